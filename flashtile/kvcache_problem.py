"""CacheProblem: the frozen description of one call on a key-value cache; the sibling of AttentionProblem.

Its from_tensors is the only place that checks such a call. Imports neither triton nor a GPU.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from flashtile.checks import (
    check_bool,
    check_device,
    check_device_type,
    check_int,
    check_int32,
    check_last_dim,
    check_number,
    check_rank,
    check_scale,
    check_softcap,
    check_tensor,
    is_int,
    shape_of,
)
from flashtile.errors import DtypeError, ShapeError, UnsupportedError, ValueRangeError, explain
from flashtile.problem import (
    DTYPES,
    FP8,
    INT32_MAX,
    MAX_HEAD_DIM,
    WIDE_ROWS,
    AttentionProblem,
    CallShape,
    check_cu_seqlens_values,
    check_head_dims,
    check_no_gradients,
    check_per_head,
    checked_window,
    is_traced,
    is_unaligned,
    limited_window,
    values_readable,
    visible_pairs,
)

MAX_SPLITS = 256
# Each is a number in a register of its own
MAX_PAGES_OF_TILE = 4
# Rows of a cache that a TMA descriptor counts through
MAX_ROWS = 2**31 - 2**20


class CacheOperands(NamedTuple):
    """The tensors of one call on a cache; None where an option is off. Shapes as in `flashtile.attention_with_kvcache`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    # new keys and values
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class CacheOptions(NamedTuple):
    """What a call has beside tensors, in the order of the op."""

    max_seqlen_q: int | None
    rotary_interleaved: bool
    causal: bool
    window_left: int | None
    window_right: int | None
    softmax_scale: float | None
    softcap: float
    num_splits: int
    return_lse: bool

    @classmethod
    def of_call(cls, max_seqlen_q, rotary_interleaved, causal, window, *rest):
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise DtypeError(explain("window", "a pair (left, right) of int or None", repr(window),
                                     "Unbounded is (None, None)."))  # fmt: skip
        return cls(max_seqlen_q, rotary_interleaved, causal, *window, *rest)


