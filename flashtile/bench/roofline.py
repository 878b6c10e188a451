"""The measured roof: what a plain matrix product and a plain copy reach on this device, now; datasheet peaks beside it."""

import statistics
import time
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

BUDGET_S = 0.25


@dataclass(frozen=True)
class Roof:
    """tflops of an n³ matrix product of random data in a dtype; bandwidth in bytes/s, read plus written, of a device copy.
    On a CPU the dtype is always float32.

    spec_* are the datasheet's, None where no table has them.
    """

    dtype: str
    n: int
    tflops: float
    bandwidth: float
    spec_tflops: float | None = None
    spec_bandwidth: float | None = None

    def fraction(self, flops: int, num_bytes: int, ms: float) -> tuple[float, str]:
        """How much of the roof a call of `ms` reaches, 0 to 1, and what bounds it: "compute" or "memory"."""
        compute_ms, memory_ms = flops / self.tflops / 1e9, num_bytes / self.bandwidth * 1e3
        return max(compute_ms, memory_ms) / ms, "compute" if compute_ms >= memory_ms else "memory"

    def to_json(self) -> dict:
        return asdict(self)


def has_products(device: torch.device, dtype: str) -> bool:
    """Whether a torch.device multiplies a dtype such as "bfloat16": GPUs fp8 from sm_89 on; on a CPU the roof is of float32."""
    return device.type == "cpu" or dtype != "float8_e4m3fn" or torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache
def measure(device: str, dtype: str) -> Roof:
    """The roof of a device such as "cuda:0" for a dtype such as "bfloat16"; under a second, once a process."""
    torch_device, torch_dtype = torch.device(device), getattr(torch, dtype)
    on_gpu = torch_device.type == "cuda"
    if not on_gpu:
        # A plain half precision product can be 100 times slower than the fp32 that attention computes in on a CPU.
        dtype, torch_dtype = "float32", torch.float32
    n = 8192 if on_gpu else 1024
    if on_gpu and 4 * n * n * torch_dtype.itemsize > torch.cuda.mem_get_info(torch_device)[0] // 2:
        n = 4096
    tflops, bandwidth = _product_tflops(n, torch_dtype, torch_device), _copy_bandwidth(torch_device)
    roof = Roof(dtype, n, tflops, bandwidth, *_spec(torch_device, dtype))
    if on_gpu:
        torch.cuda.empty_cache()
    return roof


def _product_tflops(n, dtype, device) -> float:
    generator = torch.Generator(device).manual_seed(0)
    if dtype.itemsize == 1:
        # torch.mm takes no fp8
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16, generator=generator).to(dtype) for _ in range(2))
        one = torch.ones((), device=device)

        def product():
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
    else:
        a, b = (torch.randn(n, n, device=device, dtype=dtype, generator=generator) for _ in range(2))
        out = torch.empty_like(a)

        def product():
            torch.mm(a, b, out=out)

    return 2 * n**3 / _median_ms(product, device) / 1e9


def _copy_bandwidth(device) -> float:
    size = min(1 << 30, torch.cuda.mem_get_info(device)[0] // 8) if device.type == "cuda" else 1 << 26
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / _median_ms(lambda: target.copy_(source), device) * 1e3


def _spec(device, dtype):
    from flashtile import hardware

    known = hardware.detect(device)
    return known.peak(dtype), known.peak_bandwidth


def _median_ms(fn, device) -> float:
    on_gpu = device.type == "cuda"
    fn()
    samples, start = [], time.perf_counter()
    while len(samples) < 3 or (time.perf_counter() - start < BUDGET_S and len(samples) < 40):
        if on_gpu:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            fn()
            last.record()
            last.synchronize()
            samples.append(first.elapsed_time(last))
        else:
            began = time.perf_counter()
            fn()
            samples.append((time.perf_counter() - began) * 1e3)
    return statistics.median(samples)
