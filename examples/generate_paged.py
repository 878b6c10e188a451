"""Generate text bytes with a paged key-value cache, and check every token against attention without a cache.

    python examples/generate_paged.py                  on a GPU, if there is one
    python examples/generate_paged.py --device cpu --steps 8

A decoder of two layers with random weights continues three prompts of different lengths. The prompts go through the model as
one packed batch; then each step is one token a sequence. All layers share one block table: a sequence owns pages anywhere in
the cache, takes a new one when its last is full, and nothing is ever moved or padded. `attention_with_kvcache` rotates the new
queries and keys, writes keys and values to their slots, and attends over the pages.

The check runs all tokens so far through the same weights with `flashtile.attention` and compares the logits of the last one.
"""

import argparse

import torch
from torch import nn

import flashtile

VOCABULARY, WIDTH, HEADS, HEADS_KV, HEAD_DIM, LAYERS = 256, 256, 8, 2, 32, 2
PAGE_SIZE, LONGEST = 16, 256
TOLERANCE = {torch.float32: dict(rtol=1e-4, atol=1e-4), torch.bfloat16: dict(rtol=5e-2, atol=5e-2)}
PROMPTS = ["The cache is", "Paged memory keeps the keys of a sequence wherever there is room:", "Hi"]


class Cache:
    """Pages of all layers, and which of them each sequence owns."""

    def __init__(self, batch, device, dtype):
        pages_each = LONGEST // PAGE_SIZE
        shape = (LAYERS, 2, batch * pages_each, PAGE_SIZE, HEADS_KV, HEAD_DIM)
        # NaN: were an unused slot read, the output would say so
        self.pages = torch.full(shape, float("nan"), device=device, dtype=dtype)
        self.free = torch.randperm(batch * pages_each).tolist()
        self.owned = [[] for _ in range(batch)]
        self.table = torch.full((batch, pages_each), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)

    def make_room(self, lengths):
        """Give each sequence pages until `lengths` tokens fit."""
        for b, length in enumerate(lengths):
            while len(self.owned[b]) * PAGE_SIZE < length:
                page = self.free.pop()
                self.table[b, len(self.owned[b])] = page
                self.owned[b].append(page)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, attend):
        """x: (tokens, WIDTH), tokens of all sequences one after the other. attend(q, k, v) -> (tokens, HEADS, HEAD_DIM)."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM))
        x = x + self.out(attend(*heads.split([HEADS, HEADS_KV, HEADS_KV], dim=-2)).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(LONGEST)[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def with_cache(self, tokens, counts, cache):
        """Logits of the last token of each sequence. tokens: counts[b] new ones of each sequence, one after the other."""
        starts = torch.tensor([0, *counts], device=tokens.device).cumsum(0).int()
        x = self.embedding(tokens)
        for layer, (k_pages, v_pages) in zip(self.layers, cache.pages):

            def attend(q, k, v, k_pages=k_pages, v_pages=v_pages):
                return flashtile.attention_with_kvcache(
                    q, k_pages, v_pages, k=k, v=v, cache_seqlens=cache.lengths, block_table=cache.table, cu_seqlens_q=starts,
                    cu_seqlens_k_new=starts, max_seqlen_q=max(counts), rotary_cos=self.cos, rotary_sin=self.sin, causal=True,
                )  # fmt: skip

            x = layer(x, attend)
        cache.lengths += starts.diff()
        return self.head(x[starts[1:].long() - 1])

    def without_cache(self, tokens):
        """Logits of the last of one sequence's tokens, from all of them."""

        def attend(q, k, v):
            q, k, v = (x[None] for x in (self.rotated(q), self.rotated(k), v))
            return flashtile.attention(q, k, v, causal=True)[0]

        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(x[-1])

    def rotated(self, x):
        cos, sin = (table[: len(x), None] for table in (self.cos, self.sin))
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


@torch.no_grad()
def generate(device, steps, dtype):
    """Continue PROMPTS greedily: (texts, largest difference of a logit from that without a cache). Raises where it is large."""
    torch.manual_seed(0)
    model = Decoder().to(device, dtype)
    texts = [list(prompt.encode()) for prompt in PROMPTS]
    cache = Cache(len(texts), device, dtype)
    new = texts
    largest = 0.0
    for _ in range(steps):
        cache.make_room([len(text) for text in texts])
        tokens = torch.tensor(sum(new, []), device=device)
        logits = model.with_cache(tokens, [len(part) for part in new], cache)
        expected = torch.stack([model.without_cache(torch.tensor(text, device=device)) for text in texts])
        torch.testing.assert_close(logits, expected, **TOLERANCE[dtype])
        largest = max(largest, (logits - expected).abs().max().item())
        new = [[token] for token in logits.argmax(-1).tolist()]
        texts = [text + token for text, token in zip(texts, new)]
    return texts, largest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=48)
    arguments = parser.parse_args()
    if not arguments.device.startswith("cpu") and not torch.cuda.is_available():
        parser.error(f"--device: expected cpu, got {arguments.device}; there is no GPU that torch can use")
    room = LONGEST - max(map(len, PROMPTS))
    if not 1 <= arguments.steps <= room:
        parser.error(f"--steps: expected 1 to {room}, what the longest prompt leaves of {LONGEST} slots, got {arguments.steps}")
    dtype = torch.bfloat16 if arguments.device.startswith("cuda") else torch.float32
    texts, largest = generate(arguments.device, arguments.steps, dtype)
    for prompt, text in zip(PROMPTS, texts):
        print(f"{prompt!r} -> {bytes(text[len(prompt.encode()) :])!r}")
    print(f"ok: {arguments.steps} steps of {len(texts)} sequences give the logits of attention without a cache, within "
          f"{largest:.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
