"""Gradients that need no kernel, shared by the tiers; and the refusal of those that an op has not."""

import torch

from flashtile.problem import check_no_gradients

_LIBRARY = torch.library.Library("flashtile", "FRAGMENT")


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


def refuse_gradients(name, function):
    """Have an op refuse tensors that ask for derivatives: compiled, the `function` that calls it can't see all that do.

    A call through torch's dispatcher then takes a CPU 17 us, not 10; with a formula that raises it would be 24 (single runs).
    """
    op = getattr(torch.ops.flashtile, name).default

    def checked(keyset, *arguments):
        check_no_gradients(function, arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    _LIBRARY.impl(name, checked, "Autograd", with_keyset=True)
