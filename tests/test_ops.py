"""The torch ops: registration, fakes, compile, autograd; and the CPU tier of torch's own attention."""

import dataclasses

import checks
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, named
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile import dispatch, hardware, ops, settings
from flashtile.problem import AttentionProblem, Operands
from flashtile.reference import naive

NO_OPTIONS = (None, None, False, None, None, None, 0.0, 0.0, False, True)


def qkv(seqlen=16, heads_kv=2, dtype=torch.float32, requires_grad=False):
    shapes = [(2, seqlen, 4, 16), (2, seqlen, heads_kv, 16), (2, seqlen, heads_kv, 16)]
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes]


def flat(operands, **options):
    """The flat arguments of the forward op for a case's operands."""
    window = options.pop("window")
    names = ("max_seqlen_q", "max_seqlen_k", "causal")
    rest = ("softmax_scale", "softcap", "dropout_p", "deterministic", "return_lse")
    tensors = (x if x is None else x.detach() for x in operands)
    return (*tensors, *(options.get(n) for n in names), *window, *(options[n] for n in rest))


@pytest.mark.parametrize(
    "case", named("gqa", "sinks_causal_gqa", "dropout", "varlen_cross_causal", "dim_40_8", "alibi_batch_causal"),
    ids=lambda c: c.name,
)  # fmt: skip
def test_opcheck(case):
    arguments = flat(case.make(torch.float32), **case.options)
    torch.library.opcheck(ops.forward_op, arguments)
    out, lse = ops.forward_op(*arguments)
    dlse = torch.randn_like(lse) if case.dlse else None
    gradients = torch.randn_like(out), dlse
    torch.library.opcheck(ops.backward_op, (*gradients, out, lse, *arguments))
    if case.alibi:
        torch.library.opcheck(ops.dslopes_op, (*gradients, out, lse, *arguments))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fakes_have_the_real_shapes_and_strides(case):
    from torch._subclasses import FakeTensorMode

    arguments = flat(case.make(torch.float32), **case.options)
    real = ops.forward_op(*arguments)
    grads = ops.backward_op(torch.randn_like(real[0]), None, *real, *arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        fake = ops.forward_op(*fakes)
        fake_grads = ops.backward_op(torch.empty_like(fake[0]), None, *fake, *fakes)
    for a, b in zip((*real, *grads), (*fake, *fake_grads)):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    def step(q, k, v, sinks, slopes):
        out, lse = flashtile.attention(q, k, v, causal=True, sinks=sinks, alibi_slopes=slopes, return_lse=True)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (16, 24):
        inputs = [*qkv(seqlen, requires_grad=True), *(torch.randn(4, requires_grad=True) for _ in range(2))]
        expected = torch.autograd.grad(step(*inputs), inputs)
        for got, want in zip(torch.autograd.grad(compiled(*inputs), inputs), expected):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_slopes_alone_have_a_gradient(shape):
    """Once more by what found the first call's kind; and none where they want none."""
    q, k, v = qkv(dtype=torch.float64)
    slopes = torch.rand(shape, requires_grad=True)
    wider = slopes.detach().double().requires_grad_()
    distance = (torch.arange(16)[:, None] - torch.arange(16)).abs()
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4 - wider[..., None, None] * distance
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(2, 2))
    (reference,) = torch.autograd.grad(expected.square().sum(), wider)
    for _ in range(3):
        out = flashtile.attention(q, k, v, alibi_slopes=slopes)
        (dslopes,) = torch.autograd.grad(out.square().sum(), slopes)
        assert dslopes.shape == shape and dslopes.dtype == torch.float32
        torch.testing.assert_close(dslopes, reference.float())
    assert not flashtile.attention(q, k, v, alibi_slopes=slopes.detach()).requires_grad


