"""How a kernel sees a tensor of rows: a pointer and strides, and loads and stores of tiles of rows."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """A (batch, seqlen, heads, dim) tensor with a contiguous dim, or (batch, heads, seqlen) where a row is one number.

    Strides in elements; packed tensors have no batch and stride 0 there.
    """

    ptr: Any
    batch_stride: Any
    row_stride: Any
    head_stride: Any


class RowsIn16Bytes(NamedTuple):
    """Rows with strides of multiples of 16 bytes; Triton looks for multiples of 16 elements. For `aligned`."""

    ptr: Any
    batch_stride: Any
    row_stride: Any
    head_stride: Any
    # A constant to Triton, and no argument of a kernel
    yes: Any = 1


class RowsIn8Bytes(NamedTuple):
    """The same of 8 bytes, as 8-bit numbers with a head dim such as 72 have."""

    ptr: Any
    batch_stride: Any
    row_stride: Any
    head_stride: Any
    yes: Any = 1
    half: Any = 1


def rows_of(x, lse=False) -> Rows | RowsIn16Bytes | RowsIn8Bytes:
    """Pointer and strides of (batch, seqlen, heads, dim), or with lse of (batch, heads, seqlen); packed ones have no batch."""
    strides = x.stride()
    if lse:
        batch, head, row = strides if len(strides) == 3 else (0, *strides)
        return Rows(x, batch, row, head)
    batch, row, head = strides[:3] if len(strides) == 4 else (0, *strides[:2])
    if all(stride % 16 == 0 for stride in (batch, row, head)):
        return Rows(x, batch, row, head)
    for num_bytes, kind in ((16, RowsIn16Bytes), (8, RowsIn8Bytes)):
        if all(stride * x.element_size() % num_bytes == 0 for stride in (batch, row, head)):
            return kind(x, batch, row, head)
    return Rows(x, batch, row, head)


@triton.jit
def aligned(x):
    """Rows x, of which the compiler knows what RowsIn16Bytes or RowsIn8Bytes says.

    Of head dims such as 72 it would otherwise load single numbers, and none ahead.
    """
    if len(x) == 4:
        return x
    else:
        UNIT: tl.constexpr = (128 if len(x) == 5 else 64) // x.ptr.dtype.element_ty.primitive_bitwidth
        return Rows(x.ptr, x.batch_stride // UNIT * UNIT, x.row_stride // UNIT * UNIT, x.head_stride // UNIT * UNIT)


@triton.jit
def in_pairs(x):
    """Rows x of 8-bit numbers as rows of int16, two columns in each. Their strides and address are even."""
    ptr = x.ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    return Rows(ptr, x.batch_stride // 2, x.row_stride // 2, x.head_stride // 2)


class PerHead(NamedTuple):
    """(batch, heads) numbers. Strides in elements, 0 where one number stands for all; ptr is None where there are none.

    Not None as a whole: of a tuple that holds None beside such tuples Triton knows no type.
    """

    ptr: Any
    batch_stride: Any
    head_stride: Any


def per_head_of(x) -> PerHead:
    return PerHead(None, None, None) if x is None else PerHead(x, *x.stride())


@triton.jit
def per_head_ptr(x, batch, head):
    return x.ptr + batch * x.batch_stride + head * x.head_stride


@triton.jit
def per_head(x, batch, head):
    """The number of one head, or 1."""
    if x.ptr is None:
        return 1.0
    else:
        return tl.load(per_head_ptr(x, batch, head))


@triton.jit
def head_ptr(x, batch, start, head):
    """Pointer to the first row of one head of one sequence; start is that row's number in a packed tensor, else 0."""
    return x.ptr + batch.to(tl.int64) * x.batch_stride + start * x.row_stride + head.to(tl.int64) * x.head_stride


@triton.jit
def inner(x):
    """x with a last dim of 1 for what a row holds; a number, which broadcasts to all, as it is."""
    if len(x.shape) == 0:
        return x
    else:
        return tl.expand_dims(x, len(x.shape))


@triton.jit
def tile_offsets(rows, row_stride, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of (rows, BLOCK_DIM); WIDE where a row stride of 2**22 and more could overflow int32 inside a tile."""
    if WIDE:
        rows = rows.to(tl.int64)
    return rows[:, None] * row_stride + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def load_tile(ptr, row_begin, length, row_stride, TILE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
              MASK_ROWS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """(TILE, BLOCK_DIM) from row_begin on; zeros past DIM and, with MASK_ROWS, past length."""
    rows = tl.arange(0, TILE)
    ptrs = ptr + row_begin.to(tl.int64) * row_stride + tile_offsets(rows, row_stride, DIM, BLOCK_DIM, WIDE)
    if MASK_ROWS:
        if DIM == BLOCK_DIM:
            return tl.load(ptrs, mask=(row_begin + rows < length)[:, None], other=0.0)
        else:
            mask = (row_begin + rows < length)[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
            return tl.load(ptrs, mask=mask, other=0.0)
    else:
        if DIM == BLOCK_DIM:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=(tl.arange(0, BLOCK_DIM) < DIM)[None, :], other=0.0)


@triton.jit
def prefetch_rows(ptr, row_begin, length, row_stride, TILE: tl.constexpr):
    """Ask for the first 128 bytes of TILE rows, of those below length, and do not wait: loads then find them in L2."""
    rows = row_begin + tl.arange(0, TILE)
    ptrs = ptr + rows.to(tl.int64) * row_stride
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l,r",
        [ptrs.to(tl.int64), (rows < length).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store_tile(ptr, tile, row_begin, length, row_stride, TILE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
               WIDE: tl.constexpr):  # fmt: skip
    """Store the rows of (TILE, BLOCK_DIM) below length and the columns below DIM, in the dtype of ptr."""
    rows = tl.arange(0, TILE)
    ptrs = ptr + row_begin.to(tl.int64) * row_stride + tile_offsets(rows, row_stride, DIM, BLOCK_DIM, WIDE)
    mask = (row_begin + rows < length)[:, None] & (tl.arange(0, BLOCK_DIM) < DIM)[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)
