"""Tile configurations, as data: which tile a kernel uses for which head dim on which GPU, and how that was found.

Chosen by lookup and arithmetic, never by a search at the first call. A row of a device's table wins over the defaults; a row
that does not fit in the device's shared memory is passed over for the next smaller one. Imports neither triton nor a GPU.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TileConfig:
    """tile_m queries by tile_n keys, by a block of num_warps warps, loads num_stages deep."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


class Row(NamedTuple):
    """One entry: the kernel, the largest padded head dim and element size it is for, the device, and where it comes from."""

    kernel: str
    block_dim: int
    itemsize: int
    config: TileConfig
    # a device name ("H200"), an arch ("sm_80"), or "" for any
    device: str = ""
    # None: any mask
    causal: bool | None = None
    source: str = "arithmetic: operands of two stages in the shared memory of sm_80"


def _t(*args):
    return TileConfig(*args)


# The first row that matches and fits is taken.
PORTABLE = (
    Row("forward", 64, 2, _t(128, 64, 4, 3)),
    Row("forward", 128, 2, _t(128, 64, 8, 3)),
    Row("forward", 256, 2, _t(128, 64, 8, 2)),
    Row("forward", 256, 2, _t(64, 32, 4, 2)),
    Row("forward", 64, 4, _t(64, 32, 4, 2)),
    Row("forward", 128, 4, _t(32, 32, 4, 2)),
    Row("forward", 256, 4, _t(32, 16, 4, 2)),
    Row("dkdv", 64, 2, _t(64, 128, 8, 2)),
    Row("dkdv", 128, 2, _t(64, 128, 8, 2)),
    Row("dkdv", 256, 2, _t(32, 64, 8, 2)),
    Row("dkdv", 256, 2, _t(32, 64, 8, 1)),
    Row("dkdv", 64, 4, _t(32, 32, 4, 1)),
    Row("dkdv", 128, 4, _t(16, 32, 4, 1)),
    Row("dkdv", 256, 4, _t(16, 16, 4, 1)),
    Row("dq", 64, 2, _t(128, 64, 8, 2)),
    Row("dq", 128, 2, _t(128, 64, 8, 2)),
    Row("dq", 256, 2, _t(64, 32, 8, 2)),
    Row("dq", 256, 2, _t(64, 32, 8, 1)),
    Row("dq", 64, 4, _t(32, 32, 4, 1)),
    Row("dq", 128, 4, _t(32, 16, 4, 1)),
    Row("dq", 256, 4, _t(16, 16, 4, 1)),
    Row("delta", 256, 4, _t(64, 0, 4, 1)),
)


def padded_dim(head_dim: int) -> int:
    """Columns of a tile that holds head_dim: a power of two, at least the 16 that a product needs."""
    return max(16, 1 << (head_dim - 1).bit_length())


def shared_bytes(kernel: str, config: TileConfig, block_d: int, block_dv: int, itemsize: int) -> int:
    """Estimate of a block's shared memory: the tiles that stay, and num_stages of those that stream."""
    both = (block_d + block_dv) * itemsize
    stages = config.num_stages
    if kernel == "forward":
        return config.tile_m * block_d * itemsize + stages * config.tile_n * both
    if kernel == "dkdv":
        return config.tile_n * both + stages * config.tile_m * both
    if kernel == "dq":
        return config.tile_m * both + stages * config.tile_n * both
    return 0


def feasible(kernel, config, problem, device) -> bool:
    """Whether the tiles of a problem fit in a block's shared memory."""
    block_d, block_dv = padded_dim(problem.head_dim), padded_dim(problem.head_dim_v)
    return shared_bytes(kernel, config, block_d, block_dv, problem.dtype.itemsize) <= device.smem_bytes


def select(table, kernel, problem, device) -> Row | None:
    """The row of a kernel for a problem on a device, or None where nothing fits."""
    block_dim = padded_dim(max(problem.head_dim, problem.head_dim_v))
    for where in (device.name, device.arch, ""):
        for row in table:
            if (
                row.kernel == kernel and row.device == where and block_dim <= row.block_dim and problem.dtype.itemsize <= row.itemsize
                and row.causal in (None, problem.causal) and feasible(kernel, row.config, problem, device)
            ):  # fmt: skip
                return row
    return None
