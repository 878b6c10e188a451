"""The rungs of the ladder as backends of the benchmark, and its table: each rung over the one before.

A rung is checked and timed by `engine.compare`, in interleaved rounds with the others, like any peer. Rungs 1 to 4 compute in
fp32: they run on the case in fp32, the others on the case as it is given.
"""

from dataclasses import asdict, dataclass, replace

import torch

from flashtile import dispatch, hardware
from flashtile.bench import engine, peers
from flashtile.errors import UnsupportedError
from flashtile.ladder import launch, nvrtc, rungs
from flashtile.problem import AttentionProblem, Operands

PEERS = ("naive", "sdpa-flash")
BASELINE = "sdpa-flash"


def backend_name(rung) -> str:
    return f"rung-{rung.number}"


def register(config=None) -> None:
    """Make the rungs backends that engine.compare knows; config: tiles of all rungs in place of their own."""
    for rung in rungs.RUNGS.values():
        peers.BACKENDS[backend_name(rung)] = _backend(rung, config)


def _backend(rung, config):
    def load(device):
        missing = _missing(rung, device)
        if missing:
            raise peers.Unavailable(missing)
        return lambda q, k, v, case: _Attend.apply(rung, config, q, k, v, case.causal)

    def refuses(case, mode, device):
        problem, where = case.problem(), hardware.detect(device)
        if rung.tier:
            if reason := rungs.refuses_options(problem):
                return reason
            directions = ("forward",) if mode == "fwd" else ("forward", "backward")
            try:
                for direction in directions:
                    dispatch.plan(problem, where, direction, (rung.tier,))
            except UnsupportedError as error:
                return str(error).splitlines()[1].strip()
            return None
        if rung.direction == "backward" and mode == "fwd":
            return "is the backward pass; its forward is rung 8"
        return rungs.refuses(rung, problem, where, config)

    backward = rung.tier is not None or rung.direction == "backward"
    return peers.Backend(backend_name(rung), rung.idea, load, refuses, backward=backward, package="cuda-core")


def _missing(rung, device) -> str | None:
    """What a rung needs and this machine has not, or None."""
    if torch.device(device).type != "cuda":
        return "needs a GPU"
    return None if rung.tier else nvrtc.unavailable()


class _Attend(torch.autograd.Function):
    """Forward and backward of a rung; rung 9 takes rung 8 for its forward, rungs 10 and 11 their tier."""

    @staticmethod
    def forward(ctx, rung, config, q, k, v, causal):
        ctx.rung, ctx.config, ctx.causal = rung, config, causal
        if rung.tier:
            out, lse = _tier_forward(rung.tier, q, k, v, causal)
        elif rung.direction == "backward":
            out, lse = launch.forward(8, q, k, v, causal=causal)
        else:
            out, lse = launch.forward(rung.number, q, k, v, causal=causal, config=config)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        if ctx.rung.tier:
            grads = _tier_backward(ctx.rung.tier, q, k, v, out, lse, dout, ctx.causal)
        else:
            grads = launch.backward(ctx.rung.number, q, k, v, out, lse, dout.contiguous(), causal=ctx.causal,
                                    config=ctx.config)  # fmt: skip
        return None, None, *grads, None


def _plan(tier, operands, causal, direction):
    problem = AttentionProblem.from_tensors(operands, causal=causal)
    return problem, dispatch.plan(problem, hardware.detect(operands.q.device), direction, (tier,))


def _tier_forward(tier, q, k, v, causal):
    operands = Operands(q, k, v)
    problem, plan = _plan(tier, operands, causal, "forward")
    return plan.bind("forward", problem)(operands)


def _tier_backward(tier, q, k, v, out, lse, dout, causal):
    operands = Operands(q, k, v)
    problem, plan = _plan(tier, operands, causal, "backward")
    return plan.bind("backward", problem)(operands, out, lse, dout, None)[:3]


def compare(cases, numbers, modes=("fwd", "bwd"), config=None, **options):
    """engine.compare of rungs, with standard PyTorch and SDPA's FlashAttention-2 beside them.

    Args:
        cases: BenchCases in fp16 or bf16. numbers: of rungs. config: a TileConfig in place of the rungs' own. The rest as in
            engine.compare.
    """
    register(config)
    chosen = [rungs.get(number) for number in numbers]
    in_fp32 = any("fp32" in rung.dtypes for rung in chosen)
    both = [[replace(case, dtype="fp32")] * in_fp32 + [case] for case in cases]
    backends = [*PEERS, *map(backend_name, chosen)]
    report = engine.compare([case for pair in both for case in pair], backends, modes, baseline=BASELINE, **options)
    for result in report.results:
        if result.backend.startswith("rung-"):
            flags = replace(result.case, dtype=cases[0].dtype).flags()
            words = f"ladder run --rung {result.backend.removeprefix('rung-')} {flags} --mode {result.mode}"
            if config is not None:
                words += f" --tile {config.tile_m},{config.tile_n},{config.num_warps},{config.num_stages}"
            result.repro = engine.command_line(words, report.settings)
    report.resolved["tiles"] = {
        backend_name(rung): {dim: asdict(config or rung.configs[dim]) for dim in sorted({case.head_dim for case in cases})
                             if dim in rung.configs}
        for rung in chosen if rung.configs
    }  # fmt: skip
    return report


@dataclass(frozen=True)
class Row:
    """One rung of the table: its result, its speed over the rung before it and over SDPA's FlashAttention-2."""

    rung: rungs.Rung
    result: engine.Result
    over_before: float | None
    over_flash: float | None


def table(report, case, mode) -> list[Row]:
    """The rungs that ran, and those that could not, of a case in half precision and its twin in fp32.

    A rung that does not take the case's dtype stands there as its refusal only if it takes fp32 neither.
    """
    results = {}
    for result in report.results:
        if result.mode == mode and replace(result.case, dtype=case.dtype) == case:
            known = results.get(result.backend)
            if known is None or result.ok and not known.ok:
                results[result.backend] = result
    flash = results.get(BASELINE)
    rows, before = [], None
    for rung in rungs.RUNGS.values():
        result = results.get(backend_name(rung))
        if result is None:
            continue
        rows.append(Row(rung, result, _ratio(before, result), _ratio(flash, result)))
        before = result if result.ok else before
    return rows


def peer_results(report, case, mode) -> list:
    """The results that PEERS have for a case and its twin in fp32."""
    return [r for r in report.results if r.backend in PEERS and r.ok and r.mode == mode
            and replace(r.case, dtype=case.dtype) == case]  # fmt: skip


def _ratio(slow, fast) -> float | None:
    if slow is None or not slow.ok or not fast.ok:
        return None
    return slow.stats.median / fast.stats.median
