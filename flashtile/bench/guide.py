"""Figures of the FlashAttention-2 benchmarking guide, to stand beside measured ones.

Its GPU is an L20, and it doesn't say how its values were measured: they are claims to compare with, not results.

Configurations are (batch, seqlen, heads, head dim); times are in ms, memory in MB.
"""

# configuration -> standard attention, FlashAttention-2, speed-up, memory reduction
FORWARD = {
    (1, 32, 4, 16): (0.15, 0.08, 1.88, 2.1),
    (1, 64, 8, 32): (0.42, 0.18, 2.33, 2.5),
    (2, 128, 8, 32): (1.25, 0.45, 2.78, 2.8),
    (4, 256, 16, 64): (8.32, 2.85, 2.92, 3.2),
    (8, 512, 16, 64): (32.15, 9.87, 3.26, 3.5),
    (16, 512, 32, 64): (128.42, 35.21, 3.65, 3.8),
    (32, 1024, 32, 128): (512.35, 125.67, 4.08, 4.2),
    (64, 1024, 64, 128): (2048.92, 458.23, 4.47, 4.5),
}
# configuration -> forward, backward, their ratio, total
BACKWARD = {
    (1, 32, 4, 16): (0.08, 0.12, 1.5, 0.20),
    (1, 64, 8, 32): (0.18, 0.28, 1.56, 0.46),
    (2, 128, 8, 32): (0.45, 0.72, 1.6, 1.17),
    (4, 256, 16, 64): (2.85, 4.58, 1.61, 7.43),
    (8, 512, 16, 64): (9.87, 15.92, 1.61, 25.79),
}
# seqlen -> standard, FlashAttention-2, reduction
MEMORY = {
    64: (0.5, 0.2, 2.5), 128: (2.0, 0.7, 2.9), 256: (8.0, 2.5, 3.2), 512: (32.0, 9.1, 3.5), 1024: (128.0, 30.5, 4.2),
    2048: (512.0, 102.4, 5.0),
}  # fmt: skip
# mode -> share of the theoretical bandwidth
BANDWIDTH = {"fwd": 0.708, "bwd": 0.631, "fwd_bwd": 0.669}
# batch -> speed-up over batch 1, efficiency; called strong scaling there, on one GPU
BATCH_SCALING = {1: (1.00, 1.0), 2: (1.85, 0.925), 4: (3.42, 0.855), 8: (6.12, 0.765), 16: (10.24, 0.64)}
# share of 1 x 32 x 4 x 16 a GPU, times GPUs -> speed-up, efficiency
WEAK_SCALING = {1: (1.00, 1.0), 2: (1.92, 0.96), 4: (3.68, 0.92), 8: (6.88, 0.86)}


def key(config: dict) -> tuple[int, int, int, int] | None:
    """The (batch, seqlen, heads, head dim) of a record's config, None for a kind of case that the guide has not."""
    plain = not config["causal"] and not config["softcap"] and config["window"] == [None, None]
    plain = plain and not config.get("dropout") and not config.get("varlen") and not config.get("alibi")
    square = config["seqlen_q"] == config["seqlen_k"] and config["nheads"] == config["nheads_kv"]
    if not plain or not square or config["headdim"] != config["headdim_v"]:
        return None
    return config["batch"], config["seqlen_q"], config["nheads"], config["headdim"]
