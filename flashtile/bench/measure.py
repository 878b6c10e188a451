"""Timing of one function: timers, cold cache, warm-up, stop rule, peak memory, host overhead.

| timer | times                                                                                             | L2 cache     |
|-------|---------------------------------------------------------------------------------------------------|--------------|
| event | the device, between CUDA events; a block's calls are queued before the first runs: no launch gaps | cold or warm |
| kernel| the device's kernels alone, from the tracer of torch.profiler; the gaps between them are left out   | cold or warm |
| graph | the device, replaying a CUDA graph of several calls; forward only, autograd can't be captured so  | warm         |
| wall  | the host's clock around a call and the wait for the device: what one isolated call costs          | cold or warm |
| cpu   | the host's clock around a call, on a CPU                                                          | warm         |

`auto` is event on a GPU and cpu without one. Nothing here changes the state of a GPU.
"""

import ctypes
import gc
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from flashtile.bench import stats
from flashtile.bench.cases import FORWARD_MODES

TIMERS = ("auto", "kernel", "event", "graph", "wall", "cpu")
MIN_SAMPLES = 30
MAX_SAMPLES = 5000
# Half-width of the median's interval, relative, at which sampling may stop.
CI_TARGET = 0.005
WARMUP_MS = 25.0
# A block queues at most this many calls before it waits: events and launches share a queue of about 1000 entries.
MAX_BLOCK = 40
GRAPH_CALLS = 10
# Longest that the device idles while the host queues a block, and what the host spends on a call beside fn
MAX_HEAD_START_MS = 20.0
QUEUE_MS = 0.02
# Clock that a spinning kernel counts in; only a head start depends on it.
_SPIN_CYCLES_PER_MS = 2_000_000


def resolve_timer(timer: str, device: torch.device, mode: str = "fwd") -> str:
    """The timer that is used: `auto` and what a device or mode can't do are replaced."""
    if device.type != "cuda":
        return "cpu"
    if timer in ("auto", "cpu") or (timer == "graph" and mode not in FORWARD_MODES):
        return "event"
    return timer


def demote_kept_lines() -> None:
    """Wait; then lines that a kernel asked the L2 cache to keep are like others, which a write of other memory replaces.

    FlashAttention-3 and -4 load keys and values so (evict_last). Else they last for several calls: what runs next on the same
    keys and values finds some in a cache that was to be cold (decode of 34 MB, nvidia-h100/decode.json before this and since:
    22.3 and 25.2 µs). Of one implementation's own calls, which come in one block, they last.
    """
    torch.cuda.synchronize()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()


