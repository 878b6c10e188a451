"""flashtile under what torch does to programs: compile, export, autocast, checkpoints, FLOP counting, transforms, no data."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile import DtypeError, UnsupportedError, ops
from flashtile.problem import visible_pairs


def qkv(seqlen=16, heads_kv=2, dtype=torch.float32, requires_grad=True, device="cpu", batch=2):
    shapes = [(batch, seqlen, 4, 16), (batch, seqlen, heads_kv, 16), (batch, seqlen, heads_kv, 16)]
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad, device=device) for shape in shapes]


class Block(torch.nn.Module):
    """Projections around attention, so that q, k and v are strided views, as in a model."""

    def __init__(self, call):
        super().__init__()
        self.proj = torch.nn.Linear(32, 96)
        self.call = call

    def forward(self, x, *rest):
        q, k, v = self.proj(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        return self.call(q, k, v, *rest).flatten(-2)


def dense(q, k, v):
    return flashtile.attention(q, k, v, causal=True, window=(20, None), softcap=5.0)


def functions_of_fa2(q, k, v):
    return flashtile.flash_attn_func(q, k, v, causal=True, window_size=(20, -1), softcap=5.0)


def packed(q, k, v, cu_seqlens):
    longest = q.shape[0]
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)
    return flashtile.attention_varlen(q, k, v, **lengths, causal=True)


@pytest.mark.parametrize("call", [dense, functions_of_fa2], ids=["flashtile", "flash_attn"])
def test_compile_has_one_graph_for_all_lengths(call):
    """The first length has a graph of its own, the second one for every later length; forward and backward agree."""
    torch._dynamo.reset()
    counter = CompileCounter()
    block = Block(call)
    counted = torch.compile(block, fullgraph=True, backend=counter)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for seqlen in (16, 24, 40, 7, 33, 64):
        x = torch.randn(2, seqlen, 32)
        counted(x)
        expected = block(x)
        got = compiled(x)
        torch.testing.assert_close(got, expected)
        wanted = torch.autograd.grad(expected.square().sum(), block.parameters())
        for a, b in zip(torch.autograd.grad(got.square().sum(), block.parameters()), wanted):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 2


def test_compile_packed_has_one_graph_for_all_totals():
    torch._dynamo.reset()
    counter = CompileCounter()
    block = Block(packed)
    counted = torch.compile(block, fullgraph=True, backend=counter)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for lengths in ((5, 9), (8, 0), (12, 3), (20, 30)):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        x = torch.randn(sum(lengths), 32)
        counted(x, cu_seqlens)
        torch.testing.assert_close(compiled(x, cu_seqlens), block(x, cu_seqlens))
    assert counter.frame_count == 2


@pytest.mark.parametrize("call", [dense, functions_of_fa2], ids=["flashtile", "flash_attn"])
def test_export_with_any_length(call):
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    program = torch.export.export(Block(call), (torch.randn(2, 16, 32),), dynamic_shapes=({1: seqlen},))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names.count("flashtile.forward.default") == 1
    block = Block(call)
    block.load_state_dict(program.state_dict)
    for n in (16, 50):
        x = torch.randn(2, n, 32)
        torch.testing.assert_close(program.module()(x), block(x))
    exported = program.module()
    exported(x).square().sum().backward()
    block(x).square().sum().backward()
    for got, want in zip(exported.parameters(), block.parameters()):
        torch.testing.assert_close(got.grad, want.grad)


def test_the_op_itself_has_gradients():
    """opcheck with inputs that need one; the op and the call without it agree to the bit."""
    q, k, v = qkv()
    sinks = torch.randn(4, requires_grad=True)
    options = (None, None, True, 5, None, 0.3, 2.0, 0.0, False, True)
    operands = (q, k, v, None, None, None, None, None, sinks, None)
    torch.library.opcheck(ops.forward_op, (*operands, *options))
    got = ops.forward_op(*operands, *options)
    want = flashtile.attention(q, k, v, causal=True, window=(5, None), softmax_scale=0.3, softcap=2.0, sinks=sinks,
                               return_lse=True)  # fmt: skip
    inputs = (q, k, v, sinks)
    gradients = [torch.autograd.grad(out.square().sum() + lse.sum(), inputs) for out, lse in (got, want)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    _, lse = ops.forward_op(*(x if x is None else x.detach() for x in operands[:8]), sinks, None, *options)
    assert torch.autograd.grad(lse.sum(), sinks)[0].abs().sum() > 0


def test_export_round_trip(tmp_path):
    program = torch.export.export(Block(dense), (torch.randn(2, 16, 32),))
    torch.export.save(program, tmp_path / "model.pt2")
    x = torch.randn(2, 16, 32)
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(x), program.module()(x))


def test_forward_mode_over_an_exported_program_is_refused():
    """It calls the op itself, of whose tangents torch has a word only where there are gradients too, and takes them for 0."""
    model = torch.export.export(Block(dense), (torch.randn(2, 16, 32),)).module().requires_grad_(False)
    x = torch.randn(2, 16, 32)
    with pytest.raises(flashtile.UnsupportedError, match="^attention: expected no tangents"):
        torch.func.jvp(model, (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(flashtile.UnsupportedError, match="^q: expected no tangent"):
            model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert model(x).isfinite().all()



@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_counted(causal):
    """Visible pairs, as `flashtile run` counts them: 2 products forward, 5 backward."""
    q, k, v = qkv(24)
    with FlopCounterMode(display=False) as counter:
        flashtile.attention(q, k, v, causal=causal).sum().backward()
    pairs = 2 * 4 * visible_pairs(24, 24, (None, 0 if causal else None))
    counts = counter.get_flop_counts()["Global"]
    assert counts == {torch.ops.flashtile.forward: 4 * 16 * pairs, torch.ops.flashtile.backward: 10 * 16 * pairs}


@pytest.mark.parametrize(("first", "then"), [
    ("flashtile.api", "flashtile.api"), ("torch.utils.flop_counter", "flashtile.api"),
    ("torch.utils.flop_counter", "flashtile"),
])  # fmt: skip
def test_flops_are_counted_whatever_is_imported_first(first, then):
    """And the counter, which imports triton, only where somebody asks for it.

    `import flashtile` alone registers no op, and a counter copies what it finds when it is made.
    """
    code = f"""
