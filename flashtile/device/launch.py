"""Launch a kernel again without Triton's look at every argument.

`kernel[grid](...)` describes each argument to find the compiled kernel, which is most of a small call's host time. A caller
that has a key for everything which that depends on (shapes, strides, dtypes, alignment to 16 bytes, options) gets the kernel
and the arguments of its first launch back, and exchanges the tensors alone.
"""

from collections.abc import Callable

MAX_REMEMBERED = 4096


class Relaunch:
    """A compiled kernel with the arguments of one launch.

    Called with tensors, it launches with their addresses in place of those of the first launch, in the order in which the
    arguments hold them. It keeps no tensor. They must be described as the first ones were: see the module.
    """

    def __init__(self, compiled, grid, arguments):
        self.run = compiled[grid]
        self.fill = _filler(arguments)

    def __call__(self, *tensors):
        self.run(*self.fill(tensors))


def first_launch(kernel, grid, arguments, constexprs, num_warps, num_stages, again) -> Relaunch | None:
    """Launch a kernel as Triton does. Returns how to do it again, or None where nothing was compiled for a GPU.

    arguments: tensors and tuples of them first to last; constexprs: the kernel's remaining arguments, by name. again: whether
    the call was seen before. A Relaunch takes far longer to make than a launch, too long where every call has another shape.
    """
    compiled = kernel[grid](*arguments, **constexprs, num_warps=num_warps, num_stages=num_stages)
    if not again or getattr(compiled, "function", None) is None:
        # new, interpreted, or compiled without a GPU
        return None
    return Relaunch(compiled, grid, (*arguments, *(constexprs[name] for name in kernel.arg_names[len(arguments) :])))


def _filler(arguments) -> Callable:
    """A function of tensors that gives the nested tuple `arguments` with their addresses instead of the tensors in it.

    It is compiled from its text, `lambda t: ((t[0].data_ptr(), c[0], c[1]), ...)`: a walk through the nest
    at each launch takes longer than the launch.
    """
    constants = []
    num_tensors = 0

    def text(value):
        nonlocal num_tensors
        if isinstance(value, tuple):
            return f"({''.join(text(item) + ', ' for item in value)})"
        if hasattr(value, "data_ptr"):
            num_tensors += 1
            return f"t[{num_tensors - 1}].data_ptr()"
        constants.append(value)
        return f"c[{len(constants) - 1}]"

    return eval(f"lambda t: {text(tuple(arguments))}", {"c": constants})


class Remembered(dict):
    """What was prepared for a key, None after its first call; forgotten all at once when there is much of it."""

    def __setitem__(self, key, value):
        if len(self) >= MAX_REMEMBERED:
            self.clear()
        super().__setitem__(key, value)
