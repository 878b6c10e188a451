"""From a problem and its tensors to the arguments of the Hopper kernels: TMA descriptors, schedule, flags."""

import torch

from flashtile import hardware
from flashtile.device.compat import TensorDescriptor, current_stream, gl, rebased
from flashtile.device.lengths import Packing
from flashtile.device.masks import Window
from flashtile.device.scores import ScoreParams
from flashtile.tiles import padded_dim

ROWS = 64
# Registers of a consumer's thread. The producer's warps get what is left of 65536 to a multiprocessor.
REGISTERS = {2: 240, 3: 160, 4: 112}
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def allocate_forward(problem, operands):
    """out and lse, uninitialised where the kernel writes every row."""
    q = operands.q
    out_shape = (*q.shape[:-1], problem.head_dim_v)
    if problem.has_seqused_q:
        # Rows that no sequence uses are as empty ones
        return q.new_zeros(out_shape), q.new_full(problem.lse_shape, float("-inf"), dtype=torch.float32)
    return q.new_empty(out_shape), q.new_empty(problem.lse_shape, dtype=torch.float32)


def descriptor(x, rows, block_dim):
    """TMA descriptor of (batch, seqlen, heads, dim), as (batch, heads, seqlen, dim), for tiles of rows by block_dim."""
    batch, seqlen, heads, dim = x.shape
    strides = x.stride()
    # The stride of a dim of size 1 means nothing, and may be one that TMA does not take.
    batch_stride, row_stride, head_stride = (8 if size == 1 else stride for size, stride in zip(x.shape[:3], strides))
    block = [1, 1, rows, block_dim]
    return TensorDescriptor(x, [batch, heads, seqlen, dim], [batch_stride, head_stride, row_stride, 1], block,
                            gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype]))  # fmt: skip


# What a packed descriptor takes for the number of rows.
PACKED_ROWS = 2**30


def packed_descriptor(x, rows, block_dim):
    """TMA descriptor of packed rows (total, heads, dim), whose tiles end where a sequence ends.

    TMA fills with zeros, and leaves out of a store, what is past the size of a dim. Rows of a sequence of length n from
    `start` on are given coordinates that end at PACKED_ROWS: row i is (PACKED_ROWS, start + n, head, PACKED_ROWS - n + i, 0).
    With strides 2**34 - s, s, head stride, s its offset is 2**64 + (start + i) * s, and addresses have 64 bits.
    """
    _, heads, dim = x.shape
    row_stride, head_stride = x.stride()[:2]
    if heads == 1:
        head_stride = 8
    block = [1, 1, 1, rows, block_dim]
    return TensorDescriptor(x, [2**31 - 65536, 2**31 - 65536, heads, PACKED_ROWS, dim],
                            [2**34 - row_stride, row_stride, head_stride, row_stride, 1], block,
                            gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype]))  # fmt: skip


def plan_packed_arguments(problem, config, operands, out, lse):
    """(arguments, constexprs, grid) of `schedule.plan_packed`; the first argument is the table."""
    packing = Packing(operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqused_q, operands.seqused_k)
    max_tiles = problem.total_q // config.tile_m + problem.batch
    table = out.new_empty(8 * (1 + max_tiles) + problem.batch, dtype=torch.int32)
    arguments = (table, packing, out, lse, problem.batch, max_tiles, problem.total_q, problem.num_heads, problem.head_dim_v)
    # All rows are cleared before where sequences may use less than they have.
    grid = (1 if problem.has_seqused_q else 33,)
    return arguments, {"TILE_M": config.tile_m, "BLOCK": 1024}, grid


def slots(config, block_d, block_dv, smem_bytes, itemsize=2):
    """(slots for queries, whether out has slots of its own): two tiles of queries and one of out, or as few as will do."""
    consumers = config.tile_m // ROWS
    stages = config.num_stages * config.tile_n * (block_d + block_dv) * itemsize
    q_bytes, out_bytes = ROWS * block_d * itemsize, ROWS * block_dv * itemsize
    # barriers
    left = smem_bytes - 1024 - stages
    if left >= consumers * (2 * q_bytes + out_bytes):
        return 2 * consumers, True
    if left >= (2 * consumers - 1) * q_bytes + consumers * out_bytes:
        return 2 * consumers - 1, True
    return 2 * consumers - 1, False


