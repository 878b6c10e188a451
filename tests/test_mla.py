"""Latent attention decode: the two forms of the definition, the kernels in the interpreter, the schedule, refusals."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mla_cases import (
    BY_NAME,
    CASES,
    MlaCase,
    check,
    check_infinite_sink,
    check_lse_without_sinks,
    check_other_lengths,
)

import flashtile
from flashtile import hardware
from flashtile.compat import flash_mla
from flashtile.device.launch import launch_now
from flashtile.mla import make_schedule, mla_decode, pack_fp8, unpack_fp8
from flashtile.mla import problem as problems
from flashtile.reference import mla, naive
from flashtile.tiles import TileConfig

ROOT = Path(__file__).resolve().parents[1]


def weights(heads, latent=512, nope=128, value=128, rope=64):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator) / shape[-1] ** 0.5

    return draw, draw(heads, nope, latent), draw(heads, latent, value)


@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_absorbed_and_unabsorbed_forms_are_equal(seqlen_q):
    """In float64, to rounding: DeepSeek's dims, a cache of pages against keys and values for each head."""
    heads, length, page = 3, 21, 8
    draw, w_key, w_value = weights(heads)
    latent, k_rope = draw(1, length, 512), draw(1, length, 64)
    q_nope, q_rope = draw(1, seqlen_q, heads, 128) * 20, draw(1, seqlen_q, heads, 64) * 20
    k, v = mla.keys_and_values(latent, k_rope, w_key, w_value)
    scale = 192**-0.5
    expected, expected_lse = naive.attention(torch.cat([q_nope, q_rope], -1), k, v, causal=True, softmax_scale=scale,
                                             return_lse=True)  # fmt: skip
    cache = torch.full((3, page, 1, 576), float("nan"), dtype=torch.float64)
    cache.view(-1, 576)[:length] = torch.cat([latent, k_rope], -1)[0]
    out, lse = mla.decode(
        mla.absorb(q_nope, q_rope, w_key), cache, block_table=torch.arange(3, dtype=torch.int32)[None],
        cache_seqlens=torch.tensor([length], dtype=torch.int32), softmax_scale=scale, causal=True,
    )  # fmt: skip
    torch.testing.assert_close(mla.expand(out, w_value), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-14)


