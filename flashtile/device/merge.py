"""Merge rows of attention over parts of the keys: out = sum of exp(lse_i - lse) out_i, lse = log sum exp(lse_i).

A part that saw no key has lse -inf; its out may be anything. Parts are added in their order, so the result is the same bits in
every run.
Source: Dao et al. 2023, Flash-Decoding for long-context inference.
"""

import triton
import triton.language as tl

from flashtile.device import softmax
from flashtile.device.numerics import LOG2_E, NEG_INF

# Numbers of partial results that a program holds at once
ELEMENTS = 4096
# How often a kernel stores the lse of a part, side by side: see `merge_rows`
LSE_COPIES = tl.constexpr(4)


def chunk_of(rows, block_dim, parts) -> int:
    """Parts at once, of `rows` rows with about so many parts."""
    return max(2, min(triton.next_power_of_2(parts), ELEMENTS // (rows * block_dim)))


@triton.jit
def merge_rows(out_ptrs, lse_ptrs, out_stride, lse_stride, first, rest, step, num_splits, row_mask, column, ROWS: tl.constexpr,
               CHUNK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, LSE_STEP: tl.constexpr):  # fmt: skip
    """fp32 out (BLOCK_DIM / 4, ROWS, 4) and lse (BLOCK_DIM / 4, ROWS); out_ptrs, lse_ptrs: of the rows in slot 0, (ROWS,).

    Of out BLOCK_DIM columns from `column` on, of those that are below DIM.

    Part 0 lies in slot `first`, part i in slot rest + i * step; strides are a slot's. LSE_STEP: 1 where each lse stands there
    four times side by side, else 0. Read so, it comes to the threads as out does, four columns each, and a thread merges its
    columns alone; a single number is led there through shared memory. In this order of dims the threads of a warp share a row.
    """
    quad = tl.arange(0, 4)[None, None, None, :]
    # (BLOCK_DIM / 4, 1, 1, 4)
    dims = column + 4 * tl.arange(0, BLOCK_DIM // 4)[:, None, None, None] + quad
    # (BLOCK_DIM / 4, ROWS)
    nothing = tl.zeros((BLOCK_DIM // 4, ROWS), tl.float32)
    state = softmax.OnlineSoftmax(nothing + NEG_INF, nothing)
    acc = tl.zeros((BLOCK_DIM // 4, ROWS, 4), tl.float32)
    for begin in range(0, num_splits, CHUNK):
        splits = begin + tl.arange(0, CHUNK)
        slots = tl.where(splits == 0, first, rest + splits * step).to(tl.int64)
        mask = (row_mask[:, None] & (splits < num_splits)[None, :])[None, :, :, None]
        # (BLOCK_DIM / 4, ROWS, CHUNK, 4)
        ptrs = (lse_ptrs[:, None] + (slots * lse_stride)[None, :])[None, :, :, None] + (dims * 0 + quad * LSE_STEP)
        lse = tl.load(ptrs, mask=mask, other=NEG_INF)
        ptrs = (out_ptrs[:, None] + (slots * out_stride)[None, :])[None, :, :, None] + dims
        part = tl.load(ptrs, mask=mask & (dims < DIM), other=0.0).to(tl.float32)
        lse = tl.max(lse, 3) * LOG2_E
        row_max = tl.maximum(state.row_max, tl.max(lse, 2))
        reference = softmax.pivot(row_max)
        # A sink of inf is in one part, which takes all
        correction = tl.where(state.row_max == reference, 1.0, tl.exp2(state.row_max - reference))
        weights = tl.where(lse == reference[:, :, None], 1.0, tl.exp2(lse - reference[:, :, None]))
        part = tl.where((weights > 0.0)[:, :, :, None], weights[:, :, :, None] * part, 0.0)
        acc = acc * correction[:, :, None] + tl.sum(part, 2)
        state = softmax.OnlineSoftmax(row_max, state.row_sum * correction + tl.sum(weights, 2))
    inverse, lse = softmax.finish(state)
    return acc * inverse[:, :, None], lse


@triton.jit
def store_rows(merged, lse, out_ptrs, lse_ptrs, row_mask, column, DIM: tl.constexpr):
    """What `merge_rows` gives, to rows in memory; out_ptrs, lse_ptrs (or None): (ROWS,)."""
    quads = tl.arange(0, merged.shape[0])[:, None]
    dims = column + (4 * quads)[:, :, None] + tl.arange(0, 4)[None, None, :]
    out_ptrs = out_ptrs[None, :, None] + dims
    tl.store(out_ptrs, merged.to(out_ptrs.dtype.element_ty), mask=row_mask[None, :, None] & (dims < DIM))
    if lse_ptrs is not None:
        tl.store(lse_ptrs[None, :] + quads * 0, lse, mask=row_mask[None, :] & (quads + column == 0))