def test_compile_packed():
    def step(q, k, v, cu_seqlens):
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 9, "max_seqlen_k": 9}
        return flashtile.attention_varlen(q, k, v, **lengths, window=(3, 0))

    q, k, v = (torch.randn(20, 2, 16) for _ in range(3))
    cu_seqlens = torch.tensor([0, 9, 9, 17], dtype=torch.int32)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, cu_seqlens), step(q, k, v, cu_seqlens))


def test_compile_raises_our_error():
    q, k, v = qkv()
    with pytest.raises(Exception, match="k: expected the batch of q, 2, got batch 1"):
        torch.compile(lambda: flashtile.attention(q, k[:1], v[:1]), fullgraph=True, backend="aot_eager")()


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_tier_gives_the_same(causal, return_lse, monkeypatch):
    """Without lse a plain call goes to F.scaled_dot_product_attention, with it to the reference."""
    inputs = qkv(33, requires_grad=True, dtype=torch.float64)
    result = flashtile.attention(*inputs, causal=causal, return_lse=return_lse)
    out = result[0] if return_lse else result
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout)
    monkeypatch.setenv("FLASHTILE_TIER", "reference")
    expected = flashtile.attention(*inputs, causal=causal)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs, dout))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_causal_with_a_scale_that_is_not_positive(scale):
    """torch's kernel hides keys before it scales: -inf * scale."""
    q, k, v = qkv(requires_grad=True)
    out = flashtile.attention(q, k, v, causal=True, softmax_scale=scale)
    expected = naive.attention(q, k, v, causal=True, softmax_scale=scale)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"window": (3, 3)}], ids=str)
