"""Every backend that the benchmark can time, one entry each: what it is, how to get it, which cases it refuses and why.

A backend is a function attend(q, k, v, case) -> out on (batch, seqlen, heads, head_dim) tensors, or packed ones
(total tokens, heads, head_dim) where case.varlen, differentiable where its entry says so. Peers that want
(batch, heads, seqlen, head_dim) get transposed views, never copies. Semantics are flashtile's: causal is aligned bottom-right,
rows without a visible key give 0; what a peer can't do so, it refuses.
"""

import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module, metadata

import torch
import torch.nn.functional as F

from flashtile.bench.cases import DECODE, FORWARD_MODES, UsageError, cu_seqlens
from flashtile.errors import FlashtileError, Unavailable, UnsupportedError
from flashtile.problem import AttentionProblem, Operands


class Refused(FlashtileError):
    """The backend can't run this case; the message says why."""


@dataclass(frozen=True)
class Backend:
    """One implementation. load(device) -> attend, raises Unavailable; refuses(case, mode, device) -> reason or None.

    dense, varlen, dropout, alibi, latent, fp8: whether it takes such cases here. over_cache(k, v, case) -> attend over k and v
    as a cache whose slots are all in use; others have the same keys in one piece where decoding is timed.
    """

    name: str
    about: str
    load: Callable
    refuses: Callable
    backward: bool = True
    dense: bool = True
    varlen: bool = False
    dropout: bool = False
    alibi: bool = False
    latent: bool = False
    fp8: bool = False
    over_cache: Callable | None = None
    # Distribution whose version is recorded.
    package: str = "torch"

    def refusal(self, case, mode, device) -> str | None:
        """Why this backend can't run a case in a mode, or None."""
        if mode not in FORWARD_MODES and not self.backward:
            return "forward only: no backward"
        if case.varlen and not self.varlen:
            return "measured here without packed sequences (--varlen)"
        if not case.varlen and not self.dense:
            return "packed sequences only: --varlen"
        if case.dropout and not self.dropout:
            return "measured here without dropout"
        if case.alibi and not self.alibi:
            return "measured here without ALiBi"
        if case.dtype == "fp8" and not self.fp8:
            return "measured here without fp8"
        if mode == DECODE and (case.varlen or case.dropout):
            return "decoding is measured without dropout and packed sequences"
        if case.latent and mode == DECODE:
            if case.latent_refusal:
                return case.latent_refusal
            if not self.latent:
                return "measured here with keys and values of their own, not over a latent cache"
            if case.seqlen_k % case.latent_problem().page_size:
                return f"a latent cache is measured in whole pages of {case.latent_problem().page_size} tokens"
        return self.refuses(case, mode, device)

    def version(self) -> str | None:
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


# --- flashtile ---------------------------------------------------------------------------------------------------------


def _flashtile_loader(deterministic):
    def load(device):
        from flashtile.api import attention, attention_varlen

        def attend(q, k, v, case):
            options = {"causal": case.causal, "window": case.window, "softcap": case.softcap, "dropout_p": case.dropout,
                       "deterministic": deterministic, "alibi_slopes": case.alibi_slopes(q.device)}  # fmt: skip
            if case.varlen:
                return attention_varlen(q, k, v, **packing(case, q.device), **options)
            return attention(q, k, v, **options)

        return attend

    return load


def packing(case, device) -> dict:
    """Of a case with varlen: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k, by the names of the field."""
    starts = cu_seqlens(case, device)
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}


def cache_options(case, device):
    """Those of `attention_with_kvcache` that a case has."""
    return {"causal": case.causal, "window": case.window, "softcap": case.softcap,
            "alibi_slopes": case.alibi_slopes(device)}  # fmt: skip


def cache_attend(k, v, case):
    """attend over k and v as a cache whose slots are all in use; rows of q are its last tokens.

    With case.page_size they are copied once into pages, in random order, and attend looks at these alone. Of a latent case k is
    the cache.
    """
    if case.latent:
        return _latent_attend
    from flashtile.api import attention_with_kvcache

    options = cache_options(case, k.device)
    if not case.page_size:
        return lambda q, k, v, case: attention_with_kvcache(q, k, v, **options)
    *pages, options["block_table"] = in_pages(k, v, case)
    options["cache_seqlens"] = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=k.device)
    return lambda q, k, v, case: attention_with_kvcache(q, *pages, **options)