import sys
import {first}
import {then}
assert {first == "torch.utils.flop_counter"} or "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
import torch
with FlopCounterMode(display=False) as counter:
    flashtile.attention(*torch.randn(3, 1, 4, 2, 8).unbind(0))
print(counter.get_total_flops())
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert process.stdout.strip() == str(4 * 8 * 2 * 16), process.stderr


def test_flops_of_used_tokens():
    cu_seqlens, used = torch.tensor([0, 5, 14], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        flashtile.attention_varlen(*torch.randn(3, 14, 2, 16).unbind(0), cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
                                   max_seqlen_q=9, max_seqlen_k=9, seqused_q=used, seqused_k=used)  # fmt: skip
    assert counter.get_total_flops() == 4 * 16 * 2 * (4 + 9)


def test_flops_of_packed_sequences():
    """Those of the lengths, where they can be read; else those of sequences that are all as long as the longest."""
    cu_seqlens = torch.tensor([0, 5, 14], dtype=torch.int32)
    inputs = torch.randn(3, 14, 2, 16).unbind(0)
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=9, max_seqlen_k=9)
    with FlopCounterMode(display=False) as counter:
        flashtile.attention_varlen(*inputs, **lengths)
    assert counter.get_total_flops() == 4 * 16 * 2 * (25 + 81)
    lengths = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in lengths.items()}
    with FlopCounterMode(display=False) as counter:
        flashtile.attention_varlen(*(x.to("meta") for x in inputs), **lengths)
    assert counter.get_total_flops() == 4 * 16 * 2 * 2 * 81


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(dropout_p, use_reentrant):
    """Recomputed with the same dropout mask; gradients are those without a checkpoint."""
    inputs = qkv()

    def attend(q, k, v):
        return flashtile.attention(q, k, v, causal=True, dropout_p=dropout_p).square()

    gradients = []
    for run in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(run(*inputs).sum(), inputs) if not use_reentrant else backward(run, inputs))
    for got, want in zip(*gradients):
        assert torch.equal(got, want)


