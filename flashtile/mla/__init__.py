"""Multi-head latent attention, decode: all query heads read one latent head of 512 + 64 numbers a token, see `mla_decode`.

    file         what
    api          mla_decode, make_schedule
    problem      MlaProblem: the validator; FLOPs and bytes
    cache        the fp8 layout of 656 bytes a token
    ops          the torch ops
    plan         which tier runs a problem
    schedule     even parts of all caches together, computed on the device
    portable     the Triton kernel, and the one that merges partial results
    hopper       the Gluon kernel
    cpu          CPU tensors

Prefill of MLA models is `flashtile.attention` itself, with head_dim 192 and head_dim_v 128.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

_PUBLIC = {
    "Schedule": "flashtile.mla.api",
    "make_schedule": "flashtile.mla.api",
    "mla_decode": "flashtile.mla.api",
    "pack_fp8": "flashtile.mla.cache",
    "unpack_fp8": "flashtile.mla.cache",
}

__all__ = ["Schedule", "make_schedule", "mla_decode", "pack_fp8", "unpack_fp8"]

if TYPE_CHECKING:
    from flashtile.mla.api import Schedule, make_schedule, mla_decode
    from flashtile.mla.cache import pack_fp8, unpack_fp8


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flashtile.mla' has no attribute {name!r}")
    value = getattr(_import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
