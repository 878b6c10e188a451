"""The command line: the seed's flags, exit codes, what is printed where, and how fast help is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flashtile import cli
from flashtile.bench import measure, peers, record

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["-b", "1", "-s", "64", "--nheads", "2", "-d", "16", "--device", "cpu", "--no-roof", "--no-progress"]
QUICK = [*SMALL, "--repeats", "6"]


def _python(*arguments, **more):
    # pytest and coverage variables of this process don't matter to the child; where flashtile lies does.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": path}, **more)  # fmt: skip


def _run_json(capsys, *arguments):
    code = cli.main([*arguments, "--json", "-"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_other_libraries_see_no_arguments():
    """FlashAttention-4's compiler takes -d for an option of its own, and ends the process."""
    code = "import sys; from flashtile.cli import main; main(); print(sys.argv[1:])"
    process = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=100)
    assert process.stdout.splitlines()[-1] == "[]", process.stderr


def test_help_is_immediate_and_imports_no_torch():
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = _python("-m", "flashtile", "--help")
        times.append(time.perf_counter() - start)
        assert done.returncode == 0 and "compare" in done.stdout
    assert min(times) < 0.3, times
    heavy = "import sys, flashtile.cli; print([m for m in ('torch', 'triton', 'numpy', 'matplotlib') if m in sys.modules])"
    assert _python("-c", heavy).stdout.strip() == "[]"


def test_the_short_list_of_commands_is_that_of_the_whole_app():
    """`flashtile --help` builds no command; what it prints must be what the whole app would."""
    import typer

    whole = typer.main.get_command(cli.app)
    quick = typer.main.get_command(cli._needed(["--help"]))
    assert list(whole.commands) == list(quick.commands) and set(whole.commands) == set(cli.COMMANDS)
    for name, command in whole.commands.items():
        assert command.get_short_help_str() == quick.commands[name].get_short_help_str(), name
    assert list(typer.main.get_command(cli._needed(["ladder", "list"])).commands) == ["ladder"]
    assert cli._needed(["rnu"]) is cli.app


@pytest.mark.parametrize("command", [[], ["run"], ["compare"], ["doctor"], ["presets"]])
def test_every_command_has_help(command, capsys):
    assert cli.main([*command, "--help"]) == 0
    assert "flashtile" in capsys.readouterr().out


def test_version(capsys):
    import flashtile

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == flashtile.__version__


def test_run_prints_what_the_seed_asks_for(capsys):
    assert cli.main(["run", *QUICK]) == 0
    out = capsys.readouterr().out
    for text in ("Forward Pass Results:", "Backward Pass Results:", "Time (min):", "Time (avg):", "Time (max):", "Memory:",
                 "TFLOPs/s (peak):", "TFLOPs/s (avg):", "Time (median):", "flashtile run -b 1 -s 64"):  # fmt: skip
        assert text in out, text
    assert "CPU result, the reference implementation, not a statement about the kernels" in out


def test_seed_flags_work_unchanged(capsys):
    flags = "--batch 1 --seqlen 32 --nheads 2 --headdim 16 --causal --dtype fp16 --no-grad --repeats 4 --device cpu"
    code, document, _ = _run_json(capsys, "run", *flags.split())
    assert code == 0
    (result,) = document["results"]
    config = result["config"]
    assert (config["batch"], config["seqlen_q"], config["nheads"], config["headdim"]) == (1, 32, 2, 16)
    assert config["causal"] is True and config["dtype"] == "fp16"
    assert result["mode"] == "fwd" and len(result["samples_ms"]) == 4
    assert document["roofs"]


def test_repro_has_what_a_row_was_measured_with(capsys, monkeypatch):
    monkeypatch.setenv("FLASHTILE_TIER", "sdpa,reference")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    _, document, _ = _run_json(capsys, "run", *QUICK, "--mode", "fwd")
    flags = "-b 1 -s 64 --nheads 2 -d 16 --dtype fp32 --mode fwd --seed 0"
    assert document["results"][0]["repro"] == f"FLASHTILE_TIER=sdpa,reference flashtile run {flags} --repeats 6 --device cpu"
    monkeypatch.delenv("FLASHTILE_TIER")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _, document, _ = _run_json(capsys, "run", *QUICK, "--mode", "fwd", "--timer", "wall", "--l2", "warm",
                              "--rep-ms", "2.5")  # fmt: skip
    repro = f"TRITON_INTERPRET=1 flashtile run {flags} --timer wall --l2 warm --repeats 6 --rep-ms 2.5 --device cpu"
    assert document["results"][0]["repro"] == repro


