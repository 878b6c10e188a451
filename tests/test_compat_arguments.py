"""What the functions of FlashAttention 2 and 3 take as arguments, and how they refuse the rest: by their own names."""

import numpy as np
import pytest
import torch

import flashtile
from flashtile import DtypeError, ShapeError, UnsupportedError, ValueRangeError
from flashtile.compat import flash_attn_interface as fa3
from flashtile.compat.flash_attn import flash_attn_interface as fa2

BOTH = pytest.mark.parametrize("fa", [fa2, fa3], ids=["fa2", "fa3"])
CU = torch.tensor([0, 5], dtype=torch.int32)


def rows(*shape, **options):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), **options)


Q, PACKED, NEW, CACHE = rows(1, 5, 2, 16), rows(5, 2, 16), rows(1, 1, 2, 16), rows(1, 8, 2, 16)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@BOTH
@pytest.mark.parametrize(("dim", "dim_k"), [(12, 16), (16, 12), (12, 13)])
def test_head_dims_inside_one_multiple_of_8_differ(fa, dim, dim_k):
    """They would be equal once padded."""
    q, k = rows(5, 2, dim), rows(5, 2, dim_k)
    message = f"k: expected the head_dim of q, {dim}, got head_dim {dim_k}"
    with pytest.raises(ShapeError, match=message):
        fa.flash_attn_func(q[None], k[None], k[None])
    with pytest.raises(ShapeError, match=message):
        fa.flash_attn_varlen_func(q, k, k, CU, CU, 5, 5)


@pytest.mark.parametrize(("dims", "message"), [
    ((12, 16, 16, 16, 16), "k_cache: expected the head_dim of q, 12, got head_dim 16"),
    ((16, 16, 16, 12, 16), "k: expected the head_dim of k_cache, 16, got head_dim 12"),
    ((12, 12, 12, 12, 16), "v: expected the head_dim of v_cache, 12, got head_dim 16"),
    ((257, 257, 16, 257, 16), "q: expected a head dim of at most 256, got 257"),
])  # fmt: skip
def test_head_dims_of_a_cache_differ(dims, message):
    """Nothing is written."""
    q, k_cache, v_cache, k, v = (rows(1, n, 2, dim) for n, dim in zip((1, 8, 8, 1, 1), dims))
    before = k_cache.clone()
    with pytest.raises(ShapeError, match=message):
        fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3)
    assert torch.equal(k_cache, before)


@BOTH
def test_head_dims_are_reported_as_given(fa):
    with pytest.raises(ShapeError, match="q: expected a head dim of at most 256, got 257"):
        fa.flash_attn_func(*[rows(1, 5, 2, 257)] * 3)
    with pytest.raises(ShapeError, match="q: expected a head dim .* got 0"):
        fa.flash_attn_func(*[rows(1, 5, 2, 0)] * 3)


@BOTH
@pytest.mark.parametrize(("wrong", "error", "message"), [
    (None, DtypeError, "expected a torch.Tensor, got NoneType"),
    ([1.0], DtypeError, "expected a torch.Tensor, got list"),
    (torch.tensor(1.0), ShapeError, r"expected dims \(..., seqlen, heads, dim\), got shape \(\)"),
])  # fmt: skip
@pytest.mark.parametrize("place", range(3))
def test_no_tensor_of_rows(fa, wrong, error, message, place):
    def replaced(*tensors):
        return [wrong if i == place else x for i, x in enumerate(tensors)]

    name, name_of_cache = ("q", "k", "v")[place], ("q", "k_cache", "v_cache")[place]
    with pytest.raises(error, match=f"^{name}: {message}"):
        fa.flash_attn_func(*replaced(Q, Q, Q))
    with pytest.raises(error, match=f"^{name}: {message}"):
        fa.flash_attn_varlen_func(*replaced(PACKED, PACKED, PACKED), CU, CU, 5, 5)
    with pytest.raises(error, match=f"^{name_of_cache}: {message}"):
        fa.flash_attn_with_kvcache(*replaced(NEW, CACHE, CACHE), cache_seqlens=3)


