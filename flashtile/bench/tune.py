"""Time candidate tiles of the portable kernels on this GPU, for the table in flashtile/tiles.py.

Candidates were found by hand, by (kernel, padded head dim); what does not fit or does not compile is a row with the reason.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from flashtile import hardware, tiles
from flashtile.bench import measure, stats
from flashtile.bench.cases import make_inputs
from flashtile.problem import AttentionProblem, Operands
from flashtile.tiles import TileConfig

# (tile_m, tile_n, num_warps, num_stages)
CANDIDATES = {
    "forward": {
        64: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 4), (128, 128, 8, 3)],
        128: [(64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 32, 4, 3), (64, 32, 4, 4)],
        256: [(128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 1)],
    },
    "dkdv": {
        64: [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (32, 64, 4, 3), (32, 64, 4, 4), (64, 128, 8, 3), (32, 128, 4, 3)],
        128: [(32, 64, 4, 3), (32, 64, 4, 4), (32, 128, 8, 3), (32, 128, 8, 4), (16, 64, 4, 4), (64, 64, 4, 2)],
        256: [(32, 64, 8, 3), (32, 64, 8, 2), (32, 64, 8, 4), (64, 64, 8, 2), (32, 32, 4, 3), (16, 64, 8, 3), (32, 128, 8, 2)],
    },
    "dq": {
        64: [(64, 64, 4, 3), (128, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 4), (128, 32, 4, 3), (64, 128, 4, 2)],
        128: [(128, 64, 8, 3), (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2), (128, 32, 8, 4), (128, 128, 8, 1)],
        256: [(128, 32, 8, 3), (128, 64, 8, 1), (128, 32, 8, 2), (64, 32, 4, 3), (64, 16, 4, 3), (64, 32, 8, 3)],
    },
}
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


def run(case, kernels, device, seed: int = 0, say=lambda text: None) -> list[Row]:
    """Rows of every candidate of the kernels for a BenchCase on a torch.device, the fastest of each kernel first."""
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
    here = hardware.detect(device)
    launches = {
        "forward": lambda config: bound(config)(operands),
        "dkdv": lambda config: backward.launch_dkdv(problem, config, common, operands, lse, delta, dout),
        "dq": lambda config: backward.launch_dq(problem, config, common, operands, lse, delta, dout),
    }
    block_dim = tiles.padded_dim(max(case.head_dim, case.head_dim_v), problem.dtype.itemsize)
    rows = []
    for kernel in kernels:
        chosen = tiles.select(tiles.PORTABLE, kernel, problem, here)
        current = chosen.config if chosen else None
        configs = [TileConfig(*config) for config in CANDIDATES[kernel].get(block_dim, [])]
        configs += [current] if current and current not in configs else []
        found = [Row(case, kernel, config, config == current) for config in configs]
        say(f"{case.label()} {kernel}: compiling {len(found)} candidates")

        def launch(config, kernel=kernel):
            return launches[kernel](tiles.on_gpu(kernel, config, problem, here.num_sms))

        with ThreadPoolExecutor() as threads:
            for row, refused in zip(found, threads.map(lambda row, launch=launch: _first(launch, row, problem, here), found)):
                row.refused = refused
        say(f"{case.label()} {kernel}: timing")
        _time([row for row in found if not row.refused], launch, device, seed)
        rows += sorted(found, key=lambda row: row.ms or float("inf"))
    return rows


def _first(launch, row, problem, here) -> str:
    """Compile and run a candidate once; why it can't, or nothing."""
    if not tiles.feasible(row.kernel, row.config, problem, here):
        return "its tiles don't fit in shared memory"
    try:
        launch(row.config)
        torch.cuda.synchronize()
    except Exception as error:  # a candidate may ask for more shared memory than there is
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
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
