"""What a completed exercise must do. A check takes the learner's module, raises Wrong, or returns what is worth telling."""

import heapq
import importlib.util
import inspect
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from flashtile import hardware, tiles
from flashtile.errors import Unavailable
from flashtile.learn.counters import count
from flashtile.learn.exercises import Wrong
from flashtile.problem import AttentionProblem

# Checked in float64: a difference is a mistake, not rounding.
TOLERANCE = 1e-9
# Of the exercise whose code is in fp32, with scores of up to 300
TOLERANCE_FP32 = 1e-3


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
            results = module.update(row_max, row_sum, tile)
            row_max, row_sum, p, correction = _results(("row_max", "row_sum", "p", "correction"), results, what)
            _tensor("row_max", row_max, scores[:, 0], what)
            _tensor("row_sum", row_sum, scores[:, 0], what)
            _tensor("p", p, tile, what)
            _tensor("correction", correction, scores[:, 0], what)
            acc, begin = acc * correction + p.sum(1), begin + width
        names = ("scores in +-3", "scores in +-30000", "first 16 hidden", "last 24 hidden", "all hidden", "scores in +-3")
        expected_sum = torch.exp(scores - scores.amax(1, keepdim=True)).sum(1).nan_to_num(0.0)
        _same("row_max", row_max, scores.amax(1), what, names)
        _same("row_sum", row_sum, expected_sum, what, names)
        _same("a sum kept up with correction and p", acc, expected_sum, what, names)
    return None


def check_forward(module):
    # of 4096 keys a single row of scores is larger than a tile
    for seqlen_q, seqlen_k in ((64, 64), (100, 150), (1, 65), (70, 1), (8, 4096)):
        q, k, v = _inputs(seqlen_q, seqlen_k)
        counts, results = count(module.forward, q, k, v, 32, 48)
        what = f"{seqlen_q} queries, {seqlen_k} keys, tiles of 32 x 48"
        _attention(results, q, k, v, what)
        # the output, or a tile: 32 x 48 scores, 48 x 16 keys; the numbers of all keys are made of nothing, and no scores
        allowed = max(q.numel(), 32 * 48)
        if counts.largest > allowed or counts.allocated > max(allowed, seqlen_k):
            raise Wrong(f"{what}: a tensor of {counts.made} elements was made; tiles and out have at most {allowed}. "
                        "The scores of all keys must never exist together.")  # fmt: skip
    return None


