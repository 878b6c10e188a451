"""Profilers around or inside of `workload`: the command of each, what keeps it from running, and what its result says in words.

| tool   | needs                                    | writes             | tells                                             |
|--------|------------------------------------------|--------------------|---------------------------------------------------|
| torch  | nothing more                             | .json chrome trace | a table of operators and kernels                  |
| proton | a GPU; comes with triton                 | .hatchet           | time of each kernel                               |
| ncu    | NVIDIA Nsight Compute, its counters      | .ncu-rep           | pipes, memory, occupancy; what bounds each kernel |
| nsys   | NVIDIA Nsight Systems                    | .nsys-rep          | time of each kernel and range                     |
"""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from flashtile.bench.cases import BenchCase

TOOLS = ("torch", "proton", "ncu", "nsys")
SUFFIXES = {"torch": "json", "proton": "hatchet", "ncu": "ncu-rep", "nsys": "nsys-rep"}
# Names differ by chip: of each meaning, the first one that this chip has is taken.
METRICS = {
    "duration": ("gpu__time_duration.sum",),
    "tensor pipe": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
                    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
                    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"),
    "SM": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "exponentials": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",),
    "fp32 pipe": ("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed",),
    "shared memory": ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",),
    "L2": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "DRAM": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
    "L2 hits": ("lts__t_sector_hit_rate.pct",),
    "DRAM bytes": ("dram__bytes.sum",),
    "warps active": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
    "shared bytes": ("launch__shared_mem_per_block_dynamic",),
    "blocks": ("launch__grid_size",),
}  # fmt: skip
SETS = {
    "basic": ("duration", "tensor pipe", "SM", "DRAM", "L2 hits", "warps active", "registers", "shared bytes", "blocks"),
    "memory": ("duration", "DRAM", "DRAM bytes", "L2", "L2 hits", "shared memory", "registers", "shared bytes", "blocks"),
    "tensor": ("duration", "tensor pipe", "exponentials", "fp32 pipe", "shared memory", "SM", "DRAM", "registers", "blocks"),
    "full": tuple(METRICS),
}
# What may bound a kernel; the rest describes it.
_LIMITS = ("tensor pipe", "exponentials", "fp32 pipe", "shared memory", "L2", "DRAM", "SM")
_WORDS = {"DRAM": "memory bandwidth", "tensor pipe": "tensor cores", "exponentials": "the exponential unit"}
_CHIPS = {80: "ga100", 86: "ga102", 89: "ad102", 90: "gh100", 100: "gb100", 120: "gb202"}
COUNTERS_REMEDY = (
    "performance counters are for administrators only on this machine: https://developer.nvidia.com/ERR_NVGPUCTRPERM. "
    "`--tool torch` and `--tool proton` need none."
)


@dataclass(frozen=True)
class Kernel:
    """One launch that ncu looked at; metrics by the names of METRICS, in ns, bytes and percent."""

    name: str
    metrics: dict[str, float]

    def bound(self) -> str:
        """What the launch is bound by, in words."""
        found = {name: self.metrics[name] for name in _LIMITS if name in self.metrics}
        if not found:
            return "unknown: no utilisation was asked for"
        # SM is the busiest of its pipes: it only names the limit where none of them was looked at.
        pipes = {name: value for name, value in found.items() if name != "SM"} or found
        name = max(pipes, key=pipes.get)
        if max(found.values()) < 40:
            return f"latency or too few blocks: nothing is busier than {max(found.values()):.0f}%"
        if found.get("SM", 0) > pipes[name] + 15:
            return f"the SM's instruction issue or a pipe that was not asked for (SM {found['SM']:.0f}%); try --metrics full"
        return f"{_WORDS.get(name, name)} ({pipes[name]:.0f}%)"


def command(tool: str, case: BenchCase, *, mode: str, backend: str, device: str, repeats: int, seed: int, out: str,
            kernel: str | None = None, metrics: list[str] | None = None, full: bool = False) -> list[str]:  # fmt: skip
    """The command line of a tool; metrics are ncu's own names, full collects its whole set instead."""
    inside = tool in ("torch", "proton")
    order = {"config": case.config(), "backend": backend, "mode": mode, "device": device, "repeats": repeats, "seed": seed,
             "tool": tool if inside else "range", "out": out if inside else ""}  # fmt: skip
    child = [sys.executable, "-m", "flashtile.bench.workload", json.dumps(order)]
    stem = out.removesuffix(f".{SUFFIXES[tool]}")
    if tool == "ncu":
        what = ["--set", "full"] if full else ["--metrics", ",".join(metrics)]
        chosen = ["--kernel-name", f"regex:{kernel}"] if kernel else []
        # Clocks stay as they are; ncu would lock them by default.
        return ["ncu", "--force-overwrite", "--clock-control", "none", "--profile-from-start", "off",
                "--target-processes", "all", *what, *chosen, "-o", stem, *child]  # fmt: skip
    if tool == "nsys":
        return ["nsys", "profile", "--force-overwrite", "true", "--trace", "cuda,nvtx,osrt", "--capture-range",
                "cudaProfilerApi", "-o", stem, *child]  # fmt: skip
    return child


