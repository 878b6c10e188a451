"""flash_attn.bert_padding and flash_attn.layers.rotary, against definitions written in another way."""

import math

import pytest
import torch

from flashtile.compat.flash_attn import bert_padding, flash_attn_func, flash_attn_with_kvcache
from flashtile.compat.flash_attn.layers import rotary
from flashtile.compat.flash_attn.ops.triton_.rotary import apply_rotary
from flashtile.errors import DtypeError, ShapeError, ValueRangeError

MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]])


def test_unpad_gives_five_values_and_pad_the_way_back():
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK)
    assert torch.equal(rows, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 2, 8, 10, 11]
    assert cu_seqlens.tolist() == [0, 3, 3, 6] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and isinstance(longest, int) and used.tolist() == [3, 0, 3] and used.dtype == torch.int32
    back = bert_padding.pad_input(rows, indices, 3, 4)
    assert torch.equal(back, x * MASK[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, MASK[..., None, None].expand_as(x).float())


def test_unused_rows_get_a_place_but_are_not_used():
    unused = torch.zeros_like(MASK)
    unused[0, 3] = unused[1, 1] = 1
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(torch.arange(12.0).view(3, 4, 1), MASK, unused)
    assert rows[:, 0].tolist() == indices.tolist() == [0, 1, 2, 3, 5, 8, 10, 11]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 4, 5, 8], 4, [3, 0, 3])


def test_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.arange(18.0).view(3, 6, 1)
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert rows[:, 0].tolist() == indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32 and longest == 6


def test_no_sequences():
    x = torch.randn(0, 6, 1)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, torch.zeros(0, 6))
    assert (rows.shape, indices.shape, cu_seqlens.tolist(), longest, used.shape) == ((0, 1), (0,), [0], 0, (0,))
    assert bert_padding.pad_input(rows, indices, 0, 6).shape == x.shape
    *_, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(torch.randn(2, 6, 1), torch.zeros(2, 6).int())
    assert (cu_seqlens.tolist(), longest) == ([0], 0)


def test_first_axis_functions():
    x = torch.randn(5, 3, requires_grad=True)
    indices = torch.tensor([4, 0, 4])
    picked, residual = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(picked, x[indices]) and torch.equal(residual, x)
    (residual.sum() + 10 * picked.sum()).backward()
    assert x.grad[:, 0].tolist() == [11, 1, 1, 1, 21]
    placed = bert_padding.index_put_first_axis(torch.ones(2, 3), torch.tensor([3, 1]), 5)
    assert placed[:, 0].tolist() == [0, 1, 0, 1, 0]


def rotated(x, angles, positions, interleaved):
    """Rows x (n, heads, dim) at integer positions, as complex numbers times exp(i angle); float64."""
    pairs = angles.shape[1]
    part = x[..., : 2 * pairs].double()
    pair = part.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else part.unflatten(-1, (2, pairs)).unbind(-2)
    z = torch.complex(*pair)
    z = z * torch.polar(torch.ones(()).double(), angles.double()[positions])[:, None]
    parts = torch.stack([z.real, z.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([parts, x[..., 2 * pairs :].double()], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([0, 5, 2], dtype=torch.int32)], ids=["none", "int", "tensor"])
@pytest.mark.parametrize("pairs", [3, 8])
def test_rotary(interleaved, inplace, offsets, pairs):
    x = torch.randn(3, 7, 2, 16)
    angles = torch.rand(12, pairs) * 2 * math.pi
    per_sequence = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 3
    expected = torch.stack([rotated(x[b], angles, torch.arange(7) + per_sequence[b], interleaved) for b in range(3)])
    leaf = x.clone().requires_grad_()
    out = rotary.apply_rotary_emb(leaf, angles.cos(), angles.sin(), interleaved, inplace, offsets)
    torch.testing.assert_close(out, expected.float())
    assert torch.equal(leaf, out if inplace else x)
    # A rotation keeps lengths: the gradient of half the squared length of a rotated row is the row itself.
    (grad,) = torch.autograd.grad(out, leaf, out.detach())
    torch.testing.assert_close(grad, x)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [2, torch.tensor([0, 5, 1])], ids=["int", "tensor"])