def test_products_inside_of_a_call_are_not_autocast(options):
    """Operands come in autocast's dtype; sums, and what the backward pass computes in fp32, are not rounded to it."""
    q, k, v = (x * 4 for x in qkv(dtype=torch.bfloat16))
    expected = flashtile.attention(q, k, v, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = flashtile.attention(q, k, v, **options)
        cached = flashtile.attention_with_kvcache(q, k, v)
    torch.testing.assert_close(got, expected, atol=0, rtol=0)
    assert torch.equal(cached, flashtile.attention_with_kvcache(q, k, v))
    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    result = flashtile.attention(*inputs, **options)
    result = sum(x.sum() for x in result) if options.get("return_lse") else result.sum()
    expected = torch.autograd.grad(result, inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(result, inputs)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("tier", ["reference", "portable"])
def test_backward_takes_results_of_any_layout(tier, monkeypatch):
    monkeypatch.setenv("FLASHTILE_TIER", tier)
    q, k, v = qkv()
    arguments = q, k, v, *(None,) * 7, *NO_OPTIONS
    out, lse = ops.forward_op(*arguments)
    dout = torch.randn_like(out)
    expected = ops.backward_op(dout, None, out, lse, *arguments)
    for other in ((out, lse.mT.contiguous().mT), (out.mT.contiguous().mT, lse)):
        for got, want in zip(ops.backward_op(dout, None, *other, *arguments), expected):
            assert torch.equal(got, want)


def test_v_of_another_head_dim_does_not_store_the_scores():
    """torch's kernel on CPUs wants one head dim; without it there is only its way that stores them."""
    q, k, v = torch.randn(3, 1, 16, 2, 32).unbind()
    problem = AttentionProblem.from_tensors(
        Operands(q, k, v[..., :16]), causal=False, window=(None, None), softmax_scale=None, softcap=0.0, dropout_p=0.0,
        deterministic=False, return_lse=False,
    )  # fmt: skip
    assert dispatch.plan(problem, hardware.detect(q.device), "forward").tier == "reference"


def test_traced_calls_are_the_op():
    """torch.jit.trace would keep the loops of one call."""
    def call(q, k, v):
        return flashtile.attention(q, k, v, window=(40, 40))

    traced = torch.jit.trace(call, qkv(), check_trace=False)
    longer = qkv(300)
    torch.testing.assert_close(traced(*longer), call(*longer), atol=0, rtol=0)


def test_batched_gradients():
    """autograd's own vmap, which shows in nothing but the tensors."""
    q, k, v = qkv(requires_grad=True)
    out = flashtile.attention(q, k, v, causal=True)
    douts = torch.randn(3, *out.shape)
    batched = torch.autograd.grad(out, (q, k, v), douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        for got, want in zip(batched, torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)):
            torch.testing.assert_close(got[i], want)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compile_packed_with_a_longest_from_data():
    def call(q, cu_seqlens):
        longest = int(cu_seqlens.diff().max())
        return flashtile.attention_varlen(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest,
                                          max_seqlen_k=longest, causal=True)  # fmt: skip

    arguments = torch.randn(8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments), call(*arguments))


def test_out_is_no_view():
    """It may be detached, and written to where nothing needs it: as that of F.scaled_dot_product_attention."""
    q = torch.randn(1, 5, 2, 16, requires_grad=True)
    out = flashtile.attention(q, q, q)
    out += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert not flashtile.attention(q, q, q).detach_().requires_grad


def test_missing_tensor_of_a_packed_call_is_named():
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    k = torch.randn(4, 2, 16)
    with pytest.raises(flashtile.DtypeError, match="q: expected a torch.Tensor, got NoneType"):
        flashtile.attention_varlen(None, k, k, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=4, max_seqlen_k=4)


def test_a_device_that_no_tier_takes():
    problem = AttentionProblem(1, 64, 64, 1, 1, 64, 64, torch.bfloat16)
    with pytest.raises(flashtile.UnsupportedError) as error:
        dispatch.plan(problem, hardware.Device("old", "sm_70", 80, 96 << 10))
    assert all(tier in str(error.value) for tier in dispatch.TIERS)


@pytest.mark.parametrize("device", hardware.DEVICES.values(), ids=lambda device: device.name)
def test_a_problem_without_a_scale_has_that_of_a_call(device):
    problem = AttentionProblem(2, 256, 256, 4, 4, 64, 64, torch.bfloat16)
    assert problem.softmax_scale == 0.125
    for direction in ("forward", "backward"):
        assert dispatch.plan(problem, device, direction).tier in ("hopper", "portable")


def test_plan_names_its_tier_and_the_refusals():
    problem = AttentionProblem(2, 16, 16, 4, 2, 16, 16, torch.float32, softmax_scale=1.0)
    plan = dispatch.plan(problem, hardware.CPU)
    assert plan.tier == "sdpa"
    assert dict(plan.refusals)["portable"].startswith("needs a GPU")
    softcapped = AttentionProblem(2, 16, 16, 4, 2, 16, 16, torch.float32, softmax_scale=1.0, softcap=3.0)
    plan = dispatch.plan(softcapped, hardware.CPU)
    assert plan.tier == "reference"
    assert dict(plan.refusals)["sdpa"] == "torch's SDPA has not softcap"
    assert dispatch.plan(problem, hardware.by_name("A100")).tier == "portable"


# (queries, keys) of each sequence; rows behind the last one; whether not all rows of each are used
@pytest.mark.parametrize(("lengths", "tail", "used"), [
    ([(5, 5), (1, 1), (16, 16)], 0, False),
    ([(5, 5), (0, 0), (16, 16)], 3, False),
    ([(5, 9), (7, 3), (1, 12), (4, 0), (0, 6), (8, 8)], 2, False),
    ([(5, 9), (7, 3), (6, 6), (4, 4)], 0, True),
    ([(4, 0), (0, 3)], 0, False),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_packed_calls_on_a_cpu_run_on_torchs_attention(lengths, tail, used, causal, monkeypatch):
    rows_q, rows_k = (torch.tensor([0, *lengths_of]).cumsum(0).int() for lengths_of in zip(*lengths))
    if lengths[0] == (5, 5):
        rows_k = rows_q
    total_q, total_k = (int(rows[-1]) + tail for rows in (rows_q, rows_k))
    q, k, v = (torch.randn(total, heads, 16, requires_grad=True) for total, heads in ((total_q, 4), (total_k, 2), (total_k, 2)))
    options = dict(cu_seqlens_q=rows_q, cu_seqlens_k=rows_k, max_seqlen_q=16, max_seqlen_k=16, causal=causal)
    if used:
        options |= {name: (rows.diff() - 1).int() for name, rows in (("seqused_q", rows_q), ("seqused_k", rows_k))}
    dout = torch.randn(total_q, 4, 16)

    def results():
        out = flashtile.attention_varlen(q, k, v, **options)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    operands = Operands(q, k, v, rows_q, rows_k, options.get("seqused_q"), options.get("seqused_k"))
    problem = AttentionProblem.from_tensors(operands, max_seqlen_q=16, max_seqlen_k=16, causal=causal)
    assert {dispatch.plan(problem, hardware.CPU, direction).tier for direction in ("forward", "backward")} == {"sdpa"}
    got = results()
    monkeypatch.setenv("FLASHTILE_TIER", "reference")
    for x, y in zip(got, results()):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (1, 7), (3, 1)])
def test_causal_calls_of_other_lengths_on_a_cpu_run_on_torchs_attention(seqlen_q, seqlen_k, monkeypatch):
    q, k, v = (torch.randn(2, n, 2, 16, requires_grad=True) for n in (seqlen_q, seqlen_k, seqlen_k))
    dout = torch.randn(2, seqlen_q, 2, 16)

    def results():
        out = flashtile.attention(q, k, v, causal=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    problem = AttentionProblem.from_tensors(Operands(q, k, v), causal=True)
    assert dispatch.plan(problem, hardware.CPU).tier == "sdpa"
    got = results()
    monkeypatch.setenv("FLASHTILE_TIER", "reference")
    for x, y in zip(got, results()):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("packed", [{}, {"total_q": 2**13 + 1, "total_k": 2**14}])
def test_a_cpu_stores_no_large_mask(packed):
    """As many queries as keys need none."""
    problem = AttentionProblem(1, 2**13, 2**13, 2, 2, 16, 16, torch.float32, window=(None, 0), **packed)
    if packed:
        problem = dataclasses.replace(problem, same_lengths=True)
    assert dispatch.plan(problem, hardware.CPU).tier == "sdpa"
    larger = dataclasses.replace(problem, seqlen_k=2**14, same_lengths=False)
    plan = dispatch.plan(larger, hardware.CPU)
    assert plan.tier == "reference" and "67108864 elements" in dict(plan.refusals)["sdpa"]


def test_hopper_comes_first_on_hopper():
    problem = AttentionProblem(8, 1024, 1024, 4, 2, 128, 128, torch.bfloat16, softmax_scale=1.0)
    h200 = hardware.by_name("H200")
    in_fp32 = dataclasses.replace(problem, dtype=torch.float32)
    for direction in ("forward", "backward"):
        assert dispatch.plan(problem, h200, direction).tier == "hopper"
        assert dispatch.plan(problem, h200, direction, ("portable",)).tier == "portable"
        plan = dispatch.plan(in_fp32, h200, direction)
        assert plan.tier == "portable" and "float32" in dict(plan.refusals)["hopper"]
        with pytest.raises(flashtile.UnsupportedError, match="hopper: "):
            dispatch.plan(in_fp32, h200, direction, ("hopper",))
    small = dataclasses.replace(problem, batch=1, seqlen_q=64, seqlen_k=300)
    plan = dispatch.plan(small, h200, "forward")
    assert plan.tier == "portable" and "fills 4 of 132" in dict(plan.refusals)["hopper"]
    # With so few keys that they stay in shared memory it is the fastest for all calls
    assert dispatch.plan(dataclasses.replace(small, seqlen_k=100), h200, "forward").tier == "hopper"
    assert dispatch.plan(small, h200, "forward", ("hopper", "portable")).tier == "hopper"


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "causal", "tier"),
    [(64, 384, False, "portable"), (64, 512, True, "portable"), (64, 1024, True, "hopper"), (128, 256, True, "portable"),
     (128, 384, True, "hopper"), (256, 256, False, "hopper")],
)  # fmt: skip
def test_one_tile_of_few_keys_a_multiprocessor_is_portable(head_dim, seqlen, causal, tier):
    problem = AttentionProblem(
        1, seqlen, seqlen, 132 // -(-seqlen // 128), 1, head_dim, head_dim, torch.bfloat16, softmax_scale=1.0,
        window=(None, 0 if causal else None),
    )  # fmt: skip
    h200 = hardware.by_name("H200")
    assert dispatch.plan(problem, h200, "forward").tier == tier
    assert dispatch.plan(problem, h200, "backward").tier == "hopper"
    two_tiles = dataclasses.replace(problem, batch=2)
    assert dispatch.plan(two_tiles, h200, "forward").tier == "hopper"


