"""Launching again without Triton's look at the arguments."""

import ctypes
import importlib.util
import struct
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from flashtile import counters, outputs
from flashtile.device.launch import Launches, TensorMaps, launch_now


class Group(NamedTuple):
    tensor: object
    stride: int
    inner: object


class Compiled:
    """Stands for Triton's compiled kernel; without `function` nothing was compiled for a GPU."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Kernel:
    """Stands for a Triton kernel: keeps what it is launched with."""

    arg_names = ["group", "x", "TILE", "DIM"]

    def __init__(self, compiled):
        self.compiled, self.launches = compiled, []

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            self.launches.append((grid, arguments, named))
            return self.compiled

        return launch


@pytest.fixture
def launched_again(monkeypatch):
    """What Triton's launcher is given, behind a launcher of ours."""
    launcher = pytest.importorskip("flashtile.device.launcher")
    launches, stream = [], SimpleNamespace(get_current_stream=lambda index: 7)
    described = launcher.Launcher(lambda *arguments: launches.append(arguments), ("flags",), False, [])
    monkeypatch.setattr(launcher, "launcher_of", lambda compiled: described)
    monkeypatch.setattr(launcher, "preparer", lambda *_: None)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=stream))
    return launches


def start(kernel, launch, x, off, workspace):
    launch(kernel, (3,), (Group(x, 7, (workspace[4:], off)), x), {"DIM": 64, "TILE": 16}, num_warps=4)


def test_launches_exchange_addresses_alone(launched_again):
    """From the third call on; the second one's tensor may be the same in two places. Constexprs come in the kernel's order."""
    kernel = Kernel(Compiled(function=1))
    launches = Launches(partial(start, kernel))
    for repeat in range(3):
        x, workspace = torch.zeros(4), torch.zeros(8)
        launches.run(x, None, workspace)
        assert (len(kernel.launches), len(launched_again)) == ((repeat + 1, 0) if repeat < 2 else (2, 1))
    grid, (group, _), named = kernel.launches[0]
    assert (grid, group.stride) == ((3,), 7)
    assert named == {"DIM": 64, "TILE": 16, "num_warps": 4, "enable_fp_fusion": True}
    group = (x.data_ptr(), 7, (workspace.data_ptr() + 16, None))
    assert launched_again == [(3, 1, 1, 7, "flags", group, x.data_ptr(), 16, 64)]


def test_host_overhead_times_the_launches_of_a_call(launched_again):
    """What a call launches from its third time on, and afterwards calls are as before."""
    path = Path(__file__).parents[1] / "benchmarks" / "host_overhead.py"
    spec = importlib.util.spec_from_file_location("host_overhead", path)
    host_overhead = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host_overhead)
    launches = Launches(partial(start, Kernel(Compiled(function=1))))
    x, workspace = torch.zeros(4), torch.zeros(8)
    bare = host_overhead.bare(lambda: launches.run(x, None, workspace))
    before = len(launched_again)
    bare()
    launches.run(x, None, workspace)
    assert len(launched_again) == before + 2 and launched_again[-1] == launched_again[-2]


@pytest.mark.parametrize("has_context", [False, True])
def test_descriptors_are_made_in_a_context(has_context, monkeypatch):
    """A thread of gradients that neither launched nor allocated has none, and the driver makes no descriptor then."""
    launcher = pytest.importorskip("flashtile.device.launcher")
    calls = []

    def get_current(context):
        context._obj.value = 5 if has_context else None
        return 0

    def retain(context, device):
        context._obj.value = 6
        calls.append(("retain", device.value))

    def get_device(device, index):
        device._obj.value = index + 10

    driver = SimpleNamespace(cuCtxGetCurrent=get_current, cuDeviceGet=get_device, cuDevicePrimaryCtxRetain=retain,
                             cuCtxSetCurrent=lambda context: calls.append(("set", context.value)))  # fmt: skip
    monkeypatch.setattr(launcher, "_cuda", lambda: driver)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 1)))
    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", lambda described, *_: [described.base.data_ptr()])
    described = SimpleNamespace(base=SimpleNamespace(is_cuda=True), block_shape=[16, 16])
    for make in (lambda: launch_now(Kernel(Compiled(function=1)), (1,), (described,), {}),
                 lambda: TensorMaps(described, None)[4096]):  # fmt: skip
        calls.clear()
        make()
        assert calls == ([] if has_context else [("retain", 11), ("set", 6)])
    calls.clear()
    on_cpu = SimpleNamespace(base=torch.zeros(4), block_shape=[16, 16])
    launch_now(Kernel(Compiled(function=1)), (1,), (on_cpu, torch.zeros(4)), {})
    assert TensorMaps(on_cpu, None)[4096] == 4096
    assert not calls


