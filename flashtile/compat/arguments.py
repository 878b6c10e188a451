"""What the peers' functions take: looked at before a wrapper asks it for its sizes, and turned into what flashtile takes.

Only what a wrapper itself needs, or changes, is checked here; problem.py, kvcache_problem.py and mla/problem.py check the rest.
"""

import operator
import re
from numbers import Real

import torch
import torch.nn.functional as F

from flashtile.checks import check_device, check_is_tensor, is_int, shape_of
from flashtile.errors import DtypeError, ShapeError, UnsupportedError, explain
from flashtile.problem import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, WIDER_HEADS, lse_dtype

# What stands before the parts of a packed tensor of so many dims
LEADING = {5: "batch, seqlen", 4: "total"}


def check_rows(q, k, v, names=("q", "k", "v")):
    """Three tensors with enough dims to ask for their lengths and head dims."""
    if isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
        if q.dim() > 1 and k.dim() > 1 and v.dim() > 1:
            return
    for name, x in zip(names, (q, k, v)):
        check_is_tensor(name, x)
        if x.dim() < 2:
            raise ShapeError(explain(name, "dims (..., seqlen, heads, dim)", shape_of(x)))


def strided_rows(q, k, v):
    """q, k and v with contiguous last dims."""
    check_rows(q, k, v)
    return contiguous(q), contiguous(k), contiguous(v)


def padded_rows(q, k, v):
    """q, k and v with contiguous last dims, padded with zeros to a multiple of 8."""
    check_rows(q, k, v)
    if needs_padding(q, k, v):
        check_dims_before_padding({"q": q, "k": k, "v": v}, ("k", "q"))
    return padded(q), padded(k), padded(v)


def needs_padding(*tensors):
    for x in tensors:
        if x.shape[-1] % HEAD_DIM_MULTIPLE:
            return True
    return False


def check_dims_before_padding(tensors, *pairs):
    """Head dims as they are before `padded`, which makes those inside one multiple of 8 equal; pairs: names of equal ones."""
    for name, other in pairs:
        dim, wanted = (tensors[x].shape[-1] for x in (name, other))
        if dim != wanted:
            raise ShapeError(explain(name, f"the head_dim of {other}, {wanted}", f"head_dim {dim}"))
    for name, x in tensors.items():
        if x.shape[-1] > MAX_HEAD_DIM:
            raise ShapeError(explain(name, f"a head dim of at most {MAX_HEAD_DIM}", x.shape[-1], WIDER_HEADS))


def padded(x):
    """x with a contiguous last dim, padded with zeros to a multiple of 8; x itself where it is so already."""
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    return F.pad(x, (0, missing)) if missing else contiguous(x)


def contiguous(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def unstrided(x):
    """x with a contiguous last dim; what is no tensor stays, to be refused by its name."""
    return x if x is None or not isinstance(x, torch.Tensor) or x.is_contiguous() else contiguous(x)


def check_like(name, x, of, shape, dtype, device):
    """A tensor that is read or written as another one is. of: what has that shape."""
    check_is_tensor(name, x)
    if x.shape != shape:
        raise ShapeError(explain(name, f"the shape of {of}, {tuple(shape)}", shape_of(x)))
    if x.dtype != dtype:
        raise DtypeError(explain(name, f"dtype {dtype}", x.dtype, f"Cast it: {name}.to({dtype})."))
    check_device(name, x, device)


def check_backward(operands, dout, out, lse, gradients):
    """What a backward pass reads beside its operands, and where dq, dk and dv go, of which any may be None."""
    q, k, v = operands[:3]
    rows, rows_of_lse = (*q.shape[:-1], v.shape[-1]), (*q.shape[:-3], q.shape[-2], *q.shape[-3:-2])
    check_like("dout", dout, "q with the head_dim of v", rows, q.dtype, q.device)
    check_like("out", out, "q with the head_dim of v", rows, q.dtype, q.device)
    layout = "(batch, heads, seqlen_q)" if q.dim() == 4 else "(heads, total_q)"
    check_like("softmax_lse", lse, layout, rows_of_lse, lse_dtype(q.dtype), q.device)
    for name, x, like in zip(("q", "k", "v"), gradients, (q, k, v)):
        if x is not None:
            check_like(f"d{name}", x, name, like.shape, like.dtype, q.device)


def row_sums(dout, out):
    """rowsum(dout * out), in the dtype of an lse, of products in it."""
    dtype = lse_dtype(out.dtype)
    return torch.linalg.vecdot(dout.to(dtype), out.to(dtype))


def default_scale(head_dim):
    """Also of a head dim of 0, which problem.py refuses."""
    return head_dim**-0.5 if head_dim else 1.0


def detached(x):
    """x without a gradient; what is no tensor stays."""
    return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, why, *inputs):
        ctx.why = why
        return out.view_as(out)

    @staticmethod
    def backward(ctx, *gradients):
        raise UnsupportedError(ctx.why)


