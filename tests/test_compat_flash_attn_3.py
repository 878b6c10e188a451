"""FlashAttention 3's functions: signatures, and its conventions against FlashAttention 2's and the definition."""

import inspect

import pytest
import torch
from test_compat import BOTH, LENGTHS, check, definition, packed, spread, tensors

import flashtile
from flashtile.compat import flash_attn_interface as fa3
from flashtile.errors import DtypeError, FlashtileError, ShapeError, UnsupportedError, ValueRangeError

DESCALES = "q_descale=None, k_descale=None, v_descale=None"
TAIL = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
PACKED = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALES}, window_size=(-1, -1), "
    f"attention_chunk=0, softcap=0.0, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {PACKED}, softmax_scale=None, causal=False, qv=None, {DESCALES}, "
    f"window_size=(-1, -1), attention_chunk=0, softcap=0.0, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {DESCALES}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
    "pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
    "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, "
    "max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, "
    "pack_gqa=None, sm_margin=0",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert str(inspect.signature(getattr(fa3, name))) == f"({SIGNATURES[name]})"


def test_positional_arguments_and_lse():
    """The fourth is softmax_scale; lse comes on request, second of two, -inf in empty rows."""
    q, k, v = tensors(seqlen_q=9, seqlen_k=4, dim=20, dim_v=12)
    out = fa3.flash_attn_func(q, k, v, 0.3, True, window_size=(3, -1), softcap=2.0, num_splits=4, pack_gqa=True, sm_margin=8)
    expected, lse = definition(q, k, v, 0.3, lambda i, j: (j <= i) & (j >= i - 3), 2.0)
    check(out, expected)
    got = fa3.flash_attn_func(q, k, v, 0.3, True, window_size=(3, -1), softcap=2.0, return_attn_probs=True)
    assert len(got) == 2 and (got[1][..., :5] == float("-inf")).all()
    check(got[1][..., 5:], lse[..., 5:])


def test_a_right_side_longer_than_the_keys_is_a_window():
    """FlashAttention 2 takes a side as long as all keys for none; here the right one hides keys from early queries."""
    q, k, v = tensors(seqlen_q=10, seqlen_k=3)
    expected, _ = definition(q, k, v, q.shape[-1] ** -0.5, lambda i, j: j <= i + 3)
    out, lse = fa3.flash_attn_func(q, k, v, window_size=(-1, 3), return_attn_probs=True)
    check(out, expected)
    assert (lse[..., :4] == float("-inf")).all() and lse[..., 4:].isfinite().all()


USED_Q, USED_K = torch.tensor([9, 4]).int(), torch.tensor([3, 17]).int()


@pytest.mark.parametrize("batched", ["q", "k", "qk"])
@pytest.mark.parametrize("with_qv", [False, True])
def test_batched_rows_of_which_some_are_used(batched, with_qv):
    """Each side is packed with cu_seqlens, or batched without; gradients of what is not used are 0."""
    q, k, v = tensors()
    qv = tensors(seed=3)[0] if with_qv else None
    cu_q, cu_k = (torch.tensor([0, n, 2 * n]).int() for n in (13, 19))
    flat = [None if x is None else x.flatten(0, 1) for x in (q, k, v, qv)]

    def run(q, k, v, qv, *lengths):
        inputs = [None if x is None else x.clone().requires_grad_() for x in (q, k, v, qv)]
        out, lse = fa3.flash_attn_varlen_func(*inputs[:3], *lengths, USED_Q, USED_K, causal=True, qv=inputs[3],
                                              return_attn_probs=True)  # fmt: skip
        return out, lse, torch.autograd.grad(out.square().sum(), [x for x in inputs if x is not None])

    expected, expected_lse, expected_grads = run(*flat, cu_q, cu_k, 13, 19)
    one, other = (q, qv) if "q" in batched else (flat[0], flat[3])
    keys = (k, v) if "k" in batched else flat[1:3]
    lengths = (None if "q" in batched else cu_q), (None if "k" in batched else cu_k)
    longest = (None if "q" in batched else 13), (None if "k" in batched else 19)
    out, lse, grads = run(one, *keys, other, *lengths, *longest)
    assert out.shape[:-1] == one.shape[:-1] and torch.equal(out.view_as(expected), expected)
    assert torch.equal(lse.transpose(0, 1).flatten(1) if "q" in batched else lse, expected_lse)
    for got, want in zip(grads, expected_grads):
        assert torch.equal(got.view_as(want), want)