def in_pages(k, v, case):
    """Copies of k and v in pages of case.page_size tokens, in random order, and the block table."""
    pages_each = -(-case.seqlen_k // case.page_size)
    order = torch.randperm(case.batch * pages_each, generator=torch.Generator().manual_seed(0)).to(k.device)
    pages = []
    for x in (k, v):
        # Of 8 bits torch moves integers alone
        moved = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
        padded = F.pad(moved, (0, 0, 0, 0, 0, pages_each * case.page_size - case.seqlen_k))
        pages.append(torch.empty_like(padded).view(-1, case.page_size, *x.shape[2:]))
        pages[-1][order] = padded.view(pages[-1].shape)
        pages[-1] = pages[-1].view(x.dtype)
    return *pages, order.int().view(case.batch, pages_each)


@lru_cache(maxsize=2)
def _latent_step(case, device):
    """(block_table, cache_seqlens) of a latent case whose cache is its k: pages in order, all slots in use."""
    problem = case.latent_problem()
    block_table = torch.arange(problem.num_pages, dtype=torch.int32, device=device).view(case.batch, -1)
    return block_table, torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=device)


@lru_cache(maxsize=2)
def _latent_schedule(case, device):
    """Made once, outside of what is timed after the first call, as a model does for its layers."""
    from flashtile.mla import make_schedule

    return make_schedule(_latent_step(case, device)[1], num_heads=case.num_heads, seqlen_q=case.seqlen_q)


def _latent_attend(q, k, v, case):
    from flashtile.mla import mla_decode

    block_table, cache_seqlens = _latent_step(case, q.device)
    return mla_decode(
        q, k.view(-1, case.latent_problem().page_size, *k.shape[2:]), block_table=block_table, cache_seqlens=cache_seqlens,
        softmax_scale=case.head_dim**-0.5, causal=case.causal, schedule=_latent_schedule(case, q.device),
    )  # fmt: skip


def _plans(case, mode, device):
    from flashtile import dispatch

    if mode == DECODE and case.latent:
        from flashtile.mla import plan

        return [plan.plan_for(case.latent_problem(), torch.device(device))]
    if mode == DECODE:
        return [dispatch.plan_for(case.cache_problem(), torch.device(device), "decode")]
    directions = {"fwd": ("forward",), "bwd": ("backward",), "fwd_bwd": ("forward", "backward")}[mode]
    return [dispatch.plan_for(case.problem(), torch.device(device), direction) for direction in directions]


def _flashtile_refuses(case, mode, device):
    try:
        _plans(case, mode, device)
    except UnsupportedError as error:
        return str(error)
    return None


def _deterministic_refuses(case, mode, device):
    if mode == DECODE:
        return "decoding is deterministic without an option"
    return _flashtile_refuses(case, mode, device)


def compile_ahead(q, k, v, case, forward_only) -> dict[str, float]:
    """Compile flashtile's kernels for a case side by side; seconds until those of each direction were ready."""
    from flashtile import dispatch, ops

    operands, lengths = Operands(q, k, v, alibi_slopes=case.alibi_slopes(q.device)), {}
    if case.varlen:
        lengths = packing(case, q.device)
        operands = operands._replace(cu_seqlens_q=lengths.pop("cu_seqlens_q"), cu_seqlens_k=lengths.pop("cu_seqlens_k"))
    if case.dropout:
        operands = operands._replace(rng_state=ops.draw_rng_state(q.device))
    problem = AttentionProblem.from_tensors(operands, causal=case.causal, window=case.window, softcap=case.softcap,
                                            dropout_p=case.dropout, **lengths)  # fmt: skip
    return dispatch.compile_ahead(problem, operands, ("forward",) if forward_only else ("forward", "backward"))


def flashtile_kernels(case, mode, device) -> str:
    """The tiers that flashtile takes for a case, with their tiles: `portable forward:64x64,4w,3s`."""
    words = []
    for plan in _plans(case, mode, device):
        words.append(plan.tier)
        # A plan of flashtile.mla has none
        configs = getattr(plan, "configs", {})
        words += [f"{name}:{c.tile_m}x{c.tile_n},{c.num_warps}w,{c.num_stages}s" for name, c in configs.items()]
    return " ".join(dict.fromkeys(words))