@dataclass(frozen=True, slots=True)
class CacheProblem(CallShape):
    """One call on a cache without its data; lengths are on the device, so only their bound is known.

    capacity: tokens that a sequence can have. seqlen_q: queries of a sequence (the most of them in a packed call).
    """

    batch: int
    seqlen_q: int
    capacity: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    # None: one row of the cache a sequence
    page_size: int | None = None
    # of a batched k; packed ones have total_new
    seqlen_new: int = 0
    total_q: int | None = None
    total_new: int | None = None
    rotary_dim: int = 0
    rotary_interleaved: bool = True
    # query i is rotated by its own position, else all by that of the first
    rotary_moves: bool = False
    window: tuple[int | None, int | None] = (None, None)
    # None becomes head_dim ** -0.5
    softmax_scale: float | None = None
    softcap: float = 0.0
    num_splits: int = 0
    has_leftpad: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    has_descale: bool = False
    return_lse: bool = False
    # Offsets inside one tile exceed int32 (row strides of WIDE_ROWS elements and more).
    wide_rows: bool = False
    # Rows of the cache do not all begin at multiples of 16 bytes, or sequences or pages not at a multiple of rows.
    unaligned: bool = False
    # Of a packed call in parts (mixed.py) one has the sequences with least_q to seqlen_q queries
    least_q: int = 0

    @classmethod
    def from_tensors(cls, operands, options):
        """Check a call and describe it.

        Args:
            operands: CacheOperands. options: CacheOptions.
        Raises:
            ShapeError, DtypeError, DeviceError, ValueRangeError: which argument, what was expected, what came.
        """
        q, k_cache, v_cache = operands[:3]
        packed = operands.cu_seqlens_q is not None
        _check_rows("q", q, q, 3 if packed else 4, "(total_q, heads, dim)" if packed else "(batch, seqlen_q, heads, dim)")
        paged = operands.block_table is not None
        layout = "(pages, page_size, heads, dim)" if paged else "(batch_cache, seqlen_cache, heads, dim)"
        _check_rows("k_cache", k_cache, q, 4, layout)
        _check_rows("v_cache", v_cache, q, 4, layout)
        _check_dtypes(operands)
        _check_head_dims(q, k_cache, v_cache)
        if packed:
            check_int32("cu_seqlens_q", operands.cu_seqlens_q, q.device, ("batch + 1",))
            if operands.cu_seqlens_q.shape[0] < 2:
                raise ShapeError(explain("cu_seqlens_q", "shape (batch + 1,) with batch >= 1", shape_of(operands.cu_seqlens_q)))
            batch, seqlen_q = operands.cu_seqlens_q.shape[0] - 1, options.max_seqlen_q
            if not is_traced(seqlen_q) and not 0 <= seqlen_q <= INT32_MAX:
                raise ValueRangeError(explain("max_seqlen_q", f"0 <= max_seqlen_q <= {INT32_MAX}", seqlen_q))
        else:
            batch, seqlen_q = q.shape[:2]
        capacity = _check_cache(operands, batch)
        num_heads, head_dim = q.shape[-2:]
        num_heads_kv, head_dim_v = v_cache.shape[-2:]
        seqlen_new = _check_new(operands, batch)
        _check_lengths(operands, batch)
        rotary_dim = _check_rotary(operands, head_dim)
        _check_descales(operands, batch, num_heads_kv)
        check_per_head(operands, batch, num_heads)
        window = checked_window((options.window_left, options.window_right), options.causal, seqlen_q, capacity)
        if packed and not is_traced(q.shape[0], capacity):
            window = limited_window(window, max(q.shape[0], capacity))
        check_scale(options.softmax_scale)
        check_softcap(options.softcap)
        if not 0 <= options.num_splits <= MAX_SPLITS:
            raise ValueRangeError(explain("num_splits", f"0 (flashtile chooses) to {MAX_SPLITS}", options.num_splits))
        if values_readable(q):
            _check_values(operands, options, batch, seqlen_q, capacity, seqlen_new, window[0])
        row = 0 if packed else 1
        return cls(
            batch=batch, seqlen_q=seqlen_q, capacity=capacity, num_heads=num_heads, num_heads_kv=num_heads_kv,
            head_dim=head_dim, head_dim_v=head_dim_v, dtype=q.dtype, cache_dtype=k_cache.dtype,
            page_size=k_cache.shape[1] if paged else None, seqlen_new=seqlen_new,
            total_q=q.shape[0] if packed else None,
            total_new=None if operands.cu_seqlens_k_new is None else operands.k.shape[0], rotary_dim=rotary_dim,
            rotary_interleaved=options.rotary_interleaved,
            rotary_moves=rotary_dim > 0 and _moves(options), window=window,
            softmax_scale=options.softmax_scale, softcap=options.softcap, num_splits=options.num_splits,
            has_leftpad=operands.cache_leftpad is not None, has_alibi=operands.alibi_slopes is not None,
            has_sinks=operands.sinks is not None,
            has_descale=any(x is not None for x in (operands.q_descale, operands.k_descale, operands.v_descale)),
            return_lse=options.return_lse,
            wide_rows=max(q.stride(row), k_cache.stride(1), v_cache.stride(1)) >= WIDE_ROWS,
            unaligned=is_unaligned(k_cache) or is_unaligned(v_cache) or not _in_rows(k_cache, v_cache),
        )  # fmt: skip

    @property
    def appends(self) -> bool:
        # Queries are rotated where new keys are
        return self.seqlen_new > 0 or self.total_new is not None or self.rotary_dim > 0

    @property
    def busy(self) -> int:
        """Sequences that have queries, as far as shapes tell; with least_q those of seqlen_q where all others have one."""
        if self.least_q == 0:
            return self.batch
        return min(self.batch, max(1, round((self.total_q - self.batch) / max(1, self.seqlen_q - 1))))

    def pages_of_tile(self, tile_n) -> int:
        """How many pages each tile of tile_n slots fills, or 1 where it lies in one page; 0 for neither, and without pages."""
        if not self.page_size or self.has_leftpad:
            return 0
        if self.page_size % tile_n == 0:
            return 1
        pages = tile_n // self.page_size
        return pages if tile_n % self.page_size == 0 and pages <= MAX_PAGES_OF_TILE else 0

    def as_packed(self) -> AttentionProblem:
        """The packed call that this is, of sequences with as many keys as they can have."""
        return AttentionProblem(
            batch=self.batch, seqlen_q=self.seqlen_q, seqlen_k=self.capacity, num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv, head_dim=self.head_dim, head_dim_v=self.head_dim_v, dtype=self.dtype,
            window=self.window, softmax_scale=self.softmax_scale, softcap=self.softcap, has_alibi=self.has_alibi,
            has_sinks=self.has_sinks, total_q=self.rows_q, total_k=self.batch * self.capacity,
        )  # fmt: skip

    @classmethod
    def of_attention(cls, problem):
        """The call on a cache that `flashtile.attention` without dropout is: k and v are the cache, and full."""
        return cls(
            batch=problem.batch, seqlen_q=problem.seqlen_q, capacity=problem.seqlen_k, num_heads=problem.num_heads,
            num_heads_kv=problem.num_heads_kv, head_dim=problem.head_dim, head_dim_v=problem.head_dim_v, dtype=problem.dtype,
            cache_dtype=problem.dtype, window=problem.window, softmax_scale=problem.softmax_scale, softcap=problem.softcap,
            has_alibi=problem.has_alibi, has_sinks=problem.has_sinks, return_lse=True, wide_rows=problem.wide_rows,
            unaligned=problem.unaligned,
        )  # fmt: skip

    def flops(self, lengths) -> int:
        """Matmul FLOPs of the visible pairs. lengths: keys of each sequence, with the new ones."""
        pairs = sum(visible_pairs(self.seqlen_q, length, self.window) for length in lengths)
        return 2 * (self.head_dim + self.head_dim_v) * self.num_heads * pairs

    def bytes_moved(self, lengths) -> int:
        """Bytes of a pass that reads q and each visible key and value once, and writes out once."""
        left = self.window[0]
        keys = sum(length if left is None else min(length, left + self.seqlen_q) for length in lengths)
        kv = keys * self.num_heads_kv * (self.head_dim + self.head_dim_v) * self.cache_dtype.itemsize
        q_and_out = self.head_dim * self.dtype.itemsize + self.head_dim_v * self.out_dtype.itemsize
        return kv + self.rows_q * self.num_heads * q_and_out


