"""CPU tier: reference.fa2, which takes every feature."""

from functools import partial

import torch

from flashtile.reference import fa2, kvcache

DIRECTIONS = ("forward", "backward", "dslopes", "decode")


def refuses(problem, device, direction) -> str | None:
    """Why this tier does not take a problem, or None."""
    return None if device.arch == "cpu" else "is for CPU tensors"


def configs(problem, device, direction) -> dict:
    return {}


def bind_forward(problem, configs):
    return _in_own_dtype(partial(fa2.forward, problem=problem))


def bind_backward(problem, configs):
    return _of_problem(fa2.backward, problem)


def bind_dslopes(problem, configs):
    return _of_problem(fa2.dslopes, problem)


def _of_problem(function, problem):
    def call(operands, *tensors):
        return function(operands, problem, *tensors)

    return _in_own_dtype(call)


def _in_own_dtype(function):
    """`function` without torch.autocast, which would round the operands of its products."""

    def call(*arguments):
        with torch.autocast("cpu", enabled=False):
            return function(*arguments)

    return call


def bind_decode(problem, configs, operands):
    return _in_own_dtype(partial(kvcache.forward, problem=problem))
