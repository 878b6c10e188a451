"""The measuring instrument: statistics, the grammar of shapes, the correctness gate, what happens when a backend fails."""

import dataclasses
import json
import math
import random

import pytest
import torch

from flashtile import bench, settings
from flashtile.bench import engine, gate, measure, peers, record, stats, telemetry
from flashtile.bench.cases import (
    PRESETS,
    BenchCase,
    Shape,
    UsageError,
    build_cases,
    make_inputs,
    parse_head_dims,
    parse_ints,
    parse_window,
)
from flashtile.kvcache_problem import CacheOperands, CacheOptions, CacheProblem
from flashtile.problem import AttentionProblem, Operands

SMALL = BenchCase(1, 64, 64, 2, 2, 16, 16, dtype="fp32")
QUICK = engine.Settings(repeats=6, roof=False)


# --- statistics ----------------------------------------------------------------------------------------------------------


def test_summary_of_known_samples():
    s = stats.summary([1.0] * 10 + [2.0] * 9 + [50.0])
    assert (s.median, s.min, s.max, s.n, s.outliers) == (1.5, 1.0, 50.0, 20, 1)
    assert s.mean == pytest.approx((10 + 18 + 50) / 20)
    assert s.ci95 == (1.0, 2.0)


@pytest.mark.parametrize("n, k", [(6, 0), (9, 1), (15, 3), (30, 9), (100, 39)])
def test_interval_ranks_are_those_of_the_binomial(n, k):
    def missed(rank):
        return 2 * sum(math.comb(n, i) for i in range(rank + 1)) / 2**n

    assert stats._interval_rank(n) == k
    assert missed(k) <= 0.05 < missed(k + 1)


def test_normal_approximation_of_the_ranks_continues_the_exact_ones():
    def exact(n):
        k, tail = -1, 1
        while 2 * tail <= 0.05 * 2**n:
            k += 1
            tail += math.comb(n, k + 1)
        return k

    assert all(abs(stats._interval_rank(n) - exact(n)) <= 1 for n in (401, 500, 1000))


@pytest.mark.parametrize("n", [15, 30, 500])
def test_interval_covers_the_median_of_a_skewed_distribution(n):
    draw = random.Random(0)
    hits, runs = 0, 1000
    for _ in range(runs):
        _, low, high = stats.median_ci([draw.expovariate(1.0) for _ in range(n)])
        hits += low <= math.log(2) <= high
    assert 0.935 <= hits / runs <= 0.985


def _simulated_rounds(draw, ratio, rounds=15, drift=0.04, noise=0.004):
    """Times of two backends, b = ratio * a, in random order within rounds, while the clock drifts."""
    a, b = [], []
    for number in range(rounds):
        for position, series in enumerate(draw.sample([a, b], 2)):
            level = 1 + drift * (2 * number + position) / (2 * rounds)
            series.append(level * (ratio if series is b else 1.0) * draw.lognormvariate(0, noise))
    return a, b


def test_no_false_verdict_under_drift():
    draw = random.Random(1)
    results = [stats.speedup(*_simulated_rounds(draw, 1.0)) for _ in range(500)]
    claims = sum(s.verdict in ("FASTER", "SLOWER") for s in results)
    excluded = sum(not s.ci95[0] <= 1 <= s.ci95[1] for s in results)
    assert claims / len(results) <= 0.05
    assert excluded / len(results) <= 0.08
    assert sum(s.verdict == "SAME" for s in results) / len(results) > 0.9


@pytest.mark.parametrize("ratio, word", [(1.05, "SLOWER"), (0.95, "FASTER"), (1.0, "SAME")])
def test_true_differences_are_found_under_drift(ratio, word):
    draw = random.Random(2)
    results = [stats.speedup(*_simulated_rounds(draw, ratio)) for _ in range(100)]
    assert sum(s.verdict == word for s in results) >= 95
    assert stats.geomean(s.ratio for s in results) == pytest.approx(1 / ratio, rel=0.005)


def test_verdicts_at_their_borders():
    assert stats.verdict(1.02, 1.01, 1.03) == "SAME"
    assert stats.verdict(1.04, 1.02, 1.06) == "FASTER"
    assert stats.verdict(0.9, 0.88, 0.92) == "SLOWER"
    assert stats.verdict(1.05, 0.97, 1.2) == "UNCLEAR"
    assert stats.verdict(1.0, 0.9, 1.1) == "UNCLEAR"
    # Five rounds can't make 95%.
    assert stats.speedup([2.0] * 5, [1.0] * 5).verdict == "UNCLEAR"


def test_rounding_follows_the_uncertainty():
    assert stats.round_by(0.123456, 0.001) == "0.1235"
    assert stats.round_by(123.456, 5) == "123"
    assert stats.round_by(12.3456, 0.0) == "12.35"


# --- cases ---------------------------------------------------------------------------------------------------------------


