"""Kernels of one call without a gap between them: programmatic dependent launch, which Hopper and newer have.

One that is launched with `after` may begin as soon as all programs of the kernel before it have called `allow`, and have room
left. Before its own `wait` it must not touch what that kernel writes, nor write what that reads. All kernels between the first
and the last of a chain wait, so that the end of one is the end of all before it.
"""

import triton
import triton.language as tl


def after(is_chained=True) -> dict:
    """Options of a launch."""
    return {"launch_pdl": True} if is_chained else {}


@triton.jit
def allow():
    """The next kernel may begin."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait():
    """Until the kernel before has ended."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def begin(CHAINED: tl.constexpr = True):
    """Both; nothing where a kernel is not CHAINED, as on other GPUs and in the interpreter."""
    if CHAINED:
        allow()
        wait()
