"""Which attention calls to measure: one frozen case, the grammar of lists, presets, inputs. Imports torch only to make inputs.

Grammar, everywhere: `512,1k,2k` a list; `1k..16k` powers of two (each twice the one before); k is 1024, m is 1048576;
`192-128` a head dim of q and k, and another of v.
"""

import itertools
import random
import tomllib
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path

from flashtile.errors import FlashtileError, explain

# fp8: queries and caches of the mode decode
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8": "float8_e4m3fn"}
MODES = ("fwd", "bwd", "fwd_bwd")
# One more of run and compare: seqlen_q new tokens over a key-value cache of seqlen_k, with flashtile.attention_with_kvcache
DECODE = "decode"
FORWARD_MODES = ("fwd", DECODE)
_DTYPE_ALIASES = {**{name: name for name in DTYPES}, **{full: name for name, full in DTYPES.items()}}
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20}
USER_PRESETS = Path("flashtile.toml")


class UsageError(FlashtileError, ValueError):
    """A benchmark was asked for something that doesn't exist; the message says what does."""


def as_typed(value) -> str:
    """An option's value, all digits of it."""
    return str(value).removesuffix(".0")


@dataclass(frozen=True)
class BenchCase:
    """One attention call to measure. Lengths in tokens; window counts keys left and right of the diagonal, None unbounded.

    varlen: sequences of different lengths, packed without padding, see `lengths`; seqlen is the longest. dropout: probability.
    page_size: tokens in a page of the cache in the mode decode; 0 is a cache without pages. alibi: the bias, with the slopes
    2**(-8 h / num_heads) of heads h = 1, 2, ...
    """

    batch: int = 2
    seqlen_q: int = 1024
    seqlen_k: int = 1024
    num_heads: int = 8
    num_heads_kv: int = 8
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    dtype: str = "bf16"
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    dropout: float = 0.0
    varlen: bool = False
    page_size: int = 0
    alibi: bool = False

    def __post_init__(self):
        for name in ("batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, got {getattr(self, name)}.")
        if self.num_heads % self.num_heads_kv:
            raise UsageError(f"nheads: expected a multiple of nheads-kv {self.num_heads_kv}, got {self.num_heads}.")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout: expected 0 (off) or more, and less than 1, got {self.dropout:g}.")
        if self.varlen and self.seqlen_q != self.seqlen_k:
            raise UsageError(f"varlen: expected seqlen-q as seqlen, {self.seqlen_k}, got {self.seqlen_q}.")

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence: seqlen_k; with varlen of the first, the others drawn log-uniformly from 1 to it.

        The same draw for every case of this batch and seqlen.
        """
        return ragged_lengths(self) if self.varlen else (self.seqlen_k,) * self.batch

    @property
    def group_size(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_heads_kv

    @property
    def mask_window(self) -> tuple[int | None, int | None]:
        """The window with causal folded into it: a right side of 0."""
        return (self.window[0], 0) if self.causal else self.window

    @property
    def call_window(self) -> tuple[int | None, int | None]:
        """The same as the problem of a call has it: a side that hides nothing is None."""
        from flashtile.problem import checked_window

        return checked_window(self.window, self.causal, self.seqlen_q, self.seqlen_k)

    @property
    def is_plain(self) -> bool:
        """Whether it has no option but a causal mask."""
        return self == BenchCase(self.batch, self.seqlen_q, self.seqlen_k, self.num_heads, self.num_heads_kv, self.head_dim,
                                 self.head_dim_v, self.causal, self.dtype)  # fmt: skip

    @property
    def has_latent_dims(self) -> bool:
        return (self.head_dim, self.head_dim_v) in ((576, 512), (512, 512))

    @property
    def latent(self) -> bool:
        """Whether it is a call over a latent cache, of which v is the first part of k: in the mode decode, for `mla_decode`."""
        return self.has_latent_dims and self.num_heads_kv == 1

    @property
    def latent_refusal(self) -> str | None:
        """What a latent case has that decoding over its cache has not, or None."""
        if self.alibi or self.softcap or self.window != (None, None):
            return "decoding over a latent cache has no ALiBi, window or softcap"
        if self.dtype == "fp8":
            return "a latent cache of fp8 has a layout of its own: benchmarks/mla.py"
        return None

    @property
    def torch_dtype(self):
        import torch

        return getattr(torch, DTYPES[self.dtype])

    def problem(self):
        """The AttentionProblem of this case, which counts its FLOPs and bytes."""
        from flashtile.problem import AttentionProblem

        return AttentionProblem(
            batch=self.batch, seqlen_q=self.seqlen_q, seqlen_k=self.seqlen_k, num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv, head_dim=self.head_dim, head_dim_v=self.head_dim_v, dtype=self.torch_dtype,
            window=self.call_window, softmax_scale=self.head_dim**-0.5, softcap=self.softcap, dropout_p=self.dropout,
            has_alibi=self.alibi, total_q=sum(self.lengths) if self.varlen else None,
            total_k=sum(self.lengths) if self.varlen else None, same_lengths=self.varlen,
        )  # fmt: skip

    def flops(self, mode: str) -> int:
        """Matmul FLOPs of "fwd", "bwd" or "fwd_bwd", of the sequences as long as they are."""
        return self.problem().flops(mode, [(n, n) for n in self.lengths] if self.varlen else None)

    def cache_problem(self):
        """The CacheProblem of this case in the mode decode: a cache of seqlen_k slots a sequence, all in use."""
        from flashtile.kvcache_problem import CacheProblem

        return CacheProblem(
            batch=self.batch, seqlen_q=self.seqlen_q, capacity=self.seqlen_k, num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv, head_dim=self.head_dim, head_dim_v=self.head_dim_v, dtype=self.torch_dtype,
            cache_dtype=self.torch_dtype, page_size=self.page_size or None, window=self.call_window,
            softmax_scale=self.head_dim**-0.5, softcap=self.softcap, has_alibi=self.alibi,
        )  # fmt: skip

    def latent_problem(self):
        """The MlaProblem of a latent case in the mode decode, in pages of page_size or 64 tokens."""
        from flashtile.mla.problem import MlaProblem

        page_size = self.page_size or 64
        return MlaProblem(
            batch=self.batch, seqlen_q=self.seqlen_q, num_heads=self.num_heads, num_heads_kv=self.num_heads_kv,
            head_dim=self.head_dim, head_dim_v=self.head_dim_v, dtype=self.torch_dtype, page_size=page_size,
            num_pages=self.batch * -(-self.seqlen_k // page_size), causal=self.causal and self.seqlen_q > 1,
            softmax_scale=self.head_dim**-0.5,
        )  # fmt: skip

    def alibi_slopes(self, device):
        """(num_heads,) fp32, the same tensor each time, or None."""
        return _alibi_slopes(self.num_heads, device) if self.alibi else None

    def label(self) -> str:
        """Short name of a row, such as `b8 s1024 h12 d64 causal bf16`."""
        seqlen = f"s{self.seqlen_k}" if self.seqlen_q == self.seqlen_k else f"sq{self.seqlen_q} sk{self.seqlen_k}"
        heads = f"h{self.num_heads}" if self.num_heads == self.num_heads_kv else f"h{self.num_heads}/{self.num_heads_kv}"
        words = [f"b{self.batch}", seqlen, heads, f"d{self.head_dims}"]
        words += ["causal"] if self.causal else []
        words += [f"window {_window_text(self.window)}"] if self.window != (None, None) else []
        words += [f"softcap {self.softcap:g}"] if self.softcap else []
        words += [f"dropout {self.dropout:g}"] if self.dropout else []
        words += [f"varlen {sum(self.lengths)} tokens"] if self.varlen else []
        words += [f"pages of {self.page_size}"] if self.page_size else []
        words += ["alibi"] if self.alibi else []
        return " ".join([*words, self.dtype])

    @property
    def head_dims(self) -> str:
        return f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}-{self.head_dim_v}"

    def flags(self, mode: str = "fwd") -> str:
        """The flags of `flashtile run --mode ...` that give this case; decode has one query where none are named."""
        words = ["-b", self.batch, "-s", self.seqlen_k]
        words += ["--seqlen-q", self.seqlen_q] if self.seqlen_q != self.seqlen_k or mode == DECODE else []
        words += ["--nheads", self.num_heads]
        words += ["--nheads-kv", self.num_heads_kv] if self.num_heads_kv != self.num_heads else []
        words += ["-d", self.head_dims]
        words += ["--causal"] if self.causal else []
        words += ["--window", _window_text(self.window)] if self.window != (None, None) else []
        words += ["--softcap", as_typed(self.softcap)] if self.softcap else []
        words += ["--dropout", as_typed(self.dropout)] if self.dropout else []
        words += ["--varlen"] if self.varlen else []
        words += ["--page-size", self.page_size] if self.page_size else []
        words += ["--alibi"] if self.alibi else []
        return " ".join(map(str, [*words, "--dtype", self.dtype]))

    def config(self) -> dict:
        """The `config` of a JSON record, under the names of the flags."""
        return {_JSON_NAMES.get(field.name, field.name): getattr(self, field.name) for field in fields(self)} | {
            "window": list(self.window)
        }

    @classmethod
    def from_config(cls, config: dict) -> "BenchCase":
        """The case of a JSON record's `config`."""
        # Older records lack the newer fields.
        values = {field.name: config.get(_JSON_NAMES.get(field.name, field.name), field.default) for field in fields(cls)}
        return cls(**values | {"window": tuple(values["window"])})


