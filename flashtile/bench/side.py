"""One side of `flashtile regress`: a process that times the flashtile of one folder with the measuring core of another.

It reads orders from stdin, a JSON object a line, and answers each with one on stdout:

    {"prepare": config, "mode": mode, "seed": 0, "timer": "event", "l2": "cold", "check": true, "device": "cuda:0"}
        -> {"device_ms": ...} or {"status": ..., "reason": ...}
    {"block_ms": budget}        -> {"ms": median of one block of calls}
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

# flashtile comes from argv[1]; flashtile.bench from argv[2], so that both sides are measured by the same code.
_BOOT = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
import flashtile
spec = importlib.util.spec_from_file_location("flashtile.bench", sys.argv[2] + "/__init__.py",
                                              submodule_search_locations=[sys.argv[2]])
flashtile.bench = sys.modules["flashtile.bench"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(flashtile.bench)
from flashtile.bench.side import serve
serve()
"""


class Side:
    """The parent's end of such a process; `with` starts and ends it."""

    def __init__(self, folder):
        self.folder = str(Path(folder).resolve())

    def __enter__(self):
        command = [sys.executable, "-P", "-c", _BOOT, self.folder, str(Path(__file__).resolve().parent)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *exc):
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdout.close()

    def send(self, **order) -> None:
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            # The answer says so
            pass

    def answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            return {"status": "error", "reason": f"the process of {self.folder} ended with code {self._process.wait()}"}
        return json.loads(line)

    def ask(self, **order) -> dict:
        self.send(**order)
        return self.answer()


def serve() -> None:
    """Answer orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    # What anything else prints must not come between the answers.
    os.dup2(2, 1)
    prepared = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "prepare" in order:
                prepared = None
                prepared, reply = _prepare(order)
            else:
                reply = {"ms": prepared(order["block_ms"])}
        except Exception as error:
            first = (str(error).splitlines() or [""])[0][:300]
            reply = {"status": "error", "reason": f"{type(error).__name__}: {first}"}
        print(json.dumps(reply), file=answers, flush=True)


def _prepare(order):
    """(block, reply): a function of a budget in ms that times one block, and what there is to say of the case."""
    import torch

    from flashtile.bench import gate, measure, peers, stats
    from flashtile.bench.cases import BenchCase, make_inputs

    device, mode = torch.device(order["device"]), order["mode"]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    case = BenchCase.from_config(order["prepare"])
    q, k, v, dout = make_inputs(case, device, order["seed"], dout=mode != "fwd")
    leaves = [x.requires_grad_(mode != "fwd") for x in (q, k, v)]

    attend = peers.load("flashtile", str(device))

    def forward(case=case):
        return attend(*leaves, case)

    def forward_backward():
        return torch.autograd.grad(forward(), leaves, dout)

    def with_gradients(out, retain=False):
        return out, torch.autograd.grad(out, leaves, dout, retain_graph=retain) if mode != "fwd" else None

    out, grads = with_gradients(forward(), retain=mode == "bwd")
    if order["check"]:
        checked = with_gradients(forward(replace(case, dropout=0.0))) if case.dropout else (out, grads)
        accuracy = gate.make(case, (q, k, v, dout)).check(*checked)
        if not accuracy.passed:
            return None, {"status": "mismatch", "reason": gate.describe_mismatch(accuracy)}
    fn = {"fwd": forward, "fwd_bwd": forward_backward}.get(mode)
    fn = fn or (lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    watch = measure.Stopwatch(device, order["timer"], order["l2"])
    warm = measure.warm_up(watch, fn)

    def block(budget_ms):
        calls = max(3, warm.calls_in(budget_ms))
        return stats.quantile(sorted(watch.block(fn, calls, warm.head_start_ms(calls))), 0.5)

    return block, {"device_ms": warm.device_ms}
