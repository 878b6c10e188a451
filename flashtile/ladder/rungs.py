"""The table of rungs: what each adds, what it takes, its tiles, its shared memory and how many blocks share an SM.

Imports no torch: `flashtile ladder` lists it at once.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from flashtile.errors import UnsupportedError, explain
from flashtile.tiles import TileConfig

FOLDER = Path(__file__).parent
# Of one SM. CUDA C++ programming guide, "Technical specifications per compute capability".
REGISTERS = 64 << 10
MAX_THREADS = {80: 2048, 90: 2048, 100: 2048, 103: 2048}
MAX_THREADS_ELSE = 1536
MAX_BLOCKS = {86: 16, 89: 24, 120: 24, 121: 24}
MAX_BLOCKS_ELSE = 32
# The system keeps so much shared memory of each block to itself.
RESERVED_BYTES = 1 << 10


@dataclass(frozen=True)
class Rung:
    """One implementation.

    configs: tiles by head dim, the default for each head dim that it takes; empty where a tier has its own. file: relative to
    the package's folder. dtypes: names as on the command line.
    """

    number: int
    name: str
    idea: str
    file: str
    dtypes: tuple[str, ...]
    configs: dict[int, TileConfig] = field(default_factory=dict)
    tier: str | None = None
    direction: str = "forward"

    @property
    def path(self) -> Path:
        return FOLDER.parent / self.file

    @property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")


def _any_dim(*config):
    return {dim: TileConfig(*config) for dim in range(8, 257, 8)}


_FP32, _HALF = ("fp32",), ("fp16", "bf16")
_64 = TileConfig(128, 64, 8, 1)
RUNGS = {
    rung.number: rung
    for rung in (
        Rung(1, "naive", "the definition, three kernels, scores in memory", "ladder/rung01_naive.cu", _FP32,
             _any_dim(16, 16, 8, 1)),
        Rung(2, "online softmax", "one kernel, a block a query; no score leaves the chip", "ladder/rung02_online_softmax.cu",
             _FP32, {dim: TileConfig(1, dim, dim // 32, 1) for dim in (32, 64, 128, 256)}),
        Rung(3, "FlashAttention-1", "tiles in shared memory; keys outside, out rescaled in memory", "ladder/rung03_fa1.cu",
             _FP32, {64: TileConfig(64, 64, 8, 1), 128: TileConfig(64, 64, 8, 1)}),
        Rung(4, "FlashAttention-2", "queries outside; out stays in registers until it is done", "ladder/rung04_fa2.cu", _FP32,
             {64: TileConfig(64, 64, 8, 1), 128: TileConfig(64, 64, 8, 1)}),
        Rung(5, "tensor cores", "mma.sync and ldmatrix in fp16; softmax and p in registers", "ladder/rung05_tensor_cores.cu",
             ("fp16",), {64: _64}),
        Rung(6, "swizzle", "no two threads meet in a bank of shared memory", "ladder/rung06_swizzle.cu", ("fp16",), {64: _64}),
        Rung(7, "cp.async", "the next tile arrives while this one is computed", "ladder/rung07_cp_async.cu", ("fp16",),
             {64: TileConfig(128, 64, 8, 2)}),
        Rung(8, "larger tiles", "32 queries a warp; head dims 64 and 128; bf16", "ladder/rung08_larger_tiles.cu", _HALF,
             {64: TileConfig(128, 64, 4, 2), 128: TileConfig(128, 64, 8, 2)}),
        Rung(9, "backward", "dq, dk, dv from out and lse; scores computed again", "ladder/rung09_backward.cu", _HALF,
             {64: TileConfig(64, 64, 4, 1), 128: TileConfig(64, 64, 4, 1)}, direction="backward"),
        Rung(10, "Triton", "the portable tier: tiles in Python, on Hopper by wgmma", "portable/forward.py", _HALF,
             tier="portable"),
        Rung(11, "Gluon", "the Hopper tier: TMA, wgmma, warps with different roles", "hopper/forward.py", _HALF,
             tier="hopper"),
    )
}  # fmt: skip


def get(number: int) -> Rung:
    """The rung of a number.

    Raises:
        UnsupportedError: there is none.
    """
    if number not in RUNGS:
        raise UnsupportedError(explain("rung", f"a number from 1 to {max(RUNGS)}", number))
    return RUNGS[number]


def shared_bytes(rung: Rung, config: TileConfig, head_dim: int, kernel: str = "") -> int:
    """Dynamic shared memory of a block of the main kernels, or of one by name; rungs 1 and 2 have some static bytes instead."""
    m, n, stages = config.tile_m, config.tile_n, config.num_stages
    if rung.number in (3, 4):
        # q, k, v and p in fp32, each row 4 numbers longer
        return 4 * ((m + 2 * n) * (head_dim + 4) + m * (n + 4))
    if rung.number in (5, 6, 7, 8):
        return 2 * head_dim * (m + 2 * stages * n)
    if rung.number == 9 and kernel != "delta":
        # two tiles stay and two stream; lse and delta of a tile
        return 4 * 2 * head_dim * m + 2 * 4 * m
    return 0


def refuses_config(rung: Rung, config: TileConfig, head_dim: int, device) -> str | None:
    """Why a rung does not run with these tiles on a device, or None."""
    m, n, warps, stages = config.tile_m, config.tile_n, config.num_warps, config.num_stages
    if min(m, n, warps, stages) < 1 or warps > 32:
        return f"tiles {m}x{n} with {warps} warps and {stages} stages: expected at least 1 of each, and at most 32 warps"
    # Each thread copies as many pieces of 16 bytes.
    keys_fit, keys = n % 16 == 0 and n * head_dim % (256 * warps) == 0, "a multiple of 16 and of 256 x warps / head dim"
    rules = {
        1: (m * n == 32 * warps, "tile_m x tile_n threads, so 32 x warps of them"),
        2: ((m, n, 32 * warps) == (1, head_dim, head_dim), "tile_m 1, and tile_n and 32 x warps that are the head dim"),
        3: (warps == 8 and m % 16 == 0 and n % 16 == 0, "8 warps, and tiles that are multiples of 16"),
        5: (m == 16 * warps and keys_fit, f"tile_m of 16 x warps, and tile_n {keys}"),
        7: (m == 16 * warps and keys_fit and stages >= 2, f"tile_m of 16 x warps, tile_n {keys}, 2 stages or more"),
        8: (m % (16 * warps) == 0 and keys_fit and stages >= 2,
            f"tile_m a multiple of 16 x warps, tile_n {keys}, 2 stages or more"),
        9: (m == n == 16 * warps, "tile_m and tile_n of 16 x warps"),
    }  # fmt: skip
    fits, words = rules[{4: 3, 6: 5}.get(rung.number, rung.number)]
    if not fits:
        return f"tiles {m}x{n} with {warps} warps and {stages} stages: expected {words}"
    if rung.number not in (7, 8) and stages != 1:
        return f"{stages} stages: this rung has one"
    needed = shared_bytes(rung, config, head_dim)
    if needed > device.smem_bytes:
        return f"tiles {m}x{n} need {needed / 1024:.0f} KiB of shared memory, a block has {device.smem_bytes >> 10}"
    return None


def refuses_options(problem) -> str | None:
    """Why no rung takes an AttentionProblem, or None: they are called with a causal mask or without, and nothing else."""
    if problem.window not in ((None, None), (None, 0)):
        return "takes no mask but the causal one, no window"
    if problem.softcap or problem.dropout_p or problem.has_alibi or problem.has_sinks:
        return "takes no softcap, dropout, ALiBi or sinks"
    return None


def refuses(rung: Rung, problem, device, config: TileConfig | None = None) -> str | None:
    """Why a rung of the ladder does not take an AttentionProblem, or None. Rungs 10 and 11: ask the tier."""
    if device.sm < 80:
        return f"needs sm_80 or newer, the device is {device.arch}"
    dtype = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(str(problem.dtype).removeprefix("torch."))
    if dtype not in rung.dtypes:
        return f"takes {' and '.join(rung.dtypes)}, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.head_dim not in rung.configs:
        dims = "8 to 256 in steps of 8" if len(rung.configs) > 8 else " and ".join(map(str, rung.configs))
        return f"takes a head dim of {dims}, not {problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        return f"takes one head dim for q, k and v, not {problem.head_dim} and {problem.head_dim_v}"
    if problem.num_heads != problem.num_heads_kv:
        return f"takes as many key-value heads as query heads, not {problem.num_heads_kv} for {problem.num_heads}"
    if problem.varlen or problem.seqlen_q != problem.seqlen_k:
        return "takes self-attention: as many queries as keys, not packed"
    if reason := refuses_options(problem):
        return reason
    if not problem.softmax_scale > 0:
        return f"takes a softmax_scale above 0, not {problem.softmax_scale}"
    if max(problem.batch, problem.num_heads) > 65535 or rung.number == 1 and problem.batch * problem.num_heads > 65535:
        return "a grid has at most 65535 blocks along y and z: too many heads or sequences"
    return refuses_config(rung, config or rung.configs[problem.head_dim], problem.head_dim, device)


def macros(config: TileConfig, head_dim: int, *, causal: bool, bf16: bool) -> dict:
    """The #defines that the files of rungs ask for."""
    return {
        "HEAD_DIM": head_dim, "TILE_M": config.tile_m, "TILE_N": config.tile_n, "NUM_WARPS": config.num_warps,
        "NUM_STAGES": config.num_stages, "IS_CAUSAL": causal, "IS_BF16": bf16,
    }  # fmt: skip


