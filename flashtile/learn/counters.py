"""What an algorithm written in PyTorch does, counted while it runs: FLOPs, exponentials, bytes to and from memory.

A function is looked at as if it were one fused kernel: what it is given and what it returns is in (off-chip) memory, all that
it makes on the way is on chip. So computing with a slice of an operand reads that tile from memory, unless the last tiles
that were touched, as many as fit in on_chip_bytes, hold it; writing into a slice of a result writes to memory; the rest moves
nothing. With fused=False each operation is a kernel of its own, as in PyTorch without a compiler: all operands are read from
memory, all results are written there.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Make tensors out of nothing; a kernel would start from registers of zeros.
CREATES = {"zeros", "full", "empty", "new_zeros", "new_full", "new_empty", "zeros_like", "empty_like", "arange",
           "scalar_tensor"}  # fmt: skip
PRODUCTS = {"mm", "bmm", "mv", "dot", "addmm", "addmv", "addbmm", "baddbmm"}
EXPONENTIALS = {"exp", "exp2", "_softmax"}
POINTWISE = {"add", "sub", "rsub", "mul", "div", "maximum", "where", "masked_fill", "reciprocal"}
OVERWRITES = {"copy_", "fill_", "zero_"}


class Counts(NamedTuple):
    """flops: of matrix products, a multiply-add is 2. exps, pointwise: elements of results. read, written: bytes of memory.

    largest: elements of the largest tensor that was computed. allocated: of the largest made out of nothing, as by zeros.
    largest_exps: of the largest tensor of exponentials.
    """

    flops: int
    exps: int
    pointwise: int
    read: int
    written: int
    largest: int
    allocated: int
    largest_exps: int

    @property
    def made(self) -> int:
        """Elements of the largest tensor, computed or made out of nothing."""
        return max(self.largest, self.allocated)

    @property
    def bytes(self) -> int:
        return self.read + self.written


def count(function, *arguments, fused=True, on_chip_bytes=96 * 1024) -> tuple[Counts, Any]:
    """Call function(*arguments); return its Counts and its result. Of one head, if tiles shall be those of a thread block."""
    with _Recorder(on_chip_bytes if fused else 0) as recorder:
        result = function(*arguments)
    memory = [x for x in tree_leaves((arguments, result)) if isinstance(x, torch.Tensor)]
    return recorder.counts(memory if fused else None), result


class _Recorder(TorchDispatchMode):
    def __init__(self, on_chip_bytes):
        super().__init__()
        self.on_chip_bytes = on_chip_bytes
        self.flops = self.exps = self.pointwise = self.largest = self.allocated = self.largest_exps = 0
        # (tensor, "read" or "written"), in order; kept alive, so that no address is used twice
        self.accesses = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        aliased = [argument.alias_info for argument in func._schema.arguments]
        if name in CREATES:
            self.allocated = max(self.allocated, result.numel())
        elif not any(info is not None and not info.is_write for info in aliased):
            self._record(name, aliased, args, [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)])
        return result

    def _record(self, name, aliased, args, results):
        written = [x for x, info in zip(args, aliased) if isinstance(x, torch.Tensor) and info is not None]
        for x in tree_leaves(args):
            if isinstance(x, torch.Tensor) and not (name in OVERWRITES and any(x is y for y in written)):
                self.accesses.append((x.detach(), "read"))
        self.accesses += [(x.detach(), "written") for x in written or results]
        elements = sum(x.numel() for x in results)
        base = name.removesuffix("_")
        if base in PRODUCTS:
            # a sum that they are added to comes before the two factors
            left, right = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.flops += 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1)
        elif base in EXPONENTIALS:
            self.exps += elements
            self.largest_exps = max(self.largest_exps, elements)
        elif base in POINTWISE:
            self.pointwise += elements
        self.largest = max([self.largest, *(x.numel() for x in results if not written)])

    def counts(self, memory) -> Counts:
        """memory: tensors that are off-chip; None for all."""
        addresses = None if memory is None else {x.untyped_storage().data_ptr() for x in memory}
        moved = {"read": 0, "written": 0}
        on_chip, held = OrderedDict(), 0
        for x, way in self.accesses:
            if addresses is not None and x.untyped_storage().data_ptr() not in addresses:
                continue
            tile, size = (x.data_ptr(), x.shape, x.stride()), x.numel() * x.element_size()
            hit = tile in on_chip
            if not (hit and way == "read"):
                moved[way] += size
            on_chip[tile] = size
            on_chip.move_to_end(tile)
            held += 0 if hit else size
            while held > self.on_chip_bytes:
                held -= on_chip.popitem(last=False)[1]
        sizes = {"largest": self.largest, "allocated": self.allocated, "largest_exps": self.largest_exps}
        return Counts(self.flops, self.exps, self.pointwise, **moved, **sizes)
