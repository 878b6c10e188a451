"""From q kᵀ to logits: scale, softcap, ALiBi, mask; and back through them."""

import torch

from flashtile.reference.lengths import positions
from flashtile.reference.masks import visible


def wide_dtype(dtype):
    """What sums are kept in: fp32, and fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def softcap(scores, limit):
    return limit * torch.tanh(scores / limit)


def logits(scores, rows: slice, cols: slice, seqs, alibi_slopes):
    """Natural-unit logits of raw scores q kᵀ, (..., rows, cols); hidden ones are -inf.

    Args:
        scores: (batch, heads_kv, group, rows, cols), any floating dtype; kept in the result.
        rows, cols: positions inside the sequences.
        seqs: the Sequences that the scores belong to.
        alibi_slopes: as the caller gave them, or None.
    """
    problem = seqs.problem
    scores = scores * problem.softmax_scale
    if problem.softcap:
        scores = softcap(scores, problem.softcap)
    if alibi_slopes is not None:
        slope = seqs.of_heads(alibi_slopes).unsqueeze(-1).to(wide_dtype(scores.dtype))
        scores = scores - (slope * distances(rows, cols, seqs, scores.device)).to(scores.dtype)
    row = positions(rows, scores.device)[:, None]
    col = positions(cols, scores.device)[None, :]
    mask = visible(row, col, seqs.shift, problem.window)
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def distances(rows: slice, cols: slice, seqs, device):
    """Of keys from the diagonal of queries, (rows, cols), int64: what ALiBi multiplies with -slope."""
    return (positions(rows, device)[:, None] + seqs.shift - positions(cols, device)[None, :]).abs()


def through_softcap(dscores, scores, problem):
    """Gradient of scale * q kᵀ from that of the logits; the caller multiplies by the scale. scores: raw q kᵀ."""
    if not problem.softcap:
        return dscores
    tanh = torch.tanh(scores * (problem.softmax_scale / problem.softcap))
    return dscores * (1 - tanh * tanh)
