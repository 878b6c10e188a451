"""The portable tier: Triton kernels for every NVIDIA GPU from sm_80 on, all features, forward and backward."""

from dataclasses import replace

import torch

from flashtile import settings, tiles
from flashtile.kvcache_problem import CacheOperands, CacheProblem

DIRECTIONS = ("forward", "backward", "dslopes", "decode")
# Programs of the interpreter: enough to split the caches of its tests, few enough to leave some groups of heads whole
INTERPRETED_SMS = 4
KERNELS = {"forward": ("forward",), "backward": ("delta", "dkdv", "dq"), "dslopes": ("delta", "dq")}


def refuses(problem, device, direction) -> str | None:
    """Why this tier does not take a problem, or None."""
    if device.arch == "cpu":
        if not (settings.triton_interprets() and "portable" in settings.preferred_tiers()):
            return "needs a GPU, or FLASHTILE_TIER=portable and TRITON_INTERPRET=1"
        if problem.dtype not in (torch.float16, torch.float32, torch.float8_e4m3fn):
            return f"Triton's interpreter multiplies float16 and float32 only, not {problem.dtype}"
    elif device.sm < 80:
        return f"needs sm_80 or newer, the device is {device.arch}"
    elif problem.dtype == torch.float64:
        return "takes float16, bfloat16 and float32; float64 is for CPU tensors"
    if direction == "decode":
        return _refuses_decode(problem, device)
    for kernel in KERNELS[direction]:
        if tiles.select(tiles.PORTABLE, kernel, problem, device) is None:
            return f"no tile of the {kernel} kernel fits in {device.smem_bytes >> 10} KiB of shared memory"
    return None


def _refuses_decode(problem, device) -> str | None:
    if torch.float8_e4m3fn in (problem.dtype, problem.cache_dtype):
        if device.arch != "cpu" and device.sm < 89:
            return f"Triton has fp8 (e4m3) from sm_89 on, the device is {device.arch}"
        if device.arch == "cpu" and problem.appends:
            return "Triton's interpreter rounds to fp8 (e4m3) in a way of its own"
    if tiles.decode_config(problem, device) is None:
        return f"no tile of the decode kernel fits in {device.smem_bytes >> 10} KiB of shared memory"
    return None


def configs(problem, device, direction) -> dict:
    if direction == "decode":
        return {"decode": tiles.decode_config(problem, device)}
    if direction == "forward" and tiles.cuts_keys(problem, device):
        config = tiles.decode_config(CacheProblem.of_attention(problem), device)
        if config is not None:
            return {"decode": config}
    device = replace(device, num_sms=device.num_sms or INTERPRETED_SMS)
    return {kernel: tiles.on_gpu(kernel, tiles.select(tiles.PORTABLE, kernel, problem, device).config, problem, device)
            for kernel in KERNELS[direction]}  # fmt: skip


def bind_forward(problem, configs):
    if "decode" in configs:
        return _bind_on_cache(problem, configs["decode"])
    from flashtile.portable import forward

    return forward.bind(problem, configs["forward"])


def _bind_on_cache(problem, config):
    """The forward as a call on a cache that k and v are: see `tiles.cuts_keys`."""
    from flashtile.portable import decode

    call = None

    def forward(operands):
        nonlocal call
        q, k, v = operands[:3]
        cached = CacheOperands(q, k, v, alibi_slopes=operands.alibi_slopes, sinks=operands.sinks)
        if call is None:
            call = decode.Call(CacheProblem.of_attention(problem), config, cached)
        return call(cached)

    return forward


def bind_backward(problem, configs):
    from flashtile.portable import backward

    return backward.bind(problem, configs)


def bind_dslopes(problem, configs):
    from flashtile.portable import backward

    return backward.bind_dslopes(problem, configs)


def bind_decode(problem, configs, operands, device=None):
    from flashtile.portable import decode

    return decode.Call(problem, configs["decode"], operands, device)


def compile_jobs(problem, configs, operands, direction) -> list:
    """Functions that each compile one kernel, and run it once on memory of no meaning."""
    from functools import partial

    from flashtile.outputs import forward_outputs
    from flashtile.portable import arguments, backward

    if direction == "forward":
        return [partial(bind_forward(problem, configs), operands)]
    common = arguments.common_arguments(problem, operands, configs["dq"].narrow)
    dout, lse = forward_outputs(problem, cleared=False)(operands.q)
    delta = partial(backward.launch_delta, problem, configs["delta"], common, dout, lse, dout, None)
    if direction == "dslopes":
        dslopes = backward.dslopes_of_tiles(problem, configs["dq"])(lse)
        return [delta, partial(backward.launch_dq, problem, configs["dq"], common, operands, lse, lse, dout, None, dslopes)]
    return [
        delta,
        partial(backward.launch_dkdv, problem, configs["dkdv"], common, operands, lse, lse, dout),
        partial(backward.launch_dq, problem, configs["dq"], common, operands, lse, lse, dout),
    ]
