"""Where the keys of a sequence lie in a cache, and how many there are; read from device memory, limited to the cache."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.device.lengths import Lengths
from flashtile.device.masks import Window
from flashtile.device.tensors import Rows

# The numbers of a CacheLayout, as a kernel's own arguments that are not specialised: in a tuple all are, so that another number
# of pages or another width of the table may compile the kernel anew
BOUNDS = ("table_stride", "seqlen_new", "capacity", "num_rows", "total_q", "least_q")


class CacheLayout(NamedTuple):
    """Pointers to int32 index tensors, None where an option is off, and the bounds that hold for all sequences.

    A kernel makes it: CacheLayout(*index_tensors, table_stride, seqlen_new, capacity, num_rows, total_q, least_q).

    capacity: slots of a sequence, and its length where cache_seqlens is None. num_rows: pages, or rows of a cache without
    pages. total_q: rows of packed queries. least_q: of a sequence; one with fewer counts as one without.
    """

    cache_seqlens: Any
    block_table: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    cu_seqlens_q: Any
    cu_seqlens_k_new: Any
    table_stride: Any
    seqlen_new: Any
    capacity: Any
    num_rows: Any
    total_q: Any
    least_q: Any


def layout_arguments(problem, operands) -> tuple:
    """index_tensors and BOUNDS of a CacheProblem and its CacheOperands, which hold the tensors in the same order."""
    table = operands.block_table
    return (operands[5:11], 0 if table is None else table.stride(0), problem.seqlen_new, problem.capacity,
            operands.k_cache.shape[0], problem.total_q or 0, problem.least_q)  # fmt: skip


class Slots(NamedTuple):
    """Of a sequence: slots in use before new keys came and after, and the first one that is its own."""

    before: Any
    stop: Any
    begin: Any


class Pages(NamedTuple):
    """Of a block table, for `load_pages`, and what it leads to: k and v, Rows with strides in units of 16 bytes.

    rows_apart: of k and v, from one page's begin to the next one's, in tokens. A kernel makes it: Pages(*pages, table_stride,
    num_rows), see BOUNDS.
    """

    block_table: Any
    rows_apart: Any
    k: Rows
    v: Rows
    table_stride: Any
    num_rows: Any


class PackedCache(NamedTuple):
    """A call on a cache as a packed one, whose sequences have rows of their own: see `load_packed_lengths`.

    seqlen_q: queries of a sequence, the most of packed ones. rows_apart: between two rows of a cache without pages, in tokens.
    whole: slots that are hidden together, with pages; 1 for any.
    """

    layout: CacheLayout
    window: Window
    seqlen_q: Any
    rows_apart: Any
    whole: Any


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def load_slots(layout, batch, mask):
    """Slots of one sequence, or of a vector of sequences with a mask."""
    if layout.cache_seqlens is None:
        before = batch * 0 + layout.capacity
    else:
        before = _clamp(tl.load(layout.cache_seqlens + batch, mask=mask, other=0), 0, layout.capacity)
    if layout.cu_seqlens_k_new is None:
        new = layout.seqlen_new
    else:
        new = tl.load(layout.cu_seqlens_k_new + batch + 1, mask=mask, other=0)
        new = _clamp(new - tl.load(layout.cu_seqlens_k_new + batch, mask=mask, other=0), 0, layout.capacity)
    stop = tl.minimum(before + new, layout.capacity)
    if layout.cache_leftpad is None:
        begin = batch * 0
    else:
        begin = _clamp(tl.load(layout.cache_leftpad + batch, mask=mask, other=0), 0, stop)
    return Slots(before, stop, begin)


@triton.jit
def load_queries(layout, batch, mask, seqlen_q):
    """(first row in packed queries, number of queries) of one sequence, or of a vector of them.

    A packed sequence with more than seqlen_q queries, or fewer than least_q, counts as one without: it is left out.
    """
    if layout.cu_seqlens_q is None:
        return batch * 0, batch * 0 + seqlen_q
    else:
        start = _clamp(tl.load(layout.cu_seqlens_q + batch, mask=mask, other=0), 0, layout.total_q)
        stop = tl.minimum(tl.load(layout.cu_seqlens_q + batch + 1, mask=mask, other=0), layout.total_q)
        length = tl.maximum(stop - start, 0)
        return start, tl.where((length >= layout.least_q) & (length <= seqlen_q), length, 0)


@triton.jit
def lse_rows(lse, layout, seqlen_q, num_heads):
    """Rows of a contiguous lse, (batch, num_heads, seqlen_q), or of packed queries (num_heads, total_q)."""
    if layout.cu_seqlens_q is None:
        return Rows(lse, seqlen_q.to(tl.int64) * num_heads, 1, seqlen_q)
    else:
        return Rows(lse, 0, 1, layout.total_q)


@triton.jit
def load_cache_lengths(layout, batch, mask, seqlen_q):
    """Lengths; start_k is the slot of the first key."""
    slots = load_slots(layout, batch, mask)
    start_q, length_q = load_queries(layout, batch, mask, seqlen_q)
    return Lengths(start_q, slots.begin, length_q, slots.stop - slots.begin)


@triton.jit
def cache_row(layout, batch, mask=None):
    """The row of a sequence in a cache without pages, or of a vector of sequences with a mask."""
    if layout.cache_batch_idx is None:
        return batch
    else:
        return _clamp(tl.load(layout.cache_batch_idx + batch, mask=mask), 0, layout.num_rows - 1)


@triton.jit
def load_packed_lengths(packed, batch, mask):
    """Lengths of one sequence, or of a vector of them, without the keys that none of its queries sees for the window's left.

    start_q: the row of its first query, of batched ones too. start_k: the row of its first key; with pages its slot.
    """
    layout = packed.layout
    lengths = load_cache_lengths(layout, batch, mask, packed.seqlen_q)
    start_q = lengths.start_q
    if layout.cu_seqlens_q is None:
        start_q = batch * packed.seqlen_q
    hidden = lengths.seqlen_k * 0
    if packed.window.left is not None:
        hidden = _clamp(lengths.seqlen_k - lengths.seqlen_q - packed.window.left, 0, lengths.seqlen_k)
    if layout.block_table is None:
        start_k = cache_row(layout, batch, mask) * packed.rows_apart + lengths.start_k + hidden
    else:
        hidden = hidden // packed.whole * packed.whole
        start_k = lengths.start_k + hidden
    return Lengths(start_q, start_k, lengths.seqlen_q, lengths.seqlen_k - hidden)


@triton.jit
def load_pages(layout, batch, index, mask):
    """Pages of table entries `index`, limited to those that exist; only entries under the mask are read."""
    entries = tl.load(layout.block_table + batch.to(tl.int64) * layout.table_stride + index, mask=mask, other=0)
    return _clamp(entries, 0, layout.num_rows - 1)
