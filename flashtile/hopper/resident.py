"""The Hopper forward of few keys, in Gluon: a head's keys and values stay in shared memory, a row's softmax is done at once.

A program of 4 warps has some query tiles of one head, 64 rows each, and loads all keys and values once:

    scores = q kᵀ  |  the next queries are loaded  |  p = softmax(scores), whole rows  |  out = p v, through shared memory

No loop over keys, so no maxima of before, no corrections; no partitions of warps and no turns. Two to eight programs to a
multiprocessor hide each other's waits: what `forward.py` pays at each border of a tile, with few keys all of its time, runs
here under what other programs do. Keys are pieces of falling powers of two, which are all that a product takes: 77 are 64 and
16 in place of 128, 257 are 256 and 16 in place of 384. Columns are two boxes, 64 and 16 for head dim 80. One program after the
other is for all heads of the same rows, so that lines of memory that heads share are in L2.

Takes what `tiles.resident_config` says: fp16 and bf16, up to 272 keys, head dims to 128, every window, packed calls, whose
parts of sequences a small kernel lists before (`schedule.plan_packed`). Shorter sequences of these compute all pieces too.

Limit: the chain of a tile, scores, maxima, exponentials, p v, each after the one before; with 77 keys memory. What it brought,
and what was tried, with figures: docs/kernels/hopper-resident.md.
"""

from flashtile.device import chain, columns, masks, schedule, softmax
from flashtile.device.barriers import allocate_barriers
from flashtile.device.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    reinterpret,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.device.lengths import Lengths
from flashtile.device.numerics import LOG2_E, NEG_INF
from flashtile.hopper import boxes
from flashtile.hopper.arguments import bind_resident

# Query rows of a tile: what one wgmma of 4 warps holds.
ROWS = gl.constexpr(64)


@gluon.jit
def _boxes(desc, rest_desc, DIM: gl.constexpr):
    """A descriptor for each box of columns; () where there are no rows."""
    if desc is None:
        return ()
    elif rest_desc is not None:
        return desc, rest_desc
    elif DIM > desc.block_type.shape[-1]:
        return desc, desc
    else:
        return (desc,)


@gluon.constexpr_function
def _shape(desc, rows):
    return [rows // desc.block_type.shape[-2], *desc.block_type.shape]


@gluon.jit
def _allocate(descs, COUNT: gl.constexpr):
    """Memory for COUNT rows, in boxes."""
    smem = ()
    for i in gl.static_range(len(descs)):
        smem = smem + (gl.allocate_shared_memory(descs[i].dtype, _shape(descs[i], COUNT), descs[i].layout),)
    return smem


@gluon.jit
def _allocate_keys(descs, tail_descs, KEYS: gl.constexpr):
    """Of each piece of the keys; the first is one box."""
    smem = (_allocate(descs, KEYS[0]),)
    for i in gl.static_range(1, len(KEYS)):
        smem = smem + (_allocate(tail_descs, KEYS[i]),)
    return smem


@gluon.jit
def _load_boxes(desc, smem, ready, at, head, row, PACKED: gl.constexpr, COL: gl.constexpr):
    """One arrival at ready, and then the bytes of all boxes."""
    BOXES: gl.constexpr = smem.shape[0]
    BOX_ROWS: gl.constexpr = desc.block_type.shape[-2]
    mbarrier.expect(ready, BOXES * desc.block_type.nbytes)
    for i in gl.static_range(BOXES):
        boxes.load(desc, smem.index(i), ready, at, head, row + i * BOX_ROWS, desc.block_type.shape[-1], PACKED, COL)


@gluon.jit
def _load(descs, smem, ready, at, head, row, PACKED: gl.constexpr):
    """Start the loads of the rows from `row` on that smem holds. at, row: of `boxes.place`."""
    for i in gl.static_range(len(descs)):
        _load_boxes(descs[i], smem[i], ready, at, head, row, PACKED, i * descs[0].block_type.shape[-1])


@gluon.constexpr_function
def _first_key(keys, piece):
    return sum(keys[:piece])


@gluon.jit
def _load_keys(descs, tail_descs, smem, ready, at, head, row, KEYS: gl.constexpr, PACKED: gl.constexpr):
    """ready: a barrier a piece."""
    _load(descs, smem[0], ready.index(0), at, head, row, PACKED)
    for i in gl.static_range(1, len(KEYS)):
        _load(tail_descs, smem[i], ready.index(i), at, head, row + _first_key(KEYS, i), PACKED)


@gluon.constexpr_function
def _rows_and_columns(smem):
    return [smem.shape[0] * smem.shape[-2], smem.shape[-1]]


@gluon.jit
def _tile(smem):
    """All boxes of smem: one below the other they are a tile."""
    SHAPE: gl.constexpr = _rows_and_columns(smem)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, smem.dtype)
    return reinterpret(smem, smem.dtype, SHAPE, layout)


