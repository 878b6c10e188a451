"""Online softmax in base 2. Source: Milakov and Gimelshein 2018; Dao 2023, FlashAttention-2, section 3.1."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.device import columns, scores
from flashtile.device.compat import gl, gluon
from flashtile.device.numerics import LN_2, LOG2_E, NEG_INF

# Columns of row_sum in `update_apart`: a thread of a wgmma holds two of each eight.
SUMS = gl.constexpr(8)
# How far a base-2 logit may lie above the reference of `update_lazily`: p is 256 at most, which fp16 holds well.
SLACK = gl.constexpr(8.0)


class OnlineSoftmax(NamedTuple):
    """Of the keys seen so far, for each row: the largest base-2 logit, and the sum of exponentials relative to it."""

    row_max: Any
    row_sum: Any


@triton.jit
def pivot(row_max):
    """What to subtract before the exponential: a row that has seen no key has -inf, and -inf - -inf would be nan."""
    return tl.where(row_max == NEG_INF, 0.0, row_max)


@triton.jit
def _reference(row_max, MASKED: tl.constexpr):
    if MASKED:
        return pivot(row_max)
    else:
        return row_max


@triton.jit
def update(state, logits, scale_log2, MASKED: tl.constexpr):
    """Absorb one (TILE_M, TILE_N) tile, or several side by side; return the new state, p, and the correction of acc.

    Hidden logits are -inf. Without MASKED no logit is, and the guard against rows without a key is saved.
    """
    KEYS: tl.constexpr = len(logits.shape) - 1
    row_max = tl.maximum(state.row_max, tl.max(logits, KEYS) * scale_log2)
    reference = _reference(row_max, MASKED)
    correction = tl.exp2(state.row_max - reference)
    p = tl.exp2(logits * scale_log2 - tl.expand_dims(reference, KEYS))
    return OnlineSoftmax(row_max, state.row_sum * correction + tl.sum(p, KEYS)), p, correction


@triton.jit
def begin(logits, scale_log2, MASKED: tl.constexpr):
    """State and p of a row's first tile; as `update` of a state that has seen nothing."""
    row_max = tl.max(logits, 1) * scale_log2
    reference = _reference(row_max, MASKED)
    p = tl.exp2(logits * scale_log2 - reference[:, None])
    return OnlineSoftmax(row_max, tl.sum(p, 1)), p


@gluon.jit
def lazy_max(row_max, logits, scale_log2):
    """The reference of `update_lazily`: row_max as long as no logit exceeds it by SLACK, else the largest logit."""
    largest = gl.max(logits, 1) * scale_log2
    return gl.where(largest > row_max + SLACK, largest, row_max)


@gluon.jit
def update_lazily(state, logits, scale_log2, MASKED: gl.constexpr):
    """`update`, but row_max stays as it is until a logit exceeds it by SLACK: nearly always the correction is 1.

    Source: as FlashAttention-4 does.
    """
    row_max = lazy_max(state.row_max, logits, scale_log2)
    reference = _reference(row_max, MASKED)
    correction = gl.exp2(state.row_max - reference)
    p = gl.exp2(logits * scale_log2 - reference[:, None])
    return OnlineSoftmax(row_max, state.row_sum * correction + gl.sum(p, 1)), p, correction