def backward(run, inputs):
    """Gradients by .backward(): checkpoint's older form knows no torch.autograd.grad."""
    for x in inputs:
        x.grad = None
    run(*inputs).sum().backward()
    return [x.grad for x in inputs]


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_traced_graphs_have_the_op(pre_dispatch):
    """Not what its body does for these lengths."""
    inputs = torch.randn(3, 9, 4, 16).unbind(0)
    cu_seqlens, others = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 2, 9], dtype=torch.int32)
    traced = make_fx(packed, pre_dispatch=pre_dispatch)(*inputs, cu_seqlens)
    torch.testing.assert_close(traced(*inputs, others), packed(*inputs, others))
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 8, 4, 16)
    traced = make_fx(lambda *x: flashtile.attention_with_kvcache(*x), pre_dispatch=pre_dispatch)(q, cache, cache)
    assert any(node.target is torch.ops.flashtile.kvcache.default for node in traced.graph.nodes)


@pytest.mark.parametrize("call", [
    lambda q, k, v: flashtile.attention(q, k, v, softmax_scale=q.shape[-1] ** -0.5),
    lambda q, k, v: flashtile.attention_with_kvcache(q, k, v, softmax_scale=q.shape[-1] ** -0.5),
    functions_of_fa2,
], ids=["attention", "attention_with_kvcache", "flash_attn"])  # fmt: skip
def test_scales_may_be_symbolic(call):
    inputs = qkv(requires_grad=False)
    traced = make_fx(call, tracing_mode="symbolic")(*inputs)
    torch.testing.assert_close(traced(*inputs), call(*inputs))


def test_selective_checkpoint_keeps_attention():
    """A policy may save what the op gave, so that only the rest is computed again."""
    inputs = qkv()
    runs = []

    def attend(q, k, v):
        runs.append(1)
        return flashtile.attention(q.sin(), k, v)

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == ops.forward_op else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    with FlopCounterMode(display=False) as counter:
        out = checkpoint(attend, *inputs, use_reentrant=False, context_fn=contexts)
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert len(runs) == 2
    assert counter.get_flop_counts()["Global"][torch.ops.flashtile.forward] == 4 * 16 * 2 * 4 * 16 * 16
    for got, want in zip(gradients, torch.autograd.grad(flashtile.attention(inputs[0].sin(), *inputs[1:]).sum(), inputs)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype(dtype):
    """As F.scaled_dot_product_attention does; gradients come in the inputs' dtype; fp64 stays."""
    inputs = qkv()
    with torch.autocast("cpu", dtype):
        out = flashtile.attention(*inputs)
        assert flashtile.attention(*qkv(dtype=torch.float64)).dtype == torch.float64
        functions = flashtile.flash_attn_func(*inputs)
    assert out.dtype == functions.dtype == dtype
    assert torch.equal(out, flashtile.attention(*(x.to(dtype) for x in inputs)))
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.sum(), inputs))


def test_autocast_leaves_a_cache_as_it_is():
    """q and what is appended come in its dtype; products are not rounded to autocast's."""
    q, k, v = (x.detach() for x in qkv())
    for dtype in (torch.bfloat16, torch.float32):
        caches = [torch.randn(q.shape[0], 32, *k.shape[2:]).to(dtype) for _ in range(2)]
        appended = [x.clone() for x in caches]
        want = flashtile.attention_with_kvcache(q.to(dtype), *caches, k=k.to(dtype), v=v.to(dtype), cache_seqlens=3)
        with torch.autocast("cpu", torch.bfloat16):
            got = flashtile.attention_with_kvcache(q.bfloat16() if dtype == torch.float32 else q, *appended, k=k, v=v,
                                                   cache_seqlens=3)  # fmt: skip
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        assert all(map(torch.equal, caches, appended))


@pytest.mark.parametrize("packed", [False, True])
def test_autocast_leaves_a_latent_cache_as_it_is(packed):
    q, cache = torch.randn(1, 1, 4, 576), torch.randn(2, 64, 1, 576).bfloat16()
    cache = flashtile.mla.pack_fp8(cache) if packed else cache
    options = dict(block_table=torch.tensor([[1, 0]], dtype=torch.int32), cache_seqlens=torch.tensor([70], dtype=torch.int32))
    want = flashtile.mla.mla_decode(q.bfloat16(), cache, **options)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flashtile.mla.mla_decode(q, cache, **options), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e5m2])
