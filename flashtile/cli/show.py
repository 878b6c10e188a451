"""How reports look on a terminal: blocks for one backend, tables for several, one line a cell for a grid."""

from flashtile.bench import record, telemetry
from flashtile.bench.engine import SUBJECT, Listener, Report, Result
from flashtile.bench.gate import FACTOR
from flashtile.bench.stats import round_by

CPU_NOTICE = "CPU result, the reference implementation, not a statement about the kernels"
TITLES = {"fwd": "Forward Pass Results:", "bwd": "Backward Pass Results:", "fwd_bwd": "Forward + Backward Pass Results:"}
STATUS_WORDS = {"oom": "OOM", "mismatch": "WRONG", "unavailable": "n/a", "refused": "refused", "skipped": "skipped",
                "error": "ERROR"}  # fmt: skip
VERDICT_STYLES = {"FASTER": "green", "SLOWER": "red", "SAME": "", "UNCLEAR": "yellow"}
MIB = 1 << 20


def ms(value: float, half_width: float = 0.0) -> str:
    return round_by(value, half_width)


def size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}" if num_bytes < 100 * factor else f"{num_bytes / factor:.0f} {unit}"
    return f"{num_bytes} B"


def rate(tflops: float) -> str:
    """TFLOP/s with 3 or 4 digits; a CPU's fraction of one with 4 decimals."""
    decimals = 1 if tflops >= 10 else 2 if tflops >= 1 else 4
    return f"{tflops:.{decimals}f}"


