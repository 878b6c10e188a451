"""Which keys a query sees, per element and per tile: the window around the bottom-right diagonal, and the length.

Query i sees key j when  i + shift - left <= j <= i + shift + right,  shift = seqlen_k - seqlen_q. Read from the keys, the
same rule holds with rows and columns, left and right, and the sign of shift exchanged; so one function gives both ranges.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Window(NamedTuple):
    """Keys visible on each side of the diagonal, in tokens; None is unbounded. Causal is a right side of 0."""

    left: Any
    right: Any


class TileRange(NamedTuple):
    """Tiles [begin, end) hold something visible; in [full_begin, full_end) everything is, and no row or column is missing."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@triton.jit
def _tile_range(first, last, shift, left, right, length, TILE: tl.constexpr):
    """Tiles of columns that rows first..last see; row i sees columns i + shift - left to i + shift + right."""
    column_begin = 0
    full_column_begin = 0
    column_end = length
    full_column_end = length
    if left is not None:
        column_begin = tl.maximum(first + shift - left, 0)
        full_column_begin = tl.maximum(last + shift - left, 0)
    if right is not None:
        column_end = tl.maximum(tl.minimum(last + shift + right + 1, length), 0)
        full_column_end = tl.maximum(tl.minimum(first + shift + right + 1, length), 0)
    end = tl.cdiv(column_end, TILE)
    begin = tl.minimum(column_begin // TILE, end)
    full_begin = tl.minimum(tl.cdiv(full_column_begin, TILE), end)
    full_end = tl.maximum(full_column_end // TILE, full_begin)
    return TileRange(begin, full_begin, full_end, end)


@triton.jit
def key_range(row_begin, lengths, window, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Key tiles that the queries of the tile at row_begin see."""
    last = tl.minimum(row_begin + TILE_M, lengths.seqlen_q) - 1
    shift = lengths.seqlen_k - lengths.seqlen_q
    return _tile_range(row_begin, last, shift, window.left, window.right, lengths.seqlen_k, TILE_N)


@triton.jit
def query_range(col_begin, lengths, window, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Query tiles that see the keys of the tile at col_begin. Keys past the length do not make a tile less than full."""
    last = tl.minimum(col_begin + TILE_N, lengths.seqlen_k) - 1
    shift = lengths.seqlen_q - lengths.seqlen_k
    return _tile_range(col_begin, last, shift, window.right, window.left, lengths.seqlen_q, TILE_M)


@triton.jit
def part_of(tiles, part: tl.constexpr):
    """[begin, end) of the masked tiles before the full ones (0), the full ones (1), the masked ones after them (2)."""
    if part == 0:
        return tiles.begin, tiles.full_begin
    elif part == 1:
        return tiles.full_begin, tiles.full_end
    else:
        return tiles.full_end, tiles.end


@triton.jit
def visible(rows, cols, lengths, window):
    """Mask of queries `rows` against keys `cols`, any shapes that broadcast against each other."""
    shift = lengths.seqlen_k - lengths.seqlen_q
    mask = (rows < lengths.seqlen_q) & (cols < lengths.seqlen_k)
    if window.left is not None:
        mask = mask & (cols >= rows + shift - window.left)
    if window.right is not None:
        mask = mask & (cols <= rows + shift + window.right)
    return mask


@triton.jit
def in_window(rows, cols, lengths, window):
    """`visible` for rows and columns of the sequence; window: not without bounds."""
    shift = lengths.seqlen_k - lengths.seqlen_q
    if window.left is None:
        return cols <= rows + (shift + window.right)
    elif window.right is None:
        return cols >= rows + (shift - window.left)
    else:
        return (cols <= rows + (shift + window.right)) & (cols >= rows + (shift - window.left))


@triton.jit
def first_key(rows, lengths, window, first_col):
    """The first key that rows see, counted from first_col, of a window with a left side."""
    return rows + (lengths.seqlen_k - lengths.seqlen_q - first_col - window.left)


@triton.jit
def end_of_keys(rows, lengths, window, first_col):
    """Where the keys end that rows see, counted from first_col: one a row, or one of all."""
    shift = lengths.seqlen_k - lengths.seqlen_q - first_col
    if window.right is None:
        return lengths.seqlen_k - first_col
    else:
        return tl.minimum(rows + (shift + window.right + 1), lengths.seqlen_k - first_col)


@triton.jit
def visible_keys(rows, cols, lengths, window, first_col=0):
    """Like `visible`, for rows past the length too, and with at most two comparisons an element; cols count from first_col.

    Of a tile, cols counted from its first key are constants of the program, which saves an addition an element.
    """
    mask = cols < end_of_keys(rows, lengths, window, first_col)
    if window.left is not None:
        mask = mask & (cols >= first_key(rows, lengths, window, first_col))
    return mask


@triton.jit
def right_of_left_edge(rows, cols, lengths, window, first_col):
    """`visible_keys` of keys that lie left of the right edge and of the end."""
    return cols >= first_key(rows, lengths, window, first_col)
