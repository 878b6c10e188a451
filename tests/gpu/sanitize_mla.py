"""Latent attention decode, one small case a feature, to run under a checker of memory or races:

    compute-sanitizer --tool memcheck  python tests/gpu/sanitize_mla.py hopper
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_mla.py portable

Run it once without the checker first, so that kernels are compiled. Where the tier refuses, portable steps in.

racecheck does not follow what an mbarrier orders (see `sanitize.py`). Of the Hopper kernel it reports, in all cases together,
the rows' references and sums that its two consumers hand each other (max_smem, sum_smem), with packed tokens the magnitudes
of queries (q_max_smem), and Triton's own words for `warp_specialize`. A reference of tile i is read before p_ready of tile
i + 1 is told, and written over after that is awaited; sums have two places in turn, with sum_ready between; magnitudes are read
before q_converted is told. Anything else that it reports is new.
"""

import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from mla_cases import BY_NAME  # noqa: E402

from flashtile.mla import mla_decode  # noqa: E402

FEATURES = (
    "empty_sequences", "split_uneven", "causal", "rows_70", "dim_512", "page_53", "sinks_split", "sparse_few", "fp8",
    "sparse_fp8", "fp8_both", "fp8_sparse",
)  # fmt: skip


def main(tier):
    os.environ["FLASHTILE_TIER"] = f"{tier},portable"
    if tier == "hopper":
        from flashtile.mla import hopper

        # Every sparse call of packed tokens puts its indices in order
        hopper.ORDERED_BYTES = hopper.ORDERED_TOKENS = 0
    for name in FEATURES:
        mla_decode(**BY_NAME[name].make(torch.bfloat16, "cuda"))
        torch.cuda.synchronize()
        print(f"{name}: ran", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
