"""Is flashtile slower than it was? Two versions in interleaved rounds of several processes, or two records.

interleaved  Both versions are folders (a git revision is checked out into a temporary one). A pair of fresh processes, one a
             version, times the same cases in turns; the next pair follows. A verdict other than SAME needs all pairs to agree.
records      At least one version is a recorded run. Two runs of the same code differ by some percent, as processes and clocks
             do: smaller changes than RUN_TO_RUN count as SAME.
"""

import math
import random
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from flashtile.bench import engine, measure, record, stats
from flashtile.bench.cases import BenchCase, UsageError
from flashtile.bench.side import Side
from flashtile.errors import explain

ROOT = Path(__file__).resolve().parents[2]
BASELINES = Path(".flashtile-bench")
# Largest difference seen between two runs of the same code on an H200
RUN_TO_RUN = 0.05


@dataclass
class Version:
    """One version of flashtile: a folder that holds it, or a document. name as the user gave it."""

    name: str
    folder: Path | None = None
    document: dict | None = None
    commit: str | None = None

    def to_json(self) -> dict:
        return {"name": self.name if "/" not in self.name else f".../{Path(self.name).name}", "commit": self.commit,
                "kind": "record" if self.document else "code"}  # fmt: skip


@dataclass
class Row:
    """One case and mode; change = against / baseline - 1 of the times, above 0 is slower. status as in engine.Result."""

    case: BenchCase
    mode: str
    status: str = "ok"
    reason: str = ""
    baseline_ms: float | None = None
    against_ms: float | None = None
    change: float | None = None
    ci95: tuple[float, float] | None = None
    verdict: str = "UNCLEAR"
    # medians of blocks, a list a pair of processes
    baseline_rounds_ms: list[list[float]] = field(default_factory=list)
    against_rounds_ms: list[list[float]] = field(default_factory=list)

    def to_json(self) -> dict:
        return {"config": self.case.config(), **{key: value for key, value in vars(self).items() if key != "case"}}


def locate(name: str, stack: ExitStack, device=None) -> Version:
    """The version of a name: a folder with flashtile, a record, a baseline that --save kept for this GPU, or a git revision
    of the checkout that flashtile lies in, else of the one of the current folder. Temporary folders live as long as the stack.

    Raises:
        UsageError: none of them.
    """
    path = Path(name)
    if _has_flashtile(path):
        return Version(name, folder=path.resolve(), commit=_commit(path))
    if found := record_path(name, device):
        document = record.load(found)
        git = document["env"]["git"]
        return Version(str(found), document=document, commit=git and git["commit"])
    checkout = _checkout()
    commit = _revision(checkout, name) if checkout else None
    if commit is None:
        saved = baseline_path(name, device)
        kept = sorted(p.stem for p in saved.parent.glob("*.json")) if saved else []
        expected = (f"a folder with flashtile, a record (.json), a baseline of --save ({', '.join(kept) or 'there is none'}), "
                    f"or a git revision{f' of {checkout.name}' if checkout else ''}")  # fmt: skip
        way_out = "" if checkout else ("flashtile lies in no checkout, as it does when installed without -e: start this in "
                                       "one, or pass a folder.")  # fmt: skip
        raise UsageError(explain(name, expected, "none of them", way_out))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashtile-regress-")))
    command = ["git", "-C", str(checkout), "archive", commit, "flashtile"]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return Version(name, folder=folder, commit=commit)


def _has_flashtile(path) -> bool:
    return path.is_dir() and (path / "flashtile" / "__init__.py").exists()


def record_path(name, device=None) -> Path | None:
    """The file of a name that `locate` finds to be a record or a kept baseline."""
    if _has_flashtile(Path(name)):
        return None
    candidates = Path(name), baseline_path(name, device)
    return next((path for path in candidates if path is not None and path.is_file()), None)


def _checkout() -> Path | None:
    """A folder that git keeps flashtile in: the one of this code or, where that is installed without -e, the current one's."""
    if _is_kept(ROOT):
        return ROOT
    try:
        top = Path(record.git(".", "rev-parse", "--show-toplevel"))
    except (OSError, subprocess.SubprocessError):
        return None
    return top if _is_kept(top) else None


