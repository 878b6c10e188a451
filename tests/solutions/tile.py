TILE = {"tile_m": 128, "tile_n": 32, "num_warps": 8, "num_stages": 2}


def shared_bytes(tile_m, tile_n, num_stages, head_dim, itemsize):
    return (tile_m + 2 * num_stages * tile_n) * head_dim * itemsize


def tile_registers(tile_m, tile_n, num_warps, head_dim):
    return tile_m * (head_dim + tile_n) // (32 * num_warps)
