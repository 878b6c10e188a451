"""The recorded runs of the measuring commands on this GPU, in one command; minutes on an H200, two of them guide and
regress.

    python benchmarks/record_bench.py OUT [--commit HASH] [--only guide,leetcuda,memory,regress,scale,features,train,...]

Writes to OUT what belongs under benchmarks/results/<gpu>/:

    guide.json, leetcuda.json                        the FlashAttention-2 guide's cases, LeetCUDA's sweep
    memory.json, memory-train.json, scale-batch.json
    features.json, train.json                        beside the grid of the papers, and what training sees of three models, with
                                                     FlashAttention-3 and -4 where they are installed
    deterministic.json                               the backward of the papers' grid with deterministic=True, and without
    scale-strong.json, scale-weak.json               with --only gpus, on a machine with several
    regress-same.json, regress-slowed.json           flashtile against itself, and against a copy whose forward pass is followed
                                                     by a spinning kernel of 5% of its time: SAME, and SLOWER with exit code 4
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASE = ["-b", "4", "-s", "4096", "--nheads", "16", "-d", "128"]
SLOWDOWN = 0.05
_SLOWED = '''

def _slowed(attention):
    import torch

    def slowed(*arguments, **options):
        out = attention(*arguments, **options)
        torch.cuda._sleep({cycles})
        return out

    return slowed


attention = _slowed(attention)
'''


def flashtile(*arguments, expected=0):
    """Run a command; its output only where it ends with another code than expected."""
    command = [sys.executable, "-m", "flashtile", *arguments, "--no-progress"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(f"flashtile {' '.join(arguments)}: exit {done.returncode}", flush=True)
    if done.returncode != expected:
        print(done.stdout[-3000:], done.stderr[-3000:])
    return done.returncode == expected


def slowed_copy(folder, run):
    """A copy of flashtile whose forward pass takes 5% longer than in the record of a run."""
    shutil.copytree(ROOT / "flashtile", folder / "flashtile", ignore=shutil.ignore_patterns("__pycache__"))
    row = json.loads(run.read_text())["results"][0]
    cycles = SLOWDOWN * row["stats"]["median"] * 1e3 * row["telemetry"]["sm_mhz_median"]
    with (folder / "flashtile" / "api.py").open("a") as file:
        file.write(_SLOWED.format(cycles=round(cycles)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", help="commit to record where there is no .git")
    parser.add_argument("--only", default="guide,leetcuda,memory,regress,scale,features,train,deterministic")
    arguments = parser.parse_args()
    out, commit = arguments.out, ["--commit", arguments.commit] if arguments.commit else []
    peers = "flashtile,naive,sdpa-flash,sdpa-cudnn"
    rounds = ["--rounds", "9", "--rep-ms", "45"]
    fast = ["--backend", "flashtile,sdpa-flash,sdpa-cudnn,torch-varlen,fa3,fa4", "--baseline", "flashtile", *rounds, *commit]
    done = []
    for step in arguments.only.split(","):
        if step == "guide":
            presets = "guide-small,guide-medium,guide-large,guide-backward"
            done.append(flashtile("compare", "--preset", presets, "--backend", peers, "--baseline", "naive", *rounds, *commit,
                                  "--json", f"{out}/guide.json"))  # fmt: skip
        if step == "leetcuda":
            done.append(flashtile("compare", "--preset", "leetcuda", "--dtype", "fp16", "--mode", "fwd", "--backend", peers,
                                  "--baseline", "naive", *rounds, *commit, "--json", f"{out}/leetcuda.json"))  # fmt: skip
        if step == "memory":
            shape = ["-b", "2", "--nheads", "16", "-d", "128", "-s", "64..64k"]
            done.append(flashtile("memory", *shape, *commit, "--json", f"{out}/memory.json"))
            done.append(flashtile("memory", *shape, "--train", *commit, "--json", f"{out}/memory-train.json"))
        if step == "scale":
            done.append(flashtile("scale", "-b", "1..16", "-s", "1024", "--nheads", "16", "-d", "64", "--mode", "fwd", *commit,
                                  "--json", f"{out}/scale-batch.json"))  # fmt: skip
        if step == "features":
            done.append(flashtile("compare", "--preset", "features", *fast, "--json", f"{out}/features.json"))
        if step == "train":
            models = "gpt2-small,gpt3,llama3-8b-prefill"
            done.append(flashtile("compare", "--preset", models, "--mode", "fwd_bwd", *fast, "--json", f"{out}/train.json"))
        if step == "deterministic":
            both = ["--backend", "flashtile,flashtile-deterministic", "--baseline", "flashtile-deterministic"]
            done.append(flashtile("compare", "--preset", "paper", "--mode", "bwd", *both, *rounds, *commit,
                                  "--json", f"{out}/deterministic.json"))  # fmt: skip
        if step == "gpus":
            for kind in ("strong", "weak"):
                shape = ["-b", "8", "-s", "8k", "--nheads", "16", "-d", "128", "--causal", "--mode", "fwd_bwd"]
                done.append(flashtile("scale", "--kind", kind, *shape, *commit, "--json", f"{out}/scale-{kind}.json"))
        if step == "regress":
            with tempfile.TemporaryDirectory() as folder:
                run, slowed = Path(folder, "run.json"), Path(folder, "slowed-by-5-percent")
                done.append(flashtile("run", *CASE, "--mode", "fwd", "--no-roof", "--json", str(run)))
                slowed_copy(slowed, run)
                regress = ["regress", "--baseline", str(ROOT), *CASE, "--mode", "fwd", *commit]
                done.append(flashtile(*regress, "--json", f"{out}/regress-same.json"))
                done.append(flashtile(*regress, "--against", str(slowed), "--json", f"{out}/regress-slowed.json", expected=4))
    return int(not all(done))


if __name__ == "__main__":
    sys.exit(main())