def test_rotary_of_packed_rows(inplace, offsets):
    """The second sequence is empty; the last row belongs to none."""
    x, cu_seqlens = torch.randn(10, 2, 16), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    angles = torch.rand(12, 4) * 2 * math.pi
    first, last = (offsets, offsets) if isinstance(offsets, int) else (0, 1)
    positions = torch.cat([torch.arange(4) + first, torch.arange(5) + last])
    expected = rotated(x[:9], angles, positions, False).float()
    out = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), False, inplace, offsets, cu_seqlens, 5)
    torch.testing.assert_close(out[:9], expected)
    assert (out is x) == inplace or torch.equal(out, x) == inplace


def test_rows_past_the_tables_stay():
    x, angles = torch.randn(1, 4, 1, 8), torch.rand(5, 4)
    out = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([3]))
    assert torch.equal(out[:, 2:], x[:, 2:]) and not torch.equal(out[:, :2], x[:, :2])


def test_rotary_rounds_once_in_half_precision():
    x, angles = torch.randn(2, 5, 3, 16), torch.rand(5, 8)
    half = rotary.apply_rotary_emb(x.bfloat16(), angles.cos(), angles.sin())
    exact = rotary.apply_rotary_emb(x.bfloat16().float(), angles.cos(), angles.sin())
    assert half.dtype == torch.bfloat16 and torch.equal(half, exact.bfloat16())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_has_second_derivatives(interleaved):
    """A rotation is linear: its gradient is one more."""
    x, angles = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True), torch.rand(3, 3)
    second, tables = [], (angles.cos().double(), angles.sin().double())
    for rotate in (rotary.apply_rotary_emb, rotary.apply_rotary_emb_torch):
        (first,) = torch.autograd.grad((rotate(x * x, *tables, interleaved) ** 2).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
    torch.testing.assert_close(*second)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_of_packed_tensors_is_in_place(interleaved):
    """qkv and kv, in (3, heads) and in one row of heads; values stay, keys may have tables of their own."""
    angles, angles_k = torch.rand(2, 6, 4)
    tables = angles.cos(), angles.sin(), angles_k.cos(), angles_k.sin()
    qkv = torch.randn(2, 6, 3, 2, 16)
    q, k, v = (x.clone() for x in qkv.unbind(2))
    expected_q = rotary.apply_rotary_emb(q, *tables[:2], interleaved)
    expected_k = rotary.apply_rotary_emb(k, *tables[2:], interleaved)
    leaf = qkv.clone().requires_grad_()
    out = rotary.apply_rotary_emb_qkv_(leaf, *tables, interleaved)
    assert torch.equal(out, torch.stack([expected_q, expected_k, v], 2)) and torch.equal(leaf, out)
    torch.testing.assert_close(torch.autograd.grad(out, leaf, out.detach())[0], qkv)
    flat = torch.cat([q, k[:, :, :1], v[:, :, :1]], 2)
    rotary.apply_rotary_emb_qkv_(flat, *tables, interleaved, num_heads_q=2)
    assert torch.equal(flat, torch.cat([expected_q, expected_k[:, :, :1], v[:, :, :1]], 2))
    kv = torch.stack([k, v], 2)
    rotary.apply_rotary_emb_kv_(kv, *tables[2:], interleaved)
    assert torch.equal(kv, torch.stack([expected_k, v], 2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_in_operations_that_autograd_sees(interleaved):
    x, angles = torch.randn(2, 5, 3, 16), torch.rand(5, 6)
    expected = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved)
    torch.testing.assert_close(rotary.apply_rotary_emb_torch(x, angles.cos(), angles.sin(), interleaved), expected)


@pytest.mark.parametrize("scale_base", [None, 512])
def test_rotary_embedding_depends_on_distance_only(scale_base):
    """Products of queries and keys are the same when both move; the tables grow."""
    module = rotary.RotaryEmbedding(16, scale_base=scale_base)
    q, kv = torch.randn(1, 4, 2, 16), torch.randn(1, 4, 2, 2, 16)

    def products(offset):
        rotated_q, rotated_kv = module(q.clone(), kv.clone(), offset, max_seqlen=64)
        return torch.einsum("bmhd,bnhd->bhmn", rotated_q, rotated_kv[:, :, 0])

    torch.testing.assert_close(products(0), products(40), rtol=1e-4, atol=1e-4)
    qkv = torch.randn(1, 100, 3, 2, 16)
    assert torch.equal(module(qkv.clone())[:, :, 2], qkv[:, :, 2])


def embedded(module, qkv, positions):
    """qkv with queries and keys of sequence b rotated from positions[b] on, by the definition."""
    angles = torch.outer(torch.arange(64.0), module.base ** (-torch.arange(0, module.dim, 2) / module.dim))
    steps = torch.arange(qkv.shape[1])
    expected = qkv.clone()
    for b, position in enumerate(positions):
        for part in (0, 1):
            expected[b, :, part] = rotated(qkv[b, :, part], angles, steps + position, module.interleaved).to(qkv.dtype)
    return expected


def test_rotary_embedding_of_positions_on_the_device():
    """They need tables: those of an earlier call will do."""
    module, qkv, positions = rotary.RotaryEmbedding(16), torch.randn(2, 5, 3, 1, 16), torch.tensor([1, 2])
    with pytest.raises(ShapeError, match="max_seqlen: expected an int .* no tables yet, got None"):
        module(qkv.clone(), seqlen_offset=positions)
    module(qkv.clone(), max_seqlen=64)
    torch.testing.assert_close(module(qkv.clone(), seqlen_offset=positions), embedded(module, qkv, (1, 2)))


def test_rotary_embedding_makes_its_tables_on_request():
    """As flash_attn's MHA does for its cache."""
    module = rotary.RotaryEmbedding(16)
    assert module._cos_cached is None and module._sin_cached is None
    module._update_cos_sin_cache(9, device=torch.device("cpu"), dtype=torch.bfloat16)
    cos, sin = module._cos_cached, module._sin_cached
    assert cos.shape == sin.shape == (9, 8) and cos.dtype == sin.dtype == torch.bfloat16
    torch.testing.assert_close(cos.float().square() + sin.float().square(), torch.ones(9, 8), rtol=0, atol=0.02)
    module._update_cos_sin_cache(5, device="cpu", dtype=torch.bfloat16)
    assert module._cos_cached is cos
    module._update_cos_sin_cache(5)
    assert module._cos_cached.dtype == torch.float32 and module._cos_cached.shape == (5, 8)


def test_rotary_embedding_after_inference():
    """Tables made in inference mode are made again for a gradient."""
    module, qkv = rotary.RotaryEmbedding(16), torch.randn(1, 5, 3, 1, 16)
    with torch.inference_mode():
        module(qkv.clone())
    leaf = qkv.clone().requires_grad_()
    module(leaf * 1).square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * qkv)
    assert not module._cos_cached.is_inference()


@pytest.mark.parametrize("scale_base", [None, 512])
def test_rotary_embedding_compiles(scale_base):
    module, qkv = rotary.RotaryEmbedding(16, scale_base=scale_base), torch.randn(2, 5, 3, 1, 16)
    leaf = qkv.clone().requires_grad_()
    out = torch.compile(lambda x: module(x * 1), fullgraph=True, backend="aot_eager")(leaf)
    torch.testing.assert_close(out, module(qkv.clone()))
    out.sum().backward()
    other = qkv.clone().requires_grad_()
    module(other * 1).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_half(interleaved):
    """x cos + rotate_half(x) sin is the rotation, cos and sin being repeated for both of a pair."""
    x, angles = torch.randn(2, 5, 3, 16), torch.rand(5, 8)
    repeated = angles.repeat_interleave(2, 1) if interleaved else angles.repeat(1, 2)
    got = x * repeated.cos()[:, None] + rotary.rotate_half(x, interleaved) * repeated.sin()[:, None]
    torch.testing.assert_close(got, rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved))


