"""What of the measuring instrument only a GPU can show: its timers agree, launch gaps are hidden, memory is as by formula."""

import json
import statistics
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from flashtile import bench
from flashtile.bench import measure, memory, profilers
from flashtile.bench.cases import BenchCase

pytestmark = pytest.mark.gpu
SMALL = BenchCase(1, 64, 64, 4, 4, 64, 64)
LARGE = BenchCase(2, 4096, 4096, 16, 16, 128, 128)


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_kernel_event_and_wall_time_are_in_order(mode):
    """A case whose launches take longer than its kernels: event time must not hold them."""
    result = bench.run(SMALL, modes=(mode,), settings=bench.Settings(roof=False)).one(mode=mode)
    assert result.ok, result.reason
    times = result.times_ms
    assert times["kernel"] < 1.1 * times["event"] < times["wall"]
    assert result.stats.median < 1.5 * result.stats.min + 0.005, "launch gaps are in the median"
    assert result.host_overhead_us > 0


@triton.jit
def _read_and_keep(x, sums, BLOCK: tl.constexpr):
    begin = tl.program_id(0) * BLOCK
    loaded = tl.load(x + begin + tl.arange(0, BLOCK), eviction_policy="evict_last")
    tl.store(sums + tl.program_id(0), tl.sum(loaded, 0))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="keeps no lines")
def test_a_cold_cache_holds_nothing_that_another_kept():
    """As FlashAttention-3 keeps keys and values, which the next in line is then timed on."""
    x = torch.randn(1 << 23, device="cuda")
    sums, watch = torch.empty(1 << 13, device="cuda"), measure.Stopwatch(x.device, "event")

    def read():
        torch.amax(x, dim=0, out=sums[0])

    def median():
        return statistics.median(watch.block(read, 20, 1.0))

    median()
    alone = min(median() for _ in range(3))
    for _ in range(3):
        _read_and_keep[(1 << 13,)](x, sums, 1 << 10)
    assert median() > 0.96 * alone


def test_timers_agree_on_a_long_kernel():
    medians = {}
    for timer in ("event", "kernel", "wall"):
        settings = bench.Settings(timer=timer, roof=False, check=False, repeats=40)
        medians[timer] = bench.run(LARGE, modes=("fwd",), settings=settings).one().stats.median
    assert medians["kernel"] == pytest.approx(medians["event"], rel=0.15)
    assert medians["wall"] == pytest.approx(medians["event"], rel=0.3)


@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
def test_memory_is_as_the_formulas_say(train):
    report = memory.measure_memory(LARGE, train=train, settings=bench.Settings(roof=False, check=False))
    for result in report.results:
        assert result.ok, result.reason
        assert result.extra_mem_bytes == pytest.approx(result.predicted_mem_bytes, rel=0.02), result.backend


def test_a_case_that_does_not_fit_is_a_row():
    longer = BenchCase(16, 131072, 131072, 64, 64, 64, 64)
    report = memory.measure_memory(longer, ["naive"], settings=bench.Settings(roof=False, check=False))
    assert report.results[0].status in ("skipped", "oom")


@pytest.mark.parametrize("name", ["flex", "sdpa-cudnn"])
def test_peers_of_torch_are_correct_or_say_why_not(name):
    report = bench.compare(BenchCase(1, 256, 256, 4, 4, 64, 64, causal=True), ["flashtile", name], ("fwd", "bwd"),
                           settings=bench.Settings(rounds=6, rep_ms=6, roof=False))  # fmt: skip
    assert {r.status for r in report.results if r.backend == "flashtile"} == {"ok"}
    assert all(r.ok or r.reason for r in report.results)
    assert not [r for r in report.results if r.status == "mismatch"]


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() <= (8, 0), reason="no older GPU")
def test_tiles_for_an_older_gpu_compute_the_same(tmp_path):
    """In a process of its own, whose kernels are all for that GPU."""
    out = tmp_path / "tiles.json"
    words = ["tune", "--target", "A100", "--batch", "1", "--seqlen", "512", "--headdim", "64,192", "--json", str(out)]
    subprocess.run([sys.executable, "-m", "flashtile", *words], check=True, timeout=300)
    rows = json.loads(out.read_text())["rows"]
    assert {row["kernel"] for row in rows} == {"forward", "dkdv", "dq"}
    refused = [row["refused"] for row in rows if "refused" in row]
    assert len(refused) < len(rows) / 2 and all("shared memory" in reason for reason in refused), refused


@pytest.mark.skipif(profilers.missing("proton", torch.cuda.is_available()) is not None, reason="needs proton")
def test_proton_sees_the_kernels(tmp_path):
    out = str(tmp_path / "p.hatchet")
    line = profilers.command("proton", LARGE, mode="fwd", backend="flashtile", device="cuda:0", repeats=2, seed=0, out=out)
    profilers.run(line, out)
    assert any("attention" in name and count == 2 for name, count, _ in profilers.proton_kernels(out))