# --- standard PyTorch attention ----------------------------------------------------------------------------------------


def hidden_keys(case, device, rows: range):
    """(hidden, empty): bool (len(rows), seqlen_k), None where the mask hides nothing; whether some row sees no key."""
    left, right = case.mask_window
    if left is None and right is None:
        return None, False
    shift = case.seqlen_k - case.seqlen_q
    last = torch.arange(rows.start, rows.stop, device=device)[:, None] + shift
    key = torch.arange(case.seqlen_k, device=device)[None, :]
    hidden = torch.zeros(len(rows), case.seqlen_k, dtype=torch.bool, device=device)
    if right is not None:
        hidden |= key > last + right
    if left is not None:
        hidden |= key < last - left
    # Row i sees keys from i + shift - left to i + shift + right, cut to 0 .. seqlen_k - 1.
    first_is_empty = right is not None and rows.start + shift + right < 0
    last_is_empty = left is not None and rows.stop - 1 + shift - left >= case.seqlen_k
    return hidden, first_is_empty or last_is_empty


def naive_attention(q, k, v, case, rows: range | None = None, alibi_slopes=None):
    """softmax(q kᵀ / sqrt(head_dim) + mask) v as one writes it in PyTorch: the scores are stored, in q's dtype.

    Of a case of fp8, of which torch has no products, q, k and v come in a wider dtype, and weights are rounded to e4m3, but in
    float64.

    q holds the query rows `rows` of the case (default all); shapes as in `make_inputs`, any dtype. alibi_slopes: (batch, heads)
    of a case with alibi, where q has not all heads of it.
    """
    rows = range(case.seqlen_q) if rows is None else rows
    if case.latent and q.shape[2] > 1:
        # A hundred copies of the cache would not fit
        return torch.cat([naive_attention(head, k, v, case, rows) for head in q.split(1, 2)], 2)
    if q.shape[2] != k.shape[2]:
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) * case.head_dim**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.alibi:
        query = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + case.seqlen_k - case.seqlen_q
        distance = (query - torch.arange(case.seqlen_k, device=q.device)[None, :]).abs()
        slopes = case.alibi_slopes(q.device) if alibi_slopes is None else alibi_slopes
        scores = scores - (slopes[..., None, None] * distance).to(scores.dtype)
    hidden, some_row_is_empty = hidden_keys(case, q.device, rows)
    empty = None
    if some_row_is_empty:
        # A softmax over nothing is nan: let such rows see all, then set their weights to 0.
        empty = hidden.all(-1, keepdim=True)
        hidden = hidden & ~empty
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    p = scores.softmax(-1)
    if empty is not None:
        p = p.masked_fill(empty, 0.0)
    if case.dtype == "fp8" and q.dtype != torch.float64:
        # Where the largest of a row is 256: beside it e4m3 holds weights of 2**-17
        unit = p.amax(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny) / 256
        p = (p / unit).to(case.torch_dtype).to(p.dtype) * unit
    if case.dropout:
        p = F.dropout(p, case.dropout)
    return (p @ v).transpose(1, 2)


def naive_bytes(case, mode: str) -> int:
    """Bytes that naive_attention needs beyond its inputs: the (seqlen_q, seqlen_k) tensors that live at the same time."""
    pairs = sum(n * n for n in case.lengths) if case.varlen else case.batch * case.seqlen_q * case.seqlen_k
    scores = pairs * case.num_heads * case.torch_dtype.itemsize
    return scores * (3 if mode in FORWARD_MODES else 5)


def sequences(case):
    """(rows, case of one sequence) of each sequence of a case with varlen; rows is its slice of the packed tensors."""
    begin = 0
    for length in case.lengths:
        yield slice(begin, begin + length), replace(case, batch=1, seqlen_q=length, seqlen_k=length, varlen=False)
        begin += length


def _load_naive(device):
    def attend(q, k, v, case):
        if not case.varlen:
            return naive_attention(q, k, v, case)
        outs = [naive_attention(*(x[rows].unsqueeze(0) for x in (q, k, v)), one) for rows, one in sequences(case)]
        return torch.cat(outs, 1).squeeze(0)

    return attend


# --- FlashAttention-1 and -2 in PyTorch --------------------------------------------------------------------------------