def test_repro_of_as_many_queries_as_a_cache_has_keys(capsys):
    _, document, _ = _run_json(capsys, "run", *QUICK, "--mode", "decode", "--seqlen-q", "64")
    assert "-s 64 --seqlen-q 64" in document["results"][0]["repro"]


def test_packed_sequences_are_not_decoded(capsys):
    code, document, _ = _run_json(capsys, "run", *QUICK, "--mode", "decode", "--varlen", "--page-size", "16")
    assert code == 2 and "without dropout and packed sequences" in document["results"][0]["reason"]


def test_repro_of_a_comparison_has_no_rounds(capsys):
    _, document, _ = _run_json(capsys, "compare", *QUICK, "--mode", "fwd", "--backend", "flashtile,naive", "--timeout", "2",
                               "--no-check", "--softcap", "3.1234567")  # fmt: skip
    repro = document["results"][0]["repro"]
    assert "--softcap 3.1234567" in repro and repro.endswith("--seed 0 --timeout 2 --no-check --device cpu")


def test_other_shape_flags(capsys):
    code, document, _ = _run_json(capsys, "run", *QUICK, "--mode", "fwd", "--nheads-kv", "1", "--window", "-1,4", "--softcap",
                                  "20", "--seqlen-q", "32", "--seed", "3", "--alibi")  # fmt: skip
    config = document["results"][0]["config"]
    assert config["alibi"] is True and document["results"][0]["status"] == "ok"
    assert code == 0 and config["window"] == [None, 4] and config["softcap"] == 20 and config["nheads_kv"] == 1
    assert (config["seqlen_q"], config["seqlen_k"]) == (32, 64) and document["settings"]["seed"] == 3


def test_packed_sequences_dropout_and_pages(capsys):
    code, document, _ = _run_json(capsys, "compare", *QUICK, "--batch", "3", "--mode", "fwd,bwd", "--varlen", "--dropout",
                                  "0.1", "--backend", "flashtile,naive")  # fmt: skip
    assert code == 0 and [row["status"] for row in document["results"]] == ["ok"] * 4
    config = document["results"][0]["config"]
    assert config["varlen"] is True and config["dropout"] == 0.1
    code, document, _ = _run_json(capsys, "run", *QUICK, "--mode", "decode", "--page-size", "16,24", "--alibi")
    assert code == 0 and [row["config"]["page_size"] for row in document["results"]] == [16, 24]
    code = cli.main(["run", *QUICK, "--page-size", "16"])
    assert code == 2 and "page-size" in capsys.readouterr().err
    code = cli.main(["memory", "--varlen", "-s", "64"])
    assert code == 2 and "varlen" in capsys.readouterr().err


def test_decode_over_fp8(capsys):
    shape = [*QUICK, "--seqlen-q", "3", "--nheads", "4", "--nheads-kv", "2", "-d", "32", "--dtype", "fp8"]
    code, document, _ = _run_json(capsys, "compare", *shape, "--mode", "decode", "--page-size", "16", "--causal", "--backend",
                                  "flashtile,naive", "--baseline", "flashtile")  # fmt: skip
    row, refused = document["results"]
    assert code == 0 and row["status"] == "ok" and row["config"]["dtype"] == "fp8"
    assert "-d 32 --causal --page-size 16 --dtype fp8 --mode decode" in row["repro"]
    # One byte of each key, value and query, two of out
    assert row["bytes"] == 2 * 64 * 2 * 32 + 3 * 4 * 32 * (1 + 2)
    # Weights are rounded in the yardstick alone
    assert 0 < row["accuracy"]["max_abs"] < 0.5 * row["accuracy"]["torch_same_dtype"]
    assert (refused["status"], refused["reason"]) == ("refused", "measured here without fp8")
    for command in (["run", *shape, "--mode", "fwd"], ["memory", "--dtype", "fp8"], ["explain", "--dtype", "fp8"]):
        assert cli.main(command) == 2 and "--mode decode" in capsys.readouterr().err
    latent = ["--seqlen-q", "1", "--nheads-kv", "1", "-d", "576-512", "--dtype", "fp8", "--mode", "decode"]
    assert cli.main(["run", *SMALL, *latent]) != 0 and "a layout of its own" in capsys.readouterr().out
    explained = ["explain", "--target", "H200", "--no-compile", *latent, "-s", "64", "--nheads", "4"]
    assert cli.main(explained) == 2 and "a layout of its own" in capsys.readouterr().err


