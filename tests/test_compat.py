"""flash_attn's functions: signatures, and every convention against the definition in float64."""

import inspect

import pytest
import torch

import flashtile
from flashtile.compat import flash_attn_interface as flash_attn_interface_3
from flashtile.compat.flash_attn import flash_attn_interface, flash_attn_with_kvcache
from flashtile.compat.flash_attn.layers.rotary import apply_rotary_emb
from flashtile.errors import DtypeError, ShapeError, UnsupportedError

BOTH = pytest.mark.parametrize("fa", [flash_attn_interface, flash_attn_interface_3], ids=["fa2", "fa3"])
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


@pytest.mark.parametrize("window_size", [None, 4, (4,), (None, None), (4, 2.0)])
def test_windows_that_are_no_pair_of_ints_are_explained(window_size):
    q, k, v = tensors()
    with pytest.raises(flashtile.DtypeError, match=r"window_size: expected a pair.* Unbounded is \(-1, -1\)"):
        flashtile.flash_attn_func(q, k, v, window_size=window_size)
    with pytest.raises(flashtile.DtypeError, match="window_size: expected a pair"):
        flash_attn_interface_3.flash_attn_func(q, k, v, window_size=window_size)


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


def pages_of(k, lengths, page=4, heads=2, seed=5):
    """Packed rows as pages in a random order, unused slots NaN; returns pages and block_table."""
    counts = [-(-n // page) for n in lengths]
    numbers = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).int()
    pages = torch.full((len(numbers), page, *k.shape[1:]), float("nan"), dtype=k.dtype)
    table = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=torch.int32)
    start = used = 0
    for b, (length, count) in enumerate(zip(lengths, counts)):
        table[b, :count] = numbers[used : used + count]
        for slot in range(length):
            pages[numbers[used + slot // page], slot % page] = k[start + slot]
        start, used = start + length, used + count
    return pages, table


def test_varlen_over_pages():
    """block_table: k and v lie in pages, cu_seqlens_k gives lengths alone."""
    q, k, v, cu_q, cu_k = packed(dim=16)
    lengths = cu_k.diff().tolist()
    (k_pages, table), (v_pages, _) = pages_of(k, lengths), pages_of(v, lengths)
    options = dict(causal=True, window_size=(6, -1), return_attn_probs=True)
    expected = flashtile.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 9, **options)
    got = flashtile.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, 12, 9, block_table=table, **options)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)
    with pytest.raises(UnsupportedError, match="block_table: expected dropout_p == 0"):
        flashtile.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, 12, 9, 0.1, block_table=table)


def test_a_backward_pass_over_pages_is_refused():
    """The forward is not, for models whose parameters require gradients run without no_grad too."""
    q, k, v, cu_q, cu_k = packed(dim=16)
    lengths = cu_k.diff().tolist()
    (k_pages, table), (v_pages, _) = pages_of(k, lengths), pages_of(v, lengths)
    expected = flashtile.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 9)

    def call(requires_grad):
        return flashtile.flash_attn_varlen_func(q.detach().requires_grad_(requires_grad), k_pages, v_pages, cu_q, cu_k, 12, 9,
                                                return_attn_probs=True, block_table=table)  # fmt: skip

    out, lse, _ = call(True)
    torch.testing.assert_close(out.detach(), expected.detach())
    for result in (out, lse):
        with pytest.raises(UnsupportedError, match="block_table: expected no gradient asked for beside it"):
            result.sum().backward()
    with torch.no_grad():
        assert not call(True)[0].requires_grad
    assert not call(False)[0].requires_grad


KVCACHE = (
    "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
    "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
)


def test_kvcache_signature():
    assert str(inspect.signature(flash_attn_with_kvcache)) == f"({KVCACHE})"


