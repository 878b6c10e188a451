"""Attention on a key-value cache on a GPU: every case against float64, and what only a GPU can show."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import checks
import pytest
import torch
from cache_cases import BY_NAME, CASES, FP8_CASES, NO_PAGE, CacheCase, check_cache

import flashtile
from flashtile import hardware, tiles
from flashtile.kvcache_problem import FP8

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Random configurations against float64; FLASHTILE_TEST_CONFIGURATIONS=1000 for a long run
NUM_CONFIGURATIONS = int(os.environ.get("FLASHTILE_TEST_CONFIGURATIONS", "60"))
NUM_CHUNKS = 10
# Kinds of calls among random configurations, each with kernels of its own, which take longer to compile than to run
NUM_KINDS = 100


def skip_without_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has fp8 (e4m3) from sm_89 on")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, dtype, poisoned):
    check_cache(case, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case.name)
def test_fp8(case, dtype, poisoned):
    skip_without_fp8()
    check_cache(case, dtype, "cuda")


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize(("head_dim", "heads_kv", "seqlen_q"), [
    (128, 8, 1), (128, 2, 1), (128, 8, 6), (128, 8, 16), (64, 8, 1), (64, 2, 1), (64, 8, 6), (72, 8, 1), (72, 2, 1), (96, 8, 1),
    (96, 2, 1), (40, 8, 1), ((96, 128), 8, 1), (136, 8, 1), (192, 2, 1), ((192, 128), 8, 1), (256, 8, 1), (256, 2, 20),
    (128, 1, 1), (160, 8, 1), (168, 8, 1), (192, 8, 1), (192, 32, 1),
    (40, 8, 20), (64, 8, 20), (72, 2, 20), (96, 2, 20), (128, 8, 20), (160, 2, 20), ((192, 64), 2, 20),
])  # fmt: skip
def test_large_cache_of_fp8(head_dim, heads_kv, seqlen_q, page_size, poisoned, monkeypatch):
    """All tiles: of several heads, of one, of 32 rows and of 64."""
    skip_without_fp8()
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    head_dim, head_dim_v = head_dim if isinstance(head_dim, tuple) else (head_dim, None)
    lengths = (4096, 1, 0, 3000, 2048, 63, 129, 4032, 4000, 777, 65, 1500)
    case = CacheCase("fp8", lengths, seqlen_q, capacity=4096, page_size=page_size, heads=4 * heads_kv, heads_kv=heads_kv,
                     head_dim=head_dim, head_dim_v=head_dim_v, causal=True, fp8="cache", descale=True)  # fmt: skip
    for dtype in DTYPES[:2]:
        check_cache(case, dtype, "cuda")
    for num_splits in (0, 3):
        check_cache(replace(case, fp8="all", num_splits=num_splits), torch.bfloat16, "cuda")


@pytest.mark.parametrize("heads_kv", [2, 8])
@pytest.mark.parametrize("power", [-90, -40, 0, 40, 90])
def test_queries_of_any_size_over_fp8(power, heads_kv, poisoned):
    """bf16 has a range that fp16, in which they are multiplied, has not: each row is brought to its size."""
    skip_without_fp8()
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(32, 1, 4 * heads_kv, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(32, 2048, heads_kv, 128, generator=generator, device="cuda").to(FP8) for _ in range(2))
    sizes = torch.ones(4 * heads_kv, 1, device="cuda", dtype=torch.bfloat16)
    # Beside rows of that size one that is 0, one with an inf, and one that is a thousandth
    sizes[1], sizes[2] = 0, 2.0**-10
    q = q * sizes
    q[:, :, 3, 5] = float("inf")
    call = dict(cache_seqlens=torch.full((32,), 2048, device="cuda", dtype=torch.int32), return_lse=True)
    expected = flashtile.attention_with_kvcache(q, k, v, softmax_scale=0.1, **call)
    results = flashtile.attention_with_kvcache(q * 2.0**power, k, v, softmax_scale=0.1 * 2.0**-power, **call)
    for result, before in zip(results, expected):
        torch.testing.assert_close(result, before, equal_nan=True, rtol=0, atol=1e-6)
    wide = flashtile.attention_with_kvcache(q, k.bfloat16(), v.bfloat16(), softmax_scale=0.1, **call)
    finite = [i for i in range(4 * heads_kv) if i != 3]
    torch.testing.assert_close(expected[0][:, :, finite], wide[0][:, :, finite], rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(expected[1][:, finite], wide[1][:, finite], rtol=1e-4, atol=1e-4)
    assert torch.equal(expected[0].isnan(), wide[0].isnan())


@pytest.mark.parametrize("case", [c.scaled(11) for c in CASES], ids=lambda case: case.name)
def test_larger_case(case, poisoned):
    """Eleven times as long: many parts a row tile, tiles of 64 queries, rows that no power of two divides."""
    check_cache(case, torch.bfloat16, "cuda", seed=3)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", [*CASES, *(replace(c.scaled(11), name=f"{c.name}_11") for c in CASES)], ids=lambda c: c.name)
def test_hopper_case(case, dtype, poisoned, monkeypatch):
    """By the kernel of many queries, what has few of them too."""
    monkeypatch.setenv("FLASHTILE_TIER", "hopper")
    try:
        check_cache(case, dtype, "cuda", seed=3)
    except flashtile.UnsupportedError as error:
        pytest.skip(str(error).splitlines()[1])


@pytest.mark.parametrize("case", [*CASES, *(replace(c.scaled(11), name=f"{c.name}_11") for c in CASES)], ids=lambda c: c.name)
def test_hopper_case_in_three_parts(case, three_parts, poisoned, monkeypatch):
    test_hopper_case(case, torch.bfloat16, poisoned, monkeypatch)


def test_combine_of_more_than_2_to_31_rows():
    parts = torch.ones(1, 1, 1, 1, 1, device="cuda", dtype=torch.half).expand(1, 1, 2**31 + 512, 1, 1)
    out, lse = flashtile.combine(parts, torch.zeros(1, 1, 1, 1, device="cuda").expand(1, 1, 1, 2**31 + 512))
    for x, value in ((out.flatten(), 1), (lse.flatten(), 0)):
        assert (x[:1024] == value).all() and (x[-1024:] == value).all()


PREFILL = CacheCase("prefill", (1100, 0, 1733, 640, 3, 2048), seqlen_q=300, new=300, capacity=2560, causal=True, heads=8)


@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 96, (192, 128)], ids=str)
def test_prefill(head_dim, page_size, poisoned, monkeypatch):
    """Chunks of prompts, a window of them, packed ones, on pages of all kinds; on Hopper by its forward kernel."""
    if torch.cuda.get_device_capability() == (9, 0):
        monkeypatch.setenv("FLASHTILE_TIER", "hopper,portable")
    head_dim, head_dim_v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    case = replace(PREFILL, page_size=page_size, head_dim=head_dim, head_dim_v=head_dim_v)
    packed = dict(new=None, lengths_q=(150, 0, 300, 1, 77, 256), lengths_new=(150, 3, 300, 1, 77, 256), tail=5)
    for more in (case, replace(case, window=(200, 0)), replace(case, **packed)):
        check_cache(more, torch.bfloat16, "cuda", seed=5)


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize("long_tiles", [192, 256], indirect=True)
def test_prefill_by_tiles_of_many_queries(long_tiles, page_size, poisoned, monkeypatch):
    """Of head dim 64, which has tiles of 128 rows where queries are few, as in these tests."""
    take_hopper_alone(monkeypatch)
    for window in ((None, None), (200, 0)):
        check_cache(replace(PREFILL, page_size=page_size, window=window), torch.bfloat16, "cuda", seed=5)


FP8_PREFILL = replace(PREFILL, new=None, fp8="all", descale=True)


def take_hopper_alone(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for sm_90")
    monkeypatch.setenv("FLASHTILE_TIER", "hopper")


def check_fp8_on_hopper(case, monkeypatch):
    """With queries of fp8 the tensor cores multiply weights in fp8 as well."""
    take_hopper_alone(monkeypatch)
    check_cache(case, torch.bfloat16, "cuda", seed=5, fp8_weights=True)


@pytest.mark.parametrize("page_size", [None, 16, 64, 256])
@pytest.mark.parametrize("head_dim", [
    64, 96, 128, 256, (192, 128), (80, 112), (64, 128), 208, (128, 64), (192, 64), (64, 256), 160, (144, 176), (32, 48),
    (128, 256), (96, 160),
], ids=str)  # fmt: skip
def test_prefill_of_fp8(head_dim, page_size, poisoned, monkeypatch):
    head_dim, head_dim_v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    case = replace(FP8_PREFILL, page_size=page_size, head_dim=head_dim, head_dim_v=head_dim_v)
    for more in (case, replace(case, window=(200, 0)), replace(case, causal=False, descale=False),
                 replace(case, lengths_q=(150, 0, 300, 1, 77, 256), tail=5)):  # fmt: skip
        check_fp8_on_hopper(more, monkeypatch)


@pytest.mark.parametrize("options", [
    dict(softcap=5.0), dict(softcap=80.0), dict(alibi="heads"), dict(alibi="heads", causal=False),
    dict(alibi="batch", sinks=True), dict(sinks=True),
    dict(softmax_scale=-0.3), dict(window=(100, 50), causal=False), dict(leftpad=(100, 0, 3, 640, 1, 0)),
    dict(heads_kv=1, seqlen_q=20), dict(heads_kv=8), dict(new=300), dict(new=300, page_size=64),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_of_fp8_with(options, head_dim, poisoned, monkeypatch):
    check_fp8_on_hopper(replace(FP8_PREFILL, head_dim=head_dim, head_dim_v=head_dim, **options), monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_of_fp8_adds_up_in_fp32(head_dim, monkeypatch):
    """Values of mean 1, whose sums do not cancel, in parts of 8192 keys: those of the tensor cores are off by a tenth."""
    take_hopper_alone(monkeypatch)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, rows, 2, head_dim, generator=generator, device="cuda") for rows in (64, 131072, 131072))
    q, k, v = q.to(FP8), k.to(FP8), (v + 1).to(FP8)
    out = flashtile.attention_with_kvcache(q, k, v)[0].double()
    q, k, v = (x[0].double().transpose(0, 1) for x in (q, k, v))
    expected = ((q @ k.mT * head_dim**-0.5).softmax(-1) @ v).transpose(0, 1)
    # bf16 of out alone is off by 0.002
    assert (out - expected).norm() / expected.norm() < 0.004


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_of_fp8_repeats(head_dim, monkeypatch):
    """A hundred calls, bit by bit; and a head whose descale is 0, as of a head of zeros."""
    take_hopper_alone(monkeypatch)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 777, heads, head_dim, generator=generator, device="cuda").to(FP8) for heads in (8, 2, 2))
    descale = torch.tensor([[0.0, 1.0], [2.0, 1.0]], device="cuda")
    call = dict(k_descale=descale, causal=True, return_lse=True)
    first = flashtile.attention_with_kvcache(q, k, v, **call)
    # The mean of the keys so far
    mean = v[0, :, 0].double().cumsum(0) / torch.arange(1, 778, device="cuda")[:, None]
    torch.testing.assert_close(first[0][0, :, :4].double(), mean[:, None].expand(-1, 4, -1), rtol=0.02, atol=0.01)
    for _ in range(100):
        for x, y in zip(flashtile.attention_with_kvcache(q, k, v, **call), first, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("page_size", [None, 7, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, (192, 128)], ids=str)
def test_prefill_in_three_parts(head_dim, page_size, three_parts, poisoned, monkeypatch):
    test_prefill(head_dim, page_size, poisoned, monkeypatch)


@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_prefill_reads_nothing_left_of_the_window(page_size, monkeypatch):
    """A server frees those pages."""
    q = torch.randn(2, 130, 8, 128, device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = torch.randn(2, 2, 1024, 8, 128, device="cuda", dtype=torch.bfloat16).unbind()
    options = dict(cache_seqlens=torch.tensor([1000, 900], dtype=torch.int32, device="cuda"), window=(100, 0))
    if page_size:
        k_cache, v_cache = (x.view(-1, page_size, 8, 128) for x in (k_cache, v_cache))
        pages = 2048 // page_size
        options["block_table"] = torch.arange(pages, dtype=torch.int32, device="cuda").view(2, -1)
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    expected = flashtile.attention_with_kvcache(q, k_cache, v_cache, **options)
    for x in (k_cache, v_cache):
        x.view(2, 1024, 8, 128)[:, :640] = float("nan")
    if page_size:
        options["block_table"][:, : 640 // page_size] = NO_PAGE
    # Not where FLASHTILE_TEST_AS takes it for an older GPU
    if hardware.detect().sm == 90:
        monkeypatch.setenv("FLASHTILE_TIER", "hopper")
    torch.testing.assert_close(flashtile.attention_with_kvcache(q, k_cache, v_cache, **options), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
def test_bits_of_prefills_repeat(page_size, num_parts, monkeypatch, forget):
    """100 runs of two calls in turn, and of a graph, with the keys in one part and in three."""
    monkeypatch.setattr(tiles, "_numbers_of_parts", lambda problem, device, config: (num_parts,))
    forget()
    # A page of all slots is a row
    (q, *caches), options = serving_call(6, page_size=page_size or 3000, seqlen_q=200)
    if not page_size:
        del options["block_table"]
    queries = q, q.flip(2)

    def call(x):
        return flashtile.attention_with_kvcache(x, *caches, causal=True, return_lse=True, **options)

    firsts = [call(x) for x in queries]
    for _ in range(100):
        for x, first in zip(queries, firsts):
            assert all(map(torch.equal, call(x), first))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(q)
    for _ in range(100):
        graph.replay()
        assert all(map(torch.equal, captured, firsts[0]))


@pytest.mark.parametrize(("page_size", "head_dim"), [*((size, 128) for size in (None, 1, 16, 64, 96, 128)),
                                                     *((size, 72) for size in (None, 1, 16, 64))])  # fmt: skip
def test_large_cache(page_size, head_dim, poisoned):
    """Tiles and pages of caches too large for those of a small one; of head dim 72 in a loop for each row tile."""
    lengths = (4096, 1, 0, 3000, 2048, 63, 129, 4032, 4000, 777, 65, 1500)
    check_cache(CacheCase("large", lengths=lengths, capacity=4128 if page_size == 96 else 4096, page_size=page_size, heads=32,
                          heads_kv=8, head_dim=head_dim), torch.bfloat16, "cuda")  # fmt: skip


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("num_sequences", [900, 1500, 2500])
def test_many_sequences(num_sequences, page_size, seqlen_q, poisoned):
    """As many as are added up at once, and more; and so many that each has a program. Also packed, as servers call it, and
    where some sequences have none: single ones, or half of them side by side."""
    draw = random.Random(0)
    # Few different ones: those that are alike are compared at once
    some_lengths = [0, 1, 64, *(draw.randint(0, 300) for _ in range(21))]
    lengths = tuple(draw.choice(some_lengths) for _ in range(num_sequences))
    case = CacheCase("many", lengths, seqlen_q, capacity=320, page_size=page_size, heads=4, heads_kv=1, head_dim=64,
                     causal=True)  # fmt: skip
    check_cache(case, torch.bfloat16, "cuda")
    of_all, none = [seqlen_q] * num_sequences, [0] * (num_sequences // 2)
    some = [draw.randint(0, seqlen_q) for _ in lengths]
    half = of_all[len(none) :]
    packed = {None: (of_all, some, none + half, half + none), 16: (some,), 64: (of_all,)}
    for lengths_q in packed[page_size]:
        check_cache(replace(case, lengths_q=tuple(lengths_q)), torch.bfloat16, "cuda")


# Sequences of one query and a few, and some of many: two kernels, see mixed.py
MIXED = CacheCase("mixed", (900, 0, 64, 2048, 1500, 1, 777, 300) * 8, lengths_q=(1, 0, 2, 1, 4, 1, 333, 1) + (1,) * 55 + (200,),
                  capacity=2048, heads=32, heads_kv=8, causal=True, tail=3)  # fmt: skip


@pytest.mark.parametrize("page_size", [None, 1, 64])
@pytest.mark.parametrize("options", [
    {}, {"head_dim": 64}, {"head_dim": 256, "heads": 16}, {"head_dim": 96, "heads": 8}, {"head_dim": 192, "head_dim_v": 128},
    {"heads_kv": 1, "heads": 4}, {"causal": False, "window": (500, 20), "sinks": True}, {"softcap": 30.0, "alibi": "batch"},
    {"fp8": "all", "descale": True}, {"fp8": "cache"},
], ids=str)  # fmt: skip
def test_mixed(options, page_size, poisoned, forget, monkeypatch):
    from flashtile import mixed

    forget()
    monkeypatch.setattr(mixed, "LEAST_SLOTS", 0)
    if options.get("fp8"):
        skip_without_fp8()
    case = replace(MIXED, page_size=page_size, **{"head_dim": 128} | options)
    plans = []
    with mock.patch.object(mixed, "plans", lambda *call, of=mixed.plans: plans.append(of(*call)) or plans[-1]):
        # q kᵀ of the long ones is of fp8 on Hopper, weights too
        check_cache(case, torch.bfloat16, "cuda", fp8_weights=options.get("fp8") == "all")
    assert plans and len(plans[0]) == 2


@pytest.mark.parametrize("page_size", [None, 64])
def test_bits_of_mixed_repeat(page_size):
    """100 runs, the same bits; in a graph too, which reads lengths and starts at each replay."""
    call = replace(MIXED, page_size=page_size, head_dim=128).make(torch.bfloat16, "cuda")
    tensors, options = call.arguments
    first = flashtile.attention_with_kvcache(*tensors, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = flashtile.attention_with_kvcache(*tensors, **options)
    for _ in range(50):
        graph.replay()
        for again in (replayed, flashtile.attention_with_kvcache(*tensors, **options)):
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    # The long ones change places with short ones
    starts = options["cu_seqlens_q"]
    starts.copy_(torch.cat([starts[:1], starts.diff().flip(0).cumsum(0)]).int())
    graph.replay()
    expected = flashtile.attention_with_kvcache(*tensors, **options)
    assert all(torch.equal(x, y) for x, y in zip(expected, replayed, strict=True))
    assert not torch.equal(expected[0], first[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_more_sequences_than_are_added_up_at_once(case, poisoned, monkeypatch, forget):
    from flashtile.portable import decode

    forget()
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    monkeypatch.setattr(decode, "MOST_AT_ONCE", 2)
    check_cache(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize("head_dim", [40, 80, 96, 120, 160])
def test_large_cache_of_many_heads(page_size, head_dim, poisoned):
    """On Hopper a program has several heads, of few and many rows, and parts are merged by it and by a kernel after it."""
    lengths = (2048, 1, 0, 1500, 2031, 63, 129)
    case = CacheCase("heads", lengths=lengths, capacity=2048, page_size=page_size, heads=32, heads_kv=32, head_dim=head_dim)
    check_cache(case, torch.bfloat16, "cuda")
    more = dict(heads=96, seqlen_q=5, causal=True, window=(700, 0), sinks=True, new=5, lengths=(2043, 1, 7) * 2)
    check_cache(replace(case, **more), torch.float16, "cuda")


@pytest.mark.parametrize("case", [c for c in CASES + FP8_CASES if c.capacity and max(c.head_dim, c.dim_v) <= 160],
                         ids=lambda case: case.name)  # fmt: skip
def test_several_heads_of_a_program(case, poisoned, monkeypatch, forget):
    """All that a call may ask for, by the tiles of many heads: four of 16 bits, two of fp8."""
    if case.fp8:
        skip_without_fp8()
    from flashtile.portable import decode

    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    call, configs = decode.Call, []

    def with_heads(problem, config, *rest):
        of_fp8 = tiles.DecodeConfig(16, 16, 2, 3, 4, one_loop=False, heads=2)
        configs.append(of_fp8 if case.fp8 else tiles.DecodeConfig(16, 16, 4, 3, 2, one_loop=False, heads=4))
        return call(problem, configs[-1], *rest)

    forget()
    monkeypatch.setattr(decode, "Call", with_heads)
    case = replace(case.scaled(11), heads=4 * case.heads, heads_kv=4 * case.heads_kv)
    check_cache(case, torch.bfloat16, "cuda", seed=3)
    assert configs or not case.seqlen_q


@pytest.mark.parametrize(("config", "case"), [
    (tiles.DecodeConfig(16, 64, 4, 3, 2, whole=True), CacheCase("fp8_groups", capacity=256, heads=8, heads_kv=1, head_dim=128,
                                                                 lengths=(256, 0, 31, 64) * 500, fp8="cache", descale=True)),
    (tiles.DecodeConfig(16, 64, 4, 3, 2), CacheCase("dim_96", (4096, 1, 0, 63) * 16, capacity=4096, heads=32, heads_kv=8,
                                                    head_dim=96)),
    (tiles.DecodeConfig(16, 64, 4, 3, 2), CacheCase("short", (1024, 1, 0, 63) * 16, capacity=1024, heads=32, heads_kv=8,
                                                    head_dim=128)),
    (tiles.DecodeConfig(16, 128, 8, 3, 1), CacheCase("rows", (4096, 1, 0, 63) * 8, capacity=4096, heads=32, heads_kv=8,
                                                     head_dim=128)),
    (tiles.DecodeConfig(16, 128, 8, 3, 1), CacheCase("rows_8_paged", (2048, 1, 0, 63) * 16, capacity=2048, heads=64, heads_kv=8,
                                                     head_dim=128, page_size=64)),
    (tiles.DecodeConfig(32, 64, 4, 3, 1), CacheCase("rows_32", (16384,), capacity=16384, heads=64, heads_kv=2, head_dim=128)),
    (None, CacheCase("keeps_q", (4096, 1, 0, 63) * 8, capacity=4096, heads=32, heads_kv=8, head_dim=128)),
], ids=lambda x: getattr(x, "name", ""))  # fmt: skip
def test_rows_of_the_table(config, case, poisoned, monkeypatch, forget):
    """Those that no other test has; of an H100 the one that keeps queries, on any GPU."""
    from flashtile.portable import decode

    if case.fp8:
        skip_without_fp8()
    call, taken = decode.Call, []
    keeps_q = tiles.DecodeConfig(16, 128, 8, 3, 1, keeps_q=True)

    def watched(problem, chosen, *rest):
        taken.append(chosen if config else keeps_q)
        return call(problem, taken[-1], *rest)

    forget()
    monkeypatch.setattr(decode, "Call", watched)
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    check_cache(case, torch.bfloat16, "cuda")
    assert taken and (hardware.detect("cuda").name != "H200" or taken[0] == (config or keeps_q))


def random_case(seed):
    """Options of one of NUM_KINDS kinds, and lengths. Triton has kernels of their own for windows that are multiples of 16."""
    kind, draw = random.Random(seed % NUM_KINDS), random.Random(seed)
    batch, heads_kv = kind.choice([1, 2, 5, 9]), kind.choice([1, 2, 3])
    seqlen_q = kind.choice([1, 1, 1, 2, 5, 33, 150])
    packed, appends = kind.random() < 0.3, kind.random() < 0.5
    capacity = draw.choice([200, 777, 2048])
    lengths = tuple(draw.choice([0, 1, draw.randint(0, capacity - 150)]) for _ in range(batch))
    # One of many queries, or any numbers
    long, most = draw.randrange(batch), kind.choice([seqlen_q, min(seqlen_q, 2)])
    lengths_q = tuple(seqlen_q if i == long else draw.randint(0, most) for i in range(batch)) if packed else None
    lengths_new = tuple(draw.randint(0, 150) for _ in range(batch)) if packed and appends else None
    head_dim = 8 * kind.randint(1, 32)
    window = (16 * draw.randint(0, 18) + kind.choice([0, 5]), kind.choice([0, 3, None]))
    return CacheCase(
        f"random_{seed}", lengths=lengths, seqlen_q=seqlen_q, new=seqlen_q if appends and not packed else None,
        capacity=capacity, page_size=kind.choice([None, 1, 7, 16, 64, 128, 256]), heads=heads_kv * kind.choice([1, 2, 4, 8, 9]),
        heads_kv=heads_kv, head_dim=head_dim, head_dim_v=kind.choice([None, 8 * kind.randint(1, 32)]), lengths_q=lengths_q,
        lengths_new=lengths_new, tail=draw.choice([0, 3]) if packed else 0,
        leftpad=tuple(draw.randint(0, n) for n in lengths) if kind.random() < 0.3 else None, causal=kind.random() < 0.5,
        window=kind.choice([(None, None), (None, None), window]), softcap=kind.choice([0.0, 0.0, 4.0]),
        alibi=kind.choice([None, None, "heads", "batch"]), sinks=kind.random() < 0.3,
        rotary_dim=kind.choice([0, 8, min(64, head_dim)]) if appends else 0, interleaved=kind.random() < 0.5,
        num_splits=kind.choice([0, 0, 0, 1, 3, 16]),
        **kind.choice([{}, {}, {}, {"fp8": "cache"}, {"fp8": "cache", "descale": True}]),
    )  # fmt: skip


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_configurations(chunk, poisoned):
    for seed in range(chunk, NUM_CONFIGURATIONS, NUM_CHUNKS):
        check_cache(random_case(seed), DTYPES[seed % 2], "cuda", seed=seed)


def serving_call(batch, capacity=3000, page_size=16, heads=8, heads_kv=2, seqlen_q=1, dim=128):
    """(q, k_cache, v_cache), options of a ragged batch in pages; the first sequences do not depend on the batch."""
    draw = torch.Generator().manual_seed(0)
    pages = -(-capacity // page_size)
    q = torch.randn(batch, seqlen_q, heads, dim, generator=draw).to("cuda", torch.bfloat16)
    caches = [torch.randn(batch * pages, page_size, heads_kv, dim, generator=draw).to("cuda", torch.bfloat16) for _ in range(2)]
    lengths = torch.randint(1, capacity, (batch,), generator=draw, dtype=torch.int32).cuda()
    table = torch.randperm(batch * pages, generator=draw).int().view(batch, pages).cuda()
    return (q, *caches), dict(cache_seqlens=lengths, block_table=table)


@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_fixed_splits_do_not_depend_on_the_batch(seqlen_q):
    (q, k_cache, v_cache), options = serving_call(37, seqlen_q=seqlen_q)
    together = flashtile.attention_with_kvcache(q, k_cache, v_cache, causal=True, num_splits=8, return_lse=True, **options)
    for rows in (slice(0, 1), slice(11, 12), slice(5, 30)):
        own = {name: x[rows] for name, x in options.items()}
        alone = flashtile.attention_with_kvcache(q[rows], k_cache, v_cache, causal=True, num_splits=8, return_lse=True, **own)
        assert all(torch.equal(x[rows], y) for x, y in zip(together, alone))


@pytest.mark.parametrize(("batch", "num_splits", "dim", "heads_kv"), [
    (1, 0, 128, 2), (1, 5, 128, 2), (60, 0, 128, 2), (40, 5, 128, 2), (1, 0, 72, 2), (120, 0, 72, 2), (9, 0, 96, 32),
    (40, 0, 40, 32),
])  # fmt: skip
def test_bits_repeat(batch, num_splits, dim, heads_kv):
    """100 runs, the same bits: a race would move them. Queries take turns, so that a stale partial result is another one."""
    (q, *rest), options = serving_call(batch, dim=dim, heads=max(8, heads_kv), heads_kv=heads_kv)
    queries, firsts = (q, q.flip(2)), [None, None]
    for i in range(200):
        again = flashtile.attention_with_kvcache(queries[i % 2], *rest, num_splits=num_splits, return_lse=True, **options)
        first = firsts[i % 2] = firsts[i % 2] or again
        assert all(torch.equal(x, y) for x, y in zip(first, again))
    assert not torch.equal(firsts[0][0], firsts[1][0])


@pytest.mark.parametrize(("lengths", "capacity"), [((450,), 500), ((3, 480, 40, 300), 500), ((640, 2900, 1, 1500) * 4, 3000)])
def test_the_last_to_end_merges(lengths, capacity, poisoned, monkeypatch):
    """Parts merged in the kernel, by whoever is last, against float64: new data in each call, results and scratch poisoned."""
    from flashtile.portable.decode import Call

    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    batch, draw = len(lengths), torch.Generator("cuda").manual_seed(0)
    chunks, init = [], Call.__init__

    def watched(self, *arguments):
        init(self, *arguments)
        chunks.append(self.constexprs["CHUNK"])

    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    with mock.patch.object(Call, "__init__", watched):
        for _ in range(30):
            q = torch.randn(batch, 1, 8, 128, device="cuda", dtype=torch.bfloat16, generator=draw)
            k, v = torch.randn(2, batch, capacity, 2, 128, device="cuda", dtype=torch.bfloat16, generator=draw).unbind()
            out = flashtile.attention_with_kvcache(q, k, v, cache_seqlens=cache_seqlens)
            for b, length in enumerate(lengths):
                operands = (q[b].transpose(0, 1), *(x[b, :length].transpose(0, 1).repeat_interleave(4, 0) for x in (k, v)))
                expected, torchs = (torch.nn.functional.scaled_dot_product_attention(*operands) for operands in (
                    [x.double() for x in operands], operands))  # fmt: skip
                report = checks.compare("out", out[b], expected.transpose(0, 1), torchs.transpose(0, 1), torch.bfloat16)
                assert not report, (length, report)
    assert chunks and all(chunks)


@pytest.mark.parametrize("num_splits", [0, 6])
def test_graphs_and_calls_side_by_side(num_splits):
    """Two graphs and a call on three streams at once: none writes into what another one uses."""
    tensors, options = serving_call(2)
    streams = [torch.cuda.Stream() for _ in range(3)]

    def call():
        return flashtile.attention_with_kvcache(*tensors, num_splits=num_splits, return_lse=True, **options)

    expected = call()
    torch.cuda.synchronize()
    graphs, results = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results += call()
    for _ in range(200):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager = call()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip((*results, *eager), expected * 3))


def test_threads_on_one_stream():
    """Kernels of one thread's call come between those of another's: their partial results are not in one place."""
    tensors, options = serving_call(2)
    q, *rest = tensors
    queries = [q, q.flip(0), q.flip(1), -q]

    def results(query):
        torch.cuda.synchronize()
        return [flashtile.attention_with_kvcache(query, *rest, **options) for _ in range(300)]

    expected = [results(query)[-1] for query in queries]
    with ThreadPoolExecutor(len(queries)) as threads:
        found = list(threads.map(results, queries))
    assert all(torch.equal(x, y) for outs, y in zip(found, expected) for x in outs)


def test_cuda_graph_reads_lengths_and_tables_anew():
    """A captured step of append, rotary embedding and attention follows the lengths, the table and the tokens in memory."""
    case = CacheCase("graph", lengths=(1000, 1000, 1000), new=1, capacity=1024, page_size=16, rotary_dim=64, causal=True)
    (q, k_cache, v_cache), options = case.make(torch.bfloat16, "cuda").arguments
    flashtile.attention_with_kvcache(q, k_cache, v_cache, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashtile.attention_with_kvcache(q, k_cache, v_cache, **options)
    for lengths in ((5, 900, 1), (130, 0, 1023)):
        (q_new, *caches), new = replace(case, lengths=lengths).make(torch.bfloat16, "cuda", seed=7).arguments
        # other contents of the same tensors; these sequences need fewer pages
        for x, y in ((k_cache, caches[0]), (v_cache, caches[1])):
            x[: len(y)].copy_(y)
        q.copy_(q_new)
        for name in ("k", "v", "cache_seqlens", "block_table", "rotary_cos", "rotary_sin"):
            options[name].copy_(new[name])
        graph.replay()
        expected = flashtile.attention_with_kvcache(q_new, *caches, **new)
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(captured, expected))
        assert torch.equal(k_cache[: len(caches[0])].nan_to_num(7.0), caches[0].nan_to_num(7.0))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def step(q, k, v, k_cache, v_cache, lengths):
        out = flashtile.attention_with_kvcache(q * 2, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, causal=True)
        return out + 1, lengths + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for batch in (2, 3):
        caches = [torch.randn(batch, 256, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        new = [torch.randn(batch, 1, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
        lengths = torch.arange(100, 100 + batch, dtype=torch.int32, device="cuda")
        copies = [x.clone() for x in caches]
        expected, actual = step(*new, *copies, lengths), compiled(*new, *caches, lengths)
        for x, y in zip((*actual, *caches), (*expected, *copies)):
            torch.testing.assert_close(x, y)


def broken_calls():
    """(what, changes) of calls whose index tensors point outside of the cache; sequence 1 is wrong, the others are right."""
    yield "length", lambda options: options["cache_seqlens"].__setitem__(1, 2**31 - 1)
    yield "negative length", lambda options: options["cache_seqlens"].__setitem__(1, -5)
    yield "page", lambda options: options["block_table"].__setitem__((1, 0), NO_PAGE)
    yield "negative page", lambda options: options["block_table"].__setitem__((1, slice(None)), -7)


@pytest.mark.parametrize("what", [name for name, _ in broken_calls()])
@pytest.mark.parametrize("append", [False, True])
def test_what_points_outside_stays_inside(what, append, monkeypatch):
    """No access outside of the cache, right results of other sequences, their pages untouched; an error when debugging."""
    tensors, options = serving_call(3, capacity=320)
    options["cache_seqlens"].fill_(100)
    if append:
        new = torch.randn(2, 3, 1, 2, 128, device="cuda", dtype=torch.bfloat16)
        options |= dict(k=new[0], v=new[1])
    right = [x.clone() for x in tensors]
    expected = flashtile.attention_with_kvcache(*right, **options)
    dict(broken_calls())[what](options)
    own_pages = options["block_table"][[0, 2]].flatten().long()
    actual = flashtile.attention_with_kvcache(*tensors, **options)
    torch.cuda.synchronize()
    assert torch.equal(actual[[0, 2]], expected[[0, 2]])
    assert all(torch.equal(x[own_pages], y[own_pages]) for x, y in zip(tensors[1:], right[1:]))
    monkeypatch.setenv("FLASHTILE_DEBUG", "1")
    with pytest.raises(flashtile.ValueRangeError, match=r"cache_seqlens\[1\]" if "length" in what else r"block_table\[1, 0\]"):
        flashtile.attention_with_kvcache(*tensors, **options)


def test_no_wait_for_the_device(forget):
    """Not at the first call nor later: torch would raise at a synchronisation."""
    case = BY_NAME["packed_append"]
    call = case.make(torch.bfloat16, "cuda")
    tensors, options = call.arguments
    forget()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            flashtile.attention_with_kvcache(*tensors, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cache_past_2_to_the_31_elements():
    """The last row of a cache of more than 2**31 elements, against that row alone."""
    if torch.cuda.get_device_properties(0).total_memory < 30 * 2**30:
        pytest.skip("needs 30 GiB")
    k_cache = torch.empty(65, 32768, 8, 128, device="cuda", dtype=torch.bfloat16)
    assert k_cache.numel() > 2**31
    k_cache[-1].normal_()
    q = torch.randn(1, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    row = torch.tensor([64], device="cuda", dtype=torch.int32)
    out = flashtile.attention_with_kvcache(q, k_cache, k_cache, cache_batch_idx=row)
    assert torch.equal(out, flashtile.attention_with_kvcache(q, k_cache[-1:], k_cache[-1:]))
    for page_size in (256, 64, 16):
        pages, used = k_cache.view(-1, page_size, 8, 128), 32768 // page_size
        table = torch.arange(64 * used, 65 * used, device="cuda", dtype=torch.int32)[None]
        paged = flashtile.attention_with_kvcache(q, pages, pages, block_table=table)
        if page_size == 256:
            # The same tiles as without pages
            assert torch.equal(paged, out)
        # Tiles of other sizes are summed in another order
        torch.testing.assert_close(paged, out, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3, 70])
def test_combine(splits, dtype):
    out, lse = torch.randn(splits, 2, 5, 3, 200, device="cuda", dtype=dtype), 4 * torch.randn(splits, 2, 3, 5, device="cuda")
    lse[splits // 2, 0] = float("-inf")
    out[lse.transpose(2, 3) == float("-inf")] = float("nan")
    expected, expected_lse = flashtile.combine(out.cpu().float(), lse.cpu())
    merged, merged_lse = flashtile.combine(out, lse)
    assert merged.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(merged.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(merged_lse.cpu(), expected_lse)
