import torch


def forward(q, k, v, tile_m=64, tile_n=64):
    out, lse = torch.empty_like(q), q.new_empty(q.shape[0])
    for start in range(0, q.shape[0], tile_m):
        rows = slice(start, min(start + tile_m, q.shape[0]))
        row_max, row_sum, acc = q.new_full((rows.stop - start,), -torch.inf), q.new_zeros(rows.stop - start), 0.0
        for begin in range(0, k.shape[0], tile_n):
            cols = slice(begin, min(begin + tile_n, k.shape[0]))
            scores = q[rows] @ k[cols].T * q.shape[1] ** -0.5
            new_max = torch.maximum(row_max, scores.amax(1))
            correction, p = torch.exp(row_max - new_max), torch.exp(scores - new_max[:, None])
            row_max, row_sum = new_max, row_sum * correction + p.sum(1)
            acc = acc * correction[:, None] + p @ v[cols]
        out[rows], lse[rows] = acc / row_sum[:, None], row_max + row_sum.log()
    return out, lse
