"""Arithmetic of tiles that no GPU is needed for."""

import pytest

from flashtile.tiles import live_columns, padded_dim


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_live_columns_hold_the_head_dim_in_two_products(head_dim):
    """All of a block, or its left half and a power of two of the right one, of 16 or more: what products can take."""
    block = padded_dim(head_dim, 2)
    live = live_columns(head_dim, block)
    assert head_dim <= live <= block
    rest = live - block // 2
    assert live == block or rest >= 16 and rest & (rest - 1) == 0
    # not twice as many of the right half as there are, but for 16
    assert live == block or rest == 16 or rest < 2 * (head_dim - block // 2)
