"""Latent attention decodes as named rows, the inputs they stand for, and the check of a result against float64."""

import random
from dataclasses import dataclass

import checks
import torch

from flashtile.mla import make_schedule, mla_decode, pack_fp8
from flashtile.mla.cache import split_fp8
from flashtile.reference import mla

# What no slot of a cache is; FlashMLA's tests put it where the block table isn't used
UNUSED_PAGE = 2147480000
NAN_BYTE = 0x7F


@dataclass(frozen=True)
class MlaCase:
    """One call. lengths: of the sequences, or with topk of the cache that indices point into."""

    name: str
    lengths: tuple[int, ...] = (100, 65)
    seqlen_q: int = 1
    heads: int = 4
    heads_kv: int = 1
    head_dim: int = 576
    page_size: int = 64
    # Tokens of memory between two pages
    apart: int = 0
    causal: bool = False
    sinks: bool = False
    topk: int | None = None
    topk_lengths: tuple[int, ...] | None = None
    fp8: bool = False
    # Scales of packed tokens are those of `pack_fp8` times a power of two of an exponent between these
    exponents: tuple[int, int] | None = None
    softmax_scale: float | None = None

    def make(self, dtype, device="cpu", seed=0):
        """Arguments of `mla_decode`. Unused slots hold NaN, unused entries of the block table what is no page."""
        generator = torch.Generator().manual_seed(seed)
        batch = len(self.lengths)
        pages = [-(-length // self.page_size) for length in self.lengths]
        max_pages = max(max(pages), 1) + 1
        num_pages = sum(pages) + 2
        order = torch.randperm(num_pages, generator=generator)
        table = torch.full((batch, max_pages), UNUSED_PAGE, dtype=torch.int32)
        cache = torch.full((num_pages, self.page_size, self.heads_kv, self.head_dim), float("nan"))
        first = 0
        for b, (length, count) in enumerate(zip(self.lengths, pages, strict=True)):
            table[b, :count] = order[first : first + count]
            rows = torch.randn(count * self.page_size, self.heads_kv, self.head_dim, generator=generator) / 10
            rows[length:] = float("nan")
            cache[table[b, :count].long()] = rows.unflatten(0, (count, self.page_size))
            first += count
        if self.fp8:
            # Packed NaN is NaN where it counts: e4m3 bytes, scales and rotary part
            used = ~cache.isnan().any(-1, keepdim=True)
            packed = pack_fp8(cache.nan_to_num())
            if self.exponents is not None:
                _, scales, _ = split_fp8(packed)
                low, high = self.exponents
                # A token's, and what its groups differ by
                shifts = torch.randint(low, high + 1, (*scales.shape[:-1], 1), generator=generator)
                scales *= torch.exp2((shifts + torch.randint(-3, 4, scales.shape, generator=generator)).float())
            cache = torch.where(used, packed, NAN_BYTE).to(torch.uint8)
        else:
            cache = cache.to(dtype)
        # Keys as small as FlashMLA's tests have them, for its absolute tolerance; queries so that logits are about 1
        q = (torch.randn(batch, self.seqlen_q, self.heads, self.head_dim, generator=generator) * 10).to(dtype)
        arguments = {"q": q, "kv_cache": cache, "causal": self.causal, "softmax_scale": self.softmax_scale}
        if self.topk is None:
            arguments |= {"block_table": table, "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32)}
        else:
            arguments["indices"] = self._indices(table, generator)
            if self.topk_lengths is not None:
                arguments["topk_length"] = torch.tensor(self.topk_lengths, dtype=torch.int32)
        if self.sinks:
            arguments["sinks"] = torch.randn(self.heads, generator=generator)
        arguments = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        if self.apart:
            cache = arguments["kv_cache"]
            shape = num_pages, self.page_size + self.apart, *cache.shape[2:]
            wide = torch.full(shape, NAN_BYTE if self.fp8 else float("nan"), dtype=cache.dtype, device=device)
            wide[:, : self.page_size] = cache
            arguments["kv_cache"] = wide[:, : self.page_size]
        return arguments

    def _indices(self, table, generator):
        """Slots of a sequence's tokens in random order; where there are too few, -1 and slots past the end of the cache."""
        indices = torch.full((len(self.lengths), self.seqlen_q, self.topk), -1, dtype=torch.int32)
        for b, length in enumerate(self.lengths):
            tokens = torch.arange(length)
            slots = table[b, tokens // self.page_size] * self.page_size + tokens % self.page_size
            for token in range(self.seqlen_q):
                chosen = slots[torch.randperm(length, generator=generator)][: self.topk]
                where = torch.randperm(self.topk, generator=generator)[: len(chosen)]
                indices[b, token, where] = chosen.to(torch.int32)
        indices[:, :, 0] = torch.where(indices[:, :, 0] < 0, UNUSED_PAGE, indices[:, :, 0])
        return indices


CASES = (
    MlaCase("plain"),
    MlaCase("one_key", lengths=(1, 1), heads=1),
    MlaCase("empty_sequences", lengths=(0, 70, 0), heads=3),
    MlaCase("all_empty", lengths=(0, 0)),
    MlaCase("split", lengths=(900,), heads=16),
    MlaCase("split_uneven", lengths=(3, 500, 64, 0, 400), heads=2),
    MlaCase("pieces", lengths=(500, 450), heads=2),
    MlaCase("causal", lengths=(130, 3, 1), seqlen_q=4, causal=True),
    MlaCase("two_tokens", lengths=(130,), seqlen_q=2, heads=5),
    MlaCase("rows_70", lengths=(100,), seqlen_q=2, heads=35, causal=True),
    MlaCase("latent_heads", lengths=(90, 33), heads=6, heads_kv=2, seqlen_q=2, causal=True),
    MlaCase("dim_512", head_dim=512),
    MlaCase("page_1", lengths=(40, 7), page_size=1),
    MlaCase("page_53", lengths=(200, 53), page_size=53),
    MlaCase("page_256", lengths=(300, 256), page_size=256),
    MlaCase("sinks", lengths=(70, 0), heads=8, sinks=True),
    MlaCase("sinks_split", lengths=(600,), heads=3, sinks=True),
    MlaCase("scale", softmax_scale=192**-0.5),
    MlaCase("negative_scale", softmax_scale=-0.05),
    MlaCase("sparse", lengths=(200, 90), topk=128),
    MlaCase("sparse_tokens", lengths=(200, 90), seqlen_q=3, topk=128, heads=2),
    MlaCase("sparse_few", lengths=(20, 0), topk=64, topk_lengths=(50, 64), sinks=True),
    MlaCase("sparse_split", lengths=(700,), topk=640, page_size=61),
    MlaCase("sparse_apart", lengths=(200, 90), topk=128, apart=5),
    MlaCase("fp8", lengths=(150, 0), fp8=True),
    MlaCase("fp8_apart", lengths=(150, 80), fp8=True, apart=2),
    MlaCase("sparse_fp8", lengths=(200, 90), seqlen_q=2, topk=128, topk_lengths=(128, 70), fp8=True, page_size=53),
    MlaCase("sparse_fp8_apart", lengths=(200, 90), topk=128, fp8=True, page_size=53, apart=3),
)
# Of scales that `pack_fp8` does not make. Weights of tokens whose scales are small do not vanish, since all logits are small
SCALES = (
    MlaCase("fp8_large", lengths=(150, 80), fp8=True, heads=70, exponents=(8, 20), softmax_scale=2.0**-24),
    MlaCase("fp8_small", lengths=(150, 80), fp8=True, heads=16, exponents=(-45, -2)),
    MlaCase("fp8_both", lengths=(1500, 80, 0), fp8=True, seqlen_q=2, causal=True, heads=16, exponents=(-30, 18),
            softmax_scale=2.0**-22),
    MlaCase("fp8_nearly", lengths=(700,), fp8=True, heads=8, exponents=(-10, 1), sinks=True),
    MlaCase("fp8_sparse", lengths=(700, 90), fp8=True, seqlen_q=2, topk=256, heads=64, exponents=(-30, 18), sinks=True,
            topk_lengths=(256, 100), softmax_scale=2.0**-22),
)  # fmt: skip
BY_NAME = {case.name: case for case in (*CASES, *SCALES)}


def random_case(seed):
    draw = random.Random(seed)
    heads_kv = draw.choice([1, 1, 1, 2, 3])
    lengths = tuple(draw.choice([0, 1, 17, 64, 100, 300, 1000, 5000]) for _ in range(draw.randint(1, 6)))
    sparse = heads_kv == 1 and draw.random() < 0.4
    fp8 = draw.random() < 0.3
    seqlen_q = draw.choice([1, 1, 2, 3, 8])
    topk = draw.choice([64, 128, 500, 1024]) if sparse else None
    return MlaCase(
        f"random_{seed}", lengths=lengths, seqlen_q=seqlen_q, heads=heads_kv * draw.choice([1, 3, 16, 32, 42]),
        heads_kv=heads_kv, head_dim=576 if fp8 else draw.choice([576, 576, 512]),
        page_size=draw.choice([64, 64, 64, 1, 16, 53, 128, 576]), causal=not sparse and draw.random() < 0.5,
        sinks=draw.random() < 0.3, topk=topk,
        topk_lengths=tuple(draw.randint(0, topk) for _ in lengths) if sparse and draw.random() < 0.5 else None, fp8=fp8,
        softmax_scale=draw.choice([None, 192**-0.5]), apart=draw.choice([0, 0, 4]),
    )  # fmt: skip


def check(case, dtype, device="cpu", seed=0, **options):
    """Run a case and compare out and lse with the definition in float64: the project's rule, then FlashMLA's own."""
    arguments = case.make(dtype, device, seed)
    # The implementation runs first, so that memory freed by the reference can't lend it the right answer.
    out, lse = mla_decode(**arguments, **options, return_lse=True)
    compare(case, arguments, out, lse)


def check_other_lengths(seed, dtype, device="cpu", heads=16):
    """A schedule of other lengths costs time, no more: which parts are merged is the table's to say."""
    draw = random.Random(seed)
    sequences = draw.randint(1, 4)
    lengths, planned = ([draw.choice([0, 1, 64, 65, 300, 700, 1500]) for _ in range(sequences)] for _ in range(2))
    schedule = make_schedule(torch.tensor(planned, dtype=torch.int32, device=device), num_heads=heads)
    check(MlaCase(f"lengths_{seed}", lengths=tuple(lengths), heads=heads), dtype, device, seed, schedule=schedule)


def check_infinite_sink(dtype, device="cpu", name="sinks"):
    """A head whose sink is inf has out 0 and lse inf; others do not notice."""
    arguments = BY_NAME[name].make(dtype, device)
    expected, expected_lse = mla_decode(**arguments, return_lse=True)
    arguments["sinks"][1] = float("inf")
    out, lse = mla_decode(**arguments, return_lse=True)
    assert (out[:, :, 1] == 0).all() and (lse[:, 1] == float("inf")).all()
    others = [head for head in range(BY_NAME[name].heads) if head != 1]
    assert torch.equal(out[:, :, others], expected[:, :, others]) and torch.equal(lse[:, others], expected_lse[:, others])


def compare(case, arguments, out, lse, flash_mla=True):
    """By the project's rule, then FlashMLA's, whose tolerances are for keys as `MlaCase` makes them."""
    reference, reference_lse = mla.decode(**arguments, dtype=torch.float64)
    yardstick, _ = mla.decode(**arguments)
    _, yardstick_lse = mla.decode(**arguments, dtype=torch.float32)
    dtype = arguments["q"].dtype
    report = checks.compare("out", out, reference, yardstick, dtype)
    report += checks.compare("lse", lse, reference_lse, yardstick_lse, dtype)
    if not report and flash_mla:
        report = flash_mla_rule(out, reference, lse, reference_lse)
    assert not report, "\n".join([f"{case}, {dtype}", *report])


def flash_mla_rule(out, reference, lse, reference_lse):
    """FlashMLA's tolerances: out 8e-4 or 2.01 / 128 of the value, cosine difference 5e-6; lse 1e-6 or 8.01 / 65536."""
    lines = []
    for name, got, want, absolute, relative in (("out", out, reference, 8e-4, 2.01 / 128),
                                                ("lse", lse, reference_lse, 1e-6, 8.01 / 65536)):  # fmt: skip
        finite = want.isfinite()
        error = (got.double() - want).abs()[finite]
        wrong = (error >= absolute) & (error >= relative * want.abs()[finite])
        if wrong.any():
            lines.append(f"{name}: {int(wrong.sum())} of {wrong.numel()} outside of FlashMLA's tolerance, "
                         f"largest error {error.max().item():.2e}")  # fmt: skip
    x, y = out.double().flatten(), reference.flatten()
    total = (x @ x + y @ y).item()
    difference = 1 - 2 * (x @ y).item() / total if total else 0.0
    if not difference < 5e-6:
        lines.append(f"out: cosine difference {difference:.2e}, FlashMLA allows 5e-6")
    return lines


def check_lse_without_sinks(dtype, device):
    """As FlashMLA gives it: sinks count in out alone, and a row without a key has lse +inf."""
    from flashtile.compat import flash_mla

    x = BY_NAME["sinks"].make(dtype, device)
    meta, num_splits = flash_mla.get_mla_metadata(x["cache_seqlens"], 8, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(
        x["q"], x["kv_cache"], x["block_table"], x["cache_seqlens"], 512, meta, num_splits, attn_sink=x["sinks"],
        causal=x["causal"],
    )
    expected, expected_lse = mla.decode(**x, lse_with_sinks=False, dtype=torch.float64)
    empty = expected_lse.isinf()
    assert empty.any() and (lse[empty] == float("inf")).all() and (out[x["cache_seqlens"] == 0] == 0).all()
    torch.testing.assert_close(lse[~empty].double(), expected_lse[~empty].double(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected.double(), atol=1e-2, rtol=1e-2)