@BOTH
def test_the_private_functions_ask_for_tensors_too(fa):
    options = (0.0, 0.25, False, -1, -1, 0.0, None, False) if fa is fa2 else ()
    with pytest.raises(DtypeError, match="k: expected a torch.Tensor, got NoneType"):
        fa._flash_attn_forward(Q, None, Q, *options)


TABLE, PAGES = ints(0).view(1, 1), rows(1, 4, 2, 16)
WRONG = {
    "fa2 slopes": (lambda: fa2.flash_attn_func(Q, Q, Q, alibi_slopes=[1.0, 2.0]), DtypeError, "alibi_slopes: .* got list"),
    "fa2 slopes, cache": (lambda: fa2.flash_attn_with_kvcache(NEW, CACHE, CACHE, alibi_slopes=[1.0, 2.0]), DtypeError,
                          "alibi_slopes: .* got list"),
    "fa2 new keys": (lambda: fa2.flash_attn_with_kvcache(NEW, CACHE, CACHE, [1], NEW, cache_seqlens=2), DtypeError,
                     "k: .* got list"),
    "fa2 new keys alone": (lambda: fa2.flash_attn_with_kvcache(NEW, CACHE, CACHE, NEW, cache_seqlens=2), ShapeError,
                           "v: expected a tensor, since k is given, got None"),
    "fa2 table": (lambda: fa2.flash_attn_with_kvcache(NEW, CACHE, CACHE, block_table=[[0]]), DtypeError,
                  "block_table: expected a torch.Tensor, got list"),
    "fa2 flat table": (lambda: fa2.flash_attn_with_kvcache(NEW, CACHE, CACHE, block_table=ints(0)), ShapeError,
                       r"block_table: expected shape \(1, pages of a sequence\), got shape \(1,\)"),
    "fa2 pages": (lambda: fa2.flash_attn_varlen_func(PACKED, rows(1, 4, 2, 24), PAGES, CU, CU, 5, 5, block_table=TABLE),
                  ShapeError, r"^v: expected all but the last dim of k|^k: expected the head_dim of q, 16, got head_dim 24"),
    "fa2 pages, lengths": (lambda: fa2.flash_attn_varlen_func(PACKED, PAGES, PAGES, CU, CU, 5, 5, block_table=TABLE),
                           ValueRangeError, r"^cu_seqlens_k.diff\(\)\[0\]: expected 0 to 4.* got 5"),
    "fa2 pages, no lengths": (lambda: fa2.flash_attn_varlen_func(PACKED, PAGES, PAGES, CU, [0, 5], 5, 5, block_table=TABLE),
                              DtypeError, "cu_seqlens_k: expected a torch.Tensor, got list"),
    "fa2 longest": (lambda: fa2.flash_attn_varlen_func(PACKED, PACKED, PACKED, CU, CU, 5, None, window_size=(2, 2)),
                    DtypeError, "max_seqlen_k: expected an int, got NoneType"),
    "fa2 qkv, lengths": (lambda: fa2.flash_attn_varlen_qkvpacked_func(rows(5, 3, 2, 16), CU.long(), 5), DtypeError,
                         r"^cu_seqlens: .*Cast it: cu_seqlens.to\(torch.int32\)"),
    "fa2 qkv, longest": (lambda: fa2.flash_attn_varlen_qkvpacked_func(rows(5, 3, 2, 16), CU, 4), ValueRangeError,
                         "^max_seqlen: expected at least the longest sequence, 5, got 4"),
    "fa3 table": (lambda: fa3.flash_attn_with_kvcache(NEW, CACHE, CACHE, page_table=TABLE.long()), DtypeError,
                  r"^page_table: .*Cast it: page_table.to\(torch.int32\)"),
    "fa3 page": (lambda: fa3.flash_attn_with_kvcache(NEW, PAGES, PAGES, page_table=TABLE + 1), ValueRangeError,
                 r"^page_table\[0, 0\]: expected a page, 0 to 0, got 1"),
    "fa3 lse": (lambda: fa3.flash_attn_combine(rows(2, 1, 5, 2, 16), None), DtypeError, "lse_partial: .* got NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("function", "shape", "layout"), [
    ("flash_attn_qkvpacked_func", (1, 5, 2, 16), r"qkv: expected \(batch, seqlen, 3, heads, dim\)"),
    ("flash_attn_qkvpacked_func", (1, 3, 5, 2, 16), r"qkv: expected \(batch, seqlen, 3, heads, dim\)"),
    ("flash_attn_kvpacked_func", (1, 2, 5, 2, 16), r"kv: expected \(batch, seqlen, 2, heads, dim\)"),
    ("flash_attn_varlen_qkvpacked_func", (5, 2, 2, 16), r"qkv: expected \(total, 3, heads, dim\)"),
    ("flash_attn_varlen_kvpacked_func", (5, 2, 16), r"kv: expected \(total, 2, heads, dim\)"),
])  # fmt: skip
def test_packed_layouts(function, shape, layout):
    given, longest = rows(*shape), [5]
    before, lengths = ([PACKED] if "varlen" in function else [Q], [CU])
    if "qkv" in function:
        before = []
    else:
        lengths, longest = lengths * 2, longest * 2
    arguments = [*before, given, *(lengths + longest if "varlen" in function else [])]
    with pytest.raises(ShapeError, match=rf"{layout}, got shape .*Stack its parts: torch.stack\(\["):
        getattr(fa2, function)(*arguments)