def test_grammar_of_lists():
    assert parse_ints("512,1k,2k") == [512, 1024, 2048]
    assert parse_ints("1k..16k") == [1024, 2048, 4096, 8192, 16384]
    assert parse_ints("3..13,1m,3") == [3, 6, 12, 1 << 20]
    assert parse_head_dims("64,192-128") == [(64, 64), (192, 128)]
    assert parse_window("128,0") == (128, 0)
    assert parse_window("-1,none") == (None, None)


@pytest.mark.parametrize("parse, text", [
    (parse_ints, ""), (parse_ints, "0"), (parse_ints, "-3"), (parse_ints, "1.5"), (parse_ints, "2k..1k"), (parse_ints, "1,,2"),
    (parse_ints, "x"), (parse_ints, "1k.."), (parse_ints, "..1k"), (parse_head_dims, "64-"),
    (parse_window, "128"), (parse_window, "a,b"), (parse_window, "-2,0"),
])  # fmt: skip
def test_grammar_refuses(parse, text):
    with pytest.raises(UsageError, match="expected"):
        parse(text)


@pytest.mark.parametrize("name, case", [
    ("default", (2, 1024, 8, 64, False)), ("gpt2-small", (8, 1024, 12, 64, True)), ("gpt3", (2, 2048, 96, 128, True)),
    ("bert-base", (16, 512, 12, 64, False)), ("bert-large", (8, 512, 16, 64, False)), ("short", (32, 512, 8, 64, False)),
    ("long", (1, 8192, 8, 64, False)), ("very-long", (1, 16384, 8, 64, False)),
])  # fmt: skip
def test_presets_of_the_seed(name, case):
    (only,) = build_cases(name)
    assert (only.batch, only.seqlen_k, only.num_heads, only.head_dim, only.causal) == case


def test_preset_paper_is_the_grid_of_the_papers():
    cases = build_cases("paper")
    assert len(cases) == len(set(cases)) == 36
    assert all(case.batch * case.seqlen_q == 16384 and case.num_heads * case.head_dim == 2048 for case in cases)
    assert {case.head_dim for case in cases} == {64, 128, 256} and {case.causal for case in cases} == {False, True}


def test_preset_random_is_the_same_everywhere():
    """Records of it can be compared: a generator of numbers whose sequence Python promises, and nothing else."""
    cases = bench.build_cases("random")
    assert len(cases) == 48 and len({case.head_dim for case in cases}) == 6
    numbers = [(c.batch, c.seqlen_q, c.seqlen_k, c.num_heads, c.num_heads_kv, c.head_dim, c.causal) for c in cases]
    assert numbers[2] == (19, 960, 384, 8, 1, 80, False) and numbers[-1] == (2, 133, 96, 32, 32, 128, False)
    assert any(c.seqlen_q != c.seqlen_k for c in cases) and max(c.flops("fwd") for c in cases) <= 2e11


def test_flags_override_presets():
    assert len(build_cases("paper", Shape(seqlen="1k", headdim="64"))) == 2
    assert {case.batch for case in build_cases("paper", Shape(batch="3"))} == {3}
    (case,) = build_cases("llama3-8b-prefill", Shape(nheads="16", dtype="fp16"))
    assert (case.num_heads, case.num_heads_kv, case.dtype) == (16, 8, "fp16")
    with pytest.raises(UsageError, match="multiple of nheads-kv 8"):
        build_cases("llama3-8b-prefill", Shape(nheads="4"))
    assert len(build_cases("gpt2-small,bert-base")) == 2
    with pytest.raises(UsageError, match="paper"):
        build_cases("papers")


def test_every_preset_builds_cases_that_survive_json():
    for name, preset in PRESETS.items():
        for case in preset.cases():
            assert BenchCase.from_config(json.loads(json.dumps(case.config()))) == case, name


@pytest.mark.parametrize("packed", [False, True])
def test_flags_of_a_case_give_the_case_back(packed):
    import shlex

    from flashtile.cli.common import ShapeFlags

    case = BenchCase(3, 256, 256, 8, 2, 192, 128, True, "fp16", (64, None), 30.0, 0.1, True, 16, True)
    if not packed:
        case = dataclasses.replace(case, seqlen_q=128, varlen=False)
    names = {"-b": "batch", "-s": "seqlen", "--seqlen-q": "seqlen_q", "--nheads": "nheads", "--nheads-kv": "nheads_kv",
             "-d": "headdim", "--dtype": "dtype", "--window": "window", "--softcap": "softcap",
             "--dropout": "dropout", "--page-size": "page_size"}  # fmt: skip
    words = [word for word in shlex.split(case.flags()) if word not in ("--causal", "--varlen", "--alibi")]
    values = {"causal": True}
    values["varlen"], values["alibi"] = "--varlen" in case.flags(), "--alibi" in case.flags()
    for flag, value in zip(words[::2], words[1::2], strict=True):
        values[names[flag]] = float(value) if flag in ("--softcap", "--dropout") else value
    assert ShapeFlags(**values).cases("bf16") == [case]


