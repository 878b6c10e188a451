"""Every case on a GPU, on each tier that takes it: outputs, gradients and lse against float64, and what only a GPU can show."""

import os
import random
from dataclasses import replace

import checks
import pytest
import torch
from cases import BY_NAME, CASES, LARGE, SHORT, Case

import flashtile
from flashtile import dispatch, hardware, tiles
from flashtile.problem import AttentionProblem

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GPU_TIERS = ["hopper", "portable"]
# Random configurations against float64; FLASHTILE_TEST_CONFIGURATIONS=1000 for a long run
NUM_CONFIGURATIONS = int(os.environ.get("FLASHTILE_TEST_CONFIGURATIONS", "60"))
# Of one call, whose bits must not change; FLASHTILE_TEST_REPEATS=1000 for a long run
NUM_REPEATS = int(os.environ.get("FLASHTILE_TEST_REPEATS", "100"))
# more than one, so that several processes can share them
NUM_CHUNKS = 15
# Cases whose bits are compared
REPEATED = ("causal", "gqa", "varlen_causal", "dropout_causal_gqa", "dim_256_causal", "window_both", "short_causal",
            "short_varlen", "varlen_deterministic", "varlen_dropout_dim_256", "dim_128_causal",
            "dim_192_128_deterministic", "varlen_dim_168", "alibi_batch_causal", "many_queries_dim_128")  # fmt: skip
# Kinds of calls among random configurations, each with kernels of its own, which take longer to compile than to run
NUM_KINDS = 60
RESIDENT_CONFIG = tiles.resident_config


@pytest.fixture(params=GPU_TIERS)
def tier(request, monkeypatch):
    """A tier that this GPU has, asked for; portable steps in for a direction that it refuses."""
    plain = AttentionProblem(1, 64, 64, 1, 1, 64, 64, torch.bfloat16, softmax_scale=1.0)
    module = dispatch.import_module(dispatch.TIERS[request.param])
    reason = module.refuses(plain, hardware.detect("cuda"), module.DIRECTIONS[0])
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("FLASHTILE_TIER", f"{request.param},portable")
    return request.param


def refusal(tier, case, dtype):
    """Why the tier takes a case in no direction, or None."""
    problem = case.problem(case.make(dtype, "cuda"))
    module = dispatch.import_module(dispatch.TIERS[tier])
    reasons = [module.refuses(problem, hardware.detect("cuda"), direction) for direction in ("forward", "backward")]
    return reasons[0] if all(reasons) else None


def same(got, want, key, deterministic=False, grouped=False):
    """Whether two runs gave the same bits.

    Without deterministic=True dq may be summed in another order each time, and so may dk and dv on the Hopper tier where query
    heads share keys (grouped).
    """
    got, want = got.nan_to_num(7.0), want.nan_to_num(7.0)
    if not deterministic and (key == "dq" or grouped and key in ("dk", "dv")):
        return torch.allclose(got, want, rtol=2e-2, atol=1e-2 * want.abs().max().item())
    return torch.equal(got, want)


def skip_refused(tier, case, dtype):
    """Skip a case that the tier refuses in all directions, with its own sentence."""
    reason = refusal(tier, case, dtype)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES + LARGE, ids=lambda case: case.name)
def test_case(tier, case, dtype, poisoned):
    skip_refused(tier, case, dtype)
    checks.check_attention(case, dtype, "cuda")


@pytest.fixture
def whole_groups(monkeypatch, forget):
    """A program has all query heads of its keys, as in long calls."""
    from flashtile.hopper import backward_config

    monkeypatch.setattr(tiles, "TILES_A_PROGRAM", 0)
    monkeypatch.setattr(backward_config, "_numbers_of_splits", lambda problem, config: [1])
    forget()


@pytest.mark.parametrize("tier", ["portable"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if not c.lengths and not c.dropout_p], ids=lambda case: case.name)
def test_keys_in_parts(tier, case, dtype, cut_keys, poisoned):
    checks.check_attention(case, dtype, "cuda")


