"""The exercises: each check passes with a solution and fails without one, and says what is wrong."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtile import cli
from flashtile.learn.counters import count
from flashtile.learn.exercises import EXERCISES, LEVELS, begin, check, find
from flashtile.problem import AttentionProblem, Operands
from flashtile.reference import fa1, fa2, naive

SOLUTIONS = Path(__file__).parent / "solutions"


def attempt(name, folder, *replacements):
    """The outcome of a solution in which some text was replaced."""
    text = (SOLUTIONS / f"{name}.py").read_text()
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    (folder / f"{name}.py").write_text(text)
    return check(find(name), folder)


@pytest.mark.parametrize("name", EXERCISES)
def test_a_solution_passes_and_the_stub_does_not(name, tmp_path):
    exercise = EXERCISES[name]
    assert check(exercise, tmp_path).status == "new"
    path = begin(exercise, tmp_path)
    assert check(exercise, tmp_path).status in ("todo", "wrong")
    shutil.copy(SOLUTIONS / path.name, path)
    outcome = check(exercise, tmp_path)
    assert outcome.status == "done", outcome.words


def test_every_level_has_exercises():
    assert {exercise.level for exercise in EXERCISES.values()} == set(LEVELS)
    stubs = importlib.util.find_spec("flashtile.learn.stubs").submodule_search_locations[0]
    assert {path.stem for path in Path(stubs).glob("[!_]*.py")} == set(EXERCISES)
    assert {path.stem for path in SOLUTIONS.glob("*.py")} == set(EXERCISES)


@pytest.mark.parametrize(
    "name, old, new, says",
    [
        ("softmax", "row_sum * correction +", "row_sum +", "row_sum"),
        ("softmax", "torch.where(new_max == -torch.inf, 0.0, new_max)", "new_max", "all hidden"),
        ("softmax", "correction = torch.exp(row_max - pivot)", "correction = torch.ones_like(row_max)", "scores in"),
        ("forward", "tile_m=64, tile_n=64):\n", "tile_m=64, tile_n=64):\n    tile_n = k.shape[0]\n", "never exist together"),
        ("forward", "acc * correction[:, None] +", "acc +", "out["),
        ("forward", "    out, lse =", "    q.new_zeros(q.shape[0], k.shape[0])\n    out, lse =", "never exist together"),
        ("causal", "cols > rows[:, None] + shift", "cols > rows[:, None]", "40 queries, 100 keys"),
        # the seed's: hides what is before the query instead of what is after it
        ("causal", "cols > rows[:, None] + shift", "rows[:, None] + shift > cols", "96 queries"),
        ("causal", "stop = min(seqlen_k, int(rows[-1]) + shift + 1)", "stop = seqlen_k", "Skip the tiles"),
        ("dropout", "p.sum(1)", "(p * keep(cols)).sum(1)", "without dropout"),
        ("dropout", "row_sum * (1 - dropout_p)", "row_sum", "dropout_p 0.5"),
        ("dropout", "tile_n=64):\n", "tile_n=64):\n    tile_n = k.shape[0]\n", "keep was asked for 64 columns"),
        ("dropout", "tile_n=64):\n", "tile_n=64):\n    q.new_zeros(q.shape[0], k.shape[0])\n", "never exist together"),
        ("backward", "dp - delta[rows, None]", "dp", "64 queries, 64 keys, tiles of 32 x 48: dk[0, 0]"),
        ("backward", "dv[cols] +=", "dv[cols] =", "dv["),
        ("backward", "dq[rows] += scale *", "dq[rows] +=", "dq["),
        ("backward", "col > row[:, None] + shift", "col > row[:, None]", "40 queries, 100 keys, causal"),
        ("backward", "torch.where(lse == -torch.inf, torch.inf, lse)", "lse", "is nan"),
        ("backward", "if causal else 0\n", "if False else 0\n", "Skip the tiles"),
        ("backward", "    delta =", "    weights = q.new_zeros(seqlen_q, seqlen_k)\n    delta =", "never exist together"),
        ("backward", "    delta =", "    tile_m = tile_n = 999\n    delta =", "never exist together"),
        ("kernel", "row_sum * correction +", "row_sum +", "64 queries, 64 keys: lse["),
        ("kernel", 'tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max", "40 keys, causal: lse[32] is nan"),
        ("kernel", "tl.max(scores, 1) * scale_log2", "tl.minimum(20.0, tl.max(scores, 1) * scale_log2)", "scores of up to 300"),
        ("kernel", "tl.exp2(row_max - pivot)", "tl.exponential(row_max - pivot)", "kernel.py, line 12: AttributeError"),
        ("kernel", "@triton.jit\ndef update", "def update", "plain Python"),
        ("tile", '"num_stages": 2', '"num_stages": 6', "KiB of shared memory"),
        ("tile", '"num_warps": 8', '"num_warps": 64', "1 to 32 warps"),
        ("tile", '"tile_m": 128', '"tile_m": 128.0', "expected a whole number for each of tile_m"),
        ("tile", "head_dim * itemsize", "head_dim * 2", "4 bytes an element"),
        ("tile", '"num_warps": 8', '"num_warps": 2', "registers"),
        ("bound", "2 * batch * seqlen_k * heads_kv", "2 * batch * seqlen_k * heads", "bytes_moved"),
        ("bound", "seqlen_q * (seqlen_k - seqlen_q) +", "", "a chunk of 512 tokens on 4096, fp32"),
        ("bound", "heads_kv * head_dim * itemsize", "heads_kv * head_dim * 2", "4 bytes an element: bytes_moved"),
        ("bound", '("memory", memory)', "memory", "expected bound, ms; of type float was returned"),
        ("bound", "compute >= memory", "compute <= memory", "expected compute"),
        ("combine", "lse_max + total.log()", "total.log()", "pieces of 10, 54, 32 and 0 keys: lse[0]"),
        ("combine", "lses.amax(0)", "lses.amax().expand(lses.shape[1])", "moved by another number"),
        ("combine", "torch.where(total == 0, 1.0, total)", "total", "without a visible key"),
        ("mla", "    return", '    torch.einsum("sr,hrd->hsd", c, w_k)\n    return', "Multiply the query"),
        ("mla", "    return", "    [c @ w for w in w_k]\n    return", "one head after the other"),
        ("mla", "    return", "    q.new_empty(w_k.shape[0], c.shape[0], q.shape[1])\n    return", "Multiply the query"),
        ("varlen", " + tile_m - 1", "", "tile (0, 0) (sequence, first row) is missing"),
        ("varlen", "    if causal:", "    if not causal:", "stands before"),
        ("varlen", "seqlen_k[sequences]", "seqlen_q[sequences]", "chunks of 40, 1 and 64 queries"),
        ("varlen", ", descending=True", "", "which sees 3 keys, stands before (3, 0), which sees 9"),
        ("varlen", "    keys = s", "    torch.ones(len(seqlen_q), int(num_tiles.max()))\n    keys = s", "padded grid"),
        ("varlen", "torch.argsort(keys, descending=True)", "torch.zeros_like(keys)", "is missing"),
    ],
)  # fmt: skip
def test_a_check_sees_a_mistake_and_names_it(name, old, new, says, tmp_path):
    outcome = attempt(name, tmp_path, (old, new))
    assert outcome.status == "wrong"
    assert says in outcome.words


ADDMM = ("acc * correction[:, None] + p @ v[cols]", "torch.addmm(acc * correction[:, None], p, v[cols])")
ALL_TILES = ("stop = min(seqlen_k, int(rows[-1]) + shift + 1)", "stop = seqlen_k")
IN_PLACE = [
    ("dv[cols] += p.T @ dout[rows]", "dv[cols].addmm_(p.T, dout[rows])"),
    ("dk[cols] += scale * dscores.T @ q[rows]", "dk[cols].addmm_(scale * dscores.T, q[rows])"),
    ("dq[rows] += scale * dscores @ k[cols]", "dq[rows].addmm_(scale * dscores, k[cols])"),
]


@pytest.mark.parametrize(
    "name, replacements, hidden",
    [("causal", [ADDMM], ALL_TILES), ("backward", IN_PLACE, ("if causal else 0\n", "if False else 0\n"))],
)
def test_products_that_add_are_counted(name, replacements, hidden, tmp_path):
    outcome = attempt(name, tmp_path, *replacements)
    assert outcome.status == "done" and outcome.words == attempt(name, tmp_path).words
    outcome = attempt(name, tmp_path, *replacements, hidden)
    assert outcome.status == "wrong" and "Skip the tiles" in outcome.words


def test_flops_of_every_product():
    a, b, x, batch = torch.ones(3, 4), torch.ones(4, 5), torch.ones(4), torch.ones(2, 3, 4)
    for product, flops in {
        lambda: a @ b: 2 * 3 * 4 * 5,
        lambda: torch.addmm(torch.ones(3, 5), a, b): 2 * 3 * 4 * 5,
        lambda: torch.ones(3, 5).addmm_(a, b): 2 * 3 * 4 * 5,
        lambda: torch.baddbmm(torch.ones(2, 3, 5), batch, b.expand(2, 4, 5)): 2 * 2 * 3 * 4 * 5,
        lambda: torch.addbmm(torch.ones(3, 5), batch, b.expand(2, 4, 5)): 2 * 2 * 3 * 4 * 5,
        lambda: a @ x: 2 * 3 * 4,
        lambda: torch.addmv(torch.ones(3), a, x): 2 * 3 * 4,
        lambda: x @ x: 2 * 4,
    }.items():
        assert count(product)[0].flops == flops


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("forward", """
def forward(q, k, v, tile_m, tile_n):
    scores = [k @ x * q.shape[1] ** -0.5 for x in q]
    return torch.stack([torch.softmax(row, 0) @ v for row in scores]), torch.stack([row.logsumexp(0) for row in scores])