def test_decode_over_a_latent_cache(capsys):
    latent = ["--seqlen-q", "1", "--nheads", "4", "--nheads-kv", "1", "-d", "576-512", "--mode", "decode", "--device", "cpu"]
    code, document, _ = _run_json(capsys, "compare", "-b", "2", "-s", "64", *latent, "--repeats", "3", "--backend",
                                  "flashtile,naive,flash_mla,sdpa")  # fmt: skip
    rows = {row["backend"]: row for row in document["results"]}
    assert code == 0 and rows["flashtile"]["status"] == rows["naive"]["status"] == "ok"
    # fp32: 64 tokens in each cache, read once; queries and results, with lse
    assert rows["flashtile"]["bytes"] == 2 * 4 * (64 * 576 + 4 * 576 + 4 * 512 + 4)
    assert "latent cache" in rows["sdpa"]["reason"]
    code = cli.main(["compare", "-b", "1", "-s", "65", *latent, "--backend", "flashtile,naive"])
    assert code != 0 and "whole pages of 64 tokens" in capsys.readouterr().out


def test_a_latent_cache_is_decoded_where_no_mode_is_given(capsys):
    small = ["-b", "1", "-s", "64", "--nheads", "4", "--device", "cpu", "--no-roof", "--no-progress", "--repeats", "3"]
    for command in (["run"], ["compare", "--backend", "flashtile,naive"]):
        code, document, _ = _run_json(capsys, *command, "--preset", "deepseek-mla-decode", *small)
        assert code == 0 and {row["mode"] for row in document["results"]} == {"decode"}
    code, document, _ = _run_json(capsys, "run", "-d", "576-512", "--nheads-kv", "1", *small)
    assert code == 0 and document["results"][0]["config"]["seqlen_q"] == 1
    for flags in (["--mode", "fwd"], ["--no-grad"]):
        assert cli.main(["run", "--preset", "deepseek-mla-decode", *small, *flags]) == 2
        assert "--mode decode" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "compare", "scale", "regress", "sweep"])
@pytest.mark.parametrize("flags", ["--timer graph", "--timer kernel", "--timer event", "--l2 cold"])
def test_what_a_cpu_has_not_is_refused(command, flags, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, *SMALL, *flags.split()]) == 2
    err = capsys.readouterr().err
    assert "on a CPU, got" in err and "caches stay warm" in err


@pytest.mark.parametrize("flags", ["", "--timer cpu --l2 warm", "--timer wall"])
def test_what_a_cpu_has_is_taken(flags, capsys):
    code, document, _ = _run_json(capsys, "run", *QUICK, "--mode", "fwd", *flags.split())
    assert code == 0 and (document["settings"]["timer"], document["settings"]["l2"]) == ("cpu", "warm")


@pytest.mark.parametrize("line, words", [
    ("--hidden 100", "hidden: expected a multiple of headdim 16, got 100"),
    ("--hidden 64,72", "hidden: expected a multiple of headdim 16, got 72"),
    ("--total-tokens 100", "total-tokens: expected a multiple of seqlen 64, got 100"),
    ("--total-tokens 32", "total-tokens: expected a multiple of seqlen 64, got 32"),
    ("--timeout 0", "timeout: expected"), ("--window -2,0", "window: expected 0 or more keys on a side"),
    ("-s 1k..", "seqlen: expected a range with both ends, such as 1k..16k, got '1k..'"),
    ("-d 64-", "headdim: expected a head dim such as"),
])  # fmt: skip
def test_values_that_fit_nothing_are_refused_by_their_flag(line, words, capsys):
    given = {"--hidden": ("--nheads", "2"), "--total-tokens": ("-b", "1")}.get(line.split()[0], ())
    start = SMALL.index(given[0]) if given else 0
    assert cli.main(["run", *SMALL[:start], *SMALL[start + len(given):], *line.split()]) == 2
    assert f"flashtile: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("fraction, noted", [(1.2, True), (0.9, False)])
