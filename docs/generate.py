"""Write the tables and plots of the docs from the recorded runs, and the public names from their docstrings; nobody types them.

    python docs/generate.py          rewrite what stands between the markers <!-- results:NAME:begin --> and :end
    python docs/generate.py --check  exit 1 if that would change anything

A marker's text is made by the function of its name in TABLES, from records under benchmarks/results/. A record that is not
there gives a line that says so. Plots are SVG files that carry a stamp of their record and of this file.
"""

import hashlib
import inspect
import json
import re
import sys
import textwrap
from functools import partial, wraps
from importlib import import_module
from math import exp, log
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import tables  # noqa: E402  (benchmarks/tables.py)

from flashtile.ladder.rungs import RUNGS  # noqa: E402

# Of records that name no other
GPU = tables.GPU
MARKER = re.compile(r"<!-- results:([\w-]+):begin -->\n.*?<!-- results:\1:end -->", re.S)


def load(name):
    """A record, or None."""
    path = tables.RESULTS / tables.under_results(name)
    return json.loads(path.read_text()) if path.exists() else None


def provenance(record, name) -> str:
    """GPU, versions, commit and file of a record."""
    env = record["env"]
    gpu = env["gpu"]["name"] if isinstance(env["gpu"], dict) else env["gpu"]
    commit = env["git"]["commit"]
    commit = f"commit {commit[:8]}" + (" with changes" if env["git"].get("dirty") else "") if commit else "no commit"
    return (f"{gpu}, torch {env['torch']}, Triton {env['triton']}, {commit}; "
            f"record: `benchmarks/results/{tables.under_results(name)}`.")  # fmt: skip


def markdown(header, rows) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def missing(name) -> str:
    return f"*Not recorded yet: {tables.under_results(name)}.*"


def of_record(name):
    """Makes a table of (record, name) one of no arguments; where the record is not there yet, it is a line that says so."""

    def decorate(table):
        @wraps(table)
        def made() -> str:
            record = load(name)
            return missing(name) if record is None else table(record, name)

        return made

    return decorate


# All tiers as a call chooses them; before that is recorded, the portable one
PAPER = "paper.json" if load("paper.json") else "paper-portable.json"


# --- tables: one function a marker -------------------------------------------------------------------------------------


def paper() -> str:
    """The grid of the papers: every record of it that exists."""
    return tables.section(tables.RECORDS["h200"])


def paper_rows(name):
    """(record, {(headdim, mode, causal, seqlen, backend): row})."""
    record = load(name)
    rows = {}
    for row in record["results"]:
        c = row["config"]
        rows[c["headdim"], row["mode"], c["causal"], c["seqlen_q"], row["backend"]] = row
    return record, rows


def by_seqlen() -> str:
    """Percent of the measured roof by sequence length: where the time goes that is not products."""
    name = PAPER
    record, rows = paper_rows(name)
    seqlens = sorted({key[3] for key in rows})
    roof = record["roofs"]["bfloat16"]["tflops"]
    lines = []
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            shares = [rows[head_dim, "fwd", causal, n, "flashtile"]["tflops"] / roof for n in seqlens]
            lines.append([head_dim, "causal" if causal else "none", *(f"{share:.0%}" for share in shares)])
    header = ["head dim", "mask", *(f"{n}" for n in seqlens)]
    caption = (f"flashtile, forward, bf16: share of the measured matrix product roof ({roof:.0f} TFLOP/s) by sequence "
               f"length, batch x seqlen = 16384, heads = 2048 / head dim. {provenance(record, name)}")  # fmt: skip
    return f"{caption}\n\n{markdown(header, lines)}"


@of_record("scale-batch.json")
def batch_scaling(record, name) -> str:
    """The table that `flashtile report` makes of `flashtile scale --kind batch`."""
    rows = [[f"b{row['config']['batch']} s{row['config']['seqlen_k']} h{row['config']['nheads']} d{row['config']['headdim']}",
             f"{row['ms'] * 1e3:.1f}", f"{row['speedup']:.2f}"] for row in record["scaling"]["rows"]]  # fmt: skip
    return (f"`flashtile scale --kind batch`, {record['scaling']['rows'][0]['mode']}. {provenance(record, name)}\n\n"
            + markdown(["case", "µs", "throughput over that of the first"], rows))  # fmt: skip


