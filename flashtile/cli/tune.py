"""`flashtile tune`: time candidate tiles of the portable kernels on this GPU."""

import json as json_module
from typing import Annotated

import typer

from flashtile.cli.common import OK, Progress, ShapeFlags, command, make_console
from flashtile.cli.explain import find_target


def add(app) -> None:
    app.command("tune")(command(tune))


def tune(
    shape: ShapeFlags,
    kernel: Annotated[
        str, typer.Option("--kernel", help="Some of forward, dkdv, dq; or of decode (one query, a full cache), decode-ragged.")
    ] = "forward,dkdv,dq",
    seed: Annotated[int, typer.Option("--seed", help="Of the inputs and the order.")] = 0,
    target: Annotated[
        str, typer.Option("--target", help="Tiles for this older GPU (A100, RTX 4090, ...), by its instructions.")
    ] = "",
    device: Annotated[str | None, typer.Option("--device", help="cuda:N (the current GPU).")] = None,
    json: Annotated[str | None, typer.Option("--json", help="Write every candidate; - is stdout.")] = None,
    commit: Annotated[str | None, typer.Option("--commit", help="Commit to record where there is no .git.")] = None,
) -> int:
    """Time candidate tiles of the portable kernels on this GPU, beside the ones that flashtile/tiles.py has.

    With --target they are compiled with an older GPU's instructions and have its shared memory, and run here.
    """
    console = make_console(stderr=json == "-")
    with Progress(True) as progress:
        progress.say("importing torch")
        from flashtile import hardware
        from flashtile.bench import engine, record
        from flashtile.bench import tune as tuning
        from flashtile.bench.cases import UsageError, parse_choices
        from flashtile.problem import check_head_dims

        kernels = parse_choices(kernel, [*tuning.CANDIDATES, *tuning.DECODE_KERNELS], "kernel")
        decodes = [name in tuning.DECODE_KERNELS for name in kernels]
        if len(set(decodes)) > 1:
            raise UsageError(f"kernel: expected kernels over a cache alone, or others alone, got {kernel!r}.")
        there = engine.resolve_device(device or "cuda", gpu_for="timing tiles")
        tiles_of = find_target(target, hardware) if target else None
        rows = []
        cases = shape.cases(engine.default_dtype(there), decodes[0], takes=("alibi", "page_size") if decodes[0] else ())
        for case in cases:
            check_head_dims(q=case.head_dim, v=case.head_dim_v)
        for case in cases:
            found = tuning.run(case, kernels, there, seed, progress.say, tiles_of)
            rows += found
            with progress.paused():
                console.print(f"\n[bold]{case.label()}[/]")
                for row in found:
                    mark = "  in tiles.py" if row.current else ""
                    result = row.refused or f"{row.ms:.4f} ms"
                    console.print(f"  {row.kernel:13} {tuning.describe(row.config):38} {result}{mark}", highlight=False)
    if json:
        document = {"command": "flashtile tune", "env": record.environment(there, commit), "target": target,
                    "rows": [row.to_json() for row in rows]}  # fmt: skip
        record.write(json, json_module.dumps(document) + "\n")
    return OK
