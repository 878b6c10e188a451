"""Processes in which Triton compiles: its interpreter, which other tests use, excludes the compiler in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

# `.ci/run` sets it for each Triton that is not the one installed: all calls with all of them would take an hour
ONE_CALL_A_ROW = os.environ.get("FLASHTILE_TEST_ONE_CALL_A_ROW") == "1"


def of_this_run(calls, row):
    """The calls to compile: all of them, or with ONE_CALL_A_ROW the first of each row of tiles, which row(call) tells."""
    if not ONE_CALL_A_ROW:
        return list(calls)
    first = {}
    for call in calls:
        first.setdefault(row(call), call)
    return list(first.values())


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
