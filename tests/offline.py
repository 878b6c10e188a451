"""Compile every tile row of the portable tier without a GPU, and print a JSON line for each: what it costs.

    python tests/offline.py 90              the plain causal call of each row
    python tests/offline.py 90 features     the 16 bit rows up to head dim 128, every option of the API on
    python tests/offline.py 90 sample       a kernel of this file, to test flashtile.bench.offline itself

A script of its own: Triton's interpreter, which the other tests use, and its compiler exclude each other in one process. The
launch functions of the package run as they are, on "meta" tensors; only the launch itself is left out.
"""

import json
import sys
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashtile import hardware, tiles
from flashtile.bench import offline
from flashtile.portable import backward, forward
from flashtile.portable.arguments import common_arguments
from flashtile.problem import AttentionProblem, Operands

# The GPU whose limits an architecture is compiled under.
DEVICES = {80: "A100", 90: "H200", 100: "B200"}
# Everything that adds code to a kernel, in one call: packed, window on both sides, softcap, ALiBi, sinks, dropout.
ALL_FEATURES = dict(window=(200, 100), softcap=20.0, dropout_p=0.1)


def rows_for(device):
    """The rows that dispatch can choose on a device, each with the problem that it is compiled for."""
    for row in tiles.PORTABLE:
        if row.device not in ("", device.name, device.arch):
            continue
        problem, operands = _call(row, causal=row.causal is not False)
        if tiles.feasible(row.kernel, row.config, problem, device):
            yield row, problem, operands


def _call(row, causal=False, features=False):
    """A call that fills the row: its largest head dim, in its dtype, without data."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[row.itemsize]
    dim, heads = row.block_dim, 8

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    def index(*shape):
        return empty(*shape, dtype=torch.int32)

    shape = dict(batch=2, seqlen_q=1024, seqlen_k=1024, num_heads=heads, head_dim=dim, head_dim_v=dim, dtype=dtype,
                 softmax_scale=dim**-0.5)  # fmt: skip
    if not features:
        q, k, v = (empty(2, 1024, heads, dim) for _ in range(3))
        return AttentionProblem(**shape, num_heads_kv=heads, window=(None, 0 if causal else None)), Operands(q, k, v)
    q, k, v = (empty(2048, heads, dim), *(empty(2048, heads // 2, dim) for _ in range(2)))
    operands = Operands(q, k, v, index(3), index(3), index(2), index(2), alibi_slopes=empty(heads, dtype=torch.float32),
                        sinks=empty(heads), rng_state=empty(2, dtype=torch.int64))  # fmt: skip
    problem = AttentionProblem(**shape, **ALL_FEATURES, num_heads_kv=heads // 2, total_q=2048, total_k=2048, has_alibi=True,
                               has_sinks=True, has_seqused_q=True, has_seqused_k=True)  # fmt: skip
    return problem, operands


def _launch(row, problem, operands):
    """What portable.run_forward or run_backward does for one kernel."""
    out = operands.q.new_empty((*operands.q.shape[:-1], problem.head_dim_v))
    lse = operands.q.new_empty(problem.lse_shape, dtype=torch.float32)
    common = common_arguments(problem, operands)
    if row.kernel == "forward":
        forward.launch(problem, row.config, operands)
    elif row.kernel == "delta":
        backward.launch_delta(problem, row.config, common, out, lse, out, None)
    elif row.kernel == "dkdv":
        backward.launch_dkdv(problem, row.config, common, operands, lse, lse, out)
    elif row.kernel == "dq":
        backward.launch_dq(problem, row.config, common, operands, lse, lse, out)
    else:
        raise ValueError(f"no launch is known for kernel {row.kernel!r}: add it here")


def compile_rows(arch, features=False):
    """Yield one dict a row: what it is and what it costs, or the error that it met."""
    device = hardware.by_name(DEVICES[arch])
    for row, problem, operands in rows_for(device):
        if features:
            if row.itemsize != 2 or row.block_dim > 128:
                continue
            problem, operands = _call(row, features=True)
        config = row.config
        result = {
            "kernel": row.kernel, "block_dim": row.block_dim, "itemsize": row.itemsize, "arch": arch, "device": row.device,
            "tile": f"{config.tile_m}x{config.tile_n}", "warps": config.num_warps, "stages": config.num_stages,
            "smem_limit": device.smem_bytes,
        }  # fmt: skip
        try:
            with offline.launches(arch) as reports:
                _launch(row, problem, operands)
        except Exception as error:
            yield result | {"error": f"{type(error).__name__}: {error}"[:2000]}
            continue
        report = reports[-1]
        yield result | {
            "registers": report.registers, "spill_bytes": report.spill_bytes, "shared_bytes": report.shared_bytes,
            "compile_s": round(report.compile_s, 2),
        }  # fmt: skip


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


if __name__ == "__main__":
    arch, what = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "rows"
    for line in compile_sample(arch) if what == "sample" else compile_rows(arch, features=what == "features"):
        print(json.dumps(line), flush=True)