@pytest.mark.parametrize(("shape", "num_heads_q", "error", "message"), [
    ((1, 3, 5, 2, 16), None, ShapeError, r"qkv: expected \(batch, seqlen, 3, heads, dim\)"),
    ((5, 3, 16), 1, ShapeError, r"qkv: expected \(batch, seqlen, 3, heads, dim\), or num_heads_q beside it and 4 dims"),
    ((1, 5, 8, 16), -2, ShapeError, r"qkv: expected num_heads_q \+ 2 \* num_heads_kv heads, num_heads_q being -2"),
    ((1, 5, 8, 16), 4.0, DtypeError, "num_heads_q: expected an int, got 4.0"),
    (None, None, DtypeError, "qkv: expected a torch.Tensor, got NoneType"),
])  # fmt: skip
def test_packed_layouts_of_flash_attn_3(shape, num_heads_q, error, message):
    with pytest.raises(error, match=message):
        fa3.flash_attn_qkvpacked_func(None if shape is None else rows(*shape), num_heads_q=num_heads_q)


@pytest.mark.parametrize(("k", "qv", "error", "message"), [
    (Q, rows(1, 5, 3, 16), ShapeError, r"^qv: expected .* \(1, 5, 2, 16\), got shape \(1, 5, 3, 16\)"),
    (Q, rows(1, 4, 2, 16), ShapeError, r"^qv: expected .* got shape \(1, 4, 2, 16\)"),
    (Q, rows(1, 5, 2, 24), ShapeError, r"^qv: expected .* got shape \(1, 5, 2, 24\)"),
    (rows(1, 5, 2, 24), Q, ShapeError, r"^k: expected .* head_dim of q, \(1, 5, 2, 16\), got shape \(1, 5, 2, 24\)"),
    (Q, Q.half(), DtypeError, "^qv: expected the dtype of q, torch.float32, got torch.float16"),
    (Q, Q.to("meta"), flashtile.DeviceError, "^qv: expected the device of q, cpu, got meta"),
    (Q, [1.0], DtypeError, "^qv: expected a torch.Tensor, got list"),
])  # fmt: skip
def test_second_part_of_the_queries_that_does_not_fit(k, qv, error, message):
    with pytest.raises(error, match=message):
        fa3.flash_attn_func(Q, k, Q, qv=qv)


