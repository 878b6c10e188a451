"""The torch ops, one a direction, and autograd over them; the only file that knows about autograd.

An op validates, plans and launches, so that all of it is one node to torch.compile, and costs a call once. Forward and
backward describe the call to AttentionProblem in the same way.
"""

import torch
from torch.autograd import forward_ad

from flashtile import dispatch, flops, hardware
from flashtile.errors import UnsupportedError, explain
from flashtile.problem import AttentionProblem, Operands, check_arguments, known

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? rng_state"
)
_OPTIONS = (
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool causal, SymInt? window_left, SymInt? window_right, "
    "float? softmax_scale, float softcap, float dropout_p, bool deterministic, bool return_lse"
)
torch.library.define("flashtile::forward", f"({_TENSORS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
torch.library.define(
    "flashtile::backward",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
)
_NUM_TENSORS = len(Operands._fields)


def _describe(arguments):
    """(problem, operands) of an op's flat arguments."""
    operands = Operands(*arguments[:_NUM_TENSORS])
    (max_seqlen_q, max_seqlen_k, causal, left, right, softmax_scale, softcap, dropout_p, deterministic,
     return_lse) = arguments[_NUM_TENSORS:]  # fmt: skip
    problem = AttentionProblem.of_call(
        operands, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, window=(left, right),
        softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, deterministic=deterministic, return_lse=return_lse,
    )  # fmt: skip
    return problem, operands


@torch.library.impl("flashtile::forward", ("CPU", "CUDA"))
def _forward(*arguments):
    return _run_forward(*_describe(arguments))


@torch.library.impl("flashtile::backward", ("CPU", "CUDA"))
def _backward(dout, dlse, out, lse, *arguments):
    return _run_backward(*_describe(arguments), out, lse, dout, dlse)


def _run_forward(problem, operands):
    plan = dispatch.plan_for(problem, operands.q.device, "forward")
    with hardware.on_device_of(operands.q):
        return plan.run("forward", problem, operands)


def _run_backward(problem, operands, out, lse, dout, dlse):
    plan = dispatch.plan_for(problem, operands.q.device, "backward")
    if dout.stride(-1) != 1:
        # autograd made it (out.sum() gives an expanded one); the caller can't do better
        dout = dout.contiguous()
    with hardware.on_device_of(operands.q):
        dq, dk, dv, dsinks = plan.run("backward", problem, operands, out, lse, dout, dlse)
    return dq, dk, dv, _no_sinks(dq) if dsinks is None else dsinks


@torch.library.register_fake("flashtile::forward")
def _forward_fake(*arguments):
    problem, operands = _describe(arguments)
    q, v = operands.q, operands.v
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(problem.lse_shape, dtype=lse_dtype)


@torch.library.register_fake("flashtile::backward")
def _backward_fake(dout, dlse, out, lse, *arguments):
    operands = Operands(*arguments[:_NUM_TENSORS])
    dq, dk, dv = (x.new_empty(x.shape) for x in operands[:3])
    return dq, dk, dv, _no_sinks(dq) if operands.sinks is None else operands.sinks.new_empty(operands.sinks.shape)


def _flops(mode, arguments):
    """What torch's FlopCounterMode counts; packed sequences by their lengths where these can be read without data of a GPU."""
    problem, operands = _describe(arguments)
    lengths = None
    if problem.varlen and type(operands.q) is torch.Tensor and not operands.q.is_meta:
        lengths = list(zip(operands.cu_seqlens_q.diff().tolist(), operands.cu_seqlens_k.diff().tolist()))
    return problem.flops(mode, lengths)


flops.register({
    torch.ops.flashtile.forward: lambda *arguments, **_: _flops("fwd", arguments),
    torch.ops.flashtile.backward: lambda dout, dlse, out, lse, *arguments, **_: _flops("bwd", arguments),
})  # fmt: skip


def _no_sinks(like):
    """What stands for the gradient of sinks that are not there; ops have a fixed number of outputs."""
    return like.new_empty((0,))


forward_op = torch.ops.flashtile.forward.default
backward_op = torch.ops.flashtile.backward.default


# sinks are a parameter as a rule
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


def unobserved(operands):
    """Whether plain tensors are computed at once: no mode, transform, subclass or profiler wants to see the op.

    Then its body is called instead of the op: that saves 20 arguments' way through torch's dispatcher.
    """
    return (
        _PLAIN.issuperset(map(type, operands))
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.autograd.profiler._is_profiler_enabled
        and not getattr(operands[0], "is_meta", False)
    )


def _keep(ctx, inputs, output):
    """What the backward pass needs of the forward op's arguments and results."""
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse, problem=None, first=0):
    """Gradients of the operands, in their order, None for those that have none.

    problem: that of the call where the op may be left out. first: at which of the inputs the operands begin.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        way_out = "flashtile.reference.naive.attention has second derivatives."
        raise UnsupportedError(explain("attention", "first derivatives only", "create_graph=True", way_out))
    if dout is None and dlse is None:
        return (None,) * _NUM_TENSORS
    out, lse, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    if problem is not None and unobserved(tensors):
        dq, dk, dv, dsinks = _run_backward(problem, Operands(*tensors), out, lse, dout, dlse)
    else:
        dq, dk, dv, dsinks = backward_op(dout, dlse, out, lse, *tensors, *ctx.options)
    needs_dsinks = ctx.needs_input_grad[first + Operands._fields.index("sinks")]
    return dq, dk, dv, *(None,) * 5, dsinks if needs_dsinks else None, None


def _backward_of_op(ctx, dout, dlse):
    return *_differentiate(ctx, dout, dlse), *(None for _ in ctx.options)


torch.library.register_autograd("flashtile::forward", _backward_of_op, setup_context=_keep)


class _Attention(torch.autograd.Function):
    """The forward op's body with its gradient, for calls that nobody observes; with less host time than the op with its own."""

    @staticmethod
    def forward(ctx, problem, options, *operands):
        output = _run_forward(problem, Operands(*operands))
        _keep(ctx, (*operands, *options), output)
        ctx.problem = problem
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        return None, None, *_differentiate(ctx, dout, dlse, ctx.problem, 2)


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
    options = dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, window=window,
                   softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, deterministic=deterministic,
                   return_lse=return_lse)  # fmt: skip
    q, k, v = operands.q, operands.k, operands.v
    problem = None
    if unobserved(operands):
        problem = known(operands, options)
    else:
        _refuse_transforms(operands)
    if problem is None or operands.alibi_slopes is not None:
        check_arguments(operands, **options)
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        operands, problem = _autocast(operands), None
        q, k, v = operands.q, operands.k, operands.v
    if dropout_p > 0 and operands.rng_state is None:
        operands, problem = operands._replace(rng_state=draw_rng_state(q.device)), None
    if problem is None and unobserved(operands):
        problem = AttentionProblem.of_call(operands, **options)
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or operands.sinks is not None and operands.sinks.requires_grad
    )
    if problem is None:
        out, lse = forward_op(*operands, *_flat(**options))
    elif needs_grad:
        out, lse = _Attention.apply(problem, _flat(**options), *operands)
    else:
        out, lse = _run_forward(problem, operands)
    return (out, lse) if return_lse else out


