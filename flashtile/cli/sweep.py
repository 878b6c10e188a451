"""`flashtile sweep`: compare over a grid, each finished cell kept on disk at once, so that Ctrl-C loses nothing."""

import time
from pathlib import Path
from typing import Annotated

import typer

from flashtile.cli.common import OK, JudgedOutputFlags, Progress, ShapeFlags, TimingFlags, command, exit_code, parse_fraction
from flashtile.cli.compare import BACKENDS_HELP, strict_code


def add(app) -> None:
    app.command("sweep")(command(sweep))


def sweep(
    shape: ShapeFlags,
    timing: TimingFlags,
    output: JudgedOutputFlags,
    backend: Annotated[str, typer.Option("--backend", help=BACKENDS_HELP)] = "flashtile,sdpa,naive",
    baseline: Annotated[str | None, typer.Option("--baseline", help="Compare with this (sdpa, else the first other).")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Interleaved rounds; their ratios make the verdict.")] = 15,
    threshold: Annotated[str, typer.Option("--threshold", help="Smaller differences are SAME.")] = "2%",
    out: Annotated[str, typer.Option("--out", help="Writes OUT.jsonl while it runs, and OUT.csv and OUT.md.")] = "sweep",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with OUT.jsonl where an earlier sweep stopped.")] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Also OUT-*.png and .svg; needs matplotlib.")] = False,
) -> int:
    """Compare backends over a grid of shapes; resumable, with JSON lines, CSV, Markdown and plots."""
    from flashtile.bench.cases import UsageError, only

    output.check()
    if not out.rpartition("/")[2].strip():
        raise UsageError(f"out: expected the name of a file, got {out!r}.")
    console = output.console()
    lines = Path(f"{out}.jsonl")
    with SweepProgress(output.progress and not output.quiet) as progress:
        progress.say("importing torch")
        from flashtile.bench import engine, peers, record
        from flashtile.cli import show

        if plot:
            from flashtile.bench import plots
        if lines.exists() and not resume:
            raise UsageError(f"{lines}: is there already. Go on with it by --resume, or name another file by --out.")
        earlier = record.load(lines) if resume and lines.exists() else None
        device = engine.resolve_device(timing.device)
        modes, cases = timing.modes_and_cases(shape, engine.default_dtype(device))
        names = peers.parse_backends(backend)
        base = only(peers.parse_backends(baseline), "baseline") if baseline else engine.default_baseline(names)
        names += [base] if base not in names else []
        settings = timing.settings(device, commit=output.commit, rounds=rounds, threshold=parse_fraction(threshold))
        total = len(cases) * len(modes)

        class Keeper(show.Printer):
            """Also keeps each cell on disk as soon as it is done."""

            def start(self, report):
                super().start(report)
                document = report.document()
                text = record.head_line(document)
                done = len({(r.case, r.mode) for r in report.results})
                if done:
                    text += record.cell_line(document["results"], document["comparisons"], document["roofs"])
                    console.print(f"resumed: {done} of {total} cells are in {lines} already", markup=False)
                record.write(str(lines), text)
                progress.begin(device, total, done)

            def cell(self, report, case, mode):
                rows = [r.to_json() for r in report.results if (r.case, r.mode) == (case, mode)]
                pairs = [c.to_json() for c in report.comparisons if (c.case, c.mode) == (case, mode)]
                with lines.open("a") as file:
                    file.write(record.cell_line(rows, pairs, {name: roof.to_json() for name, roof in report.roofs.items()}))
                progress.advance()
                super().cell(report, case, mode)

        printer = Keeper("sweep", console, progress, output, show.Grid(console, names, base, cases))
        report = engine.compare(cases, names, modes, baseline=base, device=device, settings=settings, listener=printer,
                                resume=earlier)  # fmt: skip
        document = report.document()
        record.write(f"{out}.csv", record.to_csv(document))
        record.write(f"{out}.md", record.to_markdown(document))
        saved = [str(lines), f"{out}.csv", f"{out}.md"]
        if plot:
            progress.say("plotting")
            saved += plots.write(plots.figures([document]), out)
    show.reasons(console, report.results)
    show.summary(console, report)
    show.footer(console, report)
    counts = {status: sum(r.status == status for r in report.results) for status in record.STATUSES}
    words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    again = f"; go on with --resume{'' if out == 'sweep' else f' --out {out}'}" if report.interrupted else ""
    console.print(f"saved {' '.join(saved)} ({words or 'nothing yet'}){again}", markup=False)
    output.save(report)
    return exit_code(report, strict_code(report, base) if output.strict else OK)


class SweepProgress(Progress):
    """Once `begin` is called a bar with the time left and the GPU's state; off a terminal a line a second."""

    def __init__(self, enabled: bool):
        from rich import progress

        super().__init__(enabled)
        columns = (progress.MofNCompleteColumn(), progress.BarColumn(24), progress.TimeRemainingColumn(compact=True),
                   progress.TextColumn("{task.fields[gpu]}{task.description}", markup=False))  # fmt: skip
        self._bar = progress.Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
        self._gpu = self.task = None

    def begin(self, device, total: int, done: int) -> None:
        """total cells, done of which an earlier sweep has."""
        from flashtile.bench import telemetry

        self._gpu = telemetry.open_gpu(device)
        self._bar.add_task("", total=total, completed=done, gpu="")
        (self.task,) = self._bar.tasks
        if self._status:
            self._status.stop()
            # `paused` and the end stop the bar from here on.
            self._status = self._bar
            self._bar.start()

    def advance(self) -> None:
        self._bar.advance(self.task.id)

    def say(self, text: str) -> None:
        if self.task is None:
            super().say(text)
            return
        text = text.partition("] ")[2] or text
        self._bar.update(self.task.id, description=text, gpu=self._state())
        left = self.task.time_remaining
        eta = f"ETA {left // 60:.0f}m{left % 60:02.0f}s  " if left else ""
        self._text = f"[{self.task.completed:.0f}/{self.task.total:.0f}] {eta}{self._state()}{text}"
        self._since = time.perf_counter()

    def _state(self) -> str:
        if not self._gpu:
            return ""
        from flashtile.bench import telemetry

        now = telemetry.read(self._gpu)
        return f"GPU {now.get('power_w', 0):.0f} W {now.get('sm_mhz', 0):.0f} MHz  "
