"""From a problem and its tensors to the arguments of the Hopper kernels: TMA descriptors, schedule, flags."""

from functools import partial

import torch

from flashtile import counters, hardware
from flashtile.device import chain, combine, schedule
from flashtile.device.compat import TensorDescriptor, gl
from flashtile.device.dropout import dropout_of
from flashtile.device.launch import Launches
from flashtile.device.lengths import Packing
from flashtile.device.masks import Window
from flashtile.device.numerics import LOG2_E
from flashtile.device.scores import SMALLEST_UNIT, cap_of, params_of
from flashtile.hopper import MAX_PACKED_ROWS, PACKED_ROWS
from flashtile.outputs import forward_outputs, outputs_of_parts
from flashtile.problem import FP8, Operands
from flashtile.tiles import box_columns, column_boxes, live_columns, packed_tiles, padded_dim

ROWS = 64
# Registers of a thread of consumers and of the producers, 65536 to a multiprocessor; where tokens are gathered these need more
REGISTERS = {2: (240, 24), 3: (160, 24), 4: (112, 24)}
REGISTERS_GATHERED = {2: (224, 56), 3: (160, 32), 4: (112, 32)}
# Of consumers, the partition that turns fp8 values, and the producers; and warps of that partition
REGISTERS_FP8 = {2: (224, 40, 24), 3: (160, 32, 32)}
TURN_WARPS = {2: 4, 3: 2}
# Of a key, in the product that adds ALiBi's bias
BIAS_BYTES = 32
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, FP8: gl.float8e4nv}
# The stride of a dim of size 1 means nothing, and may be one that TMA does not take. It takes 16 bytes
_ANY_STRIDE = 16


def descriptor(x, rows, block_dim, heads=1):
    """TMA descriptor of (batch, seqlen, heads, dim), as (batch, heads, seqlen, dim), for tiles of rows by block_dim.

    With more heads a tile, as it is: a tile holds rows // heads of each, those of one position side by side.
    """
    batch, seqlen, num_heads, dim = x.shape
    strides = x.stride()
    batch_stride, row_stride, head_stride = (_ANY_STRIDE if size == 1 else stride for size, stride in zip(x.shape[:3], strides))
    if heads > 1:
        block = [1, rows // heads, heads, block_dim]
        return TensorDescriptor(x, [*x.shape], [batch_stride, row_stride, head_stride, 1], block,
                                gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype]))  # fmt: skip
    block = [1, 1, rows, block_dim]
    return TensorDescriptor(x, [batch, num_heads, seqlen, dim], [batch_stride, head_stride, row_stride, 1], block,
                            gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype]))  # fmt: skip


def row_stride(x):
    """From one row to the next of (..., rows, heads, dim), of which the first dims are rows as well where each has one."""
    return next((stride for size, stride in zip(x.shape[-3::-1], x.stride()[-3::-1]) if size > 1), _ANY_STRIDE)


def packed_descriptor(x, rows, block_dim, heads=1):
    """TMA descriptor of packed rows (..., total, heads, dim), whose tiles end where a sequence ends.

    TMA fills with zeros, and leaves out of a store, what is past the size of a dim. Rows of a sequence of length n from
    `start` on are given coordinates that end at PACKED_ROWS: row i is (PACKED_ROWS, start + n, head, PACKED_ROWS - n + i, 0).
    With strides 2**34 - s, s, head stride, s its offset is 2**64 + (start + i) * s, and addresses have 64 bits.
    With more heads a tile the row comes before the head, see `descriptor`.
    """
    num_heads, dim = x.shape[-2:]
    apart, head_stride = row_stride(x), _ANY_STRIDE if num_heads == 1 else x.stride(-2)
    if heads > 1:
        block = [1, 1, rows // heads, heads, block_dim]
        return TensorDescriptor(x, [MAX_PACKED_ROWS, MAX_PACKED_ROWS, PACKED_ROWS, num_heads, dim],
                                [2**34 - apart, apart, apart, head_stride, 1], block,
                                gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype]))  # fmt: skip
    block = [1, 1, 1, rows, block_dim]
    return TensorDescriptor(x, [MAX_PACKED_ROWS, MAX_PACKED_ROWS, num_heads, PACKED_ROWS, dim],
                            [2**34 - apart, apart, head_stride, apart, 1], block,
                            gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype]))  # fmt: skip


