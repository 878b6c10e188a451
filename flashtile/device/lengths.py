"""Where a sequence begins and how long it is, batched or packed."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Packing(NamedTuple):
    """Pointers to int32 index tensors; all None for a batched call."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any


class Lengths(NamedTuple):
    """One sequence: its first row in packed tensors (0 in batched ones) and its lengths."""

    start_q: Any
    start_k: Any
    seqlen_q: Any
    seqlen_k: Any


@triton.jit
def load_lengths(packing, batch, seqlen_q, seqlen_k):
    """Lengths of one sequence; seqlen_q and seqlen_k hold for every sequence of a batched call."""
    if packing.cu_seqlens_q is None:
        return Lengths(0, 0, seqlen_q, seqlen_k)
    else:
        start_q = tl.load(packing.cu_seqlens_q + batch)
        start_k = tl.load(packing.cu_seqlens_k + batch)
        if packing.seqused_q is None:
            used_q = tl.load(packing.cu_seqlens_q + batch + 1) - start_q
        else:
            used_q = tl.load(packing.seqused_q + batch)
        if packing.seqused_k is None:
            used_k = tl.load(packing.cu_seqlens_k + batch + 1) - start_k
        else:
            used_k = tl.load(packing.seqused_k + batch)
        return Lengths(start_q.to(tl.int64), start_k.to(tl.int64), used_q, used_k)
