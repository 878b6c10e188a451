"""Time candidate tiles of the portable kernels on this GPU, for the table in flashtile/tiles.py.

Candidates were found by hand, by kernel and columns of a tile; what does not fit, does not compile or computes something else
is a row with the reason.

For an older GPU that is not here (`target`) kernels are compiled with its instructions, mma.sync and cp.async on an Ampere, and
have as much shared memory as a block and a multiprocessor have there, so as many blocks run side by side. How fast tensor cores
and memory are, and how many registers there are, stays as it is here.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from flashtile import hardware, tiles
from flashtile.bench import measure, peers, stats
from flashtile.bench.cases import make_inputs, ragged_lengths
from flashtile.errors import UnsupportedError, explain
from flashtile.kvcache_problem import CacheOperands
from flashtile.problem import AttentionProblem, Operands
from flashtile.tiles import DecodeConfig, TileConfig

# (tile_m, tile_n, num_warps, num_stages), where wgmma or tcgen05 takes products
CANDIDATES = {
    "forward": {
        64: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 4), (128, 128, 8, 3)],
        128: [(64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 32, 4, 3), (64, 32, 4, 4)],
        192: [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
        256: [(128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 1)],
    },
    "dkdv": {
        64: [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (32, 64, 4, 3), (32, 64, 4, 4), (64, 128, 8, 3), (32, 128, 4, 3)],
        128: [(32, 64, 4, 3), (32, 64, 4, 4), (32, 128, 8, 3), (32, 128, 8, 4), (16, 64, 4, 4), (64, 64, 4, 2)],
        192: [(32, 64, 8, 3), (32, 64, 8, 2), (64, 64, 8, 2), (32, 32, 4, 3), (32, 64, 4, 2)],
        256: [(32, 64, 8, 3), (32, 64, 8, 2), (32, 64, 8, 4), (64, 64, 8, 2), (32, 32, 4, 3), (16, 64, 8, 3), (32, 128, 8, 2)],
    },
    "dq": {
        64: [(64, 64, 4, 3), (128, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (128, 32, 4, 3), (64, 128, 4, 2)],
        128: [(128, 64, 8, 3), (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2), (128, 32, 8, 4), (128, 128, 8, 1)],
        192: [(128, 32, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3), (64, 64, 4, 3)],
        256: [(128, 32, 8, 3), (128, 64, 8, 1), (128, 32, 8, 2), (64, 32, 4, 3), (64, 16, 4, 3), (64, 32, 8, 3)],
    },
}
# Where mma.sync does: before Hopper, and from sm_120 on
MMA_SYNC_CANDIDATES = {
    "forward": {
        64: [(128, 64, 4, 3), (128, 64, 4, 2), (128, 64, 4, 4), (128, 32, 4, 3), (128, 32, 4, 4), (256, 64, 8, 3)],
        128: [(128, 32, 4, 2), (128, 32, 4, 3), (128, 16, 4, 3), (256, 32, 8, 2), (128, 64, 8, 2), (128, 64, 4, 2)],
        192: [(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (128, 16, 4, 2), (128, 64, 8, 2)],
        256: [(64, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 3), (64, 64, 8, 2), (64, 16, 4, 3), (128, 32, 8, 2)],
    },
    "dkdv": {
        64: [(32, 128, 4, 2), (16, 128, 4, 3), (32, 256, 8, 2), (32, 128, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3)],
        128: [(64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 2), (32, 64, 4, 3), (16, 64, 4, 3), (32, 128, 8, 2), (64, 128, 8, 2)],
        192: [(64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 2), (32, 32, 4, 3), (16, 64, 4, 2), (32, 64, 4, 2)],
        256: [(32, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 3), (16, 32, 4, 2), (64, 64, 8, 1), (32, 64, 8, 2)],
    },
    "dq": {
        64: [(64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 32, 4, 2), (128, 32, 4, 3), (128, 64, 8, 3)],
        128: [(128, 32, 4, 2), (128, 32, 4, 3), (128, 16, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 2)],
        192: [(64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (64, 16, 4, 3), (32, 32, 4, 2), (128, 32, 8, 2)],
        256: [(64, 32, 4, 2), (64, 16, 4, 2), (64, 16, 4, 3), (32, 32, 4, 2), (32, 32, 4, 3), (64, 32, 4, 1)],
    },
}
# (tile_n, num_warps, num_stages, programs_per_sm), each tried as shares in one loop and in several, and with whole row tiles
DECODE_CANDIDATES = {
    64: [(64, 4, 3, 2), (128, 4, 3, 2), (128, 8, 3, 1), (64, 4, 2, 2)],
    96: [(64, 4, 3, 2), (64, 4, 4, 2), (128, 4, 3, 1), (32, 4, 3, 2)],
    128: [(128, 8, 3, 1), (64, 4, 3, 2), (128, 4, 3, 1), (32, 4, 3, 2), (32, 4, 4, 2), (32, 4, 2, 2)],
    160: [(32, 4, 3, 2), (64, 4, 3, 1), (64, 8, 3, 1), (32, 4, 2, 2)],
    192: [(32, 4, 3, 2), (64, 4, 3, 1), (64, 8, 3, 1), (32, 4, 2, 2)],
    256: [(64, 4, 3, 1), (32, 4, 3, 2), (64, 4, 2, 2), (32, 4, 2, 2)],
}
# and for several heads of a program
HEADS_CANDIDATES = [(16, 4, 3, 2), (32, 4, 3, 2), (16, 4, 3, 1)]
HEADS_AT_ONCE = 4
# The tile_m of all of these: calls of more rows have other tiles
DECODE_ROWS = 16
# One kernel, over a cache that is full, and with lengths log-uniform up to that
DECODE_KERNELS = {"decode": lambda case: (case.seqlen_k,) * case.batch, "decode-ragged": ragged_lengths}
# Results of two tiles may differ by this part of the largest number
TOLERANCE = 2e-2
ROUNDS = 7
BLOCK_MS = 10.0


@dataclass
class Row:
    """One candidate of one case; ms is the median of the rounds, None where it was refused. current: tiles.py has it."""

    case: object
    kernel: str
    config: TileConfig | DecodeConfig
    current: bool
    ms: float | None = None
    refused: str = ""

    def to_json(self) -> dict:
        row = {"kernel": self.kernel, "head_dim": self.case.head_dim, "seqlen": self.case.seqlen_k, "causal": self.case.causal,
               "case": self.case.config(), "config": list(astuple(self.config)), "current": self.current}
        return row | ({"refused": self.refused} if self.refused else {"ms": self.ms})


def candidates(kernel, problem, device) -> list:
    """Configurations of a problem on a hardware.Device: TileConfigs, of kernels of DECODE_KERNELS DecodeConfigs."""
    dim = max(problem.head_dim, problem.head_dim_v)
    if kernel in DECODE_KERNELS:
        columns = sum(tiles.decode_blocks_of(dim, DECODE_ROWS))
        kinds = {}, {"one_loop": False}, {"whole": True}
        found = [DecodeConfig(DECODE_ROWS, *config, **kind) for config in DECODE_CANDIDATES.get(columns, []) for kind in kinds]
        if problem.num_heads_kv % HEADS_AT_ONCE == 0:
            found += [DecodeConfig(DECODE_ROWS, *config, heads=HEADS_AT_ONCE) for config in HEADS_CANDIDATES]
        return found
    columns = sum(tiles.blocks_of(dim, problem.dtype.itemsize, tiles.is_narrow(problem, device)))
    table = (MMA_SYNC_CANDIDATES if tiles.by_mma_sync(device) else CANDIDATES)[kernel]
    return [TileConfig(*config) for config in next(table[most] for most in table if columns <= most)]


def describe(config) -> str:
    """Its numbers, and what sets it apart of its kind."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    heads, one_loop = values.pop("heads", 1), values.pop("one_loop", True)
    numbers = [str(value) for value in values.values() if not isinstance(value, bool)]
    words = [name for name, value in values.items() if value is True]
    words += [f"{heads} heads"] if heads > 1 else [] if one_loop else ["a loop a row tile"]
    return " ".join([f"({', '.join(numbers)})", *words])


