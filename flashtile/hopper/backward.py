"""The Hopper backward, in Gluon: one kernel for dk, dv and dq, between a small one before and a small one after it.

    before   neg_delta = -(rowsum(dout * out) - dlse),  neg_lse = -lse / scale,  dq_sum = 0     one pass over out and dout
    main     p = exp(scale * (k qᵀ + neg_lse)),  dscores = p * (v doutᵀ + neg_delta)            keys are rows: all is transposed
             dv += p dout,  dk += dscores q,  dq_sum += dscoresᵀ k
    after    dk = scale * dk (in main),  dq = scale * dq_sum                                    one pass, fp32 to the dtype

A program owns TILE_N keys of one key-value head at a time, and walks over the query tiles of all heads of its group; scores
are computed once. dq_sum is the one fp32 tensor in memory: each step adds to it through the TMA unit, in the order of arrival,
so dq may differ in its last bits from run to run; dk, dv and dsinks do not. neg_lse and neg_delta are not subtracted: the
products start from them as accumulators, which saves 16 to 32 live registers in each half of a step and an addition an element.

Partitions of 16 warps, BY_ROWS (head dims to 128: 128 keys), between them only barriers on buffers:

    default   4 warps   dq: dscoresᵀ k for both halves, through fp32 buffers into the TMA reduction
    computes  4 warps   64 keys each: scores and dk of the last step under way together, exponentials under dk; then dp and dv
              twice     together, dscores under dv. p goes to dv from registers; dscores go to shared memory for dq and dk
    loads     1 warp    every TMA load; a tile of q and its neg_lse share a barrier, as do dout and neg_delta

and for larger head dims (64 keys), where one partition cannot hold dk and dv:

    default   4 warps   dq, in pieces of 64 columns
    weights   4 warps   scores, p, dv; gives p through shared memory to
    dscores   4 warps   dp, dscores, dk
    loads     1 warp

Limit: the shared-memory pipe, 86% busy at head dim 128 (tensor cores 69%): a 64 x 128 step is 2560 tensor cycles and 3200
wavefronts. Hence nothing is read twice that registers can hold, and dq pays most (512 + 512 of the wavefronts). At 16384
tokens of 2048 columns the kernel before takes 72 us and the one after 53 us, which is memory bandwidth; a tile of keys costs
some 5 us beside its steps, of which a program that takes one tile after the other saves a part.

Measured while it was written, and not yet recorded under benchmarks/results (H200, torch 2.11, cuDNN 9.19, Triton 3.6; 16384
tokens, 2048 / head_dim heads, bf16, random data; do_bench, medians; the whole backward with both small kernels), TFLOP/s and
the ratio to cuDNN in the same run:

    head dim            512 full      512 causal    4096 full     4096 causal
    64                  334 (1.22)    194 (1.17)    503 (1.20)    432 (1.18)
    128                 379 (1.12)    228 (1.08)    562 (1.11)    489 (1.12)
    256                 288 (1.22)    200 (1.12)    431 (1.20)    415 (1.15)

    Causal 128 and 256: this kernel before its programs could take several tiles, which they do not do there, in that run.

Tried, without a gain: programs that take several tiles in a fixed order, every other turn backwards, causal: 128 at 512 tokens
201 against 228, 256 at 4096 261 against 415, where the tiles of one group of heads are about as many as there are programs;
programs in order of heads or of tiles, see heads_side_by_side. What the tiles and partitions were chosen among is in
backward_config.py.
Source: Dao 2023, FlashAttention-2, algorithm 2; Shah et al. 2024, FlashAttention-3, section 3.

Refused: see backward_config.py.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashtile.device import masks, scores
from flashtile.device.compat import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.device.lengths import Lengths
from flashtile.device.numerics import LOG2_E, NEG_INF
from flashtile.device.scores import ScoreParams
from flashtile.device.tensors import Rows, head_ptr, load_tile
from flashtile.gradients import sinks_gradient
from flashtile.tiles import padded_dim

# Keys of one computing partition: the rows of one wgmma.
HALF_N = gl.constexpr(64)
LOAD_REGISTERS = gl.constexpr(24)
# Rows of the row statistics are padded to this, so that a tile of them is always whole.
ROW_MULTIPLE = 128


class Buffers(NamedTuple):
    """Shared memory. q, dout, neg_lse, neg_delta, dscores, p and dq have a slot per stage; k, v and dscores one per half."""

    q: Any
    dout: Any
    k: Any
    v: Any
    neg_lse: Any
    neg_delta: Any
    dscores: Any
    p: Any
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


class Work(NamedTuple):
    """All tiles of keys of a call, and in which order the programs take them (see _walk)."""

    num_tiles: Any
    num_heads_kv: Any
    batch_heads: Any
    heads_side_by_side: Any


class Walk(NamedTuple):
    """The steps of one tile of keys: query tiles [begin, end) of each head of the group.

    Steps are counted through, over all tiles of a program, since the rings of buffers go on. Loops over them start at 0 all the
    same: Triton 3.6 loses a number that an outer loop carries if it is used in the bounds of an inner one alone.

    In tiles [full_begin, full_end) no key is hidden.
    """

    batch: Any
    kv_head: Any
    col_begin: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    num_steps: Any


@gluon.jit
def _num_rounds(work):
    """Tiles of keys of this program."""
    num_units = work.num_tiles * work.batch_heads
    whole = num_units // gl.num_programs(0)
    return whole + (_unit(whole) < num_units).to(gl.int32)


@gluon.jit
def _unit(turn):
    """The program's tile in a turn; every other turn goes backwards, so that all get as many long ones as short ones."""
    num_programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), num_programs - 1 - gl.program_id(0))
    return turn * num_programs + place


