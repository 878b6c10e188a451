"""The kernel of `flashtile.combine`: merges parts in the first dim of dense tensors by `device.merge.merge_rows`."""

import triton
import triton.language as tl

from flashtile.device.launch import launch_now
from flashtile.device.merge import ELEMENTS, chunk_of, merge_rows, store_rows
from flashtile.device.tensors import Rows, head_ptr, rows_of


@triton.jit(do_not_specialize=["num_splits"])
def combine_splits(
    out_partial, lse_partial, out, lse, out_split_stride, lse_split_stride, num_splits, seqlen_q, num_heads,
    CHUNK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """One program a row. out_partial, out, lse_partial, lse: Rows; the parts' are those of the first part."""
    program = tl.program_id(0)
    head = program % num_heads
    row = (program // num_heads % seqlen_q).to(tl.int64)
    batch = program // (num_heads * seqlen_q)
    part_ptr = head_ptr(out_partial, batch, row, head)
    part_lse_ptr = head_ptr(lse_partial, batch, row, head)
    one = tl.arange(0, 1)
    merged, merged_lse = merge_rows(part_ptr + one, part_lse_ptr + one, out_split_stride, lse_split_stride, 0, 0, 1, num_splits,
                                    one == 0, 0, 1, CHUNK, DIM, BLOCK_DIM, 0)  # fmt: skip
    store_rows(merged, merged_lse, head_ptr(out, batch, row, head) + one, head_ptr(lse, batch, row, head) + one, one == 0, 0,
               DIM)  # fmt: skip


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
    block_dim = max(4, triton.next_power_of_2(dim))
    launch_now(
        combine_splits, (batch * seqlen_q * heads,),
        (out_rows, lse_rows, rows_of(out), rows_of(lse, lse=True), out_partial.stride(0), lse_partial.stride(0), splits,
         seqlen_q, heads),
        {"CHUNK": chunk_of(1, block_dim, ELEMENTS), "DIM": dim, "BLOCK_DIM": block_dim}, num_warps=4,
    )  # fmt: skip