class Stopwatch:
    """Times blocks of calls of functions on one device; holds the buffer that empties the L2 cache.

    Args:
        device: torch.device.
        timer: a resolved timer.
        l2: "cold" writes twice the L2 cache before each call, "warm" doesn't. A CPU is always warm.
    """

    def __init__(self, device, timer: str, l2: str = "cold"):
        self.device, self.timer = device, timer
        self.flush = None
        if device.type == "cuda" and l2 == "cold" and timer != "graph":
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self.flush = torch.empty(max(size, 1 << 20), dtype=torch.int8, device=device)
        self.l2 = "cold" if self.flush is not None else "warm"
        self._graphs = {}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, fn) -> float:
        """ms of one call and the wait for it, by the host's clock, without a cold cache."""
        self.wait()
        start = time.perf_counter()
        fn()
        self.wait()
        return (time.perf_counter() - start) * 1e3

    def block(self, fn, calls: int, head_start_ms: float = 0.0) -> list[float]:
        """ms of each of `calls` consecutive calls. head_start_ms: how long the device idles while the host queues calls."""
        if self.flush is not None:
            demote_kept_lines()
        if self.timer == "event":
            return self._event_block(fn, calls, head_start_ms)
        if self.timer == "graph":
            return self._graph_block(fn, calls)
        if self.timer == "kernel":
            return self._kernel_block(fn, calls)
        samples = []
        for _ in range(calls):
            if self.flush is not None:
                self.flush.zero_()
            samples.append(self.once(fn))
        return samples

    def _event_block(self, fn, calls, head_start_ms):
        for _ in range(3):
            samples, overtaken = self._queue(fn, calls, head_start_ms)
            if not overtaken:
                break
            head_start_ms = min(MAX_HEAD_START_MS, 2 * max(head_start_ms, 1.0))
        return samples

    def _queue(self, fn, calls, head_start_ms):
        """ms of each call, and whether the device had to wait for the host in between."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        stops = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
        self.wait()
        if head_start_ms > 0:
            # Private, but in torch since its own tests use it; without it small kernels show launch gaps.
            torch.cuda._sleep(int(head_start_ms * _SPIN_CYCLES_PER_MS))
        for start, stop in zip(starts, stops, strict=True):
            if self.flush is not None:
                self.flush.zero_()
            start.record()
            fn()
            stop.record()
        # The device is at the last call already: the host was not ahead of it.
        overtaken = calls > 1 and starts[-1].query()
        self.wait()
        return [start.elapsed_time(stop) for start, stop in zip(starts, stops, strict=True)], overtaken

    def _kernel_block(self, fn, calls):
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        self.wait()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as tracer:
            for _ in range(calls):
                if self.flush is not None:
                    self.flush.zero_()
                fn()
            self.wait()
        spans = [event.time_range for event in tracer.events() if event.device_type == DeviceType.CUDA]
        return kernel_times([(span.start, span.end) for span in spans], calls, self.flush is not None)

    def _graph_block(self, fn, calls):
        if fn not in self._graphs:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                fn()
            self.wait()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(GRAPH_CALLS):
                    fn()
            self._graphs = {fn: graph}
        replay = self._graphs[fn].replay
        replays = max(1, calls // GRAPH_CALLS)
        return [ms / GRAPH_CALLS for ms in self._event_block(replay, replays, 0.1)]

    def host_ms(self, fn, calls: int = 8) -> float:
        """ms that the host needs to queue a call while the device is busy elsewhere; the fastest of a few."""
        times = []
        for _ in range(calls):
            self.wait()
            start = time.perf_counter()
            fn()
            times.append((time.perf_counter() - start) * 1e3)
        self.wait()
        return min(times)


@dataclass
class Warm:
    """What warm-up learnt of a function: device ms a call, host ms to queue one."""

    device_ms: float
    host_ms: float

    def calls_in(self, budget_ms: float) -> int:
        """Calls in a block of this length, as far as the host can be so much ahead."""
        affordable = int(MAX_HEAD_START_MS / 1.5 / max(self._lag_ms(), 1e-4)) - 2
        return max(1, min(MAX_BLOCK, round(budget_ms / max(self.device_ms, 1e-4)), affordable))

    def head_start_ms(self, calls: int) -> float:
        """The device must stay behind the host: it waits for what the host is slower, and for the first two launches."""
        return min(MAX_HEAD_START_MS, 1.3 * (2 * self.host_ms + calls * self._lag_ms()))

    def _lag_ms(self) -> float:
        return max(0.0, self.host_ms + QUEUE_MS - self.device_ms)


def warm_up(watch: Stopwatch, fn, warmup_ms: float = WARMUP_MS) -> Warm:
    """Run fn for at least warmup_ms and until two blocks agree within 1%, for at most 8 times as long."""
    first = watch.once(fn)
    if watch.device.type == "cuda":
        first = min(first, watch.once(fn))
    host = 0.0 if watch.device.type == "cpu" else watch.host_ms(fn, 4 if first < 5 else 1)
    # What the host's clock says is no device time: a head start that trusts it would be too short, and its block so slow that
    # the next one would be, too.
    warm, unknown = Warm(first, host), Warm(0.0, host)
    start, previous = time.perf_counter(), None
    while True:
        calls = min(warm.calls_in(min(warmup_ms / 3, 10.0)), unknown.calls_in(10.0))
        head_start = (unknown if previous is None else warm).head_start_ms(calls)
        warm.device_ms = stats.quantile(sorted(watch.block(fn, calls, head_start)), 0.5)
        spent = (time.perf_counter() - start) * 1e3
        steady = previous is not None and abs(warm.device_ms - previous) <= 0.01 * previous
        if spent >= warmup_ms and (steady or spent >= 8 * warmup_ms or warm.device_ms > warmup_ms):
            return warm
        previous = warm.device_ms


def sample(watch, fn, warm, *, rep_ms: float, repeats: int | None, timeout_s: float) -> tuple[list[float], bool]:
    """Samples of one function in ms, and whether the interval's target was met.

    Exactly `repeats` samples where given. Otherwise at least 30 and for rep_ms, and then up to 3 rep_ms until the interval's
    half-width is under 0.5% of the median; timeout_s ends it in any case.
    """
    samples, start = [], time.perf_counter()
    while True:
        spent = time.perf_counter() - start
        if repeats is not None:
            if len(samples) >= repeats:
                return samples[:repeats], True
            calls = min(repeats - len(samples), warm.calls_in(100.0))
        else:
            steady = len(samples) >= MIN_SAMPLES and stats.summary(samples).ci_rel <= CI_TARGET
            enough = len(samples) >= MIN_SAMPLES and spent * 1e3 >= rep_ms
            if enough and (steady or spent * 1e3 >= 3 * rep_ms):
                return samples, steady
            if samples and (spent >= timeout_s or len(samples) >= MAX_SAMPLES):
                return samples, steady
            calls = warm.calls_in(min(20.0, rep_ms / 5))
        samples += watch.block(fn, calls, warm.head_start_ms(calls))


def quick_ms(watch, fn, warm) -> float:
    """Median ms of a few calls, by the watch's timer."""
    calls = max(3, min(20, round(50 / max(warm.device_ms, 1e-3))))
    return stats.quantile(sorted(watch.block(fn, calls, warm.head_start_ms(calls))), 0.5)


def kernel_times(spans, calls: int, flushed: bool) -> list[float]:
    """ms of kernels in each of `calls` calls, from the (start, end) of every kernel on the device in us.

    Every call launches equally many; where the cache was emptied before each, the first of them did that.

    Raises:
        RuntimeError: the kernels can't be shared out among the calls.
    """
    spans = sorted(spans)
    if not spans or len(spans) % calls:
        raise RuntimeError(f"the tracer saw {len(spans)} kernels in {calls} calls; use --timer event")
    each = len(spans) // calls
    return [sum(end - start for start, end in spans[first + flushed : first + each]) / 1e3
            for first in range(0, len(spans), each)]  # fmt: skip


def peak_memory(fn, device) -> int | None:
    """Bytes that fn had allocated at its peak, beyond what was allocated before; None on a CPU."""
    if device.type != "cuda":
        return None
    # What earlier calls left in cycles would be freed inside, and hide as much of this one
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = fn()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del kept
    return peak - before
