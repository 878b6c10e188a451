"""The names of FlashMLA's Python package, for `import flashtile.compat.flash_mla as flash_mla`: decode over a latent cache.

Differences from `flashtile.mla.mla_decode`, as FlashMLA has them: lse leaves the attention sink out, and is +inf for a row
without a visible key. `extra_k_cache` and what belongs to it are refused.
"""

import torch

from flashtile.errors import ShapeError, UnsupportedError, explain
from flashtile.mla import ops
from flashtile.mla.api import make_schedule
from flashtile.mla.cache import DTYPES as FP8_DTYPES

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


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
    if is_fp8_kvcache != (k_cache.dtype in FP8_DTYPES):
        raise ShapeError(explain("is_fp8_kvcache", f"{not is_fp8_kvcache} for a k_cache of {k_cache.dtype}", is_fp8_kvcache))
    if indices is not None:
        block_table = cache_seqlens = None
    # Gradients are of no concern to FlashMLA
    q, k_cache, attn_sink = (x if x is None else x.detach() for x in (q, k_cache, attn_sink))
    key = (q.device, tuple(q.shape), tuple(k_cache.shape[1:]), None if indices is None else tuple(indices.shape))
    schedule = meta.schedule
    if schedule is None:
        schedule = make_schedule(cache_seqlens, num_heads=q.shape[2], seqlen_q=q.shape[1], num_heads_kv=k_cache.shape[2],
                                 indices=indices, topk_length=topk_length)  # fmt: skip
    elif meta.key != key:
        raise ShapeError(explain("tile_scheduler_metadata", f"the shapes of its first call, {meta.key}", key,
                                 "Take another one from get_mla_metadata()."))  # fmt: skip
    out, lse = ops.decode_op(q, k_cache, block_table, cache_seqlens, indices, topk_length, attn_sink, schedule.table,
                             head_dim_v, softmax_scale, causal, False)  # fmt: skip
    # Not before a call went well
    meta.schedule, meta.key = schedule, key
    return out, torch.where(lse == float("-inf"), float("inf"), lse)
