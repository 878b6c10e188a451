"""What a call is found to be, how much work it is, and what is said about a wrong one."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashtile
from flashtile import hardware
from flashtile.errors import DeviceError, DtypeError, FlashtileError, ShapeError, UnsupportedError, ValueRangeError
from flashtile.problem import INT32_MAX, AttentionProblem, Operands, check_arguments, visible_pairs
from flashtile.reference import masks

OPTIONS = dict(
    causal=False, window=(None, None), softmax_scale=None, softcap=0.0, dropout_p=0.0, deterministic=False, return_lse=False
)


def describe(*, causal=False, window=(None, None), **changes):
    """AttentionProblem of a small call, checked the way the op does it; changes are tensors and options."""
    operands = Operands(**({name: torch.zeros(2, 5, 4, 16) for name in "qkv"} | tensors_of(changes)))
    options = OPTIONS | {"causal": causal, "window": window} | changes
    check_arguments(operands, **options)
    return AttentionProblem.from_tensors(operands, **options)


def describe_packed(**changes):
    """The same for sequences of 3 and 5 tokens in tensors of 9 rows."""
    tensors = {name: torch.zeros(9, 4, 16) for name in "qkv"}
    tensors |= {"cu_seqlens_q": int32(0, 3, 8), "cu_seqlens_k": int32(0, 3, 8), "max_seqlen_q": 5, "max_seqlen_k": 5}
    return describe(**(tensors | changes))


def tensors_of(changes):
    return {name: changes.pop(name) for name in Operands._fields if name in changes}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# Work

SIDES = st.none() | st.integers(0, 14)


@given(seqlen_q=st.integers(0, 12), seqlen_k=st.integers(0, 12), window=st.tuples(SIDES, SIDES))
def test_visible_pairs_counts_the_mask(seqlen_q, seqlen_k, window):
    rows, cols = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    mask = masks.visible(rows, cols, seqlen_k - seqlen_q, window)
    assert visible_pairs(seqlen_q, seqlen_k, window) == (seqlen_q * seqlen_k if mask is None else int(mask.sum()))


@given(seqlen_q=st.integers(1, 12), seqlen_k=st.integers(0, 12), window=st.tuples(SIDES, SIDES), causal=st.booleans())
def test_simplified_window_hides_the_same(seqlen_q, seqlen_k, window, causal):
    q, kv = torch.zeros(1, seqlen_q, 1, 8), torch.zeros(1, seqlen_k, 1, 8)
    problem = describe(q=q, k=kv, v=kv, window=window, causal=causal)
    assert problem.visible_pairs() == visible_pairs(seqlen_q, seqlen_k, (window[0], 0) if causal else window)


def test_work_of_a_call():
    problem = describe(q=torch.zeros(2, 5, 4, 16), k=torch.zeros(2, 7, 2, 16), v=torch.zeros(2, 7, 2, 24), causal=True)
    # row i of 5 sees 3 + i of 7 keys: 3 + 4 + 5 + 6 + 7
    assert problem.visible_pairs() == 2 * 25
    assert problem.flops("fwd") == 50 * 4 * (2 * 16 + 2 * 24)
    assert problem.flops("bwd") == 50 * 4 * (6 * 16 + 4 * 24)
    assert problem.flops("fwd_bwd") == problem.flops("fwd") + problem.flops("bwd")
    assert problem.visible_pairs([(1, 7), (5, 7)]) == 7 + 25
    q, k, v, out, lse = 2 * 5 * 4 * 16, 2 * 7 * 2 * 16, 2 * 7 * 2 * 24, 2 * 5 * 4 * 24, 2 * 5 * 4
    assert problem.bytes_moved("fwd") == 4 * (q + k + v + out + lse)
    assert problem.bytes_moved("bwd") == 4 * (2 * (q + k + v + out) + lse)
    assert problem.bytes_moved("fwd_bwd") == problem.bytes_moved("fwd") + problem.bytes_moved("bwd")


def test_keys_that_a_window_hides_are_not_read():
    """Two queries at the end of 100 keys see 6 of them; their gradients are written whole."""
    q, kv = torch.zeros(1, 2, 1, 8), torch.zeros(1, 100, 1, 8)
    problem = describe(q=q, k=kv, v=kv, window=(4, 0))
    rows, lse = 4 * 2 * 8, 4 * 2
    assert problem.bytes_moved("fwd") == 2 * rows + 2 * 4 * 6 * 8 + lse
    assert problem.bytes_moved("bwd") == 4 * rows + 2 * 4 * (6 + 100) * 8 + lse


# Description


def test_batched_call_is_described():
    problem = describe(q=torch.zeros(2, 5, 4, 16), k=torch.zeros(2, 7, 2, 16), v=torch.zeros(2, 7, 2, 24), window=(3, 1))
    assert dataclasses.asdict(problem) == dict(
        batch=2, seqlen_q=5, seqlen_k=7, num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=24, dtype=torch.float32,
        window=(3, 1), softmax_scale=0.25, softcap=0.0, dropout_p=0.0, has_alibi=False, has_sinks=False, deterministic=False,
        return_lse=False, total_q=None, total_k=None, has_seqused_q=False, has_seqused_k=False,
        same_lengths=False, wide_rows=False, unaligned=False,
    )  # fmt: skip
    assert (problem.varlen, problem.group_size, problem.lse_shape, problem.causal) == (False, 2, (2, 4, 5), False)
    assert describe(causal=True).causal and hash(problem) == hash(dataclasses.replace(problem))


def test_packed_call_is_described():
    problem = describe_packed(seqused_k=int32(3, 4), alibi_slopes=torch.ones(2, 4), sinks=torch.ones(4))
    assert (problem.batch, problem.seqlen_q, problem.total_q, problem.total_k) == (2, 5, 9, 9)
    assert (problem.varlen, problem.has_seqused_q, problem.has_seqused_k, problem.lse_shape) == (True, False, True, (4, 9))
    assert problem.has_alibi and problem.has_sinks
    # Of CPU tensors the values count, of others that they are one object
    assert not problem.same_lengths and not describe_packed(cu_seqlens_k=int32(0, 5, 9)).same_lengths
    assert describe_packed().same_lengths
    starts = int32(0, 4, 9)
    assert describe_packed(cu_seqlens_q=starts, cu_seqlens_k=starts).same_lengths
    assert not describe_packed(cu_seqlens_q=starts, cu_seqlens_k=starts, seqused_k=int32(3, 4)).same_lengths


def test_given_scale_zero_is_kept():
    assert describe(softmax_scale=0.0).softmax_scale == 0.0
    assert describe(softmax_scale=2).softmax_scale == 2
    # Of any size: torch takes an int for an int64
    assert all(isinstance(x, float) for x in (describe(softcap=10**38).softcap, describe(softmax_scale=10**30).softmax_scale))


def test_wide_rows_are_noticed():
    far_apart = torch.empty(2**23 + 64, dtype=torch.float16).as_strided((1, 3, 4, 16), (0, 2**22, 16, 1))
    near = torch.zeros(1, 3, 4, 16, dtype=torch.float16)
    assert not describe(q=near, k=near, v=near).wide_rows
    for name in "qkv":
        assert describe(**{n: far_apart if n == name else near for n in "qkv"}).wide_rows


# Errors


X = torch.zeros(2, 5, 4, 16)
PACKED = torch.zeros(9, 4, 16)
SLOPES = torch.ones(4)


def on_meta(x):
    return x.to("meta")


def on_xpu(x):
    """x on a device that no tier has, without one."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype, device="xpu")


