"""Records: the published schema, JSON lines, resuming, and what a plot or a table makes of them."""

import copy
import dataclasses
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import jsonschema
import pytest

from flashtile import bench
from flashtile.bench import engine, guide, memory, plots, record, regress, stats, tables
from flashtile.bench.cases import BenchCase, UsageError, build_cases

ROOT = Path(__file__).resolve().parents[1]
SMALL = BenchCase(1, 64, 64, 2, 2, 16, 16, dtype="fp32")
LONGER = BenchCase(1, 128, 128, 2, 2, 16, 16, dtype="fp32")
QUICK = engine.Settings(repeats=6, rep_ms=6, roof=False, commit="0" * 40)


@pytest.fixture(scope="module")
def compared():
    cases = [SMALL, LONGER]
    return bench.compare(cases, ["flashtile", "naive", "fa3"], ("fwd", "bwd"), baseline="naive", device="cpu", settings=QUICK)


def validate(document):
    jsonschema.Draft202012Validator(record.schema()).validate(json.loads(record.to_text(document)))


def test_schema_is_a_schema_and_takes_what_commands_write(compared):
    jsonschema.Draft202012Validator.check_schema(record.schema())
    validate(compared.document())
    validate(bench.run(SMALL, device="cpu", settings=QUICK).document())


@pytest.mark.parametrize("spoil", [
    lambda d: d.pop("env"),
    lambda d: d.update(schema="flashtile-bench/2"),
    lambda d: d["results"][0].update(status="fine"),
    lambda d: d["results"][0].pop("samples_ms"),
    lambda d: d["results"][0]["config"].pop("headdim"),
    lambda d: d["comparisons"][0].update(verdict="MAYBE"),
])  # fmt: skip
def test_schema_refuses(compared, spoil):
    document = json.loads(record.to_text(compared.document()))
    spoil(document)
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


def test_statuses_and_required_keys_are_those_of_the_schema():
    definitions = record.schema()["$defs"]
    assert set(record.STATUSES) == set(definitions["status"]["enum"])
    assert set(record.CONFIG_KEYS) == set(definitions["config"]["properties"]) > set(definitions["config"]["required"])
    assert set(stats.VERDICTS) == set(definitions["comparison"]["properties"]["verdict"]["enum"])


def test_results_survive_a_record(compared):
    for row in json.loads(record.to_text(compared.document()))["results"]:
        assert engine.Result.from_json(row).to_json() == row


def test_lines_are_the_document_and_a_cut_one_is_left_out(compared):
    document = json.loads(record.to_text(compared.document()))
    text = record.head_line(document)
    for mode in ("fwd", "bwd"):
        rows = [row for row in document["results"] if row["mode"] == mode]
        pairs = [row for row in document["comparisons"] if row["mode"] == mode]
        text += record.cell_line(rows, pairs, {})
    whole = record.from_lines(text)
    assert record.problems(whole) == [] and len(whole["results"]) == len(document["results"])
    cut = record.from_lines(text[:-40])
    assert {row["mode"] for row in cut["results"]} == {"fwd"}
    with pytest.raises(ValueError):
        record.from_lines(text[:30])


def test_resume_measures_only_what_is_missing(compared, monkeypatch):
    document = compared.document()
    document["results"] = [r for r in document["results"] if (r["config"]["seqlen_k"], r["mode"]) != (128, "bwd")]
    document["comparisons"] = [c for c in document["comparisons"] if (c["config"]["seqlen_k"], c["mode"]) != (128, "bwd")]
    measured = []
    rounds = engine._Measurement._rounds
    monkeypatch.setattr(engine._Measurement, "_rounds",
                        lambda self, case, *rest: measured.append(case) or rounds(self, case, *rest))  # fmt: skip
    again = bench.compare([SMALL, LONGER], ["flashtile", "naive", "fa3"], ("fwd", "bwd"), baseline="naive", device="cpu",
                          settings=QUICK, resume=json.loads(json.dumps(document)))  # fmt: skip
    assert measured == [LONGER]
    assert again.roofs == compared.roofs
    key = [(r.case, r.mode, r.backend, r.status) for r in compared.results]
    assert [(r.case, r.mode, r.backend, r.status) for r in again.results] == key
    assert len(again.comparisons) == len(compared.comparisons)