def test_batched_rows_that_do_not_fit():
    q, k, v = tensors()
    cu = torch.tensor([0, 5, 9, 13]).int()
    with pytest.raises(ShapeError, match="k: expected the sequences of q, 3, got batch 2. Packed ones need cu_seqlens"):
        fa3.flash_attn_varlen_func(q[0], k, v, cu, None, 5, None)
    with pytest.raises(ShapeError, match="q: expected those of k, 3, got batch 2"):
        fa3.flash_attn_varlen_func(q, k[0], v[0], None, cu, None, 5)
    with pytest.raises(ShapeError, match="cu_seqlens_k: expected a tensor, since cu_seqlens_q is given"):
        fa3.flash_attn_varlen_func(q[0], k[0], v[0], cu, None, 5, 5)


def test_used_lengths_in_the_private_forward():
    q, k, v = tensors()
    out, lse, *_ = fa3._flash_attn_forward(q, k, v, seqused_q=USED_Q, seqused_k=USED_K, causal=True)
    expected = fa3.flash_attn_varlen_func(q, k, v, None, None, None, None, USED_Q, USED_K, causal=True, return_attn_probs=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_buffers_that_do_not_fit():
    q, k, v = tensors()
    with pytest.raises(ShapeError, match=r"out_: expected the shape of q .*, \(2, 13, 4, 16\), got shape \(3, 2, 13, 4, 16\)"):
        fa3._flash_attn_forward(q, k, v, out_=torch.empty(3, *q.shape))
    with pytest.raises(DtypeError, match="out_: expected dtype torch.float32, got torch.int64"):
        fa3._flash_attn_forward(q, k, v, out_=torch.empty(q.shape, dtype=torch.int64))
    parts, lse = torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 5, 4)
    with pytest.raises(ShapeError, match=r"out: expected the shape of out_partial\[0\], \(2, 5, 4, 16\), got shape \(9,"):
        fa3.flash_attn_combine(parts, lse, out=torch.empty(9, 2, 5, 4, 16))
    with pytest.raises(DtypeError, match="out: expected dtype torch.bfloat16, got torch.float32"):
        fa3.flash_attn_combine(parts, lse, out=torch.empty(2, 5, 4, 16), out_dtype=torch.bfloat16)


def test_tensors_beside_q_may_have_strides():
    """But for caches, which are written in place."""
    q, k_cache, v_cache = tensors(seqlen_q=3, seqlen_k=12)
    _, k, v = tensors(seqlen_q=3, seqlen_k=3, seed=1)
    angles = torch.rand(12, 8)
    given = dict(cache_seqlens=torch.tensor([4, 6]).int(), rotary_cos=angles.cos(), rotary_sin=angles.sin(),
                 rotary_seqlens=torch.tensor([5, 6]).int(), cache_leftpad=torch.tensor([1, 2]).int())  # fmt: skip
    rows, table = torch.tensor([1, 0]).int(), torch.tensor([[3, 4, 5], [0, 1, 2]]).int()

    def run(change, paged, **more):
        caches = [x.unflatten(1, (3, 4)).flatten(0, 1).clone() if paged else x.clone() for x in (k_cache, v_cache)]
        more = given | more | ({"page_table": table} if paged else {"cache_batch_idx": rows})
        return fa3.flash_attn_with_kvcache(q, *caches, change(k), change(v), causal=True,
                                           **{name: change(x) for name, x in more.items()}), *caches  # fmt: skip

    for paged in (False, True):
        for got, want in zip(run(spread, paged), run(lambda x: x, paged)):
            assert torch.equal(got, want)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, 3, 6]).int()
    lengths = given["cache_seqlens"]
    expected = fa3.flash_attn_with_kvcache(flat[0], k_cache, v_cache, *flat[1:], cache_seqlens=lengths, cu_seqlens_q=cu,
                                           cu_seqlens_k_new=cu, max_seqlen_q=3)  # fmt: skip
    got = fa3.flash_attn_with_kvcache(flat[0], k_cache, v_cache, *flat[1:], cache_seqlens=lengths, cu_seqlens_q=spread(cu),
                                      cu_seqlens_k_new=spread(cu), max_seqlen_q=3)  # fmt: skip
    assert torch.equal(got, expected)
    q, k, v, *lengths = packed()
    used = torch.tensor([3, 0, 7, 12, 2]).int(), torch.tensor([9, 2, 0, 5, 8]).int()
    expected = fa3.flash_attn_varlen_func(q, k, v, *lengths, 12, 9, *used)
    assert torch.equal(fa3.flash_attn_varlen_func(q, k, v, *map(spread, lengths), 12, 9, *map(spread, used)), expected)