def test_plan_is_made_once_for_equal_problems():
    problems = [AttentionProblem.from_tensors(Operands(*qkv())) for _ in range(2)]
    assert dispatch.plan(problems[0], hardware.CPU) is dispatch.plan(problems[1], hardware.CPU)


def test_no_tier_lists_each_refusal():
    problem = AttentionProblem(2, 16, 16, 4, 2, 16, 16, torch.float16, softmax_scale=1.0)
    with pytest.raises(flashtile.UnsupportedError, match="(?s)portable: needs sm_80.*sdpa: is for CPU.*reference: is for CPU"):
        dispatch.plan(problem, hardware.Device("V100", "sm_70", 80, 96 << 10))


def test_preferred_tier(monkeypatch):
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(
        flashtile.UnsupportedError, match="portable: needs a GPU, or FLASHTILE_TIER=portable and TRITON_INTERPRET=1"
    ):
        flashtile.attention(*qkv(17))
    monkeypatch.setenv("FLASHTILE_TIER", "fastest")
    with pytest.raises(flashtile.UnsupportedError, match="FLASHTILE_TIER: expected some of .*portable.* got 'fastest'"):
        flashtile.attention(*qkv(17))
    monkeypatch.setenv("FLASHTILE_TIER", "hopper, portable")
    assert settings.preferred_tiers() == ("hopper", "portable")
    assert settings.TIERS == tuple(dispatch.TIERS)


