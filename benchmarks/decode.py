"""Decoding on a key-value cache against SDPA's cuDNN backend, FlashAttention-3 and -4 where installed, and the copy rate.

    python benchmarks/decode.py OUT.json [--fp8] [--commit HASH] [--rounds 7]

One query token a sequence, head dim 128 unless a row says another, bf16, random data. Every call is replayed from a CUDA graph
with a cold L2 cache; all implementations of a row take turns, each round in another order, and a row has the medians. TB/s
counts the bytes of the keys and values in use. Lines that FlashAttention-3 and -4 ask the cache to keep are given up before
each turn (`measure.demote_kept_lines`): else the others find some of the keys and values that they share with them in it.
FlashAttention-4 has no call for caches here: it is given the keys and values as such. A peer that fails is left out of its row.

--fp8: caches of e4m3, beside flashtile's of bf16. FlashAttention-3 is given queries of e4m3 too: it takes no others there.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashtile import attention_with_kvcache
from flashtile.bench import measure, peers, record
from flashtile.bench.cases import BenchCase

DIM = 128
# batch, cache length, query heads, key-value heads, page sizes beside the cache without pages; head dim
ROWS = [
    (1, 512, 32, 8, (64,)), (1, 2048, 32, 8, (64,)), (1, 8192, 32, 8, (16, 64)), (1, 32768, 32, 8, (64,)),
    (1, 131072, 32, 8, (64,)), (1, 1 << 20, 32, 8, (64,)), (8, 512, 32, 8, (64,)), (16, 2048, 32, 8, (64,)),
    (16, 8192, 32, 8, (1, 16, 64, 256)), (64, 8192, 32, 8, (16, 64)), (64, 2048, 64, 8, (64,)), (128, 1024, 32, 32, (64,)),
    # A GPU's share of a model that is split by heads; other models
    (1, 8192, 8, 1, (64,)), (1, 32768, 8, 1, (64,)), (8, 2048, 8, 1, (64,)), (1, 8192, 28, 4, (64,)),
    (32, 4096, 64, 8, (64,), 64), (32, 4096, 32, 32, (64,), 96), (8, 2048, 16, 8, (64,), 256),
]  # fmt: skip
FP8_ROWS = [
    (1, 512, 32, 8, (64,)), (1, 8192, 32, 8, (16, 64)), (1, 32768, 32, 8, (64,)), (1, 131072, 32, 8, (64,)),
    (8, 512, 32, 8, (64,)), (16, 2048, 32, 8, (64,)), (16, 8192, 32, 8, (1, 16, 64)), (64, 8192, 32, 8, (16, 64)),
    (128, 1024, 32, 32, (64,)), (1, 32768, 8, 1, (64,)), (64, 8192, 8, 1, (64,)), (64, 8192, 8, 2, (64,)),
    (32, 4096, 64, 8, (64,), 64), (32, 4096, 32, 32, (64,), 64), (32, 4096, 16, 16, (64,), 72), (32, 4096, 32, 32, (64,), 96),
    (32, 4096, 16, 16, (64,), 160), (16, 8192, 32, 8, (64,), 192), (32, 4096, 16, 8, (64,), 256),
]  # fmt: skip
# batch, the longest, query heads, key-value heads
RAGGED = [(64, 65536, 32, 8), (1024, 1024, 8, 1)]


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def in_pages(cache, page_size):
    """The same slots as pages in random order, and the block table."""
    batch, length, heads, dim = cache[0].shape
    table = torch.randperm(batch * length // page_size, device="cuda").int()
    pages = []
    for x in cache:
        page = torch.empty(batch * length // page_size, page_size, heads, dim, device="cuda", dtype=x.dtype)
        page[table.long()] = x.reshape(page.shape)
        pages.append(page)
    return pages, table.view(batch, -1)


def implementations(batch, length, heads, heads_kv, page_sizes, dim=DIM):
    """{name: function} of a row; all compute the same, which is checked."""
    q, cache = normal(batch, 1, heads, dim), [normal(batch, length, heads_kv, dim) for _ in range(2)]
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, *cache)), enable_gqa=heads != heads_kv)

    functions = {"flashtile": lambda: attention_with_kvcache(q, *cache, cache_seqlens=lengths), "sdpa-cudnn": cudnn}
    for size in page_sizes:
        pages, table = in_pages(cache, size)
        functions[f"flashtile page {size}"] = lambda pages=pages, table=table: attention_with_kvcache(
            q, *pages, cache_seqlens=lengths, block_table=table)  # fmt: skip
    fa3 = load_fa3()
    if fa3:
        functions["fa3"] = lambda: fa3.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths)
    if peers.unavailable("fa4", "cuda") is None:
        fa4, case = peers.load("fa4", "cuda"), BenchCase(batch, 1, length, heads, heads_kv, dim, dim)
        functions["fa4"] = lambda: fa4(q, *cache, case)
    expected = cudnn().transpose(1, 2).float()
    for name, function in functions.items():
        if name.startswith("flashtile"):
            torch.testing.assert_close(function().float(), expected, rtol=2e-2, atol=2e-3)
    return functions, sum(x.numel() * x.element_size() for x in cache)


def fp8_implementations(batch, length, heads, heads_kv, page_sizes, dim=DIM):
    """As `implementations`, of caches of e4m3."""
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    return _over_fp8(lengths, length, heads, heads_kv, page_sizes, dim), 2 * batch * length * heads_kv * dim


def _over_fp8(lengths, capacity, heads, heads_kv, page_sizes, dim=DIM):
    batch = len(lengths)
    q = normal(batch, 1, heads, dim)
    cache = [normal(batch, capacity, heads_kv, dim).to(torch.float8_e4m3fn) for _ in range(2)]
    wide = [x.bfloat16() for x in cache]
    descale = torch.ones(batch, heads_kv, device="cuda")
    functions = {
        "flashtile": lambda: attention_with_kvcache(q, *cache, cache_seqlens=lengths, k_descale=descale, v_descale=descale),
        "flashtile bf16": lambda: attention_with_kvcache(q, *wide, cache_seqlens=lengths),
    }
    for size in page_sizes:
        pages, table = in_pages(cache, size)
        functions[f"flashtile page {size}"] = lambda pages=pages, table=table: attention_with_kvcache(
            q, *pages, cache_seqlens=lengths, block_table=table, k_descale=descale, v_descale=descale)  # fmt: skip
    expected = functions["flashtile bf16"]().float()
    for name, function in functions.items():
        if name != "flashtile bf16":
            torch.testing.assert_close(function().float(), expected, rtol=2e-2, atol=2e-3)
    fa3 = load_fa3()
    if fa3:
        narrow = q.to(torch.float8_e4m3fn)
        functions["fa3"] = lambda: fa3.flash_attn_with_kvcache(
            narrow, *cache, cache_seqlens=lengths, q_descale=descale, k_descale=descale, v_descale=descale)  # fmt: skip
    return functions


def fp8_ragged(batch, longest, heads, heads_kv, page_size=64):
    lengths = log_uniform(batch, longest)
    return _over_fp8(lengths, longest, heads, heads_kv, (page_size,)), int(lengths.sum()) * heads_kv * 2 * DIM


def log_uniform(batch, longest):
    return (longest ** torch.rand(batch, generator=torch.Generator().manual_seed(1))).int().cuda()


def ragged(batch, longest, heads, heads_kv, page_size=64):
    """Lengths log-uniform from 1 to `longest`, in a cache of rows and in pages."""
    lengths = log_uniform(batch, longest)
    q, cache = normal(batch, 1, heads, DIM), [normal(batch, longest, heads_kv, DIM) for _ in range(2)]
    pages, table = in_pages(cache, page_size)
    functions = {
        "flashtile": lambda: attention_with_kvcache(q, *cache, cache_seqlens=lengths),
        f"flashtile page {page_size}": lambda: attention_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=table),
    }
    fa3 = load_fa3()
    if fa3:
        functions["fa3"] = lambda: fa3.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths)
    results = [function().float() for function in functions.values()]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-2, atol=2e-3)
    return functions, int(lengths.sum()) * heads_kv * 2 * DIM * 2


def load_fa3():
    try:
        import fa3_fwd_config

        sys.modules.setdefault("flash_attn_config", fa3_fwd_config)
        import fa3_fwd_interface
    except ImportError:
        return None
    return fa3_fwd_interface


def captured(function):
    """A function that replays a graph of one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph.replay


