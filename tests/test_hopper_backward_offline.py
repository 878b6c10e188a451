"""Every configuration of the Hopper backward compiles for sm_90 without a GPU: wgmma, few spills, nothing serialised.

As a script (`python tests/test_hopper_backward_offline.py`) it compiles, and prints a JSON line for each call; the test runs it
in a process of its own, since Triton's interpreter, which other tests use, excludes the compiler.
"""

import importlib.util
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import compiled
import pytest
import spills
import torch

HERE = Path(__file__).parent
# Bytes of a thread's local memory. Plain calls keep the numbers of their tile of keys there, outside of the loop over queries;
# causal ones at most one word inside of it; a softcap needs a second copy of p, dropout the random words of a tile (48, but
# 320 with Triton 3.8 at head dim 64; 296 where p is rare).
SPILLS = {"plain": 16, "causal": 16, "deterministic": 40, "packed": 64, "dropout": 320, "rare": 296, "features": 248,
          "grouped": 64, "parts": 24, "short grouped": 8, "alone": 16, "alone deterministic": 8, "alone packed": 64,
          "few units": 16, "few units causal": 16, "causal in order": 48, "packed in order": 112, "packed by arrival": 64,
          "dropout in order": 120, "features in order": 80, "short in order": 0, "alone grouped": 16, "window in order": 40,
          "grouped in order": 48, "grouped window in order": 16, "grouped packed in order": 128}  # fmt: skip
OPTIONS = {
    "plain": {},
    "causal": {"window": (None, 0)},
    "grouped": {"window": (None, 0)},
    # of a group, as programs of their own
    "parts": {"window": (None, 0)},
    "deterministic": {"deterministic": True},
    "packed": {"window": (None, 0), "total_q": 1000, "total_k": 1000, "deterministic": True},
    "dropout": {"window": (None, 0), "dropout_p": 0.1},
    # a threshold of 1
    "rare": {"dropout_p": 2**-15},
    "features": {"window": (200, 100), "softcap": 20.0, "has_alibi": True},
    # few rows in the last tile
    "short": {},
    "short causal": {"window": (None, 0)},
    "short packed": {"window": (None, 0), "total_q": 300, "total_k": 300},
    "short grouped": {"window": (None, 0), "deterministic": True},
    # one tile of keys
    "alone": {},
    "alone deterministic": {"window": (None, 0), "deterministic": True},
    "alone grouped": {"deterministic": True},
    # tiles of keys for less than the programs
    "few units": {},
    "few units causal": {"window": (None, 0)},
    # What calls of many tiles of keys are too
    "causal in order": {"window": (None, 0), "deterministic": True},
    "dropout in order": {"window": (None, 0), "deterministic": True, "dropout_p": 0.1},
    "features in order": {"window": (None, 0), "deterministic": True, "softcap": 20.0, "has_alibi": True},
    # As "packed"; at head dim 128 the step of who comes last needs more
    "packed in order": {"window": (None, 0), "total_q": 1000, "total_k": 1000, "deterministic": True},
    "packed by arrival": {"window": (None, 0), "total_q": 1000, "total_k": 1000},
    "short in order": {"window": (None, 0), "deterministic": True},
    "window in order": {"window": (200, 0), "deterministic": True},
    "grouped in order": {"window": (None, 0), "deterministic": True},
    "grouped window in order": {"window": (200, 0), "deterministic": True},
    "grouped packed in order": {"window": (None, 0), "total_q": 1000, "total_k": 1000, "deterministic": True},
    # of some sequences
    "alone packed": {"window": (None, 0), "total_q": 60, "total_k": 60},
}
CALLS = [(64, 64, "plain"), (64, 64, "causal"), (128, 128, "plain"), (128, 128, "causal"), (256, 256, "causal"),
         (192, 128, "causal"), (128, 128, "features"), (256, 256, "features"), (64, 64, "deterministic"),
         (128, 128, "deterministic"), (256, 256, "deterministic"), (64, 64, "packed"),
         (256, 256, "packed"), (64, 64, "dropout"), (64, 64, "rare"), (64, 64, "features"), (256, 256, "dropout"),
         (96, 96, "causal"), (192, 192, "causal"), (64, 64, "grouped"), (128, 128, "grouped"), (256, 256, "grouped"),
         (64, 64, "parts"), (128, 128, "parts"), (256, 256, "parts"), (192, 128, "plain"), (192, 128, "deterministic"),
         (192, 128, "packed"), (192, 128, "dropout"), (192, 128, "grouped"), (144, 128, "causal"),
         (160, 160, "features"), (32, 256, "plain"), (224, 32, "causal"), (64, 64, "short"), (64, 64, "short causal"),
         (64, 64, "short packed"), (64, 64, "short grouped"), (64, 64, "alone"), (96, 96, "alone"), (256, 256, "alone"),
         (192, 128, "alone"), (80, 80, "alone deterministic"), (64, 64, "alone packed"), (80, 80, "alone packed"),
         (128, 128, "alone packed"), (256, 256, "alone packed"), (192, 128, "alone packed"),
         (144, 144, "alone packed"),
         (64, 64, "few units"), (128, 128, "few units"), (64, 64, "few units causal"),
         (128, 128, "few units causal"), (64, 64, "causal in order"), (96, 96, "causal in order"),
         (128, 128, "causal in order"), (64, 64, "dropout in order"), (128, 128, "dropout in order"),
         (64, 64, "features in order"), (128, 128, "features in order"), (128, 128, "packed in order"),
         (64, 64, "packed by arrival"), (128, 128, "packed by arrival"), (256, 256, "packed by arrival"),
         (192, 128, "packed by arrival"), (64, 64, "short in order"), (64, 64, "alone grouped"),
         (128, 128, "alone grouped"), (64, 64, "window in order"), (128, 128, "window in order"),
         (64, 64, "grouped in order"), (128, 128, "grouped in order"), (256, 256, "grouped in order"),
         (64, 64, "grouped window in order"), (128, 128, "grouped packed in order")]  # fmt: skip

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]


