"""`flashtile monitor`: clocks, power, temperature and what slows the GPU down, a line at a time. Reads only."""

import csv
import sys
import time
from typing import Annotated

import typer

from flashtile.cli.common import OK, command

COLUMNS = ("time_s", "gpu_percent", "mem_percent", "sm_mhz", "mem_mhz", "power_w", "temperature_c", "mem_used_mib", "slowed_by")


def add(app) -> None:
    app.command("monitor")(command(monitor))


def monitor(
    device: Annotated[str | None, typer.Option("--device", help="cuda:N (the current GPU).")] = None,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between lines.")] = 1.0,
    count: Annotated[int, typer.Option("--count", help="So many lines; 0: until Ctrl-C.")] = 0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated, for a file or a plot.")] = False,
) -> int:
    """Watch the GPU beside a benchmark: use, clocks, power, temperature, memory, throttling."""
    from flashtile.bench import engine, peers, telemetry
    from flashtile.bench.cases import UsageError

    if not interval > 0 or count < 0:
        raise UsageError(f"interval and count: expected more than 0 s and 0 or more, got {interval:g} and {count}.")
    gpu = telemetry.open_gpu(engine.resolve_device(device or "cuda", gpu_for="watching clocks"))
    if gpu is None:
        raise peers.Unavailable("no telemetry: pip install nvidia-ml-py, and a driver that lets this user read it.")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    start, lines = time.perf_counter(), 0
    if as_csv:
        writer.writerow(COLUMNS)
    else:
        print("  time s    GPU %    mem %   SM MHz  mem MHz        W     C   used MiB  slowed by")
    try:
        while not count or lines < count:
            now = telemetry.read(gpu) | telemetry.usage(gpu)
            slowed = ", ".join(name for bit, name in telemetry.REASONS.items() if now.get("reasons", 0) & bit)
            row = [round(time.perf_counter() - start, 2), *(now.get(name) for name in COLUMNS[1:-1]), slowed]
            if as_csv:
                writer.writerow(row)
            else:
                widths = (8, 8, 8, 8, 8, 8, 5, 10)
                numbers = ("-" if value is None else f"{value:.0f}" for value in row[1:-1])
                print(f"{row[0]:{widths[0]}.1f} " + " ".join(f"{n:>{w}}" for n, w in zip(numbers, widths[1:], strict=True)),
                      f" {slowed}")  # fmt: skip
            sys.stdout.flush()
            lines += 1
            if not count or lines < count:
                time.sleep(interval)
    except KeyboardInterrupt:
        pass
    return OK
