"""The portable backward kernels, in Triton, for every GPU from sm_80 on.

    delta = rowsum(dout * out) - dlse                         one pass over out and dout
    dscores = p * (dp - delta),  p = exp(logits - lse),  dp = dout vᵀ
    dv = pᵀ dout,  dk = scale * dscoresᵀ q                    one program a key tile, walking over query tiles and the group
    dq = scale * dscores k                                    one program a query tile, walking over key tiles
    dslopes = -sum(dlogits * distance from the diagonal)      that walk without dq, where it is asked for

Scores are recomputed in both main kernels: seven products instead of five, but no atomics, no fp32 dq in memory, no
conversion pass, and the same bits in every run. Group heads are summed inside a program, so dk and dv of grouped queries
are never repeated in memory. Takes every feature of `flashtile.attention`. dslopes come from this tier beside every GPU
backward, for scores and dp once more: causal, 2 x 8192 tokens, head dim 128 2095 to 3350 us with the Hopper tier, 64 2780 to
4160 (single runs).

What limits it on an H200: registers. dk and dv of one key tile and two tiles of scores leave none over at head dim 128, and
at 256 the dkdv kernel spills 232 bytes a thread and reaches 0.86 to 0.97 of SDPA's flash backend (paper-portable.json). Tried,
as time over the best tile (portable-tiles.json): dkdv with 64 query rows at head dim 128: 1.21 to 1.54; with 128 keys at head
dim 256: 2.4 to 2.7; with two stages instead of three: 1.00 to 1.25 at head dim 64; dq with one stage at head dim 256: 1.20 to
1.30.
Source: Dao 2023, FlashAttention-2, algorithm 2.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from flashtile.device import blocks, groups, masks, schedule, scores
from flashtile.device import dropout as dropouts
from flashtile.device.launch import Launches, launch_now
from flashtile.device.lengths import load_lengths
from flashtile.device.numerics import LOG2_E, NEG_INF, POS_INF
from flashtile.device.tensors import aligned, head_ptr, rows_of
from flashtile.gradients import sinks_gradient, slopes_gradient
from flashtile.outputs import fresh, gradients, gradients_of_parts
from flashtile.portable.arguments import common_arguments
from flashtile.problem import Operands
from flashtile.tiles import padded_dim


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "num_tiles"])
def attention_delta(
    out, dout, dlse, lse, delta, packing, seqlen_q, seqlen_k, num_tiles, num_heads,
    TILE_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out) - dlse, fp32. dlse, lse: Rows, or None. dlse of rows without a key, often NaN, is left out."""
    out, dout = aligned(out), aligned(dout)
    work = schedule.tile_of_program(num_tiles, num_heads, None, LAST_FIRST=False)
    lengths = load_lengths(packing, work.batch, seqlen_q, seqlen_k)
    row_begin = work.tile * TILE_M
    if row_begin < lengths.seqlen_q:
        rows = row_begin + tl.arange(0, TILE_M)
        out_ptr = head_ptr(out, work.batch, lengths.start_q, work.head)
        dout_ptr = head_ptr(dout, work.batch, lengths.start_q, work.head)
        out_tile = blocks.load(out_ptr, row_begin, lengths.seqlen_q, out.row_stride, TILE_M, HEAD_DIM_V, BLOCK_DV, REST_DV,
                               True, WIDE)  # fmt: skip
        dout_tile = blocks.load(dout_ptr, row_begin, lengths.seqlen_q, dout.row_stride, TILE_M, HEAD_DIM_V, BLOCK_DV, REST_DV,
                                True, WIDE)  # fmt: skip
        row_delta = tl.sum(out_tile[0].to(tl.float32) * dout_tile[0].to(tl.float32), 1)
        if REST_DV > 0:
            row_delta += tl.sum(out_tile[1].to(tl.float32) * dout_tile[1].to(tl.float32), 1)
        if dlse is not None:
            dlse_ptr = head_ptr(dlse, work.batch, lengths.start_q, work.head)
            lse_ptr = head_ptr(lse, work.batch, lengths.start_q, work.head)
            row_lse = tl.load(lse_ptr + rows * lse.row_stride, mask=rows < lengths.seqlen_q, other=NEG_INF)
            row_delta -= tl.load(dlse_ptr + rows.to(tl.int64) * dlse.row_stride, mask=row_lse != NEG_INF, other=0.0)
        delta_ptr = head_ptr(delta, work.batch, lengths.start_q, work.head)
        tl.store(delta_ptr + rows * delta.row_stride, row_delta, mask=rows < lengths.seqlen_q)


