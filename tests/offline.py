"""Compile every tile row of the portable tier without a GPU, and print a JSON line for each: what it costs.

    python tests/offline.py rows 90        every row that dispatch can choose on sm_90, in plain calls
    python tests/offline.py features 90    the 16 bit rows, with every option of the API
    python tests/offline.py sample 90      a kernel of this file, to test flashtile.bench.offline itself
    python tests/offline.py dead           rows that dispatch can't choose anywhere
    python tests/offline.py aligned 80     head dims that are multiples of 8 and not of 16, in calls of every kind
    python tests/offline.py older 90       a forward with the instructions of sm_80, see flashtile.bench.tune

A script of its own: Triton's interpreter, which the other tests use, and its compiler exclude each other in one process. The
launch functions of the package run as they are, on "meta" tensors; only the launch itself is left out.
"""

import json
import sys
from dataclasses import asdict, replace
from itertools import chain, product
from typing import Any, NamedTuple

import compiled
import torch
import triton
import triton.language as tl

from flashtile import dispatch, hardware, tiles
from flashtile.bench import offline, tune
from flashtile.kvcache_problem import CacheProblem
from flashtile.portable import KERNELS, backward, forward
from flashtile.portable.arguments import common_arguments
from flashtile.problem import AttentionProblem, Operands

# Everything that adds code to a kernel, in one call: packed, window on both sides, softcap, ALiBi, sinks, dropout.
ALL_FEATURES = dict(window=(200, 100), softcap=20.0, dropout_p=0.1)
# Tokens of a call by its head dim
DIMS = {32: 64, 64: 1024, 96: 1024, 128: 1024, 160: 1024, 192: 1024, 256: 1024}
# Where no other tensor cores than those of mma.sync are, two blocks of columns that others have as one
NARROW_DIMS = 96, 160
HEADS = 8


