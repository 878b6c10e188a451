"""`flashtile explain`: what a call costs and which kernels it gets, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashtile.cli import main

ROOT = Path(__file__).resolve().parents[1]


def explain(capsys, *arguments):
    code = main(["explain", "--no-compile", *arguments])
    return code, " ".join(capsys.readouterr().out.split())


def test_work_floor_and_memory(capsys):
    code, text = explain(capsys, "-b", "4", "-s", "4096", "--nheads", "16", "-d", "128", "--target", "H200")
    assert code == 0
    # 4 * batch * heads * seqlen**2 * head_dim, and 2.5 times that
    assert "549.8 GFLOP forward, 1,374.4 backward" in text
    assert "compute-bound (ridge 206)" in text and "at the measured roof" in text
    assert "naive keeps scores and p: 4 GiB" in text
    assert "0.0021 GFLOP forward, 0.0052 backward" in explain(capsys, "-b", "1", "-s", "64", "--nheads", "2")[1]


@pytest.mark.parametrize("dim", ["12", "300", "128-512"])
def test_head_dims_that_no_call_takes_are_refused(capsys, dim):
    for arguments in (["explain", "--no-compile", "-d", dim], ["warm", "--headdim", dim]):
        assert main([*arguments, "--target", "H200"]) == 2
        assert "expected a head dim of 8 to 256 in steps of 8" in capsys.readouterr().err


@pytest.mark.parametrize("target, batch, plan", [
    ("A100", "2", "portable: forward 128x64"), ("sm_90", "1", "portable: forward 64x64"),
    ("sm_90", "2", "hopper: forward 128x128"), ("sm_90", "4", "hopper: forward 256x64"),
])  # fmt: skip
def test_tiles_of_a_target(capsys, target, batch, plan):
    code, text = explain(capsys, "--target", target, "-b", batch)
    assert code == 0
    assert f"forward {plan}" in text
    assert ("not hopper: " in text) == plan.startswith("portable")


@pytest.mark.parametrize("batch, seqlen_q, keys, heads, shared", [
    ("32", "16", "512", "32", True), ("1", "16", "4096", "32", True), ("1", "16", "512", "32", False),
    ("32", "128", "4096", "32", False), ("32", "16", "4096", "12", False),
])  # fmt: skip
def test_heads_share_tiles_where_queries_are_few(capsys, batch, seqlen_q, keys, heads, shared):
    """Not where all tiles of few keys run at once, not where there would be more than half as many, not a group of 3."""
    code, text = explain(capsys, "--target", "H200", "-b", batch, "--seqlen-q", seqlen_q, "-s", keys, "-d", "128", "--nheads",
                         heads, "--nheads-kv", "4")  # fmt: skip
    assert code == 0
    assert (", 8 heads a tile" in text) == shared


def test_gradient_of_slopes_has_a_plan(capsys):
    code, text = explain(capsys, "--target", "H200", "-d", "128", "--alibi")
    assert code == 0
    assert "dslopes portable: delta" in text
    assert "dslopes" not in explain(capsys, "--target", "H200", "-d", "128")[1]


def test_decode_on_a_cache(capsys):
    shape = ("--mode", "decode", "--target", "H200", "-s", "8k", "--nheads", "32", "--nheads-kv", "8", "-d", "128")
    code, text = explain(capsys, *shape, "-b", "1")
    assert code == 0 and "b1 sq1 sk8192 h32/8 d128 bf16" in text and "0.13 GFLOP tensors 32 MiB" in text
    assert "portable: decode 16x64 warps 4 stages 3 not hopper: has tiles of 128 rows, of which 4 of a sequence" in text
    assert "128 programs share the keys of all sequences evenly" in text
    # Several heads of a program, and of its neighbours
    _, text = explain(capsys, "--mode", "decode", "--target", "H200", "-b", "32", "-s", "4k", "--nheads", "32", "-d", "96")
    assert "portable: decode 16x16 warps 4 stages 3, 4 heads a tile" in text and "evenly, 32 heads side by side" in text
    code, text = explain(capsys, *shape, "-b", "8", "--page-size", "64", "--seqlen-q", "300")
    assert code == 0 and "pages of 64" in text and "hopper: decode 128x128" in text
    assert "TMA loads 64 slots of a page at once" in text
    code, text = explain(capsys, *shape, "-b", "8", "--page-size", "7", "--seqlen-q", "300")
    assert code == 0 and "tokens are gathered from pages" in text
    code, text = explain(capsys, *shape[:-1], "40", "-b", "8", "--page-size", "7", "--seqlen-q", "300")
    assert code == 0 and "not hopper: needs head dims that are multiples" in text and "each with all keys of 64 rows" in text
    assert main(["explain", "--mode", "bwd"]) == 2 and "expected fwd_bwd or decode" in capsys.readouterr().err
    assert main(["explain", *shape, "--varlen"]) == 2
    assert main(["warm", *shape[:2], "-d", "576-512", "--nheads-kv", "1", "--target", "H200"]) == 2
    assert "expected none for a latent cache" in capsys.readouterr().err


def test_parts_of_groups_in_the_backward(capsys):
    """One key-value head of 8192 tokens has too few tiles of keys for all multiprocessors."""
    shape = ("--mode", "fwd_bwd", "--target", "H200", "-b", "1", "-s", "8k", "--nheads", "8", "-d", "128", "--causal")
    assert "4 parts of a group of heads" in explain(capsys, *shape, "--nheads-kv", "1")[1]
    assert "parts of a group" not in explain(capsys, *shape, "--nheads-kv", "8")[1]


def test_parts_of_queries_in_the_backward(capsys):
    """Ten heads of 77 keys have too few tiles of keys for all multiprocessors."""
    shape = ("--mode", "fwd_bwd", "--target", "H200", "-b", "1", "--seqlen-q", "4k", "--nheads", "10", "-d", "64")
    assert "parts of the queries" in explain(capsys, *shape, "-s", "77")[1]
    assert "parts of the queries" not in explain(capsys, *shape, "-s", "4k")[1]
    assert "in a fixed order" not in explain(capsys, *shape, "-s", "77")[1]
    assert "sums in a fixed order" in explain(capsys, *shape, "-s", "4k", "--nheads", "32")[1]


def test_order_of_packed_sequences_in_the_backward(capsys):
    shape = ("--mode", "fwd_bwd", "--target", "H200", "-b", "16", "-s", "4k", "--nheads", "16", "-d", "128")
    for options, first in (("--varlen", "4"), True), (("--varlen", "16"), False), ((None, "4"), False):
        flags = (flag for flag in (options[0], "--nheads-kv", options[1]) if flag)
        assert ("the longest sequences first" in explain(capsys, *shape, *flags)[1]) == first


def test_parts_of_the_keys_in_the_forward(capsys):
    """512 queries of eight heads are 32 tiles."""
    shape = ("--target", "H200", "-b", "1", "--seqlen-q", "512", "--nheads", "8", "-d", "128", "--no-compile")
    assert "4 parts of the keys" in explain(capsys, *shape, "-s", "32k")[1]
    assert "parts of the keys" not in explain(capsys, *shape, "-s", "512")[1]
    assert "4 parts of the keys" in explain(capsys, "--mode", "decode", *shape, "-s", "32k")[1]


@pytest.mark.parametrize("flags, words", [
    (("--nheads", "256"), "at most 128 heads"), (("--seqlen-q", "9"), "at most 8 query"),
    (("--window", "5,0"), "has no ALiBi, window"),
])  # fmt: skip
def test_latent_decode_refuses_what_the_call_refuses(capsys, flags, words):
    shape = ["--seqlen-q", "1", "--nheads", "16", "--nheads-kv", "1", "-d", "576-512", "--target", "H200"]
    assert main(["explain", *shape, *flags]) == 2 and words in capsys.readouterr().err


def test_latent_decode(capsys):
    """Work per byte decides: 128 heads are limited by products, 16 by memory."""
    shape = ("-b", "128", "--seqlen-q", "1", "-s", "8k", "--nheads-kv", "1", "-d", "576-512", "--target", "H200")
    code, text = explain(capsys, *shape, "--nheads", "128")
    assert code == 0
    # 2 * (576 + 512) * batch * heads * keys
    assert "292.1 GFLOP" in text and "compute-bound" in text and "2 * heads * query tokens = 256 FLOP/B" in text
    assert "decode hopper" in text
    code, text = explain(capsys, *shape, "--nheads", "16")
    assert code == 0 and "memory-bound" in text


def test_wide_heads_are_no_latent_cache(capsys):
    assert main(["explain", "--no-compile", "-d", "512", "--target", "H200"]) == 2
    assert "expected a head dim of 8 to 256 in steps of 8, got 512" in capsys.readouterr().err


def test_several_targets_stand_under_each_other(capsys):
    code, text = explain(capsys, "-s", "4096", "-d", "128", "--target", "A100,B200")
    assert code == 0 and "(ridge 153)" in text and "(ridge 281)" in text
    assert text.index("A100 (sm_80)") < text.index("B200 (sm_100)")


def test_unknown_target(capsys):
    assert main(["explain", "--target", "V9000"]) == 2
    assert "known: A100" in capsys.readouterr().err


def test_preset_is_explained_case_by_case(capsys):
    code, text = explain(capsys, "--preset", "gpt2-small", "--target", "B200")
    assert code == 0 and "B200 (sm_100)" in text


@pytest.mark.slow
def test_kernels_are_compiled_for_the_target():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flashtile", "explain", "--target", "A100", "-d", "64", "-s", "512", "--alibi"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert run.returncode == 0, run.stderr
    assert "attention_forward: " in run.stdout and "HMMA" in run.stdout and "attention_dkdv: " in run.stdout
    # Of the backward, and of the gradient of slopes
    assert run.stdout.count("attention_dq: ") == 2
