"""The kernels on a cache compile without a GPU, fit in shared memory and spill nothing, for every row of tiles.DECODE."""

import importlib.util
import json
import os
import sys
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import compiled
import pytest
import spills

ARCHS = (80, 90)
# Bytes a thread: (16, 64, 4, 2, 2) at head dim 256 on sm_90, and there 64 rows by 64 keys: 56 with Triton 3.6, 256 with 3.8
MAX_SPILL, MAX_SPILL_64_ROWS = 16, 256
# One program an SM merges few parts itself, behind its loop: 24 with Triton 3.7, of fp8 48, none with 3.6; 128 keys 72 with 3.8
MERGES = "num_warps=4, num_stages=3, programs_per_sm=1,"
MAX_SPILL_MERGING = {f"tile_n=64, {MERGES}": 48, f"tile_n=128, {MERGES}": 72}
# Several heads of 160 columns: 80 with Triton 3.6, none from 3.7 on
MAX_SPILL_HEADS = 80
# Two heads of fp8, of 160 columns with Triton 3.6
MAX_SPILL_TWO_HEADS = 24
# Packed queries of fp8: by two heads with Triton 3.6; where one program an SM merges 80 with 3.7, 88 with 3.8
MAX_SPILL_PACKED, MAX_SPILL_PACKED_MERGING = 40, 88
# With tokens gathered at head dim 256, and Triton 3.8; at most 144 before
MAX_SPILL_PREFILL = 216

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]


