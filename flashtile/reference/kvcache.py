"""Attention over a key-value cache by definition: append, gather each sequence's keys and values, attend as without a cache.

Serves CPU tensors and is the oracle of every kernel that works on a cache. It reads lengths and tables on the host.
"""

import torch

from flashtile.kvcache_problem import FP8
from flashtile.problem import AttentionProblem, Operands
from flashtile.reference import fa2
from flashtile.reference.scores import wide_dtype


def forward(operands, problem, attend=fa2.forward, dtype=None):
    """Write new keys and values into the cache, then attend over old and new.

    Args:
        operands: CacheOperands. problem: their CacheProblem.
        attend: (Operands, AttentionProblem) -> (out, lse) of one sequence.
        dtype: compute and return in this dtype; default that of out, and at least fp32 with fp8 operands.
    Returns:
        out, lse as `flashtile.attention_with_kvcache`; lse is None unless asked for.
    """
    before, stops = lengths(operands, problem)
    if operands.k is not None:
        append(operands, problem, before, stops)
    q = operands.q
    fp8 = FP8 in (problem.dtype, problem.cache_dtype)
    inner = dtype or (wide_dtype(problem.out_dtype) if fp8 else problem.out_dtype)
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v), dtype=dtype or problem.out_dtype)
    lse = q.new_full(problem.lse_shape, float("-inf"), dtype=wide_dtype(inner))
    for b, stop in enumerate(stops):
        rows = _rows(operands.cu_seqlens_q, b)
        q_b = _descaled((q[rows] if problem.varlen else q[b]).to(inner), operands.q_descale, b, problem.group_size)
        if operands.rotary_cos is not None:
            moves = torch.arange(len(q_b), device=q.device) * problem.rotary_moves
            q_b = rotate(q_b.to(wide_dtype(inner)), operands, problem, _begin(operands, before, b) + moves)
            if dtype is None:
                # a kernel keeps the rotated queries in the dtype of out
                q_b = q_b.to(problem.out_dtype).to(inner)
        begin = 0 if operands.cache_leftpad is None else min(max(0, int(operands.cache_leftpad[b])), stop)
        k_b, v_b = (
            _descaled(gather(cache, operands, b, begin, stop).to(inner), descale, b, 1)
            for cache, descale in ((operands.k_cache, operands.k_descale), (operands.v_cache, operands.v_descale))
        )
        slopes = operands.alibi_slopes
        one = Operands(q_b[None], k_b[None], v_b[None], alibi_slopes=slopes[b] if slopes is not None and slopes.dim() == 2
                       else slopes, sinks=operands.sinks)  # fmt: skip
        out_b, lse_b = attend(one, AttentionProblem.from_tensors(one, window=problem.window, causal=problem.causal,
                                                                 softmax_scale=problem.softmax_scale,
                                                                 softcap=problem.softcap))  # fmt: skip
        if problem.varlen:
            out[rows], lse[:, rows] = out_b[0].to(out.dtype), lse_b[0]
        else:
            out[b], lse[b] = out_b[0].to(out.dtype), lse_b[0]
    return out, lse if problem.return_lse else None


def lengths(operands, problem):
    """(before, stops) of each sequence: the slots in use before the append and after it, limited to the cache."""
    before = [problem.capacity] * problem.batch if operands.cache_seqlens is None else operands.cache_seqlens.tolist()
    before = [min(max(0, n), problem.capacity) for n in before]
    new = [problem.seqlen_new] * problem.batch
    if operands.cu_seqlens_k_new is not None:
        new = operands.cu_seqlens_k_new.diff().tolist()
    return before, [min(old + more, problem.capacity) for old, more in zip(before, new, strict=True)]


def append(operands, problem, before, stops):
    """Write k, rotated, and v to their slots; an fp8 cache gets them divided by their descale."""
    for b, (old, stop) in enumerate(zip(before, stops, strict=True)):
        slots = torch.arange(old, stop, device=operands.q.device)
        position = _begin(operands, before, b) + slots - old
        for x, cache, descale, rotates in ((operands.k, operands.k_cache, operands.k_descale, problem.rotary_dim > 0),
                                           (operands.v, operands.v_cache, operands.v_descale, False)):  # fmt: skip
            new = (x[b] if operands.cu_seqlens_k_new is None else x[_rows(operands.cu_seqlens_k_new, b)])[: stop - old]
            if rotates:
                new = rotate(new.to(wide_dtype(problem.out_dtype)), operands, problem, position)
            if cache.dtype == FP8:
                new = new.float()
                if descale is not None and x.dtype != FP8:
                    # Of a head of zeros it may be 0
                    new = new / torch.where(descale[b] == 0, 1.0, descale[b])[:, None]
                # Also what a rotation made larger: older torch gives nan there, a GPU the limit
                limit = torch.finfo(FP8).max
                new = new.clamp(-limit, limit)
            row, place = _places(slots, operands, b)
            cache[row, place] = new.to(cache.dtype)


def rotate(x, operands, problem, position):
    """Rotate the first rotary_dim columns of (seqlen, heads, dim) by the angles of the positions (seqlen,)."""
    half = problem.rotary_dim // 2
    position = position.clamp(0, operands.rotary_cos.shape[0] - 1)
    cos, sin = (t[position].to(x.dtype)[:, None] for t in (operands.rotary_cos, operands.rotary_sin))
    rotated = x.clone()
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if problem.rotary_interleaved else (
        slice(0, half), slice(half, 2 * half))  # fmt: skip
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., first] * sin + x[..., second] * cos
    return rotated


def gather(cache, operands, b, begin, stop):
    """Rows begin to stop - 1 of sequence b, (seqlen_k, heads, dim), from a cache with pages or without."""
    rows, places = _places(torch.arange(begin, stop, device=cache.device), operands, b)
    # A server may have freed what lies left of the window
    return cache[rows.clamp(0, cache.shape[0] - 1), places]


def combine(out_partial, lse_partial, out_dtype):
    """`flashtile.combine` by definition."""
    # (splits, batch, seqlen_q, heads, 1)
    lse = lse_partial.double().transpose(2, 3)[..., None]
    total = torch.logsumexp(lse, 0)
    weights = torch.where(lse == total, 1.0, torch.exp(lse - total.masked_fill(total == float("-inf"), 0.0)))
    # Of a part with a sink of inf, which takes all, lse and total are inf: of several such parts each has as much
    weights = torch.where(total == float("inf"), weights / weights.sum(0), weights)
    out = torch.where(lse == float("-inf"), 0.0, out_partial.double() * weights).sum(0)
    return out.to(out_dtype), total[..., 0].transpose(1, 2).float().contiguous()


def _places(slots, operands, b):
    """(rows, columns) of the cache's first two dims that hold these slots of sequence b."""
    if operands.block_table is not None:
        page_size = operands.k_cache.shape[1]
        return operands.block_table[b].to(torch.int64)[slots // page_size], slots % page_size
    row = b if operands.cache_batch_idx is None else int(operands.cache_batch_idx[b])
    return torch.full_like(slots, row), slots


def _rows(cu_seqlens, b):
    return slice(None) if cu_seqlens is None else slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))


def _begin(operands, before, b):
    """Position of the first new token of sequence b."""
    return before[b] if operands.rotary_seqlens is None else int(operands.rotary_seqlens[b])


def _descaled(x, descale, b, group_size):
    """(seqlen, heads, dim) times the descale of each key-value head."""
    return x if descale is None else x * descale[b].to(x.dtype).repeat_interleave(group_size)[:, None]
