"""The environment variables of flashtile; no other module reads os.environ.

FLASHTILE_DEBUG=1    also check the values of index tensors (cu_seqlens, seqused, cache lengths, block tables); this waits for
                    the device in every call.
FLASHTILE_TIER=names use the first of these tiers that takes a call, or fail with their refusals: hopper,portable for example;
                    names are those of TIERS.
TRITON_INTERPRET=1   Triton's own: kernels run in its interpreter. With FLASHTILE_TIER=portable, CPU tensors go there.
"""

import os
from functools import lru_cache

from flashtile.errors import UnsupportedError, explain

# Of dispatch and mla.plan, which know where they are
TIERS = ("hopper", "portable", "sdpa", "reference")
# What CPython's os.environ keeps its variables in, asked in each call: os.environ itself takes 1 us to say that one is not set.
_VARIABLES = getattr(os.environ, "_data", os.environ)
_DEBUG, _TIER = map(getattr(os.environ, "encodekey", str), ("FLASHTILE_DEBUG", "FLASHTILE_TIER"))


def debug() -> bool:
    return _DEBUG in _VARIABLES and os.environ["FLASHTILE_DEBUG"] not in ("", "0")


def preferred_tiers() -> tuple[str, ...]:
    return _tiers_of(os.environ["FLASHTILE_TIER"]) if _TIER in _VARIABLES else ()


@lru_cache
def _tiers_of(names) -> tuple[str, ...]:
    tiers = tuple(name.strip() for name in names.split(",")) if names else ()
    for name in tiers:
        if name not in TIERS:
            raise UnsupportedError(explain("FLASHTILE_TIER", f"some of {', '.join(TIERS)}", repr(name)))
    return tiers


def triton_interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def recorded(prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables whose names start so, for a benchmark's record."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
