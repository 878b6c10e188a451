"""What a completed exercise must do. A check takes the learner's module, raises Wrong, or returns what is worth telling."""

import time

import torch

from flashtile import hardware, tiles
from flashtile.learn.counters import count
from flashtile.learn.exercises import Wrong
from flashtile.problem import AttentionProblem

# Everything is checked in float64: a difference is a mistake, not rounding.
TOLERANCE = 1e-9


def check_softmax(module):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 40, generator=generator, dtype=torch.float64)
    scores[1] *= 1e4
    scores[2, :16] = -torch.inf
    scores[3, 16:] = -torch.inf
    scores[4] = -torch.inf
    for widths in ((40,), (8,) * 5, (1, 15, 24)):
        what = f"scores (6, 40) in tiles of {', '.join(map(str, widths))} columns"
        row_max, row_sum = scores.new_full((6,), -torch.inf), scores.new_zeros(6)
        # the sum of exponentials, kept beside by corrections alone
        acc, begin = scores.new_zeros(6), 0
        for width in widths:
            tile = scores[:, begin : begin + width]
            row_max, row_sum, p, correction = module.update(row_max, row_sum, tile)
            _shape("p", p, tile.shape, what)
            _shape("correction", correction, (6,), what)
            acc, begin = acc * correction + p.sum(1), begin + width
        names = ("scores in +-3", "scores in +-30000", "first 16 hidden", "last 24 hidden", "all hidden", "scores in +-3")
        expected_sum = torch.exp(scores - scores.amax(1, keepdim=True)).sum(1).nan_to_num(0.0)
        _same("row_max", row_max, scores.amax(1), what, names)
        _same("row_sum", row_sum, expected_sum, what, names)
        _same("a sum kept up with correction and p", acc, expected_sum, what, names)
    return None


def check_forward(module):
    for seqlen_q, seqlen_k in ((64, 64), (100, 150), (1, 65), (70, 1)):
        q, k, v = _inputs(seqlen_q, seqlen_k)
        counts, (out, lse) = count(module.forward, q, k, v, 32, 48)
        what = f"{seqlen_q} queries, {seqlen_k} keys, tiles of 32 x 48"
        _attention(out, lse, q, k, v, what)
        # the output, or a tile: 32 x 48 scores, 48 x 16 keys
        allowed = max(q.numel(), 32 * 48)
        if counts.largest > allowed:
            raise Wrong(f"{what}: a tensor of {counts.largest} elements was made; tiles and out have at most {allowed}. "
                        "The scores of all keys must never exist together.")  # fmt: skip
    return None


