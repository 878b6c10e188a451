"""Which partitions `device.partitions.specialize` makes of a kernel's list, without a compiler."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from flashtile.device.compat import gl
from flashtile.device.partitions import specialize


def running(*partitions):
    """[(function, arguments)] and [(warps, registers)] of the workers, as Triton gets them."""
    got = []
    semantic = SimpleNamespace(warp_specialize=lambda *arguments: got.extend(arguments))
    specialize(list(partitions), _semantic=semantic, _generator="generator")
    functions, num_warps, registers, generator = got
    assert generator == "generator"
    plain = [(function, [getattr(x, "value", x) for x in arguments]) for function, arguments in functions]
    return plain, list(zip(num_warps, registers))


def test_partitions_are_there_as_often_as_they_say():
    """Numbers go to those that are there more than once; a count of 0, or False, leaves one out."""
    functions, workers = running((gl.constexpr(False), "load", (1,), 4, None), (gl.constexpr(3), "compute", (1, 2), 4, 240),
                                 (0, "turn", (), 2, 40), (True, "load", (1,), gl.constexpr(1), 24))  # fmt: skip
    assert functions == [("compute", [1, 2, 0]), ("compute", [1, 2, 1]), ("compute", [1, 2, 2]), ("load", [1])]
    assert workers == [(4, 240), (4, 240), (1, 24)]


def test_the_first_that_is_there_runs_in_the_kernels_own_warps():
    functions, workers = running((1, "load", (7,), 4, 24), (2, "compute", (), 4, 240))
    assert functions == [("load", [7]), ("compute", [0]), ("compute", [1])] and workers == [(4, 240), (4, 240)]
