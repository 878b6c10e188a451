"""Run the peers' own tests, unmodified, against flashtile: a random sample of their cases, on a GPU.

    git clone https://github.com/Dao-AILab/flash-attention
    python benchmarks/peer_tests.py fa2 flash-attention --cases 3000 --workers 8
    python benchmarks/peer_tests.py fa3 flash-attention --cases 1500
    python benchmarks/peer_tests.py fa3-compile flash-attention
    python benchmarks/peer_tests.py fa2-rotary flash-attention --cases 200

    git clone https://github.com/deepseek-ai/FlashMLA
    python benchmarks/peer_tests.py flash-mla FlashMLA --cases 500

Needs pytest, einops, and pytest-xdist for --workers. The names flash_attn and flash_attn_interface are answered by
`flashtile.compat.install()`; nothing of the peer is built or imported but its test files. Options of a call are drawn with
--seed, and run at all lengths that the test has: other options need kernels of their own, whose compilation takes nearly all of
the time. Each test function has the same number of cases, or all that it has if they are fewer. Further options go to pytest.
Exits with pytest's code; --report writes a JSON summary, again after each case, so that of a run that is stopped the part that
ran is known. What fails for a reason is in docs/compat.md.

FlashMLA's dense decode test is a script: its cases are drawn in the same way, for bf16 and fp16, without its timing, which
looks for a kernel by its name.
"""

import argparse
import json
import os
import random
import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from itertools import product
from math import ceil, prod
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
# test file, and the environment that switches off what flashtile has not, in the words of the file
SUITES = {
    "fa2": ("tests/test_flash_attn.py", {}),
    "fa2-rotary": ("tests/test_rotary.py", {}),
    # LOCAL brings attention_chunk, HDIM64 value head dims of 512. One of its tests holds 70 GiB: no --workers
    "fa3": ("hopper/test_flash_attn.py", {f"FLASH_ATTENTION_DISABLE_{x}": "TRUE" for x in ("FP8", "LOCAL", "HDIM64")}),
    "fa3-compile": ("hopper/test_torch_compile_and_export.py", {}),
    "flash-mla": ("tests/test_flash_mla_dense_decoding.py", {}),
}
# Names of the variables that carry arguments to the workers of pytest-xdist
CASES, SEED, FUNCTIONS = "FLASHTILE_PEER_CASES", "FLASHTILE_PEER_SEED", "FLASHTILE_PEER_FUNCTIONS"
# Parameters that change no kernel
LENGTHS = {"seqlen", "seqlen_q", "seqlen_k"}


def pytest_configure(config):
    from flashtile import compat

    compat.install()


def pytest_runtest_teardown():
    # To the workers that share the GPU
    torch.cuda.empty_cache()


def pytest_generate_tests(metafunc):
    """Draw from the product of a function's parametrize marks: to collect all half a million would take minutes."""
    marks = list(metafunc.definition.iter_markers("parametrize"))
    if not marks:
        return
    names = [[name.strip() for name in mark.args[0].split(",")] for mark in marks]
    values = [list(mark.args[1]) for mark in marks]
    is_lengths = [LENGTHS.issuperset(argnames) for argnames in names]
    at_lengths = prod(len(choices) for choices, lengths in zip(values, is_lengths) if lengths)
    total = prod(map(len, values)) // at_lengths
    wanted = min(total, ceil(int(os.environ[CASES]) / int(os.environ[FUNCTIONS]) / at_lengths))
    drawn = random.Random(f"{os.environ[SEED]} {metafunc.function.__name__}").sample(range(total), wanted)
    cases = []
    for number in drawn:
        options = []
        for choices, lengths in zip(values, is_lengths):
            if lengths:
                options.append(choices)
            else:
                number, index = divmod(number, len(choices))
                options.append(choices[index : index + 1])
        for case in product(*options):
            cases.append([x for argnames, value in zip(names, case) for x in (value if len(argnames) > 1 else [value])])
    metafunc.definition.own_markers[:] = [mark for mark in metafunc.definition.own_markers if mark.name != "parametrize"]
    metafunc.parametrize([name for argnames in names for name in argnames], cases)


class Tally:
    """Outcomes by test function, and the failed cases with the last line of their error."""

    def __init__(self, description, report):
        self.description, self.report = description, report
        self.outcomes, self.failed = {}, {}

    def add(self, function, case, outcome, error=""):
        self.outcomes.setdefault(function, Counter())[outcome] += 1
        if outcome == "failed":
            self.failed[case] = error[:300]
        if self.report:
            self.report.write_text(self.summary())

    def summary(self):
        return json.dumps(self.description | {"outcomes": self.outcomes, "failed": self.failed}, indent=1)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            case = report.nodeid.split("::")[-1]
            error = str(report.longrepr).strip().splitlines()[-1] if report.outcome == "failed" else ""
            self.add(case.split("[")[0], case, report.outcome, error)


def run_flash_mla(file, arguments, tally):
    """Run a sample of the cases that the script's main goes through; returns an exit code."""
    from flashtile.compat import flash_mla

    sys.modules["flash_mla"] = flash_mla
    module = import_module(file.stem)
    test = module.test_flash_mla
    for dtype in (torch.bfloat16, torch.float16):
        cases = []
        module.test_flash_mla = cases.append
        # It sets torch's default dtype and device, too
        module.main(dtype)
        wanted = min(len(cases), -(-arguments.cases // 2))
        for case in random.Random(f"{arguments.seed} {dtype}").sample(cases, wanted):
            name = f"{test.__name__} {dtype}"
            try:
                test(replace(case, test_performance=False))
                tally.add(name, f"{name} {case}", "passed")
            except Exception as error:
                tally.add(name, f"{name} {case}", "failed", f"{type(error).__name__}: {error}")
    return 1 if tally.failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("path", type=Path, help="the peer's repository")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes side by side (pytest-xdist)")
    parser.add_argument("--report", type=Path, help="a JSON file for the outcome")
    arguments, further = parser.parse_known_args()
    if arguments.suite == "flash-mla" and (arguments.workers or further):
        parser.error("flash-mla is a script, run in this process: no --workers and no options of pytest")
    name, environment = SUITES[arguments.suite]
    file = arguments.path / name
    if not file.exists():
        parser.error(f"{file} does not exist: give the root of the peer's repository")
    functions = file.read_text().count("\ndef test_")
    os.environ.update(environment | {CASES: str(arguments.cases), SEED: str(arguments.seed), FUNCTIONS: str(functions)})
    # Workers find flashtile, this plugin, and what lies beside the test file
    paths = [str(ROOT), str(Path(__file__).parent), str(file.parent)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    description = {"suite": arguments.suite, "cases": arguments.cases, "seed": arguments.seed, "environment": environment}
    tally = Tally(description, arguments.report)
    if arguments.suite == "flash-mla":
        code = run_flash_mla(file, arguments, tally)
    else:
        code = run_pytest(file, arguments, further, tally)
    print(tally.summary())
    return code


def run_pytest(file, arguments, further, tally):
    import pytest

    command = [str(file), "-p", Path(__file__).stem, "-p", "no:cacheprovider", "--rootdir", str(file.parent), "-q",
               "--tb=line", "-c", os.devnull, *further]  # fmt: skip
    if arguments.workers:
        command += ["-n", str(arguments.workers)]
    return pytest.main(command, plugins=[tally])


if __name__ == "__main__":
    sys.exit(main())
