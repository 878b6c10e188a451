"""Time latent attention decode on this GPU, in the shapes of FlashMLA's own benchmark and in sparse ones.

    python benchmarks/mla.py OUT.json [--tier portable] [--only dense,sparse] [--commit HASH]

bf16, head dim 576, pages of 64 tokens in random order, random data, cold L2, median of triton.testing.do_bench; the schedule is
made once, as a model does for all its layers. FlashMLA is timed beside it, interleaved, where `flash_mla` can be imported and
takes the row. Each row is checked first against the definition, on some sequences. OUT.json: {"command", "env", "roof",
"rows"}; a row has the shape, "ms" (several rounds), "graph_ms" (the call in a CUDA graph, as models decode), "tflops",
"gbytes_per_s", "roof" (the larger of work / measured product rate and bytes / measured copy rate, over the median of "ms"), and
with FlashMLA its "flash_mla_ms" and "flash_mla_graph_ms".
"""

import argparse
import json
import os
import statistics

import torch
from triton.testing import do_bench

from flashtile.bench import record, roofline
from flashtile.bench.measure import demote_kept_lines
from flashtile.mla import make_schedule, mla_decode, pack_fp8, plan
from flashtile.mla.problem import MlaOperands, MlaProblem
from flashtile.reference import mla

# (batch, query tokens, cache length, heads)
DENSE = (
    (128, 1, 4096, 128), (128, 1, 8192, 128), (128, 1, 32768, 128), (128, 2, 4096, 128), (128, 2, 8192, 128),
    (128, 2, 32768, 128), (128, 1, 8192, 16), (128, 2, 8192, 16), (128, 1, 8192, 32), (128, 1, 8192, 64), (64, 1, 4096, 64),
    (32, 1, 8192, 128), (8, 1, 16384, 128), (1, 1, 8192, 128), (1, 1, 131072, 128), (1, 1, 131072, 16), (16, 1, 8192, 16),
)  # fmt: skip
# (batch, query tokens, cache length, heads, topk, packed)
SPARSE = ((128, 2, 32768, 128, 2048, True), (128, 2, 32768, 128, 2048, False), (128, 1, 32768, 64, 2048, True),
          (1, 1, 32768, 128, 2048, True))  # fmt: skip
PAGE = 64
ROUNDS = 3


def make(batch, seqlen_q, length, heads, topk=None, fp8=False):
    """Arguments of mla_decode."""
    pages = batch * length // PAGE
    q = torch.randn(batch, seqlen_q, heads, 576, device="cuda", dtype=torch.bfloat16)
    cache = torch.empty(pages, PAGE, 1, 576, device="cuda", dtype=torch.bfloat16).normal_()
    arguments = {"q": q, "kv_cache": pack_fp8(cache) if fp8 else cache, "softmax_scale": 192**-0.5}
    if topk is None:
        table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
        lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        return arguments | {"block_table": table, "cache_seqlens": lengths, "causal": True}
    return arguments | {"indices": torch.randint(pages * PAGE, (batch, seqlen_q, topk), device="cuda", dtype=torch.int32)}