@pytest.mark.parametrize("inplace", [False, True])
def test_the_rotation_alone(inplace):
    """flash_attn.ops.triton.rotary: no gradient, and backwards with conjugate."""
    x, angles = torch.randn(2, 5, 3, 16, requires_grad=True), torch.rand(9, 4)
    tables, offsets = (angles.cos(), angles.sin()), torch.tensor([1, 4])
    before = x.detach().clone()
    out = apply_rotary(x, *tables, offsets, interleaved=True, inplace=inplace)
    assert not out.requires_grad or out is x
    torch.testing.assert_close(out, rotary.apply_rotary_emb(before, *tables, True, seqlen_offsets=offsets))
    assert torch.equal(x, out if inplace else before)
    torch.testing.assert_close(apply_rotary(out, *tables, offsets, interleaved=True, conjugate=True), before)
    packed, cu_seqlens = torch.randn(7, 2, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    torch.testing.assert_close(apply_rotary(packed, *tables, 2, cu_seqlens, 4),
                               rotary.apply_rotary_emb(packed, *tables, seqlen_offsets=2, cu_seqlens=cu_seqlens))  # fmt: skip


def test_rotary_says_what_does_not_fit():
    x = torch.randn(2, 5, 1, 8)
    with pytest.raises(ShapeError, match="cos: expected at least seqlen_offsets \\+ seqlen = 6 rows, got 5"):
        rotary.apply_rotary_emb(x, torch.ones(5, 4), torch.ones(5, 4), seqlen_offsets=1)
    with pytest.raises(ShapeError, match="cos: expected at most 4 columns"):
        rotary.apply_rotary_emb(x, torch.ones(5, 5), torch.ones(5, 5))
    with pytest.raises(ShapeError, match="sin: expected"):
        rotary.apply_rotary_emb(x, torch.ones(5, 4), torch.ones(5, 3))


def rows(*shape):
    return torch.zeros(shape)


TABLES, CU_SEQLENS = (torch.ones(6, 4), torch.ones(6, 4)), torch.tensor([0, 5], dtype=torch.int32)
WRONG = {
    "kv of two dims of heads": (lambda: rotary.apply_rotary_emb_kv_(rows(2, 5, 2, 8), *TABLES), ShapeError,
                                r"kv: expected \(batch, seqlen, 2, heads, dim\), got shape \(2, 5, 2, 8\)"),
    "kv of three parts": (lambda: rotary.apply_rotary_emb_kv_(rows(2, 5, 3, 1, 8), *TABLES), ShapeError, "kv: expected"),
    "qkv of two parts": (lambda: rotary.apply_rotary_emb_qkv_(rows(2, 5, 2, 1, 8), *TABLES), ShapeError,
                         r"qkv: expected \(batch, seqlen, 3, heads, dim\)"),
    "heads": (lambda: rotary.apply_rotary_emb_qkv_(rows(2, 5, 7, 8), *TABLES, num_heads_q=4), ShapeError,
              r"qkv: expected num_heads_q \+ 2 \* num_heads_kv heads, num_heads_q being 4, got 7 heads"),
    "ints": (lambda: rotary.apply_rotary_emb(rows(2, 5, 1, 8).int(), *TABLES), DtypeError,
             "x: expected a floating dtype, got torch.int32"),
    "ints of qkv": (lambda: rotary.apply_rotary_emb_qkv_(rows(2, 5, 3, 1, 8).int(), *TABLES), DtypeError,
                    "qkv: expected a floating dtype"),
    "ints of kv": (lambda: rotary.apply_rotary_emb_kv_(rows(2, 5, 2, 1, 8).int(), *TABLES), DtypeError, "kv: expected a float"),
    "no tensor": (lambda: rotary.apply_rotary_emb([1.0], *TABLES), DtypeError, "x: expected a torch.Tensor, got list"),
    "packed rows without their lengths": (lambda: rotary.apply_rotary_emb(rows(5, 2, 8), *TABLES), ShapeError,
                                          r"x: expected \(batch, seqlen, heads, dim\), got shape \(5, 2, 8\)"),
    "lengths": (lambda: rotary.apply_rotary_emb(rows(5, 1, 8), *TABLES, cu_seqlens=5), DtypeError,
                "cu_seqlens: expected a torch.Tensor, got int"),
    "three dims of cos": (lambda: rotary.apply_rotary_emb(rows(2, 5, 1, 8), *(x[None] for x in TABLES)), ShapeError,
                          r"cos: expected shape \(positions, rotary_dim / 2\), got shape \(1, 6, 4\)"),
    "no sin": (lambda: rotary.apply_rotary_emb(rows(2, 5, 1, 8), TABLES[0], None), DtypeError, "sin: expected a torch.Tensor"),
    "cos_k alone": (lambda: rotary.apply_rotary_emb_qkv_(rows(2, 5, 3, 1, 8), *TABLES, cos_k=TABLES[0]), ShapeError,
                    "sin_k: expected a tensor, since cos_k is given, got None. Pass both, or neither"),
    "short cos_k": (lambda: rotary.apply_rotary_emb_qkv_(rows(2, 5, 3, 1, 8), *TABLES, *(x[:3] for x in TABLES)), ShapeError,
                    r"cos_k: expected at least seqlen_offsets \+ seqlen = 5 rows, got 3"),
    "negative": (lambda: rotary.apply_rotary_emb(rows(2, 5, 1, 8), *TABLES, seqlen_offsets=-1), ValueRangeError,
                 "seqlen_offsets: expected an int >= 0, got -1"),
    "offsets of another batch": (lambda: rotary.apply_rotary_emb(rows(2, 5, 1, 8), *TABLES, False, False, CU_SEQLENS[:1]),
                                 ShapeError, r"seqlen_offsets: expected an int, or shape \(2,\), got shape \(1,\)"),
    "offsets of a packed batch": (lambda: rotary.apply_rotary_emb(rows(5, 1, 8), *TABLES, False, False, CU_SEQLENS, CU_SEQLENS),
                                  ShapeError, r"seqlen_offsets: expected an int, or shape \(1,\), got shape \(2,\)"),
    "offsets that are no ints": (lambda: rotary.apply_rotary_emb(rows(2, 5, 1, 8), *TABLES, seqlen_offsets=torch.zeros(2)),
                                 DtypeError, "seqlen_offsets: expected dtype torch.int32 or torch.int64"),
    "an offset that is no int": (lambda: rotary.apply_rotary_emb(rows(2, 5, 1, 8), *TABLES, seqlen_offsets=1.5), DtypeError,
                                 "seqlen_offsets: expected an int or a tensor of ints, got 1.5"),
    "offset of the module": (lambda: rotary.RotaryEmbedding(8)(rows(2, 5, 3, 1, 8), seqlen_offset=-1), ValueRangeError,
                             "seqlen_offset: expected an int >= 0, got -1"),
    "q of the module": (lambda: rotary.RotaryEmbedding(8)(rows(5, 1, 8), rows(2, 5, 2, 1, 8)), ShapeError,
                        r"qkv: expected \(batch, seqlen, heads, dim\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_rotary_of_wrong_arguments(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_a_refused_table_of_keys_leaves_the_queries():
    qkv = torch.randn(2, 5, 3, 1, 8)
    before = qkv.clone()
    with pytest.raises(ShapeError, match="cos_k: expected at most 4 columns"):
        rotary.apply_rotary_emb_qkv_(qkv, *TABLES, torch.ones(6, 5), torch.ones(6, 5))
    assert torch.equal(qkv, before)


def test_rows_before_the_tables_stay():
    x, angles = torch.randn(1, 4, 1, 8), torch.rand(5, 4)
    out = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([-2]))
    assert torch.equal(out[:, :2], x[:, :2])
    assert torch.equal(out[:, 2:], rotary.apply_rotary_emb(x[:, 2:], angles.cos(), angles.sin()))


@pytest.mark.parametrize("mask", [torch.ones(2, 15), torch.ones(30), None], ids=["short", "flat", "none"])
def test_a_mask_of_other_rows_is_refused(mask):
    """Its indices would name rows of other sequences."""
    error = DtypeError if mask is None else ShapeError
    for function in (bert_padding.unpad_input, bert_padding.unpad_input_for_concatenated_sequences):
        with pytest.raises(error, match="attention_mask"):
            function(torch.randn(2, 16, 4), mask)


@pytest.mark.parametrize("parts_of", [
    lambda qkv: (qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]), lambda qkv: qkv.unbind(2),
    lambda qkv: [x.squeeze(2) for x in qkv.chunk(3, 2)],
], ids=["index", "unbind", "chunk"])  # fmt: skip
def test_queries_and_keys_of_one_tensor_are_rotated_in_place_in_training(parts_of):
    """Autograd would take the rotation of the one for a change of the other."""
    x, angles = torch.randn(2, 5, 3, 2, 16, requires_grad=True), torch.rand(9, 8)
    results = []
    for inplace in (True, False):
        q, k, v = parts_of(x * 1)
        q, k = (rotary.apply_rotary_emb(part, angles.cos(), angles.sin(), inplace=inplace) for part in (q, k))
        out = flash_attn_func(q, k, v, causal=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_rotary_in_place_of_an_inference_tensor():
    angles = torch.rand(9, 8)
    with torch.inference_mode():
        x = torch.randn(2, 5, 2, 16)
        expected = rotary.apply_rotary_emb(x, angles.cos(), angles.sin())
        assert torch.equal(rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), inplace=True), expected)


