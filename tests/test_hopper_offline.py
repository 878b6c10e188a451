"""Every configuration of the Hopper forward compiles for sm_90 without a GPU: wgmma, few spills, nothing serialised.

As a script (`python tests/test_hopper_offline.py`) it compiles, and prints a JSON line for each call; the test runs it in a
process of its own, since Triton's interpreter, which other tests use, excludes the compiler.
"""

import importlib.util
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace

import compiled
import pytest
import spills
import torch

from flashtile.device.versions import triton_version

# Bytes of a thread's local memory, by options and head dim. At 256 half of the queries lie in registers; faster all the same.
# Dropout's are between tiles: at most a word or four of them in the loop over keys.
SPILLS = {("plain", 256): 56, ("causal", 256): 48, ("features", 256): 176, ("causal", 64): 16, ("dropout", 64): 56,
          ("dropout", 192): 80, ("dropout", 256): 88, ("heads", 256): 104, ("causal", 192): 128,
          ("bias", 64): 16, ("packed", 64): 16, ("packed", 256): 48, ("softcap", 64): 24,
          ("softcap", 128): 8, ("softcap", 256): 184, ("softcap window", 64): 56, ("softcap window", 256): 264,
          ("softcap packed", 64): 40, ("softcap packed", 256): 152, ("softcap dropout", 64): 56, ("softcap dropout", 128): 8,
          ("softcap dropout", 256): 144, ("columns", 256): 8, ("window", 64): 32, ("window", 192): 72,
          ("softcap window", 128): 8, ("short packed", 128): 8, ("packed", 128): 8,
          ("packed", 192): 112, ("window", 256): 120,
          ("parts", 64): 24, ("parts causal", 64): 16, ("parts window", 64): 80, ("parts packed", 64): 16,
          ("parts causal", 128): 8, ("parts window", 128): 24, ("parts heads", 128): 8, ("parts heads", 64): 32,
          ("parts", 192): 128, ("parts causal", 192): 112, ("parts window", 192): 128, ("parts packed", 192): 128,
          ("parts heads", 192): 32, ("parts features", 192): 40, ("parts", 256): 48, ("parts causal", 256): 72,
          ("parts window", 256): 96, ("parts features", 256): 168, ("parts packed", 256): 48,
          ("parts heads", 256): 136}  # fmt: skip
# with 3 consumers, outside of the loop
SPILLS_3_8 = SPILLS | {("causal", 64): 80, ("bias", 64): 112, ("packed", 64): 88, ("packed", 256): 56, ("softcap", 64): 48,
                       ("softcap", 128): 16, ("softcap window", 64): 64, ("softcap packed", 64): 72,
                       ("softcap dropout", 64): 64, ("softcap dropout", 128): 16, ("window", 64): 88, ("plain", 64): 8,
                       ("causal", 128): 16, ("columns", 128): 8, ("dropout", 128): 8, ("plain", 192): 40, ("short", 128): 8,
                       ("bias", 128): 24, ("packed", 128): 40, ("short packed", 128): 40, ("softcap window", 128): 16,
                       ("softcap packed", 128): 48, ("window", 128): 16, ("window", 256): 128, ("parts", 64): 64,
                       ("parts causal", 64): 80, ("parts packed", 64): 96, ("parts features", 128): 16,
                       ("parts", 256): 56, ("parts window", 256): 136, ("parts window", 64): 144,
                       ("parts heads", 64): 112}  # fmt: skip
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "bias": {"causal": True, "has_alibi": True},
    "features": {"window": (200, 100), "softcap": 20.0, "has_alibi": True, "has_sinks": True},
    "softcap": {"causal": True, "softcap": 50.0},
    "softcap window": {"window": (1023, 0), "softcap": 50.0},
    "softcap packed": {"causal": True, "softcap": 50.0},
    "softcap dropout": {"softcap": 50.0, "dropout_p": 0.1},
    "dropout": {"dropout_p": 0.1},
    # a threshold of 1
    "rare": {"dropout_p": 2**-15},
    "heads": {"causal": True},
    # three quarters of a block
    "columns": {"causal": True},
    # few keys: half of a diagonal's tile
    "short": {"causal": True},
    # whose edges cut the first and the last tile of a consumer
    "window": {"window": (1023, 0)},
    "packed": {"causal": True},
    "short packed": {"causal": True},
    # of the keys, merged by another kernel
    "parts": {},
    "parts causal": {"causal": True},
    "parts window": {"window": (1023, 0)},
    "parts features": {"window": (200, 100), "softcap": 20.0, "has_alibi": True, "has_sinks": True},
    "parts packed": {"causal": True},
    "parts heads": {"causal": True, "has_sinks": True},
}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]


# (head_dim, head_dim_v), in blocks of 64, 128 and 256 columns, and with the rest apart
DIMS = (64, 64), (128, 128), (192, 128), (256, 256)
# Of a batch that fills all multiprocessors many times. Longer ones come first: "short" is beside them
SEQLENS = 16384, 4096, 1200, 1024, 640, 128
WINDOWS = (127, 0), (511, 0), (1023, 0), (4095, 0)


def _problem(dims, name, seqlen, window=None):
    from flashtile.problem import AttentionProblem

    options = dict(OPTIONS[name])
    if "window" not in options:
        options["window"] = (None, 0 if options.get("causal") else None)
    options.pop("causal", None)
    if window:
        options["window"] = window
    packed = "packed" in name
    # Of the eight heads of a group, which share tiles
    seqlen_q, num_heads = (16, 32) if "heads" in name else (seqlen, 4)
    total = 64 * seqlen if packed else None
    return AttentionProblem(
        batch=64, seqlen_q=seqlen_q, seqlen_k=seqlen, num_heads=num_heads, num_heads_kv=4, head_dim=dims[0], head_dim_v=dims[1],
        dtype=torch.bfloat16, softmax_scale=0.1, total_q=total, total_k=total, same_lengths=packed, **options,
    )  # fmt: skip


