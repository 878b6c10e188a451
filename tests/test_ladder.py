"""The ladder without a GPU: every rung compiles for sm_80 and sm_90, what rungs refuse, and the commands."""

import ast
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashtile import cli, hardware, ladder
from flashtile.bench.cases import BenchCase
from flashtile.errors import FlashtileError, Unavailable, UnsupportedError
from flashtile.ladder import launch, nvrtc, rungs
from flashtile.problem import AttentionProblem, Operands
from flashtile.tiles import TileConfig

CUDA_RUNGS = [rung for rung in rungs.RUNGS.values() if not rung.tier]
H200, A100 = hardware.by_name("H200"), hardware.by_name("A100")
# Bytes a thread. 5 to 7 are held at 128 registers, for two blocks on an SM; at head dim 128 dk and dv alone are 128 registers.
SPILL_BYTES = {(5, "forward", 64): 16, (6, "forward", 64): 16, (7, "forward", 64): 16, (9, "dkdv", 128): 96}
# In CI it must be there.
needs_nvrtc = pytest.mark.skipif(bool(nvrtc.unavailable()) and not os.environ.get("CI"), reason="no cuda-core and NVRTC")


def variants():
    """(rung, head dim, causal, bf16) of each file, so that every branch of it is compiled."""
    for rung in CUDA_RUNGS:
        for head_dim in (64, 128) if len(rung.configs) > 8 else rung.configs:
            yield rung, head_dim, False, False
            yield rung, head_dim, True, "bf16" in rung.dtypes


@needs_nvrtc
@pytest.mark.parametrize("device", [A100, H200], ids=lambda device: device.arch)
@pytest.mark.parametrize("rung, head_dim, causal, bf16", list(variants()), ids=lambda v: getattr(v, "name", str(v)))
def test_every_rung_compiles_and_fits(rung, head_dim, causal, bf16, device):
    config = rung.configs[head_dim]
    cubin = nvrtc.compile_file(rung.path, device.arch, rungs.macros(config, head_dim, causal=causal, bf16=bf16))
    assert cubin.code.startswith(b"\x7fELF")
    shared = rungs.shared_bytes(rung, config, head_dim)
    assert cubin.registers
    for kernel, registers in cubin.registers.items():
        assert cubin.spill_bytes[kernel] <= SPILL_BYTES.get((rung.number, kernel, head_dim), 0), kernel
        assert rungs.occupancy(config.num_warps, registers, shared, device).blocks >= 1, kernel
    assert rungs.refuses_config(rung, config, head_dim, device) is None


@needs_nvrtc
def test_a_cubin_is_kept_by_its_source(tmp_path):
    path = tmp_path / "one.cu"
    path.write_text('#include "value.cuh"\nextern "C" __global__ void set(float* x) { x[0] = VALUE + MORE; }')
    header = tmp_path / "value.cuh"
    header.write_text("#define VALUE 1")
    first = nvrtc.compile_file(path, "sm_80", {"MORE": 1})
    assert nvrtc.compile_file(path, "sm_80", {"MORE": 1}) is first
    assert nvrtc.compile_file(path, "sm_90", {"MORE": 1}) is not first
    assert nvrtc.compile_file(path, "sm_80", {"MORE": 2}) is not first
    header.write_text("#define VALUE 2")
    assert nvrtc.compile_file(path, "sm_80", {"MORE": 1}) is not first


@needs_nvrtc
def test_the_compiler_says_what_is_wrong(tmp_path):
    path = tmp_path / "broken.cu"
    path.write_text('extern "C" __global__ void f() { nothing_of_this_name(); }')
    with pytest.raises(Exception, match="nothing_of_this_name"):
        nvrtc.compile_file(path, "sm_80", {})