def refusing_gradients(out, why, *inputs):
    """out of inputs that may require gradients: a backward pass from it raises an UnsupportedError."""
    wanted = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    return _Refused.apply(out, why, *inputs) if wanted else out


def check_packed(name, x, rank):
    """A tensor of as many parts as its name has letters, which lie along its third dim from the end."""
    check_is_tensor(name, x)
    if x.dim() != rank or x.shape[-3] != len(name):
        layout = f"({LEADING[rank]}, {len(name)}, heads, dim)"
        raise ShapeError(explain(name, layout, shape_of(x),
                                 f"Stack its parts: torch.stack([{', '.join(name)}], -3)."))  # fmt: skip


def unpacked(name, x, rank):
    """The parts of a packed tensor."""
    check_packed(name, x, rank)
    return x.unbind(-3)


def heads_of_packed(qkv, num_heads_q):
    """(num_heads_q, num_heads_kv) of qkv (batch, seqlen, num_heads_q + 2 * num_heads_kv, dim); None for one that is
    (batch, seqlen, 3, heads, dim)."""
    check_is_tensor("qkv", qkv)
    shape = tuple(qkv.shape)
    if len(shape) == 5 and shape[2] == 3:
        return None
    if len(shape) != 4 or num_heads_q is None:
        raise ShapeError(explain("qkv", "(batch, seqlen, 3, heads, dim), or num_heads_q beside it and 4 dims", shape))
    heads = as_int(num_heads_q)
    if isinstance(heads, bool) or not isinstance(heads, (int, torch.SymInt)):
        raise DtypeError(explain("num_heads_q", "an int", repr(num_heads_q)))
    num_heads_kv, rest = divmod(shape[2] - heads, 2)
    if rest or num_heads_kv < 1 or heads < 1:
        raise ShapeError(explain("qkv", f"num_heads_q + 2 * num_heads_kv heads, num_heads_q being {heads}",
                                 f"{shape[2]} heads"))  # fmt: skip
    return heads, num_heads_kv


def as_int(x):
    """A whole number of any library as an int; a tensor of one waits for its device. Anything else stays as it is."""
    if x is None or isinstance(x, (int, torch.SymInt)):
        return x
    if isinstance(x, torch.Tensor):
        return x if x.is_floating_point() or x.numel() != 1 else int(x)
    try:
        return operator.index(x)
    except TypeError:
        return x


def lengths_of(x):
    """A tensor as it is, or one int for all sequences."""
    return x if isinstance(x, torch.Tensor) else as_int(x)


def as_number(x):
    """A real number of any library but torch as a float; anything else stays as it is."""
    if x is None or type(x) is float or isinstance(x, int):
        return x
    return float(x) if isinstance(x, Real) else x


def softcap_of(x):
    """The peers' softcap: one below 0 is off too."""
    if type(x) is not float:
        x = as_number(x)
    return 0.0 if isinstance(x, (int, float)) and x <= 0 else x


def splits_of(x):
    """The peers' num_splits: a number below 1 leaves the choice to the library."""
    if type(x) is not int:
        x = as_int(x)
        if not is_int(x):
            return x
    return 0 if x < 1 else x


def renamed(error, names):
    """The error with arguments called as the caller knows them. names: of flashtile's names."""
    pattern = rf"\b({'|'.join(names)})\b"
    return type(error)(re.sub(pattern, lambda match: names[match[0]], str(error)))