@gluon.jit
def _start_scores(q_smem, k_smem, COUNT: gl.constexpr):
    """q kᵀ of a piece of the keys."""
    raw = gl.zeros([ROWS, COUNT], gl.float32, columns.layout_of(COUNT))
    for i in gl.static_range(len(q_smem)):
        raw = warpgroup_mma(_tile(q_smem[i]), _tile(k_smem[i]).permute((1, 0)), raw, use_acc=i > 0, is_async=True)
    return raw


@gluon.jit
def _hide(scores, row_begin, first_key, lengths, window):
    layout: gl.constexpr = scores.type.layout
    rows = row_begin + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))[None, :]
    return gl.where(masks.visible_keys(rows, cols, lengths, window, first_key), scores, NEG_INF)


@gluon.jit
def _await_scores(raw, row_begin, first_key, lengths, window, PENDING: gl.constexpr, MASKED: gl.constexpr):
    scores = warpgroup_mma_wait(PENDING, deps=[raw])
    if MASKED:
        scores = _hide(scores, row_begin, first_key, lengths, window)
    return scores


@gluon.jit
def _scores(q_smem, k_smem, k_ready, row_begin, lengths, window, KEYS: gl.constexpr, MASKED: gl.constexpr):
    """A tensor a piece, -inf where keys are hidden."""
    raw = ()
    for i in gl.static_range(len(KEYS)):
        mbarrier.wait(k_ready.index(i), 0)
        raw = raw + (_start_scores(q_smem, k_smem[i], KEYS[i]),)
    scores = ()
    for i in gl.static_range(len(KEYS)):
        scores = scores + (_await_scores(raw[i], row_begin, _first_key(KEYS, i), lengths, window,
                                         (len(KEYS) - 1 - i) * len(q_smem), MASKED[i]),)  # fmt: skip
    return scores


@gluon.jit
def _like(x, y):
    """x, of as many rows, in the layout of y; every element stays in its register."""
    return gl.convert_layout(x, y.type.layout)


@gluon.jit
def _largest(scores):
    """The largest score of each row."""
    row_max = softmax.max_apart(scores[0])
    for i in gl.static_range(1, len(scores)):
        row_max = gl.maximum(row_max, _like(softmax.max_apart(scores[i]), row_max))
    return row_max


@gluon.jit
def _start_values(p, v_smem, acc):
    """acc + p v of a piece of the keys; acc: a tensor for each box of columns, or () at first."""
    result = ()
    for i in gl.static_range(len(v_smem)):
        result = result + (_start_product(p, _tile(v_smem[i]), acc, i),)
    return result


@gluon.jit
def _start_product(p, v, acc, BOX: gl.constexpr):
    COLUMNS: gl.constexpr = v.shape[1]
    layout: gl.constexpr = columns.layout_of(COLUMNS)
    p = gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2))
    if len(acc) == 0:
        return warpgroup_mma(p, v, gl.zeros([ROWS, COLUMNS], gl.float32, layout), use_acc=False, is_async=True)
    else:
        return warpgroup_mma(p, v, acc[BOX], is_async=True)


@gluon.jit
def _weighted_values(scores, v_smem, v_ready, scale_log2):
    """(state, p v): a tensor for each box of columns. Exponentials of a piece under the product of the one before."""
    row_max = _largest(scores) * scale_log2
    reference = softmax.pivot(row_max)
    acc = ()
    sums = ()
    for i in gl.static_range(len(scores)):
        # ptxas moves exponentials above the product of the piece before, but not past this
        mbarrier.wait(v_ready.index(i), 0)
        p = gl.exp2(scores[i] * scale_log2 - columns.per_row(reference, scores[i]))
        sums = sums + (softmax.sum_apart(p),)
        acc = _start_values(p.to(v_smem[i][0].dtype), v_smem[i], acc)
    row_sum = sums[0]
    for i in gl.static_range(1, len(scores)):
        row_sum = row_sum + _like(sums[i], row_sum)
    return softmax.join(softmax.OnlineSoftmax(row_max, row_sum)), columns.wait(acc)


@gluon.jit
def _store(descs, smem, acc, at, head, row, PACKED: gl.constexpr):
    """Start the store of a tile, through smem."""
    for i in gl.static_range(len(descs)):
        _tile(smem[i]).store(acc[i].to(smem[i].dtype))
    fence_async_shared()
    partition_barrier()
    for i in gl.static_range(len(descs)):
        boxes.store(descs[i], smem[i].index(0), at, head, row, PACKED, i * descs[0].block_type.shape[-1])