@pytest.mark.parametrize("with_descriptor", [False, True])
def test_the_launcher_gets_what_triton_gives_it(with_descriptor, monkeypatch):
    """By the installed Triton's own CudaLauncher, of which only the compiled parts, and the maps, are stand-ins."""
    launcher = pytest.importorskip("flashtile.device.launcher")
    from triton.backends.nvidia import driver as nvidia
    from triton.tools.tensor_descriptor import TensorDescriptor

    calls = []
    utils = SimpleNamespace(launch=lambda *arguments: calls.append(arguments), fill_tma_descriptor=lambda *described: described,
                            fill_tma_descriptor_tiled=lambda *described: described)  # fmt: skip
    monkeypatch.setattr(launcher, "preparer", lambda *_: None)
    monkeypatch.setattr(launcher.driver, "_active", SimpleNamespace(utils=utils, get_current_stream=lambda index: 7))
    described = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [16, 16], "fp4_padded": False}
    metadata = SimpleNamespace(tensordesc_meta=[described] if with_descriptor else None)
    signature = {"group": ("*fp32", "constexpr", "i32"), "x": "tensordesc<fp32[16, 16]>" if with_descriptor else "*fp32",
                 "TILE": "constexpr", "DIM": "constexpr"}  # fmt: skip
    run = object.__new__(nvidia.CudaLauncher)
    run.launch = nvidia.wrap_handle_tensordesc(utils.launch, signature, metadata.tensordesc_meta)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl, run.gsan_enabled = 1, False, True, False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    run.arg_annotations, run.kernel_signature = "annotations", b"signature"
    compiled = Compiled(function=5, run=run, metadata=metadata, packed_metadata=(4, 1, 0))

    def start(launch, x, workspace):
        if with_descriptor:
            x = TensorDescriptor(x, list(x.shape), list(x.stride()), [16, 16])
        launch(Kernel(compiled), (3,), ((workspace[4:], None, 16), x), {"TILE": 16, "DIM": 64}, num_warps=4)

    launches = Launches(start)
    for _ in range(3):
        x, workspace = torch.zeros(32, 64), torch.zeros(8)
        launches.run(x, workspace)
    first = TensorDescriptor(x, list(x.shape), list(x.stride()), [16, 16]) if with_descriptor else x.data_ptr()
    run(3, 1, 1, 7, 5, (4, 1, 0), None, None, None, (workspace.data_ptr() + 16, None, 16), first, 16, 64)
    # the last may be a tuple or a list of arguments
    ours, tritons = ((*call[:-1], *call[-1]) if isinstance(call[-1], tuple | list) else call for call in calls)
    assert ours == tritons and ours[0] == 3 and ours[-1] == 64


class Driver:
    """Stands for the CUDA driver: has the layout of a kernel's arguments, and keeps what is launched."""

    def __init__(self, layout):
        self.layout, self.launched, self.status = layout, [], 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index.value == len(self.layout):
            return 1
        offset._obj.value, size._obj.value = self.layout[index.value]
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        config = config._obj
        values = [ctypes.string_at(at, size) for at, (_, size) in zip(parameters, self.layout)]
        sizes = tuple(config.grid), tuple(config.block), config.shared_bytes
        self.launched.append((*sizes, config.stream, config.num_attributes, function.value, values))
        return self.status


# x, the stride, a number and the scale, then Triton's two
LAYOUT = [(0, 8), (8, 4), (16, 8), (24, 8), (32, 4), (40, 8), (48, 8)]


@pytest.mark.parametrize("layout", [LAYOUT, LAYOUT[:-1], [*LAYOUT[:4], (36, 4), *LAYOUT[5:]]])
def test_the_driver_starts_a_kernel_by_itself(layout, monkeypatch):
    """With the arguments laid out as the driver has them; else Triton's launcher does."""
    launcher = pytest.importorskip("flashtile.device.launcher")
    driver, by_triton = Driver(layout), []
    monkeypatch.setattr(launcher, "_cuda", lambda: driver)
    described = launcher.Launcher(lambda *arguments: by_triton.append(arguments), ("flags",), False, [])
    monkeypatch.setattr(launcher, "launcher_of", lambda compiled: described)
    stream = SimpleNamespace(get_current_stream=lambda index: 7)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=stream))
    signature = {"group": ("*fp32", "i32", ("*fp32", "constexpr", "i64")), "x": "fp32", "TILE": "constexpr", "DIM": "constexpr"}
    run, metadata = dict(launch_cooperative_grid=False, launch_pdl=True), dict(num_ctas=1, num_warps=4, shared=1000)
    compiled = Compiled(function=5, src=SimpleNamespace(signature=signature), run=SimpleNamespace(**run),
                        metadata=SimpleNamespace(**metadata))  # fmt: skip
    kernel = Kernel(compiled)

    def start(launch, x, workspace):
        launch(kernel, (3, 2), ((x, 9, (workspace[4:], None, 2**40)), 0.5), {"TILE": 16, "DIM": 64}, num_warps=4)

    launches = Launches(start)
    for _ in range(4):
        x, workspace = torch.zeros(4), torch.zeros(8)
        launches.run(x, workspace)
    if layout is not LAYOUT:
        assert len(by_triton) == 2 and not driver.launched
        return
    values = x.data_ptr(), 9, workspace.data_ptr() + 16, 2**40, 0.5, 0, 0
    packed = [struct.pack(form, value) for form, value in zip("QiQqfQQ", values)]
    assert not by_triton and len(driver.launched) == 2
    assert driver.launched[-1] == ((3, 2, 1), (128, 1, 1), 1000, 7, 1, 5, packed)
    # What the driver refuses Triton is asked for, which has an error for it
    driver.status = 1
    launches.run(x, workspace)
    assert len(kernel.launches) == 3