@contextmanager
def instructions_of(device):
    """Kernels that the process compiles inside for the first time have the instructions of a hardware.Device, and run here.

    They have the shared memory of a multiprocessor there too: the rest of the one here, of `smem_bytes` and 1 KiB, is cache.
    """
    from triton import knobs

    from flashtile.device import launcher

    # The hardware has some sizes, and takes the next one up
    percent = int(100 * (device.smem_bytes + 1024) / (hardware.detect().smem_bytes + 1024))

    def loaded(module, function, *rest):
        launcher.prefer_shared_memory(function, percent)

    with knobs.runtime.scope():
        knobs.runtime.override_arch = f"sm{device.sm}"
        knobs.runtime.kernel_load_end_hook.add(loaded)
        try:
            yield
        finally:
            knobs.runtime.kernel_load_end_hook.remove(loaded)


def run(case, kernels, device, seed: int = 0, say=lambda text: None, target=None) -> list[Row]:
    """Rows of every candidate of the kernels for a BenchCase on a torch.device, the fastest of each kernel first.

    target: the hardware.Device that tiles are for, of an older architecture; None is the one here.

    Raises:
        UnsupportedError: target is newer than the GPU here.
    """
    here = hardware.detect(device)
    if target is None:
        return _run(case, kernels, device, seed, say, here)
    if target.sm > here.sm:
        raise UnsupportedError(explain("target", f"a GPU of {here.arch}, as here, or older", f"{target.name}, {target.arch}",
                                       "Instructions of a newer GPU do not run on this one."))  # fmt: skip
    with instructions_of(target):
        return _run(case, kernels, device, seed, say, replace(target, num_sms=here.num_sms))


