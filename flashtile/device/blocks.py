"""Tiles in one block of columns or two, powers of two each, as a tuple: where the last columns of one would be zeros.

See `tiles.blocks_of`. REST: columns of the second block, or 0.
"""

import triton
import triton.language as tl

from flashtile.device.numerics import dot, power_of_two, split_pairs
from flashtile.device.tensors import load_tile, store_tile


@triton.jit
def load(ptr, row_begin, length, row_stride, TILE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
         MASK_ROWS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """`load_tile` of all DIM columns."""
    if REST == 0:
        return (load_tile(ptr, row_begin, length, row_stride, TILE, DIM, BLOCK, MASK_ROWS, WIDE),)
    else:
        return (load_tile(ptr, row_begin, length, row_stride, TILE, BLOCK, BLOCK, MASK_ROWS, WIDE),
                load_tile(ptr + BLOCK, row_begin, length, row_stride, TILE, DIM - BLOCK, REST, MASK_ROWS, WIDE))  # fmt: skip


@triton.jit
def store(ptr, blocks, row_begin, length, row_stride, TILE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
          REST: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """`store_tile` of all DIM columns."""
    if REST == 0:
        store_tile(ptr, blocks[0], row_begin, length, row_stride, TILE, DIM, BLOCK, WIDE)
    else:
        store_tile(ptr, blocks[0], row_begin, length, row_stride, TILE, BLOCK, BLOCK, WIDE)
        store_tile(ptr + BLOCK, blocks[1], row_begin, length, row_stride, TILE, DIM - BLOCK, REST, WIDE)


@triton.jit
def zeros(ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, dtype: tl.constexpr, HEADS: tl.constexpr = 1):
    """Of one head, or of HEADS side by side."""
    if HEADS > 1:
        tile = tl.zeros((HEADS, ROWS, BLOCK), dtype)
        return (tile,) if REST == 0 else (tile, tl.zeros((HEADS, ROWS, REST), dtype))
    elif REST == 0:
        return (tl.zeros((ROWS, BLOCK), dtype),)
    else:
        return tl.zeros((ROWS, BLOCK), dtype), tl.zeros((ROWS, REST), dtype)


@triton.jit
def scaled(blocks, factor):
    """blocks times a factor that broadcasts to each."""
    results = ()
    for i in tl.static_range(len(blocks)):
        results = results + (blocks[i] * factor,)
    return results


@triton.jit
def chosen(condition, blocks, others):
    """blocks, or where the condition, a number, is false, others."""
    results = ()
    for i in tl.static_range(len(blocks)):
        results = results + (tl.where(condition, blocks[i], others[i]),)
    return results


@triton.jit
def dot_rows(a, b, dtype: tl.constexpr):
    """a bᵀ in fp32, of operands in dtype; of several heads side by side one product each."""
    product = dot(a[0].to(dtype), tl.trans(b[0].to(dtype)))
    for i in tl.static_range(1, len(a)):
        product = dot(a[i].to(dtype), tl.trans(b[i].to(dtype)), product)
    return product


@triton.jit
def dot_add(a, b, acc, dtype: tl.constexpr):
    """acc + a b, of operands in dtype; a is one tensor."""
    results = ()
    for i in tl.static_range(len(b)):
        results = results + (dot(a.to(dtype), b[i].to(dtype), acc[i]),)
    return results


@triton.jit
def twice(blocks):
    """Each of blocks twice, one after the other."""
    results = ()
    for i in tl.static_range(len(blocks)):
        results = results + (blocks[i], blocks[i])
    return results


@triton.jit
def unpaired(blocks):
    """fp16 of blocks of int16, which hold two e4m3 columns each: of each block those of even number, then the others."""
    results = ()
    for i in tl.static_range(len(blocks)):
        results = results + split_pairs(blocks[i])
    return results


@triton.jit
def paired(blocks):
    """Whole blocks from what `unpaired` gave."""
    results = ()
    for i in tl.static_range(len(blocks) // 2):
        results = results + (tl.interleave(blocks[2 * i], blocks[2 * i + 1]),)
    return results


@triton.jit
def in_fp16(blocks):
    """(blocks in fp16, the power of two that each row must be multiplied with to be what it was).

    The largest number of a row comes to lie between 2**14 and 2**15, so that all within 2**-31 of it keep the bits of bf16.
    """
    largest = tl.max(tl.abs(blocks[0].to(tl.float32)), len(blocks[0].shape) - 1, keep_dims=True)
    for i in tl.static_range(1, len(blocks)):
        largest = tl.maximum(largest, tl.max(tl.abs(blocks[i].to(tl.float32)), len(blocks[0].shape) - 1, keep_dims=True))
    # Of inf and nan, and of nothing but zeros, it is any number
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15) - 141
    results = ()
    for i in tl.static_range(len(blocks)):
        results = results + ((blocks[i].to(tl.float32) * power_of_two(-exponent)).to(tl.float16),)
    return results, power_of_two(exponent)