def test_autocast_blames_a_latent_cache_for_its_own_dtype(dtype):
    q, cache, lengths = torch.randn(1, 1, 4, 576), torch.zeros(1, 64, 1, 576).to(dtype), torch.ones(1, dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(DtypeError, match=f"kv_cache: expected the dtype of q.*{dtype}"):
        flashtile.mla.mla_decode(q, cache, block_table=lengths[None] - 1, cache_seqlens=lengths)


def test_autocast_is_compiled():
    inputs = qkv()

    def attend(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return flashtile.attention(q, k, v)

    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs), attend(*inputs))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_vmap_is_refused(requires_grad):
    inputs = [x[None].expand(3, *x.shape) for x in qkv(requires_grad=requires_grad)]
    with pytest.raises(UnsupportedError, match="torch.func.vmap.*flatten"):
        torch.func.vmap(flashtile.attention)(*inputs)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused(requires_grad):
    """A kernel would drop the tangent without a word."""
    q, k, v = qkv(requires_grad=requires_grad)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(UnsupportedError, match="k: expected no tangent.*reverse mode"):
            flashtile.attention(q, dual, v)
        assert flashtile.attention(q, k, v).shape == q.shape


@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_second_derivatives_are_refused_in_compiled_frames():
    q, k, v = qkv(requires_grad=False)
    torch._dynamo.reset()

    def gradient(q, create_graph):
        q = q.clone().requires_grad_()
        (dq,) = torch.autograd.grad(flashtile.attention(q, k, v).square().sum(), q, create_graph=create_graph)
        return dq.detach()

    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, False), gradient(q, False))
    with pytest.raises(Exception, match="first derivatives only, got create_graph=True"):
        compiled(q, True)


def test_second_derivatives_of_a_traced_backward_pass_are_refused():
    """It calls the ops by themselves; where gradients are enabled it still gives the first ones."""
    q, k, v = qkv()
    slopes, dout = torch.rand(4, requires_grad=True), torch.randn_like(q)

    def gradients(dout):
        out = flashtile.attention(q, k, v, alibi_slopes=slopes)
        return torch.autograd.grad(out, (q, k, v, slopes), dout)

    traced = make_fx(gradients)(dout)
    expected = gradients(dout)
    dout.requires_grad_()
    for got, want in zip(traced(dout), expected):
        torch.testing.assert_close(got, want)
        with pytest.raises(UnsupportedError, match="first derivatives only"):
            torch.autograd.grad(got.sum(), dout, retain_graph=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_of_calls_without_them_are_refused_in_compiled_frames(backend):
    """torch.func.grad's tensors don't show there that they want one."""
    q, k, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 8, 2, 16)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    latent, parts = torch.randn(1, 64, 1, 576), torch.zeros(3, 2, 4, 1)
    pages = dict(block_table=torch.zeros(1, 1, dtype=torch.int32), cache_seqlens=lengths[:1])

    def append(q):
        return flashtile.attention_with_kvcache(q, cache.clone(), cache.clone(), k=k, v=k, cache_seqlens=lengths)

    for x, call in (
        (q, lambda q: flashtile.attention_with_kvcache(q, cache, cache)),
        (q, append),
        (torch.randn(3, 2, 1, 4, 16), lambda out: flashtile.combine(out, parts)[0]),
        (torch.randn(1, 1, 4, 576), lambda q: flashtile.mla.mla_decode(q, latent, **pages)),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="expected tensors without gradients"):
            torch.compile(torch.func.grad(lambda x, call=call: call(x).square().sum()), backend=backend)(x)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(call, backend=backend, fullgraph=True)(x), call(x))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_forward_mode_is_refused_in_compiled_frames(fullgraph):
    q, k, v = qkv(requires_grad=False)
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=fullgraph)
    def tangent(attend):
        return torch.func.jvp(lambda q: attend(q, k, v), (q,), (q,))[1]

    message = "q: expected no tangent|a call outside of torch.func's transforms|tensors without tangents"
    for attend in (flashtile.attention, flashtile.attention_with_kvcache):
        with pytest.raises(Exception, match=message):
            tangent(attend)


