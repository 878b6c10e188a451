"""Write the tables of README.md from the recorded runs; nobody types them.

    python benchmarks/tables.py          rewrite what stands between the markers <!-- results:NAME:begin --> and :end
    python benchmarks/tables.py --check  exit 1 if that would change anything

A record is what `flashtile compare --json` wrote, under benchmarks/results/<gpu>/. Its table has TFLOP/s at some sequence
lengths, and how much faster flashtile is than each backend over all of them.
"""

import json
import sys
from math import exp, log
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# marker in README.md: the records whose tables stand there, each with its heading
RECORDS = {
    "h200": {
        "nvidia-h200/paper.json": "All tiers, as a call chooses them",
        "nvidia-h200/paper-portable.json": "The portable tier alone (`FLASHTILE_TIER=portable`)",
    },
}
SEQLENS = (512, 2048, 16384)


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


def main() -> int:
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = updated(before)
    if "--check" in sys.argv:
        if before != after:
            print("README.md is not what the records say; run python benchmarks/tables.py")
        return int(before != after)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
