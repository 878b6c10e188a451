"""Processes in which Triton compiles: its interpreter, which other tests use, excludes the compiler in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path


def output_of(*arguments, **variables):
    """What Python prints with these arguments and environment variables; it finds flashtile and the modules of this folder."""
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), str(here.parent), environment.get("PYTHONPATH")]))
    process = subprocess.run([sys.executable, *map(str, arguments)], env=environment, text=True, capture_output=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout


def reports_of(script, *arguments, **variables):
    """The JSON lines that a script prints."""
    return [json.loads(line) for line in output_of(script, *arguments, **variables).splitlines()]
