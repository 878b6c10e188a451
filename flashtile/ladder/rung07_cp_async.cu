// Rung 7, cp.async: NUM_STAGES tiles in shared memory; the next ones arrive while this one is computed.
//
// cp.async copies from global to shared memory in the background and through no register. A ring of NUM_STAGES slots holds the
// tile in work and those on their way. One barrier a tile is enough: behind it all threads' copies of this tile have landed,
// and all warps are done with the tile before, whose slot is filled next.
//
// Cost: shared memory for every stage, and so fewer blocks on an SM.
//
// Arguments: HEAD_DIM, IS_CAUSAL, TILE_M = 16 NUM_WARPS, TILE_N, NUM_STAGES >= 2. Tensors are (batch, seqlen, heads, HEAD_DIM),
// fp16. Source: PTX ISA, cp.async.

#define DTYPE "f16"
#include "ptx.cuh"

#define NEG_INF __int_as_float(0xff800000)
constexpr float LN2 = 0.69314718f;
constexpr int NUM_THREADS = 32 * NUM_WARPS;
static_assert(TILE_M == 16 * NUM_WARPS, "16 rows a warp");

// Where an element of a tile lies in shared memory.
__device__ int at(int row, int col) { return row * HEAD_DIM + (col / 8 ^ row % 8) * 8 + col % 8; }

template <int ROWS>
__device__ void load_tile(element* smem, const element* tensor, int begin, int seqlen, long long row_stride) {
    static_assert(ROWS * HEAD_DIM % (8 * NUM_THREADS) == 0, "as many pieces for each thread");
    for (int j = 0; j < ROWS * HEAD_DIM / (8 * NUM_THREADS); ++j) {
        const int i = j * NUM_THREADS + threadIdx.x;
        const int row = i / (HEAD_DIM / 8), col = i % (HEAD_DIM / 8) * 8;
        const bool inside = begin + row < seqlen;
        copy_async(smem + at(row, col), tensor + (inside ? begin + row : 0) * row_stride + col, inside);
    }
}

