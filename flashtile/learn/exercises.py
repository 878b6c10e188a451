"""The table of exercises, mastery levels and reading paths, and how an exercise is begun and checked. Imports no torch."""

import importlib.util
import traceback
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from flashtile.errors import FlashtileError, Unavailable

LEVELS = {
    1: "Theory: why it is fast, online softmax, tiles, exactness",
    2: "Implementation: run and change the algorithm, find what is wrong",
    3: "Optimisation: name the bound, choose a tile, measure",
    4: "Production: caches, split-KV, MLA",
}
# name: what it is for, and the parts of the guide in order
PATHS = {
    "beginner": ("understand the algorithm", "1, 3 (PyTorch), 2, 4 (first half)"),
    "implementer": ("write such kernels", "1, 3, 4, 5, 2"),
    "expert": ("serve it in production", "5, 4, 3 (CUDA), 2, 1"),
    "researcher": ("change the algorithm", "1, 2, 5, 4, 3"),
}


class Exercise(NamedTuple):
    """name: of the file in stubs and of the check. level: a key of LEVELS. part: of the guide."""

    name: str
    title: str
    level: int
    part: int


EXERCISES = {
    exercise.name: exercise
    for exercise in (
        Exercise("softmax", "write online softmax", 1, 1),
        Exercise("forward", "write the tiled forward pass", 1, 1),
        Exercise("causal", "add a causal mask", 2, 1),
        Exercise("dropout", "add dropout", 2, 1),
        Exercise("bug", "find the planted bug", 2, 1),
        Exercise("backward", "write the tiled backward pass", 2, 1),
        Exercise("kernel", "complete a Triton kernel", 2, 3),
        Exercise("tile", "choose a tile by arithmetic", 3, 4),
        Exercise("bound", "predict the bound, then measure", 3, 1),
        Exercise("combine", "combine the pieces of split-KV", 4, 5),
        Exercise("mla", "absorb the projections of MLA", 4, 5),
        Exercise("varlen", "list the tiles of a packed call", 4, 5),
    )
}


class UnknownExercise(FlashtileError, KeyError):
    """There is no exercise of that name."""

    def __str__(self):
        return self.args[0]


class Wrong(Exception):
    """A check failed; the message says with what, and what was expected."""


class Outcome(NamedTuple):
    """status: "new" (not begun), "todo" (still raises NotImplementedError), "wrong", "done", or "unchecked": this machine lacks
    what the check needs. words: what the check says.
    """

    status: str
    words: str = ""


def find(name: str) -> Exercise:
    """The exercise of a name.

    Raises:
        UnknownExercise: lists the names.
    """
    if name not in EXERCISES:
        raise UnknownExercise(f"no exercise is called {name!r}; there are {', '.join(EXERCISES)}.")
    return EXERCISES[name]


def path_of(exercise: Exercise, folder) -> Path:
    return Path(folder) / f"{exercise.name}.py"


def begin(exercise: Exercise, folder) -> Path:
    """Copy the file to complete into folder; what is there already stays."""
    path = path_of(exercise, folder)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((files("flashtile.learn") / "stubs" / path.name).read_text(encoding="utf-8"), encoding="utf-8")
    return path


def check(exercise: Exercise, folder) -> Outcome:
    """Run the check of an exercise on the file in folder."""
    path = path_of(exercise, folder)
    if not path.exists():
        return Outcome("new")
    from flashtile.learn import checks

    try:
        return Outcome("done", checks.CHECKS[exercise.name](_load(path)) or "")
    except NotImplementedError:
        return Outcome("todo")
    except Wrong as wrong:
        return Outcome("wrong", str(wrong))
    except Unavailable as missing:
        return Outcome("unchecked", str(missing))
    except (Exception, SystemExit) as error:  # the learner's own
        needed = {"numpy": "numpy<2.4", "triton": "triton"}.get(getattr(error, "name", None))
        if isinstance(error, ModuleNotFoundError) and needed:
            return Outcome("unchecked", f"{path.name} needs {error.name}: pip install '{needed}'")
        # a module's file is an absolute path, also where folder is not
        file = str(path.absolute())
        frame = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == file), None)
        where = f"{path.name}, line {frame.lineno}: " if frame else ""
        return Outcome("wrong", f"{where}{type(error).__name__}: {error}")


def _load(path):
    """A file as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"flashtile_exercise_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
