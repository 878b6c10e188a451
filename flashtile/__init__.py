"""flashtile: exact attention for PyTorch that never stores the scores.

Names are imported on first use, so that `import flashtile` costs nothing: no torch, no triton, no GPU.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {
    "attention": "flashtile.api",
    "attention_varlen": "flashtile.api",
    "attention_with_kvcache": "flashtile.api",
    "combine": "flashtile.api",
    "flash_attn_func": "flashtile.compat.flash_attn",
    "flash_attn_kvpacked_func": "flashtile.compat.flash_attn",
    "flash_attn_qkvpacked_func": "flashtile.compat.flash_attn",
    "flash_attn_varlen_func": "flashtile.compat.flash_attn",
    "flash_attn_varlen_kvpacked_func": "flashtile.compat.flash_attn",
    "flash_attn_varlen_qkvpacked_func": "flashtile.compat.flash_attn",
    "flash_attn_with_kvcache": "flashtile.compat.flash_attn",
    "FlashtileError": "flashtile.errors",
    "ShapeError": "flashtile.errors",
    "DtypeError": "flashtile.errors",
    "DeviceError": "flashtile.errors",
    "ValueRangeError": "flashtile.errors",
    "UnsupportedError": "flashtile.errors",
}

# Subpackages that are there without an import of their own
_MODULES = ("compat", "integrations", "mla", "reference")

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from flashtile import compat, integrations, mla, reference
    from flashtile.api import attention, attention_varlen, attention_with_kvcache, combine
    from flashtile.compat.flash_attn import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from flashtile.errors import DeviceError, DtypeError, FlashtileError, ShapeError, UnsupportedError, ValueRangeError


def __getattr__(name):
    if name in _MODULES:
        return _import_module(f"flashtile.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flashtile' has no attribute {name!r}")
    value = getattr(_import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*__all__, *_MODULES])