def test_flags_may_be_numbers():
    q, k, v = tensors()
    expected = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa3.flash_attn_func(q, k, v, causal=1, deterministic=0), expected)
    expected = fa3.flash_attn_with_kvcache(q, k, v, causal=True)
    assert torch.equal(fa3.flash_attn_with_kvcache(q, k, v, causal=1, rotary_interleaved=0), expected)


def test_gradients():
    inputs = [x.requires_grad_() for x in tensors()]
    plain = [x.detach().requires_grad_() for x in inputs]
    fa3.flash_attn_func(*inputs, causal=True, deterministic=True).square().sum().backward()
    flashtile.flash_attn_func(*plain, causal=True).square().sum().backward()
    for a, b in zip(inputs, plain):
        assert torch.equal(a.grad, b.grad)


def test_second_part_of_the_queries():
    """Scores are q kᵀ + qv vᵀ, scaled by both head dims together; all four have gradients."""
    q, k, v = tensors(dim=8, dim_v=24)
    qv = tensors(dim=24, seed=3)[0]
    inputs = [x.requires_grad_() for x in (q, k, v, qv)]
    reference = [x.detach().double().requires_grad_() for x in inputs]
    out = fa3.flash_attn_func(*inputs[:3], qv=inputs[3], causal=True)
    joined = torch.cat([reference[0], reference[3]], -1), torch.cat([reference[1], reference[2]], -1), reference[2]
    expected, _ = definition(*joined, mask=lambda i, j: j <= i)
    check(out, expected)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    for got, want in zip(grads, torch.autograd.grad(expected.square().sum(), reference)):
        check(got, want, 1e-4)
    with pytest.raises(UnsupportedError, match="qv: expected head_dim \\+ head_dim_v of at most 256, got 64 \\+ 512"):
        q, k, v = tensors(dim=64, dim_v=512)
        fa3.flash_attn_func(q, k, v, qv=torch.zeros(2, 13, 4, 512))


def test_varlen_with_seqused():
    q, k, v, cu_q, cu_k = packed()
    used_q, used_k = torch.tensor([3, 0, 7, 12, 2]).int(), torch.tensor([9, 2, 0, 5, 8]).int()
    out, lse = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, torch.tensor(12), 9, used_q, used_k, causal=True,
                                          return_attn_probs=True)  # fmt: skip
    for b in range(len(LENGTHS)):
        rows, cols = slice(cu_q[b], cu_q[b] + used_q[b]), slice(cu_k[b], cu_k[b] + used_k[b])
        expected, _ = definition(q[None, rows], k[None, cols], v[None, cols], mask=lambda i, j: j <= i)
        check(out[None, rows], expected)
        assert (out[rows.stop : cu_q[b + 1]] == 0).all() and (lse[:, rows.stop : cu_q[b + 1]] == float("-inf")).all()


