"""The Hopper forward kernel: persistent, warp-specialised, TMA and asynchronous wgmma, in Gluon.

    partition        warps   does
    _compute x 2..4  4 each  owns 64 query rows of the tile: products, online softmax, lse, and the TMA store of out
    _load            1 or 4  takes tiles from a counter, tells them to the others, starts every load
    _load_apart      1       of a cache in pages: starts the loads of values, so that two warps look up pages side by side
    _turn_values     2 or 4  of fp8: turns values, so that their keys lie side by side

A tile is 64 queries a consumer, of one head; where queries are few, of all heads of a group (HEADS of them, their queries of
one position side by side), which have their keys in common: see `tiles.hopper_config`. K and V are one unbroken stream of
steps over all tiles of a program (K of step i+1 is loaded before V of step i, also from one tile to the next); a step is a key
tile, and goes to all consumers:

    scores(i) = q kᵀ(i)  |  acc += p(i-1) v(i-1)      both in flight together
    p(i), row_max, row_sum = online softmax(scores(i)) under the second product

Key tiles go from the last to the first, so that the one that a causal mask cuts is the first of a consumer, outside the loop.
At the end of a tile a consumer starts the first scores of its next tile with its last product, does that first softmax, and
only then writes out. Steps that only other consumers need are handed back unused. Consumers take turns in issuing products,
so that the softmax of one runs under the products of another; the turn goes through barriers of the hardware.

Head dim 256 (LAZY): acc is rescaled only when weights would exceed 256, which after a few steps hardly happens: 128 products a
thread and step less, in time and in power. Shared memory is what runs short, its bandwidth and its size. The left half of the
queries is an operand in registers, so q kᵀ reads less of it. The buffer of the left half is free once it is read, and takes
the left half of out at the end of the tile before; the right half leaves through that of its own queries.

Schedule: tiles in the order of `schedule.tile_of_unit`, each to the program that is free first (an atomic counter in global
memory, asked while the last loads of a tile are under way; it is 0 again when the kernel ends). A packed call has a table of
its tiles, which a small kernel writes before (`schedule.plan_packed`).

Keys and values may lie in the pages of a cache, see kvcache.py: then a box of TMA is one page or a part of it, and tokens of
other pages are copied one by one (GATHERED).

fp8 (e4m3; calls on a cache alone, queries too): products are fp8, of weights 2**8 times as large, so that e4m3 holds more of
them. acc is no part of them: acc(i) = acc(i-1) * correction(i-1) + p(i-1) v(i-1), in fp32. fp8.py says why, and how operands
lie. Except for v of 97 to 128 columns, p v is in products of 32 columns, or of 64 from 193 on: the first beside the scores,
others under softmax, the rest behind it. Each tile has a scale, that of its heads' descales; so softcaps are not BOUNDED, and
nothing is LAZY.

Takes fp16, bf16 and fp8, head dims to 256 (what a block has beside is zeros, or not loaded, and no part of products: boxes.py,
device/columns.py), every mask and score option, dropout, packed calls. Refuses other dtypes, and strides that TMA does not
take: see `hopper.refuses`.

ALiBi, where it is a difference of positions (keys up to the diagonal, head dims to 128): a product more (`_bias_operand`).

Softcap (BOUNDED: bf16, up to 55, without ALiBi): its logits have a bound, so weights are relative to 0 instead
of the row's largest logit, and there are no maxima, no corrections, and nothing that scales acc. Tanh is a polynomial
(`scores.capped`). Weights are then rounded to bf16 where the largest of a row was 1: out is off by 2.0e-3 to 2.4e-3 (root mean
square, relative to float64), where it was 1.7e-3 to 2.1e-3, since bf16 of out alone is 1.65e-3.

Dropout: the random words of a step are made under its products, and of those only a bit a weight is kept (`dropout.keep_bits`).

Calls of up to 272 keys have mostly another kernel, which has no border: resident.py.

What limits it: from 4096 keys on the tensor pipe, and then the power limit (head dim 256: active 98% of the cycles; 128: 84%,
since a consumer's chain of softmax instructions takes longer than the other's products); at head dim 64 the exponentials; in
short calls the border between tiles. Counters, and everything that was tried with its figures: docs/kernels/hopper-forward.md.

Source: Dao 2023, FlashAttention-2, algorithm 1; Shah et al. 2024, FlashAttention-3, algorithm 2.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from flashtile.device import chain, columns, masks, schedule, scores, softmax
from flashtile.device import dropout as dropouts
from flashtile.device.barriers import allocate_barriers
from flashtile.device.cache import Pages
from flashtile.device.compat import (
    async_copy,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.device.dropout import RandomStream
from flashtile.device.lengths import Lengths
from flashtile.device.masks import Window
from flashtile.device.numerics import NEG_INF
from flashtile.device.partitions import specialize
from flashtile.device.schedule import Order
from flashtile.device.scores import ScoreParams
from flashtile.device.tensors import per_head
from flashtile.hopper import boxes, fp8
from flashtile.hopper.arguments import bind_forward

# Query rows of a consumer: what one wgmma of 4 warps holds.
ROWS = gl.constexpr(64)
TILE_SLOTS = gl.constexpr(2)
# One of the hardware's 16 barriers a consumer, of those that Triton leaves alone: it counts 128 threads that pass the turn and
# 128 that wait for it.
_WAIT_TURN = gl.constexpr(tuple(f"bar.sync {8 + consumer}, 256; mov.u32 $0, $1;" for consumer in range(4)))
_PASS_TURN = gl.constexpr(tuple(f"bar.arrive {8 + consumer}, 256; mov.u32 $0, $1;" for consumer in range(4)))
# Passes $2 and $3 through, and can't be done before they are known. The bits are those of no number, so nothing arrives.
_HOLD = gl.constexpr(
    "{ .reg .pred q; .reg .b32 b; mov.b32 b, $2; setp.eq.u32 q, b, 0x7fffdead; vote.sync.any.pred q, q, 0xffffffff; "
    "@q bar.arrive 15, 128; selp.b32 $0, 0, $2, q; selp.b32 $1, 0, $3, q; }"
)
_LEAST_SCALE, _LEAST_UNIT = gl.constexpr(scores.SMALLEST_NORMAL), gl.constexpr(scores.SMALLEST_UNIT)
# Of the product that adds ALiBi's bias: the fewest that a product of bf16 has
BIAS_COLUMNS = gl.constexpr(16)
# batch, head, row_begin, begin, end, and of packed calls start_q, seqlen_q, seqlen_k; start_k comes behind all slots
TILE_WORDS = gl.constexpr(8)


@dataclass(frozen=True)
class Variant:
    """What the code of a call depends on: the constants of `attention_forward`, for its partitions."""

    # Query heads to a key head, and those that share a tile
    GROUP_SIZE: int
    HEADS: int
    # Columns of shared memory, and those that have something
    BLOCK_D: int
    BLOCK_DV: int
    LIVE_D: int
    LIVE_DV: int
    TILE_N: int
    # Tokens of a cache's page; whether they are copied one by one
    PAGE_SIZE: int
    GATHERED: bool
    NUM_CONSUMERS: int
    LOAD_WARPS: int
    # Whether a partition of its own loads the values
    VALUES_APART: bool
    # Whether the left half of the queries goes to registers
    SPLIT_Q: bool
    # Slots of keys, of values, and of fp8 values before they are turned
    NUM_STAGES: int
    V_STAGES: int
    RAW_STAGES: int
    LAZY: bool
    # Whether the first key tile of a consumer may have hidden keys, and any other
    MASK_FIRST: bool
    MASK_OTHERS: bool
    # Whether out has buffers beside those of the queries
    OWN_OUT: bool
    # Whether the one of two consumers with a tile's first rows sees half of its first key tile
    HALF_FIRST: bool
    # Whether a window's left edge cuts one tile of a consumer, its last, or none; the place of that of two consumers which sees
    # the right half of that alone, or -1
    CUT_LAST: bool
    HALF_LAST: int
    # Whether the first consumer has the last rows of a tile
    LAST_ROWS_FIRST: bool
    # Whether a product adds what ALiBi's bias of a key is
    BIAS: bool
    # Whether the softcap's logits are in base 2, and weights relative to 0
    BOUNDED: bool
    PACKED: bool
    # Whether the keys of a tile are cut into parts, see `_tile_part`
    CUTS: bool
    # Warps that turn values: q, k and v are fp8; or 0
    TURN_WARPS: int

    @property
    def FP8(self):
        return self.TURN_WARPS > 0

    @property
    def K(self):
        """What a product contracts at a time: 32 bytes."""
        return 32 if self.FP8 else 16


@gluon.constexpr_function
def _variant(*constants):
    return Variant(*constants)


class Ring(NamedTuple):
    """Shared memory, in slots, and its barriers: x_ready when slot x is filled, x_free when it may be filled again."""

    q_smem: Any
    # What counts past the first columns, where that is apart: then q_smem has fewer slots than barriers
    q_rest_smem: Any
    k_smem: Any
    k_rest_smem: Any
    # As products take them: fp8 turned, (columns, keys), by `_turn_values`, from what TMA loads to raw_smem; else that itself
    v_smem: Any
    raw_smem: Any
    # one a consumer; q_smem where that has to serve
    out_smem: Any
    # `_bias_columns`, where ALiBi's bias is added by a product
    bias_smem: Any
    tile_smem: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    raw_ready: Any
    raw_free: Any
    tile_ready: Any
    tile_free: Any


class LseRows(NamedTuple):
    """stride: from head to head, of which a sequence has num_heads. apart: of a packed call, what lies between two sequences
    beside the first's rows, or None."""

    ptr: Any
    stride: Any
    apart: Any
    num_heads: Any