def _reference_loader(name):
    def load(device):
        reference = import_module(f"flashtile.reference.{name}")

        class Tiled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v, problem):
                # rows: lse; of FlashAttention-1 maxima and sums, and its out is in fp32
                ctx.problem, (ctx.out, ctx.rows) = problem, reference.forward(Operands(q, k, v), problem)
                ctx.save_for_backward(q, k, v)
                return ctx.out.to(q.dtype, copy=True)

            @staticmethod
            def backward(ctx, dout):
                operands = Operands(*ctx.saved_tensors)
                gradients = reference.backward(operands, ctx.problem, ctx.out, ctx.rows, dout)[:3]
                return (*(gradient.to(dout.dtype) for gradient in gradients), None)

        return lambda q, k, v, case: Tiled.apply(q, k, v, case.problem())

    return load


# --- scaled_dot_product_attention --------------------------------------------------------------------------------------


def _sdpa_loader(name):
    def load(device):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if name in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION") and torch.device(device).type != "cuda":
            raise Unavailable("needs a GPU")
        backend = getattr(SDPBackend, name) if name else None

        def attend(q, k, v, case):
            gqa = {"enable_gqa": True} if case.num_heads != case.num_heads_kv else {}
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout_p=case.dropout, is_causal=case.causal, **gqa
            ).transpose(1, 2)

        if backend is None:
            return attend

        def attend_with_backend(q, k, v, case):
            try:
                with sdpa_kernel(backend):
                    return attend(q, k, v, case)
            except RuntimeError as error:
                if "No available kernel" not in str(error):
                    raise
            # SDPA says why in warnings, not in its error.
            with warnings.catch_warnings(record=True) as said, suppress(RuntimeError), sdpa_kernel(backend):
                warnings.simplefilter("always")
                attend(q, k, v, case)
            reasons = [str(w.message).split(" (Triggered")[0] for w in said]
            about_it = [r for r in reasons if "not used because" not in r and "disabled" not in r]
            raise Refused("; ".join(about_it[:2]) or "SDPA has no kernel of this backend for the case")

        return attend_with_backend

    return load


def sdpa_choice(q, k, v, case) -> str:
    """The backend that F.scaled_dot_product_attention chooses, such as `flash_attention`; empty where torch doesn't tell."""
    from torch.nn.attention import SDPBackend

    try:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        gqa = case.num_heads != case.num_heads_kv
        choice = torch._fused_sdp_choice(q, k, v, None, case.dropout, case.causal, scale=None, enable_gqa=gqa)
        return SDPBackend(choice).name.lower()
    except Exception:  # a private function: other versions of torch may lack it
        return ""


def _sdpa_refuses(case, mode, device):
    if case.softcap:
        return "SDPA has no softcap"
    if case.window != (None, None):
        return "SDPA has no sliding window"
    if case.causal and case.seqlen_q != case.seqlen_k:
        return "SDPA aligns causal at the top-left corner; seqlen_q differs from seqlen_k"
    return None


def _load_torch_varlen(device):
    if torch.device(device).type != "cuda":
        raise Unavailable("needs a GPU")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise Unavailable(f"torch {torch.__version__} has no torch.nn.attention.varlen") from None
    can_group = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(q, k, v, case):
        if case.group_size > 1 and not can_group:
            raise Refused(f"varlen_attn of torch {torch.__version__} has no grouped heads")
        gqa = {"enable_gqa": True} if case.group_size > 1 else {}
        starts = cu_seqlens(case, q.device)
        return varlen_attn(q, k, v, starts, starts, case.seqlen_q, case.seqlen_k, window_size=_minus_one(case), **gqa)

    return attend


def _torch_varlen_refuses(case, mode, device):
    return "varlen_attn has no softcap" if case.softcap else _flash_attn_refuses(case, mode, device)


# --- packages that may be installed ------------------------------------------------------------------------------------


def _load_module(name, install, device):
    if torch.device(device).type != "cuda":
        raise Unavailable("needs a GPU")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise Unavailable(f"not installed: {install}" if name.startswith(error.name or "?") else f"{name}: {error}") from None
    except Exception as error:  # a binary for another torch fails in its own ways
        raise Unavailable(f"{name} does not import: {_first_line(error)}") from None


def _first_output(result):
    return result[0] if isinstance(result, (tuple, list)) else result


