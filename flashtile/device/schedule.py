"""Which tile of which head a program works on."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.device import chain
from flashtile.device.cache import BOUNDS, CacheLayout, PackedCache, load_packed_lengths
from flashtile.device.lengths import Lengths, load_lengths
from flashtile.device.numerics import NEG_INF


class Work(NamedTuple):
    tile: Any
    head: Any
    batch: Any


# Blocks of a grid in its second and third direction
MAX_GRID = 65535


def grid_of(num_tiles, num_heads, batch, tail_heads=None):
    """One program a tile, for `tile_of_program`."""
    if max(num_heads, batch) <= MAX_GRID and tail_heads is None:
        return num_tiles, num_heads, batch
    return (num_tiles * num_heads * batch,)


class Order(NamedTuple):
    """In which order the tiles of a call begin; `tile_of_unit` numbers them.

    Heads (of all sequences, counted through) go in groups of heads_per_group, whose keys and values fit in L2 together, the
    last tail_heads in a group of their own. Inside a group all heads' tiles of one place follow each other.
    """

    num_tiles: Any
    num_heads: Any
    total_heads: Any
    heads_per_group: Any
    tail_heads: Any


@triton.jit
def tile_of_unit(unit, order, LAST_FIRST: tl.constexpr):
    """The unit-th tile. With LAST_FIRST the longest tiles of a causal mask come first, so that programs end together."""
    grouped_heads = order.total_heads - order.tail_heads
    group = unit // (order.heads_per_group * order.num_tiles)
    first_head = tl.minimum(group * order.heads_per_group, grouped_heads)
    # Units of the tail come after those of all groups, whole or not
    in_tail = unit >= grouped_heads * order.num_tiles
    first_head = tl.where(in_tail, grouped_heads, first_head)
    group_heads = tl.where(in_tail, order.tail_heads, tl.minimum(order.heads_per_group, grouped_heads - first_head))
    within = unit - first_head * order.num_tiles
    # Past the last unit there is no head: callers ask for it before they look
    group_heads = tl.maximum(group_heads, 1)
    tile = within // group_heads
    if LAST_FIRST:
        tile = order.num_tiles - 1 - tile
    head = first_head + within % group_heads
    return Work(tile, head % order.num_heads, head // order.num_heads)


@triton.jit
def tile_of_program(num_tiles, num_heads, tail_heads, LAST_FIRST: tl.constexpr):
    """Of a grid of `grid_of`. Tiles of one head run side by side, so that they share its rows in L2.

    LAST_FIRST starts a head's last tiles first: under a causal mask they are the longest. Those of the last tail_heads (of all
    sequences, counted through) begin with those of the same place in other heads, so that programs end together; None for no
    such heads, since their order takes registers.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    if tl.num_programs(0) != num_tiles:
        # Counted through: divisions, which a small call waits for
        if tail_heads is None:
            batch = tile // (num_tiles * num_heads)
            head = (tile // num_tiles) % num_heads
            tile = tile % num_tiles
        else:
            order = Order(num_tiles, num_heads, tl.num_programs(0) // num_tiles, 1, tail_heads)
            tile, head, batch = tile_of_unit(tile, order, False)
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    return Work(tile, head, batch)


# Of a table of packed tiles: words before the first entry, whose first is the number of tiles of one head, and of an entry.
ENTRY = tl.constexpr(8)


def table_size(max_tiles, batch):
    """Words of a table of packed tiles."""
    return ENTRY.value * (1 + max_tiles) + 2 * batch


class Rest(NamedTuple):
    """Rows of a packed tensor behind its last sequence: from starts[batch] on."""

    ptr: Any
    starts: Any
    row_elements: Any


def rest_of(x, cu_seqlens) -> Rest:
    """x: (total, heads, dim), contiguous."""
    return Rest(x, cu_seqlens, x.shape[1] * x.shape[2])


@triton.jit
def _clear_rest(rest, total_rows, batch, BLOCK: tl.constexpr):
    """The work of all programs but the first."""
    row_elements = tl.cast(rest.row_elements, tl.int64)
    begin = tl.load(rest.starts + batch) * row_elements + (tl.program_id(0) - 1) * BLOCK
    index = tl.arange(0, BLOCK)
    for i in range(begin, total_rows * row_elements, (tl.num_programs(0) - 1) * BLOCK):
        zeros = tl.zeros((BLOCK,), rest.ptr.dtype.element_ty)
        tl.store(rest.ptr + i + index, zeros, mask=i + index < total_rows * row_elements)


@triton.jit
def _clear_rest_of_lse(lse, first_row, total_q, num_heads, BLOCK: tl.constexpr):
    """As of rows that see nothing."""
    for head in range(tl.program_id(0) - 1, num_heads, tl.num_programs(0) - 1):
        for row_begin in range(first_row, total_q, BLOCK):
            rows = row_begin + tl.arange(0, BLOCK)
            tl.store(lse + head * total_q.to(tl.int64) + rows, tl.full((BLOCK,), NEG_INF, tl.float32), mask=rows < total_q)


@triton.jit(do_not_specialize=["batch", "max_tiles", "total_q", "total_k", "num_heads"])
def plan_packed(table, packing, rests_q, rests_k, lse, batch, max_tiles, total_q, total_k, num_heads, TILE_M: tl.constexpr,
                BLOCK: tl.constexpr, SORTED: tl.constexpr = 0, CHAINED: tl.constexpr = False):  # fmt: skip
    """The first program writes the table for `packed_tile_of_unit`; others clear what is behind the last sequence.

    table: int32 of `table_size`, with an entry for each query tile of each sequence, one if there is none, since all programs
    read one; then each one's first tile. SORTED: a power of two, at least the batch, where those of most keys come first, so
    that programs end together, and the numbers of sequences in that order follow; or 0. rests_q, rests_k: tuples of Rest, of
    total_q and total_k rows. lse: (num_heads, total_q), or None. CHAINED: see chain.py.
    """
    chain.begin(CHAINED)
    if tl.program_id(0) == 0:
        _write_table(table, packing, batch, max_tiles, False, TILE_M, BLOCK, SORTED)
    else:
        for i in tl.static_range(len(rests_q)):
            _clear_rest(rests_q[i], total_q, batch, BLOCK)
        for i in tl.static_range(len(rests_k)):
            _clear_rest(rests_k[i], total_k, batch, BLOCK)
        if lse is not None:
            _clear_rest_of_lse(lse, tl.load(packing.cu_seqlens_q + batch), total_q, num_heads, BLOCK)


@triton.jit(do_not_specialize=[*BOUNDS, "seqlen_q", "rows_apart", "batch", "max_tiles"])
def plan_cached(table, index_tensors, table_stride, seqlen_new, capacity, num_rows, total_q, least_q, window, seqlen_q,
                rows_apart, whole, batch, max_tiles, TILE_M: tl.constexpr, BLOCK: tl.constexpr,
                CHAINED: tl.constexpr = False):  # fmt: skip
    """One program writes the table of `plan_packed` for a call on a cache, a `PackedCache`."""
    chain.begin(CHAINED)
    layout = CacheLayout(*index_tensors, table_stride, seqlen_new, capacity, num_rows, total_q, least_q)
    _write_table(table, PackedCache(layout, window, seqlen_q, rows_apart, whole), batch, max_tiles, True, TILE_M, BLOCK, 0)


@triton.jit
def _lengths(packing, sequence, CACHED: tl.constexpr):
    if CACHED:
        return load_packed_lengths(packing, sequence, sequence >= 0)
    else:
        return load_lengths(packing, sequence, 0, 0)


@triton.jit
def _sort(sequences, packing, batch, CACHED: tl.constexpr, SIZE: tl.constexpr):
    """Write the numbers of the sequences, those of most keys first, those without queries last; return how many have some."""
    number = tl.arange(0, SIZE)
    lengths = _lengths(packing, tl.minimum(number, batch - 1), CACHED)
    keys = tl.where(lengths.seqlen_q > 0, lengths.seqlen_k, -1)
    is_before = (keys[None, :] > keys[:, None]) | ((keys[None, :] == keys[:, None]) & (number[None, :] < number[:, None]))
    rank = tl.sum((is_before & (number < batch)[None, :]).to(tl.int32), 1)
    tl.store(sequences + rank, number, mask=number < batch)
    tl.debug_barrier()
    return tl.sum(((keys >= 0) & (number < batch)).to(tl.int32), 0)


@triton.jit
def _write_table(table, packing, batch, max_tiles, CACHED: tl.constexpr, TILE_M: tl.constexpr, BLOCK: tl.constexpr,
                 SORTED: tl.constexpr):  # fmt: skip
    first_tile = table + ENTRY * (1 + max_tiles)
    sequences = first_tile + batch
    count = batch
    if SORTED:
        count = _sort(sequences, packing, batch, CACHED, SORTED)
    total = 0
    for begin in range(0, batch, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        sequence = tl.minimum(place, batch - 1)
        if SORTED:
            sequence = tl.load(sequences + sequence)
        lengths = _lengths(packing, sequence, CACHED)
        num_tiles = tl.where(place < batch, tl.cdiv(lengths.seqlen_q, TILE_M), 0)
        tl.store(first_tile + place, total + tl.cumsum(num_tiles, 0) - num_tiles, mask=place < batch)
        total += tl.sum(num_tiles, 0)
    # Packed queries that overlap have more tiles than there is room for
    total = tl.minimum(total, max_tiles)
    tl.store(table, total)
    tl.debug_barrier()
    for begin in range(0, tl.maximum(total, 1), BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        # The place of the last sequence that begins at or before the tile: of those that begin at one, all others are empty
        low = tl.zeros((BLOCK,), tl.int32)
        high = low + batch - 1
        remaining = batch
        while remaining > 1:
            middle = (low + high + 1) // 2
            right = tl.load(first_tile + middle) <= tile
            low = tl.where(right, middle, low)
            high = tl.where(right, high, middle - 1)
            remaining = (remaining + 1) // 2
        sequence = low
        if SORTED:
            sequence = tl.load(sequences + low)
        lengths = _lengths(packing, sequence, CACHED)
        entry = table + ENTRY * (1 + tile)
        inside = tile < tl.maximum(total, 1)
        tl.store(entry, sequence, mask=inside)
        tl.store(entry + 1, tl.load(first_tile + low), mask=inside)
        tl.store(entry + 2, tl.cdiv(lengths.seqlen_q, TILE_M), mask=inside)
        tl.store(entry + 3, lengths.start_q.to(tl.int32), mask=inside)
        tl.store(entry + 4, lengths.seqlen_q, mask=inside)
        tl.store(entry + 5, lengths.start_k.to(tl.int32), mask=inside)
        tl.store(entry + 6, lengths.seqlen_k, mask=inside)
        tl.store(entry + 7, count - 1 - low, mask=inside)


@triton.jit
def packed_tile_of_unit(unit, order, table, LAST_FIRST: tl.constexpr):
    """The unit-th tile of a packed call, the lengths of its sequence, and how many follow; sequences come one by one.

    order: num_tiles of one head, all sequences together; heads_per_group counts rows of keys that fit in L2, and tail_heads
    heads that share keys. Groups are of about one size: a small last one would leave programs without a tile.
    """
    entry = table + ENTRY * (1 + tl.minimum(unit // order.num_heads, tl.maximum(order.num_tiles - 1, 0)))
    batch = tl.load(entry)
    first_tile = tl.load(entry + 1)
    num_tiles = tl.load(entry + 2)
    lengths = Lengths(tl.load(entry + 3), tl.load(entry + 5), tl.load(entry + 4), tl.load(entry + 6))
    shared = tl.cdiv(order.num_heads, order.tail_heads)
    most = tl.minimum(tl.maximum(order.heads_per_group // tl.maximum(lengths.seqlen_k, 1), 1), shared)
    heads = tl.cdiv(shared, tl.cdiv(shared, most)) * order.tail_heads
    inner = Order(num_tiles, order.num_heads, order.num_heads, tl.minimum(heads, order.num_heads), 0)
    work = tile_of_unit(unit - first_tile * order.num_heads, inner, LAST_FIRST)
    return Work(work.tile, work.head, batch), lengths, tl.load(entry + 7)


@triton.jit
def packed_part(part, table):
    """(sequence, number of the part in it, its lengths) of a part of the queries of one head. It must exist."""
    entry = table + ENTRY * (1 + part)
    lengths = Lengths(tl.load(entry + 3), tl.load(entry + 5), tl.load(entry + 4), tl.load(entry + 6))
    return tl.load(entry), part - tl.load(entry + 1), lengths
