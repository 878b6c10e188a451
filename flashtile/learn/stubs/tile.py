"""Choose a tile by arithmetic, before anything is compiled.

A thread block of the forward kernel holds one tile of q, and num_stages tiles of k and v, in shared memory; in
registers, in fp32, the accumulator (tile_m, head_dim) and the scores (tile_m, tile_n). Give both sizes as functions,
then choose a tile for an H100 (sm_90: 228 KiB of shared memory an SM, of which each block costs 1 KiB more than it
asks for; 65536 registers an SM, at most 255 a thread) with head dim 128 in bf16 so that TWO blocks run on an SM:
while one waits for its softmax, the other keeps the tensor cores busy.

Guide: part 4, "A tile by arithmetic". Done when: both functions agree with `flashtile.tiles`, two blocks fit, at
least a third of the registers is left for everything else, and the tile is at least 64 queries by 32 keys with 2
stages.
"""

# 4 warps are 128 threads
TILE = {"tile_m": 0, "tile_n": 0, "num_warps": 4, "num_stages": 2}


def shared_bytes(tile_m: int, tile_n: int, num_stages: int, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory of a block."""
    raise NotImplementedError


def tile_registers(tile_m: int, tile_n: int, num_warps: int, head_dim: int) -> int:
    """Registers (of 4 bytes) that each thread needs for the accumulator and the scores."""
    raise NotImplementedError
