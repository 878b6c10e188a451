"""`flashtile profile`: one case under a profiler, in a process of its own, and what the result says."""

import shlex
from typing import Annotated

import typer

from flashtile.cli.common import OK, PACKED, Progress, ShapeFlags, command, make_console
from flashtile.cli.run import check_head_dims


def add(app) -> None:
    app.command("profile")(command(profile))


def profile(
    shape: ShapeFlags,
    tool: Annotated[str, typer.Option("--tool", help="torch, proton, ncu or nsys; for clocks: flashtile monitor.")] = "torch",
    metrics: Annotated[str, typer.Option("--metrics", help="ncu: basic, memory, tensor or full.")] = "basic",
    kernel: Annotated[str | None, typer.Option("--kernel", help="ncu: only kernels whose name this expression finds.")] = None,
    mode: Annotated[str, typer.Option("--mode", help="fwd, bwd or fwd_bwd.")] = "fwd",
    backend: Annotated[str, typer.Option("--backend", help="What to profile; see `flashtile compare --help`.")] = "flashtile",
    repeats: Annotated[int, typer.Option("--repeats", help="Calls to profile, after ten to warm up.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of the inputs.")] = 0,
    device: Annotated[str | None, typer.Option("--device", help="cuda:N or cpu (the GPU, if there is one).")] = None,
    out: Annotated[str, typer.Option("--out", help="Folder of what is written.")] = "out",
    print_command: Annotated[bool, typer.Option("--print-command", help="Only print the command.")] = False,
) -> int:
    """Profile one case: torch's profiler, Triton's, Nsight Compute or Nsight Systems, with a summary in words."""
    from flashtile.bench.cases import MODES, UsageError, only, parse_choices

    if repeats < 1:
        raise UsageError(f"repeats: expected 1 or more, got {repeats}.")
    console = make_console()
    with Progress(not print_command) as progress:
        progress.say("importing torch")
        from flashtile import hardware
        from flashtile.bench import engine, peers, profilers
        from flashtile.cli import show

        parse_choices(tool, profilers.TOOLS, "tool")
        parse_choices(metrics, profilers.SETS, "metrics")
        mode, name = only(parse_choices(mode, MODES, "mode"), "mode"), only(peers.parse_backends(backend), "backend")
        # A command may be printed for a GPU that is not here.
        there = engine.resolve_device(device) if device or not print_command else None
        on_gpu = there is None or there.type == "cuda"
        cases = shape.cases("bf16" if there is None else engine.default_dtype(there), takes=PACKED)
        if len(cases) != 1:
            raise UsageError(f"profile: expected one case, got {len(cases)}.")
        check_head_dims(name, cases, [mode])
        if not print_command:
            peers.load(name, str(there))
        if there is not None and (reason := peers.BACKENDS[name].refusal(cases[0], mode, there)):
            raise UsageError(f"backend: {name} does not take {cases[0].label()} {mode}: {reason}.")
        path = f"{out}/{tool}-{name}-{mode}.{profilers.SUFFIXES[tool]}"
        reason = profilers.missing(tool, on_gpu)
        if reason and not print_command:
            raise peers.Unavailable(reason)
        names = None
        if tool == "ncu":
            progress.say("asking ncu for the chip's metrics")
            names = profilers.metric_names(metrics, hardware.detect(there).sm if there else 90)
        line = profilers.command(tool, cases[0], mode=mode, backend=name, device=str(there or "cuda:0"), repeats=repeats,
                                 seed=seed, out=path, kernel=kernel, metrics=names, full=metrics == "full")  # fmt: skip
        if print_command:
            print(shlex.join(line))
            return OK
        progress.say(f"{cases[0].label()} {mode} under {tool}")
        printed = profilers.run(line, path)
        progress.say(f"reading {path}")
        console.print(f"[bold]flashtile profile[/]   {tool}   {name} {mode}   {cases[0].label()}")
        if tool == "ncu":
            show.ncu_summary(console, profilers.ncu_kernels(path), cases[0], mode)
        elif tool == "proton":
            for kernel_name, count, each in profilers.proton_kernels(path):
                console.print(f"  {each:10.4f} ms x {count:<4} {kernel_name}", markup=False)
        else:
            console.print(profilers.nsys_summary(path) if tool == "nsys" else printed, markup=False)
    viewer = {"torch": "chrome://tracing or ui.perfetto.dev", "ncu": "Nsight Compute", "nsys": "Nsight Systems"}
    console.print(f"saved {path}" + (f" (open in {viewer[tool]})" if tool in viewer else ""), markup=False)
    console.print(f"command: {shlex.join(line)}", markup=False, style="dim", soft_wrap=True)
    return OK
