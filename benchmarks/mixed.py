"""Packed calls on a cache in which some sequences have a chunk of a prompt and all others one token, as servers batch them.

    python benchmarks/mixed.py OUT.json [--commit HASH] [--rounds 7]

bf16, random data, causal, pages of 64 slots in any order, and rows. Timed as decode.py does: every call from a CUDA graph, a
cold L2, all implementations of a row in turns, each round in another order, medians. "two calls": the tokens by one call, the
chunks by another, as whoever knows the lengths can, with starts of their own, put together after them. FlashAttention-3 takes
the cache without pages, where it is installed.
"""

import sys
from pathlib import Path

import torch
from decode import add_row, all_captured, in_pages, load_fa3, log_uniform, medians, normal, parsed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashtile import attention_with_kvcache
from flashtile.bench import record

# Sequences of one token, keys of each (negative: log-uniform from 1 on), chunks, tokens of each, keys of each; heads of queries
# and of keys, head dim
ROWS = [
    (255, 8192, 1, 1793, 4096, 32, 8, 128), (255, -8192, 1, 1793, 4096, 32, 8, 128), (63, -16384, 1, 449, 4096, 32, 8, 128),
    (63, -16384, 1, 65, 4096, 32, 8, 128), (60, -16384, 4, 512, 4096, 32, 8, 128), (15, -32768, 1, 497, 8192, 32, 8, 128),
    (255, -2816, 1, 1793, 2816, 32, 32, 64), (63, -8192, 1, 449, 4096, 8, 1, 128), (127, -4096, 1, 385, 4096, 16, 8, 256),
    (7, 2048, 1, 65, 2048, 32, 8, 128),
]  # fmt: skip
PAGE_SIZE = 64


def implementations(singles, keys, chunks, tokens, chunk_keys, heads, heads_kv, dim):
    """{name: function} of a row; all compute the same, which is checked."""
    batch, longest = singles + chunks, max(abs(keys), chunk_keys)
    lengths = torch.full((batch,), longest, dtype=torch.int32, device="cuda")
    lengths[:singles] = log_uniform(singles, -keys) if keys < 0 else keys
    lengths[singles:] = chunk_keys
    q, cache = normal(singles + chunks * tokens, heads, dim), [normal(batch, longest, heads_kv, dim) for _ in range(2)]
    pages, table = in_pages(cache, PAGE_SIZE)
    starts = torch.tensor([1] * singles + [tokens] * chunks, device="cuda").cumsum(0).int()
    starts = torch.cat([starts.new_zeros(1), starts])

    def paged(rows, sequences, most):
        of_these = starts[sequences.start : sequences.stop + 1]
        return attention_with_kvcache(q[rows], *pages, cache_seqlens=lengths[sequences], block_table=table[sequences],
                                      cu_seqlens_q=of_these - of_these[0], max_seqlen_q=most, causal=True)  # fmt: skip

    def two_calls():
        first = paged(slice(0, singles), slice(0, singles), 1)
        return torch.cat([first, paged(slice(singles, len(q)), slice(singles, batch), tokens)])

    packed = dict(cache_seqlens=lengths, cu_seqlens_q=starts, max_seqlen_q=tokens, causal=True)
    functions = {
        "flashtile": lambda: attention_with_kvcache(q, *cache, **packed),
        f"flashtile page {PAGE_SIZE}": lambda: attention_with_kvcache(q, *pages, block_table=table, **packed),
        "two calls": two_calls,
    }
    fa3 = load_fa3()
    if fa3:
        functions["fa3"] = lambda: fa3.flash_attn_with_kvcache(q, *cache, **packed)
    results = [function() for function in functions.values()]
    results = [(result[0] if isinstance(result, tuple) else result).float() for result in results]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-2, atol=4e-3)
    return functions


def main():
    arguments = parsed(__doc__)
    torch.manual_seed(0)
    document = {"env": record.environment(torch.device("cuda", 0), arguments.commit),
                "command": "python benchmarks/mixed.py", "rounds": arguments.rounds, "rows": []}  # fmt: skip
    names = ("singles", "keys", "chunks", "tokens", "chunk_keys", "nheads", "nheads_kv", "headdim")
    for row in ROWS:
        functions = implementations(*row)
        us = medians(all_captured(functions), arguments.rounds)
        add_row(document, {"config": dict(zip(names, row, strict=True)), "us": us}, arguments.out)
        del functions
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
