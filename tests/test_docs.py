"""The docs: their code runs, what they name exists, their tables are those of the records, and Sphinx has no warnings."""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer.main

from flashtile import cli
from flashtile.bench import peers
from flashtile.bench.cases import PRESETS
from flashtile.learn.exercises import EXERCISES, PATHS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.zh.md"]
# Its code needs packages that are not installed here, and it names functions of peers.
PEERS = DOCS / "compat.md"
# Of these only the names are checked: their code needs a GPU.
NAMING = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.S | re.M)
COMMENT = re.compile(r"<!--.*?-->", re.S)

# What pages name of others: of torch, Triton and Gluon, CUDA and its tools, FlashAttention and FlashMLA.
EXTERNAL_ROOTS = {"torch", "F", "tl", "gl", "triton", "mma", "cp", "sm__throughput", "sm__pipe_tensor_cycles_active",
                  "dram__throughput"}  # fmt: skip
EXTERNAL = {"scaled_dot_product_attention", "torch_cuda_arch_list", "max_jobs", "flash_mla_v1", "flash_mla_with_kvcache",
            "has_hopper_gpu", "max_memory_allocated", "pin_memory", "calculate_shared_memory", "block_size"}  # fmt: skip


def label(path):
    return str(path.relative_to(ROOT))


def fences(path):
    """(info string, body, line) of each fenced block."""
    text = path.read_text()
    return [(m["info"].strip(), m["body"], text.count("\n", 0, m.start()) + 2) for m in FENCE.finditer(text)]


def inline_code(path):
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", COMMENT.sub("", path.read_text())))


def with_python(pages):
    return [page for page in pages if page != PEERS and any(info == "python" for info, _, _ in fences(page))]


@pytest.mark.parametrize("page", with_python(PAGES), ids=label)
def test_code_blocks_run(page, monkeypatch, tmp_path):
    """All ```python blocks of a page in one namespace; a ```text block right after one is what it prints."""
    monkeypatch.chdir(tmp_path)
    # What a page prints must not depend on it: a reader has another. Blocks that do set one themselves.
    torch.manual_seed(1)
    namespace = {"__name__": "page"}
    blocks = fences(page)
    for (info, body, line), (next_info, expected, _) in zip(blocks, [*blocks[1:], ("", "", 0)]):
        if info != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Blank lines before it, so that a traceback has the page's own line
            exec(compile("\n" * (line - 1) + body, page, "exec"), namespace)
        if next_info == "text":
            assert printed.getvalue().strip() == expected.strip(), f"{label(page)}:{line}"


def commands(path):
    """(words, where) of each flashtile command line of a page: in bash blocks, and in inline code."""
    blocks = [body.replace("\\\n", " ") for info, body, _ in fences(path) if info == "bash"]
    lines = [line for block in blocks for line in block.splitlines()]
    for line in [*lines, *inline_code(path)]:
        for part in re.split(r"\||&&|;", line.split(" #")[0]):
            try:
                words = shlex.split(part)
            except ValueError:
                continue
            for i, word in enumerate(words):
                if word.rpartition("/")[2] == "flashtile" and (i == 0 or "=" in words[i - 1] or words[i - 1] in ("-c", "--")):
                    yield words[i + 1 :], line
                elif word.endswith("minimal_benchmark.py") and i and words[i - 1].startswith("python"):
                    yield ["run", *words[i + 1 :]], line


# What a user may define beside them: a preset in flashtile.toml
VALUES = {"--preset": {*PRESETS, "mine"}, "--backend": set(peers.BACKENDS)}


def unknown(words):
    """What of a command line does not exist, or None."""
    command = typer.main.get_command(cli.app)
    if words[:1] == ["COMMAND"]:
        return None
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    flags |= {"--help", "-h"}
    for flag, value in pairwise(words):
        strange = set(value.split(",")) - VALUES[flag] if flag in VALUES else set()
        if strange:
            return f"{flag}: no {', '.join(strange)}"
    return next((f"no flag {word}" for word in words if re.match(r"--?[a-z]", word) and word.split("=")[0] not in flags), None)


@pytest.mark.parametrize("page", NAMING, ids=label)
def test_commands_and_flags_exist(page):
    wrong = [f"{line}: {problem}" for words, line in commands(page) if (problem := unknown(list(words)))]
    assert not wrong


def test_the_test_of_commands_sees_what_does_not_exist():
    assert unknown(["rnu"]) == "no command rnu"
    assert unknown(["run", "--bach", "4"]) == "no flag --bach"
    assert unknown(["run", "--preset", "gpt2-smal"]) == "--preset: no gpt2-smal"
    assert unknown(["run", "--batch", "4", "--no-grad"]) is None