def chosen_rows(arch, features=False):
    """{(row, dim, dtype, causal): shared memory of the smallest device}, of what dispatch chooses on sm_8x, 9x or 10x."""
    chosen = {}
    devices = [device for device in hardware.DEVICES.values() if device.sm // 10 == arch // 10]
    for device, dtype, dim, causal in product(devices, (torch.bfloat16, torch.float32), DIMS, (True, False)):
        # fp32 kernels take long to compile; the masked one has all of the other's code
        if not causal and (features or dtype == torch.float32) or (features and dtype == torch.float32):
            continue
        if dim in NARROW_DIMS and not (tiles.by_mma_sync(device) and dtype == torch.bfloat16):
            continue
        problem, _ = full_call(dim, dtype) if features else plain_call(dim, dtype, causal)
        for kernel in chain(*KERNELS.values()):
            row = tiles.select(tiles.PORTABLE, kernel, problem, device)
            # delta knows no mask
            key = row, dim, dtype, causal or kernel == "delta"
            # At 32 and 64 most kernels have one row
            if row is not None and not dim < 64 <= row.head_dim:
                chosen[key] = min(device.smem_bytes, chosen.get(key, device.smem_bytes))
    return chosen


def _empty(*shape, dtype):
    """A tensor of any size, without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _shape(dim, dtype):
    return dict(batch=2, seqlen_q=DIMS[dim], seqlen_k=DIMS[dim], num_heads=HEADS, head_dim=dim, head_dim_v=dim, dtype=dtype,
                softmax_scale=dim**-0.5)  # fmt: skip


def plain_call(dim, dtype, causal):
    """(problem, operands) of a batched call."""
    q, k, v = (_empty(2, DIMS[dim], HEADS, dim, dtype=dtype) for _ in range(3))
    return AttentionProblem(**_shape(dim, dtype), num_heads_kv=HEADS, window=(None, 0 if causal else None)), Operands(q, k, v)


def full_call(dim, dtype):
    """(problem, operands) of a packed call with every option."""
    total = 2 * DIMS[dim]
    q, k, v = (_empty(total, heads, dim, dtype=dtype) for heads in (HEADS, HEADS // 2, HEADS // 2))
    cu_seqlens, used = _empty(3, dtype=torch.int32), _empty(2, dtype=torch.int32)
    operands = Operands(q, k, v, cu_seqlens, cu_seqlens, used, used, alibi_slopes=_empty(HEADS, dtype=torch.float32),
                        sinks=_empty(HEADS, dtype=dtype), rng_state=_empty(2, dtype=torch.int64))  # fmt: skip
    problem = AttentionProblem(**_shape(dim, dtype), **ALL_FEATURES, num_heads_kv=HEADS // 2, total_q=total, total_k=total,
                               has_alibi=True, has_sinks=True, has_seqused_q=True, has_seqused_k=True)  # fmt: skip
    return problem, operands


def _launch(kernel, row, problem, operands, arch):
    """Launch one kernel as the portable tier does. kernel: that of the row, or of a dq row dslopes."""
    device = replace(next(device for device in hardware.DEVICES.values() if device.sm == arch), num_sms=1)
    out = operands.q.new_empty((*operands.q.shape[:-1], problem.head_dim_v))
    lse = operands.q.new_empty(problem.lse_shape, dtype=torch.float32)
    common = common_arguments(problem, operands, tiles.is_narrow(problem, device))
    config = tiles.on_gpu(row.kernel, row.config, problem, device)
    if problem.window[1] is not None and row.kernel != "delta" and row.max_seqlen is None:
        # As in calls of many tiles, which takes registers
        config = replace(config, tail_heads=1)
    if kernel == "forward":
        forward.launch(problem, config, operands)
    elif kernel == "delta":
        backward.launch_delta(problem, config, common, out, lse, out, None)
    elif kernel == "dkdv":
        backward.launch_dkdv(problem, config, common, operands, lse, lse, out)
    elif kernel == "dq":
        backward.launch_dq(problem, config, common, operands, lse, lse, out)
    elif kernel == "dslopes":
        of_tiles = _empty(problem.batch, HEADS, triton.cdiv(problem.seqlen_q, row.config.tile_m), dtype=torch.float32)
        backward.launch_dq(problem, config, common, operands, lse, lse, out, None, of_tiles)
    else:
        raise ValueError(f"no launch is known for kernel {kernel!r}: add it here")


def compile_rows(arch, features=False):
    """Yield one dict a chosen row: what it is and what it costs, or the error that it met."""
    rows = [(row.kernel, row, *rest, smem_bytes) for (row, *rest), smem_bytes in chosen_rows(arch, features).items()]
    rows = compiled.of_this_run(rows, row=lambda call: call[0] if features else call[1])
    # Only calls with ALiBi have these
    rows += [("dslopes", *rest) for kernel, *rest in rows if features and kernel == "dq"]
    for kernel, row, dim, dtype, causal, smem_bytes in rows:
        problem, operands = full_call(dim, dtype) if features else plain_call(dim, dtype, causal)
        config = row.config
        mask = "all" if features else "causal" if causal else "full"
        name = f"{kernel} d{dim} {str(dtype).removeprefix('torch.')} {mask}"
        tile = f"{config.tile_m}x{config.tile_n} warps{config.num_warps} stages{config.num_stages}"
        result = {"kernel": kernel, "name": f"{name} {tile} sm_{arch}", "smem_bytes": smem_bytes}
        try:
            with offline.launches(arch) as reports:
                _launch(kernel, row, problem, operands, arch)
        except Exception as error:
            yield result | {"error": f"{type(error).__name__}: {error}"[:2000]}
            continue
        report = reports[-1]
        yield result | {
            "registers": report.registers, "spill_bytes": report.spill_bytes, "shared_bytes": report.shared_bytes,
            "compile_s": round(report.compile_s, 2),
        }  # fmt: skip


def compile_rows_in_16_bytes(arch):
    """Yield the report of each kernel of calls whose strides are multiples of 16 bytes and not of 16 elements."""
    device = next(device for device in hardware.DEVICES.values() if device.sm == arch)
    shape = dict(batch=2, seqlen_q=1024, seqlen_k=1024, num_heads=4, num_heads_kv=4, softmax_scale=0.1, window=(None, 0))
    for dim in (40, 72):
        problem = AttentionProblem(**shape, head_dim=dim, head_dim_v=dim, dtype=torch.bfloat16)
        for direction in ("forward", "backward"):
            plan = dispatch.plan(problem, device, direction)
            for report in offline.compile_plan(problem, plan, arch, direction, sass=True):
                yield asdict(report) | {"call": f"{dim} {direction}"}
    for dim, page_size in ((72, None), (136, 64)):
        problem = CacheProblem(batch=4, seqlen_q=1, capacity=4096, num_heads=8, num_heads_kv=2, head_dim=dim, head_dim_v=dim,
                               page_size=page_size, seqlen_new=1, dtype=torch.bfloat16, cache_dtype=torch.bfloat16,
                               softmax_scale=0.1, window=(None, None))  # fmt: skip
        plan = dispatch.plan(problem, device, "decode")
        for report in offline.compile_decode(problem, plan, device, sass=True):
            yield asdict(report) | {"call": f"{dim} decode"}


class Matrix(NamedTuple):
    ptr: Any
    row_stride: Any


@triton.jit
def scaled_product(a, b, out, scale, SIZE: tl.constexpr):
    """out = a @ b, times scale.left if there is one."""
    index = tl.arange(0, SIZE)
    product = tl.dot(tl.load(a.ptr + index[:, None] * a.row_stride + index[None, :]),
                     tl.load(b.ptr + index[:, None] * b.row_stride + index[None, :]))  # fmt: skip
    if scale[0] is not None:
        product = product * scale[0]
    tl.store(out.ptr + index[:, None] * out.row_stride + index[None, :], product)


def compile_sample(arch):
    """Yield the report of a kernel that fits in the registers, then of one that cannot."""
    for size, num_warps in ((64, 4), (128, 2)):
        a = Matrix(torch.empty((size, size), dtype=torch.float16, device="meta"), size)
        out = Matrix(torch.empty((size, size), device="meta"), size)
        yield asdict(offline.compile_kernel(scaled_product, dict(a=a, b=a, out=out, scale=(0.5, None)), dict(SIZE=size),
                                            num_warps=num_warps, arch=arch, sass=True, ptxas=size == 64))  # fmt: skip


def dead_rows():
    """Rows that no device and no problem reaches: nothing above sees them."""
    chosen = {row for arch in (80, 90, 100) for features in (False, True) for row, *_ in chosen_rows(arch, features)}
    return [str(row) for row in tiles.PORTABLE if row not in chosen]


def compile_for_older(arch):
    problem, operands = plain_call(128, torch.bfloat16, True)
    device = hardware.by_name("A100")
    config = tiles.select(tiles.PORTABLE, "forward", problem, device).config
    with tune.instructions_of(device), offline.launches(arch, sass=True) as reports:
        forward.launch(problem, tiles.on_gpu("forward", config, problem, device), operands)
    return [asdict(report) for report in reports]


def main(what, arch="90"):
    modes = {
        "rows": compile_rows,
        "features": lambda arch: compile_rows(arch, features=True),
        "sample": compile_sample,
        "dead": lambda arch: dead_rows(),
        "aligned": compile_rows_in_16_bytes,
        "older": compile_for_older,
    }
    for line in modes[what](int(arch)):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
