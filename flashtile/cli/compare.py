"""`flashtile compare`: time several backends, interleaved, on one case or a grid."""

from typing import Annotated

import typer

from flashtile.cli.common import (
    OK,
    REGRESSION,
    UNCLEAR,
    OutputFlags,
    Progress,
    ShapeFlags,
    TimingFlags,
    command,
    exit_code,
)

MAX_TABLES = 4
BACKENDS_HELP = ("Some of flashtile, naive, sdpa, sdpa-flash, sdpa-cudnn, sdpa-efficient, sdpa-math, flash_attn, fa3, fa4. "
                 "What can't run is a row with the reason.")  # fmt: skip


def add(app) -> None:
    app.command("compare")(command(compare))


def compare(
    shape: ShapeFlags,
    timing: TimingFlags,
    output: OutputFlags,
    backend: Annotated[str, typer.Option("--backend", help=BACKENDS_HELP)] = "flashtile,sdpa,naive",
    baseline: Annotated[str | None, typer.Option("--baseline", help="Compare with this (sdpa, else the first other).")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Interleaved rounds; their ratios make the verdict.")] = 15,
    threshold: Annotated[str, typer.Option("--threshold", help="Smaller differences are SAME.")] = "2%",
) -> int:
    """Compare attention backends: correct first, then interleaved timing, a speedup with its interval, and a verdict."""
    output.check()
    console = output.console()
    with Progress(output.progress and not output.quiet) as progress:
        progress.say("importing torch")
        from flashtile.bench import engine, peers
        from flashtile.cli import show

        device = engine.resolve_device(timing.device)
        cases = shape.cases(engine.default_dtype(device))
        names = peers.parse_backends(backend)
        base = peers.parse_backends(baseline)[0] if baseline else engine.default_baseline(names)
        if base not in names:
            names.append(base)
        settings = timing.settings(commit=output.commit, rounds=rounds, threshold=parse_fraction(threshold))
        grid = show.Grid(console, names, base, cases) if len(cases) > MAX_TABLES else None

        printer = show.Printer("compare", console, progress, output, grid)
        report = engine.compare(cases, names, timing.modes(), baseline=base, device=device, settings=settings,
                                listener=printer)  # fmt: skip
    if grid:
        show.reasons(console, report.results)
    else:
        for case in cases:
            show.compare_table(console, report, case)
        console.print()
    show.summary(console, report)
    show.footer(console, report)
    output.save(report)
    return exit_code(report, _strict_code(report, base) if output.strict else OK)


def _strict_code(report, baseline) -> int:
    """4 if flashtile is slower than the baseline somewhere, 5 if that is unclear somewhere."""
    from flashtile.bench.engine import SUBJECT

    words = {c.speedup.verdict for c in report.comparisons if (c.candidate, c.baseline) == (SUBJECT, baseline)}
    return REGRESSION if "SLOWER" in words else UNCLEAR if "UNCLEAR" in words else OK


def parse_fraction(text: str) -> float:
    """`2%` or `0.02` as 0.02.

    Raises:
        UsageError: neither.
    """
    from flashtile.bench.cases import UsageError

    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"threshold: expected a share such as 2% or 0.02, got {text!r}.")
    return value