@of_record("decode.json")
def decode(record, name) -> str:
    """Decode steps: microseconds, and the bandwidth that the cache is read with."""
    return _decode(record, name, {"flashtile page 64": "pages of 64", "sdpa-cudnn": "SDPA cuDNN", "fa3": "FA3", "fa4": "FA4"})


@of_record("decode-fp8.json")
def decode_fp8(record, name) -> str:
    return _decode(record, name, {"flashtile page 64": "pages of 64", "flashtile bf16": "a cache of bf16", "fa3": "FA3"})


@of_record("prefill-fp8.json")
def prefill_fp8(record, name) -> str:
    """Prompts over fp8 with fp8 queries: microseconds, TFLOP/s and errors."""
    lines = []
    for row in record["rows"]:
        c, us, error, biased = row["config"], row["us"], row["error"], row["error_of_mean_1"]
        lines.append([f"{c['batch']} x {c['queries']} of {c['length']}", f"{c['nheads']}/{c['nheads_kv']}", c["headdim"],
                      "causal" if c["causal"] else "none", f"{us['flashtile']:.0f}", row["tflops"]["flashtile"],
                      f"{us['flashtile page 64']:.0f}", f"{us['flashtile bf16']:.0f}", f"{us['fa3']:.0f}",
                      *(f"{error[name]:.2%}" for name in ("flashtile", "fa3", "flashtile bf16")),
                      *(f"{biased[name]:.2%}" for name in ("flashtile", "fa3"))])  # fmt: skip
    header = ["queries and keys", "heads", "head dim", "mask", "flashtile, µs", "TFLOP/s", "pages of 64, µs", "all in bf16, µs",
              "FA3, µs", "error", "FA3's", "that of bf16", "error, values of mean 1", "FA3's there"]  # fmt: skip
    return f"Command: `{record['command']}`. {provenance(record, name)}\n\n{markdown(header, lines)}"


@of_record("mixed.json")
def mixed(record, name) -> str:
    """Chunks of prompts beside tokens of other sequences: microseconds."""
    lines = []
    for row in record["rows"]:
        c, us = row["config"], row["us"]
        keys = f"to {-c['keys']}" if c["keys"] < 0 else f"{c['keys']} each"
        columns = ("flashtile", "flashtile page 64", "two calls", "fa3")
        lines.append([f"{c['singles']} x 1, {keys}", f"{c['chunks']} x {c['tokens']}, {c['chunk_keys']}",
                      f"{c['nheads']}/{c['nheads_kv']}", c["headdim"],
                      *(f"{us[column]:.0f}" if column in us else "-" for column in columns)])  # fmt: skip
    header = ["decodes, keys", "chunks, keys", "heads", "head dim", "flashtile, µs", "pages of 64, µs",
              "two calls and their cat, µs", "FA3, µs"]  # fmt: skip
    caption = f"Lengths to a number are log-uniform. Command: `{record['command']}`. {provenance(record, name)}"
    return f"{caption}\n\n{markdown(header, lines)}"


def _decode(record, name, others) -> str:
    """others: names of columns, by implementation."""
    lines = []
    for row in record["rows"]:
        c, us = row["config"], row["us"]
        if "flashtile" not in us:
            continue
        speed = row["kv_bytes"] / us["flashtile"] / 1e6
        peers = [f"{us[peer]:.1f}" if peer in us else "-" for peer in others]
        lines.append([c["batch"], c["length"], f"{c['nheads']}/{c['nheads_kv']}", c.get("headdim", 128),
                      f"{row['kv_bytes'] / 1e6:.0f}",
                      f"{us['flashtile']:.1f}", f"{speed:.2f}", f"{row['of_copy']['flashtile']:.0%}", *peers])  # fmt: skip
    header = ["batch", "cache length", "heads", "head dim", "MB of keys and values", "flashtile, µs", "TB/s", "of a plain copy",
              *(f"{column}, µs" for column in others.values())]  # fmt: skip
    caption = (f"A plain copy: {record['copy_tbps']:.2f} TB/s, read and written; reading alone can be faster. "
               f"Command: `{record['command']}`. {provenance(record, name)}")  # fmt: skip
    return f"{caption}\n\n{markdown(header, lines)}"


