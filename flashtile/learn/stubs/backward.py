"""The tiled backward pass: gradients of one head without the score matrix.

Forward kept out and lse, two things as small as q. Before writing, find on paper: how a tile of p comes back from its
scores and lse, without a maximum and without a sum; what the softmax needs to know of a whole row (one number, delta,
that out and dout tell before the first tile); and which of dq, dk, dv a tile of keys can collect while the queries pass
by, and which it can only add a part to.

With causal=True query i sees key j when j <= i + seqlen_k - seqlen_q. Tiles that no query sees are left out, as in the
exercise `causal`. A query that sees no key has out 0 and lse -inf; its dq is 0, and it adds nothing to dk and dv.

Guide: part 1, "The backward pass". Done when: dq, dk and dv are those of autograd for lengths that are no multiple of
the tile, no tensor was made with more elements than a tile or an operand, p is never larger than a tile, and the FLOPs of
hidden tiles were saved.
"""

import torch


def backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
             causal: bool = False, tile_m: int = 64, tile_n: int = 64):  # fmt: skip
    """Gradients of softmax(head_dim ** -0.5 * q kᵀ) v.

    Args:
        q: (seqlen_q, head_dim); k, v: (seqlen_k, head_dim).
        out: (seqlen_q, head_dim), what forward returned; lse: (seqlen_q,), natural log of each row's sum of exponentials.
        dout: (seqlen_q, head_dim), the gradient of out.
        causal: hide the keys after each query, bottom-right.
        tile_m, tile_n: queries and keys of a tile; the lengths need not be multiples of them.
    Returns:
        dq (seqlen_q, head_dim); dk, dv (seqlen_k, head_dim).
    """
    raise NotImplementedError
