"""The examples of packing and of transformers, in a short form on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(name, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "examples" / name, *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_packed_batch():
    output = run("packed_batch.py", "--batch", "4", "--seqlen", "64", "--device", "cpu")
    assert "with padding" in output and "ok: the same loss and gradients" in output


def test_transformers_generate():
    pytest.importorskip("transformers", reason="transformers is not installed")
    output = run("transformers_generate.py", "--tokens", "4", "--device", "cpu")
    assert "100% of the tokens are the same" in output and "ok: the same logits up to rounding" in output


@pytest.mark.slow
def test_train_bytes_compiled_in_bf16():
    """The model is one graph."""
    output = run("train_bytes.py", *"--device cpu --steps 10 --seqlen 16 --dtype bf16 --compile aot_eager".split())
    assert "attention: torch.bfloat16" in output and "ok: both losses fell, and they agree within noise" in output
