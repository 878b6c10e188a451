"""Time candidate tiles of the portable kernels on this GPU, for the table in flashtile/tiles.py.

    python benchmarks/tune_portable.py OUT.json [--quick] [--commit HASH]

Compiles the candidates in parallel, then times each kernel alone on random bf16 data: batch x seqlen = 16384 tokens, heads =
2048 / head dim, cold L2, median of triton.testing.do_bench. OUT.json has one row a measurement:
{"kernel", "head_dim", "seqlen", "causal", "config": [tile_m, tile_n, num_warps, num_stages], "ms"}.
"""

import argparse
import itertools
import json
import multiprocessing

import torch

from flashtile.bench import record
from flashtile.portable import backward, forward
from flashtile.portable.arguments import common_arguments
from flashtile.problem import AttentionProblem, Operands
from flashtile.tiles import TileConfig

CANDIDATES = {
    "forward": {
        64: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 4), (128, 128, 8, 3)],
        128: [(64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 32, 4, 3), (64, 32, 4, 4)],
        256: [(128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 1)],
    },
    "dkdv": {
        64: [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (32, 64, 4, 3), (32, 64, 4, 4), (64, 128, 8, 3), (32, 128, 4, 3)],
        128: [(32, 64, 4, 3), (32, 64, 4, 4), (32, 128, 8, 3), (32, 128, 8, 4), (16, 64, 4, 4), (64, 64, 4, 2)],
        256: [(32, 64, 8, 3), (32, 64, 8, 2), (32, 64, 8, 4), (64, 64, 8, 2), (32, 32, 4, 3), (16, 64, 8, 3), (32, 128, 8, 2)],
    },
    "dq": {
        64: [(64, 64, 4, 3), (128, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (128, 32, 4, 3), (64, 128, 4, 2)],
        128: [(128, 64, 8, 3), (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2), (128, 32, 8, 4), (128, 128, 8, 1)],
        256: [(128, 32, 8, 3), (128, 64, 8, 1), (128, 32, 8, 2), (64, 32, 4, 3), (64, 16, 4, 3), (64, 32, 8, 3)],
    },
}
SEQLENS = (512, 2048, 16384)


def launcher(kernel, config, head_dim, seqlen, causal, tokens=16384, heads=None):
    """A function without arguments that runs one kernel once."""
    shape = (max(1, tokens // seqlen), seqlen, heads or 2048 // head_dim, head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    operands = Operands(q, k, v)
    problem = AttentionProblem.from_tensors(operands, causal=causal)
    config = TileConfig(*config)
    if kernel == "forward":
        return lambda: forward.launch(problem, config, operands)
    common = common_arguments(problem, operands)
    # Any lse and delta cost the same; this one keeps p near 1 / seqlen.
    lse = torch.full(problem.lse_shape, 7.0, device="cuda")
    delta = torch.randn_like(lse)
    launch = {"dkdv": backward.launch_dkdv, "dq": backward.launch_dq}[kernel]
    return lambda: launch(problem, config, common, operands, lse, delta, dout)


def compile_one(candidate):
    """Why a candidate does not run on this GPU, or None; leaves the kernel in Triton's cache."""
    kernel, head_dim, config, causal = candidate
    try:
        launcher(kernel, config, head_dim, 256, causal, tokens=256, heads=2)()
        torch.cuda.synchronize()
    except Exception as error:  # a candidate may ask for more shared memory than there is
        return f"{type(error).__name__}: {error}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--quick", action="store_true", help="sequence length 2048 only")
    parser.add_argument("--commit", help="commit to record where there is no .git")
    arguments = parser.parse_args()
    candidates = [
        (kernel, head_dim, config, causal)
        for kernel, by_dim in CANDIDATES.items()
        for head_dim, configs in by_dim.items()
        for config, causal in itertools.product(configs, (False, True))
    ]
    with multiprocessing.get_context("spawn").Pool(16) as pool:
        refusals = pool.map(compile_one, candidates, chunksize=1)
    from triton.testing import do_bench

    rows = []
    for seqlen in (2048,) if arguments.quick else SEQLENS:
        for (kernel, head_dim, config, causal), refusal in zip(candidates, refusals):
            row = {"kernel": kernel, "head_dim": head_dim, "seqlen": seqlen, "causal": causal, "config": config}
            if refusal is None:
                run = launcher(kernel, config, head_dim, seqlen, causal)
                row["ms"] = do_bench(run, warmup=5, rep=25, return_mode="median")
            rows.append(row | ({"refused": refusal} if refusal else {}))
        best = {}
        for row in sorted((r for r in rows if "ms" in r and r["seqlen"] == seqlen), key=lambda r: r["ms"]):
            best.setdefault((row["kernel"], row["head_dim"], row["causal"]), row)
        for (kernel, head_dim, causal), row in best.items():
            mask = "causal" if causal else "full"
            print(f"{kernel:8} d{head_dim:<4} s{seqlen:<6} {mask:7} {row['config']} {row['ms']:.3f} ms")
    environment = record.environment(torch.device("cuda"), arguments.commit)
    with open(arguments.out, "w") as file:
        json.dump({"command": "python benchmarks/tune_portable.py", "env": environment, "rows": rows}, file)


if __name__ == "__main__":
    main()
