"""What starts a compiled kernel again: the driver itself, or Triton's launcher, whose calls differ between its versions.

Apart from `compat`, the other file that knows how Triton's versions differ: the portable tier needs this one, and no Gluon.
"""

import ctypes
import struct
from copy import copy
from functools import cache
from inspect import getclosurevars
from typing import Any, NamedTuple

from triton import knobs
from triton.runtime import driver

from flashtile.device.versions import NEWEST, OLDEST, triton_version

_VERSION = triton_version()


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
    if not OLDEST <= _VERSION <= NEWEST or more or not all(descriptors):
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
    described.base, on_gpu = None, descriptor.base.is_cuda

    def map_at(address):
        if on_gpu:
            ensure_context()
        at = copy(described)
        at.base = _At(address)
        return make_tensordesc_arg(at, *rest)[0]

    return map_at


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("value", ctypes.c_uint64 * 8)]


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip


_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
# By the types of Triton's signatures, as `struct` packs them
_FORMATS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}


@cache
def _cuda():
    # Gives up the GIL: a launch waits where the queue is full, maybe for what another thread has yet to launch
    return ctypes.CDLL("libcuda.so.1")


def prefer_shared_memory(function, percent):
    """Ask for that part of a multiprocessor's memory as shared memory where a block fits, the rest as cache."""
    _cuda().cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_SHARED_MEMORY_CARVEOUT, percent)


def ensure_context():
    """Give this thread the context of its device if it has none: the driver makes no TMA descriptor without.

    Triton's launcher does the same, but after descriptors are made. A thread of torch's gradients has no context before it
    launched or allocated something, and a backward pass may find all its memory in torch's cache.
    """
    cuda, context, device = _cuda(), ctypes.c_void_p(), ctypes.c_int()
    if cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value is None:
        cuda.cuDeviceGet(ctypes.byref(device), driver.active.get_current_device())
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        cuda.cuCtxSetCurrent(context)


def start_kernel():
    """The driver's function that takes Prepared.arguments, and returns 0 where all is well."""
    return _cuda().cuLaunchKernelEx


class Prepared:
    """A launch that lacks its addresses, in `words`, and `config.stream`, for `start_kernel`."""

    __slots__ = ("arguments", "attribute", "config", "words")

    def __init__(self, function, grid, num_threads, shared_bytes, dependent, offsets, packed):
        self.words = (ctypes.c_uint64 * (len(packed) // 8)).from_buffer_copy(packed)
        self.attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        self.attribute.value[0] = 1
        self.config = _Config(grid, (num_threads, 1, 1), shared_bytes, None, ctypes.pointer(self.attribute), int(dependent))
        base = ctypes.addressof(self.words)
        parameters = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self.arguments = ctypes.byref(self.config), ctypes.c_void_p(function), parameters, None


def _leaves(types, values):
    """(type, value) of a kernel's arguments that are not in its code."""
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _leaves(kind, value)
        elif kind != "constexpr":
            yield kind, value


def preparer(compiled, grid, arguments):
    """(function that makes a Prepared, (place among its words, tensor) of each address), of a kernel that has a Launcher.

    None for TMA descriptors, and where the driver says that the layout of the arguments is another.
    """
    launcher, metadata = compiled.run, compiled.metadata
    if launcher.launch_cooperative_grid or metadata.num_ctas != 1:
        return None
    offsets, packed, addresses = [], b"", []
    # Triton's scratch memory, of which there is none, comes last
    for kind, value in (*_leaves(compiled.src.signature.values(), arguments), ("*", None), ("*", None)):
        is_address = kind.startswith("*")
        if not is_address and kind not in _FORMATS:
            return None
        part = bytes(8) if is_address else struct.pack(_FORMATS[kind], value)
        packed = packed.ljust(-(-len(packed) // len(part)) * len(part), b"\0")
        if is_address and value is not None:
            addresses.append((len(packed) // 8, value))
        offsets.append((len(packed), len(part)))
        packed += part
    if _layout(compiled.function) != offsets:
        return None
    offsets = [offset for offset, _ in offsets]
    grid = (*grid, 1, 1)[:3]

    def prepare():
        return Prepared(compiled.function, grid, 32 * metadata.num_warps, metadata.shared, launcher.launch_pdl, offsets, packed)

    return prepare, addresses


def _layout(function):
    """(offset, bytes) of each argument of a kernel, in order."""
    found, offset, size = [], ctypes.c_size_t(), ctypes.c_size_t()
    handle, ask = ctypes.c_void_p(function), getattr(_cuda(), "cuFuncGetParamInfo", None)
    while ask and not ask(handle, ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)):
        found.append((offset.value, size.value))
    return found
