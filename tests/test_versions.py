"""Versions of Triton that are newer than what the Hopper kernels know: other tiers take their calls, and say why."""

import logging

import pytest
import torch

from flashtile import dispatch, hardware
from flashtile.device import versions
from flashtile.mla import plan as mla_plan
from flashtile.mla.problem import MlaProblem
from flashtile.problem import AttentionProblem

pytest.importorskip("triton")
PROBLEM = AttentionProblem(batch=2, seqlen_q=4096, seqlen_k=4096, num_heads=16, num_heads_kv=16, head_dim=128, head_dim_v=128,
                           dtype=torch.bfloat16, softmax_scale=0.1)  # fmt: skip
MLA = MlaProblem(batch=4, seqlen_q=1, num_heads=128, num_heads_kv=1, head_dim=576, head_dim_v=512, dtype=torch.bfloat16,
                 num_pages=64, page_size=64, softmax_scale=0.1)  # fmt: skip


@pytest.fixture
def newer(monkeypatch):
    """Triton is newer than what is known."""
    caches = versions.unknown, dispatch.plan, mla_plan.plan
    monkeypatch.setattr(versions, "NEWEST", (3, 5))
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def test_the_installed_version_is_known():
    assert versions.OLDEST <= versions.triton_version() <= versions.NEWEST
    assert versions.unknown() is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_is_left_to_the_portable_tier(newer, caplog, direction):
    device = hardware.by_name("H200")
    with caplog.at_level(logging.WARNING, "flashtile"):
        plan = dispatch.plan(PROBLEM, device, direction)
    assert plan.tier == "portable"
    ((tier, reason),) = plan.refusals
    assert tier == "hopper" and "knows Gluon of Triton" in reason and "FLASHTILE_TIER=hopper" in reason
    assert sum("Hopper kernels are not used" in record.message for record in caplog.records) == 1
    assert dispatch.plan(PROBLEM, device, direction, ("hopper",)).tier == "hopper"


def test_latent_attention_is_left_to_the_portable_tier(newer):
    plan = mla_plan.plan(MLA, hardware.by_name("H200"))
    assert plan.tier == "portable" and plan.refusals[0][0] == "hopper"
    assert mla_plan.plan(MLA, hardware.by_name("H200"), ("hopper",)).tier == "hopper"
