"""Multi-head latent attention by definition, in both of its forms.

A token leaves one latent vector c (512 numbers) and one rotary key k_rope (64 numbers, after its rotation) in the cache. Head
h has matrices w_key (nope_dim x 512) and w_value (512 x value_dim), and its query two parts, q_nope and q_rope:

    unabsorbed:  k = w_key c,  v = w_valueᵀ c;   score = q_nope · k + q_rope · k_rope;   out = sum p v
    absorbed:    q_latent = w_keyᵀ q_nope;       score = q_latent · c + q_rope · k_rope; out = w_valueᵀ (sum p c)

They are equal: q_nope · (w_key c) = (w_keyᵀ q_nope) · c, and w_valueᵀ is linear, so it may act on the sum. The first has keys
and values for each head and little work for each: prefill, `flashtile.attention` with head_dim 192 and head_dim_v 128. The
second reads 576 numbers a token, whatever the number of heads, since keys are (c, k_rope) and values c: decode,
`flashtile.mla.mla_decode`. Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1 and appendix C.
"""

import torch

from flashtile.mla.cache import DTYPES as FP8_DTYPES
from flashtile.mla.cache import unpack_fp8


def absorb(q_nope, q_rope, w_key):
    """Queries for the cache: (batch, seqlen_q, heads, latent + rope) of q_nope (..., heads, nope) and q_rope (..., rope).

    w_key: (heads, nope, latent).
    """
    return torch.cat([torch.einsum("bqhn,hnl->bqhl", q_nope, w_key), q_rope], -1)


def expand(out, w_value):
    """Output of the heads, (batch, seqlen_q, heads, value), of one over the cache, (batch, seqlen_q, heads, latent).

    w_value: (heads, latent, value).
    """
    return torch.einsum("bqhl,hlv->bqhv", out, w_value)


def keys_and_values(latent, k_rope, w_key, w_value):
    """What the unabsorbed form attends to: k (batch, seqlen_k, heads, nope + rope) and v (batch, seqlen_k, heads, value).

    latent: (batch, seqlen_k, latent). k_rope: (batch, seqlen_k, rope), shared by the heads.
    """
    k = torch.einsum("bkl,hnl->bkhn", latent, w_key)
    k_rope = k_rope[:, :, None].expand(-1, -1, w_key.shape[0], -1)
    return torch.cat([k, k_rope], -1), torch.einsum("bkl,hlv->bkhv", latent, w_value)


def decode(
    q, kv_cache, *, block_table=None, cache_seqlens=None, indices=None, topk_length=None, head_dim_v=512,
    softmax_scale=None, causal=False, sinks=None, lse_with_sinks=True, dtype=None,
):  # fmt: skip
    """`flashtile.mla.mla_decode` by definition, one query token after the other.

    Args:
        lse_with_sinks: whether sinks count in lse, as they do in out.
        dtype: compute and return in this dtype; default that of q, with everything but the softmax rounded to it, as in
            PyTorch code written by hand. torch.float64 gives the reference.
        The rest as in `flashtile.mla.mla_decode`.
    Returns:
        out (batch, seqlen_q, heads, head_dim_v); lse (batch, heads, seqlen_q), fp32 (fp64 for fp64).
    """
    dtype = q.dtype if dtype is None else dtype
    wide = torch.promote_types(dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    batch, seqlen_q, heads = q.shape[:3]
    out = q.new_zeros((batch, seqlen_q, heads, head_dim_v), dtype=dtype)
    lse = q.new_full((batch, heads, seqlen_q), float("-inf"), dtype=wide)
    rows = _Rows(kv_cache, dtype)
    for b in range(batch):
        for token in range(seqlen_q):
            if indices is None:
                slots = _slots(block_table[b], int(cache_seqlens[b]), kv_cache.shape[1])
                slots = slots[: max(0, len(slots) - seqlen_q + token + 1)] if causal else slots
            else:
                slots = indices[b, token][: None if topk_length is None else int(topk_length[b])].long()
                slots = slots[(slots >= 0) & (slots < kv_cache.shape[0] * kv_cache.shape[1])]
            # (keys, heads_kv, head_dim)
            kv = rows.take(slots)
            query = q[b, token].to(dtype).unflatten(0, (kv.shape[1], -1))
            scores = (torch.einsum("hgd,khd->hgk", query, kv) * scale).to(wide).flatten(0, 1)
            sink = scores.new_full((heads, 1), float("-inf")) if sinks is None else sinks.to(wide)[:, None]
            weights = torch.cat([scores, sink], -1)
            if not len(slots):
                lse[b, :, token] = sink[:, 0] if lse_with_sinks else float("-inf")
                continue
            # A sink of inf takes all: out is 0, not nan
            p = weights.softmax(-1)[:, :-1].masked_fill(sink == float("inf"), 0.0).to(dtype).unflatten(0, query.shape[:2])
            out[b, token] = torch.einsum("hgk,khd->hgd", p, kv[..., :head_dim_v]).flatten(0, 1)
            lse[b, :, token] = (weights if lse_with_sinks else scores).logsumexp(-1)
    return out, lse


class _Rows:
    """The tokens of a cache by slot = page * page_size + offset."""

    def __init__(self, kv_cache, dtype):
        self.kv_cache, self.dtype = kv_cache, dtype

    def take(self, slots):
        page_size = self.kv_cache.shape[1]
        kv = self.kv_cache[slots // page_size, slots % page_size]
        return unpack_fp8(kv, self.dtype) if kv.dtype in FP8_DTYPES else kv.to(self.dtype)


def _slots(pages, length, page_size):
    """Slots of a sequence's tokens, int64."""
    pages = pages[: -(-length // page_size)].long()
    offsets = torch.arange(page_size, device=pages.device)
    return (pages[:, None] * page_size + offsets).flatten()[:length]
