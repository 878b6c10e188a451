"""Prefill over caches of fp8 (e4m3), queries too, against flashtile's over bf16 and FlashAttention-3, where that is installed.

    python benchmarks/prefill.py OUT.json [--commit HASH] [--rounds 7]

Random data, all keys of a cache in use, causal unless a row says another. Timed as decode.py does: every call from a CUDA
graph, a cold L2, all implementations of a row in turns, each round in another order, medians. TFLOP/s counts the products of
visible pairs. error: root mean square of out minus what float64 gives from the same fp8 numbers, relative to it, of the last
256 queries of one head; error_of_mean_1: where values have the mean 1, so that errors of their sums do not cancel.
"""

import sys
from pathlib import Path

import torch
from decode import add_row, all_captured, in_pages, load_fa3, medians, parsed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashtile import attention_with_kvcache
from flashtile.bench import record
from flashtile.problem import FP8, visible_pairs

# batch, queries, cache length, query heads, key-value heads, head dim, causal
ROWS = [
    (2, 8192, 8192, 16, 16, 64, False), (2, 8192, 8192, 16, 16, 64, True), (2, 8192, 8192, 16, 16, 128, False),
    (2, 8192, 8192, 16, 16, 128, True), (2, 8192, 8192, 8, 8, 256, False), (2, 8192, 8192, 8, 8, 256, True),
    (16, 512, 512, 16, 16, 128, True), (8, 2048, 2048, 16, 16, 128, True), (2, 256, 8192, 32, 8, 128, True),
    (1, 2048, 32768, 32, 8, 128, True), (4, 1024, 16384, 32, 8, 64, True), (4, 1024, 16384, 16, 4, 192, True),
]  # fmt: skip
PAGE_SIZE = 64
CHECKED = 256


def implementations(batch, queries, length, heads, heads_kv, dim, causal):
    """({name: call}, {name: error}, the same for values of mean 1)."""
    q, *cache = (torch.randn(batch, rows, count, dim, device="cuda").to(FP8)
                 for rows, count in ((queries, heads), (length, heads_kv), (length, heads_kv)))  # fmt: skip
    descales = {f"{name}_descale": torch.full((batch, heads_kv), 1.25, device="cuda") for name in "qkv"}
    wide = [(x.float() * 1.25).bfloat16() for x in (q, *cache)]
    pages, table = in_pages(cache, PAGE_SIZE)
    functions = {
        "flashtile": lambda: attention_with_kvcache(q, *cache, causal=causal, **descales),
        f"flashtile page {PAGE_SIZE}": lambda: attention_with_kvcache(q, *pages, block_table=table, causal=causal, **descales),
        "flashtile bf16": lambda: attention_with_kvcache(*wide, causal=causal),
    }
    fa3 = load_fa3()
    if fa3:
        functions["fa3"] = lambda: fa3.flash_attn_with_kvcache(q, *cache, causal=causal, **descales)
    # Those of mean 0 last: they are what is timed
    errors = {}
    for mean in (1, 0):
        cache[1].copy_((torch.randn(cache[1].shape, device="cuda") + mean).to(FP8))
        wide[2].copy_(cache[1].float() * 1.25)
        pages[1][table.long()] = cache[1].unflatten(1, (-1, PAGE_SIZE))
        errors[mean] = _errors(functions, _last_queries(q, *cache, causal))
    return functions, errors[0], errors[1]


def _errors(functions, expected):
    errors = {}
    for name, function in functions.items():
        out = function()
        out = (out[0] if isinstance(out, tuple) else out)[0, -CHECKED:, 0].double()
        errors[name] = float(f"{(out - expected).norm() / expected.norm():.2e}")
    return errors


def _last_queries(q, k, v, causal):
    """out of the last queries of the first head, in float64."""
    q, k, v = q[0, -CHECKED:, 0].double() * 1.25, k[0, :, 0].double() * 1.25, v[0, :, 0].double() * 1.25
    scores = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        row = torch.arange(CHECKED, device=q.device)[:, None] + len(k) - CHECKED
        scores = scores.masked_fill(torch.arange(len(k), device=q.device) > row, float("-inf"))
    return scores.softmax(-1) @ v


def main():
    arguments = parsed(__doc__)
    torch.manual_seed(0)
    document = {"env": record.environment(torch.device("cuda", 0), arguments.commit),
                "command": "python benchmarks/prefill.py", "rounds": arguments.rounds, "rows": []}  # fmt: skip
    for batch, queries, length, heads, heads_kv, dim, causal in ROWS:
        functions, errors, of_mean_1 = implementations(batch, queries, length, heads, heads_kv, dim, causal)
        us = medians(all_captured(functions), arguments.rounds)
        flops = 4 * dim * batch * heads * visible_pairs(queries, length, (None, 0 if causal else None))
        config = dict(batch=batch, queries=queries, length=length, nheads=heads, nheads_kv=heads_kv, headdim=dim, causal=causal)
        row = {"config": config, "us": us, "tflops": {name: round(flops / value / 1e6) for name, value in us.items()},
               "error": errors, "error_of_mean_1": of_mean_1}  # fmt: skip
        add_row(document, row, arguments.out)
        del functions
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
