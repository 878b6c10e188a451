"""CPU tier: reference.fa2, which takes every feature."""

from functools import partial

from flashtile.reference import fa2, kvcache

DIRECTIONS = ("forward", "backward", "decode")


def refuses(problem, device, direction) -> str | None:
    """Why this tier does not take a problem, or None."""
    return None if device.arch == "cpu" else "is for CPU tensors"


def configs(problem, device, direction) -> dict:
    return {}


def run_forward(problem, configs, operands):
    return fa2.forward(operands, problem)


def run_backward(problem, configs, operands, out, lse, dout, dlse):
    return fa2.backward(operands, problem, out, lse, dout, dlse)


def bind_decode(problem, configs, operands):
    return partial(kvcache.forward, problem=problem)
