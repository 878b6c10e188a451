"""FlashAttention 2's functions for training, with its signatures and conventions, over flashtile.api.

    from flashtile import flash_attn_func  # for: from flash_attn import flash_attn_func

What its conventions are, where they are not flashtile's own:

- window_size=(left, right): a negative side is unbounded, and so is a side of seqlen_k and more (max_seqlen_k when packed).
- A head dim that is no multiple of 8 is padded with zeros, a copy; softmax_scale defaults to the original head_dim ** -0.5.
- A tensor whose last dim is not contiguous is copied.
- return_attn_probs=True returns (out, lse, S_dmask). A row without a visible key has lse +inf. S_dmask is an empty tensor.
- max_seqlen_q and max_seqlen_k may be tensors; reading one waits for its device.

What differs, because flash_attn is narrower there or its answer is an artefact of its kernels:

- fp32 is taken too, and fp64 on a CPU; softcap goes with dropout; v may have a head dim of its own; CPU tensors work.
- Gradients flow through lse; flash_attn ignores them.
- With causal and ALiBi, lse is that of the documented bias -slope * |i + seqlen_k - seqlen_q - j|. flash_attn's causal kernel
  adds slope * j instead: the same out, an lse that is larger by slope * (i + seqlen_k - seqlen_q).
- The dropout mask is flashtile's own: another mask for the same seed, and a probability that is not rounded to 8 bits.
- S_dmask with dropout_p > 0 and block_table are refused.
"""

import torch
import torch.nn.functional as F

from flashtile import api
from flashtile.errors import UnsupportedError, explain
from flashtile.problem import HEAD_DIM_MULTIPLE


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """`flashtile.attention` under flash_attn's name and conventions (see the module).

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), fp16, bf16 or fp32; head_dim at most 256.
        k: (batch, seqlen_k, num_heads_kv, head_dim); num_heads % num_heads_kv == 0.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v).
        dropout_p: probability of dropping an attention weight; 0.0 in evaluation.
        softmax_scale: default head_dim ** -0.5.
        causal: hide keys after the query, aligned bottom-right.
        window_size: (left, right) tokens around that diagonal; negative is unbounded.
        softcap: softcap * tanh(score / softcap); 0.0 is off.
        alibi_slopes: (num_heads,) or (batch, num_heads), fp32.
        deterministic: the same bits in every backward pass.
        return_attn_probs: also return lse and S_dmask.
    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), q.dtype; with return_attn_probs (out, lse, S_dmask), lse
        (batch, num_heads, seqlen_q), fp32, natural log, +inf in rows without a visible key; S_dmask empty.
    Raises:
        As `flashtile.attention`. UnsupportedError: return_attn_probs with dropout.
    """
    _refuse_probs_of_dropout(dropout_p, return_attn_probs)
    options = _options(q, k.shape[1], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    result = api.attention(*map(_prepared, (q, k, v)), **options, return_lse=return_attn_probs)
    return _convention(result, v.shape[-1], return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """`flash_attn_func` with k and v in one tensor, kv (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    k, v = kv.unbind(-3)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)  # fmt: skip


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """`flash_attn_func` with q, k and v in one tensor, qkv (batch, seqlen, 3, num_heads, head_dim)."""
    q, k, v = qkv.unbind(-3)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)  # fmt: skip


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):  # fmt: skip
    """`flashtile.attention_varlen` under flash_attn's name and conventions (see the module).

    Args:
        q: (total_q, num_heads, head_dim); k: (total_k, num_heads_kv, head_dim); v: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: (batch + 1,), int32; sequence b owns rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. cu_seqlens_k: the
            same for k and v.
        max_seqlen_q: the longest query sequence, an int, or a tensor at the price of a wait; max_seqlen_k: the same for keys.
        block_table: must be None.
        The rest as in `flash_attn_func`.
    Returns:
        out (total_q, num_heads, head_dim_v), q.dtype; with return_attn_probs (out, lse, S_dmask), lse (num_heads, total_q),
        fp32. Rows that belong to no sequence have out 0 and lse +inf (flash_attn leaves them uninitialised).
    Raises:
        As `flashtile.attention_varlen`. UnsupportedError: block_table, or return_attn_probs with dropout.
    """
    if block_table is not None:
        raise UnsupportedError(explain("block_table", "None: keys and values in one packed tensor", "a paged cache",
                                       "Gather the pages of each sequence into k and v first."))  # fmt: skip
    _refuse_probs_of_dropout(dropout_p, return_attn_probs)
    max_seqlen_q, max_seqlen_k = _as_int(max_seqlen_q), _as_int(max_seqlen_k)
    options = _options(q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    result = api.attention_varlen(*map(_prepared, (q, k, v)), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                                  max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options,
                                  return_lse=return_attn_probs)  # fmt: skip
    return _convention(result, v.shape[-1], return_attn_probs)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                    deterministic=False, return_attn_probs=False):  # fmt: skip
    """`flash_attn_varlen_func` with k and v in one tensor, kv (total_k, 2, num_heads_kv, head_dim)."""
    k, v = kv.unbind(-3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)  # fmt: skip


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):  # fmt: skip
    """`flash_attn_varlen_func` with q, k and v in one tensor, qkv (total, 3, num_heads, head_dim), and the same lengths."""
    q, k, v = qkv.unbind(-3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
                                  window_size, softcap, alibi_slopes, deterministic, return_attn_probs)  # fmt: skip


def _options(q, seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic):
    """flash_attn's options in flashtile's words."""
    left, right = (None if side < 0 or side >= seqlen_k else side for side in window_size)
    return dict(
        causal=causal, window=(left, right), softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        softcap=softcap, alibi_slopes=None if alibi_slopes is None else alibi_slopes.detach(), dropout_p=dropout_p,
        deterministic=deterministic,
    )  # fmt: skip


def _prepared(x):
    """x with a contiguous last dim, padded with zeros to a multiple of 8; x itself where it is so already."""
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    if missing:
        return F.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


def _convention(result, head_dim_v, return_attn_probs):
    """out without its padding; with return_attn_probs (out, lse, S_dmask) as flash_attn has them."""
    out, lse = result if return_attn_probs else (result, None)
    if out.shape[-1] != head_dim_v:
        out = out[..., :head_dim_v]
    if not return_attn_probs:
        return out
    return out, torch.where(lse == float("-inf"), float("inf"), lse), out.new_empty((0,))


def _as_int(length):
    return int(length) if isinstance(length, torch.Tensor) else length


def _refuse_probs_of_dropout(dropout_p, return_attn_probs):
    if return_attn_probs and dropout_p > 0:
        raise UnsupportedError(explain("return_attn_probs", "dropout_p == 0", f"dropout_p = {dropout_p}",
                                       "The dropped weights are never stored; flashtile.attention(return_lse=True) "
                                       "returns lse beside dropout."))  # fmt: skip