def check_cache_arguments(operands, options):
    """Check what the op's schema would refuse without our words: types, and tensors that come in pairs."""
    for name, value in zip(CacheOperands._fields, operands):
        if not isinstance(value, torch.Tensor) and (value is not None or name in ("q", "k_cache", "v_cache")):
            if name == "cache_seqlens" and is_int(value):
                if isinstance(value, int) and abs(value) > INT32_MAX:
                    raise ValueRangeError(explain(name, "0 to the slots of a sequence", value))
                continue
            expected = "an int or an int32 tensor" if name == "cache_seqlens" else "a torch.Tensor"
            raise DtypeError(explain(name, expected, type(value).__name__))
        if value is not None:
            check_tensor(name, value, "Pack it: cu_seqlens_q.")
        if name in ("k_cache", "v_cache") and not torch.compiler.is_compiling() and value.is_neg():
            # Torch would negate a copy of it in each call
            raise UnsupportedError(explain(name, "a cache whose memory holds its numbers", "their negatives",
                                           f"Negate it once: {name}.resolve_neg()."))  # fmt: skip
    for name in ("rotary_interleaved", "causal", "return_lse"):
        check_bool(name, getattr(options, name))
    if options.softmax_scale is not None:
        check_number("softmax_scale", options.softmax_scale)
    check_number("softcap", options.softcap)
    check_int("num_splits", options.num_splits)
    if operands.cu_seqlens_q is not None and not is_int(options.max_seqlen_q):
        raise DtypeError(explain("max_seqlen_q", "an int beside cu_seqlens_q", type(options.max_seqlen_q).__name__,
                                 "Take it where the batch is packed: int(lengths.max()) waits for the device."))  # fmt: skip
    for one, other in (("k", "v"), ("rotary_cos", "rotary_sin")):
        if (getattr(operands, one) is None) != (getattr(operands, other) is None):
            missing, given = (one, other) if getattr(operands, one) is None else (other, one)
            raise ShapeError(explain(missing, f"a tensor, since {given} is given", None, "Pass both, or neither."))
    if operands.k is None:
        for name in ("rotary_cos", "rotary_seqlens", "cu_seqlens_k_new"):
            if getattr(operands, name) is not None:
                raise ShapeError(explain("k", f"new keys and values beside {name}", None, "Leave both out, or pass k and v."))
    check_no_gradients("attention_with_kvcache", operands)


