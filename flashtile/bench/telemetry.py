"""What the GPU did while we measured: clocks, power, temperature, reasons for throttling. Reads only, changes nothing.

Without nvidia-ml-py (module pynvml), a driver or permission there is no telemetry, and nothing else changes.
"""

import statistics
import threading
import time

PERIOD_S = 0.05
MAX_TRACE = 16
# NVML's bits of "clocks event reasons" that slow a kernel down; idle and user-set clocks are left out.
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def open_gpu(device):
    """(pynvml, handle) of a torch.device, or None."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        try:
            # Indices of NVML ignore CUDA_VISIBLE_DEVICES; the UUID doesn't.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
    except Exception:  # no module, no library, no driver, no permission
        return None


def read(gpu) -> dict:
    """One reading of what the driver tells: sm_mhz, mem_mhz, power_w, temperature_c, reasons (a bit mask)."""
    pynvml, handle = gpu
    getters = {
        "sm_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "mem_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "reasons": lambda: _reasons(pynvml)(handle),
    }
    values = {}
    for name, get in getters.items():
        try:
            values[name] = get()
        except Exception:  # this GPU or user can't read it
            continue
    return values


def usage(gpu) -> dict:
    """gpu_percent and mem_percent (share of the time that a kernel ran, that memory moved), mem_used_mib."""
    pynvml, handle = gpu
    values = {}
    try:
        rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
        values |= {"gpu_percent": rates.gpu, "mem_percent": rates.memory}
        values["mem_used_mib"] = pynvml.nvmlDeviceGetMemoryInfo(handle).used / (1 << 20)
    except Exception:  # this GPU or user can't read it
        pass
    return values


def _reasons(pynvml):
    # Renamed in driver 535; old modules have only the old name.
    name = "nvmlDeviceGetCurrentClocksEventReasons"
    return getattr(pynvml, name, None) or pynvml.nvmlDeviceGetCurrentClocksThrottleReasons


class Telemetry:
    """A thread that reads the GPU 20 times a second between `with` and its end; `since(t)` summarises from a time on."""

    def __init__(self, device):
        self._gpu = open_gpu(device)
        self._readings: list[tuple[float, dict]] = []
        self._stop = threading.Event()
        self._thread = None

    def __enter__(self):
        if self._gpu:
            self._thread = threading.Thread(target=self._loop, name="flashtile-telemetry", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        if self._thread:
            self._thread.join(timeout=1.0)

    def _loop(self):
        while not self._stop.wait(PERIOD_S):
            self._readings.append((time.perf_counter(), read(self._gpu)))

    def since(self, start: float) -> dict | None:
        """Summary of the readings since a time of perf_counter, None without one."""
        readings = [(when - start, values) for when, values in list(self._readings) if when >= start]
        return summarise([values for _, values in readings]) | {"trace": trace(readings)} if readings else None


def summarise(readings: list[dict]) -> dict:
    """Medians and ranges; throttle: share of the readings with each reason."""
    summary = {"n": len(readings)}
    for name in ("sm_mhz", "mem_mhz", "power_w", "temperature_c"):
        values = [r[name] for r in readings if name in r]
        if values:
            summary |= {f"{name}_median": statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    masks = [r["reasons"] for r in readings if "reasons" in r]
    shares = {name: sum(bool(mask & bit) for mask in masks) / len(masks) for bit, name in REASONS.items()} if masks else {}
    summary["throttle"] = {name: round(share, 3) for name, share in shares.items() if share > 0}
    return summary


def trace(readings) -> list[list[float]]:
    """At most MAX_TRACE of (seconds, values) readings as [seconds, SM MHz, W], evenly chosen."""
    step = max(1, -(-len(readings) // MAX_TRACE))
    return [[round(when, 3), now.get("sm_mhz", 0), round(now.get("power_w", 0.0), 1)] for when, now in readings[::step]]


def describe(summary: dict | None) -> str:
    """One phrase, such as `SM 1755 MHz (1740-1980), 512 W, 61 C, power cap 63% of samples`; empty without telemetry."""
    if not summary:
        return ""
    words = []
    if "sm_mhz_median" in summary:
        low, high = summary["sm_mhz_min"], summary["sm_mhz_max"]
        steady = "" if high - low <= 0.02 * high else f" ({low:.0f}-{high:.0f})"
        words.append(f"SM {summary['sm_mhz_median']:.0f} MHz{steady}")
    words += [f"{summary['power_w_median']:.0f} W"] if "power_w_median" in summary else []
    words += [f"{summary['temperature_c_max']:.0f} C"] if "temperature_c_max" in summary else []
    words += [f"{reason} in {share:.0%} of samples" for reason, share in summary.get("throttle", {}).items()]
    return ", ".join(words)
