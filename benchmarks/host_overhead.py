"""Host time of one eager call: attention forward and backward of flashtile and its peers, and flashtile's bare launches.

    python benchmarks/host_overhead.py OUT.json [--commit HASH]

A call is so small (256 tokens, 2 heads) that the GPU waits for the host: calls per second are host time. Each figure is the
best of 9 rounds of 500 calls; the peers take turns. "bare" is the launch of the same compiled kernels with arguments at hand,
what Triton's launcher and the driver cost by themselves; "engine" is torch's own backward of one product, what autograd costs
before any attention runs. Needs a GPU.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from flashtile import dispatch, hardware
from flashtile.bench import peers, record
from flashtile.bench.cases import BenchCase, make_inputs
from flashtile.problem import AttentionProblem, Operands

ROUNDS, CALLS = 9, 500


def calls():
    """{name: function without arguments}."""
    case = BenchCase(batch=1, seqlen_q=256, seqlen_k=256, num_heads=2, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="bf16",
                     causal=True)  # fmt: skip
    q, k, v, dout = make_inputs(case, "cuda", dout=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    found = {}
    for name in ("flashtile", "sdpa-flash", "sdpa-cudnn", "fa3", "flash_attn"):
        if peers.unavailable(name, "cuda"):
            continue
        attend = peers.load(name, "cuda")
        out = attend(*leaves, case)
        found[f"{name} forward"] = lambda attend=attend: attend(q, k, v, case)
        found[f"{name} forward, recorded for backward"] = lambda attend=attend: attend(*leaves, case)
        found[f"{name} backward"] = lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True)
    product = leaves[0] * 2
    found["engine"] = lambda: torch.autograd.grad(product, leaves[0], dout, retain_graph=True)
    return found | bare(q, k, v, dout)


def bare(q, k, v, dout):
    """The portable tier's launches with arguments at hand, and what flashtile does around them without autograd."""
    from flashtile.portable import backward, forward

    operands = Operands(q, k, v)
    problem = AttentionProblem.of_call(operands, causal=True, return_lse=True)
    plans = {d: dispatch.plan(problem, hardware.detect(q.device), d, ("portable",)) for d in ("forward", "backward")}
    for _ in range(2):
        # the second time it is kept
        out, lse = plans["forward"].run("forward", problem, operands)
        plans["backward"].run("backward", problem, operands, out, lse, dout, None)
    forward_launch, again = list(forward._launched.values())[-1], list(backward._launched.values())[-1]
    one, two, three = (x.clone() for x in (q, k, v))
    inputs = problem, operands, out, lse, dout, None

    def backward_launches():
        again.delta(out, dout, lse)
        again.dkdv(q, k, v, dout, lse, lse, two, three)
        again.dq(q, k, v, dout, lse, lse, one)

    return {
        "portable forward, bare": lambda: forward_launch(q, k, v, out, lse),
        "portable forward, without autograd": lambda: plans["forward"].run("forward", problem, operands),
        "portable backward, bare": backward_launches,
        "portable backward, without autograd": lambda: plans["backward"].run("backward", *inputs),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", help="commit to record where there is no .git")
    arguments = parser.parse_args()
    functions = calls()
    for function in functions.values():
        for _ in range(50):
            function()
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                function()
            best[name] = min(best[name], (time.perf_counter() - begin) / CALLS * 1e6)
            torch.cuda.synchronize()
    for name, microseconds in best.items():
        print(f"{name:44} {microseconds:7.1f} us")
    document = {"command": "python benchmarks/host_overhead.py", "env": record.environment("cuda", arguments.commit),
                "rounds": ROUNDS, "calls": CALLS, "host_us": best}  # fmt: skip
    arguments.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
