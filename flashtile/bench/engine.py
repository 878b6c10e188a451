"""The measurement of cases: prepare every backend, gate it on correctness, time what passed; `run` one, `compare` many.

run:      one backend at a time, sampled until its interval is narrow.
compare:  rounds; in each, every backend runs one block in random order, and only ratios within a round are compared, so
          that a drifting clock cancels.
"""

import gc
import random
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from flashtile.bench import gate, measure, peers, record, roofline, stats
from flashtile.bench.cases import (
    DECODE,
    DTYPES,
    FORWARD_MODES,
    MODES,
    BenchCase,
    UsageError,
    as_typed,
    make_inputs,
    parse_choices,
)
from flashtile.bench.stats import Speedup, Summary
from flashtile.bench.telemetry import Telemetry
from flashtile.errors import FlashtileError, explain

SUBJECT = "flashtile"
DEFAULT_MODES = ("fwd", "bwd")


@dataclass(frozen=True)
class Settings:
    """How to measure. rep_ms is the sampling time of one mode of one backend; None picks 300 for run and 90 for compare.

    repeats: exactly so many samples instead (run), or so many rounds (compare). threshold: ratios within 1 + threshold are
    the same. check: gate on correctness. roof: measure the roof. show_values: keep so many first elements of the output.
    """

    timer: str = "auto"
    l2: str = "cold"
    seed: int = 0
    rep_ms: float | None = None
    repeats: int | None = None
    timeout_s: float = 3.0
    rounds: int = 15
    threshold: float = stats.DEFAULT_THRESHOLD
    check: bool = True
    roof: bool = True
    commit: str | None = None
    show_values: int = 0

    def __post_init__(self):
        for name, value, choices in (("timer", self.timer, measure.TIMERS), ("l2", self.l2, ("cold", "warm"))):
            if value not in choices:
                raise UsageError(f"{name}: expected one of {', '.join(choices)}, got {value!r}.")
        for name in ("rep_ms", "repeats", "timeout_s", "rounds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                flag = name.removesuffix("_s").replace("_", "-")
                raise UsageError(f"{flag}: expected a finite number above 0, got {value}.")
        if self.show_values < 0:
            raise UsageError(f"show-values: expected 0 or more, got {self.show_values}.")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed: expected a number of 64 bits, got {self.seed}.")
        if not self.threshold >= 0:
            raise UsageError(f"threshold: expected 0 or more, got {self.threshold}.")


@dataclass
class Result:
    """One case, backend and mode. status is one of record.STATUSES; reason says why it isn't "ok"."""

    case: BenchCase
    backend: str
    mode: str
    status: str = "ok"
    reason: str = ""
    samples_ms: list[float] = field(default_factory=list)
    stats: Summary | None = None
    flops: int = 0
    bytes: int = 0
    roof_fraction: float | None = None
    roof_bound: str | None = None
    timer: str = ""
    inputs_bytes: int = 0
    extra_mem_bytes: int | None = None
    predicted_mem_bytes: int | None = None
    accuracy: gate.Accuracy | None = None
    # first elements of the output, where they were asked for
    values: list[float] = field(default_factory=list)
    telemetry: dict | None = None
    compile_ms: float | None = None
    # median ms of a few calls by each timer: kernel, event, wall
    times_ms: dict[str, float] = field(default_factory=dict)
    host_overhead_us: float | None = None
    kernel: str = ""
    target_met: bool = True
    repro: str = ""
    rounds_ms: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def tflops(self, ms: float | None = None) -> float | None:
        """TFLOP/s at a time in ms, default the median."""
        if ms is None:
            ms = self.stats.median if self.stats else None
        return self.flops / ms / 1e9 if ms else None

    def finish(self, samples, roof) -> None:
        """Set the statistics from samples in ms."""
        self.samples_ms = samples
        self.stats = stats.summary(samples)
        if roof is not None:
            self.roof_fraction, self.roof_bound = roof.fraction(self.flops, self.bytes, self.stats.median)

    def to_json(self) -> dict:
        extra = self.extra_mem_bytes
        return {
            "config": self.case.config(), "backend": self.backend, "mode": self.mode, "status": self.status,
            "reason": self.reason, "stats": self.stats.to_json() if self.stats else None, "flops": self.flops,
            "bytes": self.bytes, "tflops": self.tflops(), "roof_fraction": self.roof_fraction,
            "roof_bound": self.roof_bound, "timer": self.timer, "extra_mem_bytes": extra,
            "peak_mem_bytes": None if extra is None else extra + self.inputs_bytes,
            "predicted_mem_bytes": self.predicted_mem_bytes,
            "accuracy": self.accuracy.to_json() if self.accuracy else None, "telemetry": self.telemetry,
            **({"values": self.values} if self.values else {}),
            "compile_ms": self.compile_ms, "times_ms": self.times_ms, "host_overhead_us": self.host_overhead_us,
            "kernel": self.kernel, "target_met": self.target_met, "repro": self.repro,
            "rounds_ms": [round(ms, 7) for ms in self.rounds_ms],
            "samples_ms": [round(ms, 7) for ms in self.samples_ms],
        }  # fmt: skip

    @classmethod
    def from_json(cls, row: dict) -> "Result":
        """The result of a row of a record."""
        peak, extra = row["peak_mem_bytes"], row["extra_mem_bytes"]
        same = ("backend", "mode", "status", "reason", "flops", "bytes", "roof_fraction", "roof_bound", "timer",
                "extra_mem_bytes", "telemetry", "compile_ms", "host_overhead_us", "kernel", "target_met", "repro", "rounds_ms",
                "samples_ms")  # fmt: skip
        return cls(
            case=BenchCase.from_config(row["config"]), **{key: row[key] for key in same}, times_ms=row.get("times_ms", {}),
            predicted_mem_bytes=row.get("predicted_mem_bytes"), values=row.get("values", []),
            stats=Summary.from_json(row["stats"]) if row["stats"] else None,
            accuracy=gate.Accuracy.from_json(row["accuracy"]) if row["accuracy"] else None,
            inputs_bytes=0 if extra is None else peak - extra,
        )  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """How many times as fast `candidate` is as `baseline`, in one case and mode."""

    case: BenchCase
    mode: str
    candidate: str
    baseline: str
    speedup: Speedup

    def to_json(self) -> dict:
        return {"config": self.case.config(), "mode": self.mode, "candidate": self.candidate, "baseline": self.baseline,
                **self.speedup.to_json()}  # fmt: skip

    @classmethod
    def from_json(cls, row: dict) -> "Comparison":
        speedup = Speedup(row["ratio"], tuple(row["ci95"]), row["verdict"], row["rounds"])
        return cls(BenchCase.from_config(row["config"]), row["mode"], row["candidate"], row["baseline"], speedup)


@dataclass
class Report:
    """Everything a run found. interrupted: it was stopped, and what is here was complete by then."""

    device: torch.device
    settings: Settings
    env: dict
    resolved: dict
    results: list[Result] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    roofs: dict[str, roofline.Roof] = field(default_factory=dict)
    interrupted: bool = False
    # further parts of the document, by name
    parts: dict = field(default_factory=dict)

    @property
    def noisy(self) -> bool:
        """Whether samples ended before an interval was as narrow as asked for."""
        return any(result.ok and not result.target_met for result in self.results)

    def one(self, case=None, backend=SUBJECT, mode="fwd") -> Result:
        """The result of a case (default the first), backend and mode.

        Raises:
            UsageError: no such row; says which there are.
        """
        if case is None and self.results:
            case = self.results[0].case
        for result in self.results:
            if (result.case, result.backend, result.mode) == (case, backend, mode):
                return result
        rows = list(dict.fromkeys(f"{r.case.label()} {r.backend} {r.mode}" for r in self.results))
        there = "; ".join(rows[:8]) + (f"; and {len(rows) - 8} more" if len(rows) > 8 else "")
        wanted = f"{case.label()} {backend} {mode}" if case else f"{backend} {mode}"
        raise UsageError(explain("report", f"one of its rows ({there or 'it has none'})", wanted))

    def comparison(self, case, mode, candidate, baseline) -> Comparison | None:
        key = (case, mode, candidate, baseline)
        return next((c for c in self.comparisons if (c.case, c.mode, c.candidate, c.baseline) == key), None)

    def geomeans(self) -> list[dict]:
        """Speedup of flashtile over each other backend, per (head dim, mode): ratio, number of cells, verdict counts."""
        groups = {}
        for c in self.comparisons:
            if c.candidate == SUBJECT:
                groups.setdefault((c.case.head_dims, c.mode, c.baseline), []).append(c.speedup)
        rows = []
        for (dims, mode, baseline), speedups in groups.items():
            words = [s.verdict for s in speedups]
            rows.append({"headdim": dims, "mode": mode, "baseline": baseline, "cells": len(speedups),
                         "geomean": stats.geomean(s.ratio for s in speedups), "min": min(s.ratio for s in speedups),
                         "max": max(s.ratio for s in speedups),
                         "verdicts": {word: words.count(word) for word in stats.VERDICTS}})  # fmt: skip
        return rows

    def document(self) -> dict:
        """The JSON document, record.SCHEMA."""
        return {
            "schema": record.SCHEMA, "env": self.env, "settings": self.resolved, "interrupted": self.interrupted,
            "roofs": {name: roof.to_json() for name, roof in self.roofs.items()}, "geomeans": self.geomeans(),
            "results": [r.to_json() for r in self.results], "comparisons": [c.to_json() for c in self.comparisons],
            **self.parts,
        }  # fmt: skip

    def to_frame(self):
        """The results as a pandas DataFrame, one row a case, backend and mode, columns as in the CSV; needs pandas."""
        import pandas

        return pandas.DataFrame([record.csv_row(r.to_json()) for r in self.results], columns=record.CSV_COLUMNS)


class Listener:
    """Hears what a run does; the command line's subclass prints it."""

    def start(self, report: Report) -> None:
        """The environment is known, nothing is measured yet."""

    def step(self, done: int, total: int, text: str) -> None:
        """About to do something that may take a while, in case `done` (from 0) of `total`."""

    def cell(self, report: Report, case: BenchCase, mode: str) -> None:
        """All backends of a case and mode are done."""

    def case(self, report: Report, case: BenchCase) -> None:
        """All modes of a case are done."""


def variables() -> str:
    """What a shell sets before a command, so that it gets the tiers of this process."""
    from flashtile import settings

    found = settings.recorded(("FLASHTILE_TIER", "TRITON_INTERPRET"))
    return "".join(f"{name}={shlex.quote(value)} " for name, value in found.items())


def _choosing(variables: dict) -> dict:
    """Those of the environment's variables that choose what is measured."""
    return {name: value for name, value in variables.items()
            if name.startswith("FLASHTILE_") or name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")}  # fmt: skip


def command_line(words: str, chosen: Settings) -> str:
    """The line that repeats a row: a command and its flags, with the variables, the seed, and what was asked of the timing."""
    asked = {name: getattr(chosen, name) for name in ("timer", "l2", "repeats", "rep_ms", "timeout_s")
             if getattr(chosen, name) != getattr(Settings, name)}  # fmt: skip
    flags = "".join(f" --{name.removesuffix('_s').replace('_', '-')} {as_typed(value)}" for name, value in asked.items())
    flags += "" if chosen.check else " --no-check"
    return f"{variables()}flashtile {words} --seed {chosen.seed}{flags}"


def resolve_device(device: str | None, gpu_for: str = "") -> torch.device:
    """A torch.device from "cuda:0", "cpu" or None (the GPU, where there is one).

    gpu_for: what a CPU can't do, where it is asked for no other: its message then offers none.

    Raises:
        UsageError: no such device. peers.Unavailable: a GPU is asked for and there is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device: expected cuda, cuda:N or cpu, got {device!r}.") from None
    if device.type not in ("cuda", "cpu"):
        raise UsageError(f"device: expected cuda, cuda:N or cpu, got {device.type!r}.")
    if device.type == "cpu" and gpu_for:
        raise peers.Unavailable(f"device cpu: {gpu_for} needs a GPU.")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        way_out = f"{gpu_for[0].upper()}{gpu_for[1:]} needs one." if gpu_for else "Try --device cpu."
        raise peers.Unavailable(f"device {device}: no GPU that torch {torch.__version__} can use. {way_out}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise peers.Unavailable(f"device cuda:{index}: there are {torch.cuda.device_count()} GPUs, numbered from 0.")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def default_dtype(device: torch.device) -> str:
    """The dtype where the user gives none: bf16, fp16 before sm_80, fp32 on a CPU, where half precision is slow."""
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def run(case, backend=SUBJECT, modes=DEFAULT_MODES, *, device=None, settings=None, listener=None) -> Report:
    """Time one backend on a case or a list of cases.

    Args:
        case: BenchCase, or several.
        backend: a name of peers.BACKENDS.
        modes: some of "fwd", "bwd" (autograd.grad over a kept graph), "fwd_bwd", or "decode" alone; also as text "fwd,bwd".
    Returns:
        Report with a Result for each case and mode, also where a backend can't run.
    """
    return _Measurement(case, [backend], modes, device, settings, listener, None).go()


def compare(cases, backends=(SUBJECT, "sdpa", "naive"), modes=DEFAULT_MODES, *, baseline=None, device=None, settings=None,
            listener=None, resume=None) -> Report:  # fmt: skip
    """Time several backends on cases, interleaved, and compare them.

    Args as in `run`; backends: names, or text as `--backend` takes it; baseline: the backend that all are compared with,
    default `default_baseline(backends)`. flashtile is also compared with each. resume: a document of an earlier run of the
    same, whose rows are kept and not measured again.
    Returns:
        Report; comparisons has the speedups with their intervals and verdicts.
    """
    backends = peers.parse_backends(backends) if isinstance(backends, str) else list(backends)
    baseline = baseline or default_baseline(backends)
    if baseline not in backends:
        raise UsageError(f"baseline: expected one of the backends {', '.join(backends)}, got {baseline!r}.")
    return _Measurement(cases, backends, modes, device, settings, listener, baseline, resume).go()


def default_baseline(backends) -> str:
    """sdpa where it is among them, else the first that isn't flashtile."""
    others = [name for name in backends if name != SUBJECT]
    return "sdpa" if "sdpa" in others else others[0] if others else SUBJECT


def list_of_modes(modes) -> list[str]:
    """Modes as a list; text is one as `--mode` takes it."""
    return parse_choices(modes, (*MODES, DECODE), "mode") if isinstance(modes, str) else list(modes)


@dataclass
class _Runner:
    """A backend that passed the gate, ready to be timed in one mode."""

    result: Result
    fn: Callable[[], object]
    warm: measure.Warm | None = None


class _Fatal(Exception):
    """The device is lost to this process."""


class _Measurement:
    """One run or comparison: what its steps share."""

    def __init__(self, cases, backends, modes, device, settings, listener, baseline, resume=None):
        self.cases = [cases] if isinstance(cases, BenchCase) else list(cases)
        self.backends, self.modes, self.baseline = backends, list_of_modes(modes), baseline
        for mode in self.modes:
            if mode not in MODES and self.modes != [DECODE]:
                raise UsageError(f"mode: expected some of {', '.join(MODES)}, or {DECODE} alone, got {','.join(self.modes)!r}.")
        for name in backends:
            if name not in peers.BACKENDS:
                raise UsageError(f"backend: expected some of {', '.join(peers.BACKENDS)}, got {name!r}.")
        if self.modes != [DECODE] and any(case.dtype == "fp8" for case in self.cases):
            raise UsageError("dtype: expected fp16, bf16 or fp32 without --mode decode: fp8 is of caches and their queries.")
        if self.modes != [DECODE] and any(case.page_size for case in self.cases):
            raise UsageError("page-size: expected none without --mode decode, the only one over a cache.")
        self.with_grad = any(mode not in FORWARD_MODES for mode in self.modes)
        self.settings = settings or Settings()
        self.listener = listener or Listener()
        self.device = resolve_device(str(device) if device is not None else None)
        self.rep_ms = self.settings.rep_ms or (90.0 if baseline else 300.0)
        rounds = (self.settings.repeats or self.settings.rounds) if baseline else None
        self.rounds = rounds
        self.stopwatches = {}
        self.order = random.Random(self.settings.seed)
        self.done = 0
        timer = measure.resolve_timer(self.settings.timer, self.device)
        self.report = Report(self.device, self.settings, record.environment(self.device, self.settings.commit), {
            "command": "compare" if baseline else "run", "timer": timer, "l2": self._watch(timer).l2,
            "seed": self.settings.seed, "rep_ms": self.rep_ms, "repeats": self.settings.repeats, "rounds": rounds,
            "timeout_s": self.settings.timeout_s, "threshold": self.settings.threshold, "check": self.settings.check,
            "data": "normal", "modes": self.modes, "backends": self.backends, "baseline": baseline, "device": self.device.type,
            "flops": record.FLOPS_CONVENTION,
        })  # fmt: skip
        # (case, mode) -> backends whose rows an earlier run has
        self.had = {}
        if resume is not None:
            self._take_over(resume)

    def _take_over(self, document):
        """Keep the rows of an earlier run of the same cases, under the same circumstances."""
        circumstances = [("settings", self.report.resolved, document["settings"])]
        circumstances += [(key, self.report.env[key], document["env"][key])
                          for key in ("gpu", "torch", "triton", "git", "peers")]  # fmt: skip
        circumstances += [("variable", *(_choosing(env["env_vars"]) for env in (self.report.env, document["env"])))]
        for name, now, then in circumstances:
            if now != then:
                differing = []
                if isinstance(now, dict) and isinstance(then, dict):
                    differing = sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k))
                what = ", ".join(differing) or f"{then}, now {now}"
                raise UsageError(f"resume: the earlier run had another {name} ({what}). "
                                 "Write to another file, or start anew without --resume.")  # fmt: skip
        self.report.roofs = {name: roofline.Roof(**roof) for name, roof in document["roofs"].items()}
        self.report.results = [Result.from_json(row) for row in document["results"]]
        self.report.comparisons = [Comparison.from_json(row) for row in document["comparisons"]]
        for result in self.report.results:
            self.had.setdefault((result.case, result.mode), set()).add(result.backend)
        strange = {case for case, _ in self.had} - set(self.cases)
        if strange:
            raise UsageError(f"resume: the earlier run had other cases, such as {next(iter(strange)).label()}.")

    def _open_modes(self, case) -> list[str]:
        """Modes of a case that an earlier run has no rows of."""
        return [mode for mode in self.modes if self.had.get((case, mode), set()) != set(self.backends)]

    def go(self) -> Report:
        self.listener.start(self.report)
        with Telemetry(self.device) as self.telemetry:
            try:
                while self.done < len(self.cases):
                    self._case(self.cases[self.done])
                    self.listener.case(self.report, self.cases[self.done])
                    self.done += 1
            except KeyboardInterrupt:
                # Rows that have no samples yet are no results.
                self.report.interrupted = True
                self.report.results = [r for r in self.report.results if self._complete(r)]
            except _Fatal as error:
                # Everything after this would fail for the same reason.
                self.report.results = [r for r in self.report.results if self._complete(r)]
                for case in self.cases[self.done :]:
                    self._fill(case, "error", f"the GPU failed earlier in this process: {error}")
                    self.listener.case(self.report, case)
        return self.report

    def _complete(self, result) -> bool:
        return not result.ok or result.stats is not None

    def _step(self, case, text):
        self.listener.step(self.done, len(self.cases), f"{case.label()}: {text}")

    def _watch(self, timer) -> measure.Stopwatch:
        if timer not in self.stopwatches:
            self.stopwatches[timer] = measure.Stopwatch(self.device, timer, self.settings.l2)
        return self.stopwatches[timer]

    def _roof(self, case):
        name = DTYPES[case.dtype]
        if self.settings.roof and name not in self.report.roofs and roofline.has_products(self.device, name):
            self._step(case, "measuring the roof")
            self.report.roofs[name] = roofline.measure(str(self.device), name)
        return self.report.roofs.get(name)

    # --- one case --------------------------------------------------------------------------------------------------------

    def _case(self, case):
        open_modes = self._open_modes(case)
        if not open_modes:
            return
        roof = self._roof(case)
        self._step(case, "making inputs")
        state = None
        try:
            inputs = make_inputs(case, self.device, self.settings.seed, dout=self.with_grad)
            state = CaseTensors(case, inputs)
        except Exception as error:
            status, reason = self._describe_failure(error)
        if state is None:
            self._release()
            self._fill(case, status, f"inputs: {reason}")
            for mode in open_modes:
                self.listener.cell(self.report, case, mode)
            return
        attends = {}
        for name in self.backends:
            attend = self._prepare(state, name, open_modes)
            if attend is not None:
                attends[name] = attend
        for mode in open_modes:
            self._mode(state, mode, attends, roof)
            self.listener.cell(self.report, case, mode)
        self.report.results.sort(key=self._position)
        del state, inputs, attends
        self._release(after_failure=False)

    def _position(self, result):
        """Results in the order of cases, modes and backends, whatever failed when."""
        return self._case_index()[result.case], self.modes.index(result.mode), self.backends.index(result.backend)

    def _case_index(self):
        return {case: i for i, case in enumerate(self.cases)}

    def _fill(self, case, status, reason, backends=None):
        """A row for every backend (default all) and mode of a case that has none yet."""
        have = {(r.backend, r.mode) for r in self.report.results if r.case == case}
        for mode in self.modes:
            for name in backends or self.backends:
                if (name, mode) not in have:
                    self._add(case, name, mode, status, reason)

    def _add(self, case, name, mode, status="ok", reason="", **more) -> Result:
        work = "fwd" if mode in FORWARD_MODES else mode
        words = f"run {case.flags(mode)} --mode {mode}" + (f" --backend {name}" if name != SUBJECT else "")
        # Of a comparison repeats are rounds, of which run has none
        chosen = replace(self.settings, repeats=None) if self.baseline else self.settings
        repro = command_line(words, chosen) + (" --device cpu" if self.device.type == "cpu" else "")
        flops, num_bytes = case.flops(work), case.problem().bytes_moved(work)
        if mode == DECODE:
            # Of a cache only what a window lets be seen is read.
            problem = case.latent_problem() if case.latent else case.cache_problem()
            flops, num_bytes = problem.flops(case.lengths), problem.bytes_moved(case.lengths)
        result = Result(case, name, mode, status, reason, flops=flops, bytes=num_bytes, repro=repro, **more)
        self.report.results.append(result)
        return result

    def _prepare(self, state, name, open_modes):
        """attend of a backend that may be timed, after its first calls and the gate; else None, with rows that say why.

        Modes that can't run have their rows after this; state.facts[name] has what the rows of the others need.
        """
        case, attend, accuracy, failure = state.case, None, None, None
        modes = []
        try:
            attend = peers.load(name, str(self.device))
            for mode in open_modes:
                blocked = self._blocked(case, name, mode)
                if blocked is None:
                    modes.append(mode)
                else:
                    self._add(case, name, mode, *blocked)
            if (over_cache := peers.BACKENDS[name].over_cache) and modes == [DECODE]:
                attend = over_cache(state.k, state.v, case)
        except Exception as error:
            failure = self._describe_failure(error)
        if failure is not None:
            self._fill(case, *failure, backends=[name])
            return None
        if not modes:
            return None
        self._step(case, f"{name}: first call (compiles)" if name == SUBJECT else f"{name}: first call")
        try:
            facts, out, grads = self._first_calls(state, name, attend, modes, case)
            if case.dropout and self.settings.check:
                _, out, grads = self._first_calls(state, name, attend, modes, replace(case, dropout=0.0))
            if self.settings.check:
                self._step(case, f"{name}: checking against float64")
                accuracy = state.gate(self.with_grad).check(out, grads)
            values = out.flatten()[: self.settings.show_values].tolist()
            del out, grads
        except Exception as error:
            failure = self._describe_failure(error)
        if failure is None and accuracy is not None and not accuracy.passed:
            failure = "mismatch", gate.describe_mismatch(accuracy)
        if failure is not None:
            self._release()
            for mode in modes:
                self._add(case, name, mode, *failure, accuracy=accuracy)
            return None
        facts |= {"accuracy": accuracy, "values": values}
        state.facts[name] = facts
        return attend

    def _first_calls(self, state, name, attend, modes, case):
        """The first call of each direction of a case, timed by the host: (facts, out, (dq, dk, dv) or None).

        flashtile's kernels are compiled side by side first; that time counts to the call.
        """
        watch = next(iter(self.stopwatches.values()))
        kept = {}
        ahead = {}
        if name == SUBJECT and self.device.type == "cuda" and modes != [DECODE]:
            ahead = peers.compile_ahead(state.q, state.k, state.v, case, forward_only=modes == ["fwd"])

        def forward():
            with torch.no_grad():
                kept["out"] = attend(state.q, state.k, state.v, case)

        def forward_with_grad():
            kept["graph"] = attend(*state.leaves, case)

        def backward():
            kept["grads"] = torch.autograd.grad(kept.pop("graph"), state.leaves, state.dout)

        first = dict.fromkeys(FORWARD_MODES, watch.once(forward) + 1e3 * ahead.get("forward", 0.0))
        if any(mode not in FORWARD_MODES for mode in modes):
            again = watch.once(forward_with_grad)
            first["bwd"] = watch.once(backward) + 1e3 * ahead.get("backward", 0.0)
            first["fwd_bwd"] = again + first["bwd"]
        return {"compile_ms": first}, kept["out"], kept.get("grads")

    def _kernel(self, state, name, mode) -> str:
        """Which kernels a backend that chooses for itself takes, where it tells."""
        if name == SUBJECT:
            return peers.flashtile_kernels(state.case, mode, self.device)
        if name == "sdpa":
            return peers.sdpa_choice(*((state.q, state.k, state.v) if mode in FORWARD_MODES else state.leaves), state.case)
        return ""

    def _blocked(self, case, name, mode) -> tuple[str, str] | None:
        """(status, reason) of what a backend can't run, known without running it."""
        reason = peers.BACKENDS[name].refusal(case, mode, self.device)
        if reason is not None:
            return "refused", reason
        if name in peers.STORES_SCORES and (reason := self._does_not_fit(case, mode)):
            return "skipped", reason
        return None

    def _does_not_fit(self, case, mode) -> str | None:
        """Whether scores that must be stored would take more than half of the free memory."""
        needed, free = peers.naive_bytes(case, mode), self._free_bytes()
        if needed <= free // 2:
            return None
        return f"its scores need about {needed / (1 << 30):.0f} GiB, more than half of the {free / (1 << 30):.0f} GiB free"

    def _free_bytes(self) -> int:
        """Memory that this process could still allocate."""
        if self.device.type != "cuda":
            return _free_host_memory()
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused

    # --- one mode of a case ----------------------------------------------------------------------------------------------

    def _mode(self, state, mode, attends, roof):
        runners = []
        timer = measure.resolve_timer(self.settings.timer, self.device, mode)
        watch = self._watch(timer)
        done = {(r.backend, r.mode) for r in self.report.results if r.case == state.case}
        for name, attend in attends.items():
            if (name, mode) in done:
                continue
            facts = state.facts[name]
            result = self._add(
                state.case, name, mode, timer=timer, accuracy=facts["accuracy"], inputs_bytes=state.bytes(mode),
                kernel=self._kernel(state, name, mode), compile_ms=facts["compile_ms"].get(mode), values=facts["values"],
            )  # fmt: skip
            self._step(state.case, f"{name} {mode}: warm-up")
            failure = None
            try:
                runner = _Runner(result, state.make_fn(attend, mode))
                result.extra_mem_bytes = measure.peak_memory(state.make_step(attend, mode), self.device)
                runner.warm = measure.warm_up(watch, runner.fn)
                runners.append(runner)
            except Exception as error:
                failure = self._describe_failure(error)
            if failure is not None:
                result.status, result.reason = failure
                runner = None
                self._release()
        if not runners:
            return
        start = time.perf_counter()
        if self.baseline is None:
            self._sample(state.case, watch, runners, roof)
        else:
            self._rounds(state.case, watch, runners, roof)
        summary = self.telemetry.since(start)
        for runner in runners:
            runner.result.telemetry = summary

    def _sample(self, case, watch, runners, roof):
        for runner in runners:
            result = runner.result
            self._step(case, f"{result.backend} {result.mode}: timing")
            failure = None
            try:
                samples, result.target_met = measure.sample(
                    watch, runner.fn, runner.warm, rep_ms=self.rep_ms, repeats=self.settings.repeats,
                    timeout_s=self.settings.timeout_s,
                )  # fmt: skip
                result.finish(samples, roof)
                if self.device.type == "cuda":
                    self._step(case, f"{result.backend} {result.mode}: kernel, event and wall time")
                    self._times(runner)
            except Exception as error:
                failure = self._describe_failure(error)
            if failure is not None:
                result.status, result.reason = failure

    def _times(self, runner):
        """The call by each timer: the kernels alone, the device's time, and one isolated call and its wait."""
        times = runner.result.times_ms
        for timer in ("wall", "event", "kernel"):
            # The tracer may be taken by a profiler around this process.
            with suppress(RuntimeError):
                times[timer] = measure.quick_ms(self._watch(timer), runner.fn, runner.warm)
        runner.result.host_overhead_us = max(0.0, times["wall"] - times.get("kernel", times["event"])) * 1e3

    def _rounds(self, case, watch, runners, roof):
        mode = runners[0].result.mode
        rounds, plans = self._plan_rounds(runners)
        self._step(case, f"{mode}: timing {', '.join(r.result.backend for r in runners)} in {rounds} rounds")
        times = {r.result.backend: [] for r in runners}
        samples = {r.result.backend: [] for r in runners}
        failure = None
        try:
            announced = time.perf_counter()
            for number in range(rounds):
                for runner, calls in self.order.sample(plans, len(plans)):
                    block = watch.block(runner.fn, calls, runner.warm.head_start_ms(calls))
                    samples[runner.result.backend] += block
                    times[runner.result.backend].append(stats.quantile(sorted(block), 0.5))
                if time.perf_counter() - announced > 0.5:
                    announced = time.perf_counter()
                    self._step(case, f"{mode}: round {number + 1} of {rounds}")
        except Exception as error:
            failure = self._describe_failure(error)
        for runner in runners:
            result = runner.result
            if failure is not None:
                result.status, result.reason = failure
                continue
            result.rounds_ms = times[result.backend]
            result.finish(samples[result.backend], roof)
        if failure is not None:
            return
        for candidate, base in self._pairs(times):
            speedup = stats.speedup(times[base], times[candidate], self.settings.threshold)
            self.report.comparisons.append(Comparison(case, mode, candidate, base, speedup))

    def _plan_rounds(self, runners):
        """(rounds, [(runner, calls a block)]); fewer rounds, down to 6, where they would take longer than the timeout."""
        plans = []
        for runner in runners:
            # A block is short: at least 3 calls, but a single one where that alone takes its share.
            calls = runner.warm.calls_in(self.rep_ms / self.rounds)
            plans.append((runner, max(calls, 3 if runner.warm.device_ms < 3 else 1)))
        round_s = sum(calls * runner.warm.device_ms for runner, calls in plans) / 1e3
        affordable = int(self.settings.timeout_s * len(runners) / max(round_s, 1e-9))
        rounds = self.rounds if self.settings.repeats else min(self.rounds, max(6, affordable))
        return rounds, plans

    def _pairs(self, times):
        """(candidate, baseline): everything against the baseline, and flashtile against everything."""
        pairs = [(name, self.baseline) for name in times if self.baseline in times]
        pairs += [(SUBJECT, name) for name in times if SUBJECT in times]
        return [pair for pair in dict.fromkeys(pairs) if pair[0] != pair[1]]

    # --- failures --------------------------------------------------------------------------------------------------------

    def _describe_failure(self, error) -> tuple[str, str]:
        """(status, reason) of an exception; raises _Fatal where the GPU is lost to this process."""
        text = (str(error).splitlines() or [""])[0][:300] or type(error).__name__
        error.__traceback__ = None
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            return "oom", "out of memory"
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                raise _Fatal(text) from None
        if isinstance(error, peers.Unavailable):
            return "unavailable", text
        if isinstance(error, FlashtileError):
            return "refused", text
        return "error", f"{type(error).__name__}: {text}"

    def _release(self, after_failure=True):
        if after_failure:
            # Exceptions keep frames in cycles, and frames keep tensors.
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class CaseTensors:
    """The tensors of one case, shared by all backends, and what was learnt of each backend."""

    def __init__(self, case, inputs):
        self.case = case
        self.q, self.k, self.v, self.dout = inputs
        self.leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        self.facts: dict[str, dict] = {}
        self._gate = None

    def gate(self, with_grad):
        if self._gate is None:
            self._gate = gate.make(self.case, (self.q, self.k, self.v, self.dout if with_grad else None))
        return self._gate

    def bytes(self, mode) -> int:
        # Of a latent cache v is a part of k
        tensors = [self.q, self.k] + [self.v] * (not self.case.latent) + [self.dout] * (mode not in FORWARD_MODES)
        return sum(x.numel() * x.element_size() for x in tensors)

    def make_fn(self, attend, mode):
        """The function to time. bwd keeps the graph of one forward pass and runs its backward pass again and again."""
        if mode in FORWARD_MODES:
            return self._forward(attend)
        if mode == "fwd_bwd":
            return self._forward_backward(attend)
        out = attend(*self.leaves, self.case)
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)

    def make_step(self, attend, mode):
        """The function whose memory counts: a backward pass needs what its forward pass kept."""
        return self._forward(attend) if mode in FORWARD_MODES else self._forward_backward(attend)

    def _forward(self, attend):
        def forward():
            with torch.no_grad():
                return attend(self.q, self.k, self.v, self.case)

        return forward

    def _forward_backward(self, attend):
        return lambda: torch.autograd.grad(attend(*self.leaves, self.case), self.leaves, self.dout)


def _free_host_memory() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return 4 << 30