def _chosen():
    """(dims, name of the options, seqlen, window) of calls; some twice."""
    for dims in DIMS:
        for seqlen in SEQLENS:
            yield from ((dims, name, seqlen, None) for name in ("plain", "causal", "packed", "dropout"))
            # A product adds it where tiles of queries, keys and values have as many columns, up to 128
            if dims[0] <= 128:
                yield dims, "bias", seqlen, None
            if dims != (192, 128):
                yield from ((dims, name, seqlen, None) for name in OPTIONS if name.startswith("softcap"))
        yield dims, "short", 1024, None
        yield dims, "short packed", 1024, None
        yield from ((dims, "window", 16384, window) for window in WINDOWS)
        for seqlen in (16384, 640):
            yield from ((dims, name, seqlen, None) for name in OPTIONS if name.startswith("parts"))
    yield (256, 256), "features", 4096, None
    yield (128, 128), "rare", 4096, None
    yield (256, 256), "heads", 4096, None
    yield from ((dims, "columns", 4096, None) for dims in ((96, 96), (192, 192)))


def _configs(call):
    """All that it may have."""
    from flashtile import tiles

    for config in tiles.hopper_configs(_problem(*call)):
        # Half of a diagonal's tile
        if "short" not in call[1] or config.tile_m == config.tile_n:
            yield replace(config, heads=8 if "heads" in call[1] else 1, key_parts=4 if "parts" in call[1] else 1)


def _calls():
    """One of `_chosen`, and its configuration, for each dims, options and configuration."""
    calls = {}
    for call in _chosen():
        for config in _configs(call):
            calls.setdefault((*call[:2], config), (call, config))
    # Those of a mask on the right have the most code
    with_mask_first = sorted(calls.values(), key=lambda item: item[0][1] != "causal")
    return compiled.of_this_run(with_mask_first, row=lambda item: (item[0][0], item[1].tile_m, item[1].tile_n))


def _compile(call_and_config):
    """Report of one call, as a dict."""
    from flashtile.bench import offline
    from flashtile.hopper import forward
    from flashtile.problem import Operands
    from flashtile.tiles import padded_dim

    call, config = call_and_config
    (head_dim, head_dim_v), name, seqlen, _ = call
    problem = _problem(*call)
    packed = problem.varlen
    starts = torch.empty(problem.batch + 1, dtype=torch.int32, device="meta") if packed else None
    seqlens = (problem.seqlen_q, seqlen, seqlen)
    leading = [(problem.batch * length,) if packed else (problem.batch, length) for length in seqlens]
    shapes = zip(leading, (problem.num_heads, 4, 4), (head_dim, head_dim, head_dim_v), strict=True)
    q, k, v = (torch.empty(*rows, heads, dim, dtype=torch.bfloat16, device="meta") for rows, heads, dim in shapes)
    vector = torch.empty(4, device="meta")
    rng_state = torch.empty(2, dtype=torch.int64, device="meta") if problem.dropout_p else None
    slopes, sinks = (vector if there else None for there in (problem.has_alibi, problem.has_sinks))
    operands = Operands(q, k, v, starts, starts, alibi_slopes=slopes, sinks=sinks, rng_state=rng_state)
    with offline.launches(90, sass=True, ptxas=True) as reports:
        forward.launch(problem, config, operands)
    block_dim = padded_dim(head_dim, 2) if name == "columns" else head_dim
    (report,) = (report for report in reports if report.kernel == "attention_forward")
    return {"call": f"{config.tile_m}x{config.tile_n} d{head_dim} {name}", "kind": (name, block_dim), **asdict(report)}


@pytest.fixture(scope="module")
def reports():
    return compiled.reports_of(__file__)


def test_every_configuration_compiles(reports):
    assert len(reports) == len(_calls())


def test_products_run_on_wgmma(reports):
    for report in reports:
        assert report["tensor_core"].get("HGMMA", 0) > 0, report["call"]
        assert set(report["tensor_core"]) == {"HGMMA"}, report["call"]


def test_columns_of_zeros_are_left_out(reports):
    """Head dims 96 and 192 have fewer products than the 128 and 256 of their tiles."""
    products = {report["call"]: report["tensor_core"]["HGMMA"] for report in reports}
    assert products["128x128 d96 columns"] < products["128x128 d128 causal"]
    assert products["128x64 d192 columns"] < products["128x64 d256 causal"]


def test_spills_stay_in_budget(reports):
    budget = SPILLS if triton_version() < (3, 8) else SPILLS_3_8
    over = [(r["call"], r["spill_bytes"]) for r in reports
            if r["spill_bytes"] > spills.allowed(r["call"], budget.get(tuple(r["kind"]), 0))]  # fmt: skip
    assert not over


def test_no_product_waits_for_another(reports):
    """ptxas warns with C75xx where it serialises wgmma, or ignores the registers that a partition asked for."""
    assert not [(r["call"], r["ptxas_warnings"]) for r in reports if r["ptxas_warnings"]]


def test_no_buffer_goes_back_to_tma_early(reports):
    """A race: threads that tell TMA's barrier must have what they read from the buffer in registers."""
    assert not [(r["call"], r["early_releases"]) for r in reports if r["early_releases"] != []]


def test_shared_memory_fits(reports):
    from flashtile import hardware

    limit = hardware.by_name("H200").smem_bytes
    assert not [(r["call"], r["shared_bytes"]) for r in reports if r["shared_bytes"] > limit]


if __name__ == "__main__":
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for report in pool.map(_compile, _calls()):
            print(json.dumps(report), flush=True)
