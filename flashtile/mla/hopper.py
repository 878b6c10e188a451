"""The Hopper kernel of dense latent attention decode: warp-specialised, TMA and asynchronous wgmma, in Gluon.

    partition        warps   does
    _load (default)  4       all TMA loads of the program's part: queries of a sequence, key tiles
    _compute x 2     4 each  scores and softmax of every second key tile; of all tiles, one half of the 512 output columns

64 rows by 512 columns of output are 128 KiB: two partitions hold half each, and both need the probabilities of all keys. So
tile i is scored by partition i % 2, which hands its probabilities to the other through shared memory, in the place of the
tile's rotary part, of no use by then. With them travels the softmax state, so that both halves keep one reference:

    scorer(i):  half of q kᵀ(i);  acc += p(i-1) c(i-1);  the rest of q kᵀ(i);  p(i), row_max, row_sum;  acc += p(i) c(i)

While one computes its probabilities, products of the other run.

Queries and two key tiles fill the shared memory. Tile i + 2 takes the slot of tile i half by half, as soon as its partition has
multiplied with that half: half h of a slot belongs to partition h, and a scorer begins with its own half, which comes first.

A tile that a sequence ends in is filled up with zeros by TMA (`cache_descriptor`), so that NaN in unused slots is never read.

Refuses what is not dense, packed caches, several latent heads, pages that are no multiple of 64 tokens, and strides that TMA
does not take; the portable kernel takes those.

How fast: benchmarks/results/nvidia-h200/mla-hopper-first-look.json; with many keys 2.6 to 2.9 times the portable kernel at 128
heads, and 0.94 of the measured copy bandwidth at 16 heads. What it costs, by counting, in clocks of an SM at 4096 FLOP: the
products of a tile 2176, its traffic in shared memory 2340 (the scores alone read 128 bytes a clock, all there is), so 0.93 of
the product rate is the most that this form can reach. Found on the way (H200; batch 128, 8192 keys, 128 heads; not recorded):
- the product with the given tile behind all scores of the own tile, as FlashAttention-3 overlaps them, 628 us; between the two
  halves of the scores, so that the other half of its slot is free 576 clocks earlier, 509 us.
- the slot told as a constant: the compiler keeps the addresses of all products, and spills 520 bytes.
Not measured yet: the rotary part of q in registers (no spills; 3% less traffic); the length of a part's next sequence asked for
one round ahead (as the round's length, see `_segment`); two or more rows at once in `portable.merge`.

Source: the form of the schedule is FlashMLA's ("seesaw"), by its description.
"""

from typing import Any, NamedTuple

import torch

from flashtile.device import softmax
from flashtile.device.compat import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    rebased,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.device.numerics import LN_2, LOG2_E, NEG_INF
from flashtile.mla import cache, portable, schedule
from flashtile.mla.relaunch import MAX_PREPARED, Prepared, launch_key

ROWS = gl.constexpr(64)
TILE = schedule.TILE
HALF = gl.constexpr(256)
LATENT = gl.constexpr(512)
# What a cache descriptor takes for the number of rows; see `cache_descriptor`
MANY_ROWS = gl.constexpr(2**30)
REGISTERS = gl.constexpr(240)


class Ring(NamedTuple):
    """Shared memory and its barriers: x_ready when x is filled, x_free when it may be filled again."""

    # two halves
    q_smem: Any
    q_rope_smem: Any
    # slot * 2 + half
    latent_smem: Any
    # rotary part of a slot, then its probabilities
    rope_smem: Any
    # softmax state after the tile of a slot
    max_smem: Any
    sum_smem: Any
    q_ready: Any
    q_free: Any
    latent_ready: Any
    latent_free: Any
    p_ready: Any


class Segment(NamedTuple):
    """Tiles [first, end) of one sequence."""

    sequence: Any
    length: Any
    first: Any
    end: Any
    num_tiles: Any


