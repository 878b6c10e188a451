"""Numbers that change from call to call of a server compile nothing anew.

Triton compiles a kernel for each class of an int argument, 1, a multiple of 16 or neither, but for top-level ones named in
`do_not_specialize`. As a script this prints by what Triton tells calls apart, and compiles nothing; the test runs it in a
process of its own, since Triton's interpreter, which other tests use, knows no classes.
"""

import importlib.util
import json

import compiled
import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def _empty(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def _kvcache(rows=64, page_size=None, width=64, table_stride=None, seqlen_q=1, total_q=None, new=0, total_new=None, batch=8):
    """A call of `attention_with_kvcache`. rows: pages of page_size, of which a sequence has width, or slots of a sequence."""
    from flashtile import dispatch, hardware
    from flashtile.kvcache_problem import CacheOperands, CacheOptions, CacheProblem

    def heads(*rows, count=2):
        return _empty(*rows, count, 128, dtype=torch.bfloat16)

    k_cache, v_cache = (heads(rows, page_size) if page_size else heads(batch, rows) for _ in range(2))
    more = {"cache_seqlens": _empty(batch)}
    if page_size:
        more["block_table"] = _empty(batch, table_stride or width)[:, :width]
    if new:
        shape = (total_new,) if total_new else (batch, new)
        more |= {"k": heads(*shape), "v": heads(*shape), "rotary_cos": _empty(4096, 32, dtype=torch.bfloat16)}
        more |= {"rotary_sin": more["rotary_cos"], "cu_seqlens_k_new": _empty(batch + 1) if total_new else None}
    if total_q:
        more["cu_seqlens_q"] = _empty(batch + 1)
    q = heads(*((total_q,) if total_q else (batch, seqlen_q)), count=8)
    operands = CacheOperands(q, k_cache, v_cache, **more)
    options = CacheOptions(seqlen_q if total_q else None, True, True, None, None, None, 0.0, 0, True)
    problem, device = CacheProblem.from_tensors(operands, options), hardware.by_name("H200")
    plan = dispatch.plan(problem, device, "decode")
    return lambda: plan.module.bind_decode(problem, plan.configs, operands, device)(operands)


def _latent(tier, pages=64, page_size=64, width=64, table_stride=None, topk=None, index_stride=None, packed=False, batch=8):
    """A call of `mla_decode`."""
    from flashtile import hardware
    from flashtile.mla import plan
    from flashtile.mla.problem import MlaOperands, MlaProblem

    q = _empty(batch, 1, 64, 576, dtype=torch.bfloat16)
    kv_cache = _empty(pages, page_size, 1, 656 if packed else 576, dtype=torch.uint8 if packed else torch.bfloat16)
    where = {"block_table": _empty(batch, table_stride or width)[:, :width], "cache_seqlens": _empty(batch)}
    if topk:
        where = {"indices": _empty(batch, 1, index_stride or topk)[..., :topk], "topk_length": _empty(batch)}
    operands = MlaOperands(q, kv_cache, **where, schedule=_empty(66 + 1 + batch, 2))
    problem = MlaProblem(
        batch=batch, seqlen_q=1, num_heads=64, num_heads_kv=1, head_dim=576, head_dim_v=512, dtype=torch.bfloat16,
        num_pages=pages, page_size=page_size, softmax_scale=0.1, topk=topk, has_topk_length=bool(topk), fp8=packed,
    )  # fmt: skip
    chosen = plan.plan(problem, hardware.by_name("H200"), (tier,))
    return lambda: chosen.module.bind(problem, chosen.config, operands)(operands)


def _packed(total_q=4096, total_k=4096):
    """The forward of `attention_varlen` on Hopper."""
    from flashtile import dispatch, hardware
    from flashtile.problem import AttentionProblem, Operands

    problem = AttentionProblem(8, 512, 512, 8, 2, 128, 128, torch.bfloat16, total_q=total_q, total_k=total_k, window=(None, 0),
                               softmax_scale=0.1)  # fmt: skip
    starts = _empty(9)
    q, k, v = (_empty(total, heads, 128, dtype=torch.bfloat16) for total, heads in ((total_q, 8), (total_k, 2), (total_k, 2)))
    plan = dispatch.plan(problem, hardware.by_name("H200"))
    return lambda: [job() for job in plan.compile_jobs(problem, Operands(q, k, v, starts, starts), "forward")]


PAGED = {"page_size": 16, "rows": 4096}
# Call, what it has, and numbers of which each has its turn
CALLS = [
    ("decode in pages", _kvcache, PAGED, {"rows": (4097, 1), "width": (63,), "table_stride": (81,)}),
    ("decode in pages of 1", _kvcache, {"page_size": 1, "rows": 4096, "width": 4096}, {"rows": (4097,), "width": (4095,)}),
    ("decode in rows", _kvcache, {"rows": 4096}, {"rows": (4095,)}),
    ("packed decode", _kvcache, PAGED | {"seqlen_q": 4, "total_q": 16}, {"total_q": (17, 8, 1), "rows": (4097,)}),
    ("append", _kvcache, {"rows": 4096, "new": 1}, {"new": (2, 16), "rows": (4095,)}),
    ("append to pages", _kvcache, PAGED | {"new": 1}, {"new": (2, 16), "rows": (4097,), "width": (63,)}),
    ("packed append", _kvcache, PAGED | {"new": 1, "total_new": 8, "seqlen_q": 4, "total_q": 8}, {"total_new": (9, 16)}),
    ("prefill over pages", _kvcache, PAGED | {"seqlen_q": 512}, {"rows": (4097,), "width": (63,), "seqlen_q": (513,)}),
    ("prefill over pages of 1", _kvcache, PAGED | {"page_size": 1, "width": 4096, "seqlen_q": 512},
     {"rows": (4097,), "width": (4095,)}),
    ("prefill over rows", _kvcache, {"rows": 4096, "seqlen_q": 512}, {"rows": (4095,), "seqlen_q": (513,)}),
    ("packed prefill over rows", _kvcache, {"rows": 4096, "seqlen_q": 512, "total_q": 4096},
     {"rows": (4095,), "total_q": (4095,)}),
    ("packed prefill over pages", _kvcache, PAGED | {"seqlen_q": 512, "total_q": 4096},
     {"total_q": (4095,), "table_stride": (81,)}),
    ("prefill that appends", _kvcache, PAGED | {"seqlen_q": 512, "new": 512}, {"new": (511,), "rows": (4097,)}),
    ("packed forward", _packed, {}, {"total_q": (4095,), "total_k": (4095,)}),
    *(
        (f"{tier} latent {name}", _latent, {"tier": tier} | shape, numbers) for tier in ("hopper", "portable")
        for name, shape, numbers in (
            ("decode", {}, {"pages": (65, 1), "width": (63,), "table_stride": (81,)}),
            ("decode in pages of 1", {"page_size": 1, "pages": 4096}, {"pages": (4097,), "width": (63,)}),
            ("sparse decode", {"topk": 512}, {"pages": (65,), "index_stride": (515,)}),
            ("sparse decode in pages of 1", {"topk": 512, "page_size": 1, "pages": 4096}, {"pages": (4097,)}),
            ("sparse packed decode", {"topk": 512, "packed": True}, {"pages": (65,), "index_stride": (515,)}),
        )
    ),
]  # fmt: skip


def _leaves(name, kinds, classes):
    """(name, (type, class or value)) of what an argument holds."""
    if not isinstance(kinds, tuple):
        return [(name, [kinds, repr(classes)])]
    names = getattr(kinds, "_fields", range(len(kinds)))
    return [leaf for part, *pair in zip(names, kinds, classes, strict=True) for leaf in _leaves(f"{name}.{part}", *pair)]


def _told_apart(start):
    """(kernel, what Triton tells its launches apart by: type, and class or value, of each leaf of its arguments) of a call."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from flashtile.bench import offline

    found = []

    def run(kernel, *args, grid, warmup, **options):
        bind = kernel.device_caches[driver.active.get_current_device()][-1]
        bound, specialised, _ = bind(*args, debug=False, instrumentation_mode="", **options)
        found.append((kernel.__name__, dict(leaf for name, pair in zip(bound, specialised) for leaf in _leaves(name, *pair))))

    with offline.launches(90):
        JITFunction.run = run
        start()
    return found


def _compare():
    """Print for each call, and each of its numbers, the arguments of kernels that are of another class with another number."""
    for name, make, shape, numbers in CALLS:
        first = _told_apart(make(**shape))
        for number, values in numbers.items():
            for value in values:
                launches = _told_apart(make(**shape | {number: value}))
                same = [kernel for kernel, _ in launches] == [kernel for kernel, _ in first]
                changed = [f"{kernel}: {argument} {before[argument]} -> {after[argument]}"
                           for (kernel, before), (_, after) in zip(first, launches)
                           for argument in before if before[argument] != after[argument]]  # fmt: skip
                print(json.dumps({"call": f"{name}, {number}={value}", "kernels": [kernel for kernel, _ in first],
                                  "changed": changed if same else ["other kernels"]}))  # fmt: skip


def test_numbers_of_a_call_compile_nothing_anew():
    rows = compiled.reports_of(__file__)
    assert len(rows) == sum(len(values) for *_, numbers in CALLS for values in numbers.values())
    kernels = {kernel for row in rows for kernel in row["kernels"]}
    assert {"append_rows", "attention_forward", "decode_attention", "merge_parts", "decode", "merge"} <= kernels
    wrong = [f"{row['call']}\n  " + "\n  ".join(row["changed"]) for row in rows if row["changed"]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("layout", "dim", "dtype", "kind"), [
    ("contiguous", 64, torch.bfloat16, "Rows"),  # Triton sees it
    ("contiguous", 72, torch.bfloat16, "RowsIn16Bytes"),
    ("contiguous", 40, torch.float16, "RowsIn16Bytes"),
    ("contiguous", 72, torch.float32, "RowsIn16Bytes"),
    ("packed", 72, torch.bfloat16, "RowsIn16Bytes"),
    ("heads first", 72, torch.bfloat16, "RowsIn16Bytes"),
    ("one element apart", 72, torch.bfloat16, "Rows"),
    ("contiguous", 72, torch.float8_e4m3fn, "RowsIn8Bytes"),
    ("one element apart", 71, torch.float8_e4m3fn, "RowsIn8Bytes"),
])  # fmt: skip
def test_rows_say_what_strides_are_multiples_of(layout, dim, dtype, kind):
    from flashtile.device.tensors import rows_of

    x = torch.empty(2, 5, 3, dim, dtype=dtype)
    if layout == "packed":
        x = x[0]
    elif layout == "heads first":
        x = torch.empty(2, 3, 5, dim, dtype=dtype).transpose(1, 2)
    elif layout == "one element apart":
        x = torch.empty(2, 5, 3, dim + 1, dtype=dtype)[..., :dim]
    rows = rows_of(x)
    assert type(rows).__name__ == kind
    assert rows[1:4] == (0,) * (x.dim() == 3) + x.stride()[:-1]


if __name__ == "__main__":
    _compare()
