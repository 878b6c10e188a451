"""Put the tokens of sparse decode in an order of few addresses at a time, for kernels that gather them.

Attention asks for no order, but memory does: tokens at random out of gigabytes wait for the translation of their addresses.
Where every program goes through its tokens from low addresses to high ones, all of them read one of eight stretches of the
cache at about the same time. A program counts a row's tokens by stretches, eight tokens in counters of 4 bits, all of them in
counters of 16 bits, and puts each behind those of its stretch that came before it: one pass, and results have the same bits
each time.

What it gains and costs is in docs/kernels/mla.md.
"""

import triton
import triton.language as tl

# Of a token's stretch: what a program counts in is for eight
STRETCH_BITS = 3
# What fits in registers, and in counters of 16 bits
MAX_TOPK = 1 << 13


@triton.jit
def _spread(counts):
    """Four counters of 16 bits from the lowest four of 4 bits."""
    counts = counts.to(tl.int64)
    return (counts & 0xF) | (counts & 0xF0) << 12 | (counts & 0xF00) << 24 | (counts & 0xF000) << 36


@triton.jit(do_not_specialize=["topk", "num_slots", "index_stride"])
def order_tokens(indices, lengths, ordered, index_stride, topk, num_slots, SEQUENCES_PER_LENGTH: tl.constexpr,
                 SHIFT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A program a row of indices, int32 (rows, topk) with index_stride; ordered: (rows, topk), contiguous, hidden ones as -1.

    lengths: int32, one for SEQUENCES_PER_LENGTH rows each, or None. A stretch is 2**SHIFT tokens; hidden ones are in the last.
    """
    row = tl.program_id(0)
    length = topk
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + row // SEQUENCES_PER_LENGTH), topk)
    # (groups, 8)
    place = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tokens = tl.load(indices + row.to(tl.int64) * index_stride + place, mask=place < length, other=-1)
    tokens = tl.where((tokens >= 0) & (tokens < num_slots), tokens, -1)
    # Of -1 all bits are 1
    stretch = (tokens >> SHIFT) & 7
    ones = 1 << (stretch * 4)
    target = (tl.cumsum(ones, 1) >> (stretch * 4)) & 15
    counts = tl.sum(ones, 1)
    low, high = _spread(counts), _spread(counts >> 16)
    low_totals, high_totals = tl.sum(low, 0), tl.sum(high, 0)
    # Where the tokens of a stretch begin
    low_begins = (low_totals << 16) + (low_totals << 32) + (low_totals << 48)
    high_begins = (high_totals << 16) + (high_totals << 32) + (high_totals << 48)
    high_begins += ((low_totals + low_begins) >> 48 & 0xFFFF) * 0x0001000100010001
    low_begins += tl.cumsum(low, 0) - low
    high_begins += tl.cumsum(high, 0) - high
    begins = tl.where(stretch < 4, low_begins[:, None], high_begins[:, None])
    target += (begins >> ((stretch & 3) * 16).to(tl.int64)).to(tl.int32) & 0xFFFF
    tl.store(ordered + row.to(tl.int64) * topk + target - 1, tokens, mask=target <= topk)


def launch(launch_kernel, indices, lengths, ordered, num_slots, rows_per_length):
    """ordered: int32 (rows, topk), from indices (..., topk) of as many rows; lengths: as `order_tokens` takes them."""
    rows, topk = ordered.shape
    constexprs = {
        "SEQUENCES_PER_LENGTH": rows_per_length, "SHIFT": max(0, (num_slots - 1).bit_length() - STRETCH_BITS),
        "BLOCK": max(8, triton.next_power_of_2(topk)),
    }  # fmt: skip
    # The tensor itself as pointer: `Launches` knows it
    index_stride = indices.view(rows, topk).stride(0)
    launch_kernel(order_tokens, (rows,), (indices, lengths, ordered, index_stride, topk, num_slots), constexprs,
                  num_warps=8)  # fmt: skip
