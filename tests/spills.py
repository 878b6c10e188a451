"""Bytes of local memory that a kernel may use: what its test allows, and what Triton 3.9 needs more.

From 3.9 on ptxas is 13.4, which Triton asks for level 2 of register allocation to work around an error of it. The Hopper
kernels fill their registers; at level 4, its own, it spills less (the backward of head dim 64, causal: 0 bytes for 88), but no
record says that a GPU has run kernels of 3.9.
"""

import json
from pathlib import Path

from flashtile.device.versions import triton_version

# By the names that the tests print
_WITH_3_9 = json.loads((Path(__file__).parent / "spills_3_9.json").read_text())
# Kernels whose products ptxas 13.4 does one after the other, for want of registers
SERIALISED_WITH_3_9 = ("attention_backward d160 dv160 features", "attention_backward d32 dv256 plain")


def has_newest() -> bool:
    return triton_version() >= (3, 9)


def allowed(name, budget) -> int:
    """budget: what the test allows with older ones."""
    return max(budget, _WITH_3_9.get(name, 0)) if has_newest() else budget
