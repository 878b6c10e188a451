"""`flashtile explain`: the work of a call, its floor, and the kernels that it gets; needs no GPU."""

import itertools
from typing import Annotated

import typer

from flashtile.cli.common import CACHED, OK, PACKED, Progress, ShapeFlags, command, decoding, make_console


def add(app) -> None:
    app.command("explain")(command(explain))


def explain(
    shape: ShapeFlags,
    target: Annotated[
        str, typer.Option("--target", help="Devices (H200,A100,...) or architectures (sm_90); the GPU here, else H200.")
    ] = "",
    compile_kernels: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the kernels for the target, to count registers and spills.")
    ] = True,
    mode: Annotated[
        str, typer.Option("--mode", help="fwd_bwd, or decode: one query token, or --seqlen-q, on a key-value cache.")
    ] = "fwd_bwd",
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Also the rungs of the ladder: shared memory; compiled, registers, blocks an SM.")
    ] = False,
) -> int:
    """Show work, bytes, floor, memory, the chosen tier and tiles, every refusal, and what the kernels compile to."""
    console = make_console()
    with Progress(True) as progress:
        progress.say("importing torch")
        from flashtile import hardware

        devices = [find_target(name.strip(), hardware) for name in target.split(",")]
        decodes = decoding(mode)
        cases = shape.cases("bf16" if all(device.sm >= 80 for device in devices) else "fp16", decodes,
                            takes=CACHED if decodes else PACKED)  # fmt: skip
        for case, device in itertools.product(cases, devices):
            if case.latent or decodes and case.has_latent_dims:
                lines = list(_describe_latent(case, device))
            else:
                describe = _describe_cache if decodes else _describe
                lines = list(describe(case, device, compile_kernels, progress))
            if ladder:
                from flashtile.cli.ladder import lines_for_case

                progress.say(f"{'compiling' if compile_kernels else 'describing'} the ladder for {device.arch}")
                lines += lines_for_case(case, device, compile_kernels)
            progress.say("")
            head = f"[bold]{case.label()}[/]   on {device.name} ({device.arch})"
            console.print("\n".join([head, *lines, ""]), highlight=False)
    return OK


def find_target(name, hardware):
    """The hardware.Device of a name; of an empty one, the GPU here, else an H200."""
    from flashtile.bench.cases import UsageError

    if not name:
        here = hardware.detect()
        return hardware.by_name("H200") if here is hardware.CPU else here
    if "," in name:
        raise UsageError(f"target: expected one device here, got {name!r}.")
    try:
        return hardware.by_name(name)
    except KeyError as error:
        raise UsageError(f"target: {error.args[0]}") from None


def _describe(case, device, compile_kernels, progress):
    """Lines about one case."""
    from flashtile.cli.show import size
    from flashtile.problem import check_counts, check_head_dims

    problem = case.problem()
    check_head_dims(q=problem.head_dim, v=problem.head_dim_v)
    check_counts(problem.batch * problem.num_heads, max(problem.longest_q, problem.longest_k))
    forward, backward = case.flops("fwd"), case.flops("bwd")
    num_bytes = problem.bytes_moved("fwd")
    yield from _work(f"{_giga(forward)} GFLOP forward, {_giga(backward)} backward", forward, num_bytes, problem, device)
    scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k * problem.dtype.itemsize
    rows = 4 * problem.num_heads * problem.rows_q
    padded = ", of sequences padded to the longest" if problem.varlen else ""
    extra = f"flashtile lse: {size(rows)}, and backward delta: {size(rows)}"
    yield f"  memory    naive keeps scores and p: {size(2 * scores)}{padded}; {extra}"
    # The last is for who learns the slopes
    for direction in ("forward", "backward", "dslopes") if problem.has_alibi else ("forward", "backward"):
        yield from _kernels(problem, device, direction, compile_kernels, progress)


def _giga(flops) -> str:
    return f"{flops / 1e9:,.1f}" if flops >= 1e9 else f"{flops / 1e9:.2g}"


def _work(words, flops, num_bytes, problem, device):
    """Lines about the work of a forward pass, and the least time that it can take."""
    from flashtile.cli.show import size

    dtype = str(problem.dtype).removeprefix("torch.")
    peak, bandwidth = device.peak(dtype), device.peak_bandwidth
    intensity = flops / num_bytes
    line = f"  work      {words}   tensors {size(num_bytes)}   {intensity:,.0f} FLOP/B"
    if peak and bandwidth:
        bound = "compute" if intensity > peak * 1e12 / bandwidth else "memory"
        line += f" -> {bound}-bound (ridge {peak * 1e12 / bandwidth:.0f})"
    yield line
    floors = [(peak, bandwidth, "datasheet")]
    if dtype in ("float16", "bfloat16"):
        floors.append((device.measured_tflops, device.measured_bandwidth, "measured roof"))
    words = [
        f"{max(flops / (tflops * 1e12), num_bytes / speed) * 1e3:.4g} ms at the {source}"
        for tflops, speed, source in floors
        if tflops and speed
    ]
    yield "  floor     forward " + (" | ".join(words) or "unknown: no peaks of this device in flashtile/hardware.py")


