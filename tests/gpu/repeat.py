"""A fixed order of the backward 1,000 times a shape, with another stream's work beside every second one: the same bits.

    python tests/gpu/repeat.py
"""

import torch

import flashtile

# head_dim, head_dim_v, seqlen, batch, heads, heads_kv, keys of a window to the left, or None
SHAPES = [
    (64, 64, 777, 3, 16, 16, None), (128, 128, 1024, 4, 16, 16, None), (256, 256, 1000, 2, 24, 24, None),
    (192, 128, 900, 2, 12, 12, None), (128, 128, 1500, 2, 32, 8, None), (256, 256, 2048, 1, 5, 5, None),
    (64, 64, 2000, 2, 9, 9, 300),
]  # fmt: skip


def repeated(head_dim, head_dim_v, seqlen, batch, heads, heads_kv, left):
    """In how many of 1,000 runs a gradient differs from the first run's."""
    torch.manual_seed(0)
    shapes = (heads, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v)
    q, k, v = (torch.randn(batch, seqlen, *x, device="cuda", dtype=torch.bfloat16, requires_grad=True) for x in shapes)
    out = flashtile.attention(q, k, v, causal=left is None, window=(left, None if left is None else 0), deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    beside, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda").bfloat16()
    differ = torch.zeros((), device="cuda", dtype=torch.int64)
    for i in range(1000):
        if i % 2:
            with torch.cuda.stream(beside):
                x @ x
        now = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for got, want in zip(now, first):
            differ += (got.view(torch.int16) != want.view(torch.int16)).any()
    return int(differ)


def main():
    differ = {shape: repeated(*shape) for shape in SHAPES}
    print(*(f"{shape}: {count} differ" for shape, count in differ.items()), sep="\n")
    assert not any(differ.values())


if __name__ == "__main__":
    main()