""", "8 queries, 4096 keys"),
        ("backward", """
def backward(q, k, v, out, lse, dout, causal, tile_m, tile_n):
    scale, shift = q.shape[1] ** -0.5, k.shape[0] - q.shape[0]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for i in range(q.shape[0]):
        stop = max(0, i + shift + 1) if causal else k.shape[0]
        p = torch.softmax(k[:stop] @ q[i] * scale, 0)
        dscores = scale * p * (v[:stop] @ dout[i] - dout[i] @ out[i])
        dq[i] = dscores @ k[:stop]
        dk[:stop] += dscores[:, None] * q[i]
        dv[:stop] += p[:, None] * dout[i]
    return dq, dk, dv
""", "8 queries, 4096 keys"),
    ],
)  # fmt: skip
def test_whole_rows_are_no_tiles(name, text, says, tmp_path):
    (tmp_path / f"{name}.py").write_text("import torch\n\n" + text)
    outcome = check(find(name), tmp_path)
    assert outcome.status == "wrong" and says in outcome.words and "never exist together" in outcome.words


def test_an_exercise_that_leaves_python_is_told(tmp_path, capsys):
    (tmp_path / "softmax.py").write_text("import sys\n\nsys.exit(0)\n")
    assert cli.main(["learn", "softmax", "--dir", str(tmp_path)]) == 3
    assert "softmax.py, line 3: SystemExit: 0" in capsys.readouterr().err
    outcome = attempt("kernel", tmp_path, ("    out, lse = torch.empty_like(q)", "    raise SystemExit(0)\n    out, lse = q"))
    assert outcome.status == "wrong" and "SystemExit: 0" in outcome.words


@pytest.mark.parametrize(
    "name, old, new, says",
    [
        ("softmax", "return new_max,", "return 1.0,", "row_max is of type float; expected a tensor of shape (6,), float64"),
        ("softmax", "p, correction\n", "p\n", "expected row_max, row_sum, p, correction; a tuple of 3 was returned"),
        ("forward", "return out, lse", "return out", "expected out, lse; a tensor of shape (64, 16), float64 was returned"),
        ("forward", "return out, lse", "return out.float(), lse", "out is a tensor of shape (64, 16), float32; expected"),
        ("bug", "return acc / row_sum[:, None],", "return None,", "128 keys: out is None; expected a tensor"),
        ("backward", "return dq, dk, dv", "return dq.tolist(), dk, dv", "dq is a list of 64; expected a tensor"),
        ("mla", "return torch.einsum", "return 1.0 or torch.einsum", "out is of type float; expected a tensor"),
        ("varlen", "first_rows[order]\n", "first_rows[order] / 1\n", "float32; expected a tensor of integers"),
    ],
)
def test_a_result_of_the_wrong_kind_is_named(name, old, new, says, tmp_path):
    outcome = attempt(name, tmp_path, (old, new))
    assert outcome.status == "wrong" and says in outcome.words


def test_the_mended_tiles_keep_their_size(tmp_path):
    begin(find("bug"), tmp_path)
    stub = (tmp_path / "bug.py").read_text()
    cut = stub.replace("    tile = x.new_zeros(size, x.shape[1])\n", "    return x[begin : begin + size]\n    tile = 0\n")
    (tmp_path / "bug.py").write_text(cut)
    outcome = check(find("bug"), tmp_path)
    assert cut != stub and outcome.status == "wrong" and "Keep tiles at their 64 rows" in outcome.words


def test_the_planted_bug_is_right_where_its_text_says_so(tmp_path):
    begin(find("bug"), tmp_path)
    words = check(find("bug"), tmp_path).words
    assert words.startswith("wrong for 100 keys") and "65 keys" in words and "128 keys" not in words


@pytest.mark.parametrize("relative", [False, True])
def test_a_learners_own_error_has_its_line(relative, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("mine" if relative else tmp_path / "mine")
    folder.mkdir()
    (folder / "softmax.py").write_text("def update(row_max, row_sum, scores):\n    return scores.nonsense\n")
    outcome = check(find("softmax"), folder)
    assert outcome.status == "wrong" and outcome.words.startswith("softmax.py, line 2: AttributeError")


def test_a_backward_pass_may_walk_twice(tmp_path):
    """Once for dk and dv and once for dq, as the portable tier does."""
    text = (SOLUTIONS / "backward.py").read_text()
    one = text.replace("            dq[rows] += scale * dscores @ k[cols]\n", "")
    two = text.replace("            dv[cols] += p.T @ dout[rows]\n            dk[cols] += scale * dscores.T @ q[rows]\n", "")
    assert len({text, one, two}) == 3
    both = "def backward(*arguments):\n    return (two(*arguments)[0], *one(*arguments)[1:])\n"
    walks = [walk.replace("def backward", f"def {name}") for name, walk in (("one", one), ("two", two))]
    (tmp_path / "backward.py").write_text("\n\n".join([*walks, both]))
    outcome = check(find("backward"), tmp_path)
    assert outcome == ("done", "7 products of each tile, 3.5 times those of forward")


def test_a_list_of_tiles_may_be_made_in_python(tmp_path):
    (tmp_path / "varlen.py").write_text(
        """import torch


