"""The torch ops, one a direction, and autograd over them; the only file that knows about autograd.

An op validates, plans and launches, so that all of it is one node to torch.compile. A call of a known kind finds what that gave
(`_Call`) and only allocates and launches; where nobody observes the op, without torch's dispatcher.
"""

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from flashtile import dispatch, flops, hardware, settings
from flashtile.calls import Calls, nobody_observes
from flashtile.device.launch import Remembered
from flashtile.errors import UnsupportedError, explain
from flashtile.problem import (
    WIDE_ROWS,
    AttentionProblem,
    Operands,
    autocast,
    check_arguments,
    has_same_lengths,
    is_autocast,
    lse_dtype,
    may_be_dual,
    values_readable,
    what_is_dual,
)

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? rng_state"
)
OPTIONS = (
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool causal, SymInt? window_left, SymInt? window_right, "
    "float? softmax_scale, float softcap, float dropout_p, bool deterministic, bool return_lse"
)
torch.library.define("flashtile::forward", f"({TENSORS}, {OPTIONS}) -> (Tensor out, Tensor lse)")
torch.library.define(
    "flashtile::backward",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {TENSORS}, {OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
)
torch.library.define(
    "flashtile::dslopes", f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {TENSORS}, {OPTIONS}) -> Tensor"
)
_NUM_TENSORS = len(Operands._fields)


_OPTION_NAMES = ("max_seqlen_q", "max_seqlen_k", "causal", "window", "softmax_scale", "softcap", "dropout_p", "deterministic",
                 "return_lse")  # fmt: skip


def split(arguments):
    """(operands, options) of an op's flat arguments; options in the order of _OPTION_NAMES."""
    tensors, (longest_q, longest_k, causal, left, right, *rest) = arguments[:_NUM_TENSORS], arguments[_NUM_TENSORS:]
    return Operands(*tensors), (longest_q, longest_k, causal, (left, right), *rest)


def problem_of(operands, options):
    return AttentionProblem.from_tensors(operands, **dict(zip(_OPTION_NAMES, options)))


class _Call:
    """What calls of one kind have in common: tensors of the same shapes, strides, dtypes, device and alignment, and options.

    Both directions use the tiers that the environment preferred when the call was first made.
    """

    __slots__ = ("problem", "options", "tiers", "more", "forward", "others")

    def __init__(self, problem, options, operands):
        self.problem, self.options, self.tiers = problem, options, settings.preferred_tiers()
        # places of the operands beside q, k and v
        self.more = [i for i, x in enumerate(operands) if i > 2 and x is not None]
        # functions of a tier, once it was called; others: by direction, and what a backward pass depends on beside the call
        self.forward, self.others = None, {"backward": Remembered(), "dslopes": Remembered()}

    def run_forward(self, operands):
        """out, lse."""
        if self.forward is not None and hardware.is_current(operands.q):
            return self.forward(operands)
        with hardware.on_device_of(operands.q):
            if self.forward is not None:
                return self.forward(operands)
            output, self.forward = self.first("forward", operands)
        return output

    def run_backward(self, operands, out, lse, dout, dlse, direction="backward"):
        """dq, dk, dv, dsinks (None without sinks); or, as another direction, dslopes."""
        if dout.stride(-1) != 1 or dout.stride(-3) >= WIDE_ROWS:
            # autograd made it (out.sum() gives an expanded one); the caller can't do better
            dout = dout.contiguous()
        # Hooks on saved tensors, or the caller of the op, may have given them another layout
        if lse.stride(-1) != 1:
            lse = lse.contiguous()
        if out.stride(-1) != 1:
            out = out.contiguous()
        key = self.backward_key(operands, out, lse, dout, dlse)
        functions = self.others[direction]
        function = functions.get(key)
        if function is not None and hardware.is_current(operands.q):
            return function(operands, out, lse, dout, dlse)
        with hardware.on_device_of(operands.q):
            if function is not None:
                return function(operands, out, lse, dout, dlse)
            gradients, functions[key] = self.first(direction, operands, out, lse, dout, dlse)
        return gradients

    def backward_key(self, operands, out, lse, dout, dlse):
        """How tensors lie in memory: also the operands and results, that hooks may give back in another way, dtype or place."""
        q, k, v = operands[:3]
        key = (
            q.stride(), q.dtype, q.get_device(), k.stride(), k.dtype, k.get_device(), v.stride(), v.dtype, v.get_device(),
            out.is_contiguous() or out.stride(), out.dtype, out.get_device(),
            lse.is_contiguous() or lse.stride(), lse.dtype, lse.get_device(), dout.stride(), dout.dtype, dout.get_device(),
        )  # fmt: skip
        for x in (dlse, *(operands[i] for i in self.more)) if dlse is not None or self.more else ():
            key += (None if x is None else (x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16),)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), dout.data_ptr()
        a, b, c, d, e, f = addresses
        return key if (a | b | c | d | e | f) % 16 == 0 else (*key, *(address % 16 for address in addresses))

    def first(self, direction, operands, *tensors):
        """(results, the tier's function for this direction)."""
        plan = dispatch.plan(self.problem, hardware.detect(operands.q.device), direction, self.tiers)
        function = plan.bind(direction, self.problem)
        return plan.first(direction, self.problem, function, operands, *tensors), function