def all_captured(functions):
    """{name: replay} of functions; of peers those that can be captured."""
    graphs = {}
    for name, function in functions.items():
        try:
            graphs[name] = captured(function)
        except Exception as error:
            if name.startswith("flashtile"):
                raise
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return graphs


def medians(functions, rounds):
    """{name: median µs} of functions that take turns, each round in another order: heat of the one before takes clocks."""
    times, order, shuffle = {name: [] for name in functions}, list(functions), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            measure.demote_kept_lines()
            times[name].append(1e3 * do_bench(functions[name], warmup=2, rep=15, return_mode="median"))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def copy_rate(rounds):
    """TB/s of a device copy of 512 MiB, bytes read plus written."""
    source = normal(1 << 28)
    target = torch.empty_like(source)
    return 4 * source.numel() / medians({"copy": lambda: target.copy_(source)}, rounds)["copy"] / 1e6


def host_us(function, calls=100, repeats=5):
    """µs of the host to queue one call: the fastest of a few series of calls that do not fill the queue."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return round(min(times), 2)


def parsed(doc, *flags):
    """The arguments of a script that takes OUT.json, --commit, --rounds, and flags."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", help="commit to record where there is no .git")
    parser.add_argument("--rounds", type=int, default=7)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def add_row(document, row, out):
    """Print a row, and write all that there are: a run that is stopped leaves what it has."""
    document["rows"].append(row)
    print(json.dumps(row), flush=True)
    out.write_text(json.dumps(document, indent=1))