def test_only_lse_may_have_a_gradient():
    q, k, v = qkv(requires_grad=True)
    _, lse = flashtile.attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    assert dq.abs().sum() > 0 and dk.abs().sum() > 0
    assert dv is None or torch.equal(dv, torch.zeros_like(v))


def test_second_derivative_is_refused():
    q, k, v = qkv(requires_grad=True)
    with pytest.raises(flashtile.UnsupportedError, match="create_graph=True"):
        torch.autograd.grad(flashtile.attention(q, k, v).sum(), q, create_graph=True)


def test_some_inputs_without_gradient():
    q, k, v = qkv()
    k.requires_grad_()
    flashtile.attention(q, k, v, causal=True).sum().backward()
    assert q.grad is None and v.grad is None and k.grad.abs().sum() > 0


def test_dropout_masks_differ_and_repeat_with_the_seed():
    q, k, v = qkv(64)
    torch.manual_seed(3)
    first, second = (flashtile.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    again = flashtile.attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share(p):
    """Uniform attention over 256 keys with v = 1: out is the share of kept weights over 1 - p."""
    q, k = (torch.zeros(1, 256, 8, 16) for _ in range(2))
    out = flashtile.attention(q, k, torch.ones(1, 256, 8, 16), dropout_p=p)
    kept = out[..., 0] * (1 - p)
    deviation = (p * (1 - p) / (256 * 256 * 8)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * deviation


def test_meta_of_a_call_needs_no_device():
    """A traced call on a GPU tensor is described on a machine without one."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(2, 64, 4, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, 64, 2, 128, device="cuda", dtype=torch.bfloat16)
        out, lse = ops.forward_op(q, k, k, *(None,) * 7, *NO_OPTIONS)
    assert (out.shape, out.device.type, lse.shape, lse.dtype) == (q.shape, "cuda", (2, 4, 64), torch.float32)


def test_meta_of_a_call_on_a_cache():
    q, k = (torch.empty(2, n, 4, 16, dtype=torch.float16, device="meta") for n in (1, 9))
    out, lse = flashtile.attention_with_kvcache(q, k, k, k=q, v=q, cache_seqlens=3, return_lse=True)
    assert out.is_meta and out.shape == q.shape and lse.shape == (2, 4, 1) and lse.dtype == torch.float32


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused(layout):
    """Also where calls with the same options came before."""
    plain = torch.randn(3, 2, 4, 2, 8).unbind()
    for _ in range(4):
        flashtile.attention(*plain)
    x = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 4)], layout=layout)
    with pytest.raises(flashtile.UnsupportedError, match="k: expected a tensor with one size a dim, got a nested tensor"):
        flashtile.attention(plain[0], x, x)
    with pytest.raises(flashtile.UnsupportedError, match="q: expected a tensor with one size a dim, got a nested tensor"):
        flashtile.attention(x, x, x)
    with pytest.raises(flashtile.UnsupportedError, match="q: expected a tensor with one size a dim, got a nested tensor"):
        flashtile.attention_with_kvcache(x, x, x)


def test_lazily_negated_tensors_have_the_right_sign(monkeypatch):
    """Their memory holds the negatives, also where calls with the same options came before."""
    pytest.importorskip("triton")
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    q, k, v, dout = (torch.randn(1, 16, 2, 16, requires_grad=True) for _ in range(4))

    def results(q, k, v, dout):
        out = flashtile.attention(q, k, v, causal=True)
        return out, *torch.autograd.grad(out, (q, k, v), dout.detach())

    want = results(-q, -k, -v, -dout)
    lazy = [torch.complex(x, x).conj().imag for x in (q, k, v, dout)]
    assert all(x.is_neg() for x in lazy)
    for made in (lazy, [x._neg_view() for x in (q, k, v, dout)]):
        for got, expected in zip(results(*made), want):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_checks_see_a_wrong_answer():
    """The check that all tiers pass is not blind: a scale off by a thousandth, a lost last key, and a stray NaN."""
    case = named("square")[0]

    def spoiled(change):
        def attend(q, k, v, **options):
            return change(flashtile.attention, q, k, v, options)

        with pytest.raises(AssertionError):
            checks.check_attention(case, torch.float32, fn=attend)

    spoiled(lambda f, q, k, v, o: f(q * 1.001, k, v, **o))
    spoiled(lambda f, q, k, v, o: f(q, k[:, :-1], v[:, :-1], **o))
    spoiled(lambda f, q, k, v, o: (f(q, k, v, **o)[0].index_fill(1, torch.tensor([0]), float("nan")), f(q, k, v, **o)[1]))


def test_gradients_with_rows_far_apart_come_to_kernels_as_copies(monkeypatch):
    """Kernels know of q, k and v whether offsets in a tile leave int32, not of the gradient of out."""
    seen, first = [], ops._Call.first
    monkeypatch.setattr(ops._Call, "first", lambda self, *given: seen.append(given) or first(self, *given))
    q = torch.randn(1, 3, 2, 16, requires_grad=True)
    out = flashtile.attention(q, q, q)
    far = torch.zeros(2 * 2**22 + 32).as_strided(out.shape, (3 * 2**22, 2**22, 16, 1))
    near = torch.randn_like(out)
    expected = torch.autograd.grad(out, q, near, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, q, far.copy_(near))[0], expected)
    *_, dout, dlse = seen[-1]
    assert dout.is_contiguous() and dlse is None


def test_rows_of_many_heads_are_wide():
    """Out and gradients are contiguous, though q may be one head that stands for all."""
    q = torch.zeros(1, 1, 1, 64).expand(1, 2, 2**16, 64)
    kv = torch.zeros(1, 2, 1, 64)
    options = dict(zip(ops._OPTION_NAMES, (None, None, False, (None, None), None, 0.0, 0.0, False, False)))
    assert AttentionProblem.from_tensors(Operands(q, kv, kv), **options).wide_rows
    assert not AttentionProblem.from_tensors(Operands(q[:, :, ::2], kv, kv), **options).wide_rows


def test_kernels_are_compiled_ahead_on_the_gpu_of_the_tensors(monkeypatch):
    """Each of its threads has a current GPU of its own."""
    from contextlib import contextmanager
    from types import SimpleNamespace

    where, ran = [], []

    @contextmanager
    def on_device_of(x):
        where.append(x)
        yield
        where.pop()

    monkeypatch.setattr(hardware, "on_device_of", on_device_of)
    plan = SimpleNamespace(compile_jobs=lambda *_: [lambda: ran.append(list(where))])
    monkeypatch.setattr(dispatch, "plan_for", lambda *_: plan)
    q = torch.zeros(1)
    dispatch.compile_ahead(None, SimpleNamespace(q=q), ("forward",))
    assert [len(x) for x in ran] == [1] and ran[0][0] is q


def test_a_dispatch_mode_of_another_thread_is_not_seen(monkeypatch):
    """torch's flag is the process's, and stays set where modes of two threads overlap."""
    from flashtile import calls

    monkeypatch.setattr(calls, "is_in_torch_dispatch_mode", lambda: True)
    assert calls.nobody_observes()


def test_tokens_unpadded_in_a_compiled_call():
    """How many there are is not known when it is traced, nor the longest sequence of a cache."""

    def unpadded(x, mask):
        starts = F.pad(mask.sum(1).cumsum(0).int(), (1, 0))
        x = x.flatten(0, 1)[mask.flatten().nonzero().flatten()]
        return flashtile.attention_varlen(x, x, x, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=6, max_seqlen_k=6)

    def over_cache(x, cache, lengths, starts):
        longest = lengths.max().item()
        return flashtile.attention_with_kvcache(x, cache, cache, cu_seqlens_q=starts, max_seqlen_q=longest, causal=True)

    mask = torch.arange(6) < torch.tensor([[4], [6]])
    packed = torch.randn(5, 4, 8), torch.randn(2, 9, 4, 8), torch.tensor([2, 3]), torch.tensor([0, 2, 5]).int()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for call, arguments in ((unpadded, (torch.randn(2, 6, 4, 8), mask)), (over_cache, packed)):
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(*arguments), call(*arguments))


def test_starts_that_are_two_tensors_in_the_backward():
    """torch's hooks make two of the one that was saved; the tier is the same, whose lse no other takes."""
    n = 8200
    starts = torch.tensor([0, n], dtype=torch.int32)
    x = torch.randn(n, 1, 8, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)
    with torch.utils.flop_counter.FlopCounterMode(display=False), hooks:
        out = flashtile.attention_varlen(x, x, x, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=n, max_seqlen_k=n,
                                         causal=True)  # fmt: skip
        out.sum().backward()
    assert x.grad.isfinite().all()


def test_torchs_own_attention_is_called_whatever_is_chosen_or_replaced(monkeypatch):
    q, k, v = qkv()
    expected = flashtile.attention(q, k, v)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        torch.testing.assert_close(flashtile.attention(q, k, v), expected)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *_, **options: pytest.fail("flashtile called itself"))
    assert torch.equal(flashtile.attention(q, k, v), expected)