def bind_forward(kernel, problem, config):
    """kernel, `forward.attention_forward`, as a function of operands -> (out, lse), for calls of one kind (see `Launches`)."""
    launches = Launches(partial(_start_forward, kernel, problem, config))
    table_size = table_entries(problem, config) if problem.varlen else 0
    # Rows that no sequence uses are as empty ones
    allocate = forward_outputs(problem, cleared=problem.has_seqused_q)
    is_empty = problem.seqlen_k == 0 or 0 in problem.lse_shape
    of_parts = outputs_of_parts(problem, config.key_parts)

    def call(operands):
        out, lse = allocate(operands.q)
        if is_empty:
            return _without_keys(out, lse, operands.sinks)
        table = out.new_empty(table_size, dtype=torch.int32) if table_size else None
        launches.run(*operands, out, lse, *of_parts(lse), table, counters.zeros(lse, 2))
        return out, lse

    return call


def _start_forward(kernel, problem, config, launch, *tensors):
    *operands, out, lse, out_parts, lse_parts, table, counter = tensors
    operands = Operands(*operands)
    if table is not None:
        _plan_forward(launch, problem, config, operands, out, lse, table)
    launch_forward(launch, kernel, problem, config, operands, (out, lse), (out_parts, lse_parts), table, counter)


def launch_forward(launch, kernel, problem, config, operands, results, parts, table, counter, *pages):
    """kernel, and what merges the parts of the keys where there are some.

    results: out and lse. parts: those of `outputs_of_parts`. pages: as the last arguments of `forward_arguments`.
    """
    cuts = config.key_parts > 1
    written = parts if cuts else results
    arguments, constexprs, grid = forward_arguments(problem, config, operands, *written, table, counter, *pages)
    launch(kernel, grid, arguments, constexprs, num_warps=4, **chain.after(table is not None))
    if cuts:
        # As a batch where they are packed
        out, lse, out_parts, lse_parts = (x if results[0].dim() == 4 else x[None] for x in (*results, *parts))
        num_heads = out.shape[-2]
        out_parts = out_parts.unflatten(-2, (-1, num_heads)).permute(2, 0, 1, 3, 4)
        combine.launch(out_parts, lse_parts.unflatten(1, (-1, num_heads)).transpose(0, 1), out, lse, launch,
                       chained=True)  # fmt: skip


def bind_resident(kernel, problem, config):
    """`bind_forward` of kernel `resident.attention_forward_resident`; config: ResidentConfig."""
    launches = Launches(partial(_start_resident, kernel, problem, config))
    table_size = table_entries(problem, config) if problem.varlen else 0
    allocate = forward_outputs(problem, cleared=problem.has_seqused_q)

    def call(operands):
        out, lse = allocate(operands.q)
        if 0 not in problem.lse_shape:
            launches.run(*operands, out, lse, out.new_empty(table_size, dtype=torch.int32) if table_size else None)
        return out, lse

    return call


def _boxes(x, rows):
    """Descriptors of boxes of x, and of its last columns or None: see `tiles.column_boxes`."""
    describe = packed_descriptor if x.dim() == 3 else descriptor
    wide, rest = column_boxes(x.shape[-1])
    return describe(x, rows, wide), describe(x, rows, rest) if rest else None