_CALLS = Calls()


def _asked(operands, options) -> tuple:
    """What tells calls apart beside the kinds of their tensors."""
    return options, has_same_lengths(operands)


def _known(operands, options) -> _Call | None:
    """The call of plain tensors that is of a known kind, or None; what it is asked about may be of any type."""
    if operands.cu_seqlens_q is not None and (operands.q is None or values_readable(operands.q)):
        # Its values are checked each time
        return None
    return _CALLS.find(operands, _asked(operands, options))


def _described(operands, options) -> _Call:
    """The call, checked."""
    call = _known(operands, options)
    if call is None:
        problem = problem_of(operands, options)
        asked = _asked(operands, options)
        call = _CALLS.find(operands, asked)
        if call is None:
            call = _Call(problem, options, operands)
            _CALLS.keep(operands, asked, call)
    return call


@torch.library.impl("flashtile::forward", ("CPU", "CUDA"))
def _forward(*arguments):
    operands, options = split(arguments)
    if forward_ad._current_level >= 0:
        # Of the op itself, as exported programs call it, torch takes tangents for 0
        _refuse_tangents(operands._fields, operands)
        if eager_transforms.JVP_NESTING > 0:
            raise UnsupportedError(explain("attention", "no tangents: gradients are of reverse mode", "a call inside of jvp",
                                           _FORWARD_MODE))  # fmt: skip
    return _described(operands, options).run_forward(operands)


@torch.library.impl("flashtile::backward", ("CPU", "CUDA"))
def _backward(dout, dlse, out, lse, *arguments):
    operands, options = split(arguments)
    return _with_dsinks(_described(operands, options).run_backward(operands, out, lse, dout, dlse))


def _with_dsinks(gradients):
    """dq, dk, dv, dsinks, with something for dsinks that are not there: ops have a fixed number of outputs."""
    dq, dk, dv, dsinks = gradients
    return dq, dk, dv, dq.new_empty((0,)) if dsinks is None else dsinks


@torch.library.impl("flashtile::dslopes", ("CPU", "CUDA"))
def _dslopes(dout, dlse, out, lse, *arguments):
    operands, options = split(arguments)
    return _described(operands, options).run_backward(operands, out, lse, dout, dlse, "dslopes")


@torch.library.register_fake("flashtile::forward")
def _forward_fake(*arguments):
    operands, options = split(arguments)
    problem = problem_of(operands, options)
    q, v = operands.q, operands.v
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(problem.lse_shape, dtype=lse_dtype(q.dtype))


@torch.library.register_fake("flashtile::backward")
def _backward_fake(dout, dlse, out, lse, *arguments):
    operands = Operands(*arguments[:_NUM_TENSORS])
    sinks = operands.sinks
    gradients = (x.new_empty(x.shape) for x in operands[:3])
    return _with_dsinks((*gradients, None if sinks is None else sinks.new_empty(sinks.shape)))


@torch.library.register_fake("flashtile::dslopes")
def _dslopes_fake(dout, dlse, out, lse, *arguments):
    slopes = Operands(*arguments[:_NUM_TENSORS]).alibi_slopes
    return slopes.new_empty(slopes.shape)


