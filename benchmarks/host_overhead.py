"""Host time of one eager call: attention forward, backward and decode of flashtile and its peers, and the bare launches.

    python benchmarks/host_overhead.py OUT.json [--commit HASH]

A call is so small (256 tokens, 2 heads; decode: 1 token, 1024 in the cache) that the GPU waits for the host: calls per second
are host time. Each figure is the best of 9 rounds of 300 calls; all take turns. "bare" is the launches of flashtile's kernels
with outputs and workspace at hand, by Triton's compiled launcher: what it and the driver cost by themselves. "autograd" is a
torch.autograd.Function in Python that allocates its results and computes nothing: what torch costs around any attention.
"hopper" is the tier for larger calls (a forward as small as this one goes to the portable tier). Needs a GPU; peers are taken
where they are installed, and asked for the directions that they have.
"""

import argparse
import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashtile import attention_with_kvcache
from flashtile.bench import peers, record
from flashtile.bench.cases import BenchCase, make_inputs
from flashtile.device.launch import Launches

ROUNDS, CALLS, WARM_UP = 9, 300, 30
PEERS = ("sdpa-flash", "sdpa-cudnn", "fa3", "fa4", "flash_attn")
OURS = {"flashtile": "", "flashtile hopper": "hopper,portable"}


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


@contextmanager
def tiers(names):
    """With FLASHTILE_TIER as it is for the functions of OURS."""
    os.environ["FLASHTILE_TIER"] = names
    yield
    del os.environ["FLASHTILE_TIER"]


def bare(function):
    """The launches of a call of ours, with the tensors of one call."""
    kept = []
    run = Launches.run

    def keeping(self):
        again = run.__get__(self)

        def launch(*tensors):
            kept.append((again, tensors))
            again(*tensors)

        return launch

    for _ in range(3):
        function()
    Launches.run = property(keeping)
    try:
        function()
    finally:
        Launches.run = run
    assert kept and not any(again.__name__ == "through_triton" for again, _ in kept)

    def launches():
        for again, tensors in kept:
            again(*tensors)

    return launches


def functions():
    """{name: (FLASHTILE_TIER, function without arguments)}."""
    case = BenchCase(batch=1, seqlen_q=256, seqlen_k=256, num_heads=2, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="bf16",
                     causal=True)  # fmt: skip
    q, k, v, dout = make_inputs(case, "cuda", dout=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    found = {}

    def add(name, attend, backward, tier=""):
        with tiers(tier):
            found[f"{name} forward"] = tier, lambda: attend(q, k, v, case)
            if backward:
                out = attend(*leaves, case)
                found[f"{name} forward, recorded"] = tier, lambda: attend(*leaves, case)
                found[f"{name} backward"] = tier, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
            if name in OURS:
                for what in ("forward", "backward"):
                    found[f"{name} {what}, bare"] = tier, bare(found[f"{name} {what}"][1])

    for name, tier in OURS.items():
        add(name, peers.load("flashtile", "cuda"), True, tier)
    for name in PEERS:
        if peers.unavailable(name, "cuda") is None:
            add(name, peers.load(name, "cuda"), peers.BACKENDS[name].backward)
    add("autograd", lambda q, k, v, case: Nothing.apply(q, k, v), True)

    token = torch.randn(1, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    caches = torch.randn(2, 1, 1024, 2, 128, device="cuda", dtype=torch.bfloat16).unbind(0)
    lengths = torch.full((1,), 1000, device="cuda", dtype=torch.int32)
    decode = lambda: attention_with_kvcache(token, *caches, cache_seqlens=lengths, causal=True)  # noqa: E731
    found["flashtile decode"] = "", decode
    found["flashtile decode, bare"] = "", bare(decode)
    if "fa3_fwd_interface" in sys.modules:
        fa3 = sys.modules["fa3_fwd_interface"].flash_attn_with_kvcache
        found["fa3 decode"] = "", lambda: fa3(token, *caches, cache_seqlens=lengths, causal=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", help="commit to record where there is no .git")
    arguments = parser.parse_args()
    measured = functions()
    best = dict.fromkeys(measured, float("inf"))
    for _ in range(ROUNDS):
        for name, (tier, function) in measured.items():
            with tiers(tier):
                for _ in range(WARM_UP):
                    function()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    function()
                best[name] = min(best[name], (time.perf_counter() - begin) / CALLS * 1e6)
                torch.cuda.synchronize()
    over = {name: best[name] - best[name + ", bare"] for name in best if name + ", bare" in best}
    for name in OURS:
        over[f"{name} forward, recorded"] = best[f"{name} forward, recorded"] - best[f"{name} forward, bare"]
        over[f"{name} backward, over bare and autograd"] = over[f"{name} backward"] - best["autograd backward"]
    for title, times in (("host time", best), ("over the bare launches", over)):
        print(title)
        for name, microseconds in times.items():
            print(f"  {name:46} {microseconds:6.1f} us")
    env = record.environment(torch.device("cuda"), arguments.commit)
    document = {"command": "python benchmarks/host_overhead.py", "env": env, "rounds": ROUNDS, "calls": CALLS,
                "host_us": best, "over_bare_us": over}  # fmt: skip
    arguments.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
