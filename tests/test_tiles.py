"""Arithmetic of tiles that no GPU is needed for."""

from dataclasses import replace

import pytest
import torch

from flashtile import hardware
from flashtile.problem import AttentionProblem
from flashtile.tiles import HOPPER, PORTABLE, box_columns, hopper_config, live_columns, padded_dim, select


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


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_no_box_of_64_columns_is_loaded_for_zeros_alone(head_dim):
    block = padded_dim(head_dim, 2)
    live = live_columns(head_dim, block)
    columns = box_columns(live, block)
    loaded = block if columns == block else -(-live // columns) * columns
    assert live <= loaded < head_dim + 64


def problem(seqlen, head_dim, head_dim_v):
    return AttentionProblem(1, seqlen, seqlen, 8, 8, head_dim, head_dim_v, torch.bfloat16, softmax_scale=0.1)


def test_columns_of_q_and_k_lie_apart_where_larger_tiles_fit_then():
    def is_apart(head_dim, head_dim_v):
        return hopper_config(problem(4096, head_dim, head_dim_v), hardware.by_name("H200")).rest_apart

    assert is_apart(152, 104) and is_apart(192, 128)
    assert not any(is_apart(*dims) for dims in ((144, 128), (192, 64), (192, 136), (200, 128), (128, 128)))


def test_calls_that_other_units_limit_have_the_tiles_of_few_keys():
    def tile(**options):
        config = hopper_config(replace(problem(8192, 64, 64), **options), hardware.by_name("H200"))
        return config.tile_m, config.tile_n

    assert tile() == (192, 128)
    assert tile(softcap=30.0) == tile(dropout_p=0.1) == tile(dropout_p=0.1, window=(None, 0)) == (256, 64)


def test_small_calls_of_small_head_dims_have_tiles_of_their_own():
    def rows(seqlen, head_dim, device):
        return select(PORTABLE, "forward", problem(seqlen, head_dim, head_dim), hardware.by_name(device)).config.tile_m

    assert [rows(64, 32, "H200"), rows(65, 32, "H200"), rows(64, 40, "H200"), rows(64, 32, "A100")] == [32, 64, 64, 128]
    assert [padded_dim(24, 2, 32), padded_dim(24, 2, 64), padded_dim(8, 2, 32), padded_dim(40, 2, 32)] == [32, 64, 16, 64]


@pytest.mark.parametrize("row", HOPPER, ids=str)
def test_stages_of_the_hopper_forward_are_enough_for_turns(row):
    """The first consumer begins so many key tiles later than the last, and keeps the turn until then."""
    assert (row.config.tile_m - 64) / row.config.tile_n < row.config.num_stages
