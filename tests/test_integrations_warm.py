"""Compiling ahead, what a long first call says, and launching again without Triton's look at the arguments."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flashtile
from flashtile import dispatch
from flashtile.device.launch import MAX_REMEMBERED, Remembered
from flashtile.ops import _Call, _key
from flashtile.problem import AttentionProblem, Operands


def function_that_takes(seconds):
    def function(operands):
        time.sleep(seconds)
        return "result"

    return function


PROBLEM = AttentionProblem(2, 16, 16, 4, 2, 64, 64, torch.bfloat16)


@pytest.mark.parametrize(("seconds", "is_cuda", "lines"), [(1.3, True, 1), (0.0, True, 0), (1.3, False, 0)])
def test_a_long_first_call_says_what_it_compiles(seconds, is_cuda, lines, caplog):
    operands = SimpleNamespace(q=SimpleNamespace(is_cuda=is_cuda))
    plan, function = dispatch.Plan("portable", {}), function_that_takes(seconds)
    with caplog.at_level(logging.WARNING, "flashtile"):
        assert plan.first("forward", PROBLEM, function, operands) == "result"
    assert len(caplog.messages) == lines
    if lines:
        assert caplog.messages[0].startswith("compiling the portable forward kernels for bfloat16, head dim 64. Triton keeps")
        assert plan.first("forward", PROBLEM, function, operands) == "result" and len(caplog.messages) == 1


def test_calls_of_one_kind_have_one_key():
    """Strides, alignment, dtypes of index tensors and options tell calls apart; not the data."""
    options = (None, None, True, (None, None), None, 0.0, 0.0, False, False)

    def key(q, k, v, options=options, **more):
        return _key(Operands(q, k, v, **more), options)

    x = torch.randn(3, 2, 8, 4, 16)
    same = key(*x)
    assert same == key(*torch.randn(3, 2, 8, 4, 16)) and hash(same) == hash(key(*x))
    strided = torch.randn(2, 4, 8, 16).transpose(1, 2)
    shifted = torch.randn(2 * 8 * 4 * 16 + 1)[1:].view(2, 8, 4, 16)
    slopes = torch.ones(2, 4)
    keys = [
        same, key(strided, *x[1:]), key(x[0], strided, x[2]), key(shifted, *x[1:]), key(x[0], x[1], shifted),
        key(*x, alibi_slopes=slopes), key(*x, alibi_slopes=slopes[0]), key(*x, sinks=slopes[0]),
        key(*x, alibi_slopes=torch.ones(9)[1:].view(2, 4)), key(*x.half()), key(*x, sinks=torch.zeros(4).half()),
        key(*x, options=(*options[:-1], True)), key(*x, options=(*options[:2], False, *options[3:])),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


class OnGpu(torch.Tensor):
    def get_device(self):
        return 0


def test_backward_calls_of_one_kind_have_one_key():
    """Hooks on saved tensors may give them back laid out in another way, in another dtype, or on another device."""
    x = torch.randn(2, 8, 4, 16)
    operands, lse = Operands(x, x, x, sinks=torch.zeros(4)), torch.zeros(2, 4, 8)
    call = _Call(PROBLEM, (), operands)

    def key(q=x, out=x, lse=lse, dout=x, dlse=None, **more):
        return call.backward_key(operands._replace(q=q, **more), out, lse, dout, dlse)

    assert key() == key(*(y.clone() for y in (x, x, lse, x)), v=x.clone()) and hash(key()) == hash(key())
    strided, shifted = x.transpose(1, 2).contiguous().transpose(1, 2), torch.randn(x.numel() + 1)[1:].view(x.shape)
    others = strided, shifted, x.half(), x.as_subclass(OnGpu)
    keys = [key(), *(key(**{name: y}) for name in ("q", "k", "v", "out", "dout") for y in others)]
    keys += [key(lse=lse.double()), key(lse=lse.as_subclass(OnGpu)), key(lse=lse.transpose(1, 2).contiguous().transpose(1, 2)),
             key(dlse=lse), key(dlse=lse[:1].expand(2, -1, -1)), key(sinks=torch.zeros(4).half()),
             key(sinks=torch.zeros(8)[::2])]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_a_known_call_is_not_checked_again(monkeypatch):
    x = torch.randn(3, 2, 8, 4, 16)
    flashtile.attention(*x, causal=True)
    monkeypatch.setattr(AttentionProblem, "from_tensors", lambda *_, **__: pytest.fail("checked"))
    flashtile.attention(*x.clone(), causal=True)
    with pytest.raises(pytest.fail.Exception):
        flashtile.attention(*x, causal=True, softcap=3.0)
    with pytest.raises(flashtile.DtypeError, match="q: expected a torch.Tensor"):
        flashtile.attention(None, *x[1:], causal=True)


def test_remembered_forgets_all_when_full():
    known = Remembered()
    for i in range(MAX_REMEMBERED + 1):
        known[i] = i
    assert dict(known) == {MAX_REMEMBERED: MAX_REMEMBERED}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_warm_needs_a_gpu():
    process = subprocess.run([sys.executable, "-m", "flashtile", "warm"], capture_output=True, text=True, timeout=100)
    assert process.returncode == 6 and "warm: no CUDA device here" in process.stderr


def warm(cache, *more):
    """The compiled kernels in a cache after `flashtile warm` of one case."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    words = "-m flashtile warm --batch 1 --seqlen 256 --nheads 2 --headdim 40 --causal".split()
    process = subprocess.run([sys.executable, *words, *more], env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    assert "b1 s256 h2 d40 causal bf16" in process.stdout and cache.name in process.stdout
    return sorted(cache.rglob("*.cubin"))


@pytest.mark.gpu
def test_warm_fills_the_cache(tmp_path):
    """A later process compiles nothing."""
    kernels = warm(tmp_path)
    assert kernels and warm(tmp_path) == kernels


@pytest.mark.slow
def test_warm_for_a_gpu_that_is_not_here(tmp_path):
    pytest.importorskip("triton")
    kernels = warm(tmp_path, "--target", "A100")
    assert {"attention_forward", "attention_delta", "attention_dkdv", "attention_dq"} == {path.stem for path in kernels}
    assert warm(tmp_path, "--target", "A100", "--forward-only") == kernels


@pytest.mark.gpu
def test_the_gpu_finds_what_was_compiled_without_it(tmp_path):
    kernels = warm(tmp_path, "--target", torch.cuda.get_device_name())
    assert kernels and warm(tmp_path) == kernels


@pytest.mark.gpu
def test_repeated_calls_are_right_when_layouts_change():
    """The same shapes with other strides, alignments and data, one after the other and back again."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(layout):
        if layout == "shifted":
            # begins 2 bytes after a multiple of 16
            parts = [torch.randn(40961, generator=generator, device="cuda").bfloat16()[1:].view(2, 80, 4, 64) for _ in range(3)]
        else:
            shape = {"plain": (3, 2, 80, 4, 64), "heads first": (3, 2, 4, 80, 64), "wide": (3, 2, 80, 4, 128)}[layout]
            x = torch.randn(shape, generator=generator, device="cuda").bfloat16()
            x = x.transpose(2, 3) if layout == "heads first" else x
            parts = x[..., :64].unbind(0)
        return [part.detach().requires_grad_() for part in parts]

    for layout in ("plain", "plain", "heads first", "wide", "shifted", "plain", "heads first", "wide", "shifted"):
        inputs = draw(layout)
        out = flashtile.attention(*inputs, causal=True)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in wide), is_causal=True)
        expected = expected.transpose(1, 2)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=1e-2)
        for got, want in zip(torch.autograd.grad(out, inputs, out), torch.autograd.grad(expected, wide, out.double())):
            torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=3e-2)
