"""CPU tensors: the definition, in fp32 or wider."""

from functools import partial

import torch

from flashtile.reference import mla


def refuses(problem, device) -> str | None:
    if device.arch != "cpu":
        return "serves CPU tensors only"
    return None


def config_of(problem, device) -> None:
    """No tiles."""


def bind(problem, config, operands):
    """A function of operands that returns out and lse as `mla_decode` describes them."""
    return partial(_decode, problem)


def _decode(problem, operands):
    tensors = operands._asdict()
    del tensors["schedule"]
    # torch.autocast would round the operands of products
    with torch.autocast("cpu", enabled=False):
        out, lse = mla.decode(
            **tensors, head_dim_v=problem.head_dim_v, softmax_scale=problem.softmax_scale, causal=problem.causal,
            lse_with_sinks=problem.lse_with_sinks, dtype=torch.promote_types(problem.dtype, torch.float32),
        )  # fmt: skip
    return out.to(problem.dtype), lse.transpose(1, 2).contiguous().transpose(1, 2)
