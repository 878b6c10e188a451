"""flashtile as an attention implementation of Hugging Face transformers (5.x).

    from flashtile.integrations import transformers as flashtile_transformers

    flashtile_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ftile")   # or
    model.set_attn_implementation("ftile")

Training and generation: padding masks (batch, seqlen), packed sequences (cu_seq_lens_q and their kin, or position_ids that
begin anew at 0, in a batch of 1), sliding windows, softcap, sinks, grouped heads, dropout, dynamic and static caches, attention
to an encoder. Head dims that are no multiple of 8 are filled with zeros, a copy in each layer. Padded tokens get output 0 with
causal or a window. A window counts tokens, not the padding between them, as
transformers' own flash attention does. Refused: prepared masks of four dims, for what they hide is known to no one; masks that
a model makes of anything else (images that see themselves, more than one chunk); a bias of the scores; choices of keys, or of
blocks of them, for each query (DeepSeek-V3.2, MiniMax-M3); models with attention code of their own (Bloom, Mpt, MPNet, RoFormer
and others), which would take the mask for theirs.

What a model's mask shows holds for all layers that get it, whatever their own arguments say (sliding_window, is_causal): as in
eager attention, which knows nothing but the mask. position_ids that begin anew are packed sequences also where the mask does
not say so, because there is an attention_mask of ones or a cache, as for transformers' own flash attention. Where a model is
traced as a whole, the arguments of its layers hold, as there.

A mask and packed position_ids are looked at once a forward pass, which waits for the device; all layers share the result.
Only at position_ids that were made in torch.inference_mode each layer looks anew. torch.compile breaks its graph there, and
where a model makes its mask: whole models compile, but not with fullgraph=True. A layer does, where a batch of 1 then needs
cu_seq_lens_q and its kin.
"""

import sys
from inspect import getclosurevars, getsource
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from flashtile import api
from flashtile.checks import shape_of
from flashtile.errors import ShapeError, UnsupportedError, ValueRangeError, explain
from flashtile.problem import HEAD_DIM_MULTIPLE

__all__ = ["register"]

# Not "flashtile": transformers takes every name with "flash" in it for one of its own, and asks its hub for the kernel.
NAME = "ftile"
# Keyword arguments of models that change what attention computes
_REFUSED = {"position_bias": "a bias of the scores", "indices": "a choice of keys", "block_indices": "a choice of blocks"}