def calls(arch):
    """(name, device, config, problem, operands) of calls that take the rows of a device of the architecture."""
    import torch

    from flashtile import hardware, tiles
    from flashtile.kvcache_problem import FP8, CacheOperands, CacheProblem

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    seen = set()
    # The last of few keys, whose row tiles stay whole
    small = product(
        ((torch.bfloat16,) * 2, (torch.bfloat16, FP8), (torch.float32,) * 2), (128, 256, 192, 80), (2,), (1, 64), (16, 64),
        ((4, 4096), (4, 2**20), (32, 512)), hardware.DEVICES.values(),
    )  # fmt: skip
    # On Hopper several heads of a program
    many_heads = product(((torch.bfloat16,) * 2,), (160, 96, 40, 120), (32,), (1,), (64, 1), ((32, 4096),),
                         hardware.DEVICES.values())  # fmt: skip
    # Those of full tiles are without pages, or with large ones; 8 rows in pages, and 32
    rows = [((torch.bfloat16,) * 2, 128, 8, 1, page_size, (16, 8192), device) for page_size in (None, 128)
            for device in hardware.DEVICES.values()]  # fmt: skip
    rows += [((torch.bfloat16,) * 2, 128, *more, device) for more in ((8, 2, 64, (64, 4096)), (2, 8, 64, (1, 16384)))
             for device in hardware.DEVICES.values()]  # fmt: skip
    fp8 = product(((torch.bfloat16, FP8),), (128, 256, 192, 160, 96, 72), (8,), (1, 8), (64, 1), ((32, 4096),),
                  hardware.DEVICES.values())  # fmt: skip
    for (dtype, cache_dtype), dim, heads, seqlen_q, page_size, (batch, capacity), device in chain(small, many_heads, rows, fp8):
        if device.sm != arch or cache_dtype == FP8 and (device.sm < 89 or seqlen_q > 8):
            continue
        # one query comes with one new key, rotated
        new = int(seqlen_q == 1 and dim == 128)
        problem = CacheProblem(
            batch=batch, seqlen_q=seqlen_q, capacity=capacity, num_heads=4 * heads, num_heads_kv=heads, head_dim=dim,
            head_dim_v=dim, page_size=page_size, seqlen_new=new, rotary_dim=64 * new, dtype=dtype, cache_dtype=cache_dtype,
            softmax_scale=0.1, has_descale=cache_dtype == FP8,
            window=(None, None if seqlen_q == 1 else 0),
        )  # fmt: skip
        config = tiles.decode_config(problem, device)
        key = dtype, cache_dtype, config, problem.pages_of_tile(config.tile_n), dim if config.heads > 1 else None
        if key in seen:
            continue
        seen.add(key)
        q = empty(batch, seqlen_q, 4 * heads, dim, dtype=dtype)
        slots = (256, page_size) if page_size else (batch, capacity)
        k_cache, v_cache = (empty(*slots, heads, dim, dtype=cache_dtype) for _ in range(2))
        k, v = (empty(batch, 1, heads, dim, dtype=dtype) for _ in range(2))
        angles = empty(4096, 32, dtype=dtype)
        table = empty(batch, capacity // page_size) if page_size else None
        # Of keys and values alone: queries have none but in fp8
        descale = empty(batch, heads, dtype=torch.float32) if cache_dtype == FP8 else None
        operands = CacheOperands(q, k_cache, v_cache, k, v, cache_seqlens=empty(batch), block_table=table, rotary_cos=angles,
                                 rotary_sin=angles, k_descale=descale, v_descale=descale)  # fmt: skip
        name = f"d{dim} {str(dtype).removeprefix('torch.')} {str(cache_dtype).removeprefix('torch.')} {seqlen_q} queries"
        name += f" pages of {page_size}"
        yield name, device, config, problem, operands
        if new:
            packed = replace(problem, total_q=batch, seqlen_new=0, rotary_dim=0)
            operands = CacheOperands(q[:, 0], k_cache, v_cache, cache_seqlens=empty(batch), block_table=table,
                                     cu_seqlens_q=empty(batch + 1), k_descale=descale, v_descale=descale)  # fmt: skip
            yield f"{name} packed", device, config, packed, operands


def main(arch):
    """Print a JSON line for each compiled kernel."""
    from flashtile.bench import offline
    from flashtile.portable import decode

    rows = compiled.of_this_run(calls(arch), row=lambda call: (call[2], call[3].cache_dtype, call[3].varlen))
    for name, device, config, problem, operands in rows:
        with offline.launches(arch) as reports:
            decode.Call(problem, config, operands, device)(operands)
        for report in reports:
            print(json.dumps({"kernel": report.kernel, "name": f"{name} {config} sm_{arch}", "spill_bytes": report.spill_bytes,
                              "shared_bytes": report.shared_bytes, "smem_bytes": device.smem_bytes}), flush=True)  # fmt: skip


def prefills():
    """Print a JSON line for each kernel of calls with many queries on Hopper, over pages that TMA loads and others."""
    import torch

    from flashtile import dispatch, hardware
    from flashtile.bench import offline
    from flashtile.kvcache_problem import FP8, CacheProblem

    device = hardware.by_name("H200")
    shapes = [(dim, page_size, torch.bfloat16) for dim, page_size in ((128, 16), (128, 1), (64, 16), (192, 64), (256, 1))]
    shapes += [(dim, page_size, FP8)
               for dim, page_size in ((64, 64), (128, None), (256, 16), (192, None), (160, None), (80, None))]  # fmt: skip
    for head_dim, page_size, dtype in compiled.of_this_run(shapes, row=lambda shape: (*shape[1:], shape[0] == 64)):
        problem = CacheProblem(
            batch=8, seqlen_q=512, capacity=4096, num_heads=32, num_heads_kv=8, head_dim=head_dim,
            head_dim_v={192: 128, 160: 192}.get(head_dim, head_dim), page_size=page_size, dtype=dtype,
            cache_dtype=dtype, softmax_scale=0.1, window=(None, 0), seqlen_new=512 if page_size == 64 else 0,
            has_descale=dtype == FP8,
        )  # fmt: skip
        plan = dispatch.plan(problem, device, "decode", prefer=("hopper",))
        for report in offline.compile_decode(problem, plan, device, sass=True, ptxas=True):
            print(json.dumps({
                "name": f"{head_dim} pages of {page_size}" + " fp8" * (dtype == FP8), "tier": plan.tier,
                "kernel": report.kernel,
                "spill_bytes": report.spill_bytes, "shared_bytes": report.shared_bytes, "smem_bytes": device.smem_bytes,
                "products": report.tensor_core, "warnings": report.ptxas_warnings, "early_releases": report.early_releases,
            }), flush=True)  # fmt: skip


def compiled_anew():
    """Print how many kernels calls compile after `offline.compile_decode` of their problems."""
    import torch

    from flashtile import attention_with_kvcache, dispatch, hardware
    from flashtile.bench import offline
    from flashtile.bench.cases import BenchCase

    def kernels():
        return len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))

    device = hardware.by_name("H200")
    for page_size in (0, 16):
        case = BenchCase(1, 1, 256, 2, 2, 40, 40, causal=True, page_size=page_size)
        for problem in (case.cache_problem(), replace(case.cache_problem(), seqlen_new=1)):
            offline.compile_decode(problem, dispatch.plan(problem, device, "decode"), device)
    before = kernels()
    hardware.detect = lambda *_: device
    lengths = torch.full((1,), 255, dtype=torch.int32)
    table = torch.arange(16, dtype=torch.int32)[None]
    new = torch.zeros(2, 1, 1, 2, 40, dtype=torch.bfloat16)
    with offline.launches(device.sm) as reports:
        for rows, options in (((1, 256), {}), ((16, 16), {"block_table": table})):
            caches = torch.zeros(2, *rows, 2, 40, dtype=torch.bfloat16)
            for more in ({}, {"k": new[0], "v": new[1]}):
                attention_with_kvcache(new[0], *caches, cache_seqlens=lengths, causal=True, **options, **more)
    print(json.dumps({"before": before, "after": kernels(), "launches": len(reports)}))


