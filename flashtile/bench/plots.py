"""Plots of records, one pair of axes each, as SVG that takes its colours from the page, or as PNG and SVG in light and dark.

Needs matplotlib: pip install 'flashtile[report]'.
"""

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from flashtile.bench import record, tables
from flashtile.bench.cases import BenchCase

SUBJECT = "flashtile"
THEMES = ("light", "dark")
# role -> colour in light and dark; a page gives them as CSS variables --ROLE
ROLES = {
    "ink": ("#1f2328", "#e8eaed"),
    "muted": ("#59636e", "#9aa4af"),
    "line": ("#d9dee3", "#3a424b"),
    "page": ("#ffffff", "#14171b"),
    "s0": ("#c2410c", "#fb923c"),
    "s1": ("#2563a8", "#7db4f0"),
    "s2": ("#2f7d4f", "#6fcf97"),
    "s3": ("#7c3aad", "#c59bf0"),
    "s4": ("#6b5d00", "#d6c345"),
    "s5": ("#0e7490", "#67d3e6"),
    "s6": ("#9d174d", "#f08ab5"),
    "s7": ("#4b5563", "#b8c0ca"),
}
_SENTINELS = {role: f"#0100{i:02x}" for i, role in enumerate(ROLES)}
SERIES = [role for role in ROLES if re.fullmatch(r"s\d", role)]
MARKERS = "osD^vPX*"
SIZE = (4.6, 3.1)
# Entries of a legend inside of the axes
MAX_INSIDE = 6
_STYLE = {
    "font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.5,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.grid": True, "grid.linewidth": 0.6, "lines.linewidth": 1.8,
    "lines.markersize": 4.5, "legend.frameon": False, "legend.fontsize": 8, "axes.axisbelow": True, "axes.grid.axis": "y",
    "axes.facecolor": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """draw(axes, colours) on one pair of axes; alt says in words what is there."""

    name: str
    group: str
    title: str
    alt: str
    draw: Callable


def render(plot: Plot, kind: str, theme: str = "page", caption: str = "") -> bytes:
    """The plot as "svg" or "png". theme: "light", "dark", or "page" for CSS variables (svg only)."""
    colours = _SENTINELS if theme == "page" else {role: pair[THEMES.index(theme)] for role, pair in ROLES.items()}
    own = {"text.color": colours["ink"], "axes.labelcolor": colours["muted"], "xtick.color": colours["muted"],
           "ytick.color": colours["muted"], "axes.edgecolor": colours["line"], "grid.color": colours["line"],
           "axes.titlecolor": colours["ink"], "svg.hashsalt": plot.name}  # fmt: skip
    with rc_context(_STYLE | own):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        plot.draw(axes, colours)
        axes.set_title(plot.title)
        if caption:
            figure.supxlabel(caption, fontsize=5.5, color=colours["muted"], x=0.02, ha="left")
        out = io.BytesIO()
        background = "none" if theme == "page" else colours["page"]
        options = {"metadata": {"Date": None, "Creator": None}} if kind == "svg" else {"dpi": 200}
        figure.savefig(out, format=kind, facecolor=background, **options)
    return _for_page(out.getvalue().decode(), plot).encode() if theme == "page" else out.getvalue()


def _for_page(svg: str, plot: Plot) -> str:
    """Without XML's head, with the page's colours and font, and with a name for those who don't see it."""
    svg = svg[svg.index("<svg") :]
    for role, colour in _SENTINELS.items():
        svg = svg.replace(colour, f"var(--{role})")
    svg = re.sub(r"font-family: [^;\"]+", "font-family: inherit", svg)
    svg = re.sub(r"font: (\S+) [^;\"]+", r"font-size: \1; font-family: inherit", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Every plot of matplotlib names its parts alike; on one page only what is referred to keeps a name, its own.
    used = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: f' id="{plot.name}-{found[1]}"' if found[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{plot.name}-", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    label = plot.alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'{head} role="img" aria-label="{label}">{rest}'


def write(plots, prefix: str, documents=()) -> list[str]:
    """PREFIX-NAME-THEME.png and .svg of each plot; their names."""
    caption = "; ".join(dict.fromkeys(provenance(d) for d in documents))
    names = []
    for plot in plots:
        for theme in THEMES:
            for kind in ("png", "svg"):
                path = Path(f"{prefix}-{plot.name}-{theme}.{kind}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(render(plot, kind, theme, caption))
                names.append(str(path))
    return names


def provenance(document) -> str:
    """GPU, versions, commit; CPU likewise."""
    return record.describe(document["env"])


def figures(documents) -> list[Plot]:
    """Every plot that the documents have data for."""
    found = tables.timed(documents)
    order = _backends(documents)
    # Everything that a line holds still: (mode, head dims, causal, dtype, heads ratio) -> {backend: {seqlen: row}}
    lines = {}
    for (case, mode), rows in found.items():
        group = (mode, case.head_dim, case.head_dim_v, case.causal, case.dtype, case.window, case.softcap, case.dropout,
                 case.varlen, case.alibi)
        for backend, row in rows.items():
            # Where only batch or heads differ, the largest one stands for the length
            kept = lines.setdefault(group, {}).setdefault(backend, {})
            if case.seqlen_k not in kept or row["flops"] > kept[case.seqlen_k]["flops"]:
                kept[case.seqlen_k] = row
    plots = []
    for group, by_backend in sorted(lines.items(), key=lambda item: (tables.ALL_MODES.index(item[0][0]), *item[0][1:5])):
        if max(len(rows) for rows in by_backend.values()) < 2:
            continue
        plots += [_rate(group, by_backend, order), _time(group, by_backend, order)]
    plots += _memory(documents, order)
    plots += _roofline(documents, found, order)
    plots += _heat_maps(found, order)
    plots += _split(found)
    plots += [_scaling(d) for d in documents if "scaling" in d and len(d["scaling"]["rows"]) > 1]
    plots += _strips(found)
    return tables.named_apart(plots)


def _backends(documents) -> dict[str, str]:
    """backend -> role of its colour, flashtile first. Where colours come again, other MARKERS go with them."""
    names = dict.fromkeys(row["backend"] for d in documents for row in d["results"])
    ordered = [SUBJECT, *(name for name in names if name != SUBJECT)]
    own, *others = SERIES
    return {name: others[(i - 1) % len(others)] if i else own for i, name in enumerate(ordered)}


def _words(group) -> str:
    mode, dim, dim_v, causal, dtype, window, softcap, dropout, varlen, alibi = group
    dims = f"{dim}" if dim == dim_v else f"{dim}-{dim_v}"
    more = (", window" if window != (None, None) else "") + (", softcap" if softcap else "")
    more += (", dropout" if dropout else "") + (", varlen" if varlen else "")
    more += ", ALiBi" if alibi else ""
    return f"{mode}, head dim {dims}, {'causal' if causal else 'full'}, {dtype}{more}"


def _name(kind, group) -> str:
    return "-".join([kind, *re.findall(r"\w+", _words(group).replace("head dim", "d"))])


def _lengths(axes, values) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(values))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
    axes.set_xlabel("sequence length")


def _plain_log(axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _lines(axes, colours, by_backend, order, value, band=True) -> None:
    for i, name in enumerate(order):
        rows = by_backend.get(name)
        if not rows:
            continue
        xs = sorted(rows)
        style = {"color": colours[order[name]], "marker": MARKERS[i % len(MARKERS)], "zorder": 4 if name == SUBJECT else 3}
        axes.plot(xs, [value(rows[x], rows[x]["stats"]["median"]) for x in xs], label=name,
                  linewidth=2.6 if name == SUBJECT else 1.5, **style)  # fmt: skip
        if band:
            low, high = ([value(rows[x], rows[x]["stats"]["ci95"][side]) for x in xs] for side in (0, 1))
            axes.fill_between(xs, low, high, color=colours[order[name]], alpha=0.2, linewidth=0)
    _lengths(axes, [x for rows in by_backend.values() for x in rows])
    _legend(axes, "best")


def _legend(axes, place) -> None:
    """Inside of the axes, or where it is long beside them."""
    if len(axes.get_legend_handles_labels()[1]) <= MAX_INSIDE:
        axes.legend(loc=place)
    else:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _ends(by_backend, value) -> str:
    """First and last value of flashtile, or where it is not in a plot of another, for the text that stands for the plot."""
    name = SUBJECT if SUBJECT in by_backend else next(iter(by_backend))
    rows = by_backend[name]
    first, last = min(rows), max(rows)
    return f"{name} {value(rows[first]):.4g} at {first} tokens, {value(rows[last]):.4g} at {last}"


def _rate(group, by_backend, order) -> Plot:
    def draw(axes, colours):
        _lines(axes, colours, by_backend, order, lambda row, ms: row["flops"] / ms / 1e9)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("TFLOP/s")

    alt = f"TFLOP/s over sequence length, {_words(group)}: {_ends(by_backend, lambda row: row['tflops'])}."
    return Plot(_name("tflops", group), "TFLOP/s", _words(group), alt, draw)


def _time(group, by_backend, order) -> Plot:
    def draw(axes, colours):
        _lines(axes, colours, by_backend, order, lambda row, ms: ms)
        _plain_log(axes)
        axes.set_ylabel("ms")

    alt = f"Time in ms over sequence length, {_words(group)}: {_ends(by_backend, lambda row: row['stats']['median'])}."
    return Plot(_name("time", group), "Time", _words(group), alt, draw)


def _memory(documents, order) -> list[Plot]:
    plots = []
    for document in documents:
        if document["settings"]["command"] != "memory":
            continue
        by_backend, first = {}, None
        for row in document["results"]:
            # Cases like the first but for their lengths
            case = replace(BenchCase.from_config(row["config"]), seqlen_q=1, seqlen_k=1)
            first = first or case
            if case == first:
                by_backend.setdefault(row["backend"], {})[row["config"]["seqlen_k"]] = row
        mode = document["settings"]["modes"][0]
        if max(map(len, by_backend.values()), default=0) < 2:
            continue

        def draw(axes, colours, by_backend=by_backend):
            for i, (name, rows) in enumerate(by_backend.items()):
                xs = sorted(rows)
                colour = colours[order[name]]
                formula = [rows[x]["predicted_mem_bytes"] / tables.MIB for x in xs]
                axes.plot(xs, formula, color=colour, linewidth=1, linestyle="--")
                seen = [x for x in xs if rows[x]["extra_mem_bytes"] is not None]
                axes.plot(seen, [rows[x]["extra_mem_bytes"] / tables.MIB for x in seen], color=colour, linestyle="none",
                          marker=MARKERS[i], label=name)  # fmt: skip
            _lengths(axes, [x for rows in by_backend.values() for x in rows])
            axes.tick_params(axis="x", labelrotation=45)
            _plain_log(axes)
            axes.set_ylabel("MiB beyond the inputs")
            axes.plot([], [], color=colours["muted"], linewidth=1, linestyle="--", label="formula")
            axes.legend()

        label = BenchCase.from_config(document["results"][0]["config"])
        title = f"{mode}, b{label.batch} h{label.num_heads} d{label.head_dims} {label.dtype}"
        alt = f"Memory beyond the inputs over sequence length, {title}: naive grows with its square, flash linearly."
        plots.append(Plot(f"memory-{mode}", "Memory", title, alt, draw))
    return plots


def _roofline(documents, found, order) -> list[Plot]:
    plots = []
    roofs = {name: roof for d in documents for name, roof in d.get("roofs", {}).items() if d["env"]["gpu"]}
    for dtype, roof in roofs.items():
        rows = [row for by_backend in found.values() for row in by_backend.values()
                if BenchCase.from_config(row["config"]).torch_dtype == _torch_dtype(dtype)]  # fmt: skip
        if not rows:
            continue

        def draw(axes, colours, roof=roof, rows=rows):
            xs = [2.0**i for i in range(-2, 15)]
            ridge = roof["tflops"] * 1e12 / roof["bandwidth"]
            xs = sorted([*xs, ridge])
            axes.plot(xs, [min(roof["tflops"], x * roof["bandwidth"] / 1e12) for x in xs], color=colours["ink"], linewidth=1.2,
                      label="measured roof")  # fmt: skip
            if roof.get("spec_tflops"):
                axes.plot(xs, [min(roof["spec_tflops"], x * roof["spec_bandwidth"] / 1e12) for x in xs], color=colours["muted"],
                          linewidth=1, linestyle=":", label="datasheet")  # fmt: skip
            for i, name in enumerate(order):
                points = [(row["flops"] / row["bytes"], row["tflops"]) for row in rows if row["backend"] == name]
                if points:
                    axes.plot(*zip(*points, strict=True), color=colours[order[name]], linestyle="none", alpha=0.8, label=name,
                              marker=MARKERS[i % len(MARKERS)], markersize=3.5, zorder=4 if name == SUBJECT else 3)  # fmt: skip
            axes.set_xscale("log", base=2)
            _plain_log(axes)
            axes.set_xlabel("FLOP per byte of the tensors")
            axes.set_ylabel("TFLOP/s")
            _legend(axes, "lower right")

        alt = f"Roofline, {dtype}: {len(rows)} points under a measured roof of {roof['tflops']:.0f} TFLOP/s."
        plots.append(Plot(f"roofline-{dtype}", "Roofline", f"{dtype}, cold L2", alt, draw))
    return plots


def _torch_dtype(name):
    import torch

    return getattr(torch, name)


def _heat_maps(found, order) -> list[Plot]:
    maps = {}
    for (case, mode), rows in found.items():
        # Cells are means: of one kind of case
        if SUBJECT not in rows or not case.is_plain:
            continue
        for other, row in rows.items():
            if other != SUBJECT:
                ratio = row["stats"]["median"] / rows[SUBJECT]["stats"]["median"]
                cell = maps.setdefault((other, mode, case.causal), {}).setdefault((case.head_dims, case.seqlen_k), [])
                cell.append(ratio)
    plots = []
    for (other, mode, causal), cells in maps.items():
        dims = sorted({dim for dim, _ in cells}, key=lambda text: [int(x) for x in text.split("-")])
        lengths = sorted({length for _, length in cells})
        if len(lengths) < 2:
            continue
        means = {key: math.exp(sum(map(math.log, ratios)) / len(ratios)) for key, ratios in cells.items()}

        def draw(axes, colours, means=means, dims=dims, lengths=lengths):
            for (dim, length), ratio in means.items():
                x, y = lengths.index(length), dims.index(dim)
                fill, ink = _heat(ratio)
                axes.add_patch(_rectangle((x - 0.5, y - 0.5), fill, colours["page"]))
                axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=8, color=ink)
            axes.set_xticks(range(len(lengths)), [f"{x // 1024}k" if x >= 1024 else str(x) for x in lengths])
            axes.set_yticks(range(len(dims)), dims)
            axes.set_xlim(-0.5, len(lengths) - 0.5)
            axes.set_ylim(-0.5, len(dims) - 0.5)
            axes.grid(False)
            axes.set_xlabel("sequence length")
            axes.set_ylabel("head dim")

        title = f"over {other}: {mode}, {'causal' if causal else 'full'}"
        alt = f"Speed-up of {SUBJECT} {title}, from {min(means.values()):.2f} to {max(means.values()):.2f}."
        name = f"speedup-{other}-{mode}-{'causal' if causal else 'full'}"
        plots.append(Plot(name, "Speed-up", title, alt, draw))
    return plots


def _heat(ratio) -> tuple[str, str]:
    """(fill, ink): blue above 1, red below, white at 1; full colour at a factor of 2."""
    strength = min(1.0, abs(math.log2(ratio)))
    end = (29, 95, 160) if ratio >= 1 else (178, 51, 35)
    rgb = [round(247 + (to - 247) * strength) for to in end]
    return "#{:02x}{:02x}{:02x}".format(*rgb), "#ffffff" if strength > 0.55 else "#1f2328"


def _rectangle(corner, fill, edge):
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, facecolor=fill, edgecolor=edge, linewidth=1.5)


def _split(found) -> list[Plot]:
    """Forward and backward of flashtile, stacked; at most 12 cases, the first ones."""
    timed = {key for key, rows in found.items() if SUBJECT in rows}
    cases = [case for case, mode in found if mode == "fwd" and {(case, "fwd"), (case, "bwd")} <= timed][:12]
    if not cases:
        return []

    def draw(axes, colours):
        medians = [[found[case, mode][SUBJECT]["stats"]["median"] for case in cases] for mode in ("fwd", "bwd")]
        total = [a + b for a, b in zip(*medians, strict=True)]
        left = [0.0] * len(cases)
        for mode, times, role in zip(("forward", "backward"), medians, ("s1", "s0"), strict=True):
            parts = [t / all_of_it for t, all_of_it in zip(times, total, strict=True)]
            axes.barh(range(len(cases)), parts, left=left, color=colours[role], label=mode, height=0.7)
            left = [a + b for a, b in zip(left, parts, strict=True)]
        axes.set_yticks(range(len(cases)), [case.label() for case in cases], fontsize=6)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
        axes.grid(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)

    alt = f"Share of forward and backward time of {SUBJECT} in {len(cases)} cases."
    return [Plot("split", "Forward and backward", "share of the time", alt, draw)]


def _scaling(document) -> Plot:
    kind, rows = document["scaling"]["kind"], document["scaling"]["rows"]
    axis = "batch" if kind == "batch" else "GPUs"
    xs = [row["config"]["batch"] if kind == "batch" else row["gpus"] for row in rows]

    def draw(axes, colours):
        axes.plot(xs, [row["efficiency"] for row in rows], color=colours["s0"], marker="o", label="efficiency")
        axes.set_ylim(0, max(1.05, *(row["efficiency"] * 1.05 for row in rows)))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(xs))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
        axes.set_xlabel(axis)
        axes.set_ylabel("efficiency")

    alt = f"Efficiency over {axis}, {kind} scaling: {rows[-1]['efficiency']:.0%} at {xs[-1]}."
    return Plot(f"scaling-{kind}", "Scaling", f"{kind} scaling", alt, draw)


def _strips(found) -> list[Plot]:
    """Samples one after the other of flashtile's steadiest and noisiest row, with the GPU's clock where it was read."""
    rows = [(rows[SUBJECT], case, mode) for (case, mode), rows in found.items() if SUBJECT in rows]
    rows.sort(key=lambda item: item[0]["stats"]["iqr_rel"])
    plots = []
    for word, (row, case, mode) in {"steadiest": rows[0], "noisiest": rows[-1]}.items() if rows else ():

        def draw(axes, colours, row=row):
            samples = row["samples_ms"]
            axes.plot(range(len(samples)), samples, color=colours["s0"], linestyle="none", marker=".", markersize=2.5)
            low, high = row["stats"]["ci95"]
            axes.axhspan(low, high, color=colours["s0"], alpha=0.25, linewidth=0)
            axes.axhline(row["stats"]["median"], color=colours["ink"], linewidth=0.8)
            axes.set_xlabel("sample")
            axes.set_ylabel("ms")
            path = (row["telemetry"] or {}).get("trace")
            if path:
                other = axes.twinx()
                xs = [i * (len(samples) - 1) / max(1, len(path) - 1) for i in range(len(path))]
                other.plot(xs, [mhz for _, mhz, _ in path], color=colours["s1"], linewidth=1, label="SM MHz")
                other.plot(xs, [watts for _, _, watts in path], color=colours["s2"], linewidth=1, linestyle="--", label="W")
                other.set_ylim(bottom=0)
                other.grid(False)
                other.spines["right"].set_visible(True)
                other.set_ylabel("MHz, W while it was measured")
                other.legend(loc="lower right")

        s = row["stats"]
        alt = (f"{s['n']} samples of {case.label()} {mode} in order: median {s['median']:.4g} ms, least {s['min']:.4g}, "
               f"most {s['max']:.4g}.")  # fmt: skip
        plots.append(Plot(f"samples-{word}", "Samples", f"{word}: {case.label()} {mode}", alt, draw))
    return plots
