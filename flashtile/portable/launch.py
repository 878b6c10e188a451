"""A kernel of calls of one kind, with what stays the same from call to call."""

from flashtile.device.launch import Relaunch


class Kernel:
    """A Triton kernel, its grid and its constexprs. dependent: it may begin before the kernel before it ends, and waits inside.

    The first launch goes through Triton, later ones through `Relaunch`: see there what must stay the same.
    """

    def __init__(self, function, grid, constexprs, num_warps, num_stages, dependent=False):
        self.function, self.grid, self.constexprs = function, (*grid, 1, 1)[:3], constexprs
        self.options = {"num_warps": num_warps, "num_stages": num_stages}
        if dependent:
            self.options["launch_pdl"] = True
        self.relaunch = None

    def __call__(self, tensors, arguments):
        """Launch. arguments: a function that gives them; tensors: those in them, first to last, None where one is off."""
        if self.relaunch is not None:
            self.relaunch(*[x for x in tensors if x is not None])
            return
        values = arguments()
        compiled = self.function[self.grid](*values, **self.constexprs, **self.options)
        if getattr(compiled, "function", None) is not None:
            # else interpreted, or compiled without a GPU
            names = self.function.arg_names[len(values) :]
            self.relaunch = Relaunch(compiled, self.grid, (*values, *(self.constexprs[name] for name in names)))