@gluon.jit
def _segment(cache_seqlens, part, index, max_length):
    """The index-th sequence of a part.

    Made anew in each round: what is carried from round to round and only used in bounds of an inner loop, Gluon 3.6 forgets to
    carry, and the partitions disagree about the number of tiles.
    """
    begin, begin_tile, last, end_tile = part
    sequence = begin + index
    length = schedule.key_length(cache_seqlens, sequence, max_length, 1)
    num_tiles = schedule.num_tiles_of(length)
    first, end = schedule.part_tiles(sequence, num_tiles, begin, begin_tile, last, end_tile)
    return Segment(sequence, length, first, gl.maximum(end, first), num_tiles)


@gluon.jit
def _load_keys(desc, smem, page, row, valid, column, ready):
    """Half of a tile, or its rotary part: 64 tokens from `row` of a page on, zeros behind the first `valid`."""
    tma_load(desc, [MANY_ROWS, row + valid, page, MANY_ROWS - valid, column], ready, smem)


@gluon.jit
def _slot(step):
    """(slot, phase of its ready barriers) of a tile. The slot is also the number of the partition that scores it.

    The compiler must not know that: it would keep the address of every product in a register, and spill them.
    """
    step = gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)
    return step & 1, (step >> 1) & 1


@gluon.jit
def _load(q_desc, q_rope_desc, latent_desc, rope_desc, ring, cache_seqlens, block_table, table_stride, max_length, part,
          TILES_PER_PAGE: gl.constexpr, ROPE: gl.constexpr):  # fmt: skip
    """The producer."""
    m_row = gl.program_id(0) * ROWS
    begin, begin_tile, last, end_tile = part
    step = 0
    for index in range(last - begin + 1):
        segment = _segment(cache_seqlens, part, index, max_length)
        pages = block_table + segment.sequence.to(gl.int64) * table_stride
        page = gl.load(pages + segment.first // TILES_PER_PAGE, mask=segment.first * TILE < segment.length, other=0)
        mbarrier.wait(ring.q_free, (index & 1) ^ 1)
        if ROPE:
            mbarrier.expect(ring.q_ready, 2 * q_desc.block_type.nbytes + q_rope_desc.block_type.nbytes)
            tma_load(q_rope_desc, [segment.sequence, m_row, LATENT], ring.q_ready, ring.q_rope_smem)
        else:
            mbarrier.expect(ring.q_ready, 2 * q_desc.block_type.nbytes)
        tma_load(q_desc, [segment.sequence, m_row, 0], ring.q_ready, ring.q_smem.index(0))
        tma_load(q_desc, [segment.sequence, m_row, HALF], ring.q_ready, ring.q_smem.index(1))
        for tile in range(segment.first, segment.end):
            slot = step & 1
            free_phase = ((step >> 1) & 1) ^ 1
            valid = gl.minimum(segment.length - tile * TILE, TILE)
            row = (tile % TILES_PER_PAGE) * TILE
            this_page = page
            following = tile + 1
            page = gl.load(pages + following // TILES_PER_PAGE, mask=following * TILE < segment.length, other=0)
            # The scorer's half first
            own = slot * 2 + slot
            mbarrier.wait(ring.latent_free.index(own), free_phase)
            mbarrier.expect(ring.latent_ready.index(own), latent_desc.block_type.nbytes)
            _load_keys(latent_desc, ring.latent_smem.index(own), this_page, row, valid, slot * HALF,
                       ring.latent_ready.index(own))  # fmt: skip
            other = slot * 2 + 1 - slot
            ready = ring.latent_ready.index(other)
            mbarrier.wait(ring.latent_free.index(other), free_phase)
            if ROPE:
                mbarrier.expect(ready, latent_desc.block_type.nbytes + rope_desc.block_type.nbytes)
                _load_keys(rope_desc, ring.rope_smem.index(slot), this_page, row, valid, LATENT, ready)
            else:
                mbarrier.expect(ready, latent_desc.block_type.nbytes)
            _load_keys(latent_desc, ring.latent_smem.index(other), this_page, row, valid, (1 - slot) * HALF, ready)
            step += 1


@gluon.jit
def _per_row(x, acc_layout: gl.constexpr):
    return gl.convert_layout(x, gl.SliceLayout(1, acc_layout))[:, None]


@gluon.jit
def _start_own_half(ring, step):
    """Start q kᵀ of a tile of this partition: its own half of the dims, which comes first."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    slot, phase = _slot(step)
    nothing = gl.zeros([ROWS, TILE], gl.float32, layout)
    mbarrier.wait(ring.latent_ready.index(slot * 3), phase)
    k = ring.latent_smem.index(slot * 3).reshape([TILE, HALF])
    q = ring.q_smem.index(slot).reshape([ROWS, HALF])
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _start_rest(ring, raw, step, ROPE: gl.constexpr):
    """Go on with the rotary part and the other half."""
    slot, phase = _slot(step)
    other = slot * 2 + 1 - slot
    mbarrier.wait(ring.latent_ready.index(other), phase)
    if ROPE:
        k_rope = ring.rope_smem.index(slot).reshape([TILE, ROPE])
        raw = warpgroup_mma(ring.q_rope_smem.reshape([ROWS, ROPE]), k_rope.permute((1, 0)), raw, is_async=True)
    k = ring.latent_smem.index(other).reshape([TILE, HALF])
    return warpgroup_mma(ring.q_smem.index(1 - slot).reshape([ROWS, HALF]), k.permute((1, 0)), raw, is_async=True)


@gluon.jit
def _start_given(ring, state, acc, step, exists, use_acc):
    """Take the other partition's state after its tile, and start acc + p c of that tile.

    Where there is none, the state is that of no key, and the product is of anything: the next one must drop it.
    """
    acc_layout: gl.constexpr = acc.type.layout
    row_layout: gl.constexpr = state.row_max.type.layout
    slot, phase = _slot(step)
    mbarrier.wait(ring.p_ready.index(slot), phase, pred=exists)
    mbarrier.wait(ring.latent_ready.index(slot * 2 + 1 - slot), phase, pred=exists)
    row_max = gl.where(exists, ring.max_smem.index(slot).load(row_layout), NEG_INF)
    row_sum = gl.where(exists, ring.sum_smem.index(slot).load(row_layout), 0.0)
    correction = gl.exp2(state.row_max - softmax.pivot(row_max))
    acc = acc * _per_row(correction, acc_layout)
    p = ring.rope_smem.index(slot).reshape([ROWS, TILE])
    c = ring.latent_smem.index(slot * 2 + 1 - slot).reshape([TILE, HALF])
    product = warpgroup_mma(p, c, acc, use_acc=use_acc, is_async=True)
    return softmax.OnlineSoftmax(row_max, row_sum), product


@gluon.jit
def _absorb_tiles(ring, state, acc, step, first_step, masked, tile, limits, scale_log2, last, ROPE: gl.constexpr):
    """The tile before `step`, which the other partition scores, and that of `step`."""
    acc_layout: gl.constexpr = acc.type.layout
    has_given = step > first_step
    slot, _ = _slot(step)
    raw = _start_own_half(ring, step)
    state, product = _start_given(ring, state, acc, step - 1, has_given, step - 1 > first_step)
    raw = _start_rest(ring, raw, step, ROPE)
    acc = warpgroup_mma_wait(2 if ROPE else 1, deps=[product])
    mbarrier.arrive(ring.latent_free.index((1 - slot) * 2 + slot), count=1, pred=has_given)
    raw = warpgroup_mma_wait(0, deps=[raw])
    mbarrier.arrive(ring.q_free, count=1, pred=last)
    if masked:
        cols = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, raw.type.layout))
        raw = gl.where(cols[None, :] < limits[:, None], raw, NEG_INF)
    state, p, correction = softmax.update(state, raw, scale_log2, True)
    p = p.to(ring.latent_smem.dtype)
    ring.rope_smem.index(slot).reshape([ROWS, TILE]).store(p)
    ring.max_smem.index(slot).store(state.row_max)
    ring.sum_smem.index(slot).store(state.row_sum)
    fence_async_shared()
    mbarrier.arrive(ring.p_ready.index(slot), count=1)
    p = gl.convert_layout(p, gl.DotOperandLayout(0, acc_layout, 2))
    acc = acc * _per_row(correction, acc_layout)
    c = ring.latent_smem.index(slot * 3).reshape([TILE, HALF])
    product = warpgroup_mma(p, c, acc, use_acc=has_given, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(ring.latent_free.index(slot * 3), count=1)
    return state, acc


@gluon.jit
def _store(out, lse, partial_out, partial_lse, sinks, state, acc, segment, part_number, num_rows, num_heads,
           LSE_WITH_SINKS: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """Half of the columns of out, or of a partial result; partition 0 writes lse."""
    row_layout: gl.constexpr = state.row_max.type.layout
    acc_layout: gl.constexpr = acc.type.layout
    rows = gl.program_id(0) * ROWS + gl.arange(0, ROWS, row_layout)
    exists = rows < num_rows
    acc_rows = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
    columns = W * HALF + gl.arange(0, HALF, gl.SliceLayout(0, acc_layout))
    if (segment.first == 0) & (segment.end == segment.num_tiles):
        inverse, row_lse = softmax.finish(state)
        if sinks is not None:
            sink = gl.load(sinks + rows % num_heads, mask=exists, other=NEG_INF).to(gl.float32)
            with_sink, correction = softmax.absorb_sink(state, sink)
            inverse, lse_with_sink = softmax.finish(with_sink)
            inverse = inverse * correction
            if LSE_WITH_SINKS:
                row_lse = lse_with_sink
        first_row = segment.sequence.to(gl.int64) * num_rows
        if W == 0:
            gl.store(lse + first_row + rows, row_lse, mask=exists)
        offsets = (first_row + acc_rows)[:, None] * LATENT + columns[None, :]
        gl.store(out + offsets, (acc * _per_row(inverse, acc_layout)).to(out.dtype.element_ty),
                 mask=(acc_rows < num_rows)[:, None])  # fmt: skip
    else:
        inverse, row_lse = softmax.finish(state)
        first_row = schedule.partial_slot(part_number, segment.first).to(gl.int64) * num_rows
        if W == 0:
            gl.store(partial_lse + first_row + rows, row_lse / LN_2, mask=exists)
        offsets = (first_row + acc_rows)[:, None] * LATENT + columns[None, :]
        gl.store(partial_out + offsets, acc * _per_row(inverse, acc_layout), mask=(acc_rows < num_rows)[:, None])


@gluon.jit
def _compute(
    out, lse, partial_out, partial_lse, sinks, ring, cache_seqlens, max_length, part, part_number, num_rows, num_heads,
    seqlen_q, scale_log2, IS_CAUSAL: gl.constexpr, ROPE: gl.constexpr, LSE_WITH_SINKS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """A consumer: every second tile's scores, and the output columns from W * HALF on."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    begin, begin_tile, last, end_tile = part
    tokens = (gl.program_id(0) * ROWS + gl.arange(0, ROWS, row_layout)) // num_heads
    first_step = 0
    for index in range(last - begin + 1):
        segment = _segment(cache_seqlens, part, index, max_length)
        limits = gl.full([ROWS], 0, gl.int32, row_layout) + segment.length
        mask_from = segment.length
        if IS_CAUSAL:
            limits = limits - seqlen_q + 1 + tokens
            mask_from = mask_from - seqlen_q + 1
        no_max = gl.full([ROWS], NEG_INF, gl.float32, row_layout)
        state = softmax.OnlineSoftmax(no_max, gl.zeros([ROWS], gl.float32, row_layout))
        acc = gl.zeros([ROWS, HALF], gl.float32, acc_layout)
        end_step = first_step + segment.end - segment.first
        own_step = first_step + ((first_step + W) & 1)
        mbarrier.wait(ring.q_ready, index & 1)
        mbarrier.arrive(ring.q_free, count=1, pred=own_step >= end_step)
        for step in range(own_step, end_step, 2):
            tile = segment.first + step - first_step
            masked = (tile + 1) * TILE > mask_from
            last_own = step + 2 >= end_step
            state, acc = _absorb_tiles(ring, state, acc, step, first_step, masked, tile, limits, scale_log2, last_own,
                                       ROPE)  # fmt: skip
        if (end_step > first_step) & (((end_step - 1 + W) & 1) == 1):
            state, product = _start_given(ring, state, acc, end_step - 1, True, end_step - 1 > first_step)
            acc = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(ring.latent_free.index((1 - W) * 2 + W), count=1)
        _store(out, lse, partial_out, partial_lse, sinks, state, acc, segment, part_number, num_rows, num_heads,
               LSE_WITH_SINKS, W)  # fmt: skip
        first_step = end_step


@gluon.jit
def _allocate_barriers(count: gl.constexpr, NUMBER: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def _allocate(desc, NUMBER: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [NUMBER] + desc.block_type.shape, desc.layout)


@gluon.jit(do_not_specialize=["table_stride", "max_length", "num_sequences", "num_rows", "seqlen_q"])
def decode(
    q_desc, q_rope_desc, latent_desc, rope_desc, out, lse, partial_out, partial_lse, table, cache_seqlens, block_table, sinks,
    softmax_scale, table_stride, max_length, num_sequences, num_rows, num_heads, seqlen_q, TILES_PER_PAGE: gl.constexpr,
    IS_CAUSAL: gl.constexpr, ROPE: gl.constexpr, LSE_WITH_SINKS: gl.constexpr,
):  # fmt: skip
    """Descriptors of `launch`; out, lse, partial_out (slots, num_rows, 512), partial_lse (slots, num_rows): pointers.

    table: of schedule.py. ROPE: 64, or 0 for a head dim of 512.
    """
    part = schedule.part_of_program(table, gl.program_id(1), num_sequences)
    vectors: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = Ring(
        _allocate(q_desc, 2), _allocate(q_rope_desc, 1).index(0), _allocate(latent_desc, 4), _allocate(rope_desc, 2),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], vectors), gl.allocate_shared_memory(gl.float32, [2, ROWS], vectors),
        _allocate_barriers(1, 1).index(0), _allocate_barriers(2, 1).index(0), _allocate_barriers(1, 4),
        _allocate_barriers(1, 4), _allocate_barriers(1, 2),
    )  # fmt: skip
    part_number = gl.program_id(1)
    scale_log2 = softmax_scale * LOG2_E
    gl.warp_specialize([
        (_load, (q_desc, q_rope_desc, latent_desc, rope_desc, ring, cache_seqlens, block_table, table_stride, max_length, part,
                 TILES_PER_PAGE, ROPE)),
        (_compute, (out, lse, partial_out, partial_lse, sinks, ring, cache_seqlens, max_length, part, part_number, num_rows,
                    num_heads, seqlen_q, scale_log2, IS_CAUSAL, ROPE, LSE_WITH_SINKS, 0)),
        (_compute, (out, lse, partial_out, partial_lse, sinks, ring, cache_seqlens, max_length, part, part_number, num_rows,
                    num_heads, seqlen_q, scale_log2, IS_CAUSAL, ROPE, LSE_WITH_SINKS, 1)),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip


# By what a compiled kernel and its arguments depend on, beside the data
_prepared = {}


def refuses(problem, device) -> str | None:
    """Why this kernel does not take a problem, or None."""
    if device.sm != 90:
        return f"needs sm_90 (H100, H200, H800), the device is {device.arch}"
    if problem.sparse:
        return "does not take indices"
    if problem.fp8:
        return "does not take packed caches"
    if problem.num_heads_kv != 1:
        return f"takes one latent head, not {problem.num_heads_kv}"
    if problem.page_size % TILE.value:
        return f"takes pages of a multiple of {TILE.value} tokens, not {problem.page_size}"
    if problem.unaligned:
        return "TMA needs a kv_cache whose rows begin at multiples of 16 bytes"
    if problem.softmax_scale <= 0:
        return "takes a positive softmax_scale"
    return None


def config_of(problem, device) -> None:
    """No choice of tiles."""


def _layout(block, x):
    return gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)


def cache_descriptor(kv_cache, columns):
    """TMA descriptor of a paged cache, (pages, page_size, 1, dim), whose tiles end after any number of tokens.

    TMA fills with zeros what is past the size of a dim. Token i of n from `row` of a page on is given coordinates that end at
    MANY_ROWS: (MANY_ROWS, row + n, page, MANY_ROWS - n + i, column). With strides 2**34 - s, s, page stride, s its offset is
    2**64 + page * page stride + (row + i) * s, and addresses have 64 bits.
    """
    pages, _, _, dim = kv_cache.shape
    page_stride, row_stride = kv_cache.stride()[:2]
    block = [1, 1, 1, TILE.value, columns]
    many = MANY_ROWS.value
    return TensorDescriptor(kv_cache, [2**31 - 65536, 2**31 - 65536, pages, many, dim],
                            [2**34 - row_stride, row_stride, page_stride, row_stride, 1], block,
                            _layout(block, kv_cache))  # fmt: skip


def query_descriptor(q, columns):
    """TMA descriptor of queries as (batch, rows, head_dim)."""
    block = [1, ROWS.value, columns]
    return TensorDescriptor(q, list(q.shape), list(q.stride()), block, _layout(block, q))


def launch(problem, config, operands):
    """Run both kernels. Returns out and lse as `mla_decode` describes them."""
    out, lse = portable.allocate(problem, operands.q)
    if out.numel() == 0:
        return out, lse
    num_parts = schedule.num_parts_of(operands.schedule, problem.num_sequences)
    outputs = portable.outputs_of(problem, out, lse, num_parts)
    q = operands.q.reshape(problem.batch, problem.num_rows, problem.head_dim)
    if q.data_ptr() % 16 or any(stride % 8 for stride in q.stride()[:2]):
        q = q.clone(memory_format=torch.contiguous_format)
    kv_cache, table = operands.kv_cache, operands.block_table
    pointers = (out, lse, outputs.partial_out, outputs.partial_lse, operands.schedule, operands.cache_seqlens, table,
                operands.sinks)  # fmt: skip
    key = problem, num_parts, q.stride(), kv_cache.stride(), table.shape[1], table.stride(0), *launch_key(pointers)
    prepared = _prepared.get(key)
    if prepared is not None:
        prepared.run(*map(rebased, prepared.descriptors, (q, q, kv_cache, kv_cache)), *pointers, *prepared.rest)
    else:
        descriptors = (query_descriptor(q, HALF.value), query_descriptor(q, cache.ROPE_DIM),
                       cache_descriptor(kv_cache, HALF.value), cache_descriptor(kv_cache, cache.ROPE_DIM))  # fmt: skip
        numbers = (problem.softmax_scale, table.stride(0), portable.max_length(problem, operands), problem.num_sequences,
                   problem.num_rows, problem.num_heads, problem.seqlen_q)  # fmt: skip
        constexprs = {"TILES_PER_PAGE": problem.page_size // TILE.value, "IS_CAUSAL": problem.causal,
                      "ROPE": problem.head_dim - problem.head_dim_v, "LSE_WITH_SINKS": problem.lse_with_sinks}  # fmt: skip
        grid = -(-problem.num_rows // ROWS.value), num_parts
        compiled = decode[grid](*descriptors, *pointers, *numbers, **constexprs, num_warps=4)
        if out.is_cuda:
            if len(_prepared) >= MAX_PREPARED:
                _prepared.clear()
            descriptors = tuple(rebased(descriptor, None) for descriptor in descriptors)
            _prepared[key] = Prepared(compiled[(*grid, 1)], descriptors, (*numbers, *constexprs.values()))
    if num_parts > 1:
        portable.launch_merge(problem, operands, outputs, num_parts)
    return out, lse