def identifiers():
    """Every identifier of the repository's sources, in lower case."""
    found = set()
    for folder in ("flashtile", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cu", ".cuh") and path != Path(__file__):
                found.update(re.findall(r"[A-Za-z_]\w*", path.read_text().lower()))
    return found


PATH = re.compile(r"[\w.*-]+(/[\w.*<>-]+)*(/|\.(py|md|json|cu|cuh|toml|txt|svg))")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(\(\))?")
BARE = re.compile(r"[A-Za-z_]*_\w*(\(\))?|[a-z]\w*\(\)")


def exists(path):
    written_by_users = path.startswith((".", "flashtile-exercises/")) or "/" not in path and not path.endswith((".py", ".md"))
    if "<" in path or written_by_users:
        return True
    return any(list(base.glob(path.rstrip("/"))) for base in (ROOT, ROOT / "flashtile", DOCS, ROOT / "benchmarks"))


def resolves(name):
    """Whether a dotted name is in flashtile: `flashtile.device.softmax.update`, without the first word, or of a tier."""
    parts = name.removesuffix("()").split(".")
    if parts[0] in EXTERNAL_ROOTS:
        return True
    for prefix in ((), ("flashtile",), ("flashtile", "portable")):
        words = [*prefix, *parts]
        for n in range(len(words), 0, -1):
            try:
                thing = importlib.import_module(".".join(words[:n]))
            except ImportError:
                continue
            for word in words[n:]:
                thing = getattr(thing, word, None) if thing is not None else None
            if thing is not None:
                return True
            break
    # an attribute of something a page talks about: `config.tile_m`, `problem.flops`
    return parts[0] in ("config", "problem", "q", "k", "v", "x", "state", "plan", "tier") and parts[-1] in KNOWN


KNOWN = identifiers()


@pytest.mark.parametrize("page", NAMING, ids=label)
def test_names_exist(page):
    """Files, dotted names, and identifiers in inline code; names of others are in EXTERNAL."""
    wrong = []
    for code in inline_code(page):
        if PATH.fullmatch(code) or code.endswith((".json", ".jsonl", ".csv", ".html")):
            wrong += [] if exists(code) else [f"{code}: no such file"]
        elif DOTTED.fullmatch(code):
            wrong += [] if resolves(code) else [f"{code}: no such name"]
        elif BARE.fullmatch(code) and page != PEERS:
            word = code.removesuffix("()").lower()
            wrong += [] if word in KNOWN or word in EXTERNAL else [f"{code}: no such identifier"]
    assert not wrong


def test_the_test_of_names_sees_what_does_not_exist():
    assert not exists("flashtile/nothing.py") and exists("flashtile/api.py") and exists("tests/")
    assert not resolves("device.softmax.updat") and resolves("device.softmax.update") and resolves("flashtile.attention")


def test_tables_and_plots_are_those_of_the_records():
    run = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_relative_links_of_the_chinese_readme():
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / "README.zh.md").read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_sphinx_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="pip install -e '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "doctrees", DOCS]
    run = subprocess.run([*command, tmp_path / "html"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_requirement_of_the_seeds_has_a_place():
    """docs/seeds.md names each id once or more: A1 to A73, B1 to B31, C1 to C46, D1 to D12, E1 to E27."""
    named = set()
    for line in (DOCS / "seeds.md").read_text().splitlines():
        for letter, first, last in re.findall(r"\b([A-E])(\d+)(?:–[A-E](\d+))?", line.split("|")[1] if "|" in line else ""):
            named.update(f"{letter}{i}" for i in range(int(first), int(last or first) + 1))
    wanted = {f"{letter}{i}" for letter, last in zip("ABCDE", (73, 31, 46, 12, 27)) for i in range(1, last + 1)}
    assert named == wanted


def test_pages_agree_with_the_learn_command():
    """Reading paths, and exercises with their levels, are the same there and here."""
    start, exercises = (DOCS / "index.md").read_text(), (DOCS / "exercises.md").read_text()
    for name, (purpose, parts) in PATHS.items():
        assert f"| {name} | {purpose} | {parts} |" in start
    for exercise in EXERCISES.values():
        assert f"| {exercise.level} | `{exercise.name}` |" in exercises
        part = next(DOCS.glob(f"guide/{exercise.part}-*.md"))
        assert f"flashtile learn {exercise.name}" in part.read_text()
