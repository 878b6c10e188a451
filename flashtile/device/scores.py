"""From q kᵀ to logits: scale, softcap, ALiBi; and back through them.

Kernels keep logits in base 2. Where only a positive scale acts, it is left to the exponential's multiply-add
(`scale_log2`); else `logits` applies everything in natural units, and `scale_log2` is log2(e).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.device.numerics import LOG2_E


class ScoreParams(NamedTuple):
    """scale > 0 unless prescaled; softcap and alibi_slopes (fp32 (heads,) or (batch, heads)) are None where off."""

    scale: Any
    softcap: Any
    alibi_slopes: Any
    # 0 where all sequences share the slopes
    alibi_batch_stride: Any
    # None, or 1 where the scale is not positive and must act before the maximum is taken
    prescaled: Any


def params_of(problem, alibi_slopes, prescaled) -> ScoreParams:
    """Of a call. prescaled: whether the scale has to act before the maximum is taken."""
    batch_stride = alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0
    return ScoreParams(float(problem.softmax_scale), float(problem.softcap) or None, alibi_slopes, batch_stride,
                       1 if prescaled else None)  # fmt: skip


@triton.jit
def load_slope(score_params, batch, head):
    if score_params.alibi_slopes is None:
        return 0.0
    else:
        return tl.load(score_params.alibi_slopes + batch * score_params.alibi_batch_stride + head)


@triton.jit
def scale_log2(score_params):
    """What is left to multiply logits with, to reach base 2."""
    if score_params.softcap is None and score_params.alibi_slopes is None and score_params.prescaled is None:
        return score_params.scale * LOG2_E
    else:
        return LOG2_E


@triton.jit
def softcap(scores, limit):
    """limit * tanh(scores / limit), as limit - 2 * limit / (1 + exp(2 * scores / limit)).

    The inverse is the square of an inverse root, which is one instruction: divisions by a number that is not a power of two
    are eight. tanh.approx is one for all, but off by 5e-4, which lse shows (95 of 99 random configurations in one run, not
    recorded).
    """
    inverse_root = tl.rsqrt(1 + tl.exp2(scores * (2 * LOG2_E / limit)))
    return limit - 2 * limit * (inverse_root * inverse_root)


@triton.jit
def logits(scores, rows, cols, lengths, slope, score_params):
    """Logits up to the factor scale_log2(score_params); rows and cols are positions that broadcast to the shape of scores."""
    if score_params.softcap is None and score_params.alibi_slopes is None and score_params.prescaled is None:
        return scores
    else:
        scores = scores * score_params.scale
        if score_params.softcap is not None:
            scores = softcap(scores, score_params.softcap)
        if score_params.alibi_slopes is not None:
            shift = lengths.seqlen_k - lengths.seqlen_q
            scores = scores - slope * tl.abs(rows + shift - cols).to(tl.float32)
        return scores


@triton.jit
def through_softcap(dscores, scores, score_params):
    """Gradient of scale * q kᵀ from that of the logits; the caller multiplies by the scale. scores: raw q kᵀ."""
    if score_params.softcap is None:
        return dscores
    else:
        tanh = softcap(scores * score_params.scale, score_params.softcap) / score_params.softcap
        return dscores * (1 - tanh * tanh)
