"""Hardware counters of attention's main kernels, forward and backward, by Nsight Compute: what limits each head dim.

    python benchmarks/attention_counters.py OUT.json [--commit HASH]

bf16, 8192 tokens, 2 sequences, 2048 / head_dim heads, full and causal, of flashtile and of those PEERS that are here. Writes
JSON: env, settings, and a row a kernel: of the second of two calls, on random data. A peer's kernels beside its main one, and
flashtile's, are left out. Needs ncu on the PATH and the right to read counters. Clocks are left alone.
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashtile.bench import profilers  # noqa: E402

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# Our name: the counter. Stalled: warps that wait for this at each instruction that is issued.
COUNTERS = {
    "time_ns": "gpu__time_duration.sum",
    "clocks": "sm__cycles_active.avg",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "exponentials_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "fma_percent": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "dram_bytes": "dram__bytes.sum",
    "l2_bytes": "lts__t_bytes.sum",
} | {f"stalled_{what}": STALL.format(what) for what in ("barrier", "gmma", "long_scoreboard", "short_scoreboard", "wait")}
MAIN = "attention_forward|attention_backward|device_kernel|sdpa_sm90_flash_[fb]prop_wgmma"
PEERS = ("sdpa-cudnn", "fa3")
SEQLEN, BATCH, WIDTH = 8192, 2, 2048
GRID = [
    {"mode": mode, "headdim": dim, "causal": causal} for mode, dim, causal in
    itertools.product(("fwd", "bwd"), (64, 128, 256), (False, True))
]  # fmt: skip


def rows():
    """A row without counters for each launch of call_all that ncu is to look at, in order."""
    from flashtile.bench import peers

    backends = ["flashtile", *(name for name in PEERS if peers.unavailable(name, "cuda") is None)]
    return [
        {"backend": name} | case for case in GRID for name in backends
        if case["mode"] == "fwd" or peers.BACKENDS[name].backward
    ]  # fmt: skip


def call_all():
    """What ncu watches: it looks at what runs between start and stop."""
    import torch

    from flashtile.bench import peers
    from flashtile.bench.cases import BenchCase, make_inputs

    for row in rows():
        dim = row["headdim"]
        case = BenchCase(batch=BATCH, seqlen_q=SEQLEN, seqlen_k=SEQLEN, num_heads=WIDTH // dim, num_heads_kv=WIDTH // dim,
                         head_dim=dim, head_dim_v=dim, dtype="bf16", causal=row["causal"])  # fmt: skip
        q, k, v, dout = make_inputs(case, "cuda", dout=True)
        attend, backward = peers.load(row["backend"], "cuda"), row["mode"] == "bwd"
        leaves = [x.requires_grad_(backward) for x in (q, k, v)]
        for watched in (False, True):
            if watched and not backward:
                torch.cuda.profiler.start()
            out = attend(*leaves, case)
            if backward:
                if watched:
                    torch.cuda.profiler.start()
                torch.autograd.grad(out, leaves, dout)
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def measure(sm) -> list[dict]:
    """rows() with counters, those that this chip has."""
    known = profilers.chip_metrics(sm)
    counters = {name: counter for name, counter in COUNTERS.items() if not known or counter.split(".")[0] in known}
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start",
               "off", "--kernel-name", f"regex:{MAIN}", "--metrics", ",".join(counters.values()),
               sys.executable, __file__, "--call"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    launches = profilers.ncu_rows(done.stdout)
    if not launches:
        raise SystemExit(f"ncu saw no kernel:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    wanted = rows()
    if len(launches) != len(wanted):
        names = "\n".join(launch["Kernel Name"][:100] for launch in launches)
        raise SystemExit(f"expected {len(wanted)} launches, got {len(launches)}:\n{names}")
    return [
        row | {"kernel": launch["Kernel Name"].partition("(")[0]}
        | {name: float(launch[counter].replace(",", "")) for name, counter in counters.items()}
        for row, launch in zip(wanted, launches)
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--commit", help="commit to record where there is no .git")
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call:
        return call_all()
    import torch

    from flashtile import hardware
    from flashtile.bench import record

    measured = measure(hardware.detect("cuda").sm)
    for row in measured:
        words = [f"{name} {value:.4g}" if isinstance(value, float) else str(value) for name, value in row.items()]
        print("  ".join(words))
    settings = {"batch": BATCH, "seqlen": SEQLEN, "nheads": f"{WIDTH} / headdim", "dtype": "bf16", "counters": COUNTERS,
                "command": "python benchmarks/attention_counters.py"}  # fmt: skip
    document = {"env": record.environment(torch.device("cuda"), arguments.commit), "settings": settings, "rows": []}
    lines = ",\n  ".join(map(json.dumps, measured))
    text = json.dumps(document, indent=1).replace('"rows": []', f'"rows": [\n  {lines}\n ]')
    record.write(str(arguments.out), text + "\n")


if __name__ == "__main__":
    main()