def test_more_than_the_roof_is_explained(fraction, noted, capsys, monkeypatch):
    from flashtile.bench import roofline

    monkeypatch.setattr(roofline.Roof, "fraction", lambda *_: (fraction, "compute"))
    roof = roofline.Roof("float32", 1024, 1.0, 1e9)
    monkeypatch.setattr(roofline, "measure", lambda *_: roof)
    assert cli.main(["run", *(word for word in QUICK if word != "--no-roof"), "--mode", "fwd"]) == 0
    assert ("over 100% of the roof: " in capsys.readouterr().out) == noted


def test_files_that_commands_write_here_are_ignored_by_git():
    lines = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/flashtile-exercises/", "/sweep.jsonl", "/sweep.csv", "/sweep.md", "/report.html"} <= set(lines)


def test_defaults_are_the_seeds():
    from flashtile.cli.common import ShapeFlags

    (case,) = ShapeFlags().cases("bf16")
    assert (case.batch, case.seqlen_q, case.num_heads, case.head_dim, case.causal) == (2, 1024, 8, 64, False)
    assert case.dtype == "bf16"


def test_json_on_stdout_is_only_json(capsys):
    code, document, err = _run_json(capsys, "run", *QUICK, "--mode", "fwd")
    assert code == 0 and record.problems(document) == [] and document["schema"] == "flashtile-bench/1"
    assert "Forward Pass Results:" in err


def test_quiet_prints_nothing(capsys, tmp_path):
    target = tmp_path / "a.json"
    assert cli.main(["run", *QUICK, "--mode", "fwd", "-q", "--json", str(target)]) == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == "" and record.load(target)["results"]


def test_files_are_written(capsys, tmp_path):
    files = {kind: tmp_path / "new" / f"a.{kind}" for kind in ("json", "csv", "md")}
    flags = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert cli.main(["compare", *SMALL, "--rounds", "6", "--rep-ms", "6", "--backend", "naive,sdpa", *flags]) == 0
    assert record.load(files["json"])["comparisons"]
    assert len(files["csv"].read_text().splitlines()) == 5
    assert files["md"].read_text().count("\n|") == 6


def test_compare_shows_unavailable_backends_with_their_reason(capsys):
    backends = "flashtile,naive,sdpa-cudnn,fa3"
    assert cli.main(["compare", *SMALL, "--rounds", "6", "--rep-ms", "6", "--mode", "fwd", "--backend", backends]) == 0
    out = capsys.readouterr().out
    assert "sdpa-cudnn: needs a GPU" in out and "fa3: needs a GPU" in out
    assert any(word in out for word in ("FASTER", "SLOWER", "SAME", "UNCLEAR"))


def test_compare_of_a_grid_ends_with_geomeans(capsys):
    code = cli.main(["compare", *SMALL, "-s", "16,32,64", "--causal", "both", "--rounds", "6", "--rep-ms", "6", "--mode", "fwd",
                     "--backend", "flashtile,naive"])  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0 and out.count("h2 d16") == 6 and "geomean" in out and "range" in out


def test_compare_strict(capsys, monkeypatch):
    from flashtile.bench import stats

    arguments = ["compare", *SMALL, "--rounds", "6", "--rep-ms", "6", "--mode", "fwd", "--backend", "flashtile,naive"]
    for verdict, code in (("SLOWER", 4), ("UNCLEAR", 5), ("FASTER", 0), ("SAME", 0)):
        monkeypatch.setattr(stats, "verdict", lambda *_, verdict=verdict: verdict)
        assert cli.main([*arguments, "--strict"]) == code
        assert cli.main(arguments) == 0


@pytest.mark.parametrize("arguments", ["-d 264", "--softcap 3 --baseline sdpa", "--backend flashtile,fa3 --baseline fa3"])
def test_compare_strict_without_a_time_to_compare_with(arguments, capsys):
    """Of flashtile, or of the baseline."""
    command = ["compare", *SMALL, "--rounds", "3", "--rep-ms", "3", "--mode", "fwd", "--no-roof", *arguments.split()]
    assert cli.main(command) == 0 and cli.main([*command, "--strict"]) == 5


USAGE_ERRORS = """
run --no-such-flag
run --dtype fp8
run --seqlen 12x
run --preset gpt5
run --mode sideways
run --backend flashtail
run --backend naive,sdpa
run --nheads 3 --nheads-kv 2
run --device toaster
run --timer sundial
run --json - --csv -
run --json tests
compare --threshold much
compare --baseline nothing
run --save=
sweep --out=
sweep --out=tests/
scale --gpus 2
frobnicate
"""


