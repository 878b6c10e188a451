"""The process that a profiler looks at: one case, warmed up, then some calls in an NVTX range that it says is to be profiled.

    python -m flashtile.bench.workload '{"config": {...}, "backend": "flashtile", "mode": "fwd", "device": "cuda:0",
                                         "repeats": 3, "seed": 0, "tool": "range", "out": ""}'

tool: "range" for a profiler around this process; "torch" and "proton" profile inside of it and write to `out`.
"""

import json
import re
import sys

import torch

from flashtile.bench import engine, peers
from flashtile.bench.cases import BenchCase, make_inputs

WARM_UPS = 10


def main(order: dict) -> None:
    device = torch.device(order["device"])
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    case, mode, repeats = BenchCase.from_config(order["config"]), order["mode"], order["repeats"]
    state = engine.CaseTensors(case, make_inputs(case, device, order["seed"], dout=mode != "fwd"))
    fn = state.make_fn(peers.load(order["backend"], str(device)), mode)
    for _ in range(WARM_UPS):
        fn()
    _wait(on_gpu)
    label = f"{order['backend']} {mode} {case.label()}"
    profile = {"range": _range, "torch": _torch, "proton": _proton}[order["tool"]]
    profile(fn, repeats, label, on_gpu, order["out"])


def _wait(on_gpu):
    if on_gpu:
        torch.cuda.synchronize()


def _range(fn, repeats, label, on_gpu, out):
    torch.cuda.profiler.start()
    with torch.cuda.nvtx.range(label):
        for _ in range(repeats):
            fn()
        _wait(on_gpu)
    torch.cuda.profiler.stop()


def _torch(fn, repeats, label, on_gpu, out):
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def trace(with_stack):
        options = {"record_shapes": True, "profile_memory": True, "with_stack": with_stack, "acc_events": True}
        with profile(activities=activities, **options) as tracer:
            for _ in range(repeats):
                with record_function(label):
                    fn()
            _wait(on_gpu)
        return tracer

    try:
        tracer = trace(with_stack=True)
    except UnicodeDecodeError:
        # Seen now and then with torch 2.13 on a CPU: with stacks, an event's name is not text.
        tracer = trace(with_stack=False)
    tracer.export_chrome_trace(out)
    # Python's frames stay in the trace; the table has operators and kernels.
    averages = tracer.key_averages()
    averages[:] = [row for row in averages if not re.search(r"\(\d+\): |^<built-in|^nn\.Module", row.key)]
    print(averages.table(sort_by=f"{'cuda' if on_gpu else 'cpu'}_time_total", row_limit=20, max_name_column_width=60))


def _proton(fn, repeats, label, on_gpu, out):
    import triton.profiler as proton

    proton.start(out.removesuffix(".hatchet"))
    with proton.scope(label):
        for _ in range(repeats):
            fn()
        _wait(on_gpu)
    proton.finalize()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
