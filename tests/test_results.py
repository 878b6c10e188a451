"""The recorded runs, and the tables made from them."""

import subprocess
import sys
from pathlib import Path

import pytest

from flashtile import tiles
from flashtile.bench import record

ROOT = Path(__file__).resolve().parents[1]
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*/paper*.json"))


def test_readme_shows_what_was_recorded():
    run = subprocess.run([sys.executable, "benchmarks/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_records_are_whole(path):
    """They follow the schema, name their commit, and hold nothing that was wrong."""
    run = record.load(path)
    assert run["env"]["git"]["commit"]
    assert not [row for row in run["results"] if row["status"] == "mismatch"]
    assert not run["interrupted"]


def test_tile_rows_name_a_record_that_exists():
    for row in tiles.PORTABLE:
        assert row.source
        if row.source.startswith("benchmarks/"):
            assert (ROOT / row.source).exists(), row