def check(arguments, out):
    """Largest error of two sequences against the definition in float64, and the largest value."""
    some = slice(0, None, max(1, out.shape[0] - 1))
    few = {name: x[some] if isinstance(x, torch.Tensor) and name != "kv_cache" else x for name, x in arguments.items()}
    expected, _ = mla.decode(**few, dtype=torch.float64)
    error, largest = (out[some].double() - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 0.02 * largest, f"wrong: error {error}, values up to {largest}"
    return error


def peer(arguments):
    """FlashMLA's call, or None."""
    try:
        import flash_mla
    except ImportError:
        return None
    meta, _ = flash_mla.get_mla_metadata()
    get = arguments.get
    if "indices" in arguments and arguments["kv_cache"].dtype != torch.uint8:
        # Sparse over packed tokens only
        return None
    return lambda: flash_mla.flash_mla_with_kvcache(
        arguments["q"], arguments["kv_cache"], get("block_table"), get("cache_seqlens"), 512, meta,
        softmax_scale=arguments["softmax_scale"], causal=get("causal", False), indices=get("indices"),
        is_fp8_kvcache=arguments["kv_cache"].dtype == torch.uint8,
    )  # fmt: skip


def refusal(run, out):
    """Why FlashMLA's call is not timed: what it raised, or that it is far from the checked result; None where it may be."""
    try:
        difference = (run()[0].float() - out.float()).abs().max().item()
    except Exception as raised:
        return f"   FlashMLA: {raised}"
    return f"   FlashMLA: differs by {difference}" if difference > 0.02 * out.abs().max().item() else None


def captured(run):
    """Replay of a CUDA graph of one call."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    # What is computed for it may be under way
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def measure(shape, roof):
    batch, seqlen_q, length, heads, topk, fp8 = (*shape, None, False)[:6]
    arguments = make(*shape)
    schedule = make_schedule(arguments.get("cache_seqlens"), num_heads=heads, seqlen_q=seqlen_q,
                             indices=arguments.get("indices"))  # fmt: skip
    out = mla_decode(**arguments, schedule=schedule)
    error = check(arguments, out)
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    options = {name: x for name, x in arguments.items() if name not in tensors}
    problem = MlaProblem.from_tensors(MlaOperands(**tensors), **options)
    lengths = [length] * batch if topk is None else [topk] * batch * seqlen_q
    flops, num_bytes = problem.flops(lengths), problem.bytes_moved(lengths)
    rivals = {"": lambda: mla_decode(**arguments, schedule=schedule)}
    other = peer(arguments)
    wrong = refusal(other, out) if other else None
    if other and not wrong:
        rivals["flash_mla_"] = other
    rivals = {f"{name}{kind}": run if kind == "ms" else captured(run)
              for name, run in rivals.items() for kind in ("ms", "graph_ms")}  # fmt: skip
    times = {name: [] for name in rivals}
    for _ in range(ROUNDS):
        for name in times:
            demote_kept_lines()
            times[name].append(do_bench(rivals[name], warmup=15, rep=60, return_mode="median"))
    ms = statistics.median(times["ms"])
    share, limit = roof.fraction(flops, num_bytes, ms)
    row = {"batch": batch, "seqlen_q": seqlen_q, "cache_seqlen": length, "heads": heads, "topk": topk, "fp8": fp8,
           "tier": plan.plan_for(problem, torch.device("cuda")).tier, **times, "tflops": flops / ms / 1e9,
           "gbytes_per_s": num_bytes / ms / 1e6, "roof": share, "limit": limit, "max_abs_error": error}  # fmt: skip
    if wrong:
        row["flash_mla"] = wrong
    us = {name: statistics.median(rounds) * 1e3 for name, rounds in times.items()}
    rival = wrong or ""
    if "flash_mla_ms" in us:
        rival = f"   FlashMLA {us['flash_mla_ms']:7.1f} us, graph {us['flash_mla_graph_ms']:7.1f}"
    print(f"{row['tier']:9} b{batch} q{seqlen_q} k{length} h{heads}{f' topk{topk}' if topk else ''}{' fp8' if fp8 else ''}: "
          f"{us['ms']:7.1f} us, graph {us['graph_ms']:7.1f} {row['tflops']:6.1f} TFLOP/s {row['gbytes_per_s']:6.0f} GB/s  "
          f"{share:.0%} of {limit} roof{rival}", flush=True)  # fmt: skip
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--tier", help="of flashtile/mla/plan.py; default the fastest")
    parser.add_argument("--only", default="dense,sparse")
    parser.add_argument("--commit", help="commit to record where there is no .git")
    arguments = parser.parse_args()
    if arguments.tier:
        os.environ["FLASHTILE_TIER"] = arguments.tier
    torch.manual_seed(0)
    roof = roofline.measure("cuda:0", "bfloat16")
    shapes = {"dense": DENSE, "sparse": SPARSE}
    command = "python benchmarks/mla.py" + (f" --tier {arguments.tier}" if arguments.tier else "")
    document = {"command": command, "env": record.environment(torch.device("cuda:0"), arguments.commit),
                "roof": roof.to_json(), "rows": []}  # fmt: skip
    for name in arguments.only.split(","):
        for shape in shapes[name]:
            # Otherwise calls took longer on the host behind many rows, the sparse one of batch 1 twice its graph's time
            torch.cuda.empty_cache()
            document["rows"].append(measure(shape, roof))
            # After each row: a run that is stopped leaves what it has
            with open(arguments.out, "w") as file:
                json.dump(document, file)


if __name__ == "__main__":
    main()