@of_record("decode.json")
def page_cost(record, name) -> str:
    """Time with pages over that without, of the case that was measured with most page sizes."""
    row = max((row for row in record["rows"] if "flashtile" in row["us"]), key=lambda row: len(row["us"]))
    costs = [f"{us / row['us']['flashtile'] - 1:+.1%} with pages of {name.split()[-1]}" for name, us in row["us"].items()
             if name.startswith("flashtile page")]  # fmt: skip
    c = row["config"]
    return (f"- What pages cost a decode step here, batch {c['batch']}, {c['length']} tokens each: {', '.join(costs)} "
            "(the same record).")  # fmt: skip


@of_record("chunked-prefill.json")
def prefill_page_cost(record, name) -> str:
    """Time of chunks of prompts with pages over that without, by page size and head dim."""
    times = {}
    for row in record["results"]:
        if row["backend"] == "flashtile" and row["status"] == "ok":
            config = {key: str(value) for key, value in row["config"].items() if key != "page_size"}
            times.setdefault(tuple(config.items()), {})[row["config"]["page_size"]] = row["stats"]["median"]
    costs = {}
    for config, by_page in times.items():
        for size, ms in by_page.items():
            if size and 0 in by_page:
                costs.setdefault(size, {}).setdefault(int(dict(config)["headdim"]), []).append(ms / by_page[0] - 1)
    words = []
    for size, by_dim in sorted(costs.items()):
        spans = [f"{' to '.join(f'{x:+.0%}' for x in sorted({min(each), max(each)}))} at head dim {dim}"
                 for dim, each in sorted(by_dim.items())]  # fmt: skip
        words.append(f"pages of {size} {', '.join(spans)}")
    return (f"- What pages cost prefill on Hopper, over the time of a cache of rows: {'; '.join(words)}. "
            f"{provenance(record, name)}")  # fmt: skip


def mla() -> str:
    """MLA decode: the Hopper kernel, with FlashMLA in the same run, and the portable one."""
    return "\n\n".join(of_record(name)(mla_table)() for name in ("mla-hopper.json", "mla-portable.json"))


def mla_table(record, name) -> str:
    beside = any("flash_mla_ms" in row for row in record["rows"])
    lines = []
    for row in record["rows"]:
        us = median(row["ms"]) * 1e3
        cache = f"{row['topk']} of {row['cache_seqlen']}{', fp8' if row['fp8'] else ''}" if row["topk"] else row["cache_seqlen"]
        line = [row["batch"], row["seqlen_q"], cache, row["heads"], f"{us:.0f}", f"{row['tflops']:.0f}",
                f"{row['gbytes_per_s'] / 1e3:.2f}", row["limit"], f"{row['roof']:.0%}"]  # fmt: skip
        if beside:
            peer = median(row["flash_mla_ms"]) * 1e3 if "flash_mla_ms" in row else None
            line += [f"{peer:.0f}", f"{peer / us:.2f}"] if peer else ["-", "-"]
        lines.append(line)
    header = ["batch", "query tokens", "tokens", "heads", "µs", "TFLOP/s", "TB/s", "bound by", "of that roof"]
    header += ["FlashMLA µs", "over FlashMLA"] if beside else []
    where = f"{record['rows'][0]['tier']} tier{', beside FlashMLA' if beside else ''}"
    caption = (f"MLA decode, {where}, bf16 queries; tokens: in the cache, or the top-k of them. "
               f"Command: `{record['command']}`. {provenance(record, name)}")  # fmt: skip
    return f"{caption}\n\n{markdown(header, lines)}"


@of_record("host-overhead.json")
def host_overhead(record, name) -> str:
    """Host time of one eager call, flashtile beside its peers."""
    host = record["host_us"]
    calls = ("forward", "forward, recorded", "backward", "decode")
    backends = ("flashtile", "flashtile hopper", "sdpa-flash", "sdpa-cudnn", "fa3", "fa4")
    lines = [[backend, *(f"{host[f'{backend} {call}']:.0f}" if f"{backend} {call}" in host else "-" for call in calls)]
             for backend in backends if any(f"{backend} {call}" in host for call in calls)]  # fmt: skip
    lines.append(["the launches of flashtile alone", f"{host['flashtile forward, bare']:.0f}", "-",
                  f"{host['flashtile backward, bare']:.0f}", f"{host['flashtile decode, bare']:.0f}"])  # fmt: skip
    lines.append(["torch.autograd.Function of no work", f"{host['autograd forward']:.0f}",
                  f"{host['autograd forward, recorded']:.0f}", f"{host['autograd backward']:.0f}", "-"])  # fmt: skip
    caption = (f"Microseconds of the host for one eager call; recorded: a gradient is asked for. flashtile: the portable tier. "
               f"Command: `{record['command']}`. {provenance(record, name)}")  # fmt: skip
    return f"{caption}\n\n{markdown(['', *calls], lines)}"


