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

from flashtile.device import cache
from flashtile.device.compat import copy_async, gl, gluon, reinterpret, tma_load, tma_store
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
def _shape_of(count, block, columns, pieces):
    return [count, *block[:-2], pieces * block[-2], columns]


@gluon.jit
def allocate(desc, count: gl.constexpr, COLUMNS: gl.constexpr, PIECES: gl.constexpr = 1):
    """Shared memory for `count` tiles of COLUMNS of one box or of several, and PIECES times the rows that a descriptor has."""
    return gl.allocate_shared_memory(desc.dtype, _shape_of(count, desc.block_type.shape, COLUMNS, PIECES), desc.layout)


@gluon.constexpr_function
def num_boxes(desc, live):
    """How many boxes of a descriptor have so many live columns."""
    return -(-live // desc.block_type.shape[-1])


@gluon.constexpr_function
def num_bytes(desc, smem, live):
    """What `load` and `load_pages` of so many live columns bring to a tile of smem, from `allocate`."""
    return num_boxes(desc, live) * smem.shape[-2] * desc.block_type.shape[-1] * desc.dtype.primitive_bitwidth // 8


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
def load_pages(desc, smem, ready, pages, batch, slot, stop, head, LIVE: gl.constexpr, PAGE_SIZE: gl.constexpr,
               COL: gl.constexpr = 0):  # fmt: skip
    """`load` from slot on of a cache in pages, and zeros from stop on; a box has rows of one page, or of a part of one.

    desc: of `arguments.packed_descriptor`, with boxes of 128 bytes. pages: `cache.Pages`.
    """
    ROWS: gl.constexpr = desc.block_type.shape[-2]
    COLUMNS: gl.constexpr = desc.block_type.shape[-1]
    PIECES: gl.constexpr = smem.shape[-2] // ROWS
    boxes = reinterpret(smem, desc.dtype, [smem.shape[-1] // COLUMNS * PIECES] + desc.block_type.shape, desc.layout)
    for piece in range(PIECES):
        first = slot + piece * ROWS
        length = gl.minimum(gl.maximum(stop - first, 0), ROWS)
        page = cache.load_pages(pages, batch, first // PAGE_SIZE, length > 0)
        start = page * pages.rows_apart + first % PAGE_SIZE
        for box in gl.static_range(num_boxes(desc, LIVE)):
            tma_load(desc, [PACKED_ROWS, start + length, head, PACKED_ROWS - length, COL + box * COLUMNS], ready,
                     boxes.index(box * PIECES + piece))  # fmt: skip


# Rows at once, of which a thread has some; 16 of 128 bytes by 4 warps, 16 bytes a thread
_GATHERED_AT_ONCE = gl.constexpr(64)
_GATHERED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def gather(smem, pages, x, batch, slot, stop, head, LIVE: gl.constexpr, PAGE_SIZE: gl.constexpr, COL: gl.constexpr = 0):
    """`load_pages` by asynchronous copies of rows, for pages of any size. x: k or v of `cache.Pages`. LIVE: 64 divides it.

    Complete when the copies are; behind the barrier that they tell, a consumer needs a fence before its products.
    """
    TILE_N: gl.constexpr = smem.shape[-2]
    WIDTH: gl.constexpr = 128 if LIVE % 128 == 0 else 64
    tile = smem.reshape([TILE_N, smem.shape[-1]])
    in_piece = gl.arange(0, _GATHERED_AT_ONCE, gl.SliceLayout(1, _GATHERED))
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, _GATHERED))[None, :]
    head_ptr = x.ptr + head.to(gl.int64) * x.head_stride * 8
    for row in gl.static_range(0, TILE_N, _GATHERED_AT_ONCE):
        slots = slot + row + in_piece
        seen = slots < stop
        page = cache.load_pages(pages, batch, slots // PAGE_SIZE, seen)
        # In units of 16 bytes, so that the compiler knows that they are whole
        units = page.to(gl.int64) * x.batch_stride + (slots % PAGE_SIZE).to(gl.int64) * x.row_stride
        ptrs = head_ptr + (8 * units)[:, None] + cols
        mask = seen[:, None] & (cols >= 0)
        for col in gl.static_range(0, LIVE, WIDTH):
            piece = tile.slice(row, _GATHERED_AT_ONCE, dim=0).slice(col, WIDTH, dim=1)
            copy_async(piece, ptrs + (COL + col), mask=mask)


@gluon.jit
def store(desc, smem, at, head, row, PACKED: gl.constexpr, COL: gl.constexpr = 0):
    """Start the store of a tile of the descriptor's shape; arguments as of `load`."""
    if PACKED:
        tma_store(desc, [PACKED_ROWS, at, head, row, COL], smem)
    else:
        tma_store(desc, [at, head, row, COL], smem)
