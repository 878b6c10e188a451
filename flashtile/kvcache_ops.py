"""The torch ops on a key-value cache; `ops` is their sibling with gradients.

Two ops of one schema: one writes new keys and values into the cache and declares it, the other only reads. Like those of
`ops` they validate, plan and launch; a repeated call finds all that in memory, and is then only its launches.

Such a call takes 13.8 us of a host on which SDPA's flash takes 41 and FlashAttention-3's decode 75, the launch 5.1
(host-overhead.json). Before few parts were merged in one launch it took 16.4 beside 41, two launches 8.0; before launches went
to the driver itself 15.6 beside 34, the launches 9.4 (host-overhead-alone.json). In a single run on a slower host, with
launches of 10.5, what it is found by took 3.2, the memory of partial results 0.8 (5.2 as new memory), that of out 3.7; since
then that comes from where compiled models take theirs, and a call costs 6.1 over its launches, not 9.6.
"""

from functools import partial

import torch

from flashtile import hardware, mixed, settings
from flashtile.calls import Calls, again, nobody_observes
from flashtile.gradients import refuse_gradients
from flashtile.kvcache_problem import FP8, CacheOperands, CacheOptions, CacheProblem, check_cache_arguments, check_combine
from flashtile.ops import resolved, unobserved
from flashtile.problem import autocast, is_autocast, lse_dtype

_TENSORS = ", ".join(f"Tensor? {name}" for name in CacheOperands._fields[3:])
_OPTIONS = (
    "SymInt? max_seqlen_q, bool rotary_interleaved, bool causal, SymInt? window_left, "
    "SymInt? window_right, float? softmax_scale, float softcap, SymInt num_splits, bool return_lse"
)
_RETURNS = "(Tensor out, Tensor lse)"
torch.library.define("flashtile::kvcache", f"(Tensor q, Tensor k_cache, Tensor v_cache, {_TENSORS}, {_OPTIONS}) -> {_RETURNS}")
torch.library.define(
    "flashtile::kvcache_append",
    f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_TENSORS}, {_OPTIONS}) -> {_RETURNS}",
)
_NUM_TENSORS = len(CacheOperands._fields)
_CACHES = slice(CacheOperands._fields.index("k_cache"), CacheOperands._fields.index("v_cache") + 1)
_LENGTHS = CacheOperands._fields.index("cache_seqlens")
_CALLS = Calls()
# torch.autograd.graph's takes twice as long
_increment_version = torch._C._increment_version


def _bind(operands, options):
    """The function of operands -> (out, lse) of a call: checked, planned, compiled."""
    problem = CacheProblem.from_tensors(operands, options)
    call = mixed.bind(problem, operands)
    return call if operands.k is None else partial(_append, call)


def _append(call, tensors):
    """(out, lse) of a call that writes to the caches; their versions tell autograd so, which sees nothing of kernels."""
    output = call(tensors)
    _increment_version(tensors[_CACHES])
    return output


def _run(operands, options, asked):
    """(out, lse or None) of a checked call. asked: the options that a repeated one is found by."""
    call = _bind(operands, options)
    if operands.q.is_cuda and not settings.debug():
        # On a CPU the values of lengths and tables are checked in each call
        _CALLS.keep(operands, asked, call)
    with hardware.on_device_of(operands.q):
        return call(operands)


def _known(tensors, options):
    """The bound call of a repeated one, or None."""
    return None if settings.debug() else _CALLS.find(tensors, options)


def _known_or_run(operands, options, asked):
    call = _known(operands, asked)
    return _run(operands, options, asked) if call is None else again(call, operands)


def _op(*arguments):
    operands, options = CacheOperands(*arguments[:_NUM_TENSORS]), CacheOptions(*arguments[_NUM_TENSORS:])
    out, lse = _known_or_run(operands, options, options)
    return out, operands.q.new_empty(0, dtype=lse_dtype(operands.q.dtype)) if lse is None else lse


