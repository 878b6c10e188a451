"""From q kᵀ to logits: scale, softcap, ALiBi; and back through them.

Kernels keep logits in base 2. A factor is left to the exponential's multiply-add (`scale_log2`): the unit of logits times
log2(e). The unit is the scale, where it is positive; the softcap, of which `logits` are then parts; else 1.
"""

import math
import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.device.numerics import LOG2_E
from flashtile.device.tensors import PerHead, inner, per_head, per_head_of

# Of scales that ALiBi's slopes are divided by
SMALLEST_UNIT = 2.0**-40
# Of fp32 to its full precision: a smaller scale may be 0 to a GPU, and 0 * -inf is nan
SMALLEST_NORMAL = 2.0**-126
# A larger one, or any in fp32, shows that `_tanh` is off by 1.2e-7 near 0 too, and logits by so many times that
COARSE_SOFTCAP = 64.0
# For |x| up to 0.6 tanh(x) is x times a polynomial in x * x, lowest power first: 2.3e-6 off at most, relatively
_TANH_BOUND = 0.6
_TANH_TERMS = 0.9999978542327881, -0.3331403732299805, 0.1305783838033676, -0.0409290194511414
# By what `_tanh_asm` wants numbers multiplied: those within the bound are then below 2, which bit 30 tells
_TANH_SCALE = tl.constexpr(2 / _TANH_BOUND)


# The same for |x| up to 0.55: 3.2e-8 off at most
_FINE_BOUND = tl.constexpr(0.55)
_FINE_TERMS = tl.constexpr((0.9999999403953552, -0.3333279490470886, 0.13318875432014465, -0.05258926004171371,
                            0.016315331682562828))  # fmt: skip
# The same for |x| up to 0.115: 2.9e-6 off at most
_NEAR_BOUND = 0.115
_NEAR_TERMS = 0.9999971, -0.33157843


