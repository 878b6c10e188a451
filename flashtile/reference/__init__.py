"""Attention in PyTorch, on any device: `naive` defines it, `fa1` and `fa2` compute it tile by tile, forward and backward.

They are the oracle of the tests and the first chapter of the guide; `fa2` also serves CPU tensors. The other modules hold
what the three share, under the names of `flashtile.device`. Tensors inside are (batch, heads_kv, group, rows, dims) for
queries and (batch, heads_kv, cols, dims) for keys and values: the query heads of a group read the same keys, so an einsum
over "bhg.." and "bh.." is grouped-query attention, without a repeated copy of k and v.
"""

from flashtile import lazy

__getattr__ = lazy.modules(__name__, "fa1", "fa2", "kvcache", "mla", "naive")
