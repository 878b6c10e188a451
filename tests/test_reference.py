"""naive against torch and finite differences; fa1 and fa2 against naive; Philox against its published vectors."""

import math
from functools import partial

import cases
import checks
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case, named
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile
from flashtile.errors import UnsupportedError, ValueRangeError
from flashtile.problem import AttentionProblem, Operands
from flashtile.reference import dropout, fa1, fa2, lengths, masks, naive, softmax

# other than the default, so that a tile's edge never falls on a sequence's end by luck
TILES = {"tile_m": 48, "tile_n": 32}


def each(rows):
    return pytest.mark.parametrize("case", rows, ids=lambda case: case.name)


def outputs_and_gradients(case):
    """(operands, problem, what naive gives in float64 with its gradients, dout, dlse)."""
    operands = checks.as_dtype(case.make(torch.float64), torch.float64)
    problem = case.problem(operands)
    expected = checks.run_naive(operands, case, torch.float64)
    dout, dlse = case.output_gradients(expected["out"], expected["lse"])
    return operands, problem, expected, dout, dlse


def assert_same(actual, expected, names=("out", "lse", "dq", "dk", "dv", "dsinks")):
    for name in names:
        if name in expected:
            message = partial("{}: {}".format, name)
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-10, msg=message)


def test_case_names_are_unique():
    assert len(cases.BY_NAME) == len(CASES + cases.SHORT + cases.LARGE)


def test_scaled_case_keeps_empty_and_single_rows():
    case = cases.BY_NAME["varlen_cross_causal"].scaled(8)
    assert case.lengths == ((37 * 8, 61 * 8), (70 * 8, 20 * 8), (1, 65 * 8))
    assert cases.BY_NAME["window_causal"].scaled(8).window == (31 * 8, None)


# naive


def sdpa(operands, problem, **options):
    """torch's attention in the layout of flashtile."""
    q, k, v = (x.transpose(1, 2) for x in operands[:3])
    return F.scaled_dot_product_attention(q, k, v, scale=problem.softmax_scale, enable_gqa=True, **options).transpose(1, 2)


@each(named(
    "square", "one_token", "short_q", "long_q", "gqa_3_to_1", "dim_192_128", "scale", "causal", "causal_ragged", "mqa",
    "heads_first", "packed_qkv", "shared_kv", "large_scores", "window_both", "alibi_batch_causal", "window_short_q",
))  # fmt: skip
def test_naive_is_torch_attention(case):
    operands = case.make(torch.float64)
    problem = case.problem(operands)
    bias = torch.zeros(1, 1, case.seqlen_q, case.seqlen_k, dtype=torch.float64)
    query, key = torch.arange(case.seqlen_q)[:, None], torch.arange(case.seqlen_k)[None, :]
    distance = key - query - (case.seqlen_k - case.seqlen_q)
    if operands.alibi_slopes is not None:
        bias = bias - operands.alibi_slopes.double()[..., None, None] * distance.abs()
    left, right = problem.window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    theirs = sdpa(operands, problem, attn_mask=bias.masked_fill(hidden, -math.inf))
    ours, _ = naive.forward(operands, problem)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(ours)
    our_gradients, their_gradients = (torch.autograd.grad(x, operands[:3], dout) for x in (ours, theirs))
    torch.testing.assert_close(our_gradients, their_gradients, rtol=1e-11, atol=1e-11)