def test_packed_forms():
    q, k, v = tensors(seqlen_q=9, seqlen_k=9)
    expected = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), causal=True, num_heads_q=4), expected)
    stacked = torch.stack([q, q, q], 2)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(stacked), fa3.flash_attn_func(q, q, q))
    with pytest.raises(ShapeError, match="num_heads_q beside it"):
        fa3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2))
    for num_heads_q in (3, 8, 9):
        with pytest.raises(ShapeError, match=rf"qkv: expected num_heads_q \+ .* being {num_heads_q}, got 8 heads"):
            fa3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), num_heads_q=num_heads_q)


def test_private_functions_are_the_two_halves():
    q, k, v = (x.requires_grad_() for x in tensors(seqlen_q=9, seqlen_k=6))
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    written = torch.empty_like(out)
    got = fa3._flash_attn_forward(q, k, v, out_=written, causal=True)
    assert len(got) == 4 and got[0] is written and torch.equal(written, out) and torch.equal(got[1], lse)
    grads = [torch.empty_like(x).requires_grad_(False) for x in (q, k, v)]
    row_sums = fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=grads[0], dk=grads[1], dv=grads[2], is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected)) and row_sums.shape == (2, 4, 128)
    with pytest.raises(UnsupportedError, match="page_table: expected None.*Call flash_attn_with_kvcache"):
        fa3._flash_attn_forward(q, k, v, page_table=torch.zeros(2, 1).int())


def test_kvcache():
    """Four results on request; packed queries; what chooses schedules is taken."""
    q, k_cache, v_cache = tensors(seqlen_q=3, seqlen_k=12)
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    metadata = fa3.get_scheduler_metadata(2, 3, 12, 4, 2, 16, lengths)
    out, lse, *parts = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True, pack_gqa=True,
                                                   scheduler_metadata=metadata, return_softmax_lse=True)  # fmt: skip
    assert [x.numel() for x in parts] == [0, 0] and metadata.dtype == torch.int32
    for b, length in enumerate(lengths.tolist()):
        one = slice(b, b + 1)
        expected, expected_lse = definition(q[one], k_cache[one, :length], v_cache[one, :length], mask=lambda i, j: j <= i)
        check(out[one], expected)
        check(lse[one], expected_lse)
    flat = fa3.flash_attn_with_kvcache(q.flatten(0, 1), k_cache, v_cache, cache_seqlens=lengths, causal=True,
                                       cu_seqlens_q=torch.tensor([0, 3, 6]).int(), max_seqlen_q=3)  # fmt: skip
    torch.testing.assert_close(flat.view_as(out), out)


def test_a_cache_that_can_not_be_written_in_place_is_refused():
    cache = torch.zeros(1, 8, 16, 2).mT
    new = torch.ones(1, 1, 2, 16)
    with pytest.raises(ShapeError, match=r"k_cache: expected a contiguous last dim"):
        fa3.flash_attn_with_kvcache(new, cache, cache.clone(), new, new, cache_seqlens=3)


@pytest.mark.parametrize("packed", [False, True])
def test_a_window_of_all_keys_does_not_move_the_rotation(packed):
    """FlashAttention 3 takes a side of all keys, or of all queries, for none, and then rotates all queries alike."""
    angles, (q, new), cache = torch.rand(20, 4) * 3, torch.randn(2, 1, 3, 2, 16), torch.randn(1, 16, 2, 16)
    options = dict(k=new, v=new, cache_seqlens=5, rotary_cos=angles.cos(), rotary_sin=angles.sin())
    if packed:
        q, options["cu_seqlens_q"], options["max_seqlen_q"] = q[0], torch.tensor([0, 3]).int(), 3

    def call(*window):
        return fa3.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), window_size=window, **options)

    assert torch.equal(call(15, 2), call(-1, -1)) and torch.equal(call(1000, 1000), call(-1, -1))
    assert not torch.allclose(call(14, 2), call(-1, -1)) and not torch.allclose(call(15, 1), call(-1, -1))


