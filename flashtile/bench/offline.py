"""Compile kernels for a GPU that is not here, and read from the binary what they cost: registers, spills, shared memory.

Four doors:

    compile_kernel(kernel, args, constexprs, arch=90)    one kernel, its arguments given
    compile_plan(problem, plan, 90, "forward")           the kernels of a plan of `dispatch`
    compile_decode(problem, plan, device)                those of a call on a key-value cache
    with launches(arch=90) as reports: launch(...)       every `kernel[grid](...)` inside compiles and runs nothing

What was compiled lies in Triton's cache, where a process on that GPU finds it, see `flashtile warm --target`.

Tensors may be on the "meta" device, so a shape of any size costs no memory. Works for Triton and Gluon kernels and needs
no GPU; not under TRITON_INTERPRET=1, where nothing is compiled. Not for threads: the driver of the process is exchanged.
"""

import re
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from flashtile.device.launch import launch_now
from flashtile.device.versions import triton_version
from flashtile.errors import UnsupportedError, explain

# Tensor core instructions: wgmma is HGMMA (QGMMA for fp8), tcgen05.mma UTC?MMA, mma.sync HMMA (IMMA int8, DMMA fp64).
_TENSOR_CORE = re.compile(r"\b(HGMMA|QGMMA|IGMMA|HMMA|QMMA|IMMA|DMMA|UTC[A-Z]*MMA)\b")
_LOCAL_MEMORY = re.compile(r"\b(LDL|STL)\b")
# Of a byte or two
_NARROW = re.compile(r"\b(?:LDG|STG)\.\S*?[SU](?:8|16)\b")
# Of cuobjdump -sass: address, instruction without its predicate, and the upper half of its encoding, whose bits from 41 on say,
# since sm_70, which of six counters it sets when it is done (46 to 48), and which it waits for before it starts (52 to 57)
_INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?) ?;\s+/\* 0x[0-9a-f]{16} \*/\s+/\* (0x[0-9a-f]{16}) \*/"
)
# A barrier of one partition's threads
_PARTITION = re.compile(r"BAR\.SYNC\S* (0x[0-9a-f]+), 0x")
# Of all threads: a partition's code ends there
_EVERYBODY = re.compile(r"BAR\.SYNC\S* 0x[0-9a-f]+$")
# What an address in shared memory adds to registers
_OFFSET = re.compile(r"\[[^\]]*?(0x[0-9a-f]+)?\]")
# Of ptxas, which has other names in newer Tritons
_PTXAS = re.compile(r"^ptxas\S* info", re.MULTILINE)
_WARNING = re.compile(r"warning|\bC75\d\d\b")
_RESOURCES = re.compile(r"Function (\w+):\s*\n?\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class CompiledReport:
    """What one kernel became on one architecture."""

    kernel: str
    arch: int
    num_warps: int
    num_stages: int
    # 32-bit registers a thread; Gluon's worker partitions may own more or fewer
    registers: int
    # bytes a thread in local memory: spilled registers and local arrays
    spill_bytes: int
    # bytes a block that the launch asks for; sm_90 and newer keep 1 KiB more to themselves
    shared_bytes: int
    # wall time of the whole compilation; near 0 when Triton's cache had it
    compile_s: float
    # Of the machine code, with sass=True: tensor core instructions by name, and loads and stores of local memory
    tensor_core: dict[str, int] = field(default_factory=dict)
    local_accesses: int | None = None
    # Too: loads and stores of global memory of less than 4 bytes a thread, as of rows that are not known to be aligned
    narrow_accesses: int | None = None
    # Too: loads from shared memory that may be under way while TMA writes there (sm_90), see `early_releases`
    early_releases: tuple[str, ...] | None = None
    # With ptxas=True: what ptxas warned of
    ptxas_warnings: tuple[str, ...] | None = None

    def __str__(self):
        tensor_core = "".join(f"  {count} {name}" for name, count in self.tensor_core.items())
        return (f"{self.kernel} sm_{self.arch}  warps {self.num_warps}  stages {self.num_stages}  registers {self.registers}  "
                f"spills {self.spill_bytes} B  shared {self.shared_bytes} B{tensor_core}")  # fmt: skip


class _Driver:
    """What Triton asks of a GPU's driver before it compiles, answered without one."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        # Kernels keep what they compiled by device: a name of its own for each architecture, never that of a real GPU.
        return f"offline sm_{self.target.arch}"

    def get_current_stream(self, device=None):
        return 0


@contextmanager
def launches(arch, *, sass=False, ptxas=False):
    """Inside, `kernel[grid](...)` compiles for sm_<arch> and launches nothing.

    Args:
        arch: compute capability without its dot: 80, 90, 100, ...
        sass: also count instructions of the machine code (some 0.1 s a kernel).
        ptxas: also what ptxas warned of; C75xx warnings mean serialised wgmma. What Triton's cache had goes through it again.
    Yields:
        list of CompiledReport, one a launch, in order.
    Raises:
        UnsupportedError: under the interpreter.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        raise UnsupportedError(explain("offline compilation", "a process without TRITON_INTERPRET=1", "the interpreter",
                                       "Start a process without that variable."))  # fmt: skip
    reports = []
    run = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        begin = time.perf_counter()
        with _ptxas_log() if ptxas else nullcontext() as log:
            compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        reports.append(_report(compiled, arch, time.perf_counter() - begin, sass, log and log.getvalue()))
        return compiled

    # The private field: asking for the active driver would look for a GPU.
    active = driver._active
    driver.set_active(_Driver(GPUTarget("cuda", arch, 32)))
    JITFunction.run = compile_only
    try:
        yield reports
    finally:
        JITFunction.run = run
        driver._active = active


def compile_kernel(kernel, args=(), constexprs=None, *, num_warps=4, num_stages=2, arch=90, sass=False, ptxas=False, **options):
    """Compile one kernel for sm_<arch>, without launching it.

    Args:
        kernel: a `@triton.jit` or `@gluon.jit` function.
        args: its arguments by position, or a dict by name: tensors (any device, also "meta"), numbers, None, NamedTuples of
            these. Numbers are specialised as in a launch (1 and multiples of 16).
        constexprs: dict of its `tl.constexpr` arguments by name.
        num_warps, num_stages: as in a launch; options: further compile options (maxnreg, num_ctas, ...).
        arch, sass, ptxas: as in `launches`.
    Returns:
        CompiledReport.
    Raises:
        UnsupportedError: under the interpreter. Triton's own errors when the kernel does not compile.
    """
    by_name = dict(args) if isinstance(args, dict) else {}
    by_position = () if by_name else args
    with launches(arch, sass=sass, ptxas=ptxas) as reports:
        options |= {"num_warps": num_warps, "num_stages": num_stages}
        launch_now(kernel, (1,), by_position, by_name | (constexprs or {}), **options)
    return reports[-1]


def compile_plan(problem, plan, arch, direction, *, sass=False):
    """Compile the kernels of a plan for sm_<arch>, without data: contiguous tensors, on the device "meta".

    Args:
        problem: AttentionProblem; without sinks and seqused.
        plan: a dispatch.Plan of it, for the direction "forward", "backward" or "dslopes".
        arch, sass: as in `launches`.
    Returns:
        list of CompiledReport.
    """
    import torch

    from flashtile.problem import Operands

    def empty(*shape, dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows_q, rows_k = ((problem.total_q,), (problem.total_k,)) if problem.varlen else (
        (problem.batch, problem.seqlen_q), (problem.batch, problem.seqlen_k))  # fmt: skip
    starts = empty(problem.batch + 1, dtype=torch.int32) if problem.varlen else None
    operands = Operands(
        empty(*rows_q, problem.num_heads, problem.head_dim, dtype=problem.dtype),
        empty(*rows_k, problem.num_heads_kv, problem.head_dim, dtype=problem.dtype),
        empty(*rows_k, problem.num_heads_kv, problem.head_dim_v, dtype=problem.dtype),
        starts, starts,
        alibi_slopes=empty(problem.num_heads, dtype=torch.float32) if problem.has_alibi else None,
        rng_state=empty(2, dtype=torch.int64) if problem.dropout_p else None,
    )  # fmt: skip
    with launches(arch, sass=sass) as reports:
        for job in plan.compile_jobs(problem, operands, direction):
            job()
    return reports


def compile_decode(problem, plan, device, *, sass=False, ptxas=False):
    """Compile the kernels of a call on a key-value cache, without data.

    Args:
        problem: CacheProblem with lengths of their own; without packed queries, rotary embedding, sinks.
        plan: a dispatch.Plan of it for the direction "decode".
        device: the hardware.Device that it is for.
        sass, ptxas: as in `launches`.
    Returns:
        list of CompiledReport.
    """
    import torch

    from flashtile.kvcache_problem import FP8, CacheOperands

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    batch, heads_kv, page_size = problem.batch, problem.num_heads_kv, problem.page_size
    pages = -(-problem.capacity // page_size) if page_size else 0
    rows = (batch * pages, page_size) if page_size else (batch, problem.capacity)
    new = {}
    if problem.appends:
        new = {name: empty(batch, problem.seqlen_new, heads_kv, dim, dtype=problem.dtype)
               for name, dim in (("k", problem.head_dim), ("v", problem.head_dim_v))}  # fmt: skip
    of_fp8 = ("q", "k", "v") if problem.dtype == FP8 else ("k", "v")
    descales = {f"{name}_descale": empty(batch, heads_kv, dtype=torch.float32) for name in of_fp8 if problem.has_descale}
    operands = CacheOperands(
        empty(batch, problem.seqlen_q, problem.num_heads, problem.head_dim, dtype=problem.dtype),
        empty(*rows, heads_kv, problem.head_dim, dtype=problem.cache_dtype),
        empty(*rows, heads_kv, problem.head_dim_v, dtype=problem.cache_dtype), **new, **descales, cache_seqlens=empty(batch),
        block_table=empty(batch, pages) if page_size else None,
        alibi_slopes=empty(problem.num_heads, dtype=torch.float32) if problem.has_alibi else None,
    )  # fmt: skip
    with launches(device.sm, sass=sass, ptxas=ptxas) as reports:
        plan.module.bind_decode(problem, plan.configs, operands, device)(operands)
    return reports


@contextmanager
def _ptxas_log():
    """StringIO of what Triton prints inside, what its ptxas says among it."""
    from triton import knobs

    with knobs.nvidia.scope(), redirect_stdout(StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        yield log


def _report(compiled, arch, compile_s, sass, log):
    """log: what ptxas printed, empty if it did not run; None if nobody wants to know."""
    metadata = compiled.metadata
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        registers, stack, local = _resources(_cuobjdump("--dump-resource-usage", cubin), metadata.name)
        extra = _instructions(_cuobjdump("-sass", cubin)) if sass else {}
        if log is not None:
            log = log if _PTXAS.search(log) else _ptxas(compiled.asm["ptx"], arch, Path(folder))
            extra["ptxas_warnings"] = tuple(line.strip() for line in log.splitlines() if _WARNING.search(line))
    return CompiledReport(
        kernel=metadata.name, arch=arch, num_warps=metadata.num_warps, num_stages=metadata.num_stages, registers=registers,
        spill_bytes=stack + local, shared_bytes=metadata.shared, compile_s=compile_s, **extra,
    )  # fmt: skip


def _cuobjdump(option, cubin):
    from triton import knobs

    return subprocess.run([knobs.nvidia.cuobjdump.path, option, cubin], check=True, capture_output=True, text=True).stdout


def _resources(dump, kernel):
    """(registers, stack, local) of the kernel in cuobjdump's list."""
    for name, *numbers in _RESOURCES.findall(dump):
        if name == kernel:
            return tuple(map(int, numbers))
    raise UnsupportedError(explain("cuobjdump", f"the resources of {kernel}", repr(dump[:200])))


def _instructions(code):
    return {
        "tensor_core": dict(Counter(_TENSOR_CORE.findall(code))),
        "local_accesses": len(_LOCAL_MEMORY.findall(code)),
        "narrow_accesses": len(_NARROW.findall(code)),
        "early_releases": early_releases(code),
    }


def early_releases(code):
    """Loads from shared memory that may not be done when a barrier lets TMA fill their buffer again, each as text.

    A thread that tells a barrier that it has read a buffer may still have loads under way. What other threads write to shared
    memory comes behind them; what TMA writes does not, and was there first in one kernel of this project.

    code: of cuobjdump -sass, sm_90. Barriers that TMA waits for are those polled last before a UTMALDG; buffers that it does
    not fill are those that another partition stores to. Branches are not followed.
    """
    instructions = [(address, text, int(word, 16) >> 41) for address, text, word in _INSTRUCTION.findall(code)]
    guards, polled = set(), None
    for _, text, _ in instructions:
        if text.startswith("SYNCS.PHASECHK"):
            polled = _OFFSET.search(text)[1]
        elif text.startswith("UTMALDG") and polled:
            guards.add(polled)
    # By the barrier that its threads use next
    partitions, partition = [], None
    for _, text, _ in reversed(instructions):
        partition = match[1] if (match := _PARTITION.match(text)) else partition
        partitions.append(partition)
    partitions.reverse()
    stores = {(_OFFSET.search(text)[1], partition)
              for (_, text, _), partition in zip(instructions, partitions) if text.startswith("STS")}  # fmt: skip
    found, under_way = [], {}
    for (address, text, control), partition in zip(instructions, partitions):
        for counter in range(6):
            if control >> 11 >> counter & 1:
                under_way.pop(counter, None)
        if _EVERYBODY.match(text):
            under_way.clear()
        if text.startswith("SYNCS.ARRIVE.TRANS64.A1T0") and _OFFSET.search(text)[1] in guards:
            found += [f"{address}: {text} before {load}" for load in under_way.values()]
        counter = control >> 5 & 7
        if text.startswith("LDS") and counter < 6:
            offset = _OFFSET.search(text)[1]
            if not any(stored == offset and where != partition for stored, where in stores):
                under_way[counter] = f"{text} is done"
    return tuple(found)


def _ptxas(ptx, arch, folder):
    """What ptxas prints of a kernel."""
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE).group(1)
    # As Triton calls it from 3.7 on
    options = ["--regAllocOptLevel=2"] if triton_version() >= (3, 7) else []
    return subprocess.run([get_ptxas(arch).path, "-v", f"--gpu-name={target}", *options, source, "-o", folder / "again.cubin"],
                          check=True, capture_output=True, text=True).stderr  # fmt: skip