@pytest.mark.parametrize("line", USAGE_ERRORS.strip().splitlines())
def test_usage_errors_exit_2_and_say_why(line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err and "Traceback" not in captured.err


@pytest.mark.parametrize("dims", ["300", "63", "64-63"])
def test_refused_shapes_exit_2(dims, capsys, monkeypatch):
    """Once, by the name of the flag, and before the roof is measured."""
    from flashtile.bench import roofline

    monkeypatch.setattr(roofline, "measure", None)
    assert cli.main(["run", *(word for word in QUICK if word != "--no-roof"), "-d", dims]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("--headdim: expected a head dim of 8 to 256") == 1


def test_some_shapes_that_are_refused_are_rows(capsys):
    code, document, _ = _run_json(capsys, "run", *QUICK, "-d", "12,16", "--mode", "fwd")
    assert code == 0 and [row["status"] for row in document["results"]] == ["refused", "ok"]


def test_a_refusal_is_said_once(capsys):
    assert cli.main(["run", *QUICK, "--softcap", "20", "--backend", "sdpa"]) == 2
    out = capsys.readouterr().out
    assert out.count("SDPA has no softcap") == 1 and out.count("as above") == 1


def test_mismatch_exits_3(capsys, monkeypatch):
    def attend(q, k, v, case):
        return peers.naive_attention(q, k, v, case) * 1.02

    wrong = peers.Backend("wrong", "of a test", lambda device: attend, lambda case, mode, device: None)
    monkeypatch.setitem(peers.BACKENDS, "wrong", wrong)
    peers._loaded.cache_clear()
    code, document, err = _run_json(capsys, "run", *QUICK, "--backend", "wrong")
    assert code == 3 and {row["status"] for row in document["results"]} == {"mismatch"} and "WRONG" in err
    assert cli.main(["compare", *QUICK, "--backend", "naive,wrong"]) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_hardware_exits_6(capsys):
    assert cli.main(["run", "--device", "cuda", "--no-progress"]) == 6
    assert "no GPU" in capsys.readouterr().err
    assert cli.main(["doctor", "--device", "cuda"]) == 6


def test_missing_backend_exits_6(capsys):
    assert cli.main(["run", *QUICK, "--backend", "fa3", "-q"]) == 6
    assert "needs a GPU" in capsys.readouterr().err


def test_interruption_exits_130_and_keeps_results(capsys, monkeypatch, tmp_path):
    sample, calls = measure.sample, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sample(*args, **kwargs)

    monkeypatch.setattr(measure, "sample", interrupted)
    target = tmp_path / "a.json"
    assert cli.main(["run", *QUICK, "--mode", "fwd", "--causal", "both", "--json", str(target)]) == 130
    document = record.load(target)
    assert document["interrupted"] and len(document["results"]) == 1


def test_a_killed_run_leaves_a_record_that_says_so(monkeypatch, tmp_path):
    """A record of 22 of 23 cases said that nothing was missing."""
    from flashtile.bench.engine import _Measurement

    class Killed(BaseException):
        pass

    measured, cases = _Measurement._case, []

    def killed(self, case):
        cases.append(case)
        if len(cases) == 2:
            raise Killed
        measured(self, case)

    target = tmp_path / "a.json"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(_Measurement, "_case", killed)
        cli.main(["run", *QUICK, "--mode", "fwd", "--causal", "both", "--json", str(target)])
    document = record.load(target)
    assert document["interrupted"] and len(document["results"]) == 1
    assert cli.main(["run", *QUICK, "--mode", "fwd", "--causal", "both", "--json", str(target)]) == 0
    document = record.load(target)
    assert not document["interrupted"] and len(document["results"]) == 2


def test_doctor_on_a_machine_without_a_gpu(capsys):
    assert cli.main(["doctor", "--device", "cpu", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    checks = " ".join(check["check"] for check in document["checks"])
    assert document["ok"] and "torch" in checks and "correct" in checks and "sdpa-cudnn" in checks
    assert "`flashtile report`" in checks


def test_presets_lists_all(capsys):
    from flashtile.bench.cases import PRESETS

    assert cli.main(["presets"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PRESETS)


def test_minimal_benchmark_is_flashtile_run():
    done = _python("minimal_benchmark.py", *QUICK, "--no-grad")
    assert done.returncode == 0, done.stderr
    assert "Forward Pass Results:" in done.stdout and "Backward" not in done.stdout
