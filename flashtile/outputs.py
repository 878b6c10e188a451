"""Memory for the results of a call, with little host time: what follows from shapes is worked out once for many calls."""

from math import prod
from threading import get_ident

import torch

from flashtile import counters

try:
    # What compiled models take memory with: half of the host time, by a stopwatch on a CPU; not of torch's public interface
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_on_gpu
except ImportError:
    empty_on_gpu = None

# Scratch memory that is kept: bytes of a stream, and how many of these
KEPT_BYTES, MAX_KEPT = 64 << 20, 64
# (memory, its numbers) by device, stream and thread
_kept = {}


def fresh(shape, dtype=None, zeros=False):
    """A function f(like) that gives a new contiguous tensor on the device of `like`, of `dtype` or that of like, uninitialised
    or zeros.

    A GPU is the current one, as for launches (`hardware.on_device_of`).
    """
    shape = tuple(shape)
    strides = tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
    if zeros:
        return lambda like: like.new_zeros(shape, dtype=dtype)

    def new(like):
        if like.is_cuda and empty_on_gpu is not None:
            return empty_on_gpu(shape, strides, dtype or like.dtype)
        # With strides at hand torch takes a third less time than with a shape alone
        return like.new_empty_strided(shape, strides, dtype=dtype)

    return new


def scratch(size, num_counters=0):
    """The function of a tensor that gives memory on its device for kernels of one call alone, and counters for one kernel.

    That is (size,) or more numbers of fp32, and num_counters or more of `counters.zeros`, or None for none. Calls of one thread
    and one stream get the same: their kernels run one after the other. Larger ones, captured ones and those on a CPU get some
    of their own.
    """
    new = fresh((size,), torch.float32)

    def both(like):
        return new(like), counters.zeros(like, num_counters) if num_counters else None

    if size * 4 > KEPT_BYTES:
        return both

    def of_stream(like):
        if not like.is_cuda:
            return both(like)
        index = like.get_device()
        stream = torch._C._cuda_getCurrentRawStream(index)
        # The default stream can't be captured
        if stream and torch._C._cuda_isCurrentStreamCapturing():
            return both(like)
        # With the thread: another one's kernels may come between those of a call
        key = index, stream, get_ident()
        memory, length = _kept.get(key, (None, -1))
        if length < size:
            if len(_kept) >= MAX_KEPT:
                _kept.clear()
            memory, length = _kept[key] = new(like), size
        return memory, counters.of_stream(like, index, stream, num_counters) if num_counters else None

    return of_stream


def _query_rows(problem):
    return (problem.total_q,) if problem.varlen else (problem.batch, problem.seqlen_q)


def _key_rows(problem):
    return (problem.total_k,) if problem.varlen else (problem.batch, problem.seqlen_k)


def forward_outputs(problem, cleared):
    """The function of q that gives out and lse, cleared: as rows have them that see nothing."""
    new_out = fresh((*_query_rows(problem), problem.num_heads, problem.head_dim_v), zeros=cleared)
    new_lse = fresh(problem.lse_shape, torch.float32)
    if cleared:
        return lambda q: (new_out(q), new_lse(q).fill_(float("-inf")))
    return lambda q: (new_out(q), new_lse(q))


def outputs_of_parts(problem, parts):
    """The function of q that gives out and lse of each of `parts` parts of the keys, as heads side by side.

    With one part None each: those are the outputs themselves. problem: AttentionProblem or CacheProblem.
    """
    if parts == 1:
        return lambda q: (None, None)
    rows, num_heads = _query_rows(problem), parts * problem.num_heads
    new_out = fresh((*rows, num_heads, problem.head_dim_v), problem.out_dtype)
    new_lse = fresh((*rows[:-1], num_heads, rows[-1]), torch.float32)
    if problem.varlen:
        # Rows of no sequence
        return lambda q: (new_out(q), new_lse(q).fill_(float("-inf")))
    return lambda q: (new_out(q), new_lse(q))


def gradients(problem, clear_q, clear_kv):
    """The function of q, k and v that gives dq, dk and dv, zeros if clear_q and clear_kv."""
    rows_q, rows_k = _query_rows(problem), _key_rows(problem)
    new_dq = fresh((*rows_q, problem.num_heads, problem.head_dim), zeros=clear_q)
    new_dk = fresh((*rows_k, problem.num_heads_kv, problem.head_dim), zeros=clear_kv)
    new_dv = fresh((*rows_k, problem.num_heads_kv, problem.head_dim_v), zeros=clear_kv)
    return lambda q, k, v: (new_dq(q), new_dk(k), new_dv(v))


def gradients_of_parts(problem, splits, zeros):
    """The function of k that gives dk and dv of each of `splits` parts of a group of heads, zeros if told.

    With one part None each: those are the gradients themselves.
    """
    if splits == 1:
        return lambda k: (None, None)
    shape = *_key_rows(problem), problem.num_heads_kv * splits
    new_dk, new_dv = (fresh((*shape, dim), zeros=zeros) for dim in (problem.head_dim, problem.head_dim_v))
    return lambda k: (new_dk(k), new_dv(k))