@triton.jit
def _load_row_stats(lse_ptr, delta_ptr, rows, lengths, MASKED: tl.constexpr):
    """lse in base 2 and delta of a query tile. Rows without a key and rows past the end get lse +inf, hence p = 0."""
    if MASKED:
        lse = tl.load(lse_ptr + rows, mask=rows < lengths.seqlen_q, other=POS_INF)
        delta = tl.load(delta_ptr + rows, mask=rows < lengths.seqlen_q, other=0.0)
        lse = tl.where(lse == NEG_INF, POS_INF, lse)
    else:
        lse = tl.load(lse_ptr + rows)
        delta = tl.load(delta_ptr + rows)
    return lse * LOG2_E, delta


@triton.jit
def _p_and_dlogits(raw_scores, dp, lse_log2, delta, kept, row_begin, col_begin, rows, cols, lengths, window, score_params,
                   slope, dropout, MASKED: tl.constexpr):  # fmt: skip
    """(p as v was weighted with, gradient of the logits) of a tile in either orientation; all broadcast to its shape.

    rows, cols: row_begin, col_begin and on. kept: mask of the weights that dropout leaves.
    """
    diagonal = row_begin + lengths.seqlen_k - lengths.seqlen_q - col_begin
    logits = scores.logits(raw_scores, rows - row_begin, cols - col_begin, diagonal, slope, score_params)
    p = tl.exp2(logits * scores.scale_log2(score_params) - lse_log2)
    if MASKED:
        p = tl.where(masks.visible(rows, cols, lengths, window), p, 0.0)
    weights = p
    if dropout.rng_state is not None:
        weights = tl.where(kept, p, 0.0)
        dp = tl.where(kept, dp * dropout.keep_scale, 0.0)
    return weights, p * (dp - delta)


