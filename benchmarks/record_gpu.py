"""Everything that CI can't see, on this GPU, in one command; writes the records that go to benchmarks/results/<gpu>/.

    python benchmarks/record_gpu.py OUT [--commit HASH] [--tier portable,hopper,ladder] [--only tests,run,...]

Steps, each a subprocess with a time limit whose end is kept in OUT/gpu-suite.json: the GPU tests (pytest, as many processes as
fit), compute-sanitizer on one small case a feature, `flashtile compare` on the paper's grid against SDPA's flash and cuDNN
backends, `flashtile run` with its defaults, and a short training run. About four minutes a tier on an H200, compiling included.
The ladder has steps of its own: its tests, the checkers, `flashtile ladder run`, and hardware counters; some two minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# of pytest; each has a context on the GPU
PROCESSES = str(min(14, os.cpu_count() or 1))


def steps(tier, out, commit):
    """{name: (limit in seconds, command)}."""
    python = [sys.executable]
    flashtile = [*python, "-m", "flashtile"]
    paper = [*flashtile, "compare", *commit, "--preset", "paper", "--backend", "flashtile,sdpa-flash,sdpa-cudnn",
             "--rounds", "9", "--rep-ms", "60", "--no-progress", "--json", str(out / f"paper-{tier}.json")]  # fmt: skip
    checker = ["compute-sanitizer", "--print-limit", "3", "--error-exitcode", "9", "--tool"]
    features = [*python, "tests/gpu/sanitize.py", tier]
    tests = [*python, "-m", "pytest", "tests/gpu", "-q", "-n", PROCESSES, "-k", f"{tier} or not hopper"]
    return {
        "tests": [(480, tests)],
        "sanitizer": [(120, features), (200, [*checker, "memcheck", *features]), (200, [*checker, "racecheck", *features])] + [
            # What racecheck reports of an mbarrier by itself: see tests/gpu/sanitize.py
            (60, [*checker, "racecheck", *python, "tests/gpu/sanitize.py", "control"])] * (tier == "hopper"),
        "paper": [(200, paper)],
        "run": [(60, [*flashtile, "run", *commit, "--json", str(out / f"run-{tier}.json")])],
        "train": [(120, [*python, "examples/train_bytes.py", "--device", "cuda", "--steps", "60"])],
    }


def ladder_steps(out, commit):
    """The same for the ladder."""
    python = [sys.executable]
    run = [*python, "-m", "flashtile", "ladder", "run", *commit, "--no-progress", "--nheads", "8"]
    lengths = ["--rung", "5,6,7,8,10,11", "--total-tokens", "16k", "-s", "1k..8k", "--causal", "both", "--mode", "fwd"]
    checker = ["compute-sanitizer", "--print-limit", "3", "--error-exitcode", "9", "--tool"]
    rungs = [*python, "tests/gpu/sanitize.py", "ladder"]
    return {
        "tests": [(120, [*python, "-m", "pytest", "tests/gpu/test_ladder_gpu.py", "-q", "-n", PROCESSES])],
        "run": [(120, [*run, "-b", "4", "-s", "4k", "--json", str(out / "ladder.json")]),
                (120, [*run, *lengths, "--json", str(out / "ladder-lengths.json")])],
        "sanitizer": [(90, [*checker, "memcheck", *rungs]), (90, [*checker, "racecheck", *rungs])],
        "counters": [(120, [*python, "benchmarks/profile_ladder.py", str(out / "ladder-counters.json"), *commit])],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", help="commit to record where there is no .git")
    parser.add_argument("--tier", default="portable")
    parser.add_argument("--only", default="tests,sanitizer,paper,run,train,counters")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    commit = ["--commit", arguments.commit] if arguments.commit else []
    records = []
    for tier in arguments.tier.split(","):
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = os.environ | {"FLASHTILE_TIER": f"{tier},portable", "PYTHONPATH": paths}
        if tier == "ladder":
            del environment["FLASHTILE_TIER"]
        steps_of_tier = ladder_steps(arguments.out, commit) if tier == "ladder" else steps(tier, arguments.out, commit)
        for name, commands in steps_of_tier.items():
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
                (arguments.out / f"{tier}-{name}.log").write_text(text)
                tail = text.strip().splitlines()[-12:]
                seconds = round(time.time() - start)
                records.append({"tier": tier, "step": name, "command": words, "exit": code, "seconds": seconds, "tail": tail})
                print(f"{tier} {name}: exit {code}, {seconds} s: {tail[-1] if tail else ''}", flush=True)
                suite = {"commit": arguments.commit, "steps": records}
                (arguments.out / "gpu-suite.json").write_text(json.dumps(suite, indent=1))
    return int(any(record["exit"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
