"""FlashAttention-1 tile by tile: keys outside, out rescaled and written again in every step.

    forward            for each tile of keys: for each tile of queries that sees it:
                           read out, row_max and row_sum of the rows; absorb the tile; write all three back
    backward           for each tile of keys: for each tile of queries that sees it:
                           p again, from scores, row_max and row_sum; delta again; dv, dk, dq += ...

Against it stands `fa2`: queries outside, so that out is written once; one lse instead of two numbers a row; delta computed
once a row. Source: Dao et al. 2022, FlashAttention, algorithms 2 and 4 (appendix B). No sinks, no gradient of lse.
"""

import torch

from flashtile.errors import UnsupportedError, explain
from flashtile.reference import softmax
from flashtile.reference.dropout import drop, keep_scale
from flashtile.reference.lengths import sequences, tiles
from flashtile.reference.masks import query_range
from flashtile.reference.scores import logits, through_softcap, wide_dtype

TILE_M = 64
TILE_N = 64


@torch.no_grad()
def forward(operands, problem, tile_m=TILE_M, tile_n=TILE_N):
    """Attention, with the softmax state of each row for backward.

    Args:
        operands: Operands, as `flashtile.attention` takes them, and rng_state if there is dropout; no sinks.
        problem: their AttentionProblem.
        tile_m, tile_n: rows and columns of a tile of scores.
    Returns:
        out (..., num_heads, head_dim_v), fp32 (fp64 for fp64): it is an accumulator; and its OnlineSoftmax state, row_max
        (base 2) and row_sum, each problem.lse_shape. `softmax.lse(state)` is the log-sum-exp.
    Raises:
        UnsupportedError: there are sinks.
    Source: Dao et al. 2022, FlashAttention, algorithm 2.
    """
    if operands.sinks is not None:
        raise UnsupportedError(explain("sinks", "None in FlashAttention-1", "a tensor", "Use flashtile.reference.fa2."))
    q, dtype = operands.q, wide_dtype(operands.q.dtype)
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v), dtype=dtype)
    state = softmax.empty_state(problem.lse_shape, dtype, q.device)
    for seqs in sequences(operands, problem):
        for cols in tiles(slice(0, seqs.seqlen_k), tile_n):
            for rows in tiles(query_range(cols, seqs), tile_m):
                _forward_step(operands, seqs, rows, cols, seqs.of_q(out), *map(seqs.of_lse, state))
    return out, state


def _forward_step(operands, seqs, rows, cols, out, row_max, row_sum):
    """One tile of keys against one tile of queries; out is a true average of the keys seen so far, before and after."""
    dtype = out.dtype
    q_tile = seqs.of_q(operands.q)[..., rows, :].to(dtype)
    k_tile, v_tile = (seqs.of_k(x)[..., cols, :].to(dtype) for x in (operands.k, operands.v))
    before = softmax.OnlineSoftmax(row_max[..., rows], row_sum[..., rows])
    # (batch, heads_kv, group, tile_m, tile_n)
    scores = torch.einsum("bhgmd,bhnd->bhgmn", q_tile, k_tile)
    after, p, correction = softmax.update(before, logits(scores, rows, cols, seqs, operands.alibi_slopes))
    p = drop(p, keep_scale(rows, cols, seqs, operands.rng_state, dtype))
    acc = out[..., rows, :] * (before.row_sum * correction)[..., None] + torch.einsum("bhgmn,bhnd->bhgmd", p, v_tile)
    out[..., rows, :] = acc * softmax.inverse_sum(after)[..., None]
    row_max[..., rows], row_sum[..., rows] = after


@torch.no_grad()
def backward(operands, problem, out, state, dout, tile_m=TILE_M, tile_n=TILE_N):
    """Gradients from what forward returned: out and the softmax state, no scores.

    Returns:
        dq, dk, dv, each with the shape of its operand, fp32 (fp64 for fp64).
    Source: Dao et al. 2022, FlashAttention, algorithm 4.
    """
    dq, dk, dv = (x.new_zeros(x.shape, dtype=out.dtype) for x in operands[:3])
    for seqs in sequences(operands, problem):
        for cols in tiles(slice(0, seqs.seqlen_k), tile_n):
            for rows in tiles(query_range(cols, seqs), tile_m):
                _backward_step(operands, seqs, rows, cols, out, state, dout, seqs.of_q(dq), seqs.of_k(dk), seqs.of_k(dv))
    return dq, dk, dv


def _backward_step(operands, seqs, rows, cols, out, state, dout, dq, dk, dv):
    """One tile of keys against one tile of queries; adds to dq, dk and dv."""
    dtype = out.dtype
    q_tile, out_tile, dout_tile = (seqs.of_q(x)[..., rows, :].to(dtype) for x in (operands.q, out, dout))
    k_tile, v_tile = (seqs.of_k(x)[..., cols, :].to(dtype) for x in (operands.k, operands.v))
    state = softmax.OnlineSoftmax(*(seqs.of_lse(x)[..., rows, None] for x in state))
    scores = torch.einsum("bhgmd,bhnd->bhgmn", q_tile, k_tile)
    shifted = logits(scores, rows, cols, seqs, operands.alibi_slopes) * softmax.LOG2_E - softmax.pivot(state.row_max)
    p = torch.exp2(shifted) * softmax.inverse_sum(state)
    keep = keep_scale(rows, cols, seqs, operands.rng_state, dtype)
    dp = drop(torch.einsum("bhgmd,bhnd->bhgmn", dout_tile, v_tile), keep)
    delta = (dout_tile * out_tile).sum(-1, keepdim=True)
    ds = through_softcap(p * (dp - delta), scores, seqs.problem) * seqs.problem.softmax_scale
    dv[..., cols, :] += torch.einsum("bhgmn,bhgmd->bhnd", drop(p, keep), dout_tile)
    dk[..., cols, :] += torch.einsum("bhgmn,bhgmd->bhnd", ds, q_tile)
    dq[..., rows, :] += torch.einsum("bhgmn,bhnd->bhgmd", ds, k_tile)
