"""The import rule of the house: who may import whom, and what `import flashtile` costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flashtile"
# The folders of kernels. They share device, tiles, hardware and problem, never each other's code.
TIERS = {"portable", "hopper", "mla", "ladder", "cpu"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path, top_level_only=False):
    """Names of what a file imports: "a.b.c" of `import a.b.c`, of `from a.b import c`, and of import_module("a.b.c").

    top_level_only: what importing the file runs; without functions and `if TYPE_CHECKING`.
    """
    found = set()

    def visit(node):
        if top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if top_level_only and isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            found.update(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def within(name, *packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def part_of(module):
    """portable of flashtile.portable.forward; flashtile itself is ""."""
    return (module.split(".") + [""])[1]


def offenders(modules, forbidden, **options):
    found = ((module, name) for module in modules for name in sorted(imports(FILES[module], **options)))
    return [f"{module} imports {name}" for module, name in found if forbidden(name)]


def test_problem_and_tiles_import_neither_triton_nor_a_gpu():
    modules = [module for module in ("flashtile.problem", "flashtile.tiles") if module in FILES]
    assert modules
    assert not offenders(modules, lambda name: within(name, "triton", "torch.cuda"))


def test_device_imports_only_triton():
    """So its functions can be used in any kernel; the standard library is allowed."""
    modules = [module for module in FILES if part_of(module) == "device"]
    allowed = ("triton", "flashtile.device")
    assert not offenders(modules, lambda name: not within(name, *allowed) and name.split(".")[0] not in sys.stdlib_module_names)


def test_tiers_import_no_other_tier():
    for tier in TIERS:
        modules = [module for module in FILES if part_of(module) == tier]
        others = [f"flashtile.{other}" for other in TIERS - {tier}]
        assert not offenders(modules, lambda name, others=others: within(name, *others))


def test_tiers_know_nothing_above_them():
    above = [f"flashtile.{name}" for name in ("api", "ops", "dispatch", "bench", "cli", "compat")]
    modules = [module for module in FILES if part_of(module) in TIERS]
    assert not offenders(modules, lambda name: within(name, *above))


def test_dispatch_imports_tiers_lazily():
    tiers = [f"flashtile.{tier}" for tier in TIERS]
    assert not offenders(["flashtile.dispatch"], lambda name: within(name, "triton", *tiers), top_level_only=True)


@pytest.mark.parametrize("part", ["cli", "compat"])
def test_nothing_imports_cli_or_compat(part):
    """But themselves, `python -m flashtile`, and the package's lazy table: compat in a dict and under TYPE_CHECKING."""
    modules = [module for module in FILES if part_of(module) not in (part, "__main__")]
    assert not offenders(modules, lambda name: within(name, f"flashtile.{part}"), top_level_only=True)
    modules.remove("flashtile")
    assert not offenders(modules, lambda name: within(name, f"flashtile.{part}"))


def test_only_settings_reads_the_environment():
    readers = []
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
            if name in ("environ", "environb", "getenv", "putenv"):
                readers.append(module)
    assert set(readers) == {"flashtile.settings"}


def test_device_modules_do_not_postpone_annotations():
    """`from __future__ import annotations` breaks aggregates on Triton 3.6."""
    modules = [module for module in FILES if part_of(module) in TIERS | {"device"}]
    assert not offenders(modules, lambda name: name == "__future__.annotations")


def test_no_folder_shadows_a_package():
    """A script beside a folder called triton or cuda would import that folder."""
    folders = {path.name for path in ROOT.rglob("*") if path.is_dir() and not {".venv", ".git", ".ci"} & set(path.parts)}
    assert not folders & {"triton", "cuda", "torch"}


def imported_by(statement, *packages):
    """Which of the packages are loaded after a statement, in a fresh interpreter."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {statement}; print([p for p in {packages} if p in sys.modules])"
    return ast.literal_eval(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_package_import_is_free():
    assert imported_by("import flashtile", "torch", "triton", "numpy", "typer") == []


def test_errors_import_is_free():
    assert imported_by("from flashtile import ShapeError", "torch", "triton") == []


@pytest.mark.parametrize("statement", ["import flashtile.api", "from flashtile import attention, flash_attn_func"])
def test_api_import_leaves_triton_alone(statement):
    assert imported_by(statement, "triton") == []


def test_cpu_call_leaves_triton_alone():
    """On a machine without Triton the API works."""
    call = "import torch, flashtile; flashtile.attention(*torch.randn(3, 1, 4, 2, 8).unbind(0))"
    assert imported_by(call, "triton") == []


def test_names_that_docs_and_errors_give_need_no_import_of_their_own():
    names = ("integrations.sdpa.enable", "integrations.transformers.register", "compat.flash_attn.flash_attn_func",
             "compat.flash_attn_interface.flash_attn_func", "compat.flash_mla.flash_mla_with_kvcache",
             "reference.naive.attention", "reference.fa1", "reference.fa2", "reference.kvcache", "reference.mla")  # fmt: skip
    assert imported_by("; ".join(["import flashtile", *(f"flashtile.{name}" for name in names)]), "flashtile") == ["flashtile"]


def test_every_public_name_is_there():
    import flashtile

    for name in flashtile.__all__:
        assert getattr(flashtile, name) is not None
    assert set(flashtile.__all__) <= set(dir(flashtile))
    assert {"mla", "compat", "integrations", "reference"} <= set(dir(flashtile)) and flashtile.mla.mla_decode
    from flashtile import bench

    for module in (flashtile.mla, bench):
        assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'flash_atn'"):
        _ = flashtile.flash_atn
