"""Attention on a key-value cache without a GPU: the reference against an oracle, the kernels in Triton's interpreter."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from cache_cases import BY_NAME, CASES, FP8_CASES, CacheCase, any_case, check_cache
from checks import poisoned_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashtile
from flashtile import dispatch, hardware, kvcache_ops, kvcache_problem, mixed, tiles
from flashtile.errors import DtypeError, FlashtileError, ShapeError, UnsupportedError, ValueRangeError
from flashtile.kvcache_problem import FP8, CacheOperands, CacheOptions, CacheProblem
from flashtile.reference import kvcache as reference_kvcache
from flashtile.reference import naive

CPU_DTYPES = [torch.float32, torch.float64]
OPTION_NAMES = (
    "max_seqlen_q", "rotary_interleaved", "causal", "window", "softmax_scale", "softcap", "num_splits", "return_lse"
)  # fmt: skip
# A case a mechanism: the interpreter takes seconds for each
INTERPRETED = [
    "plain", "mqa_dims_40_24", "several_queries", "window_both_sides", "softcap_alibi", "sinks_split", "splits_3", "page_1",
    "page_4", "page_96_leftpad", "page_256", "batch_idx", "append_many", "rotary_halves_partial", "rotary_leftpad",
    "packed_append_differs", "packed_no_queries", "no_slots",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference(case):
    for dtype in CPU_DTYPES:
        check_cache(case, dtype)


@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case.name)
def test_reference_fp8(case):
    check_cache(case, torch.bfloat16)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(case=any_case(), seed=st.integers(0, 2**16))
def test_reference_on_random_calls(case, seed):
    check_cache(case, torch.float32, seed=seed)


@pytest.mark.parametrize("name", INTERPRETED)
def test_portable_interpreted(name, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    with poisoned_memory():
        check_cache(BY_NAME[name], torch.float32)


@pytest.mark.parametrize("name", ["plain", "alike", "window", "several_queries", "append", "leftpad"])
def test_a_share_keeps_queries(name, monkeypatch):
    """As on an H100, without pages."""
    pytest.importorskip("triton")
    from flashtile.portable import decode

    call = decode.Call
    config = tiles.DecodeConfig(16, 32, 4, 2, 1, keeps_q=True)
    monkeypatch.setattr(decode, "Call", lambda problem, _, *rest: call(problem, config, *rest))
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    with poisoned_memory():
        check_cache(BY_NAME[name], torch.float32)


@pytest.mark.parametrize("one_loop", [False, True])
@pytest.mark.parametrize("name", ["alike", "alike_paged", "window", "packed", "packed_append_differs", "several_queries"])
def test_more_sequences_than_are_added_up_at_once(name, one_loop, monkeypatch):
    pytest.importorskip("triton")
    from flashtile.portable import decode

    call = decode.Call
    monkeypatch.setattr(decode, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(decode, "Call", lambda problem, config, *rest: call(problem, replace(config, one_loop=one_loop), *rest))
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    with poisoned_memory():
        check_cache(BY_NAME[name], torch.float32)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("case", [case for case in FP8_CASES if not case.new], ids=lambda case: case.name)
def test_portable_interpreted_fp8(case, heads, monkeypatch):
    """Values as pairs of columns; of several heads too."""
    pytest.importorskip("triton")
    from flashtile.portable import decode

    call = decode.Call
    if heads > 1:
        config = tiles.DecodeConfig(16, 16, 4, 2, 1, one_loop=False, heads=heads)
        monkeypatch.setattr(decode, "Call", lambda problem, _, *rest: call(problem, config, *rest))
        case = replace(case, heads=2 * case.heads, heads_kv=2 * case.heads_kv)
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    with poisoned_memory():
        check_cache(case, torch.float16)


@pytest.mark.parametrize("above", [14, 18, 20])
def test_keys_far_below_the_largest_count_over_fp8(above, monkeypatch):
    """Such as all beside an attention sink, whose values are 0. Weights are fp16 there, queries that give bf16 being fp8."""
    pytest.importorskip("triton")
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    q, k, v = torch.zeros(1, 1, 2, 32), torch.zeros(1, 2048, 2, 32), torch.ones(1, 2048, 2, 32)
    q[..., 0], k[:, 0, :, 0], v[:, 0] = 8, above / 8, 0
    out = flashtile.attention_with_kvcache(*(x.to(FP8) for x in (q, k, v)), softmax_scale=1.0, num_splits=1)
    weight = 2047 * math.exp(-above)
    expected = torch.full_like(out, weight / (1 + weight), dtype=torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0)


@pytest.mark.parametrize(("changes", "tier"), [
    ({}, "hopper"), ({"capacity": 131072}, "hopper"), ({"head_dim": 72, "head_dim_v": 72}, "portable"),
    ({"head_dim": 192, "head_dim_v": 192}, "hopper"), ({"head_dim": 192}, "hopper"), ({"head_dim_v": 256}, "hopper"),
    ({"head_dim": 80, "head_dim_v": 112}, "hopper"), ({"page_size": 16}, "hopper"), ({"page_size": 7}, "portable"),
    ({"dtype": torch.bfloat16}, "portable"), ({"num_splits": 2}, "portable"),
    ({"rotary_dim": 32, "seqlen_new": 4}, "portable"), ({"seqlen_q": 1}, "portable"), ({"unaligned": True}, "portable"),
    ({"cache_dtype": torch.bfloat16, "dtype": torch.bfloat16}, "hopper"),
], ids=str)  # fmt: skip
def test_which_kernel_takes_fp8(changes, tier):
    shape = dict(batch=8, seqlen_q=512, capacity=2048, num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128)
    problem = CacheProblem(**{**shape, "dtype": FP8, "cache_dtype": FP8, **changes})
    assert dispatch.plan(problem, hardware.by_name("H200"), "decode").tier == tier


def test_negative_descales_are_refused():
    """On Hopper all weights would be alike."""
    q, k, v = (torch.zeros(1, 2, 2, 32).to(FP8) for _ in range(3))
    descale = torch.tensor([[1.0, -0.5]])
    with pytest.raises(ValueRangeError, match="^k_descale: expected numbers of 0 or more, got -0.5"):
        flashtile.attention_with_kvcache(q, k, v, k_descale=descale)


@pytest.mark.parametrize(("dim", "in_pairs"), [(40, False), (64, False), (96, True), (128, True), (160, False), (256, True)])
def test_no_tile_of_64_rows_takes_pairs_in_32_columns(dim, in_pairs):
    """wgmma multiplied wrongly by them: of 64 columns the odd ones were of no meaning."""
    pytest.importorskip("triton")
    from flashtile.portable import decode

    shape = dict(batch=1, seqlen_q=128, capacity=512, num_heads=2, num_heads_kv=2, head_dim=dim, head_dim_v=dim)
    problem = CacheProblem(**shape, dtype=torch.bfloat16, cache_dtype=FP8)
    config = tiles.decode_config(problem, hardware.by_name("H200"))
    cache = torch.empty(1, 512, 2, dim, dtype=FP8)
    assert config.tile_m == 64 and decode._in_pairs(problem, config, cache) == in_pairs
    few = tiles.decode_config(replace(problem, seqlen_q=1), hardware.by_name("H200"))
    assert few.tile_m == 16 and decode._in_pairs(problem, few, cache)


def test_values_of_fp8_at_odd_addresses_are_not_taken_in_pairs(monkeypatch):
    """Two columns in one number of 16 bits would be read across its border."""
    pytest.importorskip("triton")
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, 4, 32, generator=generator).half()
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    k, v = (torch.randn(2, 24, 2, 33, generator=generator).to(FP8)[..., 1:] for _ in range(2))
    out = flashtile.attention_with_kvcache(q, k, v, cache_seqlens=lengths)
    assert torch.equal(out, flashtile.attention_with_kvcache(q, k.contiguous(), v.contiguous(), cache_seqlens=lengths))


@pytest.mark.parametrize("chunk", [8, 2])
@pytest.mark.parametrize("name", ["plain", "sinks_split", "splits_3", "page_4", "several_queries", "packed_append_differs"])
def test_the_last_to_end_merges(name, chunk, monkeypatch):
    """In the kernel itself, for tiles of 16 bits, chunk parts at once. Its counters are 0 again."""
    pytest.importorskip("triton")
    from flashtile import counters
    from flashtile.portable import decode

    given, plans = [], []
    plan_parts, zeros = decode.plan_parts, counters.zeros

    def planned(*arguments):
        plan = plan_parts(*arguments)
        plans.append(plan._replace(chunk=min(plan.chunk, chunk)))
        return plans[-1]

    monkeypatch.setattr(decode, "plan_parts", planned)
    monkeypatch.setattr(counters, "zeros", lambda *arguments: given.append(zeros(*arguments)) or given[-1])
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    with poisoned_memory():
        check_cache(BY_NAME[name], torch.float16)
    assert plans[-1].chunk > 0 and given and not any(x.any() for x in given)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("name", [
    "several_queries", "window_both_sides", "softcap_alibi", "alibi_batch_sinks", "sinks_split", "splits_3", "page_1",
    "page_4", "page_96_leftpad", "alike_paged", "packed_append_differs", "dim_72_append", "dim_136_paged",
])  # fmt: skip
def test_several_heads_of_a_program(name, heads, monkeypatch):
    """Each with keys, maxima and sums of its own; cut in parts, they are merged by the kernel itself and by one after it."""
    pytest.importorskip("triton")
    from flashtile.portable import decode

    case, configs = BY_NAME[name], []
    case = replace(case, heads=2 * case.heads, heads_kv=2 * case.heads_kv)
    call = decode.Call

    def with_heads(problem, config, *rest):
        configs.append(tiles.DecodeConfig(16, 16, 4, 2, 2, one_loop=False, heads=heads))
        return call(problem, configs[-1], *rest)

    monkeypatch.setattr(decode, "Call", with_heads)
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    with poisoned_memory():
        check_cache(case, torch.float16 if heads == 2 else torch.float32)
    assert configs


@pytest.mark.parametrize("heads", [1, 2])
def test_descales_are_those_of_each_head(heads):
    from flashtile.portable import decode

    q = torch.randn(2, 1, 4, 32).half()
    caches = torch.randn(2, 2, 48, 2, 32).to(torch.float8_e4m3fn)
    descales = {name: torch.rand(2, 2) + 0.5 for name in ("k_descale", "v_descale")}
    operands = CacheOperands(q, *caches, cache_seqlens=_ints(40, 17), **descales)
    problem = CacheProblem.from_tensors(operands, CacheOptions(None, True, False, None, None, None, 0.0, 1, False))
    out, _ = decode.Call(problem, tiles.DecodeConfig(16, 16, 4, 2, 1, heads=heads), operands)(operands)
    expected = flashtile.attention_with_kvcache(q, *caches, cache_seqlens=_ints(40, 17), **descales)
    torch.testing.assert_close(out, expected, atol=5e-3, rtol=5e-3)


def _on(tier, monkeypatch, *arguments, **options):
    monkeypatch.setenv("FLASHTILE_TIER", tier)
    return flashtile.attention_with_kvcache(*arguments, **options)


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_no_new_tokens_but_a_rotation(monkeypatch):
    q, k_cache, v_cache, none = torch.randn(1, 1, 2, 16), *torch.randn(2, 1, 16, 2, 16).unbind(), torch.randn(1, 0, 2, 16)
    options = dict(k=none, v=none, cache_seqlens=_ints(9), rotary_cos=torch.rand(20, 8), rotary_sin=torch.rand(20, 8))
    expected = _on("reference", monkeypatch, q, k_cache, v_cache, **options)
    torch.testing.assert_close(_on("portable", monkeypatch, q, k_cache, v_cache, **options), expected)


@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize("page_size", [None, 32])
def test_nothing_left_of_the_window_counts(seqlen_q, page_size, monkeypatch):
    """A server frees those pages."""
    q, (k_cache, v_cache) = torch.randn(1, seqlen_q, 2, 16), torch.randn(2, 1, 256, 2, 16).unbind()
    options = dict(cache_seqlens=_ints(150), window=(40, 0))
    if page_size:
        k_cache, v_cache = (x.view(-1, page_size, 2, 16) for x in (k_cache, v_cache))
        options["block_table"] = torch.arange(256 // page_size, dtype=torch.int32)[None]
    expected = _on("reference", monkeypatch, q, k_cache, v_cache, **options)
    k_cache.view(-1, 2, 16)[:100] = v_cache.view(-1, 2, 16)[:100] = float("nan")
    if page_size:
        options["block_table"][0, :3] = -1
    for tier in ("reference", "portable"):
        torch.testing.assert_close(_on(tier, monkeypatch, q, k_cache, v_cache, **options), expected)
    if page_size:
        options["block_table"][0, :3] = 2**31 - 1
        torch.testing.assert_close(_on("reference", monkeypatch, q, k_cache, v_cache, **options), expected)


@pytest.mark.parametrize("append", [False, True])
def test_heads_may_lie_far_apart(append, monkeypatch):
    """A cache as (heads, slots, dim): the last head is 2**31 numbers away. Memory that nobody touches costs nothing."""
    heads, slots, stride = 9, 32, 2**28
    memory = torch.empty(8 * stride + slots * 16, dtype=torch.float16)
    far = memory.as_strided((1, slots, heads, 16), (slots * 16, 16, stride, 1))
    q, near = torch.randn(1, 1, heads, 16).half(), torch.randn(1, slots, heads, 16).half()
    for head in range(heads):
        far[:, :, head] = near[:, :, head]
    options = {"cache_seqlens": _ints(20)}
    if append:
        options |= dict(zip("kv", torch.randn(2, 1, 1, heads, 16).half()))
    expected = _on("reference", monkeypatch, q, near.clone(), near.clone(), **options)
    got = _on("portable", monkeypatch, q, far, near.clone(), **options)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("number", [1, 2])
def test_descales_of_any_strides(number):
    """One number for all, expanded, is what servers pass. fp8 is refused in the interpreter, so by the launch itself."""
    from flashtile.portable import decode

    # Behind the numbers that count come others
    memory = torch.tensor([0.5, 2.0, 777.0, 777.0, 777.0])
    descale = memory[:number].expand(2, 2)
    q = torch.randn(2, 1, 4, 32).half()
    caches = torch.randn(2, 2, 48, 2, 32).to(torch.float8_e4m3fn)
    operands = CacheOperands(q, *caches, cache_seqlens=_ints(40, 40), k_descale=descale, v_descale=descale)
    problem = CacheProblem.from_tensors(operands, CacheOptions(None, True, False, None, None, None, 0.0, 1, False))
    out, _ = decode.Call(problem, tiles.DecodeConfig(16, 16, 4, 2, 1), operands)(operands)
    expected = flashtile.attention_with_kvcache(q, *caches, cache_seqlens=_ints(40, 40), k_descale=descale, v_descale=descale)
    torch.testing.assert_close(out, expected, atol=5e-3, rtol=5e-3)


def test_packed_queries_past_the_last_row_are_not_written(monkeypatch):
    """cu_seqlens_q is read on the device, in a CUDA graph at each replay: what it says wrong stays inside of out."""
    from flashtile.portable import decode

    q, caches = torch.randn(3, 2, 16), torch.randn(2, 2, 32, 2, 16)
    right = CacheOperands(q, *caches, cache_seqlens=_ints(20, 20), cu_seqlens_q=_ints(0, 1, 3))
    problem = CacheProblem.from_tensors(right, CacheOptions(2, True, False, None, None, None, 0.0, 1, False))
    call = decode.Call(problem, tiles.DecodeConfig(16, 16, 4, 2, 1), right)
    memory = torch.zeros(64, 3, 2, 16)
    call.new_out = lambda q: memory[32]
    for wrong in ((0, 10, 12), (-9, 1, 3), (0, 2**31 - 1, -5)):
        call(right._replace(cu_seqlens_q=_ints(*wrong)))
        assert memory[:32].eq(0).all() and memory[33:].eq(0).all()


@pytest.mark.parametrize("limit", [2, 33])
@pytest.mark.parametrize("starts", [(0, 0, 2, 4), (2, 3, 3, 5), (1, 3, 37, 39), (3, 3, 3, 3), (0, 33, 34, 34)])
def test_rows_of_no_sequence_are_cleared(starts, limit, monkeypatch):
    """Before the first and behind the last one, and one that is longer than max_seqlen_q: graphs read starts at each replay.

    With a limit of 33 by two kernels.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    monkeypatch.setattr(mixed, "LEAST_SLOTS", 0)
    q, k, v = torch.randn(41, 4, 16).half(), torch.randn(5, 32, 2, 16).half(), torch.randn(5, 32, 2, 40).half()
    starts = (*starts, starts[-1], starts[-1])
    right = CacheOperands(q, k, v, cache_seqlens=_ints(20, 3, 32, 9, 9), cu_seqlens_q=_ints(0, 1, 2, 3, 3, 3))
    problem = CacheProblem.from_tensors(right, CacheOptions(limit, True, False, None, None, None, 0.0, 0, True))
    call = mixed.bind(problem, right)
    assert isinstance(call, mixed.Call) == (limit == 33)
    with poisoned_memory():
        out, lse = call(right._replace(cu_seqlens_q=_ints(*starts)))
    belongs = torch.zeros(41, dtype=torch.bool)
    for start, stop in pairwise(starts):
        belongs[start:stop] = stop - start <= limit
    assert out[~belongs].eq(0).all() and lse[:, ~belongs].eq(float("-inf")).all()
    assert out[belongs].isfinite().all() and out[belongs].ne(0).all() and lse[:, belongs].isfinite().all()


