"""The examples, in a short form."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["sdpa", "reference"])
def test_train_bytes(tier):
    """Both losses fall and agree; with tier reference the attention of the two runs shares no code."""
    environment = os.environ | {"FLASHTILE_TIER": tier, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "examples" / "train_bytes.py", *"--device cpu --steps 16 --seqlen 64".split()]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"flashtile's tier: {tier}" in process.stdout
    assert re.search(r"text: [\d,]{7,} bytes", process.stdout)
    assert "ok: both losses fell, and they agree within noise" in process.stdout
    for name in ("flashtile", "sdpa"):
        assert re.search(rf"^{name} +[\d.]+ +\d+ ms +\d+ MiB$", process.stdout, re.MULTILINE)


@pytest.mark.parametrize(("flags", "message"), [
    ("--steps 2", "--steps: at least 10"), ("--seqlen 0", "--seqlen: at least 1"), ("--device mps", "--device: cpu or cuda"),
])  # fmt: skip
def test_train_bytes_explains_what_it_does_not_take(flags, message):
    command = [sys.executable, ROOT / "examples" / "train_bytes.py", *flags.split()]
    process = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2 and message in process.stderr


@pytest.mark.parametrize("line", ["packed_batch.py --batch 0", "packed_batch.py --seqlen 0", "packed_batch.py --device cuda",
                                  "generate_paged.py --device cuda", "train_bytes.py --device cuda:1"])  # fmt: skip
def test_examples_explain_what_they_do_not_take(line):
    name, *flags = line.split()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "examples" / name, *flags]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2 and f"error: {flags[0]}: " in process.stderr
