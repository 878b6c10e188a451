"""Scaling: larger batches on one GPU, the same problem on more GPUs (strong), more GPUs with the same work each (weak).

Over GPUs each process takes a share of the batch or of the heads; attention on such shares needs no communication, so what is
lost is balance and shared power. A time is the slowest process's. torchrun starts the processes.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from flashtile.bench import engine, stats
from flashtile.bench.cases import BenchCase, UsageError

KINDS = ("batch", "strong", "weak")
STRATEGIES = ("batch", "heads")
ROUNDS = 10


@dataclass(frozen=True)
class Row:
    """One measurement; case is the whole problem. rank_ms: median of each process."""

    gpus: int
    case: BenchCase
    mode: str
    ms: float
    speedup: float
    efficiency: float
    rank_ms: tuple[float, ...] = ()

    def to_json(self) -> dict:
        return {"gpus": self.gpus, "config": self.case.config(), "mode": self.mode, "ms": self.ms, "speedup": self.speedup,
                "efficiency": self.efficiency, "rank_ms": list(self.rank_ms)}  # fmt: skip


def batch_rows(report: engine.Report) -> list[Row]:
    """Throughput of each batch over that of the first of the same shape, in one mode; efficiency is that over the ratio of
    batches."""
    timed = [result for result in report.results if result.ok]
    rows, firsts = [], {}
    for result in timed:
        first = firsts.setdefault(replace(result.case, batch=1), result)
        more = result.case.batch / first.case.batch
        speedup = more * first.stats.median / result.stats.median
        rows.append(Row(1, result.case, result.mode, result.stats.median, speedup, speedup / more))
    return rows


def share(case: BenchCase, kind: str, strategy: str, gpus: int) -> tuple[BenchCase, BenchCase]:
    """(the whole problem, one process's part of it); in weak scaling the case given is a part.

    Raises:
        UsageError: it can't be shared out evenly.
    """
    names = ("batch",) if strategy == "batch" else ("num_heads", "num_heads_kv")
    sizes = {name: getattr(case, name) for name in names}
    if kind == "weak":
        return replace(case, **{name: size * gpus for name, size in sizes.items()}), case
    if any(size % gpus for size in sizes.values()):
        words = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UsageError(f"scale: {words} can't be shared out evenly among {gpus} GPUs. "
                         "Take another --batch, or --strategy heads or batch.")  # fmt: skip
    return case, replace(case, **{name: size // gpus for name, size in sizes.items()})


def check_counts(case, kind, strategy, gpus, device_type) -> None:
    """Refuse counts of `gpus`.

    Raises:
        peers.Unavailable: fewer GPUs here than asked for. UsageError: the case can't be shared out evenly.
    """
    import torch

    from flashtile.bench.peers import Unavailable

    if device_type == "cuda" and max(gpus) > torch.cuda.device_count():
        raise Unavailable(f"scale: {max(gpus)} GPUs asked for, {torch.cuda.device_count()} are here. "
                          "--kind batch scales the batch on one.")  # fmt: skip
    for count in gpus:
        share(case, kind, strategy, count)


def over_gpus(case, kind, strategy, gpus, mode, *, device_type="cuda", settings=None, say=lambda text: None) -> list[Row]:
    """Rows of strong or weak scaling for each count of `gpus`.

    Raises:
        peers.Unavailable: fewer GPUs here than asked for, or a process failed.
    """
    check_counts(case, kind, strategy, gpus, device_type)
    settings, rows = settings or engine.Settings(), []
    for count in gpus:
        whole, part = share(case, kind, strategy, count)
        say(f"{count} process{'es' * (count > 1)}: {part.label()} each")
        rank_ms = _launch(part, mode, count, device_type, settings)
        ms = max(rank_ms)
        if not rows:
            first = (ms, count)
        ratio, more = first[0] / ms, count / first[1]
        speedup = ratio if kind == "strong" else ratio * more
        rows.append(Row(count, whole, mode, ms, speedup, speedup / more, tuple(rank_ms)))
    return rows


def _launch(part, mode, count, device_type, settings) -> list[float]:
    from flashtile.bench.peers import Unavailable

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "ranks.json")
        order = {"config": part.config(), "mode": mode, "device": device_type, "seed": settings.seed, "timer": settings.timer,
                 "l2": settings.l2, "rep_ms": settings.rep_ms or 300.0, "out": str(out)}  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
                   "-m", "flashtile.bench.scaling", json.dumps(order)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not out.exists():
            # torchrun's own report of a failed process comes after that process's error.
            errors = [line.strip() for line in done.stderr.splitlines() if "Error" in line] or [done.stderr[-300:]]
            raise Unavailable(f"scale: torchrun ended with code {done.returncode}: {errors[0]}")
        return json.loads(out.read_text())


def _rank(order: dict) -> None:
    """One process of torchrun: time its part in rounds that all begin together; rank 0 writes the medians of all."""
    import torch
    import torch.distributed as dist

    from flashtile.bench import measure, peers
    from flashtile.bench.cases import make_inputs

    on_gpu = order["device"] == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    case, mode = BenchCase.from_config(order["config"]), order["mode"]
    state = engine.CaseTensors(case, make_inputs(case, device, order["seed"] + rank, dout=mode != "fwd"))
    fn = state.make_fn(peers.load(engine.SUBJECT, str(device)), mode)
    watch = measure.Stopwatch(device, measure.resolve_timer(order["timer"], device, mode), order["l2"])
    warm = measure.warm_up(watch, fn)
    calls = torch.tensor([warm.calls_in(order["rep_ms"] / ROUNDS)], device=device)
    dist.all_reduce(calls, op=dist.ReduceOp.MIN)
    medians = []
    for _ in range(ROUNDS):
        dist.barrier()
        block = watch.block(fn, int(calls), warm.head_start_ms(int(calls)))
        medians.append(stats.summary(block).median)
    # As a tensor: an object would need NumPy
    mine = torch.tensor([stats.summary(medians).median], dtype=torch.float64, device=device)
    found = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(found, mine)
    if rank == 0:
        Path(order["out"]).write_text(json.dumps([x.item() for x in found]))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
