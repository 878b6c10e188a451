"""FlashAttention-2 tile by tile: queries outside, an accumulator that is divided once at the end, lse saved for backward.

    forward            for each tile of queries: for each tile of keys that it sees:
                           scores -> p, rescale acc, acc += p v
                       out = acc / row_sum, once
    backward           for each tile of keys: for each tile of queries that sees it:
                           p again, from scores and lse; dv += pᵀ dout; dk += dsᵀ q; dq += ds k

Source: Dao 2023, FlashAttention-2, algorithms 1 and 2. It also serves CPU tensors: all features, O(seqlen) extra memory,
sums in fp32 (fp64 for fp64).
"""

import torch

from flashtile.gradients import slopes_gradient
from flashtile.reference import softmax
from flashtile.reference.dropout import drop, keep_scale
from flashtile.reference.lengths import sequences, tiles
from flashtile.reference.masks import key_range, query_range
from flashtile.reference.scores import distances, logits, through_softcap, wide_dtype

TILE_M = 128
TILE_N = 128


@torch.no_grad()
def forward(operands, problem, tile_m=TILE_M, tile_n=TILE_N):
    """Attention and the log-sum-exp of each row.

    Args:
        operands: Operands, as `flashtile.attention` takes them, and rng_state if there is dropout.
        problem: their AttentionProblem.
        tile_m, tile_n: rows and columns of a tile of scores.
    Returns:
        out (..., num_heads, head_dim_v), dtype of q; lse, problem.lse_shape, fp32 (fp64 for fp64), natural log.
    Source: Dao 2023, FlashAttention-2, algorithm 1.
    """
    q = operands.q
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    lse = q.new_full(problem.lse_shape, float("-inf"), dtype=wide_dtype(q.dtype))
    for seqs in sequences(operands, problem):
        for rows in tiles(slice(0, seqs.seqlen_q), tile_m):
            _forward_tile(operands, seqs, rows, tile_n, seqs.of_q(out), seqs.of_lse(lse))
    return out, lse


def _forward_tile(operands, seqs, rows, tile_n, out, lse):
    """One tile of queries against all keys that it sees; writes its rows of out and lse."""
    dtype = lse.dtype
    q, k, v = seqs.of_q(operands.q), seqs.of_k(operands.k), seqs.of_k(operands.v)
    q_tile = q[..., rows, :].to(dtype)
    # (batch, heads_kv, group, tile_m, head_dim_v), not yet divided by row_sum
    acc = q_tile.new_zeros((*q_tile.shape[:-1], v.shape[-1]))
    state = softmax.empty_state(acc.shape[:-1], dtype, acc.device)
    for cols in tiles(key_range(rows, seqs), tile_n):
        k_tile, v_tile = k[..., cols, :].to(dtype), v[..., cols, :].to(dtype)
        # (batch, heads_kv, group, tile_m, tile_n)
        scores = torch.einsum("bhgmd,bhnd->bhgmn", q_tile, k_tile)
        state, p, correction = softmax.update(state, logits(scores, rows, cols, seqs, operands.alibi_slopes))
        p = drop(p, keep_scale(rows, cols, seqs, operands.rng_state, dtype))
        acc = acc * correction[..., None] + torch.einsum("bhgmn,bhnd->bhgmd", p, v_tile)
    if operands.sinks is not None:
        state, correction = softmax.absorb_sink(state, seqs.of_heads(operands.sinks).to(dtype))
        acc = acc * correction[..., None]
    out[..., rows, :] = acc * softmax.inverse_sum(state)[..., None]
    lse[..., rows] = softmax.lse(state)


@torch.no_grad()
def backward(operands, problem, out, lse, dout, dlse=None, tile_m=TILE_M, tile_n=TILE_N):
    """Gradients from what forward saved: out and lse, no scores.

    Args:
        operands, problem: those of forward; out, lse: what it returned.
        dout: gradient of out, same shape; dlse: gradient of lse, or None.
        tile_m, tile_n: rows and columns of a tile of scores; need not be forward's.
    Returns:
        dq, dk, dv, each with the shape and dtype of its operand; dsinks (num_heads,), or None without sinks.
    Source: Dao 2023, FlashAttention-2, algorithm 2.
    """
    dtype = lse.dtype
    # Many tiles of keys add to one row of dq, so it is summed in dtype; dk and dv are written once.
    dq = torch.zeros(operands.q.shape, dtype=dtype, device=operands.q.device)
    dk, dv = operands.k.new_zeros(operands.k.shape), operands.v.new_zeros(operands.v.shape)
    dsinks = None if operands.sinks is None else dq.new_zeros(problem.num_heads)
    for seqs in sequences(operands, problem):
        lse_rows, delta = _row_statistics(seqs, out, lse, dout, dlse)
        for cols in tiles(slice(0, seqs.seqlen_k), tile_n):
            dk_tile, dv_tile = _backward_tile(operands, seqs, cols, tile_m, dout, lse_rows, delta, seqs.of_q(dq))
            seqs.of_k(dk)[..., cols, :] = dk_tile
            seqs.of_k(dv)[..., cols, :] = dv_tile
        if dsinks is not None:
            sinks = seqs.of_heads(operands.sinks).to(dtype)
            p_sink = torch.exp(sinks - lse_rows).masked_fill(sinks == float("inf"), 1.0)
            dsinks -= (p_sink * delta).sum((0, 3)).flatten()
    dsinks = None if dsinks is None else dsinks.to(operands.sinks.dtype)
    return dq.to(operands.q.dtype), dk, dv, dsinks


