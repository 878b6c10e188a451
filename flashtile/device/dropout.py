"""Which attention weights dropout keeps: Philox 4x32 with 7 rounds, addressed by position.

Key: the seed. Counter: (row group, column group, sequence * num_heads + head, offset), of positions inside the sequence: see
`flashtile.reference.dropout`. One call decides about eight weights, by 15 bits each. The mask depends on nothing else, so
backward kernels with other tiles see the forward's mask. Philox is Salmon et al. 2011; 7 rounds are the fewest that pass
BigCrush there. Row and column enter in the first round, one vector each: two of the seven rounds cost next to nothing.

Groups are what a thread of wgmma holds of 16 x 16 scores: two rows, 8 apart, and two neighbours of each 8 columns. A tile of
64 rows in 4 warps, seen by threads, is (128, columns // 16, 2, 2, 2): steps of 16 columns, their second half, the row that is
8 below, the neighbour. Of that a thread keeps a bit a weight, in two words, so that the mask can be made while products are
under way. Where keys come first (the backward), a thread makes the bits of two columns for one row, and gives those of the
other column to a neighbour for its other row.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.device.compat import gl, gluon

ROUNDS = tl.constexpr(7)
# Of both numbers in a word, the bit above the 15 that count
_FLAGS = tl.constexpr(0x80008000)


class Dropout(NamedTuple):
    """rng_state: pointer to int64 (seed, offset); threshold: of 15 bits; all None without dropout."""

    rng_state: Any
    threshold: Any
    # 1 / (1 - p)
    keep_scale: Any


def dropout_of(problem, rng_state) -> Dropout:
    """Of a call."""
    if problem.dropout_p == 0:
        return Dropout(None, None, None)
    return Dropout(rng_state, problem.dropout_threshold, problem.keep_scale)


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
def philox(rows, cols, stream):
    """Four words for groups of rows and columns that broadcast: `tl.philox` with ROUNDS rounds, and one 64-bit product for the
    two halves, half the multiplications of its own."""
    c0, c1 = tl.broadcast(rows.to(tl.uint32), cols.to(tl.uint32))
    c2, c3 = stream.head_id, stream.offset
    k0, k1 = stream.seed.to(tl.uint32), (stream.seed >> 32).to(tl.uint32)
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


@triton.jit
def _flags(word, threshold):
    """Of two weights, 1 where it stays: at the bits of _FLAGS. Neither difference borrows from the other.

    threshold: a constant where it is 1, as Triton makes of an argument.
    """
    return ((word | _FLAGS) - threshold * 0x10001) & _FLAGS


@triton.jit
def keep_tile(row_begin, col_begin, stream, dropout, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """(TILE_M, TILE_N) mask of the weights that stay; all four are multiples of 16.

    One Philox call for eight weights; its bits are then laid side by side, which costs a pass of bytes through shared memory.
    One call for each weight made a forward with dropout 2.6 to 3.5 times as slow as without (H200, 4096 tokens, not
    recorded).
    Without dropout a placeholder.
    """
    if dropout.rng_state is None:
        return 0
    else:
        return _keep_tile(row_begin, col_begin, stream, dropout, TILE_M, TILE_N)


@triton.jit
def _keep_tile(row_begin, col_begin, stream, dropout, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    rows = row_begin // 2 + tl.arange(0, TILE_M // 2)
    cols = col_begin // 4 + tl.arange(0, TILE_N // 4)
    words = philox(rows[:, None], cols[None, :], stream)
    # (rows, cols, neighbour, right half, lower half)
    right = tl.join(_kept_pair(words[0], dropout), _kept_pair(words[2], dropout))
    lower_right = tl.join(_kept_pair(words[1], dropout), _kept_pair(words[3], dropout))
    kept = tl.join(right, lower_right).reshape(TILE_M // 16, 8, TILE_N // 16, 4, 2, 2, 2)
    return kept.permute(0, 6, 1, 2, 5, 3, 4).reshape(TILE_M, TILE_N) != 0


@triton.jit
def _kept_pair(word, dropout):
    flags = _flags(word, dropout.threshold)
    return tl.join(((flags >> 15) & 1).to(tl.int8), (flags >> 31).to(tl.int8))


# ---- tiles of 64 rows in a wgmma layout of 4 warps, for Gluon ----


@gluon.constexpr_function
def _thread_layout(*shape):
    """Of (128, ...): each thread has what follows."""
    rank = len(shape)
    return gl.BlockedLayout([1, *shape], [32] + [1] * rank, [4] + [1] * rank, list(range(rank, -1, -1)))


@triton.jit
def _or(a, b):
    return a | b


# The same number, but another for the compiler in each step of a loop: else it keeps what each round adds to the seed, in 12
# registers
_AGAIN = gl.constexpr("mov.b64 $0, $1;")
@gluon.jit
def _thread_bits(rows, cols, stream, dropout):
    """int32 (128, 2): bits of a thread's weights, a word for each `right half`.

    rows, cols: groups, (128, steps) when broadcast. Bits 15 - i and 31 - i are those of both neighbours, i = 2 * step + lower.
    """
    seed = gl.inline_asm_elementwise(_AGAIN, "=l,l", [stream.seed], dtype=gl.int64, is_pure=False, pack=1)
    words = philox(rows, cols, RandomStream(seed, stream.head_id, stream.offset))
    STEPS: gl.constexpr = words[0].shape[1]
    place = 2 * gl.arange(0, STEPS, gl.SliceLayout(0, _thread_layout(STEPS)))[None, :]
    left = (_flags(words[0], dropout.threshold) >> place) | (_flags(words[1], dropout.threshold) >> (place + 1))
    right = (_flags(words[2], dropout.threshold) >> place) | (_flags(words[3], dropout.threshold) >> (place + 1))
    bits = gl.join(gl.reduce(left, 1, _or), gl.reduce(right, 1, _or))
    return gl.convert_layout(bits, _thread_layout(2)).to(gl.int32, bitcast=True)


# Passes $1 through, and looks as if it could store it where $2 is negative, which no number of a head is
_PIN = gl.constexpr("{ .reg .pred q; setp.lt.s32 q, $2, 0; @q st.shared.b32 [$2], $1; mov.b32 $0, $1; }")


@gluon.jit
def keep_bits(row_begin, col_begin, stream, dropout, COLUMNS: gl.constexpr):
    """`keep_tile` of 64 rows, as bits for `drop`. Needs dropout, and at most 128 columns.

    Called while products are under way: ptxas would make the bits after the wait for those, but not past a store.
    """
    layout: gl.constexpr = _thread_layout(COLUMNS // 16)
    thread = gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None]
    step = gl.arange(0, COLUMNS // 16, gl.SliceLayout(0, layout))[None, :]
    bits = _thread_bits(row_begin // 2 + thread // 4, col_begin // 4 + thread % 4 + 4 * step, stream, dropout)
    return gl.inline_asm_elementwise(_PIN, "=r,r,r", [bits, stream.head_id], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep_bits_transposed(row_begin, col_begin, stream, dropout, ROWS: gl.constexpr):
    """`keep_bits` with 64 keys first: of (64, ROWS). Not held above a wait, which is slower here."""
    layout: gl.constexpr = _thread_layout(ROWS // 16)
    thread = gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None]
    step = gl.arange(0, ROWS // 16, gl.SliceLayout(0, layout))[None, :]
    rows = row_begin // 2 + 8 * step + 2 * (thread % 4) + thread // 4 % 2
    bits = _thread_bits(rows, col_begin // 4 + thread // 8, stream, dropout)
    # The other column's bits go to the thread 4 lanes on, or back, for the other row's
    thread = gl.arange(0, 128, gl.SliceLayout(1, bits.type.layout))[:, None]
    selector = gl.where(thread // 4 % 2 == 0, 0x5410, 0x3276)
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; shfl.sync.bfly.b32 t, $1, 4, 31, 0xffffffff; prmt.b32 $0, $1, t, $2; }", "=r,r,r", [bits, selector],
        dtype=gl.int32, is_pure=True, pack=1)  # fmt: skip


# $1: two numbers of 16 bits, $2 and $4: their bits and place
_DROP = gl.constexpr("{ .reg .b32 t; shl.b32 t, $2, $4; prmt.b32 t, t, 0, 0xbb99; and.b32 $0, $1, t; }")
_MARK = gl.constexpr("{ .reg .b32 t; shl.b32 t, $2, $4; not.b32 t, t; and.b32 t, t, 0x80008000; or.b32 $0, $1, t; }")


@gluon.jit
def _by_pair(ASM: gl.constexpr, p, bits, TRANSPOSED: gl.constexpr):
    """p (64, columns) in 16 bits, by ASM on each two neighbours, their word of `bits`, and its place in that."""
    STEPS: gl.constexpr = p.shape[1] // 16
    layout: gl.constexpr = _thread_layout(STEPS, 2, 2, 2)
    # (warp, half, 8, step, half, 4, neighbour) to (warp, 8, 4, step, right half, lower half, neighbour)
    x = p.reshape([4, 2, 8, STEPS, 2, 4, 2])
    if TRANSPOSED:
        x = x.permute((0, 2, 5, 3, 1, 4, 6))
    else:
        x = x.permute((0, 2, 5, 3, 4, 1, 6))
    pairs = gl.convert_layout(x.reshape([128, STEPS, 2, 2, 2]), layout, assert_trivial=True)
    half: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout)))
    words = gl.convert_layout(bits, half, assert_trivial=True)[:, None, :, None, None]
    step = gl.arange(0, STEPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))))
    lower = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout)))))
    place = 2 * step[None, :, None, None, None] + lower[None, None, None, :, None]
    pairs = gl.inline_asm_elementwise(ASM, "=r,r,r,r,r,r", [pairs, words, place], dtype=p.dtype, is_pure=True, pack=2)
    x = gl.convert_layout(pairs.reshape([4, 8, 4, STEPS, 2, 2, 2]), x.type.layout, assert_trivial=True)
    if TRANSPOSED:
        x = x.permute((0, 4, 1, 3, 5, 2, 6))
    else:
        x = x.permute((0, 5, 1, 3, 4, 2, 6))
    return gl.convert_layout(x.reshape(p.shape), p.type.layout, assert_trivial=True)


@gluon.jit
def drop(p, bits, TRANSPOSED: gl.constexpr = False):
    """p, and 0 where it is dropped. p: bf16 or fp16 (64, columns) in a wgmma layout of 4 warps."""
    return _by_pair(_DROP, p, bits, TRANSPOSED)


@gluon.jit
def mark(p, bits, TRANSPOSED: gl.constexpr = False):
    """p >= 0, and its negative where it is dropped."""
    return _by_pair(_MARK, p, bits, TRANSPOSED)
