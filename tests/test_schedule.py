"""The order in which persistent kernels take their tiles, in Triton's interpreter: every tile once, the longest first."""

import importlib.util

import pytest
import torch

from flashtile import settings

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(not settings.triton_interprets(), reason="needs TRITON_INTERPRET=1"),
]

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from flashtile.device import schedule
    from flashtile.device.lengths import Packing
    from flashtile.device.masks import Window

    @triton.jit
    def _list_tiles(out, num_units, num_tiles, num_heads, total_heads, heads_per_group, tail_heads, LAST_FIRST: tl.constexpr):
        order = schedule.Order(num_tiles, num_heads, total_heads, heads_per_group, tail_heads)
        for unit in range(num_units):
            work = schedule.tile_of_unit(unit, order, LAST_FIRST)
            tl.store(out + 3 * unit, work.tile)
            tl.store(out + 3 * unit + 1, work.head)
            tl.store(out + 3 * unit + 2, work.batch)

    @triton.jit
    def _list_programs(out, num_tiles, num_heads, tail_heads, LAST_FIRST: tl.constexpr):
        work = schedule.tile_of_program(num_tiles, num_heads, tail_heads, LAST_FIRST)
        program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
        tl.store(out + 3 * program, work.tile)
        tl.store(out + 3 * program + 1, work.head)
        tl.store(out + 3 * program + 2, work.batch)

    @triton.jit
    def _list_packed_tiles(out, num_units, table, num_heads, rows_in_l2, group_size, LAST_FIRST: tl.constexpr):
        order = schedule.Order(tl.load(table), num_heads, 0, rows_in_l2, group_size)
        for unit in range(num_units):
            work, lengths, sequences_after = schedule.packed_tile_of_unit(unit, order, table, LAST_FIRST)
            tl.store(out + 8 * unit, work.tile)
            tl.store(out + 8 * unit + 1, work.head)
            tl.store(out + 8 * unit + 2, work.batch)
            tl.store(out + 8 * unit + 3, lengths.start_q)
            tl.store(out + 8 * unit + 4, lengths.seqlen_q)
            tl.store(out + 8 * unit + 5, lengths.start_k)
            tl.store(out + 8 * unit + 6, lengths.seqlen_k)
            tl.store(out + 8 * unit + 7, sequences_after)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize(("heads_per_group", "tail_heads"), [(1, 0), (4, 0), (2, 3), (3, 12), (5, 2)])
def test_every_tile_comes_once(heads_per_group, tail_heads, last_first):
    batch, num_heads, num_tiles = 2, 6, 5
    units = batch * num_heads * num_tiles
    tail_heads = min(tail_heads, batch * num_heads)
    out = torch.full((units, 3), -1, dtype=torch.int32)
    _list_tiles[(1,)](out, units, num_tiles, num_heads, batch * num_heads, heads_per_group, tail_heads, last_first)
    listed = [tuple(row) for row in out.tolist()]
    assert sorted(listed) == [(t, h, b) for t in range(num_tiles) for h in range(num_heads) for b in range(batch)]
    # The first group: its longest tiles of all heads, then the next ones
    size = min(heads_per_group, batch * num_heads - tail_heads) or tail_heads
    tiles = [tile for tile, _, _ in listed[: size * num_tiles]]
    assert tiles == sorted(tiles, reverse=last_first)
    # Of a head, one after the other: the Hopper backward's fixed order counts on it
    for head in {row[1:] for row in listed}:
        tiles = [tile for tile, *rest in listed if tuple(rest) == head]
        assert tiles == sorted(tiles, reverse=last_first)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("tail_heads", [None, 1, 3, 8])
def test_every_program_has_a_tile(tail_heads, last_first):
    """A GPU begins programs by their number: heads one after the other, the last ones side by side."""
    batch, num_heads, num_tiles = 2, 4, 3
    grid = schedule.grid_of(num_tiles, num_heads, batch, tail_heads)
    out = torch.full((batch * num_heads * num_tiles, 3), -1, dtype=torch.int32)
    _list_programs[grid](out, num_tiles, num_heads, tail_heads, last_first)
    heads = [(head, b) for b in range(batch) for head in range(num_heads)]
    tiles = range(num_tiles)[:: -1 if last_first else 1]
    whole = len(heads) - (tail_heads or 0)
    expected = [(tile, *head) for head in heads[:whole] for tile in tiles]
    expected += [(tile, *head) for tile in tiles for head in heads[whole:]]
    assert [tuple(row) for row in out.tolist()] == expected