def check_causal(module):
    for seqlen_q, seqlen_k in ((96, 96), (40, 100), (100, 40), (1, 70)):
        q, k, v = _inputs(seqlen_q, seqlen_k)
        what = f"{seqlen_q} queries, {seqlen_k} keys, causal"
        _attention(module.forward(q, k, v, 32, 32), q, k, v, what, _visible(seqlen_q, seqlen_k, True))
    q, k, v = _inputs(512, 512)
    counts, _ = count(module.forward, q, k, v, 32, 32)
    # all tiles up to the diagonal, and nothing else
    needed = 4 * 16 * 32 * 32 * (16 * 17 // 2)
    # a tenth more: a sum of a row may be a product with ones
    if counts.flops > 1.1 * needed:
        raise Wrong(f"512 queries and keys in tiles of 32: {counts.flops / 1e6:.1f} MFLOP were spent where the tiles that some "
                    f"query sees cost {needed / 1e6:.1f}. Skip the tiles behind the diagonal.")  # fmt: skip
    return f"{counts.flops / (4 * 16 * 512**2):.0%} of the products of unmasked attention"


def check_dropout(module):
    for seqlen_k, dropout_p in ((64, 0.5), (150, 0.2), (150, 0.0)):
        q, k, v = _inputs(40, seqlen_k)
        kept = torch.rand(40, seqlen_k, generator=torch.Generator().manual_seed(1)) >= dropout_p
        what = f"40 queries, {seqlen_k} keys, dropout_p {dropout_p}"

        def keep(cols, kept=kept, what=what):
            part = kept[:, cols]
            if part.shape[1] > 32:
                raise Wrong(f"{what}: keep was asked for {part.shape[1]} columns at once; a tile has at most 32.")
            return part

        counts, results = count(module.forward, q, k, v, dropout_p, keep, 32)
        out, lse = _results(("out", "lse"), results, what)
        weights = torch.softmax(q @ k.T * 16**-0.5, 1) * kept / (1 - dropout_p)
        _same("lse", lse, torch.logsumexp(q @ k.T * 16**-0.5, 1), what + " (lse is that without dropout)")
        _same("out", out, weights @ v, what)
        allowed = max(q.numel(), k.numel(), 40 * 32)
        if counts.made > allowed:
            raise Wrong(f"{what}: a tensor of {counts.made} elements was made; tiles and operands have at most {allowed}. "
                        "The weights and the mask of all keys must never exist together.")  # fmt: skip
    return None


def check_bug(module):
    wrong = []
    for seqlen_k in (128, 64, 100, 65, 1):
        q, k, v = _inputs(32, seqlen_k)
        counts, results = count(module.forward, q, k, v)
        out, lse = _results(("out", "lse"), results, f"{seqlen_k} keys")
        expected_out, expected_lse = _definition(q, k, v)
        _tensor("out", out, expected_out, f"{seqlen_k} keys")
        _tensor("lse", lse, expected_lse, f"{seqlen_k} keys")
        error = (out - expected_out).abs().max()
        if not error <= TOLERANCE or not _close(lse, expected_lse):
            wrong.append(f"{seqlen_k} keys (largest error {error:.1e})")
    if wrong:
        raise Wrong(f"wrong for {', '.join(wrong)}; right for the others of 128, 64, 100, 65, 1.")
    # of the last length, one key; the second product may leave out the rows of zeros
    if counts.flops < 2 * 32 * 16 * (64 + 1):
        raise Wrong("1 key: the tile was cut to it. Keep tiles at their 64 rows, and hide what is past the end.")
    return None


def check_backward(module):
    for seqlen_q, seqlen_k, causal in ((64, 64, False), (100, 150, False), (70, 1, False), (8, 4096, False), (96, 96, True),
                                       (40, 100, True), (100, 40, True)):  # fmt: skip
        q, k, v = _inputs(seqlen_q, seqlen_k)
        visible = _visible(seqlen_q, seqlen_k, causal)
        out, lse = _definition(q, k, v, visible)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        counts, results = count(module.backward, q, k, v, out, lse, dout, causal, 32, 48)
        expected_dq, expected_dk, expected_dv = _gradients(q, k, v, dout, visible)
        what = f"{seqlen_q} queries, {seqlen_k} keys{', causal' * causal}, tiles of 32 x 48"
        dq, dk, dv = _results(("dq", "dk", "dv"), results, what)
        # dv first: it needs p alone
        _same("dv", dv, expected_dv, what)
        _same("dk", dk, expected_dk, what)
        _same("dq", dq, expected_dq, what)
        allowed = max(q.numel(), k.numel(), 32 * 48)
        if counts.made > allowed:
            raise Wrong(f"{what}: a tensor of {counts.made} elements was made; tiles and operands have at most {allowed}. "
                        "The weights of all keys must never exist together.")  # fmt: skip
        # A row of weights is smaller than k.
        if counts.largest_exps > 32 * 48:
            raise Wrong(f"{what}: {counts.largest_exps} weights were made at once; a tile has {32 * 48}. "
                        "The weights of all keys must never exist together.")  # fmt: skip
    q, k, v = _inputs(256, 256)
    operands = (q, k, v, *_definition(q, k, v, _visible(256, 256, True)), torch.ones_like(q))
    counts, _ = count(module.backward, *operands, True, 32, 32)
    # the five products of each tile up to the diagonal; seven, where one walk makes dk and dv and another dq
    product = 2 * 16 * 32 * 32 * (8 * 9 // 2)
    # half a product more: delta may be one
    if counts.flops > 7.5 * product:
        raise Wrong(f"256 queries and keys in tiles of 32, causal: {counts.flops / 1e6:.1f} MFLOP were spent; five products of "
                    f"each tile that some query sees cost {5 * product / 1e6:.1f}, seven {7 * product / 1e6:.1f}. Skip the "
                    "tiles behind the diagonal.")  # fmt: skip
    return f"{counts.flops / product:.3g} products of each tile, {counts.flops / product / 2:.3g} times those of forward"


def check_kernel(module):
    if not hasattr(module.update, "fn"):
        raise Wrong("update is plain Python; a kernel can only call what has @triton.jit above it.")
    if "raise NotImplementedError" in inspect.getsource(module.update.fn):
        raise NotImplementedError
    cases = []
    for seqlen_q, seqlen_k, causal, larger in ((64, 64, False, 1), (100, 150, False, 1), (1, 65, False, 1), (96, 96, True, 1),
                                               (40, 100, True, 1), (100, 40, True, 1), (40, 100, False, 16)):  # fmt: skip
        q, k, v = (x.float() for x in _inputs(seqlen_q, seqlen_k))
        what = f"{seqlen_q} queries, {seqlen_k} keys{', causal' * causal}{', scores of up to 300' * (larger > 1)}"
        cases.append((what, (q * larger, k, v, causal)))
    results = _run_kernel(module.__file__, [arguments for _, arguments in cases])
    for (what, (q, k, v, causal)), (out, lse) in zip(cases, results):
        q, k, v = q.double(), k.double(), v.double()
        visible = _visible(len(q), len(k), causal)
        _attention((out.double(), lse.double()), q, k, v, what, visible, TOLERANCE_FP32)
    return "compiled, on this GPU" if torch.cuda.is_available() else "in Triton's interpreter: no GPU is here to compile for"


def _run_kernel(exercise, cases):
    if not torch.cuda.is_available() and importlib.util.find_spec("numpy") is None:
        raise Unavailable("without a GPU a kernel runs in Triton's interpreter, which needs NumPy: pip install 'numpy<2.4'")
    # Triton looks at the variable while it is imported, and here it may be already.
    variable = ["-u", "TRITON_INTERPRET"] if torch.cuda.is_available() else ["TRITON_INTERPRET=1"]
    script = Path(__file__).with_name("run_kernel.py")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("cases.pt", "results.pt")]
        torch.save(cases, files[0])
        command = ["env", *variable, sys.executable, "-P", script, exercise, *files]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            raise Wrong(f"the process that runs the kernel failed: {(run.stderr.strip().splitlines() or ['no word'])[-1]}")
        told = torch.load(files[1])
    print(run.stdout, end="")
    if "error" in told:
        raise Wrong(told["error"])
    return told["results"]


def check_tile(module):
    for tile_m, tile_n, num_warps, num_stages, dim, itemsize in (
        (64, 64, 4, 2, 128, 2), (128, 32, 8, 3, 64, 2), (128, 64, 8, 2, 256, 2), (64, 32, 4, 2, 128, 4),
    ):  # fmt: skip
        config = tiles.TileConfig(tile_m, tile_n, num_warps, num_stages)
        what = f"tile_m {tile_m}, tile_n {tile_n}, {num_stages} stages, head dim {dim}, {itemsize} bytes an element"
        expected = tiles.shared_bytes("forward", config, dim, dim, itemsize)
        _equal("shared_bytes", module.shared_bytes(tile_m, tile_n, num_stages, dim, itemsize), expected, what)
        expected = tile_m * (dim + tile_n) // (32 * num_warps)
        _equal("tile_registers", module.tile_registers(tile_m, tile_n, num_warps, dim), expected, f"{what}, {num_warps} warps")
    names = ("tile_m", "tile_n", "num_warps", "num_stages")
    if not isinstance(module.TILE, dict) or not all(isinstance(module.TILE.get(name), int) for name in names):
        raise Wrong(f"TILE is {module.TILE}; expected a whole number for each of {', '.join(names)}.")
    tile_m, tile_n, num_warps, num_stages = (module.TILE[name] for name in names)
    if tile_m == 0 or tile_n == 0:
        raise NotImplementedError
    if tile_m < 64 or tile_n < 32 or num_stages < 2 or any(n & (n - 1) for n in (tile_m, tile_n, num_warps)):
        raise Wrong(f"TILE {module.TILE}: at least 64 x 32 with 2 stages, sizes and warps powers of two.")
    if not 1 <= num_warps <= 32:
        raise Wrong(f"TILE {module.TILE}: a block has 1 to 32 warps.")
    shared = tiles.shared_bytes("forward", tiles.TileConfig(tile_m, tile_n, num_warps, num_stages), 128, 128, 2)
    room = 228 * 1024 // 2 - 1024
    if shared > room:
        raise Wrong(f"TILE {module.TILE}: {shared / 1024:.0f} KiB of shared memory; two blocks on an SM leave each "
                    f"{room / 1024:.0f}.")  # fmt: skip
    registers = tile_m * (128 + tile_n) // (32 * num_warps)
    available = min(255, 65536 // (2 * 32 * num_warps))
    if registers * 3 > available * 2:
        raise Wrong(f"TILE {module.TILE}: acc and scores take {registers} registers of the {available} that a thread has when "
                    "two blocks run; a third must be left for addresses, p, and values under way, or they spill.")  # fmt: skip
    return (f"{shared / 1024:.0f} of {room / 1024:.0f} KiB, {registers} of {available} registers; "
            f"{tile_m} FLOP for each byte of k and v; the table in flashtile/tiles.py has {_h100_tile()}")  # fmt: skip


def _h100_tile():
    problem = _problem(1, 4096, 4096, 8, 8, 128, False)
    config = tiles.select(tiles.PORTABLE, "forward", problem, hardware.by_name("H100")).config
    return f"{config.tile_m} x {config.tile_n}, {config.num_warps} warps, {config.num_stages} stages"


def check_bound(module):
    h200 = hardware.by_name("H200")
    told = []
    for name, shape in {
        "prefill, 4096 tokens": (2, 4096, 4096, 16, 16, 128, True, torch.bfloat16),
        "a chunk of 512 tokens on 4096, fp32": (1, 512, 4096, 16, 16, 128, True, torch.float32),
        "decode, 16 sequences of 8192": (16, 1, 8192, 32, 8, 128, False, torch.bfloat16),
        "a batch of 128 x 128 tokens": (128, 128, 128, 12, 12, 64, False, torch.bfloat16),
    }.items():
        batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, causal, dtype = shape
        peak, bandwidth = h200.peak(str(dtype).removeprefix("torch.")), h200.peak_bandwidth
        problem = _problem(*shape)
        num_flops, num_bytes = problem.flops(), problem.bytes_moved()
        what = (f"{name}: batch {batch}, {seqlen_q} x {seqlen_k}, heads {heads}/{heads_kv}, head dim {head_dim}, "
                f"causal {causal}, {dtype.itemsize} bytes an element")  # fmt: skip
        _equal("flops", module.flops(batch, seqlen_q, seqlen_k, heads, head_dim, causal), num_flops, what)
        moved = module.bytes_moved(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, dtype.itemsize)
        _equal("bytes_moved", moved, num_bytes, what)
        times = {"compute": num_flops / peak / 1e9, "memory": num_bytes / bandwidth * 1e3}
        expected = max(times, key=times.get)
        bound, ms = _results(("bound", "ms"), module.floor(num_flops, num_bytes, peak, bandwidth), what)
        is_time = isinstance(ms, int | float)
        if bound != expected or not is_time or abs(ms - times[expected]) > 1e-6 * times[expected]:
            given = f"{ms:.4g} ms" if is_time else repr(ms)
            raise Wrong(f"{what}: floor gave {bound}, {given}; expected {expected}, {times[expected]:.4g} ms.")
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
    what = "pieces of 10, 54, 32 and 0 keys"
    _attention(module.combine(outs, lses), q, k, v, what)
    # exp(lse) alone would overflow, or with one maximum for all rows vanish
    moved = torch.linspace(-2000, 2000, 20, dtype=lses.dtype)
    what += ", each row's lse moved by another number from -2000 to 2000"
    out, lse = _results(("out", "lse"), module.combine(outs, lses + moved), what)
    expected_out, expected_lse = _definition(q, k, v)
    _same("lse", lse, expected_lse + moved, what)
    _same("out", out, expected_out, what)
    what = "pieces without a visible key"
    out, lse = _results(("out", "lse"), module.combine(torch.zeros_like(outs), torch.full_like(lses, -torch.inf)), what)
    _same("out", out, torch.zeros_like(q), what)
    _same("lse", lse, q.new_full((20,), -torch.inf), what)
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
    if counts.made > allowed:
        raise Wrong(f"{what}: a tensor of {counts.made} elements was made; keys of all heads have {k.numel()}. "
                    "Multiply the query with w_k first.")  # fmt: skip
    absorbed = 4 * heads * rank * (head_dim + seqlen)
    if counts.flops > 2 * absorbed:
        raise Wrong(f"{what}: {counts.flops / 1e6:.2f} MFLOP were spent; the absorbed form takes {absorbed / 1e6:.2f}. "
                    "Keys and values cost the same when they are made one head after the other.")  # fmt: skip
    return f"{counts.flops / 1e6:.2f} MFLOP; making all keys and values alone costs {4 * k.numel() * rank / 1e6:.2f} MFLOP"


def check_varlen(module):
    told = None
    for name, lengths_q, lengths_k, tile_m in (
        ("sequences of 3, 17, 0 and 9 tokens", (3, 17, 0, 9), (3, 17, 0, 9), 8),
        ("chunks of 40, 1 and 64 queries on 100, 70 and 64 keys", (40, 1, 64), (100, 70, 64), 32),
        ("100 queries on 40 keys, and 32 on 32", (100, 32), (40, 32), 32),
        ("255 sequences of one token, one of 8192", (*[1] * 255, 8192), (*[1] * 255, 8192), 128),
        ("prompts of 128, 512, 1024 and 4096 tokens", (128, 512, 1024, 4096), (128, 512, 1024, 4096), 128),
    ):
        for causal in (False, True):
            what = f"{name}, tiles of {tile_m}{', causal' * causal}"
            told = _schedule(module, what, lengths_q, lengths_k, tile_m, causal)
    return told


def _schedule(module, what, lengths_q, lengths_k, tile_m, causal):
    """Check one list of tiles; returns what it saves."""
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    counts, results = count(module.schedule, cu_q, cu_k, tile_m, causal)
    sequences, first_rows = _results(("sequences", "first_rows"), results, what)
    for name, x in (("sequences", sequences), ("first_rows", first_rows)):
        if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.dim() != 1 or len(x) != len(sequences):
            raise Wrong(f"{what}: {name} is {_kind(x)}; expected a tensor of integers, one a tile.")
    listed = list(zip(sequences.tolist(), first_rows.tolist()))
    keys = _keys_of_tiles(lengths_q, lengths_k, tile_m, causal)
    twice = [tile for tile, times in Counter(listed).items() if times > 1]
    wrong = {"is missing": keys.keys() - set(listed), "has no query": set(listed) - keys.keys(), "is listed twice": twice}
    for words, which in wrong.items():
        if which:
            raise Wrong(f"{what}: tile {min(which)} (sequence, first row) {words}, {len(which)} such in all; {len(keys)} tiles "
                        "have a query.")  # fmt: skip
    for tile, after in zip(listed, listed[1:]):
        if keys[tile] < keys[after]:
            raise Wrong(f"{what}: tile {tile} (sequence, first row), which sees {keys[tile]} keys, stands before {after}, "
                        f"which sees {keys[after]}.")  # fmt: skip
    allowed = 2 * (len(keys) + len(lengths_q))
    if counts.made > allowed:
        raise Wrong(f"{what}: a tensor of {counts.made} elements was made for {len(keys)} tiles of {len(lengths_q)} sequences; "
                    f"expected at most {allowed}. A padded grid is what this list replaces.")  # fmt: skip
    grid = len(lengths_q) * -(-max(lengths_q) // tile_m)
    share = _last_end([keys[tile] for tile in listed]) / _last_end(keys.values())
    return (f"{what}: {len(keys)} tiles, where a padded grid has {grid}; 16 multiprocessors take {share:.0%} of the time of "
            "the same tiles in the order of the sequences")  # fmt: skip


def _keys_of_tiles(lengths_q, lengths_k, tile_m, causal):
    """{(sequence, first row): keys that the tile sees} of all tiles with a query, in the order of the sequences."""
    keys = {}
    for sequence, (seqlen_q, seqlen_k) in enumerate(zip(lengths_q, lengths_k)):
        for row in range(0, seqlen_q, tile_m):
            # from the tile's last query: those that only later ones see
            hidden = max(0, seqlen_q - row - tile_m) if causal else 0
            keys[sequence, row] = max(0, seqlen_k - hidden)
    return keys


def _last_end(times, workers=16):
    """When all is done, if each worker takes the next time as soon as it is free."""
    free = [0] * workers
    for duration in times:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


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


def _visible(seqlen_q, seqlen_k, causal):
    """(queries, keys), True where a query sees a key; bottom-right."""
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    return visible.tril(seqlen_k - seqlen_q) if causal else visible


def _gradients(q, k, v, dout, visible):
    """dq, dk, dv by autograd through the definition."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    # Rows without a key have no gradient; the softmax's own would be nan.
    some = visible.any(1)
    scores = (q[some] @ k.T * q.shape[1] ** -0.5).masked_fill(~visible[some], -torch.inf)
    return torch.autograd.grad(torch.softmax(scores, 1) @ v, (q, k, v), dout[some])


def _problem(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, causal, dtype=torch.bfloat16):
    window = (None, 0) if causal else (None, None)
    return AttentionProblem(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim, dtype, window)


def _attention(results, q, k, v, what, visible=None, tolerance=TOLERANCE):
    out, lse = _results(("out", "lse"), results, what)
    expected_out, expected_lse = _definition(q, k, v, visible)
    _same("lse", lse, expected_lse, what, tolerance=tolerance)
    _same("out", out, expected_out, what, tolerance=tolerance)


def _results(names, results, what):
    """What a function of the learner returned, one value a name."""
    if not isinstance(results, tuple | list) or len(results) != len(names):
        raise Wrong(f"{what}: expected {', '.join(names)}; {_kind(results)} was returned.")
    return results


def _tensor(name, x, expected, what):
    if not isinstance(x, torch.Tensor) or x.shape != expected.shape or x.dtype != expected.dtype:
        raise Wrong(f"{what}: {name} is {_kind(x)}; expected {_kind(expected)}.")


def _kind(x):
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, torch.Tensor):
        return f"a tensor of shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}"
    return "None" if x is None else f"of type {type(x).__name__}"


def _close(x, expected, tolerance=TOLERANCE):
    # -inf must stand at the same places
    return torch.allclose(x, expected, rtol=tolerance, atol=tolerance)


def _same(name, x, expected, what, row_names=None, tolerance=TOLERANCE):
    _tensor(name, x, expected, what)
    if _close(x, expected, tolerance):
        return
    wrong = ~torch.isclose(x, expected, rtol=tolerance, atol=tolerance)
    index = tuple(int(i) for i in wrong.nonzero()[0])
    row = f" ({row_names[index[0]]})" if row_names else ""
    raise Wrong(f"{what}: {name}{list(index)}{row} is {x[index]:.6g}; expected {expected[index]:.6g}. "
                f"{int(wrong.sum())} of {wrong.numel()} are wrong.")  # fmt: skip


def _equal(name, got, expected, what):
    if got != expected:
        raise Wrong(f"{what}: {name} gave {got}; expected {expected}.")
