"""flash_attn.bert_padding: from padded batches to packed rows and back, in torch operations that autograd knows."""

import torch
import torch.nn.functional as F

from flashtile.checks import check_tensor, shape_of
from flashtile.errors import ShapeError, explain


def index_first_axis(input, indices):
    """Rows `indices`, int64 (n,), of input (rows, ...); their gradient goes back to these rows."""
    return input.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """(first_axis_dim, ...) with values (n, ...) in the rows `indices`, int64 (n,) and distinct, and 0 elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def index_first_axis_residual(input, indices):
    """`index_first_axis`, and input itself; gradients of both reach input."""
    return index_first_axis(input, indices), input


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """The rows of a padded batch that a mask names, one sequence after the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or int; 1 is a token.
        unused_mask: (batch, seqlen), bool or int; 1 is a row that gets a place too, but is no token.
    Returns:
        hidden_states (total, ...), total being the number of rows in both masks;
        indices (total,), int64, of these rows in the flattened batch;
        cu_seqlens (batch + 1,), int32;
        max_seqlen, an int: this waits for the device;
        seqused (batch,), int32, the tokens of each sequence.
    Raises:
        ShapeError, DtypeError: a mask that is not one of hidden_states.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices), indices, _cu_seqlens(lengths), _longest(lengths),
        attention_mask.sum(-1, dtype=torch.int32),
    )  # fmt: skip


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """`unpad_input` for rows of several sequences each, one behind the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen), int; the lengths of the sequences in each row, then zeros.
    Returns:
        hidden_states (total, ...), indices (total,), cu_seqlens (sequences + 1,), max_seqlen; as `unpad_input`.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    used = attention_mask_in_length.sum(-1, keepdim=True)
    is_token = torch.arange(attention_mask_in_length.shape[1], device=used.device) < used
    indices = is_token.flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths > 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _cu_seqlens(lengths), _longest(lengths)


def pad_input(hidden_states, indices, batch, seqlen):
    """The way back from `unpad_input`: (total, ...) to (batch, seqlen, ...), 0 where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _check_mask(name, mask, hidden_states):
    check_tensor(name, mask)
    if mask.shape != hidden_states.shape[:2]:
        raise ShapeError(explain(name, f"shape {tuple(hidden_states.shape[:2])} as hidden_states has", shape_of(mask)))


def _cu_seqlens(lengths):
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths):
    """0 of no sequences."""
    return int(F.pad(lengths, (0, 1)).max())