@pytest.mark.parametrize("dim", [16, 19])
@pytest.mark.parametrize("interleaved", [False, True])
def test_kvcache_appends_rotates_and_attends(dim, interleaved):
    """One call is: rotate, write the new rows into the cache, attend over what is used; also where dims are padded."""
    q, k_cache, v_cache = tensors(seqlen_q=3, seqlen_k=12, dim=dim)
    _, k, v = tensors(seqlen_q=3, seqlen_k=3, dim=dim, seed=1)
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    angles = torch.rand(12, 8)
    tables = angles.cos(), angles.sin()
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    rotated = apply_rotary_emb(k, *tables, interleaved, seqlen_offsets=lengths)
    for b, length in enumerate(lengths.tolist()):
        expected_k[b, length : length + 3], expected_v[b, length : length + 3] = rotated[b], v[b]
    q_rotated = apply_rotary_emb(q, *tables, interleaved, seqlen_offsets=lengths)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, *tables, lengths, causal=True, window_size=(7, -1),
                                       rotary_interleaved=interleaved, return_softmax_lse=True)  # fmt: skip
    torch.testing.assert_close(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)
    for b, length in enumerate(lengths.tolist()):
        rows = slice(b, b + 1), slice(0, length + 3)
        want_out, want_lse = definition(q_rotated[b : b + 1], expected_k[rows], expected_v[rows],
                                        mask=lambda i, j: (j <= i) & (j >= i - 7))  # fmt: skip
        check(out[b : b + 1], want_out)
        check(lse[b : b + 1], want_lse)


def test_kvcache_rows_without_a_key():
    """lse +inf as in flash_attn; a length may be one int for all."""
    q, k_cache, v_cache = tensors(seqlen_q=3, seqlen_k=8)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=1, causal=True, return_softmax_lse=True)
    assert (lse[..., :2] == float("inf")).all() and torch.isfinite(lse[..., 2]).all() and (out[:, :2] == 0).all()
    whole = flash_attn_with_kvcache(q, k_cache, v_cache)
    check(whole, definition(q, k_cache, v_cache)[0])


@pytest.mark.parametrize("dim", [16, 19])
def test_a_cache_with_more_rows_than_sequences(dim):
    """Sequence i is row i, and what is appended reaches the cache; other rows stay."""
    q, k_cache, v_cache = tensors(batch=5, seqlen_q=1, seqlen_k=12, dim=dim)
    _, k, v = tensors(seqlen_q=1, seqlen_k=1, dim=dim, seed=1)
    small = k_cache[:2].clone(), v_cache[:2].clone()
    rest = k_cache[2:].clone(), v_cache[2:].clone()
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    expected = flash_attn_with_kvcache(q[:2], *small, k, v, cache_seqlens=lengths)
    assert torch.equal(flash_attn_with_kvcache(q[:2], k_cache, v_cache, k, v, cache_seqlens=lengths), expected)
    for cache, first, others in zip((k_cache, v_cache), small, rest):
        assert torch.equal(cache[:2], first) and torch.equal(cache[2:], others)
    with pytest.raises(ShapeError, match="k_cache: expected a row for each sequence of q, 5, got 2 rows"):
        flash_attn_with_kvcache(q, *small)
    with pytest.raises(ShapeError, match="v_cache: expected"):
        flash_attn_with_kvcache(q[:2], k_cache, v_cache[:3])


def spread(x):
    """The same numbers with a gap behind each."""
    return torch.stack([x, torch.full_like(x, 77)], -1)[..., 0]


def test_index_tensors_of_a_cache_may_have_strides():
    q, k_cache, v_cache = tensors(seqlen_q=1, seqlen_k=12)
    lengths, rows = torch.tensor([4, 9]).int(), torch.tensor([1, 0]).int()
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=rows)
    got = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=spread(lengths), cache_batch_idx=spread(rows))
    assert torch.equal(got, expected)
    pages = [x.unflatten(1, (3, 4)).flatten(0, 1) for x in (k_cache, v_cache)]
    table = torch.tensor([[3, 4, 5], [0, 1, 2]]).int()
    got = flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=spread(table))
    torch.testing.assert_close(got, expected)


@BOTH
def test_numbers_that_mean_off(fa):
    q, k, v = tensors(seqlen_q=1)
    expected = fa.flash_attn_func(q, k, v)
    for softcap in (-1.0, -3, 0):
        assert torch.equal(fa.flash_attn_func(q, k, v, softcap=softcap), expected)
    with pytest.raises(flashtile.ValueRangeError, match="softcap: expected a finite number"):
        fa.flash_attn_func(q, k, v, softcap=float("nan"))
    with pytest.raises(DtypeError, match="softcap: expected a number"):
        fa.flash_attn_func(q, k, v, softcap=True)
    expected = fa.flash_attn_with_kvcache(q, k, v)
    assert torch.equal(fa.flash_attn_with_kvcache(q, k, v, softcap=-1.0, num_splits=-1), expected)
    with pytest.raises(DtypeError, match="num_splits: expected an int"):
        fa.flash_attn_with_kvcache(q, k, v, num_splits=True)