def _revision(checkout, name) -> str | None:
    try:
        return record.git(checkout, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except (OSError, subprocess.SubprocessError):
        return None


def _is_kept(folder) -> bool:
    """Whether git keeps the flashtile in a folder; an environment inside of a checkout has one that it doesn't."""
    try:
        record.git(folder, "ls-files", "--error-unmatch", "flashtile/__init__.py")
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def baseline_path(name: str, device) -> Path | None:
    """Where --save keeps a baseline of a torch.device; None for what is no name."""
    if "/" in name or "\\" in name or device is None:
        return None
    if device.type == "cuda":
        import torch

        gpu = torch.cuda.get_device_properties(device).name
    else:
        gpu = "cpu"
    return BASELINES / gpu.lower().replace(" ", "-") / f"{name}.json"


def interleaved(baseline: Version, against: Version, cases, modes, *, device, settings, processes=3, say=lambda text: None):
    """Rows of both versions, measured in turns.

    settings: engine.Settings; its rounds are those of all pairs of processes together, rep_ms of one mode and version.
    """
    rows = [Row(case, mode) for case in cases for mode in engine.list_of_modes(modes)]
    order, rounds = random.Random(settings.seed), max(2, math.ceil(settings.rounds / processes))
    block_ms = (settings.rep_ms or 90.0) / settings.rounds
    for pair in range(processes):
        with Side(baseline.folder) as first, Side(against.folder) as second:
            for row in rows:
                if row.status != "ok":
                    continue
                label = f"processes {pair + 1} of {processes}: {row.case.label()} {row.mode}"
                say(f"{label}: first calls, checking")
                timer = measure.resolve_timer(settings.timer, device, row.mode)
                asked = {"prepare": row.case.config(), "mode": row.mode, "seed": settings.seed, "timer": timer,
                         "l2": settings.l2, "check": settings.check and pair == 0, "device": str(device)}  # fmt: skip
                # One after the other: they share the GPU's memory and the CPU's cores.
                answers = [side.ask(**asked) for side in (first, second)]
                times = {first: [], second: []}
                for number in range(rounds):
                    say(f"{label}: round {number + 1} of {rounds}")
                    if any("status" in answer for answer in answers):
                        break
                    sides = order.sample([first, second], 2)
                    answers = [side.ask(block_ms=block_ms) for side in sides]
                    for side, answer in zip(sides, answers, strict=True):
                        times[side].append(answer.get("ms"))
                failed = next((answer for answer in answers if "status" in answer), None)
                if failed:
                    row.status, row.reason = failed["status"], failed["reason"]
                    continue
                row.baseline_rounds_ms.append(times[first])
                row.against_rounds_ms.append(times[second])
    for row in rows:
        if row.status == "ok":
            judge(row, settings.threshold)
    return rows


def judge(row: Row, threshold: float) -> None:
    """Set the change and the verdict of a row from its rounds."""
    before, after = sum(row.baseline_rounds_ms, []), sum(row.against_rounds_ms, [])
    found = stats.speedup(before, after, threshold)
    row.baseline_ms, row.against_ms = (stats.summary(times).median for times in (before, after))
    row.change, row.ci95 = 1 / found.ratio - 1, (1 / found.ci95[1] - 1, 1 / found.ci95[0] - 1)
    row.verdict = found.verdict
    pairs = zip(row.baseline_rounds_ms, row.against_rounds_ms, strict=True)
    changes = [stats.summary([a / b for b, a in zip(*pair, strict=True)]).median - 1 for pair in pairs]
    agree = min(changes) > 0 or max(changes) < 0
    if row.verdict in ("FASTER", "SLOWER") and not agree:
        row.verdict = "UNCLEAR"


def compare_records(before: dict, after: dict, threshold: float) -> list[Row]:
    """Rows of what two documents both have of flashtile.

    Raises:
        UsageError: they are from different GPUs, timers or cache states, or have no row in common.
    """
    circumstances = {
        "GPU": lambda d: (d["env"]["gpu"] or d["env"]["cpu"])["name"],
        "timer": lambda d: d["settings"]["timer"],
        "L2 state": lambda d: d["settings"]["l2"],
    }
    for what, get in circumstances.items():
        if get(before) != get(after):
            raise UsageError(f"regress: expected two records of the same {what}, got {get(before)} and {get(after)}.")
    known = {_key(row): row for row in before["results"] if _key(row)}
    rows = []
    for row in after["results"]:
        case = BenchCase.from_config(row["config"])
        if row["status"] != "ok" and row["backend"] == engine.SUBJECT:
            # What had a time and has none now is no less of a change than a slower one.
            if row["status"] == "mismatch" or (case, row["mode"]) in known:
                rows.append(Row(case, row["mode"], row["status"], row["reason"]))
            continue
        if _key(row) not in known:
            continue
        old, new = known[_key(row)]["stats"], row["stats"]
        ratio = old["median"] / new["median"]
        low, high = old["ci95"][0] / new["ci95"][1] / (1 + RUN_TO_RUN), old["ci95"][1] / new["ci95"][0] * (1 + RUN_TO_RUN)
        verdict = stats.verdict(ratio, low, high, max(threshold, RUN_TO_RUN))
        rows.append(Row(case, row["mode"], baseline_ms=old["median"], against_ms=new["median"],
                        change=1 / ratio - 1, ci95=(1 / high - 1, 1 / low - 1), verdict=verdict))  # fmt: skip
    if not rows:
        raise UsageError("regress: the records have no case and mode of flashtile in common.")
    return rows


def not_compared(before: dict, after: dict) -> list[dict]:
    """config and mode of what only the first of two documents has of flashtile."""
    rows = [row for row in after["results"] if row["backend"] == engine.SUBJECT]
    there = {(BenchCase.from_config(row["config"]), row["mode"]) for row in rows}
    lost = [row for row in before["results"] if _key(row) and _key(row) not in there]
    return [{"config": row["config"], "mode": row["mode"]} for row in lost]


def document(rows, baseline, against, method, device, settings, seconds) -> dict:
    """The record of a comparison of versions."""
    modes = list(dict.fromkeys(row.mode for row in rows))
    return {
        "schema": record.SCHEMA, "env": record.environment(device, settings.commit),
        "settings": {"command": "regress", **_circumstances(baseline, device, settings),
                     "seed": settings.seed, "modes": modes, "backends": [engine.SUBJECT], "baseline": None,
                     "device": device.type, "threshold": settings.threshold, "rounds": settings.rounds,
                     "seconds": round(seconds, 1), "flops": record.FLOPS_CONVENTION},
        "interrupted": False, "results": [], "comparisons": [],
        "regress": {"baseline": baseline.to_json(), "against": against.to_json(), "method": method,
                    "rows": [row.to_json() for row in rows],
                    "not_compared": not_compared(baseline.document, against.document) if method == "records" else []},
    }  # fmt: skip


def _circumstances(baseline, device, settings) -> dict:
    """Timer and cache state of a comparison: those of the records, which are alike, or of what was measured."""
    if baseline.document:
        return {key: baseline.document["settings"][key] for key in ("timer", "l2")}
    timer = measure.resolve_timer(settings.timer, device)
    return {"timer": timer, "l2": measure.Stopwatch(device, timer, settings.l2).l2}


def compare_versions(baseline: str, against: str | None = None, cases=(), modes=("fwd", "bwd"), *, device=None, settings=None,
                     processes=3, say=lambda text: None) -> tuple[list[Row], dict]:  # fmt: skip
    """Compare two versions of flashtile; names as in `locate`, against None is the code that runs now.

    Returns:
        (rows, document). cases and modes do not matter where both are records; where one is, they are the record's.
    """
    device, settings = engine.resolve_device(str(device) if device else None), settings or engine.Settings()
    begin = time.perf_counter()
    with ExitStack() as stack:
        old = locate(baseline, stack, device)
        new = Version("now", folder=ROOT, commit=_commit(ROOT)) if against is None else locate(against, stack, device)
        if old.document is None and new.document is None:
            method = "interleaved"
            rows = interleaved(old, new, cases or [BenchCase(dtype=engine.default_dtype(device))], modes, device=device,
                               settings=settings, processes=processes, say=say)  # fmt: skip
        else:
            method = "records"
            for one, other in ((old, new), (new, old)):
                if one.document is None:
                    say(f"measuring what {other.name} has")
                    one.document = _measure_like(other.document, one, device, settings)
            rows = compare_records(old.document, new.document, settings.threshold)
    return rows, document(rows, old, new, method, device, settings, time.perf_counter() - begin)


def _measure_like(document, version, device, settings) -> dict:
    """A run of this code on the cases of a record."""
    if version.folder != ROOT:
        raise UsageError(f"regress: {version.name} against a record: only the code that runs now can be measured alone.")
    keys = dict.fromkeys((BenchCase.from_config(row["config"]), row["mode"]) for row in document["results"] if _key(row))
    cases, modes = dict.fromkeys(case for case, _ in keys), dict.fromkeys(mode for _, mode in keys)
    report = engine.run(list(cases), modes=list(modes), device=device, settings=settings)
    if report.interrupted:
        raise KeyboardInterrupt
    return report.document()


def _key(row) -> tuple | None:
    """What a row measured, for those of flashtile that have times."""
    if row["backend"] != engine.SUBJECT or not row["stats"]:
        return None
    return BenchCase.from_config(row["config"]), row["mode"]


def _commit(folder) -> str | None:
    if not _is_kept(folder):
        return None
    try:
        changed = record.git(folder, "status", "--porcelain", "flashtile")
        return record.git(folder, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
