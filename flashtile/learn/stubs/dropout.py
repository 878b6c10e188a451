"""Dropout on the attention weights, inside the tiles.

The weights of the definition are p / row_sum; dropout sets some of them to 0 and divides the others by 1 - dropout_p.
The mask is not stored: `keep` computes it again for any tile, from the positions. Two questions to answer first:
which of row_sum and acc sees the mask? And where is 1 / (1 - dropout_p) cheapest?

Guide: part 1, "Dropout". Done when: out is that of the definition with the same mask, lse is that without
dropout, `keep` is called with at most tile_n columns, and no tensor was made with more elements than a tile or an
operand.
"""

from collections.abc import Callable

import torch


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, keep: Callable, tile_n: int = 64):
    """Attention of one tile of queries with dropout.

    Args:
        q: (rows, head_dim); k, v: (seqlen_k, head_dim).
        dropout_p: probability of dropping a weight.
        keep: keep(cols: slice) -> (rows, cols) bool, False where a weight is dropped.
        tile_n: keys of a tile.
    Returns:
        out (rows, head_dim); lse (rows,), without dropout.
    """
    raise NotImplementedError