def private(name):
    return getattr(flash_attn_interface, name)


PRIVATE_SIGNATURES = {
    "_flash_attn_forward": "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, "
    "alibi_slopes, return_softmax",
    "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, "
    "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None",
    "_flash_attn_varlen_forward": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, "
    "causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
    "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0",
    "_flash_attn_varlen_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
    "max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
    "deterministic, rng_state=None, zero_tensors=False",
    "_get_block_size_n": "device, head_dim, is_dropout, is_causal",
}


@pytest.mark.parametrize("name", PRIVATE_SIGNATURES)
def test_private_signature(name):
    """As inspect.signature and inspect.getfullargspec see it, which ring attention asks."""
    assert str(inspect.signature(private(name))) == f"({PRIVATE_SIGNATURES[name]})"
    assert inspect.getfullargspec(private(name)).args[:1] != []


def unnormalised(probs, q, k, mask, block):
    """exp(m - lse) of each element of S_dmask: the definition of its running maximum, written again."""
    scores = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()) * q.shape[-1] ** -0.5
    if mask is not None:
        i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        scores = scores.masked_fill(~mask(i, torch.arange(k.shape[1])[None, :]), float("-inf"))
    lse = scores.logsumexp(-1)
    starts = range(0, k.shape[1], block)
    maxima = [scores[..., start:].amax(-1) for start in starts]
    factors = torch.cat([torch.exp(m - lse)[..., None].expand(*m.shape, min(block, k.shape[1] - start))
                         for m, start in zip(maxima, starts)], -1)  # fmt: skip
    return probs[..., : q.shape[1], : k.shape[1]].double() * factors.nan_to_num(0.0), scores.softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("mask", [None, causal])
def test_probabilities_of_dropout(mask):
    """|S_dmask| times exp(m - lse) is the softmax, its sign the mask that out was made with."""
    q, k, v = tensors(seqlen_q=150, seqlen_k=140, heads=2, heads_kv=2)
    out, lse, probs = flashtile.flash_attn_func(q, k, v, 0.3, causal=mask is not None, return_attn_probs=True)
    assert probs.shape == (2, 2, 256, 256) and probs.dtype == q.dtype
    signed, softmax = unnormalised(probs, q, k, mask, private("_get_block_size_n")(q.device, 16, True, False))
    torch.testing.assert_close(signed.abs(), softmax, rtol=1e-4, atol=1e-5)
    kept = (signed > 0) * signed / 0.7
    check(out, torch.einsum("bhmn,bnhd->bmhd", kept, v.double()))
    dropped = (signed < 0).sum() / (signed != 0).sum()
    assert 0.28 < dropped < 0.32
    assert (probs[:, :, 150:] == 0).all() and (probs[..., 140:] == 0).all()


def test_probabilities_of_packed_dropout():
    """Each sequence of a packed call stands by itself in the batch of S_dmask."""
    q, k, v, cu_q, cu_k = packed(heads=2, heads_kv=2)
    out, _, probs = flashtile.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 9, 0.3, return_attn_probs=True)
    assert probs.shape == (len(LENGTHS), 2, 128, 128)
    for b, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        if seqlen_q and seqlen_k:
            q_b, k_b, v_b = q[None, cu_q[b] : cu_q[b + 1]], k[None, cu_k[b] : cu_k[b + 1]], v[None, cu_k[b] : cu_k[b + 1]]
            signed, softmax = unnormalised(probs[b : b + 1], q_b, k_b, None, 128)
            torch.testing.assert_close(signed.abs(), softmax, rtol=1e-4, atol=1e-5)
            kept = (signed > 0) * signed / 0.7
            check(out[None, cu_q[b] : cu_q[b + 1]], torch.einsum("bhmn,bnhd->bmhd", kept, v_b.double()))
        else:
            assert (probs[b] == 0).all()


