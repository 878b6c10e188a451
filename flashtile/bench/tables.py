"""Tables made from records: of all rows, and the ones that the FlashAttention-2 benchmarking guide asks for."""

import re
import textwrap
from dataclasses import dataclass, field, replace

from flashtile.bench import guide
from flashtile.bench.cases import DECODE, MODES, BenchCase
from flashtile.bench.stats import round_by

SUBJECT = "flashtile"
MIB = 1 << 20
ALL_MODES = (*MODES, DECODE)


@dataclass(frozen=True)
class Cell:
    """What a table shows, and the number or text that it is sorted by. kind: "", "good", "bad" or "warn"."""

    text: str
    value: float | str | None = None
    kind: str = ""


@dataclass
class Table:
    """title and caption are plain text; columns are names, rows lists of Cell."""

    name: str
    title: str
    caption: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)

    def is_text(self, column: int) -> bool:
        """Whether a column's first value is words: such columns stand left."""
        return isinstance(next((row[column].value for row in self.rows if row[column].value is not None), None), str)

    def markdown(self) -> str:
        lines = ["| " + " | ".join(self.columns) + " |", "|---" * len(self.columns) + "|"]
        lines += ["| " + " | ".join(cell.text.replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in self.rows]
        return "\n".join(lines)


def text(value, kind="") -> Cell:
    return Cell(str(value), str(value), kind)


def number(value, shown=None, kind="") -> Cell:
    """A cell of a number; a dash for None."""
    return Cell("–", None, kind) if value is None else Cell(f"{value:.4g}" if shown is None else shown, value, kind)


def ms(stats) -> Cell:
    half = (stats["ci95"][1] - stats["ci95"][0]) / 2
    return number(stats["median"], round_by(stats["median"], half))


def verdict(word) -> Cell:
    return text(word or "–", {"FASTER": "good", "SLOWER": "bad", "UNCLEAR": "warn"}.get(word, ""))


def times(value) -> Cell:
    return number(value, None if value is None else f"{value:.2f}x")


def share(value) -> Cell:
    return number(value, None if value is None else f"{value:.1%}")


def mib(value) -> Cell:
    return number(value, None if value is None else f"{value / MIB:.0f}" if value >= 100 * MIB else f"{value / MIB:.3g}")


def all_tables(documents) -> list[Table]:
    """Every table that has a row in these documents."""
    made = [geomeans(documents), forward(documents), backward(documents), memory(documents), bandwidth(documents)]
    made += [side_by_side(documents, mode) for mode in ALL_MODES]
    made += [scaling(document) for document in documents if "scaling" in document]
    made += [versions(document) for document in documents if "regress" in document]
    made.append(results(documents))
    return named_apart([table for table in made if table.rows])


def named_apart(things) -> list:
    """Tables or plots with numbers behind names that come again: the names are ids of a page, and of files, and made such."""
    seen, apart = {}, []
    for thing in things:
        plain = re.sub(r"[^\w.-]+", "-", thing.name)
        seen[plain] = seen.get(plain, 0) + 1
        name = plain if seen[plain] == 1 else f"{plain}-{seen[plain]}"
        apart.append(replace(thing, name=name))
    return apart


def timed(documents) -> dict:
    """(case, mode) -> {backend: row} of rows with times, all of one run: times of two runs are not compared.

    Of several runs that which timed the most backends there, of equal ones the last.
    """
    found = {}
    for document in documents:
        of_run = {}
        for row in document["results"]:
            if row["status"] == "ok" and row["stats"]:
                of_run.setdefault((BenchCase.from_config(row["config"]), row["mode"]), {})[row["backend"]] = row
        found |= {key: rows for key, rows in of_run.items() if len(rows) >= len(found.get(key, ()))}
    return found


def results(documents) -> Table:
    """Every row, also those without a time."""
    table = Table("results", "All rows", "Median of correct calls with its 95% interval within the run; memory beyond "
                  "the inputs; verdict against the baseline of the run.",
                  ["case", "mode", "backend", "ms", "95% interval", "TFLOP/s", "of roof", "GB/s", "host µs", "memory MiB",
                   "vs baseline", "verdict", "max error", "GPU", "reproduce"])  # fmt: skip
    for document in documents:
        baseline = document["settings"]["baseline"]
        pairs = {(BenchCase.from_config(c["config"]), c["mode"], c["candidate"]): c
                 for c in document["comparisons"] if c["baseline"] == baseline}  # fmt: skip
        for row in document["results"]:
            case = BenchCase.from_config(row["config"])
            head = [text(case.label()), text(row["mode"]), text(row["backend"])]
            if row["status"] != "ok" or not row["stats"]:
                kind = "bad" if row["status"] in ("mismatch", "error") else "warn" if row["status"] != "ok" else ""
                told = text(textwrap.shorten(f"{row['status']}: {row['reason']}", 70, placeholder=" …"), kind)
                told = told if row["status"] != "ok" else text("not timed")
                table.rows.append([*head, number(None), told, *[number(None)] * 4, mib(row["extra_mem_bytes"]),
                                   *[number(None)] * 4, text(row["repro"])])  # fmt: skip
                continue
            s = row["stats"]
            pair = pairs.get((case, row["mode"], row["backend"]))
            throttle = (row["telemetry"] or {}).get("throttle", {})
            clock = (row["telemetry"] or {}).get("sm_mhz_median")
            state = ", ".join(([f"{clock:.0f} MHz"] if clock else []) + [f"{why} {part:.0%}" for why, part in throttle.items()])
            table.rows.append([
                *head, ms(s), text(f"{s['ci95'][0]:.4g} – {s['ci95'][1]:.4g}"), number(row["tflops"]),
                share(row.get("roof_fraction")), number(row["bytes"] / s["median"] / 1e6), number(row.get("host_overhead_us")),
                mib(row["extra_mem_bytes"]), times(pair and pair["ratio"]), verdict(pair and pair["verdict"]),
                number(row["accuracy"]["max_abs"] if row["accuracy"] else None), text(state or "–", "warn" if throttle else ""),
                text(row["repro"]),
            ])  # fmt: skip
    return table


def side_by_side(documents, mode) -> Table:
    """Backends beside each other, for cases that several were timed on in one run."""
    found = {case: rows for (case, its_mode), rows in timed(documents).items()
             if its_mode == mode and SUBJECT in rows and len(rows) > 1}  # fmt: skip
    others = list(dict.fromkeys(name for rows in found.values() for name in rows if name != SUBJECT))
    columns = [column for name in others for column in (f"{name} ms", f"over {name}")]
    table = Table(f"backends-{mode}", f"Backends side by side: {mode}", "Median ms, and how many times as fast flashtile is.",
                  ["case", "flashtile ms", "TFLOP/s", *columns])  # fmt: skip
    for case, rows in found.items():
        own = rows[SUBJECT]
        cells = [text(case.label()), ms(own["stats"]), number(own["tflops"])]
        for name in others:
            row = rows.get(name)
            ratio = row["stats"]["median"] / own["stats"]["median"] if row else None
            kind = "" if ratio is None else "good" if ratio > 1.02 else "bad" if ratio < 0.98 else ""
            cells += [ms(row["stats"]) if row else number(None), Cell(times(ratio).text, ratio, kind)]
        table.rows.append(cells)
    return table


def geomeans(documents) -> Table:
    table = Table("geomeans", "flashtile over each backend", "Geometric mean of the ratios of times over the cases of a run; "
                  "above 1 flashtile is faster.",
                  ["head dim", "mode", "over", "geomean", "least", "most", "cells", "verdicts"])  # fmt: skip
    for document in documents:
        for row in document.get("geomeans", []):
            if row["cells"] < 2:
                continue
            kind = "good" if row["geomean"] > 1.02 else "bad" if row["geomean"] < 0.98 else ""
            verdicts = ", ".join(f"{count} {word}" for word, count in row["verdicts"].items() if count)
            table.rows.append([text(row["headdim"]), text(row["mode"]), text(row["baseline"]),
                               Cell(f"{row['geomean']:.3f}x", row["geomean"], kind), times(row["min"]), times(row["max"]),
                               number(row["cells"]), text(verdicts)])  # fmt: skip
    return table


def _guide_rows(documents, configurations):
    """configuration -> {mode: {backend: row}} in the guide's order."""
    found = {}
    for (case, mode), rows in timed(documents).items():
        key = guide.key(case.config())
        if key in configurations:
            found.setdefault(key, {})[mode] = rows
    return {key: found[key] for key in configurations if key in found}


def forward(documents) -> Table:
    table = Table("forward", "Forward, small to large", "Standard attention (naive) and flashtile; memory is the peak, inputs "
                  "included. The guide's columns are its claims for an L20.",
                  ["B×S×H×D", "naive ms", "flashtile ms", "speed-up", "guide's", "memory reduction", "guide's "])  # fmt: skip
    for key, modes in _guide_rows(documents, guide.FORWARD).items():
        rows = modes.get("fwd", {})
        if not {"naive", SUBJECT} <= rows.keys():
            continue
        naive, flash = rows["naive"], rows[SUBJECT]
        ratio = naive["stats"]["median"] / flash["stats"]["median"]
        peaks = [row["peak_mem_bytes"] for row in (naive, flash)]
        claim = guide.FORWARD[key]
        table.rows.append([
            text("×".join(map(str, key))), ms(naive["stats"]), ms(flash["stats"]),
            Cell(f"{ratio:.2f}x", ratio, "good" if ratio > claim[2] else "bad"), times(claim[2]),
            times(peaks[0] / peaks[1] if None not in peaks else None), times(claim[3]),
        ])  # fmt: skip
    return table


def backward(documents) -> Table:
    table = Table("backward", "Forward and backward", "flashtile; the ratio is backward over forward, whose FLOPs are 5 to 2.",
                  ["B×S×H×D", "forward ms", "backward ms", "ratio", "guide's", "total ms", "guide's total ms"])  # fmt: skip
    for key, modes in _guide_rows(documents, guide.BACKWARD).items():
        rows = [modes.get(mode, {}).get(SUBJECT) for mode in ("fwd", "bwd")]
        if None in rows:
            continue
        first, second = (row["stats"]["median"] for row in rows)
        claim = guide.BACKWARD[key]
        table.rows.append([text("×".join(map(str, key))), *(ms(row["stats"]) for row in rows), times(second / first),
                           times(claim[2]), number(first + second), number(claim[3])])  # fmt: skip
    return table


def memory(documents) -> Table:
    about = "Measured, and by formula in brackets; the guide's reduction is a claim for unnamed sizes."
    columns = ["case", "mode", "naive MiB", "flashtile MiB", "reduction", "guide's"]
    table = Table("memory", "Memory beyond the inputs", about, columns)
    for document in documents:
        if document["settings"]["command"] != "memory":
            continue
        cases = {}
        for row in document["results"]:
            cases.setdefault((BenchCase.from_config(row["config"]), row["mode"]), {})[row["backend"]] = row
        for (case, mode), rows in cases.items():
            if len(rows) < 2:
                # Interrupted between the two
                continue
            pair = [rows["naive"], rows[SUBJECT]]
            used = [r["extra_mem_bytes"] or r["predicted_mem_bytes"] for r in pair]
            shown = [Cell(f"{mib(r['extra_mem_bytes']).text} ({mib(r['predicted_mem_bytes']).text})", r["predicted_mem_bytes"])
                     for r in pair]  # fmt: skip
            claim = guide.MEMORY.get(case.seqlen_k) if mode == "fwd" and guide.key(case.config()) else None
            table.rows.append([text(case.label()), text(mode), *shown, times(used[0] / used[1]), times(claim and claim[2])])
    return table


def bandwidth(documents) -> Table:
    table = Table("bandwidth", "Bandwidth", "Bytes of the tensors, each once, over time, against the datasheet. Low where a "
                  "case is bound by arithmetic, as all but short queries are; then look at percent of the roof.",
                  ["case", "pass", "theoretical GB/s", "achieved GB/s", "efficiency", "guide's", "bound by"])  # fmt: skip
    for document in documents:
        spec = next((r.get("spec_bandwidth") for r in document.get("roofs", {}).values() if r.get("spec_bandwidth")), None)
        if not spec:
            continue
        by_case = {}
        for (case, mode), rows in timed([document]).items():
            if SUBJECT in rows:
                by_case.setdefault(case, {})[mode] = rows[SUBJECT]
        for case, rows in by_case.items():
            if "fwd" not in rows or "bwd" not in rows or guide.key(case.config()) not in guide.FORWARD:
                continue
            totals = [(mode, rows[mode]["bytes"], rows[mode]["stats"]["median"]) for mode in ("fwd", "bwd")]
            totals.append(("fwd_bwd", sum(t[1] for t in totals), sum(t[2] for t in totals)))
            for mode, num_bytes, median in totals:
                speed = num_bytes / median * 1e3
                bound = rows[mode].get("roof_bound") if mode in rows else None
                table.rows.append([text(case.label()), text(mode), number(spec / 1e9), number(speed / 1e9), share(speed / spec),
                                   share(guide.BANDWIDTH[mode]), text(bound or "–")])  # fmt: skip
    return table


def scaling(document) -> Table:
    kind = document["scaling"]["kind"]
    about = {"batch": "Larger batches on one GPU: throughput over that of the first row; the guide calls this strong scaling.",
             "strong": "The same problem on more GPUs.", "weak": "The same work on each GPU."}[kind]  # fmt: skip
    claims = {"batch": guide.BATCH_SCALING, "weak": guide.WEAK_SCALING}.get(kind, {})
    table = Table(f"scaling-{kind}", f"Scaling: {kind}", about,
                  ["GPUs", "case", "ms", "speed-up", "efficiency", "guide's efficiency"])  # fmt: skip
    for row in document["scaling"]["rows"]:
        claim = claims.get(row["config"]["batch"] if kind == "batch" else row["gpus"])
        table.rows.append([number(row["gpus"]), text(BenchCase.from_config(row["config"]).label()), number(row["ms"]),
                           times(row["speedup"]), share(row["efficiency"]), share(claim and claim[1])])  # fmt: skip
    return table


def versions(document) -> Table:
    found = document["regress"]
    names = [f"{v['name']}{' @ ' + v['commit'][:8] if v['commit'] else ''}" for v in (found["baseline"], found["against"])]
    table = Table("regress", " against ".join(reversed(names)),
                  f"Change of time, {found['method']}; above 0 the first is slower than the second.",
                  ["case", "mode", "baseline ms", "against ms", "change", "95% interval", "verdict"])  # fmt: skip
    for row in found["rows"]:
        head = [text(BenchCase.from_config(row["config"]).label()), text(row["mode"])]
        if row.get("status", "ok") != "ok":
            table.rows.append([*head, *[number(None)] * 4, text(f"{row['status']}: {row['reason']}", "bad")])
            continue
        low, high = row["ci95"]
        table.rows.append([*head, number(row["baseline_ms"]), number(row["against_ms"]),
                           Cell(f"{row['change']:+.1%}", row["change"]), text(f"{low:+.1%} – {high:+.1%}"),
                           verdict(row["verdict"])])  # fmt: skip
    return table