def _refuse_transforms(operands):
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        way_out = "vmap: flatten the mapped dim into the batch; grad: call torch.autograd.grad."
        raise UnsupportedError(explain("attention", "a call outside of torch.func's transforms",
                                       "a call inside of torch.func.vmap, grad or their kin", way_out))  # fmt: skip
    if forward_ad._current_level < 0:
        return
    for name, x in zip(operands._fields, operands):
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            way_out = "flashtile.reference.naive.attention has forward-mode derivatives."
            raise UnsupportedError(explain(name, "no tangent: gradients are of reverse mode", "a dual tensor", way_out))


def _flat(window, softmax_scale, softcap, dropout_p, deterministic, return_lse, causal, max_seqlen_q, max_seqlen_k):
    """Options as the ops take them."""
    return (max_seqlen_q, max_seqlen_k, causal, window[0], window[1], softmax_scale, softcap, dropout_p, deterministic,
            return_lse)  # fmt: skip


def _autocast(operands):
    """Inside torch.autocast q, k and v come in its dtype, as those of F.scaled_dot_product_attention do."""
    dtype = torch.get_autocast_dtype(operands.q.device.type)
    q, k, v = (x.to(dtype) if x.dtype in (torch.float16, torch.bfloat16, torch.float32) else x for x in operands[:3])
    return operands._replace(q=q, k=k, v=v)