@gluon.jit
def _part(part, num_parts, tiles, table, seqlen_q, seqlen_k):
    """(batch, first tile of queries, lengths) of a part of a sequence."""
    if table is None:
        nothing = seqlen_q * 0
        return part // num_parts, part % num_parts * tiles, Lengths(nothing, nothing, seqlen_q, seqlen_k)
    else:
        batch, index, lengths = schedule.packed_part(part, table)
        return batch, index * tiles, lengths


@gluon.jit
def _run(q_descs, k_descs, k_tail_descs, v_descs, v_tail_descs, out_descs, lse, batch, head, first, end, lengths, window,
         scale_log2, GROUP_SIZE: gl.constexpr, KEYS: gl.constexpr, MASKED: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    """Tiles [first, end) of queries. lse: of the first row of the sequence."""
    q_smem = _allocate(q_descs, ROWS)
    k_smem = _allocate_keys(k_descs, k_tail_descs, KEYS)
    v_smem = _allocate_keys(v_descs, v_tail_descs, KEYS)
    out_smem = _allocate(out_descs, ROWS)
    q_ready = allocate_barriers(1, len(q_descs)).index(0)
    k_ready = allocate_barriers(len(KEYS), len(k_descs))
    v_ready = allocate_barriers(len(KEYS), len(v_descs))
    at, row = boxes.place(batch, lengths.start_q, lengths.seqlen_q, first * ROWS, PACKED)
    k_at, k_row = boxes.place(batch, lengths.start_k, lengths.seqlen_k, 0, PACKED)
    _load(q_descs, q_smem, q_ready, at, head, row, PACKED)
    _load_keys(k_descs, k_tail_descs, k_smem, k_ready, k_at, head // GROUP_SIZE, k_row, KEYS, PACKED)
    _load_keys(v_descs, v_tail_descs, v_smem, v_ready, k_at, head // GROUP_SIZE, k_row, KEYS, PACKED)
    for tile in range(first, end):
        mbarrier.wait(q_ready, (tile - first) & 1)
        scores = _scores(q_smem, k_smem, k_ready, tile * ROWS, lengths, window, KEYS, MASKED)
        # Queries are read, and out of the tile before has left
        tma_store_wait(0)
        partition_barrier()
        if tile + 1 < end:
            _load(q_descs, q_smem, q_ready, at, head, row + (tile + 1 - first) * ROWS, PACKED)
        state, acc = _weighted_values(scores, v_smem, v_ready, scale_log2)
        inverse, row_lse = softmax.finish(state)
        _store(out_descs, out_smem, columns.scale(acc, inverse), at, head, row + (tile - first) * ROWS, PACKED)
        rows = tile * ROWS + gl.arange(0, ROWS, row_lse.type.layout)
        gl.store(lse + rows, row_lse, mask=rows < lengths.seqlen_q)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["lse_stride", "seqlen_q", "seqlen_k", "num_heads", "num_parts", "tiles"])
def attention_forward_resident(
    q_desc, q_rest_desc, k_desc, k_rest_desc, k_tail_desc, k_tail_rest_desc, v_desc, v_rest_desc, v_tail_desc, v_tail_rest_desc,
    out_desc, out_rest_desc, lse, table, window, softmax_scale, lse_stride, seqlen_q, seqlen_k, num_heads, num_parts, tiles,
    GROUP_SIZE: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, KEYS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """x_desc: TMA descriptors of boxes; tail: of all pieces of the keys but the first; rest: of the last columns, or None.

    lse: pointer. table: of `schedule.plan_packed`, or None. tiles: of queries, that a program has. KEYS: rows of each piece;
    MASKED: whether some of it may be hidden.
    """
    PACKED: gl.constexpr = table is not None
    if PACKED:
        chain.begin()
        num_parts = gl.load(table)
    head = gl.program_id(0) % num_heads
    part = gl.program_id(0) // num_heads
    if not PACKED or part < num_parts:
        batch, first, lengths = _part(part, num_parts, tiles, table, seqlen_q, seqlen_k)
        lse_row = (head if PACKED else batch * num_heads + head).to(gl.int64) * lse_stride + lengths.start_q
        _run(_boxes(q_desc, q_rest_desc, DIM), _boxes(k_desc, k_rest_desc, DIM), _boxes(k_tail_desc, k_tail_rest_desc, DIM),
             _boxes(v_desc, v_rest_desc, DIM_V), _boxes(v_tail_desc, v_tail_rest_desc, DIM_V),
             _boxes(out_desc, out_rest_desc, DIM_V), lse + lse_row, batch, head, first,
             gl.minimum(first + tiles, gl.cdiv(lengths.seqlen_q, ROWS)), lengths, window, softmax_scale * LOG2_E, GROUP_SIZE,
             KEYS, MASKED, PACKED)  # fmt: skip


def launch(problem, config, operands):
    """Run the kernel. config: ResidentConfig. Returns out and lse as `flashtile.attention` describes them."""
    return bind_resident(attention_forward_resident, problem, config)(operands)
