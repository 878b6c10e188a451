"""Memory for the results of a call, with little host time: what follows from shapes is worked out once for many calls."""

from math import prod


def fresh(shape, dtype, zeros=False):
    """The function of a tensor that gives another on its device: contiguous, of dtype, uninitialised or zeros.

    Strides are at hand, so that torch need not work them out.
    """
    shape = tuple(shape)
    strides = tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))
    if zeros:
        return lambda like: like.new_zeros(shape, dtype=dtype)
    return lambda like: like.new_empty_strided(shape, strides, dtype=dtype)