def rows_apart(x) -> int | None:
    """By how many rows of (batch, rows, heads, dim) the next of the batch begins later; None where that is no whole number."""
    if x.shape[1] == 1 or x.shape[0] == 1:
        return x.shape[1]
    return x.stride(0) // x.stride(1) if x.stride(1) and x.stride(0) % x.stride(1) == 0 else None


def _in_rows(k_cache, v_cache) -> bool:
    """Whether one number of rows leads from sequence to sequence, or page to page, in both, and an int32 counts all of them."""
    apart = rows_apart(k_cache)
    return apart is not None and apart == rows_apart(v_cache) and k_cache.shape[0] * apart <= MAX_ROWS


def _check_rows(name, x, q, rank, layout) -> None:
    """Rank, device and last stride of a tensor of rows."""
    check_rank(name, x, rank, layout)
    check_device(name, x, q.device)
    check_last_dim(name, x, "(..., heads, dim)")


def _check_dtypes(operands) -> None:
    q, k_cache, v_cache = operands[:3]
    check_device_type("q", q)
    if q.dtype not in (*DTYPES, FP8):
        raise DtypeError(explain("q", "dtype float16, bfloat16, float32, float64 or float8_e4m3fn", q.dtype, "Cast q."))
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype not in (q.dtype, FP8):
            other = "" if q.dtype == FP8 else f", or {FP8}"
            raise DtypeError(explain(name, f"the dtype of q, {q.dtype}{other}", x.dtype, f"Cast q: q.to({name}.dtype)."))
    if v_cache.dtype != k_cache.dtype:
        raise DtypeError(explain("v_cache", f"the dtype of k_cache, {k_cache.dtype}", v_cache.dtype))
    for name, x in (("k", operands.k), ("v", operands.v)):
        if x is not None and x.dtype != k_cache.dtype and not (k_cache.dtype == FP8 and x.dtype in DTYPES):
            raise DtypeError(explain(name, f"the dtype of the cache, {k_cache.dtype}", x.dtype,
                                     f"Cast it: {name}.to({name}_cache.dtype); a cache of {FP8} takes any."))  # fmt: skip


def _check_head_dims(q, k_cache, v_cache) -> None:
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        raise ShapeError(explain("v_cache", f"all but the last dim of k_cache, {tuple(k_cache.shape[:-1])}", shape_of(v_cache)))
    if k_cache.shape[-1] != q.shape[-1]:
        raise ShapeError(explain("k_cache", f"the head_dim of q, {q.shape[-1]}", f"head_dim {k_cache.shape[-1]}"))
    heads, heads_kv = q.shape[-2], k_cache.shape[-2]
    if heads == 0 or heads_kv == 0 or heads % heads_kv != 0:
        raise ShapeError(explain("q", "heads that are a multiple of the heads of the cache", f"{heads} and {heads_kv}"))
    check_head_dims(q=q.shape[-1], v_cache=v_cache.shape[-1])


