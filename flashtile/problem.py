"""AttentionProblem: the frozen description of one attention call.

It is the dispatch key, the benchmark's row and the error's context. `AttentionProblem.from_tensors` is the only place that
checks a user's tensors; `flops` and `bytes_moved` live here, so that the benchmark and the kernels can't disagree about the
work. Imports neither triton nor a GPU.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from flashtile import settings
from flashtile.checks import (
    check_bool,
    check_device,
    check_device_type,
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

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
# The way out of a larger one
WIDER_HEADS = "For wider heads use F.scaled_dot_product_attention."
INT32_MAX = 2**31 - 1
# Farther than any side of a window need reach where no sequence is longer; a multiple of 16, as kernels like numbers to be
FAR = 2**30
# Rows so far apart that offsets inside of a tile may leave int32
WIDE_ROWS = 2**22
# Ends of tiles are beyond the last row
MAX_SEQLEN = INT32_MAX - 255
# Random bits that decide whether dropout keeps a weight
DROPOUT_BITS = 15
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
AUTOCAST_DTYPES = DTYPES[:3]


class Operands(NamedTuple):
    """The tensors of one call; None where an option is off. Shapes as in `flashtile.attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    # int64 (2,): Philox seed and offset of the dropout mask
    rng_state: torch.Tensor | None = None


def is_traced(*sizes) -> bool:
    """Whether one of some sizes is any of many, or not known, in a call that is being compiled."""
    return any(isinstance(size, torch.SymInt) for size in sizes)


def has_same_lengths(operands) -> bool:
    """Whether packed queries and keys of each sequence are known to be as many; of a batched call it says nothing."""
    starts_q, starts_k = operands.cu_seqlens_q, operands.cu_seqlens_k
    same_starts = starts_q is starts_k
    if not same_starts and starts_q is not None and starts_k is not None and operands.q.is_cpu and values_readable(operands.q):
        # On a CPU, where calls are checked before, the values: of one tensor two may come, between a forward and its backward
        same_starts = torch.equal(starts_q, starts_k)
    return same_starts and operands.seqused_q is None and operands.seqused_k is None


def lse_dtype(dtype):
    """Of a call's log-sum-exp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class CallShape:
    """What follows from the fields of any described call."""

    __slots__ = ()

    def __post_init__(self):
        if self.softmax_scale is None:
            object.__setattr__(self, "softmax_scale", self.head_dim**-0.5)
        for name in ("softmax_scale", "softcap"):
            if isinstance(getattr(self, name), int):
                # torch takes an int for an int64
                object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def varlen(self) -> bool:
        return self.total_q is not None

    @property
    def causal(self) -> bool:
        """Whether the right side of the window is closed at the diagonal."""
        return self.window[1] == 0

    @property
    def masked(self) -> bool:
        """Whether a side of the window is closed."""
        return self.window != (None, None)

    @property
    def group_size(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_heads_kv

    @property
    def out_dtype(self) -> torch.dtype:
        """That of q; fp8 queries give bfloat16."""
        return torch.bfloat16 if self.dtype == FP8 else self.dtype

    @property
    def rows_q(self) -> int:
        """Queries of all sequences together."""
        return self.total_q if self.varlen else self.batch * self.seqlen_q

    @property
    def longest_q(self) -> int:
        """Queries of a sequence, at most: of a packed one not more than of all together, whatever max_seqlen_q says."""
        return min(self.seqlen_q, self.total_q) if self.varlen else self.seqlen_q

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.total_q) if self.varlen else (self.batch, self.num_heads, self.seqlen_q)


@dataclass(frozen=True, slots=True)
class AttentionProblem(CallShape):
    """One attention call without its data: shapes, dtype, mask, scale, lengths.

    Packed (varlen) calls have total_q and total_k; seqlen_q and seqlen_k are then the longest sequences.
    window counts keys on each side of the bottom-right diagonal, in tokens; None is unbounded; causal is a right side of 0.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    window: tuple[int | None, int | None] = (None, None)
    # None becomes head_dim ** -0.5
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    has_alibi: bool = False
    has_sinks: bool = False
    deterministic: bool = False
    return_lse: bool = False
    total_q: int | None = None
    total_k: int | None = None
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    # Packed queries and keys of a sequence are as many: one tensor has their starts, and all are used.
    same_lengths: bool = False
    # Offsets inside one tile exceed int32 (row strides of WIDE_ROWS elements and more).
    wide_rows: bool = False
    # Rows of q, k or v do not all begin at multiples of 16 bytes.
    unaligned: bool = False

    @classmethod
    def from_tensors(
        cls, operands, *, max_seqlen_q=None, max_seqlen_k=None, causal=False, window=(None, None), softmax_scale=None,
        softcap=0.0, dropout_p=0.0, deterministic=False, return_lse=False,
    ):  # fmt: skip
        """Check a call and describe it.

        Args:
            operands: Operands; q, k, v are (batch, seqlen, heads, dim), or (total, heads, dim) with cu_seqlens.
            The rest as in `flashtile.attention` and `flashtile.attention_varlen`.
        Raises:
            ShapeError, DtypeError, DeviceError, ValueRangeError: which argument, what was expected, what came.
        """
        q, k, v = operands.q, operands.k, operands.v
        varlen = operands.cu_seqlens_q is not None or operands.cu_seqlens_k is not None
        _check_qkv(q, k, v, varlen)
        num_heads, head_dim = q.shape[-2:]
        num_heads_kv, head_dim_v = v.shape[-2:]
        if varlen:
            batch = check_cu_seqlens(operands, max_seqlen_q, max_seqlen_k)
            total_q, total_k = q.shape[0], k.shape[0]
            seqlen_q, seqlen_k = max_seqlen_q, max_seqlen_k
        else:
            batch, seqlen_q = q.shape[:2]
            seqlen_k = k.shape[1]
            total_q = total_k = None
        check_seqused(operands, batch)
        check_per_head(operands, batch, num_heads)
        traced = is_traced(batch, seqlen_q, seqlen_k, q.shape[0], k.shape[0])
        window = checked_window(window, causal, seqlen_q, seqlen_k)
        longest_q, longest_k = seqlen_q, seqlen_k
        if varlen and not traced:
            # No packed sequence is longer than all together
            longest_q, longest_k = min(seqlen_q, total_q), min(seqlen_k, total_k)
            window = limited_window(window, max(longest_q, longest_k))
        check_scale(softmax_scale)
        check_softcap(softcap)
        if not 0 <= dropout_p < 1:
            raise ValueRangeError(explain("dropout_p", "0 <= dropout_p < 1", dropout_p, "Drop nothing in evaluation: 0.0."))
        if not traced:
            check_counts(batch * num_heads, max(longest_q, longest_k), "Pass the longest as max_seqlen. " * varlen)
        row = 0 if varlen else 1
        # The last is a row of out, and of gradients
        widest = max(q.stride(row), k.stride(row), v.stride(row), num_heads * max(head_dim, head_dim_v))
        return cls(
            batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=num_heads, num_heads_kv=num_heads_kv,
            head_dim=head_dim, head_dim_v=head_dim_v, dtype=q.dtype, window=window, softmax_scale=softmax_scale,
            softcap=softcap, dropout_p=dropout_p, has_alibi=operands.alibi_slopes is not None,
            has_sinks=operands.sinks is not None, deterministic=deterministic, return_lse=return_lse,
            total_q=total_q, total_k=total_k, has_seqused_q=operands.seqused_q is not None,
            has_seqused_k=operands.seqused_k is not None, same_lengths=varlen and has_same_lengths(operands),
            wide_rows=widest >= WIDE_ROWS, unaligned=is_unaligned(q) or is_unaligned(k) or is_unaligned(v),
        )  # fmt: skip

    def __hash__(self):
        # The shapes tell most problems apart, and to hash all fields would cost each call.
        return hash((self.batch, self.seqlen_q, self.seqlen_k, self.num_heads, self.num_heads_kv, self.head_dim, self.window))

    @property
    def dropout_threshold(self) -> int:
        """A weight stays where its DROPOUT_BITS random bits are not below this: dropout_p, rounded, and below 1."""
        return min(round(self.dropout_p * 2**DROPOUT_BITS), 2**DROPOUT_BITS - 1)

    @property
    def keep_scale(self) -> float:
        """1 / (1 - p) of the p that `dropout_threshold` stands for, so that the mean stays what it is."""
        return 1 / (1 - self.dropout_threshold / 2**DROPOUT_BITS)

    @property
    def longest_k(self) -> int:
        """Keys of a sequence, as `longest_q`."""
        return min(self.seqlen_k, self.total_k) if self.varlen else self.seqlen_k

    @property
    def mean_queries(self) -> int:
        """Of a sequence, and one at least."""
        return max(1, -(-self.total_q // max(self.batch, 1)) if self.varlen else self.seqlen_q)

    @property
    def mean_keys(self) -> float:
        """Keys that a query sees, on average.

        Packed sequences count as if all had the geometric mean of their mean and their longest length: most queries are those
        of long ones.
        """
        queries, keys = self.longest_q, self.longest_k
        if self.varlen:
            batch = max(self.batch, 1)
            queries, keys = math.sqrt(self.total_q / batch * queries), math.sqrt(self.total_k / batch * keys)
        queries = max(1, round(queries))
        return visible_pairs(queries, round(keys), self.window) / queries

    def visible_pairs(self, lengths=None) -> int:
        """(query, key) pairs that the mask leaves, over the batch and one head.

        lengths: one (seqlen_q, seqlen_k) a sequence; default batch times the problem's own.
        """
        if lengths is None:
            return self.batch * visible_pairs(self.seqlen_q, self.seqlen_k, self.window)
        return sum(visible_pairs(seqlen_q, seqlen_k, self.window) for seqlen_q, seqlen_k in lengths)

    def flops(self, mode="fwd", lengths=None) -> int:
        """Matmul FLOPs of the visible pairs: 2 products forward, 5 backward (the scores are recomputed once).

        mode: "fwd", "bwd" or "fwd_bwd".
        """
        d, dv = self.head_dim, self.head_dim_v
        per_pair = {"fwd": 2 * (d + dv), "bwd": 2 * (3 * d + 2 * dv), "fwd_bwd": 2 * (4 * d + 3 * dv)}[mode]
        return per_pair * self.num_heads * self.visible_pairs(lengths)

    def bytes_moved(self, mode="fwd") -> int:
        """Bytes of a pass that reads each input once and writes each output once; of batched keys those that a query sees."""
        rows_k = self.total_k if self.varlen else self.batch * self.seqlen_k
        left = self.window[0]
        seen = rows_k if self.varlen or left is None else self.batch * min(self.seqlen_k, left + self.seqlen_q)
        size = self.dtype.itemsize
        q = self.rows_q * self.num_heads * self.head_dim * size
        out = self.rows_q * self.num_heads * self.head_dim_v * size
        row_kv = self.num_heads_kv * (self.head_dim + self.head_dim_v) * size
        lse = self.rows_q * self.num_heads * 4
        forward = q + seen * row_kv + out + lse
        # reads q k v out dout lse, writes dq dk dv
        backward = 2 * q + (seen + rows_k) * row_kv + 2 * out + lse
        return {"fwd": forward, "bwd": backward, "fwd_bwd": forward + backward}[mode]


def visible_pairs(seqlen_q: int, seqlen_k: int, window=(None, None)) -> int:
    """(query, key) pairs of one sequence with first key >= i + shift - left and last key <= i + shift + right."""
    shift = seqlen_k - seqlen_q
    left, right = window

    def keys_before(first):  # sum over queries i of clip(i + first, 0, seqlen_k)
        rising = range(max(0, -first), min(seqlen_q, max(0, seqlen_k - first)))
        total = len(rising) * first + (rising.start + rising.stop - 1) * len(rising) // 2 if rising else 0
        return total + seqlen_k * max(0, seqlen_q - max(0, seqlen_k - first))

    upper = seqlen_q * seqlen_k if right is None else keys_before(shift + right + 1)
    return upper - (0 if left is None else keys_before(shift - left))


def check_arguments(operands, *, max_seqlen_q=None, max_seqlen_k=None, causal, window, softmax_scale, softcap, dropout_p,
                    deterministic, return_lse):  # fmt: skip
    """Check what the op's schema would refuse without our words (types), and options that have no gradient."""
    for name, value in zip(Operands._fields, operands):
        if value is not None or name in "qkv":
            check_tensor(name, value, "Pack it: attention_varlen takes its values() and offsets().")
    for name, value in (("causal", causal), ("deterministic", deterministic), ("return_lse", return_lse)):
        check_bool(name, value)
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap), ("dropout_p", dropout_p)):
        if value is not None or name != "softmax_scale":
            check_number(name, value)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise DtypeError(explain("window", "a pair (left, right) of int or None", repr(window), "Unbounded is (None, None)."))
    if operands.cu_seqlens_q is None and operands.cu_seqlens_k is None:
        if max_seqlen_q is not None or max_seqlen_k is not None:
            raise ShapeError(explain("cu_seqlens_q", "a tensor, since there is a max_seqlen", None, "Use attention without."))
    else:
        for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if not is_int(value):
                way_out = "Take it where the batch is packed: int(lengths.max()) waits for the device."
                raise DtypeError(explain(name, "an int", type(value).__name__, way_out))


def may_be_dual(x) -> bool:
    """Whether it has a tangent, or might have one: torch.compile doesn't show those of a graph's inputs."""
    if forward_ad._current_level < 0 or not isinstance(x, torch.Tensor):
        return False
    return torch.compiler.is_compiling() or forward_ad.unpack_dual(x).tangent is not None


def what_is_dual() -> str:
    """What `may_be_dual` found."""
    compiled = "a call compiled inside a forward-mode level, where tangents can't be seen"
    return compiled if torch.compiler.is_compiling() else "a dual tensor"


def check_no_gradients(function, tensors) -> None:
    """Refuse what asks for derivatives of a function that has none."""
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedError(explain(function, "tensors without gradients", "requires_grad=True",
                                       "It has no backward pass: call it under torch.no_grad()."))  # fmt: skip
    if any(map(may_be_dual, tensors)):
        raise UnsupportedError(explain(function, "tensors without tangents", what_is_dual(), "It has no derivatives."))


def is_unaligned(x) -> bool:
    """Whether rows begin elsewhere than at multiples of 16 bytes. What is traced or transformed has no address, but strides."""
    elements = 16 // x.element_size()
    has_address = (
        not torch.compiler.is_compiling() and type(x) in (torch.Tensor, torch.nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )  # fmt: skip
    return any(stride % elements != 0 for stride in x.stride()[:-1]) or has_address and x.data_ptr() % 16 != 0


def _check_qkv(q, k, v, varlen) -> None:
    """Rank, dtype, device, sizes and strides of q, k and v."""
    check_device_type("q", q)
    if q.dtype not in DTYPES:
        raise DtypeError(explain("q", "dtype float16, bfloat16, float32 or float64", q.dtype, "Cast q, k and v."))
    rank, layout = (3, "(total, heads, dim)") if varlen else (4, "(batch, seqlen, heads, dim)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        way_out = "Add a batch dim with x.unsqueeze(0)." if rank - x.dim() == 1 else ""
        if varlen and x.dim() == 4:
            way_out = "Packed sequences have no batch dim: x.flatten(0, 1)."
        check_rank(name, x, rank, layout, way_out)
        check_device(name, x, q.device)
        if x.dtype != q.dtype:
            raise DtypeError(explain(name, f"the dtype of q, {q.dtype}", x.dtype, f"Cast it: {name}.to(q.dtype)."))
        check_last_dim(name, x, "(..., heads, dim)")
    if not varlen:
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != q.shape[0]:
                raise ShapeError(explain(name, f"the batch of q, {q.shape[0]}", f"batch {x.shape[0]}"))
    if v.shape[:-1] != k.shape[:-1]:
        expected = "the total and heads of k" if varlen else "the batch, seqlen and heads of k"
        raise ShapeError(explain("v", f"{expected}, {tuple(k.shape[:-1])}", shape_of(v)))
    if k.shape[-1] != q.shape[-1]:
        raise ShapeError(explain("k", f"the head_dim of q, {q.shape[-1]}", f"head_dim {k.shape[-1]}"))
    if q.shape[-2] == 0 or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        heads = 0 if varlen or 0 in (q.shape[-2], k.shape[-2]) else k.shape[1]
        # Of k and v alone, or of all
        swapped = heads and (q.shape[-2] % heads == 0 or q.shape[1] % heads == 0 and heads < k.shape[-2])
        way_out = "From (batch, heads, seqlen, dim) use x.transpose(1, 2)." if swapped else ""
        got = f"{q.shape[-2]} and {k.shape[-2]}"
        raise ShapeError(explain("q", "heads that are a multiple of the heads of k and v", got, way_out))
    check_head_dims(q=q.shape[-1], v=v.shape[-1])


def check_head_dims(**dims) -> None:
    """Head dims by the names of their tensors."""
    for name, dim in dims.items():
        if dim % HEAD_DIM_MULTIPLE != 0 or not 0 < dim <= MAX_HEAD_DIM:
            nearest = max(1, -(-dim // HEAD_DIM_MULTIPLE)) * HEAD_DIM_MULTIPLE
            then = f"cut off out[..., {dim}:]" if name.startswith("v") else "pass softmax_scale"
            way_out = WIDER_HEADS if dim > MAX_HEAD_DIM else f"Pad with zeros to {nearest} and {then}."
            raise ShapeError(explain(name, f"a head dim of 8 to {MAX_HEAD_DIM} in steps of 8", f"{dim}", way_out))


def check_counts(num_heads, seqlen, way_out="") -> None:
    """Every tier numbers its tiles, of at least 16 rows, and the rows of a sequence up to the end of a tile, with an int32.

    num_heads: of all sequences. seqlen: of the longest.
    """
    if seqlen > MAX_SEQLEN:
        raise ShapeError(explain("seqlen", f"at most {MAX_SEQLEN}", seqlen, "Split the sequences, and combine the results."))
    num_tiles = num_heads * -(-seqlen // 16)
    if num_tiles > INT32_MAX:
        expected = f"at most {INT32_MAX} tiles of 16 rows"
        raise ShapeError(explain("batch * heads * seqlen", expected, num_tiles, f"{way_out}Split the batch."))


def check_cu_seqlens(operands, max_seqlen_q, max_seqlen_k) -> int:
    """cu_seqlens and max_seqlen of a packed call; returns the batch."""
    batch = None
    for name, x, other in (("cu_seqlens_q", operands.cu_seqlens_q, "cu_seqlens_k"),
                           ("cu_seqlens_k", operands.cu_seqlens_k, "cu_seqlens_q")):  # fmt: skip
        if x is None:
            raise ShapeError(explain(name, f"a tensor, since {other} is given", None, "Pass both, or neither."))
        check_int32(name, x, operands.q.device, ("batch + 1" if batch is None else batch + 1,))
        if x.shape[0] < 2:
            raise ShapeError(explain(name, "shape (batch + 1,) with batch >= 1", shape_of(x)))
        batch = x.shape[0] - 1
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not is_traced(length) and not 0 <= length <= INT32_MAX:
            raise ValueRangeError(explain(name, f"0 <= {name} <= {INT32_MAX}", length))
    if values_readable(operands.q):
        for name, x, total, longest in (
            ("cu_seqlens_q", operands.cu_seqlens_q, operands.q.shape[0], max_seqlen_q),
            ("cu_seqlens_k", operands.cu_seqlens_k, operands.k.shape[0], max_seqlen_k),
        ):
            check_cu_seqlens_values(name, x.tolist(), total, longest)
    return batch


def check_cu_seqlens_values(name, values, total, longest) -> None:
    lengths = [stop - start for start, stop in pairwise(values)]
    if values[0] != 0:
        raise ValueRangeError(explain(name, "a first entry of 0", values[0]))
    if min(lengths) < 0:
        bad = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueRangeError(
            explain(name, "entries that do not decrease", f"{values[bad]} then {values[bad + 1]} at {bad + 1}")
        )
    if values[-1] > total:
        raise ValueRangeError(explain(name, f"a last entry of at most the packed total {total}", values[-1]))
    if max(lengths) > longest:
        longest_name = name.replace("cu_seqlens", "max_seqlen")
        raise ValueRangeError(explain(longest_name, f"at least the longest sequence, {max(lengths)}", longest))


def check_seqused(operands, batch) -> None:
    """seqused of a packed call; a batched one has none."""
    for name, x in (("seqused_q", operands.seqused_q), ("seqused_k", operands.seqused_k)):
        if x is None:
            continue
        if operands.cu_seqlens_q is None:
            raise ShapeError(
                explain(name, "cu_seqlens_q and cu_seqlens_k beside it", "a batched call", "Use attention_varlen.")
            )
        check_int32(name, x, operands.q.device, (batch,))
        if values_readable(operands.q):
            cu_seqlens = (operands.cu_seqlens_q if name == "seqused_q" else operands.cu_seqlens_k).tolist()
            for i, used in enumerate(x.tolist()):
                room = cu_seqlens[i + 1] - cu_seqlens[i]
                if not 0 <= used <= room:
                    raise ValueRangeError(explain(f"{name}[{i}]", f"0 to the sequence's length {room}", used))


def check_per_head(operands, batch, num_heads) -> None:
    """ALiBi slopes and sinks."""
    slopes, sinks = operands.alibi_slopes, operands.sinks
    if slopes is not None:
        if slopes.dtype != torch.float32:
            raise DtypeError(explain("alibi_slopes", "dtype torch.float32", slopes.dtype, "Cast them: alibi_slopes.float()."))
        # Compared in this order, since a traced batch may not be compared with heads
        if tuple(slopes.shape) != ((num_heads,) if slopes.dim() == 1 else (batch, num_heads)):
            raise ShapeError(explain("alibi_slopes", f"shape ({num_heads},) or ({batch}, {num_heads})", shape_of(slopes)))
    if sinks is not None:
        if sinks.dtype not in DTYPES:
            raise DtypeError(explain("sinks", "a floating dtype", sinks.dtype))
        if tuple(sinks.shape) != (num_heads,):
            raise ShapeError(explain("sinks", f"shape ({num_heads},), one logit a query head", shape_of(sinks)))
    for name, x in (("alibi_slopes", slopes), ("sinks", sinks)):
        if x is None:
            continue
        check_device(name, x, operands.q.device)
        check_last_dim(name, x)


def limited_window(window, longest) -> tuple[int | None, int | None]:
    """A window whose far sides, beyond the longest sequence, are so near that positions beside them are int32.

    Not None, which a side is that hides nothing by the max_seqlen promised: a kernel is not compiled for how many tokens come.
    """
    return tuple(min(side, FAR) if side is not None and longest <= FAR else side for side in window)


def checked_window(window, causal, seqlen_q, seqlen_k) -> tuple[int | None, int | None]:
    """window as a tuple; causal closes its right side at the diagonal; a side that hides nothing is None."""
    for side, value in zip(("left", "right"), window):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise DtypeError(explain(f"window {side}", "an int or None", repr(value)))
        if not 0 <= value <= INT32_MAX:
            raise ValueRangeError(explain(f"window {side}", "a number of keys >= 0, or None for unbounded", value,
                                          "flash_attn's -1 is None here."))  # fmt: skip
    left, right = window
    if causal:
        right = 0
    if is_traced(seqlen_q, seqlen_k):
        # Traced for all lengths: which side hides nothing is seen when the kernels run.
        return left, right
    # The last query stands at key seqlen_k - 1, the first one seqlen_q - 1 keys before it.
    left = None if left is None or left >= seqlen_k - 1 else left
    right = None if right is None or right >= seqlen_q - 1 else right
    return left, right


def is_autocast(x) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def autocast(x, dtype):
    """x in dtype, if torch.autocast casts tensors of its own; None stays."""
    return x.to(dtype) if x is not None and x.dtype in AUTOCAST_DTYPES else x


def values_readable(tensor) -> bool:
    """Whether index tensors may be read: for nothing on a CPU, with a wait for the device where debugging is on."""
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
        return False
    return tensor.device.type == "cpu" or settings.debug() and not torch.cuda.is_current_stream_capturing()
