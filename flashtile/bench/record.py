"""What is written down: the environment, the JSON document `flashtile-bench/1`, CSV and Markdown tables.

The document: schema, env, settings, roofs, results (one a case, backend and mode, raw samples included), comparisons,
interrupted. Times are in ms, memory in bytes. It holds no host name, user or path.
"""

import csv
import errno
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from textwrap import shorten

from flashtile import settings
from flashtile.bench.cases import DECODE, DTYPES, MODES
from flashtile.errors import explain

SCHEMA = "flashtile-bench/1"
STATUSES = ("ok", "mismatch", "unavailable", "refused", "skipped", "oom", "error")
CONFIG_KEYS = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_kv", "headdim", "headdim_v", "causal", "dtype", "window",
               "softcap", "dropout", "varlen", "page_size", "alibi")  # fmt: skip
CSV_COLUMNS = (*CONFIG_KEYS, "backend", "mode", "status", "median_ms", "ci95_low_ms", "ci95_high_ms", "min_ms", "avg_ms",
               "max_ms", "n", "outliers", "tflops", "roof_percent", "gbytes_per_s", "extra_mem_mib", "predicted_mem_mib",
               "kernel_ms", "event_ms", "wall_ms", "host_overhead_us", "compile_ms", "max_abs_error",
               "torch_same_dtype_error", "reason", "repro")  # fmt: skip
VERSIONS_COLUMNS = (*CONFIG_KEYS, "mode", "status", "baseline_ms", "against_ms", "change_percent", "ci95_low_percent",
                    "ci95_high_percent", "verdict", "reason")  # fmt: skip
FLOPS_CONVENTION = "TFLOP/s count matmul FLOPs of visible (query, key) pairs: 2 products forward, 5 backward"
PEER_PACKAGES = ("flash-attn", "fa3-fwd", "flash-attn-4", "xformers", "flashinfer-python", "flash-mla")
_RECORDED_VARIABLES = ("FLASHTILE_", "CUDA_", "TRITON_", "PYTORCH_", "TORCH_", "NVIDIA_TF32_OVERRIDE", "CUBLAS_",
                       "OMP_NUM_THREADS", "MKL_NUM_THREADS")  # fmt: skip


def environment(device, commit: str | None = None) -> dict:
    """The environment of a run on a torch.device. commit: a hash, with `-dirty` behind it, where the files have no .git."""
    import torch

    env = {
        "gpu": _gpu(device),
        "driver": _driver(device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flashtile": _flashtile_version(),
        "peers": {name: v for name in PEER_PACKAGES if (v := _version(name))},
        "git": _git(commit),
        "cpu": {"name": _cpu_name(), "threads": torch.get_num_threads()},
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "env_vars": _variables(),
    }
    return env


def describe(env: dict) -> str:
    """One line for a person."""
    where = env["gpu"]["name"] if env["gpu"] else f"CPU ({env['cpu']['name']}, {env['cpu']['threads']} threads)"
    git = env["git"]
    commit = f" @ {git['commit'][:8]}{'+' if git['dirty'] else ''}" if git else ""
    triton = f", triton {env['triton']}" if env["triton"] else ""
    return f"{where}, torch {env['torch']}{triton}, flashtile {env['flashtile']}{commit}"


def _gpu(device):
    import torch

    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "cc": f"{properties.major}.{properties.minor}",
        "sm": properties.multi_processor_count,
        "l2_mb": properties.L2_cache_size / (1 << 20),
        "mem_gib": round(properties.total_memory / (1 << 30), 1),
    }


def _driver(device):
    from flashtile.bench.telemetry import open_gpu

    gpu = open_gpu(device)
    if gpu is None:
        return None
    try:
        version = gpu[0].nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version
    except Exception:  # not readable here
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _flashtile_version() -> str:
    import flashtile

    return flashtile.__version__


