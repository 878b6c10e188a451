"""The public functions: signature, docstring, and one call to the op. Read problem.py next, then dispatch.py.

Results are annotated as Any: a tensor, or a tuple of tensors with return_lse.
"""

from typing import Any

import torch
from torch import Tensor

from flashtile import kvcache_ops, ops
from flashtile.errors import ShapeError, explain
from flashtile.problem import Operands

# (left, right) keys beside the diagonal; None is unbounded
Window = tuple[int | None, int | None]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = (None, None),
    softmax_scale: float | None = None, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, dropout_p: float = 0.0, deterministic: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Exact attention softmax(softmax_scale * q kᵀ + mask) v, without storing the scores.

    Differentiable in q, k, v, alibi_slopes and sinks.

    Inside torch.autocast q, k and v are cast to its dtype. Second derivatives and the transforms of torch.func are refused.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), fp16, bf16 or fp32 (on a CPU also fp64), last dim contiguous, other
            strides free. head_dim 8 to 256 in steps of 8.
        k: (batch, seqlen_k, num_heads_kv, head_dim), same dtype; num_heads % num_heads_kv == 0. Query head h reads
            key-value head h // (num_heads / num_heads_kv).
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), same dtype; head_dim_v 8 to 256 in steps of 8.
        causal: hide keys after the query; aligned to the bottom-right corner when seqlen_q != seqlen_k.
        window: (left, right) keys visible on each side of that diagonal, in tokens; None is unbounded. causal makes
            right 0.
        softmax_scale: multiplies q kᵀ; default head_dim ** -0.5.
        softcap: softcap * tanh(score / softcap) before the mask; 0.0 is off. On Hopper, in bf16 with a softcap of at most 55,
            sums of values over the keys of 2**48 and more may overflow to inf.
        alibi_slopes: (num_heads,) or (batch, num_heads), fp32; adds -slope * |i + seqlen_k - seqlen_q - j| to the score of
            query i and key j.
        sinks: (num_heads,), floating; one more logit a head in the denominator only.
        dropout_p: probability of dropping an attention weight, in [0, 1), rounded to a multiple of 2**-15; kept weights are
            divided by 1 - dropout_p. The mask comes from torch's default generator of q's device.
        deterministic: the same bits in every backward pass. The portable and CPU tiers always give them; the Hopper tier then
            sums in a fixed order (its time: benchmarks/results/nvidia-h200/deterministic.json). Without it, dq on Hopper, and
            dk and dv where query heads share keys, may differ in their last bits from run to run, except in calls where the
            fixed order is the faster one (`flashtile explain` says so).
        return_lse: also return the log-sum-exp of each row; gradients flow through it.
    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), q.dtype; with return_lse also lse (batch, num_heads, seqlen_q), fp32
        (fp64 for fp64), natural log, sinks included. A row with no visible key gives out 0, lse -inf (or its sink),
        and gradients 0.
    Raises:
        ShapeError, DtypeError, DeviceError, ValueRangeError: which argument, what was expected, what came.
        UnsupportedError: no tier takes the problem; lists each refusal.
    Source: Dao 2023, FlashAttention-2, algorithms 1 and 2.
    """
    operands = Operands(q, k, v, alibi_slopes=alibi_slopes, sinks=sinks)
    return ops.attention(operands, causal=causal, window=window, softmax_scale=softmax_scale, softcap=softcap,
                         dropout_p=dropout_p, deterministic=deterministic, return_lse=return_lse)  # fmt: skip


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, causal: bool = False, window: Window = (None, None),
    softmax_scale: float | None = None, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, dropout_p: float = 0.0, deterministic: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    """`attention` on sequences of different lengths packed one after the other, without padding.

    Args:
        q: (total_q, num_heads, head_dim); dtypes, strides and head dims as in `attention`.
        k: (total_k, num_heads_kv, head_dim).
        v: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: (batch + 1,), int32, on q's device; sequence b owns rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        cu_seqlens_k: (batch + 1,), int32; the same for k and v. A length may be 0. Where it is the same tensor object, causal
            forwards on Hopper are faster: lengths are then known to be equal.
        max_seqlen_q: the longest query sequence, an int; a smaller value leaves rows out (FLASHTILE_DEBUG=1 checks).
        max_seqlen_k: the longest key sequence, an int.
        seqused_q: (batch,), int32; of sequence b only the first seqused_q[b] rows are used. Default all.
        seqused_k: (batch,), int32; the same for keys.
        The rest as in `attention`, per sequence.
    Returns:
        out (total_q, num_heads, head_dim_v), q.dtype; with return_lse also lse (num_heads, total_q), fp32 (fp64 for fp64).
        Rows that belong to no sequence, or lie past seqused_q, have out 0, lse -inf and gradients 0.
    Raises:
        As `attention`. The values of index tensors are checked where that needs no wait for the device (CPU tensors), and
        everywhere with FLASHTILE_DEBUG=1.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None:
        raise ShapeError(explain("cu_seqlens_q", "a tensor of shape (batch + 1,)", None, "A batch of one length: attention."))
    operands = Operands(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks)
    return ops.attention(operands, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, window=window,
                         softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, deterministic=deterministic,
                         return_lse=return_lse)  # fmt: skip