def heads_in_groups(problem, config, num_tiles, num_sms):
    """(heads per group, heads of the last group) for `schedule.Order`."""
    total_heads = problem.batch * problem.num_heads
    if problem.varlen:
        # Rows of keys that fit, heads that share them
        row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
        return (0 if problem.window[1] is None else config.l2_bytes // row_bytes), problem.group_size
    if problem.window[1] is None:
        return 1, 0
    bytes_per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    # About 4 tiles a program in the last group: short enough that programs end together.
    most = max(1, config.l2_bytes // bytes_per_head) * problem.group_size
    tail = min(total_heads, max(most, -(-4 * num_sms // (2 * num_tiles))))
    groups = -(-(total_heads - tail) // most)
    return (-(-(total_heads - tail) // groups) if groups else 1), tail


_counters = {}


def _counter(device):
    """int32 (2,) of 0, which a kernel leaves as 0: one for each stream, since kernels of one stream run one by one.

    A captured graph gets one of its own, set to 0 by the graph: it may be replayed on any stream.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device.index, current_stream(device.index)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return counter


def forward_arguments(problem, config, operands, out, lse, table):
    """(arguments, constexprs, grid) of `forward.attention_forward`. table: of `schedule.plan_packed`, or None."""
    num_sms = hardware.detect(out.device).num_sms or 132
    itemsize = problem.dtype.itemsize
    block_d, block_dv = padded_dim(problem.head_dim, itemsize), padded_dim(problem.head_dim_v, itemsize)
    num_tiles = -(-problem.seqlen_q // config.tile_m)
    total_heads = problem.batch * problem.num_heads
    programs = num_tiles * total_heads
    if problem.varlen:
        programs = (problem.total_q // config.tile_m + problem.batch) * problem.num_heads
    describe = packed_descriptor if problem.varlen else descriptor
    slopes = operands.alibi_slopes
    score_params = ScoreParams(
        scale=float(problem.softmax_scale), softcap=float(problem.softcap) or None, alibi_slopes=slopes,
        alibi_batch_stride=slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        prescaled=None if problem.softmax_scale > 0 else 1,
    )  # fmt: skip
    q_slots, own_out = slots(config, block_d, block_dv, 227 << 10, itemsize)
    arguments = (
        describe(operands.q, ROWS, block_d), describe(operands.k, config.tile_n, block_d),
        describe(operands.v, config.tile_n, block_dv), describe(out, ROWS, block_dv), lse, _counter(lse.device),
        table, Window(*problem.window), score_params, operands.sinks, problem.lse_shape[-1], problem.seqlen_q,
        problem.seqlen_k, num_tiles, problem.num_heads,
        total_heads, *heads_in_groups(problem, config, num_tiles, num_sms),
    )  # fmt: skip
    left, right = problem.window
    diagonal = 0 if right is None else (problem.seqlen_k - problem.seqlen_q + right) % ROWS
    constexprs = {
        "GROUP_SIZE": problem.group_size, "TILE_N": config.tile_n, "NUM_CONSUMERS": config.tile_m // ROWS, "Q_SLOTS": q_slots,
        "NUM_STAGES": config.num_stages, "REGISTERS": REGISTERS[config.tile_m // ROWS], "TAKE_TURNS": config.take_turns,
        "MASK_FIRST": problem.varlen or left is not None or right is not None or problem.seqlen_k % config.tile_n != 0,
        # 64 rows of an aligned diagonal cut one key tile, of another two
        "MASK_SECOND": right is not None and (problem.varlen or diagonal not in (0, ROWS - 1)), "OWN_OUT": own_out,
    }  # fmt: skip
    return arguments, constexprs, (min(num_sms, programs),)


def relaunch_key(problem, config, operands):
    """What a compiled kernel and its arguments depend on, beside the data."""
    q, k, v = operands.q, operands.k, operands.v
    key = problem, config, q.device.index, q.stride(), k.stride(), v.stride()
    if operands.sinks is None and operands.alibi_slopes is None and not problem.varlen:
        return key
    # Kernels are compiled for pointers that are multiples of 16, or not.
    vectors = (x for x in operands[3:9] if x is not None)
    return (*key, *((x.dtype, x.stride(), x.data_ptr() % 16) for x in vectors))


class Relaunch:
    """Compiled kernels of a call with the arguments that stay the same: only tensors are exchanged, and none is kept.

    Triton's own way through `kernel[grid](...)` looks at every argument and checks every descriptor anew.
    """

    def __init__(self, compiled, grid, arguments, constexprs, compiled_plan=None, plan_grid=None):
        self.run = compiled[(*grid, 1, 1)]
        self.run_plan = compiled_plan and compiled_plan[(*plan_grid, 1, 1)]
        self.descriptors = tuple(rebased(descriptor, None) for descriptor in arguments[:4])
        self.window = arguments[7]
        self.has_slopes = arguments[8].alibi_slopes is not None
        self.score_params = arguments[8]._replace(alibi_slopes=None)
        self.rest = (*arguments[10:], *constexprs.values())

    def launch(self, problem, config, operands, out, lse):
        table = None
        if self.run_plan is not None:
            arguments, constexprs, _ = plan_packed_arguments(problem, config, operands, out, lse)
            table = arguments[0]
            self.run_plan(*arguments, *constexprs.values())
        score_params = self.score_params
        if self.has_slopes:
            score_params = score_params._replace(alibi_slopes=operands.alibi_slopes)
        tensors = (operands.q, operands.k, operands.v, out)
        self.run(*map(rebased, self.descriptors, tensors), lse, _counter(lse.device), table, self.window, score_params,
                 operands.sinks, *self.rest)  # fmt: skip