def _load_flash_attn(device):
    module = _load_module("flash_attn", "pip install flash-attn", device)
    if not hasattr(module, "flash_attn_func"):
        raise Unavailable("not installed: pip install flash-attn (a package without flash_attn_func is in its place)")

    def attend(q, k, v, case):
        options = {"dropout_p": case.dropout, "causal": case.causal, "window_size": _minus_one(case), "softcap": case.softcap,
                   "alibi_slopes": case.alibi_slopes(q.device)}  # fmt: skip
        if case.varlen:
            return module.flash_attn_varlen_func(q, k, v, **packing(case, q.device), **options)
        return module.flash_attn_func(q, k, v, **options)

    return attend


def _load_fa3(device):
    # The wheel's interface imports its options under the name that a source build gives them.
    with suppress(ImportError):
        sys.modules.setdefault("flash_attn_config", import_module("fa3_fwd_config"))
    return _load_module("fa3_fwd_interface", "pip install fa3-fwd", device)


def _fa3_loader(num_splits):
    """num_splits: parts of the keys; 0: as many as it chooses."""

    def load(device):
        module = _load_fa3(device)

        def attend(q, k, v, case):
            options = {"causal": case.causal, "softcap": case.softcap, "num_splits": num_splits}
            if case.varlen:
                return _first_output(module.flash_attn_varlen_func(q, k, v, **packing(case, q.device), **options))
            return _first_output(module.flash_attn_func(q, k, v, **options))

        return attend

    return load


def _fa3_over_cache(k, v, case):
    module = _load_fa3(k.device)
    lengths = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=k.device)
    return lambda q, *_: _first_output(
        module.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=case.causal, softcap=case.softcap))  # fmt: skip


def _load_fa4(device):
    module = _load_module("flash_attn.cute.interface", "pip install flash-attn-4", device)

    def attend(q, k, v, case):
        options = {"causal": case.causal}
        if case.window != (None, None):
            options["window_size"] = case.window
        if case.softcap:
            options["softcap"] = case.softcap
        if case.varlen:
            return _first_output(module.flash_attn_varlen_func(q, k, v, **packing(case, q.device), **options))
        return _first_output(module.flash_attn_func(q, k, v, **options))

    return attend


def _load_flex(device):
    if torch.device(device).type != "cuda":
        raise Unavailable("needs a GPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Each shape compiles anew; past the limit torch would run it uncompiled, which stores the scores.
    torch._dynamo.config.recompile_limit = max(1024, torch._dynamo.config.recompile_limit)
    # Timing a backward pass keeps its graph, which donated buffers rule out.
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)

    @lru_cache(maxsize=2)
    def masks(case):
        """(block_mask, score_mod) of a case; made once, outside of what is timed after the first call."""
        (left, right), shift = case.mask_window, case.seqlen_k - case.seqlen_q

        def visible(b, h, row, key):
            seen = key >= 0
            seen = seen if right is None else seen & (key <= row + shift + right)
            return seen if left is None else seen & (key >= row + shift - left)

        block_mask = None
        if (left, right) != (None, None):
            block_mask = create_block_mask(visible, None, None, case.seqlen_q, case.seqlen_k, device=device)
        cap, slopes = case.softcap, case.alibi_slopes(device)

        def changed(score, b, h, row, key):
            score = cap * torch.tanh(score / cap) if cap else score
            return score if slopes is None else score - slopes[h] * (row + shift - key).abs()

        return block_mask, changed if cap or slopes is not None else None

    def attend(q, k, v, case):
        block_mask, score_mod = masks(case)
        gqa = case.num_heads != case.num_heads_kv
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=gqa).transpose(1, 2)

    return attend


def _load_xformers(device):
    ops = _load_module("xformers.ops", "pip install xformers", device)

    def attend(q, k, v, case):
        bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if case.causal else None
        if case.group_size > 1:
            # Five dims are groups: (batch, seqlen, kv heads, heads of a group, head dim), keys and values as expanded views
            q = q.unflatten(2, (case.num_heads_kv, case.group_size))
            k, v = (x.unsqueeze(3).expand(-1, -1, -1, case.group_size, -1) for x in (k, v))
        out = ops.memory_efficient_attention(q, k, v, attn_bias=bias, p=case.dropout)
        return out.flatten(2, 3) if case.group_size > 1 else out

    return attend


