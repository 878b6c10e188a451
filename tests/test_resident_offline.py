"""The Hopper forward of few keys compiles for sm_90 without a GPU: wgmma, few spills, as many programs as its table says.

As a script (`python tests/test_resident_offline.py`) it compiles, and prints a JSON line for each call; the test runs it in a
process of its own, since Triton's interpreter, which other tests use, excludes the compiler.
"""

import importlib.util
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product

import compiled
import pytest
import spills
import torch

# Bytes of a thread's local memory, by keys and head dim, where there are more than 16
SPILLS = {"80 d128": 24, "208 d80": 80, "208 d96": 168}
OPTIONS = ("plain", "causal", "packed")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]


def _chosen():
    """(keys, head dim, name of the options) of each call: of all pieces, with and without a second box of columns."""
    from flashtile import tiles

    for keys, head_dim in product(map(sum, tiles.RESIDENT_KEYS), (32, 64, 80, 96, 128)):
        for name in OPTIONS if keys in (80, 208) else ("plain",):
            # One key short, so that the last piece is masked
            if ((keys in (80, 128, 208) or head_dim in (64, 80))
                    and tiles.resident_config(_problem(keys - 1, head_dim, name), _device())):  # fmt: skip
                yield keys, head_dim, name


def _calls():
    """Those that this run compiles; a row is for a number of keys."""
    return compiled.of_this_run(_chosen(), row=lambda call: call[0])


def _device():
    from flashtile import hardware

    return hardware.by_name("H200")


def _problem(seqlen_k, head_dim, name):
    from flashtile.problem import AttentionProblem

    total = 1000 if name == "packed" else None
    return AttentionProblem(
        batch=7, seqlen_q=300, seqlen_k=seqlen_k, num_heads=4, num_heads_kv=2, head_dim=head_dim, head_dim_v=head_dim,
        dtype=torch.bfloat16, window=(None, 0 if name == "causal" else None), softmax_scale=0.1, total_q=total, total_k=total,
    )  # fmt: skip


def _compile(call):
    """Report of one call, as a dict."""
    from flashtile import tiles
    from flashtile.bench import offline
    from flashtile.hopper import resident
    from flashtile.problem import Operands

    keys, head_dim, name = call
    problem = _problem(keys - 1, head_dim, name)
    rows_q, rows_k = ((problem.total_q,), (problem.total_k,)) if problem.varlen else ((7, 300), (7, keys - 1))
    q, k, v = (torch.empty(*rows, heads, head_dim, dtype=torch.bfloat16, device="meta")
               for rows, heads in ((rows_q, 4), (rows_k, 2), (rows_k, 2)))  # fmt: skip
    starts = torch.empty(8, dtype=torch.int32, device="meta") if problem.varlen else None
    config = tiles.resident_config(problem, _device())
    with offline.launches(90, sass=True, ptxas=True) as reports:
        resident.launch(problem, config, Operands(q, k, v, starts, starts))
    return {"call": f"resident {keys} d{head_dim} {name}", "kind": f"{keys} d{head_dim}", "programs": config.programs_per_sm,
            **asdict(reports[-1])}  # fmt: skip


@pytest.fixture(scope="module")
def reports():
    return compiled.reports_of(__file__)


def test_every_call_compiles_to_wgmma(reports):
    assert len(reports) == len(_calls())
    assert not [report["call"] for report in reports if set(report["tensor_core"]) != {"HGMMA"}]


def test_spills_stay_in_budget(reports):
    assert not [(r["call"], r["spill_bytes"]) for r in reports
                if r["spill_bytes"] > spills.allowed(r["call"], SPILLS.get(r["kind"], 16))]  # fmt: skip


def test_no_product_waits_for_another(reports):
    """ptxas warns with C75xx where it serialises wgmma."""
    assert not [(r["call"], r["ptxas_warnings"]) for r in reports if r["ptxas_warnings"]]


def test_no_buffer_goes_back_to_tma_early(reports):
    assert not [(r["call"], r["early_releases"]) for r in reports if r["early_releases"] != []]


def test_programs_fit_side_by_side(reports):
    """In the registers and the shared memory of a multiprocessor, of which each program costs 1 KiB more."""
    for r in reports:
        assert r["programs"] * 128 * r["registers"] <= 65536, r["call"]
        assert r["programs"] * (r["shared_bytes"] + 1024) <= 228 << 10, r["call"]


if __name__ == "__main__":
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for report in pool.map(_compile, _calls()):
            print(json.dumps(report), flush=True)