def _word(x):
    """The bits of an fp32 number."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


def _literal(x):
    return f"0f{_word(x) & 0xFFFFFFFF:08X}"


def _tanh_asm(count):
    """PTX for tanh of `count` numbers of a thread, given times _TANH_SCALE: $i from the input tied to it.

    Multiply-adds and no exponentials where all numbers of the warp are within the bound; else as `_tanh`.
    """
    factor = 1 / _TANH_SCALE.value
    terms = [_literal(term * factor ** (2 * i + 1)) for i, term in enumerate(_TANH_TERMS)]
    numbers = [f"${i}" for i in range(count)]
    lines = ["{ .reg .pred q; .reg .f32 t, u; .reg .b32 b, c; mov.b32 b, 0;"]
    lines += [f"mov.b32 c, {x}; or.b32 b, b, c;" for x in numbers]
    lines += ["and.b32 b, b, 0x40000000; setp.ne.u32 q, b, 0; vote.sync.any.pred q, q, 0xffffffff; @q bra FAR;"]
    for x in numbers:
        lines += [f"mul.f32 u, {x}, {x}; mov.f32 t, {terms[-1]};"]
        lines += [f"fma.rn.f32 t, t, u, {term};" for term in terms[-2::-1]]
        lines += [f"mul.f32 {x}, {x}, t;"]
    lines += ["bra DONE; FAR:"]
    for x in numbers:
        lines += [f"mul.f32 t, {x}, {_literal(2 * LOG2_E.value * factor)}; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;",
                  f"rsqrt.approx.ftz.f32 t, t; mul.f32 t, t, t; fma.rn.f32 {x}, t, 0fC0000000, 0f3F800000;"]  # fmt: skip
    return " ".join([*lines, "DONE: }"])


def _tanh_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)])


_TANH_ASM = tl.constexpr({n: _tanh_asm(n) for n in (16, 32, 64)})
_TANH_CONSTRAINTS = tl.constexpr({n: _tanh_constraints(n) for n in (16, 32, 64)})


class Cap(NamedTuple):
    """A softcap as polynomials of raw scores x. See `capped`.

    Near 0, with v = x * x + shift, it is x * (term0 + term1 * v), and v is at least 2**n and less than 2**(n + 1); further from
    0 v is larger.
    """

    shift: Any
    # the bits of 2**n
    exponent: Any
    term0: Any
    term1: Any
    # v up to which wide0 + wide1 * v + wide2 * v**2 + wide3 * v**3 may stand for v
    limit: Any
    wide0: Any
    wide1: Any
    wide2: Any
    wide3: Any
    # Beyond, x * far is 2 * log2(e) times what tanh is taken of, and back times tanh may stand for x, beside 0 for v
    far: Any
    back: Any


def _shifted(terms, shift):
    """A polynomial of u, lowest power first, as one of u + shift."""
    shifted = [0.0] * len(terms)
    for i, term in enumerate(terms):
        for j in range(i + 1):
            shifted[j] += term * math.comb(i, j) * (-shift) ** (i - j)
    return shifted


def cap_of(problem, unit) -> Cap | None:
    """The softcap of a call, for logits in units of softcap / unit; None without one, or where fp32 has not the range."""
    if not problem.softcap or not 2.0**-20 < abs(problem.softmax_scale / problem.softcap) < 2.0**20:
        return None
    factor = problem.softmax_scale / problem.softcap
    near = (_NEAR_BOUND / factor) ** 2
    power = 2.0 ** math.ceil(math.log2(near))
    shift = 2 * power - near
    terms, wide = (_shifted([unit * term * factor ** (2 * i + 1) for i, term in enumerate(terms)], shift)
                   for terms in (_NEAR_TERMS, _TANH_TERMS))  # fmt: skip
    wide[0] -= terms[0]
    return Cap(shift, _word(power), *terms, (_TANH_BOUND / factor) ** 2 + shift, *(term / terms[1] for term in wide),
               2 * LOG2_E.value * factor, unit / terms[0])  # fmt: skip


def _cap_asm(count):
    """PTX for x and v of `count` scores of a thread, tied to the outputs, where `count` times each number of `Cap` follows from
    exponent on, but no terms. Where all of the warp are near 0 they stay as they are; else what may stand for them."""
    xs, vs = [f"${i}" for i in range(count)], [f"${i}" for i in range(count, 2 * count)]
    exponent, limit, wide0, wide1, wide2, wide3, far, back = (f"${i * count}" for i in range(4, 12))
    lines = ["{ .reg .pred q; .reg .b32 b, c; .reg .f32 t, u, m0, m1, m2, m3; mov.b32 b, 0;"]
    lines += [f"mov.b32 c, {v}; or.b32 b, b, c;" for v in vs]
    lines += [f"xor.b32 b, b, {exponent}; and.b32 b, b, 0x7f800000; setp.ne.u32 q, b, 0;",
              "vote.sync.any.pred q, q, 0xffffffff; @!q bra NEAR;"]  # fmt: skip
    lines += [f"mov.f32 m{i}, {vs[i]};" for i in range(4)]
    lines += [f"max.f32 m{i % 4}, m{i % 4}, {vs[i]};" for i in range(4, count)]
    lines += ["max.f32 m0, m0, m1; max.f32 m2, m2, m3; max.f32 m0, m0, m2;",
              f"setp.gt.f32 q, m0, {limit}; vote.sync.any.pred q, q, 0xffffffff; @q bra FAR;"]  # fmt: skip
    for v in vs:
        lines += [f"fma.rn.f32 t, {v}, {wide3}, {wide2}; fma.rn.f32 t, t, {v}, {wide1}; fma.rn.f32 {v}, t, {v}, {wide0};"]
    lines += [f"bra NEAR; FAR: mul.f32 u, {back}, 0fC0000000;"]
    for x, v in zip(xs, vs, strict=True):
        lines += [f"mul.f32 t, {x}, {far}; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rsqrt.approx.ftz.f32 t, t;",
                  f"mul.f32 t, t, t; fma.rn.f32 {x}, t, u, {back}; mov.f32 {v}, 0f00000000;"]  # fmt: skip
    return " ".join([*lines, "NEAR: }"])


def _cap_constraints(count):
    return ",".join(["=f"] * (2 * count) + [str(i) for i in range(2 * count)] + ["r"] * count + ["f"] * (7 * count))


_CAP_ASM = tl.constexpr({n: _cap_asm(n) for n in (16, 32)})
_CAP_CONSTRAINTS = tl.constexpr({n: _cap_constraints(n) for n in (16, 32)})


class ScoreParams(NamedTuple):
    """scale > 0 unless prescaled; softcap and alibi_slopes (fp32 (heads,) or (batch, heads)) are None where off."""

    scale: Any
    softcap: Any
    alibi_slopes: Any
    # 0 where all sequences share the slopes
    alibi_batch_stride: Any
    # None, or 1 where the scale is not positive and must act before the maximum is taken
    prescaled: Any
    # None, or 1 where tanh near 0 is what a polynomial gives
    fine_cap: Any = None


def params_of(problem, alibi_slopes, prescaled) -> ScoreParams:
    """Of a call. prescaled: whether the scale has to act before the maximum is taken.

    So it has before a bias is added in fp32: else Triton starts the product from the bias, and each of its additions is rounded
    as a number of the bias's size is (out was off by 4e-4 where queries are 2000 keys away, with the scale before 4e-5).
    """
    batch_stride = alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0
    if alibi_slopes is not None and (0 < problem.softmax_scale < SMALLEST_UNIT or problem.dtype.itemsize == 4):
        prescaled = True
    prescaled = prescaled or 0 < problem.softmax_scale < SMALLEST_NORMAL
    fine_cap = problem.softcap > (0 if problem.dtype.itemsize == 4 else COARSE_SOFTCAP)
    return ScoreParams(float(problem.softmax_scale), float(problem.softcap) or None, alibi_slopes, batch_stride,
                       1 if prescaled else None, 1 if fine_cap else None)  # fmt: skip


class Descales(NamedTuple):
    """What fp8 values of q, k and v are multiplied with: PerHead of the heads of keys."""

    q: PerHead
    k: PerHead
    v: PerHead


def descales_of(operands) -> Descales:
    """Of CacheOperands."""
    return Descales(*map(per_head_of, (operands.q_descale, operands.k_descale, operands.v_descale)))


@triton.jit
def descaled(scale, descales, batch, head):
    """The scale of a head of keys, or of several, (heads, 1), with those of its fp8 values."""
    if descales.q.ptr is not None:
        scale = scale * inner(per_head(descales.q, batch, head))
    if descales.k.ptr is not None:
        scale = scale * inner(per_head(descales.k, batch, head))
    return scale


@triton.jit
def _unit(score_params):
    """What logits are multiples of."""
    if score_params.softcap is not None:
        return score_params.softcap
    elif score_params.prescaled is not None:
        return 1.0
    else:
        return score_params.scale


@triton.jit
def scale_log2(score_params):
    """What is left to multiply logits with, to reach base 2."""
    return _unit(score_params) * LOG2_E


@triton.jit
def load_slope(score_params, batch, head):
    """Negative, and in the unit of logits; 0 without ALiBi. head: a number, or a tensor of them."""
    if score_params.alibi_slopes is None:
        return 0.0
    else:
        slope = tl.load(score_params.alibi_slopes + batch * score_params.alibi_batch_stride + head)
        return slope * (-1.0 / _unit(score_params))


@triton.jit
def bias(rows, cols, diagonal, slope):
    """What ALiBi adds to logits, with arguments as those of `logits`: slope * |row + diagonal - col|.

    Positions of a thread's products in a tile differ by constants of the program: in bit 3 of those down a column, in all bits
    but 1 and 2 of those along a row. So distances are a number of the thread plus constants, in fp32 (exact to 2**24), and
    elements 8 rows and 8 columns apart share theirs: 34 additions for 64 scores, and no conversions of integers.
    """
    COL_BITS: tl.constexpr = 6 if cols.shape[0] == 1 else ~8
    ROW_BITS: tl.constexpr = ~8 if cols.shape[0] == 1 else 6
    rows_of_thread = (rows & ROW_BITS).to(tl.float32)
    cols_of_thread = (cols & COL_BITS).to(tl.float32)
    constants = ((rows & ~ROW_BITS) - (cols & ~COL_BITS)).to(tl.float32)
    return slope * tl.abs(diagonal.to(tl.float32) + rows_of_thread - cols_of_thread + constants)


@triton.jit
def _tanh(x):
    """As 1 - 2 / (1 + exp(2 * x)).

    The inverse is the square of an inverse root, which is one instruction: divisions by a number that is not a power of two
    are eight. tanh.approx is one for all, but off by 5e-4, which lse shows (95 of 99 random configurations in one run, not
    recorded).
    """
    inverse_root = tl.rsqrt(1 + tl.exp2(x * (2 * LOG2_E)))
    return 1 - 2 * (inverse_root * inverse_root)


@triton.jit
def _tanh_near_0_too(x):
    """`_tanh`, but near 0, where its error is that of numbers near 1, a polynomial."""
    u = x * x
    near = u * _FINE_TERMS[4] + _FINE_TERMS[3]
    for i in tl.static_range(2, -1, -1):
        near = near * u + _FINE_TERMS[i]
    return tl.where(tl.abs(x) <= _FINE_BOUND, x * near, _tanh(x))


@triton.jit
def _capped(scores, score_params, THREAD: tl.constexpr):
    """Logits under a softcap, in units of it."""
    factor = score_params.scale / score_params.softcap
    if THREAD == 0:
        return _tanh(scores * factor) if score_params.fine_cap is None else _tanh_near_0_too(scores * factor)
    else:
        x = scores * (factor * _TANH_SCALE)
        return tl.inline_asm_elementwise(_TANH_ASM[THREAD], _TANH_CONSTRAINTS[THREAD], [x], dtype=tl.float32, is_pure=True,
                                         pack=THREAD)  # fmt: skip


# A multiply-add takes one number from a register of the warp, and term0 is that: term1 looks as if each lane had its own
_OF_LANE = tl.constexpr(
    "{ .reg .b32 i; .reg .f32 f; mov.u32 i, %laneid; cvt.rn.f32.u32 f, i; fma.rn.f32 $0, f, 0f00000000, $1; }"
)


@triton.jit
def cap_of_lane(cap):
    """cap for `capped`, once a kernel: else each second multiply-add has a copy beside it."""
    term1 = tl.inline_asm_elementwise(_OF_LANE, "=f,f", [cap.term1], dtype=tl.float32, is_pure=True, pack=1)
    return Cap(cap.shift, cap.exponent, cap.term0, term1, cap.limit, cap.wide0, cap.wide1, cap.wide2, cap.wide3, cap.far,
               cap.back)  # fmt: skip


@triton.jit
def capped(scores, cap, THREAD: tl.constexpr):
    """Logits of raw scores under a softcap, in the unit of `cap_of`. THREAD: how many of the scores a thread has.

    Three instructions and a half for each where all of a warp's are within 0.115 of the softcap: bits of all v, put together,
    then have the exponent of one. Up to 0.6 four more, beyond exponentials.
    """
    v = scores * scores + cap.shift
    x, v = tl.inline_asm_elementwise(
        _CAP_ASM[THREAD], _CAP_CONSTRAINTS[THREAD],
        [scores, v, cap.exponent, cap.limit, cap.wide0, cap.wide1, cap.wide2, cap.wide3, cap.far, cap.back],
        dtype=(tl.float32, tl.float32), is_pure=True, pack=THREAD,
    )  # fmt: skip
    return x * (v * cap.term1 + cap.term0)


@triton.jit
def logits(scores, rows, cols, diagonal, slope, score_params, THREAD: tl.constexpr = 0):
    """Logits up to the factor scale_log2(score_params).

    rows, cols: positions in the tile, that broadcast to the shape of scores; column row + diagonal is on the diagonal.
    THREAD: how many of the scores a thread has, 16, 32 or 64, or 0 where that is not known.
    """
    if score_params.softcap is not None:
        scores = _capped(scores, score_params, THREAD)
    elif score_params.prescaled is not None:
        scores = scores * score_params.scale
    if score_params.alibi_slopes is not None:
        scores = scores + bias(rows, cols, diagonal, slope)
    return scores


@triton.jit
def through_softcap(dscores, scores, score_params, THREAD: tl.constexpr = 0):
    """Gradient of scale * q kᵀ from that of the logits; the caller multiplies by the scale. scores: raw q kᵀ."""
    if score_params.softcap is None:
        return dscores
    else:
        tanh = _capped(scores, score_params, THREAD)
        return dscores * (1 - tanh * tanh)
