"""From a problem and its tensors to the grouped arguments of the portable kernels."""

from typing import NamedTuple

from flashtile.device.dropout import Dropout, dropout_of
from flashtile.device.lengths import Packing
from flashtile.device.masks import Window
from flashtile.device.scores import ScoreParams, params_of
from flashtile.tiles import blocks_of


class CommonArguments(NamedTuple):
    """What every kernel of a call takes; shapes are its constexprs."""

    packing: Packing
    window: Window
    score_params: ScoreParams
    dropout: Dropout
    shapes: dict


def common_arguments(problem, operands, narrow) -> CommonArguments:
    """narrow: that of each of the call's configs."""
    packing = Packing(operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqused_q, operands.seqused_k)
    score_params = params_of(problem, operands.alibi_slopes, prescaled=problem.softmax_scale <= 0)
    dropout = dropout_of(problem, operands.rng_state)
    (block_d, rest_d), (block_dv, rest_dv) = (blocks_of(dim, problem.dtype.itemsize, narrow)
                                              for dim in (problem.head_dim, problem.head_dim_v))  # fmt: skip
    shapes = {
        "GROUP_SIZE": problem.group_size, "HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v, "BLOCK_D": block_d,
        "REST_D": rest_d, "BLOCK_DV": block_dv, "REST_DV": rest_dv, "WIDE": problem.wide_rows,
    }  # fmt: skip
    return CommonArguments(packing, Window(*problem.window), score_params, dropout, shapes)
