"""Run the kernel of a completed exercise, in a process of its own: Triton decides once, on import, whether it interprets.

    python -P run_kernel.py EXERCISE.py CASES RESULTS

CASES: what torch.save wrote, a list of (q, k, v, causal). RESULTS: for torch.load, {"results": [(out, lse), ...]}, or
{"error": what a learner wants to know of it}. With a GPU the tensors go there, else TRITON_INTERPRET=1 must be set.
"""

import importlib.util
import sys
import traceback
from pathlib import Path

import torch


def main(exercise, cases, results):
    try:
        told = {"results": outcomes(exercise, torch.load(cases))}
    except (Exception, SystemExit) as error:  # the learner's own
        told = {"error": describe(error, exercise)}
    torch.save(told, results)


def outcomes(exercise, cases):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = importlib.util.spec_from_file_location("flashtile_exercise_kernel", exercise)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [tuple(x.cpu() for x in module.forward(*(x.to(device) for x in qkv), causal)) for *qkv, causal in cases]


def describe(error, exercise):
    """What was caught first, not what wraps it; with the learner's line, which what the compiler says has in it."""
    while wraps(error):
        error = error.__cause__
    frame = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == exercise), None)
    where = f", line {frame.lineno}" if frame else ""
    return f"{Path(exercise).name}{where}: {type(error).__name__}: {error}"


def wraps(error):
    """The interpreter wraps every error of a kernel, the compiler those of the functions that it calls."""
    names = {base.__name__ for base in type(error.__cause__).__mro__}
    return error.__cause__ is not None and (type(error).__name__ == "InterpreterError" or "CompilationError" in names)


if __name__ == "__main__":
    main(*sys.argv[1:])
