"""The Hopper tier: Gluon kernels for sm_90, forward and backward."""

import torch

from flashtile import tiles
from flashtile.device import versions

DIRECTIONS = ("forward", "backward")

# By padded head dim the most keys, without and with a causal mask, for which the portable kernel's smaller tiles end sooner
# where each multiprocessor has one tile at most: H200, single runs, us from a cold L2. In brackets the portable kernel's. Head
# dim 64: 8 x 128 keys of 16 heads 14.7 (9.2), 8 x 256 17.1 (16.5), with a softcap 25.7 (18.5), 4 x 384 19.1 (13.7), 4 x 512
# 21.1 (22.9), causal 22.0 (19.2), 2 x 1024 causal 29.0 (26.7); 128: 8 x 128 13.8 (12.2), 4 x 256 14.5 (13.7), 4 x 384 20.0
# (25.4); 256: 8 x 256 of 8 heads 19.6 (22.7).
_FEW_KEYS = {64: (384, 1024), 128: (256, 256)}


def refuses(problem, device, direction) -> str | None:
    """Why this tier does not take a problem, or None."""
    if device.sm != 90:
        return f"needs sm_90 (H100, H200, H800), the device is {device.arch}"
    if direction == "backward":
        from flashtile.hopper import backward_config

        return backward_config.refuses(problem, device)
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {problem.dtype}"
    if problem.varlen and (problem.seqlen_k == 0 or problem.total_k == 0):
        return "takes no packed call without keys"
    if problem.unaligned:
        return "TMA needs strides of q, k and v that are multiples of 16 bytes"
    return None


def yields(problem, device, direction) -> str | None:
    """Why a problem that this tier takes is better left to a later one, or None."""
    if reason := versions.unknown():
        return reason
    if direction == "forward" and not tiles.resident_config(problem, device):
        # This kernel takes 13 us at least (single runs, as _FEW_KEYS). The portable one's tiles are half as high or less: it
        # uses twice the multiprocessors, each at two thirds of the speed (benchmarks/results/nvidia-h200/paper-portable.json).
        sequences, rows = (1, problem.total_q) if problem.varlen else (problem.batch, problem.seqlen_q)
        num_tiles = sequences * problem.num_heads * -(-rows // tiles.hopper_config(problem, device).tile_m)
        if 2 * num_tiles <= device.num_sms:
            return f"fills {num_tiles} of {device.num_sms} multiprocessors; the portable kernel's smaller tiles fill more"
        block_dim = tiles.padded_dim(max(problem.head_dim, problem.head_dim_v), problem.dtype.itemsize)
        few_keys = _FEW_KEYS.get(block_dim, (0, 0))[problem.causal]
        if num_tiles <= device.num_sms and problem.seqlen_k <= few_keys and not problem.varlen:
            return f"a tile a multiprocessor, of {problem.seqlen_k} keys; the portable kernel's smaller tiles end sooner"
    return None


def configs(problem, device, direction) -> dict:
    if direction == "backward":
        from flashtile.hopper import backward_config

        return backward_config.configs(problem, device)
    return {"forward": tiles.resident_config(problem, device) or tiles.hopper_config(problem, device)}


def bind_forward(problem, configs):
    from flashtile.hopper import arguments, forward, resident

    config = configs["forward"]
    if isinstance(config, tiles.ResidentConfig):
        return arguments.bind_resident(resident.attention_forward_resident, problem, config)
    return arguments.bind_forward(forward.attention_forward, problem, config)


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
