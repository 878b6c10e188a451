"""What the commands share: groups of flags, exit codes, progress, the files they write. Imports no torch.

A command is a function whose arguments are groups (dataclasses of typer options); `command` turns it into the flat function
that typer wants, and turns errors into exit codes.
"""

import functools
import inspect
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated

import typer

OK, INTERNAL, USAGE, MISMATCH, REGRESSION, UNCLEAR, MISSING, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130

_OURS, _REPORT = "install flashtile with its requirements, pip install flashtile", "pip install 'flashtile[report]'"
# what to do about a module that is missing
INSTALLS = {"torch": _OURS, "triton": _OURS, "numpy": _OURS, "matplotlib": _REPORT, "jinja2": _REPORT, "markupsafe": _REPORT}


def _panel(panel):
    """A maker of typer options that stand under one title in --help."""
    return lambda help, *names, **more: typer.Option(*names, help=help, rich_help_panel=panel, **more)


_shape, _timing, _output = _panel("Shape"), _panel("Measurement"), _panel("Output")
Text, Number, Switch = str | None, float | None, bool | None
# Shape flags of commands that look at attention, but not at a cache
PACKED = ("dropout", "varlen", "alibi")
# And of those that look at a cache
CACHED = ("alibi", "page_size", "fp8")


@dataclass
class ShapeFlags:
    """Which cases. Lists: `512,1k,2k`; doubling ranges: `1k..16k`."""

    preset: Annotated[Text, _shape("Named cases (see `flashtile presets`); other flags override them.", "--preset")] = None
    batch: Annotated[Text, _shape("Batch size (2). All numbers may be lists 1,2,4 or ranges 1k..16k.", "--batch", "-b")] = None
    seqlen: Annotated[Text, _shape("Tokens of keys, and of queries unless --seqlen-q (1024).", "--seqlen", "-s")] = None
    seqlen_q: Annotated[Text, _shape("Tokens of queries.", "--seqlen-q")] = None
    nheads: Annotated[Text, _shape("Query heads (8).", "--nheads")] = None
    nheads_kv: Annotated[Text, _shape("Key-value heads (as many as query heads).", "--nheads-kv")] = None
    headdim: Annotated[Text, _shape("Head dim (64); 192-128 is 192 for q and k, 128 for v.", "--headdim", "-d")] = None
    causal: Annotated[Switch, _shape("Hide keys after the query; `--causal both`: yes and no.", "--causal/--no-causal")] = None
    causal_both: Annotated[bool, _shape("The same as `--causal both`.", "--causal-both", hidden=True)] = False
    dtype: Annotated[Text, _shape("fp16, bf16, fp32; fp8 with --mode decode (bf16; fp32 on a CPU).", "--dtype")] = None
    window: Annotated[Text, _shape("LEFT,RIGHT keys visible beside the diagonal; -1 is all of them.", "--window")] = None
    softcap: Annotated[Number, _shape("Scores become softcap * tanh(score / softcap) (off).", "--softcap")] = None
    dropout: Annotated[Number, _shape("Dropout probability (0); results are checked without it.", "--dropout")] = None
    varlen: Annotated[bool, _shape("Packed sequences, log-uniformly from 1 to seqlen tokens long.", "--varlen")] = False
    page_size: Annotated[Text, _shape("Tokens in a page of the cache, with --mode decode.", "--page-size")] = None
    alibi: Annotated[bool, _shape("Scores with ALiBi's bias, slopes 2^(-8 h / nheads).", "--alibi")] = False
    total_tokens: Annotated[Text, _shape("Sets batch = this / seqlen.", "--total-tokens")] = None
    hidden: Annotated[Text, _shape("Sets nheads = this / headdim.", "--hidden")] = None

    def cases(self, dtype: str, one_query=False, takes=("dropout", "varlen", *CACHED)):
        """BenchCases of these flags; dtype where none is given. one_query: seqlen_q is 1 where none is given.

        takes: of these flags, and of fp8 as a dtype, what the command has a use for.
        """
        from flashtile.bench.cases import Shape, UsageError, build_cases

        for flag in ("dropout", "varlen", "page_size", "alibi"):
            if getattr(self, flag) and flag not in takes:
                raise UsageError(f"{flag.replace('_', '-')}: expected none, this command measures without. "
                                 "flashtile run and compare take it.")  # fmt: skip
        causal = "both" if self.causal_both else None if self.causal is None else "yes" if self.causal else "no"
        values = {field.name: getattr(self, field.name) for field in fields(Shape)} | {"causal": causal}
        defaults = {"dtype": dtype} | ({"seqlen_q": "1"} if one_query and not self.varlen else {})
        shape = Shape(**values | {"varlen": self.varlen or None, "alibi": self.alibi or None})
        cases = build_cases(self.preset, shape, defaults)
        if "fp8" not in takes and any(case.dtype == "fp8" for case in cases):
            raise UsageError("dtype: expected fp16, bf16 or fp32. fp8 is of caches: flashtile run and compare take it with "
                             "--mode decode.")  # fmt: skip
        return cases


