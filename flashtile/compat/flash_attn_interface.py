"""FlashAttention 3's functions, with its signatures and conventions, over flashtile.api.

    from flashtile.compat.flash_attn_interface import flash_attn_func  # for: from flash_attn_interface import flash_attn_func

Against FlashAttention 2 (`flashtile.compat.flash_attn`): the fourth argument is softmax_scale, there is neither dropout nor
ALiBi, block_table is called page_table, return_attn_probs=True gives (out, lse), and a row without a visible key has lse -inf.
What is said there of padded head dims and strides holds here too; a window's sides are unbounded from other lengths on.

What differs, or means nothing here:

- num_splits (but in flash_attn_with_kvcache), pack_gqa, sm_margin and scheduler_metadata choose how FlashAttention 3's kernels
  share out their work; they are taken and change nothing. get_scheduler_metadata gives an empty tensor.
- qv, the second part of the queries, is put beside q, and v beside k: a copy, and head_dim + head_dim_v at most 256.
- fp8 is taken as a cache is, see flash_attn_with_kvcache: by kernels for that, without qv, gradients and seqused_q.
- attention_chunk is refused.
- A softcap below 0 is off, and num_splits below 1 is 0, as there; an index tensor, new keys and values, or tables with strides
  are copied. flash_attn_varlen_func takes a batched q, or batched k and v, without their cu_seqlens.
- Neither the operators torch.ops.flash_attn_3 nor the autograd classes (FlashAttnFunc and its kin) are there.
- Keys of length 0 have lse -inf as any empty row; flash_attn_interface gives +inf there.
- The third and fourth of flash_attn_with_kvcache's results are empty: parts are merged before it returns.
"""

import torch

from flashtile import api, ops
from flashtile.checks import check_device, check_int32, check_is_tensor, is_int, shape_of
from flashtile.compat.arguments import (
    as_int,
    as_number,
    check_backward,
    check_like,
    check_rows,
    contiguous,
    default_scale,
    detached,
    heads_of_packed,
    lengths_of,
    padded,
    padded_rows,
    refusing_gradients,
    renamed,
    row_sums,
    softcap_of,
    splits_of,
    strided_rows,
    unstrided,
)
from flashtile.compat.flash_attn.flash_attn_interface import PROBS_BLOCK, _flat, _sides, _slots, _unless_all
from flashtile.errors import (
    DtypeError,
    FlashtileError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
    explain,
)
from flashtile.problem import (
    FP8,
    INT32_MAX,
    MAX_HEAD_DIM,
    Operands,
    check_arguments,
    check_cu_seqlens,
    check_seqused,
    is_autocast,
    values_readable,
)

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]  # fmt: skip

