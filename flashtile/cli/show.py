"""How reports look on a terminal: blocks for one backend, tables for several, one line a cell for a grid."""

from rich.markup import escape

from flashtile.bench import record, telemetry
from flashtile.bench.engine import SUBJECT, Listener, Report, Result
from flashtile.bench.gate import FACTOR
from flashtile.bench.stats import round_by

CPU_NOTICE = "CPU result, the reference implementation, not a statement about the kernels"
OVER_THE_ROOF = ("over 100% of the roof: the roof is one product and one copy, measured once; something disturbed it, or the "
                 "tensors lie in a cache")  # fmt: skip
TITLES = {"fwd": "Forward Pass Results:", "bwd": "Backward Pass Results:", "fwd_bwd": "Forward + Backward Pass Results:",
          "decode": "Decoding on a Key-Value Cache:"}  # fmt: skip
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
    said = set()
    for result in results:
        console.print(f"\n[bold]{TITLES[result.mode]}[/]")
        if result.ok:
            for name, value in _run_rows(result):
                console.print(f"  {name + ':':<18} {value}")
        else:
            reason = "as above" if result.reason in said else escape(result.reason)
            console.print(f"  [red]{STATUS_WORDS[result.status]}[/]: {reason}")
            said.add(result.reason)
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
    if result.times_ms:
        yield "Times", ", ".join(f"{timer} {ms(value)} ms" for timer, value in result.times_ms.items())
    if result.host_overhead_us is not None:
        yield "Host overhead", f"{result.host_overhead_us:.0f} us a call (isolated call and wait, less its kernels)"
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


def verdict_text(found) -> str:
    """The verdict of a stats.Speedup or a regress.Row in its colour."""
    style = VERDICT_STYLES[found.verdict]
    return f"[{style}]{found.verdict}[/]" if style else found.verdict


def values(console, report: Report) -> None:
    """The first outputs of each backend under each other, where they were kept."""
    seen = {(r.case, r.backend): r.values for r in report.results if r.values}
    for case in dict.fromkeys(case for case, _ in seen):
        console.print(f"\nfirst outputs, {case.label()}", markup=False)
        for (its_case, backend), first in seen.items():
            if its_case == case:
                console.print(f"  {backend:<16}" + "".join(f"{x:>13.6f}" for x in first), markup=False)


def memory_table(console, report: Report, limit: int, where: str) -> None:
    """Naive against flash, a row a case; limit: bytes of the GPU, 0 where unknown."""
    from rich.table import Table

    from flashtile.bench.memory import inputs_bytes

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    fits = [f"fits in {limit / (1 << 30):.0f} GiB {where}"] if limit else []
    for name in ("case", "naive MiB (formula)", "flash MiB (formula)", "reduction", *fits):
        table.add_column(name, justify="left" if name in ("case", *fits) else "right", no_wrap=True)
    by_case = {}
    for result in report.results:
        by_case.setdefault(result.case, {})[result.backend] = result
    for case, rows in by_case.items():
        if len(rows) < 2:
            # Interrupted between the two
            continue
        pair = [rows["naive"], rows["flashtile"]]
        used = [r.predicted_mem_bytes if r.extra_mem_bytes is None else r.extra_mem_bytes for r in pair]
        cells = [f"{_mib(r.extra_mem_bytes)} ({_mib(r.predicted_mem_bytes)})" for r in pair]
        needed = [inputs_bytes(case, r.mode) + r.predicted_mem_bytes for r in pair]
        fitting = [name for name, num_bytes in zip(("naive", "flash"), needed) if num_bytes <= limit]
        word = {2: "both", 0: "neither"}.get(len(fitting), f"{fitting[0]} only" if fitting else "")
        table.add_row(case.label(), *cells, f"{ratio(used[0] / used[1])}x" if used[1] else "-", *([word] if limit else []))
    console.print()
    console.print(table)
    reasons(console, report.results)
    train = report.resolved["modes"] != ["fwd"]
    terms = ("4 S + O + copies, flash = O + lse + dQ + dK + dV + row statistics" if train else
             "S + P + O + copies, flash = O + lse")  # fmt: skip
    console.print(f"[dim]beyond the inputs, {'forward and backward' if train else 'forward'}: naive = {terms}[/]")
    for row in report.parts.get("memory", []):
        name = "flash" if row["backend"] == SUBJECT else row["backend"]
        console.print(f"longest sequence by formula, other sizes as in the first row: {name} {row['largest_seqlen']:,}")


