"""`flashtile ladder`: the rungs from three naive kernels to the package's own tiers; list, run and show them."""

from typing import Annotated

import typer

from flashtile.cli.common import (
    OK,
    OutputFlags,
    Progress,
    ShapeFlags,
    TimingFlags,
    command,
    complain,
    exit_code,
    make_console,
)

Number = Annotated[int, typer.Argument(help="Of a rung, 1 to 11.")]


def add(app) -> None:
    group = typer.Typer(help="Attention rung by rung, CUDA C++ first: list, run, show.", context_settings={
        "help_option_names": ["-h", "--help"]})  # fmt: skip
    group.callback(invoke_without_command=True)(_list_unless_asked_for_more)
    group.command("list")(command(list_rungs))
    group.command("run")(command(run))
    group.command("show")(command(show))
    app.add_typer(group, name="ladder")


def _list_unless_asked_for_more(context: typer.Context) -> None:
    """Attention rung by rung: without a command, the list of rungs."""
    if context.invoked_subcommand is None:
        list_rungs()


def list_rungs() -> int:
    """List the rungs: what each adds, what it takes, its tiles and shared memory."""
    from flashtile.ladder import rungs

    table = _table(("rung", True), ("name", False), ("what it adds", False), ("dtypes", False), ("head dims", False),
                   ("tiles, warps", False), ("shared", True), ("file", False))  # fmt: skip
    for rung in rungs.RUNGS.values():
        dims, tiles, shared = "8..256", "by tier", "-"
        if rung.configs:
            dims = "8..256" if len(rung.configs) > 8 else ",".join(map(str, rung.configs))
            config = rung.configs[64]
            tiles = f"{config.tile_m}x{config.tile_n}, {config.num_warps}"
            shared = f"{rungs.shared_bytes(rung, config, 64) / 1024:.0f} KiB"
        table.add_row(str(rung.number), f"[bold]{rung.name}[/]", rung.idea, ",".join(rung.dtypes), dims, tiles, shared,
                      rung.file)  # fmt: skip
    console = make_console()
    console.print(table)
    console.print("\n[dim]Tiles and shared memory at head dim 64. `flashtile ladder show 5` prints a rung, `show 6 --diff` "
                  "what changes, `run` checks and times all. Needs: pip install 'flashtile\\[ladder]'.[/]")  # fmt: skip
    return OK


def show(
    number: Number,
    diff: Annotated[bool, typer.Option("--diff", help="Only what changed from the rung before.")] = False,
    target: Annotated[str, typer.Option("--target", help="Device or architecture to count registers and blocks for.")] = "",
) -> int:
    """Print a rung's file, or what it changes; with --target also what it compiles to, without a GPU."""
    import difflib

    from flashtile.ladder import rungs

    rung = rungs.get(number)
    console = make_console()
    if target:
        from flashtile import hardware
        from flashtile.cli.explain import find_target

        if rung.tier:
            from flashtile.errors import UnsupportedError

            raise UnsupportedError(f"rung {number}: its tiles are those of the {rung.tier} tier. "
                                   f"flashtile explain --target {target} shows what they compile to.")  # fmt: skip
        for line in _resources(rung, find_target(target, hardware)):
            console.print(line)
        return OK
    if not diff:
        print(rung.source, end="")
        return OK
    before = rungs.RUNGS.get(number - 1)
    if before is None or before.path.suffix != rung.path.suffix or rung.tier:
        from flashtile.errors import UnsupportedError

        raise UnsupportedError(f"rung {number}: there is no rung before it in the same language. Leave out --diff.")
    lines = difflib.unified_diff(before.source.splitlines(), rung.source.splitlines(), before.file, rung.file, lineterm="")
    for line in lines:
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
        console.print(line, style=style, markup=False)
    return OK


def lines_for_case(case, device, compile_kernels):
    """Lines about the rungs that take a case: tiles and shared memory, or what they compile to for a device; of the others, why
    not.
    """
    from flashtile.ladder import rungs

    for rung in rungs.RUNGS.values():
        if rung.tier:
            continue
        reason = rungs.refuses(rung, case.problem(), device)
        if reason:
            yield f"  rung {rung.number}    not {rung.name}: {reason}"
            continue
        if not compile_kernels:
            config = rung.configs[case.head_dim]
            yield f"  rung {rung.number}    {_tiles(config, rungs.shared_bytes(rung, config, case.head_dim))}"
            continue
        for line in _resources(rung, device, [case.head_dim], case.causal, case.dtype == "bf16"):
            yield f"  rung {rung.number}    {line}"


def _resources(rung, device, head_dims=(64, 128), causal=True, bf16=False):
    """Lines about a rung on a device: shared memory, registers, blocks on an SM, bank conflicts."""
    from flashtile.ladder import nvrtc, rungs

    for head_dim in head_dims:
        config = rung.configs.get(head_dim)
        if config is None:
            continue
        cubin = nvrtc.compile_file(rung.path, device.arch, rungs.macros(config, head_dim, causal=causal, bf16=bf16))
        for kernel, registers in cubin.registers.items():
            shared = rungs.shared_bytes(rung, config, head_dim, kernel)
            occupancy = rungs.occupancy(config.num_warps, registers, shared, device)
            yield (f"head dim {head_dim}, {kernel}: {_tiles(config, shared)}, {registers} registers, "
                   f"{cubin.spill_bytes[kernel]} B spilled; {occupancy.blocks} blocks an SM by {occupancy.limit}, "
                   f"{100 * occupancy.threads:.0f}% of its threads")  # fmt: skip
    cycles = rungs.bank_cycles(rung)
    if cycles:
        yield (f"cycles of shared memory: {cycles[0]} for a matrix of ldmatrix, {cycles[1]} for 8 threads that store 16 bytes "
               "each; 1 means no bank conflict")  # fmt: skip