def test_without_cuda_core_the_error_names_the_extra(monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    nvrtc._cuda.cache_clear()
    monkeypatch.setattr(nvrtc, "import_module", missing)
    with pytest.raises(Unavailable, match=r"pip install 'flashtile\[ladder\]'"):
        nvrtc.compile_file(rungs.get(1).path, "sm_80", {})
    assert cli.main(["ladder", "show", "1", "--target", "H200"]) == 6
    assert "pip install 'flashtile[ladder]'" in capsys.readouterr().err
    assert "flashtile[ladder]" in nvrtc.unavailable()


def test_only_nvrtc_knows_nvrtc():
    root = Path(ladder.__file__).parents[1]
    for path in root.rglob("*.py"):
        words = {word for node in ast.walk(ast.parse(path.read_text())) for word in named_modules(node)}
        if path.name != "nvrtc.py":
            assert not [word for word in words if word.partition(".")[0] == "cuda"], path


def named_modules(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def test_the_table_is_whole():
    assert list(rungs.RUNGS) == list(range(1, len(rungs.RUNGS) + 1))
    for rung in rungs.RUNGS.values():
        assert rung.path.exists() and rung.idea and rung.dtypes
        if not rung.tier:
            first = rung.source.splitlines()[0]
            assert first.startswith(f"// Rung {rung.number}, {rung.name}"), first
            assert "// Cost:" in rung.source and "// Arguments:" in rung.source


@pytest.mark.parametrize(
    "number, change, words",
    [
        (1, {"dtype": "fp16"}, "takes fp32, not float16"),
        (5, {"dtype": "bf16"}, "takes fp16, not bfloat16"),
        (5, {"head_dim": 128, "head_dim_v": 128}, "head dim of 64, not 128"),
        (8, {"head_dim": 96, "head_dim_v": 96}, "head dim of 64 and 128, not 96"),
        (8, {"head_dim_v": 128}, "one head dim for q, k and v"),
        (8, {"num_heads_kv": 2}, "as many key-value heads"),
        (8, {"seqlen_k": 512}, "as many queries as keys"),
        (8, {"window": (64, 0)}, "no window"),
        (8, {"softcap": 30.0}, "no softcap"),
    ],
)
def test_refusals_are_sentences(number, change, words):
    case = replace(BenchCase(dtype="fp16"), **change)
    assert words in rungs.refuses(rungs.get(number), case.problem(), H200)
    old = hardware.Device("old", "sm_70", 80, 96 << 10)
    assert "needs sm_80" in rungs.refuses(rungs.get(number), case.problem(), old)


@pytest.mark.parametrize("number", [10, 11])
def test_tiers_have_the_options_of_rungs(number):
    from flashtile.bench import ladder

    backend = ladder._backend(rungs.get(number), None)
    for change in ({"window": (64, 0)}, {"softcap": 30.0}):
        assert "takes no" in backend.refuses(replace(BenchCase(dtype="fp16"), **change), "fwd", "cpu")


def test_what_is_in_the_table_is_taken():
    for rung in CUDA_RUNGS:
        for dtype in rung.dtypes:
            for head_dim in rung.configs:
                for causal in (False, True):
                    case = BenchCase(1, 77, 77, 8, 8, head_dim, head_dim, causal, dtype)
                    assert rungs.refuses(rung, case.problem(), A100) is None, (rung.name, case)


@pytest.mark.parametrize(
    "number, config, words",
    [
        (1, (16, 16, 4, 1), "tile_m x tile_n threads"),
        (2, (1, 32, 1, 1), "the head dim"),
        (4, (64, 64, 4, 1), "8 warps"),
        (6, (128, 64, 4, 1), "tile_m of 16 x warps"),
        (6, (64, 64, 4, 2), "this rung has one"),
        (7, (64, 64, 4, 1), "2 stages or more"),
        (8, (120, 64, 4, 2), "a multiple of 16 x warps"),
        (8, (128, 256, 4, 4), "KiB of shared memory, a block has 163"),
        (9, (64, 32, 4, 1), "tile_m and tile_n of 16 x warps"),
    ],
)
def test_tiles_that_a_rung_cannot_have(number, config, words):
    assert words in rungs.refuses_config(rungs.get(number), TileConfig(*config), 64, A100)


def test_launch_refuses_before_it_compiles():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="rung 5, tensor cores: needs sm_80"):
        launch.forward(5, q, q, q)
    with pytest.raises(UnsupportedError, match="a number from 1 to 11, got 12"):
        launch.forward(12, q, q, q)
    for number, fn in ((9, launch.forward), (10, launch.forward)):
        with pytest.raises(UnsupportedError, match=f"rung {number}: expected a rung of CUDA C\\+\\+ with a forward pass"):
            fn(number, q, q, q)


def test_occupancy():
    """48 KiB and 239 registers of 4 warps: 240 x 128 registers twice, 49 KiB of 228 four times."""
    two = rungs.occupancy(4, 239, 48 << 10, H200)
    assert (two.blocks, two.limit, two.threads) == (2, "registers", 0.125)
    assert rungs.occupancy(4, 128, 48 << 10, H200).limit == "registers"
    assert rungs.occupancy(4, 64, 48 << 10, A100) == rungs.Occupancy(3, "shared memory", 3 * 128 / 2048)
    assert rungs.occupancy(32, 32, 0, H200) == rungs.Occupancy(2, "registers", 1.0)
    assert rungs.occupancy(1, 16, 0, H200) == rungs.Occupancy(32, "blocks", 0.5)
    assert rungs.occupancy(16, 32, 0, hardware.by_name("RTX 4090")).limit == "threads"


def test_bank_conflicts_end_with_rung_6():
    cycles = {number: rungs.bank_cycles(rungs.get(number)) for number in rungs.RUNGS}
    assert cycles[5] == (2, 1)
    assert cycles[6] == cycles[7] == cycles[8] == (1, 1)
    assert rungs.bank_cycles(rungs.get(8), 128) == (1, 1)
    assert cycles[4] is None


def test_every_element_has_its_own_place():
    """The layouts are permutations: of rows by HEAD_DIM elements, pieces of 8 in order."""
    for number, head_dim in ((5, 64), (6, 64), (8, 64), (8, 128), (9, 128)):
        places = rungs.places(rungs.get(number), 64, head_dim)
        assert sorted(places) == list(range(0, 64 * head_dim, 8))


# --- commands ----------------------------------------------------------------------------------------------------------


def test_list(capsys):
    for words in (["ladder"], ["ladder", "list"]):
        assert cli.main(words) == 0
        out = capsys.readouterr().out
        assert all(f"{rung.number}  {rung.name}" in out for rung in rungs.RUNGS.values())
        assert "48 KiB" in out


def test_show(capsys):
    assert cli.main(["ladder", "show", "5"]) == 0
    assert capsys.readouterr().out == rungs.get(5).source
    assert cli.main(["ladder", "show", "10"]) == 0
    assert capsys.readouterr().out == rungs.get(10).source
    assert cli.main(["ladder", "show", "0"]) == 2
    assert "a number from 1 to 11" in capsys.readouterr().err


def test_show_diff(capsys):
    assert cli.main(["ladder", "show", "6", "--diff"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("+") and "row % 8" in line for line in lines)
    assert len(lines) < len(rungs.get(6).source.splitlines())
    for number in (1, 10, 11):
        assert cli.main(["ladder", "show", str(number), "--diff"]) == 2
        assert "Leave out --diff" in capsys.readouterr().err


@needs_nvrtc
@pytest.mark.parametrize("number", ["10", "11"])
def test_show_target_of_a_tier_says_where_to_look(number, capsys):
    assert cli.main(["ladder", "show", number, "--target", "H200"]) == 2
    assert f"rung {number}: its tiles" in capsys.readouterr().err


def test_show_target_needs_no_gpu(capsys):
    assert cli.main(["ladder", "show", "8", "--target", "A100"]) == 0
    out = capsys.readouterr().out
    assert "48.0 KiB shared" in out and "0 B spilled; 2 blocks an SM by registers" in out
    assert "cycles of shared memory: 1 for" in out


@needs_nvrtc
def test_explain_ladder():
    from flashtile.cli.ladder import lines_for_case

    (rung,) = (line for line in lines_for_case(BenchCase(dtype="fp32"), hardware.by_name("A100"), True) if "rung 4" in line)
    assert "head dim 64, forward: tiles 64x64, 256 threads, 1 stages, 68.0 KiB shared" in rung and "registers" in rung


def test_explain_ladder_without_compiling(capsys, monkeypatch):
    monkeypatch.setattr(nvrtc, "compile_file", None)
    assert cli.main(["explain", "--ladder", "--target", "A100", "--dtype", "fp32", "--no-compile"]) == 0
    out = capsys.readouterr().out
    assert "rung 4    tiles 64x64, 256 threads, 1 stages, 68.0 KiB shared\n" in out
    assert "rung 5    not tensor cores: takes fp16, not float32" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_run_without_a_gpu(capsys):
    assert cli.main(["ladder", "run", "--upto", "1", "--no-progress"]) == 6
    assert "needs a GPU" in capsys.readouterr().err


def test_rungs_become_backends_of_the_benchmark(monkeypatch):
    from flashtile.bench import ladder as bench
    from flashtile.bench import peers

    monkeypatch.setattr(peers, "BACKENDS", dict(peers.BACKENDS))
    bench.register()
    rung = peers.BACKENDS["rung-8"]
    case = BenchCase(dtype="fp16")
    assert rung.refusal(case, "bwd", "cpu") == "forward only: no backward"
    assert "needs sm_80" in rung.refusal(case, "fwd", "cpu")
    assert "its forward is rung 8" in peers.BACKENDS["rung-9"].refusal(case, "fwd", "cpu")
    assert peers.BACKENDS["rung-10"].backward
    with pytest.raises(FlashtileError, match="needs a GPU"):
        rung.load("cpu")


def test_compare_runs_from_end_to_end(monkeypatch, capsys):
    """On the CPU, with standard attention in place of the kernels: checked, timed, tabulated, recorded."""
    from flashtile.bench import engine, peers, record
    from flashtile.bench import ladder as bench
    from flashtile.cli import ladder as command
    from flashtile.cli.common import make_console
    from flashtile.reference import fa2

    def problem(q, k, v, causal):
        operands = Operands(q, k, v)
        return operands, AttentionProblem.from_tensors(operands, causal=causal)

    def forward(number, q, k, v, *, causal, config=None):
        return fa2.forward(*problem(q, k, v, causal))

    def backward(number, q, k, v, out, lse, dout, *, causal, config=None):
        return fa2.backward(*problem(q, k, v, causal), out, lse, dout)[:3]

    monkeypatch.setattr(peers, "BACKENDS", dict(peers.BACKENDS))
    monkeypatch.setattr(bench, "_missing", lambda rung, device: None)
    monkeypatch.setattr(launch, "forward", forward)
    monkeypatch.setattr(launch, "backward", backward)
    monkeypatch.setattr(rungs, "refuses", lambda rung, problem, *_: None if on_dtype(rung, problem) else "its dtype")
    case = BenchCase(1, 64, 64, 2, 2, 64, 64, True, "fp16")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    settings = engine.Settings(rounds=6, rep_ms=6, roof=False)
    report = bench.compare([case], [1, 8, 9, 10], device="cpu", settings=settings)
    status = {(r.case.dtype, r.backend, r.mode): (r.status, r.reason) for r in report.results}
    ran = {key for key, (word, _) in status.items() if word == "ok" and key[1].startswith("rung")}
    assert ran == {("fp32", "rung-1", "fwd"), ("fp16", "rung-8", "fwd"), ("fp16", "rung-9", "bwd")}, status
    assert status["fp16", "rung-10", "fwd"][1].startswith("portable: needs a GPU")
    assert report.resolved["tiles"]["rung-8"] == {64: {"tile_m": 128, "tile_n": 64, "num_warps": 4, "num_stages": 2}}
    assert not record.problems(report.document())
    repro = next(result.repro for result in report.results if result.backend == "rung-9" and result.mode == "bwd")
    flags = "--rung 9 -b 1 -s 64 --nheads 2 -d 64 --causal --dtype fp16 --mode bwd --seed 0 --rep-ms 6"
    assert repro == f"flashtile ladder run {flags}"
    for mode in ("fwd", "bwd"):
        command._print_table(make_console(), report, case, mode)
    out = capsys.readouterr().out
    assert "naive: standard PyTorch attention" in out
    assert "larger tiles" in out and "rung 10: portable: needs a GPU" in out


def on_dtype(rung, problem):
    return {torch.float32: "fp32", torch.float16: "fp16"}[problem.dtype] in rung.dtypes


def test_table_compares_each_rung_with_the_one_before():
    from flashtile.bench import engine, stats
    from flashtile.bench import ladder as bench

    def result(case, name, ms, status="ok"):
        made = engine.Result(case, name, "fwd", status)
        if ms:
            made.stats = stats.summary([ms])
        return made

    half = BenchCase(dtype="fp16")
    full = replace(half, dtype="fp32")
    report = engine.Report(torch.device("cpu"), engine.Settings(), {}, {}, [
        result(full, "sdpa-flash", None, "refused"), result(full, "rung-4", 8.0), result(full, "rung-5", None, "refused"),
        result(half, "sdpa-flash", 1.0), result(half, "rung-4", None, "refused"), result(half, "rung-5", 2.0),
        result(half, "rung-9", None, "refused"), result(half, "rung-10", 0.5),
    ])  # fmt: skip
    rows = {row.rung.number: row for row in bench.table(report, half, "fwd")}
    assert (rows[4].over_before, rows[4].over_flash) == (None, 1 / 8)
    assert (rows[5].over_before, rows[5].over_flash) == (4.0, 0.5)
    assert rows[9].over_before is None
    assert (rows[10].over_before, rows[10].over_flash) == (4.0, 2.0)