@of_record("ratios.json")
def ratios(record, name) -> str:
    """What features cost, over a call without and over the work."""
    lines = []
    for row in record["rows"]:
        times = [f"{row['us'][name]:.0f}" if name in row["us"] else "-" for name in ("flashtile", "plain", "fa3")]
        mode = {"fwd": "forward", "bwd": "backward"}[row["mode"]]
        lines.append([row["feature"], mode, *times, f"{row['work']:.3f}", f"{row['cost']:.2f}"])
    header = ["feature", "pass", "µs", "without, µs", "FA3, µs", "work over the work without", "time over work"]
    caption = (f"Head dim 128, 16 heads, causal, bf16. Time over work: 1.00 is a feature that costs nothing beside its work. "
               f"Command: `{record['command']}`. {provenance(record, name)}")  # fmt: skip
    return f"{caption}\n\n{markdown(header, lines)}"


@of_record("peer-tests.json")
def peer_tests(record, name) -> str:
    """How many cases of the peers' own tests ran, and passed."""
    lines = []
    for run in record["runs"]:
        count = {k: sum(outcomes.get(k, 0) for outcomes in run["outcomes"].values()) for k in ("passed", "skipped", "failed")}
        note = f"; {run['note']}" if run["note"] else ""
        tests, command = f"{run['suite']}, {run['peer_commit']}", f"`{run['command']}`{note}"
        lines.append([tests, command, sum(count.values()), *count.values()])
    header = ["tests", "command", "cases", "passed", "skipped by the test itself", "failed"]
    return f"{record['what']} Record: `benchmarks/results/{GPU}/{name}`.\n\n{markdown(header, lines)}"


@of_record("forward-counters.json")
def forward_counters(record, name) -> str:
    """Counters of Nsight Compute for the Hopper kernel beside FlashAttention-3's."""
    lines = []
    for row in record["rows"]:
        c = row["counters"]
        time = c["gpu__time_duration.sum [ns]"]
        mask = "causal" if row["causal"] else "full"
        lines.append([row["backend"], row["head_dim"], row["seqlen"], mask, f"{time / 1e3:.0f}",
                      f"{c['sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active [%]']:.0f}%",
                      f"{c['l1tex__m_xbar2l1tex_read_bytes.sum [byte]'] / time / 1e3:.1f}",
                      f"{c['lts__t_sector_hit_rate.pct [%]']:.0f}%",
                      f"{c['smsp__inst_executed.sum [inst]'] / 1e6:.0f}"])  # fmt: skip
    header = ["", "head dim", "tokens", "mask", "µs", "tensor cores busy", "TB/s from L2", "L2 hits",
              "million warp instructions"]  # fmt: skip
    caption = f"{record['what']}. {record['gpu']}, commit {record['commit']}; record: `benchmarks/results/{GPU}/{name}`."
    return f"{caption}\n\n{markdown(header, lines)}"


@of_record("attention-counters.json")
def attention_counters(record, name) -> str:
    """What each head dim's main kernel keeps busy, forward and backward."""
    s, lines = record["settings"], []
    busy = ("tensor", "issue", "exponentials", "fma", "shared")
    for row in record["rows"]:
        waits = max((name for name in row if name.startswith("stalled_")), key=row.get)
        lines.append([row["backend"], row["mode"], row["headdim"], "causal" if row["causal"] else "full",
                      f"{row['time_ns'] / 1e3:.0f}", *(f"{row[what + '_percent']:.0f}%" for what in busy),
                      f"{waits.removeprefix('stalled_')} {row[waits]:.1f}"])  # fmt: skip
    caption = (f"Nsight Compute, {s['dtype']}, batch {s['batch']}, {s['seqlen']} tokens, 2048 / head dim heads; of the cycles "
               f"in which an SM is active. Warps that wait: at each issued instruction, the most frequent reason. "
               f"Command: `{s['command']}`. {provenance(record, name)}")  # fmt: skip
    header = ["", "pass", "head dim", "mask", "µs", "tensor cores", "issue slots", "exponentials", "fp32 pipe", "shared memory",
              "warps that wait"]  # fmt: skip
    return f"{caption}\n\n{markdown(header, lines)}"


