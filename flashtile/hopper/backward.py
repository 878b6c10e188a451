"""The Hopper backward, in Gluon: one kernel for dk, dv and dq, between a small one before and a small one after it.

    before   neg_delta = -(rowsum(dout * out) - dlse),  neg_lse = -lse / scale,  dq_sum = 0     one pass over out and dout
    main     p = exp(scale * (k qᵀ + neg_lse)),  dscores = p * (v doutᵀ + neg_delta)            keys are rows: all is transposed
             dv += p dout,  dk += dscores q,  dq_sum += dscoresᵀ k
    after    dk = scale * dk (in main),  dq = scale * dq_sum                                    one pass, fp32 to the dtype

A program owns TILE_N keys of one key-value head at a time, and walks over the query tiles of all heads of its group; scores are
computed once. dq_sum is the one fp32 tensor in memory: each step adds to it from registers, in the order of a product's
accumulators, four numbers of a thread at once (`_give_piece`), and the kernel after puts them in rows. It does not run where
who comes last writes dq (below), nor where one tile has all keys: dq has one product then, and leaves in the dtype through
shared memory (`_store_piece`), and there is no dq_sum; in packed calls for those sequences of which it is true (`is_alone`).
neg_lse and neg_delta are not subtracted: the products start from them as accumulators, which saves 16 to 32 live registers in
each half of a step and an addition an element. Programs stay, and take the next tile of keys from a counter in global memory,
which the kernel before clears.

dq is summed in the order of arrival, and may differ in its last bits from run to run; so may dk and dv where query heads share
keys, since walks begin where others are (below). All else has the same bits in every run. All has them in a fixed order, which
deterministic=True asks for, and which takes less time where queries see few keys (`backward_config`): a tile of dq_sum has a
count of what was added, and a program waits until it is its turn. So who comes first stores, to what nobody has
cleared, and who comes last takes the sum as the accumulators of its product, and writes dq in its dtype (up to head dim 128;
the kernel before writes zeros for those queries that see no key). Programs take tiles of a head in that order, also their first
one from the counter, so that who is waited for runs or has run, however many programs there are. Nobody waits long: most heads
go up, from the last tile of keys to the first, each walk from its first query to its last. Under a causal mask the tile whose
turn is before then begins one tile of queries further on, and stays there. A head's longest tiles come last so, at uneven
times, and would leave programs idle at the end of the kernel: the last group of heads goes down, from the first tile of keys to
the last, each walk from its last query to its first. There the tile before must have begun a step earlier, as it has where
programs come to it one after the other. So do all heads where query heads share keys: up, walks that begin together at
diagonals far apart would be at all queries of a group at one time, which L2 does not hold (1.1 to 1.5 times the time, single
runs).

Where query heads share keys, a walk is as many times longer, and rows of q, dout and dq_sum of a group of heads do not fit in
L2 (8 heads of 8192 queries: 64 MB). So all heads of a query tile come before the next, walks go from the last query to the
first, and a program that takes a tile of keys begins where others of that key-value head are (`at_step`), and goes round. How
much of it L2 misses, by a simulation, is in docs/guide/4-optimising.md.

Where tiles of keys are few, or walks so long that the last ones end late, each part of a group of query heads is a group of
its own, with a dk and dv of its own, which a small kernel adds in fp32: one key-value head of 8192 tokens is 64 tiles for 132
programs, each with a walk over all heads. An estimate of the time tells how many parts (`backward_config`). So has each part of
the queries, where tiles of keys are fewer than programs, or little more (`backward_config.query_parts`): cross attention of 2 x
4096 queries over 77 keys of 10 heads has 20, and of the 128 of a causal call of 4096 tokens of 4 heads the longest walk is
twice the mean.

Packed calls: a table of tiles of keys, which `schedule.plan_packed` writes with queries and keys exchanged, where heads share
keys the longest sequences first; TMA descriptors that end where a sequence ends (`arguments.packed_descriptor`); row statistics
and dq_sum padded, see padded_start. Under dropout p keeps its sign as the mask between the partitions: negative where it is
dropped.

Partitions of 16 warps, BY_ROWS (128 keys; head dims to 128, and larger ones with few columns, see backward_config.py), between
them only barriers on buffers:

    default   4 warps   dq: dscoresᵀ k for both halves, in pieces of 64 rows and columns; of tiles of 32 queries kᵀ dscores
    computes  4 warps   64 keys each: scores and dk of the last step under way together, exponentials under dk; then dp and dv
              twice     together, dscores under dv. p goes to dv from registers; dscores go to shared memory for dq and dk
    loads     1 warp    every TMA load; a tile of q and its neg_lse share a barrier, as do dout and neg_delta
    awaits    1 warp    in a fixed order: polls the counts, up to TURN_SLOTS steps ahead; a barrier tells dq that it may add
    counts    1 warp    in a fixed order: counts a step when it is in memory, while dq goes on

and else (64 keys), where one partition cannot hold dk and dv:

    default   4 warps   dq
    weights   4 warps   scores, p, dv; gives p through shared memory to
    dscores   4 warps   dp, dscores, dk
    loads, awaits, counts: 1 warp each

Limit: the shared-memory pipe (79% busy at head dim 64, 88% at 128), at 256 additions to L2. The floor, counters, and everything
that was tried with its figures: docs/kernels/hopper-backward.md.

What the tiles and partitions were chosen among is in backward_config.py.
Source: Dao 2023, FlashAttention-2, algorithm 2; Shah et al. 2024, FlashAttention-3, section 3.

Refused: see backward_config.py.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashtile.device import chain, columns, groups, masks, schedule, scores
from flashtile.device import dropout as dropouts
from flashtile.device.barriers import allocate_barriers
from flashtile.device.compat import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    reinterpret,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.device.dropout import RandomStream, dropout_of
from flashtile.device.launch import Launches, launch_now
from flashtile.device.lengths import Lengths, Packing, load_lengths
from flashtile.device.numerics import LOG2_E, NEG_INF
from flashtile.device.partitions import specialize
from flashtile.device.schedule import Order
from flashtile.device.scores import params_of
from flashtile.device.tensors import aligned, head_ptr, load_tile, rows_of, store_tile
from flashtile.gradients import sinks_gradient
from flashtile.hopper import arguments, backward_config, boxes
from flashtile.hopper.arguments import descriptor, packed_descriptor
from flashtile.outputs import fresh, gradients, gradients_of_parts
from flashtile.problem import Operands
from flashtile.tiles import box_columns, live_columns, padded_dim

# Keys of one computing partition: the rows of one wgmma.
HALF_N = gl.constexpr(64)
# Columns of an instruction where a partition has one accumulator: wider ones need more registers than ptxas gives a kernel of
# 16 warps (C7602)
WIDEST = gl.constexpr(128)
# Rows and columns of dq that 4 warps multiply and add at once: 32 numbers a thread
PIECE = gl.constexpr(64)
LOAD_REGISTERS = gl.constexpr(24)
# Rows of the row statistics are padded to this, so that a tile of them is always whole.
ROW_MULTIPLE = tl.constexpr(128)
# Those of a Walk, and of packed calls start_q, start_k, seqlen_q, seqlen_k
WALK_WORDS = gl.constexpr(13)
WALK_SLOTS = gl.constexpr(2)
# Steps between the first that waits for its turn and the last that is not yet counted
TURN_SLOTS = gl.constexpr(4)


class Buffers(NamedTuple):
    """Shared memory. q, dout, neg_lse, neg_delta, dscores and p have a slot per stage; k and v one per half; dscores is a
    tuple of one per half; walk has slots of WALK_WORDS."""

    q: Any
    dout: Any
    k: Any
    v: Any
    neg_lse: Any
    neg_delta: Any
    dscores: Any
    p: Any
    walk: Any
    # A piece of dq, or None
    dq: Any


class Barriers(NamedTuple):
    """One a slot of what they are named after."""

    k_ready: Any
    v_ready: Any
    q_ready: Any
    q_free: Any
    dout_ready: Any
    dout_free: Any
    dscores_ready: Any
    dscores_free: Any
    p_ready: Any
    p_free: Any
    # No partition reads k, or v, of this tile any more. The next one comes, or first dk or dv leaves through the buffer.
    k_done: Any
    v_done: Any
    k_free: Any
    v_free: Any
    walk_ready: Any
    walk_free: Any
    # In a fixed order, of a step: dq may be added; it has been given to memory; it is in memory, and counted
    turn_ready: Any
    added: Any
    counted: Any


class Walk(NamedTuple):
    """The steps of one tile of keys: query tiles from begin on, of all heads of the group; 0 steps say that there is no tile.

    Steps are counted through, over all tiles of a program, since the rings of buffers go on. In tiles [full_begin, full_end)
    no key is hidden. The number of steps is a word of its own: where it is known as a multiple of the number of heads, the
    computing partitions get more local variables than registers (192 bytes of spills for 8 at head dim 128). front: the query
    tile of the first step where heads share keys or the order is fixed; there ~ of it where a walk goes down. See `at_step`.
    """

    batch: Any
    # With each part of a group of heads as one
    kv_head: Any
    # With each part of the queries too: where dk and dv go
    part: Any
    col_begin: Any
    begin: Any
    full_begin: Any
    full_end: Any
    steps: Any
    front: Any


@triton.jit
def walked_tiles(col_begin, lengths, window, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Query tiles that a tile of keys walks over. Keys that no query sees walk over one, fully hidden, tile."""
    tiles = masks.query_range(col_begin, lengths, window, TILE_M, TILE_N)
    begin = tl.maximum(tl.minimum(tiles.begin, (lengths.seqlen_q - 1) // TILE_M), 0)
    return masks.TileRange(begin, tiles.full_begin, tiles.full_end, tl.maximum(tiles.end, begin + 1))


@triton.jit
def work_of_unit(unit, order, table, lengths, TILE_N: tl.constexpr, FIXED_ORDER: tl.constexpr, ALL_DOWN: tl.constexpr):
    """(the unit-th tile of keys, whether in a fixed order its walk goes up, whether there is one, lengths of its sequence).

    ALL_DOWN: no walk goes up.
    """
    if table is None:
        exists = unit < order.total_heads * order.num_tiles
        work = schedule.tile_of_unit(unit, order, False)
        goes_up = work.batch * order.num_heads + work.head < order.total_heads - order.tail_heads
    else:
        exists = unit < order.num_tiles * order.num_heads
        work, swapped, sequences_after = schedule.packed_tile_of_unit(unit, order, table, False)
        lengths = Lengths(swapped.start_k, swapped.start_q, swapped.seqlen_k, swapped.seqlen_q)
        # Down in the last group of heads of every other sequence, among which is the last
        tail_heads = order.heads_per_group // tl.maximum(lengths.seqlen_q, 1)
        goes_up = (work.head < order.num_heads - tail_heads) | (sequences_after % 2 == 1)
    if ALL_DOWN:
        goes_up = unit < 0
    if FIXED_ORDER:
        tile = tl.where(goes_up, tl.cdiv(lengths.seqlen_k, TILE_N) - 1 - work.tile, work.tile)
        work = schedule.Work(tile, work.head, work.batch)
    return work, goes_up, exists, lengths


@triton.jit
def part_of_queries(part, query_parts, begin, end):
    """(key-value head, first tile of queries, the one behind the last) of a part, which has as many as others or one more.

    Where the mask leaves fewer tiles than parts, one that gets none has the one before the first, which is hidden.
    """
    number, tiles = part % query_parts, end - begin
    first, behind = begin + number * tiles // query_parts, begin + (number + 1) * tiles // query_parts
    is_empty = first == behind
    return part // query_parts, tl.where(is_empty, begin - 1, first), tl.where(is_empty, begin, behind)


@gluon.jit
def _peek(word, ACQUIRE: gl.constexpr = False):
    """A word that other programs write. ACQUIRE: what they have written before it is read after it."""
    ASM: gl.constexpr = "ld.acquire.gpu.global.u32 $0, [$1];" if ACQUIRE else "ld.relaxed.gpu.global.u32 $0, [$1];"
    return gl.inline_asm_elementwise(ASM, "=r,l", [word.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _walk(unit, order, table, lengths, window, query_parts, fronts, GROUP_SIZE: gl.constexpr, TILE_M: gl.constexpr,
          TILE_N: gl.constexpr, FIXED_ORDER: gl.constexpr):  # fmt: skip
    """The unit-th tile of keys, and the lengths of its sequence. query_parts: as in `_load`; fronts: its own, or None."""
    ALL_DOWN: gl.constexpr = GROUP_SIZE > 1 and window.right is not None
    work, goes_up, exists, lengths = work_of_unit(unit, order, table, lengths, TILE_N, FIXED_ORDER, ALL_DOWN)
    col_begin = work.tile * TILE_N
    tiles = walked_tiles(col_begin, lengths, window, TILE_M, TILE_N)
    kv_head, begin, end = work.head, tiles.begin, tiles.end
    if query_parts is not None:
        kv_head, begin, end = part_of_queries(work.head, query_parts, begin, end)
    steps = gl.where(exists, (end - begin) * GROUP_SIZE, 0)
    front = end - 1
    if FIXED_ORDER:
        front = gl.where(goes_up, begin, ~front)
    if fronts is not None:
        # 0 before the first
        other = (_peek(fronts + work.batch * order.num_heads + work.head) & 0xFFFF) - 1 if exists else 0
        front = gl.where((other >= begin) & (other < end), other, front)
    return Walk(work.batch, kv_head, work.head, col_begin, begin, tiles.full_begin, tiles.full_end, steps, front), lengths


@gluon.jit
def _tell_front(fronts, unit, walk, order, tile):
    """Say which query tile the unit-th tile of keys begins, unless a younger one of the head has: those are where most go on.

    A word of 15 bits of the unit, and 1 + the tile in 16. It is a hint: where they do not suffice, walks begin elsewhere.
    """
    place = fronts + walk.batch * order.num_heads + walk.part
    if ((unit - (_peek(place) >> 16)) & 0x7FFF) < 0x4000:
        gl.store(place, (unit & 0x7FFF) << 16 | (tile + 1) & 0xFFFF)


@gluon.jit
def _publish(buffers, barriers, walk, lengths, turn, PACKED: gl.constexpr):
    """Tell the other partitions the program's tile of this turn."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn % WALK_SLOTS
    first = slot * WALK_WORDS
    zero = gl.full([1], 0, gl.int32, layout)
    mbarrier.wait(barriers.walk_free.index(slot), _phase(turn, WALK_SLOTS) ^ 1)
    buffers.walk.index(first).store(zero + walk.batch)
    buffers.walk.index(first + 1).store(zero + walk.kv_head)
    buffers.walk.index(first + 2).store(zero + walk.part)
    buffers.walk.index(first + 3).store(zero + walk.col_begin)
    buffers.walk.index(first + 4).store(zero + walk.begin)
    buffers.walk.index(first + 5).store(zero + walk.full_begin)
    buffers.walk.index(first + 6).store(zero + walk.full_end)
    buffers.walk.index(first + 7).store(zero + walk.steps)
    buffers.walk.index(first + 8).store(zero + walk.front)
    if PACKED:
        buffers.walk.index(first + 9).store(zero + lengths.start_q)
        buffers.walk.index(first + 10).store(zero + lengths.start_k)
        buffers.walk.index(first + 11).store(zero + lengths.seqlen_q)
        buffers.walk.index(first + 12).store(zero + lengths.seqlen_k)
    mbarrier.arrive(barriers.walk_ready.index(slot), count=1)


@gluon.jit
def _word(buffers, number):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(buffers.walk.index(number).load(layout), 0)


@gluon.jit
def _receive(buffers, barriers, lengths, turn, PACKED: gl.constexpr):
    """The program's tile of this turn, and the lengths of its sequence."""
    slot = turn % WALK_SLOTS
    first = slot * WALK_WORDS
    mbarrier.wait(barriers.walk_ready.index(slot), _phase(turn, WALK_SLOTS))
    walk = Walk(_word(buffers, first), _word(buffers, first + 1), _word(buffers, first + 2), _word(buffers, first + 3),
                _word(buffers, first + 4), _word(buffers, first + 5), _word(buffers, first + 6), _word(buffers, first + 7),
                _word(buffers, first + 8))  # fmt: skip
    if PACKED:
        lengths = Lengths(_word(buffers, first + 9), _word(buffers, first + 10), _word(buffers, first + 11),
                          _word(buffers, first + 12))  # fmt: skip
    mbarrier.arrive(barriers.walk_free.index(slot), count=1)
    return walk, lengths


@triton.jit
def at_step(walk, i, GROUP_SIZE: tl.constexpr, FIXED_ORDER: tl.constexpr):
    """(query tile, head) of the i-th step, made of i alone: what a loop carries costs the computing partitions registers.

    From the first query to the last. Where heads share keys, all of them come before the next query tile, from the last to the
    first, and a walk begins where other programs of its key-value head are, at `walk.front`, and goes round: rows of many heads
    do not fit in L2, but those that programs use at one time do. In a fixed order a walk goes up or down, as the module says.
    """
    head = walk.kv_head * GROUP_SIZE + i % GROUP_SIZE
    if FIXED_ORDER:
        tile = walk.front + i // GROUP_SIZE
        return tl.where(tile < 0, ~tile, tile), head
    elif GROUP_SIZE > 1:
        tile = walk.front - i // GROUP_SIZE
        return tl.where(tile < walk.begin, tile + walk.steps // GROUP_SIZE, tile), head
    else:
        return walk.begin + i, head


@gluon.jit
def _phase(step, NUM_STAGES: gl.constexpr):
    """Parity of the barriers of a ring at a step."""
    return (step // NUM_STAGES) & 1


@triton.jit
def padded_start(start, batch):
    """First row of a packed sequence among the row statistics, where each has a multiple of ROW_MULTIPLE rows, and some."""
    return (start + batch * ROW_MULTIPLE) // ROW_MULTIPLE * ROW_MULTIPLE


@gluon.jit
def _stats_row(walk, lengths, head, num_heads, padded_rows, PACKED: gl.constexpr):
    """Row of the row statistics where a sequence of a head begins."""
    if PACKED:
        return head * padded_rows + padded_start(lengths.start_q, walk.batch)
    else:
        return (walk.batch * num_heads + head) * padded_rows


# ---- loads ----


@gluon.jit
def _load_rows(desc, row_desc, smem, row_smem, ready, free, walk, lengths, tile, head, num_heads, padded_rows, step,
               LIVE: gl.constexpr, TILE_M: gl.constexpr, NUM_STAGES: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    """One tile of q or dout and its row statistic."""
    BOXES: gl.constexpr = boxes.num_boxes(desc, LIVE)
    slot = step % NUM_STAGES
    mbarrier.wait(free.index(slot), _phase(step, NUM_STAGES) ^ 1)
    mbarrier.expect(ready.index(slot), BOXES * desc.block_type.nbytes + row_desc.block_type.nbytes)
    row = tile * TILE_M
    at, place_row = boxes.place(walk.batch, lengths.start_q, lengths.seqlen_q, row, PACKED)
    boxes.load(desc, smem.index(slot), ready.index(slot), at, head, place_row, LIVE, PACKED)
    stats_row = _stats_row(walk, lengths, head, num_heads, padded_rows, PACKED)
    tma_load(row_desc, [stats_row + row], ready.index(slot), row_smem.index(slot))


@gluon.jit
def _load_keys(desc, smem, ready, free, walk, splits, lengths, turn, LIVE: gl.constexpr, HALVES: gl.constexpr,
               PACKED: gl.constexpr):  # fmt: skip
    """The tile of k or v. splits: parts of a group of heads, or None for one."""
    kv_head = walk.kv_head
    if splits is not None:
        kv_head = kv_head // splits
    BOXES: gl.constexpr = boxes.num_boxes(desc, LIVE)
    mbarrier.wait(free.index(0), (turn & 1) ^ 1)
    mbarrier.expect(ready.index(0), HALVES * BOXES * desc.block_type.nbytes)
    for half in gl.static_range(HALVES):
        row = walk.col_begin + HALF_N * half
        at, place_row = boxes.place(walk.batch, lengths.start_k, lengths.seqlen_k, row, PACKED)
        boxes.load(desc, smem.index(half), ready.index(0), at, kv_head, place_row, LIVE, PACKED)


@gluon.jit
def _next_unit(counter):
    """Ask the counter for the number of the next tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, layout)
    one = gl.full([32], 1, gl.int32, layout)
    # As a tensor: a scalar atomic goes through shared memory. Relaxed: nothing but the number itself is exchanged.
    numbers = gl.atomic_add(counter + lanes * 0, one, mask=lanes == 0, sem="relaxed")
    return gl.max(gl.where(lanes == 0, numbers, 0), 0)


@gluon.jit
def _load(
    q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, buffers, barriers, counter, order, table, lengths, window,
    num_heads, splits, query_parts, padded_rows, GROUP_SIZE: gl.constexpr, LIVE_D: gl.constexpr, LIVE_DV: gl.constexpr,
    TILE_M: gl.constexpr, HALVES: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, FIXED_ORDER: gl.constexpr,
):  # fmt: skip
    PACKED: gl.constexpr = table is not None
    TILE_N: gl.constexpr = HALVES * HALF_N
    # The first tile of keys is known, and may come, before the kernel that writes counters and row statistics has ended
    EARLY: gl.constexpr = not (PACKED or FIXED_ORDER or GROUP_SIZE > 1)
    if not EARLY:
        chain.wait()
    turn = 0
    first = 0
    # A word of each key-value head of each sequence, see `_tell_front`
    fronts = None
    if GROUP_SIZE > 1 and not FIXED_ORDER:
        fronts = counter + 1
    if FIXED_ORDER:
        # A tile that others wait for must not belong to a program that may not run yet
        counted_from = 0
        unit = _next_unit(counter)
    else:
        counted_from = gl.num_programs(0)
        unit = gl.program_id(0)
    walk, lengths = _walk(unit, order, table, lengths, window, query_parts, fronts, GROUP_SIZE, TILE_M, TILE_N,
                          FIXED_ORDER)  # fmt: skip
    _publish(buffers, barriers, walk, lengths, turn, PACKED)
    if EARLY:
        _load_keys(k_desc, buffers.k, barriers.k_ready, barriers.k_free, walk, splits, lengths, turn, LIVE_D, HALVES, PACKED)
        _load_keys(v_desc, buffers.v, barriers.v_ready, barriers.v_free, walk, splits, lengths, turn, LIVE_DV, HALVES, PACKED)
        chain.wait()
    while walk.steps > 0:
        for i in range(walk.steps):
            # Whether keys come under the queries
            with_keys = i == 0
            if EARLY:
                with_keys = with_keys & (turn > 0)
            step = first + i
            tile, head = at_step(walk, i, GROUP_SIZE, FIXED_ORDER)
            if fronts is not None:
                if i % GROUP_SIZE == 0:
                    _tell_front(fronts, unit, walk, order, tile)
            _load_rows(q_desc, neg_lse_desc, buffers.q, buffers.neg_lse, barriers.q_ready, barriers.q_free, walk, lengths, tile,
                       head, num_heads, padded_rows, step, LIVE_D, TILE_M, Q_STAGES, PACKED)  # fmt: skip
            if with_keys:
                _load_keys(k_desc, buffers.k, barriers.k_ready, barriers.k_free, walk, splits, lengths, turn, LIVE_D,
                           HALVES, PACKED)  # fmt: skip
            _load_rows(dout_desc, neg_delta_desc, buffers.dout, buffers.neg_delta, barriers.dout_ready, barriers.dout_free,
                       walk, lengths, tile, head, num_heads, padded_rows, step, LIVE_DV, TILE_M, DOUT_STAGES,
                       PACKED)  # fmt: skip
            if with_keys:
                _load_keys(v_desc, buffers.v, barriers.v_ready, barriers.v_free, walk, splits, lengths, turn, LIVE_DV,
                           HALVES, PACKED)  # fmt: skip
        first += walk.steps
        turn += 1
        unit = counted_from + _next_unit(counter)
        walk, lengths = _walk(unit, order, table, lengths, window, query_parts, fronts, GROUP_SIZE, TILE_M, TILE_N,
                              FIXED_ORDER)  # fmt: skip
        _publish(buffers, barriers, walk, lengths, turn, PACKED)


# ---- one tile of scores ----


@gluon.jit
def _start(row_smem, zeros, layout: gl.constexpr):
    """Accumulators (HALF_N, TILE_M) that start from a number per query. Fill them before a product is under way (C7515)."""
    start, _zeros = gl.broadcast(row_smem.load(gl.SliceLayout(0, layout))[None, :], zeros)
    return start


@gluon.jit
def _start_scores(row_smem, zeros, score_params, layout: gl.constexpr):
    """As _start; a softcap acts on q kᵀ alone, so there `_weights` adds the row's number."""
    if score_params.softcap is None:
        return _start(row_smem, zeros, layout)
    else:
        return zeros


@gluon.jit
def _keep_bits(first_col, tile, head, walk, stream, dropout, num_heads, TILE_M: gl.constexpr):
    """Which weights dropout keeps, for `_weights`; without dropout a placeholder."""
    if dropout.rng_state is None:
        return 0
    else:
        stream = RandomStream(stream.seed, (walk.batch * num_heads + head).to(gl.uint32), stream.offset)
        return dropouts.keep_bits_transposed(tile * TILE_M, first_col, stream, dropout, TILE_M)


@gluon.jit
def _weights(raw_scores, row_smem, first_col, tile, head, walk, lengths, window, score_params, kept, dropout,
             TILE_M: gl.constexpr, RAGGED_N: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """p (HALF_N, TILE_M), and p times what a softcap does to a gradient; both in dtype.

    Under dropout p is 0 where it is dropped, and the other negative.
    """
    cols = first_col + gl.arange(0, HALF_N, gl.SliceLayout(1, layout))
    rows_of_tile = gl.arange(0, TILE_M, gl.SliceLayout(0, layout))[None, :]
    cols_of_tile = gl.arange(0, HALF_N, gl.SliceLayout(1, layout))[:, None]
    diagonal = tile * TILE_M + lengths.seqlen_k - lengths.seqlen_q - first_col
    slope = scores.load_slope(score_params, walk.batch, head)
    THREAD: gl.constexpr = HALF_N * TILE_M // 128
    x = scores.logits(raw_scores, rows_of_tile, cols_of_tile, diagonal, slope, score_params, THREAD)
    x = x * scores.scale_log2(score_params)
    if score_params.softcap is not None:
        x = x + row_smem.load(gl.SliceLayout(0, layout))[None, :]
    if RAGGED_N:
        # exp(-lse) of a missing key may overflow, and inf * 0 in dq would be nan
        x = x + gl.where(cols < lengths.seqlen_k, 0.0, NEG_INF)[:, None]
    if window.left is not None or window.right is not None:
        if window.left is None:
            is_partial = tile < walk.full_begin
        elif window.right is None:
            is_partial = tile >= walk.full_end
        else:
            is_partial = (tile < walk.full_begin) | (tile >= walk.full_end)
        if is_partial:
            # again, since kept alive they cost registers
            rows = tile * TILE_M + gl.arange(0, TILE_M, gl.SliceLayout(0, layout))
            cols = first_col + gl.arange(0, HALF_N, gl.SliceLayout(1, layout))
            x = gl.where(masks.in_window(rows[None, :], cols[:, None], lengths, window), x, NEG_INF)
    p = gl.exp2(x)
    p_grad = scores.through_softcap(p, raw_scores, score_params, THREAD).to(dtype)
    p = p.to(dtype)
    if dropout.rng_state is not None:
        p = dropouts.drop(p, kept, TRANSPOSED=True)
        p_grad = dropouts.mark(p_grad, kept, TRANSPOSED=True)
    return p, p_grad


@gluon.jit
def _to_fp32(x):
    """By shift and mask for bf16: the conversion instruction has a quarter of the rate, and the exponentials need that unit."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32,
                                         is_pure=True, pack=2)  # fmt: skip
    else:
        return x.to(gl.float32)


def _pin_asm(count):
    """Assembly that passes `count` registers through, and looks as if it could store them."""
    inputs = [f"${count + i}" for i in range(count)]
    text = f"{{ .reg .b32 t; .reg .pred q; or.b32 t, {inputs[0]}, {inputs[1]}; "
    text += "".join(f"or.b32 t, t, {x}; " for x in inputs[2:])
    text += "setp.lt.s32 q, t, 0; @q st.shared.b32 [t], t; "
    text += "".join(f"mov.b32 ${i}, {x}; " for i, x in enumerate(inputs)) + "}"
    return gl.constexpr(text), gl.constexpr(",".join(["=r"] * count + ["r"] * count))


_PIN_ASM, _PIN_CONSTRAINTS = _pin_asm(8)


@gluon.jit
def _pin(p):
    """Keep the exponentials where they are: ptxas would sink them below the next wgmma wait, which costs their overlap with
    it and 100 registers' worth of spills (319 against 514 TFLOP/s). The store never happens, since p is not negative.
    """
    return gl.inline_asm_elementwise(_PIN_ASM, _PIN_CONSTRAINTS, [p], dtype=p.dtype, is_pure=False, pack=16)


@gluon.jit
def _pinned(p, p_grad, score_params, dropout):
    p = _pin(p)
    if dropout.rng_state is not None:
        return p, p_grad
    elif score_params.softcap is None:
        return p, p
    else:
        return p, _pin(p_grad)


@gluon.jit
def _start_dp(row_smem, zeros, dropout, layout: gl.constexpr):
    """As _start; dropout scales dp alone, so there `_dscores` adds the row's number."""
    if dropout.rng_state is None:
        return _start(row_smem, zeros, layout)
    else:
        return zeros


@gluon.jit
def _begin_dp(v, dropout, buffers, barriers, step, slot, zeros, layout: gl.constexpr, TILE_M: gl.constexpr,
              BLOCK_DV: gl.constexpr, LIVE_DV: gl.constexpr, DOUT_STAGES: gl.constexpr):  # fmt: skip
    """Start dp of a step, of the slot step % DOUT_STAGES; returns it, and dout and neg_delta in shared memory."""
    mbarrier.wait(barriers.dout_ready.index(slot), _phase(step, DOUT_STAGES))
    dout = buffers.dout.index(slot).reshape([TILE_M, BLOCK_DV])
    neg_delta = buffers.neg_delta.index(slot)
    dp_acc = columns.contract(v, dout, _start_dp(neg_delta, zeros, dropout, layout), LIVE_DV)
    return dp_acc, dout, neg_delta


@gluon.jit
def _dscores(p_grad, dp, row_smem, dropout, layout: gl.constexpr):
    """p times the gradient of p, which started from neg_delta."""
    p = _to_fp32(p_grad)
    if dropout.rng_state is None:
        dscores = p * dp
    else:
        neg_delta = row_smem.load(gl.SliceLayout(0, layout))[None, :]
        dscores = p * gl.where(p > 0, dp * dropout.keep_scale + neg_delta, -neg_delta)
    return dscores.to(p_grad.dtype)


@gluon.jit
def _store_keys(desc, smem, tile, walk, lengths, row, DIM: gl.constexpr, PACKED: gl.constexpr):
    """A finished (HALF_N, DIM) tile of dk or dv, through shared memory; TMA leaves out rows past the length, and columns."""
    columns.store(tile, smem.reshape([HALF_N, DIM]))
    fence_async_shared()
    partition_barrier()
    at, row = boxes.place(walk.batch, lengths.start_k, lengths.seqlen_k, row, PACKED)
    boxes.store(desc, smem, at, walk.part, row, PACKED)


# ---- dq, for both splits ----


_SIGNAL_ASM = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; @p red.release.gpu.global.add.u32 [$1], 1; "
    "mov.u32 $0, 0; }"
)


@gluon.jit
def _signal(semaphore):
    """Count a tile of dq, when what this warp knows to be added is in memory."""
    gl.inline_asm_elementwise(_SIGNAL_ASM, "=r,l", [semaphore.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@triton.jit
def turn_of(n_tile, m_tile, goes_up, lengths, window, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """(how many tiles of keys add to the dq of m_tile, how many of them before n_tile; -1 where its queries see none of these):
    as `walked_tiles`."""
    keys = masks.key_range(m_tile * TILE_M, lengths, window, TILE_M, TILE_N)
    seen = (n_tile >= keys.begin) & (n_tile < keys.end)
    rank = tl.where(goes_up, keys.end - 1 - n_tile, n_tile - keys.begin)
    return tl.maximum(keys.end - keys.begin, 1), tl.where(seen, rank, -1)


@gluon.jit
def _turn(walk, lengths, window, counters, tile, head, num_heads, padded_rows, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
          PACKED: gl.constexpr):  # fmt: skip
    """(semaphore of a query tile, what it stands at when it is the turn of this walk)."""
    _count, rank = turn_of(walk.col_begin // TILE_N, tile, walk.front >= 0, lengths, window, TILE_M, TILE_N)
    row = _stats_row(walk, lengths, head, num_heads, padded_rows, PACKED) + tile * TILE_M
    return gl.where(rank < 0, counters + 1, counters + 2 + row // TILE_M), rank


@gluon.jit
def _follow_turns(
    buffers, barriers, lengths, window, counters, num_heads, padded_rows, GROUP_SIZE: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, PACKED: gl.constexpr, FIXED_ORDER: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """Where the order is fixed. Number 0 lets the partition of dq add when it is the turn of its tile of keys, 1 counts what it
    has added, when that is in memory."""
    if FIXED_ORDER:
        chain.wait()
        first = 0
        turn = 0
        walk, lengths = _receive(buffers, barriers, lengths, turn, PACKED)
        while walk.steps > 0:
            for i in range(walk.steps):
                step = first + i
                slot = step % TURN_SLOTS
                tile, head = at_step(walk, i, GROUP_SIZE, FIXED_ORDER)
                semaphore, rank = _turn(walk, lengths, window, counters, tile, head, num_heads, padded_rows, TILE_M, TILE_N,
                                        PACKED)  # fmt: skip
                if NUMBER == 0:
                    mbarrier.wait(barriers.counted.index(slot), _phase(step, TURN_SLOTS) ^ 1)
                    count = _peek(semaphore)
                    while count < rank:
                        count = _peek(semaphore)
                    count = _peek(semaphore, ACQUIRE=True)
                    mbarrier.arrive(barriers.turn_ready.index(slot), count=1)
                else:
                    mbarrier.wait(barriers.added.index(slot), _phase(step, TURN_SLOTS))
                    _signal(semaphore)
                    mbarrier.arrive(barriers.counted.index(slot), count=1)
            first += walk.steps
            turn += 1
            walk, lengths = _receive(buffers, barriers, lengths, turn, PACKED)


@gluon.constexpr_function
def sum_columns(live_d, tile_m):
    """Numbers of a row of dq_sum: of the columns that have something, or of whole pieces where these lie transposed."""
    return live_d if tile_m >= PIECE.value else -(-live_d // PIECE.value) * PIECE.value


def _piece_asm(count, instruction, loads=False):
    """Assembly for `count` numbers a thread in memory, four at once; the first four of 128 threads follow each other.

    loads: it gives them; else the second argument has them.
    """
    text = "{ .reg .b32 t; .reg .b64 a; mov.u32 t, %tid.x; mad.wide.u32 a, t, 16, $" + f"{count}; "
    for i in range(0, count, 4):
        numbers = ", ".join(f"${i + j if loads else 2 * count + i + j}" for j in range(4))
        address = f"[a + {512 * i}]"
        text += f"{instruction} " + (f"{{{numbers}}}, {address}; " if loads else f"{address}, {{{numbers}}}; ")
    return text + ("" if loads else "".join(f"mov.u32 ${i}, 0; " for i in range(count))) + "}"


def _piece_constraints(count, result):
    return ",".join([result] * count + ["l"] * count + ["f"] * count)


# By the numbers of a thread
_COUNTS = 8, 16, 32
_ADD_ASM = gl.constexpr({n: _piece_asm(n, "red.relaxed.gpu.global.add.v4.f32") for n in _COUNTS})
_STORE_ASM = gl.constexpr({n: _piece_asm(n, "st.global.v4.f32") for n in _COUNTS})
_LOAD_ASM = gl.constexpr({n: _piece_asm(n, "ld.relaxed.gpu.global.v4.f32", loads=True) for n in _COUNTS})
_GIVE_CONSTRAINTS = gl.constexpr({n: _piece_constraints(n, "=r") for n in _COUNTS})
_LOAD_CONSTRAINTS = gl.constexpr({n: _piece_constraints(n, "=f") for n in _COUNTS})


@gluon.jit
def _give_piece(dq_sum, piece, ASM: gl.constexpr):
    """Add a piece of dq to memory (_ADD_ASM), or store it (_STORE_ASM), in the order in which the threads of the first
    partition hold it: see `_unpack`."""
    COUNT: gl.constexpr = piece.shape[0] * piece.shape[1] // 128
    gl.inline_asm_elementwise(ASM[COUNT], _GIVE_CONSTRAINTS[COUNT], [dq_sum.to(gl.int64), piece], dtype=gl.int32, is_pure=False,
                              pack=COUNT)  # fmt: skip


@gluon.jit
def _load_piece(dq_sum, zeros):
    """A piece of dq from memory, where others have added to it: of the shape and layout of zeros."""
    COUNT: gl.constexpr = zeros.shape[0] * zeros.shape[1] // 128
    return gl.inline_asm_elementwise(_LOAD_ASM[COUNT], _LOAD_CONSTRAINTS[COUNT], [dq_sum.to(gl.int64), zeros],
                                     dtype=gl.float32, is_pure=False, pack=COUNT)  # fmt: skip


@triton.jit
def is_alone(lengths, right, TILE_N: tl.constexpr):
    """Whether one tile has all keys of a sequence, and each query sees some: dq has one product, and needs no sum.

    right: of a window without a left bound; None and UNBOUNDED are none.
    """
    some = (lengths.seqlen_k > 0) & (lengths.seqlen_k <= TILE_N)
    if right is not None:
        some = some & (lengths.seqlen_k - lengths.seqlen_q + right >= 0)
    return some


@gluon.jit
def _store_piece(dq_desc, smem, dq, scale, walk, lengths, head, row, PACKED: gl.constexpr, COL: gl.constexpr):
    """Store a piece of dq from row and COL on, through shared memory; TMA leaves out rows past the length, and columns."""
    # The piece before has left
    tma_store_wait(0)
    partition_barrier()
    ROWS: gl.constexpr = smem.shape[-2]
    tile = smem.reshape([ROWS, PIECE])
    # As the accumulators lie
    tile = tile.permute((1, 0)) if ROWS < PIECE else tile.slice(0, dq.shape[1], dim=1)
    tile.store((dq * scale).to(tile.dtype))
    fence_async_shared()
    partition_barrier()
    at, place_row = boxes.place(walk.batch, lengths.start_q, lengths.seqlen_q, row, PACKED)
    boxes.store(dq_desc, smem, at, head, place_row, PACKED, COL)


@gluon.jit
def _add_dq(
    dq_sum, dq_desc, buffers, barriers, walk, lengths, window, scale, num_heads, padded_rows, tile, head, step, rank, zeros,
    last_zeros, TILE_M: gl.constexpr, TILE_N: gl.constexpr, BLOCK_D: gl.constexpr, LIVE_D: gl.constexpr,
    DSCORES_STAGES: gl.constexpr, PACKED: gl.constexpr, FIXED_ORDER: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """One step of dq_sum += dscoresᵀ k, in pieces of PIECE rows and columns, of fewer rows transposed; or dq, see `is_alone`.

    zeros: of a piece; last_zeros: of the last in a row, which may have fewer columns. LAST: nobody adds after this step, so it
    takes the sum from memory, and writes dq; before it `rank` others have added.
    """
    HALVES: gl.constexpr = TILE_N // HALF_N
    SUM_D: gl.constexpr = sum_columns(LIVE_D, TILE_M)
    # Those of zeros alone are left out
    LIVE_PIECES: gl.constexpr = (LIVE_D + PIECE - 1) // PIECE
    TRANSPOSED: gl.constexpr = TILE_M < PIECE
    PIECES: gl.constexpr = max(TILE_M // PIECE, 1) * LIVE_PIECES
    SIZE: gl.constexpr = PIECE * min(TILE_M, PIECE.value)
    slot = step % DSCORES_STAGES
    if LAST:
        stored: gl.constexpr = True
        mbarrier.wait(barriers.turn_ready.index(step % TURN_SLOTS), _phase(step, TURN_SLOTS))
    elif dq_sum is None:
        stored: gl.constexpr = True
    elif FIXED_ORDER or dq_desc is None:
        stored: gl.constexpr = False
    else:
        stored = is_alone(lengths, window.right, TILE_N)
    if dq_sum is not None:
        stats_row = _stats_row(walk, lengths, head, num_heads, padded_rows, PACKED) + tile * TILE_M
        dq_tile = dq_sum + stats_row.to(gl.int64) * SUM_D
    for piece in gl.static_range(PIECES):
        place = piece // LIVE_PIECES * PIECE * SUM_D + piece % LIVE_PIECES * SIZE
        nothing = zeros
        if (piece + 1) % LIVE_PIECES == 0:
            nothing = last_zeros
        dq_acc = nothing
        if LAST:
            if rank > 0:
                dq_acc = _load_piece(dq_tile + place, nothing)
        for half in gl.static_range(HALVES):
            if piece == 0:
                mbarrier.wait(barriers.dscores_ready.index(HALVES * slot + half), _phase(step, DSCORES_STAGES))
            k = buffers.k.index(half).reshape([HALF_N, BLOCK_D])
            if BLOCK_D > PIECE:
                k = k.slice(piece % LIVE_PIECES * PIECE, PIECE if TRANSPOSED else nothing.shape[1], dim=1)
            dscores = buffers.dscores[half].index(slot)
            if TILE_M > PIECE:
                dscores = dscores.slice(piece // LIVE_PIECES * PIECE, PIECE, dim=1)
            if TRANSPOSED:
                dq_acc = warpgroup_mma(k.permute((1, 0)), dscores, dq_acc, use_acc=LAST or half > 0, is_async=True)
            else:
                dq_acc = warpgroup_mma(dscores.permute((1, 0)), k, dq_acc, use_acc=LAST or half > 0, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq_acc])
        if FIXED_ORDER and not LAST and piece == 0:
            mbarrier.wait(barriers.turn_ready.index(step % TURN_SLOTS), _phase(step, TURN_SLOTS))
        if piece == PIECES - 1:
            mbarrier.arrive(barriers.dscores_free.index(slot), count=1)
        if stored:
            _store_piece(dq_desc, buffers.dq, dq, scale, walk, lengths, head, tile * TILE_M + piece // LIVE_PIECES * PIECE,
                         PACKED, piece % LIVE_PIECES * PIECE)  # fmt: skip
        elif FIXED_ORDER and dq_desc is not None:
            if rank > 0:
                _give_piece(dq_tile + place, dq, _ADD_ASM)
            elif rank == 0:
                _give_piece(dq_tile + place, dq, _STORE_ASM)
        else:
            _give_piece(dq_tile + place, dq, _ADD_ASM)
        if piece < PIECES - 1:
            # else ptxas begins the next piece before, which takes registers that there are not
            partition_barrier()
    if FIXED_ORDER:
        mbarrier.arrive(barriers.added.index(step % TURN_SLOTS), count=1)


@gluon.jit
def _reduce_dq(
    dq_sum, dq_desc, buffers, barriers, lengths, window, scale, num_heads, padded_rows, GROUP_SIZE: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, BLOCK_D: gl.constexpr, LIVE_D: gl.constexpr, DSCORES_STAGES: gl.constexpr,
    PACKED: gl.constexpr, FIXED_ORDER: gl.constexpr,
):  # fmt: skip
    # Where the last tile of keys that adds to dq writes it
    IN_TURN: gl.constexpr = FIXED_ORDER and dq_desc is not None and dq_sum is not None
    COLUMNS: gl.constexpr = min(TILE_M, PIECE.value)
    layout: gl.constexpr = columns.layout_of(COLUMNS)
    zeros = gl.zeros([PIECE, COLUMNS], gl.float32, layout)
    LAST: gl.constexpr = min(COLUMNS, (sum_columns(LIVE_D, TILE_M) - 1) % PIECE + 1)
    last_zeros = gl.zeros([PIECE, LAST], gl.float32, columns.layout_of(LAST))
    # What has cleared the sums
    chain.wait()
    first = 0
    turn = 0
    walk, lengths = _receive(buffers, barriers, lengths, turn, PACKED)
    while walk.steps > 0:
        mbarrier.wait(barriers.k_ready.index(0), turn & 1)
        for i in range(walk.steps):
            tile, head = at_step(walk, i, GROUP_SIZE, FIXED_ORDER)
            if IN_TURN:
                count, rank = turn_of(walk.col_begin // TILE_N, tile, walk.front >= 0, lengths, window, TILE_M, TILE_N)
                if rank == count - 1:
                    _add_dq(dq_sum, dq_desc, buffers, barriers, walk, lengths, window, scale, num_heads, padded_rows, tile,
                            head, first + i, rank, zeros, last_zeros, TILE_M, TILE_N, BLOCK_D, LIVE_D, DSCORES_STAGES, PACKED,
                            FIXED_ORDER, True)  # fmt: skip
                else:
                    _add_dq(dq_sum, dq_desc, buffers, barriers, walk, lengths, window, scale, num_heads, padded_rows, tile,
                            head, first + i, rank, zeros, last_zeros, TILE_M, TILE_N, BLOCK_D, LIVE_D, DSCORES_STAGES, PACKED,
                            FIXED_ORDER, False)  # fmt: skip
            else:
                _add_dq(dq_sum, dq_desc, buffers, barriers, walk, lengths, window, scale, num_heads, padded_rows, tile,
                        head, first + i, 0, zeros, last_zeros, TILE_M, TILE_N, BLOCK_D, LIVE_D, DSCORES_STAGES, PACKED,
                        FIXED_ORDER, False)  # fmt: skip
        mbarrier.arrive(barriers.k_done.index(0), count=1)
        first += walk.steps
        turn += 1
        walk, lengths = _receive(buffers, barriers, lengths, turn, PACKED)
    if dq_desc is not None:
        tma_store_wait(0)


# ---- split by rows: each of two partitions has 64 keys and does everything but dq ----


@gluon.constexpr_function
def _room_for_dk(dscores_stages, tile_m, block_d):
    """Tiles of dk of a partition that its buffers of dscores hold."""
    return dscores_stages * tile_m // block_d


@gluon.jit
def _second_half(
    p, p_grad, v, dv, dropout, buffers, barriers, step, zeros, layout: gl.constexpr,
    BLOCK_DV: gl.constexpr, LIVE_DV: gl.constexpr, TILE_M: gl.constexpr, DOUT_STAGES: gl.constexpr,
    DSCORES_STAGES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """dp and dv together, dscores under dv; returns dv."""
    slot = step % DOUT_STAGES
    dp_acc, dout, neg_delta = _begin_dp(v, dropout, buffers, barriers, step, slot, zeros, layout, TILE_M, BLOCK_DV,
                                        LIVE_DV, DOUT_STAGES)  # fmt: skip
    dv_acc = columns.accumulate(p, dout, dv)
    dp = warpgroup_mma_wait(len(dv), deps=[dp_acc])
    dscores = _dscores(p_grad, dp, neg_delta, dropout, layout)
    dscores_slot = step % DSCORES_STAGES
    mbarrier.wait(barriers.dscores_free.index(dscores_slot), _phase(step, DSCORES_STAGES) ^ 1)
    buffers.dscores[HALF].index(dscores_slot).store(dscores)
    fence_async_shared()
    mbarrier.arrive(barriers.dscores_ready.index(2 * dscores_slot + HALF), count=1)
    dv = columns.wait(dv_acc)
    mbarrier.arrive(barriers.dout_free.index(slot), count=1)
    return dv


@gluon.jit
def _anew(half, step, ANEW: gl.constexpr):
    """half; with ANEW made of the step, which says ptxas that its tile may be another in each.

    Else it keeps what tells products where tiles of k and v lie from step to step, two registers for 16 columns.
    """
    if ANEW:
        return half + gl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [step], dtype=gl.int32, is_pure=True, pack=1)
    else:
        return half


@gluon.jit
def _compute_rows(
    dk_desc, dv_desc, buffers, barriers, lengths, window, score_params, dropout, num_heads, GROUP_SIZE: gl.constexpr,
    TILE_M: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, LIVE_D: gl.constexpr, LIVE_DV: gl.constexpr,
    Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, DSCORES_STAGES: gl.constexpr, RAGGED_N: gl.constexpr,
    PACKED: gl.constexpr, FIXED_ORDER: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys. A step has two halves, and nothing is under way between them (else ptxas serialises: C7515)."""
    layout: gl.constexpr = columns.layout_of(TILE_M)
    zeros = gl.zeros([HALF_N, TILE_M], gl.float32, layout)
    k = buffers.k.index(HALF).reshape([HALF_N, BLOCK_D])
    v = buffers.v.index(HALF).reshape([HALF_N, BLOCK_DV])
    # Where masks, scores, heads or the order of steps need registers too
    ANEW: gl.constexpr = (
        FIXED_ORDER or GROUP_SIZE > 1 or window.left is not None or window.right is not None
        or score_params.softcap is not None or score_params.alibi_slopes is not None or dropout.rng_state is not None
    )  # fmt: skip
    stream = dropouts.load_stream(dropout, num_heads)
    # dk, and dv if there is room, leave through the slots of dscores
    ROOM: gl.constexpr = _room_for_dk(DSCORES_STAGES, TILE_M, BLOCK_D)
    DV_FITS: gl.constexpr = BLOCK_D == BLOCK_DV and ROOM > 1
    if ROOM > 0:
        out_smem = reinterpret(buffers.dscores[HALF], k.dtype, [ROOM] + dk_desc.block_type.shape, dk_desc.layout)
    first = 0
    turn = 0
    walk, lengths = _receive(buffers, barriers, lengths, turn, PACKED)
    while walk.steps > 0:
        first_col = walk.col_begin + HALF * HALF_N
        tile, head = at_step(walk, 0, GROUP_SIZE, FIXED_ORDER)
        dk = columns.accumulators(HALF_N, BLOCK_D, LIVE_D, WIDEST)
        dv = columns.accumulators(HALF_N, BLOCK_DV, LIVE_DV, WIDEST)
        slot = first % Q_STAGES
        mbarrier.wait(barriers.q_ready.index(slot), _phase(first, Q_STAGES))
        neg_lse = buffers.neg_lse.index(slot)
        start = _start_scores(neg_lse, zeros, score_params, layout)
        q = buffers.q.index(slot).reshape([TILE_M, BLOCK_D])
        mbarrier.wait(barriers.k_ready.index(0), turn & 1)
        scores_acc = columns.contract(k, q, start, LIVE_D)
        # What the last tile gave has left
        tma_store_wait(0)
        kept = _keep_bits(first_col, tile, head, walk, stream, dropout, num_heads, TILE_M)
        raw_scores = warpgroup_mma_wait(0, deps=[scores_acc])
        p, p_grad = _weights(raw_scores, neg_lse, first_col, tile, head, walk, lengths, window, score_params, kept, dropout,
                             TILE_M, RAGGED_N, k.dtype, layout)  # fmt: skip
        mbarrier.wait(barriers.v_ready.index(0), turn & 1)
        dv = _second_half(p, p_grad, v, dv, dropout, buffers, barriers, first, zeros, layout, BLOCK_DV, LIVE_DV,
                          TILE_M, DOUT_STAGES, DSCORES_STAGES, HALF)  # fmt: skip
        for i in range(1, walk.steps):
            step = first + i
            tile, head = at_step(walk, i, GROUP_SIZE, FIXED_ORDER)
            slot = step % Q_STAGES
            last_slot = (step - 1) % Q_STAGES
            mbarrier.wait(barriers.q_ready.index(slot), _phase(step, Q_STAGES))
            neg_lse = buffers.neg_lse.index(slot)
            start = _start_scores(neg_lse, zeros, score_params, layout)
            q = buffers.q.index(slot).reshape([TILE_M, BLOCK_D])
            k = buffers.k.index(_anew(HALF, step, ANEW)).reshape([HALF_N, BLOCK_D])
            scores_acc = columns.contract(k, q, start, LIVE_D)
            last_q = buffers.q.index(last_slot).reshape([TILE_M, BLOCK_D])
            last_dscores = buffers.dscores[HALF].index((step - 1) % DSCORES_STAGES)
            dk_acc = columns.accumulate(last_dscores, last_q, dk)
            kept = _keep_bits(first_col, tile, head, walk, stream, dropout, num_heads, TILE_M)
            raw_scores = warpgroup_mma_wait(len(dk), deps=[scores_acc])
            p, p_grad = _weights(raw_scores, neg_lse, first_col, tile, head, walk, lengths, window, score_params, kept, dropout,
                                 TILE_M, RAGGED_N, k.dtype, layout)  # fmt: skip
            p, p_grad = _pinned(p, p_grad, score_params, dropout)
            dk = columns.wait(dk_acc)
            mbarrier.arrive(barriers.q_free.index(last_slot), count=1)
            v = buffers.v.index(_anew(HALF, step, ANEW)).reshape([HALF_N, BLOCK_DV])
            dv = _second_half(p, p_grad, v, dv, dropout, buffers, barriers, step, zeros, layout, BLOCK_DV, LIVE_DV,
                              TILE_M, DOUT_STAGES, DSCORES_STAGES, HALF)  # fmt: skip
        first += walk.steps
        turn += 1
        last = first - 1
        last_q = buffers.q.index(last % Q_STAGES).reshape([TILE_M, BLOCK_D])
        last_dscores = buffers.dscores[HALF].index(last % DSCORES_STAGES)
        dk_acc = columns.accumulate(last_dscores, last_q, dk)
        if dropout.rng_state is not None:
            dv = columns.scale(dv, dropout.keep_scale)
        if DV_FITS:
            mbarrier.arrive(barriers.v_free.index(0), count=1)
        else:
            _store_keys(dv_desc, buffers.v.index(HALF), dv, walk, lengths, first_col, BLOCK_DV, PACKED)
        dk = columns.scale(columns.wait(dk_acc), score_params.scale)
        mbarrier.arrive(barriers.q_free.index(last % Q_STAGES), count=1)
        # The partition of dq has read the last dscores, and those before.
        mbarrier.wait(barriers.dscores_free.index(last % DSCORES_STAGES), _phase(last, DSCORES_STAGES))
        if DV_FITS:
            _store_keys(dv_desc, out_smem.index(1), dv, walk, lengths, first_col, BLOCK_DV, PACKED)
        if ROOM > 0:
            _store_keys(dk_desc, out_smem.index(0), dk, walk, lengths, first_col, BLOCK_D, PACKED)
        else:
            # and its half of the keys
            _store_keys(dk_desc, buffers.k.index(HALF), dk, walk, lengths, first_col, BLOCK_D, PACKED)
        if not DV_FITS:
            # dv has left the buffer of v; dk is still under way
            tma_store_wait(1)
            mbarrier.arrive(barriers.v_free.index(0), count=1)
        if ROOM == 0:
            tma_store_wait(0)
            mbarrier.arrive(barriers.k_free.index(0), count=1)
        walk, lengths = _receive(buffers, barriers, lengths, turn, PACKED)
    tma_store_wait(0)


# ---- split by product: one partition for p and dv, one for dscores and dk ----


@gluon.jit
def _compute_dv(
    dv_desc, buffers, barriers, lengths, window, score_params, dropout, num_heads, GROUP_SIZE: gl.constexpr,
    TILE_M: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, LIVE_D: gl.constexpr, LIVE_DV: gl.constexpr,
    Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, P_STAGES: gl.constexpr, RAGGED_N: gl.constexpr, PACKED: gl.constexpr,
    FIXED_ORDER: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = columns.layout_of(TILE_M)
    zeros = gl.zeros([HALF_N, TILE_M], gl.float32, layout)
    k = buffers.k.index(0).reshape([HALF_N, BLOCK_D])
    stream = dropouts.load_stream(dropout, num_heads)
    first = 0
    turn = 0
    walk, lengths = _receive(buffers, barriers, lengths, turn, PACKED)
    while walk.steps > 0:
        dv = columns.accumulators(HALF_N, BLOCK_DV, LIVE_DV, WIDEST)
        mbarrier.wait(barriers.k_ready.index(0), turn & 1)
        for i in range(walk.steps):
            step = first + i
            tile, head = at_step(walk, i, GROUP_SIZE, FIXED_ORDER)
            slot = step % Q_STAGES
            mbarrier.wait(barriers.q_ready.index(slot), _phase(step, Q_STAGES))
            q = buffers.q.index(slot).reshape([TILE_M, BLOCK_D])
            neg_lse = buffers.neg_lse.index(slot)
            scores_acc = columns.contract(k, q, _start_scores(neg_lse, zeros, score_params, layout), LIVE_D)
            kept = _keep_bits(walk.col_begin, tile, head, walk, stream, dropout, num_heads, TILE_M)
            raw_scores = warpgroup_mma_wait(0, deps=[scores_acc])
            p, p_grad = _weights(raw_scores, neg_lse, walk.col_begin, tile, head, walk, lengths, window, score_params, kept,
                                 dropout, TILE_M, RAGGED_N, k.dtype, layout)  # fmt: skip
            mbarrier.arrive(barriers.q_free.index(slot), count=1)
            p_slot = step % P_STAGES
            mbarrier.wait(barriers.p_free.index(p_slot), _phase(step, P_STAGES) ^ 1)
            buffers.p.index(p_slot).store(p_grad)
            mbarrier.arrive(barriers.p_ready.index(p_slot), count=1)
            slot = step % DOUT_STAGES
            mbarrier.wait(barriers.dout_ready.index(slot), _phase(step, DOUT_STAGES))
            dout = buffers.dout.index(slot).reshape([TILE_M, BLOCK_DV])
            dv = columns.wait(columns.accumulate(p, dout, dv))
            mbarrier.arrive(barriers.dout_free.index(slot), count=1)
        if dropout.rng_state is not None:
            dv = columns.scale(dv, dropout.keep_scale)
        mbarrier.wait(barriers.v_done.index(0), turn & 1)
        _store_keys(dv_desc, buffers.v.index(0), dv, walk, lengths, walk.col_begin, BLOCK_DV, PACKED)
        tma_store_wait(0)
        mbarrier.arrive(barriers.v_free.index(0), count=1)
        first += walk.steps
        turn += 1
        walk, lengths = _receive(buffers, barriers, lengths, turn, PACKED)


@gluon.jit
def _compute_dk(
    dk_desc, buffers, barriers, lengths, scale, dropout, GROUP_SIZE: gl.constexpr, TILE_M: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, LIVE_D: gl.constexpr, LIVE_DV: gl.constexpr, Q_STAGES: gl.constexpr,
    DOUT_STAGES: gl.constexpr, P_STAGES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = columns.layout_of(TILE_M)
    zeros = gl.zeros([HALF_N, TILE_M], gl.float32, layout)
    v = buffers.v.index(0).reshape([HALF_N, BLOCK_DV])
    first = 0
    turn = 0
    walk, lengths = _receive(buffers, barriers, lengths, turn, PACKED)
    while walk.steps > 0:
        dk = columns.accumulators(HALF_N, BLOCK_D, LIVE_D, WIDEST)
        mbarrier.wait(barriers.v_ready.index(0), turn & 1)
        for i in range(walk.steps):
            step = first + i
            slot = step % DOUT_STAGES
            p_slot = step % P_STAGES
            dp_acc, _dout, neg_delta = _begin_dp(v, dropout, buffers, barriers, step, slot, zeros, layout, TILE_M, BLOCK_DV,
                                                 LIVE_DV, DOUT_STAGES)  # fmt: skip
            mbarrier.wait(barriers.p_ready.index(p_slot), _phase(step, P_STAGES))
            p = buffers.p.index(p_slot).load(layout)
            dp = warpgroup_mma_wait(0, deps=[dp_acc])
            dscores = _dscores(p, dp, neg_delta, dropout, layout)
            if dropout.rng_state is None:
                mbarrier.arrive(barriers.dout_free.index(slot), count=1)
            mbarrier.arrive(barriers.p_free.index(p_slot), count=1)
            mbarrier.wait(barriers.dscores_free.index(p_slot), _phase(step, P_STAGES) ^ 1)
            buffers.dscores[0].index(p_slot).store(dscores)
            fence_async_shared()
            mbarrier.arrive(barriers.dscores_ready.index(p_slot), count=1)
            if dropout.rng_state is not None:
                # Not before: neg_delta may still be on its way to registers, and TMA does not wait for that
                mbarrier.arrive(barriers.dout_free.index(slot), count=1)
            slot = step % Q_STAGES
            mbarrier.wait(barriers.q_ready.index(slot), _phase(step, Q_STAGES))
            q = buffers.q.index(slot).reshape([TILE_M, BLOCK_D])
            dk = columns.wait(columns.accumulate(dscores, q, dk))
            mbarrier.arrive(barriers.q_free.index(slot), count=1)
        mbarrier.arrive(barriers.v_done.index(0), count=1)
        dk = columns.scale(dk, scale)
        mbarrier.wait(barriers.k_done.index(0), turn & 1)
        _store_keys(dk_desc, buffers.k.index(0), dk, walk, lengths, walk.col_begin, BLOCK_D, PACKED)
        tma_store_wait(0)
        mbarrier.arrive(barriers.k_free.index(0), count=1)
        first += walk.steps
        turn += 1
        walk, lengths = _receive(buffers, barriers, lengths, turn, PACKED)


# ---- the kernels ----


@gluon.jit(do_not_specialize=[
    "seqlen_q", "seqlen_k", "num_tiles", "num_heads", "num_heads_kv", "splits", "query_parts", "batch_heads",
    "heads_side_by_side", "tail_heads", "padded_rows",
])  # fmt: skip
def attention_backward(
    q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, dk_desc, dv_desc, dq_desc, dq_sum, counters, table,
    window, score_params, dropout, seqlen_q, seqlen_k, num_tiles, num_heads, num_heads_kv, splits, query_parts, batch_heads,
    heads_side_by_side, tail_heads, padded_rows,
    GROUP_SIZE: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    LIVE_D: gl.constexpr, LIVE_DV: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr,
    DSCORES_STAGES: gl.constexpr, BY_ROWS: gl.constexpr, RAGGED_N: gl.constexpr, FIXED_ORDER: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors of `descriptor` and `row_descriptor`. counters: int32 of 0: tiles taken (without FIXED_ORDER beyond one a
    program); then with FIXED_ORDER a place for counts that nobody needs, and a semaphore a tile of dq, else the fronts of
    `_load`. table: of `schedule.plan_packed` for tiles of keys, or None. GROUP_SIZE: with each of `splits` parts of a group of
    heads (None for one) as a group of its own. num_heads_kv: besides with each of query_parts of the queries (None for one) as
    a head of its own, as in dk_desc and dv_desc. dq_desc: where dq is stored, None where all is added to dq_sum, which is None
    where all is stored; with both, in a fixed order the last to add stores, else `is_alone` decides for each sequence.
    """
    PACKED: gl.constexpr = table is not None
    HALVES: gl.constexpr = TILE_N // 64
    dtype: gl.constexpr = q_desc.dtype
    chain.allow()
    nothing = seqlen_q * 0
    lengths = Lengths(nothing, nothing, seqlen_q, seqlen_k)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, TILE_M], dtype)
    k_smem = boxes.allocate(k_desc, HALVES, BLOCK_D)
    v_smem = boxes.allocate(v_desc, HALVES, BLOCK_DV)
    q_smem = boxes.allocate(q_desc, Q_STAGES, BLOCK_D)
    dout_smem = boxes.allocate(dout_desc, DOUT_STAGES, BLOCK_DV)
    neg_lse_smem = gl.allocate_shared_memory(gl.float32, [Q_STAGES, TILE_M], neg_lse_desc.layout)
    neg_delta_smem = gl.allocate_shared_memory(gl.float32, [DOUT_STAGES, TILE_M], neg_delta_desc.layout)
    dscores_smem = gl.allocate_shared_memory(dtype, [DSCORES_STAGES, 64, TILE_M], p_layout)
    walk_smem = gl.allocate_shared_memory(gl.int32, [WALK_SLOTS * WALK_WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    dq_smem = None
    if dq_desc is not None:
        dq_smem = boxes.allocate(dq_desc, 1, PIECE).index(0)
    k_ready = allocate_barriers(1, 1)
    v_ready = allocate_barriers(1, 1)
    q_ready = allocate_barriers(Q_STAGES, 1)
    q_free = allocate_barriers(Q_STAGES, 2)
    dout_ready = allocate_barriers(DOUT_STAGES, 1)
    dout_free = allocate_barriers(DOUT_STAGES, 2)
    dscores_ready = allocate_barriers(HALVES * DSCORES_STAGES, 1)
    dscores_free = allocate_barriers(DSCORES_STAGES, 1)
    k_done = allocate_barriers(1, 1)
    walk_ready = allocate_barriers(WALK_SLOTS, 1)
    walk_free = allocate_barriers(WALK_SLOTS, 5 if FIXED_ORDER else 3)
    if FIXED_ORDER:
        turn_ready = allocate_barriers(TURN_SLOTS, 1)
        added = allocate_barriers(TURN_SLOTS, 1)
        counted = allocate_barriers(TURN_SLOTS, 1)
    else:
        turn_ready = None
        added = None
        counted = None
    if PACKED:
        chain.wait()
        num_tiles = gl.load(table)
    order = Order(num_tiles, num_heads_kv, batch_heads, heads_side_by_side, tail_heads)
    if BY_ROWS:
        v_free = allocate_barriers(1, 2)
        # dk leaves through the buffers of dscores, or if they are too small of k
        if _room_for_dk(DSCORES_STAGES, TILE_M, BLOCK_D) > 0:
            k_free = k_done
        else:
            k_free = allocate_barriers(1, 2)
        other_dscores_smem = gl.allocate_shared_memory(dtype, [DSCORES_STAGES, 64, TILE_M], p_layout)
        buffers = Buffers(q_smem, dout_smem, k_smem, v_smem, neg_lse_smem, neg_delta_smem, (dscores_smem, other_dscores_smem),
                          None, walk_smem, dq_smem)  # fmt: skip
        barriers = Barriers(k_ready, v_ready, q_ready, q_free, dout_ready, dout_free, dscores_ready, dscores_free, None, None,
                            k_done, None, k_free, v_free, walk_ready, walk_free, turn_ready, added, counted)  # fmt: skip
    else:
        p_smem = gl.allocate_shared_memory(dtype, [DSCORES_STAGES, 64, TILE_M], p_layout)
        p_ready = allocate_barriers(DSCORES_STAGES, 1)
        p_free = allocate_barriers(DSCORES_STAGES, 1)
        v_done = allocate_barriers(1, 1)
        k_free = allocate_barriers(1, 1)
        v_free = allocate_barriers(1, 1)
        buffers = Buffers(q_smem, dout_smem, k_smem, v_smem, neg_lse_smem, neg_delta_smem, (dscores_smem,), p_smem,
                          walk_smem, dq_smem)  # fmt: skip
        barriers = Barriers(k_ready, v_ready, q_ready, q_free, dout_ready, dout_free, dscores_ready, dscores_free, p_ready,
                            p_free, k_done, v_done, k_free, v_free, walk_ready, walk_free, turn_ready, added,
                            counted)  # fmt: skip
    specialize([
        (1, _reduce_dq, (dq_sum, dq_desc, buffers, barriers, lengths, window, score_params.scale, num_heads, padded_rows,
                         GROUP_SIZE, TILE_M, TILE_N, BLOCK_D, LIVE_D, DSCORES_STAGES, PACKED, FIXED_ORDER), 4, REGISTERS),
        (2 if BY_ROWS else 0, _compute_rows, (dk_desc, dv_desc, buffers, barriers, lengths, window, score_params, dropout,
                                              num_heads, GROUP_SIZE, TILE_M, BLOCK_D, BLOCK_DV, LIVE_D, LIVE_DV, Q_STAGES,
                                              DOUT_STAGES, DSCORES_STAGES, RAGGED_N, PACKED, FIXED_ORDER), 4, REGISTERS),
        (not BY_ROWS, _compute_dv, (dv_desc, buffers, barriers, lengths, window, score_params, dropout, num_heads, GROUP_SIZE,
                                    TILE_M, BLOCK_D, BLOCK_DV, LIVE_D, LIVE_DV, Q_STAGES, DOUT_STAGES, DSCORES_STAGES, RAGGED_N,
                                    PACKED, FIXED_ORDER), 4, REGISTERS),
        (not BY_ROWS, _compute_dk, (dk_desc, buffers, barriers, lengths, score_params.scale, dropout, GROUP_SIZE, TILE_M,
                                    BLOCK_D, BLOCK_DV, LIVE_D, LIVE_DV, Q_STAGES, DOUT_STAGES, DSCORES_STAGES, PACKED), 4,
         REGISTERS),
        (1, _load, (q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, buffers, barriers, counters, order, table,
                    lengths, window, num_heads, splits, query_parts, padded_rows, GROUP_SIZE, LIVE_D, LIVE_DV, TILE_M, HALVES,
                    Q_STAGES, DOUT_STAGES, FIXED_ORDER), 1, LOAD_REGISTERS),
        (2, _follow_turns, (buffers, barriers, lengths, window, counters, num_heads, padded_rows, GROUP_SIZE, TILE_M, TILE_N,
                            PACKED, FIXED_ORDER), 1, LOAD_REGISTERS),
    ])  # fmt: skip


@triton.jit
def _sequence_of(padded_row, packing, batch, BLOCK: tl.constexpr):
    """The packed sequence that a row of the row statistics belongs to."""
    before = 0
    for begin in range(0, batch, BLOCK):
        sequences = begin + tl.arange(0, BLOCK)
        starts = tl.load(packing.cu_seqlens_q + sequences, mask=sequences < batch, other=0)
        starts = padded_start(starts, sequences)
        before += tl.sum(((starts <= padded_row) & (sequences < batch)).to(tl.int32), 0)
    return before - 1


class PaddedRows(NamedTuple):
    """Rows of a program of the small kernels: padded_begin of those of all heads, row_begin in its sequence."""

    sequence: Any
    head: Any
    lengths: Any
    row_begin: Any
    padded_begin: Any


@triton.jit
def _rows_of_program(packing, batch, seqlen_q, padded_rows, num_tiles, num_heads, TILE_M: tl.constexpr):
    """A head has num_tiles of TILE_M rows. In a packed call padded_rows counts those of all sequences: see `padded_start`."""
    program = tl.program_id(0)
    begin = program % num_tiles * TILE_M
    padded_begin = (program // num_tiles).to(tl.int64) * padded_rows + begin
    if packing.cu_seqlens_q is None:
        head = program // num_tiles
        return PaddedRows(head // num_heads, head % num_heads, Lengths(0, 0, seqlen_q, 0), begin, padded_begin)
    else:
        sequence = _sequence_of(begin, packing, batch, BLOCK=128)
        lengths = load_lengths(packing, sequence, 0, 0)
        row_begin = begin - padded_start(lengths.start_q, sequence).to(tl.int32)
        return PaddedRows(sequence, program // num_tiles, lengths, row_begin, padded_begin)


@triton.jit(do_not_specialize=[
    "right", "batch", "seqlen_q", "seqlen_k", "padded_rows", "num_tiles", "num_heads", "num_counters", "lse_factor",
])  # fmt: skip
def backward_rows(
    out, dout, dlse, lse, neg_lse, neg_delta, dq_sum, counters, dq, window, packing, right, batch, seqlen_q, seqlen_k,
    padded_rows, num_tiles, num_heads, num_counters, lse_factor, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    QUERY_TILE: tl.constexpr, SUM_D: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, WIDE: tl.constexpr, CHAINED: tl.constexpr = False,
):  # fmt: skip
    """lse_factor * lse and -(rowsum(dout * out) - dlse) for padded_rows rows a head, and zeros in counters and dq_sum.

    dq_sum: SUM_D numbers a row, or None; they stay as they are in sequences of `is_alone`, where `right` is not None.
    dq: None, or where to write zeros for the tiles of QUERY_TILE rows that see no key. lse_factor: -1 / scale, or -log2(e)
    under a softcap. Rows past the end and rows without a key get what makes p 0. CHAINED: see chain.py.
    """
    chain.begin(CHAINED)
    out, dout = aligned(out), aligned(dout)
    if dq is not None:
        dq = aligned(dq)
    program = tl.program_id(0)
    if program <= num_counters // CLEARED:
        places = program * CLEARED + tl.arange(0, CLEARED)
        tl.store(counters + places, tl.zeros((CLEARED,), tl.int32), mask=places < num_counters)
    at = _rows_of_program(packing, batch, seqlen_q, padded_rows, num_tiles, num_heads, TILE_M)
    sequence, head, lengths, row_begin = at.sequence, at.head, at.lengths, at.row_begin
    padded = at.padded_begin + tl.arange(0, TILE_M)
    start = lengths.start_q
    rows = row_begin + tl.arange(0, TILE_M)
    exists = rows < lengths.seqlen_q
    out_tile = load_tile(head_ptr(out, sequence, start, head), row_begin, lengths.seqlen_q, out.row_stride, TILE_M, HEAD_DIM_V,
                         BLOCK_DV, True, WIDE)  # fmt: skip
    dout_tile = load_tile(head_ptr(dout, sequence, start, head), row_begin, lengths.seqlen_q, dout.row_stride, TILE_M,
                          HEAD_DIM_V, BLOCK_DV, True, WIDE)  # fmt: skip
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    row_lse = tl.load(head_ptr(lse, sequence, start, head) + rows * lse.row_stride, mask=exists, other=NEG_INF)
    if dlse is not None:
        dlse_ptrs = head_ptr(dlse, sequence, start, head) + rows.to(tl.int64) * dlse.row_stride
        # Of rows without a key it is often NaN
        delta -= tl.load(dlse_ptrs, mask=row_lse != NEG_INF, other=0.0)
    row_lse = tl.where(row_lse == NEG_INF, float("inf"), row_lse)
    tl.store(neg_lse + padded, row_lse * lse_factor)
    tl.store(neg_delta + padded, -delta)
    if dq_sum is not None:
        cols = tl.arange(0, BLOCK_D)[None, :]
        cleared = cols < SUM_D
        if right is not None:
            cleared = cleared & (is_alone(lengths, right, TILE_N) == 0)
        tl.store(dq_sum + padded[:, None] * SUM_D + cols, tl.zeros((TILE_M, BLOCK_D), tl.float32), mask=cleared)
    if dq is not None:
        if packing.cu_seqlens_q is None:
            lengths = Lengths(0, 0, seqlen_q, seqlen_k)
        keys = masks.key_range(row_begin // QUERY_TILE * QUERY_TILE, lengths, window, QUERY_TILE, TILE_N)
        if keys.begin >= keys.end:
            store_tile(head_ptr(dq, sequence, start, head), tl.zeros((TILE_M, BLOCK_D), tl.float32), row_begin,
                       lengths.seqlen_q, dq.row_stride, TILE_M, HEAD_DIM, BLOCK_D, WIDE)  # fmt: skip


@triton.jit
def _unpack(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """(ROWS, BLOCK_D) from numbers as they lie in dq_sum: pieces of PIECE rows and columns, as `_give_piece` adds them.

    In a piece lie 8 columns of all rows, and in these 16 rows of a warp, their numbers in the order of a wgmma's accumulators.
    Pieces of fewer rows are transposed.
    """
    if ROWS < PIECE:
        # column of the piece, 8 rows, warp, column of 8, pair of rows, first or second 8 columns, row of the pair
        x = tl.reshape(x, (BLOCK_D // PIECE, ROWS // 8, 4, 8, 4, 2, 2))
        return tl.reshape(tl.permute(x, (1, 4, 6, 0, 2, 5, 3)), (ROWS, BLOCK_D))
    else:
        # row and column of the piece, 8 columns, warp, row of 8, pair of columns, first or second 8 rows, column of the pair
        x = tl.reshape(x, (ROWS // PIECE, BLOCK_D // PIECE, PIECE // 8, 4, 8, 4, 2, 2))
        return tl.reshape(tl.permute(x, (0, 3, 6, 4, 1, 2, 5, 7)), (ROWS, BLOCK_D))


@triton.jit(do_not_specialize=["scale", "right", "batch", "seqlen_q", "padded_rows", "num_tiles", "num_heads"])
def backward_convert(
    dq_sum, dq, scale, packing, right, batch, seqlen_q, padded_rows, num_tiles, num_heads, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, SUM_D: tl.constexpr, BLOCK_D: tl.constexpr, CHAINED: tl.constexpr = False,
):  # fmt: skip
    """dq = scale * dq_sum, which has SUM_D numbers a row, in the dtype of dq. right, CHAINED: as in `backward_rows`."""
    chain.begin(CHAINED)
    dq = aligned(dq)
    at = _rows_of_program(packing, batch, seqlen_q, padded_rows, num_tiles, num_heads, TILE_M)
    if right is not None:
        if is_alone(at.lengths, right, TILE_N):
            return
    # The columns that are left out would come last
    places = tl.arange(0, TILE_M * BLOCK_D)
    x = _unpack(tl.load(dq_sum + at.padded_begin * SUM_D + places, mask=places < TILE_M * SUM_D), TILE_M, BLOCK_D)
    rows = at.row_begin + tl.arange(0, TILE_M)
    cols = tl.arange(0, BLOCK_D)
    exists = (rows < at.lengths.seqlen_q)[:, None] & (cols < HEAD_DIM)[None, :]
    ptrs = head_ptr(dq, at.sequence, at.lengths.start_q, at.head) + rows.to(tl.int64)[:, None] * dq.row_stride + cols[None, :]
    tl.store(ptrs, (x * scale).to(dq.ptr.dtype.element_ty), mask=exists)


# ---- launch ----


# Rows of a program of backward_rows, and counters that it clears at once
ROW_TILE = 32
# The right bound of no window
UNBOUNDED = 2**30
CLEARED = tl.constexpr(128)


class Call(NamedTuple):
    """The tensors of one call: what it is given, what it gives, and what its kernels hand to each other."""

    operands: Any
    out: Any
    lse: Any
    dout: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any
    # Of each part of a group where these are split, or None
    dk_parts: Any
    dv_parts: Any
    # fp32, a number a row of each head of each sequence, or in a packed call of each head, padded: see `padded_rows`
    neg_lse: Any
    neg_delta: Any
    # fp32, sum_columns numbers a row, of as many rows: see `_unpack`. None where all of dq is stored at once
    dq_sum: Any
    # see attention_backward
    counters: Any
    # of `schedule.plan_packed` for tiles of keys, or None
    table: Any


def launch(problem, configs, operands, out, lse, dout, dlse):
    """Run the kernels. configs: {"backward": BackwardConfig}. Returns dq, dk, dv, dsinks (None without sinks)."""
    return bind(problem, configs)(operands, out, lse, dout, dlse)


def bind(problem, configs):
    """`launch` as a function of operands, out, lse, dout and dlse, for calls of one kind (see `Launches`)."""
    config = configs["backward"]
    launches = Launches(partial(_launch_all, problem, config))
    # Rows that no sequence uses are no kernel's, but for those behind the last: see `plan_keys`.
    allocate = gradients(problem, clear_q=problem.has_seqused_q, clear_kv=problem.has_seqused_k)
    new_workspace = fresh((sum(workspace_sizes(problem, config)),), torch.float32)
    new_parts = gradients_of_parts(problem, config.parts, zeros=problem.has_seqused_k)
    all_ready = None

    def call(operands, out, lse, dout, dlse):
        nonlocal all_ready
        q, k, v = operands[:3]
        if all_ready is None:
            all_ready = all(tma_ready(x) is x for x in (q, k, v, dout))
        if not all_ready:
            q, k, v, dout = (tma_ready(x) for x in (q, k, v, dout))
            operands = operands._replace(q=q, k=k, v=v)
        dq, dk, dv = allocate(q, k, v)
        tensors = *operands, out, lse, dout, dlse, dq, dk, dv, *new_parts(k), new_workspace(q)
        if q.numel() and k.numel():
            launches.run(*tensors)
        else:
            _without_pairs(problem, config, tensors)
        dsinks = None
        if operands.sinks is not None:
            dsinks = sinks_gradient(operands.sinks, lse, _delta(problem, _arrange(problem, config, tensors)))
        return dq, dk, dv, dsinks

    return call


def _launch_all(problem, config, launch, *tensors):
    call = _arrange(problem, config, tensors)
    for launch_kernel in kernels(problem):
        launch_kernel(problem, config, call, launch)


def _without_pairs(problem, config, tensors):
    """No query or no key: TMA takes no empty tensor."""
    call = _arrange(problem, config, tensors)
    for gradient in (call.dq, call.dk, call.dv):
        gradient.zero_()
    if call.dq.numel():
        launch_rows(problem, config, call)


def _arrange(problem, config, tensors):
    *operands, out, lse, dout, dlse, dq, dk, dv, dk_parts, dv_parts, workspace = tensors
    operands = Operands(*operands)
    dq_sum, neg_lse, neg_delta, counters, table = workspace.split(workspace_sizes(problem, config))
    rows = padded_rows(problem) * total_heads(problem)
    table = table.view(torch.int32) if problem.varlen else None
    dq_sum = dq_sum if dq_sum.numel() else None
    return Call(operands, out, lse, dout, dlse, dq, dk, dv, dk_parts, dv_parts, neg_lse[:rows], neg_delta[:rows], dq_sum,
                counters.view(torch.int32), table)  # fmt: skip


def kernels(problem):
    """What launches the kernels of a call, in order: functions of the problem, its config, a Call, and what launches."""
    return (*([plan_keys] if problem.varlen else []), launch_rows, launch_main, launch_convert, launch_add)


def padded_rows(problem):
    """Row statistics of a head: of a sequence, or in a packed call of all of them, each with a whole number of tiles."""
    multiple = ROW_MULTIPLE.value
    rows = problem.total_q + multiple * problem.batch if problem.varlen else problem.seqlen_q
    return triton.cdiv(rows, multiple) * multiple


def total_heads(problem):
    """Heads that have padded_rows each."""
    return problem.num_heads * (1 if problem.varlen else problem.batch)


def workspace_sizes(problem, config):
    """Numbers of 4 bytes that the kernels hand to each other: dq_sum, neg_lse, neg_delta, counters, table."""
    rows = padded_rows(problem) * total_heads(problem)
    table = schedule.table_size(backward_config.max_key_tiles(problem, config), problem.batch) if problem.varlen else 0
    sums = 0 if backward_config.stores_dq(problem, config) == "all" else rows * _sum_columns(problem, config)
    sizes = sums, rows, rows, num_counters(problem, config), table
    # Each begins at a multiple of 256 bytes.
    return [triton.cdiv(size, 64) * 64 for size in sizes]


def _sum_columns(problem, config):
    return sum_columns(live_columns(problem.head_dim, padded_dim(problem.head_dim, 2)), config.tile_m)


def _right_of_stored(problem, config):
    """For `is_alone` in the kernels before and after; None where they need not ask it."""
    if backward_config.stores_dq(problem, config) != "some":
        return None
    return UNBOUNDED if problem.window[1] is None else problem.window[1]


def num_counters(problem, config):
    """See `attention_backward`. Programs of backward_rows, four a head or more, clear CLEARED each: more than there are."""
    if config.fixed_order:
        return 2 + padded_rows(problem) // config.tile_m * total_heads(problem)
    return 1 + (problem.batch * problem.num_heads_kv * config.parts if problem.group_size > config.splits else 0)


def _delta(problem, call):
    """delta, of the shape of lse."""
    delta = -call.neg_delta
    if not problem.varlen:
        return delta.view(problem.batch, problem.num_heads, padded_rows(problem))[..., : problem.seqlen_q]
    rows = torch.arange(problem.total_q, device=delta.device)
    starts = call.operands.cu_seqlens_q[:-1].long()
    sequence = (torch.searchsorted(starts, rows, right=True) - 1).clamp(min=0)
    multiple = ROW_MULTIPLE.value
    padded = rows - starts[sequence] + (starts[sequence] + sequence * multiple) // multiple * multiple
    return delta.view(problem.num_heads, padded_rows(problem))[:, padded]


def launch_rows(problem, config, call, launch=launch_now):
    stores = backward_config.stores_dq(problem, config)
    num_tiles = padded_rows(problem) // ROW_TILE
    grid = (num_tiles * total_heads(problem),)
    kernel_arguments = (
        rows_of(call.out), rows_of(call.dout), None if call.dlse is None else rows_of(call.dlse, lse=True),
        rows_of(call.lse, lse=True), call.neg_lse, call.neg_delta, None if stores == "last" else call.dq_sum, call.counters,
        rows_of(call.dq) if stores == "last" else None, masks.Window(*problem.window), Packing(*call.operands[3:7]),
        _right_of_stored(problem, config), problem.batch, problem.seqlen_q, problem.seqlen_k, padded_rows(problem), num_tiles,
        problem.num_heads, num_counters(problem, config), -LOG2_E.value if problem.softcap else -1 / problem.softmax_scale,
    )  # fmt: skip
    constexprs = {
        "TILE_M": ROW_TILE, "TILE_N": config.tile_n, "QUERY_TILE": config.tile_m, "SUM_D": _sum_columns(problem, config),
        "HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v, "BLOCK_D": padded_dim(problem.head_dim, 2),
        "BLOCK_DV": padded_dim(problem.head_dim_v, 2), "WIDE": problem.wide_rows, "CHAINED": True,
    }  # fmt: skip
    # `plan_keys` comes before
    launch(backward_rows, grid, kernel_arguments, constexprs, num_warps=4, **chain.after(problem.varlen))


def plan_keys(problem, config, call, launch):
    """The table of tiles of keys: `schedule.plan_packed` with queries and keys exchanged."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = call.operands[3:7]
    rests_q, rests_k = () if problem.has_seqused_q else (schedule.rest_of(call.dq, cu_seqlens_q),), ()
    if not problem.has_seqused_k:
        rests_k = tuple(schedule.rest_of(x, cu_seqlens_k) for x in written_gradients(call))
    packing = Packing(cu_seqlens_k, cu_seqlens_q, seqused_k, seqused_q)
    max_tiles, sequences = backward_config.max_key_tiles(problem, config), backward_config.sorted_sequences(problem, config)
    arguments.launch_plan(launch, problem, call.table, packing, max_tiles, config.tile_n, rests_q, rests_k, sequences=sequences)


def launch_main(problem, config, call, launch):
    block_d, block_dv = padded_dim(problem.head_dim, 2), padded_dim(problem.head_dim_v, 2)
    tile_m, half_n = config.tile_m, HALF_N.value
    operands = call.operands
    score_params = params_of(problem, operands.alibi_slopes, prescaled=False)
    dropout = dropout_of(problem, operands.rng_state)
    describe = packed_descriptor if problem.varlen else descriptor
    live_d, live_dv = live_columns(problem.head_dim, block_d), live_columns(problem.head_dim_v, block_dv)
    box_d, box_dv = box_columns(live_d, block_d), box_columns(live_dv, block_dv)
    num_tiles = backward_config.max_key_tiles(problem, config)
    dk, dv = written_gradients(call)
    dq_desc = None
    if backward_config.stores_dq(problem, config) != "no":
        dq_desc = describe(call.dq, min(tile_m, PIECE.value), PIECE.value)
    heads_kv = problem.num_heads_kv * config.parts
    splits, query_parts = (count if count > 1 else None for count in (config.splits, config.query_parts))
    batch_heads = problem.batch * heads_kv
    num_units = num_tiles * (heads_kv if problem.varlen else batch_heads)
    kernel_arguments = (
        describe(operands.q, tile_m, box_d), describe(call.dout, tile_m, box_dv), describe(operands.k, half_n, box_d),
        describe(operands.v, half_n, box_dv), row_descriptor(call.neg_lse, tile_m), row_descriptor(call.neg_delta, tile_m),
        describe(dk, half_n, block_d), describe(dv, half_n, block_dv), dq_desc, call.dq_sum, call.counters, call.table,
        masks.Window(*problem.window), score_params, dropout, problem.seqlen_q, problem.seqlen_k, num_tiles, problem.num_heads,
        heads_kv, splits, query_parts, batch_heads, *backward_config.heads_in_groups(problem, config), padded_rows(problem),
    )  # fmt: skip
    constexprs = {
        "GROUP_SIZE": problem.group_size // config.splits, "TILE_M": tile_m, "TILE_N": config.tile_n,
        "BLOCK_D": block_d, "BLOCK_DV": block_dv, "LIVE_D": live_d, "LIVE_DV": live_dv,
        "Q_STAGES": config.num_stages, "DOUT_STAGES": config.dout_stages, "DSCORES_STAGES": config.dscores_stages,
        "BY_ROWS": config.by_rows, "RAGGED_N": problem.varlen or problem.seqlen_k % config.tile_n != 0,
        "FIXED_ORDER": config.fixed_order, "REGISTERS": config.registers,
    }  # fmt: skip
    launch(attention_backward, (min(config.num_programs, num_units),), kernel_arguments, constexprs, num_warps=4,
           **chain.after())  # fmt: skip


def launch_convert(problem, config, call, launch):
    if backward_config.stores_dq(problem, config) in ("all", "last"):
        return
    rows = min(config.tile_m, PIECE.value)
    num_tiles = padded_rows(problem) // rows
    grid = (num_tiles * total_heads(problem),)
    kernel_arguments = (call.dq_sum, rows_of(call.dq), float(problem.softmax_scale), Packing(*call.operands[3:7]),
                        _right_of_stored(problem, config), problem.batch, problem.seqlen_q, padded_rows(problem), num_tiles,
                        problem.num_heads)  # fmt: skip
    constexprs = {"TILE_M": rows, "TILE_N": config.tile_n, "HEAD_DIM": problem.head_dim,
                  "SUM_D": _sum_columns(problem, config), "BLOCK_D": padded_dim(problem.head_dim, 2),
                  "CHAINED": True}  # fmt: skip
    launch(backward_convert, grid, kernel_arguments, constexprs, num_warps=8, **chain.after())


def written_gradients(call):
    """The dk and dv that the main kernel writes."""
    return (call.dk, call.dv) if call.dk_parts is None else (call.dk_parts, call.dv_parts)


def launch_add(problem, config, call, launch):
    blocks = padded_dim(problem.head_dim, 2), padded_dim(problem.head_dim_v, 2)
    groups.launch_add((call.dk, call.dv), (call.dk_parts, call.dv_parts), blocks, config.parts, launch, chained=True)


def tma_ready(x):
    """x, or a contiguous copy where TMA can't read it: strides must be positive, and like the address multiples of 16 bytes."""
    multiple = 16 // x.element_size()
    *strides, last = x.stride()
    aligned = all(stride > 0 and stride % multiple == 0 or size == 1 for size, stride in zip(x.shape, strides))
    ready = aligned and last == 1 and x.data_ptr() % 16 == 0
    # not contiguous(), which gives x itself where only its address is wrong
    return x if ready else x.clone(memory_format=torch.contiguous_format)


def row_descriptor(x, rows):
    """Of all row statistics in one row."""
    return TensorDescriptor(x, [x.numel()], [1], [rows], _ROW_LAYOUT)


_ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
