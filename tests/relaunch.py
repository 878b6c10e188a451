"""Print where a kernel that is launched again by addresses gets something else than Triton gives it. For test_relaunch.

Nothing is compiled: `JITFunction.run` only writes down its arguments, and so does what stands for Triton's launcher. A process
of its own, since the interpreter, which other tests use, has no such launch.
"""

import itertools
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from triton.runtime.jit import JITFunction  # noqa: E402

from flashtile import hardware, outputs  # noqa: E402
from flashtile.device import launcher  # noqa: E402
from flashtile.problem import AttentionProblem, Operands  # noqa: E402

# The tiers decide by it whether there is anything to launch again.
torch.Tensor.is_cuda = property(lambda self: True)
outputs.empty_on_gpu = None
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.current_stream = lambda index: SimpleNamespace(synchronize=lambda: None)
torch._C._cuda_getCurrentRawStream = lambda index: 0
launches = []


class Compiled:
    """Stands for a compiled kernel."""

    function = object()

    def __init__(self, name):
        self.name = name


class Map:
    """Stands for what TMA reads of a descriptor of a tensor at an address."""

    def __init__(self, descriptor, address):
        self.block_shape, self.layout, self.address = descriptor.block_shape, descriptor.layout, address


def launcher_of(compiled):
    def run(x, y, z, stream, constant, arguments):
        launches.append((compiled.name, (x, y, z), arguments))

    return launcher.Launcher(run, ("constant",), True, itertools.repeat("metadata"))


launcher.launcher_of = launcher_of
launcher.preparer = lambda *_: None
launcher.ensure_context = lambda: None
launcher.map_maker = lambda descriptor, metadata: lambda address: Map(descriptor, address)
launcher.driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: 0))


def run(self, *arguments, grid, warmup, **options):
    # parameters, in their order: what the compiled kernel is called with
    names = self.arg_names[len(arguments) :]
    bound = (*arguments, *(options[name] for name in names))
    launches.append((self.fn.__name__, (*grid, 1, 1)[:3], bound))
    return Compiled(self.fn.__name__)


JITFunction.run = run


def leaves(value):
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, Map):
        return [value.address, *value.block_shape, repr(value.layout)]
    if hasattr(value, "block_shape"):
        # In a launch by address, shape and strides follow the map as arguments.
        return [*leaves(value.base), *value.block_shape, repr(value.layout), *value.shape, *value.strides]
    return [getattr(value, "value", value)]


def described(recorded, inputs):
    """Launches with each tensor replaced: by its name, or by how many others came before it."""
    known = {x.data_ptr(): name for name, x in inputs.items()}
    return [(name, grid, [known.setdefault(leaf.data_ptr(), f"other {len(known)}") if isinstance(leaf, torch.Tensor) else leaf
                          for leaf in leaves(arguments)]) for name, grid, arguments in recorded]  # fmt: skip


def compare(what, call, make, same=()):
    """The third call, launched by addresses, against the first of other tensors, launched by Triton.

    In the second, from which the third is made, one tensor has both names of each pair of `same`.
    """
    # kept, so that no two calls share an address
    alive = []
    for repeat in range(3):
        inputs = make()
        if repeat == 1:
            inputs |= {one: inputs[other] for one, other in same}
        launches.clear()
        alive.append((inputs, call(inputs)))
        if repeat == 0:
            first = described(launches, inputs)
    # In the third call addresses are integers where tensors were.
    known = {x.data_ptr(): name for name, x in inputs.items()}
    assert len(launches) == len(first), (what, len(launches), len(first))
    for (name, grid, expected), (again, its_grid, arguments) in zip(first, launches):
        actual = leaves(arguments)
        assert not any(isinstance(leaf, torch.Tensor) for leaf in actual), (what, "launched by Triton")
        if (name, grid, len(expected)) != (again, its_grid, len(actual)):
            print(f"{what}: {name} {grid} {len(expected)} arguments, then {again} {its_grid} {len(actual)}")
            continue
        for i, (want, got) in enumerate(zip(expected, actual)):
            if isinstance(want, str) and (want in inputs or want.startswith("other ")):
                address = got.data_ptr() if isinstance(got, torch.Tensor) else got
                got = known.setdefault(address, f"other {len(known)}")
            if want != got:
                print(f"{what}: {name}: argument {i} was {want!r}, is {got!r}")
    print(f"{what}: compared {len(launches)} launches")


def tensors(packed, **more):
    """A function that makes the inputs of a call, by name."""

    def make():
        lead = (320,) if packed else (2, 160)
        inputs = {name: torch.zeros(*lead, heads, 64, dtype=torch.bfloat16)
                  for name, heads in (("q", 4), ("k", 2), ("v", 2), ("out", 4), ("dout", 4))}  # fmt: skip
        inputs["lse"] = torch.zeros((4, 320) if packed else (2, 4, 160))
        if packed:
            inputs["cu_seqlens_q"] = torch.tensor([0, 160, 320], dtype=torch.int32)
            inputs["cu_seqlens_k"] = torch.tensor([0, 160, 320], dtype=torch.int32)
        for name, shape_and_dtype in more.items():
            shape, dtype = shape_and_dtype
            inputs[name] = torch.zeros(shape, dtype=dtype)
        return inputs

    return make


