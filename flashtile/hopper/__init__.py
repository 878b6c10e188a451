"""The Hopper tier: Gluon kernels for sm_90, forward and backward."""

import torch

from flashtile import tiles
from flashtile.device import versions
from flashtile.problem import FP8

DIRECTIONS = ("forward", "backward", "decode")

_DTYPES = torch.float16, torch.bfloat16
# What a packed descriptor takes for the number of rows of a sequence, and the most that it counts of all
PACKED_ROWS, MAX_PACKED_ROWS = 2**30, 2**31 - 65536

# By padded head dim the most keys for which the portable kernel's smaller tiles end sooner where each multiprocessor has one
# tile at most: H200, single runs, us from a cold L2. In brackets the portable kernel's. Head dim 64, full and causal: 4 x 384
# keys of 11 heads 12.7 (11.1), 12.2 (11.3), 2 x 512 of 16 13.8 (12.3), 13.8 (12.7), 1 x 1024 of 16 18.1 (17.8), 18.0 (18.2),
# 1 x 2048 of 8 27.1 (29.3), 27.9 (29.0), 1 x 4096 of 4 44.6 (51.4), 45.8 (51.2); 128: 8 x 128 13.8 (12.2), 4 x 256 14.5
# (13.7), 4 x 384 20.0 (25.4).
_FEW_KEYS = {64: 512, 128: 256}
# And where tiles fill half of the multiprocessors, so that more keys are in parts. H200, us, single runs, causal: head dim 64
# 768 of 1 head 13.8 (12.2), of 4 14.4 (12.6), 1024 of 4 15.6 (14.8), of 8 17.5 (15.5), 1500 of 2 15.4 (19.1); 80 1344 of 1
# 15.8 (22.3); 96 768 of 4 18.2 (16.4); 128 768 of 4 16.8 (15.7), 1024 of 4 17.6 (18.8), 1100 of 2 17.1 (20.0); 192 512 of 4
# 17.4 (26.3); 256 256 of 8 13.8 (18.7), 384 of 4 17.5 (22.7); full 64 1200 of 1 15.7 (13.0), 192 10 x 128 of 6 12.4 (13.4), 158
# of 10 12.1 (14.8), 256 4 x 120 queries of 106 keys 12.4 (13.1), 2 x 64 of 16 12.2 (9.7), 2 x 40 of 1000 keys of 8 21.0 (43.5).
_FEW_KEYS_OF_PARTS = {64: 1024, 128: 768, 256: 64}

# By padded head dim, how many times as fast as the portable kernel of caches a multiprocessor is: H100, single runs, 8192 keys,
# us of as many tiles of one wave, in brackets the portable kernel, all of whose programs have work: head dim 64 of 64 heads 64
# tiles 103 (74), 128 106 (137); 128 of 32 heads 32 tiles 98 (54), 64 99 (100), 96 101 (144), 128 106 (183); 256 of 16 heads 16
# tiles 159 (101), 32 160 (179), 64 161 (343). Half of a tile's rows: 64 sequences of 2048 keys, 16 queries each 195 (211).
_TIMES_DECODE = {64: 1.5, 128: 2, 256: 4}


def refuses(problem, device, direction) -> str | None:
    """Why this tier does not take a problem, or None."""
    if device.sm != 90:
        return f"needs sm_90 (H100, H200, H800), the device is {device.arch}"
    if problem.varlen and (uncounted := _uncounted(problem, direction)):
        return uncounted
    if direction == "backward":
        from flashtile.hopper import backward_config

        return backward_config.refuses(problem, device)
    if direction == "decode":
        return _refuses_decode(problem, device)
    if problem.dtype not in _DTYPES:
        return f"takes float16 and bfloat16, not {problem.dtype}"
    if problem.varlen and (problem.seqlen_k == 0 or problem.total_k == 0):
        return "takes no packed call without keys"
    if problem.unaligned:
        return "TMA needs strides of q, k and v that are multiples of 16 bytes"
    return None


def _uncounted(problem, direction) -> str | None:
    """That packed rows are too many; those of a cache have limits of their own."""
    totals, lengths = [problem.total_q], [problem.seqlen_q]
    if direction != "decode":
        totals, lengths = [*totals, problem.total_k], [*lengths, problem.seqlen_k]
    if max(totals) <= MAX_PACKED_ROWS and max(lengths) <= PACKED_ROWS:
        return None
    return f"TMA counts at most {MAX_PACKED_ROWS} packed rows, {PACKED_ROWS} of a sequence"


def _refuses_decode(problem, device) -> str | None:
    fp8 = problem.dtype == FP8
    if fp8 and (problem.head_dim % 16 or problem.head_dim_v % 16):
        return "TMA needs head dims of fp8 that are multiples of 16"
    if problem.dtype not in _DTYPES and not fp8:
        return f"takes float16, bfloat16 and float8_e4m3fn, not {problem.dtype}"
    if problem.cache_dtype != problem.dtype:
        return f"takes a cache of the dtype of q, {problem.dtype}, not {problem.cache_dtype}"
    if problem.num_splits:
        return "cuts no keys into parts of a fixed number, which num_splits asks for"
    if problem.capacity == 0:
        return "takes no cache without slots"
    if problem.unaligned:
        return "TMA needs the cache as rows of one distance, a multiple of 16 bytes"
    if fp8 and problem.rotary_dim:
        return "takes no fp8 queries that are to be rotated, which gives bfloat16"
    if problem.page_size and (fp8 or problem.head_dim % 64 or problem.head_dim_v % 64):
        config = tiles.hopper_config(problem.as_packed(), device)
        if not tiles.page_rows(problem, config):
            fits = f"a page size of at least {tiles.LEAST_PAGE} that divides, or is a multiple of, a tile of {config.tile_n}"
            other = "16-bit queries of " if fp8 else ""
            return f"needs {other}head dims that are multiples of 64, or (without cache_leftpad) {fits}"
    return None


