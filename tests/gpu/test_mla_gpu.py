"""Latent attention decode on a GPU: every case and random ones against float64 on each tier, bits, graphs, prefill."""

import os
from dataclasses import replace

import checks
import pytest
import torch
from cases import Case
from mla_cases import (
    BY_NAME,
    CASES,
    SCALES,
    MlaCase,
    check,
    check_infinite_sink,
    check_lse_without_sinks,
    check_other_lengths,
    compare,
    random_case,
)

from flashtile import hardware
from flashtile.calls import Calls
from flashtile.errors import DtypeError, ShapeError, UnsupportedError
from flashtile.mla import make_schedule, mla_decode, ops, plan
from flashtile.mla.problem import MlaOperands, MlaProblem

pytestmark = pytest.mark.gpu
# FLASHTILE_TEST_CONFIGURATIONS=500 for a long run
NUM_CONFIGURATIONS = int(os.environ.get("FLASHTILE_TEST_CONFIGURATIONS", "60"))
NUM_CHUNKS = 12
GPU_TIERS = [name for name in plan.TIERS if name != "reference"]


@pytest.fixture(params=GPU_TIERS)
def tier(request, monkeypatch):
    monkeypatch.setenv("FLASHTILE_TIER", request.param)
    return request.param


def skip_refused(tier, arguments):
    """Skip what the tier refuses, with its own sentence."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    options = {name: x for name, x in arguments.items() if name not in tensors}
    problem = MlaProblem.from_tensors(MlaOperands(**tensors), **options)
    reason = plan.import_module(plan.TIERS[tier]).refuses(problem, hardware.detect("cuda"))
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(tier, case, dtype, poisoned):
    skip_refused(tier, case.make(dtype, "cuda"))
    check(case, dtype, "cuda")


def test_lse_without_sinks(tier, poisoned):
    skip_refused(tier, BY_NAME["sinks"].make(torch.bfloat16, "cuda"))
    check_lse_without_sinks(torch.bfloat16, "cuda")


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_configurations(tier, chunk, poisoned):
    for seed in range(chunk, NUM_CONFIGURATIONS, NUM_CHUNKS):
        case, dtype = random_case(seed), torch.bfloat16 if seed % 3 else torch.float16
        try:
            skip_refused(tier, case.make(dtype, "cuda", seed))
        except pytest.skip.Exception:
            continue
        check(case, dtype, "cuda", seed)


LARGE = (
    MlaCase("many_heads", lengths=(4096, 1000, 0, 8192), heads=128),
    MlaCase("rows_1024", lengths=(700, 64), heads=128, seqlen_q=8, causal=True),
    MlaCase("long", lengths=(262144,), heads=16),
    MlaCase("many_sequences", lengths=tuple(range(0, 3000, 10)), heads=16),
    MlaCase("pieces_of_22_parts", lengths=(8192, 8000, 7900), heads=128),
)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_large(tier, case, poisoned):
    skip_refused(tier, case.make(torch.bfloat16, "cuda"))
    check(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("case", SCALES, ids=lambda case: case.name)
def test_scales_of_packed_tokens(tier, case, poisoned):
    skip_refused(tier, case.make(torch.bfloat16, "cuda"))
    for seed in range(4):
        arguments = case.make(torch.bfloat16, "cuda", seed)
        compare(case, arguments, *mla_decode(**arguments, return_lse=True), flash_mla=False)


@pytest.mark.parametrize("factor", [1e-30, 1e-8, 1e6])
def test_queries_of_any_size(tier, factor, poisoned):
    """Beside packed tokens, whose products the Hopper kernel takes in fp16."""
    case = BY_NAME["sparse_fp8"]
    arguments = case.make(torch.bfloat16, "cuda")
    skip_refused(tier, arguments)
    arguments["q"] *= factor
    # Rows of one call differ, too
    arguments["q"][:, :, 1] *= 1e-3
    arguments["softmax_scale"] = min(0.05 / factor, 1e30)
    compare(case, arguments, *mla_decode(**arguments, return_lse=True))


@pytest.mark.parametrize("name", ["many_heads", "rows_1024", "sparse_split", "sparse_fp8", "split_uneven"])
def test_bits_repeat(tier, name):
    """100 runs, the same bits: a race would move them."""
    arguments = {case.name: case for case in (*CASES, *LARGE)}[name].make(torch.bfloat16, "cuda")
    skip_refused(tier, arguments)
    first = mla_decode(**arguments, return_lse=True)
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(mla_decode(**arguments, return_lse=True), first, strict=True))


@pytest.mark.parametrize("name", ["sparse_fp8", "sparse_fp8_apart"])
def test_indices_put_in_order_first(name, monkeypatch, poisoned):
    """As calls of many indices into a large cache have them."""
    hopper = plan.import_module(plan.TIERS["hopper"])
    monkeypatch.setenv("FLASHTILE_TIER", "hopper")
    skip_refused("hopper", BY_NAME[name].make(torch.bfloat16, "cuda"))
    monkeypatch.setattr(ops, "_CALLS", Calls())
    monkeypatch.setattr(hopper, "ORDERED_BYTES", 0)
    monkeypatch.setattr(hopper, "ORDERED_TOKENS", 0)
    for seed in range(4):
        check(BY_NAME[name], torch.bfloat16, "cuda", seed)
    arguments = BY_NAME[name].make(torch.bfloat16, "cuda")
    first = mla_decode(**arguments, return_lse=True)
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(mla_decode(**arguments, return_lse=True), first, strict=True))


@pytest.mark.parametrize("name", ["causal", "sinks_split", "page_53", "sparse_fp8"])
def test_calls_of_a_kind(tier, name):
    """From the third on they are launched by addresses: those of this call's tensors."""
    skip_refused(tier, BY_NAME[name].make(torch.bfloat16, "cuda"))
    # Kept, so that no two calls have one address
    alive = []
    for seed in range(4):
        alive.append(BY_NAME[name].make(torch.bfloat16, "cuda", seed))
        check(BY_NAME[name], torch.bfloat16, "cuda", seed)