def _check_cache(operands, batch) -> int:
    """The cache's layout; returns the tokens that a sequence can have."""
    q, k_cache, table = operands.q, operands.k_cache, operands.block_table
    if table is not None:
        check_int32("block_table", table, q.device, (batch, "pages of a sequence"))
        if operands.cache_batch_idx is not None:
            raise ShapeError(explain("cache_batch_idx", "None beside block_table, which says where the pages are", "a tensor"))
        if k_cache.shape[0] == 0 or k_cache.shape[1] == 0:
            raise ShapeError(explain("k_cache", "at least one page of at least one token", shape_of(k_cache)))
        capacity = table.shape[1] * k_cache.shape[1]
    else:
        if operands.cache_batch_idx is not None:
            check_int32("cache_batch_idx", operands.cache_batch_idx, q.device, (batch,))
            if k_cache.shape[0] == 0 and batch > 0:
                raise ShapeError(explain("k_cache", "at least one row, which cache_batch_idx names", shape_of(k_cache)))
        elif k_cache.shape[0] != batch:
            raise ShapeError(explain("k_cache", f"a row for each sequence of q, {batch}", f"{k_cache.shape[0]} rows",
                                     "cache_batch_idx says which rows a larger cache's sequences are."))  # fmt: skip
        capacity = k_cache.shape[1]
    check_capacity(capacity)
    return capacity


def check_capacity(capacity) -> None:
    """Slots of a sequence: positions and lengths are int32, and what is added to them."""
    if capacity > INT32_MAX // 2:
        raise ShapeError(explain("k_cache", f"at most {INT32_MAX // 2} tokens a sequence", capacity))


