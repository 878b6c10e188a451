"""Time every configuration that the Hopper forward or backward chooses among.

    python benchmarks/choices.py forward|backward OUT.json [--preset random] [--rounds 3] [--workers 8] [--commit HASH]

bf16, random data, cold L2. Kernels are compiled first, by processes side by side; then all configurations of a call take turns,
and a call has the median µs of each, the name of the one that is taken, and that of cuDNN. Their results are compared. Calls
are those of a preset (`flashtile presets`), without packed ones.

tests/forward_times.json and tests/backward_times.json hold such times, to which tests hold the choice.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from decode import medians

from flashtile import dispatch, hardware, tiles
from flashtile.bench import cases, peers, record
from flashtile.hopper import backward_config
from flashtile.problem import Operands


def name_of(config) -> str:
    if isinstance(config, backward_config.BackwardConfig):
        parts = f" in {config.query_parts} parts" if config.query_parts > 1 else ""
        return f"{config.splits}{' in order' if config.fixed_order else ''}{parts}"
    heads = f" heads {config.heads}" if config.heads > 1 else ""
    return f"{config.tile_m}x{config.tile_n}x{config.key_parts}{heads}"


def plans_of(case, direction, device):
    """{name: Plan} of the Hopper tier, the one that is taken first; empty where another kernel takes the call."""
    problem = case.problem()
    taken = dispatch.plan(problem, device, direction, ("hopper",))
    config = taken.configs.get(direction)
    if isinstance(config, backward_config.BackwardConfig):
        choices = backward_config.choices(problem, device)
    elif isinstance(config, tiles.HopperConfig):
        choices = tiles.hopper_choices(problem, device)
    else:
        return {}
    return {name_of(choice): replace(taken, configs={direction: choice}, ran=[True]) for choice in (config, *choices)}


def tensors_of(case):
    """Operands and the gradient of out."""
    *qkv, dout = cases.make_inputs(case, "cuda", dout=True)
    return Operands(*qkv), dout


def function_of(case, plan, direction, operands, dout):
    """The call by one plan; a backward of the forward that the call has."""
    function = plan.bind(direction, case.problem())
    if direction == "forward":
        return lambda: function(operands)[:1]
    forward = dispatch.plan_for(case.problem(), operands.q.device, "forward").bind("forward", case.problem())
    out, lse = forward(operands)
    return lambda: function(operands, out, lse, dout, None)[:3]


def compile_one(case, name, direction):
    """In a process of its own: the kernels stay in Triton's cache."""
    plan = plans_of(case, direction, hardware.detect(torch.device("cuda", 0)))[name]
    function_of(case, plan, direction, *tensors_of(case))()
    torch.cuda.synchronize()


def compare(results, expected):
    for x, y in zip(results, expected):
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0.02 * y.float().abs().max().item())


def measured(case, plans, direction, rounds):
    operands, dout = tensors_of(case)
    functions = {name: function_of(case, plan, direction, operands, dout) for name, plan in plans.items()}
    results = {name: function() for name, function in functions.items()}
    expected = next(iter(results.values()))
    for result in results.values():
        compare(result, expected)
    del results
    mode = {"forward": "fwd", "backward": "bwd"}[direction]
    device, backend = operands.q.device, peers.BACKENDS["sdpa-cudnn"]
    if peers.unavailable(backend.name, str(device)) is None and backend.refusal(case, mode, device) is None:
        leaves = [x.requires_grad_(direction == "backward") for x in operands[:3]]
        cudnn = peers.load(backend.name, str(device))
        if direction == "forward":
            functions["sdpa-cudnn"] = lambda: cudnn(*leaves, case)
        else:
            out = cudnn(*leaves, case)
            functions["sdpa-cudnn"] = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return medians(functions, rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=("forward", "backward"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", default="random")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--commit", help="commit to record where there is no .git")
    arguments = parser.parse_args()
    device = hardware.detect(torch.device("cuda", 0))
    calls = [case for case in cases.presets()[arguments.preset].cases() if not case.varlen]
    plans = {case: plans_of(case, arguments.direction, device) for case in calls}
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, case, name, arguments.direction) for case in calls for name in plans[case]]
        for job in jobs:
            job.result()
    document = {"env": record.environment(torch.device("cuda", 0), arguments.commit), "rounds": arguments.rounds, "rows": [],
                "command": f"python benchmarks/choices.py {arguments.direction} --preset {arguments.preset}"}  # fmt: skip
    for case in calls:
        if not plans[case]:
            continue
        us = measured(case, plans[case], arguments.direction, arguments.rounds)
        ours = {name: value for name, value in us.items() if name in plans[case]}
        taken = next(iter(plans[case]))
        document["rows"].append({"config": case.config(), "taken": taken, "us": us})
        print(f"{case.label():44} {taken:16} {us[taken]:8.1f} us, {us[taken] / min(ours.values()):.3f} of the fastest, "
              f"{min(ours, key=ours.get)}; cuDNN {us.get('sdpa-cudnn', 0):.1f}", flush=True)  # fmt: skip
        arguments.out.write_text(json.dumps(document, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
