"""The public functions: signature, docstring, and one call to the op. Read problem.py next, then dispatch.py."""

from flashtile import ops
from flashtile.problem import Operands


def attention(
    q, k, v, *, causal=False, window=(None, None), softmax_scale=None, softcap=0.0, alibi_slopes=None, sinks=None,
    dropout_p=0.0, deterministic=False, return_lse=False,
):  # fmt: skip
    """Exact attention softmax(softmax_scale * q kᵀ + mask) v, without storing the scores. Differentiable in q, k, v and sinks.

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
        softcap: softcap * tanh(score / softcap) before the mask; 0.0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads), fp32; adds -slope * |i + seqlen_k - seqlen_q - j| to the score of
            query i and key j. Not differentiable.
        sinks: (num_heads,), floating; one more logit a head in the denominator only.
        dropout_p: probability of dropping an attention weight, in [0, 1); kept weights are divided by 1 - dropout_p. The
            mask comes from torch's default generator of q's device.
        deterministic: the same bits in every backward pass. The portable and CPU tiers always give them; a tier that sums in
            the order of arrival refuses.
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
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, causal=False,
    window=(None, None), softmax_scale=None, softcap=0.0, alibi_slopes=None, sinks=None, dropout_p=0.0,
    deterministic=False, return_lse=False,
):  # fmt: skip
    """`attention` on sequences of different lengths packed one after the other, without padding.

    Args:
        q: (total_q, num_heads, head_dim); dtypes, strides and head dims as in `attention`.
        k: (total_k, num_heads_kv, head_dim).
        v: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: (batch + 1,), int32, on q's device; sequence b owns rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        cu_seqlens_k: (batch + 1,), int32; the same for k and v. A length may be 0.
        max_seqlen_q: the longest query sequence, an int; a smaller value leaves rows out (FLASHTILE_DEBUG=1 checks).
        max_seqlen_k: the longest key sequence, an int.
        seqused_q: (batch,), int32; of sequence b only the first seqused_q[b] rows are used. Default all.
        seqused_k: (batch,), int32; the same for keys.
        The rest as in `attention`, per sequence.
    Returns:
        out (total_q, num_heads, head_dim_v), q.dtype; with return_lse also lse (num_heads, total_q), fp32. Rows that belong
        to no sequence, or lie past seqused_q, have out 0, lse -inf and gradients 0.
    Raises:
        As `attention`. The values of index tensors are checked where that needs no wait for the device (CPU tensors), and
        everywhere with FLASHTILE_DEBUG=1.
    """
    operands = Operands(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks)
    return ops.attention(operands, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, window=window,
                         softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, deterministic=deterministic,
                         return_lse=return_lse)  # fmt: skip
