"""The tiles of a packed call: sequences of different lengths, without padding.

The sequences lie one behind the other in packed tensors; cu_seqlens are the prefix sums of their lengths, 0 first. A
program of the kernel takes one tile of queries, and has to be told which. The simple grid, tiles of the longest sequence
by sequences, starts mostly programs that find nothing to do when one prompt of 8192 tokens stands beside 255 of one
token. List the tiles that exist instead.

Then put them in order. A multiprocessor takes the next tile when it is done with one; under a causal mask the last tile of
a long sequence sees the most keys, and when it is started last, all others wait for it. So: most keys first.

Guide: part 5, "Sequences of different lengths". Done when: every tile with a query is there once and nothing else is,
none stands before one that sees more keys, and no tensor has more than 2 elements for each tile and sequence. The check
then tells how long 16 multiprocessors take with your list, and in the order of the sequences.
"""

import torch


def schedule(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, tile_m: int, causal: bool):
    """The tiles of a packed call, those that see most keys first.

    Args:
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, prefix sums of the lengths; a length may be 0.
        tile_m: queries of a tile; tiles begin anew with each sequence, and its last one may be short.
        causal: query i of a sequence sees its key j when j <= i + seqlen_k - seqlen_q; else every key of the sequence. A
            tile sees as many keys as its last query, maybe none: it is listed all the same, for its out must be set to 0.
    Returns:
        sequences: (tiles,), integers, the sequence of each tile, from 0.
        first_rows: (tiles,), integers, the tile's first query, counted from the beginning of its sequence.
    """
    raise NotImplementedError
