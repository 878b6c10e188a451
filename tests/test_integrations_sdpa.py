"""torch's flash operators over flashtile: on a CPU the functions themselves, on a GPU through torch."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as torch_attention

from flashtile import ShapeError, UnsupportedError
from flashtile.integrations import sdpa


def qkv(seqlen_q=9, seqlen_k=9, heads=2, dim=16, device="cpu", dtype=torch.float64, batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, n, dim) for n in (seqlen_q, seqlen_k, seqlen_k)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


@pytest.fixture
def enabled():
    sdpa.enable()
    yield
    sdpa.disable()


@pytest.mark.parametrize("name", sdpa.OPERATORS)
def test_functions_take_what_the_operator_has(name):
    """Each argument of this torch's schema has a parameter, in the same order; new ones show up here."""
    import inspect

    if not hasattr(torch.ops.aten, name):
        pytest.skip(f"torch {torch.__version__} has no aten::{name}")
    schema = getattr(torch.ops.aten, name).default._schema
    parameters = inspect.signature(sdpa.OPERATORS[name]).parameters
    if "arguments" in parameters:
        forward = inspect.signature(sdpa.flash_attention_forward).parameters
        names = ["out", *(name for name in forward if name != "out")]
    else:
        names = list(parameters)
    wanted = [argument.name for argument in schema.arguments]
    assert wanted == [name for name in names if name in wanted]


@pytest.mark.parametrize("causal", [False, True])
def test_dense_forward_and_backward(causal):
    inputs = [x.requires_grad_() for x in qkv()]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=causal, scale=0.3)
    plain = [x.detach() for x in inputs]
    out, lse, cu_q, cu_k, max_q, max_k, rng_state, _, debug = sdpa.scaled_dot_product_flash_attention(
        *plain, is_causal=causal, scale=0.3
    )
    torch.testing.assert_close(out, expected)
    assert lse.shape == (2, 2, 9) and (cu_q, cu_k, max_q, max_k) == (None, None, 9, 9)
    assert rng_state.dtype == torch.uint64 and debug.numel() == 0
    dout = torch.randn_like(expected)
    grads = sdpa.scaled_dot_product_flash_attention_backward(dout, *plain, out, lse, None, None, 9, 9, 0.0, causal, rng_state,
                                                             debug, scale=0.3)  # fmt: skip
    for got, want in zip(grads, torch.autograd.grad(expected, inputs, dout)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", ["heads first", "heads second", "packed"])
def test_results_have_the_strides_of_the_inputs(layout):
    """What torch.compile asserts of this operator."""
    if layout == "packed":
        q, k, v = torch.randn(3, 2, 9, 3, 2, 16).select(0, 0).unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    else:
        q, k, v = (x.float() for x in qkv())
    if layout == "heads second":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out, lse, *_, rng_state, unused = sdpa.scaled_dot_product_flash_attention(q, k, v)[:8]
    assert out.stride() == torch.empty_like(q).stride()
    grads = sdpa.scaled_dot_product_flash_attention_backward(out, q, k, v, out, lse, None, None, 9, 9, 0.0, False, rng_state,
                                                             unused)  # fmt: skip
    assert [x.stride() for x in grads] == [torch.empty_like(x).stride() for x in (q, k, v)]


def test_dropout_is_the_same_in_both_directions():
    """v is the unit matrix, so out holds the dropped weights; dv of a column of dout sums them up."""
    q, k, _ = qkv(seqlen_q=12, seqlen_k=16)
    v = torch.eye(16, dtype=torch.float64).expand(2, 2, 16, 16).contiguous()
    out, lse, *_, rng_state, unused, _ = sdpa.scaled_dot_product_flash_attention(q, k, v, 0.4)
    weights = torch.softmax(q @ k.transpose(-1, -2) * 16**-0.5, -1) / (1 - round(0.4 * 2**15) / 2**15)
    torch.testing.assert_close(out, torch.where(out == 0, 0.0, weights))
    assert 0.25 < (out == 0).double().mean() < 0.55
    dout = torch.randn_like(out)
    _, _, dv = sdpa.scaled_dot_product_flash_attention_backward(dout, q, k, v, out, lse, None, None, 12, 16, 0.4, False,
                                                                rng_state, unused)  # fmt: skip
    torch.testing.assert_close(dv, out.transpose(-1, -2) @ dout)


def test_pages_need_lengths_and_no_dropout():
    q, pages, cu = torch.randn(4, 2, 8), torch.randn(2, 4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="dropout_p: expected 0.0 with block_table, got 0.3"):
        sdpa.flash_attention_forward(q, pages, pages, cu, cu, 4, 4, 0.3, True, False, block_table=table)
    with pytest.raises(ShapeError, match=r"seqused_k: expected the length of each sequence, \(batch,\), with block_table"):
        sdpa.flash_attention_forward(q, pages, pages, cu, None, 4, 4, 0.0, True, False, block_table=table)


def test_packed_forward_and_backward_with_a_window():
    """-1 and None are unbounded; sequences are apart."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv())
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    out, lse, rng_state, unused, _ = sdpa.flash_attention_forward(q, k, v, cu, cu, 5, 5, 0.0, True, False, window_size_left=2,
                                                                  window_size_right=-1, num_splits=1)  # fmt: skip
    written = torch.empty_like(out)
    assert torch.equal(sdpa.flash_attention_forward_no_dropout_inplace(
        written, q, k, v, cu, cu, 5, 5, 0.0, True, False, window_size_left=2), lse)  # fmt: skip
    assert torch.equal(written, out)
    i, j = torch.arange(9)[:, None], torch.arange(9)[None, :]
    mask = (j <= i) & (j >= i - 2) & ((i < 4) == (j < 4))
    inputs = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
    dout = torch.randn_like(out)
    grads = sdpa.flash_attention_backward(dout, q, k, v, out, lse, cu, cu, 5, 5, 0.0, True, rng_state, unused,
                                          window_size_left=2)  # fmt: skip
    for got, want in zip(grads, torch.autograd.grad(expected, inputs, dout.transpose(0, 1)[None])):
        torch.testing.assert_close(got, want[0].transpose(0, 1))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_varlen_attn_of_heads_that_lie_first(backend):
    """The operators, here for CPU tensors, give results laid out as torch's fakes promise."""
    varlen_attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    q, k, v = (x[0].float().transpose(0, 1).requires_grad_() for x in qkv())
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)

    def results(attend):
        out = attend(q * 1, k * 1, v * 1, cu, cu, 5, 5)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    library = torch.library.Library("aten", "IMPL", "CPU")
    try:
        for name in ("_flash_attention_forward", "_flash_attention_backward"):
            library.impl(name, sdpa.OPERATORS[name], "CPU")
        torch._dynamo.reset()
        for got, want in zip(results(torch.compile(varlen_attn, backend=backend)), results(varlen_attn)):
            torch.testing.assert_close(got, want)
    finally:
        library._destroy()
    plain = [x.detach() for x in (q, k, v)]
    out, lse, *_, rng_state, unused, _ = sdpa.flash_attention_forward(*plain, cu, cu, 5, 5, 0.0, True, False)
    grads = sdpa.flash_attention_backward(out, *plain, out, lse, cu, cu, 5, 5, 0.0, True, rng_state, unused)
    assert all(x.stride() == q.stride() for x in (out, *grads))