def test_cases_refuse_nonsense():
    for changes in ({"batch": 0}, {"num_heads": 3, "num_heads_kv": 2}, {"dtype": "fp4"}, {"dropout": 1.0},
                    {"varlen": True, "seqlen_q": 8}):  # fmt: skip
        with pytest.raises(UsageError):
            dataclasses.replace(SMALL, **changes)


def test_packed_cases_count_their_own_tokens():
    case = dataclasses.replace(SMALL, batch=5, seqlen_q=256, seqlen_k=256, varlen=True)
    assert case.problem().same_lengths and not SMALL.problem().same_lengths
    assert case.lengths[0] == 256 == max(case.lengths) and min(case.lengths) >= 1 and len(set(case.lengths)) > 2
    assert make_inputs(case, "cpu")[0].shape == (sum(case.lengths), case.num_heads, case.head_dim)
    alone = [dataclasses.replace(case, batch=1, seqlen_q=n, seqlen_k=n, varlen=False) for n in case.lengths]
    for mode in ("fwd", "bwd"):
        assert case.flops(mode) == sum(one.flops(mode) for one in alone)
        assert case.problem().bytes_moved(mode) == sum(one.problem().bytes_moved(mode) for one in alone)
    assert case.problem().total_q == sum(case.lengths)
    old = SMALL.config()
    del old["dropout"], old["varlen"], old["page_size"], old["alibi"]
    assert BenchCase.from_config(old) == SMALL


def test_inputs_are_seeded_and_normal():
    case = dataclasses.replace(SMALL, batch=4, seqlen_q=256, seqlen_k=256)
    first, again, other = (make_inputs(case, "cpu", seed, dout=True) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert abs(first[0].mean()) < 0.05 and abs(first[0].std() - 1) < 0.05


@pytest.mark.parametrize("more", [
    {}, {"seqlen_q": 1, "causal": True}, {"window": (63, 0)}, {"window": (5, None), "causal": True},
    {"num_heads_kv": 1, "alibi": True}, {"softcap": 3.0, "head_dim_v": 8},
], ids=str)  # fmt: skip
def test_problems_of_a_case_are_those_of_its_calls(more):
    """What `explain` and `warm --target` take for a call: else they compile other kernels."""
    case = dataclasses.replace(SMALL, **more)
    q, k, v, _ = make_inputs(case, "cpu", 0)
    options = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    slopes = case.alibi_slopes("cpu")
    assert case.problem() == AttentionProblem.from_tensors(Operands(q, k, v, alibi_slopes=slopes), **options)
    lengths = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32)
    operands = CacheOperands(q, k, v, cache_seqlens=lengths, alibi_slopes=slopes)
    asked = CacheOptions(None, True, case.causal, *case.window, None, case.softcap, 0, False)
    assert case.cache_problem() == CacheProblem.from_tensors(operands, asked)


# --- the gate ------------------------------------------------------------------------------------------------------------

GATED = [
    SMALL,
    dataclasses.replace(SMALL, causal=True, seqlen_q=48, seqlen_k=80),
    dataclasses.replace(SMALL, causal=True, seqlen_q=80, seqlen_k=48),
    dataclasses.replace(SMALL, num_heads=4, window=(7, 3), softcap=5.0, dtype="bf16"),
    dataclasses.replace(SMALL, causal=True, num_heads=4, num_heads_kv=2, seqlen_q=48, seqlen_k=80, alibi=True),
    dataclasses.replace(SMALL, batch=2, softcap=5.0, alibi=True),
    dataclasses.replace(SMALL, head_dim=32, head_dim_v=16, batch=2, dtype="fp16"),
]


@pytest.mark.parametrize("wrong", [None, "out", "dk"])
def test_packed_sequences_are_checked_one_by_one(wrong):
    case = dataclasses.replace(SMALL, batch=3, varlen=True, causal=True, dropout=0.2)
    inputs = make_inputs(case, "cpu", 0, dout=True)
    attend = peers.load("flashtile", "cpu")
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = attend(*leaves, dataclasses.replace(case, dropout=0.0))
    grads = list(torch.autograd.grad(out, leaves, inputs[3]))
    out = out.detach()
    if wrong == "out":
        out[case.lengths[0]] += 0.1
    elif wrong == "dk":
        grads[1][-1] += 0.1
    accuracy = gate.make(case, inputs).check(out, grads)
    assert accuracy.passed == (wrong is None) and accuracy.of == 3 * case.num_heads_kv
    if wrong:
        assert [name for name, error in accuracy.errors.items() if not error.passed] == [wrong]


