"""Compiled kernels with the arguments that stay the same, for calls that come again: a step of decode is a few microseconds.

Triton's own way through `kernel[grid](...)` looks at every argument and checks every descriptor anew.
"""

from typing import Any, NamedTuple

# Entries of a table of Prepared; all are forgotten when there are more.
MAX_PREPARED = 4096


class Prepared(NamedTuple):
    """run: takes descriptors, tensors, then rest. descriptors: of TMA, without their tensors."""

    run: Any
    descriptors: tuple
    rest: tuple


def launch_key(tensors):
    """What a compiled kernel depends on: device, dtypes, and pointers that are multiples of 16, or not."""
    return tuple(None if x is None else (x.device, x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
