"""Tiles that TMA loads and stores: where their rows are, and the boxes of those columns that count.

What a box has past the last column TMA fills with zeros. A box of nothing else takes as many bytes from L2 to the
multiprocessor as any other, and they do not come evenly from all of L2, so that some multiprocessors wait longer than others:
see `tiles.box_columns`. The forward of head dims 136 to 192, whose blocks have 256 columns but where the rest lies apart
(`tiles.HopperConfig`), took 1.0 to 1.5 times as long, each allocation of its tensors its own. By counters (Nsight Compute, head
dim 160, causal, 8192 keys) tensor cores were active for 43 to 59% of the time, from one multiprocessor to another, and a slice
of L2 had 22% more requests than the mean (FA3, which has no such box, 2%). us, 16 heads, 8192 tokens, causal, single runs, with
boxes of zeros, without (FA3): head dim 144 775, 500 (523), 152 848, 599 (623), 160 590 to 765, 570 (572), 168 846, 646 (633),
176 671 to 764, 656 (582), 192 743, 650 (577). The backward of 176 2519 to 2310; of 144, 160, 192, 192/128 and 160/128 it takes
0.98 to 1.01 of the time.
"""

from flashtile.device.compat import gl, gluon, reinterpret, tma_load, tma_store
from flashtile.hopper import arguments

# Rows of a packed tensor as its TMA descriptor sees it.
PACKED_ROWS = gl.constexpr(arguments.PACKED_ROWS)


@gluon.jit
def place(batch, start, length, row, PACKED: gl.constexpr):
    """Where TMA finds a row of a sequence: two coordinates around that of the head. See `arguments.packed_descriptor`."""
    if PACKED:
        return start + length, PACKED_ROWS - length + row
    else:
        return batch, row


@gluon.constexpr_function
def _shape_of(count, block, columns):
    return [count, *block[:-1], columns]


@gluon.jit
def allocate(desc, count: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for `count` tiles, of the rows that a descriptor has, and COLUMNS of one box or of several."""
    return gl.allocate_shared_memory(desc.dtype, _shape_of(count, desc.block_type.shape, COLUMNS), desc.layout)


@gluon.constexpr_function
def num_boxes(desc, live):
    """How many boxes of a descriptor have so many live columns."""
    return -(-live // desc.block_type.shape[-1])


@gluon.jit
def _load_box(desc, smem, ready, at, head, row, PACKED: gl.constexpr, COL: gl.constexpr):
    if PACKED:
        tma_load(desc, [PACKED_ROWS, at, head, row, COL], ready, smem)
    else:
        tma_load(desc, [at, head, row, COL], ready, smem)


@gluon.jit
def load(desc, smem, ready, at, head, row, LIVE: gl.constexpr, PACKED: gl.constexpr, COL: gl.constexpr = 0):
    """Start the loads of LIVE columns from COL on. at, row: of `place`; head, row: in the order of the descriptor."""
    COLUMNS: gl.constexpr = desc.block_type.shape[-1]
    boxes = reinterpret(smem, desc.dtype, [smem.shape[-1] // COLUMNS] + desc.block_type.shape, desc.layout)
    for box in gl.static_range(num_boxes(desc, LIVE)):
        _load_box(desc, boxes.index(box), ready, at, head, row, PACKED, COL + box * COLUMNS)


@gluon.jit
def store(desc, smem, at, head, row, PACKED: gl.constexpr, COL: gl.constexpr = 0):
    """Start the store of a tile of the descriptor's shape; arguments as of `load`."""
    if PACKED:
        tma_store(desc, [PACKED_ROWS, at, head, row, COL], smem)
    else:
        tma_store(desc, [at, head, row, COL], smem)