def _flops(mode, arguments):
    """What torch's FlopCounterMode counts; packed sequences by their lengths where these can be read without data of a GPU."""
    operands, options = split(arguments)
    problem = problem_of(operands, options)
    lengths = None
    if problem.varlen and type(operands.q) is torch.Tensor and not operands.q.is_meta:
        used = (operands.seqused_q, operands.cu_seqlens_q), (operands.seqused_k, operands.cu_seqlens_k)
        lengths = list(zip(*((cu.diff() if x is None else x).tolist() for x, cu in used)))
    return problem.flops(mode, lengths)


flops.register({
    torch.ops.flashtile.forward: lambda *arguments, **_: _flops("fwd", arguments),
    torch.ops.flashtile.backward: lambda dout, dlse, out, lse, *arguments, **_: _flops("bwd", arguments),
    # q kᵀ and dout vᵀ: as many as the forward's
    torch.ops.flashtile.dslopes: lambda dout, dlse, out, lse, *arguments, **_: _flops("fwd", arguments),
})  # fmt: skip


forward_op = torch.ops.flashtile.forward.default
backward_op = torch.ops.flashtile.backward.default
dslopes_op = torch.ops.flashtile.dslopes.default


_FORWARD_MODE = "flashtile.reference.naive.attention has forward-mode derivatives."
# sinks are a parameter as a rule
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


def unobserved(operands):
    """Whether plain tensors are computed at once: no mode, transform, subclass or profiler wants to see the op.

    Then its body is called instead of the op: that saves 20 arguments' way through torch's dispatcher.
    """
    return (
        nobody_observes()
        and _PLAIN.issuperset(map(type, operands))
        and not getattr(operands[0], "is_meta", False)
    )


def resolved(operands):
    """The same numbers, for bodies called without torch's dispatcher: memory may hold their negatives (z.imag of z.conj())."""
    if not any(x is not None and x.is_neg() for x in operands):
        return operands
    return type(operands)(*(x if x is None else x.resolve_neg() for x in operands))


def _keep(ctx, inputs, output):
    """What the backward pass needs of the op's arguments and results."""
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
    ctx.set_materialize_grads(False)
    ctx.call, ctx.options = None, inputs[_NUM_TENSORS:]


def _is_batched(x):
    """Whether torch.autograd.grad(is_grads_batched=True) made it: its own vmap leaves no other sign."""
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


def _differentiate(ctx, dout, dlse, needs_dsinks, needs_dslopes):
    """dq, dk, dv, dsinks, dslopes; None for those not needed. ctx.call: None where the op ran, with its options."""
    if torch.is_grad_enabled():
        _refuse_second_derivatives()
    if dout is None and dlse is None:
        return (None,) * 5
    out, lse, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    if forward_ad._current_level >= 0:
        _refuse_tangents(("dout", "dlse", "out", "lse", *Operands._fields), (dout, dlse, out, lse, *tensors))
    if ctx.call is not None and unobserved(tensors) and not any(map(_is_batched, (dout, dlse))):
        given = Operands(*tensors), out, lse, dout.resolve_neg(), None if dlse is None else dlse.resolve_neg()
        dq, dk, dv, dsinks = ctx.call.run_backward(*given)
        dslopes = ctx.call.run_backward(*given, "dslopes") if needs_dslopes else None
    else:
        given = dout, dlse, out, lse, *tensors, *(ctx.options if ctx.call is None else _flat(ctx.call.options))
        dq, dk, dv, dsinks = backward_op(*given)
        dslopes = dslopes_op(*given) if needs_dslopes else None
    return dq, dk, dv, dsinks if needs_dsinks else None, dslopes


def _refuse_second_derivatives(*_):
    way_out = "flashtile.reference.naive.attention has second derivatives."
    raise UnsupportedError(explain("attention", "first derivatives only", "create_graph=True", way_out))


_SLOPES, _SINKS = (Operands._fields.index(name) for name in ("alibi_slopes", "sinks"))