@pytest.mark.parametrize("case", GATED, ids=BenchCase.label)
def test_blocks_of_the_reference_agree_with_one_block(case, monkeypatch):
    inputs = make_inputs(case, "cpu", 0, dout=True)
    whole = gate.Gate(case, inputs)
    monkeypatch.setitem(gate.BLOCK_SCORES, "cpu", 5 * case.seqlen_k * case.group_size)
    blocks = gate.Gate(case, inputs)
    for a, b in zip(whole.reference, blocks.reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_reference_agrees_with_sdpa_in_float64():
    case = dataclasses.replace(SMALL, batch=2, num_heads=4, causal=True)
    q, k, v, dout = make_inputs(case, "cpu", 0, dout=True)
    leaves = [x.double().requires_grad_() for x in (q, k[:, :, :2], v[:, :, :2])]
    case = dataclasses.replace(case, num_heads_kv=2)
    checker = gate.Gate(case, (q, k[:, :, :2], v[:, :, :2], dout))
    out = peers.load("sdpa", "cpu")(*leaves, case)
    accuracy = checker.check(out, torch.autograd.grad(out, leaves, dout.double()))
    assert accuracy.passed and accuracy.checked == accuracy.of == 4
    assert all(error.max_abs < 1e-12 for error in accuracy.errors.values())


@pytest.mark.parametrize("case", [dataclasses.replace(SMALL, seqlen_q=1, seqlen_k=1),
                                  dataclasses.replace(SMALL, seqlen_q=40, seqlen_k=1)], ids=BenchCase.label)  # fmt: skip
def test_one_visible_key_leaves_nothing_but_rounding_of_dq(case):
    """dq and dk are then 0, and PyTorch's own error may be, too."""
    inputs = make_inputs(case, "cpu", 0, dout=True)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = peers.load("flashtile", "cpu")(*leaves, case)
    dq, dk, dv = torch.autograd.grad(out, leaves, inputs[3])
    checker = gate.make(case, inputs)
    out = out.detach()
    assert checker.check(out, (dq + 1e-7, dk - 1e-7, dv)).passed
    assert not checker.check(out, (dq + 1e-4, dk, dv)).passed and not checker.check(out, (dq, dk + 1e-4, dv)).passed


def test_rows_that_see_no_key_are_zero():
    case = dataclasses.replace(SMALL, causal=True, seqlen_q=80, seqlen_k=48)
    reference = gate.Gate(case, make_inputs(case, "cpu", 0, dout=True)).reference
    assert all(torch.isfinite(x).all() for x in reference)
    assert (reference[0][:, :32] == 0).all() and (reference[1][:, :32] == 0).all()


def test_large_cases_are_checked_on_some_heads(monkeypatch):
    monkeypatch.setitem(gate.CHECKED_SCORES, "cpu", 3 * 64 * 64)
    case = dataclasses.replace(SMALL, batch=4)
    inputs = make_inputs(case, "cpu")
    checker = gate.Gate(case, inputs)
    assert (checker.checked, checker.of) == (3, 8)
    out = peers.naive_attention(*inputs[:3], case)
    assert checker.check(out).passed
    # The last pair is among those that are looked at.
    out[-1, :, -1] += 0.01
    assert not checker.check(out).passed


def test_gate_of_fp8_takes_rounded_weights_and_no_more():
    """torch has no fp8 products: the yardstick is naive attention with weights as e4m3 has them, with 3 bits."""
    case = dataclasses.replace(SMALL, seqlen_q=5, seqlen_k=2000, dtype="fp8")
    q, k, v, _ = inputs = make_inputs(case, "cpu")
    assert q.dtype == torch.float8_e4m3fn
    checker = gate.Gate(case, inputs)
    wide = [x.double() for x in (q, k, v)]
    exact, rounded = peers.naive_attention(*wide, case), peers.naive_attention(*(x.float() for x in wide), case)
    error = (rounded - exact).norm() / exact.norm()
    assert 0.01 < error < 0.04
    assert checker.check(exact.bfloat16()).passed and checker.check(rounded.bfloat16()).passed
    for wrong in (exact * 1.2, exact.flip(1), exact * float("nan")):
        assert not checker.check(wrong).passed


@pytest.mark.parametrize("spoil", [lambda out: out * 1.01, lambda out: out.flip(1), lambda out: out * float("nan")])
def test_gate_refuses_wrong_results(spoil):
    inputs = make_inputs(SMALL, "cpu")
    accuracy = gate.Gate(SMALL, inputs).check(spoil(peers.naive_attention(*inputs[:3], SMALL)))
    assert not accuracy.passed and not accuracy.to_json()["passed"]


# --- run and compare -----------------------------------------------------------------------------------------------------


def _backend(monkeypatch, name, attend, **more):
    backend = peers.Backend(name, "of a test", lambda device: attend, lambda case, mode, device: None, **more)
    monkeypatch.setitem(peers.BACKENDS, name, backend)
    peers._loaded.cache_clear()


def test_run_gives_a_result_a_mode():
    report = bench.run(SMALL, modes=("fwd", "bwd", "fwd_bwd"), device="cpu", settings=QUICK)
    assert [(r.mode, r.status) for r in report.results] == [("fwd", "ok"), ("bwd", "ok"), ("fwd_bwd", "ok")]
    problem = SMALL.problem()
    for result in report.results:
        assert len(result.samples_ms) == 6
        assert result.flops == problem.flops(result.mode) and result.bytes == problem.bytes_moved(result.mode)
        assert result.tflops() == pytest.approx(result.flops / result.stats.median / 1e9)
        assert result.accuracy.passed and result.compile_ms > 0 and "--device cpu" in result.repro
    assert set(report.one(mode="bwd").accuracy.errors) == {"out", "dq", "dk", "dv"}
    assert record.problems(report.document()) == []


def test_compare_pairs_every_backend_with_the_baseline_and_with_flashtile():
    settings = engine.Settings(rounds=6, rep_ms=6, roof=False)
    report = bench.compare(SMALL, ["flashtile", "naive", "sdpa"], ("fwd",), device="cpu", settings=settings)
    pairs = {(c.candidate, c.baseline) for c in report.comparisons}
    assert pairs == {("flashtile", "sdpa"), ("naive", "sdpa"), ("flashtile", "naive")}
    assert all(len(result.rounds_ms) == 6 for result in report.results)
    assert {row["baseline"] for row in report.geomeans()} == {"naive", "sdpa"}
    with pytest.raises(UsageError, match="baseline"):
        bench.compare(SMALL, ["flashtile", "naive"], baseline="sdpa", device="cpu")


def test_names_may_be_text():
    report = bench.compare(SMALL, "flashtile", "fwd", device="cpu", settings=QUICK)
    assert [(r.backend, r.mode, r.status) for r in report.results] == [("flashtile", "fwd", "ok")]
    report = bench.compare(SMALL, "naive, sdpa_math", "fwd,bwd", device="cpu", settings=QUICK)
    assert {(r.backend, r.mode) for r in report.results} == {(b, m) for b in ("naive", "sdpa-math") for m in ("fwd", "bwd")}
    with pytest.raises(UsageError, match="backend: expected some of flashtile, .*got 'flash'"):
        bench.compare(SMALL, "flash", device="cpu")
    with pytest.raises(UsageError, match="mode: expected .*got 'forward'"):
        bench.run(SMALL, modes="forward", device="cpu")


def test_a_row_that_is_missing_is_refused_with_those_there_are():
    report = bench.run(SMALL, modes=["fwd"], device="cpu", settings=QUICK)
    with pytest.raises(UsageError, match=rf"rows \({SMALL.label()} flashtile fwd\), got {SMALL.label()} flashtile decode"):
        report.one(mode="decode")
    report.results.clear()
    with pytest.raises(UsageError, match="it has none"):
        report.one()


def test_a_wrong_backend_is_not_timed(monkeypatch):
    _backend(monkeypatch, "wrong", lambda q, k, v, case: peers.naive_attention(q, k, v, case) * 1.02)
    report = bench.compare(SMALL, ["naive", "wrong"], ("fwd", "bwd"), device="cpu", settings=QUICK)
    for mode in ("fwd", "bwd"):
        wrong = report.one(backend="wrong", mode=mode)
        assert wrong.status == "mismatch" and wrong.stats is None and "max error" in wrong.reason
        assert report.one(backend="naive", mode=mode).ok
    assert record.problems(report.document()) == []


def test_a_backend_with_a_wrong_gradient_is_not_timed(monkeypatch):
    def attend(q, k, v, case):
        return peers.naive_attention(q, k.detach() + 0.9 * (k - k.detach()), v, case)

    _backend(monkeypatch, "wrong", attend)
    result = bench.run(SMALL, "wrong", ("bwd",), device="cpu", settings=QUICK).one(backend="wrong", mode="bwd")
    assert result.status == "mismatch" and "dk" in result.reason and "dv" not in result.reason


def _raising(error):
    def attend(q, k, v, case):
        raise error

    return attend


@pytest.mark.parametrize("error, status, reason", [
    (torch.OutOfMemoryError("CUDA out of memory"), "oom", "out of memory"),
    (RuntimeError("no such kernel"), "error", "RuntimeError: no such kernel"),
    (peers.Refused("no softcap"), "refused", "no softcap"),
], ids=["oom", "error", "refused"])  # fmt: skip
def test_a_failing_backend_is_a_row(monkeypatch, error, status, reason):
    _backend(monkeypatch, "failing", _raising(error))
    report = bench.compare([SMALL, GATED[1]], ["failing", "naive"], ("fwd",), device="cpu", settings=QUICK)
    assert [(r.backend, r.status) for r in report.results] == [("failing", status), ("naive", "ok")] * 2
    assert report.results[0].reason == reason


def test_refusals_carry_their_reason():
    causal = dataclasses.replace(SMALL, causal=True, seqlen_q=32)
    packed = dataclasses.replace(SMALL, varlen=True)
    cases = [causal, dataclasses.replace(SMALL, softcap=9.0), packed]
    report = bench.compare(cases, ["naive", "sdpa", "fa3"], ("fwd",), device="cpu", settings=QUICK)
    reasons = [(r.backend, r.status, r.reason) for r in report.results if not r.ok]
    assert ("sdpa", "refused", "SDPA has no softcap") in reasons
    assert peers.BACKENDS["sdpa"].refusal(dataclasses.replace(SMALL, alibi=True), "fwd", "cpu") == "measured here without ALiBi"
    assert ("sdpa", "refused", "measured here without packed sequences (--varlen)") in reasons
    assert any(name == "sdpa" and "top-left" in reason for name, _, reason in reasons)
    assert ("fa3", "unavailable", "needs a GPU") in reasons


def test_scores_that_would_not_fit_are_skipped(monkeypatch):
    monkeypatch.setattr(engine, "_free_host_memory", lambda: 1 << 16)
    result = bench.run(SMALL, "naive", ("fwd",), device="cpu", settings=QUICK).results[0]
    assert result.status == "skipped" and "free" in result.reason


def test_forward_only_backends_say_so(monkeypatch):
    _backend(monkeypatch, "half", peers.naive_attention, backward=False)
    report = bench.run(SMALL, "half", ("fwd", "bwd"), device="cpu", settings=QUICK)
    assert [(r.mode, r.status) for r in report.results] == [("fwd", "ok"), ("bwd", "refused")]


def test_a_backend_may_have_a_cache(monkeypatch):
    """Of the same keys and values, made before what is timed; without one it gets them as they are."""
    made = []

    def over_cache(k, v, case):
        made.append(case)
        return lambda q, *_: peers.naive_attention(q, k, v, case)

    def attend(q, k, v, case):
        raise AssertionError("not over a cache")

    _backend(monkeypatch, "cached", attend, over_cache=over_cache)
    report = bench.compare([SMALL], ["naive", "cached"], ("decode",), device="cpu", settings=QUICK, baseline="naive")
    assert [r.status for r in report.results] == ["ok", "ok"] and made == [SMALL]
    refusal = peers.BACKENDS["fa3-kvcache"].refusal
    assert "--mode decode" in refusal(SMALL, "fwd", "cuda") and "pages" in refusal(
        dataclasses.replace(SMALL, page_size=64), "decode", "cuda")  # fmt: skip
    bf16 = dataclasses.replace(SMALL, dtype="bf16", softcap=30.0)
    assert refusal(bf16, "decode", "cuda") is None and peers.BACKENDS["fa3"].refusal(bf16, "fwd", "cuda") is None


def test_deterministic_backend(monkeypatch):
    """The option reaches the call; decoding has none."""
    seen = []
    monkeypatch.setattr("flashtile.api.attention", lambda q, k, v, **options: seen.append(options["deterministic"]))
    for name in ("flashtile", "flashtile-deterministic"):
        peers.BACKENDS[name].load("cpu")(*make_inputs(SMALL, "cpu")[:3], SMALL)
    assert seen == [False, True]
    assert "without an option" in peers.BACKENDS["flashtile-deterministic"].refusal(SMALL, "decode", "cpu")


@pytest.mark.parametrize("name", ["reference-fa1", "reference-fa2"])
def test_references_are_backends(name):
    """Forward and backward, with grouped heads and a window; packed sequences are refused."""
    case = dataclasses.replace(SMALL, num_heads_kv=1, window=(30, 0), softcap=20.0)
    report = bench.compare([case], [name], device="cpu", settings=QUICK)
    assert [(r.mode, r.status) for r in report.results] == [("fwd", "ok"), ("bwd", "ok")]
    assert "packed" in peers.BACKENDS[name].refusal(dataclasses.replace(SMALL, varlen=True), "fwd", "cpu")


def test_peers_get_views_and_give_the_layout_of_flashtile():
    inputs = make_inputs(SMALL, "cpu")
    seen = []
    case = SMALL

    def spy(q, k, v, **_):
        seen.extend((q, k, v))
        return v

    original, torch.nn.functional.scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention, spy
    try:
        out = peers.load("sdpa", "cpu")(*inputs[:3], case)
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in inputs[:3]]
    assert out.shape == inputs[2].shape and out.data_ptr() == inputs[2].data_ptr()