@gluon.jit
def max_apart(x):
    """Maximum of each row; of long rows 16 columns apart first, so that a thread's chains are half as long."""
    if x.shape[1] < 128:
        return gl.max(x, 1)
    else:
        largest = gl.max(gl.max(x.reshape([x.shape[0], x.shape[1] // 16, 16]), 1), 1)
        return gl.convert_layout(largest, gl.SliceLayout(1, x.type.layout))


@gluon.jit
def sum_apart(p):
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // SUMS, SUMS]), 1)


# Passes four numbers of a thread through, and looks as if it could store the first: only if it had bits that no sum has, or
# corrections bits that none has. ptxas moves waits for products up, but not past a store.
_HOLD = gl.constexpr(
    "{ .reg .pred q; setp.eq.u32 q, $4, 0x7fffdead; setp.eq.or.u32 q, $8, 0x7fffdead, q; setp.eq.or.u32 q, $10, 0x7fffdead, q; "
    "@q st.shared.b32 [$4], $4; mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }"
)


@gluon.jit
def _hold(sums, correction):
    """What waits for products after this is not done before a quarter of a thread's exponentials is, and the corrections are.

    correction: one a row; what is multiplied with it can then stand between the other exponentials.
    """
    correction = gl.convert_layout(correction, gl.SliceLayout(1, sums.type.layout))[:, None]
    return gl.inline_asm_elementwise(_HOLD, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [sums, correction], dtype=gl.float32, is_pure=False,
                                     pack=4)  # fmt: skip


@gluon.jit
def _scale_sums(row_sum, correction):
    return row_sum * gl.convert_layout(correction, gl.SliceLayout(1, row_sum.type.layout))[:, None]


@gluon.jit
def _largest_apart(logits, scale_log2, row_bias, TOP: gl.constexpr):
    """The largest base-2 logit of each row, less TOP."""
    if TOP > 0:
        return max_apart(logits) * scale_log2 - TOP
    elif row_bias is None:
        return max_apart(logits) * scale_log2
    else:
        return (max_apart(logits) + row_bias) * scale_log2


@gluon.jit
def _weights(logits, scale_log2, reference, row_bias):
    if row_bias is None:
        return gl.exp2(logits * scale_log2 - reference[:, None])
    else:
        return gl.exp2(logits * scale_log2 - (reference - row_bias * scale_log2)[:, None])


@gluon.jit
def update_apart(state, logits, scale_log2, MASKED: gl.constexpr, HOLD: gl.constexpr, row_bias=None, TOP: gl.constexpr = 0):
    """`update` for Gluon, with row_sum (TILE_M, SUMS), to be added by `join`: no sum crosses threads before.

    row_bias: what all logits of a row still lack, or None; not with a TOP: weights are 2**TOP at most, relative to a row_max
    that is so much smaller.
    """
    row_max = gl.maximum(state.row_max, _largest_apart(logits, scale_log2, row_bias, TOP))
    reference = _reference(row_max, MASKED)
    correction = gl.exp2(state.row_max - reference)
    p = _weights(logits, scale_log2, reference, row_bias)
    sums = sum_apart(p)
    if HOLD:
        sums = _hold(sums, correction)
    return OnlineSoftmax(row_max, _scale_sums(state.row_sum, correction) + sums), p, correction


@gluon.jit
def nothing_apart(logits):
    """The state of `update_apart` before the first tile; logits: zeros of a tile's shape and layout."""
    row_max = gl.full([logits.shape[0]], NEG_INF, gl.float32, gl.SliceLayout(1, logits.type.layout))
    return OnlineSoftmax(row_max, sum_apart(logits))


@gluon.jit
def rebase(state, row_max):
    """(state of `update_apart` relative to another reference, the correction of acc)."""
    correction = gl.exp2(state.row_max - pivot(row_max))
    return OnlineSoftmax(row_max, _scale_sums(state.row_sum, correction)), correction


@gluon.jit
def update_lazily_apart(state, logits, scale_log2):
    """`update_lazily` of a state of `update_apart`. Hidden logits are -inf."""
    state, correction = rebase(state, lazy_max(state.row_max, logits, scale_log2))
    p = gl.exp2(logits * scale_log2 - pivot(state.row_max)[:, None])
    return OnlineSoftmax(state.row_max, state.row_sum + sum_apart(p)), p, correction


@gluon.jit
def update_lazily_scaled(state, logits, scale_log2, e):
    """`update_lazily_apart` where logits, and values too, are 2**e times what is given. scale_log2: one a row; e: a number.

    p and row_max are for the values as given, so 2**e times larger; row_sum is of weights without that.
    """
    scale_log2 = scale_log2 * gl.exp2(e)
    largest = gl.max(logits, 1) * scale_log2 + e
    state, correction = rebase(state, gl.where(largest > state.row_max + SLACK, largest, state.row_max))
    p = gl.exp2(logits * scale_log2[:, None] - (pivot(state.row_max) - e)[:, None])
    row_sum = state.row_sum + sum_apart(p) * gl.exp2(-e)
    return OnlineSoftmax(state.row_max, row_sum), p, correction


@gluon.jit
def begin_apart(logits, scale_log2, MASKED: gl.constexpr, row_bias=None, TOP: gl.constexpr = 0):
    """`begin`, as `update_apart`."""
    row_max = _largest_apart(logits, scale_log2, row_bias, TOP)
    p = _weights(logits, scale_log2, _reference(row_max, MASKED), row_bias)
    return OnlineSoftmax(row_max, sum_apart(p)), p


@gluon.jit
def capped(raw, cap, PIECE: gl.constexpr):
    """`scores.capped` of PIECE scores a thread after the other: they take two registers each."""
    THREAD: gl.constexpr = raw.shape[0] * raw.shape[1] // 128
    if THREAD <= PIECE:
        return scores.capped(raw, cap, THREAD)
    else:
        left, right = columns.halves(raw)
        return gl.convert_layout(columns.beside(capped(left, cap, PIECE), capped(right, cap, PIECE)), raw.type.layout)


@gluon.jit
def bounded(raw, cap, PIECE: gl.constexpr):
    """(p, row_sum of `update_apart`) of raw scores under a softcap, relative to logits of 0.

    Exponentials of one piece stand beside the next one's polynomials.
    """
    THREAD: gl.constexpr = raw.shape[0] * raw.shape[1] // 128
    if THREAD <= PIECE:
        return bounded_of(scores.capped(raw, cap, THREAD))
    else:
        left, right = columns.halves(raw)
        p_left, sum_left = bounded(left, cap, PIECE)
        p_right, sum_right = bounded(right, cap, PIECE)
        p = gl.convert_layout(columns.beside(p_left, p_right), raw.type.layout)
        return p, sum_left + gl.convert_layout(sum_right, sum_left.type.layout)


@gluon.jit
def bounded_of(logits):
    """`bounded` of base-2 logits; hidden ones are -inf."""
    p = gl.exp2(logits)
    return p, sum_apart(p)


@gluon.jit
def begin_bounded(p, row_sum):
    """The state of `update_apart` after a first tile, with weights of `bounded`."""
    row_max = gl.full([p.shape[0]], 0.0, gl.float32, gl.SliceLayout(1, p.type.layout))
    return OnlineSoftmax(row_max, gl.convert_layout(row_sum, sum_apart(p).type.layout))


@gluon.jit
def update_bounded(state, row_sum):
    return OnlineSoftmax(state.row_max, state.row_sum + gl.convert_layout(row_sum, state.row_sum.type.layout))


@gluon.jit
def relaid(state, logits):
    """state of `update_apart`, in the layout of logits; every element stays in its register."""
    like = nothing_apart(logits)
    row_max = gl.convert_layout(state.row_max, like.row_max.type.layout)
    return OnlineSoftmax(row_max, gl.convert_layout(state.row_sum, like.row_sum.type.layout))


@gluon.jit
def widened(state, p, layout: gl.constexpr, RIGHT: gl.constexpr = False):
    """State and p of the left half of a tile, or the RIGHT, as those of the whole, of that layout: the rest is hidden.

    Every element stays in its register.
    """
    nothing = gl.zeros_like(p)
    p = gl.convert_layout(columns.beside(nothing, p) if RIGHT else columns.beside(p, nothing), layout)
    return relaid(state, p), p


@gluon.jit
def join(state):
    """The state of `update` from that of `update_apart`."""
    return OnlineSoftmax(state.row_max, gl.convert_layout(gl.sum(state.row_sum, 1), state.row_max.type.layout))


@triton.jit
def absorb_sink(state, sink):
    """Add one logit (natural units) to the denominator of each row."""
    sink = sink * LOG2_E
    # Of a row without a key too, whose weights would be relative to 0 by `bounded`
    largest = tl.where(state.row_sum == 0.0, NEG_INF, state.row_max)
    row_max = tl.maximum(largest, sink)
    reference = pivot(row_max)
    correction = tl.exp2(largest - reference)
    # A sink of inf takes all: out is 0, not nan
    weight = tl.where(sink == reference, 1.0, tl.exp2(sink - reference))
    return OnlineSoftmax(row_max, state.row_sum * correction + weight), correction


@triton.jit
def finish(state):
    """(inverse row sum, lse in natural units); a row without a key has 0 and -inf."""
    empty = state.row_sum == 0.0
    row_sum = tl.where(empty, 1.0, state.row_sum)
    lse = tl.where(empty, NEG_INF, (state.row_max + tl.log2(row_sum)) * LN_2)
    return 1.0 / row_sum, lse
