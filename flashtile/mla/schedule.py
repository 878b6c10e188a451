"""Even parts of all caches together: which programs read which keys. Computed on the device, without a wait.

All sequences stand on one line, each with SEQUENCE_COST and then one unit for each TILE keys (one at least, so that an empty
sequence has someone who writes its rows). The line is cut into parts of equal length; part p belongs to the programs of one
column of the grid. A sequence that a cut goes through has partial results, merged afterwards: a part leaves at most two, slot
2p for a sequence that began in a part before, slot 2p + 1 for one that begins here and goes on.

Where lengths are about equal, no part has the end of one sequence and the beginning of the next: each sequence has as many
parts as fit, or a part has whole sequences. A sequence's place on the line is then filled up to a multiple of `piece`, and
SEQUENCE_COST left out. What that gains over cuts anywhere, on an H100 in a single run that is not recorded (us; graphs, cold
L2, with `merge`; keys x heads): 64 sequences of 4096 x 64 141.5 to 132.0, of 3700 to 4096 137.2 to 128.6; 32 of 8192 x 128
149.9 to 144.5; 8 of 16384 x 128 90.8 to 89.2; 16 of 8192 x 16 75.6 to 75.0; 1 of 131072 x 128 92.5 to 88.8, x 16 82.5 to 80.6.
128 of 4096 x 128, two whole ones in 64 of 66 parts, 273; cut into 66 even parts 282.

A part of few keys costs a partial result to write and to merge, so that MIN_PART units are the least; but where a batch is so
small that most multiprocessors would have no part, and few rows to merge, more parts are faster. The same kind of run, with 4
units at least, with the rule of now, and with MERGED_ROWS twice that: packed, 2048 indices of one token, 128 heads 27.7, 22.9,
22.8; of two tokens 29.1, 26.3, 27.7; 1 of 8192 x 128 24.8, 25.0, 29.1; 1 of 1024 x 128 20.5, 18.3, 18.4; 2 of 4096 x 128 25.3,
25.3, 27.2; 8 ragged ones up to 8192 x 128 32.1, 32.0, 36.6. Of 16 heads with MERGED_PARTS of 64, 96, 256: 4 of 2048 (21.4)
20.6, 19.1, 19.1; 8 of 2048 (24.3) 24.2, 24.1, 25.0; 1 of 16384 (25.1) 25.0, 25.8, 26.0; 1 of 4096 (20.8) 17.9, 17.5, 17.4;
4 ragged ones up to 4096 (20.6) 20.0, 16.6, 16.5, but of 32 heads (13.7) 13.7, 14.8, 14.9.

    table, int32 (num_parts + 1 + num_sequences, 2)
    rows 0 to num_parts          (sequence, tile) where a part begins; that of the next is where it ends
    the row of a sequence        (first part, last part) that hold its tiles

Everything follows from the prefix sums of the lengths, so no part waits for another: the kernel is one block.
"""

import triton
import triton.language as tl

from flashtile.device.launch import launch_now

# Keys to a unit of the line
TILE = tl.constexpr(64)
# What a sequence costs beside its keys, in units: its queries, its output
SEQUENCE_COST = tl.constexpr(4)
# What a second sequence in a part costs, and to cut and merge, in units: so much more may a part of pieces take. In a
# simulation of random lengths 4 was 1.3% worse, 12 0.5%
MERGE_COST = tl.constexpr(8)
# A part has at least so many units; less, down to one, only until a small batch is in MERGED_PARTS parts whose partial results
# are MERGED_ROWS rows
MIN_PART = tl.constexpr(4)
MERGED_PARTS = 96
MERGED_ROWS = 4096


@triton.jit
def num_tiles_of(length):
    return tl.maximum(tl.cdiv(length, TILE), 1)