@pytest.mark.parametrize("at_once", [1024, 2])
@pytest.mark.parametrize("name", ["packed_mixed", "packed_mixed_paged", "packed_mixed_window"])
def test_a_mixed_call_is_two(name, at_once, monkeypatch):
    """Sequences of many queries and of few by tiles of their own, into one out and lse; also with work added up in pieces."""
    pytest.importorskip("triton")
    from flashtile.portable import decode

    made, init = [], decode.Call.__init__

    def watched(self, problem, config, *rest):
        made.append((problem.least_q, problem.seqlen_q))
        init(self, problem, config, *rest)

    monkeypatch.setattr(decode.Call, "__init__", watched)
    monkeypatch.setattr(mixed, "LEAST_SLOTS", 0)
    monkeypatch.setattr(decode, "MOST_AT_ONCE", at_once)
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    with poisoned_memory():
        check_cache(BY_NAME[name], torch.float16)
    assert made == [(9, 40), (0, 8)]


def test_which_calls_are_two():
    """On an H200: chunks beside decodes, unless they fill the forward's tiles on average; none that promises bits."""
    device = hardware.by_name("H200")
    of = dict(batch=64, capacity=8192, num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128, dtype=torch.bfloat16,
              cache_dtype=torch.bfloat16, page_size=64, window=(None, 0))  # fmt: skip

    def tiers(**options):
        return [(plan.tier, part.least_q, part.seqlen_q) for part, plan in mixed.plans(CacheProblem(**of | options), device)]

    assert tiers(seqlen_q=449, total_q=63 + 449) == [("hopper", 5, 449), ("portable", 0, 4)]
    assert tiers(seqlen_q=449, total_q=63 + 449, cache_dtype=FP8) == [("portable", 5, 449), ("portable", 0, 4)]
    for one in (
        {"seqlen_q": 2016, "total_q": 63 + 2016}, {"seqlen_q": 8, "total_q": 512}, {"seqlen_q": 449},
        {"seqlen_q": 1, "total_q": 64}, {"seqlen_q": 449, "total_q": 512, "num_splits": 4},
        {"seqlen_q": 449, "total_q": 512, "total_new": 512}, {"seqlen_q": 449, "total_q": 512, "capacity": 512},
        {"seqlen_q": 449, "total_q": 512, "dtype": torch.float32, "cache_dtype": torch.float32},
        {"seqlen_q": 449, "total_q": 512, "num_heads_kv": 1, "cache_dtype": FP8},
    ):  # fmt: skip
        assert len(tiers(**one)) == 1, one


