"""`flashtile compare`: time several backends, interleaved, on one case or a grid."""

from typing import Annotated

import typer

from flashtile.cli.common import (
    OK,
    REGRESSION,
    UNCLEAR,
    JudgedOutputFlags,
    Progress,
    ShapeFlags,
    TimingFlags,
    command,
    exit_code,
    parse_fraction,
)

MAX_TABLES = 4
BACKENDS_HELP = ("Some of flashtile, flashtile-deterministic, naive, reference-fa1, reference-fa2, sdpa, sdpa-flash, "
                 "sdpa-cudnn, sdpa-efficient, sdpa-math, torch-varlen, flash_attn, fa3, fa3-splits, fa3-kvcache, fa4, flex, "
                 "xformers, flashinfer, flash_mla. What can't run is a row with the reason.")  # fmt: skip


def add(app) -> None:
    app.command("compare")(command(compare))


def compare(
    shape: ShapeFlags,
    timing: TimingFlags,
    output: JudgedOutputFlags,
    backend: Annotated[str, typer.Option("--backend", help=BACKENDS_HELP)] = "flashtile,sdpa,naive",
    baseline: Annotated[str | None, typer.Option("--baseline", help="Compare with this (sdpa, else the first other).")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Interleaved rounds; their ratios make the verdict.")] = 15,
    threshold: Annotated[str, typer.Option("--threshold", help="Smaller differences are SAME.")] = "2%",
    show_values: Annotated[int, typer.Option("--show-values", help="Print so many first outputs of each backend.")] = 0,
) -> int:
    """Compare attention backends: correct first, then interleaved timing, a speedup with its interval, and a verdict."""
    from flashtile.bench.cases import only

    output.check()
    console = output.console()
    with Progress(output.progress and not output.quiet) as progress:
        progress.say("importing torch")
        from flashtile.bench import engine, peers
        from flashtile.cli import show

        device = engine.resolve_device(timing.device)
        modes, cases = timing.modes_and_cases(shape, engine.default_dtype(device))
        names = peers.parse_backends(backend)
        base = only(peers.parse_backends(baseline), "baseline") if baseline else engine.default_baseline(names)
        if base not in names:
            names.append(base)
        settings = timing.settings(device, commit=output.commit, rounds=rounds, threshold=parse_fraction(threshold),
                                   show_values=show_values)  # fmt: skip
        grid = show.Grid(console, names, base, cases) if len(cases) > MAX_TABLES else None

        printer = show.Printer("compare", console, progress, output, grid)
        report = engine.compare(cases, names, modes, baseline=base, device=device, settings=settings,
                                listener=printer)  # fmt: skip
    if grid:
        show.reasons(console, report.results)
    else:
        for case in cases:
            show.compare_table(console, report, case)
        console.print()
    show.values(console, report)
    show.summary(console, report)
    show.footer(console, report)
    output.save(report)
    return exit_code(report, strict_code(report, base) if output.strict else OK)


def strict_code(report, baseline) -> int:
    """4 if flashtile is slower than the baseline somewhere, 5 if that is unclear somewhere, or one of them has no time."""
    from flashtile.bench.engine import SUBJECT

    judged = [c for c in report.comparisons if (c.candidate, c.baseline) == (SUBJECT, baseline)]
    words = {c.speedup.verdict for c in judged}
    asked = {(result.case, result.mode) for result in report.results if result.backend == SUBJECT}
    if baseline != SUBJECT and asked - {(c.case, c.mode) for c in judged}:
        words.add("UNCLEAR")
    return REGRESSION if "SLOWER" in words else UNCLEAR if "UNCLEAR" in words else OK
