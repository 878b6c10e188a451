"""The kernels of latent attention decode compile without a GPU, fit in shared memory, and use the tensor cores as they should.

As a script (`python tests/test_mla_offline.py`) it compiles, and prints a JSON line for each launch; the test runs it in a
process of its own, since Triton's interpreter, which other tests use, excludes the compiler.
"""

import importlib.util
import json
from dataclasses import asdict

import compiled
import pytest
import spills
import torch

from flashtile.device.versions import triton_version

# Bytes of a thread's local memory, with every version of Triton. The portable kernel keeps 64 x 512 sums in the registers of 8
# warps beside pointers to a tile of tokens: on sm_80 it spills up to 576 bytes, packed on sm_90 1200. The Hopper kernel has 120
# registers for what gathers packed tokens, and 64 of them hold tokens that are on their way; loads of spilled ones wait for
# those. Consumers keep what their last lines need, 32 bytes with Triton 3.6, 24 with 3.7 and 3.8.
SPILLS = {"hopper": 0, "hopper packed": 32 if triton_version() < (3, 7) else 24, "portable": 600, "portable packed": 1300,
          "merge": 0, "plan_parts": 0}  # fmt: skip

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]


def _call(heads, seqlen_q=1, packed=False, topk=None, batch=128, head_dim=576):
    """(problem, operands) of a call, without data."""
    from flashtile.mla.problem import MlaOperands, MlaProblem

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    q = empty(batch, seqlen_q, heads, head_dim, dtype=torch.bfloat16)
    cache = empty(4096, 64, 1, 656 if packed else head_dim, dtype=torch.uint8 if packed else torch.bfloat16)
    sequences = batch * seqlen_q if topk else batch
    where = {"block_table": empty(batch, 128), "cache_seqlens": empty(batch)}
    if topk:
        where = {"indices": empty(batch, seqlen_q, topk)}
    sinks, schedule = empty(heads, dtype=torch.float32), empty(66 + 1 + sequences, 2)
    operands = MlaOperands(q, cache, **where, sinks=sinks, schedule=schedule)
    problem = MlaProblem(
        batch=batch, seqlen_q=seqlen_q, num_heads=heads, num_heads_kv=1, head_dim=head_dim, head_dim_v=512,
        dtype=torch.bfloat16, num_pages=4096, page_size=64, causal=seqlen_q > 1 and not topk, softmax_scale=0.1, topk=topk,
        fp8=packed, has_sinks=True,
    )  # fmt: skip
    return problem, operands


# Few: each is compiled with three versions of Triton
CALLS = [
    ("hopper", "causal", 90, {"heads": 16, "seqlen_q": 2}),
    ("hopper", "packed", 90, {"heads": 128, "seqlen_q": 2, "packed": True, "topk": 2048}),
    ("hopper", "sparse", 90, {"heads": 128, "seqlen_q": 2, "topk": 2048}),
    ("portable", "plain", 80, {"heads": 128}),
    ("portable", "little shared memory", 89, {"heads": 128}),
    ("portable", "packed", 90, {"heads": 128, "seqlen_q": 2, "packed": True, "topk": 2048}),
]


def _compile():
    from flashtile import hardware
    from flashtile.bench import offline
    from flashtile.mla import plan, schedule

    with offline.launches(90) as reports:
        table = torch.empty(66 + 1 + 128, 2, dtype=torch.int32, device="meta")
        lengths = torch.empty(128, dtype=torch.int32, device="meta")
        schedule.launch(table, lengths, fixed_length=8192, num_sequences=128, seqlen_q=1, total_rows=16)
    yield {"call": "schedule", **asdict(reports[0])}
    for tier, name, arch, shape in CALLS:
        problem, operands = _call(**shape)
        device = hardware.by_name({80: "A100", 89: "RTX 4090", 90: "H200"}[arch])
        chosen = plan.plan(problem, device, (tier,))
        with offline.launches(arch, sass=tier == "hopper", ptxas=tier == "hopper") as reports:
            chosen.module.bind(problem, chosen.config, operands)(operands)
        for report in reports:
            yield {"call": f"{tier} {name}", "tier": tier, "smem_bytes": device.smem_bytes, **asdict(report)}


@pytest.fixture(scope="module")
def reports():
    return compiled.reports_of(__file__)


def test_kernels_compile(reports):
    assert [report["kernel"] for report in reports] == ["plan_parts"] + ["decode", "merge"] * len(CALLS)
    problems = []
    for report in reports:
        kind = report["kernel"]
        if kind == "decode":
            kind = report["call"] if "packed" in report["call"] else report["tier"]
        call, spilled, shared = report["call"], report["spill_bytes"], report["shared_bytes"]
        if spilled > spills.allowed(call, SPILLS[kind]):
            problems.append(f"{call} {report['kernel']}: spills {spilled} bytes, expected at most {SPILLS[kind]}")
        if shared > report.get("smem_bytes", 1 << 20):
            problems.append(f"{call}: {shared} bytes of shared memory of {report['smem_bytes']}")
    assert not problems, "\n".join(problems)


def test_hopper_refuses_offsets_of_more_than_32_bits():
    code = """if True:
        from dataclasses import replace
        import test_mla_offline as tests
        from flashtile import hardware
        from flashtile.mla import hopper
        device = hardware.by_name("H200")
        for shape, page, takes in (({"topk": 64}, 64, False), ({"packed": True}, 64, False), ({}, 53, False), ({}, 64, True)):
            problem = replace(tests._call(16, **shape)[0], page_size=page)
            assert hopper.refuses(replace(problem, cache_bytes=2**35 - 16), device) is None
            # 16 bytes are the unit of an offset: this is 2**31
            reason = hopper.refuses(replace(problem, cache_bytes=2**35), device)
            assert (reason is None) == takes and (takes or "32 GiB" in reason), (shape, reason)
    """
    compiled.output_of("-c", code)


def test_hopper_products_are_asynchronous(reports):
    for report in reports:
        if report.get("tier") == "hopper" and report["kernel"] == "decode":
            assert report["tensor_core"]["HGMMA"] >= 80
            assert report["early_releases"] == [], report["call"]
            assert not [line for line in report["ptxas_warnings"] if "serialized" in line or "C7508" in line], report["call"]


if __name__ == "__main__":
    for line in _compile():
        print(json.dumps(line), flush=True)