def _tiles(config, shared):
    return (f"tiles {config.tile_m}x{config.tile_n}, {32 * config.num_warps} threads, {config.num_stages} stages, "
            f"{shared / 1024:.1f} KiB shared")  # fmt: skip


def run(
    shape: ShapeFlags,
    timing: TimingFlags,
    output: OutputFlags,
    upto: Annotated[int, typer.Option("--upto", help="The last rung.")] = 11,
    rung: Annotated[str, typer.Option("--rung", help="Only these, such as 5,8.")] = "",
    tile: Annotated[str, typer.Option("--tile", help="QUERIES,KEYS,WARPS,STAGES in place of the rungs' own tiles.")] = "",
    rounds: Annotated[int, typer.Option("--rounds", help="Interleaved rounds.")] = 9,
) -> int:
    """Check every rung against float64 and time it: TFLOP/s, percent of the roof, speed-up over the rung before."""
    from flashtile.bench.cases import UsageError, parse_ints

    output.check()
    console = output.console()
    numbers = parse_ints(rung, "rung") if rung else list(range(1, upto + 1))
    with Progress(output.progress and not output.quiet) as progress:
        progress.say("importing torch")
        from flashtile.bench import engine, ladder, peers
        from flashtile.cli import show as shown

        device = engine.resolve_device(timing.device)
        if device.type != "cuda":
            raise peers.Unavailable("the rungs are CUDA C++: running them needs a GPU. `flashtile ladder show 1 --target H200` "
                                    "compiles one without.")  # fmt: skip
        cases = shape.cases("fp16", takes=())
        for case in cases:
            if case.dtype == "fp32":
                raise UsageError("dtype: expected fp16 or bf16, got fp32. Rungs 1 to 4 run in fp32 beside the others anyway.")
        printer = shown.Printer("ladder", console, progress, output)
        report = ladder.compare(cases, numbers, timing.modes(), _parse_tile(tile), device=device, listener=printer,
                                settings=timing.settings(device, commit=output.commit, rounds=rounds))  # fmt: skip
    for case in cases:
        for mode in timing.modes():
            _print_table(console, report, case, mode)
    console.print()
    shown.footer(console, report)
    output.save(report)
    code = exit_code(report)
    if output.quiet and code != OK:
        complain("; ".join(dict.fromkeys(f"{r.backend}: {r.reason}" for r in report.results if not r.ok)) or "interrupted")
    return code


def _parse_tile(text):
    """`128,64,4,2` as a TileConfig; nothing as None."""
    from flashtile.bench.cases import UsageError, parse_int
    from flashtile.tiles import TileConfig

    if not text:
        return None
    numbers = [parse_int(item, "tile") for item in text.split(",")]
    if len(numbers) != 4:
        raise UsageError(f"tile: expected QUERIES,KEYS,WARPS,STAGES such as 128,64,4,2, got {text!r}.")
    return TileConfig(*numbers)


def _print_table(console, report, case, mode) -> None:
    from flashtile.bench import ladder, peers
    from flashtile.cli.show import STATUS_WORDS, ms, rate, ratio

    rows = ladder.table(report, case, mode)
    if not any(row.result.ok or row.result.status in ("mismatch", "error") for row in rows):
        return
    console.print(f"\n[bold]{case.label()}[/] {mode}")
    table = _table(("rung", True), ("what it adds", False), ("dtype", False), ("ms", True), ("TFLOP/s", True),
                   ("of roof", True), ("over the rung before", True), (f"over {ladder.BASELINE}", True),
                   ("max error", True))  # fmt: skip

    def add(number, name, result, *speeds):
        roof = "-" if result.roof_fraction is None else f"{100 * result.roof_fraction:.1f}%"
        error = f"{result.accuracy.to_json()['max_abs']:.1e}" if result.accuracy else "not checked"
        speeds = ["-" if value is None else f"{ratio(value)}x" for value in speeds]
        table.add_row(number, name, result.case.dtype, ms(result.stats.median), rate(result.tflops()), roof, *speeds, error)

    for row in rows:
        if row.result.ok:
            add(str(row.rung.number), f"[bold]{row.rung.name}[/]: {row.rung.idea}", row.result, row.over_before, row.over_flash)
        elif row.result.status in ("mismatch", "error"):
            table.add_row(str(row.rung.number), f"[red]{STATUS_WORDS[row.result.status]}: {row.result.reason}[/]")
    for result in ladder.peer_results(report, case, mode):
        add("", f"[dim]{result.backend}: {peers.BACKENDS[result.backend].about}[/]", result, None, None)
    console.print(table)
    for row in rows:
        if row.result.status in ("refused", "unavailable", "skipped", "oom"):
            console.print(f"  [dim]rung {row.rung.number}: {row.result.reason}[/]")


def _table(*columns):
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, right in columns:
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    return table
