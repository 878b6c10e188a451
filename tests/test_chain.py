"""Kernels that may begin before the one before them ends: all of them wait for it, behind one that lets them."""

import importlib.util
import json
import sys
from pathlib import Path

import compiled
import pytest
import torch

HERE = Path(__file__)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]


def _launched():
    """Print a JSON line for each call on Hopper: its name, and of its kernels in order what they may and do."""
    from flashtile import dispatch, hardware
    from flashtile.bench import offline
    from flashtile.kvcache_problem import CacheProblem
    from flashtile.problem import AttentionProblem

    device, kernels = hardware.by_name("H200"), []
    report = offline._report

    def noted(made, *rest):
        ptx = made.asm["ptx"]
        does = {name: f"griddepcontrol.{what}" in ptx for name, what in (("waits", "wait"), ("allows", "launch_dependents"))}
        kernels.append({"kernel": made.metadata.name, "early": made.metadata.launch_pdl, **does})
        return report(made, *rest)

    offline._report = noted
    causal = {"dtype": torch.bfloat16, "softmax_scale": 0.1, "window": (None, 0)}
    problems = {
        "few heads": AttentionProblem(1, 2048, 2048, 4, 4, 64, 64, **causal),
        "packed": AttentionProblem(9, 1024, 1024, 8, 8, 64, 64, total_q=4096, total_k=4096, **causal),
        "short packed": AttentionProblem(9, 100, 100, 8, 8, 64, 64, total_q=800, total_k=800, **causal),
    }
    for name, problem in problems.items():
        for direction in ("forward", "backward"):
            kernels.clear()
            offline.compile_plan(problem, dispatch.plan(problem, device, direction), 90, direction)
            print(json.dumps([f"{name} {direction}", kernels]), flush=True)
    cached = dict(batch=1, capacity=8192, num_heads=8, num_heads_kv=1, head_dim=64, head_dim_v=64, page_size=64,
                  cache_dtype=torch.bfloat16, **causal)  # fmt: skip
    for name, seqlen_q, new in (("prefill", 512, 512), ("decode", 1, 1)):
        problem = CacheProblem(seqlen_q=seqlen_q, seqlen_new=new, **cached)
        kernels.clear()
        offline.compile_decode(problem, dispatch.plan(problem, device, "decode"), device)
        print(json.dumps([name, kernels]), flush=True)


@pytest.fixture(scope="module")
def calls():
    return dict(compiled.reports_of(HERE))


def test_what_begins_early_waits_behind_what_allows_it(calls):
    for name, kernels in calls.items():
        for before, kernel in zip([None, *kernels], kernels):
            assert not kernel["early"] or kernel["waits"] and before and before["allows"], (name, kernel)


def test_these_calls_are_chains(calls):
    early = {name: [x["kernel"] for x in kernels if x["early"]] for name, kernels in calls.items()}
    assert early["few heads forward"] == ["combine_splits"]
    assert early["few heads backward"] == ["attention_backward", "backward_convert", "add_parts", "add_parts"]
    assert early["packed forward"] == ["attention_forward"]
    assert early["packed backward"] == ["backward_rows", "attention_backward", "backward_convert"]
    assert early["short packed forward"] == ["attention_forward_resident"]
    assert early["prefill"] == ["attention_forward", "combine_splits"]


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent.parent))
    _launched()
