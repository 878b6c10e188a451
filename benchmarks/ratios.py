"""What features cost: the time of a call with one, over that of the same call without, and over the ratio of their work.

    python benchmarks/ratios.py OUT.json [--commit HASH] [--rounds 7]

bf16, head dim 128, random data, cold L2, forward and backward alone, medians of triton.testing.do_bench; the calls of a row
take turns in rounds. A row has "us" of both calls, "work" (FLOPs over those of the plain call) and "cost" (the ratio of times
over work: 1.0 is a feature that costs nothing). Packed sequences of equal lengths are compared with the same batch, and with
FlashAttention-3's packed call where that is installed.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from decode import medians, parsed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashtile import attention, attention_varlen
from flashtile.bench import peers, record
from flashtile.bench.cases import BenchCase, make_inputs

LONG = BenchCase(1, 16384, 16384, 16, 16, 128, 128, True)
BATCH = BenchCase(2, 8192, 8192, 16, 16, 128, 128, True)
BIASED = replace(BATCH, alibi=True)
SHORT = BenchCase(16, 1024, 1024, 16, 16, 128, 128, True)


def plain(q, k, v):
    return attention(q, k, v, causal=True)


def windowed(q, k, v):
    return attention(q, k, v, window=(1023, 0))


def capped(q, k, v):
    return attention(q, k, v, causal=True, softcap=50.0)


def windowed_and_capped(q, k, v):
    return attention(q, k, v, window=(4095, 0), softcap=50.0)


def biased(q, k, v):
    return attention(q, k, v, causal=True, alibi_slopes=BIASED.alibi_slopes(q.device))


def packed(case, function=attention_varlen):
    """The sequences of the batch one after the other."""
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * case.seqlen_k

    def call(q, k, v):
        out = function(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q=starts, cu_seqlens_k=starts,
                       max_seqlen_q=case.seqlen_q, max_seqlen_k=case.seqlen_k, causal=True)  # fmt: skip
        return (out[0] if isinstance(out, (tuple, list)) else out).unflatten(0, (case.batch, case.seqlen_q))

    return call


def rows():
    """(name, case of the plain call, case, function, FLOPs over the plain call's)."""
    work = {left: replace(LONG, causal=False, window=(left, 0)).flops("fwd") / LONG.flops("fwd") for left in (1023, 4095)}
    grouped = BenchCase(2, 8192, 8192, 16, 2, 128, 128, True)
    return [
        ("window of 1024 keys", LONG, LONG, windowed, work[1023]),
        ("softcap", BATCH, BATCH, capped, 1.0),
        ("window of 4096 keys and softcap", LONG, LONG, windowed_and_capped, work[4095]),
        ("ALiBi", BATCH, BIASED, biased, 1.0),
        ("8 query heads share keys", BATCH, grouped, plain, 1.0),
        ("packed, 2 x 8k", BATCH, BATCH, packed(BATCH), 1.0),
        ("packed, 16 x 1k", SHORT, SHORT, packed(SHORT), 1.0),
    ]


def timed(function, case, mode):
    """A function to time: the forward pass, or the backward pass of a graph that is kept."""
    q, k, v, dout = make_inputs(case, "cuda", dout=True)
    if mode == "fwd":
        return lambda: function(q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def main():
    arguments = parsed(__doc__)
    fa3 = None
    if peers.unavailable("fa3", "cuda") is None:
        peers.load("fa3", "cuda")
        fa3 = sys.modules["fa3_fwd_interface"].flash_attn_varlen_func
    document = {"env": record.environment(torch.device("cuda", 0), arguments.commit), "command": "python benchmarks/ratios.py",
                "rounds": arguments.rounds, "rows": []}  # fmt: skip
    for name, base, case, function, work in rows():
        for mode in ("fwd", "bwd"):
            calls = {"plain": timed(plain, base, mode), "flashtile": timed(function, case, mode)}
            if fa3 and name.startswith("packed") and mode == "fwd":
                calls["fa3"] = timed(packed(case, fa3), case, mode)
            us = medians(calls, arguments.rounds)
            document["rows"].append({"feature": name, "mode": mode, "config": case.config(), "us": us, "work": round(work, 4),
                                     "cost": round(us["flashtile"] / us["plain"] / work, 3)})  # fmt: skip
            print(name, mode, us, document["rows"][-1]["cost"], flush=True)
    arguments.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
