"""The torch ops of latent attention decode: the schedule, and the decode itself. No gradients: decode is inference."""

import torch

from flashtile import hardware, settings
from flashtile.calls import Calls, again, nobody_observes
from flashtile.gradients import refuse_gradients
from flashtile.mla import plan
from flashtile.mla.problem import MlaOperands, MlaProblem, table_shape
from flashtile.problem import lse_dtype

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
_OPTION_NAMES = ("head_dim_v", "softmax_scale", "causal", "lse_with_sinks")
_CALLS = Calls()


def _describe(arguments):
    """(operands, problem) of the op's flat arguments."""
    operands = MlaOperands(*arguments[:_NUM_TENSORS])
    return operands, MlaProblem.from_tensors(operands, **dict(zip(_OPTION_NAMES, arguments[_NUM_TENSORS:])))


def _bind(arguments):
    """The function of operands -> (out, lse) of a call: checked, planned, compiled."""
    operands, problem = _describe(arguments)
    chosen = plan.plan_for(problem, operands.q.device)
    return chosen.module.bind(problem, chosen.config, operands)


def known(operands, options):
    """The bound call of a repeated one that may go without torch's dispatcher, for `calls.again`; else None."""
    if not nobody_observes() or settings.debug():
        return None
    call = _CALLS.find(operands, options)
    if call is None or torch.is_autocast_enabled("cuda"):
        return None
    # Of others there is no gradient
    floating = operands.q, operands.kv_cache, operands.sinks
    return None if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in floating) else call


@torch.library.impl("flashtile::mla_decode", ("CPU", "CUDA"))
def _decode(*arguments):
    operands, options = MlaOperands(*arguments[:_NUM_TENSORS]), arguments[_NUM_TENSORS:]
    # The values of lengths and tables are checked in each call on a CPU, or if asked for
    keeps = operands.q.is_cuda and not settings.debug()
    call = _CALLS.find(operands, options) if keeps else None
    if call is None:
        call = _bind(arguments)
        if keeps:
            _CALLS.keep(operands, options, call)
    return again(call, operands)


@torch.library.register_fake("flashtile::mla_decode")
def _decode_fake(*arguments):
    operands, problem = _describe(arguments)
    q = operands.q
    lse = q.new_empty((problem.batch, problem.seqlen_q, problem.num_heads), dtype=lse_dtype(q.dtype)).transpose(1, 2)
    return q.new_empty((*q.shape[:-1], problem.head_dim_v)), lse


refuse_gradients("mla_decode", "mla_decode")


@torch.library.impl("flashtile::mla_schedule", ("CPU", "CUDA"))
def _schedule(like, lengths, fixed_length, num_sequences, seqlen_q, num_rows, num_heads_kv):
    table = _empty_table(like, num_sequences, num_rows, num_heads_kv)
    if like.device.type == "cpu" and not settings.triton_interprets():
        # The definition has no parts
        return table.zero_()
    if num_sequences:
        from flashtile.mla import schedule

        with hardware.on_device_of(table):
            schedule.launch(table, lengths, fixed_length=fixed_length, num_sequences=num_sequences, seqlen_q=seqlen_q,
                            total_rows=num_rows * num_heads_kv)  # fmt: skip
    return table


@torch.library.register_fake("flashtile::mla_schedule")
def _schedule_fake(like, lengths, fixed_length, num_sequences, seqlen_q, num_rows, num_heads_kv):
    return _empty_table(like, num_sequences, num_rows, num_heads_kv)


def _empty_table(like, num_sequences, num_rows, num_heads_kv):
    return like.new_empty(table_shape(num_sequences, num_rows, num_heads_kv, like.device), dtype=torch.int32)


decode_op = torch.ops.flashtile.mla_decode.default
schedule_op = torch.ops.flashtile.mla_schedule.default