@pytest.mark.parametrize("change, words", [
    (lambda d: d["env"].update(torch="1.0"), "another torch"),
    (lambda d: d["settings"].update(seed=7), "another settings (seed)"),
    (lambda d: d["env"]["peers"].update(xformers="0.1"), "another peers (xformers)"),
    (lambda d: d["env"]["env_vars"].update(FLASHTILE_TIER="sdpa"), "another variable (FLASHTILE_TIER)"),
    (lambda d: d["results"][0]["config"].update(batch=9), "other cases"),
])  # fmt: skip
def test_resume_refuses_another_run(compared, change, words):
    document = copy.deepcopy(compared.document())
    change(document)
    with pytest.raises(UsageError, match="resume: .*") as error:
        bench.compare([SMALL, LONGER], ["flashtile", "naive", "fa3"], ("fwd", "bwd"), baseline="naive", device="cpu",
                      settings=QUICK, resume=document)  # fmt: skip
    assert words in str(error.value)


RECORDED = [path for path in sorted((ROOT / "benchmarks" / "results").glob("*/*.json"))
            if json.loads(path.read_text()).get("schema") == record.SCHEMA]  # fmt: skip


# (record, backend, head dim): dq of FlashAttention-4 is wrong at 72 and 80, and at 104 it does not compile
PEERS_THAT_FAIL = {("models.json", "fa4", dim) for dim in (72, 80, 104)}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_runs_follow_the_schema(path):
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator(record.schema()).validate(document)
    assert document["env"]["git"]["commit"]
    assert document["interrupted"] is False
    failed = {(path.name, row["backend"], row["config"]["headdim"]) for row in document["results"]
              if row["status"] in ("mismatch", "error")}  # fmt: skip
    assert failed <= PEERS_THAT_FAIL


def test_recorded_regress_runs_saw_what_was_there():
    """SAME for one version twice; SLOWER for a copy that was slowed by 5% (and a launch gap)."""
    paths = list(ROOT.glob("benchmarks/results/*/regress-*.json"))
    assert {path.stem for path in paths} >= {"regress-slowed", "regress-same"}
    for path in paths:
        rows = record.load(path)["regress"]["rows"]
        slowed = path.stem == "regress-slowed"
        assert {row["verdict"] for row in rows} == {"SLOWER" if slowed else "SAME"}
        assert all((0.03 < row["change"] < 0.1) if slowed else abs(row["change"]) < 0.03 for row in rows)


# --- memory by formula ---------------------------------------------------------------------------------------------------

B2_H16 = BenchCase(2, 1024, 1024, 16, 16, 128, 128)
GROUPED = BenchCase(2, 4096, 4096, 16, 4, 128, 128, causal=True)
# MiB beyond the inputs, as torch's allocator counted them on an H200 (torch 2.11)
MEASURED = [
    (B2_H16, "naive", "fwd", 144), (B2_H16, "flashtile", "fwd", 8.125), (B2_H16, "naive", "fwd_bwd", 288),
    (BenchCase(2, 64, 64, 16, 16, 128, 128), "naive", "fwd", 1.5), (GROUPED, "naive", "fwd_bwd", 4240),
    (BenchCase(2, 32768, 32768, 16, 16, 128, 128), "naive", "fwd", 131584),
]  # fmt: skip


@pytest.mark.parametrize("case, backend, mode, mib", MEASURED)
def test_memory_formulas_give_what_was_measured(case, backend, mode, mib):
    assert memory.predicted_bytes(case, backend, mode) / 2**20 == mib


@pytest.mark.parametrize("backend", memory.BACKENDS)
@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
def test_the_longest_sequence_fits_and_the_next_one_does_not(backend, mode):
    limit = 1 << 30
    length = memory.largest_seqlen(B2_H16, backend, mode, limit)

    def needed(seqlen):
        case = dataclasses.replace(B2_H16, seqlen_q=seqlen, seqlen_k=seqlen)
        return memory.inputs_bytes(case, mode) + memory.predicted_bytes(case, backend, mode)

    assert needed(length) <= limit < needed(length + 64)
    assert memory.largest_seqlen(B2_H16, backend, mode, 1000) == 0


def test_memory_on_a_cpu_is_formulas_only():
    report = memory.measure_memory([SMALL], device="cpu", settings=QUICK)
    assert [r.status for r in report.results] == ["skipped", "skipped"] and report.results[0].predicted_mem_bytes > 0
    validate(report.document())