@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_tables_are_made_of_the_buffers(scale_base):
    """Longer contexts by a change of inv_freq; a module in 16 bits has the tables of one in fp32."""
    x = torch.randn(1, 6, 3, 2, 16)
    modules = [rotary.RotaryEmbedding(8, scale_base=scale_base) for _ in range(3)]
    modules[1].inv_freq /= 4
    modules[2].bfloat16()
    plain, stretched, cast = (module(x.clone()) for module in modules)
    assert torch.equal(plain, cast)
    positions, half = torch.arange(6.0)[:, None] / 4, x[0, :, 0, 0]
    if scale_base is None:
        cos, sin = (f(positions * 10000.0 ** (-torch.arange(0, 8, 2) / 8)) for f in (torch.cos, torch.sin))
        first = half[:, :4] * cos - half[:, 4:8] * sin
        torch.testing.assert_close(stretched[0, :, 0, 0, :4], first)
    assert not torch.equal(plain, stretched)


def test_an_expanded_cache_of_strided_rows_is_refused_before_anything_is_written():
    """A copy of it has slots of its own; what is appended there could not go back."""
    cache = torch.zeros(1, 8, 16, 2).transpose(2, 3).expand(2, 8, 2, 16)
    new = torch.ones(2, 1, 2, 16)
    values = cache.clone(memory_format=torch.contiguous_format)
    with pytest.raises(ShapeError, match="^k_cache: expected slots of their own"):
        flash_attn_with_kvcache(torch.zeros(2, 1, 2, 16), cache, values, k=new, v=new,
                                cache_seqlens=torch.tensor([3, 4], dtype=torch.int32))  # fmt: skip
    assert not values.any()
