"""Constants of base-2 softmax, and the precision of products."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))


@triton.jit
def dot(a, b, acc=None):
    """a @ b + acc in fp32. fp32 operands are multiplied in full fp32 on the CUDA cores ("ieee"), never in tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")