def test_prefill_in_the_unabsorbed_form():
    """head_dim 192 and head_dim_v 128 through flashtile.attention, forward and backward."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(1, 40, 2, dim, dtype=torch.float64, generator=generator, requires_grad=True) for dim in (192, 192, 128)
    )
    results = []
    for attend in (flashtile.attention, naive.attention):
        out = attend(q, k, v, causal=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cpu_tensors(case):
    check(case, torch.bfloat16)


def needs_interpreter():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_portable_kernel(case, monkeypatch, poisoned):
    needs_interpreter()
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    check(case, torch.float16)


@pytest.mark.parametrize("tier", ["portable", "reference"])
@pytest.mark.parametrize("name", ["sinks", "sinks_split"])
def test_infinite_sink(tier, name, monkeypatch, poisoned):
    needs_interpreter()
    monkeypatch.setenv("FLASHTILE_TIER", tier)
    check_infinite_sink(torch.float16, name=name)


@pytest.mark.parametrize(("device", "heads", "config"), [
    ("A100", 16, (16, 32, 4, 1)), ("A100", 17, (64, 32, 8, 1)), ("A100", 128, (64, 32, 8, 1)),
    ("A6000", 16, (16, 32, 4, 1)), ("A6000", 17, (16, 32, 4, 1)), ("RTX 4090", 128, (16, 32, 4, 1)),
    ("H200", 16, (16, 64, 4, 2)), ("H200", 128, (64, 64, 8, 2)), ("B200", 16, (16, 32, 4, 1)), ("B200", 128, (64, 32, 8, 1)),
])  # fmt: skip
def test_portable_tile(device, heads, config):
    pytest.importorskip("triton")
    from flashtile.mla import plan

    problem = problems.MlaProblem(batch=4, seqlen_q=1, num_heads=heads, num_heads_kv=1, head_dim=576, head_dim_v=512,
                                  dtype=torch.bfloat16, num_pages=9, page_size=64)  # fmt: skip
    assert plan.plan(problem, hardware.by_name(device), ("portable",)).config == TileConfig(*config)


def test_portable_kernel_of_little_shared_memory(monkeypatch, poisoned):
    """The tile of 16 rows for 70."""
    needs_interpreter()
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    monkeypatch.setattr(hardware, "CPU", replace(hardware.CPU, smem_bytes=99 << 10))
    check(BY_NAME["rows_70"], torch.float16)


def test_schedule_of_other_lengths(monkeypatch, poisoned):
    needs_interpreter()
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    for seed in range(24):
        check_other_lengths(seed, torch.float16)


def least_of(lengths, num_rows):
    """Units that a part has at least."""
    total = sum(4 + max(1, -(-length // 64)) for length in lengths)
    return min(max(total // max(min(4096 // num_rows, 96), 1), 1), 4)


def simulated_schedule(lengths, num_parts, num_rows):
    """The table of flashtile/mla/schedule.py, unit by unit."""
    tiles = [max(1, -(-length // 64)) for length in lengths]
    least = least_of(lengths, num_rows)
    part = max(least, -(-sum(4 + count for count in tiles) // num_parts))
    piece = min(max(-(-max(tiles) // max(1, num_parts // len(tiles))), least), max(tiles))
    pieces = -(-len(tiles) // num_parts)
    # Where a part may begin, and how many of those places are in it. (sequence, None) is one before a sequence's tiles
    if pieces * (piece + 4) <= part + 8:
        owners, size = [(s, first) for s, count in enumerate(tiles) for first in range(0, count, piece)], pieces
    else:
        owners, size = [(s, tile) for s, count in enumerate(tiles) for tile in [None] * 4 + list(range(count))], part
    begins = [(s, tile or 0) for s, tile in owners[::size]]
    spans = []
    for sequence in range(len(tiles)):
        places = [place for place, (s, tile) in enumerate(owners) if s == sequence and tile is not None]
        spans.append((places[0] // size, places[-1] // size))
    return begins + [(len(tiles), 0)] * (num_parts + 1 - len(begins)) + spans


def made_schedule(lengths, num_parts, num_rows):
    from flashtile.mla import schedule

    table = torch.full((num_parts + 1 + len(lengths), 2), -1, dtype=torch.int32)
    schedule.launch(table, torch.tensor(lengths, dtype=torch.int32), fixed_length=2**31 - 1, num_sequences=len(lengths),
                    seqlen_q=1, total_rows=num_rows)  # fmt: skip
    return [tuple(row) for row in table.tolist()]


def tiles_of_parts(table, lengths, num_parts):
    """For each part its (sequence, first tile, end), as programs read them from the table."""
    parts = []
    for (begin, begin_tile), (end, end_tile) in zip(table[:num_parts], table[1 : num_parts + 1], strict=True):
        segments = []
        for sequence in range(begin, end + (end_tile > 0)):
            count = max(1, -(-lengths[sequence] // 64))
            last = sequence == end
            segments.append((sequence, begin_tile if sequence == begin else 0, min(end_tile, count) if last else count))
        parts.append(segments)
    return parts


LENGTHS = [(0,), (64,), (1,) * 9, (5000, 0, 3, 700), (262144, 1), tuple(range(0, 3000, 17)), (200,) * 7, (9000,) * 5]
# With a number of parts; in pieces of a sequence, or whole ones
IN_PIECES = [
    ((4096,) * 4, 8), ((4096,) * 4, 9), ((4096,) * 64, 132), ((8192,) * 32, 66), ((16384,) * 8, 66), ((8192,) * 16, 132),
    ((4000, 4096, 3700, 4090), 9), ((300,) * 2, 16), ((300, 65, 0, 1), 64), ((0,) * 3, 8), ((0,), 132), ((64,), 132),
    ((640,), 132), ((131072,), 66), ((200,) * 7, 7), ((4096,) * 128, 66), ((1000, 1024, 990), 2), ((9000,) * 5, 1),
]  # fmt: skip
CUT_ANYWHERE = [((8192,) * 5, 8), ((8192, 100), 132), ((40000,) * 3, 2), (tuple(range(0, 9000, 70)), 66), ((30000,) * 128, 66)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("num_heads", [1, 128])
def test_schedule(lengths, num_heads):
    """Of the parts that fill the device."""
    needs_interpreter()
    schedule = make_schedule(torch.tensor(lengths, dtype=torch.int32), num_heads=num_heads)
    num_parts = schedule.table.shape[0] - 1 - len(lengths)
    assert num_parts == (4 if num_heads == 1 else 2)
    assert [tuple(row) for row in schedule.table.tolist()] == simulated_schedule(lengths, num_parts, num_heads)


def test_schedule_of_the_largest_lengths():
    """Those beyond are taken for the largest."""
    needs_interpreter()
    tiles = 2**25 - 4
    for length in (64 * tiles, 2**31 - 1):
        table = make_schedule(torch.tensor([length], dtype=torch.int32), num_heads=1).table
        assert table.tolist() == [[0, part * tiles // 4] for part in range(4)] + [[1, 0], [0, 3]]


@pytest.mark.parametrize(("lengths", "num_parts"), IN_PIECES + CUT_ANYWHERE, ids=lambda x: str(x)[:30])
@pytest.mark.parametrize("num_rows", [1, 128, 5000])
def test_schedule_of_parts(lengths, num_parts, num_rows):
    """Against a simulation; each tile belongs to one part, and a sequence's row names the parts that have its tiles."""
    needs_interpreter()
    table = made_schedule(lengths, num_parts, num_rows)
    assert table == simulated_schedule(lengths, num_parts, num_rows)
    parts = tiles_of_parts(table, lengths, num_parts)
    for sequence, length in enumerate(lengths):
        mine = [(part, first, end) for part, segments in enumerate(parts) for s, first, end in segments if s == sequence]
        # In order and without a gap, so that `slots_of` leads to each
        assert [part for part, _, _ in mine] == list(range(mine[0][0], mine[-1][0] + 1))
        assert [first for _, first, _ in mine] == [0] + [end for _, _, end in mine[:-1]]
        assert mine[-1][2] == max(1, -(-length // 64)) and all(first < end for _, first, end in mine)
        assert table[num_parts + 1 + sequence] == (mine[0][0], mine[-1][0])


@pytest.mark.parametrize(("lengths", "num_parts"), IN_PIECES, ids=lambda x: str(x)[:30])
@pytest.mark.parametrize("num_rows", [1, 128])
def test_pieces_of_two_sequences_share_no_part(lengths, num_parts, num_rows):
    needs_interpreter()
    parts = tiles_of_parts(made_schedule(lengths, num_parts, num_rows), lengths, num_parts)
    sizes = [len(segments) for segments in parts if segments]
    assert max(sizes) == -(-len(lengths) // num_parts)
    if max(sizes) == 1 and len(lengths) <= num_parts // 2:
        longest = max(end - first for ((_, first, end),) in filter(None, parts))
        assert longest <= max(least_of(lengths, num_rows), -(-max(lengths) // (64 * (num_parts // len(lengths)))))


@pytest.mark.parametrize(("length", "batch"), [(64, 1), (2048, 1), (2048, 4), (2048, 8), (8192, 1), (16384, 8), (8192, 16)])
@pytest.mark.parametrize(("num_rows", "num_parts"), [(16, 132), (128, 66)])
def test_most_parts(length, batch, num_rows, num_parts):
    """What the merge is told of equal lengths is how many parts a sequence has in the table."""
    needs_interpreter()
    from flashtile.mla import schedule

    spans = simulated_schedule([length] * batch, num_parts, num_rows)[num_parts + 1 :]
    has = max(last - first + 1 for first, last in spans)
    assert schedule.most_parts(length, batch, num_parts, num_rows) == has


def test_schedule_serves_many_layers(monkeypatch):
    """One launch for all layers of a step, and the same bits as with a schedule made in each call."""
    needs_interpreter()
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    from flashtile.mla import schedule as schedules

    launches = []
    plan_parts = schedules.launch
    monkeypatch.setattr(schedules, "launch", lambda *args, **kwargs: (launches.append(1), plan_parts(*args, **kwargs)))
    arguments = MlaCase("short", lengths=(300,), heads=2).make(torch.float16)
    schedule = make_schedule(arguments["cache_seqlens"], num_heads=2)
    outs = [mla_decode(**arguments, schedule=schedule) for _ in range(3)]
    assert len(launches) == 1
    outs.append(mla_decode(**arguments))
    assert len(launches) == 2
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(("topk", "num_slots", "with_lengths"), [(64, 4096, False), (100, 1000, True), (1, 5, True),
                                                               (257, 1 << 21, True)])  # fmt: skip
def test_indices_in_order(topk, num_slots, with_lengths):
    """By 8 stretches of the cache, in each as they were; hidden ones are -1 in the last."""
    needs_interpreter()
    from flashtile.mla import order

    indices = torch.randint(-num_slots // 8, num_slots + num_slots // 8, (6, topk + 3), dtype=torch.int32)[:, :topk]
    lengths = torch.tensor([topk, topk // 2, 0], dtype=torch.int32) if with_lengths else None
    ordered = torch.full((6, topk), 7, dtype=torch.int32)
    order.launch(launch_now, indices, lengths, ordered, num_slots, 2)
    stretch = 1 << max(0, (num_slots - 1).bit_length() - 3)
    for row in range(6):
        length = topk if lengths is None else lengths[row // 2]
        seen = indices[row].where((indices[row] >= 0) & (indices[row] < num_slots) & (torch.arange(topk) < length), -1)
        keys = torch.where(seen < 0, 7, seen // stretch)
        assert torch.equal(ordered[row], seen[keys.sort(stable=True).indices])


def test_strided_cache_and_queries(monkeypatch):
    """A layer of a cache of many, and queries cut out of a wider tensor."""
    needs_interpreter()
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    for name in ("plain", "sparse_tokens"):
        arguments = BY_NAME[name].make(torch.float16)
        expected = mla_decode(**arguments)
        kv_cache, q = arguments["kv_cache"], arguments["q"]
        layers = torch.full((*kv_cache.shape[:2], 3, *kv_cache.shape[2:]), float("nan"), dtype=torch.float16)
        layers[:, :, 1] = kv_cache
        wide = torch.full((*q.shape[:3], 600), float("nan"), dtype=torch.float16)
        wide[..., 8:584] = q
        assert torch.equal(mla_decode(**arguments | {"kv_cache": layers[:, :, 1], "q": wide[..., 8:584]}), expected)


def test_heads_may_lie_far_apart(monkeypatch):
    """Queries and cache as (heads, tokens, dim): the last head is 2**31 numbers away. Memory left alone costs nothing."""
    needs_interpreter()
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    arguments = BY_NAME["latent_heads"].make(torch.float16)
    expected = mla_decode(**arguments)
    memory = torch.empty(2**31 + 2**22, dtype=torch.float16)
    for name in ("q", "kv_cache"):
        x = arguments[name]
        batch, tokens, heads, dim = x.shape
        apart = 2**31 // (heads - 1) + 64
        far = memory.as_strided(x.shape, (tokens * dim, dim, apart, 1))
        for head in range(heads):
            far[:, :, head] = x[:, :, head]
        assert torch.equal(mla_decode(**arguments | {name: far}), expected)


def test_meta_tensors_give_shapes():
    tensors = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in plain().items()}
    out, lse = mla_decode(**tensors, return_lse=True)
    expected, expected_lse = mla_decode(**plain(), return_lse=True)
    assert out.is_meta and lse.is_meta
    for got, like in ((out, expected), (lse, expected_lse)):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)


@pytest.mark.parametrize("pack", [pack_fp8, unpack_fp8])
def test_packing_says_what_it_takes(pack):
    with pytest.raises(flashtile.DtypeError, match="kv_cache: expected a torch.Tensor, got NoneType"):
        pack(None)
    for dtype in (torch.int32, "bfloat16"):
        with pytest.raises(flashtile.DtypeError, match=f"dtype: expected a floating dtype, got {dtype}"):
            unpack_fp8(pack_fp8(torch.zeros(2, 576)), dtype)


def test_pack_fp8():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 7, 1, 576, generator=generator) * torch.logspace(-3, 3, 5)[:, None, None, None]
    x[0, 0] = 0
    packed = pack_fp8(x.to(torch.bfloat16))
    assert packed.shape == (5, 7, 1, 656) and packed.dtype == torch.uint8
    scales = packed[..., 512:528].view(torch.float32)
    assert torch.equal(scales.log2(), scales.log2().round())
    unpacked = unpack_fp8(packed, torch.float32)
    assert torch.equal(unpacked[..., 512:], x.to(torch.bfloat16)[..., 512:].float())
    groups, back = x.to(torch.bfloat16)[..., :512].float().unflatten(-1, (4, 128)), unpacked[..., :512].unflatten(-1, (4, 128))
    # 3 bits of mantissa; the smallest step is 2**-9 of the scale
    assert ((back - groups).abs() <= groups.abs() / 16 + scales[..., None] * 2**-10).all()
    with pytest.raises(flashtile.ShapeError, match="last dim of 576, got shape"):
        pack_fp8(x[..., :512])
    with pytest.raises(flashtile.DtypeError, match="kv_cache"):
        pack_fp8(x.to(torch.int32))


def plain(**changes):
    return MlaCase("refused", lengths=(10, 5)).make(torch.bfloat16) | changes


Q = torch.zeros(2, 1, 4, 576, dtype=torch.bfloat16)
CACHE = torch.zeros(3, 64, 1, 576, dtype=torch.bfloat16)
INDICES = torch.zeros(2, 1, 8, dtype=torch.int32)
NO_TABLE = {"block_table": None, "cache_seqlens": None}
WRONG = {
    "q_rank": (dict(q=Q[0]), flashtile.ShapeError, "q: expected 4 dims"),
    "q_type": (dict(q=1), flashtile.DtypeError, "q: expected a torch.Tensor, got int"),
    "table_type": (dict(block_table=[[0]]), flashtile.DtypeError, "block_table: expected a torch.Tensor, got list"),
    "causal_type": (dict(causal=1), flashtile.DtypeError, "causal: expected True or False, got 1"),
    "scale_type": (dict(softmax_scale=torch.ones(())), flashtile.DtypeError, "softmax_scale: expected a number"),
    "q_dtype": (dict(q=Q.to(torch.int32)), flashtile.DtypeError, "q: expected dtype bfloat16 or float16"),
    "cache_rank": (dict(kv_cache=CACHE[:, :, 0]), flashtile.ShapeError, "unsqueeze"),
    "cache_dtype": (dict(kv_cache=CACHE.half()), flashtile.DtypeError, "kv_cache: expected the dtype of q, torch.bfloat16"),
    "head_dim": (dict(q=Q[..., :128]), flashtile.ShapeError, "q: expected a head_dim of 576"),
    "cache_head_dim": (
        dict(kv_cache=CACHE[..., :512]),
        flashtile.ShapeError,
        "kv_cache: expected the head_dim of q, 576, got 512",
    ),
    "head_dim_v": (dict(head_dim_v=256), flashtile.ShapeError, "head_dim_v: expected 512"),
    "packed_width": (dict(kv_cache=CACHE.byte()), flashtile.ShapeError, "656 bytes"),
    "packed_strides": (
        dict(kv_cache=torch.empty(3, 64, 1, 657, dtype=torch.uint8)[..., :656]),
        flashtile.ShapeError,
        r"kv_cache: expected tokens .* 4 bytes, got strides \(42048, 657, 657, 1\) from byte 0 on. Copy it: kv_cache.clone",
    ),
    "packed_offset": (
        dict(kv_cache=torch.empty(3 * 64 * 656 + 2, dtype=torch.uint8)[2:].view(3, 64, 1, 656)),
        flashtile.ShapeError,
        r"kv_cache: expected tokens .* 4 bytes, got strides \(41984, 656, 656, 1\) from byte 2 on. Copy it: kv_cache.clone",
    ),
    "stride": (
        dict(q=Q.transpose(2, 3).contiguous().transpose(2, 3)),
        flashtile.ShapeError,
        "q: expected a contiguous last dim",
    ),
    "heads": (dict(kv_cache=CACHE.expand(3, 64, 3, 576)), flashtile.ShapeError, "multiple of those of kv_cache, got 4 and 3"),
    "many_heads": (dict(q=Q.repeat(1, 1, 33, 1)), flashtile.ShapeError, "at most 128 heads, got 132"),
    "many_tokens": (dict(q=Q.repeat(1, 9, 1, 1)), flashtile.ShapeError, "at most 8 query tokens, got 9"),
    "no_table": (NO_TABLE, flashtile.ShapeError, "block_table: expected a tensor, got None"),
    "table_dtype": (dict(block_table=torch.zeros(2, 1)), flashtile.DtypeError, "block_table: expected dtype torch.int32"),
    "table_shape": (dict(block_table=torch.zeros(1, 1, dtype=torch.int32)), flashtile.ShapeError, "block_table"),
    "lengths_shape": (dict(cache_seqlens=torch.zeros(3, dtype=torch.int32)), flashtile.ShapeError, "cache_seqlens"),
    "lengths_long": (
        dict(cache_seqlens=torch.tensor([1, 400], dtype=torch.int32)),
        flashtile.ValueRangeError,
        r"cache_seqlens\[1\]",
    ),
    "page": (
        dict(block_table=torch.full((2, 2), 9, dtype=torch.int32)),
        flashtile.ValueRangeError,
        r"block_table\[0\]: expected pages",
    ),
    "no_page": (dict(kv_cache=CACHE[:0]), flashtile.ShapeError, "kv_cache: expected at least one page"),
    "wide_table": (
        # 192 tokens fewer than 2**31
        dict(block_table=torch.empty(2**25 - 3, dtype=torch.int32).expand(2, -1)),
        flashtile.ShapeError,
        "block_table: expected at most 33554428 columns",
    ),
    "indices_and_table": (dict(indices=INDICES), flashtile.ShapeError, "block_table: expected None with indices"),
    "indices_shape": (NO_TABLE | dict(indices=INDICES[0]), flashtile.ShapeError, "indices: expected shape"),
    "indices_causal": (NO_TABLE | dict(indices=INDICES, causal=True), flashtile.ValueRangeError, "causal"),
    "topk_length": (
        dict(topk_length=torch.zeros(2, dtype=torch.int32)),
        flashtile.ShapeError,
        "topk_length: expected None without",
    ),
    "sinks_shape": (dict(sinks=torch.zeros(3)), flashtile.ShapeError, r"sinks: expected shape \(4,\)"),
    "sinks_dtype": (dict(sinks=torch.zeros(4, dtype=torch.int32)), flashtile.DtypeError, "sinks"),
    "scale": (dict(softmax_scale=float("nan")), flashtile.ValueRangeError, "softmax_scale"),
    "head_dim_v_type": (dict(head_dim_v=None), flashtile.DtypeError, "head_dim_v: expected an int, got None"),
    "return_lse": (dict(return_lse="no"), flashtile.DtypeError, "return_lse: expected True or False"),
    "nested": (dict(q=torch.nested.nested_tensor([Q[0], Q[1]])), flashtile.UnsupportedError, "q: expected a tensor with one"),
    "gradient": (dict(q=Q.clone().requires_grad_()), flashtile.UnsupportedError, "no backward pass"),
    "schedule": (dict(schedule=3), flashtile.DtypeError, "schedule: expected a Schedule"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    changes, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        mla_decode(**plain(**changes))


def test_schedule_of_other_shapes():
    lengths = torch.tensor([10, 5], dtype=torch.int32)
    for wrong, words in ((make_schedule(lengths, num_heads=8), "4 rows a sequence, got 8"),
                         (make_schedule(lengths[:1], num_heads=4), "2 sequences, got 1")):  # fmt: skip
        with pytest.raises(flashtile.ShapeError, match=words):
            mla_decode(**plain(schedule=wrong))
    for arguments in ({"num_heads": 4}, {"cache_seqlens": lengths, "indices": INDICES, "num_heads": 4}):
        with pytest.raises(flashtile.ShapeError, match="cache_seqlens"):
            make_schedule(**arguments)
    with pytest.raises(flashtile.DtypeError, match=r"cache_seqlens.*int64"):
        make_schedule(lengths.long(), num_heads=4)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    # Read as if they lay side by side, the lengths of other sequences would count
    (dict(cache_seqlens=torch.zeros(4, dtype=torch.int32)[::3]), flashtile.ShapeError, "cache_seqlens: expected a contiguous"),
    (dict(cache_seqlens=torch.zeros(2, 1, dtype=torch.int32)), flashtile.ShapeError, "cache_seqlens: expected shape"),
    (dict(cache_seqlens=[1, 2]), flashtile.DtypeError, "cache_seqlens: expected a torch.Tensor, got list"),
    (dict(cache_seqlens=torch.zeros(2, dtype=torch.int32), seqlen_q=0), flashtile.ShapeError, "seqlen_q: expected at least 1"),
    (dict(cache_seqlens=torch.zeros(2, dtype=torch.int32), num_heads=4.0), flashtile.DtypeError, "num_heads: expected an int"),
    (dict(cache_seqlens=torch.zeros(2, dtype=torch.int32), num_heads_kv=0), flashtile.ShapeError,
     "num_heads_kv: expected at least 1, got 0"),
    (dict(cache_seqlens=torch.zeros(2, dtype=torch.int32), topk_length=torch.zeros(2, dtype=torch.int32)), flashtile.ShapeError,
     "topk_length: expected None without indices"),
    (dict(indices=INDICES[0]), flashtile.ShapeError, "indices: expected shape"),
    (dict(indices=INDICES, topk_length=torch.zeros(3, dtype=torch.int32)), flashtile.ShapeError, "topk_length: expected shape"),
])  # fmt: skip
def test_schedule_of_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        make_schedule(**{"num_heads": 4} | arguments)


def test_unpack_takes_packed_caches_only():
    with pytest.raises(flashtile.DtypeError, match="kv_cache: expected dtype uint8, int8 or float8_e4m3fn"):
        unpack_fp8(CACHE)
    with pytest.raises(flashtile.ShapeError, match="kv_cache: expected a last dim of 656"):
        unpack_fp8(CACHE.byte())


def test_unpack_takes_any_strides():
    packed = pack_fp8(torch.randn(4, 576))
    expected = unpack_fp8(packed)
    for strides, offset in (((656, 1), 1), ((657, 1), 0), ((1, 4), 0)):
        memory = torch.zeros(4 * 657 + 1, dtype=torch.uint8).as_strided(packed.shape, strides, offset)
        assert torch.equal(unpack_fp8(memory.copy_(packed)), expected)


def test_flash_mla_metadata_after_a_call_that_failed():
    meta, _ = flash_mla.get_mla_metadata()
    call = plain()
    arguments = call["q"].clone().requires_grad_(), call["kv_cache"], call["block_table"], call["cache_seqlens"]
    with pytest.raises(flashtile.ShapeError, match="head_dim_v"):
        flash_mla.flash_mla_with_kvcache(*arguments, 256, meta)
    one = (x[:1] if i != 1 else x for i, x in enumerate(arguments))
    out, _ = flash_mla.flash_mla_with_kvcache(*one, 512, meta)
    assert not out.requires_grad


def test_work():
    """FLOPs by pairs, bytes by keys; about 2 * heads * tokens FLOP a byte."""
    case = MlaCase("work", lengths=(1000, 2, 0), seqlen_q=3, heads=16, causal=True)
    arguments = case.make(torch.bfloat16)
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    problem = problems.MlaProblem.from_tensors(problems.MlaOperands(**tensors), causal=True)
    pairs = sum(max(0, n - 2) + max(0, n - 1) + n for n in case.lengths)
    assert problem.flops(case.lengths) == 2 * (576 + 512) * 16 * pairs
    assert problem.bytes_moved(case.lengths) == 1002 * 576 * 2 + 3 * 3 * 16 * ((576 + 512) * 2 + 4)
    long = (100000, 0, 0)
    assert problem.flops(long) / problem.bytes_moved(long) == pytest.approx(2 * 16 * 3, rel=0.1)


def test_opcheck(monkeypatch):
    needs_interpreter()
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    for name in ("one_key", "sparse_few"):
        x = BY_NAME[name].make(torch.float16)
        tensors = [x.get(field) for field in problems.MlaOperands._fields]
        torch.library.opcheck(torch.ops.flashtile.mla_decode.default, (*tensors, 512, None, x["causal"], True))
    lengths = torch.tensor([5, 600], dtype=torch.int32)
    torch.library.opcheck(torch.ops.flashtile.mla_schedule.default, (lengths, lengths, 1000, 2, 1, 16, 1))


def test_lse_without_sinks_in_the_portable_kernels(monkeypatch):
    needs_interpreter()
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    check_lse_without_sinks(torch.float16, "cpu")


def test_flash_mla_names():
    """FlashMLA's conventions: lse +inf for an empty row and without the sink, metadata for one set of shapes."""
    x = BY_NAME["sinks"].make(torch.bfloat16)
    meta, num_splits = flash_mla.get_mla_metadata(x["cache_seqlens"], 8, 1)
    assert num_splits is None
    out, lse = flash_mla.flash_mla_with_kvcache(
        x["q"], x["kv_cache"], x["block_table"], x["cache_seqlens"], 512, meta, num_splits, attn_sink=x["sinks"]
    )
    expected, expected_lse = mla.decode(**x, lse_with_sinks=False, dtype=torch.float32)
    torch.testing.assert_close(out, expected.to(torch.bfloat16))
    torch.testing.assert_close(lse[0], expected_lse[0])
    assert (lse[1] == float("inf")).all() and (out[1] == 0).all()
    arguments = (x["q"][:1], x["kv_cache"], x["block_table"][:1], x["cache_seqlens"][:1], 512, meta)
    with pytest.raises(flashtile.ShapeError, match="tile_scheduler_metadata"):
        flash_mla.flash_mla_with_kvcache(*arguments)
    with pytest.raises(flashtile.UnsupportedError, match="extra_k_cache"):
        flash_mla.flash_mla_with_kvcache(*arguments, extra_k_cache=x["kv_cache"])
    with pytest.raises(flashtile.ShapeError, match="num_splits"):
        flash_mla.flash_mla_with_kvcache(*arguments, num_splits=meta)
    with pytest.raises(flashtile.ShapeError, match="is_fp8_kvcache"):
        flash_mla.flash_mla_with_kvcache(*arguments, is_fp8_kvcache=True)
    with pytest.raises(flashtile.ShapeError, match="get_mla_metadata"):
        flash_mla.flash_mla_with_kvcache(*arguments[:-1], None)


FLASH_MLA_WRONG = {
    "q": (dict(q=None), flashtile.DtypeError, "^q: expected a torch.Tensor, got NoneType"),
    "k_cache": (dict(k_cache=[1]), flashtile.DtypeError, "^k_cache: expected a torch.Tensor, got list"),
    "rank of q": (dict(q=Q[0]), flashtile.ShapeError, "^q: expected 4 dims"),
    "rank of k_cache": (dict(k_cache=CACHE[:, :, 0]), flashtile.ShapeError,
                        r"^k_cache: expected 4 dims .* got shape \(3, 64, 576\). .*k_cache.unsqueeze\(2\)"),
    "heads": (dict(k_cache=CACHE.expand(3, 64, 3, 576)), flashtile.ShapeError,
              "^q: expected heads that are a multiple of those of k_cache, got 4 and 3"),
    "sinks": (dict(attn_sink=[1.0]), flashtile.DtypeError, "^attn_sink: expected a torch.Tensor, got list"),
    "shape of sinks": (dict(attn_sink=torch.zeros(3)), flashtile.ShapeError, r"^attn_sink: expected shape \(4,\)"),
    "table": (dict(block_table=[[0]]), flashtile.DtypeError, "^block_table: expected a torch.Tensor, got list"),
    "lengths": (dict(cache_seqlens=3), flashtile.DtypeError, "^cache_seqlens: expected a torch.Tensor, got int"),
    "head_dim_v": (dict(head_dim_v=512.0), flashtile.DtypeError, "^head_dim_v: expected an int, got 512.0"),
    "causal": (dict(causal="yes"), flashtile.DtypeError, "^causal: expected True or False, got 'yes'"),
    "fp8": (dict(is_fp8_kvcache=1), flashtile.ShapeError, "^is_fp8_kvcache: expected False for a k_cache of torch.bfloat16"),
}  # fmt: skip


def flash_mla_call(**changes):
    call = plain()
    call["k_cache"] = call.pop("kv_cache")
    named = {name: call[name] for name in ("q", "k_cache", "block_table", "cache_seqlens")}
    metadata, _ = flash_mla.get_mla_metadata()
    return flash_mla.flash_mla_with_kvcache(**{**named, "head_dim_v": 512, "tile_scheduler_metadata": metadata, **changes})


@pytest.mark.parametrize("name", FLASH_MLA_WRONG)
def test_flash_mla_wrong_arguments(name):
    """By FlashMLA's names."""
    changes, error, message = FLASH_MLA_WRONG[name]
    with pytest.raises(error, match=message):
        flash_mla_call(**changes)


def test_flash_mla_takes_what_has_a_truth_value_and_numbers_of_numpy():
    expected = flash_mla_call(softmax_scale=0.5)
    for got in (flash_mla_call(softmax_scale=np.float32(0.5), head_dim_v=np.int64(512)),
                flash_mla_call(softmax_scale=0.5, is_fp8_kvcache=None)):  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("sparse", [False, True])
def test_flash_mla_without_query_tokens(sparse):
    changes = dict(indices=INDICES[:, :0]) if sparse else {}
    metadata, _ = flash_mla.get_mla_metadata()
    for _ in range(2):
        out, lse = flash_mla_call(q=Q[:, :0], tile_scheduler_metadata=metadata, **changes)
        assert out.shape == (2, 0, 4, 512) and lse.shape == (2, 4, 0)


def test_flash_mla_sparse_fp8():
    x = BY_NAME["sparse_fp8"].make(torch.bfloat16)
    meta, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(x["q"], x["kv_cache"].view(torch.float8_e4m3fn), None, None, 512, meta,
                                                is_fp8_kvcache=True, indices=x["indices"],
                                                topk_length=x["topk_length"])  # fmt: skip
    expected, expected_lse = mla.decode(**x, dtype=torch.float32)
    torch.testing.assert_close(out, expected.to(torch.bfloat16))
    torch.testing.assert_close(lse, expected_lse.contiguous())


def test_no_tier_lists_every_refusal(monkeypatch):
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(flashtile.UnsupportedError, match="portable: needs a GPU"):
        mla_decode(**plain())


def test_misspelt_tier(monkeypatch):
    monkeypatch.setenv("FLASHTILE_TIER", "portable, referense")
    with pytest.raises(flashtile.UnsupportedError, match="FLASHTILE_TIER: expected some of .*reference, got 'referense'"):
        mla_decode(**plain())


def test_cpu_call_leaves_triton_alone():
    """On a machine without Triton the API works; schedule and FlashMLA's names included."""
    code = """if True:
        import sys, torch
        from flashtile.compat import flash_mla
        from flashtile.mla import make_schedule, mla_decode
        lengths, table = torch.tensor([5], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
        q, cache = torch.randn(1, 1, 2, 576), torch.randn(1, 64, 1, 576)
        schedule = make_schedule(lengths, num_heads=2)
        mla_decode(q, cache, block_table=table, cache_seqlens=lengths, schedule=schedule)
        assert "triton" not in sys.modules
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "FLASHTILE_TIER")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]


def test_names():
    import flashtile.mla

    assert all(getattr(flashtile.mla, name) for name in flashtile.mla.__all__)
    with pytest.raises(AttributeError, match="mla_decod'"):
        _ = flashtile.mla.mla_decod
    assert flashtile.mla.__all__ == list(flashtile.mla._PUBLIC)


def test_cache_descriptor_ends_where_a_sequence_ends():
    """Coordinates of a tile's tokens: their addresses, modulo 2**64, and which of them TMA takes to be outside."""
    pytest.importorskip("triton")
    from flashtile.mla.hopper import cache_descriptor

    layers = torch.empty(5, 128, 3, 1, 576, dtype=torch.bfloat16)
    kv_cache = layers[:, :, 1]
    shape, strides = (getattr(cache_descriptor(kv_cache, 256), name) for name in ("shape", "strides"))
    assert all(stride * 2 < 2**40 and stride * 2 % 16 == 0 for stride in strides[:-1])
    for page, row, valid in ((0, 0, 64), (4, 64, 17), (2, 0, 1), (3, 64, 0)):
        for token in (0, 1, valid - 1, valid, 63):
            coordinates = (2**30, row + valid, page, 2**30 - valid + token, 256)
            inside = all(0 <= place < size for place, size in zip(coordinates, shape, strict=True))
            assert inside == (token < valid) or token < 0
            offset = 2 * sum(place * stride for place, stride in zip(coordinates, strides, strict=True)) % 2**64
            assert token < 0 or offset == 2 * (page * kv_cache.stride(0) + (row + token) * kv_cache.stride(1) + 256)
