// Rung 9, backward: dq, dk and dv from out and lse; p is computed again, tile by tile, and no score is ever stored.
//
//   delta   delta_i = dout_i . out_i                                        a warp a query
//   dkdv    for each tile of keys (the blocks), over tiles of queries:      a warp 16 keys
//               s^T = k q^T;  p^T = 2^(scale s^T - lse);  dv += p^T dout
//               dp^T = v dout^T;  ds^T = p^T (dp^T - delta);  dk += ds^T q
//   dq      for each tile of queries (the blocks), over tiles of keys:      a warp 16 queries
//               s = q k^T;  p;  dp = dout v^T;  ds;  dq += ds k
//
// dkdv works on transposed scores: keys are then the rows that a warp owns, and p^T and ds^T are again what the next product
// takes as its a, without leaving the registers. All sums are made in a fixed order: the same bits in every run.
//
// Cost: 7 products instead of the 5 that are needed, since both kernels compute s and dp. To add to dq in dkdv would save two,
// for a pass of atomic additions whose order changes from run to run.
//
// Arguments: HEAD_DIM, IS_CAUSAL, IS_BF16, TILE_M = TILE_N = 16 NUM_WARPS. Tensors are (batch, seqlen, heads, HEAD_DIM), fp16
// or bf16. Source: Dao 2023, FlashAttention-2, algorithm 2.

#if IS_BF16
#define DTYPE "bf16"
#else
#define DTYPE "f16"
#endif
#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950f;
constexpr int NUM_THREADS = 32 * NUM_WARPS, TILE = TILE_M;
static_assert(TILE_M == 16 * NUM_WARPS && TILE_N == TILE_M, "16 rows a warp, of queries or of keys");

__device__ float to_float(element x) {
#if IS_BF16
    return __uint_as_float((unsigned)x << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}

extern "C" __global__ void delta(const element* out, const element* dout, float* delta, int seqlen, int num_heads) {
    const int row = blockIdx.x * NUM_WARPS + threadIdx.x / 32, head = blockIdx.y, batch = blockIdx.z, lane = threadIdx.x % 32;
    if (row >= seqlen) return;
    const long long of_row = (((long long)batch * seqlen + row) * num_heads + head) * HEAD_DIM;
    float sum = 0;
    for (int d = lane; d < HEAD_DIM; d += 32) sum += to_float(out[of_row + d]) * to_float(dout[of_row + d]);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) delta[((long long)batch * num_heads + head) * seqlen + row] = sum;
}

// Where an element of a tile lies in shared memory: as in rung 6.
__device__ int at(int row, int col) { return row * HEAD_DIM + (col / 8 ^ row % 8) * 8 + col % 8; }

__device__ void load_tile(element* smem, const element* tensor, int begin, int seqlen, long long row_stride) {
    for (int j = 0; j < TILE * HEAD_DIM / (8 * NUM_THREADS); ++j) {
        const int i = j * NUM_THREADS + threadIdx.x;
        const int row = i / (HEAD_DIM / 8), col = i % (HEAD_DIM / 8) * 8;
        const bool inside = begin + row < seqlen;
        copy_async(smem + at(row, col), tensor + (inside ? begin + row : 0) * row_stride + col, inside);
    }
}

