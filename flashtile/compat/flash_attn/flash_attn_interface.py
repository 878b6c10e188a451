"""FlashAttention 2's functions, with its signatures and conventions, over flashtile.api.

    from flashtile import flash_attn_func  # for: from flash_attn import flash_attn_func

What its conventions are, where they are not flashtile's own:

- window_size=(left, right): a negative side is unbounded, and so is a side of seqlen_k and more (max_seqlen_k when packed).
- A head dim that is no multiple of 8 is padded with zeros, a copy; softmax_scale defaults to the original head_dim ** -0.5.
- A tensor whose last dim is not contiguous is copied.
- return_attn_probs=True returns (out, lse, S_dmask). A row without a visible key has lse +inf. S_dmask is an empty tensor
  without dropout; with it, see `dropped_scores`.
- max_seqlen_q, max_seqlen_k and the two sides of window_size may be tensors; reading one waits for its device. Numbers may be
  numpy's. A softcap below 0 is off, and num_splits below 1 is 0.
- A cache with more rows than q has sequences, without cache_batch_idx, is used in its first rows.

What differs, because flash_attn is narrower there or its answer is an artefact of its kernels:

- fp32 is taken too, and fp64 on a CPU; softcap goes with dropout; v may have a head dim of its own; CPU tensors work.
- Gradients flow through lse; flash_attn ignores them.
- With causal and ALiBi, lse is that of the documented bias -slope * |i + seqlen_k - seqlen_q - j|. flash_attn's causal kernel
  adds slope * j instead: the same out, an lse that is larger by slope * (i + seqlen_k - seqlen_q).
- The dropout mask is flashtile's own: another mask for the same seed, and a probability rounded to 15 bits, not to 8.
- S_dmask is computed apart, in torch, in memory that grows with seqlen_q * seqlen_k.
- A page of a cache may have any size, and a sequence appends to a paged cache as well as to another. `leftpad_k` of
  `_flash_attn_varlen_forward` goes with pages too.
- Neither the operators torch.ops.flash_attn nor the autograd classes (FlashAttnFunc and its kin) are there.

The functions with an underscore are those that programs for long sequences import (ring attention, context parallelism): one
direction each, without autograd, in flash_attn's order of arguments and results, keyword or not.
"""

import torch
import torch.nn.functional as F

from flashtile import api, ops
from flashtile.checks import check_int32, check_is_tensor, check_number
from flashtile.compat.arguments import (
    as_int,
    as_number,
    check_backward,
    check_dims_before_padding,
    check_rows,
    contiguous,
    default_scale,
    detached,
    lengths_of,
    needs_padding,
    padded,
    padded_rows,
    refusing_gradients,
    renamed,
    row_sums,
    softcap_of,
    splits_of,
    strided_rows,
    unpacked,
    unstrided,
)
from flashtile.errors import DtypeError, FlashtileError, UnsupportedError, explain
from flashtile.kvcache_problem import check_own_slots, check_rotary_columns
from flashtile.problem import INT32_MAX, Operands, is_autocast
from flashtile.reference.dropout import keep_scale
from flashtile.reference.lengths import sequences
from flashtile.reference.scores import logits
from flashtile.reference.softmax import pivot

# flash_attn's switch for its kernels on AMD GPUs
USE_TRITON_ROCM = False
# flashtile's names of arguments, and those of a packed call over pages, and of one with all in one tensor
PAGED_NAMES = {"k_cache": "k", "v_cache": "v", "cache_leftpad": "leftpad_k"}
PACKED_NAMES = {"cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens", "max_seqlen_q": "max_seqlen",
                "max_seqlen_k": "max_seqlen"}  # fmt: skip
