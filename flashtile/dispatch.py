"""plan(problem, device): which tier runs a problem, with which tiles, or the list of refusals. Pure, and cached.

A tier is a module with DIRECTIONS ("forward", "backward", "dslopes": the gradient of ALiBi's slopes) that it has kernels
for, refuses(problem, device, direction) -> reason or None, and configs(problem, device, direction) -> {kernel: TileConfig}; it
imports its kernels only in bind_forward(problem, configs), which gives a function of operands, and in bind_backward(problem,
configs) and bind_dslopes(problem, configs), functions of operands, out, lse, dout and dlse; each for many calls of one kind
(see device/launch.py). With yields(problem, device, direction) -> reason or None it leaves to later tiers what they do faster.
out and lse mean the same everywhere, so a backward may run on another tier than its forward. No tier is skipped silently: a
plan carries every refusal before it.
"""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from types import ModuleType

from flashtile import hardware, settings
from flashtile.errors import UnsupportedError

logger = logging.getLogger("flashtile")

# Fastest first.
TIERS = {
    "hopper": "flashtile.hopper",
    "portable": "flashtile.portable",
    "sdpa": "flashtile.cpu.sdpa",
    "reference": "flashtile.cpu.tiled",
}


@dataclass(frozen=True)
class Plan:
    """tier: a name of TIERS. configs: tiles by kernel. refusals: (tier, reason) of the faster tiers that refused."""

    tier: str
    configs: dict
    refusals: tuple[tuple[str, str], ...] = ()
    # the tier's module, at hand for each call
    module: ModuleType | None = field(default=None, repr=False, compare=False)
    # not empty once it has run: then its kernels are there
    ran: list = field(default_factory=list, repr=False, compare=False)

    def bind(self, direction, problem):
        """The tier's function for calls of one kind."""
        return getattr(self.module, f"bind_{direction}")(problem, self.configs)

    def first(self, direction, problem, function, operands, *tensors):
        """Run the function of `bind` for the first time; log what is being compiled where that takes over a second."""
        if self.ran or not operands.q.is_cuda:
            return function(operands, *tensors)
        dtype = str(problem.dtype).removeprefix("torch.")
        what = f"the {self.tier} {direction} kernels for {dtype}, head dim {problem.head_dim}"
        hint = "Triton keeps them for later processes; `flashtile warm` compiles ahead."
        waiting = threading.Timer(1.0, logger.warning, (f"compiling {what}. {hint}",))
        waiting.daemon = True
        waiting.start()
        try:
            result = function(operands, *tensors)
        finally:
            waiting.cancel()
        self.ran.append(True)
        return result

    def compile_jobs(self, problem, operands, direction) -> list:
        """Functions that each compile one kernel, and run it on memory of no meaning; none in a tier without compile_jobs."""
        jobs = getattr(self.module, "compile_jobs", None)
        return jobs(problem, self.configs, operands, direction) if jobs else []


@lru_cache(maxsize=4096)
def plan(problem, device, direction="forward", prefer=()) -> Plan:
    """The first tier that takes the problem; only those of `prefer`, in its order, if one has kernels for the direction.

    Raises:
        UnsupportedError: no tier takes it; lists each refusal.
    """
    tiers = {name: import_module(module) for name, module in TIERS.items()}
    tiers = {name: tier for name, tier in tiers.items() if direction in tier.DIRECTIONS}
    tiers = {name: tiers[name] for name in prefer if name in tiers} or tiers
    refusals = []
    for name, tier in tiers.items():
        reason = tier.refuses(problem, device, direction)
        if reason is None and name not in prefer and hasattr(tier, "yields"):
            reason = tier.yields(problem, device, direction)
        if reason is None:
            return Plan(name, tier.configs(problem, device, direction), tuple(refusals), tier)
        refusals.append((name, reason))
    reasons = "\n".join(f"  {name}: {reason}" for name, reason in refusals)
    raise UnsupportedError(f"no tier takes this problem on {device.name} ({device.arch}).\n{reasons}\n  {problem}")


def plan_for(problem, torch_device, direction) -> Plan:
    """The plan of a call on tensors of torch_device, with the tiers that the environment prefers."""
    return plan(problem, hardware.detect(torch_device), direction, settings.preferred_tiers())


def compile_ahead(problem, operands, directions=("forward", "backward")) -> dict[str, float]:
    """Compile the kernels of a problem side by side in threads, so that the first call finds them.

    operands: tensors of the call; the kernels run once on them, and on scratch memory.

    Returns:
        For each direction the seconds until its last kernel was ready.
    """
    start = time.perf_counter()

    def finish(job):
        # Each thread has a current GPU of its own
        with hardware.on_device_of(operands.q):
            job()
        return time.perf_counter() - start

    with ThreadPoolExecutor() as threads:
        running = {}
        for direction in directions:
            chosen = plan_for(problem, operands.q.device, direction)
            running[direction] = [threads.submit(finish, job) for job in chosen.compile_jobs(problem, operands, direction)]
        return {direction: max((job.result() for job in jobs), default=0.0) for direction, jobs in running.items()}