def _xformers_refuses(case, mode, device):
    if case.window != (None, None) or case.softcap:
        return "measured here without windows and softcap, which xFormers has in some of its kernels only"
    return None


def _load_flashinfer(device):
    module = _load_module("flashinfer", "pip install flashinfer-python", device)

    @lru_cache(maxsize=2)
    def planned(case):
        """A wrapper with its plan; made once, outside of what is timed after the first call, as a model does for its layers."""
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        if case.varlen:
            starts_q = starts_k = cu_seqlens(case, torch.device(device))
        else:
            starts_q, starts_k = (torch.arange(case.batch + 1, dtype=torch.int32, device=device) * n
                                  for n in (case.seqlen_q, case.seqlen_k))  # fmt: skip
        wrapper.plan(starts_q, starts_k, case.num_heads, case.num_heads_kv, case.head_dim, head_dim_vo=case.head_dim_v,
                     causal=case.causal, window_left=-1 if case.window[0] is None else case.window[0],
                     logits_soft_cap=case.softcap or None, q_data_type=case.torch_dtype)  # fmt: skip
        return wrapper

    def attend(q, k, v, case):
        if case.varlen:
            return planned(case).run(q, k, v)
        return planned(case).run(*(x.flatten(0, 1) for x in (q, k, v))).unflatten(0, (case.batch, case.seqlen_q))

    return attend


def _flashinfer_refuses(case, mode, device):
    if case.mask_window[1] is not None and not case.causal:
        return "FlashInfer's windows have a left side only"
    return _half_only(case, mode, device)


def _load_flash_mla(device):
    module = _load_module("flash_mla", "build it from its source (DeepSeek's FlashMLA; Hopper and newer)", device)
    if not hasattr(module, "flash_mla_with_kvcache"):
        raise Unavailable("not installed: a package without flash_mla_with_kvcache is in its place")

    @lru_cache(maxsize=2)
    def schedule(case):
        return module.get_mla_metadata()[0]

    def attend(q, k, v, case):
        block_table, cache_seqlens = _latent_step(case, q.device)
        return module.flash_mla_with_kvcache(
            q, k.view(-1, 64, *k.shape[2:]), block_table, cache_seqlens, case.head_dim_v, schedule(case),
            softmax_scale=case.head_dim**-0.5, causal=case.causal,
        )[0]  # fmt: skip

    return attend


def _flash_mla_refuses(case, mode, device):
    if not case.latent or mode != DECODE:
        return "decodes over a latent cache only: --mode decode -d 576-512 --nheads-kv 1"
    if case.latent_problem().page_size != 64:
        return "takes pages of 64 tokens"
    return None if case.dtype in ("fp16", "bf16") else "fp16 and bf16 only"


def _minus_one(case):
    return tuple(-1 if side is None else side for side in case.mask_window)


def _half_only(case, mode, device):
    if case.dtype == "fp32":
        return "fp16 and bf16 only"
    if max(case.head_dim, case.head_dim_v) > 256:
        return "head dim over 256"
    return None


def _flash_attn_refuses(case, mode, device):
    if case.head_dim != case.head_dim_v:
        return "head_dim_v must be head_dim"
    return _half_only(case, mode, device)


def _fa3_refuses(case, mode, device):
    if case.window != (None, None):
        return "the fa3-fwd wheel has no window"
    if case.dtype not in ("bf16", "fp8"):
        return "the fa3-fwd wheel has bf16 and fp8 only"
    return _flash_attn_refuses(case, mode, device)


def _fa3_kvcache_refuses(case, mode, device):
    if mode != DECODE:
        return "attends over a cache only: --mode decode"
    return "the fa3-fwd wheel has no pages" if case.page_size else _fa3_refuses(case, mode, device)


