"""Memory for results."""

from types import SimpleNamespace

import pytest
import torch

from flashtile import outputs
from flashtile.outputs import fresh


@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 5), (3, 0, 2), (7,)])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_fresh_memory_is_contiguous(shape, dtype):
    like = torch.ones(2, dtype=torch.bfloat16)
    for zeros in (False, True):
        x = fresh(shape, dtype, zeros)(like)
        assert x.shape == shape and x.is_contiguous() and x.dtype == (dtype or torch.bfloat16)
        assert x.stride() == torch.empty(shape).stride()
    assert not x.any()


def test_memory_of_a_gpu_comes_the_short_way(monkeypatch):
    asked = []
    like = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, new_empty_strided=lambda *a, **k: "the long way")
    monkeypatch.setattr(outputs, "empty_on_gpu", lambda *a: asked.append(a))
    fresh((2, 3))(like)
    fresh((2, 3), torch.int32)(like)
    assert asked == [((2, 3), (3, 1), torch.bfloat16), ((2, 3), (3, 1), torch.int32)]
    monkeypatch.setattr(outputs, "empty_on_gpu", None)
    assert fresh((2, 3))(like) == "the long way"
