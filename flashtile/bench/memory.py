"""Memory of attention: what a call allocates beyond its inputs, measured, beside what the formulas say.

    naive, forward    S + P + O + copies  scores and weights, (batch, heads, seqlen_q, seqlen_k) in the dtype, and the output
    naive, training   4 S + O + copies    P, its gradient and two of S live at the same time
    flash, forward    O + lse             fp32, one number a row
    flash, training   O + lse + dQ + dK + dV + row statistics (+ dQ once more in fp32 in the Hopper tier)

Copies are what PyTorch makes of operands: a batched product of (batch, heads, ...) views makes them contiguous, and keys and
values are repeated for the heads of a group. A mask counts beside them.
"""

from dataclasses import replace

from flashtile.bench import engine, measure
from flashtile.bench.cases import BenchCase

BACKENDS = ("naive", "flashtile")


def inputs_bytes(case: BenchCase, mode: str) -> int:
    """q, k and v, and dout where there is a backward pass."""
    sizes = _sizes(case)
    return sizes["q"] + sizes["k"] + sizes["v"] + (sizes["out"] if mode != "fwd" else 0)


def predicted_bytes(case: BenchCase, backend: str, mode: str, device=None) -> int:
    """Bytes beyond the inputs by formula, for "naive" or "flashtile", "fwd" or "fwd_bwd"; device: hardware.Device or None."""
    return (_naive if backend == "naive" else _flash)(case, mode, device)


def largest_seqlen(case: BenchCase, backend: str, mode: str, memory_bytes: int, device=None) -> int:
    """The longest seqlen_q = seqlen_k, in steps of 64, that fits into memory_bytes by formula; 0 if none does."""

    def fits(blocks):
        longer = replace(case, seqlen_q=64 * blocks, seqlen_k=64 * blocks)
        return inputs_bytes(longer, mode) + predicted_bytes(longer, backend, mode, device) <= memory_bytes

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 64 * low


def longest(case: BenchCase, mode: str, device, backends=BACKENDS) -> list[dict]:
    """The part "memory" of a document: the longest sequence of each backend on a hardware.Device."""
    return [
        {"config": case.config(), "backend": name, "mode": mode, "memory_bytes": device.memory_bytes,
         "largest_seqlen": largest_seqlen(case, name, mode, device.memory_bytes, device)}
        for name in backends
    ]  # fmt: skip


def measure_memory(cases, backends=BACKENDS, *, train=False, device=None, settings=None, listener=None,
                   target=None) -> engine.Report:  # fmt: skip
    """Measure the memory of cases, without timing them; on a CPU only the formulas.

    Args:
        cases: BenchCase, or several. backends: "naive", "flashtile". train: forward and backward, else forward.
        target: the hardware.Device whose kernels the formulas are of, default the device.
    Returns:
        Report whose results have extra_mem_bytes and predicted_mem_bytes, and whose part "memory" has the longest sequence of
        each first case and backend.
    """
    modes = ["fwd_bwd" if train else "fwd"]
    return _MemoryMeasurement(target, cases, list(backends), modes, device, settings, listener, None).go()


