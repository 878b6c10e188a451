"""MlaProblem: the frozen description of one latent attention decode, and the only place that checks its tensors."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashtile import hardware
from flashtile.checks import check_device, check_device_type, check_int32, check_last_dim, check_rank, check_scale, shape_of
from flashtile.errors import DtypeError, ShapeError, ValueRangeError, explain
from flashtile.mla import cache
from flashtile.problem import is_unaligned, values_readable

HEAD_DIM_V = cache.LATENT_DIM
HEAD_DIMS = (HEAD_DIM_V, HEAD_DIM_V + cache.ROPE_DIM)
DTYPES = (torch.bfloat16, torch.float16)
# fp32 and fp64 serve CPU tensors
CPU_DTYPES = (*DTYPES, torch.float32, torch.float64)
MAX_SEQLEN_Q = 8
MAX_HEADS = 128
# Of a sequence: kernels look up to 3 tiles of 64 ahead, in int32
MAX_KEYS = 2**31 - 256
# Query rows of one program of the schedule
ROWS = 64
# What stands for the multiprocessors in the interpreter: enough to split
CPU_SMS = 4


class MlaOperands(NamedTuple):
    """The tensors of one call; None where an option is off. Shapes as in `flashtile.mla.mla_decode`."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    topk_length: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    # of Schedule
    schedule: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlaProblem:
    """One latent attention decode without its data. topk: indices of a query token, None for dense decode."""

    batch: int
    seqlen_q: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    num_pages: int
    page_size: int
    causal: bool = False
    softmax_scale: float = 1.0
    topk: int | None = None
    has_topk_length: bool = False
    fp8: bool = False
    has_sinks: bool = False
    lse_with_sinks: bool = True
    # Rows of the cache do not all begin at multiples of 16 bytes.
    unaligned: bool = False
    # From where the first token of the cache begins to where the last one does
    cache_bytes: int = 0

    @classmethod
    def from_tensors(cls, operands, *, head_dim_v=HEAD_DIM_V, softmax_scale=None, causal=False, lse_with_sinks=True):
        """Check a call and describe it.

        Raises:
            ShapeError, DtypeError, DeviceError, ValueRangeError: which argument, what was expected, what came.
        """
        q, kv_cache = operands.q, operands.kv_cache
        fp8 = check_queries_and_cache(q, kv_cache)
        sparse = operands.indices is not None
        batch, seqlen_q, num_heads, head_dim = q.shape
        num_pages, page_size, num_heads_kv = kv_cache.shape[:3]
        if head_dim_v != HEAD_DIM_V:
            raise ShapeError(explain("head_dim_v", f"{HEAD_DIM_V}, the latent part of the cache", head_dim_v))
        check_queries(1 if sparse else seqlen_q, num_heads)
        if sparse:
            _check_sparse(operands, num_heads_kv, causal)
        else:
            _check_dense(operands)
        _check_sinks(operands)
        check_scale(softmax_scale)
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        if num_pages * page_size >= 2**31:
            raise ShapeError(explain("kv_cache", "fewer than 2**31 tokens", f"{num_pages * page_size}"))
        problem = cls(
            batch=batch, seqlen_q=seqlen_q, num_heads=num_heads, num_heads_kv=num_heads_kv, head_dim=head_dim,
            head_dim_v=head_dim_v, dtype=q.dtype, num_pages=num_pages, page_size=page_size, causal=causal and seqlen_q > 1,
            softmax_scale=float(scale), topk=operands.indices.shape[2] if sparse else None,
            has_topk_length=operands.topk_length is not None, fp8=fp8, has_sinks=operands.sinks is not None,
            lse_with_sinks=lse_with_sinks, unaligned=is_unaligned(kv_cache), cache_bytes=_span(kv_cache),
        )  # fmt: skip
        if values_readable(q):
            _check_values(operands, problem)
        return problem

    @property
    def sparse(self) -> bool:
        return self.topk is not None

    @property
    def group_size(self) -> int:
        """Query heads that share a latent head."""
        return self.num_heads // self.num_heads_kv

    @property
    def num_sequences(self) -> int:
        """Sets of keys that rows share: a sequence, or with indices a query token."""
        return self.batch * self.seqlen_q if self.sparse else self.batch

    @property
    def num_rows(self) -> int:
        """Query rows that share a set of keys and a latent head."""
        return self.group_size if self.sparse else self.group_size * self.seqlen_q

    @property
    def total_rows(self) -> int:
        """Query rows that share a set of keys, in all latent heads."""
        return self.num_rows * self.num_heads_kv

    def flops(self, lengths) -> int:
        """Matmul FLOPs of the visible pairs. lengths: keys of each sequence, or with indices of each query token."""
        hidden = sum(min(length, missing) for length in lengths for missing in range(self.seqlen_q)) if self.causal else 0
        pairs = sum(lengths) * (1 if self.sparse else self.seqlen_q) - hidden
        return 2 * (self.head_dim + self.head_dim_v) * self.num_heads * pairs

    def bytes_moved(self, lengths) -> int:
        """Bytes of a pass that reads each key and query once and writes each output once.

        About 2 * heads * query tokens FLOP a byte of a 16 bit cache: whether memory or arithmetic limits is decided by them.
        """
        token = cache.TOKEN_BYTES if self.fp8 else self.head_dim * self.dtype.itemsize
        rows = self.batch * self.seqlen_q * self.num_heads
        return (sum(lengths) * self.num_heads_kv * token + rows * (self.head_dim + self.head_dim_v) * self.dtype.itemsize
                + 4 * rows)  # fmt: skip


