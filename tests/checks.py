"""Is an implementation right? Its error against float64 is compared with that of PyTorch in the same dtype.

First infinities and NaNs must stand at the same places, and what belongs to a query without a key, or to a key that no query
sees, must be exactly 0. Then, for out, lse and each gradient, against a float64 `naive`:

    largest error       <= 2 x that of the yardstick    + FLOOR_ULPS[dtype] ulps of the largest value
    root mean square    <= 1.5 x that of the yardstick  + a quarter of those ulps of the values' root mean square
    cosine difference   <= COSINE_LIMIT[dtype], whatever the yardstick does (dsinks, dslopes: + 2 x that of the yardstick)

The yardstick is `naive` in the dtype itself: products, scores and p rounded, as in PyTorch code written by hand. The floors
are needed because it may happen to be exact; those of gradients grow with |lse|: a backward pass that recomputes p from an lse
rounded to fp32 has it off by |lse| ulps of fp32. The three see different faults: one wrong element, many a little wrong, and
one that the yardstick shares. Where dq or dk are 0 by cancellation everywhere (each query sees one key), VANISHING_ULPS of the
largest possible terms are allowed instead. dsinks and dslopes are a number a head, a sum over all rows of either sign: what
rounding makes of a few of them is a matter of luck, so their yardstick is off by DEVIATIONS standard deviations of that at
least. lse is fp32 whatever the dtype: its yardstick computes in fp32.
"""

from contextlib import contextmanager
from unittest import mock

import torch

from flashtile import outputs
from flashtile.reference import naive
from flashtile.reference.lengths import sequences
from flashtile.reference.scores import distances, logits

# An fp32 kernel differs from the yardstick in the order of its sums and in exp2 against exp; a rounding dtype hides that.
FLOOR_ULPS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 8, torch.float64: 64}
# relative to the largest of 1 and |lse|: scores through approximate exp2 and log2
LSE_FLOOR = {torch.float32: 2.0**-17, torch.float64: 1e-14}
# three to seven times what the yardstick itself reaches in the worst case, large_scores
COSINE_LIMIT = {torch.float16: 1e-4, torch.bfloat16: 2e-3, torch.float32: 5e-11, torch.float64: 1e-25}
VANISHING_ULPS = 4
DEVIATIONS = 2.5


def check_attention(case, dtype, device="cpu", fn=None, seed=0):
    """Run a case forward and backward and compare out, lse, dq, dk, dv, dsinks and dslopes.

    fn: takes the arguments of `flashtile.attention` (or `attention_varlen` for packed cases); default those two.
    Raises AssertionError, with every number that is too large.
    """
    operands = case.make(dtype, device, seed)
    # The implementation runs first, so that memory freed by the reference can't lend it the right answer.
    with fixed_rng_state(operands.rng_state):
        actual = run(lambda x: case.attend(x, fn), operands, case)
    reference = run_naive(operands, case, torch.float64)
    yardstick = run_naive(operands, case, dtype)
    problem = case.problem(operands)
    with torch.no_grad():
        yardstick["lse"] = naive.forward(operands, problem, torch.promote_types(dtype, torch.float32))[1]
    for name, deviation in (("dsinks", dsinks_deviation), ("dslopes", dslopes_deviation)):
        if name in reference:
            noise = DEVIATIONS * deviation(operands, case, reference, dtype)
            if noise.max() > (yardstick[name].double() - reference[name]).abs().max():
                yardstick[name] = reference[name] + noise
    lse_error = _lse_error(reference["lse"], yardstick["lse"].dtype)
    report = []
    for name in reference:
        relative_floor = lse_error if name.startswith("d") else 0.0
        vanishing = _largest_term(operands, problem, case) if name in ("dq", "dk") else 0.0
        report += compare(name, actual[name], reference[name], yardstick[name], dtype, relative_floor, vanishing)
    report += unseen(actual, reference)
    assert not report, "\n".join([f"{case.name}, {dtype}, {device}: expected {case}", *report])


