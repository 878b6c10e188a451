"""The public functions of latent attention decode: signature, docstring, and one call to an op. Read problem.py next."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtile.calls import again
from flashtile.checks import check_bool, check_int, check_int32, check_number, check_tensor, shape_of
from flashtile.errors import DeviceError, DtypeError, ShapeError, explain
from flashtile.mla import ops
from flashtile.mla.problem import HEAD_DIM_V, MAX_KEYS, MlaOperands, dtypes_on
from flashtile.problem import autocast, check_no_gradients, is_autocast


@dataclass(frozen=True)
class Schedule:
    """Which programs read which keys, for `mla_decode`: made by `make_schedule` once a step, good for all layers.

    table: int32, on the device of the lengths; see flashtile/mla/schedule.py. It belongs to the values of the lengths that it
    was made from, and to these shapes; a captured CUDA graph makes it anew at each replay if it was made inside.
    """

    table: Tensor
    num_sequences: int
    num_rows: int
    num_heads_kv: int


def make_schedule(
    cache_seqlens: Tensor | None = None, *, num_heads: int, seqlen_q: int = 1, num_heads_kv: int = 1,
    indices: Tensor | None = None, topk_length: Tensor | None = None,
) -> Schedule:  # fmt: skip
    """Cut the work of a decode step into even parts, on the device: one small launch, no wait.

    Args:
        cache_seqlens: (batch,), int32, as `mla_decode` will take it; None with indices.
        num_heads: query heads of q.
        seqlen_q: query tokens a sequence; with indices that of the indices counts.
        num_heads_kv: latent heads of the cache.
        indices: (batch, seqlen_q, topk), int32, for sparse decode; only its shape and device are used.
        topk_length: (batch,), int32, or None.
    Returns:
        Schedule, for `mla_decode` calls of these shapes while the lengths keep their values.
    Raises:
        ShapeError, DtypeError, DeviceError: which argument, what was expected, what came.
    """
    if (cache_seqlens is None) == (indices is None):
        raise ShapeError(explain("cache_seqlens", "a tensor, or None and indices", "both" if indices is not None else None))
    _check_tensors(cache_seqlens=cache_seqlens, indices=indices, topk_length=topk_length)
    for name, number in (("num_heads", num_heads), ("seqlen_q", seqlen_q), ("num_heads_kv", num_heads_kv)):
        check_int(name, number)
    if indices is None:
        check_int32("cache_seqlens", cache_seqlens, cache_seqlens.device, (None,))
        if topk_length is not None:
            raise ShapeError(explain("topk_length", "None without indices", shape_of(topk_length)))
        if seqlen_q < 1:
            raise ShapeError(explain("seqlen_q", "at least 1", seqlen_q))
    else:
        check_int32("indices", indices, indices.device, (None, None, None))
        if topk_length is not None:
            check_int32("topk_length", topk_length, indices.device, (indices.shape[0],), of="indices")
    lengths = topk_length if cache_seqlens is None else cache_seqlens
    if num_heads_kv < 1:
        raise ShapeError(explain("num_heads_kv", "at least 1", num_heads_kv))
    if num_heads < 1 or num_heads % num_heads_kv:
        raise ShapeError(explain("num_heads", f"a multiple of num_heads_kv, {num_heads_kv}", num_heads))
    num_rows = num_heads // num_heads_kv
    if indices is None:
        num_sequences, fixed_length, repeat = lengths.shape[0], MAX_KEYS, 1
        num_rows *= seqlen_q
    else:
        repeat, fixed_length = indices.shape[1:]
        num_sequences = indices.shape[0] * repeat
    like = cache_seqlens if indices is None else indices
    table = ops.schedule_op(like, lengths, fixed_length, num_sequences, repeat, num_rows, num_heads_kv)
    return Schedule(table, num_sequences, num_rows, num_heads_kv)


def mla_decode(
    q: Tensor, kv_cache: Tensor, *, block_table: Tensor | None = None, cache_seqlens: Tensor | None = None,
    indices: Tensor | None = None, topk_length: Tensor | None = None, head_dim_v: int = HEAD_DIM_V,
    softmax_scale: float | None = None, causal: bool = False, sinks: Tensor | None = None, return_lse: bool = False,
    schedule: Schedule | None = None,
) -> Any:  # fmt: skip
    """Attention of a few query tokens over a latent cache that all query heads share, in its absorbed form.

    Keys are the 576 (or 512) numbers that the cache holds a token, values their first 512. See flashtile/reference/mla.py for
    how that follows from a model's own keys and values. Not differentiable. Inside torch.autocast q is cast to the
    cache's dtype, with a packed cache to autocast's.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), bf16 or fp16 (on a CPU also fp32, fp64), last dim contiguous; seqlen_q 1 to
            8 (any with indices), num_heads 1 to 128, head_dim 576 or 512.
        kv_cache: (num_pages, page_size, num_heads_kv, head_dim), q's dtype, last dim contiguous, other strides free; any page
            size (of caches of 32 GiB and more Hopper's fast kernel takes multiples of 64 only). Or uint8, int8 or e4m3
            (num_pages, page_size, num_heads_kv, 656), as `flashtile.mla.pack_fp8` makes it, for a head_dim of 576.
            num_heads % num_heads_kv == 0.
        block_table: (batch, max_pages), int32: the pages of each sequence. Entries past a sequence's length may be anything,
            and slots past it may hold NaN. Entries that lead outside the cache are limited to its pages.
        cache_seqlens: (batch,), int32: tokens in the cache, those of q included; 0 is allowed.
        indices: (batch, seqlen_q, topk), int32, instead of block_table and cache_seqlens: sparse decode over these slots of
            the cache, page * page_size + offset; entries that are no slot, such as -1, are left out. In any order; in a large
            cache ascending ones are looked up fastest.
        topk_length: (batch,), int32: of the indices only so many count; default all.
        head_dim_v: 512.
        softmax_scale: multiplies q kᵀ; default head_dim ** -0.5. Models mean the head dim of the unabsorbed form: pass
            192 ** -0.5 for DeepSeek's.
        causal: hide keys after the query; the last query token stands at the last key.
        sinks: (num_heads,), floating; one more logit a head in the denominator only.
        return_lse: also return the log-sum-exp of each row.
        schedule: of `make_schedule`, to share it between layers; default: made in this call.
    Returns:
        out (batch, seqlen_q, num_heads, 512), q.dtype; with return_lse also lse (batch, num_heads, seqlen_q), fp32 (fp64 for
        fp64), natural log, sinks included, strided. A row with no visible key gives out 0 and lse -inf (or its sink).
    Raises:
        ShapeError, DtypeError, DeviceError, ValueRangeError: which argument, what was expected, what came. The values of
            index tensors are checked for CPU tensors, and everywhere with FLASHTILE_DEBUG=1.
        UnsupportedError: no tier takes the problem, or a tensor requires a gradient; lists each refusal.
    Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1; the shapes and the packed layout are FlashMLA's.
    """
    if not isinstance(schedule, Schedule | None):
        raise DtypeError(explain("schedule", "a Schedule of make_schedule", type(schedule).__name__))
    table = None if schedule is None else schedule.table
    operands = MlaOperands(q, kv_cache, block_table, cache_seqlens, indices, topk_length, sinks, table)
    options = head_dim_v, softmax_scale, causal, True
    call = ops.known(operands, options)
    if call is None:
        check_types(causal, softmax_scale, head_dim_v, **operands._asdict())
        check_bool("return_lse", return_lse)
        check_no_gradients("mla_decode", (q, kv_cache, sinks))
        if is_autocast(q):
            # The cache stays what it is: packed, or of a dtype that is refused by its name
            has_dtype = kv_cache.dtype in dtypes_on(q.device)
            q = autocast(q, kv_cache.dtype if has_dtype else torch.get_autocast_dtype(q.device.type))
            operands = operands._replace(q=q)
    if schedule is not None:
        _check_schedule(schedule, q, kv_cache, indices)
    out, lse = ops.decode_op(*operands, *options) if call is None else again(call, operands)
    return (out, lse) if return_lse else out


def _check_tensors(**tensors) -> None:
    for name, x in tensors.items():
        if x is not None or name in ("q", "kv_cache"):
            check_tensor(name, x)


def check_types(causal, softmax_scale, head_dim_v, **tensors) -> None:
    """What the op's schema would refuse without our words."""
    _check_tensors(**tensors)
    check_int("head_dim_v", head_dim_v)
    check_bool("causal", causal)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)


def _check_schedule(schedule, q, kv_cache, indices) -> None:
    if q.dim() != 4 or kv_cache.dim() != 4:
        return
    batch, seqlen_q, num_heads, _ = q.shape
    heads_kv = kv_cache.shape[2]
    rows = num_heads // max(1, heads_kv)
    wanted = (batch, rows * seqlen_q, heads_kv) if indices is None else (batch * seqlen_q, rows, heads_kv)
    made_for = schedule.num_sequences, schedule.num_rows, schedule.num_heads_kv
    if made_for != wanted:
        names = "sequences", "rows a sequence", "latent heads"
        name, want, got = next(x for x in zip(names, wanted, made_for) if x[1] != x[2])
        raise ShapeError(explain("schedule", f"one for {want} {name}", got, "Make one for these shapes: make_schedule."))
    if schedule.table.device != q.device:
        raise DeviceError(explain("schedule", f"one on the device of q, {q.device}", schedule.table.device))