def _never(case, mode, device):
    return None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("flashtile", "this package", _flashtile_loader(False), _flashtile_refuses, varlen=True, dropout=True,
                alibi=True, latent=True, fp8=True, over_cache=cache_attend, package="flashtile"),
        Backend("flashtile-deterministic", "this package, deterministic=True", _flashtile_loader(True), _deterministic_refuses,
                varlen=True, dropout=True, alibi=True, package="flashtile"),
        Backend("naive", "standard PyTorch attention, stores the scores", _load_naive, _never, varlen=True, dropout=True,
                alibi=True, latent=True),
        Backend("reference-fa1", "FlashAttention-1 in PyTorch, tile by tile", _reference_loader("fa1"), _never),
        Backend("reference-fa2", "FlashAttention-2 in PyTorch, tile by tile", _reference_loader("fa2"), _never),
        Backend("sdpa", "F.scaled_dot_product_attention, torch's choice", _sdpa_loader(None), _sdpa_refuses, dropout=True),
        Backend("sdpa-flash", "SDPA's FlashAttention-2", _sdpa_loader("FLASH_ATTENTION"), _sdpa_refuses, dropout=True),
        Backend("sdpa-cudnn", "SDPA's cuDNN", _sdpa_loader("CUDNN_ATTENTION"), _sdpa_refuses, dropout=True),
        Backend("sdpa-efficient", "SDPA's memory-efficient kernels", _sdpa_loader("EFFICIENT_ATTENTION"), _sdpa_refuses,
                dropout=True),
        Backend("sdpa-math", "SDPA's decomposition, stores the scores", _sdpa_loader("MATH"), _sdpa_refuses, dropout=True),
        Backend("torch-varlen", "torch.nn.attention.varlen_attn", _load_torch_varlen, _torch_varlen_refuses, dense=False,
                varlen=True),
        Backend("flash_attn", "FlashAttention-2, the package", _load_flash_attn, _flash_attn_refuses, varlen=True, dropout=True,
                alibi=True, package="flash-attn"),
        Backend("fa3", "FlashAttention-3, forward", _fa3_loader(1), _fa3_refuses, backward=False, varlen=True,
                package="fa3-fwd"),
        Backend("fa3-splits", "FlashAttention-3, forward, num_splits=0: it may cut keys", _fa3_loader(0), _fa3_refuses,
                backward=False, varlen=True, package="fa3-fwd"),
        Backend("fa3-kvcache", "FlashAttention-3 over a cache of rows, flash_attn_with_kvcache", _fa3_loader(0),
                _fa3_kvcache_refuses, backward=False, fp8=True, over_cache=_fa3_over_cache, package="fa3-fwd"),
        Backend("fa4", "FlashAttention-4, CuTe DSL", _load_fa4, _half_only, varlen=True, package="flash-attn-4"),
        Backend("flex", "FlexAttention, compiled by torch", _load_flex, _never, alibi=True),
        Backend("xformers", "xFormers, its choice", _load_xformers, _xformers_refuses, dropout=True, package="xformers"),
        Backend("flashinfer", "FlashInfer, ragged prefill", _load_flashinfer, _flashinfer_refuses, backward=False, varlen=True,
                package="flashinfer-python"),
        Backend("flash_mla", "FlashMLA, decode", _load_flash_mla, _flash_mla_refuses, backward=False, latent=True,
                package="flash-mla"),
    )
}
# These store all scores: they are skipped where that would not fit.
STORES_SCORES = ("naive", "sdpa-math")


def parse_backends(text: str) -> list[str]:
    """`a,b` as names of BACKENDS; `-` and `_` are the same.

    Raises:
        UsageError: an unknown name.
    """
    names = []
    for item in text.split(","):
        wanted = item.strip().lower().replace("-", "_")
        match = [name for name in BACKENDS if name.replace("-", "_") == wanted]
        if not match:
            raise UsageError(f"backend: expected some of {', '.join(BACKENDS)}, got {item.strip()!r}.")
        names += match
    return list(dict.fromkeys(names))


def load(name: str, device: str):
    """attend of a backend on a device such as "cuda:0".

    Raises:
        Unavailable: what is missing.
    """
    attend, missing = _loaded(name, device)
    if missing is not None:
        raise Unavailable(missing)
    return attend


@lru_cache
def _loaded(name, device):
    # An import that fails can take seconds; it is tried once.
    try:
        return BACKENDS[name].load(device), None
    except Unavailable as error:
        return None, str(error)


def availability(device: str) -> dict[str, str | None]:
    """Backend -> None if it loads on the device, else what is missing."""
    return {name: unavailable(name, device) for name in BACKENDS}


def unavailable(name: str, device: str) -> str | None:
    """What keeps a backend from running on a device, or None."""
    try:
        load(name, device)
    except Unavailable as error:
        return str(error)
    return None


def _first_line(error) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