def ragged_lengths(case) -> tuple[int, ...]:
    """The `lengths` of a case with varlen."""
    draw = random.Random(f"{case.batch} {case.seqlen_k}").random
    return case.seqlen_k, *(int(case.seqlen_k ** draw()) for _ in range(case.batch - 1))


@lru_cache
def _alibi_slopes(num_heads, device):
    import torch

    return 2.0 ** (torch.arange(1, num_heads + 1, dtype=torch.float32, device=device) * (-8 / num_heads))


_JSON_NAMES = {"num_heads": "nheads", "num_heads_kv": "nheads_kv", "head_dim": "headdim", "head_dim_v": "headdim_v"}


# --- grammar -----------------------------------------------------------------------------------------------------------


def parse_int(text: str, flag: str = "number") -> int:
    """`2048`, `2k` or `1m` as a positive int."""
    digits, factor = text.strip().lower(), 1
    if digits[-1:] in _SUFFIXES:
        digits, factor = digits[:-1], _SUFFIXES[digits[-1]]
    if not digits.isascii() or not digits.isdigit() or int(digits) == 0:
        raise UsageError(f"{flag}: expected a positive number such as 2048 or 2k, got {text!r}.")
    return int(digits) * factor


def parse_ints(text: str, flag: str = "list") -> list[int]:
    """`512,1k,2k` or `1k..16k` (doubling) or a mixture, in the order given, without repetitions."""
    values = []
    for item in str(text).split(","):
        first, dots, last = item.partition("..")
        if not dots:
            values.append(parse_int(item, flag))
            continue
        if not first.strip() or not last.strip():
            raise UsageError(f"{flag}: expected a range with both ends, such as 1k..16k, got {item!r}.")
        value, stop = parse_int(first, flag), parse_int(last, flag)
        if stop < value:
            raise UsageError(f"{flag}: expected a range that grows, such as 1k..16k, got {item!r}.")
        while value <= stop:
            values.append(value)
            value *= 2
    return list(dict.fromkeys(values))