def yields(problem, device, direction) -> str | None:
    """Why a problem that this tier takes is better left to a later one, or None."""
    if reason := versions.unknown():
        return reason
    if direction == "decode":
        return _yields_decode(problem, device)
    if direction == "forward" and not tiles.resident_config(problem, device):
        config = tiles.hopper_config(problem, device)
        if tiles.cuts_keys(problem, device) and (reason := _leaves_empty(config, problem.seqlen_q)):
            return reason
        # This kernel takes 13 us at least (single runs, as _FEW_KEYS). The portable one's tiles are half as high or less: it
        # uses twice the multiprocessors, each at two thirds of the speed (benchmarks/results/nvidia-h200/paper-portable.json).
        sequences, rows = (1, problem.total_q) if problem.varlen else (problem.batch, problem.seqlen_q)
        whole = sequences * problem.num_heads * -(-rows // config.tile_m)
        num_tiles = whole * config.key_parts
        block_dim = tiles.padded_dim(max(problem.head_dim, problem.head_dim_v), 2)
        few_keys = tiles.most_keys(problem, config) <= _FEW_KEYS_OF_PARTS[block_dim]
        if 2 * whole <= device.num_sms and (few_keys or problem.dropout_p):
            return f"fills {whole} of {device.num_sms} multiprocessors; the portable kernel's smaller tiles fill more"
        few_keys = _FEW_KEYS.get(block_dim, 0)
        if num_tiles <= device.num_sms and problem.seqlen_k <= few_keys and not problem.varlen:
            return f"a tile a multiprocessor, of {problem.seqlen_k} keys; the portable kernel's smaller tiles end sooner"
    return None


def _leaves_empty(config, queries) -> str | None:
    """Why a call with so many queries of a sequence is better left to the portable kernel of caches, or None.

    With half of a tile's rows that one is as fast or faster where this one's keys would be in parts: H200, us, single runs, 32
    heads on 8 of 128, 16 queries of 32k keys in pages 54.7 (60.3), of 64k 86.2 (84.8), but 32 queries of 16k 38.0 (36.3).
    """
    rows = queries * config.heads
    if 2 * rows >= config.tile_m + (config.key_parts > 1):
        return None
    return f"has tiles of {config.tile_m} rows, of which {rows} of a sequence leave most empty"


def _yields_decode(problem, device) -> str | None:
    packed = problem.as_packed()
    config = tiles.hopper_config(packed, device)
    # The longest of packed sequences may be one of many: as if all had their mean
    queries = min(problem.seqlen_q, packed.mean_queries)
    if reason := _leaves_empty(config, queries):
        return reason
    num_tiles = problem.batch * problem.num_heads // config.heads * -(-queries // config.queries) * config.key_parts
    block_dim = tiles.padded_dim(max(problem.head_dim, problem.head_dim_v), 2)
    if -(-num_tiles // device.num_sms) * device.num_sms > _TIMES_DECODE[block_dim] * num_tiles:
        return f"has {num_tiles} tiles for {device.num_sms} multiprocessors; the portable kernel cuts their keys into parts"
    return None


def configs(problem, device, direction) -> dict:
    if direction == "backward":
        from flashtile.hopper import backward_config

        return backward_config.configs(problem, device)
    if direction == "decode":
        return {"decode": tiles.hopper_config(problem.as_packed(), device)}
    return {"forward": tiles.resident_config(problem, device) or tiles.hopper_config(problem, device)}


def bind_forward(problem, configs):
    from flashtile.hopper import arguments, forward, resident

    config = configs["forward"]
    if isinstance(config, tiles.ResidentConfig):
        return arguments.bind_resident(resident.attention_forward_resident, problem, config)
    return arguments.bind_forward(forward.attention_forward, problem, config)


def bind_decode(problem, configs, operands, device=None):
    from flashtile.hopper import kvcache

    return kvcache.Call(problem, configs["decode"], operands, device)


def bind_backward(problem, configs):
    from flashtile.hopper import backward

    return backward.bind(problem, configs)


def compile_jobs(problem, configs, operands, direction) -> list:
    """Functions that each compile one kernel, and run it once on memory of no meaning."""
    from functools import partial

    if direction == "backward":
        from flashtile.hopper import backward
        from flashtile.outputs import forward_outputs

        # Its kernels in a row: one clears the counters that the next one needs.
        dout, lse = forward_outputs(problem, cleared=False)(operands.q)
        return [partial(backward.launch, problem, configs, operands, dout, lse, dout, None)]
    return [partial(bind_forward(problem, configs), operands)]