def check_causal(module):
    for seqlen_q, seqlen_k in ((96, 96), (40, 100), (100, 40), (1, 70)):
        q, k, v = _inputs(seqlen_q, seqlen_k)
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
        what = f"{seqlen_q} queries, {seqlen_k} keys, causal"
        _attention(*module.forward(q, k, v, 32, 32), q, k, v, what, visible)
    q, k, v = _inputs(512, 512)
    counts, _ = count(module.forward, q, k, v, 32, 32)
    # all tiles up to the diagonal, and nothing else
    needed = 4 * 16 * 32 * 32 * (16 * 17 // 2)
    if counts.flops > needed:
        raise Wrong(f"512 queries and keys in tiles of 32: {counts.flops / 1e6:.1f} MFLOP were spent where the tiles that some "
                    f"query sees cost {needed / 1e6:.1f}. Skip the tiles behind the diagonal.")  # fmt: skip
    return f"{counts.flops / (4 * 16 * 512**2):.0%} of the products of unmasked attention"


def check_dropout(module):
    for seqlen_k, dropout_p in ((64, 0.5), (150, 0.2), (150, 0.0)):
        q, k, v = _inputs(40, seqlen_k)
        kept = torch.rand(40, seqlen_k, generator=torch.Generator().manual_seed(1)) >= dropout_p
        what = f"40 queries, {seqlen_k} keys, dropout_p {dropout_p}"
        out, lse = module.forward(q, k, v, dropout_p, lambda cols, kept=kept: kept[:, cols], 32)
        weights = torch.softmax(q @ k.T * 16**-0.5, 1) * kept / (1 - dropout_p)
        _same("lse", lse, torch.logsumexp(q @ k.T * 16**-0.5, 1), what + " (lse is that without dropout)")
        _same("out", out, weights @ v, what)
    return None


def check_bug(module):
    wrong = []
    for seqlen_k in (128, 64, 100, 65, 1):
        q, k, v = _inputs(32, seqlen_k)
        out, lse = module.forward(q, k, v)
        error = (out - _definition(q, k, v)[0]).abs().max()
        if not error <= TOLERANCE or not _close(lse, _definition(q, k, v)[1]):
            wrong.append(f"{seqlen_k} keys (largest error {error:.1e})")
    if wrong:
        raise Wrong(f"wrong for {', '.join(wrong)}; right for the others of 128, 64, 100, 65, 1.")
    return None


def check_tile(module):
    for tile_m, tile_n, num_warps, num_stages, dim in ((64, 64, 4, 2, 128), (128, 32, 8, 3, 64), (128, 64, 8, 2, 256)):
        config = tiles.TileConfig(tile_m, tile_n, num_warps, num_stages)
        what = f"tile_m {tile_m}, tile_n {tile_n}, {num_stages} stages, head dim {dim}, 2 bytes an element"
        expected = tiles.shared_bytes("forward", config, dim, dim, 2)
        _equal("shared_bytes", module.shared_bytes(tile_m, tile_n, num_stages, dim, 2), expected, what)
        expected = tile_m * (dim + tile_n) // (32 * num_warps)
        _equal("tile_registers", module.tile_registers(tile_m, tile_n, num_warps, dim), expected, f"{what}, {num_warps} warps")
    tile_m, tile_n, num_warps, num_stages = (module.TILE[name] for name in ("tile_m", "tile_n", "num_warps", "num_stages"))
    if tile_m == 0 or tile_n == 0:
        raise NotImplementedError
    if tile_m < 64 or tile_n < 32 or num_stages < 2 or any(n & (n - 1) for n in (tile_m, tile_n, num_warps)):
        raise Wrong(f"TILE {module.TILE}: at least 64 x 32 with 2 stages, sizes and warps powers of two.")
    shared = tiles.shared_bytes("forward", tiles.TileConfig(tile_m, tile_n, num_warps, num_stages), 128, 128, 2)
    room = 164 * 1024 // 2 - 1024
    if shared > room:
        raise Wrong(f"TILE {module.TILE}: {shared / 1024:.0f} KiB of shared memory; two blocks on an SM leave each "
                    f"{room / 1024:.0f}.")  # fmt: skip
    registers = tile_m * (128 + tile_n) // (32 * num_warps)
    available = min(255, 65536 // (2 * 32 * num_warps))
    if registers * 3 > available * 2:
        raise Wrong(f"TILE {module.TILE}: acc and scores take {registers} registers of the {available} that a thread has when "
                    "two blocks run; a third must be left for addresses, p, and values under way, or they spill.")  # fmt: skip
    return (f"{shared / 1024:.0f} of {room / 1024:.0f} KiB, {registers} of {available} registers; "
            f"{tile_m} FLOP for each byte of k and v; the table in flashtile/tiles.py has {_a100_tile()}")  # fmt: skip


def _a100_tile():
    problem = _problem(1, 4096, 4096, 8, 8, 128, False)
    config = tiles.select(tiles.PORTABLE, "forward", problem, hardware.by_name("A100")).config
    return f"{config.tile_m} x {config.tile_n}, {config.num_warps} warps, {config.num_stages} stages"


def check_bound(module):
    h200 = hardware.by_name("H200")
    peak, bandwidth = h200.peak("bfloat16"), h200.peak_bandwidth
    told = []
    for name, shape in {
        "prefill, 4096 tokens": (2, 4096, 4096, 16, 16, 128, True),
        "decode, 16 sequences of 8192": (16, 1, 8192, 32, 8, 128, False),
        "a batch of 128 x 128 tokens": (128, 128, 128, 12, 12, 64, False),
    }.items():
        batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, causal = shape
        problem = _problem(*shape)
        num_flops, num_bytes = problem.flops(), problem.bytes_moved()
        what = f"{name}: batch {batch}, {seqlen_q} x {seqlen_k}, heads {heads}/{heads_kv}, head dim {head_dim}, causal {causal}"
        _equal("flops", module.flops(batch, seqlen_q, seqlen_k, heads, head_dim, causal), num_flops, what)
        _equal("bytes_moved", module.bytes_moved(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, 2), num_bytes, what)
        times = {"compute": num_flops / peak / 1e9, "memory": num_bytes / bandwidth * 1e3}
        expected = max(times, key=times.get)
        bound, ms = module.floor(num_flops, num_bytes, peak, bandwidth)
        if bound != expected or abs(ms - times[expected]) > 1e-6 * times[expected]:
            raise Wrong(f"{what}: floor gave {bound}, {ms:.4g} ms; expected {expected}, {times[expected]:.4g} ms.")
        told.append(f"{name}: {bound}, {ms:.4g} ms on an H200")
    return "; ".join([*told, _measured(module)])


def _measured(module):
    """One call on this machine against the learner's floor."""
    from flashtile.bench.roofline import measure

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, seqlen = (torch.bfloat16, 4096) if device == "cuda" else (torch.float32, 512)
    roof = measure(device, str(dtype).removeprefix("torch."))
    q, k, v = (torch.randn(1, seqlen, 8, 64, device=device, dtype=dtype) for _ in range(3))
    import flashtile

    times = []
    for _ in range(4):
        begin = time.perf_counter()
        flashtile.attention(q, k, v)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    num_flops = module.flops(1, seqlen, seqlen, 8, 64, False)
    num_bytes = module.bytes_moved(1, seqlen, seqlen, 8, 8, 64, dtype.itemsize)
    bound, ms = module.floor(num_flops, num_bytes, roof.tflops, roof.bandwidth)
    return f"here ({device}, 1 x {seqlen} x 8 x 64): floor {ms:.3g} ms ({bound}), measured {min(times[1:]):.3g} ms"


def check_combine(module):
    q, k, v = _inputs(20, 96)
    outs, lses = zip(*(_definition(q, k[begin:end], v[begin:end]) for begin, end in ((0, 10), (10, 64), (64, 96))))
    outs, lses = torch.stack([*outs, torch.zeros_like(q)]), torch.stack([*lses, q.new_full((20,), -torch.inf)])
    _attention(*module.combine(outs, lses), q, k, v, "pieces of 10, 54, 32 and 0 keys")
    # exp(lse) alone would overflow
    out, lse = module.combine(outs, lses + 2000.0)
    _attention(out, lse - 2000.0, q, k, v, "the same, all lse 2000 larger")
    out, lse = module.combine(torch.zeros_like(outs), torch.full_like(lses, -torch.inf))
    _same("out", out, torch.zeros_like(q), "pieces without a visible key")
    _same("lse", lse, q.new_full((20,), -torch.inf), "pieces without a visible key")
    return None


def check_mla(module):
    generator = torch.Generator().manual_seed(0)
    heads, head_dim, seqlen, rank = 8, 16, 200, 32
    shapes = ((heads, head_dim), (seqlen, rank), (heads, rank, head_dim), (heads, rank, head_dim))
    q, c, w_k, w_v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    counts, out = count(module.absorbed, q, c, w_k, w_v, 0.1)
    k, v = torch.einsum("sr,hrd->hsd", c, w_k), torch.einsum("sr,hrd->hsd", c, w_v)
    weights = torch.softmax(torch.einsum("hd,hsd->hs", q, k) * 0.1, 1)
    what = f"{heads} heads of {head_dim}, {seqlen} latents of {rank}"
    _same("out", out, torch.einsum("hs,hsd->hd", weights, v), what)
    # w_k and w_v may be copied into another layout
    allowed = max(w_k.numel(), c.numel(), heads * seqlen)
    if counts.largest > allowed:
        raise Wrong(f"{what}: a tensor of {counts.largest} elements was made; keys of all heads have {k.numel()}. "
                    "Multiply the query with w_k first.")  # fmt: skip
    return f"{counts.flops / 1e6:.2f} MFLOP; making all keys and values alone costs {4 * k.numel() * rank / 1e6:.2f} MFLOP"


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


# --- what the checks share ---------------------------------------------------------------------------------------------


def _inputs(seqlen_q, seqlen_k, head_dim=16):
    generator = torch.Generator().manual_seed(seqlen_q + seqlen_k)
    return [2 * torch.randn(n, head_dim, generator=generator, dtype=torch.float64) for n in (seqlen_q, seqlen_k, seqlen_k)]


def _definition(q, k, v, visible=None):
    """out and lse of one head, with all scores; visible: mask of (queries, keys)."""
    scores = q @ k.T * q.shape[1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, 1).nan_to_num(0.0) @ v, torch.logsumexp(scores, 1)


def _problem(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, causal):
    window = (None, 0) if causal else (None, None)
    return AttentionProblem(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim, torch.bfloat16, window)


def _attention(out, lse, q, k, v, what, visible=None):
    expected_out, expected_lse = _definition(q, k, v, visible)
    _same("lse", lse, expected_lse, what)
    _same("out", out, expected_out, what)


def _shape(name, x, shape, what):
    if tuple(x.shape) != tuple(shape):
        raise Wrong(f"{what}: {name} has shape {tuple(x.shape)}; expected {tuple(shape)}.")


def _close(x, expected):
    # -inf must stand at the same places
    return torch.allclose(x, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _same(name, x, expected, what, row_names=None):
    _shape(name, x, expected.shape, what)
    if _close(x, expected):
        return
    wrong = ~torch.isclose(x, expected, rtol=TOLERANCE, atol=TOLERANCE)
    index = tuple(int(i) for i in wrong.nonzero()[0])
    row = f" ({row_names[index[0]]})" if row_names else ""
    raise Wrong(f"{what}: {name}{list(index)}{row} is {x[index]:.6g}; expected {expected[index]:.6g}. "
                f"{int(wrong.sum())} of {wrong.numel()} are wrong.")  # fmt: skip


def _equal(name, got, expected, what):
    if got != expected:
        raise Wrong(f"{what}: {name} gave {got}; expected {expected}.")
