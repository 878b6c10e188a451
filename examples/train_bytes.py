"""Train a small byte-level GPT twice from the same seed, with flashtile and with torch's SDPA, and compare.

    python examples/train_bytes.py                    a minute on a CPU, less on a GPU
    python examples/train_bytes.py --steps 500 --seqlen 4096 --device cuda
    python examples/train_bytes.py --dtype bf16 --compile inductor

The text is real and already here: the documents and sources of this repository, and the licences and descriptions of the
installed Python packages. Weights are fp32 and only q, k and v are cast to --dtype, so the two runs differ in their attention
alone. Exits with 1 if a loss does not fall, or if the two differ by more than the noise of a step.

On a CPU flashtile hands this call to torch's SDPA, for it is the same function there, and the losses are equal to the bit; with
FLASHTILE_TIER=reference it runs FlashAttention-2 in PyTorch instead.
"""

import argparse
import math
import re
import resource
import statistics
import sys
import time
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import flashtile

# Model and batch by device type: layers, width, heads, batch, seqlen, steps, learning rate
SIZES = {
    "cpu": dict(layers=3, width=128, heads=4, batch=8, seqlen=128, steps=150, learning_rate=2e-3),
    "cuda": dict(layers=12, width=768, heads=12, batch=8, seqlen=2048, steps=300, learning_rate=6e-4),
}
TEXT_NAMES = re.compile(r"(licen[cs]e|copying|notice|authors|readme|changelog|metadata)|\.(md|rst)$", re.IGNORECASE)
MAX_TEXT_BYTES = 8 << 20
REPORTS = 10