def parse_head_dims(text: str, flag: str = "headdim") -> list[tuple[int, int]]:
    """`64,192-128` as (head_dim, head_dim_v) pairs."""
    pairs = []
    for item in str(text).split(","):
        if "-" in item:
            qk, _, v = item.partition("-")
            if not qk.strip() or not v.strip():
                raise UsageError(f"{flag}: expected a head dim such as 128 or 192-128, got {item!r}.")
            pairs.append((parse_int(qk, flag), parse_int(v, flag)))
        else:
            pairs += [(dim, dim) for dim in parse_ints(item, flag)]
    return list(dict.fromkeys(pairs))


def parse_window(text: str, flag: str = "window") -> tuple[int | None, int | None]:
    """`128,0` as (left, right); a side that is empty, `none` or -1 is unbounded."""
    sides = [side.strip().lower() for side in text.split(",")]
    if len(sides) != 2:
        raise UsageError(f"{flag}: expected LEFT,RIGHT such as 128,0 (-1 is unbounded), got {text!r}.")
    return tuple(None if side in ("", "none", "-1") else 0 if side == "0" else _parse_keys(side, flag) for side in sides)


def _parse_keys(side, flag):
    """A side of a window that has an end."""
    try:
        return parse_int(side, flag)
    except UsageError:
        raise UsageError(f"{flag}: expected 0 or more keys on a side, or -1 for all of them, got {side!r}.") from None