def test_a_view_of_no_argument_is_a_mistake(launched_again):
    kernel = Kernel(Compiled(function=1))
    launches = Launches(lambda launch, x: start(kernel, launch, x, None, x.new_zeros(8)))
    launches.run(torch.zeros(4))
    with pytest.raises(ValueError):
        launches.run(torch.zeros(4))


def test_nothing_is_launched_again_without_a_gpu(launched_again):
    kernel = Kernel(Compiled())
    launches = Launches(partial(start, kernel))
    for _ in range(4):
        launches.run(torch.zeros(4), None, torch.zeros(8))
    assert len(kernel.launches) == 4 and not launched_again


def test_a_call_that_launches_nothing_needs_no_gpu(monkeypatch):
    """No queries and no keys: there is no driver to ask for a stream either."""
    launcher = pytest.importorskip("flashtile.device.launcher")
    monkeypatch.setattr(launcher, "driver", None)
    launches = Launches(lambda launch, x: None)
    for _ in range(4):
        launches.run(torch.zeros(0))


def test_hooks_on_launches_see_them(launched_again):
    """Triton's profiler adds such hooks; with one each launch goes through Triton."""
    from triton import knobs

    kernel = Kernel(Compiled(function=1))
    launches = Launches(partial(start, kernel))
    for _ in range(3):
        launches.run(torch.zeros(4), None, torch.zeros(8))

    def hook(metadata):
        pass

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launches.run(torch.zeros(4), None, torch.zeros(8))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert (len(kernel.launches), len(launched_again)) == (3, 1)


def test_counters_are_of_a_stream_or_of_a_captured_call(monkeypatch):
    """Two calls that may run at the same time never count in the same memory."""
    stream, capturing = 7, False
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=lambda: None))
    for kept in ("_of_stream", "_reserves"):
        monkeypatch.setattr(counters, kept, {})
    monkeypatch.setattr(counters, "RESERVED", 128)
    made = []

    def new_zeros(size, dtype):
        made.append(torch.zeros(size, dtype=dtype))
        return made[-1]

    x = SimpleNamespace(is_cuda=True, get_device=lambda: 0, new_zeros=new_zeros)
    capturing = True
    assert counters.zeros(x, 3) is made[-1] and len(made) == 1
    capturing = False
    first = counters.zeros(x, 3)
    assert counters.zeros(x, 2) is first and len(made) == 3
    larger = counters.zeros(x, 5)
    assert len(larger) == 5 and counters.zeros(x, 3) is larger
    stream = 8
    assert counters.zeros(x, 5) is not larger
    capturing = True
    captured = [counters.zeros(x, size) for size in (5, 33, 20)]
    places = sorted((y.data_ptr(), y.numel() * 4) for y in captured)
    assert all(begin + size <= following for (begin, size), (following, _) in zip(places, places[1:]))
    assert [len(y) for y in captured] == [5, 33, 20]
    # The reserve is used up
    before = len(made)
    assert counters.zeros(x, 1) is made[-1] and len(made) == before + 1


def test_scratch_is_of_a_stream_and_its_counters_are_zeros(monkeypatch):
    """Calls of one stream share both, a captured call shares neither; a call without counters gets none."""
    stream, capturing = 7, False
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(outputs, "empty_on_gpu", None)
    for module, kept in ((counters, "_of_stream"), (counters, "_reserves"), (outputs, "_kept")):
        monkeypatch.setattr(module, kept, {})
    x = SimpleNamespace(
        is_cuda=True, get_device=lambda: 0, dtype=torch.float32, new_zeros=torch.zeros,
        new_empty_strided=lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
    )  # fmt: skip
    memory, stored = outputs.scratch(100, 5)(x)
    assert len(memory) == 100 and len(stored) == 5 and not stored.any()
    smaller = outputs.scratch(60, 3)(x)
    assert smaller[0] is memory and smaller[1] is stored and outputs.scratch(60)(x) == (memory, None)
    larger = outputs.scratch(200, 9)(x)
    assert len(larger[0]) == 200 and len(larger[1]) == 9 and counters.zeros(x, 9) is larger[1]
    capturing = True
    captured = [outputs.scratch(100, 5)(x) for _ in range(2)]
    assert len({y.data_ptr() for y in (*larger, *captured[0], *captured[1])}) == 6
    capturing, stream = False, 8
    assert all(a is not b for a, b in zip(outputs.scratch(100, 5)(x), larger))
