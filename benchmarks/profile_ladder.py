"""Hardware counters of every rung of the ladder, by Nsight Compute: what limits each, and that rung 6 has no bank conflicts.

    python benchmarks/profile_ladder.py OUT.json [--commit HASH] [--seqlen 2048]

Writes JSON: env, settings, and one row a rung and kernel, its counters summed (times, bytes, counts) or averaged (percent) over
the kernel's launches of one call. Needs ncu on the PATH and the right to read counters. Clocks are left alone.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# our name: the counter
COUNTERS = {
    "time_us": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "blocks": "launch__grid_size",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor_core_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "fp32_percent": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "dram_bytes": "dram__bytes.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
}
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Kbyte/block": 1e3}
SUMMED = ("time_us", "dram_bytes", "l2_bytes", "shared_wavefronts", "bank_conflicts")
DTYPE = {"fp32": "float32", "fp16": "float16"}
BATCH, HEADS, HEAD_DIM = 2, 8, 64


def expected(seqlen) -> list[tuple[int, str]]:
    """(rung, kernel) of every launch of call_all, in order."""
    from flashtile.ladder import rungs

    steps = -(-seqlen // rungs.get(3).configs[HEAD_DIM].tile_n)
    kernels = {1: ["scores", "softmax", "output"], 3: ["step"] * steps, 9: ["delta", "dkdv", "dq"]}
    numbers = [number for number, rung in rungs.RUNGS.items() if not rung.tier]
    return [(number, kernel) for number in numbers for kernel in kernels.get(number, ["forward"])]


def call_all(seqlen):
    """One call of each rung on random data; what ncu watches."""
    import torch

    from flashtile.ladder import launch, rungs

    torch.manual_seed(0)
    for number, rung in rungs.RUNGS.items():
        if rung.tier:
            continue
        dtype = getattr(torch, DTYPE[rung.dtypes[0]])
        q, k, v, dout = (torch.randn(BATCH, seqlen, HEADS, HEAD_DIM, device="cuda", dtype=dtype) for _ in range(4))
        if rung.direction == "forward":
            launch.forward(number, q, k, v)
        else:
            lse = torch.full((BATCH, HEADS, seqlen), 5.0, device="cuda")
            launch.backward(number, q, k, v, q, lse, dout)
    torch.cuda.synchronize()


def profile(seqlen) -> list[dict]:
    """A row a rung and kernel."""
    launches = expected(seqlen)
    pattern = f"regex:^({'|'.join({kernel for _, kernel in launches})})$"
    command = ["ncu", "--csv", "--clock-control", "none", "--kernel-name", pattern, "--metrics", ",".join(COUNTERS.values()),
               sys.executable, __file__, "--call", "--seqlen", str(seqlen)]  # fmt: skip
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200).stdout
    names = {counter: name for name, counter in COUNTERS.items()}
    found = {}
    for row in csv.DictReader(io.StringIO(text[text.index('"ID"') :])):
        launch = launches[int(row["ID"])]
        if row["Kernel Name"].partition("(")[0] != launch[1]:
            raise SystemExit(f"launch {row['ID']}: expected {launch[1]} of rung {launch[0]}, got {row['Kernel Name']}")
        value = float(row["Metric Value"].replace(",", "")) * UNITS.get(row["Metric Unit"], 1.0)
        found.setdefault(launch, {}).setdefault(names[row["Metric Name"]], []).append(value)
    return [
        {"rung": number, "kernel": kernel, "launches": len(counters["time_us"])}
        | {name: sum(values) / (1 if name in SUMMED else len(values)) for name, values in counters.items()}
        for (number, kernel), counters in found.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--commit", help="commit to record where there is no .git")
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if arguments.call:
        return call_all(arguments.seqlen)
    import torch

    from flashtile.bench import record

    rows = profile(arguments.seqlen)
    for row in rows:
        print(row)
    settings = {"batch": BATCH, "seqlen": arguments.seqlen, "nheads": HEADS, "headdim": HEAD_DIM, "causal": False,
                "counters": COUNTERS,
                "command": f"python benchmarks/profile_ladder.py OUT.json --seqlen {arguments.seqlen}"}  # fmt: skip
    document = {"env": record.environment(torch.device("cuda"), arguments.commit), "settings": settings, "rows": rows}
    lines = ",\n  ".join(map(json.dumps, rows))
    text = json.dumps(document | {"rows": []}, indent=1).replace('"rows": []', f'"rows": [\n  {lines}\n ]')
    record.write(str(arguments.out), text + "\n")


if __name__ == "__main__":
    main()
