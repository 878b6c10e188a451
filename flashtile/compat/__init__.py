"""The peers' names, signatures and conventions, each a thin module over flashtile.api.

    flashtile.compat.flash_attn              FlashAttention 2: the package, with bert_padding and layers.rotary
    flashtile.compat.flash_attn_interface    FlashAttention 3
    flashtile.compat.flash_mla               FlashMLA

`install()` makes `import flash_attn` and `import flash_attn_interface` find them, for programs that one can't change.
"""

import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pkgutil import extend_path

from flashtile import lazy
from flashtile.errors import UnsupportedError, explain

__all__ = ["flash_attn", "flash_attn_interface", "flash_mla", "install", "uninstall"]

# What a program imports, and which modules answer
INSTALLED = {
    "flash_attn": (
        "", ".flash_attn_interface", ".bert_padding", ".layers", ".layers.rotary", ".ops", ".ops.triton", ".ops.triton.rotary",
    ),
    "flash_attn_interface": ("",),
}  # fmt: skip


__getattr__ = lazy.modules(__name__, "flash_attn", "flash_attn_interface", "flash_mla")


def install(names: str | tuple[str, ...] = tuple(INSTALLED)) -> None:
    """Let `import flash_attn` and `import flash_attn_interface` in this process find flashtile's.

    Call it before the program imports them. Programs that ask which distribution is installed (transformers does) still find
    none: for them there is the distribution in shim/, or `flashtile.integrations.transformers.register()`. FlashAttention 4's
    flash_attn.cute stays importable beside it.

    Args:
        names: which of the two, or one of them.
    Raises:
        UnsupportedError: a real package of that name is installed, or was imported already.
    """
    names = (names,) if isinstance(names, str) else names
    for name in names:
        if name not in INSTALLED:
            raise UnsupportedError(explain("install", " or ".join(INSTALLED), repr(name)))
        location = _real_package(name)
        if location is not None:
            way_out = f"Uninstall it, or import flashtile.compat.{name} by its own name."
            raise UnsupportedError(explain(name, "no other package of that name", location, way_out))
    for name in names:
        answer_to(name)


def answer_to(name):
    """`import <name>` finds flashtile's module in this process, whatever is installed; what `install` and shim/ share."""
    for suffix in INSTALLED[name]:
        # flash_attn.ops says why the folder is called otherwise
        sys.modules[name + suffix] = import_module(f"{__name__}.{name}{suffix.replace('.triton', '.triton_')}")
    module = sys.modules[name]
    if hasattr(module, "__path__"):
        # Other distributions put packages of theirs beside
        module.__path__ = extend_path(module.__path__, name)


def uninstall() -> None:
    """Take the names away again; modules that imported them keep what they have."""
    for name, suffixes in INSTALLED.items():
        for suffix in suffixes:
            if getattr(sys.modules.get(name + suffix), "__name__", "").startswith(__name__):
                del sys.modules[name + suffix]


def _has_shim():
    """Whether the distribution flash-attn is that of shim/."""
    try:
        return metadata.version("flash-attn").endswith("+flashtile")
    except metadata.PackageNotFoundError:
        return False


def _real_package(name):
    """Where a package of that name which is not flashtile's lies, or None."""
    module = sys.modules.get(name)
    if module is not None:
        return None if module.__name__.startswith(__name__) else f"{getattr(module, '__file__', name)}, imported already"
    if name == "flash_attn" and _has_shim():
        return None
    spec = find_spec(name)
    # A folder without __init__.py has no loader: a part of a package, such as flash_attn.cute
    return None if spec is None or spec.origin is None else spec.origin