@dataclass(frozen=True)
class Occupancy:
    """Blocks that share an SM, what allows no more, and the share of the SM's threads that they are."""

    blocks: int
    limit: str
    threads: float


def occupancy(num_warps: int, registers: int, shared: int, device) -> Occupancy:
    """How many blocks of num_warps warps fit on an SM of a device.

    Args:
        registers: of a thread. shared: bytes of shared memory of a block.
    """
    # A warp gets registers in units of 256.
    of_warp = -(-32 * registers // 256) * 256
    max_threads = MAX_THREADS.get(device.sm, MAX_THREADS_ELSE)
    allowed = {
        "registers": REGISTERS // (of_warp * num_warps),
        # What a block may have at most leaves RESERVED_BYTES of the SM's own.
        "shared memory": (device.smem_bytes + RESERVED_BYTES) // (shared + RESERVED_BYTES),
        "threads": max_threads // (32 * num_warps),
        "blocks": MAX_BLOCKS.get(device.sm, MAX_BLOCKS_ELSE),
    }
    limit = min(allowed, key=allowed.get)
    return Occupancy(allowed[limit], limit, allowed[limit] * 32 * num_warps / max_threads)


def places(rung: Rung, rows: int, head_dim: int = 64) -> list[int]:
    """Where a tile's pieces of 8 elements lie in shared memory, row by row: the `at` of the rung's file."""
    layout = re.search(r"int at\(int row, int col\) \{ return (.*); \}", rung.source)[1]
    return [_value(layout, HEAD_DIM=head_dim, row=row, col=col) for row in range(rows) for col in range(0, head_dim, 8)]


def bank_cycles(rung: Rung, head_dim: int = 64) -> tuple[int, int] | None:
    """Cycles of shared memory: one 8 x 8 matrix of ldmatrix, and 8 threads that store 16 bytes each of a tile. 1 is the least.

    Computed from the file's own `at` and load_tile; None for rungs that have none.
    """
    if rung.number not in (5, 6, 7, 8, 9):
        return None
    pieces_a_row = head_dim // 8
    pieces = places(rung, 64, head_dim)
    row, col = re.search(r"const int row = (.*), col = (.*);", rung.source).groups()
    threads = [(_value(row, HEAD_DIM=head_dim, i=i), _value(col, HEAD_DIM=head_dim, i=i)) for i in range(8)]
    stored = [pieces[row * pieces_a_row + col // 8] for row, col in threads]
    return _cycles(pieces[0 : 8 * pieces_a_row : pieces_a_row]), _cycles(stored)


def _value(expression, **names):
    # The operators of these expressions mean the same in C and Python, but for / of ints.
    return eval(expression.replace("/", "//"), names)


def _cycles(elements):
    """Most of 8 pieces of 16 bytes, given by their first element, that lie in the same 4 of the 32 banks."""
    banks = [element * 2 // 16 % 8 for element in elements]
    return max(map(banks.count, banks))
