"""Device: what a GPU is, detected or by name without one. Datasheet peaks carry their source, measured ones their record."""

import re
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True)
class Device:
    """One device as dispatch, tile choice and rooflines see it.

    smem_bytes is what one block can have; peaks are dense, in TFLOP/s by dtype name; bandwidths in bytes/s. measured_* come
    from a recorded run, None where there is none.
    """

    name: str
    arch: str  # "sm_90", or "cpu"
    num_sms: int
    smem_bytes: int
    l2_bytes: int = 0
    memory_bytes: int = 0
    peak_tflops: tuple[tuple[str, float], ...] = ()
    peak_bandwidth: float | None = None
    measured_tflops: float | None = None
    measured_bandwidth: float | None = None
    source: str = field(default="", compare=False)

    def __hash__(self):
        return hash((self.name, self.arch))

    @property
    def sm(self) -> int:
        """Compute capability as a number, 90 for sm_90; 0 on a CPU."""
        return int(self.arch.removeprefix("sm_")) if self.arch.startswith("sm_") else 0

    def peak(self, dtype_name: str) -> float | None:
        """Datasheet TFLOP/s of a dtype such as "bfloat16"."""
        return dict(self.peak_tflops).get(dtype_name)


KIB, MIB, GIB, GB = 1 << 10, 1 << 20, 1 << 30, 10**9
# Largest shared memory of one block, by compute capability. CUDA C++ programming guide, "Technical specifications".
_SMEM = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


def _half(tflops, fp32, fp8=None):
    half = ("float16", tflops), ("bfloat16", tflops), ("float32", fp32)
    return half if fp8 is None else (*half, ("float8_e4m3fn", fp8))


_B200 = "NVIDIA DGX B200 datasheet, dense"
_A100 = "NVIDIA A100 80GB SXM datasheet"
_A6000 = "NVIDIA RTX A6000 datasheet; dense half of the sparse figure"
_ADA = "NVIDIA Ada architecture whitepaper; fp32 accumulation"
_L20 = "NVIDIA L20 datasheet"
_H100 = "NVIDIA H100 SXM datasheet, dense"
# Sold as 141 GB; torch reports 139.8 GiB (every record, for example paper.json)
_H200 = "NVIDIA H200 SXM datasheet, dense; measured: memory, 8192 cubed bf16 product and device copy"
DEVICES = {
    device.name: device
    for device in (
        Device("A100", "sm_80", 108, 163 * KIB, 40 * MIB, 80 * GIB, _half(312, 19.5), 2.039e12, source=_A100),
        Device("A6000", "sm_86", 84, 99 * KIB, 6 * MIB, 48 * GIB, _half(154.8, 38.7), 0.768e12, source=_A6000),
        Device("RTX 4090", "sm_89", 128, 99 * KIB, 72 * MIB, 24 * GIB, _half(165.2, 82.6, 330.3), 1.008e12, source=_ADA),
        Device("L20", "sm_89", 92, 99 * KIB, 96 * MIB, 48 * GIB, _half(119.5, 59.8, 239), 0.864e12, source=_L20),
        Device("H100", "sm_90", 132, 227 * KIB, 50 * MIB, 80 * GIB, _half(989.4, 66.9, 1978.9), 3.35e12, source=_H100),
        Device("H200", "sm_90", 132, 227 * KIB, 60 * MIB, int(139.8 * GIB), _half(989.4, 66.9, 1978.9), 4.8e12, 778.0,
               4.27e12, _H200),
        Device("B200", "sm_100", 148, 227 * KIB, 126 * MIB, 180 * GB, _half(2250, 75, 4500), 8e12, source=_B200),
    )
}
# In the interpreter a tile may be as large as it likes.
CPU = Device("CPU", "cpu", 0, GIB)


def by_name(name: str) -> Device:
    """A device of the table, by a name such as "H200" or "nvidia a100-sxm4-80gb", or by its arch ("sm_90")."""
    lowered = name.lower()
    for device in sorted(DEVICES.values(), key=lambda d: -len(d.name)):
        # As a word of its own: an RTX A1000 is no A100
        if re.search(rf"(?<![a-z0-9]){re.escape(device.name.lower())}(?![a-z0-9])", lowered):
            return device
    # The newest GPU of the arch: its tables were measured
    matches = [device for device in DEVICES.values() if device.arch == lowered]
    if matches:
        return matches[-1]
    raise KeyError(f"no device is called {name!r}; known: {', '.join(DEVICES)}, and their archs (sm_80, ...)")


def detect(device=None) -> Device:
    """The device of a torch.device, a tensor's device, or (None) the current GPU, the CPU where there is none."""
    import torch

    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    elif not isinstance(device, torch.device):
        device = torch.device(device)
    if device.type != "cuda":
        return CPU
    return _detect_gpu(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _detect_gpu(index) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    sm = 10 * properties.major + properties.minor
    try:
        known = by_name(properties.name)
    except KeyError:
        known = CPU
    # Other products have its name too, and parts of one (MIG): a PCIe card has fewer multiprocessors, or less memory
    as_large = 0.9 * known.memory_bytes < properties.total_memory < 1.1 * known.memory_bytes
    if known.sm != sm or known.num_sms != properties.multi_processor_count or not as_large:
        known = CPU
    return Device(
        name=known.name if known is not CPU else properties.name,
        arch=f"sm_{sm}",
        num_sms=properties.multi_processor_count,
        smem_bytes=_SMEM.get(sm, 99) * KIB,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        peak_tflops=known.peak_tflops,
        peak_bandwidth=known.peak_bandwidth,
        measured_tflops=known.measured_tflops,
        measured_bandwidth=known.measured_bandwidth,
        source=known.source,
    )


_NO_SWITCH = nullcontext()


def is_current(tensor) -> bool:
    """Whether launches go to the tensor's GPU; also on a CPU."""
    if not tensor.is_cuda:
        return True
    import torch

    # torch.cuda.current_device, without its look whether CUDA was started: it was, for the tensor
    return tensor.get_device() == torch._C._cuda_getDevice()


def on_device_of(tensor):
    """A context in which launches go to the tensor's GPU; free where it is the current one."""
    if is_current(tensor):
        return _NO_SWITCH
    import torch

    return torch.cuda.device(tensor.device)
