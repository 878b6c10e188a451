"""Constants of base-2 softmax, and the precision of products."""

import triton
import triton.language as tl
from triton import knobs

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))


@triton.jit
def dot(a, b, acc=None):
    """a @ b + acc in fp32. fp32 operands are multiplied in full fp32 on the CUDA cores ("ieee"), never in tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def power_of_two(exponent):
    """2**exponent in fp32, of int32 from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


# The interpreter knows no assembler
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def split_pairs(x):
    """(those at even addresses, those at odd ones) of e4m3 numbers, in fp16; x: int16 of two each.

    The tensor cores want two keys of one column side by side in a register. Of 16 bits a matrix load from shared memory turns
    them so, of 8 bits none does, and each number would be a load of its own, 64 a thread for a tile of 64 keys and 128 columns,
    and about three instructions more. Four numbers are here a permutation and two conversions.
    """
    if _INTERPRETED:
        first = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        second = ((x >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; "
            "cvt.rn.f16x2.e4m3x2 $1, b; }", "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