@gluon.jit
def _walk(turn, work, lengths, window, GROUP_SIZE: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """Of heads_side_by_side heads the first key tiles come first, then their second ones: causal ones are longest first, and
    what these heads read and sum stays in L2.
    """
    unit = _unit(turn)
    units_side_by_side = work.num_tiles * work.heads_side_by_side
    group = unit // units_side_by_side
    first_head = group * work.heads_side_by_side
    width = gl.minimum(work.heads_side_by_side, work.batch_heads - first_head)
    within = unit - group * units_side_by_side
    col_begin = within // width * TILE_N
    batch_head = first_head + within % width
    tiles = masks.query_range(col_begin, lengths, window, TILE_M, TILE_N)
    # A key that no query sees still walks over one, fully hidden, tile.
    begin = gl.minimum(tiles.begin, (lengths.seqlen_q - 1) // TILE_M)
    end = gl.maximum(tiles.end, begin + 1)
    return Walk(batch_head // work.num_heads_kv, batch_head % work.num_heads_kv, col_begin, begin, tiles.full_begin,
                tiles.full_end, end, (end - begin) * GROUP_SIZE)  # fmt: skip


@gluon.jit
def _first_step(walk, GROUP_SIZE: gl.constexpr):
    """(query tile, head) of step 0."""
    return walk.begin, walk.kv_head * GROUP_SIZE


@gluon.jit
def _next_step(tile, head, walk, GROUP_SIZE: gl.constexpr):
    tile += 1
    if GROUP_SIZE > 1:
        wraps = tile == walk.end
        tile = gl.where(wraps, walk.begin, tile)
        head = gl.where(wraps, head + 1, head)
    return tile, head


@gluon.jit
def _phase(step, NUM_STAGES: gl.constexpr):
    """Parity of the barriers of a ring at a step."""
    return (step // NUM_STAGES) & 1


# ---- loads ----


@gluon.jit
def _load_rows(desc, row_desc, smem, row_smem, ready, free, walk, tile, head, num_heads, padded_rows, step,
               TILE_M: gl.constexpr, NUM_STAGES: gl.constexpr):  # fmt: skip
    """One tile of q or dout and its row statistic."""
    slot = step % NUM_STAGES
    mbarrier.wait(free.index(slot), _phase(step, NUM_STAGES) ^ 1)
    mbarrier.expect(ready.index(slot), desc.block_type.nbytes + row_desc.block_type.nbytes)
    tma_load(desc, [walk.batch, head, tile * TILE_M, 0], ready.index(slot), smem.index(slot))
    row = (walk.batch * num_heads + head) * padded_rows + tile * TILE_M
    tma_load(row_desc, [row], ready.index(slot), row_smem.index(slot))


@gluon.jit
def _load_keys(desc, smem, ready, free, walk, turn, HALVES: gl.constexpr):
    """The tile of k or v."""
    mbarrier.wait(free.index(0), (turn & 1) ^ 1)
    mbarrier.expect(ready.index(0), HALVES * desc.block_type.nbytes)
    for half in gl.static_range(HALVES):
        row = walk.col_begin + HALF_N * half
        tma_load(desc, [walk.batch, walk.kv_head, row, 0], ready.index(0), smem.index(half))


@gluon.jit
def _load(
    q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, buffers, barriers, work, lengths, window, padded_rows,
    GROUP_SIZE: gl.constexpr, TILE_M: gl.constexpr, HALVES: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr,
):  # fmt: skip
    num_heads = work.num_heads_kv * GROUP_SIZE
    first = 0
    for turn in range(0, _num_rounds(work)):
        walk = _walk(turn, work, lengths, window, GROUP_SIZE, TILE_M, HALVES * HALF_N)
        tile, head = _first_step(walk, GROUP_SIZE)
        for i in range(0, walk.num_steps):
            step = first + i
            _load_rows(q_desc, neg_lse_desc, buffers.q, buffers.neg_lse, barriers.q_ready, barriers.q_free, walk, tile, head,
                       num_heads, padded_rows, step, TILE_M, Q_STAGES)  # fmt: skip
            if i == 0:
                _load_keys(k_desc, buffers.k, barriers.k_ready, barriers.k_free, walk, turn, HALVES)
            _load_rows(dout_desc, neg_delta_desc, buffers.dout, buffers.neg_delta, barriers.dout_ready, barriers.dout_free,
                       walk, tile, head, num_heads, padded_rows, step, TILE_M, DOUT_STAGES)  # fmt: skip
            if i == 0:
                _load_keys(v_desc, buffers.v, barriers.v_ready, barriers.v_free, walk, turn, HALVES)
            tile, head = _next_step(tile, head, walk, GROUP_SIZE)
        first += walk.num_steps


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
def _weights(raw_scores, row_smem, first_col, tile, head, walk, lengths, window, score_params, TILE_M: gl.constexpr,
             RAGGED_N: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """p (HALF_N, TILE_M), and p times what a softcap does to a gradient; both in dtype."""
    rows = tile * TILE_M + gl.arange(0, TILE_M, gl.SliceLayout(0, layout))
    cols = first_col + gl.arange(0, HALF_N, gl.SliceLayout(1, layout))
    slope = scores.load_slope(score_params, walk.batch, head)
    x = scores.logits(raw_scores, rows[None, :], cols[:, None], lengths, slope, score_params)
    x = x * scores.scale_log2(score_params)
    if score_params.softcap is not None:
        x = x + row_smem.load(gl.SliceLayout(0, layout))[None, :]
    if RAGGED_N:
        # exp(-lse) of a missing key may overflow, and inf * 0 in dq would be nan
        x = x + gl.where(cols < lengths.seqlen_k, 0.0, NEG_INF)[:, None]
    if window.left is not None or window.right is not None:
        if (tile < walk.full_begin) | (tile >= walk.full_end):
            # again, since kept alive they cost registers
            rows = tile * TILE_M + gl.arange(0, TILE_M, gl.SliceLayout(0, layout))
            cols = first_col + gl.arange(0, HALF_N, gl.SliceLayout(1, layout))
            x = gl.where(masks.visible(rows[None, :], cols[:, None], lengths, window), x, NEG_INF)
    p = gl.exp2(x)
    if score_params.softcap is None:
        p = p.to(dtype)
        return p, p
    else:
        return p.to(dtype), scores.through_softcap(p, raw_scores, score_params).to(dtype)


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
def _pinned(p, p_grad, score_params):
    p = _pin(p)
    if score_params.softcap is None:
        return p, p
    else:
        return p, _pin(p_grad)


@gluon.jit
def _store_keys(desc, smem, tile, walk, row, DIM: gl.constexpr):
    """A finished (HALF_N, DIM) tile of dk or dv, through the buffer of k or v; TMA leaves out rows past the length."""
    smem.reshape([HALF_N, DIM]).store(tile.to(smem.dtype))
    fence_async_shared()
    partition_barrier()
    tma_store(desc, [walk.batch, walk.kv_head, row, 0], smem)


# ---- dq, for both splits ----


@gluon.jit
def _add_dq(
    dq_desc, buffers, barriers, walk, tile, head, step, zeros, TILE_M: gl.constexpr, BLOCK_D: gl.constexpr,
    HALVES: gl.constexpr, DSCORES_STAGES: gl.constexpr, DQ_COLUMNS: gl.constexpr, DQ_STAGES: gl.constexpr,
):  # fmt: skip
    """One step of dq_sum += dscoresᵀ k, in pieces of DQ_COLUMNS columns."""
    PIECES: gl.constexpr = BLOCK_D // DQ_COLUMNS
    slot = step % DSCORES_STAGES
    for piece in gl.static_range(PIECES):
        dq_acc = zeros
        for half in gl.static_range(HALVES):
            if piece == 0:
                mbarrier.wait(barriers.dscores_ready.index(HALVES * slot + half), _phase(step, DSCORES_STAGES))
            k = buffers.k.index(half).reshape([HALF_N, BLOCK_D])
            if PIECES > 1:
                k = k.slice(piece * DQ_COLUMNS, DQ_COLUMNS, dim=1)
            dscores = buffers.dscores.index(HALVES * slot + half).permute((1, 0))
            dq_acc = warpgroup_mma(dscores, k, dq_acc, use_acc=half > 0, is_async=True)
        tma_store_wait(DQ_STAGES - 1)
        dq = warpgroup_mma_wait(0, deps=[dq_acc])
        if piece == PIECES - 1:
            mbarrier.arrive(barriers.dscores_free.index(slot), count=1)
        dq_smem = buffers.dq.index((step * PIECES + piece) % DQ_STAGES)
        dq_smem.reshape([TILE_M, DQ_COLUMNS]).store(dq)
        fence_async_shared()
        partition_barrier()
        tma_reduce_add(dq_desc, [walk.batch, head, tile * TILE_M, piece * DQ_COLUMNS], dq_smem)


@gluon.jit
def _reduce_dq(
    dq_desc, buffers, barriers, work, lengths, window, GROUP_SIZE: gl.constexpr, TILE_M: gl.constexpr, BLOCK_D: gl.constexpr,
    HALVES: gl.constexpr, DSCORES_STAGES: gl.constexpr, DQ_COLUMNS: gl.constexpr, DQ_STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    zeros = gl.zeros([TILE_M, DQ_COLUMNS], gl.float32, layout)
    first = 0
    for turn in range(0, _num_rounds(work)):
        walk = _walk(turn, work, lengths, window, GROUP_SIZE, TILE_M, HALVES * HALF_N)
        tile, head = _first_step(walk, GROUP_SIZE)
        mbarrier.wait(barriers.k_ready.index(0), turn & 1)
        for i in range(0, walk.num_steps):
            _add_dq(dq_desc, buffers, barriers, walk, tile, head, first + i, zeros, TILE_M, BLOCK_D, HALVES, DSCORES_STAGES,
                    DQ_COLUMNS, DQ_STAGES)  # fmt: skip
            tile, head = _next_step(tile, head, walk, GROUP_SIZE)
        mbarrier.arrive(barriers.k_done.index(0), count=1)
        first += walk.num_steps
    tma_store_wait(0)


# ---- split by rows: each of two partitions has 64 keys and does everything but dq ----


@gluon.jit
def _second_half(
    p, p_grad, v, dv, buffers, barriers, step, zeros, layout: gl.constexpr, operand: gl.constexpr, BLOCK_DV: gl.constexpr,
    TILE_M: gl.constexpr, DOUT_STAGES: gl.constexpr, DSCORES_STAGES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """dp and dv together, dscores under dv; returns dv."""
    slot = step % DOUT_STAGES
    mbarrier.wait(barriers.dout_ready.index(slot), _phase(step, DOUT_STAGES))
    dout = buffers.dout.index(slot).reshape([TILE_M, BLOCK_DV])
    dp_acc = warpgroup_mma(v, dout.permute((1, 0)), _start(buffers.neg_delta.index(slot), zeros, layout), is_async=True)
    dv_acc = warpgroup_mma(gl.convert_layout(p, operand), dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp_acc])
    dscores = (_to_fp32(p_grad) * dp).to(p.dtype)
    dscores_slot = step % DSCORES_STAGES
    mbarrier.wait(barriers.dscores_free.index(dscores_slot), _phase(step, DSCORES_STAGES) ^ 1)
    buffers.dscores.index(2 * dscores_slot + HALF).store(dscores)
    fence_async_shared()
    mbarrier.arrive(barriers.dscores_ready.index(2 * dscores_slot + HALF), count=1)
    dv = warpgroup_mma_wait(0, deps=[dv_acc])
    mbarrier.arrive(barriers.dout_free.index(slot), count=1)
    return dv


@gluon.jit
def _compute_rows(
    dk_desc, dv_desc, buffers, barriers, work, lengths, window, score_params, GROUP_SIZE: gl.constexpr, TILE_M: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr,
    DSCORES_STAGES: gl.constexpr, RAGGED_N: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys. A step has two halves, and nothing is under way between them (else ptxas serialises: C7515)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dv_layout, 2)
    zeros = gl.zeros([HALF_N, TILE_M], gl.float32, layout)
    k = buffers.k.index(HALF).reshape([HALF_N, BLOCK_D])
    v = buffers.v.index(HALF).reshape([HALF_N, BLOCK_DV])
    first = 0
    for turn in range(0, _num_rounds(work)):
        walk = _walk(turn, work, lengths, window, GROUP_SIZE, TILE_M, 2 * HALF_N)
        first_col = walk.col_begin + HALF * HALF_N
        tile, head = _first_step(walk, GROUP_SIZE)
        dk = gl.zeros([HALF_N, BLOCK_D], gl.float32, dk_layout)
        dv = gl.zeros([HALF_N, BLOCK_DV], gl.float32, dv_layout)
        slot = first % Q_STAGES
        mbarrier.wait(barriers.q_ready.index(slot), _phase(first, Q_STAGES))
        neg_lse = buffers.neg_lse.index(slot)
        start = _start_scores(neg_lse, zeros, score_params, layout)
        q = buffers.q.index(slot).reshape([TILE_M, BLOCK_D])
        mbarrier.wait(barriers.k_ready.index(0), turn & 1)
        scores_acc = warpgroup_mma(k, q.permute((1, 0)), start, is_async=True)
        raw_scores = warpgroup_mma_wait(0, deps=[scores_acc])
        p, p_grad = _weights(raw_scores, neg_lse, first_col, tile, head, walk, lengths, window, score_params, TILE_M, RAGGED_N,
                             q.dtype, layout)  # fmt: skip
        mbarrier.wait(barriers.v_ready.index(0), turn & 1)
        dv = _second_half(p, p_grad, v, dv, buffers, barriers, first, zeros, layout, operand, BLOCK_DV, TILE_M, DOUT_STAGES,
                          DSCORES_STAGES, HALF)  # fmt: skip
        for i in range(1, walk.num_steps):
            step = first + i
            tile, head = _next_step(tile, head, walk, GROUP_SIZE)
            slot = step % Q_STAGES
            last_slot = (step - 1) % Q_STAGES
            mbarrier.wait(barriers.q_ready.index(slot), _phase(step, Q_STAGES))
            neg_lse = buffers.neg_lse.index(slot)
            start = _start_scores(neg_lse, zeros, score_params, layout)
            q = buffers.q.index(slot).reshape([TILE_M, BLOCK_D])
            scores_acc = warpgroup_mma(k, q.permute((1, 0)), start, is_async=True)
            last_q = buffers.q.index(last_slot).reshape([TILE_M, BLOCK_D])
            last_dscores = buffers.dscores.index(2 * ((step - 1) % DSCORES_STAGES) + HALF)
            dk_acc = warpgroup_mma(last_dscores, last_q, dk, is_async=True)
            raw_scores = warpgroup_mma_wait(1, deps=[scores_acc])
            p, p_grad = _weights(raw_scores, neg_lse, first_col, tile, head, walk, lengths, window, score_params, TILE_M,
                                 RAGGED_N, q.dtype, layout)  # fmt: skip
            p, p_grad = _pinned(p, p_grad, score_params)
            dk = warpgroup_mma_wait(0, deps=[dk_acc])
            mbarrier.arrive(barriers.q_free.index(last_slot), count=1)
            dv = _second_half(p, p_grad, v, dv, buffers, barriers, step, zeros, layout, operand, BLOCK_DV, TILE_M, DOUT_STAGES,
                              DSCORES_STAGES, HALF)  # fmt: skip
        first += walk.num_steps
        last_slot = (first - 1) % Q_STAGES
        last_q = buffers.q.index(last_slot).reshape([TILE_M, BLOCK_D])
        last_dscores = buffers.dscores.index(2 * ((first - 1) % DSCORES_STAGES) + HALF)
        dk_acc = warpgroup_mma(last_dscores, last_q, dk, is_async=True)
        _store_keys(dv_desc, buffers.v.index(HALF), dv, walk, first_col, BLOCK_DV)
        dk = warpgroup_mma_wait(0, deps=[dk_acc]) * score_params.scale
        mbarrier.arrive(barriers.q_free.index(last_slot), count=1)
        if BLOCK_D == BLOCK_DV:
            # Through the buffer of v too: k comes first in the next tile, so its buffer should be free first.
            tma_store_wait(0)
            _store_keys(dk_desc, buffers.v.index(HALF), dk, walk, first_col, BLOCK_D)
            tma_store_wait(0)
        else:
            mbarrier.wait(barriers.k_done.index(0), turn & 1)
            _store_keys(dk_desc, buffers.k.index(HALF), dk, walk, first_col, BLOCK_D)
            tma_store_wait(0)
            mbarrier.arrive(barriers.k_free.index(0), count=1)
        mbarrier.arrive(barriers.v_free.index(0), count=1)


# ---- split by product: one partition for p and dv, one for dscores and dk ----


@gluon.jit
def _compute_dv(
    dv_desc, buffers, barriers, work, lengths, window, score_params, GROUP_SIZE: gl.constexpr, TILE_M: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, P_STAGES: gl.constexpr,
    RAGGED_N: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    # wider instructions need more registers than ptxas gives a kernel of 16 warps (C7602)
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(BLOCK_DV, 128), 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dv_layout, 2)
    zeros = gl.zeros([HALF_N, TILE_M], gl.float32, layout)
    k = buffers.k.index(0).reshape([HALF_N, BLOCK_D])
    first = 0
    for turn in range(0, _num_rounds(work)):
        walk = _walk(turn, work, lengths, window, GROUP_SIZE, TILE_M, HALF_N)
        dv = gl.zeros([HALF_N, BLOCK_DV], gl.float32, dv_layout)
        tile, head = _first_step(walk, GROUP_SIZE)
        mbarrier.wait(barriers.k_ready.index(0), turn & 1)
        for i in range(0, walk.num_steps):
            step = first + i
            slot = step % Q_STAGES
            mbarrier.wait(barriers.q_ready.index(slot), _phase(step, Q_STAGES))
            q = buffers.q.index(slot).reshape([TILE_M, BLOCK_D])
            neg_lse = buffers.neg_lse.index(slot)
            scores_acc = warpgroup_mma(k, q.permute((1, 0)), _start_scores(neg_lse, zeros, score_params, layout), is_async=True)
            raw_scores = warpgroup_mma_wait(0, deps=[scores_acc])
            p, p_grad = _weights(raw_scores, neg_lse, walk.col_begin, tile, head, walk, lengths, window, score_params, TILE_M,
                                 RAGGED_N, q.dtype, layout)  # fmt: skip
            mbarrier.arrive(barriers.q_free.index(slot), count=1)
            p_slot = step % P_STAGES
            mbarrier.wait(barriers.p_free.index(p_slot), _phase(step, P_STAGES) ^ 1)
            buffers.p.index(p_slot).store(p_grad)
            mbarrier.arrive(barriers.p_ready.index(p_slot), count=1)
            slot = step % DOUT_STAGES
            mbarrier.wait(barriers.dout_ready.index(slot), _phase(step, DOUT_STAGES))
            dout = buffers.dout.index(slot).reshape([TILE_M, BLOCK_DV])
            dv_acc = warpgroup_mma(gl.convert_layout(p, operand), dout, dv, is_async=True)
            dv = warpgroup_mma_wait(0, deps=[dv_acc])
            mbarrier.arrive(barriers.dout_free.index(slot), count=1)
            tile, head = _next_step(tile, head, walk, GROUP_SIZE)
        mbarrier.wait(barriers.v_done.index(0), turn & 1)
        _store_keys(dv_desc, buffers.v.index(0), dv, walk, walk.col_begin, BLOCK_DV)
        tma_store_wait(0)
        mbarrier.arrive(barriers.v_free.index(0), count=1)
        first += walk.num_steps


@gluon.jit
def _compute_dk(
    dk_desc, buffers, barriers, work, lengths, window, scale, GROUP_SIZE: gl.constexpr, TILE_M: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, P_STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(BLOCK_D, 128), 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dk_layout, 2)
    zeros = gl.zeros([HALF_N, TILE_M], gl.float32, layout)
    v = buffers.v.index(0).reshape([HALF_N, BLOCK_DV])
    first = 0
    for turn in range(0, _num_rounds(work)):
        walk = _walk(turn, work, lengths, window, GROUP_SIZE, TILE_M, HALF_N)
        dk = gl.zeros([HALF_N, BLOCK_D], gl.float32, dk_layout)
        mbarrier.wait(barriers.v_ready.index(0), turn & 1)
        for i in range(0, walk.num_steps):
            step = first + i
            slot = step % DOUT_STAGES
            p_slot = step % P_STAGES
            mbarrier.wait(barriers.dout_ready.index(slot), _phase(step, DOUT_STAGES))
            dout = buffers.dout.index(slot).reshape([TILE_M, BLOCK_DV])
            dp_acc = warpgroup_mma(v, dout.permute((1, 0)), _start(buffers.neg_delta.index(slot), zeros, layout), is_async=True)
            mbarrier.wait(barriers.p_ready.index(p_slot), _phase(step, P_STAGES))
            p = buffers.p.index(p_slot).load(layout)
            dp = warpgroup_mma_wait(0, deps=[dp_acc])
            mbarrier.arrive(barriers.dout_free.index(slot), count=1)
            mbarrier.arrive(barriers.p_free.index(p_slot), count=1)
            dscores = (_to_fp32(p) * dp).to(p.dtype)
            mbarrier.wait(barriers.dscores_free.index(p_slot), _phase(step, P_STAGES) ^ 1)
            buffers.dscores.index(p_slot).store(dscores)
            fence_async_shared()
            mbarrier.arrive(barriers.dscores_ready.index(p_slot), count=1)
            slot = step % Q_STAGES
            mbarrier.wait(barriers.q_ready.index(slot), _phase(step, Q_STAGES))
            q = buffers.q.index(slot).reshape([TILE_M, BLOCK_D])
            dk_acc = warpgroup_mma(gl.convert_layout(dscores, operand), q, dk, is_async=True)
            dk = warpgroup_mma_wait(0, deps=[dk_acc])
            mbarrier.arrive(barriers.q_free.index(slot), count=1)
        mbarrier.arrive(barriers.v_done.index(0), count=1)
        dk = dk * scale
        mbarrier.wait(barriers.k_done.index(0), turn & 1)
        _store_keys(dk_desc, buffers.k.index(0), dk, walk, walk.col_begin, BLOCK_D)
        tma_store_wait(0)
        mbarrier.arrive(barriers.k_free.index(0), count=1)
        first += walk.num_steps


# ---- the kernels ----


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit(do_not_specialize=["seqlen_q", "seqlen_k", "padded_rows", "num_tiles", "num_heads_kv", "heads_side_by_side",
                              "batch_heads"])  # fmt: skip
def attention_backward(
    q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, dq_desc, dk_desc, dv_desc, window, score_params, seqlen_q,
    seqlen_k, padded_rows, num_tiles, num_heads_kv, batch_heads, heads_side_by_side, GROUP_SIZE: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, Q_STAGES: gl.constexpr,
    DOUT_STAGES: gl.constexpr, DSCORES_STAGES: gl.constexpr, DQ_COLUMNS: gl.constexpr, DQ_STAGES: gl.constexpr,
    BY_ROWS: gl.constexpr, RAGGED_N: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = TILE_N // 64
    dtype: gl.constexpr = q_desc.dtype
    lengths = Lengths(0, 0, seqlen_q, seqlen_k)
    work = Work(num_tiles, num_heads_kv, batch_heads, heads_side_by_side)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, TILE_M], dtype)
    k_smem = gl.allocate_shared_memory(dtype, [HALVES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [HALVES] + v_desc.block_type.shape, v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES] + q_desc.block_type.shape, q_desc.layout)
    dout_smem = gl.allocate_shared_memory(dtype, [DOUT_STAGES] + dout_desc.block_type.shape, dout_desc.layout)
    neg_lse_smem = gl.allocate_shared_memory(gl.float32, [Q_STAGES, TILE_M], neg_lse_desc.layout)
    neg_delta_smem = gl.allocate_shared_memory(gl.float32, [DOUT_STAGES, TILE_M], neg_delta_desc.layout)
    dscores_smem = gl.allocate_shared_memory(dtype, [HALVES * DSCORES_STAGES, 64, TILE_M], p_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [DQ_STAGES] + dq_desc.block_type.shape, dq_desc.layout)
    k_ready = _barriers(1, 1)
    v_ready = _barriers(1, 1)
    q_ready = _barriers(Q_STAGES, 1)
    q_free = _barriers(Q_STAGES, 2)
    dout_ready = _barriers(DOUT_STAGES, 1)
    dout_free = _barriers(DOUT_STAGES, 2)
    dscores_ready = _barriers(HALVES * DSCORES_STAGES, 1)
    dscores_free = _barriers(DSCORES_STAGES, 1)
    k_done = _barriers(1, 1)
    if BY_ROWS:
        v_free = _barriers(1, 2)
        if BLOCK_D == BLOCK_DV:
            k_free = k_done
        else:
            k_free = _barriers(1, 2)
        buffers = Buffers(q_smem, dout_smem, k_smem, v_smem, neg_lse_smem, neg_delta_smem, dscores_smem, None, dq_smem)
        barriers = Barriers(k_ready, v_ready, q_ready, q_free, dout_ready, dout_free, dscores_ready, dscores_free, None, None,
                            k_done, None, k_free, v_free)  # fmt: skip
        gl.warp_specialize([
            (_reduce_dq, (dq_desc, buffers, barriers, work, lengths, window, GROUP_SIZE, TILE_M, BLOCK_D, HALVES,
                          DSCORES_STAGES, DQ_COLUMNS, DQ_STAGES)),
            (_compute_rows, (dk_desc, dv_desc, buffers, barriers, work, lengths, window, score_params, GROUP_SIZE, TILE_M,
                             BLOCK_D, BLOCK_DV, Q_STAGES, DOUT_STAGES, DSCORES_STAGES, RAGGED_N, 0)),
            (_compute_rows, (dk_desc, dv_desc, buffers, barriers, work, lengths, window, score_params, GROUP_SIZE, TILE_M,
                             BLOCK_D, BLOCK_DV, Q_STAGES, DOUT_STAGES, DSCORES_STAGES, RAGGED_N, 1)),
            (_load, (q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, buffers, barriers, work, lengths, window,
                     padded_rows, GROUP_SIZE, TILE_M, HALVES, Q_STAGES, DOUT_STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        p_smem = gl.allocate_shared_memory(dtype, [DSCORES_STAGES, 64, TILE_M], p_layout)
        p_ready = _barriers(DSCORES_STAGES, 1)
        p_free = _barriers(DSCORES_STAGES, 1)
        v_done = _barriers(1, 1)
        k_free = _barriers(1, 1)
        v_free = _barriers(1, 1)
        buffers = Buffers(q_smem, dout_smem, k_smem, v_smem, neg_lse_smem, neg_delta_smem, dscores_smem, p_smem, dq_smem)
        barriers = Barriers(k_ready, v_ready, q_ready, q_free, dout_ready, dout_free, dscores_ready, dscores_free, p_ready,
                            p_free, k_done, v_done, k_free, v_free)  # fmt: skip
        gl.warp_specialize([
            (_reduce_dq, (dq_desc, buffers, barriers, work, lengths, window, GROUP_SIZE, TILE_M, BLOCK_D, HALVES,
                          DSCORES_STAGES, DQ_COLUMNS, DQ_STAGES)),
            (_compute_dv, (dv_desc, buffers, barriers, work, lengths, window, score_params, GROUP_SIZE, TILE_M, BLOCK_D,
                           BLOCK_DV, Q_STAGES, DOUT_STAGES, DSCORES_STAGES, RAGGED_N)),
            (_compute_dk, (dk_desc, buffers, barriers, work, lengths, window, score_params.scale, GROUP_SIZE, TILE_M, BLOCK_D,
                           BLOCK_DV, Q_STAGES, DOUT_STAGES, DSCORES_STAGES)),
            (_load, (q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, buffers, barriers, work, lengths, window,
                     padded_rows, GROUP_SIZE, TILE_M, HALVES, Q_STAGES, DOUT_STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOAD_REGISTERS])  # fmt: skip


@triton.jit(do_not_specialize=["seqlen_q", "padded_rows", "num_tiles", "num_heads", "lse_factor"])
def backward_rows(
    out, dout, dlse, lse, neg_lse, neg_delta, dq_sum, seqlen_q, padded_rows, num_tiles, num_heads, lse_factor,
    TILE_M: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """lse_factor * lse and -(rowsum(dout * out) - dlse) for padded_rows rows a head, and zeros in dq_sum.

    lse_factor: -1 / scale, or -log2(e) under a softcap. Rows past the end and rows without a key get what makes p 0.
    """
    program = tl.program_id(0)
    row_begin = program % num_tiles * TILE_M
    batch_head = program // num_tiles
    batch = batch_head // num_heads
    head = batch_head % num_heads
    rows = row_begin + tl.arange(0, TILE_M)
    exists = rows < seqlen_q
    out_tile = load_tile(head_ptr(out, batch, 0, head), row_begin, seqlen_q, out.row_stride, TILE_M, HEAD_DIM_V, BLOCK_DV, True,
                         WIDE)  # fmt: skip
    dout_tile = load_tile(head_ptr(dout, batch, 0, head), row_begin, seqlen_q, dout.row_stride, TILE_M, HEAD_DIM_V, BLOCK_DV,
                          True, WIDE)  # fmt: skip
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(head_ptr(dlse, batch, 0, head) + rows * dlse.row_stride, mask=exists, other=0.0)
    row_lse = tl.load(head_ptr(lse, batch, 0, head) + rows * lse.row_stride, mask=exists, other=NEG_INF)
    row_lse = tl.where(row_lse == NEG_INF, float("inf"), row_lse)
    padded = batch_head.to(tl.int64) * padded_rows + rows
    tl.store(neg_lse + padded, row_lse * lse_factor)
    tl.store(neg_delta + padded, -delta)
    cols = tl.arange(0, BLOCK_D)
    dq_ptrs = head_ptr(dq_sum, batch, 0, head) + rows.to(tl.int64)[:, None] * dq_sum.row_stride + cols[None, :]
    tl.store(dq_ptrs, tl.zeros((TILE_M, BLOCK_D), tl.float32), mask=exists[:, None] & (cols < HEAD_DIM)[None, :])


@triton.jit
def backward_convert(dq_sum, dq, scale, count, BLOCK: tl.constexpr):
    """dq = scale * dq_sum, in the dtype of dq."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    tl.store(dq + index, (tl.load(dq_sum + index, mask=mask) * scale).to(dq.dtype.element_ty), mask=mask)


# ---- launch ----


def launch(problem, configs, operands, out, lse, dout, dlse):
    """Run the three kernels. configs: {"backward": BackwardConfig}. Returns dq, dk, dv, dsinks (None without sinks)."""
    q, k, v = (tma_ready(x) for x in operands[:3])
    dout = tma_ready(dout)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands[:3])
    if not (q.numel() and k.numel()):
        for gradient in (dq, dk, dv):
            gradient.zero_()
    padded_rows = triton.cdiv(problem.seqlen_q, ROW_MULTIPLE) * ROW_MULTIPLE
    row_stats = lse.new_empty((2, problem.batch, problem.num_heads, padded_rows))
    dq_sum = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    if q.numel():
        launch_rows(problem, out, lse, dout, dlse, row_stats, dq_sum)
    if q.numel() and k.numel():
        launch_main(problem, configs["backward"], operands.alibi_slopes, q, k, v, dout, row_stats, dq_sum, dk, dv)
        count = dq.numel()
        backward_convert[(triton.cdiv(count, 4096),)](dq_sum, dq, float(problem.softmax_scale), count, BLOCK=4096, num_warps=8)
    delta = None if operands.sinks is None else -row_stats[1, ..., : problem.seqlen_q]
    return dq, dk, dv, sinks_gradient(operands.sinks, lse, delta)


def launch_rows(problem, out, lse, dout, dlse, row_stats, dq_sum):
    tile_m = 32
    padded_rows = row_stats.shape[-1]
    num_tiles = padded_rows // tile_m
    backward_rows[(num_tiles * problem.batch * problem.num_heads,)](
        _rows(out), _rows(dout), None if dlse is None else _row_numbers(dlse), _row_numbers(lse), row_stats[0], row_stats[1],
        _rows(dq_sum), problem.seqlen_q, padded_rows, num_tiles, problem.num_heads,
        -LOG2_E.value if problem.softcap else -1 / problem.softmax_scale, TILE_M=tile_m,
        HEAD_DIM=problem.head_dim, HEAD_DIM_V=problem.head_dim_v, BLOCK_D=padded_dim(problem.head_dim, 2),
        BLOCK_DV=padded_dim(problem.head_dim_v, 2), WIDE=problem.wide_rows, num_warps=4,
    )  # fmt: skip


def launch_main(problem, config, slopes, q, k, v, dout, row_stats, dq_sum, dk, dv):
    block_d, block_dv = padded_dim(problem.head_dim, 2), padded_dim(problem.head_dim_v, 2)
    tile_m, half_n = config.tile_m, HALF_N.value
    num_tiles = triton.cdiv(problem.seqlen_k, config.tile_n)
    batch_heads = problem.batch * problem.num_heads_kv
    score_params = ScoreParams(
        scale=float(problem.softmax_scale), softcap=float(problem.softcap) or None, alibi_slopes=slopes,
        alibi_batch_stride=slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0, prescaled=None,
    )  # fmt: skip
    num_units = num_tiles * batch_heads
    attention_backward[(min(config.num_programs, num_units) if takes_turns(problem) else num_units,)](
        descriptor(q, tile_m, block_d), descriptor(dout, tile_m, block_dv), descriptor(k, half_n, block_d),
        descriptor(v, half_n, block_dv), row_descriptor(row_stats[0], tile_m), row_descriptor(row_stats[1], tile_m),
        descriptor(dq_sum, tile_m, config.dq_columns), descriptor(dk, half_n, block_d), descriptor(dv, half_n, block_dv),
        masks.Window(*problem.window), score_params, problem.seqlen_q, problem.seqlen_k, row_stats.shape[-1], num_tiles,
        problem.num_heads_kv, batch_heads, heads_side_by_side(problem), GROUP_SIZE=problem.group_size, TILE_M=tile_m,
        TILE_N=config.tile_n, BLOCK_D=block_d, BLOCK_DV=block_dv, Q_STAGES=config.num_stages, DOUT_STAGES=config.dout_stages,
        DSCORES_STAGES=config.dscores_stages, DQ_COLUMNS=config.dq_columns, DQ_STAGES=config.dq_stages, BY_ROWS=config.by_rows,
        RAGGED_N=problem.seqlen_k % config.tile_n != 0, REGISTERS=config.registers, num_warps=4,
    )  # fmt: skip


def takes_turns(problem):
    """Whether a program to a multiprocessor takes tile after tile, or each tile has a program.

    Without a mask turns save 4 to 11% at 512 and 1024 tokens and 1 to 4% at 4096 (head dim 256: 1% more or less). Causal, where
    their order is fixed and tiles differ, they save 2 to 8% at head dim 64 to 4096 tokens; elsewhere they may lose 40%.
    """
    small = max(problem.head_dim, problem.head_dim_v) <= 64
    return problem.window == (None, None) or problem.causal and small and problem.seqlen_k <= 4096


def heads_side_by_side(problem):
    """Heads whose tiles of one place follow each other (see _walk). Causal, a program to a tile, against 1: 1 to 2% faster with
    16 at 512 tokens, 1 to 4% with 2 at 8192, slower with many; without a mask 2% slower.
    """
    return max(2, 8192 // max(problem.seqlen_k, 1)) if problem.causal else 1


_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def tma_ready(x):
    """x, or a contiguous copy where a TMA descriptor can't say its strides: all must be positive multiples of 16 bytes."""
    multiple = 16 // x.element_size()
    *strides, last = x.stride()
    aligned = all(stride > 0 and stride % multiple == 0 or size == 1 for size, stride in zip(x.shape, strides))
    return x if aligned and last == 1 and x.data_ptr() % 16 == 0 else x.contiguous()


def descriptor(x, rows, cols):
    """Of (batch, seqlen, heads, dim), in blocks of some rows of one head; zeros come from past the end, nothing goes there."""
    batch, seqlen, heads, dim = x.shape
    batch_stride, row_stride, head_stride, _ = x.stride()
    # The stride of a dim of one element may be anything, also what a descriptor can't have.
    strides = [batch_stride if batch > 1 else 16, head_stride if heads > 1 else 16, row_stride if seqlen > 1 else 16, 1]
    return _descriptor(x, [batch, heads, seqlen, dim], strides, [1, 1, rows, cols], _layout(x.dtype, rows, cols))


def row_descriptor(x, rows):
    """Of all row statistics in one row."""
    return _descriptor(x, [x.numel()], [1], [rows], _ROW_LAYOUT)


def _descriptor(x, shape, strides, block_shape, layout):
    """A TensorDescriptor without its own checks, which cost 4 us each, more than the launch of a small kernel in all."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(base=x, shape=shape, strides=strides, block_shape=block_shape, layout=layout, padding="zero")
    return descriptor


_ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@lru_cache
def _layout(dtype, rows, cols):
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, cols], _GLUON_DTYPES[dtype])


def _rows(x):
    batch, row, head, _ = x.stride()
    return Rows(x, batch, row, head)


def _row_numbers(x):
    batch, head, row = x.stride()
    return Rows(x, batch, row, head)