def test_probabilities_of_packed_dropout_compile():
    q, k, v, cu_q, cu_k = packed(heads=2, heads_kv=2)

    def call(q, k, v, cu_q, cu_k):
        return flashtile.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 9, 0.3, return_attn_probs=True)

    torch.manual_seed(0)
    expected = call(q, k, v, cu_q, cu_k)
    torch.manual_seed(0)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, cu_q, cu_k)
    for a, b in zip(got, expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_private_functions_are_the_two_halves(dropout_p):
    """Forward and backward called apart give what autograd gives; the mask comes from rng_state."""
    q, k, v = (x.requires_grad_() for x in tensors(seqlen_q=9, seqlen_k=6))
    torch.manual_seed(0)
    out, lse, _ = flashtile.flash_attn_func(q, k, v, dropout_p, causal=True, window_size=(5, -1), return_attn_probs=True)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    torch.manual_seed(0)
    got_out, got_lse, probs, rng_state = private("_flash_attn_forward")(q, k, v, dropout_p, 0.25, True, 5, -1, 0.0, None, False)
    assert torch.equal(got_out, out) and torch.equal(got_lse, lse) and probs.numel() == 0
    assert (got_lse[..., :3] == float("inf")).all()
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
    grads = [torch.full_like(x, float("nan")).requires_grad_(False) for x in (q, k, v)]
    row_sums = private("_flash_attn_backward")(dout, q, k, v, got_out, got_lse, *grads, dropout_p, 0.25, True, 5, -1, 0.0, None,
                                               False, rng_state=rng_state)  # fmt: skip
    for got, want in zip(grads, expected):
        assert torch.equal(got, want)
    assert row_sums.shape == (2, 4, 128) and (row_sums[..., 9:] == 0).all()
    torch.testing.assert_close(row_sums[..., :9], (dout * out).sum(-1).transpose(1, 2).detach())


@BOTH
def test_row_sums_are_of_products_in_fp32(fa):
    """dout * out may be more than fp16 holds, and has more bits than it."""
    x = torch.full((1, 128, 1, 16), 300.0).half()
    options = dict(softmax_scale=0.25, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0)
    if fa is flash_attn_interface:
        options |= dict(dropout_p=0.0, alibi_slopes=None, deterministic=False)
    else:
        options["is_causal"] = options.pop("causal")
    row_sums = fa._flash_attn_backward(x, x, x, x, x, torch.zeros(1, 1, 128), dq=None, dk=None, dv=None, **options)
    assert row_sums.dtype == torch.float32 and (row_sums == 16 * 300.0**2).all()


def test_private_varlen_functions_are_the_two_halves():
    q, k, v, cu_q, cu_k = packed(dim=24)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse, _ = flashtile.flash_attn_varlen_func(*inputs, cu_q, cu_k, 12, 9, causal=True, return_attn_probs=True)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, dout)
    got_out, got_lse, _, rng_state = private("_flash_attn_varlen_forward")(q, k, v, cu_q, cu_k, 12, 9, 0.0, 24**-0.5, True)
    assert torch.equal(got_out, out) and torch.equal(got_lse, lse)
    dq, dv = torch.empty_like(q), torch.empty_like(v)
    row_sums = private("_flash_attn_varlen_backward")(dout, q, k, v, out, lse, dq, None, dv, cu_q, cu_k, 12, 9, 0.0, 24**-0.5,
                                                      True, -1, -1, 0.0, None, False, rng_state)  # fmt: skip
    assert torch.equal(dq, expected[0]) and torch.equal(dv, expected[2])
    assert row_sums.shape == (4, q.shape[0] + 128 * len(LENGTHS))


def test_private_forward_has_no_autograd():
    q = torch.randn(1, 4, 2, 16, requires_grad=True)
    out, lse, *_ = flash_attn_interface._flash_attn_forward(q, q, q, 0.0, 0.25, True, -1, -1, 0.0, None, False)
    assert not out.requires_grad and not lse.requires_grad


