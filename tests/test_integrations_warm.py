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
from flashtile.calls import MAX_GLANCES, Calls, Glance, kind
from flashtile.device.launch import MAX_REMEMBERED, Remembered
from flashtile.ops import _Call
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


def calls_of_other_kinds():
    """(tensors, options) of a call, of the same again, and of calls that differ from it in one thing each."""
    options = (None, None, True, (None, None), None, 0.0, 0.0, False, False)
    q, k, v = torch.randn(3, 2, 8, 4, 16)
    slopes = torch.ones(2, 4)
    shifted = torch.randn(q.numel() + 1)[1:].view(q.shape)
    tensors = [
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, v), (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
        (shifted, k, v), (q, k, shifted), (q.half(), k.half(), v.half()), (q[:, :4], k, v), (q.as_subclass(OnGpu), k, v),
    ]  # fmt: skip
    more = [{"alibi_slopes": slopes}, {"alibi_slopes": slopes[0]}, {"sinks": slopes[0]}, {"sinks": torch.zeros(4).half()},
            {"alibi_slopes": torch.ones(9)[1:].view(2, 4)}]  # fmt: skip
    others = [(Operands(*x), options) for x in tensors] + [(Operands(q, k, v, **x), options) for x in more]
    others += [(Operands(q, k, v), (*options[:-1], True)), (Operands(q, k, v), (*options[:2], False, *options[3:]))]
    return (Operands(q, k, v), options), (Operands(*torch.randn(3, 2, 8, 4, 16)), options), others


def test_calls_of_one_kind_have_one_key():
    """Strides, alignment, dtypes of index tensors and options tell calls apart; not the data."""
    call, again, others = calls_of_other_kinds()
    assert kind(*call) == kind(*again) and hash(kind(*call)) == hash(kind(*again))
    assert len({kind(*call), *(kind(*other) for other in others)}) == 1 + len(others)


def test_a_call_is_found_by_its_kind_alone(monkeypatch):
    """At a glance from the second time on; where torch has no guards by its kind."""
    call, again, others = calls_of_other_kinds()
    for guards in (Calls(), Calls()):
        guards.keep(*call, "prepared")
        for _ in range(3):
            assert guards.find(*again) == "prepared"
            assert [guards.find(*other) for other in others] == [None] * len(others)
        for i, other in enumerate(others):
            guards.keep(*other, i)
        for _ in range(3):
            assert [guards.find(*other) for other in others] == list(range(len(others)))
        assert guards.find(*call) == "prepared" and all(len(latest) <= MAX_GLANCES for latest in guards.latest.values())
        monkeypatch.setattr("flashtile.calls.TensorGuards", None)
    assert not guards.latest


def test_the_tiers_of_the_environment_are_part_of_a_kind(monkeypatch):
    (tensors, options), *_ = calls_of_other_kinds()
    calls = Calls()
    calls.keep(tensors, options, "any")
    monkeypatch.setenv("FLASHTILE_TIER", "reference")
    assert calls.find(tensors, options) is None


def test_a_glance_takes_no_look_at_the_kind(monkeypatch):
    """At tensors that require gradients and at others, in turn."""
    call, again, _ = calls_of_other_kinds()
    leaves = again[0]._replace(q=again[0].q.clone().requires_grad_()), again[1]
    calls = Calls()
    calls.keep(*call, "prepared")
    assert calls.find(*again) == calls.find(*leaves) == "prepared"
    monkeypatch.setattr("flashtile.calls.kind", lambda *_: pytest.fail("described"))
    assert calls.find(*call) == calls.find(*leaves) == "prepared"


def test_options_without_a_hash_are_not_kept():
    (tensors, options), *_ = calls_of_other_kinds()
    options = (*options[:3], [None, None], *options[4:])
    calls = Calls()
    calls.keep(tensors, options, "prepared")
    assert calls.find(tensors, options) is None


def test_no_glance_at_what_has_none():
    """One tensor alone; one that is not aligned; none absent, none present."""
    x = torch.randn(2, 8, 4, 16)
    assert Glance.possible((x, x.clone(), None)) and not Glance.possible((x, x, None))
    assert not Glance.possible((x, x.view(-1)[1:], None)) and not Glance.possible((x, x.clone()))


def test_a_glance_at_one_tensor_in_two_places_knows_two_there():
    """As cu_seqlens stands for queries and for keys."""
    x, starts = torch.randn(2, 8, 4, 16), torch.arange(4)
    one, two = (x, None, starts, starts), (x, None, starts, starts.clone())
    again = x.clone(), None, *[starts.clone()] * 2
    assert Glance(one).fits(one) and Glance(one).fits(again) and not Glance(one).fits(two)
    assert Glance(two).fits(two) and not Glance(two).fits(one)


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
    label = "b1 sq1 sk256 h2 d40 causal" if "decode" in more else "b1 s256 h2 d40 causal bf16"
    assert label in process.stdout and cache.name in process.stdout
    assert ("pages of 16" in process.stdout) == ("--page-size" in more)
    return sorted(cache.rglob("*.cubin"))


DECODE = "--mode", "decode"


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), DECODE, (*DECODE, "--page-size", "16")])
def test_warm_fills_the_cache(tmp_path, more):
    """A later process compiles nothing."""
    kernels = warm(tmp_path, *more)
    assert kernels and warm(tmp_path, *more) == kernels


@pytest.mark.slow
def test_warm_for_a_gpu_that_is_not_here(tmp_path):
    pytest.importorskip("triton")
    kernels = warm(tmp_path, "--target", "A100")
    assert {"attention_forward", "attention_delta", "attention_dkdv", "attention_dq"} == {path.stem for path in kernels}
    assert warm(tmp_path, "--target", "A100", "--forward-only") == kernels


@pytest.mark.slow
def test_warm_decode_for_a_gpu_that_is_not_here(tmp_path):
    """Calls with new keys, after which attention may begin early, and calls without; seqlen_new is a specialised argument."""
    pytest.importorskip("triton")
    kernels = warm(tmp_path, "--target", "H200", *DECODE)
    assert {"append_rows", "decode_attention"} == {path.stem for path in kernels}
    assert sum(path.stem == "decode_attention" for path in kernels) == 2
    assert warm(tmp_path, "--target", "H200", *DECODE) == kernels


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), DECODE])
def test_the_gpu_finds_what_was_compiled_without_it(tmp_path, more):
    kernels = warm(tmp_path, "--target", torch.cuda.get_device_name(), *more)
    assert kernels and warm(tmp_path, *more) == kernels


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
