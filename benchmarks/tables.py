"""Write the tables of README.md and docs/measured.md from the recorded runs; nobody types them.

    python benchmarks/tables.py          rewrite what stands between the markers <!-- results:NAME:begin --> and :end
    python benchmarks/tables.py --check  exit 1 if that would change anything

A record is what a command of flashtile wrote with --json, under benchmarks/results/<gpu>/. README's table of one has TFLOP/s
at some sequence lengths, and how much faster flashtile is than each backend over all of them; docs/measured.md has the tables
of `flashtile report`, between <!-- records:NAME:begin --> and :end, NAME.json being the record.
"""

import json
import sys
from math import exp, log
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"
# marker in README.md: the records whose tables stand there, each with its heading
RECORDS = {
    "h200": {
        "nvidia-h200/paper.json": "All tiers, as a call chooses them",
        "nvidia-h200/paper-portable.json": "The portable tier alone (`FLASHTILE_TIER=portable`)",
    },
}
SEQLENS = (512, 2048, 16384)
MEASURED = ROOT / "docs" / "measured.md"
GPU = "nvidia-h200"
# record of docs/measured.md, of this GPU where it names none: names of its tables in flashtile.bench.tables
DOCS = {
    "guide": ("forward", "backward", "bandwidth"),
    "leetcuda": ("backends-fwd",),
    "memory": ("memory",),
    "memory-train": ("memory",),
    "scale-batch": ("scaling-batch",),
    "scale-strong": ("scaling-strong",),
    "scale-weak": ("scaling-weak",),
    "paper-forward": ("geomeans", "backends-fwd"),
    "features": ("backends-fwd", "backends-bwd"),
    "nvidia-h100/models": ("geomeans", "backends-fwd", "backends-bwd"),
    "train": ("backends-fwd_bwd",),
    "deterministic": ("geomeans", "backends-bwd"),
    "backward-groups": ("geomeans", "backends-bwd"),
    "few-keys": ("geomeans", "backends-fwd"),
    "few-keys-train": ("geomeans", "backends-bwd"),
    "few-queries": ("geomeans", "backends-fwd"),
    "few-heads": ("geomeans", "backends-fwd", "backends-bwd"),
    "head-dims-portable": ("backends-fwd", "backends-bwd"),
    "head-dims-decode": ("backends-decode",),
    "random": ("geomeans", "backends-fwd"),
    "random-train": ("geomeans", "backends-bwd"),
    "regress-same": ("regress",),
    "regress-slowed": ("regress",),
    "nvidia-h100/paper-forward": ("geomeans", "backends-fwd"),
    "chunked-prefill": ("geomeans", "backends-decode"),
    "nvidia-h100/chunked-prefill": ("geomeans", "backends-decode"),
    "nvidia-h100/chunked-prefill-portable": ("backends-decode",),
}


def under_results(name) -> str:
    """The path of a record, of this GPU unless it names one."""
    return name if "/" in name else f"{GPU}/{name}"


def table(record) -> list[str]:
    """Lines of Markdown for one record of `flashtile compare`."""
    backends = record["settings"]["backends"]
    cells = {}
    for row in record["results"]:
        config = row["config"]
        key = (config["headdim"], row["mode"], config["causal"])
        cells.setdefault(key, {}).setdefault(config["seqlen_q"], {})[row["backend"]] = row
    others = backends[1:]
    header = ["head dim", "pass", "mask", *(f"{name}, TFLOP/s" for name in backends), *(f"over {name}" for name in others)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    forward_first = sorted(cells, key=lambda key: (key[0], key[1] != "fwd", key[2]))
    for head_dim, mode, causal in forward_first:
        by_seqlen = cells[head_dim, mode, causal]
        words = [str(head_dim), {"fwd": "forward", "bwd": "backward"}[mode], "causal" if causal else "none"]
        for backend in backends:
            words.append(" / ".join(_tflops(by_seqlen.get(seqlen, {}).get(backend)) for seqlen in SEQLENS))
        words += [_speedup(by_seqlen, other) for other in others]
        lines.append("| " + " | ".join(words) + " |")
    return lines


def _tflops(row) -> str:
    return f"{row['tflops']:.0f}" if row and row["status"] == "ok" else "-"


def _speedup(by_seqlen, other) -> str:
    """Geometric mean and range of flashtile's speed over another backend's."""
    ratios = [
        rows[other]["stats"]["median"] / rows["flashtile"]["stats"]["median"]
        for rows in by_seqlen.values()
        if all(name in rows and rows[name]["status"] == "ok" for name in ("flashtile", other))
    ]
    if not ratios:
        return "-"
    return f"**{exp(sum(map(log, ratios)) / len(ratios)):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"


def section(records) -> str:
    """The Markdown of a marker: a heading, a table and its provenance for each record."""
    parts = []
    for name, heading in records.items():
        path = RESULTS / name
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        env = record["env"]
        lengths = ", ".join(str(seqlen) for seqlen in SEQLENS)
        caption = (
            f"{heading}. TFLOP/s at sequence lengths {lengths}; in bold the geometric mean over 512 to 16384. bf16, batch x "
            f"seqlen = 16384, heads = 2048 / head dim. {env['gpu']['name']}, torch {env['torch']}, Triton {env['triton']}, "
            f"commit {env['git']['commit'][:8]}; record: `benchmarks/results/{name}`."
        )
        parts += [caption, "", *table(record), ""]
    return "\n".join(parts).rstrip()


def updated(text: str) -> str:
    """README.md with the text between markers made anew."""
    for marker, records in RECORDS.items():
        begin, end = f"<!-- results:{marker}:begin -->", f"<!-- results:{marker}:end -->"
        head, rest = text.split(begin)
        tail = rest.split(end)[1]
        text = f"{head}{begin}\n{section(records)}\n{end}{tail}"
    return text


def measured(text: str) -> str:
    """docs/measured.md with the text between its markers made anew."""
    from flashtile.bench import record, tables

    for name, wanted in DOCS.items():
        place = under_results(f"{name}.json")
        path = RESULTS / place
        parts = ["Not recorded yet."]
        if path.exists():
            document = record.load(path)
            by_name = {table.name: table for table in tables.all_tables([document])}
            source = f"{record.describe(document['env'])}; record: `benchmarks/results/{place}`."
            parts = [part for key in wanted for part in (by_name[key].caption, by_name[key].markdown())] + [source]
        begin, end = f"<!-- records:{name}:begin -->", f"<!-- records:{name}:end -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n" + "\n\n".join(parts) + f"\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    stale = 0
    for path, update in ((ROOT / "README.md", updated), (MEASURED, measured)):
        before = path.read_text()
        after = update(before)
        if "--check" not in sys.argv:
            path.write_text(after)
        elif before != after:
            print(f"{path.relative_to(ROOT)} is not what the records say; run python benchmarks/tables.py")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
