"""From a problem and its tensors to the grouped arguments of the portable kernels, and their outputs."""

from typing import NamedTuple

from flashtile.device.cache import CacheLayout
from flashtile.device.dropout import Dropout
from flashtile.device.lengths import Packing
from flashtile.device.masks import Window
from flashtile.device.scores import ScoreParams
from flashtile.device.tensors import Rows
from flashtile.tiles import padded_dim

_NO_DROPOUT = Dropout(None, None, None)


class CommonArguments(NamedTuple):
    """What every kernel of a call takes; shapes are its constexprs."""

    packing: Packing
    window: Window
    score_params: ScoreParams
    dropout: Dropout
    shapes: dict


def rows_of(x, lse=False) -> Rows:
    """Pointer and strides of (batch, seqlen, heads, dim), or with lse of (batch, heads, seqlen); packed ones have no batch."""
    strides = x.stride()
    if lse:
        batch, head, row = strides if len(strides) == 3 else (0, *strides)
    else:
        batch, row, head = strides[:3] if len(strides) == 4 else (0, *strides[:2])
    return Rows(x, batch, row, head)


def layout_of(problem, operands) -> CacheLayout:
    """The CacheLayout of a CacheProblem and its CacheOperands, which hold its tensors in the same order."""
    table = operands.block_table
    return CacheLayout(*operands[5:11], 0 if table is None else table.stride(0), problem.seqlen_new, problem.capacity,
                       operands.k_cache.shape[0])  # fmt: skip


def common_arguments(problem, operands) -> CommonArguments:
    packing = Packing(operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqused_q, operands.seqused_k)
    slopes = operands.alibi_slopes
    score_params = ScoreParams(
        scale=float(problem.softmax_scale),
        softcap=float(problem.softcap) or None,
        alibi_slopes=slopes,
        alibi_batch_stride=slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        prescaled=None if problem.softmax_scale > 0 else 1,
    )
    dropout = _NO_DROPOUT
    if problem.dropout_p > 0:
        dropout = Dropout(operands.rng_state, int(problem.dropout_p * 2**32), 1 / (1 - problem.dropout_p))
    shapes = {
        "GROUP_SIZE": problem.group_size, "HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded_dim(problem.head_dim, problem.dtype.itemsize),
        "BLOCK_DV": padded_dim(problem.head_dim_v, problem.dtype.itemsize), "WIDE": problem.wide_rows,
    }  # fmt: skip
    return CommonArguments(packing, Window(*problem.window), score_params, dropout, shapes)
