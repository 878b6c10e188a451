"""The names of FlashMLA's Python package, for `import flashtile.compat.flash_mla as flash_mla`: decode over a latent cache.

Differences from `flashtile.mla.mla_decode`, as FlashMLA has them: lse leaves the attention sink out, and is +inf for a row
without a visible key. `extra_k_cache` and what belongs to it are refused.
"""

import torch

from flashtile.compat.arguments import as_int, as_number, detached, renamed
from flashtile.errors import FlashtileError, ShapeError, UnsupportedError, explain
from flashtile.mla import ops
from flashtile.mla.api import check_types, make_schedule
from flashtile.mla.cache import DTYPES as FP8_DTYPES
from flashtile.mla.problem import check_queries_and_cache

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

# What flashtile calls the arguments of flash_mla_with_kvcache
NAMES = {"kv_cache": "k_cache", "sinks": "attn_sink"}


class FlashMLASchedMeta:
    """The schedule of a step, made by the first `flash_mla_with_kvcache` that gets it, and reused while lengths stay."""

    def __init__(self):
        self.schedule = None
        self.key = None


def get_mla_metadata(*args, **kwargs):
    """(FlashMLASchedMeta, None); arguments, which older versions needed, are ignored."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
    topk_length=None, extra_topk_length=None,
):  # fmt: skip
    """(out, lse): out (batch, seqlen_q, heads, head_dim_v); lse (batch, heads, seqlen_q), fp32.

    Args:
        tile_scheduler_metadata: of `get_mla_metadata`; one object for calls of the same shapes and lengths.
        num_splits: None.
        indices: (batch, seqlen_q, topk), sparse decode; block_table and cache_seqlens are then not used.
        attn_sink: (heads,), scales out by exp(lse) / (exp(lse) + exp(attn_sink)).
        The rest as in `flashtile.mla.mla_decode`.
    """
    for name, value in (("extra_k_cache", extra_k_cache), ("extra_indices_in_kvcache", extra_indices_in_kvcache),
                        ("extra_topk_length", extra_topk_length)):  # fmt: skip
        if value is not None:
            raise UnsupportedError(explain(name, "None", "a tensor", "Join both sets of tokens in one cache and its indices."))
    meta = tile_scheduler_metadata
    if not isinstance(meta, FlashMLASchedMeta):
        raise ShapeError(explain("tile_scheduler_metadata", "the first result of get_mla_metadata()", type(meta).__name__))
    if num_splits is not None:
        raise ShapeError(explain("num_splits", "None, the second result of get_mla_metadata()", type(num_splits).__name__))
    if indices is not None:
        block_table = cache_seqlens = None
    # Gradients are of no concern to FlashMLA
    q, k_cache, attn_sink = map(detached, (q, k_cache, attn_sink))
    try:
        out, lse = _decode(q, k_cache, block_table, cache_seqlens, indices, topk_length, attn_sink, meta, as_int(head_dim_v),
                           as_number(softmax_scale), causal, bool(is_fp8_kvcache))  # fmt: skip
    except FlashtileError as error:
        raise renamed(error, NAMES) from None
    return out, torch.where(lse == float("-inf"), float("inf"), lse)


def _decode(q, kv_cache, block_table, cache_seqlens, indices, topk_length, sinks, meta, head_dim_v, softmax_scale, causal,
            is_fp8_kvcache):  # fmt: skip
    check_types(causal, softmax_scale, head_dim_v, q=q, kv_cache=kv_cache, block_table=block_table,
                cache_seqlens=cache_seqlens, indices=indices, topk_length=topk_length, sinks=sinks)  # fmt: skip
    if is_fp8_kvcache != (kv_cache.dtype in FP8_DTYPES):
        raise ShapeError(explain("is_fp8_kvcache", f"{not is_fp8_kvcache} for a k_cache of {kv_cache.dtype}", is_fp8_kvcache))
    key = (q.device, tuple(q.shape), tuple(kv_cache.shape[1:]), None if indices is None else tuple(indices.shape))
    schedule = meta.schedule
    if schedule is None:
        check_queries_and_cache(q, kv_cache)
        # Without query tokens any schedule will do
        schedule = make_schedule(cache_seqlens, num_heads=q.shape[2], seqlen_q=max(q.shape[1], 1),
                                 num_heads_kv=kv_cache.shape[2], indices=indices, topk_length=topk_length)  # fmt: skip
    elif meta.key != key:
        raise ShapeError(explain("tile_scheduler_metadata", f"the shapes of its first call, {meta.key}", key,
                                 "Take another one from get_mla_metadata()."))  # fmt: skip
    result = ops.decode_op(q, kv_cache, block_table, cache_seqlens, indices, topk_length, sinks, schedule.table, head_dim_v,
                           softmax_scale, causal, False)  # fmt: skip
    # Not before a call went well
    meta.schedule, meta.key = schedule, key
    return result
