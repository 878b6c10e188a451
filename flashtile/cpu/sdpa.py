"""CPU tier: F.scaled_dot_product_attention, where its semantics are ours; of packed calls once a sequence."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtile.problem import lse_dtype
from flashtile.reference.lengths import sequences

DIRECTIONS = ("forward", "backward")

# Not by its name in F, which users replace by flashtile
_SDPA = torch._C._nn.scaled_dot_product_attention
_SOME_BACKEND = nullcontext()
# Of a mask, where causal queries are fewer than keys: torch aligns its own at the top left
MOST_MASK_ELEMENTS = 2**26


def refuses(problem, device, direction) -> str | None:
    """Why this tier does not take a problem, or None."""
    if device.arch != "cpu":
        return "is for CPU tensors"
    as_many = problem.same_lengths if problem.varlen else problem.seqlen_q == problem.seqlen_k
    refused = {
        "softcap": problem.softcap > 0,
        "ALiBi": problem.has_alibi,
        "sinks": problem.has_sinks,
        "dropout with a saved mask": problem.dropout_p > 0,
        "the log-sum-exp": problem.return_lse,
        "a window": problem.window not in ((None, None), (None, 0)),
        f"a causal mask aligned bottom-right without storing it, here more than {MOST_MASK_ELEMENTS} elements":
            problem.causal and not as_many and problem.seqlen_q * problem.seqlen_k > MOST_MASK_ELEMENTS,
        "no keys": problem.seqlen_k == 0,
        # its kernel wants one; else it stores the scores
        "a head dim of v that is not that of q": problem.head_dim_v != problem.head_dim,
        # it scales after the mask: -inf * scale
        "causal with a softmax_scale <= 0": problem.causal and problem.softmax_scale <= 0,
    }  # fmt: skip
    return next((f"torch's SDPA has not {what}" for what, is_refused in refused.items() if is_refused), None)


def _has_backend() -> bool:
    """Whether torch may choose one of those that a CPU has: users choose among a GPU's by the same switches."""
    return torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.math_sdp_enabled()


def configs(problem, device, direction) -> dict:
    return {}


def _sdpa(problem, q, k, v):
    """(batch, seqlen_q, num_heads, head_dim) of a batch of one length; rows without a key are 0."""
    rows, cols = q.shape[1], k.shape[1]
    hidden = rows if cols == 0 else max(rows - cols, 0) if problem.causal else 0
    if hidden == rows:
        return v.new_zeros((*q.shape[:-1], v.shape[-1]))
    rows -= hidden
    # The last query sees all keys
    masked = problem.causal and rows > 1
    mask = torch.ones(rows, cols, dtype=torch.bool, device=q.device).tril(cols - rows) if masked and rows < cols else None
    with torch.autocast("cpu", enabled=False), _SOME_BACKEND if _has_backend() else sdpa_kernel(SDPBackend.MATH):
        out = _SDPA(
            q[:, hidden:].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
            is_causal=masked and rows == cols, scale=problem.softmax_scale, enable_gqa=problem.group_size > 1,
        ).transpose(1, 2)  # fmt: skip
    return F.pad(out, (0, 0, 0, 0, hidden, 0)) if hidden else out


def _attend(problem, operands, q, k, v):
    """out for q, k and v, which may be other tensors than those of operands."""
    if not problem.varlen:
        return _sdpa(problem, q, k, v)
    found = list(sequences(operands, problem))
    rows_q, rows_k = [seqs.rows_q for seqs in found], [seqs.rows_k for seqs in found]
    qs, ks, vs = _cut(q, rows_q), _cut(k, rows_k), _cut(v, rows_k)
    outs = [torch.zeros_like(rows) for rows in qs]
    for i in range(1, len(qs), 2):
        outs[i] = _sdpa(problem, qs[i][None], ks[i][None], vs[i][None])[0]
    return torch.cat(outs)


def _cut(x, rows):
    """What lies before, in and between the slices of rows, and behind, by one split: a slice has a gradient of all of x."""
    sizes, end = [], 0
    for part in rows:
        sizes += part.start - end, part.stop - part.start
        end = part.stop
    return x.split([*sizes, x.shape[0] - end])


def bind_forward(problem, configs):
    return partial(_forward, problem)


def bind_backward(problem, configs):
    return partial(_backward, problem)


def _forward(problem, operands):
    """out, and an lse of nan: nobody asked for it."""
    # No view of what torch has made: users may write to it
    out = _attend(problem, operands, *operands[:3]).contiguous().detach()
    return out, out.new_full(problem.lse_shape, float("nan"), dtype=lse_dtype(out.dtype))


def _backward(problem, operands, out, lse, dout, dlse):
    """dq, dk, dv, None, by torch's autograd through the forward, run again."""
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad():
        # Where a torch mode watches (FLOP counters), ops run with autograd switched off.
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality, False)
        inputs = [x.detach().requires_grad_() for x in operands[:3]]
        out = _attend(problem, operands, *inputs)
        if not out.requires_grad:
            # No query sees a key
            return *(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in operands[:3]), None
        grads = torch.autograd.grad(out, inputs, dout)
    return *(grad.contiguous() for grad in grads), None
