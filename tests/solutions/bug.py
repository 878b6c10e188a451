import torch


def load_tile(x, begin, size):
    tile = x.new_zeros(size, x.shape[1])
    rows = x[begin : begin + size]
    tile[: rows.shape[0]] = rows
    return tile


def forward(q, k, v, tile_n=64):
    row_max, row_sum, acc = q.new_full((q.shape[0],), -torch.inf), q.new_zeros(q.shape[0]), torch.zeros_like(q)
    for begin in range(0, k.shape[0], tile_n):
        scores = q @ load_tile(k, begin, tile_n).T * q.shape[1] ** -0.5
        # A row of zeros is not an absent key: its score is 0, and exp(0 - row_max) joins the denominator.
        scores = scores.masked_fill(torch.arange(begin, begin + tile_n) >= k.shape[0], -torch.inf)
        new_max = torch.maximum(row_max, scores.amax(1))
        correction, p = torch.exp(row_max - new_max), torch.exp(scores - new_max[:, None])
        row_max, row_sum = new_max, row_sum * correction + p.sum(1)
        acc = acc * correction[:, None] + p @ load_tile(v, begin, tile_n)
    return acc / row_sum[:, None], row_max + row_sum.log()
