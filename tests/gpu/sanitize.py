"""One small case a feature, forward and backward, to run under a checker of memory or races:

    compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py portable
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py hopper

Run it once without the checker first, so that kernels are compiled. Where the tier refuses, portable steps in.
"""

import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import checks  # noqa: E402
from cases import named  # noqa: E402

FEATURES = named(
    "causal_ragged", "causal_empty_rows", "gqa", "window_both", "softcap", "alibi", "sinks", "dropout", "dim_40_8",
    "dim_256_causal", "varlen_cross_causal", "varlen_used", "packed_qkv",
)  # fmt: skip


def main(tier):
    os.environ["FLASHTILE_TIER"] = f"{tier},portable"
    for case in FEATURES:
        operands = case.make(torch.bfloat16, "cuda")
        with checks.fixed_rng_state(operands.rng_state):
            checks.run(case.attend, operands, case)
        torch.cuda.synchronize()
        print(f"{case.name}: ran", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
