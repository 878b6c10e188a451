"""Memory for the results of a call, with little host time: what follows from shapes is worked out once for many calls."""

from math import prod

import torch


def fresh(shape, dtype=None, zeros=False):
    """The function of a tensor that gives another on its device: contiguous, of its dtype or `dtype`, uninitialised or zeros.

    With strides at hand torch takes a third less time than with a shape alone.
    """
    shape = tuple(shape)
    strides = tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
    if zeros:
        return lambda like: like.new_zeros(shape, dtype=dtype)
    if dtype is None:
        return lambda like: like.new_empty_strided(shape, strides)
    return lambda like: like.new_empty_strided(shape, strides, dtype=dtype)


def forward_outputs(problem, cleared):
    """The function of q that gives out and lse, cleared: as rows have them that see nothing."""
    rows = (problem.total_q,) if problem.varlen else (problem.batch, problem.seqlen_q)
    new_out = fresh((*rows, problem.num_heads, problem.head_dim_v), zeros=cleared)
    new_lse = fresh(problem.lse_shape, torch.float32)
    if cleared:
        return lambda q: (new_out(q), new_lse(q).fill_(float("-inf")))
    return lambda q: (new_out(q), new_lse(q))


def gradients(problem, clear_q, clear_kv):
    """The function of q, k and v that gives dq, dk and dv, zeros if clear_q and clear_kv."""
    rows_q, rows_k = ((problem.total_q,), (problem.total_k,)) if problem.varlen else (
        (problem.batch, problem.seqlen_q), (problem.batch, problem.seqlen_k))  # fmt: skip
    new_dq = fresh((*rows_q, problem.num_heads, problem.head_dim), zeros=clear_q)
    new_dk = fresh((*rows_k, problem.num_heads_kv, problem.head_dim), zeros=clear_kv)
    new_dv = fresh((*rows_k, problem.num_heads_kv, problem.head_dim_v), zeros=clear_kv)
    return lambda q, k, v: (new_dq(q), new_dk(k), new_dv(v))