@of_record("ladder-counters.json")
def ladder_profile(record, name) -> str:
    """Counters of Nsight Compute, one row a rung and kernel."""
    s = record["settings"]
    caption = (f"Nsight Compute, batch {s['batch']}, {s['seqlen']} tokens, {s['nheads']} heads of {s['headdim']}, no mask; "
               f"sums over the launches of one call. Command: `{s['command']}`. {provenance(record, name)}")  # fmt: skip
    lines = []
    for row in record["rows"]:
        per_wavefront = row["bank_conflicts"] / row["shared_wavefronts"] if row["shared_wavefronts"] else 0.0
        lines.append([row["rung"], row["kernel"], f"{row['time_us']:.0f}", f"{row['tensor_core_percent']:.0f}%",
                      f"{row['fp32_percent']:.0f}%", f"{row['warps_active_percent']:.0f}%", f"{row['registers']:.0f}",
                      f"{row['dram_bytes'] / 1e6:.0f}", f"{row['l2_bytes'] / 1e6:.0f}", f"{per_wavefront:.0%}"])  # fmt: skip
    header = ["rung", "kernel", "µs", "tensor cores busy", "fp32 busy", "warps active", "registers", "DRAM MB", "L2 MB",
              "conflicts in shared memory's wavefronts"]  # fmt: skip
    return f"{caption}\n\n{markdown(header, lines)}"


def causal_cost() -> str:
    """Time of a causal call over that of the full one, at the ends of the grid."""
    name = PAPER
    record, rows = paper_rows(name)
    seqlens = sorted({key[3] for key in rows})
    spans = []
    for seqlen in (seqlens[0], seqlens[-1]):
        times = [[rows[dim, "fwd", causal, seqlen, "flashtile"]["stats"]["median"] for causal in (True, False)]
                 for dim in (64, 128, 256)]  # fmt: skip
        ratios = [causal / full for causal, full in times]
        spans.append(f"{min(ratios):.2f} to {max(ratios):.2f} at {seqlen} tokens")
    return f"- Causal halves the FLOPs. The time follows late: {', '.join(spans)} (of the full call; the same record)."


def tile_times():
    """(record, {(head dim, config): {(seqlen, causal): time over the best tile of the same column}})."""
    record = load("portable-tiles.json")
    cells, best = {}, {}
    for row in record["rows"]:
        if row["kernel"] == "forward":
            column, dim, ms = (row["seqlen"], row["causal"]), row["head_dim"], row["ms"]
            cells.setdefault((dim, tuple(row["config"])), {})[column] = ms
            best[dim, column] = min(ms, best.get((dim, column), ms))
    return record, {(dim, config): {column: ms / best[dim, column] for column, ms in by_column.items()}
                    for (dim, config), by_column in cells.items()}  # fmt: skip


def geomean(values) -> float:
    values = list(values)
    return exp(sum(map(log, values)) / len(values))


def config_words(config) -> str:
    tile_m, tile_n, warps, stages = config
    return f"{tile_m} x {tile_n} by {warps} warps, {stages} stage{'s' * (stages > 1)}"


def did_not_help() -> str:
    """Pairs of tiles, the worse one first, and what it costs."""
    record, ratios = tile_times()
    tried = [
        (64, (128, 128, 8, 3), (64, 64, 4, 3), "a tile twice as wide on both sides"),
        (64, (64, 64, 4, 4), (64, 64, 4, 3), "a fourth stage"),
        (128, (64, 32, 4, 4), (64, 64, 4, 3), "key tiles of 32, for less shared memory"),
        (256, (128, 64, 8, 1), (128, 64, 8, 2), "one stage, so that nothing is loaded ahead"),
        (256, (64, 32, 4, 3), (128, 64, 8, 2), "small tiles, for a second block"),
    ]
    lines = []
    for dim, worse, better, words in tried:
        cost = [ratios[dim, worse][column] / ratios[dim, better][column] for column in ratios[dim, worse]]
        lines.append(f"- head dim {dim}, {config_words(worse)} ({words}): {geomean(cost):.2f} times the time of "
                     f"{config_words(better)} (from {min(cost):.2f} to {max(cost):.2f})")  # fmt: skip
    return "\n".join(lines)


