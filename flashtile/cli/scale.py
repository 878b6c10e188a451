"""`flashtile scale`: larger batches on one GPU, or the same or more work on several."""

from typing import Annotated

import typer

from flashtile.cli.common import OK, UNCLEAR, JudgedOutputFlags, OneModeFlags, Progress, ShapeFlags, command, exit_code


def add(app) -> None:
    app.command("scale")(command(scale))


def scale(
    shape: ShapeFlags,
    timing: OneModeFlags,
    output: JudgedOutputFlags,
    kind: Annotated[str, typer.Option("--kind", help="batch (one GPU), strong (same problem), weak (more work).")] = "batch",
    gpus: Annotated[str, typer.Option("--gpus", help="Counts of GPUs, 1,2,4 or 1..8 (1 and all that are here).")] = "",
    strategy: Annotated[str, typer.Option("--strategy", help="What the GPUs share out: batch or heads.")] = "batch",
) -> int:
    """Measure scaling: time, speed-up and efficiency; starts its processes by torchrun."""
    from flashtile.bench.cases import UsageError, parse_choices, parse_ints

    output.check()
    console = output.console()
    with Progress(output.progress and not output.quiet) as progress:
        progress.say("importing torch")
        import torch

        from flashtile.bench import engine, scaling
        from flashtile.cli import show

        parse_choices(kind, scaling.KINDS, "kind")
        parse_choices(strategy, scaling.STRATEGIES, "strategy")
        device = engine.resolve_device(timing.device)
        if kind == "batch" and not (shape.batch or shape.preset or shape.total_tokens):
            shape.batch = "1..16"
        cases, mode = shape.cases(engine.default_dtype(device), takes=()), timing.only_mode()
        if kind != "batch" and len(cases) != 1:
            raise UsageError(f"scale: expected one case for --kind {kind}, got {len(cases)}.")
        if kind == "batch" and gpus:
            raise UsageError(f"gpus: expected none for --kind batch, which measures on one GPU, got {gpus!r}. "
                             "--kind strong or weak takes them.")  # fmt: skip
        if kind != "batch":
            here = torch.cuda.device_count() if device.type == "cuda" else 1
            counts = parse_ints(gpus, "gpus") if gpus else list(dict.fromkeys([1, here]))
            scaling.check_counts(cases[0], kind, strategy, counts, device.type)
        settings = timing.settings(device, commit=output.commit)
        printer = show.Printer("scale", console, progress, output)
        # Also where torchrun's processes measure: environment, roof and the time of the first case here
        report = engine.run(cases if kind == "batch" else cases[:1], modes=[mode], device=device, settings=settings,
                            listener=printer)  # fmt: skip
        code = exit_code(report)
        if code != OK:
            show.reasons(console, report.results)
            output.save(report)
            return code
        if kind == "batch":
            rows = scaling.batch_rows(report)
        else:
            rows = scaling.over_gpus(cases[0], kind, strategy, counts, mode, device_type=device.type, settings=settings,
                                     say=progress.say)  # fmt: skip
        report.parts["scaling"] = {"kind": kind, "strategy": strategy, "rows": [row.to_json() for row in rows]}
        report.resolved["command"] = "scale"
    show.scaling_table(console, rows, kind)
    show.reasons(console, report.results)
    output.save(report)
    return exit_code(report, UNCLEAR if output.strict and report.noisy else OK)
