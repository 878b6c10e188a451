import torch


def absorbed(q, c, w_k, w_v, softmax_scale):
    q_latent = torch.einsum("hd,hrd->hr", q, w_k)
    weights = torch.softmax(q_latent @ c.T * softmax_scale, 1)
    return torch.einsum("hr,hrd->hd", weights @ c, w_v)
