"""Every tile row that dispatch can choose compiles without a GPU, fits in shared memory and spills nothing."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import compiled
import pytest
import spills

HERE = Path(__file__).parent
ARCHS = (80, 90, 100)
# Bytes a thread that a row may spill, by the name that offline.py prints; written down only where a spill can't be avoided or
# is measured to be worth it. At most that, with every version of Triton.
BUDGET = json.loads((HERE / "spill_budget.json").read_text())

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]

# As cuobjdump -sass writes it: TMA waits for a barrier; its buffer is read, the barrier told, and what was read used
READ_AND_RELEASE = """
        /*5ee0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [R0+URZ+0x2c6c0], R11 ;          /* 0x02c6c00b000075a7 */
                                                                                                       /* 0x000e64000804017f */
        /*6450*/                   UTMALDG.1D [UR20], [UR38] ;                                         /* 0x00000014260075b4 */
                                                                                                       /* 0x0003e20008000000 */
        /*93a0*/                   LDS.64 R8, [R188+0x2c560] ;                                         /* 0x02c56000bc087984 */
                                                                                                       /* 0x000e640000000a00 */
        /*93d0*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R0+URZ+0x2c6c0], RZ ;                /* 0x02c6c0ff00ff89a7 */
                                                                                                       /* 0x0005e4000810003f */
        /*93f0*/                   FFMA R176, R183, R205, R9.reuse ;                                   /* 0x000000cdb7b07223 */
                                                                                                       /* 0x102fe20000000009 */
