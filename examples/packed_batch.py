"""Train on sequences of different lengths, packed one behind the other instead of padded to the longest.

    python examples/packed_batch.py                     a CPU will do
    python examples/packed_batch.py --device cuda --seqlen 4096

One attention layer, once over the padded batch and once over the packed one: the same losses and gradients, without the work
and the memory of the padding. Exits with 1 if they differ.
"""

import argparse
import sys
import time

import torch
import torch.nn.functional as F

import flashtile
from flashtile.compat.flash_attn.bert_padding import pad_input, unpad_input

HEADS, HEADS_KV, DIM = 8, 2, 64


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(128, (HEADS + 2 * HEADS_KV) * DIM)
        self.out = torch.nn.Linear(HEADS * DIM, 128)

    def qkv(self, x):
        return self.proj(x).unflatten(-1, (-1, DIM)).split([HEADS, HEADS_KV, HEADS_KV], -2)

    def padded(self, x):
        """(batch, seqlen, 128). Padding stands behind the tokens, so a causal query never sees it."""
        return self.out(flashtile.attention(*self.qkv(x), causal=True).flatten(-2))

    def packed(self, x, cu_seqlens, longest):
        """(total, 128)."""
        lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)
        return self.out(flashtile.attention_varlen(*self.qkv(x), **lengths, causal=True).flatten(-2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=256, help="the longest; others have an eighth of it and more")
    arguments = parser.parse_args()
    if not arguments.device.startswith("cpu") and not torch.cuda.is_available():
        parser.error(f"--device: expected cpu, got {arguments.device}; there is no GPU that torch can use")
    for name in ("batch", "seqlen"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(arguments, name)}")
    torch.manual_seed(0)
    device, batch, seqlen = torch.device(arguments.device), arguments.batch, arguments.seqlen
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = Layer().to(device, dtype)
    lengths = torch.randint(seqlen // 8, seqlen + 1, (batch,), device=device)
    lengths[0] = seqlen
    is_token = torch.arange(seqlen, device=device) < lengths[:, None]
    x = torch.randn(batch, seqlen, 128, device=device, dtype=dtype)
    rows, indices, cu_seqlens, longest, _ = unpad_input(x, is_token)
    print(f"{batch} sequences of {int(lengths.min())} to {longest} tokens: {len(rows)} tokens, {batch * seqlen} with padding")

    def padded():
        return layer.padded(x)[is_token]

    def packed():
        return pad_input(layer.packed(rows, cu_seqlens, longest), indices, batch, seqlen)[is_token]

    results = {}
    for name, run in (("padded", padded), ("packed", packed)):
        for _ in range(2):
            # the first time compiles
            layer.zero_grad()
            begin = time.perf_counter()
            out = run().float()
            loss = F.mse_loss(out, torch.ones_like(out))
            loss.backward()
            gradient = layer.proj.weight.grad.float()
            norm = gradient.norm().item()
        seconds = time.perf_counter() - begin
        results[name] = loss.item(), gradient.clone()
        print(f"{name}   loss {loss.item():.6f}   gradient norm {norm:.6f}   {1e3 * seconds:7.1f} ms")
    (loss_a, gradient_a), (loss_b, gradient_b) = results.values()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    difference = (gradient_a - gradient_b).norm() / gradient_a.norm()
    if abs(loss_a - loss_b) > tolerance * abs(loss_a) or not difference <= tolerance:
        print(f"the two differ: gradients by {difference:.1e} of their norm, expected at most {tolerance:.0e}")
        return 1
    print("ok: the same loss and gradients")
    return 0


if __name__ == "__main__":
    sys.exit(main())