def test_memory_of_a_target_is_that_of_its_kernels():
    """Not of those that the CPU has; and the line that repeats a row names it."""
    from flashtile import hardware

    h200 = hardware.by_name("H200")
    report = memory.measure_memory([B2_H16], ["flashtile"], train=True, device="cpu", settings=QUICK, target=h200)
    (result,) = report.results
    assert result.predicted_mem_bytes == memory.predicted_bytes(B2_H16, "flashtile", "fwd_bwd", h200)
    assert result.predicted_mem_bytes > memory.predicted_bytes(B2_H16, "flashtile", "fwd_bwd", hardware.CPU)
    assert result.repro.endswith(' --train --target "H200"') and report.parts["memory"][0]["memory_bytes"] == h200.memory_bytes


def test_names_of_plots_are_ids_and_files():
    from types import SimpleNamespace

    from flashtile.bench.plots import Plot

    names = ('x"><script>', "x/../y", "x//../y", "speedup-fa3-fwd")
    plots = [Plot(name, "Speed-up", "", "", SimpleNamespace()) for name in names]
    assert [plot.name for plot in tables.named_apart(plots)] == ["x-script-", "x-..-y", "x-..-y-2", "speedup-fa3-fwd"]


def test_what_a_run_writes_is_no_change(tmp_path):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    package = tmp_path / "flashtile" / "bench"
    package.mkdir(parents=True)
    (package / "record.py").write_text((ROOT / "flashtile" / "bench" / "record.py").read_text())
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")

    def dirty():
        with mock.patch.object(record, "__file__", str(package / "record.py")):
            return record._git(None)["dirty"]

    (tmp_path / "sweep.jsonl").write_text("")
    assert not dirty()
    (package / "new.py").write_text("")
    assert dirty()


def test_flash_memory_knows_what_the_hopper_backward_adds(monkeypatch):
    from dataclasses import replace
    from types import SimpleNamespace

    from flashtile import hardware
    from flashtile.hopper import backward_config

    def predicted(case, splits):
        config = replace(backward_config.CONFIGS[128], splits=splits)
        plan = SimpleNamespace(tier="hopper", configs={"backward": config})
        monkeypatch.setattr(memory, "_backward_plan", lambda case, device: plan)
        return memory.predicted_bytes(case, "flashtile", "fwd_bwd", hardware.by_name("H200")) / 2**20

    # as measured: fp32 dq, and lse in base 2
    assert predicted(B2_H16, 1) == 48.375
    # dk and dv of 2 parts of each of 4 groups, 8 MiB for all 4 heads each
    assert predicted(GROUPED, 2) - predicted(GROUPED, 1) == 2 * (8 + 8)
    # One tile of keys: no dq in fp32
    few = replace(B2_H16, seqlen_k=128)
    assert predicted(few, 1) == predicted(replace(few, seqlen_k=129), 1) - 16 - 2 * (2 * 16 * 128 * 2) / 2**20


# --- tables and plots ----------------------------------------------------------------------------------------------------


def row(case, mode="fwd", backend="flashtile", median=1.0, **more):
    """A result as a record has it, with times around a median."""
    samples = [median * (1 + 0.001 * (i % 5)) for i in range(20)]
    result = engine.Result(case, backend, mode, flops=case.problem().flops(mode), bytes=case.problem().bytes_moved(mode),
                           timer="event", inputs_bytes=1000, extra_mem_bytes=500, predicted_mem_bytes=500)  # fmt: skip
    result.finish(samples, None)
    result.repro = f"flashtile run {case.flags()} --mode {mode}"
    return result.to_json() | more


def make_document(rows, command="compare", **more):
    env = record.environment(engine.resolve_device("cpu"), commit="1" * 40)
    env["gpu"] = {"name": "NVIDIA H200", "cc": "9.0", "sm": 132, "l2_mb": 60.0, "mem_gib": 139.8}
    settings = {"command": command, "timer": "event", "l2": "cold", "seed": 0, "modes": ["fwd", "bwd"], "baseline": "naive",
                "backends": ["flashtile", "naive"], "device": "cuda", "flops": record.FLOPS_CONVENTION}  # fmt: skip
    roofs = {"bfloat16": {"dtype": "bfloat16", "n": 8192, "tflops": 780.0, "bandwidth": 4.2e12, "spec_tflops": 989.4,
                          "spec_bandwidth": 4.8e12}}  # fmt: skip
    return {"schema": record.SCHEMA, "env": env, "settings": settings, "interrupted": False, "roofs": roofs, "geomeans": [],
            "results": rows, "comparisons": [], **more}  # fmt: skip