def missing(tool: str, on_gpu: bool) -> str | None:
    """Why a tool can't run here, with the way out, or None."""
    if tool != "torch" and not on_gpu:
        return f"{tool}: needs a GPU. `--tool torch` works on a CPU."
    if tool in ("ncu", "nsys") and shutil.which(tool) is None:
        product = {"ncu": "Nsight Compute", "nsys": "Nsight Systems"}[tool]
        return (f"{tool} is not on PATH: it comes with the CUDA toolkit, or alone as NVIDIA {product}. "
                "`--tool torch` needs nothing, and --print-command shows what to run elsewhere.")  # fmt: skip
    if tool == "proton":
        try:
            import triton.profiler  # noqa: F401
        except ImportError as error:
            return f"proton does not import ({error}): it comes with triton."
    return None


def metric_names(wanted: str, sm: int) -> list[str]:
    """ncu's names of a set on the chip of sm_<sm>; all first names where ncu can't be asked."""
    known = chip_metrics(sm)
    chosen = []
    for meaning in SETS[wanted]:
        names = [name for name in METRICS[meaning] if not known or name.split(".")[0] in known or name.startswith("launch__")]
        chosen += names[:1]
    return chosen


def chip_metrics(sm: int) -> set[str]:
    """What ncu has on the chip of sm_<sm>, without the part after the point; empty where it can't be asked."""
    chip = _CHIPS.get(sm)
    if chip is None or shutil.which("ncu") is None:
        return set()
    try:
        listed = subprocess.run(["ncu", "--query-metrics", "--chips", chip], capture_output=True, text=True, timeout=120).stdout
    except (OSError, subprocess.SubprocessError):
        return set()
    return set(re.findall(r"^(\w+__\w+)", listed, re.MULTILINE))


def run(line: list[str], out: str) -> str:
    """Run a command of `command`; what it printed.

    Raises:
        peers.Unavailable: the tool failed; its reason, and the remedy where one is known.
    """
    from flashtile.bench.peers import Unavailable

    Path(out).parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "ERR_NVGPUCTRPERM" in done.stdout:
        raise Unavailable(f"ncu: {COUNTERS_REMEDY}")
    if done.returncode or not Path(out).exists():
        last = [text for text in done.stdout.splitlines() if text.strip()][-6:]
        raise Unavailable(f"{Path(line[0]).name} ended with code {done.returncode} and wrote no {out}:\n" + "\n".join(last))
    return done.stdout


def ncu_kernels(out: str) -> list[Kernel]:
    """The launches of a .ncu-rep."""
    line = ["ncu", "--import", out, "--csv", "--page", "raw", "--print-units", "base"]
    return parse_ncu(subprocess.run(line, capture_output=True, text=True, check=True).stdout)


def ncu_rows(text: str) -> list[dict]:
    """A row a launch of `ncu --csv --page raw --print-units base`: a line of names, one of units, then one a launch."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    return [] if start is None else list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))[1:]


def parse_ncu(text: str) -> list[Kernel]:
    """The launches of `ncu_rows`, by what their metrics mean."""
    kernels = []
    for row in ncu_rows(text):
        metrics = {}
        for meaning, names in METRICS.items():
            value = next((row[name] for name in names if row.get(name)), None)
            if value is not None:
                metrics[meaning] = float(value.replace(",", ""))
        kernels.append(Kernel(row["Kernel Name"].partition("(")[0], metrics))
    return kernels


def nsys_summary(out: str) -> str:
    """nsys's own tables of a .nsys-rep: kernels, and kernels by NVTX range."""
    line = ["nsys", "stats", "--force-export=true", "--report", "cuda_gpu_kern_sum,nvtx_kern_sum", "--format", "table", out]
    return subprocess.run(line, capture_output=True, text=True).stdout


def proton_kernels(out: str) -> list[tuple[str, int, float]]:
    """(kernel, launches, ms of one) of a .hatchet file, the slowest first."""
    found = {}

    def walk(node):
        metrics = node.get("metrics", {})
        time_ns = next((value for name, value in metrics.items() if name.startswith("time")), None)
        if not node.get("children") and time_ns:
            count, total = found.get(node["frame"]["name"], (0, 0.0))
            found[node["frame"]["name"]] = (count + int(metrics.get("count", 1)), total + float(time_ns))
        for child in node.get("children", []):
            walk(child)

    for root in json.loads(Path(out).read_text()):
        if "frame" in root:
            walk(root)
    rows = [(name, count, total / count / 1e6) for name, (count, total) in found.items()]
    return sorted(rows, key=lambda row: -row[1] * row[2])
