"""Which tile of which head a program works on."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Work(NamedTuple):
    tile: Any
    head: Any
    batch: Any


@triton.jit
def tile_of_program(num_tiles, num_heads, LAST_FIRST: tl.constexpr):
    """One program a tile. Tiles of one head run side by side, so that they share its rows in L2.

    LAST_FIRST starts a head's last tiles first: under a causal mask they are the longest.
    """
    program = tl.program_id(0)
    tile = program % num_tiles
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    head = (program // num_tiles) % num_heads
    return Work(tile, head, program // (num_tiles * num_heads))
