"""Arithmetic of tiles that no GPU is needed for."""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashtile import hardware
from flashtile.problem import AttentionProblem
from flashtile.tiles import (
    HOPPER,
    PORTABLE,
    RESIDENT_KEYS,
    TileConfig,
    blocks_of,
    box_columns,
    column_boxes,
    cuts_keys,
    decode_blocks_of,
    feasible,
    hopper_config,
    live_columns,
    on_gpu,
    padded_dim,
    resident_config,
    select,
)

TIMES = Path(__file__).parent / "forward_times.json"


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_live_columns_hold_the_head_dim_in_two_products(head_dim):
    """All of a block, or its left half and a power of two of the right one, of 16 or more: what products can take."""
    block = padded_dim(head_dim, 2)
    live = live_columns(head_dim, block)
    assert head_dim <= live <= block
    rest = live - block // 2
    assert live == block or rest >= 16 and rest & (rest - 1) == 0
    # not twice as many of the right half as there are, but for 16
    assert live == block or rest == 16 or rest < 2 * (head_dim - block // 2)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_two_blocks_of_columns_hold_the_head_dim_with_fewer_zeros(head_dim, narrow):
    padded = padded_dim(head_dim, 2, narrow)
    block, rest = blocks_of(head_dim, 2, narrow)
    if rest == 0:
        assert block == padded
    else:
        assert block < head_dim <= block + rest < padded
        # powers of two, and wide enough for a product by wgmma
        assert block & (block - 1) == rest & (rest - 1) == 0 and rest >= (32 if narrow else 64)
    assert (rest > 0) == (128 < head_dim <= 192 or narrow and 64 < head_dim <= 96)
    assert blocks_of(head_dim, 4, narrow) == blocks_of(head_dim, 4, False)
    # Over a cache
    rows = 16 if narrow else 64
    assert decode_blocks_of(head_dim, rows) == (
        (padded_dim(head_dim, 2), 0) if head_dim <= 64 or 80 < head_dim <= 96 else blocks_of(head_dim, 2, narrow)
    )
    # of several heads
    expected = (padded_dim(head_dim, 2), 0) if head_dim <= 64 else blocks_of(head_dim, 2, narrow=True)
    assert decode_blocks_of(head_dim, 16, heads=4) == expected


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_no_box_of_64_columns_is_loaded_for_zeros_alone(head_dim):
    block = padded_dim(head_dim, 2)
    live = live_columns(head_dim, block)
    columns = box_columns(live, block)
    loaded = block if columns == block else -(-live // columns) * columns
    assert live <= loaded < head_dim + 64


def problem(seqlen, head_dim, head_dim_v):
    return AttentionProblem(1, seqlen, seqlen, 8, 8, head_dim, head_dim_v, torch.bfloat16, softmax_scale=0.1)


def test_columns_of_q_and_k_lie_apart_where_larger_tiles_fit_then():
    def is_apart(head_dim, head_dim_v):
        return hopper_config(problem(4096, head_dim, head_dim_v), hardware.by_name("H200")).rest_apart

    assert is_apart(152, 104) and is_apart(192, 128)
    few, many = (hopper_config(replace(problem(n, 192, 128), window=(None, 0)), hardware.by_name("H200")) for n in (1200, 1400))
    assert (few.tile_n, few.lazy, few.rest_apart) == (64, False, False) and many.rest_apart
    assert not any(is_apart(*dims) for dims in ((144, 128), (192, 64), (192, 136), (200, 128), (128, 128)))


def tile(seqlen, head_dim, batch=64, **options):
    config = hopper_config(replace(problem(seqlen, head_dim, head_dim), batch=batch, **options), hardware.by_name("H200"))
    return config.tile_m, config.tile_n


def test_tiles_of_the_hopper_forward_follow_the_keys_that_a_query_sees():
    causal = {"window": (None, 0)}
    short, middle, wide, four = (128, 64), (128, 128), (192, 128), (256, 64)
    # 768 are whole tiles of 192
    assert [tile(n, 64) for n in (640, 768, 1024, 4096)] == [middle, wide, four, wide]
    assert [tile(n, 64, **causal) for n in (300, 1024, 4096, 8192)] == [short, middle, four, wide]
    assert [tile(16384, 64, window=(left, 0)) for left in (63, 511, 1023, 4095)] == [short, middle, middle, wide]
    assert [tile(n, 128, **causal) for n in (384, 512)] == [short, middle] and tile(128, 128) == middle
    # Of packed sequences neither the mean alone nor the longest counts: most queries are those of long ones
    few, many = ({"total_q": 64 * mean, "total_k": 64 * mean} for mean in (10, 1188))
    assert tile(1024, 128, **few, **causal) == short
    assert tile(8192, 64, **many, **causal) == four and tile(8192, 64, **many) == wide


def measured_calls():
    """(problem, {(tile_m, tile_n, parts): us}) of what was measured on an H200."""
    for batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, causal, left, times in json.loads(TIMES.read_text())["calls"]:
        packed = {}
        if isinstance(batch, list):
            packed = {"total_q": sum(batch), "total_k": sum(batch), "same_lengths": True}
            batch = len(batch)
        call = few_queries(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, window=(left, 0 if causal else None), **packed)
        yield call, {tuple(map(int, name.split("x"))): us for name, us in times.items()}


def test_tiles_of_the_hopper_forward_are_those_that_were_fast():
    """Time of the choice of today over that of the fastest; where it was not tried nothing is known."""
    slower, unknown = [], 0
    for call, times in measured_calls():
        config = hopper_config(call, hardware.by_name("H200"))
        us = times.get((config.tile_m, config.tile_n, config.key_parts)) if config.heads == 1 else None
        unknown += us is None
        slower += [us / min(times.values())] if us else []
    assert unknown <= 0.06 * len(slower) and max(slower) < 1.11
    assert math.exp(sum(map(math.log, slower)) / len(slower)) < 1.008


def test_every_call_has_tiles():
    """Whatever its lengths and window are: queries that see no key, windows wider than the keys, packed calls."""
    draw = random.Random(0)
    windows = (None, None), (None, 0), (0, 0), (5000, 0), (300, None), (100, 50), (None, 70), (7, 4000)
    for _ in range(3000):
        batch, seqlen_q, seqlen_k = draw.choice((1, 2, 33)), draw.randint(1, 9000), draw.randint(1, 9000)
        (heads, heads_kv), head_dim = draw.choice(((8, 8), (32, 8), (4, 1))), draw.choice((64, 128, 192, 256))
        packed = {}
        if draw.random() < 0.3:
            packed = {"total_q": draw.randint(0, batch * seqlen_q), "total_k": draw.randint(0, batch * seqlen_k)}
        call = few_queries(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, window=draw.choice(windows), **packed)
        config = hopper_config(call, hardware.by_name("H200"))
        assert config.key_parts >= 1 and config.heads in (1, call.group_size), call


def test_tiles_chosen_by_mma_sync_are_not_those_of_other_tensor_cores():
    def forward(name, sm):
        device = replace(hardware.by_name(name), name="another", arch=f"sm_{sm}")
        return select(PORTABLE, "forward", problem(2048, 256, 256), device).config

    assert forward("B200", 100) == forward("B200", 103) == TileConfig(64, 64, 8, 2)
    assert forward("A100", 80) == forward("RTX 4090", 120) == TileConfig(64, 32, 4, 2)


def test_tiles_of_dropout_are_smaller_where_ptxas_would_give_up():
    """And those that only narrow blocks leave room for are not for dropout, whose blocks are wide."""

    def tile(kernel, head_dim, **options):
        return select(PORTABLE, kernel, replace(problem(2048, head_dim, head_dim), **options), hardware.by_name("A100")).config

    assert (tile("dkdv", 64), tile("dkdv", 64, dropout_p=0.1)) == (TileConfig(32, 128, 4, 2), TileConfig(16, 128, 4, 3))
    assert (tile("dkdv", 128), tile("dkdv", 96, dropout_p=0.1)) == (TileConfig(64, 64, 4, 2), TileConfig(32, 64, 4, 3))
    assert (tile("dq", 96), tile("dq", 96, dropout_p=0.1)) == (TileConfig(128, 32, 4, 3), TileConfig(128, 32, 4, 2))


@pytest.mark.parametrize(("name", "narrow"), [("A100", True), ("RTX 4090", True), ("H200", False), ("B200", False)])
def test_operands_are_narrow_where_mma_sync_takes_all_products(name, narrow):
    """And a stage less of the tiles that stream is in shared memory, so that one of 3 stages fits in 99 KiB."""
    device, call = hardware.by_name(name), problem(2048, 256, 256)
    assert on_gpu("dq", TileConfig(64, 32, 4, 2), call, device).narrow == narrow
    assert not on_gpu("dq", TileConfig(64, 32, 4, 2), replace(call, dropout_p=0.1), device).narrow
    assert on_gpu("forward", TileConfig(32, 64, 2, 2), call, device).narrow
    assert feasible("dq", TileConfig(32, 32, 4, 3), call, replace(device, smem_bytes=99 << 10)) == narrow


def test_the_last_heads_of_many_causal_tiles_end_a_portable_call():
    def tail(kernel, seqlen, heads, heads_kv=None, **options):
        shape = 2, seqlen, seqlen, heads, heads_kv or heads, 128, 128
        problem = AttentionProblem(*shape, torch.bfloat16, softmax_scale=1.0, **options)
        return on_gpu(kernel, TileConfig(64, 64, 4, 3), problem, replace(hardware.by_name("H200"), num_sms=100)).tail_heads

    causal = {"window": (None, 0)}
    # 400 tiles have 16 warps a multiprocessor
    assert tail("forward", 6400, 40, **causal) == 4 and tail("dq", 256, 1000, **causal) == 100
    assert tail("dq", 192, 1000, **causal) is tail("forward", 6400, 1, **causal) is None
    assert tail("forward", 6400, 2, **causal) == 4
    # Of keys
    assert tail("dkdv", 3200, 16, 2, **causal) is None and tail("dkdv", 3200, 16, **causal) == 8
    assert tail("forward", 6400, 40) is tail("delta", 6400, 40, **causal) is None


def few_queries(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim=128, **options):
    return AttentionProblem(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim, torch.bfloat16, softmax_scale=1.0,
                            **options)  # fmt: skip


def test_few_queries_of_many_keys_go_to_the_kernel_of_caches():
    """Where tiles of 64 rows are nearly empty, or too few multiprocessors have one; on Hopper the first alone."""
    from flashtile import dispatch

    def cuts(*shape, device="A100", **options):
        problem, device = few_queries(*shape, **options), hardware.by_name(device)
        plan = dispatch.plan(problem, device, "forward")
        assert (set(plan.configs) == {"decode"}) == (cuts_keys(problem, device) and plan.tier == "portable")
        return "decode" in plan.configs

    assert cuts(1, 1, 65536, 32, 8) and cuts(128, 1, 1024, 32, 8) and cuts(1, 128, 1024, 8, 8) and cuts(1, 256, 4096, 8, 8)
    assert cuts(1, 64, 65536, 8, 8) and cuts(1, 4, 2000, 8, 8, window=(None, 0))
    assert cuts(64, 16, 1024, 12, 12) and cuts(64, 32, 4096, 12, 12) and cuts(3, 64, 2048, 16, 16) and cuts(1, 384, 3000, 8, 8)
    assert not cuts(64, 17, 1024, 12, 12) and not cuts(64, 33, 4096, 12, 12) and not cuts(4, 64, 1024, 16, 16)
    assert not cuts(1, 1, 1000, 32, 8) and not cuts(1, 512, 1024, 8, 8) and not cuts(2, 4096, 4096, 16, 16)
    assert not cuts(1, 1, 65536, 32, 8, dropout_p=0.1) and not cuts(1, 4, 65536, 8, 8, window=(100, 0))
    assert not cuts(2, 1, 65536, 32, 8, total_q=2, total_k=100000)
    assert cuts(1, 1, 65536, 32, 8, device="H200") and cuts(64, 16, 1024, 12, 12, device="H200")
    assert not cuts(1, 512, 4096, 8, 8, device="H200") and not cuts(1, 32, 16384, 32, 8, device="H200")


def test_keys_of_few_tiles_are_cut_into_parts():
    """As many parts as fill the multiprocessors; causal tiles, which are unlike, also where these all have one."""
    from flashtile import dispatch
    from flashtile.kvcache_problem import CacheProblem

    def parts(*shape, **options):
        config = hopper_config(few_queries(*shape, **options), hardware.by_name("H200"))
        return config.key_parts

    causal = {"window": (None, 0)}
    assert [parts(1, n, 32768, 8, 8) for n in (256, 512, 1024, 2048, 8192)] == [8, 4, 2, 1, 1]
    assert [parts(1, 4096, 4096, heads, heads, **causal) for heads in (4, 8, 32)] == [2, 1, 1]
    assert parts(1, 2048, 2048, 4, 4, **causal) == 3 and parts(2, 300, 4096, 4, 4, 256) == 5
    # To read the keys takes longer than the products
    assert parts(4, 64, 2048, 16, 16) == 1
    assert parts(1, 512, 32768, 8, 8, dropout_p=0.1) == 1 and parts(1, 512, 0, 8, 8) == 1
    # Few of the keys are in a window
    assert parts(1, 512, 32768, 8, 8, window=(255, 0)) == 1
    # By the mean of packed sequences; a deterministic call has the parts of 132 multiprocessors, whatever the GPU has
    assert parts(4, 512, 32768, 2, 2, total_q=2048, total_k=4 * 32768) == 4
    assert parts(1, 512, 32768, 8, 8, deterministic=True) == 4
    # Heads of a group share a tile
    shared = hopper_config(few_queries(1, 32, 16384, 32, 8), hardware.by_name("H200"))
    assert shared.heads == 4 and shared.key_parts > 4
    problem = CacheProblem(1, 512, 32768, 8, 1, 128, 128, torch.bfloat16, torch.bfloat16, page_size=64, softmax_scale=1.0)
    plan = dispatch.plan(problem, hardware.by_name("H200"), "decode")
    assert plan.tier == "hopper" and plan.configs["decode"].key_parts == 4


def test_keys_that_a_query_sees():
    call = problem(1000, 64, 64)
    assert call.mean_keys == replace(call, batch=7).mean_keys == 1000
    assert replace(call, window=(None, 0)).mean_keys == 500.5
    packed = replace(call, batch=4, seqlen_q=900, seqlen_k=1600, total_q=400, total_k=1600)
    assert packed.mean_keys == 800 and replace(packed, window=(99, 0)).mean_keys == 100
    assert replace(packed, batch=0, total_q=0, total_k=0).mean_keys == 0
    assert replace(call, seqlen_q=0).mean_keys == 1000


def test_calls_that_other_units_limit_have_two_consumers():
    assert tile(8192, 64, softcap=30.0) == tile(8192, 64, dropout_p=0.1) == (128, 128)
    assert tile(512, 64, softcap=30.0) == tile(512, 128, softcap=30.0) == tile(512, 64, dropout_p=0.1) == (128, 64)
    assert tile(512, 128, dropout_p=0.1) == (128, 64) and tile(1024, 128, dropout_p=0.1) == (128, 128)


def test_calls_of_one_wave_have_tiles_that_fill_it():
    # 88 and 64 of larger ones would leave more multiprocessors without work
    assert tile(2048, 64, batch=1) == (128, 128)
    # a second wave of 192 queries' tiles would be half empty
    assert tile(4096, 64, batch=2) == (256, 64) and tile(4096, 64, batch=8) == (192, 128)
    # Of two causal tiles a program one is as much shorter as the other is longer
    assert tile(4096, 64, batch=1, window=(None, 0)) == tile(2048, 64, batch=2, window=(None, 0)) == (128, 128)
    assert tile(3072, 64, batch=2, window=(None, 0)) == (192, 128)


def test_heads_of_a_group_share_tiles_where_these_are_fewer_then():
    def shares(*shape, **options):
        return hopper_config(few_queries(*shape, **options), hardware.by_name("H200")).heads

    # The last tile of each head has 20 rows of 128: a wave less
    assert shares(1, 404, 404, 40, 5) == shares(3, 700, 700, 16, 2) == 8
    # As many tiles, or no wave less
    assert shares(1, 512, 512, 40, 5) == shares(4, 2048, 2048, 32, 8) == shares(1, 577, 577, 32, 4) == 1
    # A diagonal that heads share hides keys of every tile
    assert shares(1, 404, 404, 40, 5, window=(None, 0)) == 1
    assert shares(13, 576, 576, 64, 16, head_dim=64, window=(None, 0)) == 4
    assert shares(1, 404, 404, 40, 5, dropout_p=0.1) == shares(1, 404, 404, 40, 5, has_alibi=True) == 1


def test_calls_without_queries_have_tiles():
    for head_dim, options in itertools.product((64, 128, 256), ({}, {"dropout_p": 0.1}, {"window": (None, 0)})):
        empty = problem(0, head_dim, head_dim)
        assert hopper_config(replace(empty, batch=0, **options), hardware.by_name("H200")).key_parts == 1
        assert hopper_config(replace(empty, seqlen_k=7, **options), hardware.by_name("H200")).key_parts == 1


def test_few_tiles_of_few_keys_go_to_the_portable_kernel():
    from flashtile import dispatch

    def tier(*shape, **options):
        return dispatch.plan(few_queries(*shape, **options), hardware.by_name("H200"), "forward").tier

    causal = {"window": (None, 0)}
    assert tier(1, 768, 768, 4, 4, **causal) == tier(1, 1024, 1024, 8, 8, head_dim=64, **causal) == "portable"
    assert tier(1, 1344, 1344, 1, 1, head_dim=80, **causal) == tier(1, 1500, 1500, 2, 2, head_dim=64, **causal) == "hopper"
    # At head dim 256 that one has long steps
    assert tier(2, 64, 64, 16, 16, head_dim=256) == "portable" and tier(10, 128, 128, 6, 1, head_dim=192) == "hopper"
    # Few of the keys are in a window
    assert tier(1, 2000, 2000, 4, 4, window=(127, 0)) == "portable"
    # Its keys can't be cut
    assert tier(1, 1500, 1500, 2, 2, dropout_p=0.1) == "portable"


def test_small_calls_of_small_head_dims_have_tiles_of_their_own():
    def rows(seqlen, head_dim, device):
        return select(PORTABLE, "forward", problem(seqlen, head_dim, head_dim), hardware.by_name(device)).config.tile_m

    assert [rows(64, 32, "H200"), rows(65, 32, "H200"), rows(64, 40, "H200"), rows(64, 32, "A100")] == [32, 64, 64, 128]
    assert [padded_dim(dim, 2, narrow=True) for dim in (24, 8, 40)] == [32, 16, 64] and padded_dim(24, 2) == 64


@pytest.mark.parametrize("config", sorted({config for row in HOPPER for config in row.configs}, key=str), ids=str)
def test_stages_of_the_hopper_forward_are_enough_for_turns(config):
    """The first consumer begins so many key tiles later than the last, and keeps the turn until then."""
    assert (config.tile_m - 64) / config.tile_n < config.num_stages


@pytest.mark.parametrize("head_dim", range(8, 129, 8))
def test_two_boxes_hold_the_columns(head_dim):
    """Powers of two from 16 to 64; none of zeros alone, and less than 32 columns too many."""
    wide, rest = column_boxes(head_dim)
    columns = wide + (rest or wide * (head_dim > wide))
    assert head_dim <= columns < head_dim + 32
    assert all(size in (0, 16, 32, 64) for size in (wide, rest)) and rest < wide
    # TMA finds the second box behind the first
    assert not rest or head_dim > wide


def test_pieces_of_keys_are_powers_of_two_that_the_last_divides():
    for keys in RESIDENT_KEYS:
        assert list(keys) == sorted(keys, reverse=True) and all(size & (size - 1) == 0 and size >= 16 for size in keys)
    assert sorted(map(sum, RESIDENT_KEYS)) == list(map(sum, RESIDENT_KEYS))


def config_of(batch, seqlen_q, seqlen_k, heads, head_dim, **options):
    problem = AttentionProblem(batch, seqlen_q, seqlen_k, heads, heads, head_dim, head_dim, torch.bfloat16, softmax_scale=0.1)
    return resident_config(replace(problem, **options), hardware.by_name("H200"))


def test_few_keys_stay_in_shared_memory():
    config = config_of(64, 257, 257, 16, 80)
    assert (config.keys, config.tile_n, config.tiles, config.programs_per_sm) == ((256, 16), 272, 5, 2)
    # Diffusion's: as many programs as run at once
    assert config_of(8, 4096, 77, 8, 40).keys == (64, 16) and config_of(8, 4096, 77, 8, 40).tiles == 8
    # A small call has a program a tile
    assert config_of(1, 197, 197, 12, 64).tiles == 1


def test_calls_that_do_not_gain_have_the_loop_over_keys():
    causal = (None, 0)
    assert not config_of(8, 273, 273, 16, 64)
    assert config_of(8, 160, 160, 16, 128) and not config_of(8, 256, 256, 16, 128) and not config_of(8, 64, 64, 16, 136)
    assert config_of(8, 192, 192, 16, 64, window=causal) and not config_of(8, 256, 256, 16, 64, window=causal)
    assert config_of(32, 256, 256, 12, 64) and config_of(32, 255, 256, 12, 64) and config_of(2, 256, 256, 12, 64)
    assert config_of(64, 256, 256, 16, 72) and config_of(64, 256, 128, 16, 64)
    for options in ({"softcap": 5.0}, {"dropout_p": 0.1}, {"has_alibi": True}, {"has_sinks": True}, {"softmax_scale": -0.1}):
        assert not config_of(8, 64, 64, 16, 64, **options)
    # Heads of a group share tiles
    assert not config_of(64, 16, 200, 32, 64, num_heads_kv=4)


def test_tiles_of_packed_calls_are_a_power_of_two():
    config = config_of(200, 200, 200, 12, 64, total_q=30000, total_k=30000)
    assert config.tiles & (config.tiles - 1) == 0 and config.queries == 64 * config.tiles