// 16 warps share an SM if none takes more than 128 registers a thread: two blocks of 8.
extern "C" __global__ void __launch_bounds__(NUM_THREADS, 512 / NUM_THREADS)
    forward(const element* q, const element* k, const element* v, element* out, float* lse, int seqlen, int num_heads,
            float scale_log2) {
    // Under a causal mask the last queries have most keys: they begin first.
    const int m_begin = (gridDim.x - 1 - blockIdx.x) * TILE_M, head = blockIdx.y, batch = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_begin = m_begin + 16 * warp;
    const long long row_stride = (long long)num_heads * HEAD_DIM;
    const long long of_head = ((long long)batch * seqlen * num_heads + head) * HEAD_DIM;
    extern __shared__ __align__(128) element smem[];
    constexpr int TILE = TILE_N * HEAD_DIM;
    element *q_smem = smem, *kv_smem = q_smem + TILE_M * HEAD_DIM;
    const int n_end = IS_CAUSAL ? min(m_begin + TILE_M, seqlen) : seqlen;

    // Every call closes a group of copies, an empty one past the end, so that groups can be counted.
    auto load_keys = [&](int n_tile) {
        element* slot = kv_smem + n_tile % NUM_STAGES * 2 * TILE;
        if (n_tile * TILE_N < n_end) {
            load_tile<TILE_N>(slot, k + of_head, n_tile * TILE_N, seqlen, row_stride);
            load_tile<TILE_N>(slot + TILE, v + of_head, n_tile * TILE_N, seqlen, row_stride);
        }
        commit_copies();
    };
    load_tile<TILE_M>(q_smem, q + of_head, m_begin, seqlen, row_stride);
    commit_copies();
    for (int n_tile = 0; n_tile < NUM_STAGES - 1; ++n_tile) load_keys(n_tile);
    wait_copies<NUM_STAGES - 1>();
    __syncthreads();
    // The warp's 16 queries, as a of mma, for the whole loop.
    unsigned q_frag[HEAD_DIM / 16][4];
    for (int d = 0; d < HEAD_DIM / 16; ++d)
        ldmatrix(q_frag[d], q_smem + at(16 * warp + lane % 16, 16 * d + lane / 16 * 8));

    // Of the 16 rows a lane has lane / 4 and lane / 4 + 8: r = 0 and 1. row_sum is of the lane's columns only, until the end.
    float acc[HEAD_DIM / 8][4] = {}, row_max[2] = {NEG_INF, NEG_INF}, row_sum[2] = {};
    for (int n_tile = 0; n_tile * TILE_N < n_end; ++n_tile) {
        const int n_begin = n_tile * TILE_N;
        wait_copies<NUM_STAGES - 2>();
        __syncthreads();
        load_keys(n_tile + NUM_STAGES - 1);
        const element *k_smem = kv_smem + n_tile % NUM_STAGES * 2 * TILE, *v_smem = k_smem + TILE;

        // scores (16, TILE_N) = q k^T; one ldmatrix has 16 keys by 16 dims.
        float scores[TILE_N / 8][4] = {};
        for (int d = 0; d < HEAD_DIM / 16; ++d)
            for (int n = 0; n < TILE_N / 16; ++n) {
                unsigned b[4];
                ldmatrix(b, k_smem + at(16 * n + lane / 16 * 8 + lane % 8, 16 * d + lane / 8 % 2 * 8));
                mma(scores[2 * n], q_frag[d], b[0], b[1]);
                mma(scores[2 * n + 1], q_frag[d], b[2], b[3]);
            }

        // Only tiles at the diagonal and at the end hide anything.
        if (n_begin + TILE_N > (IS_CAUSAL ? min(row_begin + 1, seqlen) : seqlen))
            for (int n = 0; n < TILE_N / 8; ++n)
                for (int i = 0; i < 4; ++i) {
                    const int row = row_begin + lane / 4 + i / 2 * 8, col = n_begin + 8 * n + lane % 4 * 2 + i % 2;
                    if (col >= (IS_CAUSAL ? min(row + 1, seqlen) : seqlen)) scores[n][i] = NEG_INF;
                }

        for (int r = 0; r < 2; ++r) {
            float new_max = row_max[r];
            for (int n = 0; n < TILE_N / 8; ++n) new_max = fmaxf(new_max, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            new_max = max_of_row(new_max);
            const float correction = exp2f((row_max[r] - new_max) * scale_log2), shift = new_max * scale_log2;
            row_max[r] = new_max;
            row_sum[r] *= correction;
            for (int d = 0; d < HEAD_DIM / 8; ++d) acc[d][2 * r] *= correction, acc[d][2 * r + 1] *= correction;
            for (int n = 0; n < TILE_N / 8; ++n)
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    scores[n][i] = exp2f(scores[n][i] * scale_log2 - shift);
                    row_sum[r] += scores[n][i];
                }
        }

        // acc (16, HEAD_DIM) += p v
        for (int n = 0; n < TILE_N / 16; ++n) {
            const float *left = scores[2 * n], *right = scores[2 * n + 1];
            const unsigned p[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]),
                                   pack(right[2], right[3])};
            for (int d = 0; d < HEAD_DIM / 16; ++d) {
                unsigned b[4];
                ldmatrix_trans(b, v_smem + at(16 * n + lane % 16, 16 * d + lane / 16 * 8));
                mma(acc[2 * d], p, b[0], b[1]);
                mma(acc[2 * d + 1], p, b[2], b[3]);
            }
        }
    }

    for (int r = 0; r < 2; ++r) {
        const int row = row_begin + lane / 4 + 8 * r;
        const float sum = sum_of_row(row_sum[r]), inverse = 1 / sum;
        if (row >= seqlen) continue;
        for (int d = 0; d < HEAD_DIM / 8; ++d)
            *(unsigned*)(out + of_head + row * row_stride + 8 * d + lane % 4 * 2) =
                pack(acc[d][2 * r] * inverse, acc[d][2 * r + 1] * inverse);
        if (lane % 4 == 0)
            lse[((long long)batch * num_heads + head) * seqlen + row] = (row_max[r] * scale_log2 + log2f(sum)) * LN2;
    }
}