def test_second_part_of_the_queries_inside_autocast():
    """Dtypes may differ there."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa3.flash_attn_func(Q, Q.bfloat16(), Q, qv=Q.bfloat16())
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(("rows_of_table", "picked", "error", "message"), [
    (3, ints(3), ValueRangeError, r"cache_batch_idx\[0\]: expected 0 to 2, got 3"),
    (3, ints(-1), ValueRangeError, r"cache_batch_idx\[0\]: expected 0 to 2, got -1"),
    (3, ints(0, 1), ShapeError, r"cache_batch_idx: expected shape \(1,\)"),
    (3, [0], DtypeError, "cache_batch_idx: expected a torch.Tensor, got list"),
    (0, ints(0), ShapeError, "page_table: expected at least one row, which cache_batch_idx names"),
])  # fmt: skip
def test_rows_of_a_page_table_that_are_not_there(rows_of_table, picked, error, message):
    table = torch.zeros(rows_of_table, 2, dtype=torch.int32)
    with pytest.raises(error, match=message):
        fa3.flash_attn_with_kvcache(NEW, PAGES, PAGES, page_table=table, cache_batch_idx=picked)


def test_rows_of_a_page_table_are_limited_where_they_are_not_read(monkeypatch):
    """As on a GPU, where the nearest row stands for one that is not there."""
    monkeypatch.setattr(fa3, "values_readable", lambda x: False)
    pages, table = rows(2, 4, 2, 16), ints(0, 1).view(2, 1)
    picked = [fa3.flash_attn_with_kvcache(NEW, pages, pages, page_table=table, cache_batch_idx=ints(i)) for i in (-7, 9)]
    for page, out in enumerate(picked):
        assert torch.equal(out, fa3.flash_attn_with_kvcache(NEW, pages[page : page + 1], pages[page : page + 1]))


@BOTH
def test_numbers_of_numpy(fa):
    numbers = dict(softmax_scale=np.float32(0.5), window_size=(np.int64(2), np.int32(-1)), softcap=np.float32(2))
    plain = dict(softmax_scale=0.5, window_size=(2, -1), softcap=2.0)
    assert torch.equal(fa.flash_attn_func(Q, Q, Q, **numbers), fa.flash_attn_func(Q, Q, Q, **plain))
    lengths = CU, CU, np.int64(5), np.int32(5)
    expected = fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, CU, CU, 5, 5, **plain)
    assert torch.equal(fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, *lengths, **numbers), expected)
    expected = fa.flash_attn_with_kvcache(NEW, CACHE, CACHE, cache_seqlens=3, num_splits=2, **plain)
    got = fa.flash_attn_with_kvcache(NEW, CACHE, CACHE, cache_seqlens=np.int64(3), num_splits=np.int64(2), **numbers)
    assert torch.equal(got, expected)


@BOTH
@pytest.mark.parametrize(("options", "message"), [
    (dict(softmax_scale=True), "softmax_scale: expected a number, got True"),
    (dict(softmax_scale=torch.tensor(0.5)), r"softmax_scale: expected a number, .* Call .item\(\)"),
    (dict(softcap=np.bool_(True)), "softcap: expected a number"),
    (dict(window_size=torch.tensor([1.5, 2.0])), "window_size: expected a pair"),
    (dict(window_size=torch.tensor(2)), "window_size: expected a pair"),
])  # fmt: skip
def test_numbers_that_are_none(fa, options, message):
    with pytest.raises(DtypeError, match=message):
        fa.flash_attn_func(Q, Q, Q, **options)


@BOTH
def test_lengths_that_are_no_ints(fa):
    for wrong in (torch.tensor(5.5), True, torch.tensor([5, 5])):
        with pytest.raises(DtypeError, match="max_seqlen_k: expected an int"):
            fa.flash_attn_varlen_func(PACKED, PACKED, PACKED, CU, CU, 5, wrong)


@BOTH
def test_lengths_of_a_traced_call(fa):
    """One graph for all lengths but the first: what looks at them must not fix them."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def call(x, cu_seqlens):
        return fa.flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, x.shape[0], x.shape[0], window_size=(2, -1))

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for length in (5, 6, 7, 11):
        x, cu_seqlens = rows(length, 2, 16), ints(0, length)
        torch.testing.assert_close(compiled(x, cu_seqlens), call(x, cu_seqlens))
    assert len(graphs) <= 2


