"""Packed calls on a cache of which most sequences have few queries and some have many: decoding beside chunks of prompts.

One kernel for all would have tiles of many rows, in which the few queries of a decode leave most empty, or of few, for which a
chunk's keys are read again and again. So such a call is two, each of which takes the sequences that are its own, by their
lengths on the device, and leaves the rows of the others: the long ones first, by whatever tier is the fastest for them, then
all others by the tiles of decoding. H200, single runs: docs/kernels/decode.md.
"""

from dataclasses import replace

import torch

from flashtile import dispatch, hardware, settings
from flashtile.outputs import fresh
from flashtile.tiles import ROWS_OF_WGMMA

# Rows of the tiles of few queries (tiles.DECODE)
FEW_ROWS = 16
# Times the mean number of queries that the longest sequence has
TIMES_MEAN = 4
# Slots of all heads of all sequences: with fewer two kernels, one after the other, take longer than one
LEAST_SLOTS = 2**19


def plans(problem, device, prefer=()) -> list:
    """[(problem, plan)] of a call on a cache: itself, or its parts in the order in which they run.

    problem: CacheProblem. device: hardware.Device. prefer: as for `dispatch.plan`.
    Raises:
        UnsupportedError: no tier takes it.
    """
    whole = dispatch.plan(problem, device, "decode", prefer)
    # The Hopper forward takes calls whose sequences have many queries on average: then few rows are empty
    if whole.tier != "portable" or not _is_mixed(problem):
        return [(problem, whole)]
    most = FEW_ROWS // problem.group_size
    few, many = replace(problem, seqlen_q=most), replace(problem, least_q=most + 1)
    plan_of_many = dispatch.plan(replace(many, batch=many.busy), device, "decode", prefer)
    # What merges parts of keys may write all rows, so the other one comes last
    return [(many, plan_of_many), (few, dispatch.plan(few, device, "decode", ("portable",)))]


def _is_mixed(problem) -> bool:
    """As far as shapes tell. A fixed num_splits promises the same bits whatever else is in the batch; new keys come once."""
    if not problem.varlen or problem.num_splits or problem.appends:
        return False
    # Else the tiles of few queries are no lower
    lower = problem.group_size <= FEW_ROWS and problem.dtype.itemsize <= 2
    if not lower or problem.batch * problem.num_heads_kv * problem.capacity < LEAST_SLOTS:
        return False
    many = problem.seqlen_q * problem.group_size >= ROWS_OF_WGMMA
    return many and problem.seqlen_q * problem.batch >= TIMES_MEAN * problem.total_q


def bind(problem, operands):
    """The function of operands -> (out, lse or None) for calls of one kind."""
    device = hardware.detect(operands.q.device)
    parts = plans(problem, device, settings.preferred_tiers())
    calls = [plan.module.bind_decode(part, plan.configs, operands) for part, plan in parts]
    return calls[0] if len(calls) == 1 else Call(problem, calls)


class Call:
    """Calls into one out and lse, cleared before: rows of no sequence are nobody's. For calls of one kind."""

    def __init__(self, problem, calls):
        self.calls = calls
        self.new_out = fresh((problem.total_q, problem.num_heads, problem.head_dim_v), problem.out_dtype, zeros=True)
        self.new_lse = fresh(problem.lse_shape, torch.float32) if problem.return_lse else None

    def __call__(self, operands):
        q = operands[0]
        out, lse = self.new_out(q), None
        if self.new_lse is not None:
            lse = self.new_lse(q).fill_(float("-inf"))
        for call in self.calls:
            call.into(operands, out, lse)
        return out, lse