def register(name: str = NAME) -> None:
    """Make attn_implementation=name known to transformers: the attention, and the mask that goes with it.

    Raises:
        ImportError: transformers is not installed.
        UnsupportedError: it is older than 5.0.
        ValueRangeError: a name with "flash" in it.
    """
    if "flash" in name:
        way_out = "transformers looks for such names on its hub."
        raise ValueRangeError(explain("name", 'a name without "flash"', repr(name), way_out))
    from transformers import AttentionInterface, AttentionMaskInterface, __version__

    if int(__version__.partition(".")[0]) < 5:
        raise UnsupportedError(explain("transformers", "version 5 or newer", __version__, "pip install 'transformers>=5'."))
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, padding_mask)


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
              is_causal=None, s_aux=None, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None, max_length_k=None,
              position_ids=None, deterministic=None, **kwargs):  # fmt: skip
    """What transformers calls in each layer.

    Args:
        module: the layer; its is_causal holds where is_causal is None.
        query: (batch, num_heads, seqlen_q, head_dim); key: (batch, num_heads_kv, seqlen_k, head_dim); value: the same.
        attention_mask: what `padding_mask` gave for the keys: (batch, at most seqlen_k), bool, or None. What it knows of the
            model's mask comes before is_causal, sliding_window and position_ids.
        sliding_window: a query sees itself and sliding_window - 1 keys before it (without causal also after it).
        s_aux: (num_heads,), sinks.
        The rest under transformers' names; further keyword arguments are of no concern to attention.
    Returns:
        (out (batch, seqlen_q, num_heads, head_dim_v), None).
    """
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(explain(name, "None", shape_of(kwargs[name]),
                                           f'Use attn_implementation="sdpa" for {what}.'))  # fmt: skip
    shown = getattr(attention_mask, _SHOWN, None) or _shown_by_arguments(module, is_causal, sliding_window)
    q, k, v = (_of_whole_head_dims(x.transpose(1, 2).to(value.dtype)) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = dict(causal=shown.causal, window=shown.window, softmax_scale=scale, softcap=softcap or 0.0, sinks=s_aux)
    training = dict(dropout_p=dropout, deterministic=bool(deterministic))
    packing = position_ids, (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
    out = _attend(q, k, v, attention_mask, shown, packing, options, training)
    return (out if out.shape[-1] == value.shape[-1] else out[..., : value.shape[-1]]), None


def _of_whole_head_dims(x):
    """x with zeros behind its head dim, up to a multiple of 8."""
    return F.pad(x, (0, -x.shape[-1] % HEAD_DIM_MULTIPLE)) if x.shape[-1] % HEAD_DIM_MULTIPLE else x


def _attend(q, k, v, attention_mask, shown, packing, options, training):
    """out of q, k, v (batch, seqlen, heads, dim). options: of every call; training: of calls with gradients too."""
    position_ids, (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k) = packing
    dropout = training["dropout_p"]
    remembers = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, options["sinks"]))
    if attention_mask is not None:
        # A static cache is longer than what it holds
        k, v = k[:, : attention_mask.shape[1]], v[:, : attention_mask.shape[1]]
        padding = _padding(attention_mask) if shown.padded else None
        is_padded = padding is not None and not padding.is_full
        _check_shape(attention_mask, q, k, is_padded, options["causal"] or options["window"] != (None, None))
        if is_padded:
            # With a window to both sides padded queries would see tokens to their right, and their output would not be 0
            has_one_side = options["causal"] or options["window"] == (None, None)
            if padding.left is not None and has_one_side and not remembers and not dropout:
                return api.attention_with_kvcache(q, k, v, cache_leftpad=padding.left, **options)
            return _attend_without_padding(q, k, v, padding, options | training)
    if cu_seq_lens_q is None and q.shape[0] == 1 and q.shape[1] == k.shape[1]:
        cu_seq_lens_q, max_length_q = shown.packing
        # Those of three dims are places in images: they may begin anew in one sequence
        if cu_seq_lens_q is None and position_ids is not None and position_ids.shape == q.shape[:2]:
            cu_seq_lens_q, max_length_q = _packing(position_ids)
        cu_seq_lens_k, max_length_k = cu_seq_lens_q, max_length_q
    if cu_seq_lens_q is not None:
        lengths = {"cu_seqlens_q": cu_seq_lens_q.int(), "cu_seqlens_k": cu_seq_lens_k.int(),
                   "max_seqlen_q": int(max_length_q), "max_seqlen_k": int(max_length_k)}  # fmt: skip
        out = api.attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), **lengths, **options, **training)
        return out.view(*q.shape[:-1], -1)
    if q.shape[1] < k.shape[1] and not remembers and not dropout:
        return api.attention_with_kvcache(q, k, v, **options)
    return api.attention(q, k, v, **options, **training)


def _check_shape(mask, q, k, is_padded, is_masked):
    """k: of no more keys than the mask has columns. is_masked: what a query sees depends on its place."""
    expected = None
    if is_padded and mask.shape[1] > k.shape[1]:
        expected = f"at most {k.shape[1]} columns, one for each key"
    elif is_masked and mask.shape[1] < q.shape[1]:
        expected = f"at least {q.shape[1]} columns, one for each query"
    elif is_padded and mask.shape[0] != q.shape[0]:
        expected = f"{q.shape[0]} rows, one for each sequence"
    if expected:
        raise ShapeError(explain("attention_mask", expected, shape_of(mask)))


def padding_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
                 device="cpu", **kwargs):  # fmt: skip
    """What transformers calls once a forward pass for `attention`'s mask: (batch, keys), True for tokens.

    In a graph None where there is no padding: a graph can't keep what else is known of a mask.

    Raises:
        UnsupportedError: a mask that is not (batch, seqlen), a mask_function that hides something else, or a model with
            attention code of its own, which would take the mask for one of scores.
    """
    config = kwargs.get("config")
    if config is not None and _attends_by_itself(type(config)):
        raise UnsupportedError(explain("attn_implementation", "one that the model has code for", repr(NAME),
                                       f'Use "eager": models of a {type(config).__name__} attend by themselves.'))  # fmt: skip
    parts = {"causal_mask_function": {}} if mask_function is None else _parts(mask_function)
    _refuse_masks(parts, batch_size, kv_length + kv_offset, kwargs.get("local_size"))
    # Keys of an encoder are all there; of a static cache those up to the last query
    seen = int(q_offset) + q_length - kv_offset if "causal_mask_function" in parts else kv_length
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise UnsupportedError(explain("attention_mask", "(batch, seqlen)", shape_of(attention_mask),
                                           'Use attn_implementation="sdpa" for other masks.'))  # fmt: skip
        width = min(seen, kv_length)
        # With a static cache of windows transformers asks twice: the second time for the mask that it got
        begin = 0 if attention_mask.shape[1] == width else kv_offset
        mask = attention_mask[:, begin : begin + width]
        if mask.shape[1] < width:
            # What it says nothing of is padding
            mask = F.pad(mask, (0, width - mask.shape[1]))
        padded = not mask.all()
    else:
        # A static cache may not be full
        mask, padded = torch.ones(batch_size, min(seen, kv_length), dtype=torch.bool, device=device), False
    if torch.compiler.is_compiling():
        return mask if padded or mask.shape[1] < kv_length else None
    setattr(mask, _SHOWN, _Shown("causal_mask_function" in parts, _window(parts), padded, _packing_of_mask(parts)))
    return mask