def git(folder, *arguments) -> str:
    """What git says of a checkout."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def _git(commit: str | None) -> dict | None:
    """Commit and dirtiness of the repository that flashtile lies in; None in an installed package."""
    if commit:
        return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    try:
        # What a run writes beside the package is no change
        changed = git(root, "status", "--porcelain", "--untracked-files=no") or git(root, "status", "--porcelain", "flashtile")
        return {"commit": git(root, "rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _variables() -> dict[str, str]:
    """Environment variables that change how things run. Paths may name a user: they are left out."""
    values = settings.recorded(_RECORDED_VARIABLES)
    return {name: "<path>" if "/" in value or "\\" in value else value for name, value in values.items()}


# --- documents -----------------------------------------------------------------------------------------------------------


@lru_cache
def schema() -> dict:
    """The JSON Schema (2020-12) of a document, as it lies in the package beside this file."""
    return json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))


def problems(document) -> list[str]:
    """What is wrong with a document, as far as its readers here rely on it; empty if nothing is."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return [f"expected an object with schema {SCHEMA!r}"]
    from jsonschema import Draft202012Validator

    # Messages hold what is wrong, which may be long
    wrong = [shorten(f"{error.json_path.removeprefix('$').lstrip('.') or 'the document'}: {error.message}", 200)
             for error in Draft202012Validator(schema()).iter_errors(document)]  # fmt: skip
    if wrong:
        return wrong
    for i, row in enumerate(document["results"]):
        if row["mode"] not in (*MODES, DECODE):
            wrong.append(f"results[{i}].mode: expected one of {', '.join(MODES)}, {DECODE}, got {row['mode']!r}")
        if row["config"]["dtype"] not in DTYPES:
            wrong.append(f"results[{i}].config.dtype: expected one of {', '.join(DTYPES)}, got {row['config']['dtype']!r}")
        if row["status"] == "ok" and row.get("timer") and not row["samples_ms"]:
            wrong.append(f"results[{i}].samples_ms: empty")
    return wrong


def load(path) -> dict:
    """A document from a file.

    Raises:
        UsageError: not a document of this schema; says what is wrong.
    """
    from flashtile.bench.cases import UsageError

    try:
        text = Path(path).read_text(encoding="utf-8")
        document = from_lines(text) if str(path).endswith(".jsonl") else json.loads(text)
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        raise UsageError(explain(path, "a record, as --json writes it", got)) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(explain(path, "a record, as --json writes it", f"text that is none: {error}")) from None
    wrong = problems(document)
    if wrong:
        raise UsageError(f"{path}: not a {SCHEMA} document: {'; '.join(wrong[:3])}.")
    return document


def to_text(document: dict) -> str:
    """JSON with one line a result, so that it can be read and diffed."""
    document = dict(document)
    lists = {key: document.pop(key) for key in ("results", "comparisons")}
    lines = json.dumps(document, indent=1, allow_nan=False)[:-2]
    for key, rows in lists.items():
        body = ",\n  ".join(json.dumps(_finite(row), allow_nan=False) for row in rows)
        lines += f',\n "{key}": [\n  {body}\n ]' if rows else f',\n "{key}": []'
    return lines + "\n}\n"


def head_line(document: dict) -> str:
    """The first line of a .jsonl file: the document without rows."""
    rows = ("results", "comparisons", "geomeans")
    return json.dumps({key: value for key, value in document.items() if key not in rows}) + "\n"


def cell_line(results, comparisons, roofs) -> str:
    """A further line of a .jsonl file: the rows of one case and mode, and the roofs as known by then."""
    return json.dumps(_finite({"results": results, "comparisons": comparisons, "roofs": roofs}), allow_nan=False) + "\n"


def from_lines(text: str) -> dict:
    """The document of a .jsonl file; a last line that was cut off is left out."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    if not lines:
        raise ValueError("no whole line")
    document = json.loads(lines[0])
    if not isinstance(document, dict):
        raise ValueError("its first line is not an object")
    document = {"roofs": {}} | document | {"results": [], "comparisons": []}
    for number, line in enumerate(lines[1:], 2):
        cell = json.loads(line)
        if not isinstance(cell, dict) or not {"results", "comparisons", "roofs"} <= cell.keys():
            raise ValueError(f"line {number} has no results, comparisons and roofs")
        document["results"] += cell["results"]
        document["comparisons"] += cell["comparisons"]
        document["roofs"] |= cell["roofs"]
    return document


def _finite(value):
    """JSON has no nan and no infinity: they become strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def is_stream(path: str) -> bool:
    """Whether what is written there is read at once: stdout, a pipe or a device."""
    target = Path(path)
    return path == "-" or (target.exists() and not target.is_file() and not target.is_dir())


def write(path: str, text: str) -> None:
    """Write a file whole or not at all; `-` is stdout."""
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "expected a file, got a folder", str(target))
    if is_stream(path):
        # A pipe or a device: nothing may take its place
        target.write_text(text, encoding="utf-8")
        return
    # What a link points at, not the link
    target = target.resolve()
    options = {"dir": target.parent, "prefix": f".{target.name}.", "delete": False, "encoding": "utf-8"}
    try:
        with tempfile.NamedTemporaryFile("w", **options) as handle:
            handle.write(text)
        os.chmod(handle.name, 0o644)
        os.replace(handle.name, target)
    except OSError as error:
        # It has the name of the temporary file.
        raise OSError(error.errno, error.strerror, path) from None


