import torch


def update(row_max, row_sum, scores):
    new_max = torch.maximum(row_max, scores.amax(1))
    # A row that has seen no key: -inf - -inf would be nan.
    pivot = torch.where(new_max == -torch.inf, 0.0, new_max)
    p = torch.exp(scores - pivot[:, None])
    correction = torch.exp(row_max - pivot)
    return new_max, row_sum * correction + p.sum(1), p, correction
