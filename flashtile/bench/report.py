"""One HTML file from records: environment, tables, plots, commands and raw data; it needs no network and no other file.

Needs jinja2 and matplotlib: pip install 'flashtile[report]'.
"""

import json
from pathlib import Path

import jinja2
from markupsafe import Markup

import flashtile
from flashtile.bench import plots, record, tables
from flashtile.errors import explain

TEMPLATE = Path(__file__).with_name("report.html")
SUFFIXES = (".json", ".jsonl")


def find(paths) -> list[Path]:
    """Record files: those named, and in folders all that follow the schema.

    Raises:
        UsageError: a named file that is no record, or nothing at all.
    """
    from flashtile.bench.cases import UsageError

    found = []
    for path in map(Path, paths):
        if path.is_dir():
            found += [file for file in sorted(path.rglob("*")) if file.suffix in SUFFIXES and _is_record(file)]
        elif not path.exists():
            raise UsageError(explain(path, "a record (.json, .jsonl) or a folder of them", "no such file or folder",
                                     "flashtile run --json FILE writes one."))  # fmt: skip
        else:
            record.load(path)
            found.append(path)
    if not found:
        raise UsageError(f"report: no record of {record.SCHEMA} in {', '.join(map(str, paths))}.")
    return list(dict.fromkeys(found))


def _is_record(path) -> bool:
    from flashtile.bench.cases import UsageError

    try:
        record.load(path)
    except (UsageError, UnicodeDecodeError):
        return False
    return True


def html(documents: dict[str, dict], command: str = "flashtile report", say=lambda text: None) -> str:
    """The page of documents by name."""
    given, groups = list(documents.values()), {}
    shown, drawn = tables.all_tables(given), plots.figures(given)
    for number, plot in enumerate(drawn):
        say(f"plot {number + 1} of {len(drawn)}: {plot.name}")
        groups.setdefault(plot.group, []).append((Markup(plots.render(plot, "svg").decode()), plot.alt))
    say("writing the page")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=_title(given), summary=_summary(given), tables=shown, groups=groups, roles=plots.ROLES, command=command,
        convention=record.FLOPS_CONVENTION, version=flashtile.__version__,
        provenance="; ".join(dict.fromkeys(plots.provenance(d) for d in given)),
        runs=[{"name": name, "file": f"{Path(name).stem}.json", "facts": _facts(d)} for name, d in documents.items()],
        raw=Markup(_script_safe(given)),
    )  # fmt: skip


def markdown(documents: dict[str, dict]) -> str:
    """The tables, with where they come from."""
    given = list(documents.values())
    parts = [f"# {_title(given)}", _summary(given), *dict.fromkeys(plots.provenance(d) + "." for d in given),
             f"{record.FLOPS_CONVENTION}."]  # fmt: skip
    for table in tables.all_tables(given):
        parts += [f"## {table.title}", table.caption, table.markdown()]
    return "\n\n".join(parts) + "\n"


def _script_safe(documents) -> str:
    """JSON that can't end the element it stands in."""
    return "[" + ",\n".join(json.dumps(d).replace("<", "\\u003c") for d in documents) + "]"


def _title(documents) -> str:
    devices = dict.fromkeys((d["env"]["gpu"] or d["env"]["cpu"])["name"] for d in documents)
    return f"flashtile on {', '.join(devices)}"


def _summary(documents) -> str:
    rows = [row for d in documents for row in d["results"]]
    words = [f"{len(documents)} run{'s' * (len(documents) != 1)}, {len(rows)} rows"]
    for status, said in (("mismatch", "wrong and not timed"), ("oom", "out of memory"), ("error", "failed")):
        count = sum(row["status"] == status for row in rows)
        words += [f"{count} {said}"] if count else []
    capped = sum(bool((row["telemetry"] or {}).get("throttle")) for row in rows)
    words += [f"{capped} while the GPU limited its clock"] if capped else []
    return ", ".join(words) + "."


def _facts(document) -> list[tuple[str, str]]:
    env, s = document["env"], document["settings"]
    gpu, git = env["gpu"], env["git"]
    device = env["cpu"]["name"]
    if gpu:
        device = f"{gpu['name']}, sm_{gpu['cc'].replace('.', '')}, {gpu['sm']} SM, {gpu['mem_gib']:g} GiB"
    commit = f" @ {git['commit'][:12]}{' + changes' if git['dirty'] else ''}" if git else ""
    facts = [("command", f"flashtile {s['command']}"), ("device", device)]
    facts += [("driver, CUDA", f"{env['driver']}, {env['cuda']}")] if gpu else []
    facts += [("torch, triton, python", f"{env['torch']}, {env['triton']}, {env['python']}"),
              ("flashtile", env["flashtile"] + commit),
              ("timer, L2, seed", f"{s['timer']}, {s['l2']}, {s['seed']}"), ("backends", ", ".join(s["backends"]))]  # fmt: skip
    facts += [("peers", ", ".join(f"{k} {v}" for k, v in env["peers"].items()))] if env.get("peers") else []
    for roof in document.get("roofs", {}).values():
        measured = f"{roof['tflops']:.0f} TFLOP/s, {roof['bandwidth'] / 1e12:.2f} TB/s"
        spec = f" (datasheet {roof['spec_tflops']:g}, {roof['spec_bandwidth'] / 1e12:.2f})" if roof.get("spec_tflops") else ""
        facts.append((f"roof, {roof['dtype']}", measured + spec))
    if env["env_vars"]:
        facts.append(("environment", ", ".join(f"{k}={v}" for k, v in env["env_vars"].items())))
    return facts
