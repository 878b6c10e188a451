"""`flashtile memory`: what attention allocates, naive against flash, measured and by formula; the formulas need no GPU."""

from typing import Annotated

import typer

from flashtile.cli.common import OK, OutputFlags, Progress, ShapeFlags, command, exit_code
from flashtile.cli.run import check_head_dims


def add(app) -> None:
    app.command("memory")(command(memory))


def memory(
    shape: ShapeFlags,
    output: OutputFlags,
    train: Annotated[bool, typer.Option("--train", help="Forward and backward instead of forward.")] = False,
    target: Annotated[str, typer.Option("--target", help="Formulas for this GPU (H200, A100, ...), no measuring.")] = "",
    device: Annotated[str | None, typer.Option("--device", help="cuda:N, or cpu: formulas only.")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Measure only what is correct.")] = True,
) -> int:
    """Measure peak memory beyond the inputs, naive against flash, beside the formulas; the longest sequence that fits."""
    output.check()
    console = output.console()
    with Progress(output.progress and not output.quiet) as progress:
        progress.say("importing torch")
        from flashtile import hardware
        from flashtile.bench import engine
        from flashtile.bench import memory as measurement
        from flashtile.cli import show
        from flashtile.cli.explain import find_target

        there = find_target(target, hardware) if target else None
        torch_device = engine.resolve_device("cpu" if there else device)
        # The formulas speak of a GPU's dtype
        cases = shape.cases("bf16" if torch_device.type == "cpu" else engine.default_dtype(torch_device), takes=())
        check_head_dims(engine.SUBJECT, cases, ["fwd"])
        settings = engine.Settings(check=check, roof=False, commit=output.commit)
        printer = show.Printer("memory", console, progress, output)
        report = measurement.measure_memory(cases, train=train, device=torch_device, settings=settings, listener=printer,
                                            target=there)  # fmt: skip
        limit = there.memory_bytes if there else hardware.detect(torch_device).memory_bytes
    show.memory_table(console, report, limit, there.name if there else "here")
    output.save(report)
    return OK if torch_device.type == "cpu" and not report.interrupted else exit_code(report)
