"""Which tier decodes: the fastest that does not refuse."""

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

from flashtile import hardware, settings
from flashtile.device import versions
from flashtile.errors import UnsupportedError

# Fastest first: benchmarks/results/nvidia-h200/mla-hopper.json and mla-portable.json.
TIERS = {
    "hopper": "flashtile.mla.hopper",
    "portable": "flashtile.mla.portable",
    "reference": "flashtile.mla.cpu",
}


@dataclass(frozen=True)
class Plan:
    """tier: a name of TIERS. config: its tile. refusals: (tier, reason) of the faster tiers that refused."""

    tier: str
    config: Any
    module: ModuleType
    refusals: tuple[tuple[str, str], ...] = ()


@lru_cache(maxsize=4096)
def plan(problem, device, prefer=()) -> Plan:
    """The first tier that takes the problem, of those in `prefer` if it names some of TIERS.

    Raises:
        UnsupportedError: no tier takes it; lists each refusal.
    """
    refusals = []
    for name in [name for name in prefer if name in TIERS] or TIERS:
        if name != "reference" and device.arch == "cpu" and not settings.triton_interprets():
            # Without importing Triton, which may be missing
            refusals.append((name, "needs a GPU, or FLASHTILE_TIER=portable and TRITON_INTERPRET=1"))
            continue
        if name == "hopper" and name not in prefer and (reason := versions.unknown()):
            refusals.append((name, reason))
            continue
        tier = import_module(TIERS[name])
        reason = tier.refuses(problem, device)
        if reason is None:
            return Plan(name, tier.config_of(problem, device), tier, tuple(refusals))
        refusals.append((name, reason))
    reasons = "\n".join(f"  {name}: {reason}" for name, reason in refusals)
    raise UnsupportedError(f"no tier takes this problem on {device.name} ({device.arch}).\n{reasons}\n  {problem}")


def plan_for(problem, torch_device) -> Plan:
    """The plan of a call on tensors of torch_device, with the tiers that the environment prefers."""
    return plan(problem, hardware.detect(torch_device), settings.preferred_tiers())