WRONG_TENSORS = [
    ("dout", lambda x: x[:1], ShapeError, r"dout: expected the shape of q .*, \(2, 9, 4, 16\), got shape \(1, 9, 4, 16\)"),
    ("dout", lambda x: x.double(), DtypeError, "dout: expected dtype torch.float32, got torch.float64"),
    ("out", lambda x: x[:, :1], ShapeError, r"out: expected the shape of q .* got shape \(2, 1, 4, 16\)"),
    ("softmax_lse", lambda x: torch.nn.functional.pad(x, (0, 119)), ShapeError,
     r"softmax_lse: expected the shape of \(batch, heads, seqlen_q\), \(2, 4, 9\), got shape \(2, 4, 128\)"),
    ("softmax_lse", lambda x: x.transpose(1, 2), ShapeError, "softmax_lse: expected"),
    ("softmax_lse", lambda x: x.bfloat16(), DtypeError, "softmax_lse: expected dtype torch.float32"),
    ("dq", lambda x: x[:, 1:], ShapeError, r"dq: expected the shape of q, \(2, 9, 4, 16\), got shape \(2, 8, 4, 16\)"),
    ("dk", lambda x: x.repeat_interleave(2, 2), ShapeError,
     r"dk: expected the shape of k, \(2, 6, 2, 16\), got shape \(2, 6, 4, 16\)"),
    ("dv", lambda x: x.expand(3, *x.shape), ShapeError, r"dv: expected the shape of v, \(2, 6, 2, 16\), got shape \(3, 2, 6"),
    ("dv", lambda x: x.long(), DtypeError, r"dv: expected dtype torch.float32, got torch.int64. Cast it: dv.to"),
    ("dq", lambda x: x.tolist(), DtypeError, "dq: expected a torch.Tensor, got list"),
]  # fmt: skip


def backward_of(fa, q, k, v, lse_shape, **lengths):
    """The private backward function of a module, and arguments that fit."""
    given = dict(dout=torch.ones_like(q), q=q, k=k, v=v, out=torch.ones_like(q), softmax_lse=torch.zeros(lse_shape), **lengths,
                 dq=torch.empty_like(q), dk=torch.empty_like(k), dv=torch.empty_like(v))  # fmt: skip
    if fa is flash_attn_interface_3:
        return fa._flash_attn_backward, given
    given |= dict(dropout_p=0.0, softmax_scale=0.25, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
                  alibi_slopes=None, deterministic=False)  # fmt: skip
    return fa._flash_attn_varlen_backward if lengths else fa._flash_attn_backward, given


@BOTH
@pytest.mark.parametrize(("name", "change", "error", "message"), WRONG_TENSORS)
def test_tensors_of_a_backward_pass_that_do_not_fit(fa, name, change, error, message):
    """Nothing is broadcast, read past its end or cast."""
    backward, given = backward_of(fa, *tensors(seqlen_q=9, seqlen_k=6), (2, 4, 9))
    backward(**given)
    with pytest.raises(error, match=message):
        backward(**given | {name: change(given[name])})


@BOTH
@pytest.mark.parametrize(("name", "change", "shapes"), [
    ("dout", lambda x: x[:1], r"q with the head_dim of v, \(32, 4, 24\), got shape \(1, 4, 24\)"),
    ("softmax_lse", lambda x: x.mT, r"\(heads, total_q\), \(4, 32\), got shape \(32, 4\)"),
    ("dk", lambda x: x.repeat_interleave(2, 1), r"k, \(27, 2, 24\), got shape \(27, 4, 24\)"),
])  # fmt: skip
def test_tensors_of_a_packed_backward_pass_that_do_not_fit(fa, name, change, shapes):
    q, k, v, cu_q, cu_k = packed(dim=24)
    lengths = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=12, max_seqlen_k=9)
    backward, given = backward_of(fa, q, k, v, (4, 32), **lengths)
    backward(**given)
    with pytest.raises(ShapeError, match=f"{name}: expected the shape of {shapes}"):
        backward(**given | {name: change(given[name])})