@triton.jit
def _absorb_query_tile(
    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, q_row_stride, dout_row_stride, col_begin, m_tile, lengths, window,
    score_params, slope, stream, dropout, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk and dv from one query tile. Tiles are (TILE_N, TILE_M): so pᵀ and dscoresᵀ are operands as they come."""
    row_begin = m_tile * TILE_M
    rows = row_begin + tl.arange(0, TILE_M)
    q = blocks.load(q_ptr, row_begin, lengths.seqlen_q, q_row_stride, TILE_M, HEAD_DIM, BLOCK_D, REST_D, MASKED, WIDE)
    lse_log2, delta = _load_row_stats(lse_ptr, delta_ptr, rows, lengths, MASKED)
    dout = blocks.load(dout_ptr, row_begin, lengths.seqlen_q, dout_row_stride, TILE_M, HEAD_DIM_V, BLOCK_DV, REST_DV, MASKED,
                       WIDE)  # fmt: skip
    kept = dropouts.keep_tile(row_begin, col_begin, stream, dropout, TILE_M, TILE_N)
    if dropout.rng_state is not None:
        kept = kept.T
    cols = col_begin + tl.arange(0, TILE_N)
    dtype: tl.constexpr = q[0].dtype
    raw_scores = blocks.dot_rows(k, q, dtype)
    weights, dlogits = _p_and_dlogits(
        raw_scores, blocks.dot_rows(v, dout, dtype), lse_log2[None, :], delta[None, :], kept, row_begin, col_begin,
        rows[None, :], cols[:, None], lengths, window, score_params, slope, dropout, MASKED,
    )  # fmt: skip
    dscores = scores.through_softcap(dlogits, raw_scores, score_params)
    dv = blocks.dot_add(weights, dout, dv, dtype)
    dk = blocks.dot_add(dscores, q, dk, dtype)
    return dk, dv


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "num_tiles", "tail_heads", "splits"])
def attention_dkdv(
    q, k, v, dout, lse, delta, dk, dv, packing, window, score_params, dropout, seqlen_q, seqlen_k, num_tiles, num_heads,
    tail_heads, splits, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program a tile of TILE_N keys of one key-value head; walks over the query tiles of every head in its group.

    With `splits` parts of a group, GROUP_SIZE heads each, in its part; dk and dv are then those of parts.
    """
    q, k, v, dout, dk, dv = aligned(q), aligned(k), aligned(v), aligned(dout), aligned(dk), aligned(dv)
    work = schedule.tile_of_program(num_tiles, num_heads // GROUP_SIZE, tail_heads, LAST_FIRST=False)
    lengths = load_lengths(packing, work.batch, seqlen_q, seqlen_k)
    col_begin = work.tile * TILE_N
    if col_begin < lengths.seqlen_k:
        k_ptr = head_ptr(k, work.batch, lengths.start_k, work.head // splits)
        v_ptr = head_ptr(v, work.batch, lengths.start_k, work.head // splits)
        k_tile = blocks.load(k_ptr, col_begin, lengths.seqlen_k, k.row_stride, TILE_N, HEAD_DIM, BLOCK_D, REST_D, True, WIDE)
        v_tile = blocks.load(v_ptr, col_begin, lengths.seqlen_k, v.row_stride, TILE_N, HEAD_DIM_V, BLOCK_DV, REST_DV, True,
                             WIDE)  # fmt: skip
        tiles = masks.query_range(col_begin, lengths, window, TILE_M, TILE_N)
        dk_acc = blocks.zeros(TILE_N, BLOCK_D, REST_D, tl.float32)
        dv_acc = blocks.zeros(TILE_N, BLOCK_DV, REST_DV, tl.float32)
        for member in range(GROUP_SIZE):
            head = work.head * GROUP_SIZE + member
            q_ptr = head_ptr(q, work.batch, lengths.start_q, head)
            dout_ptr = head_ptr(dout, work.batch, lengths.start_q, head)
            lse_ptr = head_ptr(lse, work.batch, lengths.start_q, head)
            delta_ptr = head_ptr(delta, work.batch, lengths.start_q, head)
            slope = scores.load_slope(score_params, work.batch, head)
            stream = dropouts.load_stream(dropout, work.batch * num_heads + head)
            for part in tl.static_range(3):
                if part != 0 or window.right is not None:
                    begin, end = masks.part_of(tiles, part)
                    for m_tile in tl.range(begin, end):
                        dk_acc, dv_acc = _absorb_query_tile(
                            dk_acc, dv_acc, k_tile, v_tile, q_ptr, dout_ptr, lse_ptr, delta_ptr, q.row_stride,
                            dout.row_stride, col_begin, m_tile, lengths, window, score_params, slope, stream, dropout, TILE_M,
                            TILE_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, REST_D, BLOCK_DV, REST_DV, WIDE, MASKED=part != 1,
                        )  # fmt: skip
        if dropout.rng_state is not None:
            dv_acc = blocks.scaled(dv_acc, dropout.keep_scale)
        dk_ptr = head_ptr(dk, work.batch, lengths.start_k, work.head)
        dv_ptr = head_ptr(dv, work.batch, lengths.start_k, work.head)
        blocks.store(dk_ptr, blocks.scaled(dk_acc, score_params.scale), col_begin, lengths.seqlen_k, dk.row_stride, TILE_N,
                     HEAD_DIM, BLOCK_D, REST_D, WIDE)  # fmt: skip
        blocks.store(dv_ptr, dv_acc, col_begin, lengths.seqlen_k, dv.row_stride, TILE_N, HEAD_DIM_V, BLOCK_DV, REST_DV, WIDE)


@triton.jit
def _absorb_key_tile(
    acc, q, dout, lse_log2, delta, k_ptr, v_ptr, k_row_stride, v_row_stride, row_begin, n_tile, lengths, window, score_params,
    slope, stream, dropout, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr, WIDE: tl.constexpr,
    OF_SLOPES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq from one key tile, or OF_SLOPES what each row adds to a slope's gradient."""
    rows = row_begin + tl.arange(0, TILE_M)
    col_begin = n_tile * TILE_N
    cols = col_begin + tl.arange(0, TILE_N)
    k = blocks.load(k_ptr, col_begin, lengths.seqlen_k, k_row_stride, TILE_N, HEAD_DIM, BLOCK_D, REST_D, MASKED, WIDE)
    v = blocks.load(v_ptr, col_begin, lengths.seqlen_k, v_row_stride, TILE_N, HEAD_DIM_V, BLOCK_DV, REST_DV, MASKED, WIDE)
    kept = dropouts.keep_tile(row_begin, col_begin, stream, dropout, TILE_M, TILE_N)
    dtype: tl.constexpr = q[0].dtype
    raw_scores = blocks.dot_rows(q, k, dtype)
    _, dlogits = _p_and_dlogits(
        raw_scores, blocks.dot_rows(dout, v, dtype), lse_log2[:, None], delta[:, None], kept, row_begin, col_begin,
        rows[:, None], cols[None, :], lengths, window, score_params, slope, dropout, MASKED,
    )  # fmt: skip
    if OF_SLOPES:
        diagonal = row_begin + lengths.seqlen_k - lengths.seqlen_q - col_begin
        in_rows, in_cols = tl.arange(0, TILE_M)[:, None], tl.arange(0, TILE_N)[None, :]
        return acc + tl.sum(dlogits * scores.bias(in_rows, in_cols, diagonal, -1.0), 1)
    else:
        dscores = scores.through_softcap(dlogits, raw_scores, score_params)
        return blocks.dot_add(dscores, k, acc, dtype)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "num_tiles", "tail_heads"])
def attention_dq(
    q, k, v, dout, lse, delta, dq, dslopes, packing, window, score_params, dropout, seqlen_q, seqlen_k, num_tiles, num_heads,
    tail_heads, GROUP_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program a tile of TILE_M queries of one head; walks over the key tiles that they see, as the forward does.

    dq: Rows; or None, and dslopes, fp32 (batch, num_heads, num_tiles): what each program adds to a slope's gradient.
    """
    OF_SLOPES: tl.constexpr = dslopes is not None
    q, k, v, dout = aligned(q), aligned(k), aligned(v), aligned(dout)
    if dq is not None:
        dq = aligned(dq)
    work = schedule.tile_of_program(num_tiles, num_heads, tail_heads, LAST_FIRST=window.right is not None)
    lengths = load_lengths(packing, work.batch, seqlen_q, seqlen_k)
    row_begin = work.tile * TILE_M
    if row_begin < lengths.seqlen_q:
        rows = row_begin + tl.arange(0, TILE_M)
        kv_head = work.head // GROUP_SIZE
        q_ptr = head_ptr(q, work.batch, lengths.start_q, work.head)
        dout_ptr = head_ptr(dout, work.batch, lengths.start_q, work.head)
        k_ptr = head_ptr(k, work.batch, lengths.start_k, kv_head)
        v_ptr = head_ptr(v, work.batch, lengths.start_k, kv_head)
        slope = scores.load_slope(score_params, work.batch, work.head)
        stream = dropouts.load_stream(dropout, work.batch * num_heads + work.head)
        q_tile = blocks.load(q_ptr, row_begin, lengths.seqlen_q, q.row_stride, TILE_M, HEAD_DIM, BLOCK_D, REST_D, True, WIDE)
        dout_tile = blocks.load(dout_ptr, row_begin, lengths.seqlen_q, dout.row_stride, TILE_M, HEAD_DIM_V, BLOCK_DV, REST_DV,
                                True, WIDE)  # fmt: skip
        lse_ptr = head_ptr(lse, work.batch, lengths.start_q, work.head)
        delta_ptr = head_ptr(delta, work.batch, lengths.start_q, work.head)
        lse_log2, row_delta = _load_row_stats(lse_ptr, delta_ptr, rows, lengths, True)
        tiles = masks.key_range(row_begin, lengths, window, TILE_M, TILE_N)
        if OF_SLOPES:
            acc = tl.zeros((TILE_M,), tl.float32)
        else:
            acc = blocks.zeros(TILE_M, BLOCK_D, REST_D, tl.float32)
        for part in tl.static_range(3):
            if part != 0 or window.left is not None:
                begin, end = masks.part_of(tiles, part)
                for n_tile in tl.range(begin, end):
                    acc = _absorb_key_tile(
                        acc, q_tile, dout_tile, lse_log2, row_delta, k_ptr, v_ptr, k.row_stride, v.row_stride, row_begin,
                        n_tile, lengths, window, score_params, slope, stream, dropout, TILE_M, TILE_N, HEAD_DIM, HEAD_DIM_V,
                        BLOCK_D, REST_D, BLOCK_DV, REST_DV, WIDE, OF_SLOPES, MASKED=part != 1,
                    )  # fmt: skip
        if OF_SLOPES:
            place = (work.batch * num_heads + work.head).to(tl.int64) * num_tiles + work.tile
            tl.store(dslopes + place, tl.sum(acc, 0))
        else:
            dq_ptr = head_ptr(dq, work.batch, lengths.start_q, work.head)
            blocks.store(dq_ptr, blocks.scaled(acc, score_params.scale), row_begin, lengths.seqlen_q, dq.row_stride, TILE_M,
                         HEAD_DIM, BLOCK_D, REST_D, WIDE)  # fmt: skip


def bind(problem, configs):
    """The three kernels as a function of operands, out, lse, dout, dlse, for calls of one kind (see `Launches`).

    configs: {"delta", "dkdv", "dq": PortableConfig}. It returns dq, dk, dv, dsinks (None without sinks).
    """
    launches = Launches(partial(_start, problem, configs))
    allocate = gradients(problem, clear_q=problem.varlen, clear_kv=problem.varlen)
    new_parts = gradients_of_parts(problem, configs["dkdv"].splits, zeros=problem.varlen)

    def call(operands, out, lse, dout, dlse):
        dq, dk, dv = allocate(*operands[:3])
        delta = _allocate_like(lse, problem)
        launches.run(*operands, out, lse, dout, dlse, delta, dq, dk, dv, *new_parts(operands.k))
        return dq, dk, dv, sinks_gradient(operands.sinks, lse, delta)

    return call


def dslopes_of_tiles(problem, config):
    """A function that allocates what each query tile adds to the slopes' gradients, on a tensor's device.

    Zeros, since sequences may have fewer tiles than the longest.
    """
    num_tiles = triton.cdiv(problem.longest_q, config.tile_m)
    return fresh((problem.batch, problem.num_heads, num_tiles), torch.float32, zeros=True)


def bind_dslopes(problem, configs):
    """As `bind`, of dslopes alone: scores and dp once more, two products beside the backward's. configs: {"delta", "dq"}."""
    launches = Launches(partial(_start_dslopes, problem, configs))
    allocate = dslopes_of_tiles(problem, configs["dq"])

    def call(operands, out, lse, dout, dlse):
        dslopes = allocate(lse)
        launches.run(*operands, out, lse, dout, dlse, _allocate_like(lse, problem), dslopes)
        return slopes_gradient(operands.alibi_slopes, dslopes.sum(-1))

    return call


def _start_dslopes(problem, configs, launch, *tensors):
    *operands, out, lse, dout, dlse, delta, dslopes = tensors
    operands = Operands(*operands)
    common = common_arguments(problem, operands, configs["dq"].narrow)
    launch_delta(problem, configs["delta"], common, out, lse, dout, dlse, delta, launch)
    launch_dq(problem, configs["dq"], common, operands, lse, delta, dout, None, dslopes, launch)


def _start(problem, configs, launch, *tensors):
    *operands, out, lse, dout, dlse, delta, dq, dk, dv, dk_parts, dv_parts = tensors
    operands = Operands(*operands)
    common = common_arguments(problem, operands, configs["dq"].narrow)
    launch_delta(problem, configs["delta"], common, out, lse, dout, dlse, delta, launch)
    launch_dkdv(problem, configs["dkdv"], common, operands, lse, delta, dout, (dk, dv, dk_parts, dv_parts), launch)
    launch_dq(problem, configs["dq"], common, operands, lse, delta, dout, dq, None, launch)


def launch_delta(problem, config, common, out, lse, dout, dlse, delta=None, launch=launch_now):
    """Write delta, of the shape of lse. The outputs of this and the next two functions are made where they are not given."""
    delta = _allocate_like(lse, problem) if delta is None else delta
    num_tiles = triton.cdiv(problem.longest_q, config.tile_m)
    arguments = (
        rows_of(out), rows_of(dout), *(None if dlse is None else rows_of(x, lse=True) for x in (dlse, lse)),
        rows_of(delta, lse=True), common.packing, problem.seqlen_q, problem.seqlen_k, num_tiles, problem.num_heads,
    )  # fmt: skip
    constexprs = {name: common.shapes[name] for name in ("HEAD_DIM_V", "BLOCK_DV", "REST_DV", "WIDE")}
    _launch(launch, attention_delta, schedule.grid_of(num_tiles, problem.num_heads, problem.batch), arguments,
            {"TILE_M": config.tile_m, **constexprs}, config)  # fmt: skip


def launch_dkdv(problem, config, common, operands, lse, delta, dout, outputs=None, launch=launch_now):
    """Write dk and dv, of the shapes of k and v, contiguous; outputs: these, and those of `gradients_of_parts`.

    Returns dk and dv.
    """
    if outputs is None:
        parts = gradients_of_parts(problem, config.splits, zeros=problem.varlen)(operands.k)
        outputs = *(_allocate_like(x, problem) for x in operands[1:3]), *parts
    dk, dv, dk_parts, dv_parts = outputs
    written = (dk, dv) if dk_parts is None else (dk_parts, dv_parts)
    num_tiles = triton.cdiv(problem.longest_k, config.tile_n)
    arguments = (
        *_inputs(operands, lse, delta, dout), *map(rows_of, written), common.packing, common.window, common.score_params,
        common.dropout, problem.seqlen_q, problem.seqlen_k, num_tiles, problem.num_heads,
        config.tail_heads, config.splits,
    )  # fmt: skip
    constexprs = {"TILE_M": config.tile_m, "TILE_N": config.tile_n, **common.shapes}
    constexprs["GROUP_SIZE"] = problem.group_size // config.splits
    grid = schedule.grid_of(num_tiles, problem.num_heads_kv * config.splits, problem.batch, config.tail_heads)
    _launch(launch, attention_dkdv, grid, arguments, constexprs, config)
    if 0 not in grid:
        padded = (padded_dim(dim, problem.dtype.itemsize) for dim in (problem.head_dim, problem.head_dim_v))
        groups.launch_add((dk, dv), (dk_parts, dv_parts), padded, config.splits, launch)
    return dk, dv


def launch_dq(problem, config, common, operands, lse, delta, dout, dq=None, dslopes=None, launch=launch_now):
    """Write dq, of the shape of q, contiguous, or where dslopes is given that alone. Returns dq."""
    if dq is None and dslopes is None:
        dq = _allocate_like(operands.q, problem)
    num_tiles = triton.cdiv(problem.longest_q, config.tile_m)
    arguments = (
        *_inputs(operands, lse, delta, dout), None if dq is None else rows_of(dq), dslopes, common.packing, common.window,
        common.score_params, common.dropout, problem.seqlen_q, problem.seqlen_k, num_tiles, problem.num_heads,
        config.tail_heads,
    )  # fmt: skip
    constexprs = {"TILE_M": config.tile_m, "TILE_N": config.tile_n, **common.shapes}
    grid = schedule.grid_of(num_tiles, problem.num_heads, problem.batch, config.tail_heads)
    _launch(launch, attention_dq, grid, arguments, constexprs, config)
    return dq


def _launch(launch, kernel, grid, arguments, constexprs, config):
    if 0 not in grid:
        launch(kernel, grid, arguments, constexprs, num_warps=config.num_warps, num_stages=config.num_stages)


def _inputs(operands, lse, delta, dout):
    q, k, v = operands[:3]
    return rows_of(q), rows_of(k), rows_of(v), rows_of(dout), rows_of(lse, lse=True), rows_of(delta, lse=True)


def _allocate_like(x, problem):
    """Contiguous; zeros for a packed call, since rows outside of every sequence are no kernel's."""
    return (torch.zeros_like if problem.varlen else torch.empty_like)(x, memory_format=torch.contiguous_format)