@pytest.mark.parametrize("options", [
    {"block_table": _ints(-1, -1, 2, 3)[None], "window": (3, 0)},
    {"block_table": _ints(-1, -1, 2, 3)[None], "cache_leftpad": _ints(8)},
], ids=["window", "leftpad"])  # fmt: skip
def test_entries_that_nobody_looks_at_are_arbitrary(options):
    q, caches = torch.randn(1, 1, 2, 16), torch.randn(2, 4, 4, 2, 16)
    assert flashtile.attention_with_kvcache(q, *caches, cache_seqlens=_ints(14), **options).isfinite().all()
    options = options | {"block_table": _ints(-1, -1, -1, 3)[None]}
    with pytest.raises(ValueRangeError, match=r"block_table\[0, 2\]: expected a page, 0 to 3, got -1"):
        flashtile.attention_with_kvcache(q, *caches, cache_seqlens=_ints(14), **options)


def test_rotary_tables_need_rows_for_the_positions_in_use():
    caches, cos = torch.randn(2, 2, 16, 2, 16), torch.rand(16, 8)
    options = {"rotary_cos": cos, "rotary_sin": cos}
    # Without a mask all queries have the position of the first
    new = dict(zip("kv", torch.randn(2, 1, 1, 2, 16)))
    flashtile.attention_with_kvcache(torch.randn(1, 4, 2, 16), *caches[:, :1], **new, cache_seqlens=_ints(15), **options)
    # A full cache whose sequence does nothing
    packed = dict(zip("kv", torch.randn(2, 1, 2, 16))) | {"cu_seqlens_k_new": _ints(0, 0, 1), "causal": True} | options
    flashtile.attention_with_kvcache(torch.randn(1, 2, 16), *caches, cache_seqlens=_ints(16, 3), cu_seqlens_q=_ints(0, 0, 1),
                                     max_seqlen_q=1, **packed)  # fmt: skip
    with pytest.raises(ValueRangeError, match="sequence 1: expected a row for each of its positions 15 to 18"):
        flashtile.attention_with_kvcache(torch.randn(4, 2, 16), *caches, cache_seqlens=_ints(16, 15),
                                         cu_seqlens_q=_ints(0, 0, 4), max_seqlen_q=4, **packed)  # fmt: skip


def test_fp8_keys_that_a_rotation_makes_too_large_are_limited():
    new = torch.full((1, 1, 2, 16), 448.0).to(torch.float8_e4m3fn)
    k_cache, v_cache = torch.zeros(2, 1, 8, 2, 16).to(torch.float8_e4m3fn)
    eighth = torch.full((8, 8), torch.pi / 4)
    flashtile.attention_with_kvcache(torch.ones(1, 1, 2, 16), k_cache, v_cache, k=new, v=new, cache_seqlens=3,
                                     rotary_cos=eighth.cos(), rotary_sin=eighth.sin())  # fmt: skip
    assert k_cache[0, 3].float().unique().tolist() == [0, 448]