def main():
    arguments = parsed(__doc__, "--fp8")
    torch.manual_seed(0)
    copy_tbps = copy_rate(arguments.rounds)
    command = "python benchmarks/decode.py" + " --fp8" * arguments.fp8
    document = {"env": record.environment(torch.device("cuda", 0), arguments.commit), "copy_tbps": round(copy_tbps, 3),
                "command": command, "rounds": arguments.rounds, "rows": []}  # fmt: skip
    rows, of_row, of_all = (FP8_ROWS, fp8_implementations, fp8_ragged) if arguments.fp8 else (ROWS, implementations, ragged)
    cells = [(dict(batch=b, length=n, nheads=h, nheads_kv=kv, headdim=dim[0] if dim else DIM),
              lambda row=(b, n, h, kv, pages, *dim): of_row(*row)) for b, n, h, kv, pages, *dim in rows]  # fmt: skip
    for batch, longest, heads, heads_kv in RAGGED:
        cells.append((dict(batch=batch, length=f"log-uniform 1..{longest}", nheads=heads, nheads_kv=heads_kv, headdim=DIM),
                      lambda row=(batch, longest, heads, heads_kv): of_all(*row)))  # fmt: skip
    for config, make in cells:
        functions, kv_bytes = make()
        us = medians(all_captured(functions), arguments.rounds)
        row = {"config": config, "kv_bytes": kv_bytes, "us": us,
               "of_copy": {name: round(kv_bytes / value / 1e6 / copy_tbps, 3) for name, value in us.items()}}  # fmt: skip
        if config["batch"] == 1 and config["length"] == 8192 and config["nheads_kv"] == 8:
            row["host_us"] = {name: host_us(functions[name]) for name in us}
        add_row(document, row, arguments.out)
        del functions
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