def test_known_calls_are_checked(tier):
    """A call of a known kind goes without torch's dispatcher, but not past gradients, autocast and its schedule's shapes."""
    arguments = BY_NAME["causal"].make(torch.bfloat16, "cuda")
    skip_refused(tier, arguments)
    q = arguments["q"]
    schedule = make_schedule(arguments["cache_seqlens"], num_heads=q.shape[2], seqlen_q=q.shape[1])
    expected = [mla_decode(**arguments, schedule=schedule) for _ in range(4)][0]
    with pytest.raises(UnsupportedError, match="without gradients"):
        mla_decode(**arguments | {"q": q.clone().requires_grad_()}, schedule=schedule)
    with torch.no_grad():
        assert torch.equal(mla_decode(**arguments | {"q": q.clone().requires_grad_()}, schedule=schedule), expected)
    with pytest.raises(ShapeError, match="rows a sequence"):
        mla_decode(**arguments, schedule=replace(schedule, num_rows=schedule.num_rows + 1))
    with pytest.raises(DtypeError, match="schedule"):
        mla_decode(**arguments, schedule=schedule.table)
    with torch.autocast("cuda", torch.float16):
        # As the cache
        assert mla_decode(**arguments | {"q": q.float()}, schedule=schedule).dtype == torch.bfloat16
    mine = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with mine:
        mla_decode(**arguments, schedule=schedule)
    assert "flashtile::mla_decode" in {event.key for event in mine.key_averages()}


@pytest.mark.parametrize("name", ["causal", "page_53", "many_heads"])
def test_pages_that_do_not_exist(tier, name, poisoned):
    """Entries of a block table that lead outside the cache are limited to its pages."""
    arguments = {case.name: case for case in (*CASES, *LARGE)}[name].make(torch.bfloat16, "cuda")
    skip_refused(tier, arguments)
    table, num_pages = arguments["block_table"], arguments["kv_cache"].shape[0]
    wrong, limited = table.clone(), table.clone()
    for column, (entry, page) in enumerate(((2**31 - 1, num_pages - 1), (-(2**31), 0), (num_pages, num_pages - 1), (-1, 0))):
        if column < table.shape[1]:
            wrong[:, column], limited[:, column] = entry, page
    # Slots of other sequences, which are poisoned past their ends
    arguments["kv_cache"].nan_to_num_(0.0)
    results = [mla_decode(**arguments | {"block_table": x}, return_lse=True) for x in (wrong, limited)]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_schedule_of_other_lengths(tier, poisoned):
    for seed in range(60):
        check_other_lengths(seed, torch.bfloat16, "cuda", heads=128 if seed % 2 else 16)


@pytest.mark.parametrize("name", ["sinks", "sinks_split"])
def test_infinite_sink(tier, name, poisoned):
    check_infinite_sink(torch.bfloat16, "cuda", name)


def test_cuda_graph_with_schedule(tier):
    """A step of three layers, captured: a replay follows lengths that changed since."""
    arguments = MlaCase("graph", lengths=(3000, 100, 0), heads=32).make(torch.bfloat16, "cuda")
    skip_refused(tier, arguments)
    lengths = arguments["cache_seqlens"]
    shorter = torch.tensor([700, 100, 0], dtype=torch.int32, device="cuda")
    expected = mla_decode(**arguments | {"cache_seqlens": shorter})
    mla_decode(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        schedule = make_schedule(lengths, num_heads=32)
        outs = [mla_decode(**arguments, schedule=schedule) for _ in range(3)]
    lengths.copy_(shorter)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


def test_compile(tier):
    arguments = BY_NAME["causal"].make(torch.bfloat16, "cuda")
    skip_refused(tier, arguments)

    def step(q, lengths):
        schedule = make_schedule(lengths, num_heads=4, seqlen_q=4)
        return mla_decode(**arguments | {"q": q, "cache_seqlens": lengths}, schedule=schedule)

    inputs = arguments["q"], arguments["cache_seqlens"]
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(*inputs), step(*inputs))


@pytest.mark.parametrize("causal", [False, True])
def test_prefill_in_the_unabsorbed_form(causal):
    case = Case("mla_prefill", seqlen_q=300, seqlen_k=300, heads=4, heads_kv=4, head_dim=192, head_dim_v=128, causal=causal)
    checks.check_attention(case, torch.bfloat16, "cuda")