"""


def _compile(*arguments):
    """What offline.py prints."""
    return compiled.reports_of(HERE / "offline.py", *arguments)


def _problems(row):
    """What is wrong with a compiled row, in words."""
    name = row["name"]
    if "error" in row:
        return [f"{name}: does not compile: {row['error']}"]
    problems = []
    if row["spill_bytes"] > spills.allowed(name, BUDGET.get(name, 0)):
        problems.append(f"{name}: spills {row['spill_bytes']} bytes a thread, {row['registers']} registers")
    if row["shared_bytes"] > row["smem_bytes"]:
        problems.append(f"{name}: needs {row['shared_bytes']} bytes of shared memory of {row['smem_bytes']}")
    return problems


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_compile_without_spills(arch):
    rows = _compile("rows", arch)
    assert {row["kernel"] for row in rows} >= {"forward", "delta", "dkdv", "dq"}
    problems = [problem for row in rows for problem in _problems(row)]
    assert not problems, "\n" + "\n".join(problems)
    unknown = {name for name in BUDGET if name.endswith(f" sm_{arch}")} - {row["name"] for row in rows}
    assert compiled.ONE_CALL_A_ROW or not unknown, f"in spill_budget.json, but no row has this name: {unknown}"


@pytest.mark.parametrize("arch", ARCHS)
def test_all_features_at_once_compile(arch):
    """Spills are allowed here: such a call is rare, and its tile is that of the plain one."""
    rows = _compile("features", arch)
    assert {row["kernel"] for row in rows} == {"forward", "delta", "dkdv", "dq", "dslopes"}
    problems = [problem for row in rows for problem in _problems(row) if ": spills " not in problem]
    # ptxas gave up: it leaves a kernel few registers and all else in memory
    problems += [f"{row['name']}: spills {row['spill_bytes']} bytes a thread, {row['registers']} registers"
                 for row in rows if row.get("registers", 255) < 64 and row["spill_bytes"] > 1000]  # fmt: skip
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(("arch", "kernels"), [
    (80, {"attention_forward", "attention_delta", "attention_dkdv", "attention_dq"}),
    (90, {"attention_forward", "backward_rows", "attention_backward", "backward_convert"}),
])  # fmt: skip
def test_rows_of_head_dims_like_72_are_loaded_16_bytes_at_once(arch, kernels):
    """Triton looks for strides that are multiples of 16 elements. Where it found none, decode of head dim 136 took 43 times as
    long (docs/kernels/decode.md)."""
    rows = _compile("aligned", arch)
    assert {row["kernel"] for row in rows} >= kernels | {"append_rows", "decode_attention"}
    # A program that merges may have fewer numbers than threads
    narrow = [row for row in rows if row["narrow_accesses"] and row["kernel"] != "merge_parts"]
    assert not narrow


def test_kernels_for_an_older_gpu_have_its_instructions():
    """`flashtile tune --target A100` on a Hopper: a kernel that runs here, with mma.sync and no wgmma."""
    [forward] = _compile("older", 90)
    assert forward["arch"] == 90 and set(forward["tensor_core"]) == {"HMMA"}


def test_every_row_is_chosen_somewhere():
    """A row that no device and no problem reaches is dead, and the tests above would not see it."""
    assert _compile("dead") == []


@pytest.mark.parametrize(("arch", "instruction"), [(80, "HMMA"), (90, "HGMMA"), (100, "UTCHMMA")])
def test_report(arch, instruction):
    """The numbers of a report say what the kernel is: tensor cores in one, spills in the other."""
    good, large = _compile("sample", arch)
    assert (good["kernel"], good["arch"], good["num_warps"]) == ("scaled_product", arch, 4)
    assert 16 <= good["registers"] <= 255
    assert good["spill_bytes"] == good["local_accesses"] == 0
    assert good["shared_bytes"] >= 2 * 64 * 64 * 2
    assert good["tensor_core"][instruction] > 0
    assert good["ptxas_warnings"] == []
    assert large["spill_bytes"] > 0 and large["local_accesses"] > 0
    assert large["ptxas_warnings"] is None


def test_what_ptxas_warns_of_is_reported(tmp_path):
    """Its lines come through Triton's run of it, and through one of its own for what Triton's cache had."""
    path = compiled.output_of("-c", "from triton import knobs; print(knobs.nvidia.ptxas.path)").strip()
    ptxas, warning = tmp_path / "ptxas", "ptxas info    : (C7510) Potential Performance Loss: of a test"
    ptxas.write_text(f'#!/bin/sh\n"{path}" "$@" && case "$*" in *--version*) ;; *) echo "{warning}" >&2 ;; esac\n')
    ptxas.chmod(0o755)
    for _ in range(2):
        good, large = compiled.reports_of(HERE / "offline.py", "sample", 80, TRITON_PTXAS_PATH=str(ptxas),
                                          TRITON_CACHE_DIR=str(tmp_path / "cache"))  # fmt: skip
        assert good["ptxas_warnings"] == [warning] and large["ptxas_warnings"] is None


def test_interpreter_is_refused():
    """Under the interpreter nothing is compiled, and the error says so."""
    code = "from flashtile.bench import offline\nwith offline.launches(90): pass"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parent)}
    process = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True)
    assert "UnsupportedError: offline compilation: expected a process without TRITON_INTERPRET=1" in process.stderr


def test_early_releases_are_found():
    from flashtile.bench.offline import early_releases

    (found,) = early_releases(READ_AND_RELEASE)
    assert "93d0" in found and "LDS.64" in found
    lines = READ_AND_RELEASE.splitlines()
    # The use, which waits for the load, before the barrier is told
    assert early_releases("\n".join(lines[:-4] + lines[-2:] + lines[-4:-2])) == ()
    # A barrier of all threads before: what loads belongs to another partition
    everybody = lines[-4].replace(lines[-4].split("*/")[1].split("/*")[0], " BAR.SYNC.DEFER_BLOCKING 0x1 ; ")
    assert early_releases("\n".join(lines[:-4] + [everybody, lines[-3]] + lines[-4:])) == ()
    # A barrier that TMA does not wait for
    assert early_releases(READ_AND_RELEASE.replace("TRYWAIT P2, [R0+URZ+0x2c6c0]", "TRYWAIT P2, [R0+URZ+0x2c6d0]")) == ()