# By class of a config, once its models are loaded: whether they attend by themselves
_BY_THEMSELVES = {}


@torch.compiler.assume_constant_result
def _attends_by_itself(config_class):
    """Whether a model of transformers itself with this config asks for masks, but not for the attention that goes with them."""
    if config_class not in _BY_THEMSELVES:
        for base in config_class.__mro__:
            if models := _models_with(base):
                _BY_THEMSELVES[config_class] = any(map(_has_code_of_its_own, models))
                break
    return _BY_THEMSELVES.get(config_class, False)


def _models_with(config_class):
    """transformers' own models that have this class of configs, of those that are loaded."""
    from transformers import PreTrainedModel

    classes, models = [PreTrainedModel], set()
    while classes:
        classes = [sub for cls in classes for sub in cls.__subclasses__()]
        models.update(cls for cls in classes if cls.config_class is config_class and cls.__module__.startswith("transformers."))
    return models


def _has_code_of_its_own(model):
    """As transformers finds out, by the source, of a model whose implementation is changed later; not where there is none."""
    try:
        getsource(sys.modules[model.__module__])
    except (OSError, TypeError):
        return False
    finds_out = getattr(model, "_can_set_attn_implementation", None)
    return finds_out is not None and not finds_out()


class _Shown(NamedTuple):
    """What a mask shows. packing: (cu_seqlens, longest) of packed sequences, or (None, None)."""

    causal: bool
    window: tuple
    padded: bool
    packing: tuple


# The attribute of a mask of `padding_mask` that has its _Shown
_SHOWN = "_flashtile_shown"


def _shown_by_arguments(module, is_causal, sliding_window):
    if is_causal is None and not hasattr(module, "is_causal"):
        way_out = 'Set it on the module, or use attn_implementation="eager".'
        raise UnsupportedError(explain("module", "an attribute is_causal", type(module).__name__, way_out))
    window = (None, None) if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    return _Shown(module.is_causal if is_causal is None else is_causal, window, True, (None, None))


def _window(parts):
    """(left, right) of the windows of a mask, which count a query itself, or none does."""
    left, right = None, None
    if "sliding_window_overlay" in parts:
        left = parts["sliding_window_overlay"]["sliding_window"] - 1
    if "sliding_window_bidirectional_overlay" in parts:
        right = parts["sliding_window_bidirectional_overlay"]["sliding_window"]
        left = right if left is None else min(left, right)
    return left, right


def _packing_of_mask(parts):
    if "packed_sequence_mask_function" not in parts:
        return None, None
    numbers = parts["packed_sequence_mask_function"]["packed_sequence_mask"].flatten()
    return _cu_seqlens((numbers.diff() != 0).nonzero().flatten() + 1, len(numbers))


# What attention does without looking at a mask
_KNOWN_MASKS = {"causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
                "sliding_window_bidirectional_overlay", "packed_sequence_mask_function"}  # fmt: skip


@torch.compiler.disable(reason="flashtile looks for the functions that a model's mask is made of, which a graph can't")
def _parts(mask_function):
    """What the functions of transformers.masking_utils that made a mask_function were given, by their names.

    "or_masks" is one of them where it is a union.
    """
    name = getattr(mask_function, "__qualname__", type(mask_function).__name__).split(".")[0]
    given = getclosurevars(mask_function).nonlocals if hasattr(mask_function, "__closure__") else {}
    if name not in ("and_masks", "or_masks"):
        return {name: given}
    found = {} if name == "and_masks" else {name: given}
    for function in given["mask_functions"]:
        found |= _parts(function)
    return found


def _refuse_masks(parts, batch_size, stop, local_size):
    """Refuse what attention would not hide or show. stop: where keys end; local_size: size of a chunk."""
    unknown = parts.keys() - _KNOWN_MASKS
    if local_size is not None and stop <= local_size:
        # One chunk
        unknown -= {"chunked_overlay"}
    if unknown:
        raise UnsupportedError(explain("mask_function", "causal or not, windows, packed sequences", ", ".join(sorted(unknown)),
                                       'Use attn_implementation="sdpa" for other masks.'))  # fmt: skip
    # Where it is traced transformers always adds it
    if "packed_sequence_mask_function" in parts and batch_size > 1 and not torch.compiler.is_compiling():
        raise UnsupportedError(explain("position_ids", "packed sequences in a batch of 1", f"a batch of {batch_size}",
                                       "Put the rows one behind the other: input_ids.view(1, -1)."))  # fmt: skip