class Contest(NamedTuple):
    """Of one kernel: its configuration in use, or None; all others; what says whether one fits, and what runs it."""

    current: Any
    others: list
    fits: Callable
    launch: Callable


def _run(case, kernels, device, seed, say, there) -> list[Row]:
    rows = []
    contests_of = _decode_contests if DECODE_KERNELS.keys() & kernels else _contests
    for kernel, contest in contests_of(case, kernels, device, seed, there):
        # The one in use first: others are compared with it
        configs = [contest.current] if contest.current else []
        configs += [config for config in contest.others if config != contest.current]
        found = [Row(case, kernel, config, config == contest.current) for config in configs]
        say(f"{case.label()} {kernel}: compiling {len(found)} candidates")
        with ThreadPoolExecutor() as threads:
            expected = None
            for row, (results, refused) in zip(found, threads.map(partial(_first, contest), configs)):
                expected = expected or results
                row.refused = refused or _differs(results, expected)
        say(f"{case.label()} {kernel}: timing")
        _time([row for row in found if not row.refused], contest.launch, device, seed)
        rows += sorted(found, key=lambda row: row.ms or float("inf"))
    return rows


def _contests(case, kernels, device, seed, there):
    """(name, Contest) of kernels of CANDIDATES."""
    from flashtile.portable import backward, forward
    from flashtile.portable.arguments import common_arguments

    q, k, v, dout = make_inputs(case, device, seed, dout=True)
    operands = Operands(q, k, v)
    problem = AttentionProblem.from_tensors(operands, causal=case.causal, window=case.window, softcap=case.softcap)
    # Any lse and delta cost the same; this lse keeps p near 1 / seqlen.
    lse = torch.full(problem.lse_shape, 7.0, device=device)
    delta = torch.randn_like(lse)
    common = common_arguments(problem, operands, tiles.is_narrow(problem, there))
    bound = cache(lambda config: forward.bind(problem, config))
    launches = {
        "forward": lambda config: bound(config)(operands),
        "dkdv": lambda config: backward.launch_dkdv(problem, config, common, operands, lse, delta, dout),
        "dq": lambda config: (backward.launch_dq(problem, config, common, operands, lse, delta, dout),),
    }
    for kernel in kernels:
        chosen = tiles.select(tiles.PORTABLE, kernel, problem, there)
        yield kernel, Contest(
            chosen.config if chosen else None, candidates(kernel, problem, there),
            lambda config, kernel=kernel: tiles.feasible(kernel, config, problem, there),
            lambda config, kernel=kernel: launches[kernel](tiles.on_gpu(kernel, config, problem, there)),
        )  # fmt: skip


def _decode_contests(case, kernels, device, seed, there):
    """(name, Contest) of kernels of DECODE_KERNELS."""
    from flashtile.portable import decode

    q, *caches, _ = make_inputs(case, device, seed)
    table = None
    if case.page_size:
        *caches, table = peers.in_pages(*caches, case)
    problem = case.cache_problem()
    for kernel in kernels:
        lengths = torch.tensor(DECODE_KERNELS[kernel](case), dtype=torch.int32, device=device)
        operands = CacheOperands(q, *caches, cache_seqlens=lengths, block_table=table, alibi_slopes=case.alibi_slopes(device))
        bound = cache(lambda config, operands=operands: decode.Call(problem, config, operands, there))
        yield kernel, Contest(
            tiles.decode_config(problem, there), candidates(kernel, problem, there),
            lambda config: tiles.decode_fits(config, problem, there),
            lambda config, bound=bound, operands=operands: bound(config)(operands)[:1],
        )  # fmt: skip


def _first(contest, config) -> tuple:
    """(what a candidate computes, why it can't) of its first run, which compiles it."""
    if not contest.fits(config):
        return None, "its tiles don't fit in shared memory"
    try:
        results = contest.launch(config)
        torch.cuda.synchronize()
    except Exception as error:  # a candidate may ask for more shared memory than there is
        return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return results, ""


def _differs(results, expected) -> str:
    """By how much, if it is more than rounding."""
    for x, y in zip(results, expected):
        off = float((x.float() - y.float()).abs().max() / y.float().abs().max())
        if not off <= TOLERANCE:
            return f"computes something else: off by {off:.2g} of the largest number"
    return ""


def _time(rows, launch, device, seed) -> None:
    """Set ms of rows, measured in rounds of random order."""
    watch, order = measure.Stopwatch(device, measure.resolve_timer("auto", device)), random.Random(seed)
    runners = {id(row): (row, lambda row=row: launch(row.config), []) for row in rows}
    warm = {key: measure.warm_up(watch, fn, 10.0) for key, (_, fn, _) in runners.items()}
    for _ in range(ROUNDS):
        for key in order.sample(list(runners), len(runners)):
            _, fn, times = runners[key]
            calls = max(3, warm[key].calls_in(BLOCK_MS))
            times.append(stats.summary(watch.block(fn, calls, warm[key].head_start_ms(calls))).median)
    for row, _, times in runners.values():
        row.ms = stats.summary(times).median
