"""flash_attn.layers.rotary: rotary position embeddings of packed and batched rows, in torch operations.

A pair (a, b) of a row at position t becomes (a cos_t - b sin_t, a sin_t + b cos_t), computed in fp32. Pairs are elements i and
i + rotary_dim / 2 (GPT-NeoX), or with interleaved elements 2i and 2i + 1 (GPT-J). Elements past rotary_dim stay as they are,
and so do rows at positions that the tables do not have. The gradient is the rotation backwards; cos and sin have none.
Source: Su et al. 2021, RoFormer, section 3.2.
"""

import torch
import torch.nn.functional as F

from flashtile.checks import check_is_tensor, shape_of
from flashtile.compat.arguments import check_packed, heads_of_packed, lengths_of, renamed
from flashtile.errors import DtypeError, FlashtileError, ShapeError, ValueRangeError, explain

# Names of arguments, and what RotaryEmbedding calls them
MODULE_NAMES = {"seqlen_offsets": "seqlen_offset", "x": "qkv"}


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """x with the first rotary_dim elements of each row rotated.

    Args:
        x: (batch, seqlen, heads, dim), or (total, heads, dim) with cu_seqlens.
        cos: (positions, rotary_dim / 2), rotary_dim <= dim; sin: the same.
        interleaved: pairs of neighbours instead of halves.
        inplace: write to x. Use only what is returned afterwards; a gradient of x is that before the rotation.
        seqlen_offsets: position of each sequence's first row, an int or (batch,) integers on x's device.
        cu_seqlens: (batch + 1,), int32; sequence b owns rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        max_seqlen: the longest sequence; not needed here.
    Returns:
        The shape and dtype of x.
    Raises:
        ShapeError: cos and sin differ, or are wider than x or, where seqlen_offsets is an int, shorter; other dims of x.
        DtypeError: x is not floating. ValueRangeError: seqlen_offsets is a negative int.
    """
    _check_rows("x", x, packed=cu_seqlens is not None)
    tables = _tables(cos, sin, x, x.shape[0] if cu_seqlens is not None else x.shape[1], seqlen_offsets, cu_seqlens)
    return _Rotary.apply(x, (tables,), (None,), interleaved, inplace)


# an older name of it
apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """`apply_rotary_emb` in the dtype of x by operations that autograd sees: cos and sin have gradients.

    cos, sin: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2).
    """
    pairs = cos.shape[-1]
    _check_columns("cos", cos, x)
    first, second = _pairs(x, pairs, interleaved)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = torch.stack([first * cos - second * sin, first * sin + second * cos], -1 if interleaved else -2)
    return torch.cat([rotated.flatten(-2), x[..., 2 * pairs :]], -1)


def apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None):
    """Rotate queries and keys of a packed tensor in place, and return it.

    Args:
        qkv: (batch, seqlen, 3, heads, dim), or (batch, seqlen, num_heads_q + 2 * num_heads_kv, dim) with num_heads_q.
        cos_k, sin_k: tables of the keys; default those of the queries.
        The rest as in `apply_rotary_emb`.
    """
    heads = heads_of_packed(qkv, num_heads_q)
    _check_floating("qkv", qkv)
    parts = (slice(0, 1), slice(1, 2)) if heads is None else (slice(0, heads[0]), slice(heads[0], sum(heads)))
    if (cos_k is None) != (sin_k is None):
        missing, given = ("cos_k", "sin_k") if cos_k is None else ("sin_k", "cos_k")
        raise ShapeError(explain(missing, f"a tensor, since {given} is given", None, "Pass both, or neither."))
    tables_q = tables_k = _tables(cos, sin, qkv, qkv.shape[1], seqlen_offsets)
    if cos_k is not None:
        tables_k = _tables(cos_k, sin_k, qkv, qkv.shape[1], seqlen_offsets, names=("cos_k", "sin_k"))
    return _Rotary.apply(qkv, (tables_q, tables_k), parts, interleaved, True)


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotate the keys of kv (batch, seqlen, 2, heads, dim) in place, and return it; arguments as in `apply_rotary_emb`."""
    check_packed("kv", kv, 5)
    _check_floating("kv", kv)
    tables = _tables(cos, sin, kv, kv.shape[1], seqlen_offsets)
    return _Rotary.apply(kv, (tables,), (slice(0, 1),), interleaved, True)


def rotate_half(x, interleaved=False):
    """(-b, a) of each pair (a, b) of the last dim."""
    first, second = _pairs(x, x.shape[-1] // 2, interleaved)
    return torch.stack([-second, first], -1 if interleaved else -2).flatten(-2)


class RotaryEmbedding(torch.nn.Module):
    """Tables of cos and sin for the angles t * base ** (-2i / dim), made as long as needed, and their application in place.

    scale_base: not None scales queries up and keys down with their position (XPos, Sun et al. 2022).

    inv_freq and scale are what tables are made from: who changes them before, as for longer contexts, gets others. Where the
    module was cast, so that they lack the precision of fp32, they are made anew.

    _cos_cached and _sin_cached are the tables, None before the first call; with scale_base _cos_k_cached and _sin_k_cached are
    those of the keys. _update_cos_sin_cache makes them.
    """

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._new_inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._new_scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """Rotate qkv, or q and kv, in place.

        Args:
            qkv: as in `apply_rotary_emb_qkv_`, or with kv only q, (batch, seqlen, heads, dim).
            kv: (batch, seqlen, 2, heads, dim).
            seqlen_offset: an int, or (batch,) integers, which need max_seqlen or the tables of an earlier call.
            max_seqlen: length of the tables; default seqlen + seqlen_offset.
        Returns:
            qkv, or (q, kv).
        """
        if kv is None:
            heads_of_packed(qkv, num_heads_q)
        else:
            _check_rows("qkv", qkv, packed=False)
            check_packed("kv", kv, 5)
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif not isinstance(seqlen_offset, torch.Tensor):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        elif self._cos_cached is None:
            raise ShapeError(explain("max_seqlen", "an int where seqlen_offset is a tensor and there are no tables yet", None))
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        try:
            if kv is None:
                return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
            q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
            tables_k = (cos, sin) if self.scale is None else (cos_k, sin_k)
            return q, apply_rotary_emb_kv_(kv, *tables_k, self.interleaved, seqlen_offset)
        except FlashtileError as error:
            raise renamed(error, MODULE_NAMES) from None

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        """Make tables of at least seqlen rows, unless they are there. Default: the device of the module, fp32."""
        device = self.inv_freq.device if device is None else torch.device(device)
        dtype = torch.float32 if dtype is None else dtype
        cos = self._cos_cached
        if cos is not None and seqlen <= self._seq_len_cached and cos.device == device and cos.dtype == dtype:
            # Tables made in inference mode can't be kept for a backward pass
            if torch.compiler.is_compiling() or not cos.is_inference() or torch.is_inference_mode_enabled():
                return
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(positions, _in_fp32(self.inv_freq, device, self._new_inv_freq))
        cos, sin = angles.cos(), angles.sin()
        self._seq_len_cached = seqlen
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        grown = _in_fp32(self.scale, device, self._new_scale) ** ((positions - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * grown).to(dtype), (sin * grown).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / grown).to(dtype), (sin / grown).to(dtype)

    def _even(self, device):
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _new_inv_freq(self, device):
        return self.base ** (-self._even(device) / self.dim)

    def _new_scale(self, device):
        return (self._even(device) + 0.4 * self.dim) / (1.4 * self.dim)


def _in_fp32(buffer, device, make):
    """A buffer on a device; what make(device) gives where it was cast, or has no data."""
    return make(device) if buffer.dtype != torch.float32 or buffer.is_meta else buffer.to(device)


class _Rotary(torch.autograd.Function):
    """Rotate parts of x. tables: (cos, sin) of each part. parts: slices of dim 2, or None for x itself."""

    @staticmethod
    def forward(ctx, x, tables, parts, interleaved, inplace):
        ctx.arguments = tables, parts, interleaved
        if not inplace or torch.compiler.is_compiling() or x.is_inference():
            return _rotate_(x if inplace else x.clone(), tables, parts, interleaved)
        # Autograd does not learn of it, as with flash_attn's kernel: q and k may be views of one tensor
        with torch.autograd._unsafe_preserve_version_counter(x):
            return _rotate_(x, tables, parts, interleaved)

    @staticmethod
    def backward(ctx, dout):
        tables, parts, interleaved = ctx.arguments
        backwards = tuple((cos, -sin) for cos, sin in tables)
        # Itself, so that it has derivatives too
        return _Rotary.apply(dout, backwards, parts, interleaved, False), None, None, None, None


def _rotate_(x, tables, parts, interleaved):
    for (cos, sin), part in zip(tables, parts):
        rows = x if part is None else x[:, :, part]
        if rows.dim() == 5:
            cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        first, second = _pairs(rows, cos.shape[-1], interleaved)
        a, b = first.to(cos.dtype), second.to(cos.dtype)
        rotated = a * cos - b * sin, a * sin + b * cos
        first.copy_(rotated[0])
        second.copy_(rotated[1])
    return x


def _pairs(x, pairs, interleaved):
    """Views of the first and the second element of each pair."""
    if interleaved:
        return x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]


def _check_rows(name, x, packed):
    check_is_tensor(name, x)
    if x.dim() != (3 if packed else 4):
        layout = "(total, heads, dim) beside cu_seqlens" if packed else "(batch, seqlen, heads, dim)"
        raise ShapeError(explain(name, layout, shape_of(x)))
    _check_floating(name, x)


def _check_floating(name, x):
    if not x.is_floating_point():
        raise DtypeError(explain(name, "a floating dtype", x.dtype, f"Cast it: {name}.float()."))


def _check_columns(name, cos, x):
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ShapeError(explain(name, f"at most {x.shape[-1] // 2} columns, half of the dim of x", cos.shape[-1]))


def _check_tables(cos, sin, names):
    for name, x in zip(names, (cos, sin)):
        check_is_tensor(name, x)
    if cos.dim() != 2:
        raise ShapeError(explain(names[0], "shape (positions, rotary_dim / 2)", shape_of(cos)))
    if cos.shape != sin.shape:
        raise ShapeError(explain(names[1], f"the shape of {names[0]}, {tuple(cos.shape)}", shape_of(sin)))


def _check_offsets(offsets, batch):
    if isinstance(offsets, torch.Tensor):
        if offsets.dtype not in (torch.int32, torch.int64):
            raise DtypeError(explain("seqlen_offsets", "dtype torch.int32 or torch.int64", offsets.dtype))
        if tuple(offsets.shape) != (batch,):
            raise ShapeError(explain("seqlen_offsets", f"an int, or shape ({batch},)", shape_of(offsets)))
    elif isinstance(offsets, bool) or not isinstance(offsets, (int, torch.SymInt)):
        raise DtypeError(explain("seqlen_offsets", "an int or a tensor of ints", repr(offsets)))
    elif offsets < 0:
        raise ValueRangeError(explain("seqlen_offsets", "an int >= 0", offsets))


def _tables(cos, sin, x, seqlen, offsets, cu_seqlens=None, names=("cos", "sin")):
    """cos and sin of each row, fp32 (fp64 for fp64), as (seqlen, 1, pairs) or (batch, seqlen, 1, pairs); seqlen is the total
    of packed rows. Rows before or behind the tables get 1 and 0."""
    _check_tables(cos, sin, names)
    _check_columns(names[0], cos, x)
    if cu_seqlens is not None:
        check_is_tensor("cu_seqlens", cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise ShapeError(explain("cu_seqlens", "shape (batch + 1,)", shape_of(cu_seqlens)))
    offsets = lengths_of(offsets)
    _check_offsets(offsets, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    cos, sin = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (cos, sin))
    if cu_seqlens is None and not isinstance(offsets, torch.Tensor):
        if offsets + seqlen > cos.shape[0]:
            expected = f"at least seqlen_offsets + seqlen = {offsets + seqlen} rows"
            raise ShapeError(explain(names[0], expected, cos.shape[0]))
        return cos[offsets : offsets + seqlen, None], sin[offsets : offsets + seqlen, None]
    positions = torch.arange(seqlen, device=cos.device)
    if cu_seqlens is None:
        positions = positions + offsets[:, None]
    else:
        # Rows past the last sequence count as one more.
        sequence = torch.searchsorted(cu_seqlens, positions, right=True) - 1
        positions = positions - cu_seqlens[sequence]
        positions = positions + (F.pad(offsets, (0, 1))[sequence] if isinstance(offsets, torch.Tensor) else offsets)
    there = ((positions >= 0) & (positions < cos.shape[0]))[..., None]
    nearest = positions.clamp(0, cos.shape[0] - 1)
    return torch.where(there, cos[nearest], 1.0).unsqueeze(-2), torch.where(there, sin[nearest], 0.0).unsqueeze(-2)
