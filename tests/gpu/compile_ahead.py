"""Compile the kernels of the GPU tests on a machine without a GPU: one that is paid by the minute then only has to run them.

    TRITON_CACHE_DIR=/tmp/cache python tests/gpu/compile_ahead.py H200 attention,kvcache,mla --tier hopper --processes 2

The tests' own cases are called with tensors of the CPU, on tiers that believe in the GPU, and every launch compiles and runs
nothing. Take the cache to the same path on the GPU's machine, with the same versions of Python and Triton: a line that moves in
a file of kernels makes them new. Tests of their own kind (other options, compiled models) compile as ever. A case that raises
is counted: its kernels are those before it did.
"""

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def attention_calls(tier, configurations):
    import checks
    import test_attention as tests
    import torch
    from cases import BY_NAME, CASES, SHORT, Case

    from flashtile import dispatch, hardware

    module = dispatch.import_module(dispatch.TIERS[tier])

    def call(case, dtype, seed=0):
        operands = case.make(dtype, "cpu", seed)
        problem, device = case.problem(operands), hardware.detect()
        if not all(module.refuses(problem, device, direction) for direction in ("forward", "backward")):
            checks.run(lambda x: case.attend(x), operands, case)

    bf16 = torch.bfloat16
    for case in CASES:
        for dtype in tests.DTYPES:
            yield call, case, dtype
    for case in (*SHORT, *(case.scaled(5) for case in CASES if case.magnitude == 1.0)):
        yield call, case, bf16, 3
    for deterministic in (False, True):
        for name in tests.REPEATED:
            yield call, replace(BY_NAME[name].scaled(4), deterministic=deterministic), bf16
        for head_dim in (64, 128, 256):
            yield call, Case("programs", 1500, 1500, heads=48, heads_kv=24, head_dim=head_dim, causal=deterministic,
                             deterministic=True), bf16  # fmt: skip
    for seed in range(configurations):
        yield call, tests.random_case(seed), tests.DTYPES[seed % 2], seed


def kvcache_calls(tier, configurations):
    import test_kvcache_gpu as tests
    from cache_cases import CASES, FP8_CASES

    def call(case, dtype, seed=0):
        case.make(dtype, "cpu", seed).run()

    for case in CASES:
        for dtype in tests.DTYPES:
            yield call, case, dtype
        yield call, case.scaled(11), tests.DTYPES[0], 3
    for case in FP8_CASES:
        for dtype in tests.DTYPES[:2]:
            yield call, case, dtype
    for seed in range(configurations):
        yield call, tests.random_case(seed), tests.DTYPES[seed % 2], seed


def mla_calls(tier, configurations):
    import test_mla_gpu as tests
    import torch
    from mla_cases import CASES, random_case

    from flashtile.mla import mla_decode

    def call(case, dtype, seed=0):
        mla_decode(**case.make(dtype, "cpu", seed), return_lse=True)

    for case in (*CASES, *tests.LARGE):
        for dtype in (torch.bfloat16, torch.float16):
            yield call, case, dtype
    for seed in range(configurations):
        yield call, random_case(seed), torch.bfloat16 if seed % 3 else torch.float16, seed


PARTS = {"attention": attention_calls, "kvcache": kvcache_calls, "mla": mla_calls}


def compile_part(arguments, part, process):
    """Every arguments.processes-th call of a part; prints what happened."""
    os.environ["FLASHTILE_TIER"] = f"{arguments.tier},portable"
    sys.path[:0] = [str(TESTS / "gpu"), str(TESTS), str(TESTS.parent)]
    import torch

    torch.set_num_threads(1)
    from flashtile import hardware
    from flashtile.bench import offline

    device = hardware.by_name(arguments.gpu)
    hardware.detect = lambda *_: device
    # What a kernel costs is of no interest here
    offline._report = lambda compiled, *_: compiled
    start, errors = time.perf_counter(), Counter()
    calls = list(PARTS[part](arguments.tier, arguments.configurations))[process :: arguments.processes]
    with offline.launches(device.sm) as launched:
        for call, *case in calls:
            try:
                call(*case)
            except Exception as error:  # the tiers refuse some, and what runs nothing gives no results
                errors[f"{type(error).__name__}: {error}"[:100]] += 1
    seconds = time.perf_counter() - start
    print(f"{part} {process}: {len(calls)} calls, {len(launched)} launches, {seconds:.0f} s, raised {dict(errors)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu", help="a name such as H200")
    parser.add_argument("parts", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--tier", default="hopper", help="portable or hopper; the first steps in where the other refuses")
    parser.add_argument("--configurations", type=int, default=60, help="as FLASHTILE_TEST_CONFIGURATIONS")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    jobs = [(arguments, part, process) for part in arguments.parts.split(",") for process in range(arguments.processes)]
    with get_context("spawn").Pool(arguments.processes, maxtasksperchild=1) as pool:
        pool.starmap(compile_part, jobs, chunksize=1)



if __name__ == "__main__":
    main()
