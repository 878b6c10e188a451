"""A kernel that is launched again by addresses gets what Triton would give it: every tier, direction and kind of argument."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_arguments_are_those_of_the_first_launch():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, HERE / "relaunch.py"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    compared = [line for line in lines if ": compared " in line]
    assert len(compared) >= 50
    assert lines == compared, "\n".join(line for line in lines if line not in compared)