@pytest.fixture
def documents():
    """One document of each kind that a table or a plot is made of."""
    cases = build_cases("guide-small,guide-medium")
    rows = [row(case, mode, backend, time) for case in cases for mode in ("fwd", "bwd")
            for backend, time in (("flashtile", 0.1), ("naive", 0.9))]  # fmt: skip
    rows += [row(case, "fwd", "flashtile", 0.01 * case.seqlen_k) for case in build_cases("guide-memory")]
    rows.append(row(cases[0], "fwd", "fa3") | {"status": "unavailable", "reason": "needs <a> wheel", "stats": None,
                                               "samples_ms": []})  # fmt: skip
    trace = [[0.0, 1980, 300.0], [0.1, 1755, 600.0]]
    rows[0]["telemetry"] = {"throttle": {"power cap": 0.5}, "sm_mhz_median": 1755, "trace": trace}
    measured = {"stats": None, "samples_ms": [], "tflops": None, "timer": ""}
    decode = dataclasses.replace(cases[0], seqlen_q=1)
    rows += [row(decode, "fwd", name, time) | {"mode": "decode"} for name, time in (("flashtile", 0.1), ("naive", 0.2))]
    memory = [row(case, "fwd", backend, extra_mem_bytes=size * case.seqlen_k, **measured)
              for case in build_cases("guide-memory") for backend, size in (("flashtile", 100), ("naive", 900))]  # fmt: skip
    scaled = [{"gpus": n, "config": cases[0].config(), "mode": "fwd", "ms": 1.0, "speedup": 0.9 * n, "efficiency": 0.9}
              for n in (1, 2, 4)]  # fmt: skip
    versions = [{"config": cases[0].config(), "mode": "fwd", "status": "ok", "baseline_ms": 1.0, "against_ms": 1.05,
                 "change": 0.05, "ci95": [0.049, 0.051], "verdict": "SLOWER"}]  # fmt: skip
    sides = [{"name": name, "commit": "2" * 40, "kind": "code"} for name in ("main", "now")]
    return [
        make_document(rows),
        make_document(memory, "memory"),
        make_document([], "scale", scaling={"kind": "weak", "rows": scaled}),
        make_document([], "regress", regress={"baseline": sides[0], "against": sides[1], "method": "interleaved",
                                              "rows": versions}),
    ]


def test_made_up_documents_follow_the_schema(documents):
    for document in documents:
        validate(document)
        assert record.problems(document) == []


def test_tables_of_the_guide_stand_beside_its_figures(documents):
    made = {table.name: table for table in tables.all_tables(documents)}
    assert set(made) == {"forward", "backward", "memory", "bandwidth", "backends-fwd", "backends-bwd", "backends-decode",
                         "scaling-weak", "regress", "results"}  # fmt: skip
    assert [cell.text for cell in made["backends-fwd"].rows[0]][3:] == ["0.90180", "9.00x"]
    first = [cell.text for cell in made["forward"].rows[0]]
    assert first[0] == "1×32×4×16" and first[3] == "9.00x" and first[4] == "1.88x" and first[6] == "2.10x"
    assert made["forward"].rows[0][3].kind == "good"
    assert len(made["forward"].rows) == 6 and len(made["backward"].rows) == 5
    assert [cell.text for cell in made["memory"].rows[4]][4:] == ["9.00x", "4.20x"]
    assert made["regress"].rows[0][6].kind == "bad"
    assert all(len(cells) == len(table.columns) for table in made.values() for cells in table.rows)
    assert made["backward"].markdown().splitlines()[0].startswith("| B×S×H×D | forward ms")


