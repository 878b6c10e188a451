"""`flashtile presets`: the named cases."""

from flashtile.cli.common import command, make_console


def add(app) -> None:
    app.command("presets")(command(presets))


def presets() -> int:
    """List the named cases of --preset; a file flashtile.toml in this folder may add some."""
    from rich.markup import escape
    from rich.table import Table

    from flashtile.bench import cases as known

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("preset", "cases", "shape", "about"):
        table.add_column(name, no_wrap=True)
    for name, preset in known.presets().items():
        cases = preset.cases()
        table.add_row(f"[bold]{escape(name)}[/]", str(len(cases)), _describe(cases), escape(preset.about))
    console = make_console()
    console.print(table)
    console.print("\n[dim]Flags override a preset: flashtile run --preset gpt2-small --batch 16 --dtype fp16[/]")
    return 0


def _describe(cases) -> str:
    """The label of a case, `b8 s1024 h12 d64 causal`, or what a set spans: `b1..32 s512..16384 d64..256 causal and not`."""

    def span(values):
        values = sorted(set(values))
        return str(values[0]) if len(values) == 1 else f"{values[0]}..{values[-1]}"

    if len(cases) == 1:
        return cases[0].label().removesuffix(f" {cases[0].dtype}")
    heads = span(case.num_heads for case in cases)
    if any(case.num_heads_kv != case.num_heads for case in cases):
        heads += f"/{span(case.num_heads_kv for case in cases)}"
    masks = {case.causal for case in cases}
    mask = " causal and not" if len(masks) == 2 else " causal" if masks == {True} else ""
    batch, seqlen, dims = (span(getattr(c, name) for c in cases) for name in ("batch", "seqlen_k", "head_dim"))
    return f"b{batch} s{seqlen} h{heads} d{dims}{mask}"