# What flashtile calls the arguments of flash_attn_with_kvcache
CACHE_NAMES = {"block_table": "page_table"}
LATENT = "Multi-head latent attention over a cache is in flashtile.compat.flash_mla."


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """`flashtile.attention` under FlashAttention 3's name and conventions (see the module).

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), fp16, bf16, fp32 or fp8 (e4m3); head_dim at most 256.
        k: (batch, seqlen_k, num_heads_kv, head_dim); num_heads % num_heads_kv == 0.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v).
        softmax_scale: default head_dim ** -0.5, with qv (head_dim + head_dim_v) ** -0.5.
        causal: hide keys after the query, aligned bottom-right.
        qv: (batch, seqlen_q, num_heads, head_dim_v); scores are q kᵀ + qv vᵀ.
        q_descale, k_descale, v_descale: (batch, num_heads_kv), fp32, of fp8: what its values are multiplied with.
        window_size: (left, right) tokens around that diagonal; negative is unbounded.
        softcap: softcap * tanh(score / softcap); 0.0 is off.
        deterministic: the same bits in every backward pass.
        return_attn_probs: also return lse.
    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), q.dtype, bf16 for fp8; with return_attn_probs (out, lse), lse
        (batch, num_heads, seqlen_q), fp32, natural log, -inf in rows without a visible key.
    Raises:
        As `flashtile.attention`. UnsupportedError: descales beside other dtypes, attention_chunk, head_dim + head_dim_v over
        256 with qv.
    """
    if _is_fp8(q, q_descale, k_descale, v_descale):
        return _attend_fp8(q, k, v, qv, (q_descale, k_descale, v_descale), softmax_scale, causal, window_size, attention_chunk,
                           softcap, return_attn_probs)  # fmt: skip
    operands = Operands(*_with_qv(q, k, v, qv))
    options = _options(q, softmax_scale, causal, qv, window_size, attention_chunk, softcap, deterministic)
    return _attend(operands, options, v.shape[-1], return_attn_probs)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """`flashtile.attention_varlen` under FlashAttention 3's name and conventions (see the module).

    Args:
        q: (total_q, num_heads, head_dim); k: (total_k, num_heads_kv, head_dim); v: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,), int32.
        max_seqlen_q, max_seqlen_k: the longest sequences, ints, or tensors at the price of a wait.
        seqused_q, seqused_k: (batch,), int32; of sequence b only the first seqused[b] rows are used.
        Without cu_seqlens_q q is batched as in `flash_attn_func`, without cu_seqlens_k k and v; max_seqlen is not used there.
        The rest as in `flash_attn_func`.
    Returns:
        out (total_q, num_heads, head_dim_v); with return_attn_probs (out, lse), lse (num_heads, total_q), fp32; of a batched q
        as in `flash_attn_func`.
    Raises:
        As `flashtile.attention_varlen`. UnsupportedError: as in `flash_attn_func`.
    """
    fp8 = _is_fp8(q, q_descale, k_descale, v_descale)
    batched_q = None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        check_rows(q, k, v)
        _check_batches(q, k, cu_seqlens_q, cu_seqlens_k)
        if cu_seqlens_q is None and q.dim() == 4:
            batched_q = q.shape[:2]
            (q, qv), cu_seqlens_q, max_seqlen_q = _flattened(q, qv)
        if cu_seqlens_k is None and k.dim() == 4:
            (k, v), cu_seqlens_k, max_seqlen_k = _flattened(k, v)
    same = cu_seqlens_k is cu_seqlens_q
    cu_seqlens_q = unstrided(cu_seqlens_q)
    # flashtile.attention_varlen tells by the same object that lengths are equal
    cu_seqlens_k = cu_seqlens_q if same else unstrided(cu_seqlens_k)
    if seqused_q is not None or seqused_k is not None:
        seqused_q, seqused_k = unstrided(seqused_q), unstrided(seqused_k)
    rows = strided_rows(q, k, v) if fp8 else _with_qv(q, k, v, qv)
    operands = Operands(*rows, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    options = _options(q, softmax_scale, causal, qv, window_size, attention_chunk, softcap, deterministic)
    options |= {"max_seqlen_q": as_int(max_seqlen_q), "max_seqlen_k": as_int(max_seqlen_k)}
    if fp8:
        if seqused_q is not None:
            raise UnsupportedError(explain("seqused_q", "None with fp8", "a tensor", "Other rows then have results too."))
        # Said here, where keys are packed and not yet parts of a cache
        check_arguments(operands, **options, return_lse=bool(return_attn_probs))
        check_seqused(operands, check_cu_seqlens(operands, options["max_seqlen_q"], options["max_seqlen_k"]))
        # One row of a cache, which each sequence has a part of
        starts, stops = cu_seqlens_k[:-1], cu_seqlens_k[1:]
        sequences = dict(
            cache_leftpad=starts, cache_seqlens=stops if seqused_k is None else starts + seqused_k,
            cache_batch_idx=torch.zeros_like(starts), cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        )  # fmt: skip
        q, k, v = rows
        result = _attend_fp8(q, k[None], v[None], qv, (q_descale, k_descale, v_descale), softmax_scale, causal, window_size,
                             attention_chunk, softcap, return_attn_probs, **sequences)  # fmt: skip
        return result if batched_q is None else _unflattened(result, batched_q, return_attn_probs)
    result = _attend(operands, options, v.shape[-1], return_attn_probs)
    return result if batched_q is None else _unflattened(result, batched_q, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """`flash_attn_func` with q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim).
        num_heads_q: heads of q in the second form.
        The rest as in `flash_attn_func`.
    """
    heads = heads_of_packed(qkv, num_heads_q)
    q, k, v = qkv.unbind(2) if heads is None else qkv.split([heads[0], heads[1], heads[1]], 2)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
                           softcap, deterministic=deterministic, return_attn_probs=return_attn_probs)  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False,
):  # fmt: skip
    """`flashtile.attention_with_kvcache` under FlashAttention 3's name and conventions (see the module). No gradients.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim) with cu_seqlens_q and max_seqlen_q.
        k_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim), or pages (num_pages, page_size, num_heads_kv, head_dim)
            with page_table; v_cache: the same with head_dim_v. Head dims are multiples of 8.
        page_table: (batch, pages of a sequence), int32; with cache_batch_idx (batch_cache, pages of a sequence), of which it
            picks rows; without FLASHTILE_DEBUG=1 a row that a GPU's table does not have is the nearest one.
        qv: must be None.
        The rest as in `flashtile.attention_with_kvcache`.
    Returns:
        out; with return_softmax_lse (out, lse, empty, empty).
    Raises:
        As `flashtile.attention_with_kvcache`. UnsupportedError: attention_chunk, qv.
    """
    _refuse_chunk(attention_chunk)
    if qv is not None:
        raise UnsupportedError(explain("qv", "None", type(qv).__name__, LATENT))
    check_rows(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    q, k_cache, v_cache, k, v = map(detached, (q, k_cache, v_cache, k, v))
    if page_table is not None:
        page_table = unstrided(page_table)
    if cache_batch_idx is not None:
        cache_batch_idx = unstrided(cache_batch_idx)
        if page_table is not None:
            page_table, cache_batch_idx = _picked_rows(page_table, cache_batch_idx, q, cu_seqlens_q), None
    if k is not None:
        k, v, cu_seqlens_k_new = unstrided(k), unstrided(v), unstrided(cu_seqlens_k_new)
    if rotary_cos is not None:
        rotary_cos, rotary_sin, rotary_seqlens = map(unstrided, (detached(rotary_cos), detached(rotary_sin), rotary_seqlens))
    else:
        rotary_sin, rotary_seqlens = detached(rotary_sin), None
    window = _window(window_size)
    if cu_seqlens_q is not None:
        cu_seqlens_q = unstrided(cu_seqlens_q)
    if rotary_cos is not None and window != (None, None):
        seqlen_q = as_int(max_seqlen_q) if cu_seqlens_q is not None else q.shape[1]
        window = _cache_window(window, _slots(k_cache, page_table), seqlen_q)
    if cache_leftpad is not None:
        cache_leftpad = unstrided(cache_leftpad)
    try:
        # Caches as they are, without a contiguous last dim refused: what is appended to a copy would be lost
        result = api.attention_with_kvcache(
            contiguous(q), k_cache, v_cache, k=k, v=v, cache_seqlens=unstrided(lengths_of(cache_seqlens)),
            block_table=page_table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=as_int(max_seqlen_q), cu_seqlens_k_new=cu_seqlens_k_new, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens,
            rotary_interleaved=bool(rotary_interleaved), q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            causal=bool(causal), window=window, softmax_scale=as_number(softmax_scale),
            softcap=softcap_of(softcap), num_splits=splits_of(num_splits), return_lse=bool(return_softmax_lse),
        )  # fmt: skip
    except FlashtileError as error:
        raise renamed(error, CACHE_NAMES) from None
    return (*result, *_no_parts(q)) if return_softmax_lse else result


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """`flashtile.combine` under FlashAttention 3's name.

    Args:
        out_partial: (splits, batch, seqlen_q, num_heads, head_dim_v).
        lse_partial: (splits, batch, seqlen_q, num_heads), fp32: heads last, other than flashtile's.
        out: where to write, or None. out_dtype: of the result; default that of out_partial.
    Returns:
        (out, lse (batch, seqlen_q, num_heads)).
    """
    check_is_tensor("lse_partial", lse_partial)
    # What has other dims is refused there
    lse_partial = lse_partial.transpose(2, 3) if lse_partial.dim() == 4 else lse_partial
    merged, lse = api.combine(out_partial, lse_partial, out_dtype=out_dtype)
    return _written(out, merged, "out", "out_partial[0]"), lse.transpose(1, 2)


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
    causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """An empty int32 tensor on the device of cache_seqlens: flashtile plans a call inside of it."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _flash_attn_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None,
    rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """One forward pass without autograd; q, and k with v, batched, or packed with their cu_seqlens.

    What belongs to a cache is `flash_attn_with_kvcache`'s (new keys, page_table, kv_batch_idx, leftpad_k, rotary tables).

    Returns:
        (out, lse, empty, empty); out_ is written, and returned as out, where it is given.
    """
    cache = {"k_new": k_new, "v_new": v_new, "cu_seqlens_k_new": cu_seqlens_k_new, "page_table": page_table,
             "kv_batch_idx": kv_batch_idx, "leftpad_k": leftpad_k, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin,
             "seqlens_rotary": seqlens_rotary}  # fmt: skip
    for name, x in cache.items():
        if x is not None:
            raise UnsupportedError(explain(name, "None", shape_of(x), "Call flash_attn_with_kvcache."))
    is_plain = cu_seqlens_q is None and cu_seqlens_k is None and seqused_q is None and seqused_k is None
    with torch.no_grad():
        if is_plain:
            out, lse = flash_attn_func(q, k, v, softmax_scale, causal, qv, q_descale, k_descale, v_descale,
                                       (window_size_left, window_size_right), attention_chunk, softcap,
                                       return_attn_probs=True)  # fmt: skip
        else:
            out, lse = flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q,
                                              seqused_k, softmax_scale, causal, qv, q_descale, k_descale, v_descale,
                                              (window_size_left, window_size_right), attention_chunk, softcap,
                                              return_attn_probs=True)  # fmt: skip
        return _written(out_, out, "out_", "q with the head_dim of v"), lse, *_no_parts(q)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None,
    max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1,
    window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    """One backward pass without autograd, batched or packed; dq, dk and dv are written where they are given.

    Returns:
        rowsum(dout * out), fp32 (fp64 for fp64), (batch, num_heads, seqlen_q rounded up to 128) or (num_heads, total_q
        rounded up to 128).
    """
    operands = Operands(*strided_rows(q, k, v), cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k)
    options = _options(q, softmax_scale, is_causal, None, (window_size_left, window_size_right), 0, softcap, deterministic)
    if cu_seqlens_q is not None:
        options |= {"max_seqlen_q": as_int(max_seqlen_q), "max_seqlen_k": as_int(max_seqlen_k)}
    check_backward(operands, dout, out, softmax_lse, (dq, dk, dv))
    with torch.no_grad():
        results = ops.backward_op(contiguous(dout), None, contiguous(out), softmax_lse.contiguous(), *operands,
                                  *_flat(options))  # fmt: skip
        for wanted, result in zip((dq, dk, dv), results):
            if wanted is not None:
                wanted.copy_(result)
        sums = row_sums(dout, out).transpose(-1, -2)
    return torch.nn.functional.pad(sums, (0, -sums.shape[-1] % PROBS_BLOCK))


def _window(window_size):
    """FlashAttention 3's window in flashtile's words; a side is unbounded from seqlen_k - 1 (left), seqlen_q - 1 (right) on."""
    return tuple(None if side < 0 else min(side, INT32_MAX) for side in _sides(window_size))


def _cache_window(window, slots, seqlen_q):
    """A window of `_window` whose sides are None where they are unbounded: queries are rotated by whether there is one."""
    # Without a length kvcache_problem.py refuses the call
    limits = slots - 1, seqlen_q - 1 if is_int(seqlen_q) else None
    return tuple(None if side is None else _unless_all(side, limit, asks=True) for side, limit in zip(window, limits))


def _options(q, softmax_scale, causal, qv, window_size, attention_chunk, softcap, deterministic):
    """FlashAttention 3's options in flashtile's words."""
    _refuse_chunk(attention_chunk)
    if softmax_scale is None:
        softmax_scale = default_scale(q.shape[-1] + (0 if qv is None else qv.shape[-1]))
    return dict(causal=bool(causal), window=_window(window_size), softmax_scale=as_number(softmax_scale),
                softcap=softcap_of(softcap), dropout_p=0.0, deterministic=bool(deterministic))  # fmt: skip


def _with_qv(q, k, v, qv):
    """q, k and v as they go into a call: q kᵀ + qv vᵀ is one product of longer rows."""
    if qv is None:
        return padded_rows(q, k, v)
    check_rows(q, k, v)
    check_is_tensor("qv", qv)
    if q.shape[-1] + v.shape[-1] > MAX_HEAD_DIM:
        expected = f"head_dim + head_dim_v of at most {MAX_HEAD_DIM}"
        raise UnsupportedError(explain("qv", expected, f"{q.shape[-1]} + {v.shape[-1]}", LATENT))
    _check_joined(q, k, v, qv)
    return padded(torch.cat([q, qv], -1)), padded(torch.cat([k, v], -1)), padded(v)


def _check_joined(q, k, v, qv):
    """What torch.cat would refuse in words of its own, or promote."""
    for name, x in (("k", k), ("v", v), ("qv", qv)):
        check_device(name, x, q.device)
        if x.dtype != q.dtype and not is_autocast(q):
            raise DtypeError(explain(name, f"the dtype of q, {q.dtype}", x.dtype, f"Cast it: {name}.to(q.dtype)."))
    for name, x, of, shape in (("k", k, "v and the head_dim of q", (*v.shape[:-1], q.shape[-1])),
                               ("qv", qv, "q and the head_dim of v", (*q.shape[:-1], v.shape[-1]))):  # fmt: skip
        if x.shape != shape:
            expected = f"all but the last dim of {of}, {tuple(shape)}"
            raise ShapeError(explain(name, expected, shape_of(x)))


def _check_batches(q, k, cu_seqlens_q, cu_seqlens_k):
    """Of a call with a batched side: both sides have as many sequences."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is not None:
            check_is_tensor(name, x)
    batch_q = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    batch_k = k.shape[0] if cu_seqlens_k is None else cu_seqlens_k.numel() - 1
    if q.dim() == k.dim() == 3 or batch_q == batch_k:
        return
    name, expected = ("k", f"the sequences of q, {batch_q}") if cu_seqlens_k is None else ("q", f"those of k, {batch_k}")
    raise ShapeError(explain(name, expected, f"batch {batch_k if name == 'k' else batch_q}", "Packed ones need cu_seqlens."))


def _flattened(x, other):
    """Batched tensors of one side as packed ones: (x, other), cu_seqlens, max_seqlen. What has no 4 dims is refused later."""
    batch, seqlen = x.shape[:2]
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen
    packed = (y.flatten(0, 1) if isinstance(y, torch.Tensor) and y.dim() == 4 else y for y in (x, other))
    return tuple(packed), cu_seqlens, seqlen


def _unflattened(result, batched, return_lse):
    """The way back of the results of a packed call. batched: (batch, seqlen_q)."""
    out, lse = result if return_lse else (result, None)
    out = out.unflatten(0, batched)
    return (out, lse.unflatten(1, batched).transpose(0, 1).contiguous()) if return_lse else out


def _picked_rows(page_table, cache_batch_idx, q, cu_seqlens_q):
    """Rows of page_table; one out of range is the nearest one, where it is not refused."""
    for name, x in (("page_table", page_table), ("cache_batch_idx", cache_batch_idx), ("cu_seqlens_q", cu_seqlens_q)):
        if x is not None:
            check_is_tensor(name, x)
    if cu_seqlens_q is not None and cu_seqlens_q.numel() == 0:
        # Refused with all others
        return page_table
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    check_int32("cache_batch_idx", cache_batch_idx, q.device, (batch,))
    if page_table.dim() != 2 or page_table.device != q.device:
        # Refused with all other tables
        return page_table
    if page_table.shape[0] == 0:
        raise ShapeError(explain("page_table", "at least one row, which cache_batch_idx names", f"{tuple(page_table.shape)}"))
    last = page_table.shape[0] - 1
    for b, row in enumerate(cache_batch_idx.tolist() if values_readable(q) else ()):
        if not 0 <= row <= last:
            raise ValueRangeError(explain(f"cache_batch_idx[{b}]", f"0 to {last}", row))
    return page_table[cache_batch_idx.clamp(0, last)]


def _attend(operands, options, head_dim_v, return_lse):
    result = ops.attention(operands, **options, return_lse=bool(return_lse))
    out, lse = result if return_lse else (result, None)
    if out.shape[-1] != head_dim_v:
        out = out[..., :head_dim_v]
    return (out, lse) if return_lse else out


def _written(buffer, result, name, of):
    """The result, in the caller's buffer where there is one. of: what has the result's shape."""
    if buffer is None:
        return result
    check_like(name, buffer, of, result.shape, result.dtype, result.device)
    return buffer.copy_(result)


def _no_parts(q):
    """What stands for the outputs and lse of single parts."""
    return tuple(torch.empty(0, dtype=torch.float32, device=q.device) for _ in range(2))


def _refuse_chunk(attention_chunk):
    if attention_chunk:
        raise UnsupportedError(explain("attention_chunk", "0", attention_chunk,
                                       "Pack the chunks as sequences of their own: attention_varlen."))  # fmt: skip


def _is_fp8(q, *descales):
    dtype = getattr(q, "dtype", None)
    if dtype != FP8 and any(x is not None for x in descales):
        raise UnsupportedError(explain("descales", f"None beside q of {dtype}", "a tensor", f"They go with {FP8}."))
    return dtype == FP8


def _attend_fp8(q, k, v, qv, descales, softmax_scale, causal, window_size, attention_chunk, softcap, return_lse, **sequences):
    """Over k and v as over a cache. sequences: of packed ones."""
    q_descale, k_descale, v_descale = descales
    check_rows(q, k, v)
    try:
        result = flash_attn_with_kvcache(
            q, contiguous(k), contiguous(v), qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, attention_chunk=attention_chunk,
            softcap=softcap, return_softmax_lse=return_lse, **sequences,
        )  # fmt: skip
    except FlashtileError as error:
        raise renamed(error, {"k_cache": "k", "v_cache": "v"}) from None
    why = explain("q, k and v", "no gradients with fp8", "a backward pass", "Call it under torch.no_grad().")
    result = tuple(refusing_gradients(x, why, q, k, v) for x in (result[:2] if return_lse else (result,)))
    return result if return_lse else result[0]
