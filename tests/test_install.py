"""flashtile under the names flash_attn and flash_attn_interface: in a process, and as a distribution."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashtile import UnsupportedError, compat

ROOT = Path(__file__).parent.parent


def run(code, *paths):
    """What code prints in a process of its own, with folders in front of the path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, paths), str(ROOT)])}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_nothing_is_installed_by_import():
    code = "import flashtile.compat.flash_attn, sys; print([name for name in sys.modules if name.startswith('flash_attn')])"
    assert run(code) == "[]"


def test_install_answers_for_every_module():
    code = """
import flashtile.compat
flashtile.compat.install()
import flash_attn, flash_attn_interface
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import _flash_attn_forward, _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb, rotate_half
from flash_attn.ops.triton.rotary import apply_rotary
import flash_attn.ops.triton.rotary
assert flash_attn.ops.triton.rotary.apply_rotary is apply_rotary
from flashtile.compat import flash_attn as ours
assert flash_attn is ours and flash_attn_func is ours.flash_attn_func and flash_attn.__version__
assert flash_attn_interface.flash_attn_func is not flash_attn_func
flashtile.compat.install()
flashtile.compat.uninstall()
import importlib.util
print(importlib.util.find_spec("flash_attn"))
"""
    assert run(code) == "None"


@pytest.mark.parametrize("imported", [False, True])
def test_install_refuses_where_a_real_package_is(tmp_path, imported):
    """And then answers for neither name."""
    (tmp_path / "flash_attn_interface.py").write_text("")
    code = f"""
import sys
import flashtile.compat
{"import flash_attn_interface" if imported else ""}
try:
    flashtile.compat.install()
except flashtile.UnsupportedError as error:
    print(error)
assert "flash_attn" not in sys.modules
flashtile.compat.install(["flash_attn"])
"""
    message = run(code, tmp_path)
    assert message.startswith("flash_attn_interface: expected no other package of that name, got ")
    assert str(tmp_path) in message and "Uninstall it, or import flashtile.compat.flash_attn_interface" in message


def test_install_knows_two_names():
    with pytest.raises(UnsupportedError, match="install: expected flash_attn or flash_attn_interface, got 'xformers'"):
        compat.install(["xformers"])


def test_install_takes_one_name():
    code = "import flashtile.compat, sys; flashtile.compat.install('flash_attn'); import flash_attn; print(flash_attn.__name__)"
    assert run(code) == "flashtile.compat.flash_attn"
    with pytest.raises(UnsupportedError, match="install: expected flash_attn or flash_attn_interface, got 'xformers'"):
        compat.install("xformers")


def test_parts_of_other_distributions_stay(tmp_path):
    """flash_attn.cute comes without an __init__.py of flash_attn."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("number = 4")
    code = "import flashtile.compat; flashtile.compat.install(); from flash_attn import cute; print(cute.number)"
    assert run(code, tmp_path) == "4"


@pytest.mark.slow
def test_shim_is_the_distribution_flash_attn(tmp_path):
    """Programs that ask importlib.metadata who brings flash_attn hear flash-attn, of a version that is new enough."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, ROOT / "shim"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert process.returncode == 0, process.stderr
    code = """
import importlib.metadata as metadata
import flashtile.compat
flashtile.compat.install()
flashtile.compat.uninstall()
import flash_attn.bert_padding
from flash_attn import flash_attn_func
from flashtile.compat import flash_attn
assert flash_attn_func is flash_attn.flash_attn_func
print(metadata.packages_distributions()["flash_attn"], metadata.version("flash-attn"))
"""
    assert run(code, tmp_path) == "['flash-attn'] 2.8.3+flashtile"