MORE = {
    "plain": {},
    "alibi and sinks": {"alibi_slopes": ((4,), torch.float32), "sinks": ((4,), torch.float32)},
    "dropout": {"rng_state": ((2,), torch.int64)},
    "dlse": {"dlse": ((2, 4, 160), torch.float32)},
}


def main():
    from flashtile import hopper, portable

    device = hardware.by_name("H200")
    for tier in (portable, hopper):
        for packed in (False, True):
            for name, more in MORE.items():
                for deterministic in (False, True) if tier is hopper else (False,):
                    if "dlse" in more and packed:
                        more = {"dlse": ((4, 320), torch.float32)}
                    make = tensors(packed, **more)
                    operands = [field for field in Operands._fields if field in make()]
                    problem = AttentionProblem(
                        batch=2, seqlen_q=160, seqlen_k=160, num_heads=4, num_heads_kv=2, head_dim=64, head_dim_v=64,
                        dtype=torch.bfloat16, window=(None, 0), softmax_scale=0.1, deterministic=deterministic,
                        dropout_p=0.5 if "rng_state" in more else 0.0, has_alibi="alibi_slopes" in more,
                        has_sinks="sinks" in more, **({"total_q": 320, "total_k": 320} if packed else {}),
                    )  # fmt: skip
                    for direction in (name for name in tier.DIRECTIONS if name != "decode"):
                        if direction == "dslopes" and not problem.has_alibi:
                            continue
                        # To a forward, dlse is nothing: its call would be the plain one again.
                        if tier.refuses(problem, device, direction) or direction == "forward" and "dlse" in more:
                            continue
                        bind = getattr(tier, f"bind_{direction}")
                        function = bind(problem, tier.configs(problem, device, direction))

                        def call(inputs, function=function, direction=direction, operands=operands):
                            given = Operands(**{field: inputs[field] for field in operands})
                            if direction == "forward":
                                return function(given)
                            return function(given, inputs["out"], inputs["lse"], inputs["dout"], inputs.get("dlse"))

                        words = (tier.__name__, direction, "packed" * packed, name, "deterministic" * deterministic)
                        compare(" ".join(filter(None, words)), call, make, (("v", "k"), ("dout", "out")))
    compare_mla(device)


MLA = {
    "plain": {"heads": 16},
    "causal, sinks, its own schedule": {"heads": 128, "seqlen_q": 2, "sinks": True, "schedule": False},
    "strided queries": {"heads": 16, "seqlen_q": 2, "strided": True},
    "sparse": {"heads": 128, "seqlen_q": 2, "topk": 128},
    "sparse, packed, lengths, its own schedule": {"heads": 64, "seqlen_q": 2, "topk": 128, "packed": True, "topk_length": True,
                                                  "schedule": False, "strided": True},
    "sparse, packed, lengths beside indices": {"heads": 128, "topk": 128, "packed": True, "topk_length": True},
    "pages of 16": {"heads": 16, "page_size": 16},
}  # fmt: skip


def mla_tensors(heads, seqlen_q=1, topk=None, packed=False, page_size=64, sinks=False, schedule=True, strided=False,
                topk_length=False):  # fmt: skip
    """The inputs of a latent decode of two sequences. Indices and topk_length are cut from one tensor."""
    q = torch.zeros(seqlen_q, 2, heads, 576, dtype=torch.bfloat16).transpose(0, 1)
    inputs = {"q": q if strided else q.contiguous(),
              "kv_cache": torch.zeros(8, page_size, 1, 656 if packed else 576, dtype=torch.uint8 if packed else torch.bfloat16)}
    if topk:
        memory = torch.zeros(4 * seqlen_q * topk + 2, dtype=torch.int32)
        indices = memory[:-2].view(2, seqlen_q, 2 * topk)[..., :topk]
        inputs["indices"] = indices.transpose(0, 1).contiguous().transpose(0, 1) if strided else indices
    else:
        inputs |= {"block_table": torch.zeros(2, 4, dtype=torch.int32), "cache_seqlens": torch.ones(2, dtype=torch.int32)}
    if topk_length:
        inputs["topk_length"] = memory[-2:]
    if sinks:
        inputs["sinks"] = torch.zeros(heads)
    if schedule:
        inputs["schedule"] = torch.zeros(5 + (2 * seqlen_q if topk else 2), 2, dtype=torch.int32)
    return inputs


def compare_mla(device):
    from flashtile.mla import hopper, plan, portable
    from flashtile.mla.problem import MlaOperands, MlaProblem

    # As in large calls indices are put in order
    hopper.ORDERED_BYTES = hopper.ORDERED_TOKENS = 0
    for name, shape in MLA.items():
        make = partial(mla_tensors, **shape)
        problem = MlaProblem.from_tensors(MlaOperands(**make()), causal="causal" in name)
        for tier in (portable, hopper):
            chosen = plan.plan(problem, device, (tier.__name__.split(".")[-1],))
            call = chosen.module.bind(problem, chosen.config, MlaOperands(**make()))
            compare(f"{tier.__name__} {name}", lambda inputs, call=call: call(MlaOperands(**inputs)), make)


if __name__ == "__main__":
    main()
