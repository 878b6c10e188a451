import torch


def backward(q, k, v, out, lse, dout, causal=False, tile_m=64, tile_n=64):
    seqlen_q, seqlen_k, scale = q.shape[0], k.shape[0], q.shape[1] ** -0.5
    shift = seqlen_k - seqlen_q
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (dout * out).sum(1)
    # A row that sees no key: with lse = inf its p is 0 everywhere, where exp(-inf - -inf) would be nan.
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    for begin in range(0, seqlen_k, tile_n):
        cols = slice(begin, min(begin + tile_n, seqlen_k))
        # The first query that sees the first key of the tile, down to a multiple of tile_m
        first = max(0, begin - shift) // tile_m * tile_m if causal else 0
        for start in range(first, seqlen_q, tile_m):
            rows = slice(start, min(start + tile_m, seqlen_q))
            scores = q[rows] @ k[cols].T * scale
            if causal:
                col, row = torch.arange(cols.start, cols.stop), torch.arange(rows.start, rows.stop)
                scores = scores.masked_fill(col > row[:, None] + shift, -torch.inf)
            p = torch.exp(scores - lse[rows, None])
            dp = dout[rows] @ v[cols].T
            dscores = p * (dp - delta[rows, None])
            dv[cols] += p.T @ dout[rows]
            dk[cols] += scale * dscores.T @ q[rows]
            dq[rows] += scale * dscores @ k[cols]
    return dq, dk, dv
