"""flash_attn's functions: signatures, and every convention against the definition in float64."""

import inspect

import pytest
import torch

import flashtile
from flashtile.errors import UnsupportedError

SIGNATURES = {
    "flash_attn_func": "q, k, v",
    "flash_attn_kvpacked_func": "q, kv",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen",
}
OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    options = OPTIONS + (", block_table=None" if name == "flash_attn_varlen_func" else "")
    assert str(inspect.signature(getattr(flashtile, name))) == f"({SIGNATURES[name]}, {options})"


def definition(q, k, v, scale=None, mask=None, softcap=0.0, slopes=None):
    """(out, lse) of (batch, seqlen, heads, dim) tensors in float64, lse +inf in empty rows; mask(i, j) on shifted indices."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # position of each query on the keys' axis
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2])[None, :]
    if slopes is not None:
        scores = scores - slopes.double().reshape(-1, q.shape[1], 1, 1) * (i - j).abs()
    if mask is not None:
        scores = scores.masked_fill(~mask(i, j), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    out = torch.softmax(scores, -1).nan_to_num(0.0) @ v
    return out.transpose(1, 2), torch.where(lse == float("-inf"), float("inf"), lse)


def tensors(batch=2, seqlen_q=13, seqlen_k=19, heads=4, heads_kv=2, dim=16, dim_v=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k = draw(batch, seqlen_q, heads, dim), draw(batch, seqlen_k, heads_kv, dim)
    return q, k, draw(batch, seqlen_k, heads_kv, dim_v or dim)


def check(got, expected, tolerance=2e-5):
    assert got.shape == expected.shape
    assert torch.equal(torch.isinf(got), torch.isinf(expected)) and not torch.isnan(got).any()
    finite = ~torch.isinf(expected)
    torch.testing.assert_close(got.double()[finite], expected[finite], rtol=tolerance, atol=tolerance)


def causal(i, j):
    return j <= i


def test_plain_call_returns_a_tensor():
    q, k, v = tensors()
    out = flashtile.flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor) and out.dtype == q.dtype
    check(out, definition(q, k, v)[0])


def test_positional_arguments_are_those_of_flash_attn():
    """The fourth is dropout_p, the fifth softmax_scale, then causal, window_size, softcap, alibi_slopes."""
    q, k, v = tensors()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    out = flashtile.flash_attn_func(q, k, v, 0.0, 0.3, True, (5, -1), 3.0, slopes)
    mask = lambda i, j: (j <= i) & (j >= i - 5)  # noqa: E731
    check(out, definition(q, k, v, scale=0.3, mask=mask, softcap=3.0, slopes=slopes)[0])


@pytest.mark.parametrize(
    ("window_size", "is_causal", "mask"),
    [
        ((-1, -1), False, None),
        ((-1, -1), True, causal),
        ((4, -1), False, lambda i, j: j >= i - 4),
        ((-1, 3), False, lambda i, j: j <= i + 3),
        ((4, 3), False, lambda i, j: (j >= i - 4) & (j <= i + 3)),
        ((4, 3), True, lambda i, j: (j >= i - 4) & (j <= i)),
        ((0, 0), False, lambda i, j: j == i),
        ((-1, 0), False, causal),
        # other negative numbers are unbounded as well
        ((-5, 0), False, causal),
    ],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(13, 19), (19, 13), (16, 16), (1, 9)])
def test_window(window_size, is_causal, mask, seqlen_q, seqlen_k):
    q, k, v = tensors(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse, _ = flashtile.flash_attn_func(q, k, v, causal=is_causal, window_size=window_size, return_attn_probs=True)
    expected_out, expected_lse = definition(q, k, v, mask=mask)
    check(out, expected_out)
    check(lse, expected_lse)


@pytest.mark.parametrize("side", [13, 14, 10**6])
def test_window_of_all_keys_is_unbounded(side):
    """Also where leading queries would see no key by the literal rule: seqlen_q is longer than seqlen_k and the window."""
    q, k, v = tensors(seqlen_q=40, seqlen_k=13)
    check(flashtile.flash_attn_func(q, k, v, window_size=(side, side)), definition(q, k, v)[0])
    check(flashtile.flash_attn_func(q, k, v, window_size=(12, 12)),
          definition(q, k, v, mask=lambda i, j: (j >= i - 12) & (j <= i + 12))[0])  # fmt: skip


def test_rows_without_a_key():
    """out is 0 and lse +inf, where flashtile.attention has -inf; gradients are finite."""
    q, k, v = (x.requires_grad_() for x in tensors(seqlen_q=9, seqlen_k=4))
    out, lse, probs = flashtile.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :5] == 0).all() and (lse[..., :5] == float("inf")).all() and torch.isfinite(lse[..., 5:]).all()
    assert probs.numel() == 0
    assert lse.dtype == torch.float32
    out.sum().backward()
    assert (q.grad[:, :5] == 0).all() and all(torch.isfinite(x.grad).all() for x in (q, k, v))


def test_no_keys_at_all():
    q, k, v = tensors(seqlen_q=5, seqlen_k=0)
    out, lse, _ = flashtile.flash_attn_func(q, k, v, return_attn_probs=True)
    assert (out == 0).all() and (lse == float("inf")).all()


@pytest.mark.parametrize("dim", [5, 8, 12, 33, 59, 111])
def test_head_dim_is_padded(dim):
    """The scale is that of the original head dim; out and gradients have its size."""
    inputs = [x.requires_grad_() for x in tensors(dim=dim)]
    reference = [x.detach().double().requires_grad_() for x in inputs]
    out = flashtile.flash_attn_func(*inputs, causal=True)
    expected, _ = definition(*reference, mask=causal)
    check(out, expected)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, inputs, dout)
    for got, want in zip(grads, torch.autograd.grad(expected, reference, dout.double())):
        check(got, want, 1e-4)


def test_value_head_dim_of_its_own():
    q, k, v = tensors(dim=20, dim_v=11)
    check(flashtile.flash_attn_func(q, k, v), definition(q, k, v)[0])


def test_strided_last_dim_is_copied():
    q, k, v = tensors()
    strided = torch.empty(*q.shape[:-1], 2 * q.shape[-1])[..., ::2].copy_(q)
    check(flashtile.flash_attn_func(strided, k, v), definition(q, k, v)[0])


@pytest.mark.parametrize("shape", ["heads", "batch"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_alibi(shape, is_causal):
    """Also in lse, which is that of the documented bias whether causal or not."""
    q, k, v = tensors()
    slopes = torch.rand((4,) if shape == "heads" else (2, 4), generator=torch.Generator().manual_seed(2)).requires_grad_()
    out, lse, _ = flashtile.flash_attn_func(q, k, v, causal=is_causal, alibi_slopes=slopes, return_attn_probs=True)
    expected_out, expected_lse = definition(q, k, v, mask=causal if is_causal else None, slopes=slopes.detach())
    check(out, expected_out)
    check(lse, expected_lse)


def test_dropout_with_softcap():
    """flash_attn refuses the pair. The mean over masks is the call without dropout."""
    q, k, v = tensors(batch=1, heads=1, heads_kv=1)
    torch.manual_seed(0)
    many = torch.cat([flashtile.flash_attn_func(q, k, v, 0.2, softcap=2.0) for _ in range(300)])
    expected, _ = definition(q, k, v, softcap=2.0)
    assert (many.double().mean(0) - expected[0]).abs().max() < 0.12
    assert not torch.equal(many[0], many[1])


def test_gradients_with_grouped_heads():
    inputs = [x.requires_grad_() for x in tensors(heads=6, heads_kv=2)]
    reference = [x.detach().double().requires_grad_() for x in inputs]
    options = dict(causal=True, window_size=(7, 0), softcap=5.0, deterministic=True)
    out = flashtile.flash_attn_func(*inputs, **options)
    expected, _ = definition(*reference, mask=lambda i, j: (j <= i) & (j >= i - 7), softcap=5.0)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    for got, want in zip(grads, torch.autograd.grad(expected.square().sum(), reference)):
        check(got, want, 1e-4)


def test_lse_is_differentiable():
    inputs = [x.requires_grad_() for x in tensors()]
    reference = [x.detach().double().requires_grad_() for x in inputs[:2]]
    _, lse, _ = flashtile.flash_attn_func(*inputs, return_attn_probs=True)
    expected = definition(*reference, inputs[2].detach())[1]
    for got, want in zip(torch.autograd.grad(lse.sum(), inputs[:2]), torch.autograd.grad(expected.sum(), reference)):
        check(got, want, 1e-4)


@pytest.mark.parametrize("return_attn_probs", [False, True])
def test_packed_forms_are_the_plain_call(return_attn_probs):
    """Values, and the gradient of the packed tensor."""
    q, k, v = tensors(seqlen_q=17, seqlen_k=17, heads=4, heads_kv=4)
    options = dict(softmax_scale=0.2, causal=True, window_size=(6, -1), return_attn_probs=return_attn_probs)
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = flashtile.flash_attn_func(*plain, **options)
    qkv = torch.stack([q, k, v], 2).requires_grad_()
    kv = torch.stack([k, v], 2).requires_grad_()
    for got in (flashtile.flash_attn_qkvpacked_func(qkv, **options), flashtile.flash_attn_kvpacked_func(q, kv, **options)):
        if return_attn_probs:
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]) and got[2].numel() == 0
        else:
            assert torch.equal(got, expected)
            got.square().sum().backward()
    if not return_attn_probs:
        expected.square().sum().backward()
        torch.testing.assert_close(qkv.grad, torch.stack([x.grad for x in plain], 2))
        torch.testing.assert_close(kv.grad, torch.stack([x.grad for x in plain[1:]], 2))


LENGTHS = ((5, 9), (0, 4), (7, 0), (12, 6), (8, 8))


def packed(lengths=LENGTHS, heads=4, heads_kv=2, dim=20):
    """q, k, v, cu_seqlens_q, cu_seqlens_k of sequences one after the other."""
    totals = [sum(side) for side in zip(*lengths)]
    q = tensors(batch=1, seqlen_q=totals[0], seqlen_k=1, heads=heads, dim=dim)[0][0]
    _, k, v = (x[0] for x in tensors(batch=1, seqlen_q=1, seqlen_k=totals[1], heads=heads, heads_kv=heads_kv, dim=dim, seed=1))
    cu_seqlens = (torch.tensor([0, *side]).cumsum(0).int() for side in zip(*lengths))
    return q, k, v, *cu_seqlens


def test_varlen():
    """Sequence by sequence the batched call, empty ones included; head dim 20 is padded here too."""
    q, k, v, cu_q, cu_k = packed()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse, probs = flashtile.flash_attn_varlen_func(*inputs, cu_q, cu_k, 12, 9, causal=True, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (4, q.shape[0]) and lse.dtype == torch.float32 and probs.numel() == 0
    reference = [x.detach().double().requires_grad_() for x in inputs]
    outs, lses = [], []
    for b in range(len(LENGTHS)):
        rows, cols = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one_out, one_lse = definition(*(x[s][None] for x, s in zip(reference, (rows, cols, cols))), mask=causal)
        outs.append(one_out[0])
        lses.append(one_lse[0])
    check(out, torch.cat(outs))
    check(lse, torch.cat(lses, -1))
    grads = torch.autograd.grad(out.square().sum(), inputs)
    for got, want in zip(grads, torch.autograd.grad(torch.cat(outs).square().sum(), reference)):
        check(got, want, 1e-4)


def test_varlen_lengths_may_be_tensors():
    q, k, v, cu_q, cu_k = packed()
    expected = flashtile.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 9)
    assert torch.equal(flashtile.flash_attn_varlen_func(q, k, v, cu_q, cu_k, torch.tensor(12), torch.tensor(9)), expected)


def test_varlen_packed_forms_are_the_plain_call():
    lengths = tuple((n, n) for n in (5, 0, 11, 3))
    q, k, v, cu, _ = packed(lengths, heads=4, heads_kv=4)
    options = dict(causal=True, window_size=(4, -1), softcap=2.0)
    expected = flashtile.flash_attn_varlen_func(q, k, v, cu, cu, 11, 11, **options)
    qkv, kv = torch.stack([q, k, v], 1), torch.stack([k, v], 1)
    assert torch.equal(flashtile.flash_attn_varlen_qkvpacked_func(qkv, cu, 11, **options), expected)
    assert torch.equal(flashtile.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 11, 11, **options), expected)


def test_block_table_is_refused():
    q, k, v, cu_q, cu_k = packed()
    with pytest.raises(UnsupportedError, match="block_table: expected None"):
        flashtile.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 9, block_table=torch.zeros(5, 1, dtype=torch.int32))


def test_probabilities_of_dropout_are_refused():
    q, k, v = tensors()
    with pytest.raises(UnsupportedError, match="return_attn_probs: expected dropout_p == 0"):
        flashtile.flash_attn_func(q, k, v, 0.1, return_attn_probs=True)