def forward_tiles() -> str:
    """Time of each tile over the best of its column."""
    name = "portable-tiles.json"
    record, cells = tile_times()
    columns = sorted({column for by_column in cells.values() for column in by_column})
    lines = []
    for (dim, config), by_column in sorted(cells.items(), key=lambda item: (item[0][0], geomean(item[1].values()))):
        tile_m, tile_n, warps, stages = config
        ratios = (f"{by_column[column]:.2f}" for column in columns)
        lines.append([dim, f"{tile_m} x {tile_n}", warps, stages, *ratios, f"**{geomean(by_column.values()):.2f}**"])
    header = ["head dim", "tile", "warps", "stages", *(f"{n}{' causal' if causal else ''}" for n, causal in columns), "mean"]
    caption = (f"Portable forward kernel: time over the best tile of the same head dim, by sequence length (16384 tokens, "
               f"bf16). Command: `{record['command']}`, a script of that commit; `flashtile tune` took its place. "
               f"{provenance(record, name)}")  # fmt: skip
    return f"{caption}\n\n{markdown(header, lines)}"


def run_default() -> str:
    """What `flashtile run` says on this GPU."""
    name = "run-default.json"
    record = load(name)
    lines = []
    for row in record["results"]:
        if row["status"] == "ok":
            s = row["stats"]
            lines.append([row["mode"], f"{s['median'] * 1e3:.1f}", f"{s['ci95'][0] * 1e3:.1f} to {s['ci95'][1] * 1e3:.1f}",
                          f"{row['tflops']:.0f}", f"{row['roof_fraction']:.0%}", f"{row['host_overhead_us']:.0f}",
                          row["kernel"]])  # fmt: skip
    header = ["mode", "time, µs", "95% interval", "TFLOP/s", "of the roof", "host, µs", "kernel"]
    about = "`flashtile run` without flags; host: what a call costs the CPU."
    return f"{about} {provenance(record, name)}\n\n{markdown(header, lines)}"


def rungs() -> str:
    """The table of flashtile.ladder."""
    return markdown(["rung", "", "what it adds", "file"], [[r.number, r.name, r.idea, f"`{r.file}`"] for r in RUNGS.values()])


def ladder() -> str:
    """Every rung at one length, and those in half precision at several."""
    names = [name for name in ("ladder.json", "ladder-lengths.json") if load(name)]
    return "\n\n".join(map(ladder_tables, names)) or missing("ladder.json")


def ladder_tables(name) -> str:
    """What each rung costs and gains, forward without a mask and backward, at each head dim of a record."""
    record = load(name)
    # (mode, headdim, seqlen) -> backend -> row; rungs 1 to 4 ran in fp32
    cells, naive = {}, {}
    for row in record["results"]:
        c = row["config"]
        if row["status"] == "ok" and not c["causal"] and (c["dtype"] != "fp32" or row["backend"].startswith("rung-")):
            cells.setdefault((row["mode"], c["headdim"], c["seqlen_q"]), {})[row["backend"]] = row
        if row["status"] == "ok" and not c["causal"] and row["backend"] == "naive":
            naive[row["mode"], c["headdim"], c["seqlen_q"], c["dtype"]] = row
    parts = [f"The ladder, no mask. {provenance(record, name)}"]
    for mode, head_dim in sorted({key[:2] for key in cells}, key=lambda key: (key[0] != "fwd", key[1])):
        seqlens = sorted(key[2] for key in cells if key[:2] == (mode, head_dim))
        longest = cells[mode, head_dim, seqlens[-1]]
        lines, before = [], None
        for rung in RUNGS.values():
            row = longest.get(f"rung-{rung.number}")
            if row is None:
                continue
            rates = [cells[mode, head_dim, n].get(row["backend"]) for n in seqlens]
            flash = longest.get("sdpa-flash")
            lines.append([rung.number, f"{rung.name}: {rung.idea}", row["config"]["dtype"],
                          *(f"{r['tflops']:.3g}" if r else "-" for r in rates), f"{row['roof_fraction']:.1%}",
                          _times(before, row), _times(naive.get((mode, head_dim, seqlens[-1], row["config"]["dtype"])), row),
                          _times(flash, row)])  # fmt: skip
            before = row
        header = ["rung", "what it adds", "dtype", *(f"{n} tokens" for n in seqlens), "of the roof", "over the rung before",
                  "over PyTorch's naive", "over SDPA flash"]  # fmt: skip
        words = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward and backward"}[mode]
        about = (f"TFLOP/s {words}, head dim {head_dim}; the last columns at {seqlens[-1]} tokens. Naive has the dtype of the "
                 "rung, SDPA flash fp16.")  # fmt: skip
        parts.append(f"{about}\n\n{markdown(header, lines)}")
    return "\n\n".join(parts)


