"""The portable forward kernel: FlashAttention-2's loop order in Triton, for every GPU from sm_80 on.

One program owns TILE_M queries of one head and walks over the key tiles that they see:

    scores = q kᵀ;  row_max, p = online softmax;  acc = acc * correction + p v;  at the end out = acc / row_sum, lse

Key tiles that no query sees are skipped. Mask code runs in two loops at the edges (left: window; right: causal, window,
last keys), the loop between them has none. Takes every feature of `flashtile.attention`.

What it reaches on an H200 is in benchmarks/results/nvidia-h200/paper-portable.json: 56 to 67% of the measured roof at 16k
tokens. No warp specialisation and no TMA: between its two products a warp group waits for its own softmax, and only a second
block on the same SM fills the tensor cores meanwhile. Hence small tiles win, two blocks to an SM. Tried, as time over the best
tile (portable-tiles.json): 128 x 128 by 8 warps at head dim 64, one block to an SM: 1.06 to 1.47; one stage less at head dim
256: 1.21 to 1.46; one stage more: 1.00 to 1.09; 32 keys a tile: 1.04 to 1.44.
Small calls: at 64 tokens and head dim 32 the kernel takes 3.4 us (an empty one 0.6), in which q is waited for before the first
keys are asked for. `prefetch_rows` asks for them before, and products of 32 rows take head dims below 64 as they are: 6.5 to
6.0 us between events, where an empty kernel takes 3.4; in a queue of calls, on another machine, 7.2 to 6.6, an empty one 4.1
(single runs, not recorded). Either alone: 6.4, and 6.9 to 7.1. Tried there as well: 16 rows a tile 6.4, one stage 6.2, keys in
tiles of 32 6.3; in the queue 6.6 to 6.8, 6.8, 7.5.
Causal calls whose heads all go one after the other end late: the last ones' longest tiles begin when most programs have
nothing left. `tail_heads` of the tile's config go side by side. Time of forward and backward over that without, H200, single
runs, medians of 7 shuffled rounds, with as many last tiles as give each multiprocessor 16 warps: 16384 tokens of 2048 columns,
head dim 64 0.95 to 1.01, 0.97 to 1.01; 128 0.96 to 1.00, 0.94 to 1.02; 256 0.89 to 0.97, 0.94 to 1.01; 1 x 5537 of 5 heads of
128 0.80, 0.87; 3 x 3200 of 16 on 4 of 64 0.92, 0.81; 2 x 1500 of 12 of 96 0.79, 0.80. Half as many as that 0 to 3% slower,
twice as many within 1%, all tiles of all heads 1.1 to 1.4 times as long at 512 and 1024 tokens.
Head dims from 129 to 192 are two blocks of columns (`tiles.blocks_of`): 0.83 to 0.90 of the time of one with zeros. These,
and which tiles are fast with the instructions of GPUs before Hopper: docs/kernels/portable-forward.md.
A grid of three dims, whose programs divide nothing: in a queue 5.38 to 5.25, 4 x 256 tokens 7.78 to 7.71 (another machine).

Source: Dao 2023, FlashAttention-2, algorithm 1.
"""

from functools import partial

import triton
import triton.language as tl

from flashtile import settings
from flashtile.device import blocks, masks, schedule, scores, softmax
from flashtile.device import dropout as dropouts
from flashtile.device.launch import Launches
from flashtile.device.lengths import load_lengths
from flashtile.device.numerics import NEG_INF
from flashtile.device.tensors import aligned, head_ptr, prefetch_rows, rows_of
from flashtile.outputs import forward_outputs
from flashtile.portable.arguments import common_arguments
from flashtile.problem import Operands