def run(*arguments, **variables):
    """The JSON lines that this file prints."""
    return compiled.reports_of(__file__, *arguments, **variables)


def test_what_is_compiled_ahead_is_what_calls_launch(tmp_path):
    (found,) = run("anew", TRITON_CACHE_DIR=str(tmp_path))
    assert found["before"] == found["after"] and found["launches"] == 6


def test_prefills_on_hopper_compile():
    """What spills is the producer's, but at head dim 256, which forwards of that spill as well, and of fp8 at a tile's end."""
    rows = run("prefills")
    assert {row["kernel"] for row in rows} == {"append_rows", "plan_cached", "attention_forward"}
    for row in rows:
        assert row["tier"] == "hopper" and row["shared_bytes"] <= row["smem_bytes"], row
        if row["kernel"] == "attention_forward":
            # wgmma, none waits for another, and nothing goes back to TMA early: see test_hopper_offline.py
            product = "QGMMA" if row["name"].endswith("fp8") else "HGMMA"
            assert set(row["products"]) == {product} and not row["warnings"] and row["early_releases"] == [], row
        assert row["spill_bytes"] <= spills.allowed(f"prefill {row['kernel']} {row['name']}", MAX_SPILL_PREFILL), row


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_compile_without_spills(arch):
    rows = run(str(arch))
    assert {row["kernel"] for row in rows} == {"append_rows", "decode_attention", "merge_parts"}

    def budget(name):
        if name.split(" DecodeConfig")[0].endswith("packed") and "float8" in name:
            return spills.allowed(name, MAX_SPILL_PACKED_MERGING if MERGES in name else MAX_SPILL_PACKED)
        merging = [limit for config, limit in MAX_SPILL_MERGING.items() if config in name]
        if name.startswith("d128") and merging:
            return spills.allowed(name, merging[0])
        if name.startswith("d160") and "heads=4" in name:
            return MAX_SPILL_HEADS
        if name.startswith("d160") and "heads=2" in name:
            return spills.allowed(name, MAX_SPILL_TWO_HEADS)
        many_rows = name.startswith("d256 bfloat16") and "tile_m=64" in name
        return spills.allowed(name, MAX_SPILL_64_ROWS if many_rows else MAX_SPILL)

    wrong = [row for row in rows if row["spill_bytes"] > budget(row["name"])]
    wrong += [row for row in rows if row["shared_bytes"] > row["smem_bytes"]]
    assert not wrong, "\n".join(map(str, wrong))


if __name__ == "__main__":
    {"anew": compiled_anew, "prefills": prefills}.get(sys.argv[1], lambda: main(int(sys.argv[1])))()