def of_no_memory(batch, seqlen_q, heads):
    """A call of a few bytes."""
    q, kv = (torch.zeros(1, 1, 1, 8).expand(batch, rows, heads, 8) for rows in (seqlen_q, 1))
    return describe(q=q, k=kv, v=kv)


def test_max_seqlen_may_be_as_large_as_an_int32_where_no_sequence_is():
    assert describe_packed(max_seqlen_q=2**31 - 1, max_seqlen_k=2**31 - 1).seqlen_q == 2**31 - 1


TAKE_EARLIER = "Take it where the batch is packed: int(lengths.max()) waits for the device."

# What is called, the error, and all of its message.
WRONG_CALLS = [
    # Types
    (lambda: describe(q=[1.0]), DtypeError, "q: expected a torch.Tensor, got list."),
    (lambda: describe(v=None), DtypeError, "v: expected a torch.Tensor, got NoneType."),
    (lambda: describe(alibi_slopes=[0.5] * 4), DtypeError, "alibi_slopes: expected a torch.Tensor, got list."),
    (lambda: describe(causal=1), DtypeError, "causal: expected True or False, got 1."),
    (lambda: describe(deterministic=None), DtypeError, "deterministic: expected True or False, got None."),
    (lambda: describe(return_lse="yes"), DtypeError, "return_lse: expected True or False, got 'yes'."),
    (lambda: describe(softmax_scale=torch.ones(())), DtypeError,
     "softmax_scale: expected a number, got tensor(1.). Call .item() on a tensor once, outside the loop."),
    (lambda: describe(softcap=None), DtypeError,
     "softcap: expected a number, got None."),
    (lambda: describe(softcap=X.numpy()[0, 0, 0, 0]), DtypeError, f"softcap: expected a number, got {X.numpy()[0, 0, 0, 0]!r}. "
     "Use float(softcap)."),
    (lambda: describe(softmax_scale=10**400), ValueRangeError,
     f"softmax_scale: expected a finite number that fp32 holds, got {10**400}."),
    (lambda: describe(q=X.to_sparse()), UnsupportedError, "q: expected a dense tensor, got layout torch.sparse_coo. "
     "Use q.to_dense()."),
    (lambda: describe(max_seqlen_q=5), ShapeError,
     "cu_seqlens_q: expected a tensor, since there is a max_seqlen, got None. Use attention without."),
    (lambda: describe(k=X.transpose(1, 2), v=X.transpose(1, 2)), ShapeError,
     "q: expected heads that are a multiple of the heads of k and v, got 4 and 5. "
     "From (batch, heads, seqlen, dim) use x.transpose(1, 2)."),
    (lambda: describe(q=torch.zeros(2, 8, 100, 64), **dict.fromkeys("kv", torch.zeros(2, 8, 77, 64))), ShapeError,
     "q: expected heads that are a multiple of the heads of k and v, got 100 and 77. "
     "From (batch, heads, seqlen, dim) use x.transpose(1, 2)."),
    (lambda: describe(k=X[:, :, :3], v=X[:, :, :3]), ShapeError,
     "q: expected heads that are a multiple of the heads of k and v, got 4 and 3."),
    (lambda: flashtile.attention_varlen(X, X, X, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None),
     ShapeError, "cu_seqlens_q: expected a tensor of shape (batch + 1,), got None. A batch of one length: attention."),
    (lambda: describe(v=X[..., :12]), ShapeError,
     "v: expected a head dim of 8 to 256 in steps of 8, got 12. Pad with zeros to 16 and cut off out[..., 12:]."),
    (lambda: describe(dropout_p=True), DtypeError,
     "dropout_p: expected a number, got True."),
    (lambda: describe(window=4), DtypeError,
     "window: expected a pair (left, right) of int or None, got 4. Unbounded is (None, None)."),
    (lambda: describe(window=(1, 2, 3)), DtypeError,
     "window: expected a pair (left, right) of int or None, got (1, 2, 3). Unbounded is (None, None)."),
    (lambda: describe(window=(1.5, None)), DtypeError, "window left: expected an int or None, got 1.5."),
    (lambda: describe(window=(None, True)), DtypeError, "window right: expected an int or None, got True."),
    (lambda: describe_packed(max_seqlen_q=torch.tensor(5)), DtypeError,
     "max_seqlen_q: expected an int, got Tensor. " + TAKE_EARLIER),
    (lambda: describe_packed(max_seqlen_k=None), DtypeError,
     "max_seqlen_k: expected an int, got NoneType. " + TAKE_EARLIER),
    # Rank, device, dtype, strides
    (lambda: describe(q=X[0]), ShapeError,
     "q: expected 4 dims (batch, seqlen, heads, dim), got shape (5, 4, 16). Add a batch dim with x.unsqueeze(0)."),
    (lambda: describe(k=X[0, 0]), ShapeError, "k: expected 4 dims (batch, seqlen, heads, dim), got shape (4, 16)."),
    (lambda: describe_packed(v=X), ShapeError,
     "v: expected 3 dims (total, heads, dim), got shape (2, 5, 4, 16). Packed sequences have no batch dim: x.flatten(0, 1)."),
    (lambda: describe(k=on_meta(X)), DeviceError, "k: expected the device of q, cpu, got meta. Move it: k.to(q.device)."),
    (lambda: describe(v=X.double()), DtypeError,
     "v: expected the dtype of q, torch.float32, got torch.float64. Cast it: v.to(q.dtype)."),
    (lambda: describe(k=X.mT.contiguous().mT), ShapeError,
     "k: expected a contiguous last dim (stride 1), got strides (320, 64, 1, 4). "
     "Use k.contiguous(), or lay it out as (..., heads, dim)."),
    (lambda: describe(q=on_xpu(X), k=on_xpu(X), v=on_xpu(X)), DeviceError,
     "q: expected a CUDA or CPU tensor, got device xpu:0. Move it: q.to('cpu') or q.to('cuda')."),
    (lambda: describe(q=X.int(), k=X.int(), v=X.int()), DtypeError,
     "q: expected dtype float16, bfloat16, float32 or float64, got torch.int32. Cast q, k and v."),
    # Sizes
    (lambda: describe(k=X[:1]), ShapeError, "k: expected the batch of q, 2, got batch 1."),
    (lambda: describe(v=X[:, :4]), ShapeError,
     "v: expected the batch, seqlen and heads of k, (2, 5, 4), got shape (2, 4, 4, 16)."),
    (lambda: describe_packed(v=PACKED[:8]), ShapeError,
     "v: expected the total and heads of k, (9, 4), got shape (8, 4, 16)."),
    (lambda: describe(k=X[..., :8]), ShapeError, "k: expected the head_dim of q, 16, got head_dim 8."),
    (lambda: describe(k=X[:, :, :3], v=X[:, :, :3]), ShapeError,
     "q: expected heads that are a multiple of the heads of k and v, got 4 and 3."),
    (lambda: describe(k=X[:, :, :0], v=X[:, :, :0]), ShapeError,
     "q: expected heads that are a multiple of the heads of k and v, got 4 and 0."),
    (lambda: describe(q=X[..., :12], k=X[..., :12]), ShapeError,
     "q: expected a head dim of 8 to 256 in steps of 8, got 12. Pad with zeros to 16 and pass softmax_scale."),
    (lambda: describe(q=torch.zeros(2, 5, 4, 16, dtype=torch.int64)), DtypeError,
     "q: expected dtype float16, bfloat16, float32 or float64, got torch.int64. Cast q, k and v."),
    (lambda: describe(v=torch.zeros(2, 5, 4, 264)), ShapeError,
     "v: expected a head dim of 8 to 256 in steps of 8, got 264. For wider heads use F.scaled_dot_product_attention."),
    (lambda: of_no_memory(2**16, 2**16, 16), ShapeError,
     "batch * heads * seqlen: expected at most 2147483647 tiles of 16 rows, got 4294967296. Split the batch."),
    # No whole tile has fewer rows
    (lambda: of_no_memory(2**31 + 8, 1, 1), ShapeError,
     "batch * heads * seqlen: expected at most 2147483647 tiles of 16 rows, got 2147483656. Split the batch."),
    (lambda: of_no_memory(1, 2**31 - 64, 1), ShapeError,
     "seqlen: expected at most 2147483392, got 2147483584. Split the sequences, and combine the results."),
    # Index tensors
    (lambda: describe_packed(cu_seqlens_q=None), ShapeError,
     "cu_seqlens_q: expected a tensor, since cu_seqlens_k is given, got None. Pass both, or neither."),
    (lambda: describe_packed(cu_seqlens_k=None), ShapeError,
     "cu_seqlens_k: expected a tensor, since cu_seqlens_q is given, got None. Pass both, or neither."),
    (lambda: describe_packed(cu_seqlens_q=int32(0, 3, 8).long()), DtypeError,
     "cu_seqlens_q: expected dtype torch.int32, got torch.int64. Cast it: cu_seqlens_q.to(torch.int32)."),
    (lambda: describe_packed(cu_seqlens_k=on_meta(int32(0, 3, 8))), DeviceError,
     "cu_seqlens_k: expected the device of q, cpu, got meta. Move it: cu_seqlens_k.to(q.device)."),
    (lambda: describe_packed(cu_seqlens_q=int32(0, 3, 8)[None]), ShapeError,
     "cu_seqlens_q: expected shape (batch + 1,), got shape (1, 3)."),
    (lambda: describe_packed(cu_seqlens_k=int32(0, 8)), ShapeError, "cu_seqlens_k: expected shape (3,), got shape (2,)."),
    (lambda: describe_packed(cu_seqlens_q=int32(0, 0, 3, 3, 8, 8)[::2]), ShapeError,
     "cu_seqlens_q: expected a contiguous last dim (stride 1), got strides (2,). Use cu_seqlens_q.contiguous()."),
    (lambda: describe_packed(cu_seqlens_q=int32(0)), ShapeError,
     "cu_seqlens_q: expected shape (batch + 1,) with batch >= 1, got shape (1,)."),
    (lambda: describe_packed(max_seqlen_q=-1), ValueRangeError,
     f"max_seqlen_q: expected 0 <= max_seqlen_q <= {INT32_MAX}, got -1."),
    (lambda: describe_packed(max_seqlen_k=2**31), ValueRangeError,
     f"max_seqlen_k: expected 0 <= max_seqlen_k <= {INT32_MAX}, got {2**31}."),
    (lambda: describe_packed(cu_seqlens_q=int32(1, 3, 8)), ValueRangeError,
     "cu_seqlens_q: expected a first entry of 0, got 1."),
    (lambda: describe_packed(cu_seqlens_k=int32(0, 5, 3)), ValueRangeError,
     "cu_seqlens_k: expected entries that do not decrease, got 5 then 3 at 2."),
    (lambda: describe_packed(cu_seqlens_k=int32(0, 5, 10)), ValueRangeError,
     "cu_seqlens_k: expected a last entry of at most the packed total 9, got 10."),
    (lambda: describe_packed(max_seqlen_q=4), ValueRangeError,
     "max_seqlen_q: expected at least the longest sequence, 5, got 4."),
    (lambda: describe(seqused_k=int32(3, 3)), ShapeError,
     "seqused_k: expected cu_seqlens_q and cu_seqlens_k beside it, got a batched call. Use attention_varlen."),
    (lambda: describe_packed(seqused_q=int32(3, 3, 3)), ShapeError, "seqused_q: expected shape (2,), got shape (3,)."),
    (lambda: describe_packed(seqused_q=int32(3, 6)), ValueRangeError,
     "seqused_q[1]: expected 0 to the sequence's length 5, got 6."),
    (lambda: describe_packed(seqused_k=int32(-1, 5)), ValueRangeError,
     "seqused_k[0]: expected 0 to the sequence's length 3, got -1."),
    # Slopes and sinks
    (lambda: describe(alibi_slopes=SLOPES.half()), DtypeError,
     "alibi_slopes: expected dtype torch.float32, got torch.float16. Cast them: alibi_slopes.float()."),
    (lambda: describe(alibi_slopes=torch.ones(3, 4)), ShapeError,
     "alibi_slopes: expected shape (4,) or (2, 4), got shape (3, 4)."),
    (lambda: describe(sinks=torch.ones(4, dtype=torch.int32)), DtypeError,
     "sinks: expected a floating dtype, got torch.int32."),
    (lambda: describe(sinks=torch.ones(1)), ShapeError, "sinks: expected shape (4,), one logit a query head, got shape (1,)."),
    (lambda: describe(sinks=on_meta(SLOPES)), DeviceError,
     "sinks: expected the device of q, cpu, got meta. Move it: sinks.to(q.device)."),
    (lambda: describe(alibi_slopes=torch.ones(4, 2).T), ShapeError,
     "alibi_slopes: expected a contiguous last dim (stride 1), got strides (1, 2). Use alibi_slopes.contiguous()."),
    # Numbers
    (lambda: describe(window=(-1, None)), ValueRangeError,
     "window left: expected a number of keys >= 0, or None for unbounded, got -1. flash_attn's -1 is None here."),
    (lambda: describe(window=(None, 2**31)), ValueRangeError,
     f"window right: expected a number of keys >= 0, or None for unbounded, got {2**31}. flash_attn's -1 is None here."),
    (lambda: describe(softmax_scale=math.inf), ValueRangeError,
     "softmax_scale: expected a finite number that fp32 holds, got inf."),
    (lambda: describe(softmax_scale=math.nan), ValueRangeError,
     "softmax_scale: expected a finite number that fp32 holds, got nan."),
    (lambda: describe(softmax_scale=1e-46), ValueRangeError,
     "softmax_scale: expected a finite number that fp32 holds, got 1e-46."),
    (lambda: describe(softcap=1e39), ValueRangeError,
     "softcap: expected a finite number >= 0 that fp32 holds (0 is off), got 1e+39."),
    (lambda: describe(softcap=-1.0), ValueRangeError,
     "softcap: expected a finite number >= 0 that fp32 holds (0 is off), got -1.0."),
    (lambda: describe(softcap=math.inf), ValueRangeError,
     "softcap: expected a finite number >= 0 that fp32 holds (0 is off), got inf."),
    (lambda: describe(dropout_p=1.0), ValueRangeError,
     "dropout_p: expected 0 <= dropout_p < 1, got 1.0. Drop nothing in evaluation: 0.0."),
    (lambda: describe(dropout_p=math.nan), ValueRangeError,
     "dropout_p: expected 0 <= dropout_p < 1, got nan. Drop nothing in evaluation: 0.0."),
]  # fmt: skip