@BOTH
def test_a_window_of_all_keys_does_not_move_the_rotation_when_compiled(fa):
    angles, q, new, cache = torch.rand(20, 4) * 3, *torch.randn(2, 1, 3, 2, 16), torch.randn(1, 16, 2, 16)

    def call(*window):
        return fa.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), k=new, v=new, cache_seqlens=5, window_size=window,
                                          rotary_cos=angles.cos(), rotary_sin=angles.sin())  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for window in ((1000, 1000), (1000, -1), (16, 16), (3, 2), (-1, -1)):
        torch.testing.assert_close(compiled(*window), call(*window), msg=str(window))


@pytest.mark.parametrize("name", ["v_new", "cu_seqlens_k_new", "rotary_sin", "seqlens_rotary"])
def test_the_private_forward_refuses_what_belongs_to_a_cache(name):
    q, k, v = tensors()
    with pytest.raises(UnsupportedError, match=f"{name}: expected None"):
        fa3._flash_attn_forward(q, k, v, **{name: torch.zeros(3)})


def test_kvcache_rows_of_a_page_table():
    """cache_batch_idx picks rows of page_table; rotary_seqlens without tables means nothing."""
    q, k_cache, v_cache = tensors(seqlen_q=1, seqlen_k=8)
    pages = [torch.cat([x.unflatten(1, (2, 4)).flatten(0, 1), torch.full_like(x[:1, :4], float("nan"))])
             for x in (k_cache, v_cache)]  # fmt: skip
    table = torch.tensor([[4, 4], [2, 3], [0, 1]], dtype=torch.int32)
    lengths = torch.tensor([7, 5], dtype=torch.int32)
    got = fa3.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, page_table=table, rotary_seqlens=lengths,
                                      cache_batch_idx=torch.tensor([2, 1], dtype=torch.int32))  # fmt: skip
    torch.testing.assert_close(got, fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths))


def test_combine():
    """Parts of the keys merge into the whole; lse has heads last."""
    q, k, v = tensors(seqlen_k=20)
    whole, whole_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [fa3.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 8), slice(8, 20))]
    outs, lses = (torch.stack(x) for x in zip(*parts))
    written = torch.empty_like(whole)
    out, lse = fa3.flash_attn_combine(outs, lses.transpose(2, 3), written)
    assert out is written
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse.transpose(1, 2))


def test_refusals():
    q, k, v = tensors()
    with pytest.raises(UnsupportedError, match="attention_chunk: expected 0, got 64. Pack the chunks"):
        fa3.flash_attn_func(q, k, v, attention_chunk=64)
    with pytest.raises(UnsupportedError, match="descales: expected None beside q of"):
        fa3.flash_attn_func(q, k, v, q_descale=torch.ones(2, 2))
    with pytest.raises(UnsupportedError, match="qv: expected None"):
        fa3.flash_attn_with_kvcache(q, k, v, qv=q)


def _narrow(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(torch.float8_e4m3fn) for shape in shapes]


def _wide(x, descale, heads):
    """fp8 values of (batch, rows, heads, dim) times their descales."""
    return x.float() * descale.repeat_interleave(x.shape[2] // heads, 1)[:, None, :, None]


@pytest.mark.parametrize("causal", [False, True])
def test_fp8_is_taken_as_a_cache_is(causal):
    q, k, v = _narrow((2, 9, 4, 32), (2, 20, 2, 32), (2, 20, 2, 16))
    descales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    options = dict(causal=causal, window_size=(12, 3), softcap=3.0, return_attn_probs=True)
    out, lse = fa3.flash_attn_func(q, k, v, **named, **options)
    wide = [_wide(x, descale, 2) for x, descale in zip((q, k, v), descales, strict=True)]
    expected = fa3.flash_attn_func(*wide, **options)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected[0], rtol=0.01, atol=0.01)
    torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-4)
    assert fa3.flash_attn_func(q, k.transpose(1, 2).contiguous().transpose(1, 2), v).shape == (2, 9, 4, 16)


