"""The kernel that merges parts in the first dim of dense tensors by `device.merge.merge_rows`."""

import triton
import triton.language as tl

from flashtile.device import chain
from flashtile.device.launch import launch_now
from flashtile.device.merge import ELEMENTS, chunk_of, merge_rows, store_rows
from flashtile.device.tensors import Rows, aligned, head_ptr, rows_of


@triton.jit(do_not_specialize=["num_splits", "seqlen_q", "num_heads", "num_rows"])
def combine_splits(
    out_partial, lse_partial, out, lse, out_split_stride, lse_split_stride, num_splits, seqlen_q, num_heads, num_rows,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS of all num_rows a program. out_partial, out, lse_partial, lse: Rows; the parts' are those of the first part.

    CHAINED: see chain.py.
    """
    chain.begin(CHAINED)
    out_partial, out = aligned(out_partial), aligned(out)
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = number < num_rows
    head = number % num_heads
    row = (number // num_heads % seqlen_q).to(tl.int64)
    # Their product may be more than an int32 holds
    batch = number // num_heads // seqlen_q
    merged, merged_lse = merge_rows(head_ptr(out_partial, batch, row, head), head_ptr(lse_partial, batch, row, head),
                                    out_split_stride, lse_split_stride, 0, 0, 1, num_splits, exists, 0, ROWS, CHUNK, DIM,
                                    BLOCK_DIM, 0)  # fmt: skip
    store_rows(merged, merged_lse, head_ptr(out, batch, row, head), head_ptr(lse, batch, row, head), exists, 0, DIM)


def launch(out_partial, lse_partial, out, lse, launch=launch_now, chained=False):
    """Merge the first dim of out_partial and lse_partial into out and lse.

    out_partial: (splits, batch, seqlen_q, heads, dim). lse_partial: (splits, batch, heads, seqlen_q), fp32. out, lse: the same
    without splits. Strides are free but for a contiguous dim of out and out_partial. launch: see `Launches`. chained: after a
    kernel of `chain`.
    """
    splits, batch, seqlen_q, heads, dim = out_partial.shape
    if not out.numel():
        return
    if splits == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return
    out_rows = rows_of(out_partial[0])
    lse_rows = Rows(lse_partial, lse_partial.stride(1), lse_partial.stride(3), lse_partial.stride(2))
    num_rows = batch * seqlen_q * heads
    block_dim = max(4, triton.next_power_of_2(dim))
    chunk = chunk_of(1, block_dim, splits)
    rows = max(1, ELEMENTS // (chunk * block_dim))
    launch(
        combine_splits, (triton.cdiv(num_rows, rows),),
        (out_rows, lse_rows, rows_of(out), rows_of(lse, lse=True), out_partial.stride(0), lse_partial.stride(0), splits,
         seqlen_q, heads, num_rows),
        {"ROWS": rows, "CHUNK": chunk, "DIM": dim, "BLOCK_DIM": block_dim, "CHAINED": chained}, num_warps=4,
        **chain.after(chained),
    )  # fmt: skip