class _MemoryMeasurement(engine._Measurement):
    """As a run: gate first; then the peak instead of times."""

    def __init__(self, target, *arguments):
        super().__init__(*arguments)
        from flashtile import hardware

        self.target, self.hardware = target, target or hardware.detect(self.device)
        self.report.resolved |= {"command": "memory", "timer": "none"}
        if self.hardware.memory_bytes:
            self.report.parts["memory"] = longest(self.cases[0], self.modes[0], self.hardware, self.backends)

    def _complete(self, result):
        return not result.ok or result.extra_mem_bytes is not None

    def _roof(self, case):
        return None

    def _case(self, case):
        if self.device.type == "cpu":
            self._fill(case, "skipped", "memory is measured on a GPU")
            self.listener.cell(self.report, case, self.modes[0])
        else:
            super()._case(case)

    def _add(self, case, name, mode, *arguments, **more):
        more["predicted_mem_bytes"] = predicted_bytes(case, name, mode, self.hardware)
        result = super()._add(case, name, mode, *arguments, **more)
        result.repro = f"{engine.variables()}flashtile memory {case.flags()}" + (" --train" if mode != "fwd" else "")
        if self.target:
            result.repro += f' --target "{self.target.name}"'
        return result

    def _does_not_fit(self, case, mode):
        needed, free = predicted_bytes(case, "naive", mode), self._free_bytes()
        return None if needed <= free else f"needs {needed / (1 << 30):.0f} GiB by formula, {free / (1 << 30):.0f} GiB are free"

    def _mode(self, state, mode, attends, roof):
        for name, attend in attends.items():
            facts = state.facts[name]
            result = self._add(state.case, name, mode, accuracy=facts["accuracy"], inputs_bytes=state.bytes(mode),
                               kernel=self._kernel(state, name, mode), compile_ms=facts["compile_ms"].get(mode))  # fmt: skip
            failure = None
            try:
                result.extra_mem_bytes = measure.peak_memory(state.make_step(attend, mode), self.device)
            except Exception as error:
                failure = self._describe_failure(error)
            if failure is not None:
                result.status, result.reason = failure
                self._release()


def _sizes(case) -> dict[str, int]:
    size = case.torch_dtype.itemsize
    rows_q, rows_k = case.batch * case.seqlen_q, case.batch * case.seqlen_k
    return {
        "q": rows_q * case.num_heads * case.head_dim * size,
        "k": rows_k * case.num_heads_kv * case.head_dim * size,
        "v": rows_k * case.num_heads_kv * case.head_dim_v * size,
        "out": rows_q * case.num_heads * case.head_dim_v * size,
        "row": rows_q * case.num_heads * 4,
        "scores": rows_q * case.num_heads * case.seqlen_k * size,
    }


def _naive(case, mode, device):
    s = _sizes(case)
    # Views of one batch entry need no copy, and neither do those of one head.
    copied = case.batch > 1 and case.num_heads > 1
    hidden = case.seqlen_q * case.seqlen_k if case.mask_window != (None, None) else 0
    repeated = case.group_size > 1
    k, v = s["k"] * case.group_size, s["v"] * case.group_size
    if mode == "fwd":
        products = max(2 * s["scores"] + s["out"] + copied * v, s["scores"] + copied * (s["q"] + k))
        return hidden + products + repeated * (k + v)
    # What the products saved: copies, or what was repeated for the groups
    return hidden + 4 * s["scores"] + s["out"] + copied * s["q"] + (copied or repeated) * (k + v)


def _flash(case, mode, device):
    s = _sizes(case)
    forward = s["out"] + s["row"]
    if mode == "fwd":
        return forward
    # delta; dk and dv of parts, where heads of a group or queries are split; the Hopper tier also has lse in base 2, and dq in
    # fp32 but where one tile has all keys
    working = s["row"]
    plan = None if device is None or device.arch == "cpu" else _backward_plan(case, device)
    if plan is not None:
        parts = max((getattr(config, "parts", 1) for config in plan.configs.values()), default=1)
        working += parts * (s["k"] + s["v"]) if parts > 1 else 0
    if plan is not None and plan.tier == "hopper":
        from flashtile.hopper import backward_config

        stored = backward_config.stores_dq(case.problem(), plan.configs["backward"]) == "all"
        working += s["row"] + (0 if stored else s["q"] * 4 // case.torch_dtype.itemsize)
    return forward + working + s["q"] + s["k"] + s["v"]


def _backward_plan(case, device):
    from flashtile import dispatch, settings
    from flashtile.errors import UnsupportedError

    try:
        return dispatch.plan(case.problem(), device, "backward", settings.preferred_tiers())
    except UnsupportedError:
        return None


