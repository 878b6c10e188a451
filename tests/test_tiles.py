"""Arithmetic of tiles and schedules that no GPU is needed for."""

import importlib.util

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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("group_size", [1, 2, 8])
@pytest.mark.parametrize("num_heads", [8, 16, 24, 40])
@pytest.mark.parametrize("most", [0, 1, 3, 8, 12, 100])
def test_groups_of_packed_calls_are_about_equal(num_heads, most, group_size):
    from flashtile.hopper.arguments import equal_groups

    heads = equal_groups(num_heads, most, group_size)
    assert heads % group_size == 0 and group_size <= heads <= max(group_size, most)
    groups = -(-num_heads // heads)
    # the last one is smaller by less than a shared key-value head a group
    assert groups * heads - num_heads < groups * group_size