@pytest.mark.parametrize("tier", ["reference", "portable"])
def test_values_are_not_rotated_where_they_are_the_keys(tier, monkeypatch):
    monkeypatch.setenv("FLASHTILE_TIER", tier)
    new, (k_cache, v_cache), angles = torch.randn(1, 1, 2, 16), torch.zeros(2, 1, 8, 2, 16), torch.rand(8, 8) + 1
    flashtile.attention_with_kvcache(torch.ones(1, 1, 2, 16), k_cache, v_cache, k=new, v=new, cache_seqlens=3,
                                     rotary_cos=angles.cos(), rotary_sin=angles.sin())  # fmt: skip
    assert torch.equal(v_cache[0, 3], new[0, 0]) and not torch.allclose(k_cache[0, 3], new[0, 0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_descale_of_0_leaves_zeros_of_a_key(device):
    """amax / 448 of a head of zeros: 0 / 0 would be nan."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    caches = torch.ones(2, 1, 8, 2, 16, device=device).to(torch.float8_e4m3fn)
    q, new = torch.ones(1, 1, 2, 16, device=device).half(), torch.zeros(1, 1, 2, 16, device=device).half()
    descale = torch.tensor([[0.0, 1.0]], device=device)
    out = flashtile.attention_with_kvcache(q, *caches, k=new, v=new, cache_seqlens=3, k_descale=descale, v_descale=descale)
    assert (caches[:, 0, 3].float() == 0).all()
    assert (out[0, 0, 0] == 0).all() and (out[0, 0, 1] > 0.9).all()


@pytest.mark.parametrize(("starts", "lengths", "written"), [
    ((0, 2, 4, 8), (2, 2, 0), {1: [0, 0, 1, 2], 2: [0, 0, 3, 4], 3: [5, 6, 7, 8], 4: [0] * 4}),
    # falling: rows of two sequences, and of one whose number is not that of the starts before it
    ((0, 4, 2, 6), (0, 4, 0), {2: [0] * 4, 4: [0] * 4}),
    ((0, 4, 6, 2), (0, 0, 0), {1: [1, 2, 3, 4], 2: [5, 6, 0, 0], 3: [0] * 4}),
    ((3, 4, 4, 4), (3, 0, 0), {1: [0, 0, 0, 4], 2: [0] * 4, 3: [0] * 4, 4: [0] * 4}),
])  # fmt: skip
def test_new_keys_of_wrong_starts_stay_on_their_own_pages(starts, lengths, written, monkeypatch):
    """A page behind a sequence's length may be another request's; values of index tensors that a GPU does not look at."""
    pytest.importorskip("triton")
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    monkeypatch.setattr(kvcache_problem, "values_readable", lambda q: False)
    # Of nobody here: 0 and 5
    table = torch.tensor([[1, 0, 0, 0], [2, 0, 0, 0], [3, 4, 0, 0]], dtype=torch.int32)
    pages, new = torch.zeros(2, 6, 4, 1, 16), torch.arange(1.0, 9)[:, None, None].expand(8, 1, 16).contiguous()
    flashtile.attention_with_kvcache(torch.randn(3, 1, 1, 16), *pages, k=new, v=new, cache_seqlens=_ints(*lengths),
                                     block_table=table, cu_seqlens_k_new=_ints(*starts))  # fmt: skip
    for cache in pages[..., 0, 0]:
        assert (cache[[0, 5]] == 0).all() and {page: cache[page].tolist() for page in written} == written


def test_fixed_splits_do_not_depend_on_the_batch(monkeypatch):
    """Bitwise the same alone and among others, as the docstring promises; interpreted kernels, real splits."""
    pytest.importorskip("triton")
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    q, k_cache, v_cache = torch.randn(3, 1, 4, 32), torch.randn(3, 160, 2, 32), torch.randn(3, 160, 2, 32)
    lengths = torch.tensor([150, 0, 97], dtype=torch.int32)
    together = flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, num_splits=3)
    for b in range(3):
        own = slice(b, b + 1)
        alone = flashtile.attention_with_kvcache(q[own], k_cache[own], v_cache[own], cache_seqlens=lengths[own], num_splits=3)
        assert torch.equal(together[own], alone)


def test_row_tiles_of_small_caches_stay_whole():
    """One launch then; not where one program would take much longer than equal shares, nor where these are whole row tiles."""
    pytest.importorskip("triton")
    from flashtile import hardware, tiles
    from flashtile.portable.decode import plan_parts

    def is_split(batch, capacity, heads_kv=8):
        problem = CacheProblem(batch=batch, capacity=capacity, seqlen_q=1, num_heads=32, num_heads_kv=heads_kv, head_dim=128,
                               head_dim_v=128, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)  # fmt: skip
        config = tiles.decode_config(problem, hardware.by_name("H200"))
        plan = plan_parts(problem, config, 132)
        assert plan.balanced == (plan.slots > 0)
        # one to an SM
        assert not (config.whole and config.programs_per_sm == 1) or (config.tile_n, config.num_warps) == (128, 4)
        return plan.balanced

    assert not any(is_split(*call) for call in ((6, 512), (8, 512), (16, 512), (8, 1024), (16, 2048)))
    split = (1, 512), (2, 512), (1, 8192), (4, 2048), (8, 2048), (8, 4096), (64, 512), (16, 8192)
    assert all(is_split(*call) for call in split)
    # many short row tiles; not longer ones or fewer
    assert not any(is_split(*call) for call in ((64, 1024, 32), (128, 512, 32), (256, 1024, 8)))
    assert all(is_split(*call) for call in ((128, 1024, 8), (64, 2048, 32), (32, 1024, 32)))


def test_fixed_splits_have_the_tiles_of_any_batch():
    """Or their results would depend on it."""
    from flashtile import hardware, tiles

    def tile_n(batch, seqlen_q=1, capacity=8192, **changes):
        problem = CacheProblem(batch=batch, seqlen_q=seqlen_q, capacity=capacity, num_heads=32, num_heads_kv=8, head_dim=128,
                               head_dim_v=128, dtype=torch.bfloat16, cache_dtype=torch.bfloat16, **changes)  # fmt: skip
        return tiles.decode_config(problem, hardware.by_name("H200")).tile_n

    assert tile_n(1) == tile_n(1, page_size=64) == tile_n(1, page_size=16) == tile_n(64, page_size=64) == 64
    assert tile_n(64) == tile_n(64, page_size=128) == tile_n(64, page_size=256) == 128
    assert tile_n(64, page_size=96) == tile_n(64, page_size=1) == tile_n(64, page_size=64, has_leftpad=True) == 64
    assert tile_n(64, page_size=16) == tile_n(64, page_size=128, has_leftpad=True) == 64
    # short ones, in rows and pages
    assert tile_n(128, capacity=1024) == tile_n(128, capacity=1024, page_size=128) == 64 < tile_n(128, capacity=2048)
    # two pages, for more rows, and where row tiles stay whole
    assert tile_n(64, seqlen_q=2, page_size=64) == tile_n(8, capacity=512, page_size=64) == 128
    assert tile_n(8, capacity=512, page_size=16) == 64
    for page_size in (None, 16, 64):
        assert tile_n(1, num_splits=8, page_size=page_size) == tile_n(64, num_splits=8, page_size=page_size)


def test_which_calls_have_several_heads_of_a_program():
    def heads(dim, heads_kv=32, batch=32, device="H200", **changes):
        dtypes = dict.fromkeys(("dtype", "cache_dtype"), torch.bfloat16)
        problem = CacheProblem(batch=batch, seqlen_q=1, capacity=4096, num_heads=32, num_heads_kv=heads_kv, head_dim=dim,
                               head_dim_v=dim, **(dtypes | changes))  # fmt: skip
        config = tiles.decode_config(problem, hardware.by_name(device))
        assert problem.num_heads_kv % config.heads == 0
        return config.heads

    assert {dim for dim in range(8, 257, 8) if heads(dim) > 1} == {*range(8, 161, 8)} - {64, 128}
    assert heads(80, heads_kv=16) == heads(104, heads_kv=16) == heads(96, page_size=1) == 4
    # few keys, few heads of keys, a fixed order, fp8, another GPU
    assert heads(80, batch=1) == heads(80, heads_kv=8) == heads(96, heads_kv=16) == heads(80, num_splits=4) == 1
    assert heads(80, device="A100") == 1
    assert [heads(80, heads_kv=n, cache_dtype=FP8) for n in (4, 8, 32)] == [1, 2, 2]
    assert heads(96, cache_dtype=FP8) == 4
    of_eight = {dim for dim in range(104, 257, 8) if heads(dim, 8, cache_dtype=FP8) > 1}
    assert of_eight == {*range(104, 161, 8), 168, 184}
    assert [heads(192, n, cache_dtype=FP8) for n in (16, 32)] == [1, 2] and heads(144, 8, batch=1, cache_dtype=FP8) == 1


def test_tiles_of_few_keys_of_fp8():
    def tile(**changes):
        problem = CacheProblem(**(dict(
            batch=1, seqlen_q=1, capacity=8192, num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128,
            dtype=torch.bfloat16, cache_dtype=FP8,
        ) | changes))  # fmt: skip
        config = tiles.decode_config(problem, hardware.by_name("H200"))
        return config.tile_n, config.programs_per_sm

    assert tile() == tile(page_size=64) == tile(batch=4, capacity=1024) == (128, 1)
    assert tile(capacity=512) == tile(page_size=16) == tile(cache_dtype=torch.bfloat16) == (64, 1)
    assert tile(batch=256, capacity=1024) == tile(batch=2048, capacity=512, num_heads=8, num_heads_kv=1) == (64, 2)
    assert tile(batch=256, capacity=1024, num_heads=8) == (32, 4)
    assert tile(capacity=32768) == (64, 2) and tile(num_splits=8) == (128, 2)
    assert tile(batch=16, head_dim=192) == (128, 2) and tile(head_dim=192) == tile(batch=16, head_dim=224) == (64, 2)


def test_pages_of_tile():
    def pages(page_size, tile_n, has_leftpad=False):
        problem = CacheProblem(
            batch=1, seqlen_q=1, capacity=960, num_heads=1, num_heads_kv=1, head_dim=64, head_dim_v=64, dtype=torch.float16,
            cache_dtype=torch.float16, page_size=page_size, has_leftpad=has_leftpad,
        )  # fmt: skip
        return problem.pages_of_tile(tile_n)

    assert [pages(size, 64) for size in (None, 1, 8, 16, 32, 48, 64, 96, 192)] == [0, 0, 0, 4, 2, 0, 1, 0, 1]
    assert [pages(size, 16) for size in (2, 4, 8, 16, 48)] == [0, 4, 2, 1, 1]
    assert pages(64, 64, has_leftpad=True) == 0


def flat_values(arguments):
    for value in arguments:
        if isinstance(value, tuple):
            yield from flat_values(value)
        else:
            yield value


RELAUNCHED = [
    "plain", "splits_3", "packed_append", "rotary_seqlens", "alibi_batch_sinks", "page_96_leftpad", "append_batch_idx",
    "fp8_append",
]  # fmt: skip


@pytest.mark.parametrize("name", RELAUNCHED)
def test_a_repeated_launch_has_the_tensors_of_its_own_call(name, monkeypatch):
    """The third launch leaves Triton's look at the arguments out; each number and address must be where it was."""
    pytest.importorskip("triton")
    from flashtile import hardware, tiles
    from flashtile.device import launch, launcher
    from flashtile.portable import decode

    calls = []
    for seed in range(2):
        (q, k_cache, v_cache), options = BY_NAME[name].make(torch.float32, seed=seed).arguments
        operands = CacheOperands(q, k_cache, v_cache, **{field: options[field] for field in CacheOperands._fields[3:]})
        calls.append(operands)
    problem = CacheProblem.from_tensors(operands, CacheOptions.of_call(*(options[field] for field in OPTION_NAMES)))
    launches = []

    def launch_now(kernel, grid, arguments, constexprs, num_warps, num_stages, launch_pdl=False):
        assert set(kernel.arg_names[len(arguments) :]) == set(constexprs)
        launches.append((*(*grid, 1, 1)[:3], *arguments, *(constexprs[name] for name in kernel.arg_names[len(arguments) :])))
        return SimpleNamespace(function="of a GPU")

    def run(x, y, z, stream, constant, arguments):
        launches.append((x, y, z, *arguments))

    monkeypatch.setattr(launch, "launch_now", launch_now)
    monkeypatch.setattr(launcher, "launcher_of", lambda compiled: launcher.Launcher(run, (0,), True, []))
    monkeypatch.setattr(launcher, "preparer", lambda *_: None)
    monkeypatch.setattr(launcher.driver, "_active", SimpleNamespace(get_current_stream=lambda index: 0))
    call = decode.Call(problem, tiles.decode_config(problem, hardware.by_name("H200")), operands)
    for operands in (*calls, calls[1]):
        call(operands)
    addresses = [{x.data_ptr(): f"{field}" for field, x in zip(CacheOperands._fields, call) if x is not None} for call in calls]
    assert len(launches) % 3 == 0
    each = len(launches) // 3
    first, second, third = (list(flat_values(launches[i * each : (i + 1) * each])) for i in range(3))
    assert len(first) == len(second) == len(third)
    for a, b, c in zip(first, second, third):
        if isinstance(a, torch.Tensor):
            assert addresses[0].get(a.data_ptr()) == addresses[1].get(b.data_ptr()) == addresses[1].get(c)
        else:
            assert a == b == c


def small_call(**changes):
    """Arguments of a correct call: two sequences, a cache of 16 slots; changes replace some."""
    arguments = dict(
        q=torch.randn(2, 1, 4, 16), k_cache=torch.randn(2, 16, 2, 16), v_cache=torch.randn(2, 16, 2, 16),
        cache_seqlens=torch.tensor([5, 9], dtype=torch.int32),
    ) | changes  # fmt: skip
    return [arguments.pop(name) for name in ("q", "k_cache", "v_cache")], arguments


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


NEW = dict(k=torch.zeros(2, 3, 2, 16), v=torch.zeros(2, 3, 2, 16))
PAGED = dict(k_cache=torch.zeros(5, 4, 2, 16), v_cache=torch.zeros(5, 4, 2, 16), block_table=int32(0, 1, 2, 3, 4, 0).view(2, 3))
WRONG = [
    (dict(q=torch.zeros(2, 4, 16)), ShapeError, r"q: expected 4 dims \(batch, seqlen_q, heads, dim\)"),
    (dict(k_cache=torch.zeros(3, 16, 2, 16), v_cache=torch.zeros(3, 16, 2, 16)), ShapeError, "a row for each sequence of q, 2"),
    (dict(v_cache=torch.zeros(2, 15, 2, 16)), ShapeError, "v_cache: expected all but the last dim of k_cache"),
    (dict(k_cache=torch.zeros(2, 16, 2, 8)), ShapeError, "k_cache: expected the head_dim of q, 16"),
    (dict(q=torch.zeros(2, 1, 3, 16)), ShapeError, "heads that are a multiple"),
    (dict(v_cache=torch.zeros(2, 16, 2, 16).half()), DtypeError, "v_cache: expected the dtype of q"),
    (dict(q=torch.zeros(2, 1, 4, 16, dtype=torch.int32)), DtypeError, "q: expected dtype"),
    (dict(cache_seqlens=torch.tensor([1, 2])), DtypeError, "cache_seqlens: expected dtype torch.int32"),
    (dict(cache_seqlens=1.0), DtypeError, "cache_seqlens: expected an int or an int32 tensor"),
    (dict(cache_seqlens=2**40), ValueRangeError, "cache_seqlens: expected 0 to the slots of a sequence, got 1099511627776"),
    (dict(cache_seqlens=-1), ValueRangeError, r"cache_seqlens\[0\]: expected 0 to 16.*got -1"),
    (dict(cache_seqlens=int32(5, 17)), ValueRangeError, r"cache_seqlens\[1\]: expected 0 to 16"),
    (dict(cache_seqlens=int32(5, 14), **NEW), ValueRangeError, r"cache_seqlens\[1\]: expected 0 to 13"),
    (dict(cache_seqlens=None, **NEW), ShapeError, "cache_seqlens: expected the lengths before the append"),
    (dict(k=NEW["k"]), ShapeError, "v: expected a tensor, since k is given"),
    (dict(k_cache=torch.zeros(1, 16, 2, 16).expand(2, -1, -1, -1), **NEW), ShapeError, "k_cache: expected slots of their own"),
    (dict(q=torch.zeros(2, 1, 4, 16).to_sparse()), UnsupportedError, "q: expected a dense tensor"),
    (dict(k=torch.zeros(2, 3, 2, 8), v=NEW["v"]), ShapeError, "k: expected heads and dim of k_cache"),
    (dict(k=NEW["k"].half(), v=NEW["v"]), DtypeError, "k: expected the dtype of the cache"),
    (dict(PAGED, cache_seqlens=int32(5, 13)), ValueRangeError, r"cache_seqlens\[1\]: expected 0 to 12"),
    (dict(PAGED, block_table=int32(0, 7, 2, 3, 4, 0).view(2, 3)), ValueRangeError, r"block_table\[0, 1\].*Sequence 0 uses it"),
    (dict(PAGED, block_table=int32(0, 1)), ShapeError, r"block_table: expected shape \(2, pages of a sequence\)"),
    (dict(PAGED, cache_batch_idx=int32(0, 1)), ShapeError, "cache_batch_idx: expected None beside block_table"),
    (dict(cache_batch_idx=int32(0, 2)), ValueRangeError, r"cache_batch_idx\[1\]: expected 0 to 1"),
    (dict(k_cache=torch.zeros(0, 16, 2, 16), v_cache=torch.zeros(0, 16, 2, 16), cache_batch_idx=int32(0, 0)), ShapeError,
     "k_cache: expected at least one row"),
    (dict(cache_leftpad=int32(0, 10)), ValueRangeError, r"cache_leftpad\[1\]: expected 0 to 9"),
    (dict(rotary_cos=torch.zeros(20, 8), rotary_sin=torch.zeros(20, 8)), ShapeError, "k: expected new keys and values beside"),
    (dict(rotary_cos=torch.zeros(20, 8), **NEW), ShapeError, "rotary_sin: expected a tensor, since rotary_cos"),
    (dict(rotary_cos=torch.zeros(20, 9), rotary_sin=torch.zeros(20, 9), **NEW), ShapeError, "rotary_cos: expected shape"),
    (dict(rotary_cos=torch.zeros(9, 8), rotary_sin=torch.zeros(9, 8), **NEW), ValueRangeError, "rotary_cos, sequence 1"),
    (dict(k_descale=torch.ones(2, 2)), DtypeError, "k_descale: expected None beside k"),
    (dict(num_splits=257), ValueRangeError, "num_splits: expected 0"),
    (dict(num_splits=True), DtypeError, "num_splits: expected an int"),
    (dict(window=3), DtypeError, "window: expected a pair"),
    (dict(softcap=-1.0), ValueRangeError, "softcap"),
    (dict(causal=1), DtypeError, "causal: expected True or False"),
    (dict(cu_seqlens_q=int32(0, 1, 2), q=torch.zeros(2, 4, 16)), DtypeError, "max_seqlen_q: expected an int beside"),
    (dict(sinks=torch.zeros(2)), ShapeError, "sinks: expected shape"),
    (dict(q=torch.zeros(2, 1, 4, 16, requires_grad=True)), UnsupportedError, "no backward pass"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_calls_say_what_is_wrong(changes, error, message):
    tensors, options = small_call(**changes)
    before = [x.clone() for x in tensors[1:]]
    with pytest.raises(error, match=message) as raised:
        flashtile.attention_with_kvcache(*tensors, **options)
    assert isinstance(raised.value, FlashtileError)
    assert all(torch.equal(x, y) for x, y in zip(tensors[1:], before)), "nothing is written before the error"


def test_lazily_negated_tensors_have_the_right_sign(monkeypatch):
    """Their memory holds the negatives; a cache of such is refused."""
    pytest.importorskip("triton")
    tensors, options = small_call(**{name: torch.randn_like(x) for name, x in NEW.items()})
    got = _on("portable", monkeypatch, tensors[0]._neg_view(), *tensors[1:], **options)
    negated = {name: x._neg_view() for name, x in options.items() if name in NEW}
    assert torch.equal(got, _on("portable", monkeypatch, -tensors[0], *tensors[1:], **options))
    caches = [x.clone() for x in tensors[1:]]
    _on("portable", monkeypatch, *tensors, **options | negated)
    _on("portable", monkeypatch, tensors[0], *caches, **options | {name: -options[name] for name in NEW})
    assert all(map(torch.equal, tensors[1:], caches))
    with pytest.raises(UnsupportedError, match=r"v_cache: expected a cache whose memory.*v_cache.resolve_neg\(\)"):
        flashtile.attention_with_kvcache(tensors[0], tensors[1], tensors[2]._neg_view())


def op_arguments(case):
    """Flat arguments of the op for a case."""
    (q, k_cache, v_cache), options = case.make(torch.float32).arguments
    operands = CacheOperands(q, k_cache.nan_to_num(), v_cache.nan_to_num(),
                             **{name: options[name] for name in CacheOperands._fields[3:]})  # fmt: skip
    return (*operands, *CacheOptions.of_call(*(options[name] for name in OPTION_NAMES)))


@pytest.mark.parametrize("name", ["plain", "page_16", "append_many", "rotary", "packed_append", "alibi_batch_sinks"])
def test_opcheck(name):
    case = BY_NAME[name]
    op = kvcache_ops.kvcache_append_op if case.new or case.lengths_new else kvcache_ops.kvcache_op
    torch.library.opcheck(op, op_arguments(case))


def test_the_op_declares_what_it_writes():
    written = [a.name for a in kvcache_ops.kvcache_append_op._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["k_cache", "v_cache"]
    assert not kvcache_ops.kvcache_op._schema.is_mutable


@pytest.mark.parametrize("how", ["unobserved", "op"])
@pytest.mark.parametrize("tier", ["cpu", "portable", "repeated"])
def test_autograd_sees_appends(tier, how, monkeypatch):
    """And no writes of calls that only read, nor those to tensors of inference mode, which have no versions."""
    if tier != "cpu":
        pytest.importorskip("triton")
        monkeypatch.setenv("FLASHTILE_TIER", "portable")
    if tier == "repeated":
        # What is kept for calls on a GPU
        kept = {}
        monkeypatch.setattr(kvcache_ops, "_known", lambda tensors, options: kept.get(tensors[3] is None))
        monkeypatch.setattr(kvcache_ops, "_bind", lambda operands, options, bind=kvcache_ops._bind:
                            kept.setdefault(operands.k is None, bind(operands, options)))  # fmt: skip
    if how == "op":
        monkeypatch.setattr(kvcache_ops, "nobody_observes", lambda: False)
        monkeypatch.setattr(kvcache_ops, "unobserved", lambda operands: False)

    def call(caches, **new):
        before = [None if x.is_inference() else x._version for x in caches]
        flashtile.attention_with_kvcache(q, *caches, cache_seqlens=int32(3), **new)
        return [None if x.is_inference() else x._version > version for x, version in zip(caches, before)]

    q, k, *caches = (torch.randn(1, rows, 2, 16) for rows in (1, 1, 8, 8))
    for _ in range(2):
        assert call(caches, k=k, v=k) == [True, True]
        assert call(caches) == [False, False]
    with torch.inference_mode():
        assert call([x.clone() for x in caches], k=k, v=k) == [None, None]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    """A compiled decoding step appends to the caller's cache and gives what the eager one gives."""

    def step(q, k, v, k_cache, v_cache, lengths):
        out = flashtile.attention_with_kvcache(q * 2, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, causal=True)
        return out + 1, lengths + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (2, 3):
        caches = [torch.randn(batch, 16, 2, 16) for _ in range(2)]
        new = [torch.randn(batch, 1, heads, 16) for heads in (4, 2, 2)]
        lengths = torch.arange(batch, dtype=torch.int32)
        copies = [x.clone() for x in caches]
        expected = step(*new, *copies, lengths)
        actual = compiled(*new, *caches, lengths)
        assert all(torch.equal(x, y) for x, y in zip((*actual, *caches), (*expected, *copies)))


def test_decoding_step_by_step_is_full_attention():
    """Tokens one by one through a paged cache with rotary embedding, against causal attention over all of them."""
    seqlen, heads, heads_kv, dim = 11, 4, 2, 16
    q, k, v = (torch.randn(1, seqlen, h, dim, dtype=torch.float64) for h in (heads, heads_kv, heads_kv))
    angles = torch.rand(seqlen, dim // 2, dtype=torch.float64)
    caches = [torch.full((6, 3, heads_kv, dim), float("nan"), dtype=torch.float64) for _ in range(2)]
    table = int32(4, 0, 5, 2)[None]
    outs = [
        flashtile.attention_with_kvcache(
            q[:, t : t + 1], *caches, k=k[:, t : t + 1], v=v[:, t : t + 1], cache_seqlens=t, block_table=table, causal=True,
            rotary_cos=angles.cos(), rotary_sin=angles.sin(),
        )
        for t in range(seqlen)
    ]  # fmt: skip

    def turned(x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)

    torch.testing.assert_close(torch.cat(outs, 1), naive.attention(turned(q), turned(k), v, causal=True))


def test_generate_example():
    root = Path(__file__).parent.parent
    command = [sys.executable, root / "examples" / "generate_paged.py", "--device", "cpu", "--steps", "6"]
    process = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "ok: 6 steps of 3 sequences give the logits of attention without a cache" in process.stdout


def test_decode_mode_of_the_benchmark():
    """One query over a cache, checked and timed; with other modes it is refused in words."""
    from flashtile.bench import engine
    from flashtile.bench.cases import BenchCase, UsageError

    case = BenchCase(batch=2, seqlen_q=1, seqlen_k=64, num_heads=4, num_heads_kv=2, dtype="fp32")
    settings = engine.Settings(repeats=3, roof=False)
    result = engine.run(case, modes=["decode"], device="cpu", settings=settings).one(mode="decode")
    assert result.ok and result.accuracy.passed
    assert result.flops == case.problem().flops("fwd")
    # All but lse, which nobody asks for
    assert result.bytes == case.problem().bytes_moved("fwd") - 4 * 2 * 4
    with pytest.raises(UsageError, match="decode alone"):
        engine.run(case, modes=["fwd", "decode"], device="cpu", settings=settings)


# combine


def partials(splits, heads=3, dim=24, dtype=torch.float32):
    """Parts of which some saw no key: lse -inf, out NaN."""
    out, lse = torch.randn(splits, 2, 5, heads, dim, dtype=dtype), 4 * torch.randn(splits, 2, heads, 5)
    lse[splits // 2, 0] = float("-inf")
    lse[:, 1, 0, 0] = float("-inf")
    out[lse.transpose(2, 3) == float("-inf")] = float("nan")
    return out, lse


@pytest.mark.parametrize("splits", [1, 3, 70])
def test_combine(splits):
    """Merged parts are attention over all keys: against a softmax over the parts, in float64."""
    out_partial, lse_partial = partials(splits)
    out, lse = flashtile.combine(out_partial, lse_partial)
    weights = lse_partial.double().softmax(0).nan_to_num().transpose(2, 3)[..., None]
    expected = (weights * out_partial.double().nan_to_num()).sum(0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, torch.logsumexp(lse_partial, 0))
    assert flashtile.combine(out_partial, lse_partial, out_dtype=torch.float16)[0].dtype == torch.float16
    torch.library.opcheck(torch.ops.flashtile.combine.default, (out_partial.nan_to_num(), lse_partial, torch.float32))


@pytest.mark.parametrize("splits", [1, 3, 70])
def test_combine_interpreted(splits):
    pytest.importorskip("triton")
    from flashtile.device import combine

    out_partial, lse_partial = partials(splits)
    lse_partial[0, 0, 1, 2], out_partial[0, 0, 2, 1] = float("inf"), 0.0
    expected = flashtile.combine(out_partial, lse_partial)
    assert (expected[0][0, 2, 1] == 0).all()
    with poisoned_memory():
        out, lse = torch.empty(expected[0].shape), torch.empty(expected[1].shape)
    combine.launch(out_partial, lse_partial, out, lse)
    torch.testing.assert_close((out, lse), expected)


def test_combine_of_no_parts():
    pytest.importorskip("triton")
    from flashtile.device import combine

    out_partial, lse_partial = torch.empty(0, 2, 3, 4, 16), torch.empty(0, 2, 4, 3)
    with poisoned_memory():
        launched = torch.empty(2, 3, 4, 16), torch.empty(2, 4, 3)
    combine.launch(out_partial, lse_partial, *launched)
    for out, lse in (launched, flashtile.combine(out_partial, lse_partial)):
        assert out.eq(0).all() and lse.eq(float("-inf")).all()


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "alibi_slopes", "sinks"])
def test_a_repeated_call_asks_for_gradients_as_the_first_one_does(name):
    """Of every tensor: what is kept of a call under no_grad knows nothing of it."""
    operands = CacheOperands(*torch.zeros(3, 1))
    assert not kvcache_ops._differentiable(operands)
    assert kvcache_ops._differentiable(operands._replace(**{name: torch.zeros(1, requires_grad=True)}))


def test_combine_says_what_is_wrong():
    out, lse = partials(2)
    with pytest.raises(ShapeError, match=r"lse_partial: expected shape \(2, 2, 3, 5\)"):
        flashtile.combine(out, lse.transpose(2, 3))
    with pytest.raises(DtypeError, match="lse_partial: expected dtype torch.float32"):
        flashtile.combine(out, lse.half())
    with pytest.raises(ShapeError, match="out_partial: expected 5 dims"):
        flashtile.combine(out[0], lse)
    with pytest.raises(DtypeError, match="out_dtype: expected a floating dtype"):
        flashtile.combine(out, lse, out_dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="combine: expected tensors without gradients"):
        flashtile.combine(out.clone().requires_grad_(), lse)


def test_tangents_are_refused():
    from torch.autograd import forward_ad

    from flashtile.mla import mla_decode

    q, caches = torch.randn(1, 1, 2, 16), torch.randn(2, 1, 8, 2, 16)
    latent_q, latent = torch.randn(1, 1, 2, 576), torch.randn(1, 64, 1, 576)
    with forward_ad.dual_level():
        dual, latent_dual = (forward_ad.make_dual(x, torch.ones_like(x)) for x in (q, latent_q))
        with pytest.raises(UnsupportedError, match="attention_with_kvcache: expected tensors without tangents"):
            flashtile.attention_with_kvcache(dual, *caches)
        with pytest.raises(UnsupportedError, match="mla_decode: expected tensors without tangents"):
            mla_decode(latent_dual, latent, block_table=int32(0).view(1, 1), cache_seqlens=int32(3))
        with pytest.raises(UnsupportedError, match="combine: expected tensors without tangents"):
            flashtile.combine(forward_ad.make_dual(caches[:, None, :, 0], caches[:, None, :, 0]), torch.zeros(2, 1, 2, 1))


# Work


def test_work_of_a_problem():
    call = CacheCase("work", lengths=(37, 0, 96), page_size=16).make(torch.float32)
    (q, k_cache, v_cache), options = call.arguments
    operands = CacheOperands(q, k_cache, v_cache, cache_seqlens=options["cache_seqlens"], block_table=options["block_table"])
    problem = CacheProblem.from_tensors(operands, CacheOptions(None, True, False, None, None, None, 0.0, 0, False))
    assert problem.flops((37, 0, 96)) == 2 * (64 + 64) * 4 * (37 + 96)
    assert problem.bytes_moved((37, 0, 96)) == (37 + 96) * 2 * 128 * 4 + 3 * 4 * 128 * 4


@pytest.mark.parametrize(("shape", "options", "tier"), [
    # batch, seqlen_q, capacity, heads, heads of keys, head dim
    ((1, 1, 8192, 32, 8, 128), {}, "portable"), ((1, 512, 8192, 32, 8, 128), {}, "hopper"),
    ((64, 16, 2048, 32, 8, 128), {}, "hopper"), ((64, 8, 2048, 32, 8, 128), {}, "portable"),
    # few tiles, whose keys are cut into parts, unless half of their rows are empty
    ((1, 128, 8192, 32, 8, 128), {}, "hopper"), ((1, 16, 8192, 32, 8, 128), {}, "portable"),
    ((1, 256, 8192, 64, 8, 64), {}, "hopper"),
    ((1, 512, 8192, 16, 8, 256), {}, "hopper"), ((1, 512, 8192, 32, 8, 128), {"num_splits": 1}, "portable"),
    ((1, 512, 8192, 32, 8, 128), {"page_size": 7}, "hopper"), ((1, 512, 8192, 32, 8, 96), {"page_size": 7}, "portable"),
    ((1, 512, 8192, 32, 8, 96), {"page_size": 16}, "hopper"), ((1, 512, 8192, 32, 8, 128), {"unaligned": True}, "portable"),
    ((1, 512, 8192, 32, 8, 128), {"cache_dtype": torch.float8_e4m3fn}, "portable"),
    # packed: as long as their mean, not as the longest of them
    ((8, 2048, 8192, 32, 8, 128), {"total_q": 8}, "portable"), ((64, 512, 8192, 32, 8, 128), {"total_q": 575}, "portable"),
    ((8, 2048, 8192, 32, 8, 128), {"total_q": 8 * 512}, "hopper"), ((0, 512, 8192, 32, 8, 128), {"total_q": 0}, "portable"),
])  # fmt: skip
def test_many_queries_are_hoppers(shape, options, tier):
    batch, seqlen_q, capacity, heads, heads_kv, dim = shape
    options = {"cache_dtype": torch.bfloat16} | options
    problem = CacheProblem(batch, seqlen_q, capacity, heads, heads_kv, dim, dim, torch.bfloat16, window=(None, 0),
                           softmax_scale=1.0, **options)  # fmt: skip
    plan = dispatch.plan(problem, hardware.by_name("H200"), "decode")
    assert plan.tier == tier, plan.refusals
    assert (tier == "hopper") == ("hopper" not in dict(plan.refusals))


@pytest.mark.parametrize(("page_size", "leftpad", "rows"), [
    (None, False, 0), (1, False, 0), (8, False, 0), (16, False, 16), (48, False, 0), (64, False, 64), (128, False, 128),
    (192, False, 0), (256, False, 128), (64, True, 0),
])  # fmt: skip
def test_pages_that_tma_loads(page_size, leftpad, rows):
    problem = CacheProblem(1, 512, 8192, 32, 8, 128, 128, torch.bfloat16, torch.bfloat16, page_size, has_leftpad=leftpad)
    assert tiles.page_rows(problem, tiles.HopperConfig(128, 128, 2, 0)) == rows


def test_rows_that_tma_takes():
    """Pages beside one another or between others; not those at half a row, nor of k and v at different distances."""
    q = torch.randn(2, 8, 4, 16).half()

    def unaligned(k_cache, v_cache):
        table = torch.zeros(2, 4, dtype=torch.int32)
        operands = CacheOperands(q, k_cache, v_cache, cache_seqlens=_ints(9, 9), block_table=table)
        return CacheProblem.from_tensors(operands, CacheOptions(None, True, True, None, None, None, 0.0, 0, False)).unaligned

    caches = torch.randn(8, 2, 16, 4, 16).half()
    assert not unaligned(caches[:, 0], caches[:, 1])
    assert unaligned(caches[:, 0], caches[:, 1].contiguous())
    memory = torch.zeros(8 * 1100).half()
    at_half_a_row = memory.as_strided((8, 16, 4, 16), (1056, 64, 16, 1))
    assert unaligned(at_half_a_row, at_half_a_row)
    assert unaligned(*(torch.zeros(8, 16, 4, 20).half()[..., :16] for _ in range(2)))
    assert unaligned(*(torch.nn.Parameter(memory[1:4097].view(1, 64, 4, 16).half()) for _ in range(2)))


def _half(*shape):
    return torch.randn(shape, dtype=torch.float16)


@pytest.mark.parametrize(("make", "copies"), [
    (lambda: _half(2, 8, 4, 64), False), (lambda: _half(2, 4, 8, 64).transpose(1, 2), True),
    (lambda: _half(2, 9, 4, 64)[:, 1:], True), (lambda: _half(16, 4, 64), False),
    (lambda: _half(16, 4, 68)[..., :64], True), (lambda: _half(1, 4, 8, 64).transpose(1, 2), False),
])  # fmt: skip
def test_queries_that_tma_does_not_take_are_copied(make, copies):
    """Where they lie decides nothing else: a copy costs less than another tier."""
    kvcache = pytest.importorskip("flashtile.hopper.kvcache")
    q = make()
    batch = 2 if q.dim() == 3 else q.shape[0]
    cache = torch.randn(batch, 64, 4, 64).half()
    packed = {"cu_seqlens_q": _ints(0, 7, 16)} if q.dim() == 3 else {}
    operands = CacheOperands(q, cache, cache, cache_seqlens=_ints(*[40] * batch), **packed)
    options = CacheOptions(9 if packed else None, True, True, None, None, None, 0.0, 0, False)
    problem = CacheProblem.from_tensors(operands, options)
    assert not problem.unaligned
    call = kvcache.Call(problem, tiles.HopperConfig(128, 128, 2, 0), operands, hardware.by_name("H200"))
    launched = []
    call.launches.run = lambda *tensors: launched.append(tensors)
    call(operands)
    rows = launched[0][len(operands) + 2]
    if copies:
        assert rows.is_contiguous() and torch.equal(rows, q)
    else:
        assert rows is None


@pytest.mark.parametrize("num_splits", [0, 4])
@pytest.mark.parametrize("longest", [64, 32768, 2**31 - 1])
def test_a_loose_max_seqlen_q_costs_no_more_than_all_tokens(num_splits, longest):
    """A program of a row tile past int32 wrote in front of out; scratch was of 132 GiB."""
    pytest.importorskip("triton")
    from flashtile.portable import decode

    shape = dict(batch=64, total_q=64, capacity=8192, num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128,
                 dtype=torch.bfloat16, cache_dtype=torch.bfloat16, num_splits=num_splits)  # fmt: skip
    problem = CacheProblem(seqlen_q=longest, **shape)
    config = dispatch.plan(problem, hardware.by_name("H200"), "decode", prefer=("portable",)).configs["decode"]
    plan = decode.plan_parts(problem, config, 132)
    assert plan.num_tiles == -(-64 * 4 // config.tile_m)
    assert plan.num_programs == 64 * (8 // config.heads) * plan.num_tiles * max(num_splits, 1) or num_splits == 0
    assert plan.num_programs < 2**16 and plan.slots < 2**16


def test_fp64_queries_over_fp8_are_computed_in_fp64():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 3, 2, 16, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 8, 2, 16, generator=generator).to(FP8) for _ in range(2))
    out, lse = flashtile.attention_with_kvcache(q, k, v, return_lse=True)
    assert out.dtype == lse.dtype == torch.float64
    expected = flashtile.attention(q, k.double(), v.double())
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    arguments = (q, k, v, *[None] * 16, None, True, False, None, None, None, 0.0, 0, True)
    torch.library.opcheck(torch.ops.flashtile.kvcache.default, arguments, test_utils=("test_faketensor",))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_queries_are_rotated_in_fp32(dtype):
    """On a CPU, as on a GPU and as new keys are: in half precision sums of rounded products are off by half as much again."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 64, generator=generator).to(dtype) for _ in range(2))
    angle = torch.rand(1001, 32, generator=generator) * 6.28
    cache = torch.zeros(1, 1001, 1, 64, dtype=dtype)
    seen = []
    real = reference_kvcache.rotate

    def rotate(x, *arguments):
        seen.append(x.dtype)
        return real(x, *arguments)

    with mock.patch.object(reference_kvcache, "rotate", rotate):
        flashtile.attention_with_kvcache(q, cache, cache.clone(), k=k, v=k, cache_seqlens=1000, rotary_cos=angle.cos(),
                                         rotary_sin=angle.sin())  # fmt: skip
    assert len(seen) > 1 and set(seen) == {torch.float32}


@pytest.mark.parametrize("shape", [(0,), ()], ids=str)
def test_cu_seqlens_of_nothing_beside_one_length(shape):
    cache = torch.zeros(1, 8, 2, 16)
    with pytest.raises(ShapeError, match="^cu_seqlens_q"):
        flashtile.attention_with_kvcache(torch.zeros(2, 2, 16), cache, cache, cache_seqlens=3, max_seqlen_q=2,
                                         cu_seqlens_q=torch.zeros(shape, dtype=torch.int32))  # fmt: skip


def test_more_new_keys_than_slots_are_named():
    cache, new = torch.zeros(1, 8, 2, 16), torch.zeros(1, 12, 2, 16)
    with pytest.raises(ValueRangeError, match="^k: expected at most 8 new keys of sequence 0.*got 12"):
        flashtile.attention_with_kvcache(torch.zeros(1, 1, 2, 16), cache, cache.clone(), k=new, v=new,
                                         cache_seqlens=torch.zeros(1, dtype=torch.int32))  # fmt: skip


def test_combine_of_several_parts_whose_sink_is_inf():
    """Each has as much: the sum of weights is 1 there, too."""
    out = torch.stack([torch.ones(1, 1, 1, 4), torch.full((1, 1, 1, 4), 3.0), torch.full((1, 1, 1, 4), 7.0)])
    lse = torch.tensor([math.inf, math.inf, 0.0])[:, None, None, None]
    merged, total = flashtile.combine(out, lse)
    assert (merged == 2).all() and (total == math.inf).all()
