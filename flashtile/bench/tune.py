"""Time candidate tiles of the portable kernels on this GPU, for the table in flashtile/tiles.py.

Candidates were found by hand, by kernel and columns of a tile; what does not fit, does not compile or computes something else
is a row with the reason.

For an older GPU that is not here (`target`) kernels are compiled with its instructions, mma.sync and cp.async on an Ampere, and
have as much shared memory as a block has there. How many blocks run side by side, and how fast memory is, stays as it is here.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch

from flashtile import hardware, tiles
from flashtile.bench import measure, stats
from flashtile.bench.cases import make_inputs
from flashtile.errors import UnsupportedError, explain
from flashtile.problem import AttentionProblem, Operands
from flashtile.tiles import TileConfig

# (tile_m, tile_n, num_warps, num_stages), on Hopper and newer
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
# Before
MMA_SYNC_CANDIDATES = {
    "forward": {
        64: [(128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 4, 3), (128, 64, 8, 3)],
        128: [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 32, 4, 2), (128, 32, 8, 2)],
        192: [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (128, 32, 8, 2)],
        256: [(64, 64, 8, 2), (64, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2), (128, 64, 8, 2)],
    },
    "dkdv": {
        64: [(32, 128, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (32, 128, 4, 2)],
        128: [(64, 64, 8, 2), (32, 64, 4, 2), (32, 64, 8, 2), (32, 128, 8, 2), (64, 128, 8, 2), (32, 32, 4, 2), (64, 64, 4, 2)],
        192: [(32, 32, 4, 2), (32, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2), (32, 64, 8, 2), (16, 64, 4, 2)],
        256: [(32, 32, 8, 2), (32, 32, 4, 2), (64, 32, 4, 2), (32, 64, 8, 2), (64, 32, 8, 2), (16, 64, 4, 2)],
    },
    "dq": {
        64: [(64, 64, 4, 3), (64, 32, 4, 2), (128, 64, 8, 3), (128, 64, 4, 2), (64, 64, 4, 2), (128, 32, 4, 3)],
        128: [(64, 64, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2), (128, 32, 4, 2)],
        192: [(64, 32, 4, 2), (64, 32, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (32, 32, 4, 2), (64, 16, 4, 2)],
        256: [(64, 32, 8, 2), (32, 16, 4, 2), (64, 32, 4, 2), (64, 16, 4, 2), (128, 32, 8, 2), (32, 32, 4, 2)],
    },
}
# Results of two tiles may differ by this part of the largest number
TOLERANCE = 2e-2
ROUNDS = 7
BLOCK_MS = 10.0


@dataclass
class Row:
    """One candidate of one case; ms is the median of the rounds, None where it was refused. current: tiles.py has it."""

    case: object
    kernel: str
    config: TileConfig
    current: bool
    ms: float | None = None
    refused: str = ""

    def to_json(self) -> dict:
        c = self.config
        row = {"kernel": self.kernel, "head_dim": self.case.head_dim, "seqlen": self.case.seqlen_k, "causal": self.case.causal,
               "case": self.case.config(), "config": [c.tile_m, c.tile_n, c.num_warps, c.num_stages], "current": self.current}
        return row | ({"refused": self.refused} if self.refused else {"ms": self.ms})


def candidates(kernel, problem, device) -> list[TileConfig]:
    """Of a problem on a hardware.Device."""
    dim = max(problem.head_dim, problem.head_dim_v)
    block = tiles.padded_dim(dim, problem.dtype.itemsize)
    table = (CANDIDATES if device.sm >= 90 else MMA_SYNC_CANDIDATES)[kernel]
    return [TileConfig(*config) for config in table.get(sum(tiles.blocks_of(dim, block, tiles.ROWS_OF_WGMMA)), [])]


@contextmanager
def instructions_of(device):
    """Kernels that the process compiles inside for the first time have the instructions of a hardware.Device, and run here."""
    from triton import knobs

    with knobs.runtime.scope():
        knobs.runtime.override_arch = f"sm{device.sm}"
        yield


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


def _run(case, kernels, device, seed, say, there) -> list[Row]:
    from flashtile.portable import backward, forward
    from flashtile.portable.arguments import common_arguments

    q, k, v, dout = make_inputs(case, device, seed, dout=True)
    operands = Operands(q, k, v)
    problem = AttentionProblem.from_tensors(operands, causal=case.causal, window=case.window, softcap=case.softcap)
    # Any lse and delta cost the same; this lse keeps p near 1 / seqlen.
    lse = torch.full(problem.lse_shape, 7.0, device=device)
    delta = torch.randn_like(lse)
    common = common_arguments(problem, operands)
    bound = cache(lambda config: forward.bind(problem, config))
    launches = {
        "forward": lambda config: bound(config)(operands),
        "dkdv": lambda config: backward.launch_dkdv(problem, config, common, operands, lse, delta, dout),
        "dq": lambda config: (backward.launch_dq(problem, config, common, operands, lse, delta, dout),),
    }
    rows = []
    for kernel in kernels:
        chosen = tiles.select(tiles.PORTABLE, kernel, problem, there)
        current = chosen.config if chosen else None
        configs = candidates(kernel, problem, there)
        # The one in use first: others are compared with it
        configs = ([current] if current else []) + [config for config in configs if config != current]
        found = [Row(case, kernel, config, config == current) for config in configs]
        say(f"{case.label()} {kernel}: compiling {len(found)} candidates")

        def launch(config, kernel=kernel):
            return launches[kernel](tiles.on_gpu(kernel, config, problem, there.num_sms))

        with ThreadPoolExecutor() as threads:
            firsts = threads.map(lambda row, launch=launch: _first(launch, row, problem, there), found)
            expected = None
            for row, (results, refused) in zip(found, firsts):
                expected = expected or results
                row.refused = refused or _differs(results, expected)
        say(f"{case.label()} {kernel}: timing")
        _time([row for row in found if not row.refused], launch, device, seed)
        rows += sorted(found, key=lambda row: row.ms or float("inf"))
    return rows


def _first(launch, row, problem, there) -> tuple:
    """(what a candidate computes, why it can't) of its first run, which compiles it."""
    if not tiles.feasible(row.kernel, row.config, problem, there):
        return None, "its tiles don't fit in shared memory"
    try:
        results = launch(row.config)
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
