"""Calls on a key-value cache: named rows, their tensors with NaN wherever nothing may be read, and what must come out.

The oracle knows where it put each token: it attends by `naive` over a sequence's keys in float64 and never walks a table.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import accumulate
from unittest import mock

import torch
from checks import compare
from hypothesis import strategies as st

import flashtile
from flashtile.problem import AttentionProblem, Operands
from flashtile.reference import naive

FP8 = torch.float8_e4m3fn
# An unused entry of a block table; not a page anywhere
NO_PAGE = 2147480000


@dataclass(frozen=True)
class CacheCase:
    """One call. lengths: slots in use before the append. new: tokens that each sequence gets; None appends nothing."""

    name: str
    lengths: tuple[int, ...] = (37, 0, 96)
    seqlen_q: int = 1
    new: int | None = None
    capacity: int = 96
    page_size: int | None = None
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    # packed: queries, and new tokens, of each sequence
    lengths_q: tuple[int, ...] | None = None
    lengths_new: tuple[int, ...] | None = None
    # rows behind the last sequence of packed tensors
    tail: int = 0
    leftpad: tuple[int, ...] | None = None
    # rows of the cache that the sequences are, of `cache_rows`
    batch_idx: tuple[int, ...] | None = None
    cache_rows: int = 0
    # cache_seqlens as one int, or not given at all
    int_length: bool = False
    full: bool = False
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None
    sinks: bool = False
    rotary_dim: int = 0
    interleaved: bool = True
    rotary_seqlens: tuple[int, ...] | None = None
    num_splits: int = 0
    # "cache": k and v; "all": q too
    fp8: str | None = None
    descale: bool = False

    def scaled(self, factor):
        """The same case with all lengths multiplied; those of 0 and 1 stay."""

        def scale(n):
            return tuple(scale(x) for x in n) if isinstance(n, tuple) else n if n is None or n <= 1 else n * factor

        names = ("lengths", "seqlen_q", "new", "capacity", "lengths_q", "lengths_new", "leftpad", "window", "rotary_seqlens")
        return replace(self, **{name: scale(getattr(self, name)) for name in names})

    @property
    def batch(self):
        return len(self.lengths)

    @property
    def dim_v(self):
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def queries(self):
        return self.lengths_q or (self.seqlen_q,) * self.batch

    @property
    def added(self):
        return self.lengths_new or (self.new or 0,) * self.batch

    @property
    def stops(self):
        return tuple(min(old + more, self.capacity) for old, more in zip(self.lengths, self.added, strict=True))

    def make(self, dtype, device="cpu", seed=0):
        """A Call of this case: N(0, 1) values, the same on all devices; NaN in slots and rows that are nobody's."""
        return Call(self, dtype, device, seed)