def test_interruption_keeps_what_was_complete(monkeypatch):
    sample, calls = measure.sample, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sample(*args, **kwargs)

    monkeypatch.setattr(measure, "sample", interrupted)
    report = bench.run([SMALL, GATED[1]], modes=("fwd",), device="cpu", settings=QUICK)
    assert report.interrupted and [r.case for r in report.results] == [SMALL]
    assert record.problems(report.document()) == []


def test_a_lost_gpu_ends_the_run_with_rows(monkeypatch):
    def lost(self, error):
        raise engine._Fatal("an illegal memory access")

    _backend(monkeypatch, "failing", _raising(RuntimeError("boom")))
    monkeypatch.setattr(engine._Measurement, "_describe_failure", lost)
    report = bench.compare([SMALL, GATED[1]], ["naive", "failing"], ("fwd",), device="cpu", settings=QUICK)
    assert [r.status for r in report.results] == ["error"] * 4 and "illegal" in report.results[0].reason
    assert record.problems(report.document()) == []


def test_sdpa_tells_its_choice():
    result = bench.run(SMALL, "sdpa", ("fwd",), device="cpu", settings=QUICK).results[0]
    assert result.kernel in ("", "math", "flash_attention")


def test_settings_refuse_nonsense():
    for bad in ({"timer": "sundial"}, {"l2": "hot"}, {"repeats": 0}, {"rounds": -1}, {"threshold": -0.1}):
        with pytest.raises(UsageError):
            engine.Settings(**bad)
    with pytest.raises(UsageError, match="mode"):
        bench.run(SMALL, modes=("sideways",), device="cpu")
    with pytest.raises(UsageError, match="backend"):
        bench.run(SMALL, "flashtail", device="cpu")