def decoding(mode) -> bool:
    """Whether --mode of a command that measures nothing says decode; refuses what is neither that nor fwd_bwd."""
    from flashtile.bench.cases import DECODE, UsageError

    if mode not in ("fwd_bwd", DECODE):
        raise UsageError(f"mode: expected fwd_bwd or {DECODE}, got {mode!r}.")
    return mode == DECODE


@dataclass
class TimingFlags:
    """How to measure."""

    mode: Annotated[Text, _timing("Some of fwd, bwd, fwd_bwd (fwd,bwd); run, compare, sweep: or decode.", "--mode")] = None
    no_grad: Annotated[bool, _timing("Forward only, as --mode fwd.", "--no-grad")] = False
    repeats: Annotated[int | None, _timing("Exactly so many samples (compare: rounds).", "--repeats")] = None
    rep_ms: Annotated[Number, _timing("Sampling time per mode and backend in ms (run 300, compare 90).", "--rep-ms")] = None
    timeout: Annotated[float, _timing("Most seconds of sampling per mode and backend.", "--timeout")] = 3.0
    timer: Annotated[str, _timing("auto, event (device), kernel, graph, wall (call, wait).", "--timer")] = "auto"
    l2: Annotated[Text, _timing("cold empties the L2 cache before each call; warm doesn't (cold).", "--l2")] = None
    seed: Annotated[int, _timing("Of the N(0, 1) inputs and the order of backends.", "--seed")] = 0
    device: Annotated[Text, _timing("cuda, cuda:N or cpu (the GPU, if there is one).", "--device")] = None
    check: Annotated[bool, _timing("Time only what is correct; --no-check for profilers.", "--check/--no-check")] = True
    roof: Annotated[bool, _timing("Measure what a matrix product and a copy reach.", "--roof/--no-roof")] = True

    def modes(self, also=()) -> list[str]:
        """also: modes that a command has beside MODES."""
        from flashtile.bench.cases import FORWARD_MODES, MODES, UsageError, parse_choices

        if self.mode is None:
            return ["fwd"] if self.no_grad else ["fwd", "bwd"]
        modes = parse_choices(self.mode, (*MODES, *also), "mode")
        if self.no_grad and (others := [mode for mode in modes if mode not in FORWARD_MODES]):
            raise UsageError(f"no-grad: expected no mode with gradients beside it, got --mode {','.join(others)}.")
        return modes

    def modes_and_cases(self, shape: ShapeFlags, dtype: str) -> tuple[list[str], list]:
        """Of a command that also decodes. Where no mode is given, cases over a latent cache are decoded: nothing else takes
        them.
        """
        from flashtile.bench.cases import DECODE

        modes = self.modes(also=(DECODE,))
        if self.mode is None and not self.no_grad and all(case.latent for case in shape.cases(dtype)):
            modes = [DECODE]
        return modes, shape.cases(dtype, one_query=modes == [DECODE])

    def settings(self, device, **more):
        """engine.Settings on a torch.device.

        Raises:
            UsageError: a timer or a cache state that a CPU hasn't.
        """
        from flashtile.bench.cases import UsageError
        from flashtile.bench.engine import Settings
        from flashtile.errors import explain

        found = Settings(timer=self.timer, l2=self.l2 or "cold", seed=self.seed, rep_ms=self.rep_ms, repeats=self.repeats,
                         timeout_s=self.timeout, check=self.check, roof=self.roof, **more)  # fmt: skip
        if device.type == "cpu":
            way_out = "A CPU has the host's clock, and its caches stay warm."
            if self.timer in ("kernel", "event", "graph"):
                raise UsageError(explain("timer", "auto or cpu on a CPU", repr(self.timer), way_out))
            if self.l2 == "cold":
                raise UsageError(explain("l2", "warm on a CPU", repr(self.l2), way_out))
        return found


