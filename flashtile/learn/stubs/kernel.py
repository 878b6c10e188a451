"""Complete a Triton kernel: the step of the online softmax.

`attention_forward` below is the forward pass as a GPU runs it: one program owns TILE_M queries and walks over the tiles
of keys. Loads, masks, products and the end are there; `update` is missing. It is that of the exercise `softmax`, with
three differences:

- A GPU has exp2 and no exp. e ** (scale * x) is 2 ** (scale * log2(e) * x), so the kernel is given scale_log2, the
  softmax scale times log2(e). Scores come unscaled; row_max is kept in base-2 units, that is, times scale_log2.
- It is written with tl instead of torch: tl.max(x, 1), tl.sum(x, 1), tl.maximum, tl.exp2, tl.where, and x[:, None] to
  set one number a row beside a tile. Nothing is changed in place: a function takes tiles and returns tiles.
- It is in fp32, where exponentials of more than 128 are inf. And -inf - -inf is still nan.

On a machine with a GPU the kernel is compiled; elsewhere it runs in Triton's interpreter, in which print shows what a tile
holds (`print(scores)`), and which is more patient than the compiler: keep to tl.

Guide: part 3, "Triton". Done when: out and lse are right within fp32, with and without a causal mask, for lengths that
are no multiple of the tile, for rows that see no key, and for scores in the hundreds.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def update(row_max, row_sum, scores, scale_log2):
    """Absorb a tile of scores.

    Args:
        row_max: (TILE_M,), the largest score seen so far times scale_log2; -inf if there was none.
        row_sum: (TILE_M,), sum of 2 ** (score * scale_log2 - row_max) over the scores seen so far; 0 if there was none.
        scores: (TILE_M, TILE_N), the new tile, not scaled; -inf where a key is hidden.
        scale_log2: a number above 0.
    Returns:
        row_max, row_sum: the same after this tile.
        p: (TILE_M, TILE_N), 2 ** (scores * scale_log2 - new row_max); 0 where hidden.
        correction: (TILE_M,), what sums made with the old row_max have to be multiplied with.
    """
    raise NotImplementedError


@triton.jit
def attention_forward(q, k, v, out, lse, seqlen_q, seqlen_k, scale_log2, IS_CAUSAL: tl.constexpr, TILE_M: tl.constexpr,
                      TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr):  # fmt: skip
    """One tile of queries of one head. q, k, v, out, lse: pointers to contiguous fp32."""
    row_begin = tl.program_id(0) * TILE_M
    rows, dims = row_begin + tl.arange(0, TILE_M), tl.arange(0, HEAD_DIM)
    # What is past the end is not loaded, and not stored.
    q_tile = tl.load(q + rows[:, None] * HEAD_DIM + dims[None, :], mask=rows[:, None] < seqlen_q, other=0.0)
    row_max = tl.full((TILE_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, HEAD_DIM), tl.float32)
    stop = seqlen_k
    if IS_CAUSAL:
        stop = tl.minimum(seqlen_k, row_begin + TILE_M + seqlen_k - seqlen_q)
    for begin in tl.range(0, stop, TILE_N):
        cols = begin + tl.arange(0, TILE_N)
        at, inside = cols[:, None] * HEAD_DIM + dims[None, :], cols[:, None] < seqlen_k
        # (TILE_M, TILE_N); "ieee": without it fp32 products keep 10 bits of their factors
        scores = tl.dot(q_tile, tl.load(k + at, mask=inside, other=0.0).T, input_precision="ieee")
        visible = cols[None, :] < seqlen_k
        if IS_CAUSAL:
            visible = visible & (cols[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
        scores = tl.where(visible, scores, float("-inf"))
        row_max, row_sum, p, correction = update(row_max, row_sum, scores, scale_log2)
        acc = tl.dot(p, tl.load(v + at, mask=inside, other=0.0), acc * correction[:, None], input_precision="ieee")
    # A row without a key has out 0 and lse -inf.
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], mask=rows[:, None] < seqlen_q)
    # log2 back to natural units: times ln 2
    tl.store(lse + rows, (row_max + tl.log2(total)) * 0.6931471805599453, mask=rows < seqlen_q)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False):
    """q: (seqlen_q, head_dim); k, v: (seqlen_k, head_dim), fp32. Returns out (seqlen_q, head_dim), lse (seqlen_q,)."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[0])
    scale_log2 = q.shape[1] ** -0.5 * 1.4426950408889634
    attention_forward[(triton.cdiv(q.shape[0], 32),)](
        q, k, v, out, lse, q.shape[0], k.shape[0], scale_log2, IS_CAUSAL=causal, TILE_M=32, TILE_N=32, HEAD_DIM=q.shape[1]
    )
    return out, lse
