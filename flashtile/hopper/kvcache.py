"""Calls on a key-value cache with many queries, prefill and chunked prefill, by the forward kernel of this tier.

Such a call is a packed one: sequences, batched or not, have rows of q and out one after the other, and `schedule.plan_cached`
reads from the device where their keys are and how many. In a cache without pages they are rows of one tensor; with pages a tile
of keys has a box of each page, whose number the producer looks up (`boxes.load_pages`). TMA ends a box where the sequence ends,
so that nothing of an unused slot is read; keys that a window hides from all queries of a sequence are no part of it, with pages
those of whole pages.

Queries and a cache of fp8 are multiplied in fp8. Beside other queries a cache of fp8 is the portable tier's.

How fast: `flashtile compare --preset chunked-prefill --mode decode`; fp8: `benchmarks/prefill.py`. What was tried:
docs/kernels/hopper-forward.md.

New keys go to the cache before (`device.append`). Calls of few queries, decoding, are the portable tier's: see `hopper.yields`.
"""

import torch

from flashtile import counters, hardware, tiles
from flashtile.device import schedule
from flashtile.device.append import Append
from flashtile.device.cache import layout_arguments
from flashtile.device.launch import Launches
from flashtile.device.masks import Window
from flashtile.device.scores import descales_of
from flashtile.device.tensors import Rows, rows_of
from flashtile.hopper import arguments
from flashtile.hopper.forward import attention_forward
from flashtile.kvcache_problem import CacheOperands, rows_apart
from flashtile.outputs import fresh, outputs_of_parts
from flashtile.problem import FP8, Operands, is_unaligned


def _in_units(x) -> Rows:
    """`rows_of` with strides in units of 16 bytes."""
    ptr, *strides = rows_of(x)[:4]
    return Rows(ptr, *(stride * x.element_size() // 16 for stride in strides))


def _is_rows(q) -> bool:
    """Whether TMA takes queries where they are: as rows, those of a sequence behind those of the one before."""
    return not is_unaligned(q) and (q.dim() == 3 or rows_apart(q) == q.shape[1])


class Call:
    """Append, list the tiles, attend, merge: four launches at most. For calls of one kind, see `portable.decode.Call`.

    device: the hardware.Device that it is for, if that is not where the operands are.
    """

    def __init__(self, problem, config, operands, device=None):
        self.problem, self.config, self.packed = problem, config, problem.as_packed()
        device = device or hardware.detect(operands.q.device)
        out_shape = (*operands.q.shape[:-1], problem.head_dim_v)
        self.is_empty = 0 in out_shape
        self.append = Append(problem, operands, device) if problem.appends else None
        self.copies_q = not problem.rotary_dim and not _is_rows(operands.q)
        self.new_q = fresh(operands.q.shape, problem.dtype) if problem.rotary_dim or self.copies_q else None
        # Rows of no sequence
        self.new_out = fresh(out_shape, problem.out_dtype, zeros=problem.varlen)
        self.new_lse = fresh(problem.lse_shape, torch.float32)
        self.of_parts = outputs_of_parts(problem, config.key_parts)
        self.new_table = fresh((arguments.table_entries(self.packed, config),), torch.int32)
        self.rows_apart, self.page_rows = rows_apart(operands.k_cache), tiles.page_rows(problem, config)
        self.launches = Launches(self.start)

    def __call__(self, operands):
        """out and lse (None unless asked for) as `flashtile.attention_with_kvcache` describes them; operands: in any tuple."""
        q = operands[0]
        out, lse = self.new_out(q), self.new_lse(q) if self.problem.return_lse else None
        if self.problem.varlen and lse is not None:
            lse.fill_(float("-inf"))
        self.into(operands, out, lse)
        return out, lse

    def into(self, operands, out, lse):
        """The call, into memory that is there; lse may be None. Rows of no sequence stay, unless keys are in parts."""
        q = operands[0]
        if lse is None:
            lse = self.new_lse(q)
        rows = self.new_q(q) if self.new_q is not None else None
        if self.copies_q:
            rows.copy_(q)
        self.launches.run(*operands, out, lse, rows, *self.of_parts(q), self.new_table(q), counters.zeros(q, 2))

    def start(self, launch, *tensors):
        *operands, out, lse, q, out_parts, lse_parts, table, counter = tensors
        operands = CacheOperands(*operands)
        if q is None:
            q = operands.q
        if self.append is not None:
            self.append.start(launch, operands, q)
        if self.is_empty:
            return
        problem, pages = self.problem, None
        if problem.page_size:
            pages = (operands.block_table, self.rows_apart, _in_units(operands.k_cache), _in_units(operands.v_cache))
            pages = (pages, operands.block_table.stride(0), operands.k_cache.shape[0])
        planned = (table, *layout_arguments(problem, operands), Window(*problem.window), problem.seqlen_q, self.rows_apart,
                   problem.page_size if self.page_rows else 1, problem.batch,
                   arguments.max_query_tiles(self.packed, self.config))  # fmt: skip
        arguments.launch_table(launch, schedule.plan_cached, 1, planned, self.config.queries)
        attended = Operands(q, operands.k_cache, operands.v_cache, alibi_slopes=operands.alibi_slopes, sinks=operands.sinks)
        arguments.launch_forward(
            launch, attention_forward, self.packed, self.config, attended, (out, lse), (out_parts, lse_parts), table, counter,
            pages, problem.page_size or 0, self.page_rows, descales_of(operands) if problem.dtype == FP8 else None,
        )  # fmt: skip