def schedule(cu_seqlens_q, cu_seqlens_k, tile_m, causal):
    tiles = []
    for sequence, (seqlen_q, seqlen_k) in enumerate(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist())):
        for row in range(0, seqlen_q, tile_m):
            last = min(row + tile_m, seqlen_q)
            tiles.append((max(0, last + seqlen_k - seqlen_q) if causal else seqlen_k, sequence, row))
    _, sequences, first_rows = zip(*sorted(tiles, reverse=True))
    return torch.tensor(sequences), torch.tensor(first_rows)
"""
    )
    outcome = check(find("varlen"), tmp_path)
    assert outcome.status == "done" and "45 tiles, where a padded grid has 128" in outcome.words


def test_what_a_kernel_prints_is_shown(tmp_path, capfd):
    outcome = attempt("kernel", tmp_path, ("    new_max = ", "    print('a tile')\n    new_max = "))
    assert outcome.status == "done", outcome.words
    assert "a tile\n" in capfd.readouterr().out


def test_the_command_begins_checks_and_marks(tmp_path, capsys):
    folder = str(tmp_path / "mine")
    assert cli.main(["learn", "combine", "--dir", folder]) == 0
    assert "flashtile learn combine" in capsys.readouterr().out
    assert cli.main(["learn", "combine", "--dir", folder]) == 3
    assert "not written yet" in capsys.readouterr().err
    shutil.copy(SOLUTIONS / "combine.py", folder)
    assert cli.main(["learn", "combine", "--dir", folder]) == 0
    assert cli.main(["learn", "--dir", folder]) == 0
    out = capsys.readouterr().out
    assert f"1 of {len(EXERCISES)} done" in out and "beginner" in out
    assert cli.main(["learn", "nothing", "--dir", folder]) == 2
    assert "softmax" in capsys.readouterr().err


def test_no_warning_where_numpy_is_not_installed(tmp_path):
    shutil.copy(SOLUTIONS / "forward.py", tmp_path)
    words = ["learn", "--dir", str(tmp_path)]
    code = f"import sys; sys.modules['numpy'] = None; from flashtile import cli; cli.main({words})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SOLUTIONS.parents[1])
    assert f"1 of {len(EXERCISES)} done" in run.stdout and run.stderr == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("interpret", ["0", "1"])
def test_a_kernel_without_numpy_is_not_wrong(interpret, tmp_path):
    shutil.copy(SOLUTIONS / "kernel.py", tmp_path)
    words = ["learn", "kernel", "--dir", str(tmp_path)]
    code = f"import sys; sys.modules['numpy'] = None; from flashtile import cli; sys.exit(cli.main({words}))"
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    more = {"capture_output": True, "text": True, "cwd": SOLUTIONS.parents[1], "env": environment}
    run = subprocess.run([sys.executable, "-c", code], **more)
    assert run.returncode == 6 and "pip install 'numpy<2.4'" in run.stderr


def test_begin_leaves_work_alone(tmp_path):
    (tmp_path / "softmax.py").write_text("mine")
    assert begin(find("softmax"), tmp_path).read_text() == "mine"


def test_counters_agree_with_arithmetic():
    """One head, 512 x 512, tiles of 64, head dim 64, bf16."""
    n, tile, dim = 512, 64, 64
    operands = Operands(*(torch.randn(1, n, 1, dim, dtype=torch.bfloat16) for _ in range(3)))
    problem = AttentionProblem.from_tensors(operands)
    one, steps, row = n * dim * 2, n // tile, n * 4
    # 64 KiB hold the tiles of two steps, not all of k and v
    counted = {m: count(m.forward, operands, problem, tile, tile, on_chip_bytes=64 * 1024)[0] for m in (fa1, fa2)}
    for counts in counted.values():
        assert counts.flops == problem.flops()
        assert counts.exps == n * n + n * steps
        assert counts.largest == tile * tile
    # k, v once; q, fp32 out and the state of each row once a tile of keys
    assert counted[fa1].read == 2 * one + steps * (one + 2 * one + 2 * row)
    assert counted[fa1].written == steps * (2 * one + 2 * row)
    # q once, k and v once a tile of queries; out and lse once
    assert counted[fa2].read == one + steps * 2 * one
    assert counted[fa2].written == one + row
    assert counted[fa2].pointwise < counted[fa1].pointwise
    unfused, _ = count(naive.forward, operands, problem, fused=False)
    assert unfused.flops == problem.flops() and unfused.largest >= n * n
    assert unfused.bytes > 10 * counted[fa2].bytes
