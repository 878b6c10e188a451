"""`flashtile regress`: exit 4 if flashtile has become slower."""

import signal
import threading
from contextlib import contextmanager
from typing import Annotated

import typer

from flashtile.cli.common import (
    INTERNAL,
    MISMATCH,
    OK,
    PACKED,
    REGRESSION,
    UNCLEAR,
    JudgedOutputFlags,
    Progress,
    ShapeFlags,
    TimingFlags,
    command,
    parse_fraction,
)
from flashtile.cli.run import check_head_dims

VERSION_HELP = "A git revision, a folder with flashtile, or a record or baseline of --save, whose cases are then compared"


def add(app) -> None:
    app.command("regress")(command(regress))


@contextmanager
def _ended_by_sigterm():
    """SIGTERM ends this as Ctrl-C does: by default it would leave the temporary folder of a revision behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def regress(
    shape: ShapeFlags,
    timing: TimingFlags,
    output: JudgedOutputFlags,
    baseline: Annotated[str, typer.Option("--baseline", help=f"{VERSION_HELP}.")] = "HEAD",
    against: Annotated[str | None, typer.Option("--against", help=f"{VERSION_HELP} (the code that runs now).")] = None,
    threshold: Annotated[str, typer.Option("--threshold", help="Smaller changes are SAME.")] = "3%",
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds of all processes together.")] = 30,
    processes: Annotated[int, typer.Option("--processes", help="Pairs of fresh processes.")] = 3,
) -> int:
    """Compare two versions of flashtile here, in turns; exit 4 on a confirmed slowdown, 5 if unclear and --strict."""
    from flashtile.bench.cases import UsageError

    output.check()
    console = output.console()
    if output.keep:
        raise UsageError("--save: expected none, a comparison is no baseline. flashtile run keeps one.")
    if processes < 1:
        raise UsageError(f"processes: expected 1 or more, got {processes}.")
    with Progress(output.progress and not output.quiet) as progress, _ended_by_sigterm():
        progress.say("importing torch")
        from flashtile.bench import engine, record
        from flashtile.bench import regress as versions
        from flashtile.cli import show

        device = engine.resolve_device(timing.device)
        cases, modes = shape.cases(engine.default_dtype(device), takes=PACKED), timing.modes()
        check_head_dims(engine.SUBJECT, cases, modes)
        records = [name for name in (baseline, against) if name is not None and versions.record_path(name, device)]
        if records and (shape != ShapeFlags() or timing.mode or timing.no_grad):
            raise UsageError(f"regress: expected no shape and no --mode beside the record {records[0]}, whose cases and modes "
                             "are compared, got some.")  # fmt: skip
        settings = timing.settings(device, commit=output.commit, rounds=timing.repeats or rounds,
                                   threshold=parse_fraction(threshold))  # fmt: skip
        rows, document = versions.compare_versions(
            baseline, against, cases, modes, device=device, settings=settings, processes=processes, say=progress.say,
        )  # fmt: skip
    console.print(f"[bold]flashtile regress[/]   {record.describe(document['env'])}")
    show.regress_table(console, rows, document["regress"])
    output.write(document)
    statuses, verdicts = {row.status for row in rows}, {row.verdict for row in rows if row.status == "ok"}
    if "mismatch" in statuses:
        return MISMATCH
    if "SLOWER" in verdicts:
        return REGRESSION
    if statuses - {"ok"}:
        return INTERNAL
    return UNCLEAR if output.strict and "UNCLEAR" in verdicts else OK
