"""The tiled forward pass: attention of one head without the score matrix.

For each tile of queries: walk over the tiles of keys with the online softmax, and keep an accumulator of p v that is
corrected whenever the maximum grows. Divide once at the end.

Guide: part 1, "Tiles". Done when: out and lse are those of the definition for lengths that are no multiple of the
tile, and no tensor was made with more elements than a tile of queries, keys, scores or the output.
"""

import torch


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile_m: int = 64, tile_n: int = 64):
    """softmax(head_dim ** -0.5 * q kᵀ) v.

    Args:
        q: (seqlen_q, head_dim); k: (seqlen_k, head_dim); v: (seqlen_k, head_dim).
        tile_m, tile_n: queries and keys of a tile; the lengths need not be multiples of them.
    Returns:
        out (seqlen_q, head_dim); lse (seqlen_q,), the natural log of the sum of exponentials of each row's scores.
    """
    raise NotImplementedError