class Keys(NamedTuple):
    """Where the keys of a step are: of `boxes.place`; with pages the sequence, the slot of the first, and where slots end."""

    place: Any
    head: Any
    row: Any
    stop: Any


class Part(NamedTuple):
    """What a consumer, or all together, do of one tile: queries from row_begin on, key tiles [begin, end).

    head is the number of the group where its heads share the tile. With CUTS it counts through all parts of keys: those of the
    first, those of the second and so on, as heads of out and lse do; `_head_of` is that of q, k and v.
    """

    batch: Any
    head: Any
    row_begin: Any
    begin: Any
    end: Any
    # without hidden keys or keys past the end: [full_begin, full_end)
    full_begin: Any
    full_end: Any


@gluon.jit
def _slot(step, NUM_SLOTS: gl.constexpr):
    """(slot, phase of its ready barrier) of a step."""
    return step % NUM_SLOTS, (step // NUM_SLOTS) & 1


@gluon.jit
def _tile_part(unit, order, table, lengths, window, parts, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """The part of all consumers together, and the lengths of its sequence.

    At least one key tile, so that empty rows need no path of their own; an end of 0 says that there is no such tile. parts: of
    the key tiles, each a unit of its own, or None for one. A part that gets none has one behind the last, which hides all keys.
    """
    LAST_FIRST: gl.constexpr = window.right is not None
    number = 0
    if parts is not None:
        number = unit % parts
        unit = unit // parts
    if table is None:
        exists = unit < order.total_heads * order.num_tiles
        work = schedule.tile_of_unit(unit, order, LAST_FIRST)
    else:
        exists = unit < order.num_tiles * order.num_heads
        work, lengths, _ = schedule.packed_tile_of_unit(unit, order, table, LAST_FIRST)
    row_begin = work.tile * TILE_M
    tiles = masks.key_range(row_begin, lengths, window, TILE_M, TILE_N)
    end = gl.maximum(tiles.end, 1)
    begin = gl.minimum(tiles.begin, end - 1)
    head = work.head
    if parts is not None:
        head += number * order.num_heads
        count = end - begin
        end = begin + (number + 1) * count // parts
        begin = begin + number * count // parts
        behind = gl.maximum(gl.cdiv(lengths.seqlen_k, TILE_N), 1)
        end = gl.where(begin < end, end, behind + 1)
        begin = gl.where(end > behind, behind, begin)
    end = gl.where(exists, end, 0)
    return Part(work.batch, head, row_begin, begin, end, 0, 0), lengths


@gluon.jit
def _head_of(part, num_heads, variant: gl.constexpr):
    """The head of q, or the number of the group whose heads share the tile."""
    return part.head % num_heads if variant.CUTS else part.head


@gluon.constexpr_function
def _place(consumer, variant):
    """Which 64 rows of a tile a consumer has."""
    return variant.NUM_CONSUMERS - 1 - consumer if variant.LAST_ROWS_FIRST else consumer


@gluon.jit
def _consumer_part(part, lengths, window, HEADS: gl.constexpr, TILE_N: gl.constexpr, PLACE: gl.constexpr):
    """The part of the consumer of one place. Rows past the length do what the last row does."""
    QUERIES: gl.constexpr = ROWS // HEADS
    row_begin = part.row_begin + PLACE * QUERIES
    tiles = masks.key_range(gl.minimum(row_begin, lengths.seqlen_q - 1), lengths, window, QUERIES, TILE_N)
    end = gl.minimum(gl.maximum(tiles.end, part.begin + 1), part.end)
    begin = gl.minimum(gl.maximum(tiles.begin, part.begin), end - 1)
    # Key tile end - 1 comes first, and is masked whatever it holds.
    full_end = gl.minimum(gl.maximum(tiles.full_end, begin), end - 1)
    full_begin = gl.minimum(gl.maximum(tiles.full_begin, begin), full_end)
    return Part(part.batch, part.head, row_begin, begin, end, full_begin, full_end)


@gluon.jit
def _publish(ring, part, lengths, index, variant: gl.constexpr):
    """Tell the other partitions the program's index-th tile; an end of 0 says that there is none."""
    slot, phase = _slot(index, TILE_SLOTS)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [variant.LOAD_WARPS], [0])
    zero = gl.full([1], 0, gl.int32, layout)
    mbarrier.wait(ring.tile_free.index(slot), phase ^ 1)
    ring.tile_smem.index(slot * TILE_WORDS).store(zero + part.batch)
    ring.tile_smem.index(slot * TILE_WORDS + 1).store(zero + part.head)
    ring.tile_smem.index(slot * TILE_WORDS + 2).store(zero + part.row_begin)
    ring.tile_smem.index(slot * TILE_WORDS + 3).store(zero + part.begin)
    ring.tile_smem.index(slot * TILE_WORDS + 4).store(zero + part.end)
    if variant.PACKED:
        ring.tile_smem.index(slot * TILE_WORDS + 5).store(zero + lengths.start_q)
        ring.tile_smem.index(slot * TILE_WORDS + 6).store(zero + lengths.seqlen_q)
        ring.tile_smem.index(slot * TILE_WORDS + 7).store(zero + lengths.seqlen_k)
    if variant.VALUES_APART:
        ring.tile_smem.index(TILE_SLOTS * TILE_WORDS + slot).store(zero + lengths.start_k)
    mbarrier.arrive(ring.tile_ready.index(slot), count=1)


@gluon.jit
def _word(ring, number, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(ring.tile_smem.index(number).load(layout), 0)


@gluon.jit
def _receive(ring, lengths, index, PACKED: gl.constexpr, WARPS: gl.constexpr = 4, START_K: gl.constexpr = False):
    """The program's index-th tile, and the lengths of its sequence, with START_K where its keys start; for WARPS."""
    slot, phase = _slot(index, TILE_SLOTS)
    mbarrier.wait(ring.tile_ready.index(slot), phase)
    first = slot * TILE_WORDS
    part = Part(_word(ring, first, WARPS), _word(ring, first + 1, WARPS), _word(ring, first + 2, WARPS),
                _word(ring, first + 3, WARPS), _word(ring, first + 4, WARPS), 0, 0)  # fmt: skip
    start_k = lengths.start_k
    if START_K:
        start_k = _word(ring, TILE_SLOTS * TILE_WORDS + slot, WARPS)
    if PACKED:
        lengths = Lengths(_word(ring, first + 5, WARPS), start_k, _word(ring, first + 6, WARPS), _word(ring, first + 7, WARPS))
    mbarrier.arrive(ring.tile_free.index(slot), count=1)
    return part, lengths


@gluon.jit
def _load_rows(desc, smem, ready, place, head, row, LIVE: gl.constexpr, PACKED: gl.constexpr, COL: gl.constexpr = 0):
    """LIVE columns from COL on. head and row: of q as `_head_and_row` gives them."""
    mbarrier.expect(ready, boxes.num_boxes(desc, LIVE) * desc.block_type.nbytes)
    boxes.load(desc, smem, ready, place, head, row, LIVE, PACKED, COL)


@gluon.jit
def _head_and_row(head, row, HEADS: gl.constexpr):
    """In the order of the descriptors of q and out, which `arguments.descriptor` explains."""
    if HEADS == 1:
        return head, row
    else:
        return row, head * HEADS


@gluon.jit
def _q_slots(index, CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    """Slots and phases of a consumer's queries of the program's index-th tile, and of their left half where it is apart."""
    slot, phase = _slot(index, 2)
    return slot * NUM_CONSUMERS + CONSUMER, phase, 2 * NUM_CONSUMERS + CONSUMER, index & 1


@gluon.jit
def _left_slot(ring, left):
    """Of q_smem, which has left halves alone where the rest is apart; its number among barriers is `left`."""
    return left - (ring.q_ready.shape[0] - ring.q_smem.shape[0])


@gluon.jit
def _load_q(q_desc, q_rest_desc, ring, index, part, lengths, num_heads, variant: gl.constexpr,
            CONSUMER: gl.constexpr):  # fmt: skip
    """Queries of a consumer; with SPLIT_Q a slot has half of their columns."""
    slot, phase, left, left_phase = _q_slots(index, CONSUMER, variant.NUM_CONSUMERS)
    PACKED: gl.constexpr = variant.PACKED
    COL: gl.constexpr = ring.q_smem.shape[-1] if variant.SPLIT_Q else 0
    REST: gl.constexpr = variant.LIVE_D - COL
    row = part.row_begin + _place(CONSUMER, variant) * (ROWS // variant.HEADS)
    place, row = boxes.place(part.batch, lengths.start_q, lengths.seqlen_q, row, PACKED)
    head, row = _head_and_row(_head_of(part, num_heads, variant), row, variant.HEADS)
    mbarrier.wait(ring.q_free.index(slot), phase ^ 1)
    if q_rest_desc is None:
        _load_rows(q_desc, ring.q_smem.index(slot), ring.q_ready.index(slot), place, head, row, REST, PACKED, COL)
    else:
        _load_rows(q_rest_desc, ring.q_rest_smem.index(slot), ring.q_ready.index(slot), place, head, row, REST, PACKED, COL)
    if variant.SPLIT_Q:
        mbarrier.wait(ring.q_free.index(left), left_phase ^ 1)
        _load_rows(q_desc, ring.q_smem.index(_left_slot(ring, left)), ring.q_ready.index(left), place, head, row, COL, PACKED)


@gluon.jit
def _load_keys(desc, smem, ready, keys, pages, variant: gl.constexpr, LIVE: gl.constexpr, VALUES: gl.constexpr,
               COL: gl.constexpr = 0):  # fmt: skip
    """Start the loads of LIVE columns of k, or v, from COL on."""
    if variant.GATHERED:
        if VALUES:
            boxes.gather(smem, pages, pages.v, keys.place, keys.row, keys.stop, keys.head, LIVE, variant.PAGE_SIZE, COL)
        else:
            boxes.gather(smem, pages, pages.k, keys.place, keys.row, keys.stop, keys.head, LIVE, variant.PAGE_SIZE, COL)
    elif pages is None:
        boxes.load(desc, smem, ready, keys.place, keys.head, keys.row, LIVE, variant.PACKED, COL)
    else:
        boxes.load_pages(desc, smem, ready, pages, keys.place, keys.row, keys.stop, keys.head, LIVE, variant.PAGE_SIZE, COL)


@gluon.jit
def _expect(ready, NUM_BYTES: gl.constexpr, GATHERED: gl.constexpr):
    if not GATHERED:
        mbarrier.expect(ready, NUM_BYTES)


@gluon.jit
def _tell(ready, GATHERED: gl.constexpr):
    """Let copies that this partition has started tell a barrier when they are done, once a thread; TMA does so by itself."""
    if GATHERED:
        async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def _wait_keys(ready, phase, GATHERED: gl.constexpr, pred=True):
    """Wait for keys or values."""
    mbarrier.wait(ready, phase, pred=pred)
    if GATHERED:
        fence_async_shared()


@gluon.jit
def _load_values(desc, ring, step, keys, pages, variant: gl.constexpr):
    slot, phase = _slot(step, variant.RAW_STAGES)
    ready = ring.raw_ready.index(slot)
    mbarrier.wait(ring.raw_free.index(slot), phase ^ 1)
    _expect(ready, boxes.num_bytes(desc, ring.raw_smem, variant.LIVE_DV), variant.GATHERED)
    _load_keys(desc, ring.raw_smem.index(slot), ready, keys, pages, variant, variant.LIVE_DV, True)
    _tell(ready, variant.GATHERED)


@gluon.jit
def _ask_next(counter, WARPS: gl.constexpr):
    """Ask the counter for the number of the next tile. The answer takes a microsecond: `_answer` waits for it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lanes = gl.arange(0, 32 * WARPS, layout)
    # As a tensor: a scalar atomic is waited for at once. Relaxed: nothing but the number itself is exchanged.
    one = gl.full([32 * WARPS], 1, gl.int32, layout)
    return gl.atomic_add(counter + lanes * 0, one, mask=lanes == 0, sem="relaxed")


@gluon.jit
def _answer(numbers):
    layout: gl.constexpr = numbers.type.layout
    return gl.num_programs(0) + gl.max(gl.where(gl.arange(0, numbers.shape[0], layout) == 0, numbers, 0), 0)


@gluon.jit
def _keys_of(part, lengths, pages, num_heads, variant: gl.constexpr):
    """The keys of a tile's first step, which are its last ones."""
    row = (part.end - 1) * variant.TILE_N
    head = _head_of(part, num_heads, variant) // variant.GROUP_SIZE
    if pages is not None:
        return Keys(part.batch, head, lengths.start_k + row, lengths.start_k + lengths.seqlen_k)
    else:
        place, row = boxes.place(part.batch, lengths.start_k, lengths.seqlen_k, row, variant.PACKED)
        return Keys(place, head, row, 0)


@gluon.jit
def _load_step(k_desc, k_rest_desc, v_desc, ring, step, i, first, before, pages, variant: gl.constexpr):
    """Keys of the i-th step of a tile, whose first ones are `first`, and the values of the step before: `before` at first.

    VALUES_APART: keys alone.
    """
    row = first.row - i * variant.TILE_N
    keys = Keys(first.place, first.head, row, first.stop)
    slot, phase = _slot(step + i, variant.NUM_STAGES)
    ready = ring.k_ready.index(slot)
    COL: gl.constexpr = variant.LIVE_D if k_rest_desc is None else ring.k_smem.shape[-1]
    mbarrier.wait(ring.k_free.index(slot), phase ^ 1)
    if k_rest_desc is None:
        _expect(ready, boxes.num_bytes(k_desc, ring.k_smem, COL), variant.GATHERED)
        _load_keys(k_desc, ring.k_smem.index(slot), ready, keys, pages, variant, COL, False)
    else:
        REST: gl.constexpr = variant.LIVE_D - COL
        REST_BYTES: gl.constexpr = boxes.num_bytes(k_rest_desc, ring.k_rest_smem, REST)
        _expect(ready, boxes.num_bytes(k_desc, ring.k_smem, COL) + REST_BYTES, variant.GATHERED)
        _load_keys(k_desc, ring.k_smem.index(slot), ready, keys, pages, variant, COL, False)
        _load_keys(k_rest_desc, ring.k_rest_smem.index(slot), ready, keys, pages, variant, REST, False, COL)
    _tell(ready, variant.GATHERED)
    if not variant.VALUES_APART and step + i > 0:
        place = gl.where(i > 0, first.place, before.place)
        head = gl.where(i > 0, first.head, before.head)
        stop = gl.where(i > 0, first.stop, before.stop)
        keys = Keys(place, head, gl.where(i > 0, row + variant.TILE_N, before.row), stop)
        _load_values(v_desc, ring, step + i - 1, keys, pages, variant)


@gluon.jit
def _load(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, ring, counter, order, table, pages, lengths, window, parts,
          variant: gl.constexpr):  # fmt: skip
    """The producer: all tiles of this program, and all loads but those of `_load_apart`."""
    TILE_N: gl.constexpr = variant.TILE_N
    WARPS: gl.constexpr = variant.LOAD_WARPS
    NUM_CONSUMERS: gl.constexpr = variant.NUM_CONSUMERS
    TILE_M: gl.constexpr = ROWS // variant.HEADS * NUM_CONSUMERS
    index = 0
    step = 0
    before = Keys(0, 0, 0, 0)
    part, lengths = _tile_part(gl.program_id(0), order, table, lengths, window, parts, TILE_M, TILE_N)
    _publish(ring, part, lengths, index, variant)
    while part.end > 0:
        for consumer in gl.static_range(NUM_CONSUMERS):
            _load_q(q_desc, q_rest_desc, ring, index, part, lengths, order.num_heads, variant, consumer)
        first = _keys_of(part, lengths, pages, order.num_heads, variant)
        steps = part.end - part.begin
        for i in range(steps - 2):
            _load_step(k_desc, k_rest_desc, v_desc, ring, step, i, first, before, pages, variant)
        # As late as can be, so that tiles go to whom is free first, and before the last loads, which wait for their slots.
        numbers = _ask_next(counter, WARPS)
        if steps > 1:
            _load_step(k_desc, k_rest_desc, v_desc, ring, step, steps - 2, first, before, pages, variant)
        next_part, next_lengths = _tile_part(_answer(numbers), order, table, lengths, window, parts, TILE_M, TILE_N)
        _load_step(k_desc, k_rest_desc, v_desc, ring, step, steps - 1, first, before, pages, variant)
        before = Keys(first.place, first.head, first.row - (steps - 1) * TILE_N, first.stop)
        step += steps
        index += 1
        part = next_part
        lengths = next_lengths
        _publish(ring, part, lengths, index, variant)
    # A packed call may have fewer tiles than programs.
    if not variant.VALUES_APART and step > 0:
        _load_values(v_desc, ring, step - 1, before, pages, variant)
    # The last program to come here leaves the counter as it was found.
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _load_apart(v_desc, ring, pages, lengths, num_heads, variant: gl.constexpr):
    """The producer of values, where they have one of their own."""
    index = 0
    step = 0
    part, lengths = _receive(ring, lengths, index, variant.PACKED, variant.LOAD_WARPS, True)
    while part.end > 0:
        first = _keys_of(part, lengths, pages, num_heads, variant)
        steps = part.end - part.begin
        for i in range(steps):
            keys = Keys(first.place, first.head, first.row - i * variant.TILE_N, first.stop)
            _load_values(v_desc, ring, step + i, keys, pages, variant)
        step += steps
        index += 1
        part, lengths = _receive(ring, lengths, index, variant.PACKED, variant.LOAD_WARPS, True)


@gluon.jit
def _turn_values(ring, lengths, variant: gl.constexpr):
    """The partition that turns fp8 values, so that keys lie side by side, as products take them: see fp8.py."""
    TILE_N: gl.constexpr = variant.TILE_N
    TURN_WARPS: gl.constexpr = variant.TURN_WARPS
    index = 0
    step = 0
    part, lengths = _receive(ring, lengths, index, variant.PACKED, TURN_WARPS)
    while part.end > 0:
        steps = part.end - part.begin
        for i in range(step, step + steps):
            raw, phase = _slot(i, variant.RAW_STAGES)
            mbarrier.wait(ring.raw_ready.index(raw), phase)
            slot, phase = _slot(i, variant.V_STAGES)
            mbarrier.wait(ring.v_free.index(slot), phase ^ 1)
            fp8.turn(ring.raw_smem.index(raw).reshape([TILE_N, variant.BLOCK_DV]), ring.v_smem.index(slot), TURN_WARPS)
            fence_async_shared()
            # Not before: loads may be under way, and TMA does not wait for them
            mbarrier.arrive(ring.raw_free.index(raw), count=1)
            mbarrier.arrive(ring.v_ready.index(slot), count=1)
        step += steps
        index += 1
        part, lengths = _receive(ring, lengths, index, variant.PACKED, TURN_WARPS)


@gluon.jit
def _wait_turn(CONSUMER: gl.constexpr, pred=True):
    """Wait until the consumer before this one has started its products."""
    if pred:
        nothing = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
        gl.inline_asm_elementwise(_WAIT_TURN[CONSUMER], "=r,r", [nothing], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr, pred=True):
    if pred:
        nothing = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
        gl.inline_asm_elementwise(_PASS_TURN[(CONSUMER + 1) % NUM_CONSUMERS], "=r,r", [nothing], dtype=gl.int32,
                                  is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _load_left(ring, left, phase, TILE_N: gl.constexpr, pred):
    """The left half of the queries, as an operand in registers."""
    layout: gl.constexpr = columns.layout_of(TILE_N)
    mbarrier.wait(ring.q_ready.index(left), phase, pred=pred)
    q = ring.q_smem.index(_left_slot(ring, left)).reshape([ROWS, ring.q_smem.shape[-1]])
    return q.load(gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _some_keys(tile, KEYS: gl.constexpr, LAST: gl.constexpr):
    """The first KEYS rows of a tile, or the last."""
    if KEYS == tile.shape[0]:
        return tile
    else:
        return tile.slice(tile.shape[0] - KEYS if LAST else 0, KEYS, dim=0)


@gluon.jit
def _bias_columns(KEYS: gl.constexpr):
    """The right operand of a product that adds ALiBi's bias, with `_bias_operand`: a key's place in its tile, from the middle.

    In three columns, exactly: bf16 holds integers to 256.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    keys = gl.arange(0, KEYS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BIAS_COLUMNS, gl.SliceLayout(0, layout))[None, :]
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BIAS_COLUMNS], gl.bfloat16)
    places = gl.where(cols < 3, keys - KEYS // 2, 0).to(gl.bfloat16)
    bias_smem = gl.allocate_shared_memory(gl.bfloat16, [KEYS, BIAS_COLUMNS], shared, places)
    fence_async_shared()
    return bias_smem


@gluon.jit
def _bias_operand(slope, TILE_N: gl.constexpr):
    """The left operand: the slope, in three parts of bf16, which have all of its bits. slope: of `scores.load_slope`."""
    layout: gl.constexpr = gl.DotOperandLayout(0, columns.layout_of(TILE_N), 2)
    cols = gl.arange(0, BIAS_COLUMNS, gl.SliceLayout(0, layout))[None, :] + gl.zeros([ROWS, BIAS_COLUMNS], gl.int32, layout)
    first = (-slope).to(gl.bfloat16).to(gl.float32)
    second = (-slope - first).to(gl.bfloat16).to(gl.float32)
    third = -slope - first - second
    return gl.where(cols == 0, first, gl.where(cols == 1, second, gl.where(cols == 2, third, 0.0))).to(gl.bfloat16)


@gluon.jit
def _row_bias(part, n_tile, lengths, slope, TILE_N: gl.constexpr):
    """The bias of each row in the middle of a step's keys, to which the product adds the rest."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, columns.layout_of(TILE_N)))
    return slope * (part.row_begin + lengths.seqlen_k - lengths.seqlen_q - n_tile * TILE_N - TILE_N // 2 + i).to(gl.float32)


@gluon.jit
def _start_scores(ring, q_slot, q_left, bias, step, variant: gl.constexpr, KEYS: gl.constexpr, LAST: gl.constexpr = False):
    """Start q kᵀ of a step's first KEYS keys, or LAST, of LIVE_D columns, and what adds the bias; the keys must be there.

    q_left: left half of q, and the slot has the right one; None: all of it. bias: `_bias_operand`, or None; not beside q_left.
    """
    layout: gl.constexpr = columns.layout_of(KEYS, K=variant.K)
    TILE_N: gl.constexpr = variant.TILE_N
    LIVE_D: gl.constexpr = variant.LIVE_D
    BLOCK_D: gl.constexpr = ring.k_smem.shape[-1]
    COLS: gl.constexpr = ring.q_smem.shape[-1]
    REST: gl.constexpr = LIVE_D - COLS
    APART: gl.constexpr = ring.q_smem.shape[0] < ring.q_ready.shape[0]
    if APART:
        q = ring.q_rest_smem.index(q_slot).reshape([ROWS, REST])
    else:
        q = ring.q_smem.index(q_slot).reshape([ROWS, COLS])
    k = _some_keys(ring.k_smem.index(step % variant.NUM_STAGES).reshape([TILE_N, BLOCK_D]), KEYS, LAST)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, layout)
    if bias is not None:
        # Last: sums are cut to 24 bits at each 16 columns
        raw = columns.contract(q, k, nothing, LIVE_D, USE_ACC=False)
        return warpgroup_mma(bias, ring.bias_smem.permute((1, 0)), raw, is_async=True)
    elif q_left is None:
        return columns.contract(q, k, nothing, LIVE_D, USE_ACC=False)
    elif not APART:
        raw = warpgroup_mma(q_left, k.slice(0, COLS, dim=1).permute((1, 0)), nothing, use_acc=False, is_async=True)
        q_rest, k_rest = q.slice(0, REST, dim=1), k.slice(COLS, REST, dim=1)
        return warpgroup_mma(q_rest, k_rest.permute((1, 0)), raw, is_async=True)
    else:
        raw = warpgroup_mma(q_left, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        k_rest = _some_keys(ring.k_rest_smem.index(step % variant.NUM_STAGES).reshape([TILE_N, REST]), KEYS, LAST)
        return warpgroup_mma(q, k_rest.permute((1, 0)), raw, is_async=True)


@gluon.jit
def _start_values(ring, p, acc, step, variant: gl.constexpr, CONSUMER: gl.constexpr, pred=True):
    """Wait for the values of a step, start acc + p v, of fp8 the first p v alone, and pass the turn."""
    slot, phase = _slot(step, variant.V_STAGES)
    _wait_keys(ring.v_ready.index(slot), phase, variant.GATHERED)
    if variant.FP8:
        product = (fp8.start(p, ring.v_smem.index(slot), acc, 0),)
    else:
        product = columns.accumulate(p, ring.v_smem.index(slot).reshape([variant.TILE_N, variant.BLOCK_DV]), acc)
    _pass_turn(CONSUMER, variant.NUM_CONSUMERS, pred)
    return product


@gluon.jit
def _rows_and_heads(part, HEADS: gl.constexpr, layout: gl.constexpr):
    """Position of each row of a consumer, and its head."""
    i = gl.arange(0, ROWS, layout)
    if HEADS == 1:
        return part.row_begin + i, part.head
    else:
        return part.row_begin + i // HEADS, part.head * HEADS + i % HEADS


@gluon.constexpr_function
def _piece(keys):
    """Scores of a thread to cap at a time: half of them, which fit in its registers."""
    return ROWS.value * keys // 256


@gluon.jit
def _logits(raw, bias, part, n_tile, lengths, slope, score_params, cap, TILE_N: gl.constexpr, LAZY: gl.constexpr):
    """Logits of a step's scores, of all its keys or the first of them, but for `_row_bias`."""
    if bias is not None:
        return raw
    KEYS: gl.constexpr = raw.shape[1]
    layout: gl.constexpr = raw.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, KEYS, gl.SliceLayout(0, layout))[None, :]
    # of tiles of one head, as ALiBi has them
    diagonal = part.row_begin + lengths.seqlen_k - lengths.seqlen_q - n_tile * TILE_N
    if cap is not None:
        return softmax.capped(raw, cap, _piece(KEYS))
    else:
        # A softcap without exponentials where these and products are what takes time; not at head dim 256
        THREAD: gl.constexpr = 0 if LAZY else ROWS * KEYS // 128
        return scores.logits(raw, rows, cols, diagonal, slope, score_params, THREAD)


@gluon.jit
def _hide(logits, part, n_tile, lengths, window, variant: gl.constexpr):
    """logits, -inf where keys are hidden. Of fp8 by `columns.hide`, by which bf16 gains nothing."""
    layout: gl.constexpr = logits.type.layout
    rows = _rows_and_heads(part, variant.HEADS, gl.SliceLayout(1, layout))[0]
    first_col = n_tile * variant.TILE_N
    if variant.FP8:
        first = None
        if window.left is not None:
            first = masks.first_key(rows, lengths, window, first_col)
        return columns.hide(logits, first, masks.end_of_keys(rows, lengths, window, first_col) + gl.zeros_like(rows))
    else:
        cols = gl.arange(0, logits.shape[1], gl.SliceLayout(0, layout))[None, :]
        return gl.where(masks.visible_keys(rows[:, None], cols, lengths, window, first_col), logits, NEG_INF)


@gluon.jit
def _hide_first(logits, part, n_tile, lengths, window, variant: gl.constexpr, HALF_SEEN: gl.constexpr):
    """`_hide` of a first tile. CUT_LAST: no key of it lies left of the window. HALF_SEEN: then its left half is seen."""
    HEADS: gl.constexpr = variant.HEADS
    TILE_N: gl.constexpr = variant.TILE_N
    if variant.CUT_LAST:
        layout: gl.constexpr = logits.type.layout
        rows = _rows_and_heads(part, HEADS, gl.SliceLayout(1, layout))[0][:, None]
        cols = gl.arange(0, logits.shape[1], gl.SliceLayout(0, layout))[None, :]
        seen = masks.visible_keys(rows, cols, lengths, Window(None, window.right), n_tile * TILE_N)
        if HALF_SEEN:
            # The compiler knows which: of a column's bits only the last few depend on the thread
            seen = seen | (cols < TILE_N // 2)
        return gl.where(seen, logits, NEG_INF)
    else:
        return _hide(logits, part, n_tile, lengths, window, variant)


@gluon.jit
def _hide_left(logits, part, n_tile, lengths, window, HEADS: gl.constexpr, TILE_N: gl.constexpr, HALF_SEEN: gl.constexpr):
    """logits of a tile's last keys, -inf left of the window; the rest is seen, and with HALF_SEEN all of the right half."""
    layout: gl.constexpr = logits.type.layout
    rows = _rows_and_heads(part, HEADS, gl.SliceLayout(1, layout))[0][:, None]
    cols = gl.arange(0, logits.shape[1], gl.SliceLayout(0, layout))[None, :]
    seen = masks.right_of_left_edge(rows, cols, lengths, window, (n_tile + 1) * TILE_N - logits.shape[1])
    if HALF_SEEN:
        seen = seen | (cols >= TILE_N // 2)
    return gl.where(seen, logits, NEG_INF)


@gluon.jit
def _hide_some(logits, part, n_tile, lengths, window, variant: gl.constexpr, MASKED: gl.constexpr, CUT: gl.constexpr,
               HALF_SEEN: gl.constexpr):  # fmt: skip
    """logits of a step, -inf where keys are hidden. MASKED, CUT, HALF_SEEN: as for `_absorb_tile`."""
    HEADS: gl.constexpr = variant.HEADS
    TILE_N: gl.constexpr = variant.TILE_N
    if CUT:
        logits = _hide_left(logits, part, n_tile, lengths, window, HEADS, TILE_N, HALF_SEEN)
    elif MASKED:
        # In one loop: p from another one would be taken apart and put together again in every step
        if (n_tile < part.full_begin) | (n_tile >= part.full_end):
            logits = _hide(logits, part, n_tile, lengths, window, variant)
    return logits


@gluon.jit
def _keep_bits(part, n_tile, stream, dropout, num_heads, TILE_N: gl.constexpr):
    """Which weights of a step dropout keeps, for `_as_operand`; without dropout a placeholder. Under products."""
    if dropout.rng_state is None:
        return 0
    else:
        stream = RandomStream(stream.seed, (part.batch * num_heads + part.head).to(gl.uint32), stream.offset)
        return dropouts.keep_bits(part.row_begin, n_tile * TILE_N, stream, dropout, TILE_N)


@gluon.jit
def _as_operand(p, kept, dropout, ring, acc):
    """p in the dtype of v, as the left operand of p v."""
    if ring.v_smem.dtype.is_fp8():
        return fp8.weights(p)
    else:
        p = p.to(ring.v_smem.dtype)
        if dropout.rng_state is not None:
            p = dropouts.drop(p, kept)
        return columns.as_operand(p, acc[0])


@gluon.jit
def _update(state, logits, scale_log2, row_bias, LAZY: gl.constexpr, MASKED: gl.constexpr, HOLD: gl.constexpr,
            FP8: gl.constexpr):  # fmt: skip
    """Softmax of one step. Nothing that follows waits before all exponentials are done (LAZY), or a quarter of them (HOLD);
    ptxas moves waits up."""
    if LAZY:
        state, p, correction = softmax.update_lazily(state, logits, scale_log2, MASKED)
        row_sum = gl.inline_asm_elementwise(_HOLD, "=r,=r,r,r", [state.row_sum], dtype=gl.float32, is_pure=False, pack=2)
        return softmax.OnlineSoftmax(state.row_max, row_sum), p, correction
    else:
        return softmax.update_apart(state, logits, scale_log2, MASKED, HOLD, row_bias, fp8.TOP if FP8 else 0)


@gluon.jit
def _begin(logits, scale_log2, row_bias, TILE_N: gl.constexpr, LAZY: gl.constexpr, MASKED: gl.constexpr,
           FP8: gl.constexpr):  # fmt: skip
    """State and p of a first step, whose keys past the columns of logits are hidden."""
    if LAZY:
        return softmax.begin(logits, scale_log2, MASKED)
    else:
        state, p = softmax.begin_apart(logits, scale_log2, MASKED, row_bias, fp8.TOP if FP8 else 0)
        if logits.shape[1] == TILE_N:
            return state, p
        else:
            return softmax.widened(state, p, columns.layout_of(TILE_N))


@gluon.jit
def _first(raw, bias, part, lengths, window, slope, score_params, cap, variant: gl.constexpr, HALF_SEEN: gl.constexpr):
    """State and p of the first step of a part. HALF_SEEN: of `_hide_first`."""
    TILE_N: gl.constexpr = variant.TILE_N
    n_tile = part.end - 1
    if variant.BOUNDED:
        if variant.MASK_FIRST:
            logits = softmax.capped(raw, cap, _piece(raw.shape[1]))
            p, row_sum = softmax.bounded_of(_hide(logits, part, n_tile, lengths, window, variant))
        else:
            p, row_sum = softmax.bounded(raw, cap, _piece(raw.shape[1]))
        return softmax.begin_bounded(p, row_sum), p
    else:
        logits = _logits(raw, bias, part, n_tile, lengths, slope, score_params, cap, TILE_N, variant.LAZY)
        if variant.MASK_FIRST:
            logits = _hide_first(logits, part, n_tile, lengths, window, variant, HALF_SEEN)
        row_bias = None
        if bias is not None:
            row_bias = _row_bias(part, n_tile, lengths, slope, TILE_N)
        return _begin(logits, scores.scale_log2(score_params), row_bias, TILE_N, variant.LAZY, variant.MASK_FIRST, variant.FP8)


@gluon.jit
def _absorb_tile(
    ring, q_slot, q_left, bias, state, acc, correction, p, step, part, n_tile, lengths, window, slope, score_params, cap,
    stream, dropout, num_heads, variant: gl.constexpr, CONSUMER: gl.constexpr, MASKED: gl.constexpr, KEYS: gl.constexpr,
    CUT: gl.constexpr = False, HALF_SEEN: gl.constexpr = False,
):  # fmt: skip
    """Scores and softmax of one step, and the product of the step before. MASKED: its tile may have hidden keys.

    correction: what acc of fp8 is to be multiplied with before that product is added to it.
    CUT: a window's left edge cuts its tile, of which the last KEYS may be seen, and with HALF_SEEN the right half is.
    """
    TILE_N: gl.constexpr = variant.TILE_N
    LAZY: gl.constexpr = variant.LAZY
    NUM_STAGES: gl.constexpr = variant.NUM_STAGES
    slot, phase = _slot(step, NUM_STAGES)
    _wait_keys(ring.k_ready.index(slot), phase, variant.GATHERED)
    _wait_turn(CONSUMER)
    raw = _start_scores(ring, q_slot, q_left, bias, step, variant, KEYS, CUT)
    product = _start_values(ring, p, acc, step - 1, variant, CONSUMER)
    kept = _keep_bits(part, n_tile, stream, dropout, num_heads, TILE_N)
    words = p
    SEVERAL: gl.constexpr = variant.FP8 and len(acc) > 1
    if SEVERAL:
        # Both: beside a product under way there would not be registers for the mask
        raw, done = warpgroup_mma_wait(0, deps=[raw, product[0]])
        acc = fp8.add(acc, correction, (done,), 0)
    else:
        raw = warpgroup_mma_wait(len(product), deps=[raw])
    mbarrier.arrive(ring.k_free.index(slot), count=1)
    if variant.BOUNDED:
        if CUT or MASKED:
            logits = softmax.capped(raw, cap, _piece(raw.shape[1]))
            logits = _hide_some(logits, part, n_tile, lengths, window, variant, MASKED, CUT, HALF_SEEN)
            p, row_sum = softmax.bounded_of(logits)
        else:
            p, row_sum = softmax.bounded(raw, cap, _piece(raw.shape[1]))
        state = softmax.update_bounded(state, row_sum)
        acc = columns.wait(product)
        mbarrier.arrive(ring.v_free.index((step - 1) % variant.V_STAGES), count=1)
        return state, acc, correction, _as_operand(p, kept, dropout, ring, acc)
    else:
        logits = _logits(raw, bias, part, n_tile, lengths, slope, score_params, cap, TILE_N, LAZY)
        row_bias = None
        if bias is not None:
            row_bias = _row_bias(part, n_tile, lengths, slope, TILE_N)
        logits = _hide_some(logits, part, n_tile, lengths, window, variant, MASKED, CUT, HALF_SEEN)
        turned = ring.v_smem.index((step - 1) % variant.V_STAGES)
        if SEVERAL:
            product = fp8.start_some(words, turned, acc, 1)
        HOLD: gl.constexpr = variant.NUM_CONSUMERS == 2 and score_params.softcap is None and dropout.rng_state is None
        if KEYS < TILE_N:
            state = softmax.relaid(state, logits)
        state, p, next_correction = _update(state, logits, scores.scale_log2(score_params), row_bias, LAZY, MASKED or CUT, HOLD,
                                            variant.FP8)  # fmt: skip
        if KEYS < TILE_N:
            state, p = softmax.widened(state, p, columns.layout_of(TILE_N), True)
        if variant.FP8:
            acc = fp8.add_rest(acc, correction, product, words, turned, 1 if SEVERAL else 0)
        else:
            product = columns.wait(product)
        mbarrier.arrive(ring.v_free.index((step - 1) % variant.V_STAGES), count=1)
        if variant.FP8:
            correction = next_correction
        else:
            acc = columns.scale_rarely(product, next_correction) if LAZY else columns.scale(product, next_correction)
        return state, acc, correction, _as_operand(p, kept, dropout, ring, acc)


@gluon.jit
def _skip_keys(ring, step, count, variant: gl.constexpr, CONSUMER: gl.constexpr):
    """Hand the keys of `count` steps back. Each must have come, or the arrival would count for the fill before."""
    for i in range(step, step + count):
        slot, phase = _slot(i, variant.NUM_STAGES)
        mbarrier.wait(ring.k_ready.index(slot), phase)
        _wait_turn(CONSUMER)
        _pass_turn(CONSUMER, variant.NUM_CONSUMERS)
        mbarrier.arrive(ring.k_free.index(slot), count=1)


@gluon.jit
def _skip_values(ring, step, count, V_STAGES: gl.constexpr):
    for i in range(step, step + count):
        slot, phase = _slot(i, V_STAGES)
        mbarrier.wait(ring.v_ready.index(slot), phase)
        mbarrier.arrive(ring.v_free.index(slot), count=1)


@gluon.jit
def _store(out_desc, lse, ring, acc, row_lse, part, lengths, slot, left, HEADS: gl.constexpr, PACKED: gl.constexpr):
    """Write 64 rows of out, through shared memory, and of lse. The store of out is still under way at the end.

    left: slot for the left half of out, and the other has the right one; for all of it where the rest of q is apart. None: the
    other has all of it.
    """
    COLS: gl.constexpr = out_desc.block_type.shape[-1]
    APART: gl.constexpr = ring.q_smem.shape[0] < ring.q_ready.shape[0]
    HALVES: gl.constexpr = left is not None and not APART
    buffer = ring.out_smem.index(_left_slot(ring, left) if APART else slot)
    tile = buffer.reshape([ROWS, COLS])
    if not HALVES:
        columns.store(acc, tile)
    else:
        left_buffer = ring.out_smem.index(left)
        out_left, out_right = columns.halves(acc[0]) if len(acc) == 1 else acc
        left_buffer.reshape([ROWS, COLS]).store(out_left.to(tile.dtype))
        tile.slice(0, out_right.shape[1], dim=1).store(out_right.to(tile.dtype))
    fence_async_shared()
    partition_barrier()
    place, row = boxes.place(part.batch, lengths.start_q, lengths.seqlen_q, part.row_begin, PACKED)
    head, row = _head_and_row(part.head, row, HEADS)
    if not HALVES:
        boxes.store(out_desc, buffer, place, head, row, PACKED)
    else:
        boxes.store(out_desc, left_buffer, place, head, row, PACKED)
        boxes.store(out_desc, buffer, place, head, row, PACKED, COLS)
    # After the fence, which waits for stores before it
    layout: gl.constexpr = row_lse.type.layout
    rows, heads = _rows_and_heads(part, HEADS, layout)
    if PACKED:
        head_lse = lse.ptr + heads.to(gl.int64) * lse.stride + lengths.start_q
        if lse.apart is not None:
            head_lse += part.batch * lse.apart.to(gl.int64)
    else:
        head_lse = lse.ptr + (part.batch * lse.num_heads + heads).to(gl.int64) * lse.stride
    gl.store(head_lse + rows, row_lse, mask=rows < lengths.seqlen_q)


@gluon.jit
def _scales(score_params, descales, part, head, variant: gl.constexpr):
    """Of a tile: what scores are multiplied with, and what values are."""
    if variant.FP8:
        head = head // variant.GROUP_SIZE
        scale = scores.descaled(score_params.scale, descales, part.batch, head)
        if score_params.prescaled is None:
            # Of a head of zeros it may be 0, and 0 * -inf is nan; slopes are divided by it
            if score_params.alibi_slopes is None:
                scale = gl.maximum(scale, _LEAST_SCALE)
            else:
                scale = gl.maximum(scale, _LEAST_UNIT)
        return scale, per_head(descales.v, part.batch, head)
    else:
        return score_params.scale, 1.0


@gluon.jit
def _compute(out_desc, lse, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, descales,
             variant: gl.constexpr, CONSUMER: gl.constexpr):  # fmt: skip
    """A consumer: 64 rows of each tile of this program."""
    HEADS: gl.constexpr = variant.HEADS
    TILE_N: gl.constexpr = variant.TILE_N
    NUM_CONSUMERS: gl.constexpr = variant.NUM_CONSUMERS
    NUM_STAGES: gl.constexpr = variant.NUM_STAGES
    PACKED: gl.constexpr = variant.PACKED
    SPLIT_Q: gl.constexpr = variant.SPLIT_Q
    OWN_OUT: gl.constexpr = variant.OWN_OUT
    CUT_LAST: gl.constexpr = variant.CUT_LAST
    HALF_FIRST: gl.constexpr = variant.HALF_FIRST
    HALF_LAST: gl.constexpr = variant.HALF_LAST
    PLACE: gl.constexpr = _place(CONSUMER, variant)
    KEYS: gl.constexpr = TILE_N // 2 if HALF_FIRST and PLACE == 0 else TILE_N
    HALF_SEEN: gl.constexpr = HALF_FIRST and PLACE == 1
    LAST_KEYS: gl.constexpr = TILE_N // 2 if HALF_LAST == PLACE else TILE_N
    LAST_HALF_SEEN: gl.constexpr = HALF_LAST >= 0 and HALF_LAST != PLACE
    if variant.FP8:
        # Calls on a cache: where diagonals and edges lie is not known
        gl.static_assert(not HALF_FIRST and not CUT_LAST)
        no_values = fp8.accumulators(ROWS, variant.LIVE_DV)
    else:
        no_values = columns.accumulators(ROWS, variant.BLOCK_DV, variant.LIVE_DV)
    if cap is not None:
        cap = scores.cap_of_lane(cap)
    stream = dropouts.load_stream(dropout, num_heads)

    if CONSUMER == NUM_CONSUMERS - 1:
        _pass_turn(CONSUMER, NUM_CONSUMERS)
    whole, lengths = _receive(ring, lengths, 0, PACKED)
    # A packed call may have fewer tiles than programs: then nothing comes.
    some = whole.end > 0
    part = _consumer_part(whole, lengths, window, HEADS, TILE_N, PLACE)
    head = _head_of(part, num_heads, variant)
    scale, value_scale = _scales(score_params, descales, part, head, variant)
    first_params = ScoreParams(scale, *score_params[1:])
    slope = scores.load_slope(first_params, part.batch, head)
    bias = None
    if variant.BIAS:
        bias = _bias_operand(slope, TILE_N)
    # Steps before the first of this tile whose values are still to be handed back
    skipped = whole.end - part.end
    _skip_keys(ring, 0, skipped, variant, CONSUMER)
    step = skipped
    slot, phase = _slot(step, NUM_STAGES)
    q_slot, q_phase, left, left_phase = _q_slots(0, CONSUMER, NUM_CONSUMERS)
    mbarrier.wait(ring.q_ready.index(q_slot), q_phase, pred=some)
    q_left = None
    if SPLIT_Q:
        q_left = _load_left(ring, left, left_phase, TILE_N, some)
    _wait_keys(ring.k_ready.index(slot), phase, variant.GATHERED, some)
    _wait_turn(CONSUMER, some)
    raw = _start_scores(ring, q_slot, q_left, bias, step, variant, KEYS)
    _pass_turn(CONSUMER, NUM_CONSUMERS, some)
    kept = _keep_bits(part, part.end - 1, stream, dropout, num_heads, TILE_N)
    raw = warpgroup_mma_wait(0, deps=[raw])
    mbarrier.arrive(ring.k_free.index(slot), count=1, pred=some)
    if SPLIT_Q:
        # Not before: it may still be on its way to registers, and TMA does not wait for that
        mbarrier.arrive(ring.q_free.index(left), count=1, pred=some)
    state, p = _first(raw, bias, part, lengths, window, slope, first_params, cap, variant, HALF_SEEN)
    p = _as_operand(p, kept, dropout, ring, no_values)
    index = 0
    while whole.end > 0:
        _skip_values(ring, step - skipped, skipped, variant.V_STAGES)
        acc = no_values
        correction = gl.full([ROWS], 0.0, gl.float32, state.row_max.type.layout) if variant.FP8 else 0
        params = ScoreParams(scale, *score_params[1:])
        # step of key tile n is last_step - n
        last_step = step + part.end - 1
        # 1 where a window's left edge cuts the last tile: outside of the loop, which has no mask then
        cut = part.full_begin - part.begin if CUT_LAST else 0
        for step in range(last_step - part.end + 2, last_step - part.begin + 1 - cut):
            state, acc, correction, p = _absorb_tile(
                ring, q_slot, q_left, bias, state, acc, correction, p, step, part, last_step - step, lengths, window, slope,
                params, cap, stream, dropout, num_heads, variant, CONSUMER, variant.MASK_OTHERS, TILE_N,
            )  # fmt: skip
        last_step = last_step - part.begin
        if CUT_LAST:
            if cut > 0:
                state, acc, correction, p = _absorb_tile(
                    ring, q_slot, q_left, bias, state, acc, correction, p, last_step, part, part.begin, lengths, window,
                    slope, params, cap, stream, dropout, num_heads, variant, CONSUMER, False, LAST_KEYS, True,
                    LAST_HALF_SEEN,
                )  # fmt: skip

        # The border: the first scores of the next tile with the last product of this one
        index += 1
        next_whole, next_lengths = _receive(ring, lengths, index, PACKED)
        more = next_whole.end > 0
        next_part = _consumer_part(next_whole, next_lengths, window, HEADS, TILE_N, PLACE)
        next_head = _head_of(next_part, num_heads, variant)
        next_scale, next_value_scale = scale, value_scale
        if variant.FP8:
            if more:
                next_scale, next_value_scale = _scales(score_params, descales, next_part, next_head, variant)
        next_params = ScoreParams(next_scale, *score_params[1:])
        next_slope = scores.load_slope(next_params, next_part.batch, next_head) if more else slope
        if variant.BIAS:
            bias = _bias_operand(next_slope, TILE_N)
        skipped = part.begin - whole.begin
        if more:
            skipped += next_whole.end - next_part.end
        _skip_keys(ring, last_step + 1, skipped, variant, CONSUMER)
        step = last_step + 1 + skipped
        slot, phase = _slot(step, NUM_STAGES)
        next_q_slot, q_phase, left, left_phase = _q_slots(index, CONSUMER, NUM_CONSUMERS)
        _wait_turn(CONSUMER, more)
        mbarrier.wait(ring.q_ready.index(next_q_slot), q_phase, pred=more)
        if SPLIT_Q:
            q_left = _load_left(ring, left, left_phase, TILE_N, more)
        _wait_keys(ring.k_ready.index(slot), phase, variant.GATHERED, more)
        # After the last tile these products are of whatever the slots hold, and nothing reads them.
        raw = _start_scores(ring, next_q_slot, q_left, bias, step, variant, KEYS)
        product = _start_values(ring, p, acc, last_step, variant, CONSUMER, more)
        kept = _keep_bits(next_part, next_part.end - 1, stream, dropout, num_heads, TILE_N)
        words = p
        if variant.FP8:
            # Both: beside a product under way there would not be registers for the first softmax
            raw, done = warpgroup_mma_wait(0, deps=[raw, product[0]])
            acc = fp8.add(acc, correction, (done,), 0)
        else:
            raw = warpgroup_mma_wait(len(product), deps=[raw])
        mbarrier.arrive(ring.k_free.index(slot), count=1, pred=more)
        if OWN_OUT:
            mbarrier.arrive(ring.q_free.index(q_slot), count=1)
            if SPLIT_Q:
                mbarrier.arrive(ring.q_free.index(left), count=1)
        next_state, p = _first(raw, bias, next_part, next_lengths, window, next_slope, next_params, cap, variant, HALF_SEEN)
        if variant.FP8:
            # Before any word of p is written: those are a product's registers (ptxas: C7513)
            if len(acc) > 1:
                turned = ring.v_smem.index(last_step % variant.V_STAGES)
                acc = fp8.add_rest(acc, correction, fp8.start_some(words, turned, acc, 1), words, turned, 1)
        p = _as_operand(p, kept, dropout, ring, acc)
        if OWN_OUT:
            tma_store_wait(0)
        if not variant.FP8:
            acc = columns.wait(product)
        mbarrier.arrive(ring.v_free.index(last_step % variant.V_STAGES), count=1)
        if not variant.LAZY or variant.BOUNDED:
            state = softmax.join(state)
        if sinks is not None:
            row_layout: gl.constexpr = state.row_max.type.layout
            heads = _rows_and_heads(part, HEADS, row_layout)[1]
            sink = gl.load(sinks + (heads % (num_heads * HEADS) if variant.CUTS else heads)).to(gl.float32)
            if variant.CUTS:
                # Of parts the first one has it
                sink = gl.where(heads < num_heads * HEADS, sink, NEG_INF)
            state, correction = softmax.absorb_sink(state, sink)
            acc = columns.scale(acc, correction)
        inverse, row_lse = softmax.finish(state)
        if dropout.rng_state is not None:
            inverse = inverse * dropout.keep_scale
        if variant.FP8:
            inverse = inverse * value_scale
        _store(out_desc, lse, ring, columns.scale(acc, inverse), row_lse, part, lengths,
               CONSUMER if OWN_OUT else q_slot, left if SPLIT_Q and not OWN_OUT else None, HEADS, PACKED)  # fmt: skip
        if not OWN_OUT:
            tma_store_wait(0)
            mbarrier.arrive(ring.q_free.index(q_slot), count=1)
            if SPLIT_Q:
                mbarrier.arrive(ring.q_free.index(left), count=1)
        q_slot = next_q_slot
        state = next_state
        scale = next_scale
        value_scale = next_value_scale
        slope = next_slope
        whole = next_whole
        part = next_part
        lengths = next_lengths
    tma_store_wait(0)


@gluon.jit
def _allocate(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc, variant: gl.constexpr):
    TILE_N: gl.constexpr = variant.TILE_N
    NUM_CONSUMERS: gl.constexpr = variant.NUM_CONSUMERS
    NUM_STAGES: gl.constexpr = variant.NUM_STAGES
    V_STAGES: gl.constexpr = variant.V_STAGES
    LIVE_D: gl.constexpr = variant.LIVE_D
    # What fills a slot of keys: TMA, told by one thread, or the producer's threads
    FILLS: gl.constexpr = 128 if variant.GATHERED else 1
    # Boxes of a page, or of a part of one
    PIECES: gl.constexpr = TILE_N // k_desc.block_type.shape[-2]
    Q_SLOTS: gl.constexpr = NUM_CONSUMERS * (3 if variant.SPLIT_Q else 2)
    LEFT: gl.constexpr = variant.BLOCK_D // 2 if variant.SPLIT_Q else variant.BLOCK_D
    if q_rest_desc is None:
        q_smem = boxes.allocate(q_desc, Q_SLOTS, LEFT)
        q_rest_smem = q_smem
    else:
        q_smem = boxes.allocate(q_desc, NUM_CONSUMERS, LEFT)
        q_rest_smem = boxes.allocate(q_rest_desc, 2 * NUM_CONSUMERS, LIVE_D - LEFT)
    if variant.OWN_OUT:
        out_smem = boxes.allocate(out_desc, NUM_CONSUMERS, out_desc.block_type.shape[-1])
    else:
        out_smem = q_smem
    if variant.BIAS:
        bias_smem = _bias_columns(TILE_N)
    else:
        bias_smem = q_smem
    WORDS: gl.constexpr = TILE_SLOTS * (TILE_WORDS + variant.VALUES_APART)
    tile_smem = gl.allocate_shared_memory(gl.int32, [WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if k_rest_desc is None:
        k_smem = boxes.allocate(k_desc, NUM_STAGES, variant.BLOCK_D, PIECES)
        k_rest_smem = k_smem
    else:
        k_smem = boxes.allocate(k_desc, NUM_STAGES, LEFT, PIECES)
        k_rest_smem = boxes.allocate(k_rest_desc, NUM_STAGES, LIVE_D - LEFT, PIECES)
    raw_smem = boxes.allocate(v_desc, variant.RAW_STAGES, variant.BLOCK_DV, PIECES)
    q_ready, q_free = allocate_barriers(Q_SLOTS, 1), allocate_barriers(Q_SLOTS, 1)
    k_ready, k_free = allocate_barriers(NUM_STAGES, FILLS), allocate_barriers(NUM_STAGES, NUM_CONSUMERS)
    v_ready, v_free = allocate_barriers(V_STAGES, FILLS), allocate_barriers(V_STAGES, NUM_CONSUMERS)
    if variant.FP8:
        v_smem = fp8.allocate_turned(V_STAGES, TILE_N, variant.BLOCK_DV)
        raw_ready, raw_free = allocate_barriers(variant.RAW_STAGES, 1), allocate_barriers(variant.RAW_STAGES, 1)
    else:
        v_smem = raw_smem
        raw_ready, raw_free = v_ready, v_free
    return Ring(
        q_smem, q_rest_smem, k_smem, k_rest_smem, v_smem, raw_smem, out_smem, bias_smem, tile_smem,
        q_ready, q_free, k_ready, k_free, v_ready, v_free, raw_ready, raw_free,
        allocate_barriers(TILE_SLOTS, 1), allocate_barriers(TILE_SLOTS, NUM_CONSUMERS + variant.VALUES_APART + variant.FP8),
    )  # fmt: skip


@gluon.jit(do_not_specialize=[
    "table_stride", "num_pages", "lse_stride", "lse_apart", "seqlen_q", "seqlen_k", "num_tiles", "num_heads", "total_heads",
    "heads_per_group", "tail_heads", "parts",
])  # fmt: skip
def attention_forward(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc, lse, counter, table, pages, table_stride, num_pages, window,
    score_params, cap, sinks, dropout, lse_stride, lse_apart, seqlen_q, seqlen_k, num_tiles, num_heads, total_heads,
    heads_per_group, tail_heads, parts, descales, GROUP_SIZE: gl.constexpr, HEADS: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr, LIVE_D: gl.constexpr, LIVE_DV: gl.constexpr, TILE_N: gl.constexpr, PAGE_SIZE: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr, SPLIT_Q: gl.constexpr, NUM_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    RAW_STAGES: gl.constexpr, TURN_WARPS: gl.constexpr, TURN_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr, LOAD_WARPS: gl.constexpr, LAZY: gl.constexpr, MASK_FIRST: gl.constexpr,
    MASK_OTHERS: gl.constexpr, OWN_OUT: gl.constexpr, HALF_FIRST: gl.constexpr, CUT_LAST: gl.constexpr, HALF_LAST: gl.constexpr,
    LAST_ROWS_FIRST: gl.constexpr, BIAS: gl.constexpr, BOUNDED: gl.constexpr, GATHERED: gl.constexpr,
    CHAINED: gl.constexpr,
):  # fmt: skip
    """x_desc: TMA descriptors of arguments.py; of the rest, where that is apart (`HopperConfig`), else None. lse: pointer.
    counter: int32 (2,) of 0. cap: of `scores.cap_of`, or None.

    table: of `schedule`, or None. In a packed call heads_per_group counts rows of keys. pages, table_stride, num_pages: of
    `cache.Pages` of PAGE_SIZE tokens, or None. parts: of the keys of a tile, each with heads of out and lse of its own, which
    `device.combine` merges, or None (without dropout). lse_stride, lse_apart: see LseRows. Constants: see Variant.
    REGISTERS, LOAD_REGISTERS: of a thread of consumers and of the LOAD_WARPS that load; where these are the first warps they
    get the registers that are left. TURN_REGISTERS: of the TURN_WARPS that turn fp8 values, or 0. CHAINED: see chain.py.
    descales: `scores.Descales` of fp8, else None.
    """
    VALUES_APART: gl.constexpr = pages is not None and not GATHERED
    variant: gl.constexpr = _variant(
        GROUP_SIZE, HEADS, BLOCK_D, BLOCK_DV, LIVE_D, LIVE_DV, TILE_N, PAGE_SIZE, GATHERED, NUM_CONSUMERS, LOAD_WARPS,
        VALUES_APART, SPLIT_Q, NUM_STAGES, V_STAGES, RAW_STAGES, LAZY, MASK_FIRST, MASK_OTHERS, OWN_OUT, HALF_FIRST, CUT_LAST,
        HALF_LAST, LAST_ROWS_FIRST, BIAS, BOUNDED, table is not None, parts is not None, TURN_WARPS,
    )  # fmt: skip
    ring = _allocate(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc, variant)
    chain.begin(CHAINED)
    if table is not None:
        num_tiles = gl.load(table)
    if pages is not None:
        pages = Pages(*pages, table_stride, num_pages)
    order = Order(num_tiles, num_heads, total_heads, heads_per_group, tail_heads)
    nothing = seqlen_q * 0
    lengths = Lengths(nothing, nothing, seqlen_q, seqlen_k)
    out_heads = num_heads * HEADS
    if parts is not None:
        out_heads = out_heads * parts
    rows = LseRows(lse, lse_stride, lse_apart, out_heads)
    # Three consumers of 16 bits: the warps that load get the registers that are left
    LOAD_FIRST: gl.constexpr = NUM_CONSUMERS == 3 and pages is None and not variant.FP8
    specialize([
        (LOAD_FIRST, _load, (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, ring, counter, order, table, pages, lengths,
                             window, parts, variant), LOAD_WARPS, LOAD_REGISTERS),
        (NUM_CONSUMERS, _compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout,
                                   descales, variant), 4, REGISTERS),
        (variant.FP8, _turn_values, (ring, lengths, variant), TURN_WARPS, TURN_REGISTERS),
        (not LOAD_FIRST, _load, (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, ring, counter, order, table, pages, lengths,
                                 window, parts, variant), LOAD_WARPS, LOAD_REGISTERS),
        (VALUES_APART, _load_apart, (v_desc, ring, pages, lengths, num_heads, variant), LOAD_WARPS, LOAD_REGISTERS),
    ])  # fmt: skip


def launch(problem, config, operands):
    """Run the kernel. config: HopperConfig. Returns out and lse as `flashtile.attention` describes them."""
    return bind_forward(attention_forward, problem, config)(operands)
