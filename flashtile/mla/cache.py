"""The fp8 layout of a latent cache, 656 bytes a token: 512 e4m3 latent numbers, 4 fp32 scales, 64 bf16 rotary numbers.

One scale serves 128 latent numbers and is a power of two, so that scaling rounds nothing. It is FlashMLA's layout for
DeepSeek-V3.2; the rotary part keeps its 16 bits.
"""

import torch

from flashtile.checks import check_tensor, shape_of
from flashtile.errors import DtypeError, ShapeError, explain

LATENT_DIM = 512
ROPE_DIM = 64
SCALE_GROUP = 128
NUM_SCALES = LATENT_DIM // SCALE_GROUP
# Where the scales and the rotary numbers begin, and where a token ends
SCALES_BYTE = LATENT_DIM
ROPE_BYTE = SCALES_BYTE + 4 * NUM_SCALES
TOKEN_BYTES = ROPE_BYTE + 2 * ROPE_DIM
DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_SCALE = 1e-4


def pack_fp8(kv_cache: torch.Tensor) -> torch.Tensor:
    """Pack a latent cache into the fp8 layout.

    Args:
        kv_cache: (..., 576), bf16, fp16 or fp32: 512 latent and 64 rotary numbers a token.
    Returns:
        (..., 656), uint8, for `mla_decode`. The scale of 128 numbers is the power of two at or above amax / 448.
    Raises:
        ShapeError, DtypeError.
    """
    check_tensor("kv_cache", kv_cache)
    if kv_cache.shape[-1:] != (LATENT_DIM + ROPE_DIM,):
        raise ShapeError(explain("kv_cache", f"a last dim of {LATENT_DIM + ROPE_DIM}", shape_of(kv_cache)))
    if not kv_cache.is_floating_point() or kv_cache.element_size() < 2:
        raise DtypeError(explain("kv_cache", "dtype bfloat16, float16 or float32", kv_cache.dtype))
    latent, rope = kv_cache.split([LATENT_DIM, ROPE_DIM], -1)
    groups = latent.float().unflatten(-1, (NUM_SCALES, SCALE_GROUP))
    scales = torch.exp2((groups.abs().amax(-1) / _LARGEST).clamp_min(_SMALLEST_SCALE).log2().ceil())
    packed = torch.empty((*kv_cache.shape[:-1], TOKEN_BYTES), dtype=torch.uint8, device=kv_cache.device)
    packed[..., :SCALES_BYTE] = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)
    packed[..., SCALES_BYTE:ROPE_BYTE] = scales.view(torch.uint8)
    packed[..., ROPE_BYTE:] = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    return packed


def split_fp8(kv_cache):
    """Views of a packed cache: e4m3 (..., 512), fp32 scales (..., 4), bf16 rotary (..., 64)."""
    raw = kv_cache.view(torch.uint8)
    return (raw[..., :SCALES_BYTE].view(torch.float8_e4m3fn), raw[..., SCALES_BYTE:ROPE_BYTE].view(torch.float32),
            raw[..., ROPE_BYTE:].view(torch.bfloat16))  # fmt: skip


def unpack_fp8(kv_cache: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The numbers of a packed cache.

    Args:
        kv_cache: (..., 656), uint8, int8 or e4m3, as `pack_fp8` makes it.
        dtype: of the result.
    Returns:
        (..., 576), dtype: 512 latent and 64 rotary numbers a token.
    Raises:
        ShapeError, DtypeError.
    """
    check_tensor("kv_cache", kv_cache)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise DtypeError(explain("dtype", "a floating dtype", dtype))
    if kv_cache.dtype not in DTYPES:
        raise DtypeError(explain("kv_cache", "dtype uint8, int8 or float8_e4m3fn", kv_cache.dtype))
    if kv_cache.shape[-1:] != (TOKEN_BYTES,):
        raise ShapeError(explain("kv_cache", f"a last dim of {TOKEN_BYTES}", shape_of(kv_cache)))
    # A copy: of other strides, or from an odd byte on, there are no such views
    latent, scales, rope = split_fp8(kv_cache.clone(memory_format=torch.contiguous_format))
    groups = latent.to(torch.float32).unflatten(-1, (NUM_SCALES, SCALE_GROUP)) * scales[..., None]
    return torch.cat([groups.flatten(-2).to(dtype), rope.to(dtype)], -1)