def ratio(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def header(console, report: Report, command: str) -> None:
    console.print(f"[bold]flashtile {command}[/]   {record.describe(report.env)}")
    if report.device.type == "cpu":
        import torch

        console.print(f"[yellow]{'' if torch.cuda.is_available() else 'no GPU: '}{CPU_NOTICE}[/]")


def roof_lines(report: Report) -> list[str]:
    lines = []
    for roof in report.roofs.values():
        spec = f", datasheet {roof.spec_tflops:g}" if roof.spec_tflops else ""
        spec_bandwidth = f", datasheet {roof.spec_bandwidth / 1e12:.3g}" if roof.spec_bandwidth else ""
        lines.append(f"roof, measured: {rate(roof.tflops)} TFLOP/s ({roof.dtype} product, {roof.n} cubed{spec}), "
                     f"{roof.bandwidth / 1e12:.3g} TB/s (copy{spec_bandwidth})")  # fmt: skip
    return lines


# --- one backend -------------------------------------------------------------------------------------------------------


def run_block(console, results: list[Result]) -> None:
    """The modes of one case and backend, in the layout of the seed's minimal benchmark."""
    first = results[0]
    kernel = f" ({first.kernel.split()[0]})" if first.kernel else ""
    console.print(f"\n[bold]{first.case.label()}[/]   {first.backend}{kernel}")
    for result in results:
        console.print(f"\n[bold]{TITLES[result.mode]}[/]")
        if result.ok:
            for name, value in _run_rows(result):
                console.print(f"  {name + ':':<18} {value}")
        else:
            console.print(f"  [red]{STATUS_WORDS[result.status]}[/]: {result.reason}")
    console.print()
    checked = next((r.accuracy for r in results if r.accuracy), None)
    if checked:
        console.print(accuracy_line(first.case, checked))
    gpu = telemetry.describe(next((r.telemetry for r in reversed(results) if r.telemetry), None))
    if gpu:
        console.print(f"gpu: {gpu}")
    ok = [r for r in results if r.ok]
    if ok:
        modes = ",".join(r.mode for r in ok)
        console.print(f"repro: {ok[0].repro.replace(f'--mode {ok[0].mode}', f'--mode {modes}')}")


def _run_rows(result: Result):
    s = result.stats
    half = (s.ci95[1] - s.ci95[0]) / 2
    yield "Time (min)", f"{ms(s.min, half)} ms"
    yield "Time (avg)", f"{ms(s.mean, half)} ms"
    yield "Time (max)", f"{ms(s.max, half)} ms"
    noisy = "" if result.target_met else "  [yellow]noisy: the interval is wider than 0.5%[/]"
    outliers = f", {s.outliers} outlier{'s' * (s.outliers > 1)}" if s.outliers else ""
    yield "Time (median)", (f"[bold]{ms(s.median, half)} ms[/]  95% CI \\[{ms(s.ci95[0], half)}, {ms(s.ci95[1], half)}] "
                            f"within this run, n {s.n}{outliers}{noisy}")  # fmt: skip
    yield "TFLOPs/s (peak)", rate(result.tflops(s.min))
    yield "TFLOPs/s (avg)", rate(result.tflops(s.mean))
    gbytes = result.bytes / s.median / 1e6
    yield "TFLOPs/s (median)", f"[bold]{rate(result.tflops())}[/]"
    if result.roof_fraction is not None:
        bound = f"{result.roof_bound} bound; its tensors move at {gbytes:.3g} GB/s"
        yield "Of the roof", f"[bold]{100 * result.roof_fraction:.1f}%[/]  ({bound})"
    if result.extra_mem_bytes is None:
        yield "Memory", f"inputs {size(result.inputs_bytes)}; the peak is not measured on a CPU"
    else:
        extra, inputs = result.extra_mem_bytes, result.inputs_bytes
        yield "Memory", f"{size(inputs + extra)} at the peak: inputs {size(inputs)} + {size(extra)}"
    if result.host_overhead_us is not None:
        yield "Host overhead", f"{result.host_overhead_us:.0f} us a call (isolated call and wait, less device time)"
    if result.compile_ms is not None:
        yield "First call", f"{result.compile_ms / 1e3:.2f} s, compilation included"


def accuracy_line(case, accuracy) -> str:
    parts = [f"{name} {e.max_abs:.1e} (PyTorch {e.torch_same_dtype:.1e})" for name, e in accuracy.errors.items()]
    where = "all heads" if accuracy.checked == accuracy.of else f"{accuracy.checked} of {accuracy.of} (batch, kv head) pairs"
    word = "[green]correct[/]" if accuracy.passed else "[red]WRONG[/]"
    return f"{word}: max error against float64: {', '.join(parts)}; limit {FACTOR:g}x PyTorch in {case.dtype}; {where}"


# --- several backends --------------------------------------------------------------------------------------------------


def compare_table(console, report: Report, case) -> None:
    """One case: a table a mode, a row a backend."""
    from rich.table import Table

    baseline = report.resolved["baseline"]
    console.print(f"\n[bold]{case.label()}[/]")
    for mode in report.resolved["modes"]:
        results = [r for r in report.results if r.case == case and r.mode == mode]
        if not results:
            continue
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name, right in (("backend", False), (f"{mode} ms", True), ("95% CI", False), ("TFLOP/s", True), ("of roof", True),
                            ("memory", True), (f"vs {baseline}", False), ("verdict", False), ("max error", False)):  # fmt: skip
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for result in results:
            table.add_row(*_compare_row(report, result, baseline))
        console.print(table)
    reasons(console, [r for r in report.results if r.case == case])


def _compare_row(report, result, baseline):
    name = f"[bold]{result.backend}[/]" if result.backend == SUBJECT else result.backend
    if not result.ok:
        style = "red" if result.status in ("mismatch", "error") else "dim"
        return name, f"[{style}]{STATUS_WORDS[result.status]}[/]"
    s = result.stats
    half = (s.ci95[1] - s.ci95[0]) / 2
    comparison = report.comparison(result.case, result.mode, result.backend, baseline)
    speedup, verdict = ("-", "") if comparison is None else (speedup_text(comparison.speedup), verdict_text(comparison.speedup))
    roof = "-" if result.roof_fraction is None else f"{100 * result.roof_fraction:.1f}%"
    memory = "-" if result.extra_mem_bytes is None else f"+{size(result.extra_mem_bytes)}"
    error = "not checked"
    if result.accuracy:
        worst = result.accuracy.to_json()
        error = f"ok {worst['max_abs']:.1e}"
    return (name, ms(s.median, half), f"\\[{ms(s.ci95[0], half)}, {ms(s.ci95[1], half)}]", rate(result.tflops()), roof, memory,
            speedup, verdict, error)  # fmt: skip


def speedup_text(speedup) -> str:
    return f"{ratio(speedup.ratio)}x \\[{ratio(speedup.ci95[0])}, {ratio(speedup.ci95[1])}]"


def verdict_text(speedup) -> str:
    style = VERDICT_STYLES[speedup.verdict]
    return f"[{style}]{speedup.verdict}[/]" if style else speedup.verdict


def reasons(console, results) -> None:
    """Why backends have no time, each reason once."""
    seen = {}
    for result in results:
        if not result.ok:
            key = (result.backend, result.reason)
            seen.setdefault(key, []).append(result)
    for (name, reason), rows in seen.items():
        where = f" ({len(rows)} rows)" if len(rows) > 1 else ""
        style = "red" if rows[0].status in ("mismatch", "error") else "dim"
        console.print(f"  [{style}]{name}{where}: {reason}[/]")


class Grid:
    """Prints one line a (case, mode) as they are done: median ms / TFLOP/s of each backend, and flashtile's verdict."""

    def __init__(self, console, report_backends, baseline, cases):
        self.console, self.backends, self.baseline = console, report_backends, baseline
        self.label_width = max(len(case.label()) for case in cases)
        self.widths = [max(18, len(name) + 2) for name in report_backends]
        self.started = False

    def head(self) -> None:
        columns = "".join(f"{name:>{width}}" for name, width in zip(self.backends, self.widths, strict=True))
        versus = f"   {self.subject()} vs {self.baseline}" if self.baseline and len(self.backends) > 1 else ""
        self.console.print(f"\n[dim]{'case':<{self.label_width}} {'mode':<8}{columns}{versus}[/]")

    def subject(self) -> str:
        return SUBJECT if SUBJECT in self.backends and self.baseline != SUBJECT else self.backends[0]

    def line(self, report: Report, case, mode) -> None:
        if not self.started:
            self.head()
            self.started = True
        cells = []
        for name, width in zip(self.backends, self.widths, strict=True):
            result = next((r for r in report.results if (r.case, r.backend, r.mode) == (case, name, mode)), None)
            if result is None:
                text = "-"
            elif result.ok:
                text = f"{ms(result.stats.median)} / {rate(result.tflops())}"
            else:
                text = STATUS_WORDS[result.status]
            cells.append(f"{text:>{width}}")
        comparison = report.comparison(case, mode, self.subject(), self.baseline) if self.baseline else None
        versus = f"   {speedup_text(comparison.speedup)} {verdict_text(comparison.speedup)}" if comparison else ""
        self.console.print(f"{case.label():<{self.label_width}} {mode:<8}{''.join(cells)}{versus}")


class Printer(Listener):
    """Prints a run while it goes: what is being done, the header, the lines of a grid; saves after each case."""

    def __init__(self, command, console, progress, output, grid=None):
        self.command, self.console, self.progress, self.output, self.grid = command, console, progress, output, grid

    def start(self, report):
        with self.progress.paused():
            header(self.console, report, self.command)

    def step(self, done, total, text):
        self.progress.say(f"[{done + 1}/{total}] {text}" if total > 1 else text)

    def cell(self, report, case, mode):
        if self.grid:
            with self.progress.paused():
                self.grid.line(report, case, mode)

    def case(self, report, case):
        self.output.save(report, partial=True)


def summary(console, report: Report) -> None:
    """flashtile over each backend, per head dim and mode."""
    from rich.table import Table

    rows = report.geomeans()
    if not rows or max(row["cells"] for row in rows) < 2:
        return
    console.print(f"\n[bold]{SUBJECT} over each backend[/] (ratio of times, above 1 {SUBJECT} is faster)")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, right in (("head dim", True), ("mode", False), ("over", False), ("geomean", True), ("range", False),
                        ("cells", True), ("verdicts", False)):  # fmt: skip
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        verdicts = ", ".join(f"{count} {word}" for word, count in row["verdicts"].items() if count)
        table.add_row(row["headdim"], row["mode"], row["baseline"], f"[bold]{row['geomean']:.3f}x[/]",
                      f"{ratio(row['min'])} - {ratio(row['max'])}", str(row["cells"]), verdicts)  # fmt: skip
    console.print(table)


def footer(console, report: Report) -> None:
    """What the numbers mean."""
    s = report.resolved
    for line in roof_lines(report):
        console.print(f"[dim]{line}[/]")
    console.print(f"[dim]timer {s['timer']}, {s['l2']} L2, inputs N(0, 1) with seed {s['seed']}; {record.FLOPS_CONVENTION}[/]")
    if report.interrupted:
        console.print("[yellow]interrupted: what is shown was complete[/]")
