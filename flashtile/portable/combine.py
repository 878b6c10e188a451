"""Merge attention over parts of the keys: out = sum of exp(lse_i - lse) out_i, lse = log sum exp(lse_i).

`merge_row` is one row's merge, for any kernel that knows where its parts lie; `combine_splits` is the kernel of
`flashtile.combine`, for parts in the first dim of dense tensors. A part that saw no key has lse -inf; its out may be anything.
Parts are added in their order, so the result is the same bits in every run.
Source: Dao et al. 2023, Flash-Decoding for long-context inference.
"""

import triton
import triton.language as tl

from flashtile.device.numerics import LN_2, LOG2_E, NEG_INF
from flashtile.device.softmax import pivot
from flashtile.device.tensors import Rows, head_ptr
from flashtile.portable.arguments import rows_of

# Parts that are read at once
CHUNK = tl.constexpr(32)


@triton.jit
def merge_row(out_ptr, lse_ptr, out_stride, lse_stride, first, rest, num_splits, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """(BLOCK_DIM,) fp32 out and lse of one row. Part 0 lies in slot `first`, part i in slot rest + i; strides are a slot's."""
    dims = tl.arange(0, BLOCK_DIM)
    row_max = tl.full((), NEG_INF, tl.float32)
    row_sum = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_DIM,), tl.float32)
    for begin in range(0, num_splits, CHUNK):
        splits = begin + tl.arange(0, CHUNK)
        slots = tl.where(splits == 0, first, rest + splits).to(tl.int64)
        lse = tl.load(lse_ptr + slots * lse_stride, mask=splits < num_splits, other=NEG_INF) * LOG2_E
        mask = (splits < num_splits)[:, None] & (dims < DIM)[None, :]
        # (CHUNK, BLOCK_DIM); does not wait for lse
        part = tl.load(out_ptr + slots[:, None] * out_stride + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        reference = pivot(new_max)
        correction = tl.exp2(row_max - reference)
        weights = tl.exp2(lse - reference)
        acc = acc * correction + tl.sum(tl.where((weights > 0.0)[:, None], weights[:, None] * part, 0.0), 0)
        row_sum = row_sum * correction + tl.sum(weights, 0)
        row_max = new_max
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    return acc / row_sum, tl.where(empty, NEG_INF, (row_max + tl.log2(row_sum)) * LN_2)


@triton.jit(do_not_specialize=["num_splits"])
def combine_splits(
    out_partial, lse_partial, out, lse, out_split_stride, lse_split_stride, num_splits, seqlen_q, num_heads,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """One program a row. out_partial, out, lse_partial, lse: Rows; the parts' are those of the first part."""
    program = tl.program_id(0)
    head = program % num_heads
    row = (program // num_heads % seqlen_q).to(tl.int64)
    batch = program // (num_heads * seqlen_q)
    part_ptr = head_ptr(out_partial, batch, row, head)
    part_lse_ptr = head_ptr(lse_partial, batch, row, head)
    merged, merged_lse = merge_row(part_ptr, part_lse_ptr, out_split_stride, lse_split_stride, 0, 0, num_splits, DIM, BLOCK_DIM)
    dims = tl.arange(0, BLOCK_DIM)
    tl.store(head_ptr(out, batch, row, head) + dims, merged.to(out.ptr.dtype.element_ty), mask=dims < DIM)
    tl.store(head_ptr(lse, batch, row, head), merged_lse)


def launch(out_partial, lse_partial, out, lse):
    """Merge the first dim of out_partial and lse_partial into out and lse.

    out_partial: (splits, batch, seqlen_q, heads, dim). lse_partial: (splits, batch, heads, seqlen_q), fp32. out, lse: the same
    without splits. Strides are free but for a contiguous dim of out and out_partial.
    """
    splits, batch, seqlen_q, heads, dim = out_partial.shape
    if not out.numel():
        return
    out_rows = Rows(out_partial, *out_partial.stride()[1:4])
    lse_rows = Rows(lse_partial, lse_partial.stride(1), lse_partial.stride(3), lse_partial.stride(2))
    combine_splits[(batch * seqlen_q * heads,)](
        out_rows, lse_rows, rows_of(out), rows_of(lse, lse=True), out_partial.stride(0), lse_partial.stride(0), splits,
        seqlen_q, heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