def test_sampling_stops_by_the_rules():
    watch = measure.Stopwatch(torch.device("cpu"), "cpu")

    def fn():
        return math.factorial(300)

    warm = measure.warm_up(watch, fn, warmup_ms=2)
    samples, _ = measure.sample(watch, fn, warm, rep_ms=5, repeats=None, timeout_s=5)
    assert len(samples) >= measure.MIN_SAMPLES
    assert len(measure.sample(watch, fn, warm, rep_ms=5, repeats=7, timeout_s=5)[0]) == 7
    slow = measure.Warm(200.0, 0.0)
    samples, met = measure.sample(watch, lambda: __import__("time").sleep(0.01), slow, rep_ms=1, repeats=None, timeout_s=0.02)
    assert 1 <= len(samples) < measure.MIN_SAMPLES and not met


class _Device(measure.Stopwatch):
    """A GPU in thought: queueing a call takes the host host_ms, running it takes the device device_ms."""

    def __init__(self, host_ms, device_ms):
        self.device, self.timer, self.cost = torch.device("cuda"), "event", (host_ms, device_ms)

    def wait(self):
        pass

    def once(self, fn):
        return sum(self.cost)

    def host_ms(self, fn, calls=8):
        return self.cost[0]

    def block(self, fn, calls, head_start_ms=0.0):
        host, device = self.cost
        samples, free = [], head_start_ms
        for i in range(calls):
            # The start event runs when the device is free and the host has queued it; the kernel when fn has.
            begin = max(free, i * host)
            free = max(begin, (i + 1) * host) + device
            samples.append(free - begin)
        return samples


