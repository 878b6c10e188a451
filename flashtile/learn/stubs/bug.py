"""Find the planted bug.

This forward pass was tested with 128 keys and tiles of 64, where it is right. In production it was wrong: not by
much, never nan, not for every length. Find out for which lengths (`flashtile learn bug` says how wrong it is), say
why, and mend it. Keep the tiles of a fixed size: on a GPU a tile is a fixed piece of shared memory.

Guide: part 1, "Masks". Done when: out and lse are right for every length, with tiles of 64 keys.
"""

import torch


def load_tile(x: torch.Tensor, begin: int, size: int) -> torch.Tensor:
    """Rows begin to begin + size of x; rows past the end are filled with zeros, as TMA does."""
    tile = x.new_zeros(size, x.shape[1])
    rows = x[begin : begin + size]
    tile[: rows.shape[0]] = rows
    return tile


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile_n: int = 64):
    """q: (rows, head_dim), one tile; k, v: (seqlen_k, head_dim). Returns out (rows, head_dim), lse (rows,)."""
    row_max, row_sum, acc = q.new_full((q.shape[0],), -torch.inf), q.new_zeros(q.shape[0]), torch.zeros_like(q)
    for begin in range(0, k.shape[0], tile_n):
        scores = q @ load_tile(k, begin, tile_n).T * q.shape[1] ** -0.5
        new_max = torch.maximum(row_max, scores.amax(1))
        correction, p = torch.exp(row_max - new_max), torch.exp(scores - new_max[:, None])
        row_max, row_sum = new_max, row_sum * correction + p.sum(1)
        acc = acc * correction[:, None] + p @ load_tile(v, begin, tile_n)
    return acc / row_sum[:, None], row_max + row_sum.log()