def test_times_of_two_runs_are_not_compared(documents):
    """A faster machine's run of one backend, and a case with an option, change no ratio."""
    cases = build_cases("guide-small")
    other = [row(case, "fwd", "flashtile", 0.01) for case in cases]
    assert tables.timed([*documents, make_document(other)]) == tables.timed(documents)
    packed = [row(dataclasses.replace(case, varlen=True), "fwd", name, time) for case in cases
              for name, time in (("flashtile", 0.1), ("naive", 7.0))]  # fmt: skip

    def speedups(documents):
        return [plot.alt for plot in plots.figures(documents) if plot.group == "Speed-up" and "fwd" in plot.alt]

    assert speedups([*documents, make_document(packed)]) == speedups(documents) != []


def test_runs_without_flashtile_add_no_columns_to_tables_of_it(documents):
    rungs = make_document([row(case, "fwd", name, 0.5) for case in build_cases("paper") for name in ("naive", "rung-1")])
    (table,) = [table for table in tables.all_tables([*documents, rungs]) if table.name == "backends-fwd"]
    assert table.columns == ["case", "flashtile ms", "TFLOP/s", "naive ms", "over naive"]


def test_lines_of_many_backends_are_told_apart():
    names = ["naive", "sdpa-flash", *(f"rung-{n}" for n in range(1, 12))]
    roles = plots._backends([make_document([row(case, "fwd", name) for case in build_cases("guide-small") for name in names])])
    looks = [(role, plots.MARKERS[i % len(plots.MARKERS)]) for i, role in enumerate(roles.values())]
    assert len(set(looks)) == 14
    counts = [[*roles.values()].count(role) for role in roles.values()]
    assert counts[0] == 1 and max(counts) == 2


def test_a_plot_without_flashtile_names_another():
    rows = [row(case, "fwd", "naive", 0.01 * case.seqlen_k) for case in build_cases("guide-memory")]
    alts = [plot.alt for plot in plots.figures([make_document(rows)]) if plot.group in ("TFLOP/s", "Time")]
    assert len(alts) == 2 and all(": naive " in alt and "flashtile" not in alt for alt in alts)


def test_the_guide_has_only_plain_cases():
    (case,) = build_cases("guide-small")[:1]
    assert guide.key(case.config()) == (1, 32, 4, 16)
    assert guide.key(case.config() | {"causal": True}) is None
    assert guide.key(case.config() | {"nheads_kv": 2}) is None


def test_every_kind_of_plot_is_drawn_in_page_colours(documents):
    made = plots.figures(documents)
    groups = {plot.group for plot in made}
    assert groups == {"TFLOP/s", "Time", "Memory", "Roofline", "Speed-up", "Forward and backward", "Scaling",
                      "Samples"}
    assert len({plot.name for plot in made}) == len(made)
    for plot in {plot.group: plot for plot in made}.values():
        svg = plots.render(plot, "svg").decode()
        assert svg.startswith("<svg") and "var(--ink)" in svg and 'role="img"' in svg and "#0100" not in svg, plot.name


def test_plots_are_written_in_both_themes(documents, tmp_path):
    plot = next(plot for plot in plots.figures(documents) if plot.group == "Scaling")
    names = plots.write([plot], str(tmp_path / "new" / "p"), documents)
    assert len(names) == 4 and (tmp_path / "new" / "p-scaling-weak-dark.png").read_bytes().startswith(b"\x89PNG")
    light, dark = ((tmp_path / "new" / f"p-scaling-weak-{theme}.svg").read_text() for theme in plots.THEMES)
    assert "#ffffff" in light and "#14171b" in dark and "NVIDIA H200" in light


@pytest.mark.parametrize("spoil, said", [
    (lambda d: d.update(env={}), "env: 'gpu' is a required property"),
    (lambda d: d["settings"].pop("command"), "settings: 'command' is a required property"),
    (lambda d: d.update(results={"a": 1}), "results: {'a': 1} is not of type 'array'"),
    (lambda d: d.update(results=[3]), "results[0]: 3 is not of type 'object'"),
    (lambda d: d["results"][0].update(config=None), "results[0].config: None is not of type 'object'"),
    (lambda d: d["results"][0]["config"].update(window=None), "results[0].config.window: None is not of type 'array'"),
    (lambda d: d["results"][0]["config"].update(batch=0), "results[0].config.batch: 0 is less than the minimum of 1"),
    (lambda d: d["results"][0]["config"].update(dtype="fp4"), "results[0].config.dtype: expected one of fp16"),
    (lambda d: d["results"][0].update(mode="sideways"), "results[0].mode: expected one of fwd"),
    (lambda d: d["results"][0].update(stats={"median": 1}), "results[0].stats: {'median': 1} is not valid"),
])  # fmt: skip
def test_a_spoilt_record_is_refused_with_the_place(compared, tmp_path, spoil, said):
    document = json.loads(record.to_text(compared.document()))
    spoil(document)
    path = tmp_path / "spoilt.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError) as error:
        record.load(path)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["[]\n", "{}\n3\n", '{}\n{"results": []}\n'])
