"""New keys and values into the cache, in place, and rotary embedding of them and of the queries: one launch before attention.

A program owns a few heads of one token: of k and v, which it writes to the token's slot, or of q, whose rotated copy attention
then reads. A slot past the cache or on a page that does not exist is not written.
Source: Su et al. 2021, RoFormer (rotary embedding).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.device import cache, chain
from flashtile.device.tensors import aligned, per_head_of, per_head_ptr, rows_of

# Heads of a program; the largest finite number of fp8 (e4m3)
HEADS = 16
FP8_MAX = tl.constexpr(448.0)


class Rotary(NamedTuple):
    """cos, sin: (length, rotary_dim / 2); seqlens: where the positions of each sequence begin; None where off."""

    cos: Any
    sin: Any
    stride: Any
    length: Any
    seqlens: Any


@triton.jit
def _find(cu_seqlens, row, num_sequences, seqlen, BATCH_BLOCK: tl.constexpr):
    """(sequence, place in it) of a row of packed or batched tensors; sequence -1 of a row that no sequence has.

    Of several that have it, where cu_seqlens fall, the last one.
    """
    if cu_seqlens is None:
        return row // seqlen, row % seqlen
    else:
        sequences = tl.arange(0, BATCH_BLOCK)
        starts = tl.load(cu_seqlens + sequences, mask=sequences < num_sequences, other=0)
        stops = tl.load(cu_seqlens + 1 + sequences, mask=sequences < num_sequences, other=0)
        sequence = tl.max(tl.where((starts <= row) & (row < stops), sequences, -1), 0)
        return sequence, row - tl.load(cu_seqlens + tl.maximum(sequence, 0))


@triton.jit
def _load_rotated(ptr, head_stride, heads, mask, position, rotary, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
                  ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """(HEADS, BLOCK_DIM) fp32 of one token, the first ROTARY_DIM columns rotated."""
    dims = tl.arange(0, BLOCK_DIM)
    x = tl.load(ptr + heads[:, None] * head_stride + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTARY_DIM > 0:
        # Column d is turned together with its partner: (first, second) -> (first cos - second sin, second cos + first sin)
        if INTERLEAVED:
            partner = dims ^ 1
            pair = dims // 2
            is_first = dims % 2 == 0
        else:
            is_first = dims < ROTARY_DIM // 2
            partner = tl.where(is_first, dims + ROTARY_DIM // 2, dims - ROTARY_DIM // 2)
            pair = dims % (ROTARY_DIM // 2)
        turned = dims < ROTARY_DIM
        position = tl.minimum(tl.maximum(position, 0), rotary.length - 1).to(tl.int64)
        cos = tl.load(rotary.cos + position * rotary.stride + pair, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(rotary.sin + position * rotary.stride + pair, mask=turned, other=0.0).to(tl.float32)
        sin = tl.where(is_first, -sin, sin)
        other = tl.load(ptr + heads[:, None] * head_stride + partner[None, :], mask=mask & turned[None, :], other=0.0)
        x = x * cos[None, :] + other.to(tl.float32) * sin[None, :]
    return x


@triton.jit
def _store_new(x, heads, mask, x_cache, page, place, descale, batch, num_heads, CONVERT: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """A token's heads to its slot. CONVERT: into fp8, divided by the descale of each head."""
    if CONVERT:
        if descale.ptr is not None:
            # Of a head of zeros it may be 0
            scale = tl.load(per_head_ptr(descale, batch, heads), mask=heads < num_heads, other=1.0)
            x = x / tl.where(scale == 0, 1.0, scale)[:, None]
        x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    ptr = x_cache.ptr + page.to(tl.int64) * x_cache.batch_stride + place.to(tl.int64) * x_cache.row_stride
    ptrs = ptr + heads[:, None] * x_cache.head_stride + tl.arange(0, BLOCK_DIM)[None, :]
    tl.store(ptrs, x.to(x_cache.ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=[*cache.BOUNDS, "num_new", "num_sequences", "seqlen_q"])
def append_rows(
    q, q_rotated, k, v, k_cache, v_cache, index_tensors, table_stride, seqlen_new, capacity, num_rows, total_q, least_q, rotary,
    k_descale, v_descale, num_new, num_sequences, seqlen_q, num_heads, num_heads_kv, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, MOVES: tl.constexpr, CONVERT_K: tl.constexpr, CONVERT_V: tl.constexpr, HEADS: tl.constexpr,
    BATCH_BLOCK: tl.constexpr, HAS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs (row, heads): the first num_new rows are those of k and v, the others those of q. q, ...: Rows.

    index_tensors to least_q: see `cache.CacheLayout`.
    """
    layout = cache.CacheLayout(*index_tensors, table_stride, seqlen_new, capacity, num_rows, total_q, least_q)
    if HAS_DEPENDENT:
        chain.allow()
    q, q_rotated, k, v = aligned(q), aligned(q_rotated), aligned(k), aligned(v)
    k_cache, v_cache = aligned(k_cache), aligned(v_cache)
    row = tl.program_id(0)
    # A cache may lie as (heads, slots, dim): heads times their stride needs 64 bits
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    if row < num_new:
        batch, place = _find(layout.cu_seqlens_k_new, row, num_sequences, seqlen_new, BATCH_BLOCK)
        if batch >= 0:
            slots = cache.load_slots(layout, batch, batch >= 0)
            slot = slots.before + place
            position = slot
            if rotary.seqlens is not None:
                position = tl.load(rotary.seqlens + batch).to(tl.int64) + place
            x_row = row.to(tl.int64)
            if layout.cu_seqlens_k_new is None:
                x_row = place.to(tl.int64)
            # No more than it has, or they would lie on pages of others
            inside = slot < slots.stop
            if PAGE_SIZE == 0:
                page = batch
                if layout.cache_batch_idx is not None:
                    page = tl.load(layout.cache_batch_idx + batch)
                cache_slot = slot
            else:
                entry = layout.block_table + batch.to(tl.int64) * layout.table_stride + slot // PAGE_SIZE
                page = tl.load(entry, mask=inside, other=-1)
                cache_slot = slot % PAGE_SIZE
            mask = (heads < num_heads_kv)[:, None] & inside & (page >= 0) & (page < layout.num_rows)
            k_ptr = k.ptr + batch.to(tl.int64) * k.batch_stride + x_row * k.row_stride
            mask_k = mask & (dims < HEAD_DIM)[None, :]
            new_k = _load_rotated(k_ptr, k.head_stride, heads, mask_k, position, rotary, HEAD_DIM, BLOCK_D, ROTARY_DIM,
                                  INTERLEAVED)  # fmt: skip
            _store_new(new_k, heads, mask_k, k_cache, page, cache_slot, k_descale, batch, num_heads_kv, CONVERT_K,
                       BLOCK_D)  # fmt: skip
            v_ptr = v.ptr + batch.to(tl.int64) * v.batch_stride + x_row * v.row_stride
            mask_v = mask & (dims_v < HEAD_DIM_V)[None, :]
            new_v = _load_rotated(v_ptr, v.head_stride, heads, mask_v, position, rotary, HEAD_DIM_V, BLOCK_DV, 0, INTERLEAVED)
            _store_new(new_v, heads, mask_v, v_cache, page, cache_slot, v_descale, batch, num_heads_kv, CONVERT_V,
                       BLOCK_DV)  # fmt: skip
    else:
        row_q = row - num_new
        batch, place = _find(layout.cu_seqlens_q, row_q, num_sequences, seqlen_q, BATCH_BLOCK)
        if batch >= 0:
            if rotary.seqlens is None:
                position = cache.load_slots(layout, batch, batch >= 0).before
            else:
                position = tl.load(rotary.seqlens + batch).to(tl.int64)
            if MOVES:
                position += place
            x_row = row_q.to(tl.int64)
            if layout.cu_seqlens_q is None:
                x_row = place.to(tl.int64)
            mask_q = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
            q_ptr = q.ptr + batch.to(tl.int64) * q.batch_stride + x_row * q.row_stride
            rotated = _load_rotated(q_ptr, q.head_stride, heads, mask_q, position, rotary, HEAD_DIM, BLOCK_D, ROTARY_DIM,
                                    INTERLEAVED)  # fmt: skip
            out_ptr = q_rotated.ptr + batch.to(tl.int64) * q_rotated.batch_stride + x_row * q_rotated.row_stride
            tl.store(out_ptr + heads[:, None] * q_rotated.head_stride + dims[None, :],
                     rotated.to(q_rotated.ptr.dtype.element_ty), mask=mask_q)  # fmt: skip


class Append:
    """The launch of calls with the shapes, strides, dtypes and alignments of operands; see `decode.Call`."""

    def __init__(self, problem, operands, device):
        q, k = operands.q, operands.k
        self.problem = problem
        num_new = k.shape[0] if k.dim() == 3 else k.shape[0] * k.shape[1]
        num_q = (q.shape[0] if problem.varlen else q.shape[0] * q.shape[1]) if problem.rotary_dim else 0
        heads = problem.num_heads if problem.rotary_dim else problem.num_heads_kv
        self.shape = (num_new, problem.batch, problem.seqlen_q, problem.num_heads, problem.num_heads_kv)
        self.constexprs = {
            "PAGE_SIZE": problem.page_size or 0, "HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_D": triton.next_power_of_2(problem.head_dim), "BLOCK_DV": triton.next_power_of_2(problem.head_dim_v),
            "ROTARY_DIM": problem.rotary_dim, "INTERLEAVED": problem.rotary_interleaved, "MOVES": problem.rotary_moves,
            "CONVERT_K": problem.cache_dtype != k.dtype, "CONVERT_V": problem.cache_dtype != operands.v.dtype,
            "HEADS": min(HEADS, triton.next_power_of_2(heads)), "BATCH_BLOCK": triton.next_power_of_2(problem.batch),
            "HAS_DEPENDENT": device.sm >= 90,
        }  # fmt: skip
        self.grid = (num_new + num_q, triton.cdiv(heads, HEADS))

    def start(self, launch, operands, q_rotated):
        """q_rotated: memory for the queries that attention then reads, or without rotary embedding q."""
        if self.grid[0] == 0:
            return
        cos = operands.rotary_cos
        stride, length = (0, 0) if cos is None else (cos.stride(0), cos.shape[0])
        rotary = Rotary(cos, operands.rotary_sin, stride, length, operands.rotary_seqlens)
        rows = (rows_of(x) for x in (operands.q, q_rotated, operands.k, operands.v, operands.k_cache, operands.v_cache))
        descales = map(per_head_of, (operands.k_descale, operands.v_descale))
        arguments = (*rows, *cache.layout_arguments(self.problem, operands), rotary, *descales, *self.shape)
        launch(append_rows, self.grid, arguments, self.constexprs, num_warps=4, num_stages=1)