@dataclass
class OneModeFlags(TimingFlags):
    """How to measure one mode."""

    mode: Annotated[str, _timing("fwd, bwd or fwd_bwd.", "--mode")] = "fwd"

    def only_mode(self) -> str:
        from flashtile.bench.cases import only

        return only(self.modes(), "mode")


@dataclass
class OutputFlags:
    """Where results go. `-` is stdout; tables then go to stderr."""

    json: Annotated[Text, _output("Write everything, raw samples too; - is stdout, tables then on stderr.", "--json")] = None
    csv: Annotated[Text, _output("Write one row per case, backend and mode.", "--csv")] = None
    md: Annotated[Text, _output("Write a Markdown table.", "--md")] = None
    keep: Annotated[Text, _output("Keep as a baseline for `flashtile regress --baseline NAME`.", "--save")] = None
    commit: Annotated[
        Text, _output("Commit to record where there is no .git (HASH or HASH-dirty).", "--commit", envvar="FLASHTILE_COMMIT")
    ] = None
    quiet: Annotated[bool, _output("No tables and no progress; files and the exit code only.", "--quiet", "-q")] = False
    progress: Annotated[bool, _output("Say on stderr what is being done.", "--progress/--no-progress")] = True
    color: Annotated[bool, _output("Colours on a terminal; NO_COLOR works too.", "--color/--no-color")] = True

    def console(self):
        """The rich console for tables."""
        to_stderr = "-" in (self.json, self.csv, self.md)
        return make_console(stderr=to_stderr, quiet=self.quiet, no_color=not self.color)

    def check(self) -> None:
        """Refuse what can't be written before hours of measurement.

        Raises:
            UsageError: an empty name, two outputs on stdout, or a folder that isn't there and can't be made.
        """
        from pathlib import Path

        from flashtile.bench.cases import UsageError

        if self.keep is not None and (not self.keep.strip() or "/" in self.keep or "\\" in self.keep):
            raise UsageError(f"--save: expected a name, got {self.keep!r}. --json writes to a path.")
        targets = [target for target in (self.json, self.csv, self.md) if target]
        if targets.count("-") > 1:
            raise UsageError("--json, --csv, --md: expected at most one of them on stdout.")
        if len(set(targets)) < len(targets):
            raise UsageError("--json, --csv, --md: expected a file each, got one twice.")
        for target in targets:
            if target == "-":
                continue
            try:
                Path(target).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"{target}: can't be written: {error.strerror}.") from None
            if Path(target).is_dir():
                raise UsageError(f"{target}: expected a file, got a folder.")

    def save(self, report, partial: bool = False) -> None:
        """Write the files; a partial report goes to files only, not to stdout, and is no baseline, nor is one without a time.

        It says that it is interrupted: nothing could, once the process is killed.
        """
        document = report.document() | ({"interrupted": True} if partial else {})
        whole = not document["interrupted"] and any(result.ok for result in report.results)
        if self.keep and not partial and not whole:
            why = "was interrupted" if document["interrupted"] else "has no row with a time"
            self.console().print(f"--save: not kept as {self.keep!r}, since the run {why}")
        elif self.keep and not partial:
            from flashtile.bench import record, regress

            record.write(str(regress.baseline_path(self.keep, report.device)), record.to_text(document))
        self.write(document, partial)

    def write(self, document, partial: bool = False) -> None:
        """As save, of a document."""
        from flashtile.bench import record

        makers = ((self.json, record.to_text), (self.csv, record.to_csv), (self.md, record.to_markdown))
        for target, make in makers:
            if target and not (partial and record.is_stream(target)):
                record.write(target, make(document))


@dataclass
class JudgedOutputFlags(OutputFlags):
    """Also of commands whose exit code may tell how sure the numbers are."""

    strict: Annotated[bool, _output("Exit 5 when noisy or unclear; compare: 4 when slower.", "--strict")] = False


