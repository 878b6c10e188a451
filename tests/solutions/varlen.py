import torch


def schedule(cu_seqlens_q, cu_seqlens_k, tile_m, causal):
    seqlen_q, seqlen_k = cu_seqlens_q.diff().long(), cu_seqlens_k.diff().long()
    num_tiles = (seqlen_q + tile_m - 1) // tile_m
    sequences = torch.repeat_interleave(torch.arange(len(seqlen_q)), num_tiles)
    # Tiles of all sequences before it
    before = num_tiles.cumsum(0) - num_tiles
    first_rows = (torch.arange(len(sequences)) - before[sequences]) * tile_m
    keys = seqlen_k[sequences]
    if causal:
        hidden = (seqlen_q[sequences] - first_rows - tile_m).clamp(min=0)
        keys = (keys - hidden).clamp(min=0)
    order = torch.argsort(keys, descending=True)
    return sequences[order], first_rows[order]
