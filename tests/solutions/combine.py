import torch


def combine(outs, lses):
    lse_max = lses.amax(0)
    pivot = torch.where(lse_max == -torch.inf, 0.0, lse_max)
    weights = torch.exp(lses - pivot)
    total = weights.sum(0)
    out = (weights[..., None] * outs).sum(0) / torch.where(total == 0, 1.0, total)[:, None]
    return out, lse_max + total.log()
