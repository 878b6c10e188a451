"""flashtile below torch's own attention functions, through the registry of flash implementations (torch 2.11 to 2.15).

    from flashtile.integrations import sdpa

    sdpa.enable()
    F.scaled_dot_product_attention(q, k, v, is_causal=True)    # where torch chooses its flash backend: flashtile
    sdpa.disable()

What calls torch's flash operators gets flashtile: F.scaled_dot_product_attention, torch.nn.attention.varlen.varlen_attn, and
context parallelism in torch.distributed. torch still chooses the backend, by its own rules: fp16 and bf16 on a GPU, no
attn_mask; `torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)` leaves it no other. On an H100 and a B200 it would try
cuDNN's first; until `disable` it tries flash before all others. CPU tensors are not touched. Grouped heads arrive here as torch
repeats them.

As in torch's own flash backend, causal is aligned bottom-right in the operators; F.scaled_dot_product_attention passes it on
for seqlen_q == seqlen_k alone. A row without a visible key has lse -inf: merging parts by lse stays right. The dropout mask is
flashtile's own. num_splits of varlen_attn is used with a block_table alone: without one the order of sums of a sequence may
depend on the rest of the batch, also with num_splits=1.
"""

import torch
from torch.library import Library
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend

from flashtile import api, ops
from flashtile.errors import ShapeError, UnsupportedError, explain
from flashtile.problem import Operands

__all__ = ["disable", "enable"]

NAME = "flashtile"


def enable() -> None:
    """Let torch's flash operators on CUDA tensors run flashtile, in this process, until `disable`. Initialises CUDA.

    Takes the place of another implementation that was active ("FA3", "FA4").
    """
    torch_attention.register_flash_attention_impl(NAME, register_fn=_Active)
    torch_attention.activate_flash_attention_impl(NAME)


def disable() -> None:
    """Give torch its own operators back; nothing where flashtile is not active."""
    if torch_attention.current_flash_attention_impl() == NAME:
        torch_attention.restore_flash_attention_impl()


class _Active:
    """The handle that torch keeps while flashtile is active."""

    def __init__(self):
        self.library = Library("aten", "IMPL", "CUDA")
        for name, function in OPERATORS.items():
            # torch 2.11 has not all of them
            if hasattr(torch.ops.aten, name):
                self.library.impl(name, function, "CUDA")
        if torch.cuda.is_available():
            # torch finds its own order at its first choice of a backend, whatever there was before
            x = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(x, x, x)
        self.order_before = torch._C._get_sdp_priority_order()
        self.order = sorted(self.order_before, key=lambda backend: backend != int(SDPBackend.FLASH_ATTENTION))
        torch._C._set_sdp_priority_order(self.order)

    def remove(self):
        self.library._destroy()
        # Not an order that came later
        if torch._C._get_sdp_priority_order() == self.order:
            torch._C._set_sdp_priority_order(self.order_before)


def flash_attention_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, out=None, block_table=None,
    compute_auxiliary=True, num_splits=None,
):  # fmt: skip
    """aten::_flash_attention_forward: (out, lse, rng_state, unused, debug_attn_mask).

    Tensors are (batch, seqlen, heads, dim), or packed with cum_seq_q and cum_seq_k; with block_table key and value are pages.
    compute_auxiliary=False leaves out all but out and lse.
    """
    if return_debug_mask:
        raise UnsupportedError(explain("return_debug_mask", "False", True, "Call sdpa.disable() where masks are debugged."))
    window = _window(window_size_left, window_size_right)
    operands = Operands(query, key, value, cum_seq_q, cum_seq_k, None, seqused_k, alibi_slopes)
    if block_table is not None:
        if dropout_p > 0:
            raise UnsupportedError(explain("dropout_p", "0.0 with block_table", dropout_p, "Dropout is for training."))
        if seqused_k is None and cum_seq_k is None:
            raise ShapeError(explain("seqused_k", "the length of each sequence, (batch,), with block_table", None))
        lengths = cum_seq_k.diff() if seqused_k is None else seqused_k
        result, lse = api.attention_with_kvcache(
            query, key, value, cache_seqlens=lengths, block_table=block_table, cu_seqlens_q=cum_seq_q, max_seqlen_q=max_q,
            causal=is_causal, window=window, softmax_scale=scale, alibi_slopes=alibi_slopes, num_splits=num_splits or 0,
            return_lse=True,
        )  # fmt: skip
    else:
        if dropout_p > 0:
            operands = operands._replace(rng_state=ops.draw_rng_state(query.device))
        result, lse = ops.forward_op(*operands, *_options(operands, max_q, max_k, dropout_p, is_causal, scale, window))
    result = _laid_out_as(query, result) if out is None else out.copy_(result)
    if not compute_auxiliary:
        return result, lse, None, None, None
    rng_state = operands.rng_state
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=query.device)
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return result, lse, rng_state.view(torch.uint64), unused, query.new_empty(0)


def flash_attention_forward_no_dropout_inplace(out, *arguments, **options):
    """aten::_flash_attention_forward_no_dropout_inplace: writes out, returns lse."""
    return flash_attention_forward(*arguments, out=out, compute_auxiliary=False, **options)[1]


def flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """aten::_flash_attention_backward: (dq, dk, dv)."""
    packed = query.dim() == 3
    operands = Operands(query, key, value, cum_seq_q if packed else None, cum_seq_k if packed else None)
    if dropout_p > 0:
        operands = operands._replace(rng_state=rng_state.view(torch.int64))
    window = _window(window_size_left, window_size_right)
    options = _options(operands, max_q, max_k, dropout_p, is_causal, scale, window)
    gradients = ops.backward_op(grad_out, None, out, logsumexp, *operands, *options)[:3]
    return tuple(map(_laid_out_as, (query, key, value), gradients))


def scaled_dot_product_flash_attention(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    """aten::_scaled_dot_product_flash_attention, on (batch, heads, seqlen, dim)."""
    out, lse, *rest = flash_attention_forward(
        *(x.transpose(1, 2) for x in (query, key, value)), None, None, query.shape[2], key.shape[2], dropout_p, is_causal,
        return_debug_mask, scale=scale,
    )  # fmt: skip
    return _laid_out_as(query, out.transpose(1, 2)), lse, None, None, query.shape[2], key.shape[2], *rest


def scaled_dot_product_flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
    philox_offset, *, scale=None,
):  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward: (dq, dk, dv), (batch, heads, seqlen, dim)."""
    tensors = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    gradients = flash_attention_backward(*tensors, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed,
                                         philox_offset, scale=scale)  # fmt: skip
    return tuple(_laid_out_as(like, x.transpose(1, 2)) for like, x in zip((query, key, value), gradients))


# By the names of aten's operators
OPERATORS = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_no_dropout_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_flash_attention_backward,
}


def _laid_out_as(like, x):
    """A dense x with the strides that torch.compile expects of an operator: those of its input, copied where they differ."""
    if x.stride() == like.stride() or x.shape != like.shape:
        # Of values of another head dim torch expects a wrong shape
        return x
    result = torch.empty_like(like)
    return x if x.stride() == result.stride() else result.copy_(x)


def _options(operands, max_q, max_k, dropout_p, is_causal, scale, window):
    """As flashtile's ops take them."""
    packed = operands.cu_seqlens_q is not None
    return (max_q if packed else None, max_k if packed else None, is_causal, *window, scale, 0.0, dropout_p,
            torch.are_deterministic_algorithms_enabled(), True)  # fmt: skip


def _window(left, right):
    """torch's window, where None and -1 are unbounded."""
    return tuple(None if side is None or side < 0 else side for side in (left, right))
