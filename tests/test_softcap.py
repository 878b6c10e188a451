"""The polynomials that stand for a softcap in the Hopper forward kernel, against tanh."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.parametrize(
    "softcap, scale", [(50.0, 128**-0.5), (50.0, 0.125), (1.0, 0.1), (30.0, -0.07), (0.001, 100.0), (5e3, 0.1)]
)
def test_polynomials(softcap, scale):
    from flashtile.device import scores

    cap = scores.cap_of(SimpleNamespace(softcap=softcap, softmax_scale=scale), softcap)
    tanh = torch.linspace(-0.599, 0.599, 4000, dtype=torch.float64)
    x = torch.atanh(tanh * 0.99) / (scale / softcap)
    x = x[(x * scale / softcap).abs() < 0.599]
    want = softcap * torch.tanh(x * scale / softcap)
    v = x.float() * x.float() + cap.shift
    exponents = v.view(torch.int32) & 0x7F800000
    near = (x * scale / softcap).abs() < 0.1149
    assert (exponents[near] == cap.exponent).all() and (exponents >= cap.exponent).all()
    assert (exponents[(x * scale / softcap).abs() > 0.1151] > cap.exponent).all() and (v <= cap.limit).all()
    v = v.double()
    wide = cap.wide0 + v * (cap.wide1 + v * (cap.wide2 + v * cap.wide3))
    for got, where in ((x * (cap.term0 + cap.term1 * v), near), (x * (cap.term0 + cap.term1 * wide), slice(None))):
        torch.testing.assert_close(got[where], want[where], rtol=3.5e-6, atol=0)
    assert cap.back * cap.term0 == pytest.approx(softcap)


def test_numbers_out_of_range():
    from flashtile.device import scores

    for softcap, scale in ((0.0, 1.0), (50.0, 0.0), (50.0, 1e-9), (1e-9, 1.0)):
        assert scores.cap_of(SimpleNamespace(softcap=softcap, softmax_scale=scale), 1.0) is None
