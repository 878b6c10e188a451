"""What the Hopper backward relies on, in Triton's interpreter: who waits for a turn at a tile of dq must not wait for ever."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from flashtile import hardware, settings

TIMES = Path(__file__).parent / "backward_times.json"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(not settings.triton_interprets(), reason="needs TRITON_INTERPRET=1"),
]

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from flashtile.device import masks, schedule
    from flashtile.device.launch import launch_now
    from flashtile.device.lengths import Lengths, Packing
    from flashtile.device.tensors import rows_of
    from flashtile.hopper import backward
    from flashtile.tiles import live_columns

    @triton.jit
    def _ranges(of_keys, of_queries, window, seqlen_q, seqlen_k, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
        lengths = Lengths(0, 0, seqlen_q, seqlen_k)
        for n_tile in range(tl.cdiv(seqlen_k, TILE_N)):
            tiles = masks.query_range(n_tile * TILE_N, lengths, window, TILE_M, TILE_N)
            tl.store(of_keys + 2 * n_tile, tiles.begin)
            tl.store(of_keys + 2 * n_tile + 1, tiles.end)
        for m_tile in range(tl.cdiv(seqlen_q, TILE_M)):
            tiles = masks.key_range(m_tile * TILE_M, lengths, window, TILE_M, TILE_N)
            tl.store(of_queries + 2 * m_tile, tiles.begin)
            tl.store(of_queries + 2 * m_tile + 1, tiles.end)

    @triton.jit
    def _turns(out, counts, num_n, num_m, goes_up, window, seqlen_q, seqlen_k, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
        lengths = Lengths(0, 0, seqlen_q, seqlen_k)
        for n_tile in range(num_n):
            tiles = backward.walked_tiles(n_tile * TILE_N, lengths, window, TILE_M, TILE_N)
            for m_tile in range(tiles.begin, tiles.end):
                count, rank = backward.turn_of(n_tile, m_tile, goes_up > 0, lengths, window, TILE_M, TILE_N)
                tl.store(out + n_tile * num_m + m_tile, tl.where(rank < 0, num_n, rank))
                tl.store(counts + n_tile * num_m + m_tile, count)

    @triton.jit
    def _parts(tiles, parts, begin, end, width):
        head, first, behind = backward.part_of_queries(tl.program_id(0), parts, begin, end)
        for tile in range(first, behind):
            tl.atomic_add(tiles + head * width + tile, 1)

    @triton.jit
    def _steps(out, begin, steps, front, GROUP_SIZE: tl.constexpr, FIXED_ORDER: tl.constexpr):
        walk = backward.Walk(0, 2, 2, 0, begin, 0, 0, steps, front)
        for i in range(steps):
            tile, head = backward.at_step(walk, i, GROUP_SIZE, FIXED_ORDER)
            tl.store(out + 2 * i, tile)
            tl.store(out + 2 * i + 1, head)

    @triton.jit
    def _units(out, count, order, table, seqlen, TILE_N: tl.constexpr, ALL_DOWN: tl.constexpr = False):
        for unit in range(count):
            lengths = Lengths(0, 0, seqlen, seqlen)
            work, goes_up, exists, lengths = backward.work_of_unit(unit, order, table, lengths, TILE_N, True, ALL_DOWN)
            tl.store(out + 5 * unit, work.batch)
            tl.store(out + 5 * unit + 1, work.head)
            tl.store(out + 5 * unit + 2, work.tile)
            tl.store(out + 5 * unit + 3, tl.where(goes_up, 1, 0))
            tl.store(out + 5 * unit + 4, tl.where(exists, 1, 0))

    @triton.jit
    def _padded_starts(out, starts, batch):
        for sequence in range(batch):
            tl.store(out + sequence, backward.padded_start(tl.load(starts + sequence), sequence))


WINDOWS = [(None, None), (None, 0), (None, 5), (7, None), (0, 0), (20, 3), (3, 20)]
BOTH_LENGTHS = [(64, 64), (50, 130), (130, 50), (97, 33), (1, 40), (40, 1), (0, 20), (20, 0)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", BOTH_LENGTHS)
def test_tiles_that_meet_agree_on_it(lengths, window):
    """A tile of queries counts on a turn of just those tiles of keys that walk over it."""
    tile_m, tile_n = 8, 16
    seqlen_q, seqlen_k = lengths
    num_m, num_n = -(-seqlen_q // tile_m), -(-seqlen_k // tile_n)
    of_keys = torch.zeros(num_n, 2, dtype=torch.int32)
    of_queries = torch.zeros(max(num_m, 1), 2, dtype=torch.int32)
    _ranges[(1,)](of_keys, of_queries, masks.Window(*window), seqlen_q, seqlen_k, tile_m, tile_n)
    walked = {(m, n) for n, (begin, end) in enumerate(of_keys.tolist()) for m in range(begin, end)}
    awaited = {(m, n) for m, (begin, end) in enumerate(of_queries.tolist()[:num_m]) for n in range(begin, end)}
    assert walked == awaited


@pytest.mark.parametrize("goes_up", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", BOTH_LENGTHS)
def test_every_turn_comes(lengths, window, goes_up):
    """At each tile of queries the tiles of keys that walk over it take turns 0, 1, 2 ... from the first keys to the last, or
    the other way where walks go up, or none: also of a sequence without queries, over whose first tile all walk."""
    tile_m, tile_n = 8, 16
    seqlen_q, seqlen_k = lengths
    num_m, num_n = max(1, -(-seqlen_q // tile_m)), -(-seqlen_k // tile_n)
    turns = torch.full((num_n, num_m), -1, dtype=torch.int32)
    counts = torch.full_like(turns, -1)
    _turns[(1,)](turns, counts, num_n, num_m, int(goes_up), masks.Window(*window), seqlen_q, seqlen_k, tile_m, tile_n)
    # a tile of keys that did not walk has a row of -1
    assert (turns >= 0).any(1).all()
    for column, of_column in zip(turns.T.tolist(), counts.T.tolist()):
        taken = [rank for rank in column if 0 <= rank < num_n]
        # all know how many there are, so the last knows that it is; who adds nothing is never the last
        assert {count for count in of_column if count >= 0} <= {max(1, len(taken))}
        assert (taken[::-1] if goes_up else taken) == list(range(len(taken)))


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [129, 512, 2048, 8192, 1 << 17])
@pytest.mark.parametrize("whole", [True, False])
def test_groups_of_the_fixed_order(seqlen, head_dim, causal, group_size, whole):
    """The same on every GPU: the order of sums hangs on them. Without a mask a tile has twice as many steps as tiles of its
    head run at once; causal, a group has a tile for each program, or half of the heads, and as many go down as are in it. The
    heads of a group never become more with the length."""
    from dataclasses import replace

    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem

    def groups(seqlen, num_programs):
        problem = AttentionProblem(
            2, seqlen, seqlen, 8 * group_size, 8, head_dim, head_dim, torch.bfloat16, softmax_scale=1.0,
            window=(None, 0 if causal else None), deterministic=True,
        )  # fmt: skip
        config = backward_config.configs(problem, hardware.by_name("H200"))["backward"]
        config = replace(config, num_programs=num_programs, splits=splits)
        return *backward_config.heads_in_groups(problem, config), config

    # Parts of a group are groups
    splits = 1 if whole else group_size

    group, down, config = groups(seqlen, 132)
    assert groups(seqlen, 114)[:2] == (group, down)
    assert 1 <= groups(2 * seqlen, 132)[0] <= group
    num_tiles, all_heads = -(-seqlen // config.tile_n), 16 * splits
    if causal and group_size > splits and head_dim <= 128:
        # Few enough for one group
        assert group == down == all_heads
    elif causal:
        assert group == down <= 8 * splits and (group == 8 * splits or group * num_tiles >= 132)
    else:
        steps = -(-seqlen // config.tile_m) * group_size // splits
        assert down == 0 and (group in (1, all_heads) or 2 * 132 / group <= 1.5 * steps)


@pytest.mark.parametrize("group_size", [1, 4])
def test_programs_end_together(group_size):
    """Of causal calls, each tile of keys to the program that is free first: whatever the number of heads, and of tiles."""
    import heapq
    from dataclasses import replace

    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem

    for seqlen, heads in ((8192, 5), (5000, 8), (11100, 16), (3000, 36), (3200, 12), (1500, 24), (2048, 64), (13000, 3)):
        problem = AttentionProblem(1, seqlen, seqlen, heads * group_size, heads, 128, 128, torch.bfloat16, softmax_scale=1.0,
                                   window=(None, 0))  # fmt: skip
        config = backward_config.configs(problem, hardware.by_name("H200"))["backward"]
        config = replace(config, splits=1, query_parts=1, fixed_order=False)
        group, last = backward_config.heads_in_groups(problem, config)
        num_tiles, order = -(-seqlen // 128), []
        groups = [group] * ((heads - last) // group) + [last]
        assert sum(groups) == heads
        for count in groups:
            order += [2 * group_size * (num_tiles - tile) + 5 for tile in range(num_tiles) for _head in range(count)]
        ends = [0] * 132
        for steps in order:
            heapq.heapreplace(ends, ends[0] + steps)
        assert max(ends) <= 1.15 * max(sum(order) / 132, max(order)), (seqlen, heads)


def test_calls_that_other_units_limit_have_smaller_tiles():
    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem

    def tile_m(seqlen, head_dim=64, **options):
        shape = 2, seqlen, seqlen, 8, 8, head_dim, head_dim
        problem = AttentionProblem(*shape, torch.bfloat16, softmax_scale=1.0, **options)
        return backward_config.configs(problem, hardware.by_name("H200"))["backward"].tile_m

    causal = {"window": (None, 0)}
    assert tile_m(8192, softcap=30.0, **causal) == tile_m(8192, dropout_p=0.1, **causal) == tile_m(512, softcap=30.0) == 64
    assert tile_m(8192, softcap=30.0) == tile_m(8192, **causal) == 128 and tile_m(8192, 128, softcap=30.0, **causal) == 64


def test_few_rows_of_the_last_tile_have_smaller_tiles():
    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem

    def queries(seqlen, head_dim=64, **options):
        problem = AttentionProblem(4, seqlen, 512, 8, 8, head_dim, head_dim, torch.bfloat16, softmax_scale=0.1, **options)
        return backward_config.configs(problem, hardware.by_name("H200"))["backward"].tile_m

    assert {queries(n) for n in (50, 64, 129, 192, 257, 700)} == {64} and {queries(n) for n in (65, 193, 900, 2048)} == {128}
    assert queries(300, window=(None, 0)) == 64 and queries(257, 128) == 64
    # As many of packed sequences as are empty on average
    packed = [queries(512, total_q=4 * mean, total_k=4 * mean) for mean in (64, 256, 500)]
    assert packed == [64, 64, 128]


def config_of(batch, seqlen, heads, heads_kv, head_dim=128, causal=False, **options):
    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem

    shape = batch, seqlen, options.pop("seqlen_k", seqlen), heads, heads_kv, head_dim, head_dim
    problem = AttentionProblem(*shape, torch.bfloat16, softmax_scale=1.0, window=(None, 0 if causal else None), **options)
    return backward_config.configs(problem, hardware.by_name("H200"))["backward"]


def test_parts_of_groups():
    """Where tiles of keys are too few for the programs, or the longest walk would end last."""
    assert config_of(1, 128, 32, 8).splits == 4 and config_of(4, 8192, 32, 8).splits == 1
    assert config_of(1, 8192, 8, 1).splits > 1 and config_of(1, 4096, 28, 4, causal=True).splits == 7
    assert config_of(1, 2048, 32, 8, causal=True).splits == 2 and config_of(2, 4096, 32, 8, causal=True).splits == 1
    # As few as give each program some tiles of keys, of packed calls
    packed = [config_of(4, 2048, 32, 8, total_q=4 * mean, total_k=4 * mean).splits for mean in (128, 2048)]
    assert packed == [4, 1]


def test_the_backward_that_should_end_first_does():
    """Of parts of groups and orders of sums that were measured, in backward_times.json, mostly the fastest is taken."""
    regrets = []
    for *shape, head_dim, causal, times in json.loads(TIMES.read_text())["calls"]:
        batch, seqlen_q, seqlen_k, heads, heads_kv = shape
        config = config_of(batch, seqlen_q, heads, heads_kv, head_dim, causal, seqlen_k=seqlen_k)
        taken = f"{config.splits}{' in order' if config.fixed_order else ''}"
        if taken in times and config.query_parts == 1:
            regrets.append((times[taken] / min(times.values()), shape))
    assert len(regrets) >= 60
    assert math.prod(regret for regret, _shape in regrets) ** (1 / len(regrets)) <= 1.01
    assert max(regrets)[0] <= 1.09, max(regrets)


def test_every_call_has_a_backward():
    """Whatever the lengths, heads, head dims, window and options; a deterministic one the same on a GPU of another size."""
    import random
    from dataclasses import replace

    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem

    draw, h200 = random.Random(0), hardware.by_name("H200")
    windows = [(None, None), (None, 0), (100, 0), (100, 50), (None, 30), (2000, None), (0, 0), (None, -5), (-3, 10)]
    for _ in range(1000):
        batch, heads_kv, group_size = draw.choice((0, 1, 2, 17)), draw.choice((1, 2, 3, 16)), draw.choice((1, 2, 3, 8, 64))
        queries, keys = (draw.choice((0, 1, 77, 128, 500, 3000, 100_000)) for _ in range(2))
        dims = (draw.choice((8, 40, 64, 80, 128, 192, 256)) for _ in range(2))
        options = {"total_q": batch * queries // 2, "total_k": batch * keys // 2} if draw.random() < 0.25 else {}
        problem = AttentionProblem(
            batch, queries, keys, heads_kv * group_size, heads_kv, *dims, torch.bfloat16, softmax_scale=0.1,
            window=draw.choice(windows), softcap=draw.choice((0.0, 30.0)), deterministic=draw.random() < 0.3, **options,
        )  # fmt: skip
        if backward_config.refuses(problem, h200):
            continue
        found, other = (backward_config.configs(problem, replace(h200, num_sms=n))["backward"] for n in (132, 20))
        assert group_size % found.splits == 0 and found.query_parts >= 1
        if problem.deterministic:
            assert replace(other, num_programs=132) == found
        if batch and queries and keys:
            group, last = backward_config.heads_in_groups(problem, found)
            assert group >= 0 and last >= 0
            if problem.deterministic:
                assert backward_config.heads_in_groups(problem, other) == (group, last)
                assert backward_config.sorted_sequences(problem, other) == backward_config.sorted_sequences(problem, found)


def test_whose_sequences_are_sorted():
    """Those of long walks, where programs have several, of not too many sequences."""
    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem

    def places(batch, total, heads, heads_kv):
        shape = batch, 2000, 2000, heads, heads_kv, 128, 128
        problem = AttentionProblem(*shape, torch.bfloat16, softmax_scale=1.0, total_q=total, total_k=total)
        return backward_config.sorted_sequences(problem, backward_config.CONFIGS[128])

    assert places(16, 16384, 32, 8) == 16 and places(17, 16384, 32, 8) == 32 and places(128, 65536, 32, 8) == 128
    assert {places(1, 16384, 32, 8), places(129, 65536, 32, 8), places(16, 16384, 8, 8), places(4, 1000, 32, 8)} == {0}


def test_parts_of_queries():
    """Where tiles of keys are too few for the programs, and never so many that a part has no tile of queries."""
    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem

    def parts(batch, seqlen_q, seqlen_k, heads, heads_kv=None, **options):
        shape = batch, seqlen_q, seqlen_k, heads, heads_kv or heads, 64, 64
        problem = AttentionProblem(*shape, torch.bfloat16, softmax_scale=1.0, **options)
        config = backward_config.configs(problem, hardware.by_name("H200"))["backward"]
        assert config.parts == config.splits * config.query_parts
        assert config.query_parts <= max(1, -(-seqlen_q // config.tile_m))
        return config.query_parts

    assert parts(2, 4096, 77, 10) == 6 and parts(1, 4096, 77, 1) == 16 and parts(1, 70, 77, 1) <= 2
    # The longest walk of a causal call is twice the mean
    causal = {"window": (None, 0)}
    assert parts(1, 4096, 4096, 4, **causal) == 2 and {parts(1, 4096, 4096, n, **causal) for n in (8, 16)} == {1}
    assert parts(1, 4096, 4096, 4, deterministic=True, **causal) == parts(1, 4096, 4096, 4, window=(511, 0)) == 1
    # They have enough, have none, a mask leaves few of them, or a program has several heads (268 tiles, 8 of them)
    assert {parts(8, 1024, 1024, 16), parts(1, 0, 77, 1), parts(2, 4096, 77, 10, window=(None, 0)), parts(1, 4096, 4096, 8, 1),
            parts(4, 300, 300, 1, total_q=1200, total_k=1200), parts(67, 4096, 512, 8, 1)} == {1}  # fmt: skip


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize("end", [6, 7, 12])
def test_parts_of_queries_have_each_tile_once(parts, end):
    """Those that get none of a causal walk have the hidden one before it."""
    tiles = torch.zeros(2, end, dtype=torch.int32)
    _parts[(2 * parts,)](tiles, parts, 5, end, end)
    assert (tiles[:, 5:] == 1).all() and not tiles[:, :4].any()
    assert (tiles[:, 4] == max(0, parts - (end - 5))).all()


@pytest.mark.parametrize("all_down", [False, True])
@pytest.mark.parametrize(("packed", "is_sorted"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("tail_heads", [0, 1, 2, 6])
def test_who_is_waited_for_has_begun(tail_heads, packed, is_sorted, all_down):
    """In a fixed order each tile of keys comes once, after those whose turns are before its own; the last heads go down, or
    all."""
    tile, heads = 16, 3
    lengths = [40, 5, 0, 64, 33] if packed else [100, 100]
    num_tiles = [-(-length // tile) for length in lengths]
    table, order = None, (num_tiles[0], heads, heads * len(lengths), 2, tail_heads)
    if packed:
        starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
        most = sum(num_tiles) + len(lengths)
        table = torch.zeros(schedule.table_size(most, len(lengths)), dtype=torch.int32)
        packing = Packing(starts, starts, None, None)
        schedule.plan_packed[(1,)](table, packing, (), (), None, len(lengths), most, 0, 0, heads, TILE_M=tile, BLOCK=32,
                                   SORTED=8 * is_sorted)  # fmt: skip
        order = (sum(num_tiles), heads, heads * len(lengths), 64 * tail_heads, 1)
    units = sum(num_tiles) * heads
    out = torch.full((units + 2, 5), -1, dtype=torch.int32)
    _units[(1,)](out, units + 2, schedule.Order(*order), table, lengths[0], tile, all_down)
    assert out[:, 4].tolist() == [1] * units + [0, 0]
    taken = {}
    for batch, head, n_tile, goes_up, _exists in out[:units].tolist():
        walks = taken.setdefault((batch, head), ([], set()))
        walks[0].append(n_tile)
        walks[1].add(goes_up)
    assert len(taken) == heads * sum(n > 0 for n in num_tiles)
    for (batch, _head), (tiles, directions) in taken.items():
        (goes_up,) = directions
        assert tiles == list(range(num_tiles[batch]))[:: -1 if goes_up else 1]
    down = [name for name, (_tiles, directions) in taken.items() if directions == {0}]
    if all_down:
        assert len(down) == len(taken)
    elif packed and tail_heads:
        order = [3, 0, 4, 1] if is_sorted else list(range(len(lengths)))
        assert (order[-1], heads - 1) in down and {batch for batch, _head in down} <= set(order[::-1][::2])
    elif not packed:
        assert sorted(down) == sorted(taken)[len(taken) - tail_heads :]


@pytest.mark.parametrize("group_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 7), (3, 4), (5, 12)])
def test_a_walk_has_each_tile_of_each_head_once(begin, end, group_size):
    """Wherever it begins, and heads of a tile always follow each other."""
    steps = (end - begin) * group_size
    heads = range(2 * group_size, 3 * group_size)
    for front in range(begin, end):
        out = torch.full((steps, 2), -1, dtype=torch.int32)
        _steps[(1,)](out, begin, steps, front, group_size, False)
        tiles = list(range(begin, end)) if group_size == 1 else [*range(front, begin - 1, -1), *range(end - 1, front, -1)]
        assert out.tolist() == [[tile, head] for tile in tiles for head in heads]


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("goes_up", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 7), (3, 4), (5, 12)])
def test_a_walk_in_a_fixed_order(begin, end, goes_up, group_size):
    """Up from its first tile of queries, or down from its last."""
    steps = (end - begin) * group_size
    out = torch.full((steps, 2), -1, dtype=torch.int32)
    _steps[(1,)](out, begin, steps, begin if goes_up else ~(end - 1), group_size, True)
    tiles = list(range(begin, end))[:: 1 if goes_up else -1]
    assert out.tolist() == [[tile, head] for tile in tiles for head in range(2 * group_size, 3 * group_size)]


def test_padded_sequences_do_not_meet():
    """Among the row statistics each sequence, also an empty one, has a whole number of tiles of its own."""
    multiple = backward.ROW_MULTIPLE.value
    lengths = torch.tensor([0, 1, 127, 128, 129, 0, 0, 300, 5])
    starts = torch.cumsum(lengths, 0) - lengths
    out = torch.zeros(len(lengths), dtype=torch.int32)
    _padded_starts[(1,)](out, starts.to(torch.int32), len(lengths))
    ends = [start + max(1, -(-length // multiple)) * multiple for start, length in zip(out.tolist(), lengths.tolist())]
    last = int(lengths.sum()) + multiple * len(lengths)
    assert all(start % multiple == 0 for start in out.tolist())
    assert all(end <= start for end, start in zip(ends, [*out.tolist()[1:], -(-last // multiple) * multiple]))


def as_added(x, tile_m, sum_columns):
    """Rows of dq in the order of memory in which the threads of a partition add them: by the accumulators of a wgmma.

    Pieces of 64 rows and 64 columns, the last one of a row of fewer where sum_columns are; or of tiles of 32 queries,
    transposed, of 64 columns and 32 rows.
    """
    size = min(tile_m, 64)
    thread, number = torch.arange(128)[:, None], torch.arange(size // 2)
    row = thread // 32 * 16 + number // 2 % 2 * 8 + thread % 32 // 4
    col = number // 4 * 8 + thread % 4 * 2 + number % 2
    if size < 64:
        row, col = col, row
    # four numbers of each thread, then the next four
    place = number // 4 * 512 + thread * 4 + number % 4
    memory = torch.empty(x.shape[0] // size, x.shape[1] // 64, size * 64)
    memory[:, :, place] = x.view(x.shape[0] // size, size, -1, 64).transpose(1, 2)[:, :, row, col]
    return memory.flatten(1)[:, : size * sum_columns].flatten()


@pytest.mark.parametrize("tile_m", [32, 64])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 160, 256])
def test_dq_comes_out_of_pieces(head_dim, packed, tile_m):
    """What is added in the order of registers is put in rows: batched, and packed with an empty sequence."""
    heads, lengths = 2, [100, 0, 130] if packed else [100, 100]
    block_d = triton.next_power_of_2(head_dim)
    multiple = backward.ROW_MULTIPLE.value
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    if packed:
        padded_rows = -(-(starts[-1] + multiple * len(lengths)) // multiple) * multiple
        padded = [(start + i * multiple) // multiple * multiple for i, start in enumerate(starts[:-1])]
    else:
        padded_rows, padded = multiple, [0, 0]
    expected = torch.randn(starts[-1], heads, head_dim)
    sums = torch.full((1 if packed else len(lengths), heads, padded_rows, block_d), float("nan"))
    for i, (start, length, begin) in enumerate(zip(starts, lengths, padded)):
        sums[0 if packed else i, :, begin : begin + length, :head_dim] = expected[start : start + length].transpose(0, 1) / 2
    dq = torch.zeros(expected.shape if packed else (len(lengths), lengths[0], heads, head_dim))
    cu_seqlens = torch.tensor(starts, dtype=torch.int32) if packed else None
    num_tiles, packing = padded_rows // tile_m, Packing(cu_seqlens, cu_seqlens, None, None)
    sum_columns = backward.sum_columns(live_columns(head_dim, block_d), tile_m)
    dq_sum = torch.cat([as_added(x, tile_m, sum_columns) for x in sums.flatten(0, 1)])
    backward.backward_convert[(num_tiles * heads * sums.shape[0],)](
        dq_sum, rows_of(dq), 2.0, packing, None, len(lengths), lengths[0], padded_rows, num_tiles, heads, TILE_M=tile_m,
        TILE_N=128, HEAD_DIM=head_dim, SUM_D=sum_columns, BLOCK_D=block_d,
    )  # fmt: skip
    torch.testing.assert_close(dq.view(expected.shape), expected)


def test_dq_of_one_tile_of_keys_is_stored():
    """Nothing is added to it then, nor cleared before: each row must be written, so each query must see a key."""
    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem

    def stored(seqlen_q, seqlen_k, head_dim=64, **options):
        shape = 2, seqlen_q, seqlen_k, 4, 4, head_dim, head_dim
        problem = AttentionProblem(*shape, torch.bfloat16, softmax_scale=0.1, **options)
        return backward_config.stores_dq(problem, backward_config.configs(problem, hardware.by_name("H200"))["backward"])

    causal = {"window": (None, 0)}
    everything = stored(4096, 77), stored(50, 128, 128), stored(64, 64, 256), stored(77, 77, **causal), stored(50, 77, **causal)
    assert {*everything, stored(77, 50, window=(None, 27))} == {"all"}
    nothing = stored(50, 129), stored(50, 65, 256), stored(78, 77, **causal), stored(77, 50, window=(None, 26))
    assert {*nothing, stored(64, 64, window=(3, 0)), stored(300, 300, total_q=600, total_k=514)} == {"no"}
    assert stored(300, 300, total_q=600, total_k=512) == stored(64, 64, total_q=100, total_k=100, **causal) == "some"
    fixed = {"deterministic": True}
    window = {"window": (3, 0), **fixed}
    assert {stored(50, 129, **fixed), stored(50, 129, 128, **window), stored(64, 64, **window)} == {"last"}
    assert stored(300, 300, total_q=600, total_k=512, **fixed) == "last" and stored(50, 128, 128, **fixed) == "all"
    assert stored(50, 65, 256, **fixed) == stored(50, 129, 192, **fixed) == "no"


def test_the_order_is_fixed_where_that_takes_less_time():
    """Without deterministic=True too: as the estimate says, and of packed calls and windows what has been measured."""
    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem

    def fixed(batch, seqlen, heads, head_dim, heads_kv=None, **options):
        problem = AttentionProblem(batch, seqlen, seqlen, heads, heads_kv or heads, head_dim, head_dim, torch.bfloat16,
                                   softmax_scale=0.1, **options)  # fmt: skip
        config = backward_config.configs(problem, hardware.by_name("H200"))["backward"]
        found = config.fixed_order
        assert not found or config.dscores_stages <= 2
        assert not found or options.get("deterministic") or backward_config.stores_dq(problem, config) == "last"
        return found

    causal = {"window": (None, 0)}
    assert fixed(1, 16384, 32, 64) and fixed(8, 2048, 16, 128) and fixed(4, 4096, 16, 96, **causal)
    assert fixed(32, 512, 16, 128, total_q=32 * 512, total_k=32 * 512)
    assert fixed(4, 4096, 16, 128, **causal) and not fixed(4, 4096, 16, 128)
    assert not fixed(2, 8192, 16, 128, **causal) and not fixed(2, 1024, 16, 128)
    assert not fixed(8, 2048, 32, 64, softcap=20.0) and not fixed(8, 2048, 32, 64, dropout_p=0.1)
    assert not fixed(1, 16384, 32, 64, window=(1023, 0)) and not fixed(8, 2048, 16, 192) and not fixed(64, 128, 16, 64)
    assert fixed(1, 16384, 16, 128, window=(1023, 0)) and not fixed(1, 16384, 16, 128, window=(4095, 0))
    # Where heads share keys, causal calls and narrow windows
    assert fixed(8, 2048, 32, 64, 8, **causal) and not fixed(8, 2048, 32, 64, 8)
    assert fixed(8, 2048, 32, 64, 8, deterministic=True)
    assert fixed(2, 8192, 64, 64, 8, window=(127, 0)) and not fixed(2, 8192, 64, 64, 8, window=(1023, 0))
    assert fixed(16, 512, 32, 128, 8, **causal) and not fixed(2, 4096, 32, 128, 8, **causal) and not fixed(4, 2048, 32, 128, 8)


@pytest.mark.parametrize("right", [backward.UNBOUNDED, 0, 3])
def test_rows_of_dq_are_summed_or_stored(right):
    """Sequences of no keys, of one tile, of more, and with queries that see none; the kernels before and after leave alone what
    is stored."""
    lengths_q, lengths_k = [5, 40, 130, 7, 0, 33], [5, 0, 40, 130, 4, 32]
    heads, dim, multiple = 2, 16, backward.ROW_MULTIPLE.value
    starts_q, starts_k = ([sum(x[:i]) for i in range(len(x) + 1)] for x in (lengths_q, lengths_k))
    packing = Packing(*(torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k)), None, None)
    alone = [0 < k <= 128 and k - q + right >= 0 for q, k in zip(lengths_q, lengths_k)]
    assert any(alone) and not all(alone)
    padded_rows = -(-(starts_q[-1] + multiple * len(lengths_q)) // multiple) * multiple
    out, lse = torch.randn(starts_q[-1], heads, dim), torch.randn(heads, starts_q[-1])
    dq_sum = torch.full((heads, padded_rows, dim), 7.0)
    statistics = torch.empty(2, heads * padded_rows)
    tiles = padded_rows // 32
    backward.backward_rows[(tiles * heads,)](
        rows_of(out), rows_of(out), None, rows_of(lse, lse=True), *statistics, dq_sum, torch.empty(1, dtype=torch.int32),
        None, masks.Window(None, None), packing, right, len(lengths_q), max(lengths_q), max(lengths_k), padded_rows, tiles,
        heads, 1, 1.0, TILE_M=32, TILE_N=128, QUERY_TILE=64, SUM_D=dim, HEAD_DIM=dim, HEAD_DIM_V=dim,
        BLOCK_D=dim, BLOCK_DV=dim, WIDE=False,
    )  # fmt: skip
    dq = torch.full_like(out, 7.0)
    tiles = padded_rows // 64
    backward.backward_convert[(tiles * heads,)](
        dq_sum, rows_of(dq), 1.0, packing, right, len(lengths_q), max(lengths_q), padded_rows, tiles, heads,
        TILE_M=64, TILE_N=128, HEAD_DIM=dim, SUM_D=dim, BLOCK_D=64,
    )  # fmt: skip
    for i, (begin, length) in enumerate(zip(starts_q, lengths_q)):
        row = (begin + i * multiple) // multiple * multiple
        expected = 7.0 if alone[i] else 0.0
        assert (dq_sum[:, row : row + length] == expected).all()
        assert (dq[begin : begin + length] == expected).all()


@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (40, -30)])
def test_tiles_of_queries_that_see_no_key_have_dq_of_zeros(window, packed, dim):
    """In a fixed order, where nothing else writes them; all others stay as they are."""
    lengths_q, lengths_k = ([200, 70, 64, 0, 33], [3, 70, 0, 9, 200]) if packed else ([200, 200], [100, 100])
    heads, tile, block = 2, 64, triton.next_power_of_2(dim)
    starts_q, starts_k = ([sum(x[:i]) for i in range(len(x) + 1)] for x in (lengths_q, lengths_k))
    packing = Packing(*(torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k)), None, None) if packed else (
        Packing(None, None, None, None))  # fmt: skip
    multiple = backward.ROW_MULTIPLE.value
    padded_rows = -(-(starts_q[-1] + multiple * len(lengths_q) if packed else 200) // multiple) * multiple
    shape = (starts_q[-1], heads, dim) if packed else (2, 200, heads, dim)
    out, lse = torch.randn(shape), torch.randn((heads, starts_q[-1]) if packed else (2, heads, 200))
    dq = torch.full(shape, 7.0)
    tiles, sequences = padded_rows // 32, 1 if packed else 2
    statistics = torch.empty(2, sequences * heads * padded_rows)
    backward.backward_rows[(tiles * heads * sequences,)](
        rows_of(out), rows_of(out), None, rows_of(lse, lse=True), *statistics, None, torch.empty(1, dtype=torch.int32),
        rows_of(dq), masks.Window(*window), packing, None, len(lengths_q), max(lengths_q), max(lengths_k), padded_rows, tiles,
        heads, 1, 1.0, TILE_M=32, TILE_N=128, QUERY_TILE=tile, SUM_D=dim, HEAD_DIM=dim, HEAD_DIM_V=dim, BLOCK_D=block,
        BLOCK_DV=block, WIDE=False,
    )  # fmt: skip
    rows = dq if packed else dq.flatten(0, 1)
    left, right = window
    for begin, seqlen_q, seqlen_k in zip(starts_q, lengths_q, lengths_k):
        for first in range(0, seqlen_q, tile):
            shift = seqlen_k - seqlen_q
            seen = any(
                (left is None or key >= row + shift - left) and (right is None or key <= row + shift + right)
                for row in range(first, min(first + tile, seqlen_q)) for key in range(seqlen_k)
            )  # fmt: skip
            assert (rows[begin + first : begin + min(first + tile, seqlen_q)] == (7.0 if seen else 0.0)).all()


@pytest.mark.parametrize(("rows", "splits", "dim"), [(70, 4, 24), (1, 7, 128)])
def test_parts_are_added(rows, splits, dim):
    from flashtile.device import groups

    parts, out = torch.randn(rows, splits, dim), torch.full((rows, dim), float("nan"))
    groups.add_parts[(-(-rows // 32),)](parts, out, rows, SPLITS=splits, ROWS=32, DIM=dim, BLOCK_D=128)
    torch.testing.assert_close(out, parts.sum(1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_all_counters_are_cleared_and_nothing_else(deterministic):
    """Also two more than tiles of 32 queries, and those of more key-value heads than a program clears."""
    from dataclasses import replace

    from flashtile.hopper import backward_config
    from flashtile.problem import AttentionProblem, Operands

    batch, seqlen, heads, heads_kv, dim, dim_v = 5, 33, 64, 32, 160, 16
    problem = AttentionProblem(
        batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=heads, num_heads_kv=heads_kv, head_dim=dim, head_dim_v=dim_v,
        dtype=torch.float32, softmax_scale=1.0, deterministic=deterministic,
    )  # fmt: skip
    config = replace(backward_config.configs(problem, hardware.by_name("H200"))["backward"], splits=1,
                     fixed_order=deterministic)  # fmt: skip
    assert config.tile_m == 32
    count, rows = backward.num_counters(problem, config), backward.padded_rows(problem) * batch * heads
    assert count > backward.CLEARED.value
    counters = torch.ones(count + 300, dtype=torch.int32)
    out, lse = torch.randn(batch, seqlen, heads, dim_v), torch.randn(problem.lse_shape)
    empty = [None] * (len(backward.Call._fields) - 1)
    call = backward.Call(Operands(out, out, out), *empty)._replace(
        out=out, dout=out, lse=lse, neg_lse=torch.empty(rows), neg_delta=torch.empty(rows), dq_sum=torch.empty(rows * 256),
        counters=counters,
    )  # fmt: skip

    def launch(kernel, grid, arguments, constexprs, **options):
        launch_now(kernel, grid, arguments, constexprs | {"CHAINED": False}, **options)

    backward.launch_rows(problem, config, call, launch)
    assert not counters[:count].any() and counters[count:].all()


def test_what_tma_cannot_read_is_copied():
    """Also a contiguous tensor whose address alone is wrong, such as a slice of a gradient of several outputs."""
    x = torch.randn(2, 8, 4, 64).half()
    assert backward.tma_ready(x) is x
    shifted = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    for given in (shifted, x[:, :, :1].expand(x.shape), x.transpose(1, 2)[..., 1:57]):
        ready = backward.tma_ready(given)
        assert ready.data_ptr() % 16 == 0 and ready.is_contiguous() and torch.equal(ready, given)
        assert backward.tma_ready(ready) is ready


def test_one_packed_row_has_a_descriptor():
    """The stride of a dim of one element means nothing, and need not be one that TMA takes."""
    from flashtile.hopper.arguments import packed_descriptor

    x = torch.empty(256, dtype=torch.bfloat16).as_strided((1, 4, 64), (3, 64, 1))
    assert all(stride % 8 == 0 for stride in packed_descriptor(x, 64, 64).strides[:-1])
