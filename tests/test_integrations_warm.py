"""Compiling ahead, what a long first call says, and launching again without Triton's look at the arguments."""

import logging
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import flashtile
from flashtile import dispatch
from flashtile.device.launch import MAX_REMEMBERED, Relaunch, Remembered, first_launch
from flashtile.portable.arguments import launch_key
from flashtile.problem import AttentionProblem, Operands


def plan_that_takes(seconds):
    def run_forward(problem, configs, operands):
        time.sleep(seconds)
        return "result"

    return dispatch.Plan("portable", {}, module=SimpleNamespace(run_forward=run_forward))


PROBLEM = AttentionProblem(2, 16, 16, 4, 2, 64, 64, torch.bfloat16)


@pytest.mark.parametrize(("seconds", "is_cuda", "lines"), [(1.3, True, 1), (0.0, True, 0), (1.3, False, 0)])
def test_a_long_first_call_says_what_it_compiles(seconds, is_cuda, lines, caplog):
    operands = SimpleNamespace(q=SimpleNamespace(is_cuda=is_cuda))
    plan = plan_that_takes(seconds)
    with caplog.at_level(logging.WARNING, "flashtile"):
        assert plan.run("forward", PROBLEM, operands) == "result"
    assert len(caplog.messages) == lines
    if lines:
        assert caplog.messages[0].startswith("compiling the portable forward kernels for bfloat16, head dim 64. Triton keeps")
        assert plan.run("forward", PROBLEM, operands) == "result" and len(caplog.messages) == 1


class Group(NamedTuple):
    tensor: object
    stride: int
    inner: object


class Compiled:
    """Stands for Triton's compiled kernel: keeps what it is launched with."""

    def __getitem__(self, grid):
        self.grid, self.launches = grid, []
        return lambda *arguments: self.launches.append(arguments)


def test_relaunch_exchanges_addresses_alone():
    first, second = torch.zeros(4), torch.zeros(4)
    compiled = Compiled()
    relaunch = Relaunch(compiled, (3, 1, 1), (Group(first, 7, (second, None)), 0.5, None, (), second, 64))
    x, y, z = (torch.zeros(4) for _ in range(3))
    relaunch(x, y, z)
    assert compiled.grid == (3, 1, 1)
    assert compiled.launches == [((x.data_ptr(), 7, (y.data_ptr(), None)), 0.5, None, (), z.data_ptr(), 64)]
    import weakref

    gone = weakref.ref(first)
    del first
    assert gone() is None


def test_a_kernel_is_prepared_when_it_is_launched_again():
    """Not the first time, which may be the only one; and never where nothing was compiled for a GPU. Constexprs come last."""
    compiled = Compiled()
    kernel = {(2, 1, 1): lambda *arguments, **named: compiled}

    class Kernel(dict):
        arg_names = ["x", "TILE", "DIM"]

    kernel, x = Kernel(kernel), torch.zeros(4)
    launch = partial(first_launch, kernel, (2, 1, 1), (x,), {"DIM": 64, "TILE": 16}, 4, 2)
    assert launch(again=False) is None
    assert launch(again=True) is None
    compiled.function = 1
    launch(again=True)(x)
    assert compiled.launches == [(x.data_ptr(), 16, 64)]


def test_launch_key_tells_apart_what_kernels_are_compiled_for():
    """Strides, alignment, dtypes of index tensors and options; not the data."""

    def key(q, k, v, *others, **more):
        operands = Operands(q, k, v, **more)
        return launch_key(AttentionProblem.from_tensors(operands, causal=True), operands, *others)

    x = torch.randn(3, 2, 8, 4, 16)
    same = key(*x)
    assert same == key(*torch.randn(3, 2, 8, 4, 16)) and hash(same) == hash(key(*x))
    strided = torch.randn(2, 4, 8, 16).transpose(1, 2)
    shifted = torch.randn(2 * 8 * 4 * 16 + 1)[1:].view(2, 8, 4, 16)
    slopes = torch.ones(2, 4)
    keys = [
        same, key(strided, *x[1:]), key(x[0], strided, x[2]), key(shifted, *x[1:]), key(x[0], x[1], shifted),
        key(*x, x[0]), key(*x, None), key(*x, shifted), key(*x, alibi_slopes=slopes), key(*x, alibi_slopes=slopes[0]),
        key(*x, alibi_slopes=torch.ones(3, 4)[1:]), key(*x, alibi_slopes=torch.ones(9)[1:].view(2, 4)),
        key(*x.half()), key(*x, sinks=torch.zeros(4)), key(*x, sinks=torch.zeros(4).half()),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys) - 1, "only slopes that begin at another row are the same to a kernel"


def test_remembered_forgets_all_when_full():
    known = Remembered()
    for i in range(MAX_REMEMBERED + 1):
        known[i] = i
    assert dict(known) == {MAX_REMEMBERED: MAX_REMEMBERED}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_warm_needs_a_gpu():
    process = subprocess.run([sys.executable, "-m", "flashtile", "warm"], capture_output=True, text=True, timeout=100)
    assert process.returncode == 6 and "warm: no CUDA device here" in process.stderr


@pytest.mark.gpu
def test_warm_fills_the_cache(tmp_path):
    """A later process compiles nothing: its first call takes less than a second where the first process took more."""
    import os

    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    words = "-m flashtile warm --batch 1 --seqlen 256 --nheads 2 --headdim 40 --causal".split()
    process = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    assert "b1 s256 h2 d40 causal bf16" in process.stdout and str(tmp_path) in process.stdout
    before = sorted(tmp_path.rglob("*.cubin"))
    assert before
    process = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0 and sorted(tmp_path.rglob("*.cubin")) == before


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