def _backward_of_op(ctx, dout, dlse):
    needs = ctx.needs_input_grad
    dq, dk, dv, dsinks, dslopes = _differentiate(ctx, dout, dlse, needs[_SINKS], needs[_SLOPES])
    return dq, dk, dv, *(None,) * (_SLOPES - 3), dslopes, dsinks, *(None for _ in needs[_SINKS + 1 :])


torch.library.register_autograd("flashtile::forward", _backward_of_op, setup_context=_keep)
for _name in ("flashtile::backward", "flashtile::dslopes"):
    # A traced backward pass calls these by themselves
    torch.library.register_autograd(_name, _refuse_second_derivatives)


class _Attention(torch.autograd.Function):
    """The forward op's body with its gradient, for calls that nobody observes; with less host time than the op with its own."""

    @staticmethod
    def forward(ctx, call, operands, q, k, v, sinks, slopes):
        output = call.run_forward(operands)
        ctx.save_for_backward(*output, *operands)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        *_, needs_dsinks, needs_dslopes = ctx.needs_input_grad
        return None, None, *_differentiate(ctx, dout, dlse, needs_dsinks, needs_dslopes)


# Without what Function.apply does for torch.func first: no transform is active where this is called.
_apply = super(torch.autograd.Function, _Attention).apply


def draw_rng_state(device):
    """(seed, offset) of one dropout mask, int64 (2,), drawn from torch's default generator of the device.

    On the device, so that a captured CUDA graph draws a new mask at each replay.
    """
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def attention(
    operands,
    *,
    max_seqlen_q=None,
    max_seqlen_k=None,
    causal,
    window,
    softmax_scale,
    softcap,
    dropout_p,
    deterministic,
    return_lse,
):
    """The one entry: `flashtile.attention` and `flashtile.attention_varlen` on Operands."""
    options = (max_seqlen_q, max_seqlen_k, causal, window, softmax_scale, softcap, dropout_p, deterministic, return_lse)
    q, k, v = operands.q, operands.k, operands.v
    call = None
    if unobserved(operands):
        call = _known(operands, options)
    else:
        _refuse_transforms(operands)
    if call is None:
        check_arguments(operands, **dict(zip(_OPTION_NAMES, options)))
        # a list has no hash
        options = (*options[:3], tuple(window), *options[4:])
    if is_autocast(q):
        operands, call = autocast_operands(operands), None
        q, k, v = operands.q, operands.k, operands.v
    if dropout_p > 0 and operands.rng_state is None:
        operands, call = operands._replace(rng_state=draw_rng_state(q.device)), None
    if call is None and unobserved(operands):
        operands = resolved(operands)
        q, k, v = operands[:3]
        call = _described(operands, options)
    slopes, sinks = operands.alibi_slopes, operands.sinks
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or sinks is not None and sinks.requires_grad
        or slopes is not None and slopes.requires_grad
    )
    if call is None:
        out, lse = forward_op(*operands, *_flat(options))
    elif needs_grad:
        out, lse = _apply(call, operands, q, k, v, sinks, slopes)
    else:
        out, lse = call.run_forward(operands)
    return (out, lse) if return_lse else out


def _refuse_transforms(operands):
    # Under torch.compile the stack is not that of the program
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        way_out = ("vmap: flatten the mapped dim into the batch; grad: call torch.autograd.grad; "
                   "else flashtile.reference.naive.attention.")  # fmt: skip
        raise UnsupportedError(explain("attention", "a call outside of torch.func's transforms",
                                       "a call inside of torch.func.vmap, grad or their kin", way_out))  # fmt: skip
    _refuse_tangents(operands._fields, operands)


def _refuse_tangents(names, tensors):
    for name, x in zip(names, tensors):
        if may_be_dual(x):
            raise UnsupportedError(explain(name, "no tangent: gradients are of reverse mode", what_is_dual(), _FORWARD_MODE))


def _flat(options):
    """Options as the ops take them."""
    return *options[:3], *options[3], *options[4:]


def autocast_operands(operands):
    """Inside torch.autocast q, k and v come in its dtype, as those of F.scaled_dot_product_attention do."""
    dtype = torch.get_autocast_dtype(operands.q.device.type)
    q, k, v = (autocast(x, dtype) for x in operands[:3])
    return operands._replace(q=q, k=k, v=v)
