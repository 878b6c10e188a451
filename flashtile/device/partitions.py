"""Warp specialisation: a kernel's partitions as one list, of which a call has those that it needs."""

from flashtile.device.compat import builtin, gl


@builtin
def specialize(partitions, _semantic=None, _generator=None):
    """`gl.warp_specialize` of partitions (count, function, arguments, warps, registers of a thread).

    Each is there count times, which may be 0; where that is more than once, the last argument of each is its number. The first
    that is there runs in the kernel's own warps, whatever its warps and registers say. The list is to be written where it is
    passed: bound to a name before, it loses what is constexpr in it. Triton does not look at builtins when it asks whether a
    kernel in its cache is still right: who changes this one clears the cache.
    """
    running = []
    for count, function, arguments, warps, registers in partitions:
        count = int(getattr(count, "value", count))
        for number in range(count):
            numbered = [*arguments, gl.constexpr(number)] if count > 1 else arguments
            running.append(((function, gl.tuple(numbered)), warps, registers))
    functions, num_warps, registers = zip(*running)
    return gl.warp_specialize(functions, num_warps[1:], registers[1:], _semantic=_semantic, _generator=_generator)
