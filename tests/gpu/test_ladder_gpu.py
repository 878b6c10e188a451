"""Every rung on a GPU: outputs and gradients against float64, the same bits each time, on any stream, in a CUDA graph."""

import checks
import pytest
import torch
from cases import Case

from flashtile import hardware
from flashtile.ladder import launch, nvrtc, rungs
from flashtile.reference import naive
from flashtile.tiles import TileConfig

pytestmark = pytest.mark.gpu
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FORWARD = [rung for rung in rungs.RUNGS.values() if not rung.tier and rung.direction == "forward"]
# around the tiles of 64 and 128 rows, and one key alone
SEQLENS = (1, 7, 63, 64, 65, 127, 129, 200, 513)


@pytest.fixture(autouse=True)
def available():
    reason = nvrtc.unavailable() or (hardware.detect("cuda").sm < 80 and "needs sm_80 or newer")
    if reason:
        pytest.skip(reason)


def head_dims(rung):
    return (40, 64, 128) if len(rung.configs) > 8 else tuple(rung.configs)


def check(rung, dtype, head_dim, seqlen, causal, config=None, **more):
    """Outputs of a forward rung, or gradients of rung 9, as tests/checks.py has it."""
    case = Case("ladder", seqlen, seqlen, batch=2, heads=3, heads_kv=3, head_dim=head_dim, causal=causal, **more)
    operands = case.make(dtype, "cuda")
    q, k, v = (x.detach() for x in operands[:3])
    options = {"causal": causal, "softmax_scale": case.softmax_scale, "config": config}
    if rung.direction == "forward":
        out, lse = launch.forward(rung.number, q, k, v, **options)
        actual = {"out": out, "lse": lse}
    else:
        out, lse = launch.forward(8, q, k, v, causal=causal, softmax_scale=case.softmax_scale)
        dout, _ = case.output_gradients(out, lse)
        actual = dict(zip(("dq", "dk", "dv"), launch.backward(rung.number, q, k, v, out, lse, dout, **options)))
    reference = checks.run_naive(operands, case, torch.float64)
    yardstick = checks.run_naive(operands, case, dtype)
    with torch.no_grad():
        yardstick["lse"] = naive.forward(operands, case.problem(operands), torch.float32)[1]
    report = []
    for name, got in actual.items():
        relative_floor = checks._lse_error(reference["lse"], torch.float32) if name.startswith("d") else 0.0
        vanishing = checks._largest_term(operands, case.problem(operands), case) if name in ("dq", "dk") else 0.0
        report += checks.compare(name, got, reference[name], yardstick[name], dtype, relative_floor, vanishing)
    assert not report, "\n".join([f"rung {rung.number}, {dtype}, {case}", *report])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("number", [number for number, rung in rungs.RUNGS.items() if not rung.tier])
def test_against_float64(number, causal, poisoned):
    rung = rungs.get(number)
    for name in rung.dtypes:
        for head_dim in head_dims(rung):
            for seqlen in SEQLENS:
                check(rung, DTYPES[name], head_dim, seqlen, causal)


@pytest.mark.parametrize("number", [number for number, rung in rungs.RUNGS.items() if not rung.tier])
def test_large_scores_and_another_scale(number):
    rung = rungs.get(number)
    dtype = DTYPES[rung.dtypes[0]]
    check(rung, dtype, 64, 200, True, magnitude=8.0)
    check(rung, dtype, 64, 200, False, softmax_scale=0.5)


@pytest.mark.parametrize(
    "number, config",
    [(1, (8, 32, 8, 1)), (3, (32, 64, 8, 1)), (4, (64, 32, 8, 1)), (5, (64, 32, 4, 1)), (6, (32, 64, 2, 1)),
     (7, (64, 32, 4, 4)), (8, (64, 64, 2, 3)), (8, (64, 32, 4, 2)), (5, (64, 64, 4, 1)), (9, (32, 32, 2, 1))],
)  # fmt: skip
def test_other_tiles(number, config):
    rung = rungs.get(number)
    for causal in (False, True):
        check(rung, DTYPES[rung.dtypes[0]], 64, 200, causal, TileConfig(*config))


@pytest.mark.parametrize("number", [number for number, rung in rungs.RUNGS.items() if not rung.tier])
def test_bits_repeat(number):
    """100 runs, the same bits: a race would move them."""
    rung = rungs.get(number)
    q, k, v, dout = (torch.randn(2, 300, 4, 64, device="cuda", dtype=DTYPES[rung.dtypes[0]]) for _ in range(4))

    def run():
        if rung.direction == "forward":
            return launch.forward(number, q, k, v, causal=True)
        return launch.backward(number, q, k, v, out, lse, dout, causal=True)

    if rung.direction == "backward":
        out, lse = launch.forward(8, q, k, v, causal=True)
    first = run()
    for _ in range(100):
        for got, want in zip(run(), first):
            assert torch.equal(got, want)


def test_runs_on_the_current_stream_and_in_a_graph():
    q, k, v = (torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    want = launch.forward(8, q, k, v)[0]
    graph = torch.cuda.CUDAGraph()
    # A kernel on another stream than the one that captures would fail the capture.
    with torch.cuda.graph(graph):
        out, _ = launch.forward(8, q, k, v)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_wrong_tensors_are_refused():
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
    with pytest.raises(ValueError, match="k: expected a contiguous tensor"):
        launch.forward(8, q, torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16).transpose(1, 2), q)
    shifted = torch.randn(64 * 128 + 1, device="cuda", dtype=torch.float16)[1:].view(1, 64, 2, 64)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        launch.forward(8, shifted, q, q)
    out, lse = launch.forward(8, q, q, q)
    with pytest.raises(ValueError, match="lse: expected"):
        launch.backward(9, q, q, q, out, lse.double(), out)
    empty = q[:, :0]
    assert launch.forward(8, empty, empty, empty)[0].shape == empty.shape


@pytest.mark.parametrize("number", [1, 3, 8])
def test_past_2_to_the_31_elements(number):
    """The last head of the last sequence, whose offsets exceed int32, against that head alone."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    shape = {1: (41, 210, 1000, 256), 3: (68, 500, 1000, 64), 8: (68, 500, 1000, 64)}[number]
    dtype = DTYPES[rungs.get(number).dtypes[0]]
    q = torch.empty(shape, device="cuda", dtype=dtype).normal_()
    assert q.numel() > 2**31
    out, _ = launch.forward(number, q, q, q, causal=True)
    one = q[-1:, :, -1:].contiguous()
    assert torch.equal(out[-1:, :, -1:], launch.forward(number, one, one, one, causal=True)[0])
