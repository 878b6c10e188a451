"""`flashtile warm`: compile the kernels of given cases into Triton's cache, so that later processes find them."""

import time
from dataclasses import replace
from typing import Annotated

import typer

from flashtile.cli.common import (
    CACHED,
    MISSING,
    OK,
    PACKED,
    Progress,
    ShapeFlags,
    command,
    complain,
    decoding,
    make_console,
)


def add(app) -> None:
    app.command("warm")(command(warm))


def warm(
    shape: ShapeFlags,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave the backward kernels out.")] = False,
    mode: Annotated[
        str, typer.Option("--mode", help="fwd_bwd, or decode: on a key-value cache, with new tokens in the call and without.")
    ] = "fwd_bwd",
    device: Annotated[str, typer.Option("--device", help="cuda or cuda:N.")] = "cuda",
    target: Annotated[
        str, typer.Option("--target", help="Compile for a GPU that is not here: H200, A100, sm_90, ...")
    ] = "",
) -> int:
    """Compile the kernels of these cases ahead, and say how long each takes; on the GPU that they are for, or with --target.

    They land in Triton's cache, ~/.triton/cache or $TRITON_CACHE_DIR. Any number of processes may fill and read it at once.
    Give it a folder in an image of a container, or one that the nodes of a cluster share. A cache that was filled elsewhere
    is found where it lies at the same path, by the same versions of Python and Triton.
    """
    console = make_console()
    with Progress(True) as progress:
        progress.say("importing torch")
        import torch

        if not target and not torch.cuda.is_available():
            complain("warm: no CUDA device here. Name the GPU that the kernels are for: --target H200.")
            return MISSING
        decodes = decoding(mode)
        cases = shape.cases("bf16", decodes, takes=CACHED if decodes else PACKED)
        for case in cases:
            progress.say(f"compiling {case.label()}")
            if decodes:
                seconds, tiers = _compile_decode(case, target) if target else _warm_decode(case, device)
            else:
                seconds, tiers = _compile(case, target, forward_only) if target else _warm(case, device, forward_only)
            progress.say("")
            console.print(f"{case.label():48}  {seconds:6.1f} s   {tiers}", highlight=False)
    from triton import knobs

    console.print(f"[dim]in {knobs.cache.dir}[/]", highlight=False)
    return OK


def _compile(case, target, forward_only):
    """(seconds, names of the tiers) of one case, for a GPU that need not be here."""
    from flashtile import dispatch, hardware, settings
    from flashtile.bench import offline
    from flashtile.cli.explain import find_target
    from flashtile.problem import check_head_dims

    check_head_dims(q=case.head_dim, v=case.head_dim_v)
    begin = time.perf_counter()
    device, problem, tiers = find_target(target, hardware), case.problem(), []
    for direction in ("forward",) if forward_only else ("forward", "backward"):
        plan = dispatch.plan(problem, device, direction, settings.preferred_tiers())
        offline.compile_plan(problem, plan, device.sm, direction)
        tiers.append(f"{direction}: {plan.tier}")
    return time.perf_counter() - begin, ", ".join(tiers)


def _compile_decode(case, target):
    """The same for calls on a key-value cache, those that bring new keys and those that do not."""
    from flashtile import dispatch, hardware, settings
    from flashtile.bench import offline
    from flashtile.bench.cases import UsageError
    from flashtile.cli.explain import find_target
    from flashtile.problem import check_head_dims

    if case.latent:
        raise UsageError("target: expected none for a latent cache; its kernels are warmed on the GPU that they are for.")
    check_head_dims(q=case.head_dim, v=case.head_dim_v)
    begin = time.perf_counter()
    device, problem = find_target(target, hardware), case.cache_problem()
    for each in (problem, replace(problem, seqlen_new=problem.seqlen_q)):
        plan = dispatch.plan(each, device, "decode", settings.preferred_tiers())
        offline.compile_decode(each, plan, device)
    return time.perf_counter() - begin, f"decode: {plan.tier}"


def _warm_decode(case, device):
    """The same, by calls as a user would make them."""
    import torch

    from flashtile import attention_with_kvcache
    from flashtile.bench import peers
    from flashtile.bench.cases import UsageError, make_inputs

    if case.latent and (reason := peers.BACKENDS["flashtile"].refusal(case, "decode", torch.device(device))):
        raise UsageError(f"{case.label()}: {reason}.")
    begin = time.perf_counter()
    q, k, v, _ = make_inputs(case, device)
    if case.latent:
        peers.cache_attend(k, v, case)(q, k, v, case)
    else:
        options = peers.cache_options(case, q.device)
        new, caches = {"k": k[:, : case.seqlen_q], "v": v[:, : case.seqlen_q]}, (k.clone(), v.clone())
        if case.page_size:
            pages = -(-case.seqlen_k // case.page_size)
            caches = [x.new_zeros(case.batch * pages, case.page_size, *x.shape[2:]) for x in (k, v)]
            options["block_table"] = torch.arange(case.batch * pages, dtype=torch.int32, device=q.device).view(case.batch, -1)
        lengths = torch.full((case.batch,), case.seqlen_k - case.seqlen_q, dtype=torch.int32, device=q.device)
        for more in ({}, {name: x.contiguous() for name, x in new.items()}):
            attention_with_kvcache(q, *caches, cache_seqlens=lengths, **more, **options)
    torch.cuda.synchronize()
    return time.perf_counter() - begin, peers.flashtile_kernels(case, "decode", device)


def _warm(case, device, forward_only):
    """(seconds, names of the tiers) of one case: compile side by side, then run once as a user would."""
    import torch

    from flashtile.bench import peers
    from flashtile.bench.cases import make_inputs

    begin = time.perf_counter()
    q, k, v, dout = make_inputs(case, device, dout=not forward_only)
    peers.compile_ahead(q, k, v, case, forward_only)
    attend = peers.load("flashtile", device)
    if not forward_only:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, case)
    if not forward_only:
        torch.autograd.grad(out, (q, k, v), dout)
    torch.cuda.synchronize()
    return time.perf_counter() - begin, peers.flashtile_kernels(case, "fwd" if forward_only else "fwd_bwd", device)
