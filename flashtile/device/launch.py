"""Launch the kernels of a call again without Triton's look at every argument.

`kernel[grid](...)` describes each argument to find the compiled kernel, checks each TMA descriptor and makes it anew: most of
a small call's host time. `Launches` leaves that to the first two calls of a kind. After them it hands addresses to the driver,
or to Triton's launcher where a kernel takes TMA descriptors, in a function that is compiled for the kind: a walk through nested
arguments would take longer than a launch.
"""

MAX_REMEMBERED = 4096


class Launches:
    """The kernels of one kind of call, launched one after the other.

    Calls are of one kind if their tensors have the same shapes, strides, dtypes, device and alignment to 16 bytes, and all else
    is equal (`calls.kind`). start(launch, *tensors) launches the kernels by `launch(kernel, grid, arguments, constexprs,
    **options)`, as launch_now is called. What arguments hold at any depth, or describe for TMA, are the tensors themselves, or
    views of those that share memory with no other. Nothing else in them may change from call to call. No tensor is kept.
    """

    __slots__ = ("run", "seen", "start")

    def __init__(self, start):
        # run(*tensors): of the call, in one order, None where one is off. Another function later, so not to be kept.
        self.start, self.seen, self.run = start, False, self.through_triton

    def through_triton(self, *tensors):
        # Objects of their own: what is one tensor in two places now may be two in the next call.
        tensors = [x if x is None else x.detach() for x in tensors]
        launched = []

        def launch(kernel, grid, arguments, constexprs, **options):
            compiled = launch_now(kernel, grid, arguments, constexprs, **options)
            launched.append((compiled, grid, (*arguments, *(constexprs[n] for n in kernel.arg_names[len(arguments) :]))))

        self.start(launch, *tensors)
        on_gpu = launched and all(getattr(compiled, "function", None) for compiled, *_ in launched)
        # To make the function takes far longer than a call, too long where every call is of another kind.
        if self.seen and self.run == self.through_triton and on_gpu:
            self.run = _again(launched, tensors, self.through_triton) or self.run
        self.seen = True


def launch_now(kernel, grid, arguments, constexprs, **options):
    """Launch as Triton does; returns what it compiled. constexprs: the kernel's last arguments, by name."""
    # TMA descriptors of tensors on a GPU
    if any(hasattr(x, "block_shape") and x.base.is_cuda for x in arguments):
        from flashtile.device.launcher import ensure_context

        ensure_context()
    # Multiply-adds, said here since Triton 3.9 warns where nobody says it and 3.10 will do without
    return kernel[grid](*arguments, **constexprs, enable_fp_fusion=True, **options)


def _again(launched, tensors, through_triton):
    """A function of tensors that does the launches; None where Triton's version has a launcher that we don't know.

    launched: (compiled kernel, grid, all its arguments) each. The text of the function is, for a kernel that the driver starts
    and one that Triton's launcher does,

        def again(t0, t1, t2):
            if hooked(): return through_triton(t0, t1, t2)
            stream = current_stream(0)
            p0 = t0.data_ptr(); p1 = t1.data_ptr()
            launch = c4.pop() if c4 else c3()
            words = launch.words
            words[0] = p0
            launch.config.stream = stream
            if c2(*launch.arguments): return through_triton(t0, t1, t2)
            c4.append(launch)
            c5(132, 1, 1, stream, c6, c7[p0], 4096, 64, 1, (p1 + 512, None), 64)

    A prepared launch is in nobody's list while it is filled: threads don't share one.
    """
    # Not before a kernel ran: a machine without Triton imports this module too
    from flashtile.device import launcher as triton_launcher

    names = {"hooked": triton_launcher.hooked, "through_triton": through_triton}
    names["current_stream"] = triton_launcher.driver.active.get_current_stream
    places = {id(x): i for i, x in enumerate(tensors) if x is not None}
    used = set()

    def constant(value):
        names[f"c{len(names)}"] = value
        return f"c{len(names) - 1}"

    def address(x):
        place = places.get(id(x))
        if place is not None:
            used.add(place)
            return f"p{place}"
        (place,) = (i for i, y in enumerate(tensors) if y is not None and _memory(y) == _memory(x))
        used.add(place)
        return f"p{place} + {x.data_ptr() - tensors[place].data_ptr()}"

    def text(value):
        if isinstance(value, tuple | list):
            return f"({''.join(text(item) + ', ' for item in value)})"
        if hasattr(value, "data_ptr"):
            return address(value)
        return repr(value) if value is None or type(value) in (int, bool) else constant(value)

    def by_driver(make, addresses):
        start, make, spare = constant(triton_launcher.start_kernel()), constant(make), constant([])
        filled = (f"words[{i}] = {address(x)}" for i, x in addresses)
        return [f"launch = {spare}.pop() if {spare} else {make}()", "words = launch.words", *filled,
                "launch.config.stream = stream", f"if {start}(*launch.arguments): return through_triton({parameters})",
                f"{spare}.append(launch)"]  # fmt: skip

    def by_triton(launcher, grid, arguments):
        words, descriptors = [], iter(launcher.descriptors)
        for value in arguments:
            if hasattr(value, "block_shape"):
                maps = TensorMaps(value, next(descriptors))
                words += [f"{constant(maps)}[{address(value.base)}]", *map(text, (*value.shape, *value.strides))]
            else:
                words.append(text(value))
        words = f"({', '.join(words)},)" if launcher.as_tuple else ", ".join(words)
        before, after = ", ".join(map(text, (*grid, 1, 1)[:3])), ", ".join(map(constant, launcher.constants))
        return f"{constant(launcher.run)}({before}, stream, {after}, {words})"

    parameters = ", ".join(f"t{i}" for i in range(len(tensors)))
    lines = []
    for compiled, grid, arguments in launched:
        # With it Triton may unload the code.
        constant(compiled)
        launcher = triton_launcher.launcher_of(compiled)
        if launcher is None:
            return None
        prepared = triton_launcher.preparer(compiled, grid, arguments)
        lines += [by_triton(launcher, grid, arguments)] if prepared is None else by_driver(*prepared)
    index = next(x for x in tensors if x is not None).device.index
    body = [f"if hooked(): return through_triton({parameters})", f"stream = current_stream({index})",
            *(f"p{i} = t{i}.data_ptr()" for i in sorted(used)), *lines]  # fmt: skip
    exec(f"def again({parameters}):\n " + "\n ".join(body), names)
    return names["again"]


def _memory(x):
    return x.untyped_storage().data_ptr()


class Remembered(dict):
    """What was prepared, by its key; forgotten all at once when there is much of it."""

    def __setitem__(self, key, value):
        if len(self) >= MAX_REMEMBERED:
            self.clear()
        super().__setitem__(key, value)


class TensorMaps(Remembered):
    """What TMA reads of one descriptor, by the address of its tensor: allocators give the same addresses again and again."""

    def __init__(self, descriptor, metadata):
        from flashtile.device.launcher import map_maker

        self.map_at = map_maker(descriptor, metadata)

    def __missing__(self, address):
        self[address] = made = self.map_at(address)
        return made
