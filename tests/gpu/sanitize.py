"""One small case a feature, forward and backward, to run under a checker of memory or races:

    compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py portable
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py hopper
    compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py ladder
    compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py kvcache
    FLASHTILE_TIER=hopper,portable compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py kvcache
    FLASHTILE_TIER=hopper,portable compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py parts

Names of cases after the tier: those alone. Run it once without the checker first, so that kernels are compiled. Where the tier
refuses, portable steps in.

racecheck does not follow what one warp hands another through an mbarrier: one thread of 128 arrives, after a barrier of all.
`sanitize.py control` runs the smallest kernel that does only that, with the synchronisation of hopper/forward.py; what it
reports there it reports of any such kernel, so a report of the same kind (a word written before `arrive` and read after
`wait`, Triton's own words for `warp_specialize`) says nothing. memcheck and 100 runs with equal bits stand.
"""

import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import checks  # noqa: E402
from cases import named  # noqa: E402

FEATURES = named(
    "causal_ragged", "causal_empty_rows", "gqa", "window_both", "softcap", "alibi", "sinks", "dropout", "dim_40_8",
    "dim_32_short", "dim_160", "dim_192_128", "dim_256_causal", "varlen_cross_causal", "varlen_used", "varlen_dim_168",
    "packed_qkv", "short_causal", "short_varlen", "deterministic", "varlen_deterministic", "alibi_empty_rows", "varlen_alibi",
    "resident_77", "resident_257", "resident_197",
)  # fmt: skip


def hand_over():
    """A partition hands 64 words to another, one by one, through two slots of shared memory."""
    from flashtile.device.compat import gl, gluon, mbarrier

    layout = gl.BlockedLayout([1], [32], [4], [0])

    @gluon.jit
    def give(words, ready, free, LAYOUT: gl.constexpr):
        for i in range(64):
            mbarrier.wait(free.index(i % 2), ((i // 2) & 1) ^ 1)
            words.index(i % 2).store(gl.full([1], i, gl.int32, LAYOUT))
            mbarrier.arrive(ready.index(i % 2), count=1)

    @gluon.jit
    def take(words, ready, free, out, LAYOUT: gl.constexpr):
        for i in range(64):
            mbarrier.wait(ready.index(i % 2), (i // 2) & 1)
            word = gl.max(words.index(i % 2).load(LAYOUT), 0)
            mbarrier.arrive(free.index(i % 2), count=1)
            gl.store(out + i, word)

    @gluon.jit
    def kernel(out, LAYOUT: gl.constexpr):
        words = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(2):
            mbarrier.init(ready.index(slot), count=1)
            mbarrier.init(free.index(slot), count=1)
        gl.warp_specialize([(give, (words, ready, free, LAYOUT)), (take, (words, ready, free, out, LAYOUT))], [4], [24])

    out = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    kernel[(1,)](out, layout, num_warps=4)
    assert torch.equal(out, torch.arange(64, dtype=torch.int32, device="cuda"))


def run_ladder():
    """Every rung on a length that ends inside a tile."""
    from flashtile.ladder import launch, rungs

    for rung in rungs.RUNGS.values():
        if rung.tier:
            continue
        dtype = {"fp32": torch.float32, "fp16": torch.float16}[rung.dtypes[0]]
        q, k, v = (torch.randn(1, 150, 2, 64, device="cuda", dtype=dtype) for _ in range(3))
        if rung.direction == "forward":
            launch.forward(rung.number, q, k, v, causal=True)
        else:
            launch.backward(rung.number, q, k, v, *launch.forward(8, q, k, v, causal=True), q, causal=True)
        torch.cuda.synchronize()
        print(f"rung {rung.number}: ran", flush=True)


def run_kvcache(*names):
    """Every case on a cache, or those of these names; also a call whose lengths and pages point outside."""
    from cache_cases import CASES, FP8_CASES

    import flashtile
    from flashtile import mixed

    # Small calls too
    mixed.LEAST_SLOTS = 0
    for case in CASES + FP8_CASES:
        if names and case.name not in names:
            continue
        call = case.make(torch.bfloat16, "cuda")
        call.run()
        torch.cuda.synchronize()
        print(f"{case.name}: ran", flush=True)
    pages = torch.randn(2, 8, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.tensor([[0, 2**31 - 1], [-5, 3]], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([2**31 - 1, 20], device="cuda", dtype=torch.int32)
    q, new = torch.randn(2, 1, 4, 64, device="cuda").bfloat16(), torch.randn(2, 1, 2, 64, device="cuda").bfloat16()
    flashtile.attention_with_kvcache(q, *pages, k=new, v=new, cache_seqlens=lengths, block_table=table)
    torch.cuda.synchronize()
    print("outside: ran", flush=True)
    # So many keys that a program has several heads
    q, *caches = torch.randn(4, 1, 16, 40, device="cuda").half(), *torch.randn(2, 4, 4352, 16, 40, device="cuda").half()
    lengths = torch.tensor([4352, 1, 0, 700], device="cuda", dtype=torch.int32)
    flashtile.attention_with_kvcache(q, *caches, cache_seqlens=lengths)
    torch.cuda.synchronize()
    print("several heads: ran", flush=True)
    # So few queries are the portable kernel's otherwise
    if torch.cuda.get_device_capability() == (9, 0):
        os.environ["FLASHTILE_TIER"] = "hopper"
    for head_dim in (64, 128, 256):
        q, *caches = (torch.randn(2, 300, heads, head_dim, device="cuda").to(torch.float8_e4m3fn) for heads in (4, 2, 2))
        flashtile.attention_with_kvcache(q, *caches, causal=True, k_descale=torch.ones(2, 2, device="cuda"))
        torch.cuda.synchronize()
        print(f"fp8 prefill, head dim {head_dim}: ran", flush=True)


def main(tier, *names):
    if tier == "ladder":
        return run_ladder()
    if tier == "kvcache":
        return run_kvcache(*names)
    if tier == "control":
        hand_over()
        return
    cases = named(*names) if names else FEATURES
    if tier == "parts":
        # Three of the keys of each tile, and of the queries of each walk
        from flashtile import tiles
        from flashtile.hopper import backward_config

        tiles._numbers_of_parts = checks.three_key_parts
        backward_config.query_parts = checks.three_query_parts
        tiles.resident_config = lambda problem, device: None
        run_cases(cases)
        return run_kvcache()
    os.environ["FLASHTILE_TIER"] = f"{tier},portable"
    run_cases(cases)
    if tier == "hopper":
        # Cases are small: the forward of few keys has most of them. Now the one that has all options and long calls
        from flashtile import dispatch, ops, tiles

        tiles.resident_config = lambda problem, device: None
        dispatch.plan.cache_clear()
        ops._CALLS.__init__()
        run_cases(cases)


def run_cases(cases):
    for case in cases:
        operands = case.make(torch.bfloat16, "cuda")
        with checks.fixed_rng_state(operands.rng_state):
            checks.run(case.attend, operands, case)
        torch.cuda.synchronize()
        print(f"{case.name}: ran", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
