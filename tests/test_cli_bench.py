"""The measuring commands beyond run and compare: sweep, memory, scale, regress, profile, monitor, tune; exit codes."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

from flashtile import cli
from flashtile.bench import engine, peers, profilers, record, regress, scaling, telemetry
from flashtile.bench.cases import BenchCase, Shape, UsageError, build_cases
from flashtile.cli import compare

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["-b", "1", "-s", "64", "--nheads", "2", "-d", "16", "--device", "cpu", "--no-progress"]
QUICK = [*SMALL, "--no-roof", "--mode", "fwd", "--rounds", "6", "--rep-ms", "6"]
CASE = BenchCase(1, 64, 64, 2, 2, 16, 16, dtype="fp32")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    assert cli.main([command, "--help"]) == 0
    assert command in capsys.readouterr().out


# --- presets -------------------------------------------------------------------------------------------------------------


def test_presets_of_the_other_seeds():
    def shapes(name):
        return [(c.batch, c.seqlen_q, c.num_heads, c.head_dim) for c in build_cases(name)]

    assert shapes("guide-small") == [(1, 32, 4, 16), (1, 64, 8, 32), (2, 128, 8, 32)]
    assert shapes("guide-medium") == [(4, 256, 16, 64), (8, 512, 16, 64), (16, 512, 32, 64)]
    assert shapes("guide-large") == [(32, 1024, 32, 128), (64, 1024, 64, 128)]
    assert len(shapes("guide-backward")) == 5 and [s[1] for s in shapes("guide-memory")] == [64, 128, 256, 512, 1024, 2048]
    assert len(shapes("leetcuda")) == 24 and set(shapes("learn")) == {(1, 1024, 8, 64), (1, 2048, 12, 128), (1, 4096, 16, 128)}
    (decode,) = build_cases("llama3-8b-decode")
    assert (decode.seqlen_q, decode.seqlen_k, decode.num_heads, decode.num_heads_kv) == (1, 8192, 32, 8)
    (deepseek,) = build_cases("deepseek-v3-prefill")
    assert (deepseek.head_dim, deepseek.head_dim_v) == (192, 128)


def test_presets_are_described_as_their_cases(capsys):
    """Queries that are not as many as keys, and values of another head dim."""
    assert cli.main(["presets"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name in ("llama3-8b-decode", "deepseek-v3-prefill", "gpt2-small"):
        (case,) = build_cases(name)
        assert case.label().removesuffix(" bf16") in lines[name]


def test_help_names_all_backends():
    names = compare.BACKENDS_HELP.removeprefix("Some of ").partition(". ")[0]
    assert names.split(", ") == list(peers.BACKENDS)


def test_a_users_file_adds_presets(capsys):
    text = '[presets.mine]\nabout = "my model"\nbatch = 3\nseqlen = "64,128"\nnheads = 2\nheaddim = 16\nsoftcap = 20.0\n'
    Path("flashtile.toml").write_text(text)
    assert [(c.batch, c.seqlen_k, c.softcap) for c in build_cases("mine")] == [(3, 64, 20.0), (3, 128, 20.0)]
    assert cli.main(["presets"]) == 0 and "my model" in capsys.readouterr().out
    Path("flashtile.toml").write_text("[presets.x]\nbatchh = 1\n")
    with pytest.raises(UsageError, match=r"presets\.x: expected some of about, batch, seqlen, .*got 'batchh'"):
        build_cases("x")
    for wrong in ("[presets.x]\nbatchsize = 1\n", "presets = 3\n", "[[[", '[presets.x]\nbatch = "many"\n'):
        Path("flashtile.toml").write_text(wrong)
        with pytest.raises(UsageError, match="flashtile.toml"):
            build_cases("x")


def test_the_python_api_has_what_the_commands_have():
    from flashtile import bench

    assert {"run", "compare", "measure_memory", "compare_versions", "build_cases"} <= set(bench.__all__)
    assert all(callable(getattr(bench, name)) for name in bench.__all__ if name != "PRESETS")


def test_compare_shows_first_outputs_side_by_side(capsys):
    assert cli.main(["compare", *QUICK, "--backend", "flashtile,naive", "--show-values", "3", "--json", "v.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("first outputs, b1 s64"))
    first, second = ([float(x) for x in line.split()[1:]] for line in lines[start + 1 : start + 3])
    assert len(first) == 3 and first == pytest.approx(second, abs=1e-5)
    assert record.load("v.json")["results"][0]["values"] == pytest.approx(first, abs=1e-5)


# --- sweep ---------------------------------------------------------------------------------------------------------------

SWEEP = ["sweep", *QUICK, "--backend", "flashtile,naive", "-s", "32,64", "--causal", "both"]


def test_sweep_writes_lines_csv_and_markdown(capsys):
    assert cli.main([*SWEEP, "--json", "all.json"]) == 0
    out = capsys.readouterr().out
    assert "saved sweep.jsonl sweep.csv sweep.md (8 ok)" in out and "geomean" in out
    document = record.load("sweep.jsonl")
    assert len(document["results"]) == 8 and len(document["comparisons"]) == 4
    assert len(Path("sweep.csv").read_text().splitlines()) == 9 and Path("sweep.md").read_text().count("\n|") == 10
    jsonschema.Draft202012Validator(record.schema()).validate(document)
    # It is not overwritten by accident
    assert cli.main(SWEEP) == 2 and "--resume" in capsys.readouterr().err


def test_an_interrupted_sweep_goes_on_where_it_stopped(capsys, monkeypatch):
    rounds, calls = engine._Measurement._rounds, []

    def interrupted(self, case, *rest):
        calls.append(case)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return rounds(self, case, *rest)

    monkeypatch.setattr(engine._Measurement, "_rounds", interrupted)
    assert cli.main(SWEEP) == 130
    assert "go on with --resume" in capsys.readouterr().out
    kept = record.load("sweep.jsonl")["results"]
    assert len(kept) == 4
    assert cli.main([*SWEEP, "--resume"]) == 0
    assert "resumed: 2 of 4 cells" in capsys.readouterr().out and len(calls) == 5
    document = record.load("sweep.jsonl")
    assert len(document["results"]) == 8 and document["results"][:4] == kept


def test_a_sweep_may_be_interrupted_before_its_first_cell(capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._Measurement, "_rounds", interrupted)
        assert cli.main([*SWEEP, "--plot"]) == 130
    assert "sweep.md (nothing yet); go on with --resume" in capsys.readouterr().out
    assert cli.main([*SWEEP, "--resume"]) == 0 and len(record.load("sweep.jsonl")["results"]) == 8


@pytest.mark.parametrize("command", ["memory", "ladder run"])
def test_strict_is_of_commands_that_judge_their_numbers(command, capsys):
    assert cli.main([*command.split(), *SMALL, "--strict"]) == 2
    assert "--strict" in capsys.readouterr().err


def test_strict_scale_of_noisy_times(capsys, monkeypatch):
    monkeypatch.setattr(engine.Report, "noisy", True)
    arguments = ["scale", *QUICK[:-4], "-b", "1", "--repeats", "6"]
    assert cli.main(arguments) == 0 and cli.main([*arguments, "--strict"]) == 5


def test_total_tokens_sets_the_batch(capsys):
    assert cli.main(["sweep", *QUICK[2:], "--backend", "naive,sdpa", "-s", "32..128", "--total-tokens", "128"]) == 0
    configs = [row["config"] for row in record.load("sweep.jsonl")["results"]]
    assert {(c["batch"], c["seqlen_k"]) for c in configs} == {(4, 32), (2, 64), (1, 128)}


def test_sweep_plots(capsys):
    assert cli.main(["sweep", *QUICK, "-s", "32,64", "--backend", "flashtile,naive", "--plot", "--out", "o/x"]) == 0
    assert list(Path("o").glob("x-tflops-*-light.png")) and list(Path("o").glob("x-speedup-*-dark.svg"))


# --- memory --------------------------------------------------------------------------------------------------------------


def test_memory_formulas_need_no_gpu(capsys):
    shape = ["-b", "2", "--nheads", "16", "-d", "128", "-s", "1k,64k", "--no-progress"]
    assert cli.main(["memory", *shape, "--target", "H200", "--json", "m.json"]) == 0
    out = capsys.readouterr().out
    assert "naive = S + P + O + copies" in out
    assert "(144)" in out and "(8.12)" in out and "17.7x" in out and "flash only" in out and "naive 34,048" in out
    document = record.load("m.json")
    assert document["memory"][1]["largest_seqlen"] == 4563136
    jsonschema.Draft202012Validator(record.schema()).validate(document)
    assert cli.main(["memory", *shape, "--target", "V9000"]) == 2


# --- regress -------------------------------------------------------------------------------------------------------------

REGRESS = ["regress", *QUICK[:-4], "--rounds", "12", "--rep-ms", "24"]


def slowed_copy(folder, spoil="import time; time.sleep(0.01)"):
    """flashtile with a forward pass that takes 10 ms longer, or is otherwise spoilt."""
    shutil.copytree(ROOT / "flashtile", folder / "flashtile", ignore=shutil.ignore_patterns("__pycache__"))
    code = "\n\n_attention = attention\n\n\ndef attention(*args, **options):\n    out = _attention(*args, **options)\n"
    (folder / "flashtile" / "api.py").open("a").write(f"{code}    {spoil}\n    return out\n")
    return str(folder)


@pytest.mark.slow
def test_regress_finds_a_slower_version_and_exits_4(capsys, tmp_path):
    slower = slowed_copy(tmp_path)
    assert cli.main([*REGRESS, "--processes", "2", "--baseline", str(ROOT), "--against", slower, "--json", "r.json"]) == 4
    assert "1 SLOWER" in capsys.readouterr().out
    document = record.load("r.json")
    jsonschema.Draft202012Validator(record.schema()).validate(document)
    (row,) = document["regress"]["rows"]
    assert document["regress"]["method"] == "interleaved" and row["change"] > 0.05
    assert [len(rounds) for rounds in row["against_rounds_ms"]] == [6, 6]


@pytest.mark.slow
def test_regress_finds_a_wrong_version_and_exits_3(capsys, tmp_path):
    wrong = slowed_copy(tmp_path, "out = out * 1.1")
    assert cli.main([*REGRESS, "--processes", "1", "--baseline", str(ROOT), "--against", wrong]) == 3
    assert "WRONG" in capsys.readouterr().out


def saved(name, factor):
    """A baseline whose times are a factor of those of another."""
    document = record.load(regress.baseline_path("first", torch.device("cpu")))
    for row in document["results"]:
        for key in ("median", "min", "max", "mean"):
            row["stats"][key] *= factor
        row["stats"]["ci95"] = [row["stats"]["median"]] * 2
    record.write(str(regress.baseline_path(name, torch.device("cpu"))), record.to_text(document))


def test_a_run_without_a_time_replaces_no_baseline(capsys, monkeypatch):
    run = ["run", *SMALL, "--no-roof", "--mode", "fwd", "--repeats", "6", "--save", "kept"]
    assert cli.main(run) == 0
    path = regress.baseline_path("kept", torch.device("cpu"))
    before = Path(path).read_text()
    capsys.readouterr()
    monkeypatch.setenv("FLASHTILE_TIER", "hopper")
    assert cli.main(run) != 0
    assert "not kept as 'kept', since the run has no row with a time" in capsys.readouterr().out
    assert Path(path).read_text() == before


def test_no_grad_beside_a_mode(capsys):
    assert cli.main(["run", *SMALL, "--mode", "fwd,bwd", "--no-grad"]) == 2
    assert "no-grad: expected no mode with gradients beside it, got --mode bwd" in capsys.readouterr().err
    assert cli.main(["run", *SMALL, "--no-roof", "--mode", "decode", "--no-grad", "--repeats", "3"]) == 0
    assert "Decoding" in capsys.readouterr().out


def test_regress_of_kept_baselines(capsys):
    assert cli.main(["run", *SMALL, "--no-roof", "--mode", "fwd", "--repeats", "30", "--save", "first"]) == 0
    for name, factor in (("same", 1.0), ("bit", 1.04), ("slow", 1.3), ("fast", 0.7)):
        saved(name, factor)
    for name, code, word in (("same", 0, "1 SAME"), ("bit", 0, "1 SAME"), ("slow", 4, "1 SLOWER"), ("fast", 0, "1 FASTER")):
        arguments = ["regress", "--device", "cpu", "--baseline", "same", "--against", name, "--no-progress"]
        assert cli.main(arguments) == code, name
        assert word in capsys.readouterr().out
    # Five hundredths and a little are more than two runs differ by, the interval says not by how much
    saved("unclear", 1.09)
    document = record.load(regress.baseline_path("unclear", torch.device("cpu")))
    document["results"][0]["stats"]["ci95"] = [value * factor for value, factor in zip(
        document["results"][0]["stats"]["ci95"], (0.8, 1.2), strict=True)]  # fmt: skip
    record.write(str(regress.baseline_path("unclear", torch.device("cpu"))), record.to_text(document))
    arguments = ["regress", "--device", "cpu", "--baseline", "same", "--against", "unclear", "--no-progress"]
    assert cli.main(arguments) == 0 and cli.main([*arguments, "--strict"]) == 5


def test_regress_measures_again_what_a_record_has(capsys):
    assert cli.main(["run", *SMALL, "--no-roof", "--mode", "fwd", "--repeats", "6", "--save", "first"]) == 0
    assert cli.main(["regress", "--device", "cpu", "--baseline", "first", "--repeats", "6", "--no-progress", "-q"]) in (0, 4)


def test_regress_tells_what_only_the_baseline_has(capsys):
    flags = [*SMALL, "--no-roof", "--repeats", "6"]
    assert cli.main(["run", *flags, "--save", "both"]) == 0
    assert cli.main(["run", *flags, "--mode", "fwd", "--save", "one"]) == 0
    capsys.readouterr()
    compared = ["regress", "--device", "cpu", "--no-progress", "--json", "found.json"]
    assert cli.main([*compared, "--baseline", "both", "--against", "one"]) in (0, 4)
    assert "not compared: 1 that only the baseline has" in capsys.readouterr().out
    assert [row["mode"] for row in record.load("found.json")["regress"]["not_compared"]] == ["bwd"]
    assert cli.main([*compared, "--baseline", "one", "--against", "both"]) in (0, 4)
    assert "not compared" not in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["-s 128", "--mode fwd", "--no-grad", "--preset gpt3"])
def test_regress_of_a_record_has_its_cases(flags, capsys):
    assert cli.main(["run", *SMALL, "--no-roof", "--mode", "fwd", "--repeats", "6", "--save", "first"]) == 0
    assert cli.main(["regress", "--device", "cpu", "--baseline", "first", "--no-progress", *flags.split()]) == 2
    assert "expected no shape and no --mode beside the record first" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_a_side_of_regress_is_checked_without_dropout(mode):
    from flashtile.bench import side
    from flashtile.bench.cases import BenchCase

    case = BenchCase(1, 64, 64, 2, 2, 32, 32, dtype="fp32", dropout=0.3)
    asked = {"prepare": case.config(), "mode": mode, "seed": 0, "timer": "wall", "l2": "warm", "check": True, "device": "cpu"}
    block, answer = side._prepare(asked)
    assert block is not None, answer


def test_regress_of_a_shape_that_nothing_takes(capsys):
    """Before anything is measured."""
    assert cli.main(["regress", "-s", "64", "-d", "12", "--device", "cpu", "--no-progress"]) == 2
    assert "head dim" in capsys.readouterr().err


def test_regress_refuses_what_can_not_be_compared(capsys):
    assert cli.main(["regress", *SMALL, "--baseline", "no-such-thing"]) == 2
    assert "git revision" in capsys.readouterr().err
    assert cli.main(["run", *SMALL, "--no-roof", "--mode", "fwd", "--repeats", "6", "--save", "first", "--json", "a.json"]) == 0
    other = json.loads(Path("a.json").read_text())
    other["env"]["cpu"]["name"] = "another"
    Path("b.json").write_text(json.dumps(other))
    assert cli.main(["regress", "--device", "cpu", "--baseline", "a.json", "--against", "b.json", "--no-progress"]) == 2
    assert "same GPU" in capsys.readouterr().err


def _git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def made_checkout(folder):
    """A git repository with a flashtile, committed."""
    (folder / "flashtile").mkdir(parents=True)
    (folder / "flashtile" / "__init__.py").write_text("version = 'kept'\n")
    _git(folder, "init", "-q")
    _git(folder, "add", "flashtile")
    _git(folder, "commit", "-q", "-m", "one")
    return folder


@pytest.mark.parametrize("inside", [False, True])
def test_revisions_are_those_of_the_current_folder_where_flashtile_is_installed(inside, monkeypatch, tmp_path):
    """Also where the environment lies inside of the checkout, whose git then knows site-packages, but not what is in there."""
    from contextlib import ExitStack

    checkout = made_checkout(tmp_path / "checkout")
    installed = (checkout if inside else tmp_path) / "site-packages"
    shutil.copytree(checkout / "flashtile", installed / "flashtile")
    monkeypatch.setattr(regress, "ROOT", installed)
    (checkout / "docs").mkdir()
    for folder in (checkout, checkout / "docs"):
        monkeypatch.chdir(folder)
        with ExitStack() as stack:
            version = regress.locate("HEAD", stack)
            assert (version.folder / "flashtile" / "__init__.py").read_text() == "version = 'kept'\n"
    assert regress._commit(installed) is None and regress._commit(checkout) == version.commit
    with pytest.raises(UsageError, match="or a git revision of checkout, got none"):
        regress.locate("no-such-thing", ExitStack())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="installed without -e: .*pass a folder"):
        regress.locate("HEAD", ExitStack())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_a_regress_that_is_ended_leaves_no_folder(tmp_path):
    import signal
    import time

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-m", "flashtile", *REGRESS], env=environment, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    end = time.monotonic() + 60
    while not list(tmp_path.glob("flashtile-regress-*/flashtile/bench")) and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err
    assert not list(tmp_path.glob("flashtile-regress-*"))


def test_an_interrupted_measurement_is_compared_with_nothing(monkeypatch):
    row = {"backend": "flashtile", "stats": {}, "config": CASE.config(), "mode": "fwd"}
    monkeypatch.setattr(engine._Measurement, "_case", lambda self, case: (_ for _ in ()).throw(KeyboardInterrupt))
    version = regress.Version("now", folder=regress.ROOT)
    row["stats"] = {"median": 1.0}
    with pytest.raises(KeyboardInterrupt):
        regress._measure_like({"results": [row]}, version, "cpu", engine.Settings(roof=False))


def made_row(changes, noise=0.001):
    """A row whose pairs of processes have these changes."""
    row = regress.Row(CASE, "fwd")
    for change in changes:
        row.baseline_rounds_ms.append([1.0 + noise * (i % 3) for i in range(10)])
        row.against_rounds_ms.append([(1.0 + change) * (1.0 + noise * ((i + 1) % 3)) for i in range(10)])
    regress.judge(row, 0.03)
    return row


def test_a_verdict_needs_all_pairs_of_processes():
    slower = made_row([0.05, 0.05, 0.05])
    assert slower.verdict == "SLOWER" and slower.change == pytest.approx(0.05, abs=0.003)
    assert made_row([0.0, 0.002, -0.002]).verdict == "SAME"
    assert made_row([-0.05, -0.06, -0.05]).verdict == "FASTER"
    assert made_row([0.06, 0.06, -0.01]).verdict == "UNCLEAR"


@pytest.mark.parametrize("change, word, least", [(0.0, "SAME", 0.9), (0.05, "SLOWER", 0.95), (-0.05, "FASTER", 0.95)])
def test_regress_is_right_under_drift(change, word, least):
    """4% of drift in a session, 0.4% of noise, and processes that differ by 0.3%: hardly a false verdict."""
    draw, verdicts = random.Random(3), []
    for _ in range(200):
        row, step = regress.Row(CASE, "fwd"), 0
        for _ in range(3):
            sides = ([], [])
            offsets = [draw.lognormvariate(0, 0.003) for _ in sides]
            for _ in range(10):
                for side in draw.sample((0, 1), 2):
                    step += 1
                    level = (1 + 0.04 * step / 60) * offsets[side] * (1 + change * side)
                    sides[side].append(level * draw.lognormvariate(0, 0.004))
            row.baseline_rounds_ms.append(sides[0])
            row.against_rounds_ms.append(sides[1])
        regress.judge(row, 0.03)
        verdicts.append(row.verdict)
    assert verdicts.count(word) >= least * 200
    wrong = {"FASTER", "SLOWER"} - {word}
    assert sum(verdict in wrong for verdict in verdicts) <= 0.05 * 200


# --- scale ---------------------------------------------------------------------------------------------------------------


def test_scale_over_batches(capsys):
    code = cli.main(["scale", *QUICK[2:-4], "-b", "1,2", "--repeats", "6", "--json", "s.json"])
    assert code == 0 and "batch scaling" in capsys.readouterr().out
    document = record.load("s.json")
    jsonschema.Draft202012Validator(record.schema()).validate(document)
    first, second = document["scaling"]["rows"]
    assert first["speedup"] == first["efficiency"] == 1.0
    assert second["speedup"] == pytest.approx(2 * first["ms"] / second["ms"])
    assert second["efficiency"] == pytest.approx(second["speedup"] / 2)


@pytest.mark.parametrize("line", [
    "scale --mode fwd,bwd", "profile --mode fwd,bwd", "profile --backend flashtile,sdpa", "compare --baseline sdpa,naive",
    "sweep --baseline sdpa,naive",
])  # fmt: skip
def test_what_there_is_one_of_is_one(line, capsys):
    command, *flags = line.split()
    assert cli.main([command, *(SMALL[:-1] if command == "profile" else SMALL), *flags]) == 2
    assert re.search(r"(mode|backend|baseline): expected one, got \w+, \w+", capsys.readouterr().err)


def test_several_cases_over_gpus_are_refused_before_one_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(engine, "run", None)
    assert cli.main(["scale", *SMALL, "-b", "1,2", "--kind", "weak"]) == 2
    assert "expected one case for --kind weak, got 2" in capsys.readouterr().err
    for flags, words in (
        ("--gpus 2", "gpus: expected none for --kind batch"), ("--kind strong --gpus 3", "can't be shared out evenly"),
        ("--kind weak --gpus 2,x", "gpus: expected a positive number"),
    ):  # fmt: skip
        assert cli.main(["scale", *SMALL, *flags.split()]) == 2
        assert words in capsys.readouterr().err


def test_shares_of_a_problem():
    case = BenchCase(4, 64, 64, 8, 2, 16, 16)
    assert scaling.share(case, "strong", "batch", 2)[1].batch == 2
    whole, part = scaling.share(case, "strong", "heads", 2)
    assert whole == case and (part.num_heads, part.num_heads_kv) == (4, 1)
    whole, part = scaling.share(case, "weak", "batch", 4)
    assert whole.batch == 16 and part == case
    with pytest.raises(UsageError, match="evenly"):
        scaling.share(case, "strong", "heads", 4)


def test_strong_and_weak_scaling_are_the_slowest_process(monkeypatch):
    case, seen = BenchCase(4, 64, 64, 8, 2, 16, 16), []

    def launch(part, mode, count, device_type, settings):
        seen.append(part.batch)
        return [1.0 / count if len(seen) <= 2 else 1.0] * (count - 1) + [1.25 / count if len(seen) <= 2 else 1.25]

    monkeypatch.setattr(scaling, "_launch", launch)
    first, second = scaling.over_gpus(case, "strong", "batch", [1, 2], "fwd", device_type="cpu")
    assert seen == [4, 2] and (second.ms, second.speedup, second.efficiency) == (0.625, 2.0, 1.0)
    first, second = scaling.over_gpus(case, "weak", "batch", [1, 2], "fwd", device_type="cpu")
    assert seen[2:] == [4, 4] and second.case.batch == 8 and (second.speedup, second.efficiency) == (2.0, 1.0)


@pytest.mark.slow
def test_scaling_over_two_processes_of_torchrun(capsys):
    arguments = [*SMALL[2:], "-b", "2", "--no-roof", "--mode", "fwd", "--repeats", "6", "--rep-ms", "10", "--json", "s.json"]
    assert cli.main(["scale", *arguments, "--kind", "strong", "--gpus", "2"]) == 0
    (row,) = record.load("s.json")["scaling"]["rows"]
    assert row["gpus"] == 2 and len(row["rank_ms"]) == 2 and row["ms"] == max(row["rank_ms"])


# --- profile, monitor, tune ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_profile_with_torch(capsys):
    assert cli.main(["profile", *SMALL[:-1], "--repeats", "2"]) == 0
    out = capsys.readouterr().out
    assert "flashtile::forward" in out and "saved out/torch-flashtile-fwd.json" in out
    assert "traceEvents" in json.loads(Path("out/torch-flashtile-fwd.json").read_text())


@pytest.mark.parametrize("tool, words", [
    ("ncu", ["--clock-control none", "--profile-from-start off", "dram__throughput", "regex:attn", "out/ncu-sdpa-bwd"]),
    ("nsys", ["--trace cuda,nvtx,osrt", "--capture-range cudaProfilerApi"]),
    ("torch", ["flashtile.bench.workload"]), ("proton", ['"tool": "proton"']),
])  # fmt: skip
def test_profile_prints_its_command_without_a_gpu_or_the_tool(tool, words, capsys):
    arguments = ["profile", "--tool", tool, "--print-command", "--kernel", "attn", "--backend", "sdpa", "--mode", "bwd"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words) and "-lgc" not in out
    # What is printed can be pasted: the case is still whole
    import shlex

    assert json.loads(shlex.split(out)[-1])["config"]["window"] == [None, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("arguments, words", [
    (["profile", "--tool", "ncu", "--device", "cpu"], "--tool torch"), (["profile", "--device", "cuda"], "no GPU"),
])  # fmt: skip
def test_missing_hardware_or_tool_exits_6_and_says_the_way_out(arguments, words, capsys):
    assert cli.main(arguments) == 6
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["monitor", "tune"])
def test_no_cpu_is_offered_where_none_will_do(command, capsys):
    for flags, words in (([], "no GPU that torch"), (["--device", "cpu"], "needs a GPU")):
        assert cli.main([command, *flags]) == 6
        err = capsys.readouterr().err
        assert words in err and "Try --device cpu" not in err


def test_a_missing_tool_says_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(profilers.shutil, "which", lambda name: None)
    assert "Nsight Compute" in profilers.missing("ncu", True) and "Nsight Systems" in profilers.missing("nsys", True)
    assert profilers.missing("torch", False) is None


NCU = '''==PROF== Connected
"ID","Process ID","Kernel Name","gpu__time_duration.sum","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed","sm__throughput.avg.pct_of_peak_sustained_elapsed","launch__registers_per_thread"
"","","","ns","%","%","%","register/thread"
"0","77","attention_forward(int, float)","787,904","78.60","6.93","78.60","168"
"1","77","combine","12,000","0.0","3.5","11.0","32"
"2","77","rows","66,000","1.0","85.0","20.0","36"
"3","77","odd","66,000","20.0","30.0","75.0","36"
'''


def test_ncu_is_put_into_words():
    kernels = profilers.parse_ncu(NCU)
    assert [k.name for k in kernels] == ["attention_forward", "combine", "rows", "odd"]
    assert kernels[0].metrics["duration"] == 787904 and kernels[0].metrics["registers"] == 168
    words = [kernel.bound() for kernel in kernels]
    assert words[0] == "tensor cores (79%)" and words[1].startswith("latency") and words[2] == "memory bandwidth (85%)"
    assert "not asked for" in words[3]
    assert profilers.parse_ncu("nothing") == []


def test_a_profiler_that_fails_says_why(tmp_path):
    from flashtile.bench.peers import Unavailable

    out = str(tmp_path / "x.ncu-rep")
    with pytest.raises(Unavailable, match="administrators"):
        profilers.run([sys.executable, "-c", "print('==ERROR== ERR_NVGPUCTRPERM'); exit(1)"], out)
    with pytest.raises(Unavailable, match="code 3(.|\n)*no luck"):
        profilers.run([sys.executable, "-c", "print('no luck'); exit(3)"], out)


def test_proton_is_read(tmp_path):
    leaf = {"frame": {"name": "attention_forward"}, "metrics": {"time (ns)": 6e6, "count": 3}, "children": []}
    scope = {"frame": {"name": "scope"}, "metrics": {}, "children": [leaf]}
    root = {"frame": {"name": "ROOT"}, "metrics": {}, "children": [scope]}
    path = tmp_path / "p.hatchet"
    path.write_text(json.dumps([root, {"CUDA": {}}]))
    assert profilers.proton_kernels(str(path)) == [("attention_forward", 3, 2.0)]


def test_monitor_prints_what_the_driver_says(capsys, monkeypatch):
    monkeypatch.setattr(engine, "resolve_device", lambda name, gpu_for: torch.device("cuda:0"))
    monkeypatch.setattr(telemetry, "open_gpu", lambda device: (None, None))
    now = {"sm_mhz": 1755, "mem_mhz": 3201, "power_w": 699.6, "temperature_c": 61, "reasons": 4}
    monkeypatch.setattr(telemetry, "read", lambda gpu: now)
    monkeypatch.setattr(telemetry, "usage", lambda gpu: {"gpu_percent": 100})
    assert cli.main(["monitor", "--count", "2", "--interval", "0.01", "--csv"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    row = dict(zip(head.split(","), lines[1].split(","), strict=True))
    assert len(lines) == 2 and row["power_w"] == "699.6" and row["slowed_by"] == "power cap" and row["mem_used_mib"] == ""
    assert cli.main(["monitor", "--count", "1"]) == 0 and "power cap" in capsys.readouterr().out
    assert cli.main(["monitor", "--interval", "0"]) == 2


def test_telemetry_keeps_a_short_trace():
    readings = [(0.05 * i, {"sm_mhz": 1980 - i, "power_w": 300.0}) for i in range(100)]
    trace = telemetry.trace(readings)
    assert len(trace) <= telemetry.MAX_TRACE and trace[0] == [0.0, 1980, 300.0]


# --- noise ---------------------------------------------------------------------------------------------------------------


def test_run_strict_exits_5_when_the_interval_is_wide(capsys, monkeypatch):
    from flashtile.bench import measure

    monkeypatch.setattr(measure, "sample", lambda *args, **options: ([1.0, 2.0, 3.0, 1.0, 2.0, 3.0], False))
    arguments = ["run", *SMALL, "--no-roof", "--mode", "fwd"]
    assert cli.main([*arguments, "--strict"]) == 5 and cli.main(arguments) == 0


def test_nothing_changes_the_state_of_a_gpu():
    """No command locks clocks, limits power or switches a mode; doctor prints such a command for the owner, and runs none."""
    words = ("nvmlDeviceSet", "nvmlDeviceReset", "--clock-control base", "nvidia-smi\", \"-")
    for path in (ROOT / "flashtile").rglob("*.py"):
        assert not [word for word in words if word in path.read_text()], path


@pytest.mark.slow
def test_a_missing_extra_says_what_to_install(tmp_path):
    """report without matplotlib: exit code 6 and the pip command."""
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, "-m", "flashtile", "report", str(ROOT / "benchmarks" / "results")], cwd=tmp_path,
                          capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=60)  # fmt: skip
    assert done.returncode == 6 and "pip install 'flashtile[report]'" in done.stderr


# --- odd input -----------------------------------------------------------------------------------------------------------


def test_presets_keep_their_key_value_heads_and_queries():
    (prefill,) = build_cases("llama3-8b-prefill", Shape(nheads="64"))
    (decode,) = build_cases("llama3-8b-decode", Shape(seqlen="4k"))
    assert (prefill.num_heads, prefill.num_heads_kv) == (64, 8)
    assert (decode.seqlen_q, decode.seqlen_k) == (1, 4096)


def test_presets_of_a_file_take_the_values_of_toml():
    Path("flashtile.toml").write_text("[presets.mine]\nsoftcap = 50\ndropout = 0\ncausal = true\nvarlen = false\nabout = 3\n")
    (case,) = build_cases("mine")
    assert (case.softcap, case.dropout, case.causal, case.varlen) == (50.0, 0.0, True, False)
    assert cli.main(["presets"]) == 0


def test_a_preset_of_a_file_keeps_its_dtype_and_queries(capsys):
    Path("flashtile.toml").write_text("[presets.mine]\nbatch = 1\nseqlen = 64\nseqlen_q = 4\nheaddim = 16\ndtype = 'bf16'\n")
    command = "run --preset mine --device cpu --mode decode --repeats 6 --no-roof --no-progress --json -"
    assert cli.main(command.split()) == 0
    config = json.loads(capsys.readouterr().out)["results"][0]["config"]
    assert (config["dtype"], config["seqlen_q"]) == ("bf16", 4)


@pytest.mark.parametrize("line", ["varlen = 'no'", "alibi = 0", "softcap = '50'", "causal = 'maybe'", "about = '\xe9'"])
def test_presets_of_a_file_are_refused_by_its_name(line, capsys):
    Path("flashtile.toml").write_text(f"[presets.mine]\n{line}\n", encoding="latin-1")
    assert cli.main(["presets"]) == 2
    assert "flashtile: flashtile.toml: expected tables" in capsys.readouterr().err


@pytest.mark.parametrize("text, words", [
    ("[presets]\na = 3\n", "presets.a: expected a table [presets.a], got 3"),
    ("presets = 3\n", "presets: expected tables, got 3"),
    ("[presets.mine]\nseqlen = [[64]]\n", "seqlen: expected a number, a text, or a list of whole numbers or texts, got [[64]]"),
])  # fmt: skip
def test_what_is_no_preset_is_told(text, words, capsys):
    Path("flashtile.toml").write_text(text)
    assert cli.main(["presets"]) == 2
    assert words in capsys.readouterr().err


def test_a_list_in_a_preset_is_a_list(capsys):
    Path("flashtile.toml").write_text("[presets.mine]\nseqlen = [64, '1k']\n")
    assert [case.seqlen_k for case in build_cases("mine")] == [64, 1024]


def test_brackets_are_shown_as_they_are(capsys):
    Path("flashtile.toml").write_text("[presets.'a[b]']\nabout = 'x [/red]'\n")
    assert cli.main(["presets"]) == 0
    assert "x [/red]" in capsys.readouterr().out
    assert cli.main(["sweep", *QUICK, "--backend", "flashtile,sdpa", "--out", "a[b]"]) == 0
    assert "saved a[b].jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["--timeout inf", "--rep-ms inf", f"--seed {10**20}", "--csv x --md x", "--dtype="])
def test_run_refuses(flags, capsys):
    assert cli.main(["run", *SMALL, "--no-roof", *flags.split()]) == 2
    assert "expected" in capsys.readouterr().err


def test_compare_shows_no_negative_number_of_values():
    assert cli.main(["compare", *QUICK, "--show-values", "-1"]) == 2


@pytest.mark.parametrize("line", ["doctor --device cpu --no-kernels --json .", "learn softmax --dir file",
                                  "profile --device cpu -b 1 -s 16 --nheads 1 -d 16 --out file"])  # fmt: skip
def test_a_path_that_can_not_be_written_is_named(line, capsys):
    Path("file").touch()
    assert cli.main(line.split()) == 2
    assert "flashtile: " in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder in which no file can be made")
def test_a_file_that_can_not_be_made_is_named_as_given(capsys):
    assert cli.main(["memory", "-s", "64", "--target", "H200", "--no-progress", "--json", "/proc/flashtile.json"]) == 2
    assert "flashtile: /proc/flashtile.json: " in capsys.readouterr().err


@pytest.mark.parametrize("target", ["H200,A100", "RTX A1000", "L200"])
def test_a_target_is_one_known_device(target, capsys):
    assert cli.main(["memory", "--target", target, "-s", "64", "--no-progress"]) == 2
    assert "target: " in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "words"), [
    ("--backend sdpa --window 3,0 --softcap 5", "SDPA has no softcap"), ("--backend sdpa --varlen", "without packed sequences"),
    ("-d 300", "expected a head dim of 8 to 256"), ("--backend fa3", "needs"),
])  # fmt: skip
def test_profile_refuses_what_run_refuses(flags, words, capsys):
    assert cli.main(["profile", *SMALL[:-1], *flags.split()]) in (2, 6)
    assert words in capsys.readouterr().err


def test_explain_and_memory_refuse_what_no_call_takes(capsys):
    explained = ["explain", "--no-compile", "--target", "H200", "-d", "64", "-b", "1"]
    assert cli.main([*explained, "-s", str(2**32)]) == 2 and "seqlen: expected at most" in capsys.readouterr().err
    assert cli.main([*explained, "-s", str(2**31), "--mode", "decode"]) == 2
    assert cli.main(["memory", "-d", "576-512", "--nheads-kv", "1", "--target", "H200", "-s", "64", "--no-progress"]) == 2


def test_profile_refuses_no_calls():
    assert cli.main(["profile", *SMALL[:-1], "--repeats", "0"]) == 2


def test_regress_keeps_no_baseline():
    assert cli.main(["regress", *SMALL, "--save", "name"]) == 2


def test_report_names_what_is_no_record(capsys):
    pytest.importorskip("matplotlib")
    Path("text.json").write_text("hello")
    for name, words in (("nope", "or a folder of them, got no such file"), ("text.json", "got text that is none")):
        assert cli.main(["report", name, "--no-progress"]) == 2
        err = capsys.readouterr().err
        assert f"flashtile: {name}: expected a record" in err and words in err and "Errno" not in err


def test_report_on_stdout_is_nothing_but_the_page(capsys):
    pytest.importorskip("matplotlib")
    assert cli.main(["run", *QUICK[:-4], "--repeats", "6", "-q", "--json", "a.json"]) == 0
    assert cli.main(["report", "a.json", "--html", "-", "--no-progress"]) == 0
    captured = capsys.readouterr()
    assert captured.out.rstrip().endswith("</html>") and "read 1 records" in captured.err


def test_batches_are_compared_within_a_shape():
    cases = [replace(CASE, batch=b, seqlen_q=s, seqlen_k=s) for s in (64, 128) for b in (1, 2)]
    report = engine.run(cases, modes=["fwd"], device="cpu", settings=engine.Settings(repeats=6, roof=False))
    rows = scaling.batch_rows(report)
    assert [rows[0].speedup, rows[2].speedup] == [1.0, 1.0]


def test_a_narrow_terminal_gets_every_column(monkeypatch):
    from flashtile.cli.common import make_console

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert make_console().width >= 200