def load_text():
    """Bytes of the repository's and the installed packages' texts, each once; uint8 (length,)."""
    root = Path(__file__).parent.parent
    patterns = ("*.md", "docs/**/*.md", "flashtile/**/*.py", "tests/**/*.py")
    paths = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    for distribution in sorted(metadata.distributions(), key=lambda d: str(d.metadata["Name"]).lower()):
        files = sorted(file for file in distribution.files or () if TEXT_NAMES.search(file.name))
        paths += [Path(distribution.locate_file(file)) for file in files]
    texts = dict.fromkeys(path.read_bytes() for path in paths if path.is_file())
    text = b"\n".join(texts)[:MAX_TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def flashtile_attention(q, k, v):
    return flashtile.attention(q, k, v, causal=True)


def sdpa_attention(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm attention and MLP; x is (batch, seqlen, width)."""

    def __init__(self, width, heads, attend, dtype):
        super().__init__()
        self.heads, self.attend, self.dtype = heads, attend, dtype
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        # (batch, seqlen, 3, heads, head_dim); q, k and v stay views of it
        q, k, v = self.qkv(self.norm1(x)).to(self.dtype).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.project(self.attend(q, k, v).flatten(-2).to(x.dtype))
        return x + self.mlp(self.norm2(x))


class ByteGPT(nn.Module):
    """Logits of the next byte: (batch, seqlen) int64 to (batch, seqlen, 256)."""

    def __init__(self, layers, width, heads, seqlen, attend, dtype):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(seqlen, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend, dtype) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(name, attend, text, size, device, dtype, backend=None, seed=0):
    """Train, with a backend of torch.compile or without one.

    Returns losses (one a step), seconds (one a step) and the peak memory in bytes above the start.
    """
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    model = ByteGPT(size["layers"], size["width"], size["heads"], size["seqlen"], attend, dtype).to(device)
    if backend:
        model = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), size["learning_rate"], betas=(0.9, 0.95), weight_decay=0.1)
    batches = torch.Generator().manual_seed(seed)
    losses, seconds = [], []
    peak_memory = watch_memory(device)
    for step in range(size["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = size["learning_rate"] * min(1.0, (step + 1) / 20)
        starts = torch.randint(len(text) - size["seqlen"], (size["batch"],), generator=batches)
        window = text[starts[:, None] + torch.arange(size["seqlen"] + 1)].to(device).long()
        begin = time.perf_counter()
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # .item() waits for the device
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
        if not math.isfinite(losses[-1]):
            raise ValueError(f"{name}: the loss of step {step} is {losses[-1]}")
    return losses, seconds, peak_memory()


def watch_memory(device):
    """Start watching; the function that it returns gives the peak in bytes above now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return lambda: torch.cuda.max_memory_allocated(device) - before
    before = _peak_resident_bytes()
    return lambda: _peak_resident_bytes() - before


def _peak_resident_bytes():
    """Of this process; libraries that load on first use count too."""
    # KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def tier_of(size, device, dtype):
    """The name of the tier that flashtile runs this attention on."""
    from flashtile.dispatch import plan_for
    from flashtile.problem import AttentionProblem, Operands

    shape = (size["batch"], size["seqlen"], size["heads"], size["width"] // size["heads"])
    x = torch.empty(shape, dtype=dtype, device=device)
    return plan_for(AttentionProblem.from_tensors(Operands(x, x, x), causal=True), device, "forward").tier


def report(runs, steps):
    """Print the curves, each number the mean over the steps since the last one, and the cost of a step."""
    every = max(1, steps // REPORTS)
    print(f"\n{'steps':>11}" + "".join(f"{name:>14}" for name in runs) + f"{'difference':>14}")
    for begin in range(0, steps, every):
        means = [statistics.fmean(losses[begin : begin + every]) for losses, *_ in runs.values()]
        last = min(begin + every, steps)
        print(f"{f'{begin + 1}-{last}':>11}" + "".join(f"{x:14.4f}" for x in means) + f"{means[0] - means[1]:14.1e}")
    print(f"\n{'':11}{'ms/step':>14}{'first step':>14}{'peak memory':>14}")
    for name, (_, seconds, peak_bytes) in runs.items():
        memory = f"{peak_bytes / 2**20:.0f} MiB"
        print(f"{name:11}{1e3 * statistics.median(seconds[1:]):14.2f}{f'{1e3 * seconds[0]:.0f} ms':>14}{memory:>14}")


def verdict(runs):
    """The sentences that say what is wrong; none if both losses fell and agree."""
    problems = []
    tails = {}
    for name, (losses, *_) in runs.items():
        tail = losses[-max(5, len(losses) // 4) :]
        tails[name] = statistics.fmean(tail)
        if tails[name] > losses[0] - 0.5:
            problems.append(f"{name}: the loss did not fall: {losses[0]:.3f} at first, {tails[name]:.3f} at last")
        # noise of a mean over the last steps, whose batches differ
        noise = statistics.stdev(tail) / math.sqrt(len(tail))
    difference = abs(tails["flashtile"] - tails["sdpa"])
    print(f"\nlast steps: difference {difference:.1e}, noise {noise:.1e}")
    if difference > 2 * noise:
        problems.append(f"the last losses differ by {difference:.4f}, more than twice the noise {noise:.4f}")
    return problems


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="default 150 on a CPU, 300 on a GPU")
    parser.add_argument("--seqlen", type=int, help="bytes of context; default 128 on a CPU, 2048 on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="of attention; default fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--compile", metavar="BACKEND", help="torch.compile the model, in one graph: inductor, aot_eager")
    options = parser.parse_args(arguments)
    if options.device.partition(":")[0] not in SIZES:
        parser.error(f"--device: {' or '.join(SIZES)}, not {options.device}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device: cpu, not {options.device}; there is no GPU that torch can use")
    device = torch.device(options.device)
    size = SIZES[device.type] | {k: v for k, v in (("steps", options.steps), ("seqlen", options.seqlen)) if v is not None}
    if size["steps"] < 10:
        parser.error("--steps: at least 10, or there is no curve")
    if size["seqlen"] < 1:
        parser.error("--seqlen: at least 1")
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = names[options.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    text = load_text()
    print(f"text: {len(text):,} bytes   device: {device}   attention: {dtype}")
    print(f"flashtile's tier: {tier_of(size, device, dtype)}")
    print("model: " + ", ".join(f"{name} {value}" for name, value in size.items()))
    runs = {}
    for name, attend in (("flashtile", flashtile_attention), ("sdpa", sdpa_attention)):
        # A process each, so that memory and first step are its own
        with get_context("spawn").Pool(1) as pool:
            runs[name] = pool.apply(train, (name, attend, text, size, device, dtype, options.compile))
    report(runs, size["steps"])
    problems = verdict(runs)
    print("\n".join(problems) if problems else "ok: both losses fell, and they agree within noise")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
