"""Which attention weights dropout keeps: Philox 4x32 with 7 rounds, addressed by position.

Key: the seed. Counter: (row, col // 4, sequence * num_heads + head, offset), row and col being positions inside the sequence;
word col % 4 decides. The mask depends on nothing else, so backward kernels with other tiles see the forward's mask. Philox is
Salmon et al. 2011; 7 rounds are the fewest that pass BigCrush there. Row and col enter in the first round, one vector each:
two of the seven rounds cost next to nothing.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.device.compat import gl, gluon

ROUNDS = tl.constexpr(7)


class Dropout(NamedTuple):
    """rng_state: pointer to int64 (seed, offset); threshold: floor(p * 2**32); all None without dropout."""

    rng_state: Any
    threshold: Any
    # 1 / (1 - p)
    keep_scale: Any


def dropout_of(problem, rng_state) -> Dropout:
    """Of a call."""
    if problem.dropout_p == 0:
        return Dropout(None, None, None)
    return Dropout(rng_state, int(problem.dropout_p * 2**32), 1 / (1 - problem.dropout_p))


class RandomStream(NamedTuple):
    """Philox key and the constant words of the counter, for one head of one sequence."""

    seed: Any
    head_id: Any
    offset: Any


@triton.jit
def load_stream(dropout, head_id):
    if dropout.rng_state is None:
        return RandomStream(0, 0, 0)
    else:
        offset = tl.load(dropout.rng_state + 1).to(tl.uint32)
        return RandomStream(tl.load(dropout.rng_state), head_id.to(tl.uint32), offset)


@triton.jit
def keep_tile(row_begin, col_begin, stream, dropout, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """(TILE_M, TILE_N) mask of the weights that stay; col_begin is a multiple of 4.

    One Philox call for four columns; its words are then laid side by side, which costs a pass of bytes through shared memory.
    One call for each element made a forward with dropout 2.6 to 3.5 times as slow as without (H200, 4096 tokens, not
    recorded).
    Without dropout a placeholder.
    """
    if dropout.rng_state is None:
        return 0
    else:
        return _keep_tile(row_begin, col_begin, stream, dropout, TILE_M, TILE_N)


@triton.jit
def _keep_tile(row_begin, col_begin, stream, dropout, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    rows = row_begin + tl.arange(0, TILE_M)
    groups = col_begin // 4 + tl.arange(0, TILE_N // 4)
    kept = _keep_words(rows[:, None], groups[None, :], stream, dropout)
    return kept.reshape(TILE_M, TILE_N) != 0


@triton.jit
def _keep_words(rows, groups, stream, dropout):
    """int8 (..., 2, 2), 0 where dropped, for rows and groups of four columns that broadcast: word = 2 * third + last index."""
    words = tl.philox(stream.seed, rows, groups, stream.head_id, stream.offset, ROUNDS)
    threshold = dropout.threshold.to(tl.uint32)
    kept_0, kept_1 = (words[0] >= threshold).to(tl.int8), (words[1] >= threshold).to(tl.int8)
    kept_2, kept_3 = (words[2] >= threshold).to(tl.int8), (words[3] >= threshold).to(tl.int8)
    return tl.join(tl.join(kept_0, kept_2), tl.join(kept_1, kept_3))


@gluon.jit
def keep_transposed(row_begin, col_begin, stream, dropout, TILE_M: gl.constexpr, TILE_N: gl.constexpr, layout: gl.constexpr):
    """`keep_tile` for Gluon, with keys first: (TILE_N, TILE_M), in a layout of 4 warps. Needs dropout."""
    words_layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    rows = row_begin + gl.arange(0, TILE_M, gl.SliceLayout(0, words_layout))
    groups = col_begin // 4 + gl.arange(0, TILE_N // 4, gl.SliceLayout(1, words_layout))
    kept = _keep_words(rows[None, :], groups[:, None], stream, dropout)
    # (TILE_N / 4, TILE_M, 2, 2), then words beside their group
    kept = gl.permute(kept, (0, 2, 3, 1)).reshape([TILE_N, TILE_M])
    return gl.convert_layout(kept, layout) != 0