def _calls():
    """Those of CALLS that this run compiles; a row of tiles is its head dims', or that of few rows or one tile of keys."""
    causal_first = sorted(CALLS, key=lambda call: call[2] != "causal")
    return compiled.of_this_run(causal_first, row=lambda call: (*call[:2], {"short", "alone"} & set(call[2].split()) != set()))


def _compile(call):
    """Reports of the kernels of one call, as dicts."""
    from flashtile import hardware
    from flashtile.bench import offline
    from flashtile.hopper import backward, backward_config
    from flashtile.problem import AttentionProblem, Operands

    dim, dim_v, name = call
    features = "features" in name
    heads_kv = 2 if name == "features" else 1 if name == "parts" or "grouped" in name else 4
    packed, short = "packed" in name, "short" in name
    # The last tile of keys is not whole
    seqlen = 60 if "alone" in name else 300 if short else 1000
    q, k, v, out = (torch.empty(*([] if packed else [1]), seqlen, heads, d, dtype=torch.bfloat16, device="meta")
                    for heads, d in ((4, dim), (heads_kv, dim), (heads_kv, dim_v), (4, dim_v)))  # fmt: skip
    problem = AttentionProblem(
        batch=1, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=4, num_heads_kv=heads_kv, head_dim=dim, head_dim_v=dim_v,
        dtype=torch.bfloat16, softmax_scale=0.1, **OPTIONS[name],
    )  # fmt: skip
    slopes = torch.empty(4, device="meta") if features else None
    lse = torch.empty(problem.lse_shape, device="meta")
    cu_seqlens = torch.empty(2, dtype=torch.int32, device="meta") if packed else None
    rng_state = torch.empty(2, dtype=torch.int64, device="meta") if problem.dropout_p else None
    device = hardware.by_name("H200")
    assert backward_config.refuses(problem, device) is None
    with offline.launches(90, sass=True, ptxas=True) as reports:
        operands = Operands(q, k, v, cu_seqlens, cu_seqlens, alibi_slopes=slopes, rng_state=rng_state)
        configs = backward_config.configs(problem, device)
        assert (configs["backward"].splits > 1) == (heads_kv < 4)
        assert not short or configs["backward"].tile_m == 64
        if name != "parts":
            config = replace(configs["backward"], splits=1)
            configs["backward"] = replace(config, fixed_order=backward_config._orders(problem, config)[0])
        if "few units" not in name:
            configs["backward"] = replace(configs["backward"], query_parts=1)
        assert (configs["backward"].query_parts > 1) == ("few units" in name)
        backward.launch(problem, configs, operands, out, lse, out, lse)
    return [{"call": f"{r.kernel} d{dim} dv{dim_v} {name}", "options": name, **asdict(r)} for r in reports]


@pytest.fixture(scope="module")
def reports():
    return compiled.reports_of(__file__)


def main_kernels(reports):
    found = [report for report in reports if report["kernel"] == "attention_backward"]
    assert len(found) == len(_calls())
    return found


def test_products_run_on_wgmma(reports):
    for report in main_kernels(reports):
        assert set(report["tensor_core"]) == {"HGMMA"}, report["call"]


def test_columns_of_zeros_are_left_out(reports):
    """Head dims 96, 192 and 144/128 have fewer products than others of their tiles."""
    products = {report["call"]: report["tensor_core"]["HGMMA"] for report in main_kernels(reports)}
    for dims, larger in (((96, 96), (128, 128)), ((192, 192), (256, 256)), ((144, 128), (192, 128))):
        fewer, more = (products["attention_backward d{} dv{} causal".format(*x)] for x in (dims, larger))
        assert fewer < more


def test_spills_stay_in_budget(reports):
    budget = {"attention_backward": SPILLS}
    over = [(r["call"], r["spill_bytes"]) for r in reports
            if r["spill_bytes"] > spills.allowed(r["call"], budget.get(r["kernel"], {}).get(r["options"], 0))]  # fmt: skip
    assert not over


def test_no_product_waits_for_another(reports):
    """ptxas warns with C75xx where it serialises wgmma, or ignores the registers that a partition asked for."""
    known = spills.SERIALISED_WITH_3_9 if spills.has_newest() else ()
    assert not [(r["call"], r["ptxas_warnings"]) for r in reports if r["ptxas_warnings"] and r["call"] not in known]


def test_no_buffer_goes_back_to_tma_early(reports):
    """A race: threads that tell TMA's barrier must have what they read from the buffer in registers."""
    assert not [(r["call"], r["early_releases"]) for r in reports if r["early_releases"] != []]


def test_shared_memory_fits(reports):
    from flashtile import hardware

    limit = hardware.by_name("H200").smem_bytes
    assert not [(r["call"], r["shared_bytes"]) for r in reports if r["shared_bytes"] > limit]


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for lines in pool.map(_compile, _calls()):
            for line in lines:
                print(json.dumps(line), flush=True)