class _Padding:
    """Where the tokens of a mask are. left: (batch,), int32, padding before them, or None where there is other padding."""

    def __init__(self, mask):
        # Not the mask itself: what is known of it is forgotten with it
        self.mask = mask = mask.bool().clone()
        lengths = mask.sum(-1, dtype=torch.int32)
        left = mask.shape[1] - lengths
        is_left = (torch.arange(mask.shape[1], device=mask.device) >= left[:, None]) == mask
        self.left = left if bool(is_left.all()) else None
        self.is_full = self.left is not None and not bool(left.any())
        self.rows = {}

    def of(self, length):
        """(rows in the flattened batch, cu_seqlens, longest) of the last `length` columns."""
        if length not in self.rows:
            mask = self.mask[:, -length:]
            lengths = mask.sum(-1, dtype=torch.int32)
            rows = mask.flatten().nonzero().flatten()
            self.rows[length] = rows, F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())
        return self.rows[length]


# What was found out about masks and position_ids that are still in use, by tensor, and its version then: it may be a buffer
# that the caller writes again.
_paddings = WeakIdKeyDictionary()
_packings = WeakIdKeyDictionary()


@torch.compiler.disable(reason="flashtile looks at the padding in a mask, which a graph can't")
def _padding(mask):
    if mask.dim() != 2:
        raise UnsupportedError(explain("attention_mask", "(batch, seqlen)", shape_of(mask),
                                       'Use attn_implementation="sdpa" for other masks.'))  # fmt: skip
    if mask.is_inference() and not hasattr(mask, _SHOWN):
        # Nothing tells when it is written to; one of `padding_mask` is of a forward pass alone
        return _Padding(mask)
    now = None if mask.is_inference() else mask._version
    version, padding = _paddings.get(mask, (now, None))
    if padding is None or version != now:
        padding = _Padding(mask)
        _paddings[mask] = now, padding
    return padding


@torch.compiler.disable(reason="flashtile looks for packed sequences in the position_ids of a batch of 1, which a graph can't; "
                               "pass cu_seq_lens_q and its kin, and it does not")  # fmt: skip
def _packing(position_ids):
    """(cu_seqlens, longest) of positions (1, total) that begin anew at 0, or (None, None)."""
    if position_ids.is_inference():
        # Nothing tells when it is written to
        return _packing_of(position_ids)
    version, packing = _packings.get(position_ids, (None, None))
    if version != position_ids._version:
        packing = _packing_of(position_ids)
        _packings[position_ids] = position_ids._version, packing
    return packing


def _packing_of(position_ids):
    # Gaps are no new sequence: they hide nothing
    return _cu_seqlens((position_ids.flatten()[1:] == 0).nonzero().flatten() + 1, position_ids.numel())


def _cu_seqlens(starts, total):
    """(cu_seqlens, longest) of sequences that begin at 0 and at starts; (None, None) for one."""
    if not len(starts):
        return None, None
    cu_seqlens = F.pad(starts, (1, 1))
    cu_seqlens[-1] = total
    return cu_seqlens.int(), int(cu_seqlens.diff().max())


def _attend_without_padding(q, k, v, padding, options):
    """Take the tokens out of their padding, attend, and put them back; padded queries get 0 with causal or a window."""
    batch, seqlen_q = q.shape[:2]
    rows_k, cu_seqlens_k, longest_k = padding.of(k.shape[1])
    packed_k, packed_v = (x.flatten(0, 1).index_select(0, rows_k) for x in (k, v))
    if not options["causal"] and options["window"] == (None, None):
        # The mask may be that of an encoder, which says nothing of the queries
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
        out = api.attention_varlen(
            q.flatten(0, 1), packed_k, packed_v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=seqlen_q,
            max_seqlen_k=longest_k, **options,
        )  # fmt: skip
        return out.unflatten(0, (batch, seqlen_q))
    rows_q, cu_seqlens_q, longest_q = padding.of(seqlen_q)
    out = api.attention_varlen(
        q.flatten(0, 1).index_select(0, rows_q), packed_k, packed_v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=longest_q, max_seqlen_k=longest_k, **options,
    )  # fmt: skip
    padded = out.new_zeros((batch * seqlen_q, *out.shape[1:])).index_copy(0, rows_q, out)
    return padded.unflatten(0, (batch, seqlen_q))
