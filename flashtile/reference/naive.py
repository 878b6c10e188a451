"""The definition of attention, with the whole score matrix in memory; float64 is exact enough to be every test's oracle.

Written with differentiable operations: autograd gives the gradients of q, k, v, slopes and sinks, through out and through lse.
"""

import torch

from flashtile.errors import ValueRangeError, explain
from flashtile.problem import AttentionProblem, Operands
from flashtile.reference.dropout import drop, keep_scale
from flashtile.reference.lengths import sequences
from flashtile.reference.scores import logits, wide_dtype
from flashtile.reference.softmax import pivot


def attention(
    q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None,
    alibi_slopes=None, sinks=None, rng_state=None, dtype=None, return_lse=False, **options,
):  # fmt: skip
    """`flashtile.attention`, or with cu_seqlens `flashtile.attention_varlen`, by definition; O(seqlen²) memory.

    Args:
        rng_state: int64 (2,), Philox seed and offset; needed with dropout_p > 0.
        dtype: compute and return in this dtype; default that of q.
        The rest as in `flashtile.attention_varlen`.
    Returns:
        out, or (out, lse) with return_lse, as `forward`.
    """
    operands = Operands(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks, rng_state)
    problem = AttentionProblem.from_tensors(operands, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                                            return_lse=return_lse, **options)  # fmt: skip
    if problem.dropout_p and rng_state is None:
        raise ValueRangeError(explain("rng_state", "an int64 tensor (seed, offset) with dropout", None))
    out, lse = forward(operands, problem, dtype)
    return (out, lse) if return_lse else out


def forward(operands, problem, dtype=None):
    """softmax(softmax_scale * q kᵀ + mask) v, and the log-sum-exp of each row.

    Without dtype everything but the softmax itself is rounded to the dtype of q, as in PyTorch code written by hand: the
    yardstick for the rounding error of a kernel. With dtype the operands are cast first; torch.float64 gives the reference.

    Args:
        operands: Operands, as `flashtile.attention` takes them, and rng_state if there is dropout.
        problem: their AttentionProblem.
        dtype: compute and return in this dtype; default that of q.
    Returns:
        out (..., num_heads, head_dim_v) in that dtype; lse, problem.lse_shape, natural log, fp32 (fp64 for fp64). A row
        without a visible key has out 0 and lse -inf, or its sink. Rows outside of all sequences have out 0, lse -inf.
    """
    dtype = operands.q.dtype if dtype is None else dtype
    wide = wide_dtype(dtype)
    q, k, v = (x.to(dtype) for x in operands[:3])
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    lse = q.new_full(problem.lse_shape, float("-inf"), dtype=wide)
    for seqs in sequences(operands, problem):
        rows, cols = slice(0, seqs.seqlen_q), slice(0, seqs.seqlen_k)
        # (batch, heads_kv, group, seqlen_q, seqlen_k)
        scores = torch.einsum("bhgmd,bhnd->bhgmn", seqs.of_q(q), seqs.of_k(k))
        scores = logits(scores, rows, cols, seqs, operands.alibi_slopes).to(wide)
        # One more column, of which only the denominator knows.
        sink = _sink_column(scores, operands.sinks, seqs)
        scores = torch.cat([scores, sink], -1)
        row_max = pivot(scores.detach().amax(-1, keepdim=True))
        scores = scores - row_max
        if operands.sinks is not None:
            # A sink of inf takes all: out is 0, not nan
            scores = torch.cat([scores[..., :-1], scores[..., -1:].masked_fill(sink == float("inf"), 0.0)], -1)
        weights = torch.exp(scores)
        row_sum = weights.sum(-1, keepdim=True)
        empty = row_sum == 0
        row_sum = row_sum.masked_fill(empty, 1.0)
        p = (weights[..., :-1] / row_sum).to(dtype)
        p = drop(p, keep_scale(rows, cols, seqs, operands.rng_state, dtype))
        seqs.of_q(out)[...] = torch.einsum("bhgmn,bhnd->bhgmd", p, seqs.of_k(v))
        seqs.of_lse(lse)[...] = (row_max + row_sum.log()).masked_fill(empty, float("-inf")).squeeze(-1)
    return out, lse


def _sink_column(scores, sinks, seqs):
    """(batch, heads_kv, group, seqlen_q, 1) logits; -inf without sinks."""
    shape = (*scores.shape[:-1], 1)
    if sinks is None:
        return scores.new_full(shape, float("-inf"))
    return seqs.of_heads(sinks).unsqueeze(-1).to(scores.dtype).expand(shape)