@triton.jit
def _absorb_tile(
    state, acc, q, k_ptr, v_ptr, k_row_stride, v_row_stride, row_begin, n_tile, lengths, window, score_params, slope,
    stream, dropout, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One key tile: scores, online softmax, p v. With MASKED some element of the tile is hidden."""
    rows = row_begin + tl.arange(0, TILE_M)
    col_begin = n_tile * TILE_N
    cols = col_begin + tl.arange(0, TILE_N)
    k = blocks.load(k_ptr, col_begin, lengths.seqlen_k, k_row_stride, TILE_N, HEAD_DIM, BLOCK_D, REST_D, MASKED, WIDE)
    # (TILE_M, TILE_N)
    diagonal = row_begin + lengths.seqlen_k - lengths.seqlen_q - col_begin
    logits = scores.logits(blocks.dot_rows(q, k, q[0].dtype), tl.arange(0, TILE_M)[:, None], tl.arange(0, TILE_N)[None, :],
                           diagonal, slope, score_params)  # fmt: skip
    if MASKED:
        logits = tl.where(masks.visible(rows[:, None], cols[None, :], lengths, window), logits, NEG_INF)
    state, p, correction = softmax.update(state, logits, scores.scale_log2(score_params), MASKED)
    if dropout.rng_state is not None:
        p = tl.where(dropouts.keep_tile(row_begin, col_begin, stream, dropout, TILE_M, TILE_N), p, 0.0)
    v = blocks.load(v_ptr, col_begin, lengths.seqlen_k, v_row_stride, TILE_N, HEAD_DIM_V, BLOCK_DV, REST_DV, MASKED, WIDE)
    return state, blocks.dot_add(p, v, blocks.scaled(acc, correction[:, None]), v[0].dtype)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "num_tiles", "tail_heads"])
def attention_forward(
    q, k, v, out, lse, packing, window, score_params, sinks, dropout, seqlen_q, seqlen_k, num_tiles, num_heads,
    tail_heads, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    WIDE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """q, k, v, out, lse: Rows. packing: Packing. window: Window. score_params: ScoreParams. sinks: pointer or None."""
    q, k, v, out = aligned(q), aligned(k), aligned(v), aligned(out)
    work = schedule.tile_of_program(num_tiles, num_heads, tail_heads, LAST_FIRST=window.right is not None)
    lengths = load_lengths(packing, work.batch, seqlen_q, seqlen_k)
    row_begin = work.tile * TILE_M
    if row_begin < lengths.seqlen_q:
        rows = row_begin + tl.arange(0, TILE_M)
        kv_head = work.head // GROUP_SIZE
        q_ptr = head_ptr(q, work.batch, lengths.start_q, work.head)
        k_ptr = head_ptr(k, work.batch, lengths.start_k, kv_head)
        v_ptr = head_ptr(v, work.batch, lengths.start_k, kv_head)
        slope = scores.load_slope(score_params, work.batch, work.head)
        stream = dropouts.load_stream(dropout, work.batch * num_heads + work.head)
        tiles = masks.key_range(row_begin, lengths, window, TILE_M, TILE_N)

        if PREFETCH:
            prefetch_rows(k_ptr, tiles.begin * TILE_N, lengths.seqlen_k, k.row_stride, TILE_N)
            prefetch_rows(v_ptr, tiles.begin * TILE_N, lengths.seqlen_k, v.row_stride, TILE_N)
        q_tile = blocks.load(q_ptr, row_begin, lengths.seqlen_q, q.row_stride, TILE_M, HEAD_DIM, BLOCK_D, REST_D, True, WIDE)
        state = softmax.OnlineSoftmax(tl.full((TILE_M,), NEG_INF, tl.float32), tl.zeros((TILE_M,), tl.float32))
        acc = blocks.zeros(TILE_M, BLOCK_DV, REST_DV, tl.float32)
        for part in tl.static_range(3):
            if part != 0 or window.left is not None:
                begin, end = masks.part_of(tiles, part)
                for n_tile in tl.range(begin, end):
                    state, acc = _absorb_tile(
                        state, acc, q_tile, k_ptr, v_ptr, k.row_stride, v.row_stride, row_begin, n_tile, lengths,
                        window, score_params, slope, stream, dropout, TILE_M, TILE_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D,
                        REST_D, BLOCK_DV, REST_DV, WIDE, MASKED=part != 1,
                    )  # fmt: skip
        if sinks is not None:
            state, correction = softmax.absorb_sink(state, tl.load(sinks + work.head).to(tl.float32))
            acc = blocks.scaled(acc, correction[:, None])
        inverse, row_lse = softmax.finish(state)
        if dropout.rng_state is not None:
            inverse = inverse * dropout.keep_scale
        out_ptr = head_ptr(out, work.batch, lengths.start_q, work.head)
        blocks.store(out_ptr, blocks.scaled(acc, inverse[:, None]), row_begin, lengths.seqlen_q, out.row_stride, TILE_M,
                     HEAD_DIM_V, BLOCK_DV, REST_DV, WIDE)  # fmt: skip
        lse_ptr = head_ptr(lse, work.batch, lengths.start_q, work.head)
        tl.store(lse_ptr + rows * lse.row_stride, row_lse, mask=rows < lengths.seqlen_q)


def launch(problem, config, operands):
    """Run the kernel. config: PortableConfig. Returns out and lse as `flashtile.attention` describes them."""
    return bind(problem, config)(operands)


def bind(problem, config):
    """`launch` as a function of operands, for calls of one kind (see `Launches`)."""
    launches = Launches(partial(_start, problem, config))
    # Packed rows may belong to no sequence.
    allocate = forward_outputs(problem, cleared=problem.varlen)
    is_empty = 0 in (problem.longest_q, problem.num_heads, problem.batch)

    def call(operands):
        out, lse = allocate(operands.q)
        if not is_empty:
            launches.run(*operands, out, lse)
        return out, lse

    return call


def _start(problem, config, launch, *tensors):
    *operands, out, lse = tensors
    operands = Operands(*operands)
    num_tiles = triton.cdiv(problem.longest_q, config.tile_m)
    packing, window, score_params, dropout, shapes = common_arguments(problem, operands, config.narrow)
    arguments = (
        rows_of(operands.q), rows_of(operands.k), rows_of(operands.v), rows_of(out), rows_of(lse, lse=True), packing, window,
        score_params, operands.sinks, dropout, problem.seqlen_q, problem.seqlen_k, num_tiles, problem.num_heads,
        config.tail_heads,
    )  # fmt: skip
    # Where a row is part of a cache line: in 16 bits only the tiles of small calls have such blocks
    prefetch = max(shapes["BLOCK_D"], shapes["BLOCK_DV"]) * problem.dtype.itemsize < 128 and not settings.triton_interprets()
    grid = schedule.grid_of(num_tiles, problem.num_heads, problem.batch, config.tail_heads)
    launch(attention_forward, grid, arguments,
           {"TILE_M": config.tile_m, "TILE_N": config.tile_n, **shapes, "PREFETCH": prefetch}, num_warps=config.num_warps,
           num_stages=config.num_stages)  # fmt: skip