def parse_choices(text: str, choices, flag: str) -> list[str]:
    """A list of names out of `choices`."""
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in choices:
            raise UsageError(f"{flag}: expected {', '.join(choices)}, got {name!r}.")
    return list(dict.fromkeys(names))


def only(names, flag: str) -> str:
    """The name of a list of one.

    Raises:
        UsageError: several.
    """
    if len(names) != 1:
        raise UsageError(f"{flag}: expected one, got {', '.join(names)}.")
    return names[0]


def _window_text(window) -> str:
    return ",".join("-1" if side is None else str(side) for side in window)


# --- presets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What a user can give, as text in the grammar of the module; None is not given. Each list multiplies the number of cases.

    total_tokens sets batch = total_tokens / seqlen; hidden sets nheads = hidden / headdim; both are multiples of what divides
    them. causal is "no", "yes" or "both".
    """

    batch: str | None = None
    seqlen: str | None = None
    seqlen_q: str | None = None
    nheads: str | None = None
    nheads_kv: str | None = None
    headdim: str | None = None
    causal: str | None = None
    dtype: str | None = None
    window: str | None = None
    softcap: float | None = None
    dropout: float | None = None
    varlen: bool | None = None
    page_size: str | None = None
    alibi: bool | None = None
    total_tokens: str | None = None
    hidden: str | None = None

    def overridden_by(self, other: "Shape") -> "Shape":
        """This shape with what `other` gives; an explicit batch ends total_tokens, explicit nheads end hidden, and back."""
        given = {field.name: getattr(other, field.name) for field in fields(self) if getattr(other, field.name) is not None}
        for one, its_rival in (("batch", "total_tokens"), ("nheads", "hidden")):
            for name, rival in ((one, its_rival), (its_rival, one)):
                if name in given and rival not in given:
                    given[rival] = None
        return replace(self, **given)

    def cases(self) -> list[BenchCase]:
        """Every combination, head dims outermost, causal and dtype innermost."""
        for field in fields(self):
            if getattr(self, field.name) == "":
                raise UsageError(f"{field.name.replace('_', '-')}: expected a value, got an empty one.")
        if self.batch and self.total_tokens:
            raise UsageError("batch and total-tokens: expected one of them, got both.")
        if self.nheads and self.hidden:
            raise UsageError("nheads and hidden: expected one of them, got both.")
        masks = {"no": [False], "yes": [True], "both": [False, True]}.get(self.causal or "no")
        if masks is None:
            raise UsageError(f"causal: expected no, yes or both, got {self.causal!r}.")
        dtypes = [_DTYPE_ALIASES[name] for name in parse_choices(self.dtype or BenchCase.dtype, _DTYPE_ALIASES, "dtype")]
        window = parse_window(self.window) if self.window else (None, None)
        softcap = self.softcap or 0.0
        if softcap < 0:
            raise UsageError(f"softcap: expected 0 (off) or more, got {softcap:g}.")
        page_sizes = parse_ints(self.page_size, "page-size") if self.page_size else [0]
        cases = []
        for (dim, dim_v), seqlen in itertools.product(
            parse_head_dims(self.headdim or BenchCase.head_dim), parse_ints(self.seqlen or BenchCase.seqlen_k, "seqlen")
        ):
            batches = self._quotients("batch", "total_tokens", seqlen, BenchCase.batch)
            heads = self._quotients("nheads", "hidden", dim, BenchCase.num_heads)
            seqlens_q = parse_ints(self.seqlen_q, "seqlen-q") if self.seqlen_q else [seqlen]
            for batch, num_heads, seqlen_q, causal, dtype in itertools.product(batches, heads, seqlens_q, masks, dtypes):
                heads_kv = parse_ints(self.nheads_kv, "nheads-kv") if self.nheads_kv else [num_heads]
                for kv, page_size in itertools.product(heads_kv, page_sizes):
                    cases.append(BenchCase(batch, seqlen_q, seqlen, num_heads, kv, dim, dim_v, causal, dtype, window, softcap,
                                           self.dropout or 0.0, bool(self.varlen), page_size, bool(self.alibi)))  # fmt: skip
        return cases

    def _quotients(self, name, total_name, divisor, default) -> list[int]:
        total = getattr(self, total_name)
        if not total:
            return parse_ints(getattr(self, name) or default, name)
        flag, of = total_name.replace("_", "-"), "seqlen" if name == "batch" else "headdim"
        values = parse_ints(total, flag)
        for value in values:
            if value % divisor:
                raise UsageError(explain(flag, f"a multiple of {of} {divisor}", value, f"--{name} sets the {name} itself."))
        return [value // divisor for value in values]


def _drawn(count: int, most_flops: float = 2e11) -> tuple[Shape, ...]:
    """Shapes at random, always the same: batches and lengths log-uniform, many no multiple of 64, heads in groups or not."""
    draw = random.Random(0)

    def choose(*options):
        return options[int(draw.random() * len(options))]

    def length():
        tokens = int(2 ** (6 + 8 * draw.random()))
        return choose(tokens, tokens // 64 * 64)

    shapes = []
    while len(shapes) < count:
        batch, heads = int(2 ** (6 * draw.random())), choose(1, 2, 4, 8, 12, 16, 20, 32, 40, 64)
        heads_kv, head_dim = max(1, heads // choose(1, 1, 4, 8)), choose(64, 64, 128, 128, 256, 80, 96, 192)
        causal, seqlen_q = choose("no", "yes"), length()
        seqlen = length() if causal == "no" and draw.random() < 0.4 else seqlen_q
        flops = 4 * batch * heads * seqlen_q * seqlen * head_dim // (1 + (causal == "yes"))
        if heads % heads_kv == 0 and flops <= most_flops:
            shapes.append(Shape(str(batch), str(seqlen), str(seqlen_q), str(heads), str(heads_kv), str(head_dim), causal))
    return tuple(shapes)


@dataclass(frozen=True)
class Preset:
    """A named case or set of cases; `shapes` are united, `about` says what it stands for."""

    about: str
    shapes: tuple[Shape, ...]

    def cases(self) -> list[BenchCase]:
        return list(dict.fromkeys(case for shape in self.shapes for case in shape.cases()))


def _one(about, batch, seqlen, nheads, headdim, causal="no", **more) -> Preset:
    return Preset(about, (Shape(str(batch), str(seqlen), nheads=str(nheads), headdim=str(headdim), causal=causal, **more),))


def _listed(about, *rows) -> Preset:
    """A set from (batch, seqlen, nheads, headdim) rows."""
    return Preset(about, tuple(Shape(str(b), str(s), nheads=str(h), headdim=str(d)) for b, s, h, d in rows))


PRESETS = {
    "default": _one("what runs without flags", 2, 1024, 8, 64),
    "gpt2-small": _one("GPT-2 small", 8, 1024, 12, 64, "yes"),
    "gpt3": _one("GPT-3", 2, 2048, 96, 128, "yes"),
    "bert-base": _one("BERT base", 16, 512, 12, 64),
    "bert-large": _one("BERT large", 8, 512, 16, 64),
    "short": _one("short sequences", 32, 512, 8, 64),
    "long": _one("a long sequence", 1, 8192, 8, 64),
    "very-long": _one("a very long sequence", 1, 16384, 8, 64),
    "llama3-8b-prefill": _one("Llama 3 8B, prompt of 8k tokens", 1, 8192, 32, 128, "yes", nheads_kv="8"),
    "llama3-70b-prefill": _one("Llama 3 70B, prompt of 8k tokens", 1, 8192, 64, 128, "yes", nheads_kv="8"),
    "gemma2-9b-prefill": _one("Gemma 2 9B, a layer with a window", 1, 8192, 16, 256, "yes", nheads_kv="8", window="4095,0",
                              softcap=50.0),
    "deepseek-v3-prefill": _one("DeepSeek V3, uncompressed heads", 1, 4096, 128, "192-128", "yes"),
    "llama3-8b-decode": _one("Llama 3 8B, a new token after 8k", 16, 8192, 32, 128, "yes", nheads_kv="8", seqlen_q="1"),
    "deepseek-mla-decode": _one("DeepSeek V3, a new token after 8k over its latent cache", 128, 8192, 128,
                                "576-512", "yes", nheads_kv="1", seqlen_q="1"),
    "guide-small": _listed("small forward cases", (1, 32, 4, 16), (1, 64, 8, 32), (2, 128, 8, 32)),
    "guide-medium": _listed("medium forward cases", (4, 256, 16, 64), (8, 512, 16, 64), (16, 512, 32, 64)),
    "guide-large": _listed("large forward cases", (32, 1024, 32, 128), (64, 1024, 64, 128)),
    "guide-backward": _listed("forward and backward cases", (1, 32, 4, 16), (1, 64, 8, 32), (2, 128, 8, 32), (4, 256, 16, 64),
                              (8, 512, 16, 64)),
    "guide-memory": _one("for `flashtile memory`", 2, "64..2k", 16, 128),
    "leetcuda": Preset("sweep of small cases", (Shape("8,16", "256,512,1024", nheads="8,16", headdim="64,128"),)),
    "learn": _listed("the guide's comparison", (1, 1024, 8, 64), (1, 2048, 12, 128), (1, 4096, 16, 128)),
    "features": Preset(
        "what the papers' grid leaves out: grouped heads, windows, softcap, ALiBi, packed sequences, dropout, 128k tokens",
        (
            Shape("2", "8k", nheads="32", nheads_kv="4", headdim="128", causal="yes"),
            Shape("4", "4k", nheads="32", nheads_kv="1", headdim="64"),
            Shape("1", "16k", nheads="16", headdim="128", causal="yes"),
            Shape("1", "16k", nheads="16", headdim="128", window="1023,0"),
            Shape("2", "8k", nheads="16", headdim="128", causal="yes"),
            Shape("2", "8k", nheads="16", headdim="128", causal="yes", softcap=50.0),
            Shape("2", "8k", nheads="16", headdim="128", causal="yes", alibi=True),
            Shape("1", "8k", nheads="16", headdim="192-128", causal="yes"),
            Shape("1", "128k", nheads="4", headdim="128", causal="yes"),
            Shape("4", "4k", nheads="16", headdim="96", causal="both"),
            Shape("4", "4k", nheads="16", headdim="64,128", dropout=0.1),
            Shape("32", "8k", nheads="16", headdim="64,128", causal="yes", varlen=True),
            Shape("512", "1k", nheads="16", headdim="128", causal="yes", varlen=True),
        ),
    ),
    "few-keys": Preset(
        "cross attention of diffusion models on a prompt, vision and text encoders",
        (
            Shape("8", "77", seqlen_q="4096", nheads="8", headdim="40"),
            Shape("8", "77", seqlen_q="4096", nheads="10", headdim="64"),
            Shape("8", "120", seqlen_q="4096", nheads="16", headdim="72"),
            Shape("256", "50", nheads="12", headdim="64"),
            Shape("128", "197", nheads="12", headdim="64"),
            Shape("64", "257", nheads="16", headdim="64,80"),
            Shape("64", "256", nheads="16", headdim="72"),
            Shape("32", "577", nheads="16", headdim="64"),
            Shape("64", "64", nheads="8", headdim="32"),
            Shape("64", "128", nheads="12", headdim="64"),
            Shape("64", "77", nheads="12", headdim="64", causal="yes"),
        ),
    ),
    "few-queries": Preset(
        "a query or some of many keys, without a cache: decoding, resamplers, cross attention to long inputs",
        (
            Shape("1", "2k,8k,64k", seqlen_q="1", nheads="32", nheads_kv="8", headdim="128"),
            Shape("16", "4k", seqlen_q="1", nheads="32", nheads_kv="8", headdim="128"),
            Shape("1", "32k", seqlen_q="16,64,256", nheads="16", headdim="64"),
            Shape("1", "4k,32k", seqlen_q="512", nheads="8", headdim="128"),
            Shape("1", "16k", seqlen_q="64", nheads="32", nheads_kv="8", headdim="128"),
            # few heads, of a model on several GPUs
            Shape("1", "4k", nheads="4", headdim="64,128", causal="yes"),
            # Flamingo's and Perceiver's latents
            Shape("8", "2k", seqlen_q="64", nheads="8", headdim="64"),
            Shape("1", "50176", seqlen_q="512", nheads="8", headdim="128"),
        ),
    ),
    "few-heads": Preset(
        "training a causal model whose heads are spread over GPUs: about as many tiles as multiprocessors",
        (
            Shape("1", "4k", nheads="4", headdim="64,128", causal="yes"),
            Shape("1", "2k", nheads="8", headdim="64,128", causal="yes"),
            Shape("1", "4k", nheads="8", headdim="64", causal="yes"),
            Shape("2", "2k", nheads="8", headdim="64", causal="yes"),
            Shape("1", "8k", nheads="1,2", headdim="128", causal="yes"),
            Shape("1", "16k", nheads="1", headdim="64,128", causal="yes"),
            Shape("1", "4k", nheads="4", nheads_kv="1", headdim="128", causal="yes"),
            Shape("1", "4k", nheads="2", headdim="256", causal="yes"),
            Shape("1", "2k", nheads="4", headdim="256", causal="yes"),
        ),
    ),
    "head-dims": Preset(
        "head dims that are no power of two; with --mode decode a new token after as many",
        (
            Shape("16", "2k", nheads="16", headdim="40,72,80,88,96,104,120,136,192,200"),
            # Stable Diffusion 1.5 at 64 x 64; SigLIP So400m
            Shape("2", "4k", nheads="8", headdim="40"),
            Shape("64", "729", nheads="16", headdim="72"),
        ),
    ),
    "models": Preset(
        "one layer of each of 20 models, as they are trained or take a prompt: text, vision, speech, images, video",
        (
            # Llama 3.2 1B; Qwen 3 32B; Falcon 7B; Phi-2; Phi-3 mini; DeepSeek V3
            Shape("2", "8k", nheads="32", nheads_kv="8", headdim="64", causal="yes"),
            Shape("1", "32k", nheads="64", nheads_kv="8", headdim="128", causal="yes"),
            Shape("4", "2k", nheads="71", nheads_kv="1", headdim="64", causal="yes"),
            Shape("4", "2k", nheads="32", headdim="80", causal="yes"),
            Shape("2", "4k", nheads="32", headdim="96", causal="yes"),
            Shape("1", "4k", nheads="128", headdim="192-128", causal="yes"),
            # layers with a window of gpt-oss, Gemma 3 12B and Mistral 7B
            Shape("2", "8k", nheads="64", nheads_kv="8", headdim="64", window="127,0"),
            Shape("2", "8k", nheads="16", nheads_kv="8", headdim="256", window="1023,0"),
            Shape("1", "16k", nheads="32", nheads_kv="8", headdim="128", window="4095,0"),
            # BERT large; Whisper large's encoder; DINOv2 L, SigLIP So400m, SAM's ViT-H, OpenCLIP bigG
            Shape("32", "512", nheads="16", headdim="64"),
            Shape("8", "1500", nheads="20", headdim="64"),
            Shape("16", "1370", nheads="16", headdim="64"),
            Shape("32", "729", nheads="16", headdim="72"),
            Shape("2", "4k", nheads="16", headdim="80"),
            Shape("64", "257", nheads="16", headdim="104"),
            # Stable Diffusion XL at two sizes; FLUX; CogVideoX 5B; Wan 2.1 14B
            Shape("4", "4k", nheads="10", headdim="64"),
            Shape("4", "1k", nheads="20", headdim="64"),
            Shape("1", "4608", nheads="24", headdim="128"),
            Shape("1", "17776", nheads="48", headdim="64"),
            Shape("1", "32760", nheads="40", headdim="128"),
        ),
    ),
    "chunked-prefill": Preset(
        "chunks of prompts over a cache, in rows and in pages; with --mode decode",
        tuple(
            Shape(batch, seqlen, seqlen_q=queries, nheads=nheads, nheads_kv="8", headdim=headdim, causal="yes", page_size=pages)
            for batch, seqlen, queries, nheads, headdim, page_sizes in (
                ("1", "8k", "512,2k,8k", "32", "128", "16,64"), ("8", "4k", "512", "32", "128", "64,256"),
                ("16", "4k", "128", "32", "128", "64"), ("1", "32k", "512", "32", "128", "1,64"),
                ("2", "8k", "2k", "64", "64", "16,64"), ("2", "8k", "2k", "16", "256", "16,64"),
            )
            for pages in (None, page_sizes)
        )
        # one of a model's key-value heads, each on a GPU
        + (Shape("1", "8k,32k,128k", seqlen_q="512", nheads="8", nheads_kv="1", headdim="128", causal="yes", page_size="64"),),
    ),
    "random": Preset("48 calls drawn at random, once: no shape that somebody tuned for", _drawn(48)),
    "paper": Preset(
        "the grid of the FlashAttention papers: 16k tokens, nheads = 2048 / headdim",
        (Shape(seqlen="512..16k", headdim="64,128,256", causal="both", total_tokens="16k", hidden="2048"),),
    ),
}


def presets() -> dict[str, Preset]:
    """PRESETS and those of the file flashtile.toml in the current folder, whose tables [presets.NAME] have the fields of Shape
    and `about`.

    Raises:
        UsageError: the file can't be read so.
    """
    if not USER_PRESETS.is_file():
        return PRESETS
    try:
        tables = tomllib.loads(USER_PRESETS.read_text(encoding="utf-8")).get("presets", {})
        if not isinstance(tables, dict):
            raise UsageError(f"presets: expected tables, got {tables!r}.")
        own, known = {}, [field.name for field in fields(Shape)]
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise UsageError(f"presets.{name}: expected a table [presets.{name}], got {table!r}.")
            about = str(table.pop("about", "of flashtile.toml"))
            for key in table:
                if key not in known:
                    raise UsageError(f"presets.{name}: expected some of about, {', '.join(known)}, got {key!r}.")
            own[name] = Preset(about, (Shape(**{key: _of_toml(key, value) for key, value in table.items()}),))
            own[name].cases()
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{USER_PRESETS}: expected tables such as [presets.mine] with batch, seqlen, nheads, headdim, ... "
                         f"in the grammar of the flags: {error}") from None  # fmt: skip
    return PRESETS | own


def _of_toml(key, value):
    """A value of flashtile.toml as a field of Shape has it."""
    if key in ("varlen", "alibi"):
        if not isinstance(value, bool):
            raise UsageError(f"{key}: expected true or false, got {value!r}.")
        return value
    if key in ("softcap", "dropout"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{key}: expected a number, got {value!r}.")
        return float(value)
    if key == "causal" and isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(isinstance(item, int | str) and not isinstance(item, bool) for item in value):
        return ",".join(map(str, value))
    if not isinstance(value, int | float | str):
        raise UsageError(f"{key}: expected a number, a text, or a list of whole numbers or texts, got {value!r}.")
    return str(value)


def build_cases(preset: str | None = None, shape: Shape | None = None, defaults: dict | None = None) -> list[BenchCase]:
    """The cases of presets (a list of names) with what `shape` gives on top; without a preset, the defaults.

    defaults: fields of Shape where neither gives one.

    Raises:
        UsageError: unknown preset, or text outside of the grammar.
    """
    shape = shape or Shape()
    chosen, known = ([], presets()) if preset is not None else ([shape], {})
    for name in preset.split(",") if preset is not None else ():
        if name.strip() not in known:
            raise UsageError(f"preset: expected one of {', '.join(known)}, got {name.strip()!r}.")
        chosen += [part.overridden_by(shape) for part in known[name.strip()].shapes]
    chosen = [replace(part, **{key: value for key, value in (defaults or {}).items() if getattr(part, key) is None})
              for part in chosen]  # fmt: skip
    return list(dict.fromkeys(case for part in chosen for case in part.cases()))


# --- inputs ------------------------------------------------------------------------------------------------------------


def make_inputs(case: BenchCase, device, seed: int = 0, dout: bool = False) -> tuple:
    """(q, k, v, dout) drawn from N(0, 1) with a seed; dout is None unless asked for.

    Random data matter: a matrix product of zeros draws less power and runs some 10% faster.

    Returns:
        q (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_kv, head_dim),
        v (batch, seqlen_k, num_heads_kv, head_dim_v), dout (batch, seqlen_q, num_heads, head_dim_v); case.dtype, contiguous.
        With varlen all are packed: (total tokens, heads, dim). Of a latent case v is a view of k.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        # Of 8 bits torch draws none
        drawn = torch.bfloat16 if case.dtype == "fp8" else case.torch_dtype
        return torch.randn(shape, device=device, dtype=drawn, generator=generator).to(case.torch_dtype)

    rows_q, rows_k = (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
    if case.varlen:
        rows_q = rows_k = (sum(case.lengths),)
    q = normal(*rows_q, case.num_heads, case.head_dim)
    k = normal(*rows_k, case.num_heads_kv, case.head_dim)
    v = k[..., : case.head_dim_v] if case.latent else normal(*rows_k, case.num_heads_kv, case.head_dim_v)
    return q, k, v, normal(*rows_q, case.num_heads, case.head_dim_v) if dout else None


@lru_cache(maxsize=16)
def cu_seqlens(case: BenchCase, device):
    """Where the sequences of a case with varlen begin and end in its packed tensors: int32 (batch + 1,) on the device."""
    import torch

    return torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