@BOTH
def test_a_cache_has_no_autograd(fa):
    """Tensors that require gradients are taken, also outside of no_grad."""
    arguments = [x.clone() for x in (NEW, CACHE, CACHE, NEW, NEW)]
    expected = fa.flash_attn_with_kvcache(*arguments, cache_seqlens=3)
    traced = [x.clone().requires_grad_() for x in (NEW, CACHE, CACHE, NEW, NEW)]
    out = fa.flash_attn_with_kvcache(*traced, cache_seqlens=3)
    assert torch.equal(out, expected) and not out.requires_grad
    for written, wanted in zip(traced, arguments):
        assert torch.equal(written, wanted)


def test_parts_of_no_tensor_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="qv: expected None, got list"):
        fa3.flash_attn_with_kvcache(NEW, CACHE, CACHE, qv=[1.0])


def test_tables_wider_than_the_head_dim_before_padding():
    """They would rotate the zeros, which are cut off."""
    q, caches, new = rows(1, 1, 2, 20), [torch.zeros(1, 8, 2, 20) for _ in range(2)], rows(1, 1, 2, 20)
    tables = dict(rotary_cos=rows(9, 12), rotary_sin=rows(9, 12))
    with pytest.raises(ShapeError, match=r"rotary_cos: expected shape \(seqlen_rotary, at most 10\), got shape \(9, 12\)"):
        fa2.flash_attn_with_kvcache(q, *caches, new, new, **tables, cache_seqlens=1)
    assert not any(cache.any() for cache in caches)


def test_a_cache_that_sequences_share_is_refused_before_padding():
    cache, new = torch.zeros(1, 8, 2, 20).expand(2, 8, 2, 20), rows(2, 1, 2, 20)
    with pytest.raises(ShapeError, match="k_cache: expected slots of their own, since k is appended"):
        fa2.flash_attn_with_kvcache(new, cache, cache, new, new, cache_seqlens=1)


@pytest.mark.parametrize("dropout_p", [None, "0.1"])
def test_dropout_that_is_no_number_beside_its_mask(dropout_p):
    with pytest.raises(DtypeError, match="dropout_p: expected a number"):
        fa2.flash_attn_func(Q, Q, Q, dropout_p=dropout_p, return_attn_probs=True)
    with pytest.raises(DtypeError, match="dropout_p: expected a number"):
        fa2._flash_attn_forward(Q, Q, Q, dropout_p, 1.0, False, -1, -1, 0.0, None, True)


def test_lengths_of_pages_that_are_no_vector():
    pages, table = rows(4, 4, 2, 16), ints(0, 1)[None]
    with pytest.raises(ShapeError, match="cu_seqlens_k: expected shape"):
        fa2._flash_attn_varlen_forward(PACKED, pages, pages, CU, ints(0, 5)[1], 5, 8, 0.0, 1.0, True, block_table=table)


def test_the_mask_of_dropout_under_autocast():
    """It has the dtypes of the call, and its own products are those of fp32."""
    q, k = (4 * rows(1, 128, 2, 16)).bfloat16(), (4 * rows(1, 128, 2, 16).flip(1)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = fa2.flash_attn_func(Q, Q, Q.bfloat16(), 0.1, return_attn_probs=True)
        assert [x.dtype for x in mixed] == [torch.bfloat16, torch.float32, torch.bfloat16]
        _, lse, mask = fa2.flash_attn_func(q, k, k, 0.1, return_attn_probs=True)
    weights = torch.softmax(torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()) / 4, -1)
    largest = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()).amax(-1, keepdim=True) / 4
    torch.testing.assert_close(mask.double().abs() * (largest - lse.double()[..., None]).exp(), weights, atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_with_kvcache"])
def test_another_default_device(name):
    q, k, tables = rows(1, 3, 2, 16), rows(1, 5, 2, 16), rows(9, 4)
    options = {"causal": True}
    if name == "flash_attn_with_kvcache":
        options |= dict(k=q, v=q, cache_seqlens=ints(2), rotary_cos=tables, rotary_sin=tables)
    expected = getattr(fa2, name)(q, k.clone(), k.clone(), **options)
    torch.set_default_device("meta")
    try:
        got = getattr(fa2, name)(q, k.clone(), k.clone(), **options)
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, expected)