def test_naive_lse_and_sinks_are_one_more_logit():
    case = Case("", 9, 7, sinks="fp32", causal=True)
    operands = case.make(torch.float64)
    _, lse = naive.forward(operands, case.problem(operands))
    scores = torch.einsum("bmhd,bnhd->bhmn", operands.q, operands.k) * 64**-0.5
    scores = scores.masked_fill(torch.ones(9, 7, dtype=torch.bool).triu(-1), -math.inf)
    with_sink = torch.cat([scores, operands.sinks.double().view(1, 2, 1, 1).expand(1, 2, 9, 1)], -1)
    torch.testing.assert_close(lse, with_sink.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_infinite_sink():
    """Of naive, fa2 and what CPU tensors get."""
    (case,) = named("sinks_causal_gqa")

    def by_naive(operands):
        return naive.forward(operands, case.problem(operands))

    for fn in (None, by_naive):
        checks.check_infinite_sink(case, torch.float64, fn=fn)
    operands = case.make(torch.float64)
    with torch.no_grad():
        operands.sinks[1] = float("inf")
        problem = case.problem(operands)
        out, lse = fa2.forward(operands, problem)
        gradients = fa2.backward(operands, problem, out, lse, torch.ones_like(out))
    assert (out[:, :, 1] == 0).all() and (lse[:, 1] == float("inf")).all()
    assert (gradients[0][:, :, 1] == 0).all() and all(x.isfinite().all() for x in gradients)


SMALL = dict(seqlen_q=5, seqlen_k=4, heads=2, heads_kv=1, head_dim=8, dlse=True)


@each([
    Case("plain", **SMALL),
    Case("causal_empty_rows", **SMALL, causal=True),
    Case("everything", **SMALL, window=(2, 1), softcap=2.0, alibi="heads", sinks="fp32", dropout_p=0.3),
    Case("varlen", **SMALL, lengths=((3, 2), (0, 1), (2, 0), (2, 3)), causal=True, softcap=2.0, sinks="fp32", alibi="batch"),
])  # fmt: skip
def test_naive_gradients_are_finite_differences(case):
    operands = checks.as_dtype(case.make(torch.float64), torch.float64)
    problem = case.problem(operands)
    if operands.sinks is not None:
        operands = operands._replace(sinks=operands.sinks.detach().double().requires_grad_())

    def finite_part(q, k, v, sinks):
        out, lse = naive.forward(operands._replace(q=q, k=k, v=v, sinks=sinks), problem)
        return out, lse.masked_fill(torch.isinf(lse.detach()), 0.0)

    assert torch.autograd.gradcheck(finite_part, (*operands[:3], operands.sinks))


@each(named("causal_empty_rows", "window_empty_rows", "dlse_empty_rows", "no_keys", "causal_no_keys"))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_row_without_key_gives_zero_and_no_gradient(case, dtype):
    operands = case.make(dtype)
    result = checks.run_naive(operands, case, dtype)
    empty = torch.isneginf(result["lse"]).transpose(1, 2)
    assert empty.any()
    assert (result["out"][empty] == 0).all() and (result["dq"][empty] == 0).all()
    assert all(torch.isfinite(result[name]).all() for name in ("out", "dq", "dk", "dv"))


def test_rows_outside_of_sequences_are_zero():
    case = cases.BY_NAME["varlen_used"]
    operands = case.make(torch.float64)
    result = checks.run_naive(operands, case, torch.float64)
    unused = ~case.used_rows(0, "cpu")
    assert (result["out"][unused] == 0).all() and (result["dq"][unused] == 0).all()
    assert torch.isneginf(result["lse"][:, unused]).all()
    assert (result["dk"][~case.used_rows(1, "cpu")] == 0).all()


def test_naive_attention_takes_the_public_arguments():
    case = cases.BY_NAME["varlen_scores"]
    operands = case.make(torch.float32)
    out, lse = case.attend(operands, naive.attention)
    expected, expected_lse = naive.forward(operands, case.problem(operands))
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    with pytest.raises(ValueRangeError, match="rng_state"):
        naive.attention(*operands[:3], dropout_p=0.5, cu_seqlens_q=operands.cu_seqlens_q, cu_seqlens_k=operands.cu_seqlens_k,
                        max_seqlen_q=40, max_seqlen_k=40)  # fmt: skip


# fa1 and fa2


@each(CASES)
def test_fa2_is_naive(case):
    operands, problem, expected, dout, dlse = outputs_and_gradients(case)
    with checks.poisoned_memory():
        out, lse = fa2.forward(operands, problem, **TILES)
        dq, dk, dv, dsinks = fa2.backward(operands, problem, out, lse, dout, dlse, **TILES)
    assert (dsinks is None) == (operands.sinks is None)
    assert_same({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks}, expected)


@each([case for case in CASES if not case.sinks and not case.dlse])
def test_fa1_is_naive(case):
    operands, problem, expected, dout, _ = outputs_and_gradients(case)
    out, state = fa1.forward(operands, problem, **TILES)
    dq, dk, dv = fa1.backward(operands, problem, out, state, dout, **TILES)
    assert_same({"out": out, "lse": softmax.lse(state), "dq": dq, "dk": dk, "dv": dv}, expected)


def test_fa1_refuses_sinks():
    case = cases.BY_NAME["sinks"]
    operands = case.make(torch.float32)
    with pytest.raises(UnsupportedError, match="sinks: expected None"):
        fa1.forward(operands, case.problem(operands))


@settings(max_examples=60)
@given(case=cases.any_case(), tile_m=st.integers(3, 50), tile_n=st.integers(3, 50))
def test_fa2_is_naive_on_drawn_calls(case, tile_m, tile_n):
    operands, problem, expected, dout, dlse = outputs_and_gradients(case)
    out, lse = fa2.forward(operands, problem, tile_m, tile_n)
    dq, dk, dv, dsinks = fa2.backward(operands, problem, out, lse, dout, dlse, tile_m, tile_n)
    assert_same({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks}, expected)


@each(named("causal_empty_rows", "window_both", "dropout_causal_gqa"))
@pytest.mark.parametrize("tile_m, tile_n", [(1, 1), (16, 64), (1000, 1000)])
def test_tile_sizes_do_not_matter(case, tile_m, tile_n):
    operands, problem, expected, dout, dlse = outputs_and_gradients(case)
    out, lse = fa2.forward(operands, problem, tile_m, tile_n)
    dq, dk, dv, _ = fa2.backward(operands, problem, out, lse, dout, dlse, tile_n, tile_m)
    assert_same({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, expected)


# the check itself, on what serves CPU tensors


@each(CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_cpu_tensors_pass_the_check(case, dtype, poisoned):
    checks.check_attention(case, dtype)


def wrong_attention(*tensors, factor=1.0, hidden_row=None, **options):
    """factor multiplies out, hidden_row gets lse -inf."""
    out, lse = flashtile.attention(*tensors, **options)
    if hidden_row is not None:
        lse = lse.index_fill(2, torch.tensor([hidden_row]), -math.inf)
    return out * factor, lse


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_check_fails_a_wrong_factor(dtype):
    with pytest.raises(AssertionError, match="out: rms error"):
        checks.check_attention(cases.BY_NAME["gqa"], dtype, fn=partial(wrong_attention, factor=1.02))


def test_check_fails_infinities_in_other_places():
    with pytest.raises(AssertionError, match="lse: -inf in other places than expected, 2 of 254"):
        checks.check_attention(cases.BY_NAME["causal_ragged"], torch.float32, fn=partial(wrong_attention, hidden_row=9))


def test_check_fails_gradients_of_unseen_keys():
    case = cases.BY_NAME["window_unseen_keys"]
    result = checks.run_naive(case.make(torch.float64), case, torch.float64)
    assert not checks.unseen(result, result)
    assert "first [0, 0, 0]" in checks.unseen(result | {"dv": result["dv"] + 1e-30}, result)[0]


def test_poisoned_memory_is_nan(poisoned):
    assert torch.empty(3).isnan().all() and torch.ones(3).new_empty(2).isnan().all()
    assert (torch.empty(2, dtype=torch.int32) == 2**31 - 1).all()
    assert (torch.zeros(2) == 0).all()


def test_fa2_makes_no_seqlen_by_seqlen_tensor():
    """The largest allocation of a long call is one of its own tensors."""
    operands = Operands(*(torch.randn(1, 2048, 1, 8, requires_grad=True) for _ in range(3)))
    problem = AttentionProblem.from_tensors(operands, causal=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes())
            return result

    with Watch():
        out, lse = fa2.forward(operands, problem)
        fa2.backward(operands, problem, out, lse, torch.ones_like(out))
    # a tile's column minus row is int64, 8 bytes an element
    assert largest <= max(2048 * 8 * 4, 8 * fa2.TILE_M * fa2.TILE_N)


# masks and dropout


@each(named("causal_short_q", "causal_empty_rows", "window_both", "window_unseen_keys", "window_empty_rows", "window_left"))
def test_tile_ranges_are_tight(case):
    operands = case.make(torch.float32)
    (seqs,) = lengths.sequences(operands, case.problem(operands))
    rows, cols = torch.arange(case.seqlen_q)[:, None], torch.arange(case.seqlen_k)[None, :]
    visible = masks.visible(rows, cols, seqs.shift, seqs.problem.window)
    for extent in lengths.tiles(slice(0, case.seqlen_q), 16):
        seen = visible[extent].any(0).nonzero().flatten().tolist()
        found = masks.key_range(extent, seqs)
        assert list(range(found.start, found.stop)) == seen
    for extent in lengths.tiles(slice(0, case.seqlen_k), 16):
        seen = visible[:, extent].any(1).nonzero().flatten().tolist()
        found = masks.query_range(extent, seqs)
        assert list(range(found.start, found.stop)) == seen


@pytest.mark.parametrize("counter, key, expected", [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])  # fmt: skip
def test_philox_gives_the_published_vectors(counter, key, expected):
    """The known answers for 10 rounds that its authors publish with Random123."""
    words = dropout.philox([torch.tensor(word) for word in counter], key, rounds=10)
    assert tuple(word.item() for word in words) == expected


@pytest.mark.parametrize("dropout_p, threshold, scale", [
    (0.5, 2**14, 2.0), (0.1, 3277, 2**15 / (2**15 - 3277)),
    # nothing is dropped below half a step, and not everything just below 1
    (1e-5, 0, 1.0), (1 - 1e-9, 2**15 - 1, 2.0**15),
])  # fmt: skip
def test_probabilities_have_15_bits(dropout_p, threshold, scale):
    problem = AttentionProblem(2, 200, 200, 2, 2, 8, 8, torch.float32, dropout_p=dropout_p)
    assert (problem.dropout_threshold, problem.keep_scale) == (threshold, scale)


def test_dropout_keeps_the_promised_share_and_depends_on_everything():
    def keep(seed=1, offset=0, batch=slice(0, 1)):
        problem = AttentionProblem(2, 200, 200, 2, 2, 8, 8, torch.float32, dropout_p=0.25)
        seqs = lengths.Sequences(problem, batch, slice(None), slice(None), 200, 200)
        return dropout.keep_scale(slice(0, 200), slice(0, 200), seqs, torch.tensor([seed, offset]), torch.float64)

    first = keep()
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75}
    # Every place of a group of 16 x 16 has bits of its own
    places = (first > 0)[..., :192, :192].double().unflatten(-1, (12, 16)).unflatten(-3, (12, 16))
    assert (places.mean((0, 1, 2, 3, 5)) - 0.75).abs().max() < 0.09
    halves = (first > 0).unflatten(-1, (-1, 2))[..., :192, :96, :].unflatten(-3, (12, 2, 8)).unflatten(-2, (12, 2, 4))
    flat = halves.double().movedim((4, 7, 9), (-3, -2, -1)).flatten(0, -4).flatten(1)
    # the eight of a group, pairwise: a standard deviation of 0.006
    assert (torch.corrcoef(flat.T) - torch.eye(8)).abs().max() < 0.03
    # 80,000 draws: the mean of the kept share has a standard deviation of 0.0015
    assert abs((first > 0).double().mean().item() - 0.75) < 0.006
    assert torch.equal(first, keep())
    assert not torch.equal(first[:, 0], first[:, 1])
    for other in (keep(seed=2), keep(seed=1 + 2**32), keep(offset=1), keep(batch=slice(1, 2))):
        assert abs(((first > 0) == (other > 0)).double().mean().item() - 0.625) < 0.01


def test_transforms_of_the_definition():
    """Where flashtile.attention has no derivatives of second order or forward mode, errors name it."""
    q, k, v = torch.randn(3, 1, 3, 2, 8, dtype=torch.float64)

    def loss(q):
        return naive.attention(q, k, v, causal=True).square().sum()

    gradient = torch.autograd.functional.jacobian(loss, q)
    torch.testing.assert_close(torch.func.grad(loss)(q), gradient)
    torch.testing.assert_close(torch.func.jvp(loss, (q,), (q,))[1], (gradient * q).sum())
    assert torch.func.hessian(loss)(q).shape == (*q.shape, *q.shape)
    torch.testing.assert_close(torch.func.vmap(loss)(torch.stack([q, 2 * q])), torch.stack([loss(q), loss(2 * q)]))
