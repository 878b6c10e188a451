"""Tell torch's FlopCounterMode what flashtile's ops cost, when it is imported and not before: it imports triton."""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

COUNTER = "torch.utils.flop_counter"


def register(formulas):
    """formulas: functions that take an op's arguments and return FLOPs, by op (an OpOverloadPacket)."""
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER], formulas)
    else:
        sys.meta_path.insert(0, _WhenImported(formulas))


def _register(counter, formulas):
    # A counter copies the registry when it is made
    active = [mode.counter.flop_registry for mode in _get_current_dispatch_mode_stack() if hasattr(mode, "counter")]
    for op, formula in formulas.items():
        counter.register_flop_formula(op, get_raw=True)(formula)
        for registry in active:
            registry.setdefault(op, counter.flop_registry[op])


class _WhenImported(MetaPathFinder):
    """Finds the counter's module once, as others do, and registers the formulas after it has run."""

    def __init__(self, formulas):
        self.formulas = formulas

    def find_spec(self, fullname, path, target=None):
        if fullname != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _register(module, self.formulas)

        spec.loader.exec_module = exec_module
        return spec