@torch.no_grad()
def dslopes(operands, problem, out, lse, dout, dlse=None, tile_m=TILE_M, tile_n=TILE_N):
    """The gradient of operands.alibi_slopes, with its shape and dtype; arguments as those of `backward`.

    A score loses slope * distance of its key from the diagonal: dslope = -sum of dlogits * distance.
    """
    of_sequences = torch.zeros(problem.batch, problem.num_heads, dtype=lse.dtype, device=lse.device)
    for seqs in sequences(operands, problem):
        lse_rows, delta = _row_statistics(seqs, out, lse, dout, dlse)
        for cols in tiles(slice(0, seqs.seqlen_k), tile_n):
            for rows in tiles(query_range(cols, seqs), tile_m):
                _, _, dlogits = _p_and_dlogits(operands, seqs, rows, cols, dout, lse_rows, delta)
                distance = distances(rows, cols, seqs, dlogits.device)
                seqs.of_heads(of_sequences).sub_((dlogits * distance).sum((-2, -1))[..., None])
    return slopes_gradient(operands.alibi_slopes, of_sequences)


def _row_statistics(seqs, out, lse, dout, dlse):
    """lse and delta of the sequences' queries, (batch, heads_kv, group, seqlen_q)."""
    # A row without a key has lse -inf; with +inf its p comes out as 0.
    lse_rows = seqs.of_lse(lse)
    is_keyless = lse_rows == float("-inf")
    lse_rows = lse_rows.masked_fill(is_keyless, float("inf"))
    # The sum over a row of p * dp, dropped or not, is that of dout * out.
    delta = (seqs.of_q(dout).to(lse.dtype) * seqs.of_q(out)).sum(-1)
    # Of such a row dlse is often NaN
    return lse_rows, delta if dlse is None else delta - seqs.of_lse(dlse).to(lse.dtype).masked_fill(is_keyless, 0.0)


def _p_and_dlogits(operands, seqs, rows, cols, dout, lse, delta):
    """Of a tile, (batch, heads_kv, group, tile_m, tile_n): raw q kᵀ, p as v was weighted with, the gradient of the logits."""
    dtype = lse.dtype
    q_tile, dout_tile = (seqs.of_q(x)[..., rows, :].to(dtype) for x in (operands.q, dout))
    k_tile, v_tile = (seqs.of_k(x)[..., cols, :].to(dtype) for x in (operands.k, operands.v))
    scores = torch.einsum("bhgmd,bhnd->bhgmn", q_tile, k_tile)
    p = torch.exp(logits(scores, rows, cols, seqs, operands.alibi_slopes) - lse[..., rows, None])
    keep = keep_scale(rows, cols, seqs, operands.rng_state, dtype)
    dp = drop(torch.einsum("bhgmd,bhnd->bhgmn", dout_tile, v_tile), keep)
    return scores, drop(p, keep), p * (dp - delta[..., rows, None])


def _backward_tile(operands, seqs, cols, tile_m, dout, lse, delta, dq):
    """One tile of keys against all queries that see it; adds to dq, returns dk and dv of the tile."""
    dtype, scale = lse.dtype, seqs.problem.softmax_scale
    k_tile, v_tile = (seqs.of_k(x)[..., cols, :].to(dtype) for x in (operands.k, operands.v))
    dk_tile, dv_tile = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
    for rows in tiles(query_range(cols, seqs), tile_m):
        q_tile, dout_tile = (seqs.of_q(x)[..., rows, :].to(dtype) for x in (operands.q, dout))
        scores, p, dlogits = _p_and_dlogits(operands, seqs, rows, cols, dout, lse, delta)
        ds = through_softcap(dlogits, scores, seqs.problem)
        dv_tile += torch.einsum("bhgmn,bhgmd->bhnd", p, dout_tile)
        dk_tile += torch.einsum("bhgmn,bhgmd->bhnd", ds, q_tile) * scale
        dq[..., rows, :] += torch.einsum("bhgmn,bhnd->bhgmd", ds, k_tile) * scale
    return dk_tile, dv_tile