def test_debug_masks_are_refused():
    with pytest.raises(UnsupportedError, match="return_debug_mask: expected False"):
        sdpa.scaled_dot_product_flash_attention(*qkv(), 0.5, return_debug_mask=True)


def test_enable_and_disable():
    assert torch_attention.current_flash_attention_impl() is None
    sdpa.enable()
    sdpa.enable()
    assert torch_attention.current_flash_attention_impl() == "flashtile"
    assert "flashtile" in torch_attention.list_flash_attention_impls()
    sdpa.disable()
    sdpa.disable()
    assert torch_attention.current_flash_attention_impl() is None


def test_flash_comes_first_until_it_is_disabled():
    """torch puts cuDNN first on some GPUs; an order that comes later stays."""
    before = torch._C._get_sdp_priority_order()
    try:
        torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])
        sdpa.enable()
        sdpa.enable()
        assert torch._C._get_sdp_priority_order() == [1, 3, 2, 0, 4]
        sdpa.disable()
        assert torch._C._get_sdp_priority_order() == [3, 1, 2, 0, 4]
        sdpa.enable()
        torch._C._set_sdp_priority_order([2, 1, 3, 0, 4])
        sdpa.disable()
        assert torch._C._get_sdp_priority_order() == [2, 1, 3, 0, 4]
    finally:
        sdpa.disable()
        torch._C._set_sdp_priority_order(before)


def test_import_activates_nothing():
    code = "import flashtile.integrations.sdpa; from torch.nn import attention as a; print(a.current_flash_attention_impl())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert process.stdout.strip() == "None", process.stderr


@pytest.mark.gpu
def test_torch_runs_flashtile_before_cudnn():
    """Where nobody names a backend, in a process that has not chosen one yet, and after `disable` again what it was."""
    code = """
import torch
import torch.nn.functional as F
from flashtile.integrations import sdpa

q = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
sdpa.enable()
with torch.profiler.profile() as profile:
    F.scaled_dot_product_attention(q, q, q)
    torch.cuda.synchronize()
assert any("flashtile" in event.key for event in profile.key_averages())
sdpa.disable()
assert torch._fused_sdp_choice(q, q, q) == torch._C._get_sdp_priority_order()[0]
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gqa", [False, True])
def test_torch_runs_flashtile(enabled, causal, gqa, compiled):
    """Forward and backward of F.scaled_dot_product_attention; the profiler sees our kernels' op."""
    q, k, v = (x.requires_grad_() for x in qkv(256, 256, 4, 64, "cuda", torch.bfloat16))
    if gqa:
        k, v = (x[:, :2].detach().requires_grad_() for x in (k, v))
    attend = torch.compile(F.scaled_dot_product_attention) if compiled else F.scaled_dot_product_attention
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
        with torch.profiler.profile() as profile:
            out = attend(q, k, v, is_causal=causal, enable_gqa=gqa)
        grads = torch.autograd.grad(out, (q, k, v), out)
    assert any("flashtile" in event.key for event in profile.key_averages())
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*wide, is_causal=causal, enable_gqa=gqa)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=1e-2)
    for got, want in zip(grads, torch.autograd.grad(expected, wide, out.double())):
        torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
def test_varlen_attn_runs_flashtile(enabled):
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous().requires_grad_() for x in qkv(192, 192, 4, 64, "cuda", torch.bfloat16))
    cu = torch.tensor([0, 100, 192], dtype=torch.int32, device="cuda")
    with torch.profiler.profile() as profile:
        out = varlen_attn(q, k, v, cu, cu, 100, 100)
    assert any("flashtile" in event.key for event in profile.key_averages())
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    parts = [[x[rows].transpose(0, 1) for x in wide] for rows in (slice(0, 100), slice(100, 192))]
    expected = torch.cat([F.scaled_dot_product_attention(*part).transpose(0, 1) for part in parts])
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=1e-2)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), out), torch.autograd.grad(expected, wide, out.double())):
        torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=3e-2)