def three_key_parts(problem, device, config):
    """In place of `tiles._numbers_of_parts`: parts of the keys for any call that may have them."""
    return (1,) if problem.dropout_p else (3,)


def three_query_parts(problem, config):
    """In place of `backward_config.query_parts`: parts of the queries for any call that may have them, none without a tile."""
    from flashtile.hopper.backward_config import may_cut_queries

    return min(3, max(1, -(-problem.seqlen_q // config.tile_m))) if may_cut_queries(problem, config) else 1


def check_infinite_sink(case, dtype, device="cpu", fn=None):
    """A head whose sink is inf has out 0, lse inf and no gradients; others do not notice. fn: as that of `run`."""
    operands = case.make(dtype, device)
    others = [head for head in range(case.heads) if head != 1]
    expected = run(fn or case.attend, operands, case)
    with torch.no_grad():
        operands.sinks[1] = float("inf")
    actual = run(fn or case.attend, operands, case)
    assert (actual["out"][:, :, 1] == 0).all() and (actual["lse"][:, 1] == float("inf")).all()
    assert (actual["dq"][:, :, 1] == 0).all() and all(x.isfinite().all() for name, x in actual.items() if name[0] == "d")
    torch.testing.assert_close(actual["out"][:, :, others], expected["out"][:, :, others], rtol=0, atol=0)
    torch.testing.assert_close(actual["dq"][:, :, others], expected["dq"][:, :, others], rtol=0, atol=0)
    torch.testing.assert_close(actual["dsinks"][others], expected["dsinks"][others])


def run_naive(operands, case, dtype):
    """The outputs and gradients of `naive` computed in dtype, from the same values."""
    cast = as_dtype(operands, dtype)
    problem = case.problem(cast)
    return run(lambda x: naive.forward(x, problem), cast, case, like=operands)


def run(fn, operands, case, like=None):
    """fn(operands) -> (out, lse), forward and backward, as a dict; `like` has the dtype that the output gradients come in."""
    out, lse = fn(operands)
    dtype = (like or operands).q.dtype
    dout, dlse = case.output_gradients(out.detach().to(dtype), lse.detach().to(torch.promote_types(dtype, torch.float32)))
    outputs, gradients = [out], [dout.to(out.dtype)]
    if dlse is not None:
        if like is not None:
            # Plain arithmetic has no rows to leave out
            dlse = dlse.nan_to_num()
        outputs, gradients = [out, lse], [*gradients, dlse.to(lse.dtype)]
    inputs = {"dq": operands.q, "dk": operands.k, "dv": operands.v}
    if operands.sinks is not None:
        inputs["dsinks"] = operands.sinks
    if operands.alibi_slopes is not None and operands.alibi_slopes.requires_grad:
        inputs["dslopes"] = operands.alibi_slopes
    grads = torch.autograd.grad(outputs, list(inputs.values()), gradients)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(inputs, grads, strict=True))}


def as_dtype(operands, dtype):
    """The same values in another dtype, as new leaves; sinks become at least as precise as dtype."""

    def cast(x, dtype):
        return x.detach().to(dtype).requires_grad_()

    q, k, v = (cast(x, dtype) for x in operands[:3])
    sinks = operands.sinks
    if sinks is not None:
        sinks = cast(sinks, torch.promote_types(dtype, sinks.dtype))
    return operands._replace(q=q, k=k, v=v, sinks=sinks)


def compare(name, actual, reference, yardstick, dtype, relative_floor=0.0, vanishing=0.0, narrow=False):
    """Lines that say what is wrong; none if nothing is.

    relative_floor is added to the floors, relative to the values; vanishing is allowed where all values are 0. narrow: what is
    between has fewer bits than dtype, of the yardstick too.
    """
    if actual.shape != reference.shape:
        return [f"{name}: expected shape {tuple(reference.shape)}, got {tuple(actual.shape)}"]
    if reference.numel() == 0:
        return []
    # lse is wider than the inputs, and the gradient of fp32 sinks is narrower than fp64 ones.
    dtype = actual.dtype if name == "lse" or actual.dtype == torch.float32 and dtype == torch.float64 else dtype
    actual, yardstick = actual.double(), yardstick.double()
    for anomaly, where in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (where(actual) != where(reference)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            return [f"{name}: {anomaly} in other places than expected, {len(wrong)} of {actual.numel()}; "
                    f"at {at} expected {reference[at].item()}, got {actual[at].item()}"]  # fmt: skip
    finite = torch.isfinite(reference) & torch.isfinite(yardstick)
    actual, reference, yardstick = actual[finite], reference[finite], yardstick[finite]
    if reference.numel() == 0:
        return []
    largest, rms = reference.abs().max().item(), _rms(reference)
    if largest == 0:
        got = actual.abs().max().item()
        return [] if got <= vanishing else [f"{name}: {got:.3e}, expected 0, at most {vanishing:.3e}"]
    if name == "lse":
        floor = rms_floor = LSE_FLOOR[dtype] * max(1.0, largest)
    else:
        ulps = FLOOR_ULPS[dtype] * torch.finfo(dtype).eps
        floor, rms_floor = (ulps + relative_floor) * largest, (ulps / 4 + relative_floor) * rms
    ours, theirs = actual - reference, yardstick - reference
    measures = (
        ("largest error", ours.abs().max().item(), 2, theirs.abs().max().item(), floor),
        # of a few numbers it says no more than the largest, and less surely
        ("rms error", _rms(ours) if ours.numel() >= 32 else 0.0, 1.5, _rms(theirs), rms_floor),
        # these are few
        ("cosine difference", _cosine_difference(actual, reference), 2 if narrow or name in ("dsinks", "dslopes") else 0,
         _cosine_difference(yardstick, reference), COSINE_LIMIT[dtype]),
    )
    lines = []
    for measure, got, factor, allowed, floor in measures:
        if not got <= factor * allowed + floor:
            lines.append(f"{name}: {measure} {got:.3e}, expected at most {factor * allowed + floor:.3e} "
                         f"= {factor} x {allowed:.3e} + {floor:.3e}; values up to {largest:.3e}")  # fmt: skip
    return lines


def unseen(actual, reference):
    """Lines about rows that must be exactly 0, since no query and key meet there."""
    lines = []
    for names in (("out", "dq"), ("dk", "dv")):
        hidden = torch.stack([(reference[name] == 0).all(-1) for name in names]).all(0)
        for name in names:
            if actual[name].shape != hidden.shape + actual[name].shape[-1:]:
                continue
            wrong = ((actual[name] != 0).any(-1) & hidden).nonzero().tolist()
            if wrong:
                lines.append(f"{name}: expected 0 where nothing is visible, got more in {len(wrong)} rows, first {wrong[0]}")
    return lines


def _largest_term(operands, problem, case):
    """VANISHING_ULPS of a bound on the terms of dq and dk that may cancel: |dout| |v| times an element of q or k."""
    q, k, v = (torch.nan_to_num(x.detach()).double() for x in operands[:3])
    if not q.numel() or not k.numel():
        return 0.0
    out = q.new_empty((*q.shape[:-1], problem.head_dim_v), dtype=operands.q.dtype)
    dout, _ = case.output_gradients(out, out)
    largest = torch.nan_to_num(dout).double().norm(dim=-1).max() * v.norm(dim=-1).max() * max(q.abs().max(), k.abs().max())
    eps = torch.finfo(torch.promote_types(operands.q.dtype, torch.float32)).eps
    return VANISHING_ULPS * eps * abs(problem.softmax_scale) * largest.item()


def _delta_variance(case, reference, dtype):
    """Of each row's delta = sum(dout out), of the shape of lse, where out is rounded to dtype before.

    Rounding moves a number by up to eps / 2 of it, evenly.
    """
    out, lse = reference["out"], reference["lse"]
    dout, _ = case.output_gradients(out.to(dtype), lse.to(torch.promote_types(dtype, torch.float32)))
    variance = (dout.double() * out).square().sum(-1).transpose(-1, -2) * torch.finfo(dtype).eps ** 2 / 12
    # Rows of no sequence
    return torch.where(torch.isfinite(lse), variance, 0.0)


def dsinks_deviation(operands, case, reference, dtype):
    """Standard deviation of each of dsinks = -sum over rows of p(sink) (delta - dlse), by that of delta."""
    p_sink = torch.exp(operands.sinks.detach().double()[:, None] - reference["lse"])
    variance = torch.nan_to_num(p_sink.square() * _delta_variance(case, reference, dtype)).transpose(-1, -2)
    return variance.reshape(-1, variance.shape[-1]).sum(0).sqrt()


def dslopes_deviation(operands, case, reference, dtype):
    """Standard deviation of each of dslopes = -sum of p (dp - delta) distance, by that of delta."""
    cast, delta_variance = as_dtype(operands, torch.float64), _delta_variance(case, reference, dtype)
    problem = case.problem(cast)
    variance = delta_variance.new_zeros(problem.batch, problem.num_heads)
    for seqs in sequences(cast, problem):
        rows, cols = slice(0, seqs.seqlen_q), slice(0, seqs.seqlen_k)
        scores = torch.einsum("bhgmd,bhnd->bhgmn", seqs.of_q(cast.q), seqs.of_k(cast.k)).detach()
        p = torch.exp(logits(scores, rows, cols, seqs, cast.alibi_slopes.detach()) - seqs.of_lse(reference["lse"])[..., None])
        distance = torch.nan_to_num(p * distances(rows, cols, seqs, p.device)).sum(-1)
        seqs.of_heads(variance).add_((distance.square() * seqs.of_lse(delta_variance)).sum(-1, keepdim=True))
    return (variance if operands.alibi_slopes.dim() == 2 else variance.sum(0)).sqrt()


def _lse_error(lse, dtype):
    """What rounding lse to dtype does to p, relatively."""
    finite = lse[torch.isfinite(lse)]
    return torch.finfo(dtype).eps * finite.abs().max().item() if finite.numel() else 0.0


def _rms(x):
    return x.square().mean().sqrt().item()


def _cosine_difference(x, y):
    """0 where x equals y; sees a common factor, unlike the cosine itself. Written so that small ones are not lost."""
    total = (x.square() + y.square()).sum().item()
    return (x - y).square().sum().item() / total if total else 0.0


@contextmanager
def fixed_rng_state(rng_state):
    """Let flashtile draw this Philox state, so that the reference can make the same dropout mask; None lets it draw."""
    if rng_state is None:
        yield
        return
    from flashtile import ops

    with mock.patch.object(ops, "draw_rng_state", lambda device: rng_state.to(device)):
        yield


@contextmanager
def poisoned_memory():
    """Fill what torch.empty and its kin allocate: NaN, and for integers a number that is no index."""

    def poisoned(allocate):
        def allocate_and_fill(*args, **kwargs):
            x = allocate(*args, **kwargs)
            if x.dtype.is_floating_point:
                x.detach().fill_(float("nan"))
            elif x.dtype != torch.bool and not x.dtype.is_complex:
                x.fill_(torch.iinfo(x.dtype).max)
            return x

        return allocate_and_fill

    # Scratch of calls before is finite
    outputs._kept.clear()
    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        mock.patch.object(torch, "empty_strided", poisoned(torch.empty_strided)),
        mock.patch.object(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty)),
        mock.patch.object(torch.Tensor, "new_empty_strided", poisoned(torch.Tensor.new_empty_strided)),
        mock.patch.object(outputs, "empty_on_gpu", outputs.empty_on_gpu and poisoned(outputs.empty_on_gpu)),
    ):
        yield
