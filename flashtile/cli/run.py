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
    from flashtile.bench.cases import UsageError

    output.check()
    console = output.console()
    with Progress(output.progress and not output.quiet) as progress:
        progress.say("importing torch")
        from flashtile.bench import engine, peers
        from flashtile.cli import show

        device = engine.resolve_device(timing.device)
        modes, cases = timing.modes_and_cases(shape, engine.default_dtype(device))
        names = peers.parse_backends(backend)
        if len(names) != 1:
            raise UsageError(f"backend: expected one, got {backend!r}. Use `flashtile compare` for several.")
        check_head_dims(names[0], cases, modes)
        settings = timing.settings(device, commit=output.commit)
        grid = show.Grid(console, names, None, cases) if len(cases) > MAX_BLOCKS else None

        printer = show.Printer("run", console, progress, output, grid)
        report = engine.run(cases, names[0], modes, device=device, settings=settings, listener=printer)
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


def check_head_dims(backend, cases, modes) -> None:
    """Refuse, before anything is measured, what flashtile takes no case of; of several cases those are rows with the reason.

    Raises:
        UsageError: no case has head dims that flashtile takes.
    """
    from flashtile.bench.cases import DECODE, UsageError
    from flashtile.errors import ShapeError, explain
    from flashtile.problem import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, check_head_dims

    if backend not in ("flashtile", "flashtile-deterministic"):
        return
    for case in cases:
        if case.latent and modes == [DECODE]:
            return
        try:
            check_head_dims(q=case.head_dim, v=case.head_dim_v)
            return
        except ShapeError:
            pass
    case = cases[0]
    fits = f"a head dim of {HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM} in steps of {HEAD_DIM_MULTIPLE}"
    way_out = "Others take more: --backend sdpa."
    if case.latent:
        way_out = "A latent cache is decoded, by run and compare: --mode decode."
    raise UsageError(explain("--headdim", fits, case.head_dims, way_out))