@pytest.mark.parametrize("host, device", [(0.25, 0.014), (0.3, 0.3), (0.02, 0.005), (0.02, 5.0), (2.0, 0.01)])
def test_launch_gaps_are_not_measured(host, device):
    """A call that the device does faster than the host can queue it: the head start must hide that from the first block on."""
    watch = _Device(host, device)
    warm = measure.warm_up(watch, None, warmup_ms=6.0)
    assert warm.device_ms == pytest.approx(device)
    calls = warm.calls_in(20.0)
    assert sum(watch.block(None, calls, warm.head_start_ms(calls))) == pytest.approx(calls * device)


@pytest.mark.parametrize("flushed", [False, True])
def test_kernel_times_are_shared_out_among_calls(flushed):
    each = [(0, 100)] * flushed + [(200, 207), (210, 213)]
    spans = [(start + 1000 * call, end + 1000 * call) for call in range(3) for start, end in each]
    times = measure.kernel_times(reversed(spans), 3, flushed)
    assert times == pytest.approx([0.010] * 3)
    with pytest.raises(RuntimeError, match="kernels in 3 calls"):
        measure.kernel_times(spans[1:], 3, flushed)


# --- records and telemetry -----------------------------------------------------------------------------------------------


def test_records_hold_no_host_user_or_path(monkeypatch):
    import getpass
    import socket

    values = {"TRITON_CACHE_DIR": "/home/somebody/cache", "CUDA_VISIBLE_DEVICES": "0"}
    monkeypatch.setattr(settings, "recorded", lambda prefixes: values, raising=False)
    env = record.environment(torch.device("cpu"), commit="abc123-dirty")
    text = json.dumps(env)
    assert "somebody" not in text and socket.gethostname() not in text
    assert getpass.getuser() == "root" or getpass.getuser() not in text
    assert env["env_vars"]["TRITON_CACHE_DIR"] == "<path>" and env["env_vars"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert env["git"] == {"commit": "abc123", "dirty": True}


def test_documents_round_trip(tmp_path):
    report = bench.run(SMALL, modes=("fwd",), device="cpu", settings=QUICK)
    path = tmp_path / "deep" / "run.json"
    record.write(str(path), record.to_text(report.document()))
    document = record.load(path)
    assert document["results"][0]["stats"]["n"] == 6 and len(document["results"][0]["samples_ms"]) == 6
    header, row = record.to_csv(document).splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=False))["batch"] == "1" and "median_ms" in header
    assert SMALL.label() in record.to_markdown(document)
    path.write_text('{"schema": "other/1"}')
    with pytest.raises(UsageError, match="flashtile-bench/1"):
        record.load(path)


