"""The torch ops of latent attention decode: the schedule, and the decode itself. No gradients: decode is inference."""

import torch

from flashtile import hardware, settings
from flashtile.mla import plan
from flashtile.mla.problem import MlaOperands, MlaProblem

_TENSORS = (
    "Tensor q, Tensor kv_cache, Tensor? block_table, Tensor? cache_seqlens, Tensor? indices, Tensor? topk_length, "
    "Tensor? sinks, Tensor? schedule"
)
torch.library.define(
    "flashtile::mla_decode",
    f"({_TENSORS}, SymInt head_dim_v, float? softmax_scale, bool causal, bool lse_with_sinks) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "flashtile::mla_schedule",
    "(Tensor like, Tensor? lengths, SymInt fixed_length, SymInt num_sequences, SymInt seqlen_q, SymInt num_rows, "
    "SymInt num_heads_kv) -> Tensor",
)
_NUM_TENSORS = len(MlaOperands._fields)
# Query rows of one program
ROWS = 64
# What stands for the multiprocessors in the interpreter: enough to split
CPU_SMS = 4


def _describe(arguments):
    """(problem, operands) of the op's flat arguments."""
    operands = MlaOperands(*arguments[:_NUM_TENSORS])
    head_dim_v, softmax_scale, causal, lse_with_sinks = arguments[_NUM_TENSORS:]
    problem = MlaProblem.of_call(operands, head_dim_v=head_dim_v, softmax_scale=softmax_scale, causal=causal,
                                 lse_with_sinks=lse_with_sinks)  # fmt: skip
    return problem, operands


@torch.library.impl("flashtile::mla_decode", ("CPU", "CUDA"))
def _decode(*arguments):
    problem, operands = _describe(arguments)
    chosen = plan.plan_for(problem, operands.q.device)
    if operands.schedule is None and chosen.tier != "reference":
        operands = operands._replace(schedule=schedule_of(problem, operands))
    with hardware.on_device_of(operands.q):
        return chosen.module.launch(problem, chosen.config, operands)


@torch.library.register_fake("flashtile::mla_decode")
def _decode_fake(*arguments):
    problem, operands = _describe(arguments)
    q = operands.q
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty((problem.batch, problem.seqlen_q, problem.num_heads), dtype=lse_dtype).transpose(1, 2)
    return q.new_empty((*q.shape[:-1], problem.head_dim_v)), lse


@torch.library.impl("flashtile::mla_schedule", ("CPU", "CUDA"))
def _schedule(like, lengths, fixed_length, num_sequences, seqlen_q, num_rows, num_heads_kv):
    table = _empty_table(like, num_sequences, num_rows, num_heads_kv)
    if like.device.type == "cpu" and not settings.triton_interprets():
        # The definition has no parts
        return table.zero_()
    if num_sequences:
        from flashtile.mla import schedule

        with hardware.on_device_of(table):
            schedule.launch(table, lengths, fixed_length=fixed_length, num_sequences=num_sequences, seqlen_q=seqlen_q)
    return table


@torch.library.register_fake("flashtile::mla_schedule")
def _schedule_fake(like, lengths, fixed_length, num_sequences, seqlen_q, num_rows, num_heads_kv):
    return _empty_table(like, num_sequences, num_rows, num_heads_kv)


def _empty_table(like, num_sequences, num_rows, num_heads_kv):
    """With as many parts as fill the device: each has a program for every ROWS query rows of a latent head."""
    num_sms = hardware.detect(like.device).num_sms or CPU_SMS
    num_parts = max(1, num_sms // (-(-num_rows // ROWS) * num_heads_kv))
    return like.new_empty((num_parts + 1 + num_sequences, 2), dtype=torch.int32)


decode_op = torch.ops.flashtile.mla_decode.default
schedule_op = torch.ops.flashtile.mla_schedule.default


def schedule_of(problem, operands):
    """The table of a call that brought none."""
    if problem.sparse:
        like, lengths, fixed_length = operands.indices, operands.topk_length, problem.topk
    else:
        like = lengths = operands.cache_seqlens
        fixed_length = operands.block_table.shape[1] * problem.page_size
    seqlen_q = problem.seqlen_q if problem.sparse else 1
    return schedule_op(like, lengths, fixed_length, problem.num_sequences, seqlen_q, problem.num_rows, problem.num_heads_kv)
