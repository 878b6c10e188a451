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
# What `drop` multiplies with: the float whose only bit is the highest of the exponent.
FACTOR = tl.constexpr(2.0)
_FACTOR_BITS = tl.constexpr(0x40000000)


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


@gluon.constexpr_function
def _bits_layouts(tile_n):
    """Layouts of 4 warps: of (64, tile_n // 4) groups, and of wgmma's (64, tile_n), as (64, tile_n // 8, 4, 2).

    In both a warp has the same 16 rows. A thread has one row of the groups; of wgmma's elements it has two rows, 8 apart, and
    two neighbours of every 8 columns.
    """
    steps = [1 << i for i in range((tile_n // 8).bit_length() - 1)]
    groups = gl.DistributedLinearLayout(
        [[0, 2 * step] for step in steps], [[8, 0], [0, 1], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, tile_n // 4]
    )
    elements = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], *([0, step, 0, 0] for step in steps)],
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]], [[16, 0, 0, 0], [32, 0, 0, 0]], [],
        [64, tile_n // 8, 4, 2],
    )  # fmt: skip
    return groups, elements


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """`tl.philox` with ROUNDS rounds, and one 64-bit product for the two halves: half the multiplications of its own."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@gluon.jit
def keep_bits(row_begin, col_begin, stream, dropout, TILE_N: gl.constexpr):
    """`keep_tile` of 64 rows for Gluon, as bits for `drop`: int32 (64, 4). Needs dropout, and TILE_N <= 128.

    Bit 2 * i + j of [row, pair] is that of column 8 * i + 2 * pair + j. A thread has two words of bits, so that the mask can be
    made while products are under way, and gives one of its words to a neighbour for one of its own.
    """
    layout: gl.constexpr = _bits_layouts(TILE_N)[0]
    rows = (row_begin + gl.arange(0, 64, gl.SliceLayout(1, layout))).to(gl.uint32)
    in_tile = gl.arange(0, TILE_N // 4, gl.SliceLayout(0, layout))[None, :]
    groups = (col_begin // 4 + in_tile).to(gl.uint32)
    words = philox(stream.seed, rows[:, None], groups, stream.head_id, stream.offset)
    threshold = dropout.threshold.to(gl.uint32)
    place = in_tile // 2 * 2
    pair_0 = _collect(_kept_pair(words[0], words[1], threshold) << place, TILE_N)
    pair_1 = _collect(_kept_pair(words[2], words[3], threshold) << place, TILE_N)
    bits = gl.join(pair_0, pair_1).reshape([64, 4])
    return gl.convert_layout(bits, gl.SliceLayout(1, gl.SliceLayout(3, _bits_layouts(TILE_N)[1])))


@gluon.jit
def _kept_pair(low, high, threshold):
    """Bits 0 and 1: whether low and high reach the threshold, from the carries of subtractions."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 t, u; sub.cc.u32 t, $2, $3; subc.u32 u, 0, -1; not.b32 t, u; sub.cc.u32 $0, $1, $3; subc.u32 $0, u, t; }",
        "=&r,r,r,r", [low, high, threshold], dtype=gl.int32, is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def _collect(bits, TILE_N: gl.constexpr):
    """(64, 2): the bits of all groups at even, and at odd places. A thread has them all."""
    return gl.sum(bits.reshape([64, TILE_N // 8, 2]), 1)


@gluon.jit
def drop(p, bits):
    """FACTOR * p (64, TILE_N) in a wgmma layout of 4 warps, 0 where `keep_bits` drops it.

    By a product: the units of comparisons and selections are what a kernel with dropout is short of.
    """
    TILE_N: gl.constexpr = p.shape[1]
    layout: gl.constexpr = _bits_layouts(TILE_N)[1]
    elements = gl.convert_layout(p.reshape([64, TILE_N // 8, 4, 2]), layout, assert_trivial=True)
    i = gl.arange(0, TILE_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[None, :, None, None]
    j = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
    place = 2 * i + j
    bits = bits[:, None, :, None]
    factor = gl.where(place < 31, bits << (30 - place), bits >> 1) & _FACTOR_BITS
    kept = elements * factor.to(gl.float32, bitcast=True)
    return gl.convert_layout(kept.reshape([64, TILE_N]), p.type.layout, assert_trivial=True)
