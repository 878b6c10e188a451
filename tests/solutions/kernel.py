import torch
import triton
import triton.language as tl


@triton.jit
def update(row_max, row_sum, scores, scale_log2):
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    # A row that has seen no key: -inf - -inf would be nan.
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores * scale_log2 - pivot[:, None])
    correction = tl.exp2(row_max - pivot)
    return new_max, row_sum * correction + tl.sum(p, 1), p, correction


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