def _start_resident(kernel, problem, config, launch, *tensors):
    *operands, out, lse, table = tensors
    operands = Operands(*operands)
    q, k, v = operands[:3]
    num_parts = -(-problem.seqlen_q // config.queries)
    programs = problem.batch * num_parts
    if table is not None:
        programs = max_query_tiles(problem, config)
        _plan_forward(launch, problem, config, operands, out, lse, table)
    # Rows of the last piece divide those of all others
    tails = [_boxes(x, config.keys[-1]) if len(config.keys) > 1 else (None, None) for x in (k, v)]
    arguments = (
        *_boxes(q, ROWS), *_boxes(k, config.keys[0]), *tails[0], *_boxes(v, config.keys[0]), *tails[1], *_boxes(out, ROWS), lse,
        table, Window(*problem.window), float(problem.softmax_scale), problem.lse_shape[-1], problem.seqlen_q, problem.seqlen_k,
        problem.num_heads, num_parts, config.tiles,
    )  # fmt: skip
    hidden = problem.varlen or problem.masked
    constexprs = {
        "GROUP_SIZE": problem.group_size, "DIM": problem.head_dim, "DIM_V": problem.head_dim_v, "KEYS": config.keys,
        "MASKED": (hidden,) * (len(config.keys) - 1) + (hidden or problem.seqlen_k < sum(config.keys),),
    }  # fmt: skip
    launch(kernel, (programs * problem.num_heads,), arguments, constexprs, num_warps=4,
           maxnreg=min(255, 512 // config.programs_per_sm // 8 * 8), **chain.after(table is not None))  # fmt: skip


def _plan_forward(launch, problem, config, operands, out, lse, table):
    packing = Packing(operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqused_q, operands.seqused_k)
    # All rows are cleared before where sequences may use less than they have.
    rests, rest_lse = ((), None) if problem.has_seqused_q else ((schedule.rest_of(out, operands.cu_seqlens_q),), lse)
    launch_plan(launch, problem, table, packing, max_query_tiles(problem, config), config.queries, rests, (), rest_lse)


def _without_keys(out, lse, sinks):
    """What rows have that see nothing: TMA takes no empty tensor."""
    out.zero_()
    if sinks is None:
        lse.fill_(float("-inf"))
    else:
        lse.copy_(sinks.to(torch.float32)[:, None].expand_as(lse))
    return out, lse


def max_query_tiles(problem, config):
    """Tiles of queries of one head of a packed call, at most."""
    return packed_tiles(problem, config.queries, problem.total_q)


def table_entries(problem, config):
    """Numbers in the table that `schedule.plan_packed` writes."""
    return schedule.table_size(max_query_tiles(problem, config), problem.batch)


def launch_plan(launch, problem, table, packing, max_tiles, tile_rows, rests_q, rests_k, lse=None, sequences=0):
    """`schedule.plan_packed`, whose other programs than the first have something to do where there are rests.

    sequences: how many it may sort, or 0.
    """
    arguments = (table, packing, rests_q, rests_k, lse, problem.batch, max_tiles, problem.total_q, problem.total_k,
                 problem.num_heads)  # fmt: skip
    launch_table(launch, schedule.plan_packed, 33 if rests_q or rests_k else 1, arguments, tile_rows, SORTED=sequences)


def launch_table(launch, kernel, num_programs, arguments, tile_rows, **constexprs):
    """A kernel of `schedule` that writes a table of packed tiles."""
    constexprs = {"TILE_M": tile_rows, "BLOCK": 1024, **constexprs, "CHAINED": True}
    launch(kernel, (num_programs,), arguments, constexprs, num_warps=8)


def buffers(config, block_d, block_dv, smem_bytes, itemsize=2):
    """(whether the left half of the queries goes to registers, whether out has buffers beside those of two tiles of queries).

    Where out has none, it leaves through those of its own queries, but beside fp8, of another dtype.
    """
    if itemsize == 1:
        return False, True
    consumers = config.tile_m // ROWS
    split_q = block_d == 256
    stages = config.num_stages * config.tile_n * (block_d + block_dv) * itemsize
    # A left half has one buffer, since it is read as soon as it comes.
    q_bytes, out_bytes = ROWS * block_d * itemsize * (3 if split_q else 4) // 2, ROWS * block_dv * itemsize
    # 1024: barriers
    return split_q, smem_bytes - 1024 - stages >= consumers * (q_bytes + out_bytes)


def _value_slots(config, block_d, block_dv):
    """(slots of fp8 values, slots of those that are yet to be turned): as many as fit beside the rest, to 4 and 2.

    With two slots to a step each, consumers waited for values to be turned: see docs/kernels/hopper-forward.md.
    """
    queries = 2 * config.tile_m * block_d + 2 * config.tile_m * block_dv
    room = (227 << 10) - 1024 - queries - config.num_stages * config.tile_n * block_d
    slots = room // (config.tile_n * block_dv)
    raw = 2 if slots > 4 else 1
    return min(4, slots - raw), raw


def heads_in_groups(problem, config, num_tiles, num_sms):
    """(heads per group, heads of the last group) for `schedule.Order`, which takes heads that share tiles for one."""
    total_heads = problem.batch * problem.num_heads // config.heads
    group_size = problem.group_size // config.heads
    if problem.varlen:
        # Rows of keys that fit, heads that share them
        row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
        return (0 if problem.window[1] is None else config.l2_bytes // row_bytes), group_size
    if problem.window[1] is None:
        return 1, 0
    bytes_per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    # About 4 tiles a program in the last group: short enough that programs end together.
    most = max(1, config.l2_bytes // bytes_per_head) * group_size
    tail = min(total_heads, max(most, -(-4 * num_sms // (2 * num_tiles))))
    groups = -(-(total_heads - tail) // most)
    return (-(-(total_heads - tail) // groups) if groups else 1), tail


def _shift(problem):
    """How far the diagonal lies right of the first key, in tokens; None where packed sequences may have one each."""
    if problem.varlen:
        return 0 if problem.same_lengths else None
    return problem.seqlen_k - problem.seqlen_q


def _half_first(problem, config):
    """Whether under a causal mask one of two consumers takes the left half of its first key tile alone: it sees no more.

    With a softcap or ALiBi that was no gain: see docs/kernels/hopper-forward.md.
    """
    shift = _shift(problem)
    return (
        problem.causal and config.key_parts == 1 and shift is not None and shift % config.tile_n == 0
        and config.queries == 2 * ROWS == config.tile_n and not config.lazy
        and not problem.softcap and not problem.has_alibi and not problem.dropout_p
    )  # fmt: skip


def _last_rows_first(problem, config):
    """Whether the first of two consumers, whose turn is first, has the last rows of a tile: all of its first key tile then.

    No gain in short calls, and at head dim 192: see docs/kernels/hopper-forward.md.
    """
    long = problem.seqlen_k > 1024 or problem.window[0] is not None
    return _half_first(problem, config) and long and not config.rest_apart


def _cut_last(problem, config):
    """Whether the left edge of a window cuts one key tile of a consumer at most: its last, and never its first."""
    left, right = problem.window
    shift, queries = _shift(problem), ROWS // config.heads
    return (
        left is not None and config.key_parts == 1 and left >= config.tile_n - 1 and (right is None or right >= 0)
        and shift is not None and shift >= 0 and (shift - left) % queries in (0, 1)
        and not config.lazy and not problem.dropout_p
    )  # fmt: skip


def _half_last(problem, config):
    """Which of two consumers takes the right half of a tile that the left edge cuts alone: it sees no more; -1 for none."""
    two = config.queries == 2 * ROWS == config.tile_n
    if not two or not _cut_last(problem, config) or problem.has_alibi or problem.softcap:
        return -1
    return 1 - (_shift(problem) - problem.window[0]) % config.tile_n // ROWS


def _bias_product(problem, block_d, block_dv):
    """Whether a product adds ALiBi's bias: no key right of the diagonal is seen, so that distances are differences.

    Where its operand takes the memory that out would have, out leaves through the queries', which have its shape.
    """
    right = problem.window[1]
    return (
        problem.has_alibi and right is not None and right <= 0 and not problem.softcap and problem.dtype != FP8
        and problem.softmax_scale >= SMALLEST_UNIT and block_dv == block_d < 256
    )  # fmt: skip


# Base-2 logits up to which weights may be relative to 0: bf16 has them, and fp32 has 2**46 times as much
_BOUNDED = 80


def _capped(problem, config):
    """(`scores.Cap` or None, whether it bounds logits so that no maxima are needed).

    fp16 has not the range of such weights, and ALiBi has no bound: it keeps maxima, and polynomials in units of the softcap. Of
    fp8 each head has a scale of its own.
    """
    if problem.has_alibi or problem.dtype == FP8:
        return None, False
    softcap_log2 = problem.softcap * LOG2_E.value
    bounded = softcap_log2 <= _BOUNDED and problem.dtype == torch.bfloat16
    # At head dim 256 polynomials are no gain without that
    cap = cap_of(problem, softcap_log2 if bounded else 1.0) if bounded or not config.lazy else None
    return cap, bounded and cap is not None


def forward_arguments(
    problem, config, operands, out, lse, table, counter, pages=None, page_size=0, page_rows=0, descales=None
):
    """(arguments, constexprs, grid) of `forward.attention_forward`. table: of `schedule.plan_packed`, or None.

    out and lse of a packed call may be batched: then its sequences have one length. pages: what the kernel makes
    `cache.Pages` of, or None; page_rows: of boxes of a page, 0 where its tokens are gathered. descales: of fp8.
    """
    num_sms = hardware.detect(out.device).num_sms or 132
    itemsize = problem.dtype.itemsize
    block_d, block_dv = padded_dim(problem.head_dim, 2), padded_dim(problem.head_dim_v, 2)
    num_tiles = -(-problem.seqlen_q // config.queries)
    num_heads = problem.num_heads // config.heads
    total_heads = problem.batch * num_heads
    programs = max_query_tiles(problem, config) * num_heads if problem.varlen else num_tiles * total_heads
    describe = packed_descriptor if problem.varlen else descriptor
    score_params = params_of(problem, operands.alibi_slopes, prescaled=problem.softmax_scale <= 0)
    dropout = dropout_of(problem, operands.rng_state)
    bias = _bias_product(problem, block_d, block_dv)
    split_q, own_out = buffers(config, block_d, block_dv, (227 << 10) - bias * config.tile_n * BIAS_BYTES, itemsize)
    fp8 = problem.dtype == FP8
    live_d, live_dv = (live_columns(dim, block, 32 if fp8 else 16)
                       for dim, block in ((problem.head_dim, block_d), (problem.head_dim_v, block_dv)))  # fmt: skip
    rest = live_d - block_d // 2 if config.rest_apart else 0
    # A page is a box of its own, and so are 128 bytes of its rows, since those of other pages lie between
    rows_k, wide = page_rows or config.tile_n, 128 // itemsize
    box_d = block_d // 2 if rest else min(wide, block_d) if fp8 else box_columns(live_d, block_d)
    box_k, box_v = (min(wide, block_d), min(wide, block_dv)) if pages or fp8 else (box_d, box_columns(live_dv, block_dv))
    out_columns = block_dv // 2 if split_q and not own_out and not rest else block_dv
    left, right = problem.window
    queries, shift = ROWS // config.heads, _shift(problem)
    # The queries of a consumer on an aligned diagonal cut one key tile, on another two
    aligned = right is None or shift is not None and (shift + right) % queries in (0, queries - 1)
    cap, bounded = _capped(problem, config)
    gathered = pages is not None and not page_rows
    # With half of the queries in registers consumers have none to give
    registers, load_registers = (REGISTERS_GATHERED if gathered and not split_q else REGISTERS)[config.tile_m // ROWS]
    turn_warps, turn_registers, (v_stages, raw_stages) = 0, 0, (config.num_stages, config.num_stages)
    if fp8:
        turn_warps, (v_stages, raw_stages) = TURN_WARPS[config.tile_m // ROWS], _value_slots(config, block_d, block_dv)
        registers, turn_registers, load_registers = REGISTERS_FP8[config.tile_m // ROWS]
    # Three consumers leave issue slots short: four warps load, before these, and not one behind them
    load_warps = 4 if gathered or config.tile_m == 3 * ROWS and not pages and not fp8 else 1
    cut_last = _cut_last(problem, config) and not bias and (bounded or not problem.softcap)
    mask_others = left is not None and not cut_last or not aligned
    arguments = (
        describe(operands.q, ROWS, min(box_d, block_d // 2) if split_q else box_d, config.heads),
        describe(operands.q, ROWS, rest, config.heads) if rest else None,
        describe(operands.k, rows_k, box_k), describe(operands.k, rows_k, min(rest, box_k)) if rest else None,
        describe(operands.v, rows_k, box_v), describe(out, ROWS, out_columns, config.heads), lse, counter, table,
        *(pages or (None, None, None)), Window(*problem.window), score_params, cap, operands.sinks, dropout, lse.shape[-1],
        (problem.num_heads * config.key_parts - 1) * problem.seqlen_q if problem.varlen and lse.dim() == 3 else None,
        problem.seqlen_q, problem.seqlen_k, num_tiles, num_heads, total_heads,
        *heads_in_groups(problem, config, num_tiles, num_sms), config.key_parts if config.key_parts > 1 else None,
        descales,
    )  # fmt: skip
    constexprs = {
        "GROUP_SIZE": problem.group_size // config.heads, "HEADS": config.heads,
        "BLOCK_D": block_d, "BLOCK_DV": block_dv, "LIVE_D": live_d, "LIVE_DV": live_dv,
        "TILE_N": config.tile_n, "PAGE_SIZE": page_size,
        "NUM_CONSUMERS": config.tile_m // ROWS, "SPLIT_Q": split_q,
        "NUM_STAGES": config.num_stages, "V_STAGES": v_stages, "RAW_STAGES": raw_stages, "TURN_WARPS": turn_warps,
        "TURN_REGISTERS": turn_registers, "REGISTERS": registers, "LOAD_REGISTERS": load_registers,
        "LOAD_WARPS": load_warps, "LAZY": config.lazy,
        "MASK_FIRST": problem.varlen or problem.masked or config.key_parts > 1 or problem.seqlen_k % config.tile_n != 0,
        "MASK_OTHERS": mask_others,
        "OWN_OUT": own_out,
        "HALF_FIRST": _half_first(problem, config),
        "CUT_LAST": cut_last, "HALF_LAST": _half_last(problem, config),
        "LAST_ROWS_FIRST": _last_rows_first(problem, config),
        "BIAS": bias,
        "BOUNDED": bounded, "GATHERED": gathered, "CHAINED": table is not None or config.key_parts > 1,
    }  # fmt: skip
    return arguments, constexprs, (min(num_sms, programs * config.key_parts),)
