"""Online softmax in base 2. Source: Milakov and Gimelshein 2018; Dao 2023, FlashAttention-2, section 3.1."""

import math
from typing import Any, NamedTuple

import torch

LOG2_E = math.log2(math.e)
NEG_INF = float("-inf")


class OnlineSoftmax(NamedTuple):
    """Of the keys seen so far, for each row: the largest base-2 logit, and the sum of exponentials relative to it."""

    row_max: Any
    row_sum: Any


def empty_state(shape, dtype, device):
    """No key seen yet."""
    return OnlineSoftmax(torch.full(shape, NEG_INF, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))


def pivot(row_max):
    """What to subtract before the exponential: a row that has seen no key has -inf, and -inf - -inf would be nan."""
    return row_max.masked_fill(row_max == NEG_INF, 0.0)


def update(state, logits):
    """Absorb a tile of natural-unit logits, (..., rows, cols); return the new state, p, and the correction of acc."""
    logits = logits * LOG2_E
    row_max = torch.maximum(state.row_max, logits.amax(-1))
    reference = pivot(row_max)
    correction = torch.exp2(state.row_max - reference)
    p = torch.exp2(logits - reference[..., None])
    return OnlineSoftmax(row_max, state.row_sum * correction + p.sum(-1)), p, correction


def absorb_sink(state, sink):
    """Add one logit (natural units) to the denominator of each row; return the new state and the correction of acc."""
    sink = sink * LOG2_E
    row_max = torch.maximum(state.row_max, sink)
    reference = pivot(row_max)
    correction = torch.exp2(state.row_max - reference)
    # A sink of inf takes all: out is 0, not nan
    weight = torch.where(sink == reference, 1.0, torch.exp2(sink - reference))
    return OnlineSoftmax(row_max, state.row_sum * correction + weight), correction


def inverse_sum(state):
    """1 / row_sum; a row without a key has 0 instead of a division by 0."""
    return torch.where(state.row_sum == 0, 0.0, 1 / state.row_sum)


def lse(state):
    """Natural-log log-sum-exp; -inf for a row without a key."""
    return (state.row_max + torch.log2(state.row_sum)) / LOG2_E
