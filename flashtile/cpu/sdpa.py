"""CPU tier: F.scaled_dot_product_attention, where its semantics are ours."""

from functools import partial

import torch
import torch.nn.functional as F

from flashtile.problem import lse_dtype

DIRECTIONS = ("forward", "backward")


def refuses(problem, device, direction) -> str | None:
    """Why this tier does not take a problem, or None."""
    if device.arch != "cpu":
        return "is for CPU tensors"
    refused = {
        "packed sequences": problem.varlen,
        "softcap": problem.softcap > 0,
        "ALiBi": problem.has_alibi,
        "sinks": problem.has_sinks,
        "dropout with a saved mask": problem.dropout_p > 0,
        "the log-sum-exp": problem.return_lse,
        "a window": problem.window not in ((None, None), (None, 0)),
        # torch aligns causal at the top left; rows without a key would differ too
        "causal with seqlen_q != seqlen_k": problem.causal and problem.seqlen_q != problem.seqlen_k,
        "no keys": problem.seqlen_k == 0,
        # its kernel wants one; else it stores the scores
        "a head dim of v that is not that of q": problem.head_dim_v != problem.head_dim,
        # it scales after the mask: -inf * scale
        "causal with a softmax_scale <= 0": problem.causal and problem.softmax_scale <= 0,
    }
    return next((f"torch's SDPA has not {what}" for what, is_refused in refused.items() if is_refused), None)


def configs(problem, device, direction) -> dict:
    return {}


def _sdpa(problem, q, k, v):
    with torch.autocast("cpu", enabled=False):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                             is_causal=problem.causal, scale=problem.softmax_scale,
                                             enable_gqa=problem.group_size > 1)  # fmt: skip
    return out.transpose(1, 2)


def bind_forward(problem, configs):
    return partial(_forward, problem)


def bind_backward(problem, configs):
    return partial(_backward, problem)


def _forward(problem, operands):
    """out, and an lse of nan: nobody asked for it."""
    # No view of what torch has made: users may write to it
    out = _sdpa(problem, *operands[:3]).contiguous().detach()
    return out, out.new_full(problem.lse_shape, float("nan"), dtype=lse_dtype(out.dtype))


def _backward(problem, operands, out, lse, dout, dlse):
    """dq, dk, dv, None, by torch's autograd through the forward, run again."""
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad():
        # Where a torch mode watches (FLOP counters), ops run with autograd switched off.
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality, False)
        inputs = [x.detach().requires_grad_() for x in operands[:3]]
        grads = torch.autograd.grad(_sdpa(problem, *inputs), inputs, dout)
    return *(grad.contiguous() for grad in grads), None