def table_shape(num_sequences, num_rows, num_heads_kv, device):
    """Of a schedule with as many parts as fill the device: each has a program for every ROWS query rows of a latent head."""
    num_sms = hardware.detect(device).num_sms or CPU_SMS
    return max(1, num_sms // (max(1, -(-num_rows // ROWS)) * num_heads_kv)) + 1 + num_sequences, 2


def _span(kv_cache) -> int:
    return sum((size - 1) * stride for size, stride in zip(kv_cache.shape[:2], kv_cache.stride())) * kv_cache.element_size()


def dtypes_on(device) -> tuple:
    """Of queries."""
    return CPU_DTYPES if device.type == "cpu" else DTYPES


def check_queries_and_cache(q, kv_cache) -> bool:
    """q and kv_cache; returns whether the cache is packed."""
    check_rank("q", q, 4, "(batch, seqlen_q, heads, head_dim)")
    way_out = "Add the dim of latent heads: kv_cache.unsqueeze(2)." if kv_cache.dim() == 3 else ""
    check_rank("kv_cache", kv_cache, 4, "(pages, page_size, heads_kv, head_dim)", way_out)
    check_device_type("q", q)
    check_device("kv_cache", kv_cache, q.device)
    if q.dtype not in dtypes_on(q.device):
        raise DtypeError(explain("q", "dtype bfloat16 or float16", q.dtype, "Cast q and the cache."))
    fp8 = kv_cache.dtype in cache.DTYPES
    if not fp8 and kv_cache.dtype != q.dtype:
        raise DtypeError(explain("kv_cache", f"the dtype of q, {q.dtype}, or uint8 packed by flashtile.mla.pack_fp8",
                                 kv_cache.dtype))  # fmt: skip
    head_dim, width = q.shape[-1], kv_cache.shape[-1]
    if head_dim not in HEAD_DIMS:
        raise ShapeError(explain("q", f"a head_dim of {HEAD_DIMS[1]} (512 latent, 64 rotary) or {HEAD_DIMS[0]}", head_dim,
                                 "Keys of their own for each head are for flashtile.attention."))  # fmt: skip
    if fp8 and (width != cache.TOKEN_BYTES or head_dim != HEAD_DIMS[1]):
        raise ShapeError(explain("kv_cache", f"{cache.TOKEN_BYTES} bytes a token, for a head_dim of q of {HEAD_DIMS[1]}",
                                 f"{width} bytes and head_dim {head_dim}", "Pack it with flashtile.mla.pack_fp8."))  # fmt: skip
    if not fp8 and width != head_dim:
        raise ShapeError(explain("kv_cache", f"the head_dim of q, {head_dim}", width))
    for name, x in (("q", q), ("kv_cache", kv_cache)):
        check_last_dim(name, x)
    if fp8 and (any(stride % 4 for stride in kv_cache.stride()[:-1]) or kv_cache.storage_offset() % 4):
        got = f"strides {kv_cache.stride()} from byte {kv_cache.storage_offset()} on"
        raise ShapeError(explain("kv_cache", "tokens that begin at multiples of 4 bytes", got,
                                 "Copy it: kv_cache.clone(memory_format=torch.contiguous_format)."))  # fmt: skip
    num_heads, num_heads_kv = q.shape[2], kv_cache.shape[2]
    if num_heads == 0 or num_heads_kv == 0 or num_heads % num_heads_kv:
        raise ShapeError(explain("q", "heads that are a multiple of those of kv_cache", f"{num_heads} and {num_heads_kv}"))
    if kv_cache.shape[1] == 0:
        raise ShapeError(explain("kv_cache", "a page size of at least 1", shape_of(kv_cache)))
    return fp8


def check_queries(seqlen_q, num_heads) -> None:
    """How many queries a call takes; of tokens where they share their keys."""
    if num_heads > MAX_HEADS:
        raise ShapeError(explain("q", f"at most {MAX_HEADS} heads", num_heads, "Split the heads over calls."))
    if seqlen_q > MAX_SEQLEN_Q:
        raise ShapeError(explain("q", f"at most {MAX_SEQLEN_Q} query tokens", seqlen_q,
                                 "Prefill in the unabsorbed form with flashtile.attention."))  # fmt: skip


def _check_dense(operands) -> None:
    q = operands.q
    for name in ("block_table", "cache_seqlens"):
        if getattr(operands, name) is None:
            raise ShapeError(explain(name, "a tensor", None, "Only sparse decode, with indices, has none."))
    if operands.topk_length is not None:
        raise ShapeError(explain("topk_length", "None without indices", shape_of(operands.topk_length)))
    check_int32("block_table", operands.block_table, q.device, (q.shape[0], None))
    check_int32("cache_seqlens", operands.cache_seqlens, q.device, (q.shape[0],))
    num_pages, page_size = operands.kv_cache.shape[:2]
    if num_pages == 0 and q.numel() > 0:
        raise ShapeError(explain("kv_cache", "at least one page beside block_table", shape_of(operands.kv_cache)))
    if operands.block_table.shape[1] * page_size > MAX_KEYS:
        most = f"at most {MAX_KEYS // page_size} columns ({MAX_KEYS} tokens)"
        raise ShapeError(explain("block_table", most, shape_of(operands.block_table)))


def _check_sparse(operands, num_heads_kv, causal) -> None:
    q = operands.q
    if causal:
        raise ValueRangeError(explain("causal", "False with indices", True, "Leave hidden keys out of the indices."))
    if num_heads_kv != 1:
        raise ShapeError(explain("kv_cache", "one latent head with indices", f"{num_heads_kv} heads"))
    for name in ("block_table", "cache_seqlens"):
        if getattr(operands, name) is not None:
            raise ShapeError(explain(name, "None with indices, which name slots of the cache", "a tensor",
                                     "A token's slot is page * page_size + offset."))  # fmt: skip
    check_int32("indices", operands.indices, q.device, (q.shape[0], q.shape[1], None))
    if operands.topk_length is not None:
        check_int32("topk_length", operands.topk_length, q.device, (q.shape[0],))


def _check_sinks(operands) -> None:
    q, sinks = operands.q, operands.sinks
    if sinks is None:
        return
    if not sinks.is_floating_point():
        raise DtypeError(explain("sinks", "a floating dtype", sinks.dtype))
    if tuple(sinks.shape) != (q.shape[2],):
        raise ShapeError(explain("sinks", f"shape ({q.shape[2]},), one logit a query head", shape_of(sinks)))
    check_device("sinks", sinks, q.device)
    check_last_dim("sinks", sinks)


def _check_values(operands, problem) -> None:
    """Lengths and pages; waits for the device. Entries of the block table past a sequence's pages may hold anything."""
    if problem.sparse:
        if operands.topk_length is not None:
            _check_range("topk_length", operands.topk_length, problem.topk)
        return
    _check_range("cache_seqlens", operands.cache_seqlens, operands.block_table.shape[1] * problem.page_size)
    for b, length in enumerate(operands.cache_seqlens.tolist()):
        for page in operands.block_table[b, : -(-length // problem.page_size)].tolist():
            if not 0 <= page < problem.num_pages:
                raise ValueRangeError(explain(f"block_table[{b}]", f"pages of 0 to {problem.num_pages - 1}", page))


def _check_range(name, lengths, most) -> None:
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= most:
            raise ValueRangeError(explain(f"{name}[{b}]", f"0 to {most}", length))
