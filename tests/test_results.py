"""The recorded runs, and the tables made from them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtile import tiles
from flashtile.bench.stats import geomean

ROOT = Path(__file__).resolve().parents[1]


def test_readme_shows_what_was_recorded():
    run = subprocess.run([sys.executable, "benchmarks/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_what_features_cost_is_timed_with_the_feature(monkeypatch):
    """ALiBi once cost nothing: the case that it took its slopes from had none."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ratios

    asked = []
    monkeypatch.setattr(ratios, "attention", lambda *_, **options: asked.append(options))
    x = torch.empty(0)
    # makes tensors on a GPU
    monkeypatch.setattr(ratios, "packed", lambda case: None)
    functions = {name: function for name, _, _, function, _ in ratios.rows() if not name.startswith("packed")}
    for function in functions.values():
        function(x, x, x)
    options = dict(zip(functions, asked, strict=True))
    assert options["softcap"]["softcap"] > 0 and options["window of 1024 keys"]["window"] == (1023, 0)
    assert options["ALiBi"]["alibi_slopes"].shape == (ratios.BATCH.num_heads,)


def test_tile_rows_name_a_record_that_exists():
    for row in (*tiles.PORTABLE, *tiles.HOPPER, *tiles.DECODE):
        assert row.source
        if row.source.startswith("benchmarks/"):
            assert (ROOT / row.source.partition(";")[0]).exists(), row


def test_what_is_said_of_the_fastest_peers_is_what_was_recorded():
    def over_the_fastest(name, mode, num_backends):
        """Ratios of all cells. num_backends: those that measured each."""
        cells = {}
        for row in json.loads((ROOT / "benchmarks/results/nvidia-h200" / name).read_text())["results"]:
            if row["mode"] == mode and row["stats"]:
                cells.setdefault(json.dumps(row["config"]), {})[row["backend"]] = row["stats"]["median"]
        ratios = [min(time for name, time in cell.items() if name != "flashtile") / cell["flashtile"]
                  for cell in cells.values()]  # fmt: skip
        assert len(ratios) == 36 and all(len(cell) == num_backends for cell in cells.values())
        return ratios

    text = " ".join((ROOT / "docs/measured.md").read_text().split())
    ratios = over_the_fastest("paper-forward.json", "fwd", 4)
    fastest = "times as fast as the fastest peer of each cell (geometric mean)"
    assert f"{geomean(ratios):.3f} {fastest}, {min(ratios):.3f} in the worst cell" in text
    forward, backward = over_the_fastest("paper.json", "fwd", 5), over_the_fastest("paper.json", "bwd", 4)
    assert (f"{geomean(forward):.3f} forward (geometric mean; {min(forward):.3f} in the worst cell), "
            f"{geomean(backward):.3f} backward ({min(backward):.3f})") in text  # fmt: skip