// c (16, TILE) = a (16, HEAD_DIM) b (TILE, HEAD_DIM)^T; both in shared memory, a from row a_begin on.
__device__ void multiply_rows(float (&c)[TILE / 8][4], const element* a_smem, int a_begin, const element* b_smem) {
    const int lane = threadIdx.x % 32;
    for (int n = 0; n < TILE / 8; ++n)
        for (int i = 0; i < 4; ++i) c[n][i] = 0;
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
        unsigned a[4], b[4];
        ldmatrix(a, a_smem + at(a_begin + lane % 16, 16 * d + lane / 16 * 8));
        for (int n = 0; n < TILE / 16; ++n) {
            ldmatrix(b, b_smem + at(16 * n + lane / 16 * 8 + lane % 8, 16 * d + lane / 8 % 2 * 8));
            mma(c[2 * n], a, b[0], b[1]);
            mma(c[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// c (16, HEAD_DIM) += a (16, TILE) b (TILE, HEAD_DIM); a is the c of an earlier product, b in shared memory.
__device__ void multiply_add(float (&c)[HEAD_DIM / 8][4], const float (&a)[TILE / 8][4], const element* b_smem) {
    const int lane = threadIdx.x % 32;
    for (int n = 0; n < TILE / 16; ++n) {
        const float *left = a[2 * n], *right = a[2 * n + 1];
        const unsigned packed[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]),
                                    pack(right[2], right[3])};
        for (int d = 0; d < HEAD_DIM / 16; ++d) {
            unsigned b[4];
            ldmatrix_trans(b, b_smem + at(16 * n + lane % 16, 16 * d + lane / 16 * 8));
            mma(c[2 * d], packed, b[0], b[1]);
            mma(c[2 * d + 1], packed, b[2], b[3]);
        }
    }
}

__device__ void store_rows(element* tensor, const float (&c)[HEAD_DIM / 8][4], float factor, int row_begin, int seqlen,
                           long long row_stride) {
    const int lane = threadIdx.x % 32;
    for (int r = 0; r < 2; ++r) {
        const int row = row_begin + lane / 4 + 8 * r;
        if (row >= seqlen) continue;
        for (int d = 0; d < HEAD_DIM / 8; ++d)
            *(unsigned*)(tensor + row * row_stride + 8 * d + lane % 4 * 2) =
                pack(c[d][2 * r] * factor, c[d][2 * r + 1] * factor);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    dkdv(const element* q, const element* k, const element* v, const element* dout, const float* lse, const float* delta,
         element* dk, element* dv, int seqlen, int num_heads, float softmax_scale) {
    const int n_begin = blockIdx.x * TILE, head = blockIdx.y, batch = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key_begin = n_begin + 16 * warp;
    const float scale_log2 = softmax_scale * LOG2_E;
    const long long row_stride = (long long)num_heads * HEAD_DIM, of_rows = ((long long)batch * num_heads + head) * seqlen;
    const long long of_head = ((long long)batch * seqlen * num_heads + head) * HEAD_DIM;
    extern __shared__ __align__(128) element smem[];
    element *k_smem = smem, *v_smem = k_smem + TILE * HEAD_DIM, *q_smem = v_smem + TILE * HEAD_DIM;
    element* dout_smem = q_smem + TILE * HEAD_DIM;
    float *lse_smem = (float*)(dout_smem + TILE * HEAD_DIM), *delta_smem = lse_smem + TILE;
    load_tile(k_smem, k + of_head, n_begin, seqlen, row_stride);
    load_tile(v_smem, v + of_head, n_begin, seqlen, row_stride);

    float dk_acc[HEAD_DIM / 8][4] = {}, dv_acc[HEAD_DIM / 8][4] = {};
    for (int m_begin = IS_CAUSAL ? n_begin : 0; m_begin < seqlen; m_begin += TILE) {
        __syncthreads();
        load_tile(q_smem, q + of_head, m_begin, seqlen, row_stride);
        load_tile(dout_smem, dout + of_head, m_begin, seqlen, row_stride);
        commit_copies();
        for (int i = threadIdx.x; i < TILE; i += NUM_THREADS) {
            const bool inside = m_begin + i < seqlen;
            // Past the end p is 2^(0 - inf) = 0.
            lse_smem[i] = inside ? lse[of_rows + m_begin + i] * LOG2_E : __int_as_float(0x7f800000);
            delta_smem[i] = inside ? delta[of_rows + m_begin + i] : 0;
        }
        wait_copies<0>();
        __syncthreads();

        // Rows are keys, columns are queries.
        float p[TILE / 8][4], ds[TILE / 8][4];
        multiply_rows(p, k_smem, 16 * warp, q_smem);
        multiply_rows(ds, v_smem, 16 * warp, dout_smem);
        for (int n = 0; n < TILE / 8; ++n)
            for (int i = 0; i < 4; ++i) {
                const int key = key_begin + lane / 4 + i / 2 * 8, col = 8 * n + lane % 4 * 2 + i % 2;
                const bool hidden = IS_CAUSAL && m_begin + col < key;
                p[n][i] = hidden ? 0 : exp2f(p[n][i] * scale_log2 - lse_smem[col]);
                ds[n][i] = p[n][i] * (ds[n][i] - delta_smem[col]);
            }
        multiply_add(dv_acc, p, dout_smem);
        multiply_add(dk_acc, ds, q_smem);
    }
    store_rows(dk + of_head, dk_acc, softmax_scale, key_begin, seqlen, row_stride);
    store_rows(dv + of_head, dv_acc, 1, key_begin, seqlen, row_stride);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    dq(const element* q, const element* k, const element* v, const element* dout, const float* lse, const float* delta,
       element* dq, int seqlen, int num_heads, float softmax_scale) {
    const int m_begin = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y, batch = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_begin = m_begin + 16 * warp;
    const float scale_log2 = softmax_scale * LOG2_E;
    const long long row_stride = (long long)num_heads * HEAD_DIM, of_rows = ((long long)batch * num_heads + head) * seqlen;
    const long long of_head = ((long long)batch * seqlen * num_heads + head) * HEAD_DIM;
    extern __shared__ __align__(128) element smem[];
    element *q_smem = smem, *dout_smem = q_smem + TILE * HEAD_DIM, *k_smem = dout_smem + TILE * HEAD_DIM;
    element* v_smem = k_smem + TILE * HEAD_DIM;
    load_tile(q_smem, q + of_head, m_begin, seqlen, row_stride);
    load_tile(dout_smem, dout + of_head, m_begin, seqlen, row_stride);
    float row_lse[2], row_delta[2];
    for (int r = 0; r < 2; ++r) {
        const int row = row_begin + lane / 4 + 8 * r;
        row_lse[r] = row < seqlen ? lse[of_rows + row] * LOG2_E : 0;
        row_delta[r] = row < seqlen ? delta[of_rows + row] : 0;
    }

    float dq_acc[HEAD_DIM / 8][4] = {};
    const int n_end = IS_CAUSAL ? min(m_begin + TILE, seqlen) : seqlen;
    for (int n_begin = 0; n_begin < n_end; n_begin += TILE) {
        __syncthreads();
        load_tile(k_smem, k + of_head, n_begin, seqlen, row_stride);
        load_tile(v_smem, v + of_head, n_begin, seqlen, row_stride);
        commit_copies();
        wait_copies<0>();
        __syncthreads();

        float p[TILE / 8][4], ds[TILE / 8][4];
        multiply_rows(p, q_smem, 16 * warp, k_smem);
        multiply_rows(ds, dout_smem, 16 * warp, v_smem);
        for (int n = 0; n < TILE / 8; ++n)
            for (int i = 0; i < 4; ++i) {
                const int r = i / 2, row = row_begin + lane / 4 + 8 * r, col = n_begin + 8 * n + lane % 4 * 2 + i % 2;
                const bool hidden = col >= (IS_CAUSAL ? min(row + 1, seqlen) : seqlen);
                p[n][i] = hidden ? 0 : exp2f(p[n][i] * scale_log2 - row_lse[r]);
                ds[n][i] = p[n][i] * (ds[n][i] - row_delta[r]);
            }
        multiply_add(dq_acc, ds, k_smem);
    }
    store_rows(dq + of_head, dq_acc, softmax_scale, row_begin, seqlen, row_stride);
}
