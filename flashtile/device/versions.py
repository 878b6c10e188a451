"""Triton's version, and those whose Gluon this package knows: `compat` and `launcher` do.

CI compiles with all of them. Records under benchmarks/results are of 3.6.
"""

import logging
from functools import cache
from importlib.util import find_spec

logger = logging.getLogger("flashtile")

OLDEST, NEWEST = (3, 6), (3, 9)


@cache
def triton_version() -> tuple[int, int] | None:
    """(major, minor), or None without Triton."""
    if find_spec("triton") is None:
        return None
    import triton

    return tuple(int(number) for number in triton.__version__.split(".")[:2])


@cache
def unknown() -> str | None:
    """A sentence where Triton is newer than what this package knows, and a warning the first time; else None.

    Gluon's names change from version to version: 3.9 has removed three that 3.8 had.
    """
    version = triton_version()
    if version is None or version <= NEWEST:
        return None
    known = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
    reason = f"knows Gluon of Triton {known}, this is {version[0]}.{version[1]}; FLASHTILE_TIER=hopper tries it"
    logger.warning("the Hopper kernels are not used: flashtile %s. A newer flashtile may know it.", reason)
    return reason
