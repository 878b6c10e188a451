"""The portable Triton kernels, run by Triton's interpreter on the CPU: every case, forward and backward."""

import dataclasses

import checks
import pytest
import torch
from cases import CASES, named

import flashtile

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the same cases run compiled, in tests/gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

# fp16 has its own path through casts of p and dscores; a few masks and shapes show it.
FP16 = named("square", "causal_ragged", "gqa", "dim_40", "softcap", "sinks_causal_gqa", "dropout", "varlen_cross_causal")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("FLASHTILE_TIER", "portable")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fp32(case, poisoned):
    checks.check_attention(case, torch.float32)


@pytest.mark.parametrize("case", FP16, ids=lambda case: case.name)
def test_fp16(case, poisoned):
    checks.check_attention(case, torch.float16)


# A GPU has all cases
@pytest.mark.parametrize("name", ["square", "causal_empty_rows", "gqa", "window_both", "softcap", "alibi_batch_causal",
                                  "sinks_causal_gqa", "dim_40_8", "packed_qkv", "one_key"])  # fmt: skip
def test_keys_in_parts(name, cut_keys, poisoned):
    from flashtile import dispatch

    (case,) = named(name)
    problem = case.problem(case.make(torch.float32))
    assert set(dispatch.plan_for(problem, torch.device("cpu"), "forward").configs) == {"decode"}
    checks.check_attention(case, torch.float32)


@pytest.mark.parametrize("name", ["causal", "gqa", "window_both", "varlen_cross_causal", "alibi_batch_causal"])
def test_tail_of_half(name, tail_of_half, poisoned):
    checks.check_attention(named(name)[0], torch.float32)


@pytest.mark.parametrize("longest", [64, 2**31 - 1])
def test_a_loose_max_seqlen_costs_nothing(longest, monkeypatch, poisoned):
    """No packed sequence is longer than all together: neither grids nor what slopes add up follow what was promised beyond."""
    from flashtile.device import schedule

    grids, grid_of = [], schedule.grid_of
    monkeypatch.setattr(schedule, "grid_of", lambda *arguments: grids.append(grid_of(*arguments)) or grids[-1])
    qkv, slopes = [torch.randn(64, 2, 16, requires_grad=True) for _ in range(3)], torch.rand(2, requires_grad=True)
    cu = torch.tensor([0, 40, 64], dtype=torch.int32)
    out = flashtile.attention_varlen(*qkv, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
                                     causal=True, alibi_slopes=slopes)  # fmt: skip
    out.sum().backward()
    assert out.isfinite().all() and slopes.grad.isfinite().all() and len(grids) > 3 and max(map(max, grids)) <= 4


def test_windows_near_the_largest_int32_of_a_loose_max_seqlen(poisoned):
    """They hide nothing, which is known by the tokens there are; positions beside them would not be int32."""
    q, k = torch.randn(10, 2, 16), torch.randn(100, 2, 16)
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (10, 100)]
    expected, lse = flashtile.attention(q[None], k[None], k[None], return_lse=True)
    for window in ((None, 2**31 - 4), (2**31 - 4, None)):
        out, got = flashtile.attention_varlen(q, k, k, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], window=window,
                                              max_seqlen_q=2**31 - 1, max_seqlen_k=2**31 - 1, return_lse=True)  # fmt: skip
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(got, lse[0])
        out = flashtile.attention_with_kvcache(q, k[None], k[None], cu_seqlens_q=starts[0], max_seqlen_q=2**31 - 1,
                                               window=window)  # fmt: skip
        torch.testing.assert_close(out, expected[0])


def test_infinite_sink(poisoned):
    checks.check_infinite_sink(named("sinks_causal_gqa")[0], torch.float32)


def test_more_sequences_than_a_grid_has_rows(monkeypatch, poisoned):
    from flashtile.device import schedule

    monkeypatch.setattr(schedule, "MAX_GRID", 1)
    assert schedule.grid_of(3, 2, 1) == (6,) and schedule.grid_of(3, 1, 2) == (6,)
    checks.check_attention(named("causal_short_q")[0], torch.float32)
    checks.check_attention(named("varlen_cross_causal")[0], torch.float32)


def test_scale_that_slopes_are_not_divided_by(poisoned):
    """Logits have the scale as their unit, but for one that fp32 could not divide slopes by."""
    (case,) = named("alibi")
    for softmax_scale in (2.0**-45, 1e-39):
        checks.check_attention(dataclasses.replace(case, softmax_scale=softmax_scale), torch.float32)


def test_rows_may_lie_far_apart(poisoned):
    """Row strides from 2**22 on take 64-bit offsets inside a tile."""
    case = dataclasses.replace(named("causal_short_q")[0], heads=1, heads_kv=1)

    def attend(q, k, v, **options):
        from flashtile import attention

        storage = torch.empty(1, q.shape[1], 1, 2**22, dtype=q.dtype)
        wide = storage[..., : q.shape[-1]]
        wide.copy_(q)
        assert case.problem(case.make(q.dtype)._replace(q=wide)).wide_rows
        return attention(wide, k, v, **options)

    checks.check_attention(case, torch.float32, fn=attend)