@pytest.mark.parametrize("tier", ["portable"], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tail_of_half(tier, case, tail_of_half, poisoned):
    checks.check_attention(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("case", [c for c in CASES + LARGE if c.lengths], ids=lambda case: case.name)
def test_longest_first(tier, case, longest_first, poisoned):
    skip_refused(tier, case, torch.bfloat16)
    checks.check_attention(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES + SHORT if not c.dropout_p], ids=lambda case: case.name)
def test_three_parts(tier, case, dtype, three_parts, long_keys, poisoned):
    """Of cases of fewer key tiles some parts have none."""
    skip_refused(tier, case, dtype)
    checks.check_attention(case, dtype, "cuda")


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", [c.scaled(3) for c in CASES if not c.lengths], ids=lambda case: case.name)
def test_three_query_parts(tier, case, dtype, three_query_parts, poisoned):
    """To some of a causal walk's the mask leaves none."""
    skip_refused(tier, case, dtype)
    if _query_parts(case) == 1:
        pytest.skip("one part: its queries fit in a tile, or are not cut")
    checks.check_attention(case, dtype, "cuda")


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("case", [c for case in CASES + SHORT for c in (case, case.scaled(3))
                                  if c.heads_kv < c.heads and not c.dropout_p and not c.alibi],
                         ids=lambda case: case.name)  # fmt: skip
def test_shared_heads(tier, case, shared_heads, long_keys, poisoned):
    skip_refused(tier, case, torch.bfloat16)
    checks.check_attention(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
def test_an_infinite_sink_in_one_of_three_parts(tier, three_parts, long_keys, poisoned):
    checks.check_infinite_sink(BY_NAME["sinks_causal_gqa"], torch.bfloat16, "cuda")


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("name", [case.name for case in CASES if case.heads_kv < case.heads])
def test_whole_groups(tier, name, whole_groups, poisoned):
    skip_refused(tier, BY_NAME[name], torch.bfloat16)
    checks.check_attention(BY_NAME[name], torch.bfloat16, "cuda")


def _is_resident(case):
    """Whether the keys of a case's Hopper forward stay in shared memory."""
    problem = case.problem(case.make(torch.bfloat16, "cuda"))
    return 0 not in problem.lse_shape and tiles.resident_config(problem, hardware.detect("cuda")) is not None


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_few_keys_as_many(tier, case, long_keys, poisoned):
    """Cases of small shapes, in the kernel that has all options and long calls."""
    skip_refused(tier, case, torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "resident_config", RESIDENT_CONFIG)
        if not _is_resident(case):
            pytest.skip("that kernel has it in test_case")
    checks.check_attention(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("long_tiles", [128, 192, 256], indirect=True)
@pytest.mark.parametrize("case", [c.scaled(3) for c in CASES if c.magnitude == 1.0], ids=lambda case: case.name)
def test_tiles_of_long_calls(tier, long_tiles, case, poisoned):
    """Cases of few keys with the tiles that many have: at head dims to 64 two kinds, beyond one."""
    skip_refused(tier, case, torch.bfloat16)
    problem = case.problem(case.make(torch.bfloat16, "cuda"))
    config = tiles.hopper_config(problem, hardware.detect("cuda"))
    dim = max(problem.head_dim, problem.head_dim_v)
    if (dim <= 64) == (long_tiles == 128):
        pytest.skip("tiles of other head dims")
    if dim > 128 and not config.rest_apart:
        pytest.skip("few keys have the same, in test_few_keys_as_many")
    if not problem.softcap and not problem.dropout_p:
        assert config.tile_m == long_tiles
    checks.check_attention(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("name", ["resident_77", "resident_257", "resident_197", "resident_causal_gqa", "resident_window",
                                  "one_key", "varlen_cross_causal", "varlen_empties", "varlen_used_k"])  # fmt: skip
def test_few_keys_of_many_heads(tier, name, poisoned):
    """Several programs to a multiprocessor, of one tile and of more; many runs, the same bits."""
    case = BY_NAME[name]
    many = {"lengths": 40 * case.lengths, "used": case.used and 40 * case.used} if case.varlen else {"batch": 200}
    case = replace(case, **many)
    assert _is_resident(case)
    checks.check_attention(case, torch.bfloat16, "cuda")
    operands = case.make(torch.bfloat16, "cuda")
    with torch.no_grad():
        first = case.attend(operands)
        for _ in range(NUM_REPEATS):
            for got, want in zip(case.attend(operands), first, strict=True):
                assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_infinite_sink(tier, poisoned):
    checks.check_infinite_sink(BY_NAME["sinks_causal_gqa"], torch.bfloat16, "cuda")


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_short_case(tier, case, poisoned):
    """Heads of a group that share tiles, forward and backward; also that they do."""
    skip_refused(tier, case, torch.bfloat16)
    if tier == "hopper":
        problem = case.problem(case.make(torch.bfloat16, "cuda"))
        assert dispatch.plan_for(problem, torch.device("cuda"), "forward").configs["forward"].heads == problem.group_size
    checks.check_attention(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("case", [c.scaled(5) for c in CASES if c.magnitude == 1.0], ids=lambda case: case.name)
def test_larger_case(tier, case, poisoned):
    """Five times as long: many tiles in each part of a range, rows that no power of two divides."""
    skip_refused(tier, case, torch.bfloat16)
    checks.check_attention(case, torch.bfloat16, "cuda", seed=3)


def _dim(draw, block):
    """A head dim of those that kernels pad to a block."""
    return 8 * draw.randint(1 if block == 64 else block // 16 + 1, block // 8)


def random_case(seed):
    """Options of one of NUM_KINDS kinds, and a shape.

    Triton has kernels of their own for windows that are multiples of 16: a kind has all such or none. Of keys there are none,
    or many: with a few, dq and dk are differences that cancel, but for the rounding of out in delta, which is
    FlashAttention's own. Cases such as one_key show that this stays small.
    """
    kind, draw = random.Random(seed % NUM_KINDS), random.Random(seed)
    block, block_v = kind.choice([64, 128, 256]), kind.choice([None, None, 64, 128, 256])
    varlen, windowed, odd = kind.random() < 0.4, kind.choice([0, 0, 1, 2]), kind.choice([0, 5])
    heads_kv = draw.choice([1, 2, 3])
    left, right = (16 * max(1, draw.randint(0, 12)) + odd for _ in range(2))
    lengths = None
    if varlen:
        lengths = tuple(
            (draw.choice([0, 1, 17, 64, 100, 300]), draw.choice([0, 33, 64, 200, 257])) for _ in range(draw.randint(1, 5))
        )
    return Case(
        f"random_{seed}", seqlen_q=draw.choice([1, 63, 64, 113, 128, 300, 511]), seqlen_k=draw.choice([64, 97, 128, 255, 400]),
        batch=draw.choice([1, 2, 3]), heads=heads_kv * kind.choice([1, 1, 2, 4]), heads_kv=heads_kv,
        head_dim=_dim(kind, block), head_dim_v=block_v and _dim(kind, block_v), causal=kind.random() < 0.5,
        window=(left if windowed else None, right if windowed == 2 else None),
        softcap=kind.choice([0.0, 0.0, 5.0]), alibi=kind.choice([None, None, "heads", "batch"]),
        sinks=kind.choice([None, None, "fp32", "same"]), dropout_p=kind.choice([0.0, 0.0, 0.0, 0.25]), dlse=kind.random() < 0.3,
        layout=draw.choice(["contiguous", "heads_first", "sliced"]), lengths=lengths,
        tail=draw.choice([0, 5]) if lengths else 0, deterministic=kind.random() < 0.3, dslopes=kind.random() < 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("kind", [kind for kind in range(NUM_KINDS) if random_case(kind).heads_kv < random_case(kind).heads])
def test_whole_groups_at_random(tier, kind, whole_groups, poisoned):
    skip_refused(tier, random_case(kind), torch.bfloat16)
    checks.check_attention(random_case(kind), torch.bfloat16, "cuda")


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_configurations(tier, chunk, poisoned):
    for seed in range(chunk, NUM_CONFIGURATIONS, NUM_CHUNKS):
        case = random_case(seed)
        dtype = DTYPES[seed % 2]
        if refusal(tier, case, dtype):
            continue
        checks.check_attention(case, dtype, "cuda", seed=seed)


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("case", [case.scaled(3) for case in CASES], ids=lambda case: case.name)
def test_fixed_order(tier, case, poisoned):
    """Every case with sums in a fixed order, which calls of many tiles of keys have too; of several tiles of keys."""
    case = replace(case, deterministic=True)
    skip_refused(tier, case, torch.bfloat16)
    checks.check_attention(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", REPEATED)
def test_bits_repeat(tier, name, deterministic):
    """Many runs, the same bits: a race would move them."""
    case = replace(BY_NAME[name].scaled(4), deterministic=deterministic)
    skip_refused(tier, case, torch.bfloat16)
    _check_bits(tier, case)


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize("name", [name for name in REPEATED if not BY_NAME[name].lengths])
def test_bits_of_three_query_parts_repeat(tier, name, three_query_parts):
    case = BY_NAME[name].scaled(4)
    skip_refused(tier, case, torch.bfloat16)
    if _query_parts(case) == 1:
        pytest.skip("one part: its queries fit in a tile, or are not cut")
    _check_bits(tier, case)


@pytest.mark.parametrize("tier", ["hopper"], indirect=True)
@pytest.mark.parametrize(("tile_m", "case"), [
    (256, Case("wide", 1024, 1024, batch=8, heads=32, heads_kv=32)),
    (192, Case("three_consumers", 3072, 3072, batch=2, heads=8, heads_kv=8, causal=True)),
], ids=str)  # fmt: skip
def test_bits_of_wide_tiles_repeat(tier, tile_m, case):
    problem = case.problem(case.make(torch.bfloat16, "cuda"))
    assert tiles.hopper_config(problem, hardware.detect("cuda")).tile_m == tile_m
    _check_bits(tier, case)


def _query_parts(case):
    """Of the Hopper backward of a case."""
    problem = case.problem(case.make(torch.bfloat16, "cuda"))
    plan = dispatch.plan(problem, hardware.detect("cuda"), "backward", ("hopper", "portable"))
    return getattr(plan.configs.get("backward"), "query_parts", 1)


def test_many_packed_sequences(tier, poisoned):
    """More of them than a table of the Hopper forward is written at once."""
    draw = random.Random(0)
    pairs = tuple((draw.randint(0, 40), draw.randint(0, 40)) for _ in range(1500))
    for causal in (False, True):
        case = Case("many", lengths=pairs, heads=4, heads_kv=2, causal=causal)
        checks.check_attention(case, torch.bfloat16, "cuda")


def _check_bits(tier, case):
    operands = case.make(torch.bfloat16, "cuda")
    first = None
    for _ in range(NUM_REPEATS):
        with checks.fixed_rng_state(operands.rng_state):
            result = checks.run(lambda x: case.attend(x), operands, case)
        if first is None:
            first = result
        for key, value in result.items():
            assert same(value, first[key], key, case.deterministic, tier == "hopper" and case.heads != case.heads_kv), key


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_fixed_order_with_any_number_of_programs(tier, causal, head_dim):
    """Fewer programs than fit, one, and more: none may wait for a tile of one that does not run yet; all give the same bits."""
    if tier != "hopper":
        pytest.skip("programs of the portable tier wait for none")
    from flashtile.hopper import backward

    case = Case("programs", 1500, 1500, heads=48, heads_kv=24, head_dim=head_dim, causal=causal, deterministic=True)
    operands = case.make(torch.bfloat16, "cuda")
    problem = case.problem(operands)
    with torch.no_grad():
        out, lse = case.attend(operands)
    dout, _ = case.output_gradients(out, lse)
    config = dispatch.plan_for(problem, torch.device("cuda"), "backward").configs["backward"]
    results = [
        backward.launch(problem, {"backward": replace(config, num_programs=programs)}, operands, out, lse, dout, None)[:3]
        for programs in (config.num_programs, 1, 7, 3 * config.num_programs)
    ]  # fmt: skip
    for result in results[1:]:
        for got, want, key in zip(result, results[0], ("dq", "dk", "dv")):
            assert torch.equal(got, want), key


def test_starts_of_one_tensor_and_of_two(tier):
    """Calls that differ in nothing else have kernels of their own: with one tensor the diagonal is where queries begin."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 300, 2, 128, device="cuda", dtype=torch.bfloat16).unbind()
    starts = torch.tensor([0, 130, 300], dtype=torch.int32, device="cuda")
    others = torch.tensor([0, 101, 300], dtype=torch.int32, device="cuda")
    for starts_k in (starts, others) * 4:
        out = flashtile.attention_varlen(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts_k, max_seqlen_q=170,
                                         max_seqlen_k=199, causal=True)  # fmt: skip
        for i in range(2):
            rows, keys = (slice(*x[i : i + 2].tolist()) for x in (starts, starts_k))
            want = flashtile.attention(q[None, rows], k[None, keys], v[None, keys], causal=True)[0]
            torch.testing.assert_close(out[rows], want, rtol=0.02, atol=0.002)


@pytest.mark.parametrize("name", ["causal", "sinks_causal_gqa", "varlen_causal"])
def test_cuda_graph(tier, name):
    """Forward and backward in a graph; a replay reads the inputs anew."""
    case = BY_NAME[name].scaled(3)
    skip_refused(tier, case, torch.bfloat16)
    operands = case.make(torch.bfloat16, "cuda")
    eager = checks.run(lambda x: case.attend(x), operands, case)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        checks.run(lambda x: case.attend(x), operands, case)
    torch.cuda.synchronize()
    dout, dlse = case.output_gradients(eager["out"], eager["lse"])
    inputs = [x for x in (operands.q, operands.k, operands.v, operands.sinks) if x is not None]
    outputs = slice(None) if dlse is not None else slice(1)
    gradients = [x for x in (dout, dlse) if x is not None]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.attend(operands)
        grads = torch.autograd.grad(list(results[outputs]), inputs, gradients)
    with torch.no_grad():
        original = operands.q.clone()
        operands.q.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        assert not torch.equal(results[0], eager["out"])
        operands.q.copy_(original)
    graph.replay()
    torch.cuda.synchronize()
    for got, key in zip((*results, *grads), ("out", "lse", "dq", "dk", "dv", "dsinks")):
        assert same(got, eager[key], key, grouped=tier == "hopper" and case.heads != case.heads_kv), key


def test_cuda_graph_draws_new_dropout(tier):
    skip_refused(tier, BY_NAME["dropout_causal_gqa"], torch.bfloat16)
    q, k, v = (torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flashtile.attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention(q, k, v, dropout_p=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(tier, dynamic):
    def step(q, k, v, sinks):
        out, lse = flashtile.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        return out.float().square().sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for seqlen in (128, 200):
        inputs = [torch.randn(2, seqlen, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)]
        inputs.append(torch.randn(4, device="cuda", requires_grad=True))
        expected = torch.autograd.grad(step(*inputs), inputs)
        for got, want in zip(torch.autograd.grad(compiled(*inputs), inputs), expected):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layout", ["batch", "rows"])
def test_past_2_to_the_31_elements(tier, layout):
    """The last head of a tensor of more than 2**31 elements, forward and backward, against that head alone."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    batch, seqlen, heads = (9, 4096, 512) if layout == "batch" else (1, 36864, 512)
    shape = (batch, seqlen, heads, 128)
    q = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    q.normal_()
    k, v = (torch.randn(batch, 256, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    # One head alone would have its queries in parts, whose dk and dv are rounded each
    out = flashtile.attention(q, k, v, causal=True, deterministic=True)
    dout = torch.randn(1, 1, 1, 128, device="cuda", dtype=torch.bfloat16).expand(shape)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    one = [x.detach()[-1:, :, -1:].contiguous().requires_grad_() for x in (q, k, v)]
    out_one = flashtile.attention(*one, causal=True, deterministic=True)
    grads_one = torch.autograd.grad(out_one, one, dout[-1:, :, -1:].contiguous())
    assert torch.equal(out[-1:, :, -1:], out_one)
    for got, want, key in zip(grads, grads_one, ("dq", "dk", "dv")):
        assert same(got[-1:, :, -1:], want, key)


def test_extra_memory_is_linear(tier):
    """Beside its results a forward makes lse; a backward delta, lse in another unit, and dq in fp32."""
    batch, seqlen, heads, dim = 1, 8192, 16, 128
    q, k, v = (
        torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    row_bytes, tensor_bytes = 4 * seqlen * heads, 2 * q.numel()
    flashtile.attention(q, k, v).backward(torch.ones_like(q))
    q.grad = k.grad = v.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flashtile.attention(q, k, v)
    assert torch.cuda.max_memory_allocated() - before <= tensor_bytes + row_bytes + 4096
    dout = torch.randn_like(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, (q, k, v), dout)
    # 1 MiB: torch's allocator splits no less from a block, and one block holds all that kernels hand to each other.
    assert torch.cuda.max_memory_allocated() - before <= 3 * tensor_bytes + 2 * row_bytes + 4 * q.numel() + 2**20 + 4096


def test_a_gradient_may_lie_at_any_address(tier):
    """Contiguous, but at no multiple of 16 bytes; again and again, as later calls are launched in another way."""
    inputs = [torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out = flashtile.attention(*inputs, causal=True)
    shifted = torch.randn(out.numel() + 1, device="cuda", dtype=out.dtype)[1:].view(out.shape)
    for dout in (shifted, shifted.clone()) * 4:
        grads = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        expected = torch.autograd.grad(out, inputs, shifted.clone(), retain_graph=True)
        for got, want, key in zip(grads, expected, ("dq", "dk", "dv")):
            assert same(got, want, key), key


def test_saved_tensors_that_hooks_leave_elsewhere_are_refused(tier):
    """Their addresses go to no kernel, also after calls with the same layout."""
    inputs = [torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for _ in range(3):
        flashtile.attention(*inputs).sum().backward()
    for kept in ((1, 128, 2, 64), (1, 2, 128)):
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: x.cpu() if x.shape == kept else x, lambda x: x):
            out = flashtile.attention(*inputs)
        with pytest.raises((RuntimeError, ValueError)):
            out.sum().backward()


def test_second_gpu_is_used_without_being_current(tier):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q = torch.randn(1, 64, 2, 64, device="cuda:1", dtype=torch.bfloat16, requires_grad=True)
    flashtile.attention(q, q, q, causal=True).sum().backward()
    first = q.detach().to("cuda:0").requires_grad_()
    flashtile.attention(first, first, first, causal=True).sum().backward()
    torch.testing.assert_close(q.grad.cpu(), first.grad.cpu())