def make_console(*, stderr=False, quiet=False, no_color=False):
    """A rich console, wide: off a terminal nobody sees a margin, and on a narrow one rich would leave columns out."""
    from rich.console import Console

    console = Console(stderr=stderr, quiet=quiet, no_color=no_color or None, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(stderr=stderr, quiet=quiet, no_color=True, highlight=False, soft_wrap=True, width=200)
    console.width = max(200, console.width)
    return console


class Progress:
    """Says on stderr what is being done: a spinner on a terminal, else a line a second. `with` starts and ends it."""

    def __init__(self, enabled: bool):
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        self.enabled, self.on_terminal = enabled, self.console.is_terminal
        self._text, self._said, self._since = "starting", None, time.perf_counter()
        self._status = self._thread = None
        self._stop = threading.Event()

    def __enter__(self):
        if self.enabled and self.on_terminal:
            self._status = self.console.status(self._text, refresh_per_second=4)
            self._status.start()
        elif self.enabled:
            self._thread = threading.Thread(target=self._beat, name="flashtile-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        if self._status:
            self._status.stop()
        if self._thread:
            self._thread.join(timeout=2.0)

    def say(self, text: str) -> None:
        """Tell what is being done from now on."""
        self._text, self._since = text, time.perf_counter()
        if self._status:
            self._status.update(text)

    @contextmanager
    def paused(self):
        """Nothing is said inside, so that lines printed elsewhere stay whole."""
        if self._status:
            self._status.stop()
        try:
            yield
        finally:
            if self._status:
                self._status.start()

    def _beat(self):
        while not self._stop.wait(0.9):
            seconds = time.perf_counter() - self._since
            text = self._text if self._text != self._said else f"{self._text} ({seconds:.0f} s)"
            self._said = self._text
            print(text, file=sys.stderr, flush=True)


def command(function):
    """A typer command from a function of flag groups; its return value is the exit code, its errors become one."""
    groups = {name: parameter.annotation for name, parameter in inspect.signature(function).parameters.items()}
    flat, owners = [], {}
    for name, annotation in groups.items():
        if not is_dataclass(annotation):
            parameter = inspect.signature(function).parameters[name]
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        for field in fields(annotation):
            owners[field.name] = name
            flat.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                                          annotation=field.type))  # fmt: skip

    @functools.wraps(function)
    def wrapped(**values):
        arguments = {name: {} for name in groups}
        for key, value in values.items():
            if key in owners:
                arguments[owners[key]][key] = value
            else:
                arguments[key] = value
        built = {name: groups[name](**part) if is_dataclass(groups[name]) else part for name, part in arguments.items()}
        raise typer.Exit(_guarded(function, built))

    wrapped.__signature__ = inspect.Signature(flat)
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return wrapped


def _guarded(function, arguments) -> int:
    """function's exit code; what a user can mend is one line on stderr, what is our fault a traceback."""
    from flashtile.errors import FlashtileError, Unavailable

    try:
        return function(**arguments) or OK
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except FlashtileError as error:
        complain(str(error))
        return MISSING if isinstance(error, Unavailable) else USAGE
    except OSError as error:
        # Of a file or folder that the user named; a closed pipe has no name
        if error.filename is None:
            raise
        complain(f"{error.filename}: {error.strerror}.")
        return USAGE
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in INSTALLS:
            raise
        complain(f"{error.name} is not installed: {INSTALLS[package]}.")
        return MISSING


def complain(text: str) -> None:
    print(f"flashtile: {text}", file=sys.stderr)


def exit_code(report, strict_code=OK) -> int:
    """The code of a finished report: what is worst in it."""
    from flashtile.bench.engine import SUBJECT

    if report.interrupted:
        return INTERRUPTED
    statuses = {result.status for result in report.results}
    if "mismatch" in statuses:
        return MISMATCH
    if any(result.status == "error" and result.backend == SUBJECT for result in report.results):
        return INTERNAL
    if "ok" in statuses:
        return strict_code
    for status, code in (("error", INTERNAL), ("unavailable", MISSING), ("oom", MISSING), ("skipped", MISSING)):
        if status in statuses:
            return code
    return USAGE


def parse_fraction(text: str) -> float:
    """`2%` or `0.02` as 0.02.

    Raises:
        UsageError: neither.
    """
    from flashtile.bench.cases import UsageError

    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"threshold: expected a share such as 2% or 0.02, got {text!r}.")
    return value
