"""From tensors to a rung's kernels: check, allocate, compile once, launch on torch's current stream."""

from functools import lru_cache

import torch

from flashtile import hardware
from flashtile.errors import ShapeError, UnsupportedError, explain
from flashtile.ladder import nvrtc, rungs
from flashtile.problem import AttentionProblem, Operands

LOG2_E = 1.4426950408889634


def forward(number, q, k, v, *, causal=False, softmax_scale=None, config=None):
    """Attention by rung 1 to 8.

    Args:
        number: the rung; `rungs.RUNGS` says what it takes.
        q, k, v: (batch, seqlen, num_heads, head_dim), contiguous, on a GPU.
        causal: hide keys after the query.
        softmax_scale: multiplies q kᵀ; default head_dim ** -0.5.
        config: a TileConfig other than the rung's own for the head dim.
    Returns:
        out, like q; lse (batch, num_heads, seqlen), fp32, natural log.
    Raises:
        ShapeError, DtypeError, ...: as `flashtile.attention`. UnsupportedError: what the rung does not take.
    """
    call = _Call(rungs.get(number), "forward", config, causal, softmax_scale, q=q, k=k, v=v)
    out, lse = torch.empty_like(q), q.new_empty(call.problem.lse_shape, dtype=torch.float32)
    if q.numel():
        with torch.cuda.device(q.device):
            _FORWARD.get(number, _flash)(call, q, k, v, out, lse)
    return out, lse


def backward(number, q, k, v, out, lse, dout, *, causal=False, softmax_scale=None, config=None):
    """Gradients by rung 9, from what a forward returned. Arguments as in `forward`; dout: the gradient of out, contiguous.

    Returns:
        dq, dk, dv, like q, k and v.
    """
    call = _Call(rungs.get(number), "backward", config, causal, softmax_scale, q=q, k=k, v=v, out=out, lse=lse, dout=dout)
    dq, dk, dv = map(torch.empty_like, (q, k, v))
    if q.numel():
        with torch.cuda.device(q.device):
            _backward(call, q, k, v, out, lse, dout, dq, dk, dv)
    return dq, dk, dv


class _Call:
    """One call of a rung: the problem, its tiles, and its kernels by name."""

    def __init__(self, rung, direction, config, causal, softmax_scale, **tensors):
        q = tensors["q"]
        self.problem = AttentionProblem.from_tensors(
            Operands(q, tensors["k"], tensors["v"]), causal=causal, softmax_scale=softmax_scale
        )
        self.causal, self.device, self.index = causal, hardware.detect(q.device), q.device.index
        if rung.tier or rung.direction != direction:
            raise UnsupportedError(explain(f"rung {rung.number}", f"a rung of CUDA C++ with a {direction} pass",
                                           rung.tier or f"the {rung.direction} pass", "See `flashtile ladder`."))  # fmt: skip
        reason = rungs.refuses(rung, self.problem, self.device, config)
        if reason:
            raise UnsupportedError(f"rung {rung.number}, {rung.name}: {reason}.")
        for name, x in tensors.items():
            shape = self.problem.lse_shape if name == "lse" else q.shape
            if x.shape != shape or not x.is_contiguous() or x.dtype != (torch.float32 if name == "lse" else q.dtype):
                raise ShapeError(explain(name, f"a contiguous tensor of shape {tuple(shape)} and the dtype of its kind",
                                         f"shape {tuple(x.shape)}, strides {x.stride()}, {x.dtype}",
                                         f"Use {name}.contiguous()."))  # fmt: skip
        if any(x.data_ptr() % 16 for x in tensors.values()):
            raise ShapeError(explain("q, k, v", "tensors that begin at multiples of 16 bytes", "others", "Clone them."))
        self.rung = rung
        self.config = config or rung.configs[self.problem.head_dim]
        self.scale = self.problem.softmax_scale

    def launch(self, kernel, grid, *arguments):
        """Queue a kernel of the rung's file."""
        shared = rungs.shared_bytes(self.rung, self.config, self.problem.head_dim, kernel)
        bf16 = self.problem.dtype == torch.bfloat16
        loaded = _kernel(self.rung.number, self.config, self.problem.head_dim, self.causal, bf16, self.device.arch, kernel,
                         shared, self.index)  # fmt: skip
        stream = torch.cuda.current_stream().cuda_stream
        nvrtc.launch(loaded, grid, 32 * self.config.num_warps, shared, stream, *arguments)


@lru_cache(maxsize=256)
def _kernel(number, config, head_dim, causal, bf16, arch, name, shared_bytes, device_index):
    rung = rungs.get(number)
    cubin = nvrtc.compile_file(rung.path, arch, rungs.macros(config, head_dim, causal=causal, bf16=bf16))
    return nvrtc.load(cubin, name, shared_bytes, device_index)


def _tiles(n, tile):
    return -(-n // tile)


def _naive(call, q, k, v, out, lse):
    """Rung 1: every score in memory."""
    p, config = call.problem, call.config
    seqlen, heads = p.seqlen_q, p.num_heads
    scores = q.new_empty(p.batch, heads, seqlen, seqlen)
    rows, pairs = _tiles(seqlen, config.tile_m), p.batch * heads
    call.launch("scores", (_tiles(seqlen, config.tile_n), rows, pairs), q, k, scores, seqlen, heads, call.scale * LOG2_E)
    call.launch("softmax", (seqlen, pairs, 1), scores, lse, seqlen)
    call.launch("output", (_tiles(p.head_dim, config.tile_n), rows, pairs), scores, v, out, seqlen, heads)


def _row_a_block(call, q, k, v, out, lse):
    """Rung 2."""
    p = call.problem
    grid = (p.seqlen_q, p.num_heads, p.batch)
    call.launch("forward", grid, q, k, v, out, lse, p.seqlen_q, p.num_heads, call.scale * LOG2_E)


def _keys_outside(call, q, k, v, out, lse):
    """Rung 3: a launch for each tile of keys."""
    p = call.problem
    out.zero_()
    row_max, row_sum = torch.full_like(lse, float("-inf")), torch.zeros_like(lse)
    grid = (_tiles(p.seqlen_q, call.config.tile_m), p.num_heads, p.batch)
    for n_tile in range(_tiles(p.seqlen_k, call.config.tile_n)):
        call.launch("step", grid, q, k, v, out, row_max, row_sum, p.seqlen_q, p.num_heads, call.scale * LOG2_E, n_tile)
    torch.add(row_max, row_sum.log2_(), out=lse).mul_(1 / LOG2_E)


def _flash(call, q, k, v, out, lse):
    """Rungs 4 to 8: a block for each tile of queries."""
    p = call.problem
    grid = (_tiles(p.seqlen_q, call.config.tile_m), p.num_heads, p.batch)
    call.launch("forward", grid, q, k, v, out, lse, p.seqlen_q, p.num_heads, call.scale * LOG2_E)


def _backward(call, q, k, v, out, lse, dout, dq, dk, dv):
    """Rung 9."""
    p = call.problem
    delta = torch.empty_like(lse)
    shape = (p.seqlen_q, p.num_heads)
    call.launch("delta", (_tiles(p.seqlen_q, call.config.num_warps), p.num_heads, p.batch), out, dout, delta, *shape)
    grid = (_tiles(p.seqlen_q, call.config.tile_m), p.num_heads, p.batch)
    call.launch("dkdv", grid, q, k, v, dout, lse, delta, dk, dv, *shape, call.scale)
    call.launch("dq", grid, q, k, v, dout, lse, delta, dq, *shape, call.scale)


_FORWARD = {1: _naive, 2: _row_a_block, 3: _keys_outside}