LENGTHS = [
    [(300, 500)],
    [(0, 5), (129, 64), (0, 3), (128, 256), (1, 0), (0, 0)],
    [(64, 64)] * 40,
    [(0, 5), (0, 0)],
]


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_tiles(lengths, used, is_sorted):
    """The table has each tile of each sequence once; rows behind the last sequence are cleared, and no others."""
    heads, dim, tile_m, behind = 3, 8, 128, 7
    starts_q, starts_k = ([0, *torch.tensor(side).cumsum(0).tolist()] for side in zip(*lengths))
    total_q = starts_q[-1] + behind
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k))
    seqlens = [(q // 2, k // 2) if used else (q, k) for q, k in lengths]
    seqused = [torch.tensor(side, dtype=torch.int32) if used else None for side in zip(*seqlens)]
    max_tiles = total_q // tile_m + len(lengths)
    table = torch.full((schedule.table_size(max_tiles, len(lengths)),), -1, dtype=torch.int32)
    out, lse = torch.full((total_q, heads, dim), 7.0), torch.full((heads, total_q), 7.0)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, *seqused)
    other = torch.full((starts_k[-1] + 1, 1, 5), 7.0)
    rests = (schedule.rest_of(out, cu_seqlens_q),), (schedule.rest_of(other, cu_seqlens_k),)
    schedule.plan_packed[(3,)](table, packing, *rests, lse, len(lengths), max_tiles, total_q, other.shape[0], heads,
                               TILE_M=tile_m, BLOCK=64, SORTED=64 * is_sorted)  # fmt: skip
    assert (out[starts_q[-1] :] == 0).all() and (out[: starts_q[-1]] == 7).all()
    assert (other[-1] == 0).all() and (other[:-1] == 7).all()
    assert (lse[:, starts_q[-1] :] == float("-inf")).all() and (lse[:, : starts_q[-1]] == 7).all()

    places = list(range(len(lengths)))
    if is_sorted:
        places = sorted((b for b in places if seqlens[b][0]), key=lambda b: -seqlens[b][1])
    expected = [
        (tile, head, b, starts_q[b], seqlens[b][0], starts_k[b], seqlens[b][1], len(places) - 1 - place)
        for place, b in enumerate(places) for tile in range(-(-seqlens[b][0] // tile_m)) for head in range(heads)
    ]  # fmt: skip
    assert table[0].item() * heads == len(expected)
    assert 0 <= table[8] < len(lengths)
    listed = torch.full((len(expected), 8), -1, dtype=torch.int32)
    for last_first in (False, True):
        _list_packed_tiles[(1,)](listed, len(expected), table, heads, 256, 1, last_first)
        assert sorted(map(tuple, listed.tolist())) == sorted(expected)
        assert [row[2] for row in listed.tolist()] == [row[2] for row in expected]
        for head in {(row[1], row[2]) for row in listed.tolist()}:
            tiles = [row[0] for row in listed.tolist() if (row[1], row[2]) == head]
            assert tiles == sorted(tiles, reverse=last_first)


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def _cached_sequences(layout, window, batch, seqlen_q, total_q, rows_apart, whole, least_q=0):
    """(start_q, seqlen_q, start_k, seqlen_k) of sequences with a tile of 128 queries. layout: of a CacheLayout, to total_q."""
    max_tiles = total_q // 128 + batch
    table = torch.full((schedule.table_size(max_tiles, batch),), -1, dtype=torch.int32)
    schedule.plan_cached[(1,)](table, layout[:6], *layout[6:], least_q, Window(*window), seqlen_q, rows_apart, whole, batch,
                               max_tiles, TILE_M=128, BLOCK=32)  # fmt: skip
    entries = table[8 : 8 * (1 + max_tiles)].view(-1, 8)[: table[0]]
    return {int(entry[0]): tuple(entry[3:7].tolist()) for entry in entries}


def test_sequences_of_a_cache_are_rows():
    """Rows of a cache, padding on the left, new keys; lengths and rows that point outside are limited."""
    layout = _ints(60, 2000, -5, 0), None, _ints(2, 0, 9, 1), _ints(7, 0, 0, 0), None, None, 0, 10, 100, 3, 0
    found = _cached_sequences(layout, (None, None), 4, 130, 520, 120, 1)
    # start_q, seqlen_q, start_k, seqlen_k
    assert found == {0: (0, 130, 247, 63), 1: (130, 130, 0, 100), 2: (260, 130, 240, 10), 3: (390, 130, 120, 10)}


@pytest.mark.parametrize(("whole", "hidden"), [(1, 50), (16, 48), (64, 0)])
def test_what_a_window_hides_from_all_queries_is_left_out(whole, hidden):
    table = torch.zeros(2, 8, dtype=torch.int32)
    layout = _ints(90, 40), table, None, None, _ints(0, 20, 150), None, 8, 0, 128, 9, 150
    found = _cached_sequences(layout, (20, 0), 2, 130, 150, 0, whole)
    assert found == {0: (0, 20, hidden, 90 - hidden), 1: (20, 130, 0, 40)}


def test_sequences_of_fewer_and_of_more_queries_are_left_out():
    layout = _ints(90, 40, 50, 60), None, None, None, _ints(0, 4, 9, 139, 270), None, 0, 0, 128, 4, 270
    found = _cached_sequences(layout, (None, None), 4, 130, 270, 128, 1, least_q=5)
    assert found == {1: (4, 5, 128, 40), 2: (9, 130, 256, 50)}


def test_packed_queries_that_overlap_stay_in_the_table():
    layout = _ints(*[50] * 6), None, None, None, _ints(0, 260, 0, 260, 0, 260, 0), None, 0, 0, 64, 6, 260
    found = _cached_sequences(layout, (None, None), 6, 260, 260, 64, 1)
    assert len(found) <= 260 // 128 + 6