def regress_table(console, rows, found: dict) -> None:
    """A row a case and mode, then the counts of verdicts; found: the part "regress" of the document."""
    from rich.table import Table

    from flashtile.bench import stats
    from flashtile.bench.cases import BenchCase

    names = [f"{v['name']}{' @ ' + v['commit'][:8] if v['commit'] else ''}" for v in (found["baseline"], found["against"])]
    console.print(f"baseline {names[0]}, against {names[1]}, {found['method']}\n", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("case", "mode", "baseline ms", "against ms", "change, 95% CI", "verdict"):
        table.add_column(name, justify="right" if name.endswith(" ms") else "left", no_wrap=True)
    for row in rows:
        if row.status != "ok":
            table.add_row(row.case.label(), row.mode, "", "", "", f"[red]{STATUS_WORDS[row.status]}: {escape(row.reason)}[/]")
            continue
        change = f"{row.change:+.1%} \\[{row.ci95[0]:+.1%}, {row.ci95[1]:+.1%}]"
        table.add_row(row.case.label(), row.mode, ms(row.baseline_ms), ms(row.against_ms), change, verdict_text(row))
    console.print(table)
    if alone := found["not_compared"]:
        first = f"{BenchCase.from_config(alone[0]['config']).label()} {alone[0]['mode']}"
        console.print(f"\nnot compared: {len(alone)} that only the baseline has, such as {first}", markup=False)
    verdicts = [row.verdict for row in rows if row.status == "ok"]
    counts = "  ".join(f"{verdicts.count(word)} {word}" for word in stats.VERDICTS)
    if verdicts:
        overall = stats.geomean(1 + row.change for row in rows if row.status == "ok") - 1
        counts += f"  geomean {overall:+.1%}  (change of time: above 0 the second is slower)"
    console.print(f"\n{counts}")


def scaling_table(console, rows, kind) -> None:
    """A row a count of GPUs, or a batch."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("GPUs", "case", "mode", "ms", "speed-up", "efficiency"):
        table.add_column(name, justify="left" if name in ("case", "mode") else "right", no_wrap=True)
    for row in rows:
        table.add_row(str(row.gpus), row.case.label(), row.mode, ms(row.ms), f"{row.speedup:.2f}x", f"{row.efficiency:.0%}")
    console.print()
    console.print(table)
    about = {"batch": "throughput over that of the shape's first batch, one GPU",
             "strong": "the same problem on more GPUs, the slowest's time",
             "weak": "the same work on each GPU, the slowest's time"}[kind]  # fmt: skip
    console.print(f"[dim]{kind} scaling: {about}[/]")


def ncu_summary(console, kernels, case, mode) -> None:
    """What ncu saw of each kernel, and what bounds it, in words."""
    if not kernels:
        console.print("ncu saw no kernel; look at --kernel")
    units = {"duration": (1e-3, "us"), "DRAM bytes": (1 / MIB, "MiB"), "shared bytes": (1 / 1024, "KiB")}
    for kernel in kernels:
        console.print(f"\n[bold]{kernel.name}[/]")
        words = []
        for name, value in kernel.metrics.items():
            if name in units:
                factor, unit = units[name]
                words.append(f"{name} {value * factor:.4g} {unit}")
            else:
                words.append(f"{name} {value:.0f}{'' if name in ('registers', 'blocks') else ' %'}")
        console.print("  " + "   ".join(words))
        console.print(f"  bound by: [bold]{kernel.bound()}[/]")
    intensity = case.flops(mode) / case.problem().bytes_moved(mode)
    if intensity > 100:
        console.print(f"\n[dim]{intensity:.0f} FLOP a byte: little DRAM traffic is as it should be; look at the pipes[/]")


def _mib(num_bytes) -> str:
    if num_bytes is None:
        return "-"
    mib = num_bytes / MIB
    return f"{mib:.0f}" if mib >= 100 else f"{mib:.3g}"


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
        console.print(f"  [{style}]{name}{where}: {escape(reason)}[/]")


def capping(results) -> str:
    """`   power cap 40%` where the GPU was slowed down in a tenth of the readings or more."""
    throttle = next((r.telemetry["throttle"] for r in results if r.telemetry), {})
    return "".join(f"   [yellow]{reason} {share:.0%}[/]" for reason, share in throttle.items() if share >= 0.1)


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
        if SUBJECT in self.backends and self.baseline != SUBJECT:
            return SUBJECT
        return next((name for name in self.backends if name != self.baseline), self.backends[0])

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
        capped = capping([r for r in report.results if (r.case, r.mode) == (case, mode)])
        self.console.print(f"{case.label():<{self.label_width}} {mode:<8}{''.join(cells)}{versus}{capped}")


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
    if report.device.type == "cpu" and any((result.roof_fraction or 0) > 1 for result in report.results):
        console.print(f"[dim]{OVER_THE_ROOF}[/]")
    console.print(f"[dim]timer {s['timer']}, {s['l2']} L2, inputs N(0, 1) with seed {s['seed']}; {record.FLOPS_CONVENTION}[/]")
    if report.interrupted:
        console.print("[yellow]interrupted: what is shown was complete[/]")