def check_own_slots(k_cache, v_cache) -> None:
    """Caches that a call writes."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if any(stride == 0 and size > 1 for size, stride in zip(cache.shape, cache.stride())):
            way_out = "Give each sequence its slots with .contiguous(), or share pages by block_table."
            raise ShapeError(explain(name, "slots of their own, since k is appended", f"strides {cache.stride()}", way_out))


def check_rotary_columns(cos, head_dim) -> None:
    """cos: (positions, rotary_dim / 2); what is no such tensor is refused elsewhere."""
    if isinstance(cos, torch.Tensor) and cos.dim() == 2 and (2 * cos.shape[1] > head_dim or 0 in cos.shape):
        raise ShapeError(explain("rotary_cos", f"shape (seqlen_rotary, at most {head_dim // 2})", shape_of(cos)))


def _check_new(operands, batch) -> int:
    """New keys and values; returns how many a sequence gets, 0 for packed ones."""
    k, v, k_cache, v_cache = operands.k, operands.v, operands.k_cache, operands.v_cache
    if k is None:
        return 0
    check_own_slots(k_cache, v_cache)
    packed = operands.cu_seqlens_k_new is not None
    layout = "(total_new, heads, dim)" if packed else "(batch, seqlen_new, heads, dim)"
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        _check_rows(name, x, operands.q, 3 if packed else 4, layout)
        if x.shape[-2:] != cache.shape[-2:]:
            raise ShapeError(explain(name, f"heads and dim of {name}_cache, {tuple(cache.shape[-2:])}", shape_of(x)))
        if not packed and x.shape[0] != batch:
            raise ShapeError(explain(name, f"the batch of q, {batch}", f"batch {x.shape[0]}"))
    if v.shape[:-1] != k.shape[:-1]:
        raise ShapeError(explain("v", f"all but the last dim of k, {tuple(k.shape[:-1])}", shape_of(v)))
    if packed:
        check_int32("cu_seqlens_k_new", operands.cu_seqlens_k_new, operands.q.device, (batch + 1,))
        return 0
    return k.shape[1]


def _check_lengths(operands, batch) -> None:
    if operands.cache_seqlens is None and operands.k is not None:
        raise ShapeError(explain("cache_seqlens", "the lengths before the append, since k is given", None))
    for name in ("cache_seqlens", "cache_leftpad", "rotary_seqlens"):
        if getattr(operands, name) is not None:
            check_int32(name, getattr(operands, name), operands.q.device, (batch,))


def _check_rotary(operands, head_dim) -> int:
    """Columns that are rotated, 0 without rotary_cos."""
    cos, sin = operands.rotary_cos, operands.rotary_sin
    if cos is None:
        if operands.rotary_seqlens is not None:
            raise ShapeError(explain("rotary_cos", "a tensor, since rotary_seqlens is given", None))
        return 0
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        _check_rows(name, x, operands.q, 2, "(seqlen_rotary, rotary_dim / 2)")
        if x.dtype not in DTYPES:
            raise DtypeError(explain(name, "a floating dtype", x.dtype))
    if sin.shape != cos.shape or sin.stride() != cos.stride() or sin.dtype != cos.dtype:
        expected = f"shape, strides and dtype of rotary_cos, {tuple(cos.shape)}, {cos.stride()}, {cos.dtype}"
        raise ShapeError(explain("rotary_sin", expected, f"{tuple(sin.shape)}, {sin.stride()}, {sin.dtype}"))
    check_rotary_columns(cos, head_dim)
    return 2 * cos.shape[1]


def _check_descales(operands, batch, num_heads_kv) -> None:
    for name, x, of in (("q_descale", operands.q_descale, operands.q), ("k_descale", operands.k_descale, operands.k_cache),
                        ("v_descale", operands.v_descale, operands.v_cache)):  # fmt: skip
        if x is None:
            continue
        if of.dtype != FP8:
            raise DtypeError(explain(name, f"None beside {name[0]} of {of.dtype}", "a tensor", f"It goes with {FP8}."))
        if x.dtype != torch.float32:
            raise DtypeError(explain(name, "dtype torch.float32", x.dtype, f"Cast it: {name}.float()."))
        check_device(name, x, operands.q.device)
        if tuple(x.shape) != (batch, num_heads_kv):
            raise ShapeError(explain(name, f"shape ({batch}, {num_heads_kv}), (batch, heads of the cache)", shape_of(x)))


def _moves(options) -> bool:
    """Whether each query has a rotary position of its own."""
    return options.causal or options.window_left is not None or options.window_right is not None


def _check_values(operands, options, batch, seqlen_q, capacity, seqlen_new, window_left) -> None:
    """What index tensors hold, and descales, where it is looked at; an error says which sequence."""
    for name in ("q_descale", "k_descale", "v_descale"):
        x = getattr(operands, name)
        if x is not None and not (x >= 0).all():
            raise ValueRangeError(explain(name, "numbers of 0 or more", x[~(x >= 0)][0].item()))
    queries, new = [seqlen_q] * batch, [seqlen_new] * batch
    if operands.cu_seqlens_q is not None:
        bounds = operands.cu_seqlens_q.tolist()
        check_cu_seqlens_values("cu_seqlens_q", bounds, operands.q.shape[0], seqlen_q)
        queries = [stop - start for start, stop in pairwise(bounds)]
    if operands.cu_seqlens_k_new is not None:
        bounds = operands.cu_seqlens_k_new.tolist()
        check_cu_seqlens_values("cu_seqlens_k_new", bounds, operands.k.shape[0], INT32_MAX)
        new = [stop - start for start, stop in pairwise(bounds)]
    before = [capacity] * batch if operands.cache_seqlens is None else operands.cache_seqlens.tolist()
    for b, (old, more) in enumerate(zip(before, new, strict=True)):
        if more > capacity:
            raise ValueRangeError(explain("k", f"at most {capacity} new keys of sequence {b}, as many as it has slots", more))
        if not 0 <= old <= capacity - more:
            room = f"0 to {capacity - more}, what {capacity} slots leave before {more} new keys"
            raise ValueRangeError(explain(f"cache_seqlens[{b}]", room, old))
    stops = [old + more for old, more in zip(before, new, strict=True)]
    for name, x, limits in (
        ("cache_leftpad", operands.cache_leftpad, stops),
        ("cache_batch_idx", operands.cache_batch_idx, [operands.k_cache.shape[0] - 1] * batch),
    ):
        for b, value in enumerate([] if x is None else x.tolist()):
            if not 0 <= value <= limits[b]:
                raise ValueRangeError(explain(f"{name}[{b}]", f"0 to {limits[b]}", value))
    if operands.block_table is not None:
        num_pages, page_size = operands.k_cache.shape[:2]
        begins = [0] * batch if operands.cache_leftpad is None else operands.cache_leftpad.tolist()
        for b, pages in enumerate(operands.block_table.tolist()):
            # The first slot that is seen or written
            first = begins[b] if window_left is None else max(begins[b], stops[b] - queries[b] - window_left)
            first = min(first, before[b]) if new[b] else first
            for i, page in enumerate(pages[: -(-stops[b] // page_size)]):
                if i >= first // page_size and not 0 <= page < num_pages:
                    raise ValueRangeError(explain(f"block_table[{b}, {i}]", f"a page, 0 to {num_pages - 1}", page,
                                                  f"Sequence {b} uses it: its length is {stops[b]}."))  # fmt: skip
    if operands.rotary_cos is not None:
        begins = before if operands.rotary_seqlens is None else operands.rotary_seqlens.tolist()
        for b, begin in enumerate(begins):
            rows = max(new[b], queries[b] if _moves(options) else min(queries[b], 1))
            last = begin + rows - 1
            if rows and not (0 <= begin and last < operands.rotary_cos.shape[0]):
                raise ValueRangeError(explain(f"rotary_cos, sequence {b}", f"a row for each of its positions {begin} to {last}",
                                              f"{operands.rotary_cos.shape[0]} rows"))  # fmt: skip


def check_combine(out_partial, lse_partial, out_dtype) -> None:
    """Check the arguments of `flashtile.combine`."""
    for name, x, rank in (("out_partial", out_partial, 5), ("lse_partial", lse_partial, 4)):
        check_tensor(name, x)
        check_rank(name, x, rank, "(splits, batch, seqlen_q, heads, dim)" if rank == 5 else "(splits, batch, heads, seqlen_q)")
    if out_partial.dtype not in DTYPES[:3]:
        raise DtypeError(explain("out_partial", "dtype float32, float16 or bfloat16", out_partial.dtype))
    if lse_partial.dtype != torch.float32:
        raise DtypeError(explain("lse_partial", "dtype torch.float32", lse_partial.dtype))
    check_device("lse_partial", lse_partial, out_partial.device, of="out_partial")
    splits, batch, seqlen_q, heads, dim = out_partial.shape
    if lse_partial.shape != (splits, batch, heads, seqlen_q):
        raise ShapeError(explain("lse_partial", f"shape {(splits, batch, heads, seqlen_q)}", shape_of(lse_partial)))
    if out_dtype is not None and out_dtype not in DTYPES:
        raise DtypeError(explain("out_dtype", "a floating dtype, or None for that of out_partial", out_dtype))
    check_no_gradients("combine", (out_partial, lse_partial))
    if not 0 < dim <= 2 * MAX_HEAD_DIM:
        raise ShapeError(explain("out_partial", f"a last dim of 1 to {2 * MAX_HEAD_DIM}", dim))
    check_last_dim("out_partial", out_partial)