def _fake(*arguments):
    operands, options = CacheOperands(*arguments[:_NUM_TENSORS]), CacheOptions(*arguments[_NUM_TENSORS:])
    problem = CacheProblem.from_tensors(operands, options)
    q = operands.q
    out = q.new_empty((*q.shape[:-1], operands.v_cache.shape[-1]), dtype=problem.out_dtype)
    return out, q.new_empty(problem.lse_shape if options.return_lse else (0,), dtype=lse_dtype(q.dtype))


for _name in ("kvcache", "kvcache_append"):
    torch.library.impl(f"flashtile::{_name}", ("CPU", "CUDA"), _op)
    torch.library.register_fake(f"flashtile::{_name}", _fake)
    refuse_gradients(_name, "attention_with_kvcache")

kvcache_op = torch.ops.flashtile.kvcache.default
kvcache_append_op = torch.ops.flashtile.kvcache_append.default


def attention_with_kvcache(tensors, options):
    """`flashtile.attention_with_kvcache` on what CacheOperands and CacheOptions.of_call take.

    A repeated call makes neither of them: that alone would be a tenth of its time.
    """
    if isinstance(tensors[_LENGTHS], (int, torch.SymInt)):
        operands = CacheOperands(*tensors)
        check_cache_arguments(operands, CacheOptions.of_call(*options))
        tensors = operands._replace(cache_seqlens=_lengths(operands))
    call = _known(tensors, options) if nobody_observes() else None
    if call is None or torch.is_grad_enabled() and _differentiable(tensors):
        out, lse = _checked(CacheOperands(*tensors), options)
    else:
        out, lse = again(call, tensors)
    return (out, lse) if options[-1] else out


def _checked(operands, asked):
    options = CacheOptions.of_call(*asked)
    check_cache_arguments(operands, options)
    operands = _autocast(operands)
    if unobserved(operands):
        return _known_or_run(resolved(operands), options, asked)
    return (kvcache_op if operands.k is None else kvcache_append_op)(*operands, *options)


def _autocast(operands):
    """Inside torch.autocast q and new k and v come in the dtype of the cache: it stays what it is. An fp8 one takes any."""
    q, k_cache, _, k, v = operands[:5]
    if k_cache.dtype == FP8 or not is_autocast(q):
        return operands
    q, k, v = (autocast(x, k_cache.dtype) for x in (q, k, v))
    return operands._replace(q=q, k=k, v=v)


def _differentiable(tensors):
    """Whether a gradient is asked of one of them."""
    return any(x is not None and x.requires_grad for x in tensors)


def _lengths(operands):
    """One int for all sequences, as cache_seqlens."""
    q, cu_seqlens = operands.q, operands.cu_seqlens_q
    # Of no cu_seqlens_q any number: it is refused by its name
    batch = q.shape[:1].numel() if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)
    return torch.full((batch,), operands.cache_seqlens, dtype=torch.int32, device=q.device)


torch.library.define("flashtile::combine", "(Tensor out_partial, Tensor lse_partial, ScalarType out_dtype) -> (Tensor, Tensor)")


@torch.library.impl("flashtile::combine", "CPU")
def _combine_cpu(out_partial, lse_partial, out_dtype):
    from flashtile.reference import kvcache

    return kvcache.combine(out_partial, lse_partial, out_dtype)


@torch.library.impl("flashtile::combine", "CUDA")
def _combine_cuda(out_partial, lse_partial, out_dtype):
    from flashtile.device import combine

    out, lse = _combine_fake(out_partial, lse_partial, out_dtype)
    with hardware.on_device_of(out_partial):
        combine.launch(out_partial, lse_partial, out, lse)
    return out, lse


@torch.library.register_fake("flashtile::combine")
def _combine_fake(out_partial, lse_partial, out_dtype):
    return out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype), lse_partial.new_empty(lse_partial.shape[1:])


refuse_gradients("combine", "combine")


def combine(out_partial, lse_partial, out_dtype):
    """`flashtile.combine`."""
    check_combine(out_partial, lse_partial, out_dtype)
    return torch.ops.flashtile.combine.default(out_partial, lse_partial, out_dtype or out_partial.dtype)
