import torch


def forward(q, k, v, dropout_p, keep, tile_n=64):
    row_max, row_sum, acc = q.new_full((q.shape[0],), -torch.inf), q.new_zeros(q.shape[0]), torch.zeros_like(q)
    for begin in range(0, k.shape[0], tile_n):
        cols = slice(begin, min(begin + tile_n, k.shape[0]))
        scores = q @ k[cols].T * q.shape[1] ** -0.5
        new_max = torch.maximum(row_max, scores.amax(1))
        correction, p = torch.exp(row_max - new_max), torch.exp(scores - new_max[:, None])
        # The denominator is that of the softmax, which drops nothing.
        row_max, row_sum = new_max, row_sum * correction + p.sum(1)
        acc = acc * correction[:, None] + (p * keep(cols)) @ v[cols]
    return acc / (row_sum * (1 - dropout_p))[:, None], row_max + row_sum.log()
