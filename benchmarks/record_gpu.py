"""Everything that CI can't see, on this GPU, in one command; writes the records that go to benchmarks/results/<gpu>/.

    python benchmarks/record_gpu.py OUT [--commit HASH] [--part portable,hopper,kvcache,...] [--only tests,run,...]

Steps, each a subprocess with a time limit whose end is kept in OUT/gpu-suite.json. Of a tier: the GPU tests (pytest, as many
processes as fit), compute-sanitizer on one small case a feature, `flashtile compare` on the paper's grid, `flashtile run` with
its defaults, and a short training run; about four minutes on an H200, compiling included. The others have tests, checkers and
records of their own, some two minutes each.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = [sys.executable]
FLASHTILE = [*PYTHON, "-m", "flashtile"]
# Of kernels: cuda-core probes for driver functions that older drivers lack, which the checker counts as errors of the program
CHECKER = ["compute-sanitizer", "--report-api-errors", "no", "--print-limit", "3", "--error-exitcode", "9", "--tool"]


def pytest(*arguments):
    # each process has a context on the GPU
    return [*PYTHON, "-m", "pytest", "-q", "-n", str(min(14, os.cpu_count() or 1)), *arguments]


def checked(*script, tools=("memcheck", "racecheck")):
    """Commands that run a script by itself, so that its kernels are compiled, and then under the checkers."""
    script = [*PYTHON, *script]
    return [(120, script), *((200, [*CHECKER, tool, *script]) for tool in tools)]


def tier_steps(tier, out, commit):
    """{name: [(limit in seconds, command)]} of portable or hopper."""
    others = "kvcache or mla or ladder or bench"
    paper = [*FLASHTILE, "compare", *commit, "--preset", "paper", "--backend", "flashtile,sdpa-flash,sdpa-cudnn",
             "--rounds", "9", "--rep-ms", "60", "--no-progress", "--json", str(out / f"paper-{tier}.json")]  # fmt: skip
    # What racecheck reports of an mbarrier by itself: see tests/gpu/sanitize.py
    control = [(60, [*CHECKER, "racecheck", *PYTHON, "tests/gpu/sanitize.py", "control"])] if tier == "hopper" else []
    return {
        "tests": [(480, pytest("tests/gpu", "-k", f"({tier} or not hopper) and not ({others})"))],
        "sanitizer": checked("tests/gpu/sanitize.py", tier) + control,
        "paper": [(200, paper)],
        "run": [(60, [*FLASHTILE, "run", *commit, "--json", str(out / f"run-{tier}.json")])],
        "train": [(120, [*PYTHON, "examples/train_bytes.py", "--device", "cuda", "--steps", "60"])],
    }


def kvcache_steps(out, commit):
    return {
        "tests": [(200, pytest("tests/gpu/test_kvcache_gpu.py"))],
        "sanitizer": checked("tests/gpu/sanitize.py", "kvcache"),
        "run": [(200, [*PYTHON, "benchmarks/decode.py", str(out / "decode.json"), *commit])],
        "train": [(120, [*PYTHON, "examples/generate_paged.py"])],
    }


def mla_steps(out, commit):
    steps = {"tests": [(300, pytest("tests/gpu/test_mla_gpu.py"))], "sanitizer": [], "run": []}
    for tier in ("portable", "hopper"):
        steps["sanitizer"] += checked("tests/gpu/sanitize_mla.py", tier)
        rows = ["--tier", tier, *(["--only", "dense"] if tier == "hopper" else [])]
        steps["run"].append((200, [*PYTHON, "benchmarks/mla.py", str(out / f"mla-{tier}.json"), *rows, *commit]))
    return steps


def ladder_steps(out, commit):
    run = [*FLASHTILE, "ladder", "run", *commit, "--no-progress", "--nheads", "8"]
    lengths = ["--rung", "5,6,7,8,10,11", "--total-tokens", "16k", "-s", "1k..8k", "--causal", "both", "--mode", "fwd"]
    return {
        "tests": [(120, pytest("tests/gpu/test_ladder_gpu.py"))],
        "run": [(120, [*run, "-b", "4", "-s", "4k", "--json", str(out / "ladder.json")]),
                (120, [*run, *lengths, "--json", str(out / "ladder-lengths.json")])],
        "sanitizer": checked("tests/gpu/sanitize.py", "ladder"),
        "counters": [(120, [*PYTHON, "benchmarks/profile_ladder.py", str(out / "ladder-counters.json"), *commit])],
    }  # fmt: skip


def integrations_steps(out, commit):
    """What of the drop-in parts shows only on a GPU."""
    return {
        "tests": [(300, pytest(*sorted(map(str, (ROOT / "tests").glob("test_integrations*.py"))), "-m", "gpu"))],
        "run": [(120, [*PYTHON, "benchmarks/host_overhead.py", str(out / "host-overhead.json"), *commit])],
    }


PARTS = {"kvcache": kvcache_steps, "mla": mla_steps, "ladder": ladder_steps, "integrations": integrations_steps}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", help="commit to record where there is no .git")
    parser.add_argument("--part", default="portable,hopper")
    parser.add_argument("--only", default="tests,sanitizer,paper,run,train,counters")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    commit = ["--commit", arguments.commit] if arguments.commit else []
    records = []
    for part in arguments.part.split(","):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        if part in PARTS:
            steps = PARTS[part](arguments.out, commit)
        else:
            steps = tier_steps(part, arguments.out, commit)
            environment["FLASHTILE_TIER"] = f"{part},portable"
        for name, commands in steps.items():
            if name not in arguments.only.split(","):
                continue
            for limit, command in commands:
                start = time.time()
                try:
                    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
                    code, text = run.returncode, run.stdout + run.stderr
                except subprocess.TimeoutExpired as error:
                    code, text = -1, f"stopped after {limit} s\n{(error.stdout or b'').decode(errors='replace')}"
                except FileNotFoundError as error:
                    code, text = -2, str(error)
                words = " ".join(command).replace(sys.executable, "python").replace(str(arguments.out), "OUT")
                with (arguments.out / f"{part}-{name}.log").open("a") as log:
                    log.write(text)
                lines = [line for line in text.splitlines() if line.strip() and "PytestBenchmarkWarning" not in line]
                tail = lines[-12:]
                seconds = round(time.time() - start)
                records.append({"part": part, "step": name, "command": words, "exit": code, "seconds": seconds, "tail": tail})
                print(f"{part} {name}: exit {code}, {seconds} s: {tail[-1] if tail else ''}", flush=True)
                suite = {"commit": arguments.commit, "steps": records}
                (arguments.out / "gpu-suite.json").write_text(json.dumps(suite, indent=1))
    return int(any(record["exit"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
