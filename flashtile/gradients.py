"""Gradients that need no kernel, shared by the tiers."""

import torch


def sinks_gradient(sinks, lse, delta):
    """dsinks (num_heads,), or None without sinks; lse and delta = rowsum(dout * out) - dlse are (..., num_heads, seqlen_q).

    A sink is a key with value 0, so its dscores are -p_sink * delta, summed over all queries.
    """
    if sinks is None:
        return None
    sinks_column = sinks.float()[:, None]
    p_sink = torch.exp(sinks_column - lse).masked_fill(lse == float("-inf"), 0.0).masked_fill(sinks_column == float("inf"), 1.0)
    per_row = p_sink * delta
    return -per_row.sum(dim=tuple(i for i in range(per_row.dim()) if i != per_row.dim() - 2)).to(sinks.dtype)


def slopes_gradient(slopes, of_sequences):
    """dslopes, of the shape and dtype of slopes, from those of each sequence and head, (batch, num_heads)."""
    return (of_sequences if slopes.dim() == 2 else of_sequences.sum(0)).to(slopes.dtype)