class Call:
    """The tensors of a case, the arguments of `flashtile.attention_with_kvcache`, and where each slot lies in the cache."""

    def __init__(self, case, dtype, device, seed):
        self.case, self.dtype, self.device = case, dtype, device
        self.generator = torch.Generator().manual_seed(seed)
        self.cache_dtype = FP8 if case.fp8 else dtype
        self.q = self.draw(self.packed_shape(case.lengths_q, case.seqlen_q, case.heads, case.head_dim))
        if case.fp8 == "all":
            self.q = self.q.to(FP8)
        self.poison_tail(self.q, case.lengths_q)
        self.place()
        self.caches = [self.new_cache(dim) for dim in (case.head_dim, case.dim_v)]
        appends = case.new is not None or case.lengths_new is not None
        self.new = [self.draw(self.packed_shape(case.lengths_new, case.new, case.heads_kv, dim)) if appends else None
                    for dim in (case.head_dim, case.dim_v)]  # fmt: skip
        if appends:
            for x in self.new:
                self.poison_tail(x, case.lengths_new)
        self.before = [cache.clone() for cache in self.caches]
        length = max(case.capacity, *case.rotary_seqlens or (0,)) + max(*case.queries, *case.added) + 1
        angles = None
        if case.rotary_dim:
            angles = 6.3 * torch.rand(length, case.rotary_dim // 2, generator=self.generator).to(device)
        self.rotary = (None, None) if angles is None else (angles.cos().to(dtype), angles.sin().to(dtype))
        self.descales = [None] * 3
        if case.descale:
            shape = (case.batch, case.heads_kv)
            self.descales = [(torch.rand(shape, generator=self.generator) + 0.5).to(device) for _ in range(3)]
            if case.fp8 != "all":
                self.descales[0] = None
        self.slopes = None
        if case.alibi:
            shape = (case.heads,) if case.alibi == "heads" else (case.batch, case.heads)
            self.slopes = torch.rand(shape, generator=self.generator).to(device) / 4
        self.sinks = torch.randn(case.heads, generator=self.generator).to(device) if case.sinks else None

    def draw(self, shape, dtype=None):
        return torch.randn(shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def packed_shape(self, lengths, seqlen, heads, dim):
        if lengths is None:
            return self.case.batch, seqlen, heads, dim
        return sum(lengths) + self.case.tail, heads, dim

    def poison_tail(self, x, lengths):
        if lengths is not None and self.case.tail:
            x[sum(lengths) :] = float("nan")

    def place(self):
        """Lay the sequences into the cache: self.places[b] = (rows, columns) of its slots 0 .. stop - 1."""
        case = self.case
        if case.page_size:
            per_sequence = -(-case.capacity // case.page_size)
            used = [-(-stop // case.page_size) for stop in case.stops]
            # a page more than needed, so that a wrong one is not the right one by chance
            pages = torch.randperm(sum(used) + 1, generator=self.generator)
            self.cache_shape = (sum(used) + 1, case.page_size)
            self.table = torch.full((case.batch, per_sequence), NO_PAGE, dtype=torch.int32)
            self.places, taken = [], 0
            for b, count in enumerate(used):
                self.table[b, :count] = pages[taken : taken + count]
                slots = torch.arange(case.stops[b])
                self.places.append((pages[taken : taken + count][slots // case.page_size], slots % case.page_size))
                taken += count
        else:
            self.table = None
            rows = case.batch_idx or range(case.batch)
            self.cache_shape = (max(case.cache_rows, case.batch), case.capacity)
            slots = [torch.arange(stop) for stop in case.stops]
            self.places = [(torch.full_like(s, row), s) for row, s in zip(rows, slots, strict=True)]

    def new_cache(self, dim):
        """Values in the slots of each sequence before the append, from its left padding on; else NaN."""
        case = self.case
        cache = torch.full((*self.cache_shape, case.heads_kv, dim), float("nan"))
        for b, (rows, cols) in enumerate(self.places):
            begin = case.leftpad[b] if case.leftpad else 0
            own = slice(begin, case.lengths[b])
            cache[rows[own], cols[own]] = torch.randn(len(rows[own]), case.heads_kv, dim, generator=self.generator)
        return cache.to(self.device, self.cache_dtype)

    def int32(self, values):
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=self.device)

    def cumulative(self, lengths):
        return None if lengths is None else self.int32(list(accumulate(lengths, initial=0)))

    @property
    def arguments(self):
        """(q, k_cache, v_cache), keyword arguments."""
        case = self.case
        lengths = case.lengths[0] if case.int_length else None if case.full else self.int32(case.lengths)
        table = None if self.table is None else self.table.to(self.device)
        options = dict(
            k=self.new[0], v=self.new[1], cache_seqlens=lengths, block_table=table, cache_batch_idx=self.int32(case.batch_idx),
            cache_leftpad=self.int32(case.leftpad), cu_seqlens_q=self.cumulative(case.lengths_q),
            max_seqlen_q=max(case.lengths_q) if case.lengths_q else None, cu_seqlens_k_new=self.cumulative(case.lengths_new),
            rotary_cos=self.rotary[0], rotary_sin=self.rotary[1], rotary_seqlens=self.int32(case.rotary_seqlens),
            rotary_interleaved=case.interleaved, q_descale=self.descales[0], k_descale=self.descales[1],
            v_descale=self.descales[2], causal=case.causal, window=case.window, softmax_scale=case.softmax_scale,
            softcap=case.softcap, alibi_slopes=self.slopes, sinks=self.sinks, num_splits=case.num_splits, return_lse=True,
        )  # fmt: skip
        return (self.q, *self.caches), options

    def run(self, fn=None):
        """(out, lse) of fn, default `flashtile.attention_with_kvcache`."""
        tensors, options = self.arguments
        return (fn or flashtile.attention_with_kvcache)(*tensors, **options)

    def first_position(self, b):
        return self.case.rotary_seqlens[b] if self.case.rotary_seqlens else self.case.lengths[b]

    def positions(self, begin, count, moves=True):
        return begin + (torch.arange(count) if moves else torch.zeros(count, dtype=torch.int64)).to(self.device)

    def rotated(self, x, positions):
        """(seqlen, heads, dim) rotated in float64, as products of complex numbers."""
        case = self.case
        if not case.rotary_dim or not x.numel():
            return x
        cos, sin = (t[positions].double() for t in self.rotary)
        turned, rest = x[..., : case.rotary_dim].double(), x[..., case.rotary_dim :].double()
        pairs = turned.unflatten(-1, (-1, 2)) if case.interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
        pairs = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None]
        pairs = torch.view_as_real(pairs)
        turned = (pairs if case.interleaved else pairs.transpose(-1, -2)).flatten(-2)
        return torch.cat([turned, rest], -1)

    def part(self, x, lengths, b):
        return x[b] if lengths is None else x[sum(lengths[:b]) : sum(lengths[: b + 1])]

    def expected_caches(self):
        """(k_cache, v_cache) after the append, and whether each new slot must be there exactly."""
        case, caches = self.case, []
        for i, (new, before) in enumerate(zip(self.new, self.before, strict=True)):
            cache = before.double()
            for b in range(case.batch if new is not None else 0):
                count = case.stops[b] - case.lengths[b]
                x = self.part(new, case.lengths_new, b)[:count]
                x = self.rotated(x, self.positions(self.first_position(b), count)) if i == 0 else x
                if self.cache_dtype == FP8 and self.descales[1 + i] is not None:
                    x = x.float() / self.descales[1 + i][b][:, None]
                own = slice(case.lengths[b], case.stops[b])
                cache[tuple(index[own] for index in self.places[b])] = x.to(self.cache_dtype).double()
            caches.append(cache)
        return caches

    def attend(self, dtype, rounded):
        """(out, lse) over the cache as it is now, by `naive` in dtype; rounded: rotated queries in the call's dtype."""
        case = self.case
        out_dtype = torch.bfloat16 if case.fp8 == "all" else self.dtype
        out = torch.zeros(*self.q.shape[:-1], case.dim_v, dtype=dtype, device=self.device)
        wide = torch.promote_types(dtype, torch.float32)
        lse = torch.full(out.shape[:-1], float("-inf"), dtype=wide, device=self.device).transpose(-1, -2)
        moves = case.causal or case.window != (None, None)
        begins, starts = case.leftpad or (0,) * case.batch, list(accumulate(case.queries, initial=0))
        # Sequences that are alike but in their values at once
        alike = defaultdict(list)
        for b in range(case.batch):
            alike[case.queries[b], self.first_position(b), begins[b], case.stops[b]].append(b)
        for (count, first, begin, stop), group in alike.items():
            rows = torch.tensor([range(starts[b], starts[b + 1]) for b in group], dtype=torch.int64, device=self.device)
            q = self.rotated(self.q.flatten(0, -3)[rows].double(), self.positions(first, count, moves))
            if rounded:
                q = q.to(out_dtype)
            slots = [torch.stack([self.places[b][i][begin:stop] for b in group]) for i in range(2)]
            keys = [cache[tuple(slots)].double() for cache in self.caches]
            q, k, v = (x.double() if d is None else
                       x.double() * d[group].repeat_interleave(x.shape[2] // case.heads_kv, 1)[:, None, :, None]
                       for x, d in zip((q, *keys), self.descales, strict=True))  # fmt: skip
            slopes = self.slopes[group] if case.alibi == "batch" else self.slopes
            operands = Operands(*(x.to(dtype) for x in (q, k, v)), alibi_slopes=slopes, sinks=self.sinks)
            problem = AttentionProblem.from_tensors(operands, causal=case.causal, window=case.window, softcap=case.softcap,
                                                    softmax_scale=case.softmax_scale)  # fmt: skip
            out_of_group, lse_of_group = naive.forward(operands, problem)
            out.flatten(0, -3)[rows] = out_of_group
            if case.lengths_q:
                lse[:, rows] = lse_of_group.transpose(0, 1)
            else:
                lse[group] = lse_of_group
        return out, lse


def _as_fp8(p, keep):
    """In the place of `naive.drop`: weights as e4m3 holds them where the largest of a row is 256."""
    unit = p.sum(-1, keepdim=True) if p.shape[-1] == 0 else p.amax(-1, keepdim=True).clamp(min=1e-30) / 256
    return (p / unit).float().to(FP8).to(p.dtype) * unit


def check_cache(case, dtype, device="cpu", fn=None, seed=0, fp8_weights=False):
    """Run a case; compare the caches with what must stand there, out and lse with float64. Raises AssertionError.

    fp8_weights: the kernel multiplies them, and q kᵀ, in fp8: tensor cores add up 13 bits or so of the latter.
    """
    call = case.make(dtype, device, seed)
    out, lse = call.run(fn)
    report = []
    for name, cache, expected in zip(("k_cache", "v_cache"), call.caches, call.expected_caches(), strict=True):
        rotated = case.rotary_dim and name == "k_cache" or case.descale
        # rotated and divided in fp32, so that a value may be rounded to the other side
        steps = torch.finfo(call.cache_dtype).eps * expected.abs() + 1e-6 if rotated else torch.zeros_like(expected)
        wrong = ~((cache.double() - expected).abs() <= steps) & ~(cache.double().isnan() & expected.isnan())
        if wrong.any():
            report.append(f"{name}: {int(wrong.sum())} elements differ, first at {wrong.nonzero()[0].tolist()}")
    out_dtype = torch.bfloat16 if case.fp8 == "all" else dtype
    reference, yardstick = call.attend(torch.float64, rounded=False), call.attend(out_dtype, rounded=True)
    yardstick_lse = call.attend(torch.promote_types(out_dtype, torch.float32), rounded=True)[1]
    if out.dtype != out_dtype:
        report.append(f"out: dtype {out.dtype}, expected {out_dtype}")
    if fp8_weights:
        with mock.patch.object(naive, "drop", _as_fp8):
            yardstick = call.attend(torch.float64, rounded=True)
    report += compare("out", out, reference[0], yardstick[0], out_dtype, narrow=fp8_weights)
    if fp8_weights:
        finite = reference[1].isfinite()
        largest = max(1.0, reference[1][finite].abs().max().item()) if finite.any() else 1.0
        off = (lse - reference[1])[finite].abs().max().item() if finite.any() else 0.0
        if not off <= 2.0**-10 * largest or not torch.equal(lse.double()[~finite], reference[1][~finite]):
            report.append(f"lse: off by {off:.1e}, the largest is {largest:.1f}; or not finite elsewhere")
    else:
        # rotated queries are rounded to the dtype of q, and lse is no better than they are
        report += compare("rotated lse" if case.rotary_dim else "lse", lse, reference[1], yardstick_lse, out_dtype)
    hidden = reference[0].eq(0).all(-1)
    if (out[hidden] != 0).any():
        report.append("out: expected 0 where no key is visible")
    assert not report, "\n".join([f"{case.name}, {dtype}, {device}: {case}", *report])


CASES = [
    CacheCase("plain"),
    CacheCase("one_int", int_length=True, lengths=(50, 50, 50)),
    CacheCase("all_slots", full=True, lengths=(96, 96, 96)),
    CacheCase("mha", heads=3, heads_kv=3),
    CacheCase("mqa_dims_40_24", heads=5, heads_kv=1, head_dim=40, head_dim_v=24),
    CacheCase("dim_128_256", head_dim=128, head_dim_v=256),
    # Rows of 16 bytes that are not of 16 numbers; two blocks of columns, or one and zeros
    CacheCase("dim_72_append", head_dim=72, new=1, lengths=(37, 0, 95)),
    CacheCase("dim_136_paged", head_dim=136, page_size=16, seqlen_q=2, causal=True),
    CacheCase("dim_144_200", head_dim=144, head_dim_v=200, num_splits=2),
    CacheCase("dim_192_window", head_dim=192, page_size=64, capacity=192, lengths=(64, 65, 180), window=(50, 0), softcap=5.0),
    CacheCase("dim_192_128", heads=8, heads_kv=2, head_dim=192, head_dim_v=128, sinks=True),
    CacheCase("dim_160_many_rows", heads=40, heads_kv=2, head_dim=160, seqlen_q=5, causal=True),
    CacheCase("group_20", heads=20, heads_kv=1),
    CacheCase("several_queries", seqlen_q=5, causal=True),
    CacheCase("several_queries_full", seqlen_q=5, heads=6),
    CacheCase("queries_beyond_keys", seqlen_q=7, causal=True, lengths=(3, 7, 0)),
    CacheCase("window", seqlen_q=3, window=(20, 0), causal=True),
    CacheCase("window_both_sides", seqlen_q=9, window=(11, 2), page_size=16),
    CacheCase("softcap_alibi", seqlen_q=4, causal=True, softcap=5.0, alibi="heads"),
    CacheCase("alibi_batch_sinks", alibi="batch", sinks=True),
    CacheCase("sinks_split", sinks=True, num_splits=4, seqlen_q=3, causal=True),
    CacheCase("negative_scale", softmax_scale=-0.3),
    CacheCase("splits_1", num_splits=1),
    CacheCase("splits_3", num_splits=3, page_size=8),
    CacheCase("splits_beyond_keys", num_splits=64, lengths=(5, 0, 33)),
    CacheCase("page_1", page_size=1, capacity=40, lengths=(7, 0, 40)),
    CacheCase("page_3", page_size=3, capacity=39, lengths=(7, 0, 38), seqlen_q=2, causal=True),
    CacheCase("page_4", page_size=4, lengths=(37, 0, 90), seqlen_q=3, window=(30, 0), sinks=True),
    CacheCase("page_16", page_size=16),
    CacheCase("page_32", page_size=32, lengths=(31, 33, 90)),
    CacheCase("page_64", page_size=64, capacity=192, lengths=(64, 65, 180)),
    CacheCase("page_64_split", page_size=64, capacity=448, lengths=(64, 65, 400), num_splits=2),
    CacheCase("page_96_leftpad", page_size=96, leftpad=(5, 0, 70), lengths=(37, 1, 90)),
    CacheCase("page_256", page_size=256, capacity=256, lengths=(37, 0, 250)),
    CacheCase("leftpad", leftpad=(5, 0, 95), lengths=(37, 0, 96), seqlen_q=2, causal=True),
    CacheCase("leftpad_all", leftpad=(37, 0, 0)),
    CacheCase("batch_idx", batch_idx=(3, 0, 2), cache_rows=5),
    CacheCase("alike", heads=16, heads_kv=8, lengths=(96, 90, 37, 64, 65, 80, 96, 1, 0, 70, 50, 88)),
    CacheCase("alike_paged", heads=16, heads_kv=8, lengths=(96, 90, 37, 64, 65, 80, 96, 1, 0, 70, 50, 88), page_size=16,
              seqlen_q=2, causal=True, sinks=True),
    CacheCase("append", new=1, lengths=(37, 0, 95)),
    CacheCase("append_many", new=6, seqlen_q=6, causal=True, lengths=(37, 0, 90), page_size=16),
    CacheCase("append_batch_idx", new=2, seqlen_q=2, causal=True, lengths=(37, 0, 94), batch_idx=(3, 0, 2), cache_rows=5),
    CacheCase("append_fewer_queries", new=5, seqlen_q=2, causal=True, lengths=(1, 0, 60)),
    CacheCase("rotary", new=1, rotary_dim=64, lengths=(37, 0, 95), causal=True),
    CacheCase("rotary_halves_partial", new=3, seqlen_q=3, rotary_dim=24, interleaved=False, lengths=(37, 0, 90), causal=True),
    CacheCase("rotary_still_queries", new=3, seqlen_q=3, rotary_dim=32, lengths=(37, 0, 90), page_size=3),
    CacheCase("rotary_seqlens", new=2, seqlen_q=2, rotary_dim=64, lengths=(37, 0, 90), causal=True, rotary_seqlens=(9, 100, 0)),
    CacheCase("rotary_leftpad", new=2, seqlen_q=2, rotary_dim=16, causal=True, lengths=(37, 4, 90), leftpad=(3, 4, 50)),
    CacheCase("packed", lengths_q=(3, 0, 7), causal=True, tail=2),
    CacheCase("packed_split_paged", lengths_q=(3, 1, 2), causal=True, page_size=16, num_splits=2),
    # Two calls: see mixed.py
    CacheCase("packed_mixed", (37, 60, 0, 96, 50), lengths_q=(1, 40, 0, 8, 0), heads=2, heads_kv=1, causal=True, tail=1),
    CacheCase("packed_mixed_paged", (37, 60, 20, 96, 50), lengths_q=(1, 2, 0, 40, 3), heads=4, heads_kv=2, causal=True,
              page_size=16, softcap=5.0),
    CacheCase("packed_mixed_window", (37, 60, 20, 96, 50), lengths_q=(40, 1, 1, 1, 1), heads=4, heads_kv=2, window=(20, 3),
              alibi="batch", sinks=True, leftpad=(0, 5, 20, 50, 3)),
    CacheCase("packed_append", lengths_q=(3, 0, 7), lengths_new=(3, 0, 7), lengths=(37, 5, 80), causal=True, page_size=16,
              tail=1, rotary_dim=32),  # fmt: skip
    CacheCase("packed_append_differs", lengths_q=(3, 0, 2), lengths_new=(1, 4, 7), lengths=(37, 5, 80), causal=True,
              sinks=True),  # fmt: skip
    CacheCase("prefill", new=40, seqlen_q=40, causal=True, lengths=(0, 0, 0), page_size=16),
    CacheCase("chunked_prefill", new=33, seqlen_q=33, causal=True, lengths=(20, 0, 63), heads=6, window=(30, 0)),
    CacheCase("no_slots", capacity=0, lengths=(0, 0, 0), sinks=True),
    CacheCase("no_queries", seqlen_q=0, new=3, lengths=(1, 0, 60)),
    CacheCase("packed_no_queries", seqlen_q=0, lengths=(40, 0), lengths_q=(0, 0), tail=3, causal=True),
]  # fmt: skip
FP8_CASES = [
    CacheCase("fp8_cache", fp8="cache", descale=True),
    CacheCase("fp8_all", fp8="all", descale=True, seqlen_q=3, causal=True, page_size=16),
    CacheCase("fp8_no_descale", fp8="cache", head_dim=128, page_size=64, capacity=192, lengths=(64, 65, 180)),
    CacheCase("fp8_dim_96", fp8="cache", descale=True, head_dim=96, alibi="heads", softcap=20.0, sinks=True, page_size=8),
    CacheCase("fp8_dim_72_window", fp8="cache", head_dim=72, seqlen_q=5, causal=True, window=(20, 0), lengths=(90, 5, 64)),
    CacheCase("fp8_append", fp8="cache", descale=True, new=2, seqlen_q=2, causal=True, lengths=(37, 0, 90), rotary_dim=64),
    CacheCase("fp8_append_all", fp8="all", new=1, lengths=(37, 0, 90), page_size=3),
]
BY_NAME = {case.name: case for case in CASES + FP8_CASES}


@st.composite
def any_case(draw, largest=96):
    """A random configuration."""
    batch = draw(st.integers(1, 5))
    heads_kv = draw(st.sampled_from([1, 2, 3]))
    packed = draw(st.booleans())
    seqlen_q = draw(st.sampled_from([1, 1, 2, 5, 17]))
    appends = draw(st.booleans())
    capacity = draw(st.integers(20, largest))
    new = seqlen_q if appends else None
    lengths_q = tuple(draw(st.integers(0, seqlen_q)) for _ in range(batch)) if packed else None
    lengths_new = tuple(draw(st.integers(0, 17)) for _ in range(batch)) if packed and appends else None
    lengths = tuple(draw(st.integers(0, capacity - 17)) for _ in range(batch))
    page_size = draw(st.sampled_from([None, 1, 5, 16, 32, 64]))
    rotary_dim = draw(st.sampled_from([0, 0, 16, 32])) if appends else 0
    return CacheCase(
        "random", lengths=lengths, seqlen_q=seqlen_q, new=None if lengths_new else new, capacity=capacity, page_size=page_size,
        heads=heads_kv * draw(st.sampled_from([1, 2, 4, 7])), heads_kv=heads_kv,
        head_dim=draw(st.sampled_from([32, 64, 128, 80])),
        head_dim_v=draw(st.sampled_from([None, 64, 48])), lengths_q=lengths_q, lengths_new=lengths_new,
        tail=draw(st.integers(0, 2)) if packed else 0,
        leftpad=tuple(draw(st.integers(0, n)) for n in lengths) if draw(st.booleans()) else None,
        causal=draw(st.booleans()), window=draw(st.sampled_from([(None, None), (None, None), (30, 0), (7, 3), (None, 2)])),
        softcap=draw(st.sampled_from([0.0, 0.0, 4.0])), alibi=draw(st.sampled_from([None, None, "heads", "batch"])),
        sinks=draw(st.booleans()), rotary_dim=rotary_dim, interleaved=draw(st.booleans()),
        num_splits=draw(st.sampled_from([0, 0, 1, 2, 5])),
    )  # fmt: skip