def _times(slow, fast) -> str:
    return f"{slow['stats']['median'] / fast['stats']['median']:.2f}" if slow else "-"


def roofline() -> str:
    """A plot and where it comes from."""
    return ("![Roofline of an H200](../plots/roofline.svg)\n\n"
            "Measured roof, and flashtile under it: forward, bf16, head dim 128, 512 to 16384 tokens. The grey "
            f"band is where an implementation with scores in memory has to stay. {provenance(load(PAPER), PAPER)}")  # fmt: skip


def forward_plot() -> str:
    """A plot and where it comes from."""
    return ("![TFLOP/s over sequence length](../plots/forward.svg)\n\n"
            f"batch x seqlen = 16384, 16 heads. {provenance(load(PAPER), PAPER)}")  # fmt: skip


# --- public names -------------------------------------------------------------------------------------------------------


def names_of(module) -> str:
    """The public functions and classes of a module: a heading each, then signature and docstring as the source has them."""
    found = import_module(module)
    values = [getattr(found, name) for name in found.__all__]
    entries = [_entry(module, value) for value in values if inspect.isclass(value) or inspect.isfunction(value)]
    return "\n\n".join([textwrap.indent(found.__doc__.strip(), "    "), *entries])


def _entry(module, value) -> str:
    name = value.__name__
    is_class = inspect.isclass(value)
    head = name if is_class and issubclass(value, Exception) else f"{name}{_signature(value, is_class)}"
    return f"### {module}.{name}\n\n" + textwrap.indent(f"{head}\n\n{inspect.getdoc(value)}", "    ")