def test_keys_of_packed_sequences_behind_their_padding():
    """leftpad_k with packed k: sequence b begins so many rows later, and is so much shorter."""
    q, k, v, cu_q, cu_k = packed(dim=16)
    leftpad, used = torch.tensor([2, 4, 0, 5, 1]).int(), torch.tensor([8, 4, 0, 6, 5]).int()
    slopes = torch.rand(len(LENGTHS), 4)
    nan = [x.clone() for x in (k, v)]
    for b in range(len(LENGTHS)):
        for x in nan:
            x[cu_k[b] : cu_k[b] + leftpad[b]] = float("nan")
    for lengths, seqused in ((cu_k.diff(), None), (used, used)):
        out, lse, probs, _ = private("_flash_attn_varlen_forward")(
            q, *nan, cu_q, cu_k, 12, 9, 0.0, 0.25, True, 3, -1, 0.0, slopes, leftpad_k=leftpad, seqused_k=seqused,
        )  # fmt: skip
        assert out.shape == q.shape and lse.shape == (4, q.shape[0]) and probs.numel() == 0
        for b in range(len(LENGTHS)):
            rows, cols = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b] + leftpad[b], cu_k[b] + lengths[b])
            expected, expected_lse = definition(q[None, rows], k[None, cols], v[None, cols], slopes=slopes[b],
                                                mask=lambda i, j: (j <= i) & (j >= i - 3))  # fmt: skip
            check(out[None, rows], expected)
            check(lse[None, :, rows], expected_lse)
    *_, probs, _ = private("_flash_attn_varlen_forward")(q, k, v, cu_q, cu_k, 12, 9, 0.2, 0.25, True, return_softmax=True,
                                                         leftpad_k=leftpad)  # fmt: skip
    assert [(x != 0).any().item() for x in probs] == [True, False, False, True, True]
    with pytest.raises(ShapeError, match=r"cu_seqlens_k: expected shape \(5,\), got shape \(6,\)"):
        private("_flash_attn_varlen_forward")(q, k, v, cu_q[:5], cu_k, 12, 9, 0.0, 0.25, True, leftpad_k=leftpad[:4])


def test_parts_of_a_row_merge_by_lse():
    """What ring attention does: two halves of the keys, joined by their lse, are the whole call; so are its gradients."""
    q, k, v = tensors(seqlen_k=20)
    whole_out, whole_lse, _ = flashtile.flash_attn_func(q, k, v, return_attn_probs=True)
    forward, backward = private("_flash_attn_forward"), private("_flash_attn_backward")
    options = (0.0, 0.25, False, -1, -1, 0.0, None)
    halves = [(k[:, :8], v[:, :8]), (k[:, 8:], v[:, 8:])]
    outs, lses = zip(*[forward(q, *half, *options, False)[:2] for half in halves])
    weights = torch.softmax(torch.stack(lses), 0).transpose(2, 3)[..., None]
    torch.testing.assert_close((torch.stack(outs) * weights).sum(0), whole_out)
    torch.testing.assert_close(torch.logsumexp(torch.stack(lses), 0), whole_lse)
    dout = torch.randn_like(q)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    backward(dout, q, k, v, whole_out, whole_lse, dq, dk, dv, *options, False)
    total = torch.zeros_like(q)
    for keys, (k_half, v_half) in zip((slice(0, 8), slice(8, 20)), halves):
        part = [torch.empty_like(x) for x in (q, k_half, v_half)]
        backward(dout, q, k_half, v_half, whole_out, whole_lse, *part, *options, False)
        total += part[0]
        torch.testing.assert_close(part[1], dk[:, keys])
        torch.testing.assert_close(part[2], dv[:, keys])
    torch.testing.assert_close(total, dq)


def test_flags_may_be_numbers():
    """As flash_attn's operators take them."""
    q, k, v = tensors()
    assert torch.equal(flashtile.flash_attn_func(q, k, v, causal=1), flashtile.flash_attn_func(q, k, v, causal=True))
    assert torch.equal(flashtile.flash_attn_func(q, k, v, deterministic=0), flashtile.flash_attn_func(q, k, v))
    for fa in (flash_attn_interface, flash_attn_interface_3):
        with_probs, without = (fa.flash_attn_func(q, k, v, return_attn_probs=flag) for flag in (1, None))
        torch.testing.assert_close(with_probs[0], without)
    with_cache = flashtile.flash_attn_with_kvcache
    assert torch.equal(with_cache(q, k, v, causal=1, rotary_interleaved=0), with_cache(q, k, v, causal=True))


def test_window_size_may_be_a_tensor():
    q, k, v = tensors()
    expected = flashtile.flash_attn_func(q, k, v, window_size=(4, 3))
    assert torch.equal(flashtile.flash_attn_func(q, k, v, window_size=torch.tensor([4, 3])), expected)


def test_dropout_backward_needs_the_state():
    q, k, v = tensors()
    out, lse, _, _ = private("_flash_attn_forward")(q, k, v, 0.2, 0.25, False, -1, -1, 0.0, None, False)
    with pytest.raises(UnsupportedError, match="rng_state: expected what the forward pass returned"):
        private("_flash_attn_backward")(out, q, k, v, out, lse, None, None, None, 0.2, 0.25, False, -1, -1, 0.0, None, False)