def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, k: Tensor | None = None, v: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None, block_table: Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None, rotary_interleaved: bool = True, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, causal: bool = False, window: Window = (None, None),
    softmax_scale: float | None = None, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, num_splits: int = 0, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of new queries over a key-value cache, which first gets their keys and values in place. No gradients.

    Lengths and block tables stay on the device: no call waits for it, and a CUDA graph reads them anew at each replay.
    Inside torch.autocast q, k and v are cast to the dtype of a cache that is not fp8.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim) with cu_seqlens_q. fp16, bf16, fp32
            (on a CPU also fp64) or fp8 (e4m3; sm_89 and newer, and CPUs). seqlen_q is 1 in decoding, a few with
            speculation, thousands in a prefill.
        k_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim), a row a sequence; or with block_table
            (num_pages, page_size, num_heads_kv, head_dim) with any page size. The dtype of q, or fp8. Slots outside of a
            sequence are never read into a result, nor pages that lie left of the window of all its queries.
        v_cache: the same with head_dim_v.
        k: (batch, seqlen_new, num_heads_kv, head_dim), written to the slots cache_seqlens .. cache_seqlens + seqlen_new - 1;
            or (total_new, num_heads_kv, head_dim) with cu_seqlens_k_new. The dtype of the cache. An fp8 cache also takes
            other floating dtypes: k goes there divided by k_descale, v by v_descale, limited to fp8's largest number.
        v: the same with head_dim_v.
        cache_seqlens: (batch,), int32, or one int: the length of each sequence before the append, its left padding
            counted. Default all slots.
        block_table: (batch, pages of a sequence), int32; entry i holds slots i * page_size to (i + 1) * page_size - 1.
            Entries past a sequence's length are not read.
        cache_batch_idx: (batch,), int32: the row of each sequence in a cache without pages; default 0, 1, 2, ... Two
            sequences that append to one row leave the values of either.
        cache_leftpad: (batch,), int32: the slot where a sequence begins; default 0.
        cu_seqlens_q, max_seqlen_q: packed queries, as in `attention_varlen`; one of more than max_seqlen_q is left out.
        cu_seqlens_k_new: (batch + 1,), int32: k and v are packed.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2), a floating dtype; rotate the first rotary_dim columns of k
            before it is written, and of q; they need k. Token t has position cache_seqlens + t; without causal and window
            all queries have that of the first.
        rotary_seqlens: (batch,), int32: positions begin here instead of at cache_seqlens.
        rotary_interleaved: columns (0, 1), (2, 3), ... are rotated together (GPT-J); else (0, rotary_dim / 2), ... (NeoX).
        q_descale, k_descale, v_descale: (batch, num_heads_kv), fp32, 0 or more: what fp8 values are multiplied with;
            default 1. Many queries of fp8 are multiplied in fp8 on Hopper, weights too, and added up in fp32: out is off by
            2% (root mean square) of values of mean 0. Other calls over fp8 multiply in fp16, or fp32.
        causal, window, softmax_scale, softcap, alibi_slopes, sinks: as in `attention`; the last query stands at the last key.
        num_splits: into how many parts the keys of a sequence are cut, so that few sequences fill a GPU. 0 lets flashtile
            choose by the lengths of the whole batch; with a fixed number (1 to 256) the result of a sequence is bitwise
            the same whatever else is in the batch (packed queries: for one max_seqlen_q, by which tiles are chosen).
        return_lse: also return the log-sum-exp of each row.
    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v) or (total_q, num_heads, head_dim_v), q.dtype, bf16 for fp8; with
        return_lse also lse (batch, num_heads, seqlen_q) or (num_heads, total_q), fp32 (fp64 for fp64), natural log. A
        query without a visible key gives out 0 and lse -inf (or its sink), as do packed rows behind the last sequence.
    Raises:
        ShapeError, DtypeError, DeviceError, ValueRangeError: which argument, what was expected, what came. The values of
        index tensors are checked where that needs no wait for the device (CPU tensors), and everywhere with
        FLASHTILE_DEBUG=1, which says which sequence is wrong. Else a length is limited to the cache's size, packed queries to
        those that are there, new keys past the cache's size or on pages that don't exist are not written, a page or row that
        does not exist is read as the nearest one, and a rotary position as the nearest row: the result of that sequence (and of
        those that share rows with it where cu_seqlens_k_new falls) means nothing, that of others stays right.
        UnsupportedError: no tier takes the call, or a tensor requires a gradient; lists each refusal.
    Source: Dao et al. 2023, Flash-Decoding for long-context inference; Kwon et al. 2023, PagedAttention.
    """
    return kvcache_ops.attention_with_kvcache(
        (q, k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new,
         rotary_cos, rotary_sin, rotary_seqlens, q_descale, k_descale, v_descale, alibi_slopes, sinks),
        (max_seqlen_q, rotary_interleaved, causal, window, softmax_scale, softcap, num_splits, return_lse),
    )  # fmt: skip


def combine(
    out_partial: Tensor, lse_partial: Tensor, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Merge attention over parts of the keys into attention over all of them.

    Args:
        out_partial: (splits, batch, seqlen_q, num_heads, head_dim_v), fp32, fp16 or bf16, last dim contiguous, head_dim_v 1
            to 512: each part's own output, divided by its own sum.
        lse_partial: (splits, batch, num_heads, seqlen_q), fp32, natural log. -inf where a part sees no key: its output is
            not read into the result and may be anything.
        out_dtype: of out, fp16, bf16, fp32 or fp64; default that of out_partial.
    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v); lse (batch, num_heads, seqlen_q), fp32. Where all parts are empty out is
        0 and lse -inf. No gradients.
    Raises:
        ShapeError, DtypeError, DeviceError: which argument, what was expected, what came.
        UnsupportedError: a tensor requires a gradient.
    """
    return kvcache_ops.combine(out_partial, lse_partial, out_dtype)