def csv_row(row: dict) -> dict:
    """A result of a document as one flat row with units in its names."""
    stats = row["stats"] or {}
    accuracy = row["accuracy"] or {}
    return _flat_config(row) | {
        "backend": row["backend"], "mode": row["mode"], "status": row["status"],
        "median_ms": stats.get("median"), "min_ms": stats.get("min"), "avg_ms": stats.get("mean"), "max_ms": stats.get("max"),
        "ci95_low_ms": stats.get("ci95", [None])[0], "ci95_high_ms": stats.get("ci95", [None])[-1],
        "n": stats.get("n"), "outliers": stats.get("outliers"), "tflops": row["tflops"],
        "roof_percent": None if row.get("roof_fraction") is None else 100 * row["roof_fraction"],
        "gbytes_per_s": row["bytes"] / stats["median"] / 1e6 if stats else None,
        "extra_mem_mib": None if row["extra_mem_bytes"] is None else row["extra_mem_bytes"] / (1 << 20),
        "predicted_mem_mib": None if row.get("predicted_mem_bytes") is None else row["predicted_mem_bytes"] / (1 << 20),
        **{f"{timer}_ms": row.get("times_ms", {}).get(timer) for timer in ("kernel", "event", "wall")},
        "host_overhead_us": row.get("host_overhead_us"), "compile_ms": row["compile_ms"],
        "max_abs_error": accuracy.get("max_abs"), "torch_same_dtype_error": accuracy.get("torch_same_dtype"),
        "reason": row["reason"], "repro": row["repro"],
    }  # fmt: skip


def to_csv(document: dict) -> str:
    """One row a case, backend and mode; of a comparison of versions one row a case and mode."""
    out, versions = io.StringIO(), document.get("regress")
    writer = csv.DictWriter(out, VERSIONS_COLUMNS if versions else CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_versions_row, versions["rows"]) if versions else map(csv_row, document["results"]))
    return out.getvalue()


def _versions_row(row: dict) -> dict:
    """A row of the part "regress" of a document as a flat one."""
    low, high = row["ci95"] or (None, None)
    same = ("mode", "status", "baseline_ms", "against_ms", "verdict", "reason")
    return _flat_config(row) | {key: row.get(key) for key in same} | {
        "change_percent": None if row["change"] is None else 100 * row["change"],
        "ci95_low_percent": None if low is None else 100 * low, "ci95_high_percent": None if high is None else 100 * high,
    }  # fmt: skip


def _flat_config(row: dict) -> dict:
    window = ",".join("-1" if side is None else str(side) for side in row["config"]["window"])
    return {key: row["config"].get(key) for key in CONFIG_KEYS} | {"window": window}


def to_markdown(document: dict) -> str:
    """A table of the results, or of a comparison of versions, under a line that says where they come from."""
    if "regress" in document:
        from flashtile.bench import tables

        table = tables.versions(document)
        return f"{describe(document['env'])}. {table.title}. {table.caption}\n\n{table.markdown()}\n"
    lines = [
        f"{describe(document['env'])}. Median ms (95% interval within this run), timer {document['settings']['timer']}, "
        f"{document['settings']['l2']} L2, inputs N(0, 1). {FLOPS_CONVENTION}.",
        "",
        "| case | mode | backend | ms | TFLOP/s | of roof | memory beyond inputs | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    from flashtile.bench.cases import BenchCase

    for row in document["results"]:
        label = BenchCase.from_config(row["config"]).label()
        cells = ["-"] * 4
        if row["status"] == "ok" and row["stats"]:
            stats, roof = row["stats"], row.get("roof_fraction")
            cells[:3] = [
                f"{stats['median']:.4g} [{stats['ci95'][0]:.4g}, {stats['ci95'][1]:.4g}]",
                f"{row['tflops']:.4g}",
                "-" if roof is None else f"{roof:.1%}",
            ]
        extra, formula = row["extra_mem_bytes"], row.get("predicted_mem_bytes")
        words = [f"{extra / (1 << 20):.1f} MiB"] if extra is not None else []
        words += [f"by formula {formula / (1 << 20):.1f} MiB"] if formula is not None else []
        cells[3] = ", ".join(words) or "-"
        note = row["reason"].replace("\n", " ").replace("|", "/") if row["reason"] else ""
        lines.append("| " + " | ".join([label, row["mode"], row["backend"], *cells, note]) + " |")
    return "\n".join(lines) + "\n"