@triton.jit
def smallest_part(total, cheap_parts):
    """Units that a part has at least, of `total` in all; the host asks it, too."""
    return min(max(total // cheap_parts, 1), MIN_PART)


def cheap_parts(total_rows) -> int:
    """Into how many parts to cut even where they are small. total_rows: of queries of a sequence, in all heads."""
    return max(min(MERGED_ROWS // total_rows, MERGED_PARTS), 1)


@triton.jit
def key_length(lengths, sequence, fixed_length, SEQLEN_Q: tl.constexpr):
    """Keys of a sequence: of lengths, one for SEQLEN_Q sequences each, or fixed_length where there are none."""
    if lengths is None:
        return fixed_length
    else:
        return tl.minimum(tl.maximum(tl.load(lengths + sequence // SEQLEN_Q), 0), fixed_length)


@triton.jit(do_not_specialize=["fixed_length", "num_sequences", "num_parts", "cheap_parts"])
def plan_parts(table, lengths, fixed_length, num_sequences, num_parts, cheap_parts, SEQLEN_Q: tl.constexpr, PARTS: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Write the table. lengths: int32 pointer or None; cheap_parts: see there; PARTS: a power of two above num_parts."""
    total = 0
    largest = 0
    for begin in range(0, num_sequences, BLOCK):
        tiles = _num_tiles(begin, lengths, fixed_length, num_sequences, SEQLEN_Q, BLOCK)
        total += tl.sum(tl.where(tiles > 0, tiles + SEQUENCE_COST, 0), 0)
        largest = tl.maximum(largest, tl.max(tiles, 0))
    least = smallest_part(total, cheap_parts)
    part_cost = tl.maximum(tl.cdiv(total, num_parts), least)
    piece = tl.cdiv(largest, tl.maximum(num_parts // num_sequences, 1))
    piece = tl.minimum(tl.maximum(piece, least), largest)
    # In a part
    pieces = tl.cdiv(num_sequences, num_parts)
    in_pieces = pieces * (piece + SEQUENCE_COST) <= part_cost + MERGE_COST
    part_cost = tl.where(in_pieces, pieces * piece, part_cost)
    first_cost = tl.where(in_pieces, 0, SEQUENCE_COST)
    multiple = tl.where(in_pieces, piece, 1)
    parts = tl.arange(0, PARTS)
    cuts = parts * part_cost
    sequence_at = tl.zeros((PARTS,), tl.int32)
    start_at = tl.zeros((PARTS,), tl.int32)
    start = 0
    for begin in range(0, num_sequences, BLOCK):
        tiles = _num_tiles(begin, lengths, fixed_length, num_sequences, SEQLEN_Q, BLOCK)
        costs = tl.where(tiles > 0, tl.cdiv(tiles, multiple) * multiple + first_cost, 0)
        starts = start + tl.cumsum(costs, 0) - costs
        start += tl.sum(costs, 0)
        sequences = begin + tl.arange(0, BLOCK)
        exists = sequences < num_sequences
        row = table + 2 * (num_parts + 1 + sequences)
        tl.store(row, (starts + first_cost) // part_cost, mask=exists)
        tl.store(row + 1, (starts + costs - 1) // part_cost, mask=exists)
        # The last sequence that starts at or before each cut
        before = (starts[None, :] <= cuts[:, None]) & exists[None, :]
        sequence_at += tl.sum(before.to(tl.int32), 1)
        start_at = tl.maximum(start_at, tl.max(tl.where(before, starts[None, :], 0), 1))
    inside = cuts < start
    tile_at = tl.maximum(cuts - start_at - first_cost, 0)
    exists = parts <= num_parts
    tl.store(table + 2 * parts, tl.where(inside, sequence_at - 1, num_sequences), mask=exists)
    tl.store(table + 2 * parts + 1, tl.where(inside, tile_at, 0), mask=exists)


@triton.jit
def _num_tiles(begin, lengths, fixed_length, num_sequences, SEQLEN_Q: tl.constexpr, BLOCK: tl.constexpr):
    """Of BLOCK sequences; 0 where there is none."""
    sequences = begin + tl.arange(0, BLOCK)
    length = key_length(lengths, tl.minimum(sequences, num_sequences - 1), fixed_length, SEQLEN_Q)
    return tl.where(sequences < num_sequences, num_tiles_of(length), 0)


@triton.jit
def part_of_program(table, part, num_sequences):
    """(first sequence, its first tile, last sequence, the end of its tiles) of a part; an empty part ends before it begins."""
    begin = tl.load(table + 2 * part)
    begin_tile = tl.load(table + 2 * part + 1)
    end = tl.load(table + 2 * part + 2)
    end_tile = tl.load(table + 2 * part + 3)
    # A cut between two sequences, or past the last
    between = end_tile == 0
    return begin, begin_tile, tl.where(between, end - 1, end), tl.where(between, 2**30, end_tile)


@triton.jit
def part_tiles(sequence, num_tiles, begin, begin_tile, last, end_tile):
    """[first, end) of a sequence's tiles that belong to a part."""
    return tl.where(sequence == begin, begin_tile, 0), tl.where(sequence == last, tl.minimum(end_tile, num_tiles), num_tiles)


@triton.jit
def is_whole(sequence, begin, begin_tile, last, end_tile):
    """Whether a part has all tiles of a sequence, so that nothing is merged: by the table, whatever the lengths are now."""
    return ((sequence != begin) | (begin_tile == 0)) & ((sequence != last) | (end_tile == 2**30))


@triton.jit
def partial_slot(part, first_tile):
    return 2 * part + tl.where(first_tile == 0, 1, 0)


@triton.jit
def slots_of(first_part):
    """(first, rest, step) of `merge_rows`: where the partial results of a sequence lie that begins in first_part."""
    return 2 * first_part + 1, 2 * first_part, 2


def num_parts_of(table_shape, num_sequences) -> int:
    return table_shape[0] - 1 - num_sequences


def most_parts(length, num_sequences, num_parts, total_rows) -> int:
    """Of a sequence, where all have this length."""
    tiles = max(-(-length // TILE.value), 1)
    least = smallest_part.fn((tiles + SEQUENCE_COST.value) * num_sequences, cheap_parts(total_rows))
    return min(num_parts // num_sequences, -(-tiles // int(least)))


def launch(table, lengths, *, fixed_length, num_sequences, seqlen_q, total_rows, launch=launch_now):
    """Fill table, (num_parts + 1 + num_sequences, 2).

    lengths: int32, one for seqlen_q sequences each, or None where all have fixed_length, which bounds them anyway.
    """
    parts = num_parts_of(table.shape, num_sequences)
    constexprs = {"SEQLEN_Q": seqlen_q, "PARTS": triton.next_power_of_2(parts + 1), "BLOCK": 64}
    launch(plan_parts, (1,), (table, lengths, fixed_length, num_sequences, parts, cheap_parts(total_rows)),
           constexprs, num_warps=8)  # fmt: skip