def test_spoilt_lines_are_refused(tmp_path, text):
    path = tmp_path / "spoilt.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="spoilt.jsonl"):
        record.load(path)


def test_a_record_goes_through_a_link_and_not_in_its_place(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    record.write(str(link), "new")
    assert link.is_symlink() and target.read_text() == "new"


def test_a_pipe_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as threads:
        read = threads.submit(pipe.read_text)
        record.write(str(pipe), "text")
        assert read.result(10) == "text" and pipe.is_fifo() and record.is_stream(str(pipe))


def test_memory_and_versions_as_csv_and_markdown(documents):
    measured, compared = documents[1], documents[3]
    assert "0.0 MiB, by formula 0.0 MiB" in record.to_markdown(measured)
    assert "predicted_mem_mib" in record.to_csv(measured)
    assert "| +5.0% |" in record.to_markdown(compared)
    header, row = record.to_csv(compared).splitlines()
    assert "change_percent" in header and ",SLOWER" in row


def test_a_missing_time_is_a_row_of_a_comparison_of_records(compared):
    before = json.loads(record.to_text(compared.document()))
    after = copy.deepcopy(before)
    lost = next(row for row in after["results"] if row["backend"] == "flashtile")
    lost.update(status="error", reason="RuntimeError: boom", stats=None, samples_ms=[], tflops=None)
    rows = regress.compare_records(before, after, 0.03)
    assert [row.status for row in rows].count("error") == 1 and len(rows) == 4


def test_an_interrupted_memory_run_keeps_what_was_complete(monkeypatch):
    def case(self, case):
        if self.done:
            raise KeyboardInterrupt
        for name in self.backends:
            self._add(case, name, "fwd").extra_mem_bytes = 5

    monkeypatch.setattr(memory._MemoryMeasurement, "_case", case)
    report = memory.measure_memory([SMALL, LONGER], device="cpu", settings=QUICK)
    assert report.interrupted and len(report.results) == 2


def test_cells_of_inputs_that_can_not_be_made_are_told(monkeypatch):
    monkeypatch.setattr(engine, "make_inputs", lambda *a, **b: 1 / 0)
    cells = []

    class Listener(engine.Listener):
        def cell(self, report, case, mode):
            cells.append((case, mode))

    engine.run([SMALL], modes=("fwd", "bwd"), device="cpu", settings=QUICK, listener=Listener())
    assert cells == [(SMALL, "fwd"), (SMALL, "bwd")]


def test_decode_with_a_window_counts_the_bytes_that_it_reads():
    cases = [dataclasses.replace(SMALL, seqlen_q=1, seqlen_k=1024, causal=True, window=window)
             for window in ((63, None), (None, None))]  # fmt: skip
    report = engine.run(cases, modes=("decode",), device="cpu", settings=QUICK)
    near, far = report.results
    assert near.bytes == cases[0].cache_problem().bytes_moved([1024]) < far.bytes / 10
    assert near.flops * 16 == far.flops


def test_memory_plot_is_of_one_batch():
    cases = [dataclasses.replace(SMALL, batch=b, seqlen_q=s, seqlen_k=s) for b in (1, 2) for s in (64, 128)]
    rows = [row(case, backend=name, predicted_mem_bytes=case.batch * case.seqlen_k)
            for case in cases for name in memory.BACKENDS]  # fmt: skip
    seen = []

    class Axes:
        def __getattr__(self, name):
            return lambda *arguments, **more: None

        def plot(self, xs, ys, **more):
            seen.append(ys)

        xaxis = yaxis = property(lambda self: Axes())

    (plot,) = plots._memory([make_document(rows, "memory")], {"naive": "s0", "flashtile": "s1"})
    plot.draw(Axes(), plots._SENTINELS)
    assert seen[0] == [64 / tables.MIB, 128 / tables.MIB] and " b1 " in plot.title
    assert plots._memory([make_document([], "memory")], {}) == []
