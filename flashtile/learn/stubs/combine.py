"""Split-KV: put attention over pieces of the keys together again.

A decode step has one query a sequence: too few tiles to fill a GPU. So the keys are cut into pieces, each piece is
attended to by a block of its own, and (out, lse) of the pieces are combined. What a piece knows nothing of is the
others' maximum; its lse is enough to make up for that.

Guide: part 5, "Split-KV". Done when: the result is attention over all keys, also with a piece that holds no visible
key (lse -inf, out 0), and with no visible key at all.
"""

import torch


def combine(outs: torch.Tensor, lses: torch.Tensor):
    """Args: outs (pieces, rows, head_dim), each normalised; lses (pieces, rows). Returns out (rows, head_dim), lse (rows,)."""
    raise NotImplementedError
