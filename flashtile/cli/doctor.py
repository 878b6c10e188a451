"""`flashtile doctor`: can this machine run, time and profile? Looks only; changes nothing."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flashtile.cli.common import MISSING, OK, Progress, command, make_console

STYLES = {"ok": "green", "warn": "yellow", "FAIL": "red", "info": "dim"}
MIN_PYTHON, MIN_TORCH, MIN_TRITON = (3, 11), (2, 11), (3, 6)


def add(app) -> None:
    app.command("doctor")(command(doctor))


def doctor(
    device: Annotated[str | None, typer.Option("--device", help="cuda:N or cpu [the GPU, if there is one].")] = None,
    json: Annotated[str | None, typer.Option("--json", help="Write the checks as JSON; - is stdout.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels/--no-kernels", help="Compile, run and check small kernels.")] = True,
) -> int:
    """Check that this machine can run, time and profile attention; exit 6 if something that is needed is missing."""
    console = make_console(stderr=json == "-")
    console.print("[bold]flashtile doctor[/]")
    from rich.markup import escape

    rows: list[tuple[str, str]] = []

    def say(level, text):
        rows.append((level, text))
        console.print(f"  {escape(f'{text:<100}')} [{STYLES[level]}]{level}[/]")

    with Progress(True) as progress:
        progress.say("importing torch")
        if _software(say):
            progress.say("looking at the device")
            _profilers(say, _device(say, device, kernels, progress))
            _extras(say)
    failed = [text for level, text in rows if level == "FAIL"]
    if json:
        import json as json_module

        from flashtile.bench import record

        checks = [{"level": level, "check": text} for level, text in rows]
        document = {"schema": "flashtile-doctor/1", "ok": not failed, "checks": checks}
        record.write(json, json_module.dumps(document, indent=1) + "\n")
    console.print(f"[red]{len(failed)} needed things are missing[/]" if failed else "[green]ready[/]")
    return MISSING if failed else OK


def _software(say) -> bool:
    import flashtile

    python = sys.version.split()[0]
    say("ok" if sys.version_info >= MIN_PYTHON else "FAIL", f"python {python}, flashtile {flashtile.__version__}")
    try:
        import torch
    except ImportError as error:
        say("FAIL", f"torch does not import ({error}): pip install 'torch>=2.11'")
        return False
    say("ok" if _at_least(torch.__version__, MIN_TORCH) else "FAIL", f"torch {torch.__version__} (2.11 or newer)")
    return True


def _at_least(version: str, minimum: tuple[int, int]) -> bool:
    parts = version.split(".")
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts[:2]) >= minimum


def _device(say, wanted, kernels, progress):
    """Checks of the device; returns the torch.device, or None."""
    import torch

    from flashtile.bench import engine, peers

    try:
        device = engine.resolve_device(wanted)
    except peers.Unavailable as error:
        say("FAIL", str(error))
        return None
    if device.type == "cpu":
        reason = "" if torch.version.cuda else " (this torch is built without CUDA)"
        subject = "--device cpu" if torch.cuda.is_available() else "no GPU"
        say("info", f"{subject}: reference and interpreter backends available{reason}")
        say("info", "`flashtile run` and `flashtile compare` work on the CPU; they say nothing about the kernels")
    else:
        _gpu(say, device)
    if kernels:
        progress.say("compiling and checking small kernels")
        _kernels(say, device)
    available = peers.availability(str(device))
    say("info", f"backends: {', '.join(name for name, reason in available.items() if reason is None)}")
    for name, reason in available.items():
        if reason is not None:
            say("info", f"backend {name}: {reason}")
    return device


def _gpu(say, device) -> None:
    import torch

    from flashtile import hardware
    from flashtile.bench import telemetry

    p = torch.cuda.get_device_properties(device)
    gpu = telemetry.open_gpu(device)
    driver = gpu[0].nvmlSystemGetDriverVersion() if gpu else None
    driver = driver.decode() if isinstance(driver, bytes) else driver
    say("ok" if p.major >= 8 else "FAIL",
        f"GPU {device.index}: {p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SM, L2 {p.L2_cache_size >> 20} MiB, "
        f"{p.total_memory / (1 << 30):.0f} GiB, CUDA {torch.version.cuda}{f', driver {driver}' if driver else ''}")  # fmt: skip
    known = hardware.detect(device)
    if known.peak("bfloat16"):
        peaks = f"{known.peak('bfloat16'):g} bf16 TFLOP/s dense, {known.peak_bandwidth / 1e12:.3g} TB/s"
        say("info", f"datasheet: {peaks} ({known.source})")
    try:
        import triton

        from flashtile.device import versions

        good = _at_least(triton.__version__, MIN_TRITON)
        newest = "; the Hopper kernels know up to {}.{}".format(*versions.NEWEST)
        say("ok" if good else "FAIL", f"triton {triton.__version__} (3.6 or newer{newest})")
    except ImportError as error:
        say("FAIL", f"triton does not import ({error}); it comes with torch on Linux")
    if gpu is None:
        say("warn", "no telemetry: pip install nvidia-ml-py, for clocks, power and throttling beside the numbers")
        return
    pynvml, handle = gpu
    now = telemetry.read(gpu)
    most = _try(lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))
    cap = _try(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)
    power = f"{now.get('power_w', 0):.0f} of {cap or 0:.0f} W"
    say("ok", f"clocks: SM {now.get('sm_mhz', '?')} MHz now, {most or '?'} at most; {power}; {now.get('temperature_c', '?')} C")
    others = _try(lambda: [q for q in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if q.pid != _own_pid()])
    if others is not None:
        disturb = " (they disturb timings)" if others else ""
        say("warn" if others else "ok", f"other processes on this GPU: {len(others)}{disturb}")
    throttle = [name for bit, name in telemetry.REASONS.items() if now.get("reasons", 0) & bit]
    if throttle:
        say("warn", f"the GPU is slowed down now: {', '.join(throttle)}")
    if most:
        lock = f"sudo nvidia-smi -i {device.index} -lgc {int(most * 0.75)}   (undo: -rgc)"
        say("info", f"steadier clocks, for the machine's owner: {lock}")


def _own_pid() -> int:
    import os

    return os.getpid()


def _try(get):
    try:
        return get()
    except Exception:  # not readable by this user or on this GPU
        return None


def _kernels(say, device) -> None:
    """A small case through `bench.run`: it compiles, runs and is checked against float64."""
    from flashtile.bench import BenchCase, Settings, run
    from flashtile.bench.engine import default_dtype

    case = BenchCase(1, 256, 256, 4, 2, 64, 64, causal=True, dtype=default_dtype(device))
    report = run(case, modes=("fwd", "bwd"), device=device, settings=Settings(repeats=3, roof=False))
    for result in report.results:
        kernel = result.kernel.split()[0] if result.kernel else "flashtile"
        if result.ok:
            error = f"{result.accuracy.to_json()['max_abs']:.1e}"
            say("ok", f"kernels: {kernel} {result.mode} correct (error {error}), first call {result.compile_ms / 1e3:.1f} s")
        else:
            say("FAIL", f"kernels: {kernel} {result.mode}: {result.status}: {result.reason.splitlines()[0]}")


def _profilers(say, device) -> None:
    on_gpu = device is not None and device.type == "cuda"
    for tool, purpose in (("ncu", "kernel metrics"), ("nsys", "timelines")):
        path = shutil.which(tool)
        if path is None:
            say("warn" if on_gpu else "info", f"{tool} not on PATH: no {purpose} from it")
            continue
        version = _try(lambda path=path: subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout)
        words = [word for word in (version or "").split() if word[:1].isdigit() and "." in word]
        readable = _counters_readable() if tool == "ncu" else None
        if readable is False:
            say("warn", f"{tool} {words[-1] if words else ''}: performance counters are for administrators only "
                        "(https://developer.nvidia.com/ERR_NVGPUCTRPERM)")  # fmt: skip
        else:
            say("ok", f"{tool} {words[-1] if words else 'found'}{', counters readable' if readable else ''}")


def _extras(say) -> None:
    """What the report needs beside the measurement."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        say("info", f"{' and '.join(missing)} not installed: no plots, no `flashtile report`; pip install 'flashtile[report]'")
    else:
        say("ok", "matplotlib and jinja2 found: plots and `flashtile report`")


def _counters_readable() -> bool | None:
    """Whether the driver lets every user read performance counters; None if it doesn't say."""
    try:
        for line in Path("/proc/driver/nvidia/params").read_text().splitlines():
            if line.startswith("RmProfilingAdminOnly"):
                return line.split()[-1] == "0" or _own_uid() == 0
    except OSError:
        pass
    return None


def _own_uid() -> int:
    import os

    return os.getuid() if hasattr(os, "getuid") else -1
