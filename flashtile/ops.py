"""The torch ops, one a direction, and autograd over them; the only file that knows about autograd.

An op validates, plans and launches, so that all of it is one node to torch.compile, and costs a call once. Forward and
backward describe the call to AttentionProblem in the same way.
"""

import torch

from flashtile import dispatch
from flashtile.errors import UnsupportedError, explain
from flashtile.problem import AttentionProblem, Operands, check_arguments

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
    problem, operands = _describe(arguments)
    plan = dispatch.plan_for(problem, operands.q.device, "forward")
    with _on_device_of(operands.q):
        return plan.module.run_forward(problem, plan.configs, operands)


@torch.library.impl("flashtile::backward", ("CPU", "CUDA"))
def _backward(dout, dlse, out, lse, *arguments):
    problem, operands = _describe(arguments)
    plan = dispatch.plan_for(problem, operands.q.device, "backward")
    if dout.stride(-1) != 1:
        # autograd made it (out.sum() gives an expanded one); the caller can't do better
        dout = dout.contiguous()
    with _on_device_of(operands.q):
        dq, dk, dv, dsinks = plan.module.run_backward(problem, plan.configs, operands, out, lse, dout, dlse)
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


def _no_sinks(like):
    """What stands for the gradient of sinks that are not there; ops have a fixed number of outputs."""
    return like.new_empty((0,))


class _NoSwitch:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


_NO_SWITCH = _NoSwitch()


def _on_device_of(tensor):
    """Launch on the tensor's GPU; free where it is the current one."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return _NO_SWITCH
    return torch.cuda.device(tensor.device)


forward_op = torch.ops.flashtile.forward.default
backward_op = torch.ops.flashtile.backward.default


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        out, lse = forward_op(*arguments)
        ctx.save_for_backward(out, lse, *arguments[:_NUM_TENSORS])
        ctx.options = arguments[_NUM_TENSORS:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            way_out = "flashtile.reference.naive.attention has second derivatives."
            raise UnsupportedError(explain("attention", "first derivatives only", "create_graph=True", way_out))
        out, lse, *tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (_NUM_TENSORS + len(ctx.options))
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, dsinks = backward_op(dout, dlse, out, lse, *tensors, *ctx.options)
        needs_dsinks = ctx.needs_input_grad[Operands._fields.index("sinks")]
        grads = {"q": dq, "k": dk, "v": dv, "sinks": dsinks if needs_dsinks else None}
        return *(grads.get(name) for name in Operands._fields), *(None for _ in ctx.options)


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
    check_arguments(operands, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, window=window,
                    softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, deterministic=deterministic,
                    return_lse=return_lse)  # fmt: skip
    if dropout_p > 0:
        operands = operands._replace(rng_state=draw_rng_state(operands.q.device))
    options = (max_seqlen_q, max_seqlen_k, causal, window[0], window[1], softmax_scale, softcap, dropout_p, deterministic,
               return_lse)  # fmt: skip
    differentiable = (operands.q, operands.k, operands.v, operands.sinks)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable)
    out, lse = (_Attention.apply if needs_grad else forward_op)(*operands, *options)
    return (out, lse) if return_lse else out
