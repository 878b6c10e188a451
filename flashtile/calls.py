"""Find what was prepared for a call by all that it depends on but its data (`Calls`), and run it if nobody wants to see it."""

from operator import itemgetter

import torch
from torch.autograd import forward_ad, profiler
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flashtile import hardware, settings
from flashtile.device.launch import Remembered

try:
    # How torch.compile knows tensors again; not of its public interface
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

_num_dispatch_modes, _innermost_transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_key_is_included, _PRE_DISPATCH = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
# Kept for one set of options, and for one kind of call
MAX_GLANCES = 4


def kind(tensors, more) -> tuple:
    """What tells calls of one kind from others: `more`, and of each tensor that is there all but its data."""
    return more, *[
        x if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg(), x.data_ptr() % 16)
        for x in tensors
    ]  # fmt: skip


class Glance:
    """A fast test, one call of torch's C++ guards: whether tensors have the shapes, strides, dtypes and device of those it was
    made from, and addresses that are multiples of 16 bytes.

    It never says yes wrongly. It may say no to tensors of that kind: to two where it was made from one that stands in both
    places, for example. `possible`: whether it can be made from tensors.
    """

    __slots__ = ("absent", "again", "none", "present", "same")

    def __init__(self, tensors):
        places = {id(x): i for i, x in reversed([*enumerate(tensors)]) if x is not None}
        present = sorted(places.values())
        # (place, the first one) of a tensor that stands in several: torch's look says no to it
        self.again = [(i, places[id(x)]) for i, x in enumerate(tensors) if x is not None and places[id(x)] != i]
        absent = [i for i, x in enumerate(tensors) if x is None]
        self.present, self.absent = itemgetter(*present), itemgetter(*absent)
        self.none = self.absent(tensors)
        there = self.present(tensors)
        shapes, strides = [list(x.shape) for x in there], [list(x.stride()) for x in there]
        self.same = TensorGuards(*there, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check

    @staticmethod
    def possible(tensors) -> bool:
        there = [x for x in tensors if x is not None]
        # itemgetter gives a tuple of two or more
        several = len({id(x) for x in there}) > 1 and len(there) < len(tensors)
        return TensorGuards is not None and several and not any(x.data_ptr() % 16 for x in there)

    def fits(self, tensors) -> bool:
        there = self.present(tensors)
        if self.absent(tensors) != self.none:
            return False
        addresses = 0
        for x in there:
            if x is None or x.is_nested:
                # torch's look ends the process at nested ones
                return False
            addresses |= x.data_ptr()
        if addresses % 16 or not self.same(*there):
            return False
        for place, first in self.again:
            if tensors[place] is not tensors[first]:
                return False
        return True


class Calls:
    """What was prepared for calls, by the kind of their tensors, their options, and the tiers that the environment prefers."""

    def __init__(self):
        # (prepared, glances) each: guards also tell apart what kinds don't, tensors that require gradients from others
        self.by_kind = Remembered()
        # By all but tensors: (prepared, glance) of the calls that came last
        self.latest = Remembered()

    def find(self, tensors, options):
        """What keep was given for calls of this kind, or None. What this is asked about may be of any type."""
        try:
            more = settings.preferred_tiers(), options
            latest = self.latest.get(more, ())
            for prepared, glance in latest:
                if glance.fits(tensors):
                    return prepared
            prepared, glances = self.by_kind.get(kind(tensors, more), (None, ()))
            if prepared is not None and len(glances) < MAX_GLANCES and Glance.possible(tensors):
                # Not before the second call: many kinds come once
                glances.append((prepared, Glance(tensors)))
            if glances:
                self.latest[more] = [glances[-1], *(x for x in latest if x is not glances[-1])][:MAX_GLANCES]
            return prepared
        except (AttributeError, RuntimeError, TypeError, ValueError):
            # Not a tensor, one without an address, or without a hash: the checks say so
            return None

    def keep(self, tensors, options, prepared):
        """Have find give `prepared` from now on; not for options without a hash, such as a list."""
        key = kind(tensors, (settings.preferred_tiers(), options))
        try:
            self.by_kind[key] = prepared, []
        except TypeError:
            pass


def again(call, tensors):
    """Run what `Calls.find` gave, on the device of the first of its tensors."""
    if hardware.is_current(tensors[0]):
        return call(tensors)
    with hardware.on_device_of(tensors[0]):
        return call(tensors)


def nobody_observes():
    """Whether no mode, transform or profiler wants to see the ops of this call: then it may go without torch's dispatcher."""
    return (
        not is_compiling()
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and _num_dispatch_modes() == 0
        # Those of make_fx(pre_dispatch=True) are not in that number; the flag, which is quick to ask, is any thread's
        and not (is_in_torch_dispatch_mode() and _key_is_included(_PRE_DISPATCH))
        and _innermost_transform() is None
        and not profiler._is_profiler_enabled
    )