def _signature(value, is_class) -> str:
    signature = inspect.signature(value)
    text = str(signature.replace(return_annotation=signature.empty) if is_class else signature)
    for parameter in signature.parameters.values():
        # So that a line ends between two of them
        text = text.replace(str(parameter), str(parameter).replace(" ", "\0"))
    text = textwrap.fill(text, 112, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    text = re.sub(r"\b(torch|flashtile(\.\w+)+)\.(?=[A-Z])", "", text.replace("\0", " "))
    return re.sub(r"<function .*? at .*?>", "...", text)


API = ("flashtile", "flashtile.mla", "flashtile.compat", "flashtile.compat.flash_attn_interface", "flashtile.compat.flash_mla",
       "flashtile.integrations.transformers", "flashtile.integrations.sdpa", "flashtile.bench")  # fmt: skip

TABLES = {
    **{f"api-{module.replace('.', '-')}": partial(names_of, module) for module in API},
    "roofline": roofline,
    "forward-plot": forward_plot,
    "rungs": rungs,
    "ladder": ladder,
    "ladder-profile": ladder_profile,
    "forward-counters": forward_counters,
    "host-overhead": host_overhead,
    "ratios": ratios,
    "peer-tests": peer_tests,
    "attention-counters": attention_counters,
    "decode": decode,
    "decode-fp8": decode_fp8,
    "prefill-fp8": prefill_fp8,
    "mixed": mixed,
    "page-cost": page_cost,
    "prefill-page-cost": prefill_page_cost,
    "mla": mla,
    "batch-scaling": batch_scaling,
    "paper": paper,
    "by-seqlen": by_seqlen,
    "causal-cost": causal_cost,
    "forward-tiles": forward_tiles,
    "did-not-help": did_not_help,
    "run-default": run_default,
    **{f"{table.__name__.replace('_', '-')}-h100": of_record(f"nvidia-h100/{name}")(table.__wrapped__)
       for table, name in ((decode, "decode.json"), (ratios, "ratios.json"), (host_overhead, "host-overhead.json"))},
    "mla-h100": of_record("nvidia-h100/mla-hopper.json")(mla_table),
}  # fmt: skip


# --- plots -------------------------------------------------------------------------------------------------------------


def stamp(*names) -> str:
    """What a plot was made from: a hash of its records and of this file."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in names:
        digest.update((tables.RESULTS / GPU / name).read_bytes())
    return digest.hexdigest()[:16]


def plot_forward(path) -> None:
    """TFLOP/s over sequence length, head dim 128, with the roof; of all tiers, else of the portable one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "flashtile", "svg.fonttype": "none", "font.size": 9})
    (name,) = PLOTS[path.name].records
    record, rows = paper_rows(name)
    seqlens = sorted({key[3] for key in rows})
    roof = record["roofs"]["bfloat16"]["tflops"]
    names = {"flashtile": "flashtile, portable tier" if "portable" in name else "flashtile"}
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    for axis, causal in zip(axes, (False, True)):
        for backend in record["settings"]["backends"]:
            axis.plot(seqlens, [rows[128, "fwd", causal, n, backend]["tflops"] for n in seqlens], "o-", ms=3,
                      label=names.get(backend, backend))  # fmt: skip
        axis.axhline(roof, color="grey", lw=1, ls="--")
        axis.annotate("measured matrix product", (seqlens[0], roof), va="bottom", color="grey", fontsize=8)
        axis.set(xscale="log", xlabel="sequence length", title="causal" if causal else "no mask", ylim=(0, 1.12 * roof))
        axis.set_xticks(seqlens, [f"{n // 1024}k" if n >= 1024 else str(n) for n in seqlens], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("TFLOP/s, forward, head dim 128, bf16")
    axes[1].legend(fontsize=8, loc="lower right", ncol=2)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Description": f"stamp {PLOTS[path.name].stamp()}"})
    pyplot.close(figure)


def plot_roofline(path) -> None:
    """Forward calls of head dim 128 under the measured roof, and the intensity of attention with scores in memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "flashtile", "svg.fonttype": "none", "font.size": 9})
    (name,) = PLOTS[path.name].records
    record, rows = paper_rows(name)
    roof = record["roofs"]["bfloat16"]
    intensities = [4, roof["tflops"] * 1e12 / roof["bandwidth"], 2**14]
    figure, axis = pyplot.subplots(figsize=(6, 3.2))
    axis.plot(intensities, [min(roof["tflops"], x * roof["bandwidth"] / 1e12) for x in intensities], color="grey")
    axis.axvspan(48, 64, color="grey", alpha=0.25, lw=0)
    axis.text(46, 14, "scores in memory,\n512 tokens and more", ha="right", fontsize=8, color="dimgrey")
    for causal, marker in ((False, "o"), (True, "s")):
        calls = [rows[key] for key in sorted(rows) if key[:3] == (128, "fwd", causal) and key[4] == "flashtile"]
        axis.plot([row["flops"] / row["bytes"] for row in calls], [row["tflops"] for row in calls], marker, ms=4,
                  label="flashtile, causal" if causal else "flashtile, no mask")  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="FLOP / byte of q, k, v, out, lse", ylabel="TFLOP/s", xlim=(4, 2**14),
             ylim=(10, 1500))  # fmt: skip
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Description": f"stamp {PLOTS[path.name].stamp()}"})
    pyplot.close(figure)


class Plot:
    def __init__(self, draw, *records):
        self.draw, self.records = draw, records

    def stamp(self):
        return stamp(*self.records)


PLOTS = {"forward.svg": Plot(plot_forward, PAPER), "roofline.svg": Plot(plot_roofline, PAPER)}


def updated(text: str) -> str:
    """A page with the text between its markers made anew."""

    def table(match):
        name = match.group(1)
        return f"<!-- results:{name}:begin -->\n{TABLES[name]()}\n<!-- results:{name}:end -->"

    return MARKER.sub(table, text)


def main() -> int:
    check = "--check" in sys.argv
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text()
        after = updated(before)
        if before != after:
            stale.append(page.name)
            if not check:
                page.write_text(after)
    for name, plot in PLOTS.items():
        path = DOCS / "plots" / name
        if not path.exists() or plot.stamp() not in path.read_text():
            stale.append(name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                plot.draw(path)
    if check and stale:
        print(f"{', '.join(stale)}: not what the records say; run python docs/generate.py")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