def test_packed_fp8():
    """Sequences are parts of one row of a cache; other rows of it are not read."""
    lengths_q, lengths_k, used = [5, 0, 7], [11, 4, 20], [9, 4, 0]
    q, k, v = _narrow((12, 4, 32), (35, 2, 32), (35, 2, 32))
    starts_q, starts_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths_q, lengths_k))
    descale = torch.rand(3, 2) + 0.5
    call = dict(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=7, max_seqlen_k=20, k_descale=descale, causal=True)
    for seqused_k in (None, torch.tensor(used).int()):
        out, lse = fa3.flash_attn_varlen_func(q, k, v, seqused_k=seqused_k, return_attn_probs=True, **call)
        for b, keys in enumerate(lengths_k if seqused_k is None else used):
            rows, begin = slice(starts_q[b], starts_q[b + 1]), int(starts_k[b])
            own = slice(begin, begin + keys)
            expected = fa3.flash_attn_func(q[None, rows], k[None, own], v[None, own], k_descale=descale[b:][:1], causal=True,
                                           return_attn_probs=True)  # fmt: skip
            torch.testing.assert_close(out[rows], expected[0][0], rtol=0.01, atol=0.01)
            torch.testing.assert_close(lse[:, rows], expected[1][0], rtol=1e-4, atol=1e-4)
    batched = fa3.flash_attn_varlen_func(q.view(3, 4, 4, 32), k, v, **{**call, "cu_seqlens_q": None})
    assert batched.shape == (3, 4, 4, 32)
    with pytest.raises(UnsupportedError, match="seqused_q: expected None with fp8"):
        fa3.flash_attn_varlen_func(q, k, v, seqused_q=torch.tensor(lengths_q).int(), **call)


def test_what_fp8_can_t_have():
    q, k, v = _narrow((1, 4, 2, 32), (1, 4, 2, 32), (1, 4, 2, 32))
    with pytest.raises(UnsupportedError, match="qv: expected None"):
        fa3.flash_attn_func(q, k, v, qv=v)
    with pytest.raises(DtypeError, match="^k: expected the dtype of q"):
        fa3.flash_attn_func(q, k.bfloat16(), v)


def test_what_is_wrong_with_packed_fp8():
    """In the words of the call, though it is one on a cache."""
    q, k, v = _narrow((8, 2, 32), (12, 2, 32), (12, 2, 32))
    call = dict(cu_seqlens_q=torch.tensor([0, 5, 8]).int(), cu_seqlens_k=torch.tensor([0, 5, 12]).int(), max_seqlen_q=5,
                max_seqlen_k=7)  # fmt: skip
    for changes, error, words in (
        ({"cu_seqlens_k": torch.tensor([0, 5, 12])}, DtypeError, "cu_seqlens_k: expected dtype torch.int32"),
        ({"cu_seqlens_k": torch.tensor([0, 12]).int()}, ShapeError, r"cu_seqlens_k: expected shape \(3,\)"),
        ({"cu_seqlens_k": torch.tensor([0, 13, 12]).int()}, ValueRangeError, "cu_seqlens_k: expected entries that do not dec"),
        ({"cu_seqlens_k": None}, FlashtileError, "cu_seqlens_k"),
        ({"max_seqlen_k": 6}, ValueRangeError, "max_seqlen_k: expected at least the longest sequence, 7"),
        ({"seqused_k": torch.tensor([6, 7]).int()}, ValueRangeError,
         r"seqused_k\[0\]: expected 0 to the sequence's length 5, got 6"),
    ):
        with pytest.raises(error, match=words):
            fa3.flash_attn_varlen_func(q, k, v, **{**call, **changes})
    with pytest.raises(DtypeError, match="k: expected a torch.Tensor"):
        fa3.flash_attn_func(q[None], None, v[None])
    out = fa3.flash_attn_func(q[None].requires_grad_(), k[None], v[None])
    with pytest.raises(UnsupportedError, match="no gradients with fp8"):
        out.sum().backward()