@pytest.mark.parametrize("call, error, message", WRONG_CALLS, ids=[message.split(", got")[0] for _, _, message in WRONG_CALLS])
def test_wrong_call_is_explained(call, error, message):
    with pytest.raises(FlashtileError) as raised:
        call()
    assert type(raised.value) is error
    assert str(raised.value) == message


def test_errors_are_builtin_errors_too():
    assert all(issubclass(error, ValueError) for error in (ShapeError, DeviceError, ValueRangeError))
    assert issubclass(DtypeError, TypeError) and issubclass(UnsupportedError, NotImplementedError)


@pytest.mark.parametrize(("name", "num_sms", "gib", "known"), [
    ("NVIDIA H100 80GB HBM3", 132, 79.1, "H100"), ("NVIDIA H100 PCIe", 114, 79.1, None),
    ("NVIDIA H200", 132, 139.8, "H200"), ("NVIDIA H200 MIG 1g.18gb", 16, 16.0, None),
])  # fmt: skip
def test_peaks_are_those_of_the_product(name, num_sms, gib, known, monkeypatch):
    properties = SimpleNamespace(name=name, major=9, minor=0, multi_processor_count=num_sms, L2_cache_size=50 << 20,
                                 total_memory=int(gib * 2**30))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    device = hardware._detect_gpu.__wrapped__(0)
    assert (device.name, device.num_sms) == (known or name, num_sms)
    assert device.peak_tflops == (hardware.DEVICES[known].peak_tflops if known else ())


@pytest.mark.gpu
def test_float64_is_refused_on_a_gpu():
    x = torch.zeros(1, 5, 2, 16, dtype=torch.float64, device="cuda")
    with pytest.raises(UnsupportedError, match="float64 is for CPU tensors"):
        flashtile.attention(x, x, x)


@pytest.mark.gpu
def test_index_values_on_a_gpu_are_read_only_with_debug(monkeypatch):
    wrong = {"cu_seqlens_q": int32(0, 5, 3).cuda(), "cu_seqlens_k": int32(0, 3, 8).cuda()}
    x = PACKED.cuda()
    assert describe_packed(q=x, k=x, v=x, **wrong).varlen
    monkeypatch.setenv("FLASHTILE_DEBUG", "1")
    with pytest.raises(ValueRangeError, match="cu_seqlens_q: expected entries that do not decrease"):
        describe_packed(q=x, k=x, v=x, **wrong)
