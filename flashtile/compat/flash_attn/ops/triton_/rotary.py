"""flash_attn.ops.triton.rotary: the rotation without a gradient, by the same torch operations as layers.rotary."""

import torch

from flashtile.compat.flash_attn.layers.rotary import apply_rotary_emb


@torch.no_grad()
def apply_rotary(x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False,
                 conjugate=False):  # fmt: skip
    """`flashtile.compat.flash_attn.layers.rotary.apply_rotary_emb`, without autograd. conjugate: the rotation backwards."""
    if conjugate and isinstance(sin, torch.Tensor):
        sin = -sin
    return apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)
