import torch


def forward(q, k, v, tile_m=64, tile_n=64):
    seqlen_q, seqlen_k = q.shape[0], k.shape[0]
    shift = seqlen_k - seqlen_q
    out, lse = torch.empty_like(q), q.new_empty(seqlen_q)
    for start in range(0, seqlen_q, tile_m):
        rows = torch.arange(start, min(start + tile_m, seqlen_q))
        row_max, row_sum = q.new_full((len(rows),), -torch.inf), q.new_zeros(len(rows))
        acc = q.new_zeros(len(rows), q.shape[1])
        # The last query of the tile sees keys up to its own position.
        stop = min(seqlen_k, int(rows[-1]) + shift + 1)
        for begin in range(0, stop, tile_n):
            cols = torch.arange(begin, min(begin + tile_n, seqlen_k))
            scores = q[rows] @ k[cols].T * q.shape[1] ** -0.5
            scores = scores.masked_fill(cols > rows[:, None] + shift, -torch.inf)
            new_max = torch.maximum(row_max, scores.amax(1))
            pivot = torch.where(new_max == -torch.inf, 0.0, new_max)
            correction, p = torch.exp(row_max - pivot), torch.exp(scores - pivot[:, None])
            row_max, row_sum = new_max, row_sum * correction + p.sum(1)
            acc = acc * correction[:, None] + p @ v[cols]
        out[rows] = acc / torch.where(row_sum == 0, 1.0, row_sum)[:, None]
        lse[rows] = row_max + row_sum.log()
    return out, lse
