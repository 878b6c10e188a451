"""Triton's compiled launchers, whose calls differ between Triton 3.6, 3.7 and 3.8; `launch` calls them without Triton's Python.

Apart from `compat`, the other file that knows Triton's versions: the portable tier needs this one, and no Gluon.
"""

from copy import copy
from inspect import getclosurevars
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.runtime import driver

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


def hooked():
    """Whether somebody, such as Triton's profiler, asked to be called at each launch."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return getattr(enter, "calls", enter) or getattr(leave, "calls", leave)


class Launcher(NamedTuple):
    """Triton's compiled launcher without the Python before it, which looks for hooks, scratch memory and descriptors.

    It is called as run(*grid, stream, *constants, *arguments), with the arguments as one tuple where as_tuple. A descriptor
    among them is its map (see map_maker), its shape and its strides; descriptors holds what a map needs, one each.
    """

    run: Any
    constants: tuple
    as_tuple: bool
    descriptors: list


def launcher_of(compiled) -> Launcher | None:
    """The Launcher of a compiled kernel; None for a version of Triton, or a kernel, that we don't know how to launch."""
    launcher, descriptors = compiled.run, getattr(compiled.metadata, "tensordesc_meta", None) or []
    more = any(getattr(launcher, name, False) for name in ("global_scratch_size", "profile_scratch_size", "gsan_enabled"))
    if not (3, 6) <= _VERSION <= (3, 8) or more or not all(descriptors):
        return None
    flags = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    # hooks and scratch memory, none
    if _VERSION == (3, 6):
        run = getclosurevars(launcher.launch).nonlocals["launcher"] if descriptors else launcher.launch
        return Launcher(run, (*flags, None, None, compiled.packed_metadata, None, None, None), False, descriptors)
    constants = *flags, compiled.packed_metadata, *(None,) * 5, launcher.arg_annotations, launcher.kernel_signature
    return Launcher(driver.active.utils.launch, constants, True, descriptors)


class _At:
    """What stands for a tensor at an address."""

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


def map_maker(descriptor, metadata):
    """The function of an address that makes what TMA reads of a TensorDescriptor of a tensor there."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    described, rest = copy(descriptor), (metadata, None) if _VERSION >= (3, 8) else (metadata,)
    described.base = None

    def map_at(address):
        at = copy(described)
        at.base = _At(address)
        return make_tensordesc_arg(at, *rest)[0]

    return map_at
