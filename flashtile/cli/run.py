"""`flashtile run`: time one backend on one case, or on several."""

from typing import Annotated

import typer

from flashtile.cli.common import OK, UNCLEAR, JudgedOutputFlags, Progress, ShapeFlags, TimingFlags, command, complain, exit_code

# More cases than this are shown as a line each.
MAX_BLOCKS = 4


def add(app) -> None:
    app.command("run")(command(run))


def run(
    shape: ShapeFlags,
    timing: TimingFlags,
    output: JudgedOutputFlags,
    backend: Annotated[str, typer.Option("--backend", help="What to time; see `flashtile compare --help`.")] = "flashtile",
) -> int:
    """Time attention on one shape: min/avg/max, TFLOP/s, percent of the measured roof, memory, correctness."""
    from flashtile.bench.cases import DECODE, UsageError

    output.check()
    console = output.console()
    with Progress(output.progress and not output.quiet) as progress:
        progress.say("importing torch")
        from flashtile.bench import engine, peers
        from flashtile.cli import show

        device = engine.resolve_device(timing.device)
        modes = timing.modes(also=(DECODE,))
        cases = shape.cases(engine.default_dtype(device), one_query=modes == [DECODE])
        names = peers.parse_backends(backend)
        if len(names) != 1:
            raise UsageError(f"backend: expected one, got {backend!r}. Use `flashtile compare` for several.")
        grid = show.Grid(console, names, None, cases) if len(cases) > MAX_BLOCKS else None

        printer = show.Printer("run", console, progress, output, grid)
        report = engine.run(cases, names[0], modes, device=device, settings=timing.settings(commit=output.commit),
                            listener=printer)  # fmt: skip
    if grid:
        show.reasons(console, report.results)
    else:
        for case in cases:
            results = [result for result in report.results if result.case == case]
            if results:
                show.run_block(console, results)
    show.footer(console, report)
    output.save(report)
    code = exit_code(report, UNCLEAR if output.strict and report.noisy else OK)
    if output.quiet and code not in (OK, UNCLEAR):
        complain("; ".join(dict.fromkeys(f"{r.backend}: {r.reason}" for r in report.results if not r.ok)) or "interrupted")
    return code