def test_a_tangent_from_outside_of_a_compiled_function_is_refused():
    """Also where it was compiled before."""
    q, k, v = qkv(requires_grad=False)
    torch._dynamo.reset()
    compiled = torch.compile(flashtile.attention, backend="eager")
    compiled(q, k, v)
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(Exception, match="expected no tangent"):
            compiled(torch.autograd.forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("name", ["dout", "dlse"])
def test_tangents_of_the_backward_pass_are_refused(name):
    q, k, v = qkv()
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    result = out if name == "dout" else lse
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones_like(result), torch.ones_like(result))
        with pytest.raises(UnsupportedError, match=f"{name}: expected no tangent.*reverse mode"):
            torch.autograd.grad(result, q, dual, retain_graph=True)
        assert torch.autograd.grad(result, q, torch.ones_like(result))[0].shape == q.shape


def test_a_parameter_is_a_plain_tensor_and_a_subclass_is_not():
    """Subclasses beside plain q, k and v too: the op's dispatcher knows what they are, a kernel would read an address."""
    from flashtile.ops import unobserved
    from flashtile.problem import Operands

    class Wrapped(torch.Tensor):
        pass

    q, k, v = qkv(requires_grad=False)
    sinks = torch.zeros(q.shape[2])
    assert unobserved(Operands(q, k, v)) and unobserved(Operands(q, k, v, sinks=torch.nn.Parameter(sinks)))
    assert not unobserved(Operands(q, k, v, sinks=sinks.as_subclass(Wrapped)))


def test_other_transforms_are_refused():
    q, k, v = qkv(requires_grad=False)
    with pytest.raises(UnsupportedError, match="call torch.autograd.grad"):
        torch.func.grad(lambda q: flashtile.attention(q, k, v).sum())(q)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_meta_tensors(requires_grad):
    """Shapes, dtypes and errors without data or a device."""
    q, k, v = qkv(dtype=torch.bfloat16, device="meta", requires_grad=requires_grad)
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    assert out.is_meta and (out.shape, out.dtype, out.stride()) == (q.shape, q.dtype, q.stride())
    assert (lse.shape, lse.dtype) == ((2, 4, 16), torch.float32)
    if requires_grad:
        assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]
    with pytest.raises(flashtile.ShapeError, match="k: expected the batch of q"):
        flashtile.attention(q, k[:1], v[:1])


def test_fake_tensors_with_gradients():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q, k, v = qkv(dtype=torch.float16)
        out = flashtile.attention(q, k, v)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.shape == q.shape and [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_parameters_as_operands():
    """Learned keys and values; a subclass of Tensor goes through the op."""
    q, k, v = qkv(requires_grad=False)
    k, v = torch.nn.Parameter(k), torch.nn.Parameter(v)
    out = flashtile.attention(q, k, v)
    torch.testing.assert_close(out, flashtile.attention(q, k.detach(), v.detach()))
    assert all(x is not None for x in torch.autograd.grad(out.sum(), (k, v)))


def test_compile_of_self_attention_to_one_tensor():
    """The same tensor as q, k and v, with a gradient."""
    x = torch.randn(2, 9, 4, 16, requires_grad=True)

    def attend(x):
        return flashtile.attention(x, x, x, causal=True).square().sum()

    got = torch.autograd.grad(torch.compile(attend, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(got, torch.autograd.grad(attend(x), x))


def test_profiler_names_the_op():
    inputs = qkv(requires_grad=False)
    flashtile.attention(*inputs)
    with torch.profiler.profile() as profile:
        flashtile.attention(*inputs)
    assert "flashtile::forward" in [event.key for event in profile.key_averages()]


def test_saved_tensor_hooks_see_what_is_kept():
    """What torch.autograd.graph.save_on_cpu and its kin do: pack, unpack, and the same gradients."""
    inputs = qkv()
    expected = torch.autograd.grad(flashtile.attention(*inputs).square().sum(), inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True), torch.from_numpy):
        out = flashtile.attention(*inputs)
    for got, want in zip(torch.autograd.grad(out.square().sum(), inputs), expected):
        torch.testing.assert_close(got, want)
