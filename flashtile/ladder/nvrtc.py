"""CUDA C++ from source to a running kernel: NVRTC compiles, cuda-core drives it. No other file knows either.

Compiling needs neither a GPU nor a driver. A cubin is kept by the hash of everything that went into it, for the process.
"""

import ctypes
import hashlib
import io
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from flashtile.errors import Unavailable, UnsupportedError, explain

_KERNEL = re.compile(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)
_CUBINS = {}
# What a kernel may have without asking for more.
DEFAULT_SHARED_BYTES = 48 << 10


@dataclass(frozen=True)
class Cubin:
    """Machine code of a file. registers: a thread, by kernel; spill_bytes: a thread writes them to memory, by kernel."""

    code: bytes
    registers: dict[str, int]
    spill_bytes: dict[str, int]


def compile_file(path: Path, arch: str, macros: dict) -> Cubin:
    """Compile a .cu file for an architecture such as "sm_90"; macros are #defines. What it includes lies beside it.

    Raises:
        Unavailable: cuda-core is not installed.
        cuda-core's NVRTCError: the source does not compile; it holds the compiler's words.
    """
    core = _cuda("cuda.core")
    source = path.read_text(encoding="utf-8")
    included = "".join(header.read_text(encoding="utf-8") for header in sorted(path.parent.glob("*.cuh")))
    key = hashlib.sha256(repr((source, included, arch, sorted(macros.items()))).encode()).hexdigest()
    if key not in _CUBINS:
        options = core.ProgramOptions(
            # ftz: exp2f is then one instruction; numbers below 2^-126 count as 0.
            name=path.name, arch=arch, std="c++17", ftz=True, include_path=[str(path.parent)], ptxas_options=["-v"],
            # A result of NVRTC's own cache on disk comes without the log that has the registers.
            no_cache=True,
            define_macro=[(name, str(int(value))) for name, value in macros.items()] or None,
        )  # fmt: skip
        log = io.StringIO()
        code = core.Program(source, "c++", options).compile("cubin", logs=log).code
        found = _KERNEL.findall(log.getvalue())
        _CUBINS[key] = Cubin(code, {name: int(regs) for name, _, regs in found}, {name: int(s) for name, s, _ in found})
    return _CUBINS[key]


def load(cubin: Cubin, name: str, shared_bytes: int, device: int):
    """A kernel of a cubin on GPU number `device`, which may then have so much dynamic shared memory a block."""
    kernel = _cuda("cuda.core").ObjectCode.from_cubin(cubin.code).get_kernel(name)
    if shared_bytes > DEFAULT_SHARED_BYTES:
        driver = _cuda("cuda.bindings.driver")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise UnsupportedError(explain("shared memory", "an amount that a block can have", f"{shared_bytes} bytes",
                                           "Choose smaller tiles."))  # fmt: skip
    return kernel


def launch(kernel, grid, num_threads: int, shared_bytes: int, stream: int, *arguments) -> None:
    """Queue a kernel on a stream's handle. Arguments: tensors go as pointers, ints as int, floats as float."""
    core = _cuda("cuda.core")
    config = core.LaunchConfig(grid=grid, block=num_threads, shmem_size=shared_bytes)
    core.launch(core.Stream.from_handle(stream), config, kernel, *map(_argument, arguments))


def _argument(value):
    if isinstance(value, int):
        return ctypes.c_int(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return value.data_ptr()


@cache
def _cuda(name):
    try:
        return import_module(name)
    except ImportError as error:
        raise Unavailable(explain("the ladder", f"the module {name}", str(error),
                                       "Install it: pip install 'flashtile[ladder]'.")) from None  # fmt: skip


def unavailable() -> str | None:
    """What is missing to compile, or None."""
    try:
        _cuda("cuda.core")
        _cuda("cuda.bindings.nvrtc").nvrtcVersion()
    except (Unavailable, RuntimeError) as error:
        return str(error)
    return None