def test_telemetry_degrades_and_summarises():
    with telemetry.Telemetry(torch.device("cpu")) as nothing:
        assert nothing.since(0.0) is None
    readings = [{"sm_mhz": 1980, "power_w": 500.0, "temperature_c": 60, "reasons": bits} for bits in (0, 4, 4, 1)]
    summary = telemetry.summarise(readings)
    assert summary["throttle"] == {"power cap": 0.5} and summary["sm_mhz_median"] == 1980
    assert telemetry.describe(summary) == "SM 1980 MHz, 500 W, 60 C, power cap in 50% of samples"
    assert telemetry.describe(None) == ""


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("name", ["A100", "RTX 4090", "H200"])
def test_tiles_that_are_tuned_are_beside_the_one_in_use(name, head_dim):
    """Some of the candidates fit on each device; dims that are two blocks of columns have their own."""
    from flashtile import hardware, tiles
    from flashtile.bench import tune

    device = hardware.by_name(name)
    problem = BenchCase(batch=1, seqlen_q=512, seqlen_k=512, head_dim=head_dim, head_dim_v=head_dim).problem()
    for kernel in tune.CANDIDATES:
        fit = [config for config in tune.candidates(kernel, problem, device) if tiles.feasible(kernel, config, problem, device)]
        assert len(fit) >= 2
    assert len(tune.candidates("decode", problem, device)) >= 12


def test_what_is_tuned_computes_the_same(monkeypatch):
    """The wiring, in Triton's interpreter: the tile in use and others, over a cache in pages too."""
    pytest.importorskip("triton")
    from flashtile import hardware
    from flashtile.bench import tune

    if not settings.triton_interprets():
        pytest.skip("needs TRITON_INTERPRET=1")
    small = dict(num_heads=2, num_heads_kv=1, head_dim=72, head_dim_v=72, dtype="fp16")
    calls = [
        (tune._contests, BenchCase(1, 40, 40, causal=True, **small), list(tune.CANDIDATES)),
        (tune._decode_contests, BenchCase(2, 1, 150, **small), list(tune.DECODE_KERNELS)),
        (tune._decode_contests, BenchCase(2, 1, 150, page_size=16, **small), list(tune.DECODE_KERNELS)),
    ]
    for contests_of, case, kernels in calls:
        names = []
        for kernel, contest in contests_of(case, kernels, torch.device("cpu"), 0, hardware.CPU):
            names.append(kernel)
            expected = contest.launch(contest.current)
            for config in contest.others[:4]:
                assert contest.fits(config) and not tune._differs(contest.launch(config), expected), (case, kernel, config)
        assert names == kernels


def test_as_much_is_cache_as_leaves_an_older_gpus_shared_memory(monkeypatch):
    """Of a Hopper with 228 KiB a multiprocessor, where sizes of shared memory are steps: the one asked for is a little less."""
    pytest.importorskip("triton")
    from triton import knobs

    from flashtile import hardware
    from flashtile.bench import tune
    from flashtile.device import launcher

    monkeypatch.setattr(hardware, "detect", lambda: hardware.by_name("H200"))
    asked, hooks = [], knobs.runtime.kernel_load_end_hook
    monkeypatch.setattr(launcher, "prefer_shared_memory", lambda function, percent: asked.append((function, percent)))
    before = list(hooks.calls)
    for name, kib in (("A100", 164), ("RTX 4090", 100)):
        with tune.instructions_of(hardware.by_name(name)):
            hooks(None, 7, "a kernel", None, "")
        function, percent = asked.pop()
        smaller = {164: 132, 100: 64}[kib]
        assert function == 7 and smaller < 228 * percent / 100 <= kib
    assert hooks.calls == before


def test_tiles_of_a_newer_gpu_are_not_timed_on_an_older_one(monkeypatch):
    from flashtile import hardware
    from flashtile.bench import tune
    from flashtile.errors import UnsupportedError

    monkeypatch.setattr(hardware, "detect", lambda device: hardware.by_name("A100"))
    with pytest.raises(UnsupportedError, match="target: expected a GPU of sm_80, as here, or older.*\n?.*H200, sm_90"):
        tune.run(BenchCase(), ["forward"], torch.device("cuda"), target=hardware.by_name("H200"))


def test_a_tile_that_computes_something_else_is_refused():
    from flashtile.bench import tune

    expected = torch.linspace(-4, 4, 64), torch.ones(3)
    assert not tune._differs([x * 1.01 for x in expected], expected)
    assert "off by 0.5 of" in tune._differs((expected[0], expected[1] * 1.5), expected)
    assert tune._differs((expected[0] * float("nan"), expected[1]), expected)
