"""Tile configurations, as data: which tile a kernel uses for which head dim on which GPU, and how that was found.

Chosen by lookup and arithmetic, never by a search at the first call. A row of a device's table wins over the defaults; a row
that does not fit in the device's shared memory is passed over for the next smaller one. Imports neither triton nor a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TileConfig:
    """tile_m queries by tile_n keys, by a block of num_warps warps, loads num_stages deep."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class KeyTileConfig(TileConfig):
    """Of a kernel whose programs own keys. splits: parts of a group of query heads, each with a dk and dv of its own."""

    splits: int = 1

    @property
    def parts(self) -> int:
        """How many give a dk and dv for the same keys."""
        return self.splits


# Tiles of keys for each multiprocessor, causal or not: with fewer, groups of query heads are split. Measured on an H100, see
# docs/kernels/hopper-backward.md
TILES_A_PROGRAM = 1.9


def programs_in_order(deterministic, num_sms) -> int:
    """For how many programs work is divided: the order of sums of a deterministic call must not depend on the size of a GPU."""
    return 132 if deterministic else num_sms


def packed_tiles(problem, rows, total) -> int:
    """At most so many tiles of rows one head of a packed call has. total: rows of all sequences."""
    return total // rows + problem.batch


def _number_of_tiles(problem, rows, seqlen, total) -> int:
    """Of one head. seqlen, total: of what tiles are rows of."""
    return packed_tiles(problem, rows, total) if problem.varlen else problem.batch * -(-seqlen // rows)


def _tiles_of_keys(problem, tile_n) -> int:
    return _number_of_tiles(problem, tile_n, problem.seqlen_k, problem.total_k)


def group_splits(problem, tile_n, num_sms) -> int:
    """Parts of a group of query heads, as few as give each multiprocessor TILES_A_PROGRAM tiles of keys."""
    wanted = TILES_A_PROGRAM * programs_in_order(problem.deterministic, num_sms)
    units = _tiles_of_keys(problem, tile_n) * problem.num_heads_kv
    return next(n for n in range(1, problem.group_size + 1)
                if problem.group_size % n == 0 and (units * n >= wanted or n == problem.group_size))  # fmt: skip


@dataclass(frozen=True, slots=True)
class PortableConfig(KeyTileConfig):
    """Of a kernel with a program for each tile. tail_heads: the last heads, see `device.schedule.tile_of_program`. narrow: see
    `padded_dim`."""

    tail_heads: int | None = None
    narrow: bool = False


# Of the tiles of the last heads under a causal mask, see portable/forward.py
_TAIL_WARPS_AN_SM = 16


def on_gpu(kernel, config, problem, device) -> PortableConfig:
    """The TileConfig of a portable kernel with what a hardware.Device adds to it for a problem."""
    num_sms = device.num_sms
    # Of the left operands of all its products tile_m is the fewest rows in the forward alone
    narrow = is_narrow(problem, device) or kernel == "forward" and config.tile_m < ROWS_OF_WGMMA
    config = PortableConfig(config.tile_m, config.tile_n, config.num_warps, config.num_stages, narrow=narrow)
    heads, tiles = problem.num_heads, _number_of_tiles(problem, config.tile_m, problem.seqlen_q, problem.total_q)
    if kernel == "dkdv":
        config = replace(config, splits=group_splits(problem, config.tile_n, num_sms))
        heads, tiles = problem.num_heads_kv * config.splits, _tiles_of_keys(problem, config.tile_n)
    last = num_sms * _TAIL_WARPS_AN_SM // config.num_warps
    # Tiles that all run at once end as they do in any order, and heads of few tiles hardly matter
    if kernel == "delta" or problem.window[1] is None or 2 * heads * tiles <= last or tiles < 4 * problem.batch:
        return config
    return replace(config, tail_heads=min(problem.batch * heads, -(-last * problem.batch // tiles)))


class Row(NamedTuple):
    """One entry: the kernel, the largest head dim and element size it is for, the device, and where it comes from."""

    kernel: str
    head_dim: int
    itemsize: int
    config: TileConfig
    # a device name ("H200"), an arch ("sm_90"), or "" for any
    device: str = ""
    # None: any mask, any number of keys
    causal: bool | None = None
    max_seqlen: int | None = None
    # only for calls with dropout
    dropout: bool = False
    source: str = ""


def _rows(device, source, entries):
    return tuple(Row(kernel, head_dim, itemsize, TileConfig(*config), device, *limits, source=source)
                 for kernel, head_dim, itemsize, config, *limits in entries)  # fmt: skip


# Where mma.sync takes all products: tiles with 164 KiB of shared memory a multiprocessor, and with 100. 8 warps do a product
# twice whose result has 64 rows and no more columns: each has 16 rows of its own. With dropout larger tiles of dkdv spill 460
# to 3500 bytes, and of dq at 192 4304 with Triton 3.8; and its blocks of columns are wide, see `is_narrow`
_DROPOUT = None, None, True
_BY_MMA_SYNC = (
    ("forward", 64, (128, 64, 4, 3), (128, 64, 4, 3)),
    ("forward", 128, (128, 32, 4, 2), (128, 32, 4, 2)),
    ("forward", 192, (64, 64, 4, 2), (64, 32, 4, 2)),
    ("forward", 256, (64, 32, 4, 2), (64, 32, 4, 2)),
    ("dkdv", 64, (16, 128, 4, 3), (16, 128, 4, 3), *_DROPOUT),
    ("dkdv", 64, (32, 128, 4, 2), (32, 128, 4, 2)),
    ("dkdv", 128, (32, 64, 4, 3), (32, 64, 4, 3), *_DROPOUT),
    # With 100 KiB (32, 128, 8, 2) is 11% faster, but from Triton 3.7 on spills 3496 bytes
    ("dkdv", 128, (64, 64, 4, 2), (32, 64, 4, 3)),
    ("dkdv", 160, (64, 32, 4, 2), (64, 32, 4, 2), *_DROPOUT),
    ("dkdv", 160, (32, 64, 4, 2), (32, 64, 4, 2)),
    ("dkdv", 192, (64, 32, 4, 2), (64, 32, 4, 2)),
    ("dkdv", 256, (32, 32, 4, 2), (32, 32, 4, 3)),
    ("dq", 64, (128, 64, 4, 2), (128, 64, 4, 2), *_DROPOUT),
    ("dq", 32, (64, 64, 4, 3), (64, 64, 4, 3)),
    ("dq", 64, (128, 64, 4, 2), (128, 64, 4, 2)),
    ("dq", 128, (128, 32, 4, 2), (128, 32, 4, 2), *_DROPOUT),
    ("dq", 96, (128, 32, 4, 3), (128, 32, 4, 3)),
    ("dq", 128, (128, 32, 4, 2), (128, 32, 4, 2)),
    ("dq", 192, (64, 16, 4, 2), (64, 16, 4, 2), *_DROPOUT),
    ("dq", 192, (64, 32, 4, 2), (64, 32, 4, 2)),
    ("dq", 256, (32, 32, 4, 2), (32, 32, 4, 3)),
)
_NOT_RECORDED = "32, 96 and 160 single runs, for dropout spills; head dim 64 with 100 KiB as with 164"
# The first row that matches and fits is taken; those of the device's name come first, then its arch, then any.
PORTABLE = (
    *_rows(
        "sm_90",
        "benchmarks/results/nvidia-h200/portable-tiles.json",
        [
            # H200, single runs: 32 and 64 tokens 13 to 17% faster than (64, 64, 4, 3), from 128 on 4 to 24% slower
            ("forward", 32, 2, (32, 64, 2, 2), None, 64),
            ("forward", 64, 2, (64, 64, 4, 3)),
            ("forward", 128, 2, (64, 64, 4, 3)),
            # 192: tiles-192.json
            ("forward", 192, 2, (128, 64, 8, 3)),
            ("forward", 256, 2, (128, 64, 8, 2)),
            # without a mask (32, 64, 4, 3) is 13 to 17% slower than (64, 64, 4, 3)
            ("dkdv", 64, 2, (32, 64, 4, 3), True),
            ("dkdv", 64, 2, (64, 64, 4, 3)),
            # (32, 128, 8, 3) spills nothing; 6 to 10% slower at 512 tokens, 1 to 5% faster at 16k
            ("dkdv", 128, 2, (32, 64, 4, 3)),
            # Spills 176 to 552 bytes; 18% faster than (32, 64, 8, 3), causal 4% than (32, 32, 4, 3)
            ("dkdv", 192, 2, (64, 64, 8, 2)),
            ("dkdv", 256, 2, (32, 32, 4, 3), True),
            # (32, 32, 4, 3) hardly spills; without a mask it is 1% slower at 512 tokens, 13% at 16k
            ("dkdv", 256, 2, (32, 64, 8, 3)),
            ("dq", 64, 2, (64, 64, 4, 3)),
            ("dq", 128, 2, (128, 64, 8, 3)),
            ("dq", 256, 2, (128, 32, 8, 3)),
            # Of dropout
            ("dq", 256, 2, (64, 32, 4, 2)),
        ],
    ),
    # Where tcgen05 takes the products, and not mma.sync as in the rows after these
    *_rows(
        "sm_100",
        "arithmetic: no spills on sm_80, tiles of all stages in 163 KiB of shared memory; not measured",
        [
            ("forward", 64, 2, (128, 64, 4, 3)),
            ("forward", 128, 2, (128, 64, 8, 2)),
            ("forward", 256, 2, (64, 64, 8, 2)),
            ("dkdv", 64, 2, (32, 128, 8, 2)),
            ("dkdv", 128, 2, (64, 64, 8, 2)),
            ("dkdv", 256, 2, (32, 32, 8, 2)),
            ("dq", 64, 2, (64, 64, 4, 3)),
            ("dq", 128, 2, (64, 64, 8, 2)),
            ("dq", 256, 2, (64, 32, 8, 2)),
        ],
    ),
    *_rows(
        "sm_80",
        f"benchmarks/results/nvidia-h200/tiles-a100.json; an A100's instructions and room for blocks, H200. {_NOT_RECORDED}",
        [(kernel, head_dim, 2, config, *limits) for kernel, head_dim, config, _, *limits in _BY_MMA_SYNC],
    ),
    *_rows(
        "",
        f"benchmarks/results/nvidia-h200/tiles-4090.json; those of an RTX 4090. {_NOT_RECORDED}",
        [(kernel, head_dim, 2, config, *limits) for kernel, head_dim, _, config, *limits in _BY_MMA_SYNC],
    ),
    *_rows(
        "",
        "arithmetic: tiles of all stages in 99 KiB of shared memory; not measured",
        [
            ("forward", 64, 4, (32, 32, 4, 2)),
            ("forward", 128, 4, (16, 32, 8, 2)),
            ("forward", 256, 4, (32, 16, 8, 2)),
            ("dkdv", 64, 4, (32, 32, 4, 2)),
            ("dkdv", 128, 4, (16, 32, 8, 2)),
            ("dkdv", 256, 4, (16, 16, 8, 2)),
            ("dq", 64, 4, (32, 32, 4, 2)),
            ("dq", 128, 4, (32, 16, 4, 2)),
            ("dq", 256, 4, (16, 16, 8, 1)),
            ("delta", 256, 8, (32, 0, 4, 1)),
        ],
    ),
)


# wgmma takes left operands of so many, or multiples
ROWS_OF_WGMMA = 64


def padded_dim(head_dim: int, itemsize: int, narrow: bool = False) -> int:
    """Columns of a tile that holds head_dim: a power of two, at least 16 for a product, and 128 bytes of a 2-byte dtype.

    Triton 3.6 multiplies wrongly on Hopper when a right operand with shorter rows did not come through the load pipeline
    (seen with fp16 and bf16 rows of 16 and 32; rows of 64 and more are right): the cases dim_40_8 and dim_224_32_sliced.
    narrow: wgmma takes no product, since left operands have fewer rows than it wants or the GPU has none, so 16 will do.
    """
    return max(64 if itemsize == 2 and not narrow else 16, 1 << (head_dim - 1).bit_length())


def live_columns(head_dim: int, block: int, least: int = 16) -> int:
    """Columns of a block that a product has to read: a power of two of its right half, and the left one; the rest is zeros.

    block: `padded_dim`. Tiles are powers of two, products need not be: 80, 96, 160 and 192 columns are two slices. least: of
    one, 32 columns of fp8, of which a product contracts so many at a time.
    """
    half = block // 2
    if block == 64 or head_dim <= half:
        return block
    return half + max(least, 1 << (head_dim - half - 1).bit_length())


def blocks_of(head_dim: int, itemsize: int, narrow: bool) -> tuple[int, int]:
    """Columns of a tile's block of columns, and of a second one behind it or 0: of what is past them nothing takes part.

    itemsize, narrow: as in `padded_dim`; two blocks of 4 bytes, the second with 32 columns, were not tried.
    """
    block = padded_dim(head_dim, itemsize, narrow)
    live, narrow = live_columns(head_dim, block), narrow and itemsize == 2
    if live == block or block < (128 if narrow else 256):
        return block, 0
    # Of 16, a thread would load 8 bytes
    return block // 2, max(32 if narrow else 64, live - block // 2)


def decode_blocks_of(head_dim: int, rows: int, heads: int = 1, in_pairs: bool = False) -> tuple[int, int]:
    """The same of a tile over a cache, of so many rows. Of one head two blocks are slower where 96 columns of 128 live.

    in_pairs: it is multiplied as two tiles with half of the columns each, of which the warps of one head then share 32 or more.
    """
    if head_dim <= 64 or 80 < head_dim <= 96 and heads == 1:
        return padded_dim(head_dim, 2), 0
    return blocks_of(head_dim, 2, narrow=rows < ROWS_OF_WGMMA and not (in_pairs and heads == 1))


def box_columns(live: int, block: int) -> int:
    """Columns that TMA loads at once of a block with so many live ones: 64 where it would else load boxes of zeros.

    Source: measured, see hopper/boxes.py.
    """
    return 64 if 128 < live <= block - 64 else block


def by_mma_sync(device) -> bool:
    """Whether mma.sync takes a device's products: before Hopper's wgmma, and on the consumer GPUs after it; or no GPU does."""
    return not 90 <= device.sm < 120


def is_narrow(problem, device) -> bool:
    """Whether all products of a call of the portable tier may have narrow right operands, see `padded_dim`.

    Not with dropout: a dkdv of two blocks, the second with 32 columns, spills 2600 to 8500 bytes with it.
    """
    return by_mma_sync(device) and not problem.dropout_p


def shared_bytes(
    kernel: str, config: TileConfig, block_d: int, block_dv: int, itemsize: int, dropout: bool = False, mma_sync: bool = False
) -> int:
    """Estimate of a block's shared memory: the tiles that stay, num_stages of those that stream, and the mask of dropout.

    mma_sync: its operands are in registers before the next load begins, so a tile in use has no stage of its own; scores may
    change their layout through shared memory.
    """
    both = (block_d + block_dv) * itemsize
    stages = max(1, config.num_stages - mma_sync)
    # changes its layout through shared memory, a byte an element
    mask = config.tile_m * config.tile_n * (dropout + mma_sync * itemsize)
    if kernel == "forward":
        return config.tile_m * block_d * itemsize + stages * config.tile_n * both + mask
    if kernel == "dkdv":
        return config.tile_n * both + stages * config.tile_m * both + mask
    if kernel == "dq":
        return config.tile_m * both + stages * config.tile_n * both + mask
    return 0


def feasible(kernel, config, problem, device) -> bool:
    """Whether the tiles of a problem fit in a block's shared memory."""
    itemsize, mma_sync = problem.dtype.itemsize, by_mma_sync(device)
    columns = (sum(blocks_of(dim, itemsize, is_narrow(problem, device))) for dim in (problem.head_dim, problem.head_dim_v))
    return shared_bytes(kernel, config, *columns, itemsize, problem.dropout_p > 0, mma_sync) <= device.smem_bytes


def select(table, kernel, problem, device) -> Row | None:
    """The row of a kernel for a problem on a device, or None where nothing fits."""
    head_dim = max(problem.head_dim, problem.head_dim_v)
    # What has the tensor cores of sm_100
    arch = "sm_100" if device.sm >= 100 and not by_mma_sync(device) else device.arch
    for where in (device.name, arch, ""):
        for row in table:
            if (
                (row.kernel, row.device) == (kernel, where)
                and head_dim <= row.head_dim
                and problem.dtype.itemsize <= row.itemsize
                and row.causal in (None, problem.causal)
                and (row.max_seqlen is None or problem.seqlen_k <= row.max_seqlen)
                and row.dropout <= (problem.dropout_p > 0)
                and feasible(kernel, row.config, problem, device)
            ):
                return row
    return None


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """tile_m = 64 queries a consumer, by tile_n keys, loads num_stages deep.

    Stages are more than the key tiles by which a causal mask sets the first consumer back, (tile_m - 64) / tile_n: it keeps the
    turn while it waits for its first one, which others would have to make room for. With 192 by 64 and 2 stages a call with a
    window never ended.

    l2_bytes: keys and values of the heads in work together. lazy: acc is rescaled only where a maximum grew by much, and p v is
    waited for after the exponentials; else a row's sum stays in parts until the end. heads: of a group that share a tile, by
    their queries side by side. rest_apart: of q and k those columns that count past the first 128 have memory of their own, so
    that larger tiles fit. key_parts: of the keys of a tile, each with an out and lse of its own, see `_forward_us`.
    """

    tile_m: int
    tile_n: int
    num_stages: int
    l2_bytes: int
    lazy: bool = False
    heads: int = 1
    rest_apart: bool = False
    key_parts: int = 1

    @property
    def queries(self) -> int:
        """Of each head in a tile."""
        return self.tile_m // self.heads

    @property
    def num_warps(self) -> int:
        """Consumers of 4 warps, and the 4 of the producer, of which mostly one works."""
        return 4 + self.tile_m // 16


class HopperRow(NamedTuple):
    """One entry: the largest padded head dims it is for, the most keys that a query sees on average (`mean_keys` of a problem,
    None for any), and where it comes from.

    configs: of several the one by which a call ends first, see `_forward_us`. dims: head_dim, and the padded head_dim_v; None
    for any. when: a function of the problem that tells whether it is for a call.
    """

    block_dim: int
    max_keys: int | None
    configs: tuple[HopperConfig, ...]
    source: str
    dims: tuple[range, int] | None = None
    when: Callable | None = None


def _is_capped(problem) -> bool:
    return problem.softcap > 0


def _has_dropout(problem) -> bool:
    return problem.dropout_p > 0


def _is_masked(problem) -> bool:
    return problem.masked


def _is_fp8(problem) -> bool:
    return problem.dtype.itemsize == 1


_L2_BYTES = 20 * 2**20
_HOPPER_SOURCE = "benchmarks/results/nvidia-h200/paper-forward.json"
_HOPPER_192 = "benchmarks/results/nvidia-h200/features.json; for 192/128"
_HOPPER_SINGLE = "single runs on an H200, of 192/128 on an H100, see docs/kernels/hopper-forward.md"
_HOPPER_FP8 = "benchmarks/results/nvidia-h200/prefill-fp8.json; see docs/kernels/hopper-forward.md"
# Two consumers: other units than the tensor cores limit calls with a softcap or dropout, and the border between tiles those of
# few keys
_SHORT = HopperConfig(128, 64, 4, _L2_BYTES)
_MIDDLE = HopperConfig(128, 128, 3, _L2_BYTES)
_WIDE = HopperConfig(192, 128, 2, _L2_BYTES)
_FOUR = HopperConfig(256, 64, 8, _L2_BYTES)
# Head dims 192/128. Not below 152, where the rest is 16 columns, which has not run
_DIMS_APART = range(152, 193), 128
# The first row that matches is taken.
HOPPER = (
    HopperRow(64, None, (HopperConfig(192, 128, 3, _L2_BYTES),), _HOPPER_FP8, when=_is_fp8),
    HopperRow(128, None, (HopperConfig(128, 128, 2, _L2_BYTES),), _HOPPER_FP8, when=_is_fp8),
    HopperRow(256, None, (HopperConfig(128, 64, 2, _L2_BYTES),), _HOPPER_FP8, when=_is_fp8),
    HopperRow(64, 1024, (_SHORT,), _HOPPER_SINGLE, when=_is_capped),
    HopperRow(64, None, (_MIDDLE,), _HOPPER_SINGLE, when=_is_capped),
    HopperRow(64, 640, (_SHORT,), _HOPPER_SINGLE, when=_has_dropout),
    HopperRow(64, None, (_MIDDLE,), _HOPPER_SINGLE, when=_has_dropout),
    HopperRow(64, None, (_SHORT, _MIDDLE, _WIDE, _FOUR), _HOPPER_SOURCE),
    HopperRow(128, 1024, (_SHORT,), _HOPPER_SINGLE, when=_is_capped),
    HopperRow(128, 512, (_SHORT,), _HOPPER_SINGLE, when=_has_dropout),
    HopperRow(128, 200, (_SHORT,), _HOPPER_SINGLE, when=_is_masked),
    HopperRow(128, None, (HopperConfig(128, 128, 2, _L2_BYTES),), _HOPPER_SOURCE),
    HopperRow(256, 650, (HopperConfig(128, 64, 2, _L2_BYTES),), _HOPPER_SINGLE, dims=_DIMS_APART, when=_is_masked),
    HopperRow(256, None, (HopperConfig(128, 128, 2, _L2_BYTES, rest_apart=True),), _HOPPER_192, dims=_DIMS_APART),
    HopperRow(256, None, (HopperConfig(128, 64, 2, _L2_BYTES, lazy=True),), _HOPPER_SOURCE),
)


def hopper_configs(problem) -> tuple[HopperConfig, ...]:
    """Configurations of the Hopper forward kernel for a problem, of which `hopper_config` chooses."""
    block_dim, block_dv = padded_dim(max(problem.head_dim, problem.head_dim_v), 2), padded_dim(problem.head_dim_v, 2)
    keys = problem.mean_keys
    return next(row.configs for row in HOPPER
                if block_dim <= row.block_dim and (row.max_keys is None or keys <= row.max_keys)
                and (row.dims is None or problem.head_dim in row.dims[0] and block_dv == row.dims[1])
                and (row.when is None or row.when(problem)))  # fmt: skip


@lru_cache(maxsize=256)
def hopper_config(problem, device) -> HopperConfig:
    """The configuration of the Hopper forward kernel: of the choices, what should end first."""
    choices = hopper_choices(problem, device)
    return choices[0] if len(choices) == 1 else min(choices, key=partial(_forward_us, problem, device))


def hopper_choices(problem, device) -> list[HopperConfig]:
    """Of the configurations for the problem, heads a tile and numbers of parts."""
    whole = [replace(config, heads=heads) for config in hopper_configs(problem)
             for heads in _numbers_of_heads(problem, device, config.tile_m)]  # fmt: skip
    return [replace(config, key_parts=parts) for config in whole for parts in _numbers_of_parts(problem, device, config)]


class _Cost(NamedTuple):
    """Time on one multiprocessor, us."""

    # of 128 queries by 128 keys
    tile: float
    # to begin and end a tile of queries
    begin: float
    # what that takes more under a mask
    masked: float = 0
    # and where it has only a part of the keys
    part: float = 0


# H200, fitted to single runs: by padded head dim and tile, or head dim alone
_COSTS = {
    (64, 128, 64): _Cost(1.4, 0.42, 0.39), (64, 128, 128): _Cost(1.17, 0.83, 0.3, 0.9), (64, 192, 128): _Cost(0.85, 3.25, 2.1),
    (64, 256, 64): _Cost(0.96, 4.45, 0.2), 128: _Cost(1.33, 2), 256: _Cost(2.4, 2),
}  # fmt: skip
# us: what a call takes to launch, and to launch the kernel that merges; bytes a us that this one moves, and at which keys and
# values come
_LAUNCH_US, _MERGE_US, _MERGED_A_US, _READ_A_US = 8.1, 3.4, 2.9e6, 3.4e6
_MOST_KEY_PARTS, _MOST_WAVES_OF_PARTS = 16, 4
# Of the longest tile, by how much programs of a packed call end apart: its tiles come sequence by sequence, the longest of each
# first, so that the last of all are not the shortest
_PACKED_ENDS = 0.2
# By so much a call in parts must end sooner; and one whose heads share tiles, without a mask and with one: H200, us, single
# runs, heads apart and sharing, 2048 keys 404, 414, causal 214, 222, 512 89, 96, but 404 keys of 8 on 1 22.5, 17.1, 700 37.1,
# 29.3, causal 13 x 576 of 4 on 1 of dim 64 140, 121
_PARTS_MARGIN, _HEADS_MARGIN = 1.04, {False: 1.05, True: 1.08}


def _num_tiles(problem, config):
    return problem.batch * problem.num_heads // config.heads * -(-problem.mean_queries // config.queries)


def most_keys(problem, config):
    """Keys that the longest tiles of queries see."""
    if None in problem.window:
        return problem.seqlen_k
    return min(problem.seqlen_k, max(0, sum(problem.window) + config.queries))


class _KeyTiles(NamedTuple):
    """Tiles of keys that the tiles of queries of a call see: how many, and how unlike they are."""

    # of a longest one
    longest: float
    # the share of tiles of queries that are as long
    alike: float
    # by how many the shortest has less
    less: float
    # Behind those alike a tile at the place x, from 0 to 1, has less * x ** power less: 1 where lengths change evenly, below 1
    # where most tiles are short, as in packed calls
    power: float


def _key_tiles(problem, config) -> _KeyTiles:
    """An estimate of what tiles of queries see.

    Under a causal mask tiles see one key at least up to all of them, in a window they are alike but for those that begin with
    the sequence.
    """
    keys, mean, alike = most_keys(problem, config), problem.mean_keys, 0.0
    if None not in problem.window:
        alike = max(0.0, 1 - problem.window[0] / max(problem.seqlen_k, 1))
        mean += config.queries
    # Queries that see nothing would leave less than none to others
    missing = min(max(0, keys - mean) / (1 - alike), 0.9 * keys) if alike < 1 else 0
    less = min(2 * missing, keys)
    return _KeyTiles(keys / config.tile_n, alike, less / config.tile_n, less / missing - 1 if missing else 1)


def _numbers_of_parts(problem, device, config):
    """Parts that the keys of a tile of the Hopper forward may have: several where tiles are too few, or too unlike, to end
    together.

    Not with dropout, whose numbers belong to a head: of out and lse each part has heads of its own.
    """
    tiles = _num_tiles(problem, config)
    if problem.dropout_p or not tiles:
        return range(1, 2)
    waves = _MOST_WAVES_OF_PARTS * programs_in_order(problem.deterministic, device.num_sms) // tiles
    return range(1, 1 + max(1, min(_MOST_KEY_PARTS, waves, int(_key_tiles(problem, config).longest))))


def _forward_us(problem, device, config) -> float:
    """An estimate of what the Hopper forward takes."""
    programs, parts = programs_in_order(problem.deterministic, device.num_sms), config.key_parts
    block_dim = padded_dim(max(problem.head_dim, problem.head_dim_v), 2)
    cost = _COSTS.get((block_dim, config.tile_m, config.tile_n)) or _COSTS[max(128, block_dim)]
    tile_us = cost.tile * config.tile_m * config.tile_n / 128**2
    part_us = cost.begin + problem.masked * cost.masked + (parts > 1) * cost.part
    longest, alike, less, power = _key_tiles(problem, config)
    tiles = _num_tiles(problem, config)
    units = max(1, tiles * parts)

    def unit(number):
        """The time of one, of which so many are longer: some program has two of the first `programs` + 1."""
        shorter = less * (max(0.0, number / units - alike) / max(1e-9, 1 - alike)) ** power
        return -(-max(1, longest - shorter) // parts) * tile_us + part_us

    waves = -(-units // programs)
    # Of many waves, of which all but the last have longer units, the mean tells
    ends = max((i + 1) * unit(i * programs) for i in {*range(min(waves, 4)), waves - 1})
    row_bytes = problem.num_heads_kv * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    read_us = (problem.total_k if problem.varlen else problem.batch * problem.seqlen_k) * row_bytes / _READ_A_US
    ends = max(ends, tiles * ((longest - less * (1 - alike) / (1 + power)) * tile_us + parts * part_us) / programs, read_us)
    if problem.varlen and problem.masked:
        ends += _PACKED_ENDS * unit(0)
    if config.heads > 1:
        ends *= _HEADS_MARGIN[problem.masked]
    if parts == 1:
        return _LAUNCH_US + ends
    out_bytes = problem.batch * problem.mean_queries * problem.num_heads * problem.head_dim_v * problem.out_dtype.itemsize
    return _PARTS_MARGIN * (_LAUNCH_US + ends + _MERGE_US + (parts + 1) * out_bytes / _MERGED_A_US)


def _may_share(problem) -> bool:
    """Whether heads of a group may share tiles: the rows of a consumer hold whole groups. ALiBi and dropout ask for the head of
    each row, which the kernel knows for lse and sinks only."""
    return problem.group_size in (2, 4, 8, 16, 32, 64) and not problem.has_alibi and not problem.dropout_p


def _numbers_of_heads(problem, device, tile_m) -> tuple[int, ...]:
    """How many heads may share the tiles of the Hopper forward: all of a group, or 1, or what ends first.

    All, where queries are few, so that this halves the number of tiles at least, and the tiles are more than can run at once,
    or keys are many, so that parts of them are.
    """
    if not _may_share(problem):
        return (1,)
    group = problem.group_size
    tiles, shared = -(-problem.seqlen_q // tile_m) * group, -(-problem.seqlen_q * group // tile_m)
    in_waves = problem.batch * problem.num_heads_kv * tiles > programs_in_order(problem.deterministic, device.num_sms)
    if (in_waves or problem.seqlen_k >= 1024) and 2 * shared <= tiles:
        return (group,)
    return (1, group) if shared < tiles else (1,)


# Slots of the least box of a page, where TMA loads it
LEAST_PAGE = 16


def page_rows(problem, config) -> int:
    """Slots of a page, or of a part of one, that TMA loads at once for the Hopper forward; 0 where tokens are gathered."""
    size, tile_n = problem.page_size, config.tile_n
    if not size or problem.has_leftpad or size < LEAST_PAGE or size % tile_n and tile_n % size:
        return 0
    return min(size, tile_n)


@dataclass(frozen=True, slots=True)
class ResidentConfig:
    """Of the Hopper forward that has all keys and values of a head in shared memory: see hopper/resident.py.

    keys: rows of their pieces, falling powers of two. tiles: of tile_m queries, that a program takes one after the other.
    programs_per_sm: how many shared memory and registers leave room for.
    """

    keys: tuple[int, ...]
    tiles: int
    programs_per_sm: int

    tile_m = 64
    num_warps = 4
    num_stages = 1

    @property
    def tile_n(self) -> int:
        return sum(self.keys)

    @property
    def queries(self) -> int:
        """Of a program."""
        return self.tiles * self.tile_m


# Pieces of the keys. Each is a product of its own; with more of them, or more keys, registers do not hold a row's weights
RESIDENT_KEYS = ((16,), (32,), (64,), (64, 16), (64, 32), (128,), (128, 16), (128, 32), (128, 64), (128, 64, 16), (256,),
                 (256, 16))  # fmt: skip


def column_boxes(head_dim: int) -> tuple[int, int]:
    """(columns of a box, of the second one where that is narrower, or 0): two at most hold up to 128 columns."""
    wide = min(64, max(16, 1 << (head_dim - 1).bit_length()))
    rest = head_dim - wide
    return wide, max(16, 1 << (rest - 1).bit_length()) if 0 < rest <= 32 else 0


def resident_config(problem, device) -> ResidentConfig | None:
    """The configuration of that kernel, or None where it does not take a problem, or `hopper_config`'s is as fast or faster.

    That is where heads of a group share tiles, and where a multiprocessor has room for one program alone, or for two that
    compute scores which a mask hides.
    """
    if (problem.softcap or problem.has_alibi or problem.has_sinks or problem.dropout_p or problem.softmax_scale <= 0
            or max(problem.head_dim, problem.head_dim_v) > 128 or not 0 < problem.seqlen_k <= sum(RESIDENT_KEYS[-1])
            or 1 not in _numbers_of_heads(problem, device, hopper_configs(problem)[0].tile_m)):  # fmt: skip
        return None
    keys = next(keys for keys in RESIDENT_KEYS if problem.seqlen_k <= sum(keys))
    columns, columns_v = (wide + (rest or wide * (dim > wide))
                          for dim in (problem.head_dim, problem.head_dim_v) for wide, rest in [column_boxes(dim)])  # fmt: skip
    # 1 KiB is the hardware's
    num_bytes = (sum(keys) + 64) * (columns + columns_v) * problem.dtype.itemsize + 1024 + 128
    # Of a thread, as compiled: half a row of scores, half a row of out, weights under way, and others
    registers = max(sum(keys), 64) // 2 + max(columns_v, 64) // 2 + sum(keys[1:]) // 4 + 12
    programs = min((228 << 10) // num_bytes, 512 // registers, 8)
    if programs < 2 or programs < 3 and problem.masked:
        return None
    return ResidentConfig(keys, _resident_tiles(problem, programs, device.num_sms), programs)


def _resident_tiles(problem, programs_per_sm, num_sms) -> int:
    """Tiles of a program, so that all together end soonest; of packed calls a power of two, for which the plan is compiled.

    Fitted to single runs on an H200: a multiprocessor is as fast with three programs as with more, and to begin one takes a
    quarter of the time of a tile.
    """
    heads = problem.batch * problem.num_heads
    tiles = -(-problem.mean_queries // ResidentConfig.tile_m)

    def time(count):
        programs = -(-heads * -(-tiles // count) // num_sms)
        last = programs % programs_per_sm
        return (count + 0.25) * (programs - last + (last and max(last, min(3, programs_per_sm))))

    counts = (1, 2, 4, 8, 16, 32, 64) if problem.varlen else range(1, min(tiles, 64) + 1)
    return min(counts, key=time)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """tile_m rows (queries of all heads of a group) by tile_n keys; programs_per_sm: how many run side by side. whole: no row
    tile is split. one_loop: over the key tiles of all row tiles of a program, else each of these has a loop. keeps_q: that one
    loop keeps the queries of each row tile, and loads none with other key tiles. heads: of keys that a program has at once,
    tile_n keys of each, for warps of its own; then each row tile has a loop."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    whole: bool = False
    one_loop: bool = True
    keeps_q: bool = False
    heads: int = 1


class DecodeRow(NamedTuple):
    """One entry: the largest padded head dim and element size, the most rows it is for, the arch or the name of a device, and
    where it comes from.

    fp8: for caches of 8 bits alone. pages: the most pages that a tile may fill, where it holds pages. when: a function of
    (problem, number of SMs) that tells whether it is for a call; such a row is not for calls with a fixed num_splits, whose
    results depend on no other sequence.
    """

    block_dim: int
    itemsize: int
    # None for any
    max_rows: int | None
    config: DecodeConfig
    # "" for any
    arch: str = ""
    source: str = ""
    pages: int | None = None
    when: Callable | None = None
    fp8: bool = False


def _few_keys(problem, num_sms) -> bool:
    """Of all heads of a full cache, for each SM. Small tiles are faster up to 1,986, slower from 7,944; not tried between."""
    return problem.batch * problem.num_heads_kv * problem.capacity <= 2048 * num_sms


def _many_parts(problem, num_sms) -> bool:
    """Whether two programs an SM, whose loads are faster, would leave more parts to merge than that is worth."""
    row_tiles = problem.batch * problem.num_heads_kv
    return _few_keys(problem, num_sms) and (row_tiles * problem.capacity <= 512 * num_sms or row_tiles <= 2)


def _narrow(problem, num_sms) -> bool:
    return problem.head_dim <= 96


def _narrower(problem, num_sms) -> bool:
    """Faster with a loop for each row tile where the mean length is about a quarter of the longest or more, see
    docs/kernels/decode.md."""
    return max(problem.head_dim, problem.head_dim_v) <= 80


def _many_heads(problem, num_sms) -> bool:
    """Whether several heads for the warps of a program are faster than one for all, whatever the lengths are.

    Not with 64 or 128 columns, where one head is as fast; nor with fewer heads of keys, where ragged lengths make it slower,
    see docs/kernels/decode.md.
    """
    dim, num_heads = max(problem.head_dim, problem.head_dim_v), problem.num_heads_kv
    least = 32 if dim > 80 and dim % 16 == 0 else 16
    return problem.cache_dtype.itemsize == 2 and num_heads >= least and dim <= 160 and dim not in (64, 128)


def _eight_heads(problem, num_sms) -> bool:
    """Of fp8 several heads are as fast as one, and faster where lengths differ; with fewer they are slower there, see
    docs/kernels/decode.md."""
    return problem.num_heads_kv >= 8


def _eight_heads_of_96(problem, num_sms) -> bool:
    return _eight_heads(problem, num_sms) and 80 < max(problem.head_dim, problem.head_dim_v) <= 96


def _two_heads_to_192(problem, num_sms) -> bool:
    """Of fp8 with many keys two heads are faster up to 160 columns, and where rows begin at multiples of 8 bytes; with 192 only
    where heads are many, since ragged lengths of few are slower, see docs/kernels/decode.md."""
    dim = max(problem.head_dim, problem.head_dim_v)
    least = 32 if dim > 160 and dim % 16 == 0 else 8
    return dim <= 192 and problem.num_heads_kv >= least and not _few_keys(problem, num_sms)


def _many_keys_of_192(problem, num_sms) -> bool:
    return 160 < max(problem.head_dim, problem.head_dim_v) <= 192 and not _few_keys(problem, num_sms)


def _a_tile_each(problem, num_sms) -> bool:
    """Few keys, but 128 for each SM."""
    keys = problem.batch * problem.num_heads_kv * problem.capacity
    return _many_parts(problem, num_sms) and keys > 128 * num_sms


def _below_256(problem, num_sms) -> bool:
    return max(problem.head_dim, problem.head_dim_v) < 256


def _in_rows(problem, num_sms) -> bool:
    return not problem.page_size


def _in_rows_or_few_keys(problem, num_sms) -> bool:
    return not problem.page_size or _few_keys(problem, num_sms)


def _whole_is_as_fast(problem, num_sms) -> bool:
    """Whether a program to a row tile ends about as early as equal shares of the whole cache, whose results must be merged.

    A program alone on its SM takes a tile of 64 keys in about a third of the time that it takes all together, two to an SM, to
    read one each, and the merge as long as 4 of these: fitted to single runs on an H200, see docs/kernels/decode.md.
    """
    row_tiles, key_tiles = problem.batch * problem.num_heads_kv, -(-problem.capacity // 64)
    share = -(-row_tiles * key_tiles // (2 * num_sms))
    return _few_keys(problem, num_sms) and 1 < share <= key_tiles <= 3 * share + 4


def _whole_and_alone(problem, num_sms) -> bool:
    """The same, with an SM for each program."""
    return _whole_is_as_fast(problem, num_sms) and problem.batch * problem.num_heads_kv <= num_sms


def _short(problem, num_sms) -> bool:
    """Where a larger tile is mostly empty in many row tiles; of lengths log-uniform to 16k 128 keys are faster."""
    return problem.capacity <= 1024


def _many_row_tiles(problem, num_sms) -> bool:
    """So many, and so short, that programs end together whatever the lengths are."""
    return problem.batch * problem.num_heads_kv >= 15 * num_sms and _short(problem, num_sms)


def _many_groups(problem, num_sms) -> bool:
    """The same of several rows; of one row several heads of a program read fp8 as fast as memory gives it."""
    return _many_row_tiles(problem, num_sms) and problem.seqlen_q * problem.group_size > 2


_DECODE_H200 = "benchmarks/results/nvidia-h200/decode.json"
_DECODE_SINGLE = "single runs on an H200, see docs/kernels/decode.md"
_DECODE_HEADS = "benchmarks/results/nvidia-h200/head-dims-decode.json; others single runs, see docs/kernels/decode.md"
_DECODE_FP8 = "benchmarks/results/nvidia-h200/decode-fp8.json; others single runs, see docs/kernels/decode.md"
_DECODE_BOTH = "single runs on an H100 and an H200, see docs/kernels/decode.md"
_DECODE_SOURCE = "arithmetic: hardly a spill, tiles of all stages in shared memory, of 99 KiB but for one; not measured"
_DECODE_OLDER = "benchmarks/results/nvidia-h200/tiles-a100.json; an A100's instructions on an H200"
# The first row that matches and fits is taken.
DECODE = (
    # Alone on its SM a program has larger tiles, and with 4 warps is faster than with 8
    DecodeRow(128, 2, 16, DecodeConfig(16, 128, 4, 3, 1, whole=True), "sm_90", _DECODE_SINGLE, pages=2, when=_whole_and_alone),
    DecodeRow(128, 2, 16, DecodeConfig(16, 64, 4, 3, 2, whole=True), "sm_90", _DECODE_SINGLE, when=_whole_is_as_fast),
    DecodeRow(64, 2, 16, DecodeConfig(16, 64, 4, 3, 2), "sm_90", _DECODE_SINGLE, when=_few_keys),
    DecodeRow(128, 2, 16, DecodeConfig(16, 128, 4, 3, 1), "sm_90", _DECODE_FP8, pages=2, when=_a_tile_each, fp8=True),
    DecodeRow(128, 2, 16, DecodeConfig(16, 64, 4, 3, 1), "sm_90", _DECODE_BOTH, when=_many_parts),
    DecodeRow(128, 2, 16, DecodeConfig(16, 64, 4, 3, 2), "sm_90", _DECODE_SINGLE, when=_few_keys),
    DecodeRow(128, 2, 16, DecodeConfig(16, 64, 4, 3, 2, whole=True), "sm_90", _DECODE_SINGLE, when=_many_groups, fp8=True),
    DecodeRow(128, 2, 16, DecodeConfig(16, 32, 4, 3, 2, heads=4), "sm_90", _DECODE_FP8, when=_eight_heads_of_96, fp8=True),
    DecodeRow(128, 2, 16, DecodeConfig(16, 32, 2, 3, 4, heads=2), "sm_90", _DECODE_FP8, when=_eight_heads, fp8=True),
    DecodeRow(128, 2, 16, DecodeConfig(16, 128, 4, 3, 2), "sm_90", _DECODE_FP8, fp8=True),
    DecodeRow(256, 2, 16, DecodeConfig(16, 16, 2, 3, 4, heads=2), "sm_90", _DECODE_FP8, when=_two_heads_to_192, fp8=True),
    DecodeRow(256, 2, 16, DecodeConfig(16, 128, 4, 2, 2), "sm_90", _DECODE_FP8, when=_many_keys_of_192, fp8=True),
    DecodeRow(256, 2, 16, DecodeConfig(16, 64, 4, 3, 2), "sm_90", _DECODE_FP8, fp8=True),
    DecodeRow(128, 2, 32, DecodeConfig(32, 64, 4, 3, 2), "sm_90", _DECODE_FP8, fp8=True),
    DecodeRow(64, 2, 16, DecodeConfig(16, 32, 4, 3, 2, heads=4), "sm_90", _DECODE_HEADS, when=_many_heads),
    DecodeRow(256, 2, 16, DecodeConfig(16, 16, 4, 3, 2, heads=4), "sm_90", _DECODE_HEADS, when=_many_heads),
    DecodeRow(128, 2, 16, DecodeConfig(16, 64, 4, 3, 2, whole=True), "sm_90", _DECODE_SINGLE, when=_many_row_tiles),
    DecodeRow(64, 2, 16, DecodeConfig(16, 128, 4, 3, 2), "sm_90", _DECODE_BOTH, pages=2),
    DecodeRow(128, 2, 16, DecodeConfig(16, 64, 4, 3, 2, one_loop=False), "sm_90", _DECODE_SINGLE, when=_narrower),
    # On an H200 12% faster than 128 keys, on an H100 equal
    DecodeRow(128, 2, 16, DecodeConfig(16, 64, 4, 3, 2), "sm_90", _DECODE_BOTH, when=_narrow),
    DecodeRow(128, 2, 16, DecodeConfig(16, 64, 4, 3, 2), "sm_90", _DECODE_SINGLE, when=_short),
    DecodeRow(128, 2, 16, DecodeConfig(16, 128, 8, 3, 1, keeps_q=True), "H100", _DECODE_BOTH, when=_in_rows),
    DecodeRow(128, 2, 16, DecodeConfig(16, 128, 8, 3, 1), "sm_90", _DECODE_H200, pages=1),
    # From here on pages that are smaller: of 64 slots, single runs, 7% faster for ragged lengths, with 8 rows 3% slower
    DecodeRow(128, 2, 4, DecodeConfig(16, 64, 4, 3, 2), "sm_90", _DECODE_H200),
    DecodeRow(128, 2, 16, DecodeConfig(16, 128, 8, 3, 1), "sm_90", _DECODE_H200, pages=2),
    DecodeRow(128, 2, 16, DecodeConfig(16, 64, 4, 3, 2), "sm_90", _DECODE_H200),
    # Of two blocks of columns, or with columns of zeros, see `blocks_of`
    DecodeRow(256, 2, 16, DecodeConfig(16, 32, 4, 3, 2), "sm_90", _DECODE_SINGLE, when=_below_256),
    DecodeRow(256, 2, 16, DecodeConfig(16, 64, 4, 3, 1), "sm_90", _DECODE_BOTH, when=_in_rows_or_few_keys),
    # Head dim 64 is faster with 64 rows
    DecodeRow(64, 2, None, DecodeConfig(64, 64, 4, 3, 2), "sm_90", _DECODE_BOTH),
    DecodeRow(128, 2, 32, DecodeConfig(32, 64, 4, 3, 1), "sm_90", _DECODE_BOTH, when=_many_parts),
    *(
        DecodeRow(block_dim, itemsize, max_rows, DecodeConfig(*config), arch, source, when=when)
        for block_dim, itemsize, max_rows, arch, config, source, when in [
            (256, 2, 16, "sm_90", (16, 64, 4, 2, 2), _DECODE_SOURCE, None),
            (128, 2, None, "sm_90", (64, 64, 4, 3, 2), _DECODE_SOURCE, None),
            (256, 2, None, "sm_90", (64, 64, 8, 2, 1), _DECODE_SOURCE, None),
            (64, 2, 16, "", (16, 64, 4, 3, 2), _DECODE_SOURCE, None),
            # As a Hopper has them for few rows in pages; two to an SM of 164 and of 100 KiB
            (128, 2, 16, "", (16, 64, 4, 3, 2), _DECODE_OLDER, None),
            (128, 2, 16, "", (16, 32, 4, 3, 2), _DECODE_SOURCE, None),
            (256, 2, 16, "", (16, 32, 4, 3, 2), _DECODE_OLDER, _below_256),
            # One loop takes 1.2 to 1.35 of the time of one for each row tile, with two stages
            (256, 2, 16, "", (16, 32, 4, 2, 2, False, False), _DECODE_OLDER, None),
            (128, 2, None, "", (64, 32, 4, 3, 2), _DECODE_SOURCE, None),
            (256, 2, None, "", (64, 32, 8, 2, 1), _DECODE_SOURCE, None),
            (256, 4, None, "", (16, 16, 4, 2, 1), _DECODE_SOURCE, None),
        ]
    ),
)


def cuts_keys(problem, device) -> bool:
    """Whether a forward has so few queries that the portable kernel of caches, which cuts keys into parts, is for it.

    On Hopper those fill less than half of a tile, since its own kernel cuts keys too (`_forward_us`). That is where three
    quarters of a tile of 64 rows, queries of all heads of a group, are empty, of many keys half, or where tiles leave three
    quarters of the multiprocessors without work, of more keys half of them. problem: AttentionProblem.

    Time over that of the other forward (H200, bf16, single runs, cold L2; batch, queries, keys, heads, head dim): 1, 1, 64k,
    32 on 8, 128 0.11; 64, 4, 2k, 16, 128 1.00; 64, 16, 2k, 8, 128 1.01; 64, 16, 1k, 12, 64 0.96; 64, 32, 1k, 12, 64 1.07;
    16, 32, 4k, 12, 64 0.86; 2, 128, 1k, 8, 128 1.01; 4, 64, 1k, 16, 64 1.09; 4, 64, 2k, 16, 64 0.83; 1, 512, 3k, 8, 64 0.66;
    1, 512, 32k, 8, 128 0.67; 8, 64, 4k, 16, 64 1.13. Not taken, although less: 1, 512, 32k, 16, 128 0.84; but 1, 1024, 32k, 8,
    128 1.25.
    """
    keys = problem.mean_keys
    if problem.varlen or problem.dropout_p or keys < 1024:
        return False
    rows = problem.seqlen_q * problem.group_size
    num_tiles = problem.batch * problem.num_heads_kv * -(-rows // 64)
    return rows <= (32 if keys >= 4096 else 16) or (2 if keys >= 2048 else 4) * num_tiles <= device.num_sms


def decode_fits(config, problem, device) -> bool:
    """Whether the tiles of a CacheProblem fit in a block's shared memory."""
    itemsize, of_out = problem.cache_dtype.itemsize, problem.out_dtype.itemsize
    blocks = [padded_dim(dim, 2) for dim in (problem.head_dim, problem.head_dim_v)]
    tile = replace(config, tile_n=config.heads * config.tile_n)
    # fp8 becomes fp16 in registers, of which wgmma takes none for a right operand
    in_fp16 = tile.tile_n * sum(blocks) if config.tile_m >= ROWS_OF_WGMMA else 0
    more = (of_out - itemsize) * config.tile_m * blocks[0] + (of_out > itemsize) * of_out * in_fp16
    return shared_bytes("forward", tile, *blocks, itemsize) + more <= device.smem_bytes


def decode_config(problem, device) -> DecodeConfig | None:
    """The configuration of the kernel on a cache, or None where nothing fits. problem: CacheProblem."""
    itemsize = max(problem.cache_dtype.itemsize, problem.out_dtype.itemsize)
    block_dim = padded_dim(max(problem.head_dim, problem.head_dim_v), 2)
    rows = problem.seqlen_q * problem.group_size
    for row in DECODE:
        if (
            row.arch in (device.arch, device.name, "")
            and block_dim <= row.block_dim
            and itemsize <= row.itemsize
            and problem.num_heads_kv % row.config.heads == 0
            and (row.max_rows is None or rows <= row.max_rows)
            and (not row.fp8 or problem.cache_dtype.itemsize == 1)
            and (row.pages is None or not problem.page_size or 0 < problem.pages_of_tile(row.config.tile_n) <= row.pages)
            # lengths are on the device
            and (row.when is None or not problem.num_splits and row.when(problem, device.num_sms))
            and decode_fits(row.config, problem, device)
        ):
            return row.config
    return None
