"""Where the sequences of a call begin and how long they are, batched or packed; and how to cut them into tiles."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flashtile.problem import AttentionProblem


class Sequences(NamedTuple):
    """Sequences that are computed together: the whole batch of a batched call, or one sequence of a packed call.

    of_q, of_k, of_lse and of_heads give views of the caller's tensors: what is written to them lands there.
    """

    problem: AttentionProblem
    # which sequences of the batch
    batch: slice
    # rows in packed tensors; all of them in batched ones
    rows_q: slice
    rows_k: slice
    seqlen_q: int
    seqlen_k: int

    @property
    def shift(self) -> int:
        """Query i stands at key i + shift: the bottom-right diagonal."""
        return self.seqlen_k - self.seqlen_q

    def of_q(self, x):
        """q, out and their gradients as (batch, heads_kv, group, seqlen_q, dim)."""
        x = x[self.rows_q].unsqueeze(0) if self.problem.varlen else x
        return self._grouped(x, 2).permute(0, 2, 3, 1, 4)

    def of_k(self, x):
        """k, v and their gradients as (batch, heads_kv, seqlen_k, dim)."""
        x = x[self.rows_k].unsqueeze(0) if self.problem.varlen else x
        return x.transpose(1, 2)

    def of_lse(self, x):
        """lse, (batch, heads, seqlen_q) or (heads, total_q), as (batch, heads_kv, group, seqlen_q)."""
        x = x[:, self.rows_q].unsqueeze(0) if self.problem.varlen else x
        return self._grouped(x, 1)

    def of_heads(self, x):
        """sinks or ALiBi slopes, (heads,) or (batch, heads), as (batch or 1, heads_kv, group, 1)."""
        x = x[self.batch] if x.dim() == 2 else x.unsqueeze(0)
        return self._grouped(x, 1).unsqueeze(-1)

    def _grouped(self, x, dim):
        return x.unflatten(dim, (self.problem.num_heads_kv, self.problem.group_size))


def sequences(operands, problem) -> Iterator[Sequences]:
    """Everything of a batched call at once, or one sequence after the other; those without a query or a key are included."""
    if not problem.varlen:
        everything = slice(0, problem.batch)
        yield Sequences(problem, everything, slice(None), slice(None), problem.seqlen_q, problem.seqlen_k)
        return
    rows_q = _used_rows(operands.cu_seqlens_q, operands.seqused_q)
    rows_k = _used_rows(operands.cu_seqlens_k, operands.seqused_k)
    for b, (q, k) in enumerate(zip(rows_q, rows_k, strict=True)):
        yield Sequences(problem, slice(b, b + 1), q, k, q.stop - q.start, k.stop - k.start)


def _used_rows(cu_seqlens, seqused):
    bounds = cu_seqlens.tolist()
    used = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)] if seqused is None else seqused.tolist()
    return [slice(start, start + length) for start, length in zip(bounds, used, strict=False)]


def tiles(extent: slice, size: int) -> Iterator[slice]:
    """Cut extent into slices of `size`; the last may be shorter."""
    for start in range(extent.start, extent.stop, size):
        yield slice(start, min(start + size, extent.stop))


def positions(extent: slice, device):
    """The numbers in extent, int64."""
    return torch.arange(extent.start, extent.stop, device=device)