# Rows and columns of S_dmask are padded to a multiple of this, and so many columns share a running maximum.
PROBS_BLOCK = 128
_NO_GRADIENTS_OVER_PAGES = explain("block_table", "no gradient asked for beside it", "a backward pass",
                                   "Give k and v as packed rows, without pages.")  # fmt: skip


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
        alibi_slopes: (num_heads,) or (batch, num_heads), fp32; without a gradient, as in flash_attn.
        deterministic: the same bits in every backward pass.
        return_attn_probs: also return lse and S_dmask.
    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), q.dtype; with return_attn_probs (out, lse, S_dmask), lse
        (batch, num_heads, seqlen_q), fp32, natural log, +inf in rows without a visible key; S_dmask as `dropped_scores`, empty
        without dropout.
    Raises:
        As `flashtile.attention`.
    """
    operands = Operands(*padded_rows(q, k, v), alibi_slopes=detached(alibi_slopes))
    options = _options(q, k.shape[1], dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    return _attend(operands, options, v.shape[-1], return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """`flash_attn_func` with k and v in one tensor, kv (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    k, v = unpacked("kv", kv, 5)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)  # fmt: skip


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    """`flash_attn_func` with q, k and v in one tensor, qkv (batch, seqlen, 3, num_heads, head_dim)."""
    q, k, v = unpacked("qkv", qkv, 5)
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
        block_table: (batch, pages of a sequence), int32: k and v are pages (num_pages, page_size, num_heads_kv, head_dim), and
            cu_seqlens_k gives the lengths alone. No dropout, and no gradients: a backward pass raises.
        The rest as in `flash_attn_func`.
    Returns:
        out (total_q, num_heads, head_dim_v), q.dtype; with return_attn_probs (out, lse, S_dmask), lse (num_heads, total_q),
        fp32. Rows that belong to no sequence have out 0 and lse +inf (flash_attn leaves them uninitialised).
    Raises:
        As `flashtile.attention_varlen`; with block_table as `flashtile.attention_with_kvcache`, but that a tensor may require
        a gradient: its backward pass raises UnsupportedError.
    """
    max_seqlen_q, max_seqlen_k = as_int(max_seqlen_q), as_int(max_seqlen_k)
    if block_table is not None:
        out, lse, empty, _ = _flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            *_sides(window_size), softcap, alibi_slopes, block_table=block_table,
        )  # fmt: skip
        out, lse = (refusing_gradients(x, _NO_GRADIENTS_OVER_PAGES, q, k, v, alibi_slopes) for x in (out, lse))
        return (out, lse, empty) if return_attn_probs else out
    operands = Operands(*padded_rows(q, k, v), cu_seqlens_q, cu_seqlens_k, alibi_slopes=detached(alibi_slopes))
    options = _options(q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    return _attend(operands, options | {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}, v.shape[-1],
                   return_attn_probs)  # fmt: skip


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                    deterministic=False, return_attn_probs=False):  # fmt: skip
    """`flash_attn_varlen_func` with k and v in one tensor, kv (total_k, 2, num_heads_kv, head_dim)."""
    k, v = unpacked("kv", kv, 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)  # fmt: skip


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):  # fmt: skip
    """`flash_attn_varlen_func` with q, k and v in one tensor, qkv (total, 3, num_heads, head_dim), and the same lengths."""
    q, k, v = unpacked("qkv", qkv, 4)
    try:
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
                                      window_size, softcap, alibi_slopes, deterministic, return_attn_probs)  # fmt: skip
    except FlashtileError as error:
        raise renamed(error, PACKED_NAMES) from None


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """`flashtile.attention_with_kvcache` under flash_attn's name and conventions (see the module). No gradients.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim), or pages (num_pages, page_size, num_heads_kv, head_dim)
            with block_table; v_cache: the same. A head dim that is no multiple of 8 makes a copy of the cache.
        k, v: (batch, seqlen_new, num_heads_kv, head_dim), written into the cache behind cache_seqlens before attention.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2); rotate q and k, see `flashtile.attention_with_kvcache`.
        cache_seqlens: an int or (batch,), int32: the lengths before the append.
        cache_batch_idx, cache_leftpad, block_table: as in `flashtile.attention_with_kvcache`.
        num_splits: into how many parts keys are cut; 0 lets flashtile choose.
        The rest as in `flash_attn_func`.
    Returns:
        out (batch, seqlen_q, num_heads, head_dim); with return_softmax_lse (out, lse), lse (batch, num_heads, seqlen_q), fp32,
        +inf in rows without a visible key.
    Raises:
        As `flashtile.attention_with_kvcache`.
    """
    return _with_cache(
        q, k_cache, v_cache, None, window_size, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=unstrided(lengths_of(cache_seqlens)),
        cache_batch_idx=None if cache_batch_idx is None else unstrided(cache_batch_idx), cache_leftpad=cache_leftpad,
        block_table=None if block_table is None else unstrided(block_table), softmax_scale=softmax_scale, causal=causal,
        softcap=softcap, rotary_interleaved=bool(rotary_interleaved), alibi_slopes=alibi_slopes, num_splits=num_splits,
        return_lse=return_softmax_lse,
    )  # fmt: skip


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                        return_softmax):  # fmt: skip
    """One forward pass without autograd.

    Args:
        As `flash_attn_func`; softmax_scale is needed; head dims are multiples of 8.
        return_softmax: also make S_dmask; needs dropout.
    Returns:
        (out, lse (batch, num_heads, seqlen_q), S_dmask or an empty tensor, rng_state int64 (2,)).
    """
    operands = Operands(*strided_rows(q, k, v), alibi_slopes=alibi_slopes)
    options = _options(q, k.shape[1], dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap)
    return _forward(operands, options, return_softmax)


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None,
    seqused_k=None, zero_tensors=False, num_splits=0,
):  # fmt: skip
    """`_flash_attn_forward` on packed sequences; lse (num_heads, total_q).

    Args:
        block_table: keys in pages, see `flash_attn_varlen_func`; cu_seqlens_k gives lengths alone.
        leftpad_k: (batch,), int32: so many keys at the start of a sequence are not seen; packed, in pages, or in a cache of 4
            dims, of which cu_seqlens_k gives lengths alone.
        seqused_k: (batch,), int32: the lengths instead of those of cu_seqlens_k, padding counted.
        num_splits: into how many parts keys in pages are cut; else nothing.
        zero_tensors: rows of no sequence are always 0.
    """
    max_seqlen_q, max_seqlen_k = as_int(max_seqlen_q), as_int(max_seqlen_k)
    window_size = window_size_left, window_size_right
    skips = leftpad_k is not None and block_table is None and isinstance(k, torch.Tensor) and k.dim() == 3
    if not skips and (block_table is not None or leftpad_k is not None):
        if dropout_p:
            raise UnsupportedError(explain("block_table", "dropout_p == 0 beside it", f"dropout_p = {dropout_p}"))
        if seqused_k is None:
            check_is_tensor("cu_seqlens_k", cu_seqlens_k)
            check_int32("cu_seqlens_k", cu_seqlens_k, cu_seqlens_k.device, (None,))
        names = PAGED_NAMES | {"cache_seqlens": "cu_seqlens_k.diff()" if seqused_k is None else "seqused_k"}
        try:
            out, lse = _with_cache(
                q, k, v, max_seqlen_k, window_size, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
                cache_seqlens=cu_seqlens_k.diff() if seqused_k is None else seqused_k, block_table=block_table,
                cache_leftpad=leftpad_k, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
                alibi_slopes=alibi_slopes, num_splits=num_splits, return_lse=True,
            )  # fmt: skip
        except FlashtileError as error:
            raise renamed(error, names) from None
        return out, lse, out.new_empty((0,)), out.new_zeros((2,), dtype=torch.int64)
    operands = Operands(*strided_rows(q, k, v), cu_seqlens_q, cu_seqlens_k, None, seqused_k, alibi_slopes)
    options = _options(q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap)
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if not skips:
        return _forward(operands, options, return_softmax)
    out, lse, probs, rng_state = _forward(_behind_padding(operands, leftpad_k), options, return_softmax)
    return out, lse, probs[1::2], rng_state


def _behind_padding(operands, leftpad_k):
    """Packed operands without the first leftpad_k keys of each sequence: these become a sequence of their own, in front of it
    and without a query, so that the batch is twice as large."""
    q, cu_seqlens_q, cu_seqlens_k, used, slopes = (
        operands.q, operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqused_k, operands.alibi_slopes,
    )  # fmt: skip
    indices = {"leftpad_k": leftpad_k, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    indices |= {} if used is None else {"seqused_k": used}
    for name, x in indices.items():
        check_is_tensor(name, x)
    batch = leftpad_k.numel()
    for name, x in indices.items():
        check_int32(name, x, q.device, (batch + 1 if name.startswith("cu_") else batch,))
    lengths = cu_seqlens_k.diff() if used is None else used
    skipped = torch.minimum(leftpad_k, lengths)
    starts = cu_seqlens_k[:-1]
    return operands._replace(
        cu_seqlens_q=cu_seqlens_q.repeat_interleave(2)[:-1],
        cu_seqlens_k=torch.cat([torch.stack([starts, starts + skipped], 1).flatten(), cu_seqlens_k[-1:]]),
        seqused_k=torch.stack([torch.zeros_like(skipped), lengths - skipped], 1).flatten(),
        alibi_slopes=slopes.repeat_interleave(2, 0) if isinstance(slopes, torch.Tensor) and slopes.dim() == 2 else slopes,
    )


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """One backward pass without autograd.

    Args:
        dout, q, k, v, out: as `_flash_attn_forward` has them.
        softmax_lse: (batch, num_heads, seqlen_q), fp32; that of the whole row, where out is one part of it.
        dq, dk, dv: written in place; None is left out.
        rng_state: what the forward pass returned; needed with dropout.
    Returns:
        rowsum(dout * out), fp32 (fp64 for fp64), (batch, num_heads, seqlen_q rounded up to 128).
    """
    operands = Operands(*strided_rows(q, k, v), alibi_slopes=alibi_slopes, rng_state=rng_state)
    options = _options(q, k.shape[1], dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
                       deterministic)  # fmt: skip
    row_sums = _backward(operands, options, dout, out, softmax_lse, (dq, dk, dv)).transpose(1, 2)
    return F.pad(row_sums, (0, -row_sums.shape[-1] % PROBS_BLOCK))


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    """`_flash_attn_backward` on packed sequences; lse (num_heads, total_q), and returns (num_heads, total_q + 128 * batch), of
    which the first total_q columns are rowsum(dout * out) and the rest 0."""
    operands = Operands(*strided_rows(q, k, v), cu_seqlens_q, cu_seqlens_k, alibi_slopes=alibi_slopes, rng_state=rng_state)
    max_seqlen_q, max_seqlen_k = as_int(max_seqlen_q), as_int(max_seqlen_k)
    options = _options(q, max_seqlen_k, dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap,
                       deterministic)  # fmt: skip
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    row_sums = _backward(operands, options, dout, out, softmax_lse, (dq, dk, dv)).transpose(0, 1)
    return F.pad(row_sums, (0, PROBS_BLOCK * (cu_seqlens_q.shape[0] - 1)))


# Names of the same functions for torch.compile, which needs no other ones here
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    """How many columns of S_dmask share a running maximum; here the same number always."""
    return PROBS_BLOCK


def dropped_scores(operands, problem):
    """S_dmask: the weights that dropout dropped and kept, as flash_attn shows them for tests.

    Element (i, j) is exp(score - m), negative where it is dropped, m being the largest score of row i in the block of
    PROBS_BLOCK keys that holds j and in all later ones; times exp(m - lse) it is the softmax.

    Returns:
        (batch, num_heads, seqlen_q, seqlen_k), both lengths rounded up to PROBS_BLOCK, the dtype of q; 0 outside.
    """
    result = _empty_scores(operands.q, problem)
    for seqs in sequences(operands, problem):
        if not seqs.seqlen_q or not seqs.seqlen_k:
            continue
        rows, cols = slice(0, seqs.seqlen_q), slice(0, seqs.seqlen_k)
        scores = torch.einsum("bhgmd,bhnd->bhgmn", seqs.of_q(operands.q).float(), seqs.of_k(operands.k).float())
        scores = logits(scores, rows, cols, seqs, operands.alibi_slopes)
        blocks = F.pad(scores, (0, -seqs.seqlen_k % PROBS_BLOCK), value=float("-inf")).unflatten(-1, (-1, PROBS_BLOCK))
        row_max = blocks.amax(-1).flip(-1).cummax(-1).values.flip(-1)
        weights = torch.exp(blocks - pivot(row_max)[..., None]).flatten(-2)[..., : seqs.seqlen_k]
        kept = keep_scale(rows, cols, seqs, operands.rng_state, torch.float32) > 0
        signed = torch.where(kept, weights, -weights).flatten(1, 2)
        result[seqs.batch, :, : seqs.seqlen_q, : seqs.seqlen_k] = signed.to(result.dtype)
    return result


def _with_cache(q, k_cache, v_cache, capacity, window_size, *, k=None, v=None, softmax_scale, causal, return_lse, softcap,
                num_splits, rotary_cos=None, rotary_sin=None, alibi_slopes=None, block_table=None, **options):  # fmt: skip
    """A call on a cache; one with a head dim that must be padded goes over a copy, and what it appends is copied back.

    capacity: of a sequence; None for all the slots that it has.
    """
    check_rows(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    appends = k is not None and v is not None
    if appends:
        check_rows(q, k, v)
    if needs_padding(q, k_cache, v_cache, *((k, v) if appends else ())):
        _check_cache_dims(q, k_cache, v_cache, k, v)
        check_rotary_columns(rotary_cos, q.shape[-1])
    if appends:
        # Also without padding: a copy with another stride has slots of its own
        check_own_slots(k_cache, v_cache)
    q, k_cache, v_cache, k, v = map(detached, (q, k_cache, v_cache, k, v))
    if q.shape[0] < k_cache.shape[0] == v_cache.shape[0] and q.dim() == 4:
        if block_table is None and options.get("cache_batch_idx") is None:
            k_cache, v_cache = k_cache[: q.shape[0]], v_cache[: q.shape[0]]
    caches = padded(k_cache), padded(v_cache)
    result = api.attention_with_kvcache(
        padded(q), *caches, k=padded(k) if appends else k, v=padded(v) if appends else v, block_table=block_table,
        window=_window(window_size, _slots(k_cache, block_table) if capacity is None else capacity, rotary_cos is not None),
        softmax_scale=_scale(softmax_scale, q), causal=bool(causal), softcap=softcap_of(softcap),
        num_splits=splits_of(num_splits), return_lse=bool(return_lse), rotary_cos=detached(rotary_cos),
        rotary_sin=detached(rotary_sin), alibi_slopes=detached(alibi_slopes), **options,
    )  # fmt: skip
    if appends:
        for cache, used in zip((k_cache, v_cache), caches):
            if used is not cache:
                cache.copy_(used[..., : cache.shape[-1]])
    out, lse = result if return_lse else (result, None)
    if out.shape[-1] != v_cache.shape[-1]:
        out = out[..., : v_cache.shape[-1]]
    return (out, _convert_lse(lse)) if return_lse else out


def _check_cache_dims(q, k_cache, v_cache, k, v):
    tensors, pairs = {"q": q, "k_cache": k_cache, "v_cache": v_cache}, [("k_cache", "q")]
    if k is not None and v is not None:
        tensors |= {"k": k, "v": v}
        pairs += [("k", "k_cache"), ("v", "v_cache")]
    check_dims_before_padding(tensors, *pairs)


def _slots(k_cache, block_table):
    """What a sequence can have; of no table that is one as if it had one page, for kvcache_problem.py refuses it."""
    is_table = isinstance(block_table, torch.Tensor) and block_table.dim() == 2
    return k_cache.shape[1] * block_table.shape[1] if is_table else k_cache.shape[1]


def _window(window_size, seqlen_k, asks=False):
    """flash_attn's window in flashtile's words. asks: as for `_unless_all`."""
    return tuple(None if side < 0 else _unless_all(side, seqlen_k, asks) for side in _sides(window_size))


def _sides(window_size):
    """The two numbers of a window."""
    if type(window_size) is tuple and len(window_size) == 2 and type(window_size[0]) is type(window_size[1]) is int:
        return window_size
    is_pair = isinstance(window_size, (tuple, list)) or isinstance(window_size, torch.Tensor) and window_size.dim() > 0
    sides = tuple(map(as_int, window_size)) if is_pair else ()
    if len(sides) != 2 or not all(isinstance(side, (int, torch.SymInt)) for side in sides):
        raise DtypeError(explain("window_size", "a pair (left, right) of ints", repr(window_size), "Unbounded is (-1, -1)."))
    return sides


def _unless_all(side, seqlen_k, asks):
    """A side of a window; unbounded where it is as long as all keys.

    asks: in compiled programs too, since it matters whether there is a window: how queries are rotated depends on it.
    """
    if not isinstance(seqlen_k, (int, torch.SymInt)):
        # No length: problem.py refuses it
        return side
    if torch.compiler.is_compiling() and not asks:
        # In arithmetic: a question would give lengths below the window a graph of their own.
        return min(side + side // max(seqlen_k, 1) * INT32_MAX, INT32_MAX)
    return None if side >= seqlen_k else side


def _options(q, seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, deterministic=False):
    """flash_attn's options in flashtile's words. Where these ask for a bool, flash_attn takes what has a truth value."""
    return dict(causal=bool(causal), window=_window(window_size, seqlen_k), softmax_scale=_scale(softmax_scale, q),
                softcap=softcap_of(softcap), dropout_p=as_number(dropout_p), deterministic=bool(deterministic))  # fmt: skip


def _scale(softmax_scale, q):
    return default_scale(q.shape[-1]) if softmax_scale is None else as_number(softmax_scale)


def _attend(operands, options, head_dim_v, return_attn_probs):
    """One differentiable call. operands may have padded head dims, head_dim_v is without."""
    return_attn_probs = bool(return_attn_probs)
    with_probs = return_attn_probs and _drops(options)
    if with_probs:
        # The numbers that the call itself sees
        operands = ops.autocast_operands(operands) if is_autocast(operands.q) else operands
        operands = operands._replace(rng_state=ops.draw_rng_state(operands.q.device))
    result = ops.attention(operands, **options, return_lse=return_attn_probs)
    out, lse = result if return_attn_probs else (result, None)
    if out.shape[-1] != head_dim_v:
        out = out[..., :head_dim_v]
    if not return_attn_probs:
        return out
    return out, _convert_lse(lse), _probs(operands, options) if with_probs else out.new_empty((0,))


def _drops(options):
    check_number("dropout_p", options["dropout_p"])
    return options["dropout_p"] > 0


@torch.no_grad()
def _forward(operands, options, return_softmax):
    drops = _drops(options)
    if drops:
        operands = operands._replace(rng_state=ops.draw_rng_state(operands.q.device))
    out, lse = ops.forward_op(*operands, *_flat(options))
    probs = _probs(operands, options) if return_softmax and drops else out.new_empty((0,))
    rng_state = out.new_zeros((2,), dtype=torch.int64) if operands.rng_state is None else operands.rng_state
    return out, _convert_lse(lse), probs, rng_state


@torch.no_grad()
def _backward(operands, options, dout, out, lse, gradients):
    """Write the gradients; returns `row_sums` of dout and out."""
    if options["dropout_p"] > 0 and operands.rng_state is None:
        raise UnsupportedError(explain("rng_state", "what the forward pass returned, with dropout", None))
    if options["dropout_p"] == 0:
        operands = operands._replace(rng_state=None)
    check_backward(operands, dout, out, lse, gradients)
    lse = torch.where(lse == float("inf"), float("-inf"), lse).contiguous()
    results = ops.backward_op(contiguous(dout), None, contiguous(out), lse, *operands, *_flat(options))
    for wanted, result in zip(gradients, results):
        if wanted is not None:
            wanted.copy_(result)
    return row_sums(dout, out)


def _flat(options):
    """The options as the ops take them."""
    return (options.get("max_seqlen_q"), options.get("max_seqlen_k"), options["causal"], *options["window"],
            options["softmax_scale"], options["softcap"], options["dropout_p"], options["deterministic"], True)  # fmt: skip


@torch.no_grad()
def _probs(operands, options):
    """S_dmask, as an op: torch.compile can't follow lengths that are read."""
    return torch.ops.flashtile.dropped_scores.default(*operands, *_flat(options))


torch.library.define("flashtile::dropped_scores", f"({ops.TENSORS}, {ops.OPTIONS}) -> Tensor")


@torch.library.impl("flashtile::dropped_scores", ("CPU", "CUDA"))
def _dropped_scores(*arguments):
    operands, options = ops.split(arguments)
    with torch.autocast(operands.q.device.type, enabled=False):
        return dropped_scores(operands, ops.problem_of(operands, options))


@torch.library.register_fake("flashtile::dropped_scores")
def _dropped_scores_fake(*arguments):
    operands, options = ops.split(arguments)
    return _empty_scores(operands.q, ops.problem_of(operands, options))


def _empty_scores(q, problem):
    rows_q, rows_k = (-(-n // PROBS_BLOCK) * PROBS_BLOCK for n in (problem.seqlen_q, problem.seqlen_k))
    return q.new_zeros(problem.batch, problem.num_heads, rows_q, rows_k)


def _convert_lse(lse):
    return torch.where(lse == float("-inf"), float("inf"), lse)
