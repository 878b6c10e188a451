"""Checks of single arguments that the descriptions of calls share (problem, kvcache_problem, mla.problem).

Each raises what a user sees: the argument's name, what was expected, what came, the way out.
"""


import torch

from flashtile.errors import DeviceError, DtypeError, ShapeError, UnsupportedError, ValueRangeError, explain


def shape_of(x) -> str:
    return f"shape {tuple(x.shape)}"


def check_is_tensor(name, x) -> None:
    if not isinstance(x, torch.Tensor):
        raise DtypeError(explain(name, "a torch.Tensor", type(x).__name__))


def check_tensor(name, x, way_out="") -> None:
    """A dense tensor. way_out: of a nested one."""
    check_is_tensor(name, x)
    if x.is_nested:
        raise UnsupportedError(explain(name, "a tensor with one size a dim", "a nested tensor", way_out))
    if x.layout is not torch.strided:
        raise UnsupportedError(explain(name, "a dense tensor", f"layout {x.layout}", f"Use {name}.to_dense()."))


def check_rank(name, x, rank, layout, way_out="") -> None:
    if x.dim() != rank:
        raise ShapeError(explain(name, f"{rank} dims {layout}", shape_of(x), way_out))


def check_device_type(name, x) -> None:
    if x.device.type not in ("cuda", "cpu", "meta"):
        way_out = f"Move it: {name}.to('cpu') or {name}.to('cuda')."
        raise DeviceError(explain(name, "a CUDA or CPU tensor", f"device {x.device}", way_out))


def check_device(name, x, device, of="q") -> None:
    if x.device != device:
        raise DeviceError(explain(name, f"the device of {of}, {device}", x.device, f"Move it: {name}.to({of}.device)."))


def check_last_dim(name, x, layout="") -> None:
    """Numbers of a row lie side by side. layout: what an error shows beside .contiguous()."""
    if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0:
        way_out = f"Use {name}.contiguous()" + (f", or lay it out as {layout}." if layout else ".")
        raise ShapeError(explain(name, "a contiguous last dim (stride 1)", f"strides {x.stride()}", way_out))


def check_int32(name, x, device, shape, of="q") -> None:
    """An index tensor on the device of `of`. shape: sizes; any size has None, or its name in the error."""
    if x.dtype != torch.int32:
        raise DtypeError(explain(name, "dtype torch.int32", x.dtype, f"Cast it: {name}.to(torch.int32)."))
    check_device(name, x, device, of)
    if x.dim() != len(shape) or any(isinstance(want, (int, torch.SymInt)) and want != got for want, got in zip(shape, x.shape)):
        sizes = ["any" if size is None else str(size) for size in shape]
        expected = f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"
        raise ShapeError(explain(name, f"shape {expected}", shape_of(x)))
    check_last_dim(name, x)


def check_bool(name, value) -> None:
    if not isinstance(value, bool):
        raise DtypeError(explain(name, "True or False", repr(value)))


def is_int(value) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_int(name, value) -> None:
    if not is_int(value):
        raise DtypeError(explain(name, "an int", repr(value)))


def check_number(name, value) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
        is_tensor = isinstance(value, torch.Tensor)
        way_out = "Call .item() on a tensor once, outside the loop." if is_tensor else f"Use float({name})."
        raise DtypeError(explain(name, "a number", repr(value), way_out if hasattr(value, "dtype") else ""))


def _in_fp32(number) -> bool:
    """Whether it is finite in fp32, in which kernels compute, and 0 there only if it is 0."""
    return number == 0 or 2.0**-149 <= abs(number) <= (2 - 2.0**-23) * 2.0**127


def check_scale(softmax_scale) -> None:
    """softmax_scale: a number, or None."""
    if softmax_scale is not None and not _in_fp32(softmax_scale):
        raise ValueRangeError(explain("softmax_scale", "a finite number that fp32 holds", softmax_scale))


def check_softcap(softcap) -> None:
    if not (_in_fp32(softcap) and softcap >= 0):
        raise ValueRangeError(explain("softcap", "a finite number >= 0 that fp32 holds (0 is off)", softcap))