def _describe_latent(case, device):
    """Lines about a decode over a latent cache with pages of 64 tokens, or --page-size: `flashtile.mla.mla_decode`."""
    from flashtile import settings
    from flashtile.bench.cases import UsageError
    from flashtile.errors import UnsupportedError
    from flashtile.mla import plan
    from flashtile.mla.problem import check_queries

    if case.latent_refusal:
        raise UsageError(f"{case.label()}: {case.latent_refusal}.")
    check_queries(case.seqlen_q, case.num_heads)
    problem = case.latent_problem()
    lengths = [case.seqlen_k] * case.batch
    flops = problem.flops(lengths)
    yield from _work(f"{_giga(flops)} GFLOP", flops, problem.bytes_moved(lengths), problem, device)
    yield ("            a token of the cache is read once for all rows: about 2 * heads * query tokens = "
           f"{2 * problem.num_rows} FLOP/B")  # fmt: skip
    try:
        chosen = plan.plan(problem, device, settings.preferred_tiers())
    except UnsupportedError as error:
        yield f"  decode    {error}"
        return
    yield f"  decode    {chosen.tier}"
    for tier, reason in chosen.refusals:
        yield f"            not {tier}: {reason}"


def _describe_cache(case, device, compile_kernels, progress):
    """Lines about `flashtile.attention_with_kvcache` on a cache whose slots are all in use."""
    from flashtile.kvcache_problem import check_capacity
    from flashtile.problem import check_head_dims

    problem = case.cache_problem()
    check_head_dims(q=problem.head_dim, v=problem.head_dim_v)
    check_capacity(problem.capacity)
    lengths = [case.seqlen_k] * case.batch
    flops = problem.flops(lengths)
    yield from _work(f"{_giga(flops)} GFLOP", flops, problem.bytes_moved(lengths), problem, device)
    yield from _kernels(problem, device, "decode", compile_kernels, progress)


def _parts(problem, config, device):
    """Who attends to what in a call on a cache."""
    from flashtile.portable.decode import plan_parts

    plan = plan_parts(problem, config, device.num_sms or 1)
    if plan.balanced:
        heads = plan.side * config.heads
        side = f", {heads} heads side by side" if heads > 1 else ""
        merger = "the last to end" if plan.chunk else "a second kernel"
        return f"{plan.num_programs} programs share the keys of all sequences evenly{side}; {merger} merges what was cut"
    return f"{plan.num_programs} programs, each with all keys of {config.tile_m} rows (queries of the heads of a group)"


def _kernels(problem, device, direction, compile_kernels, progress):
    """Lines about the plan of one direction."""
    from flashtile import dispatch, settings, tiles
    from flashtile.bench import offline
    from flashtile.errors import UnsupportedError
    from flashtile.hopper import backward_config

    try:
        plan = dispatch.plan(problem, device, direction, settings.preferred_tiers())
    except UnsupportedError as error:
        yield f"  {direction:9} {error}"
        return
    yield f"  {direction:9} {plan.tier}: {', '.join(f'{name} {_tiles(config)}' for name, config in plan.configs.items())}"
    for tier, reason in plan.refusals:
        if device.arch != "cpu" and tier not in ("sdpa", "reference"):
            yield f"            not {tier}: {reason}"
    if direction == "decode" and plan.tier == "portable":
        yield f"            {_parts(problem, plan.configs['decode'], device)}"
    if direction == "decode" and plan.tier == "hopper" and problem.page_size:
        rows = tiles.page_rows(problem, plan.configs["decode"])
        yield f"            {f'TMA loads {rows} slots of a page at once' if rows else 'tokens are gathered from pages'}"
    if plan.tier == "hopper" and direction == "backward":
        if backward_config.sorted_sequences(problem, plan.configs["backward"]):
            yield "            the longest sequences first"
    if compile_kernels and device.arch != "cpu":
        progress.say(f"compiling the {direction} kernels for {device.arch}")
        try:
            if direction == "decode":
                reports = offline.compile_decode(problem, plan, device, sass=True)
            else:
                reports = offline.compile_plan(problem, plan, device.sm, direction, sass=True)
        except (ImportError, UnsupportedError) as error:
            yield f"            not compiled: {error}"
            return
        for report in reports:
            instructions = "".join(f", {count} {name}" for name, count in report.tensor_core.items())
            yield (f"            {report.kernel}: {report.registers} registers, {report.spill_bytes} B spilled, shared "
                   f"{report.shared_bytes / 1024:.0f} KiB{instructions}, compiled in {report.compile_s:.1f} s")  # fmt: skip


def _tiles(config):
    heads = getattr(config, "heads", 1)
    words = f"{config.tile_m}x{config.tile_n} warps {config.num_warps} stages {config.num_stages}"
    for name, whole in (("splits", "a group of heads"), ("query_parts", "the queries"), ("key_parts", "the keys")):
        parts = getattr(config, name, 1)
        words += f", {parts} parts of {whole}" if parts > 1 else ""
    tail_heads = getattr(config, "tail_heads", None)
    words += f", the last {tail_heads} heads side by side" if tail_heads else ""
    words += ", sums in a fixed order" if getattr(config, "fixed_order", False) else ""
    return f"{words}, {heads} heads a tile" if heads > 1 else words
