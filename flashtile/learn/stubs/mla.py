"""Multi-head latent attention: attend to the latents, without making keys and values.

MLA stores one latent a token, c (seqlen_k, rank), for all heads; keys and values of head h are c w_k[h] and c w_v[h].
Making them costs memory traffic that the small cache was meant to save. But (q (c w_k)ᵀ) = (q w_kᵀ) cᵀ: the
projection can be absorbed into the query, and that of the values can wait until after the sum.

Guide: part 5, "MLA". Done when: out is that of the definition, no tensor of the size of all heads' keys was made, and
the FLOPs are those of the absorbed form.
"""

import torch


def absorbed(q: torch.Tensor, c: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Attention of one query token.

    Args:
        q: (heads, head_dim); c: (seqlen_k, rank); w_k, w_v: (heads, rank, head_dim).
    Returns:
        out (heads, head_dim): softmax(softmax_scale * q[h] (c w_k[h])ᵀ) (c w_v[h]) for each head h.
    """
    raise NotImplementedError
