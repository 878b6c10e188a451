"""Online softmax: the state of a row after one more tile of scores.

The softmax of a row needs its maximum and its sum before it can give out anything. Here the scores come tile by tile,
and a tile is gone when the next one comes. Keep two numbers a row, and correct what was summed before whenever the
maximum grows.

Guide: part 1, "Online softmax". Done when: the state after all tiles is that of the whole row, for scores of +-10000
and for rows whose scores so far are all -inf (hidden keys), without a nan.
"""

import torch


def update(row_max: torch.Tensor, row_sum: torch.Tensor, scores: torch.Tensor):
    """Absorb a tile of scores.

    Args:
        row_max: (rows,), the largest score seen so far; -inf if there was none.
        row_sum: (rows,), sum of exp(score - row_max) over the scores seen so far; 0 if there was none.
        scores: (rows, cols), the new tile; -inf where a key is hidden.
    Returns:
        row_max, row_sum: the same after this tile.
        p: (rows, cols), exp(scores - new row_max); 0 where hidden.
        correction: (rows,), what sums made with the old row_max have to be multiplied with.
    """
    raise NotImplementedError
