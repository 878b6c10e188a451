// Rung 3, FlashAttention-1: tiles in shared memory, and the paper's loop order: keys outside, queries inside.
//
//   for each tile of keys (one launch each):
//       for each tile of queries that sees it (the blocks of the launch):
//           read out, row_max and row_sum of the rows; absorb the tile; write all three back
//
// A tile of keys is read once for TILE_M queries instead of once for each, and from shared memory every number is used
// ROWS or COLS times from a register. The outer loop is a loop of launches: all tiles of queries work at the same time, and the
// next launch waits for them. A single block that walks over all of this, as the paper's algorithm reads, leaves most of the
// GPU idle: there are only batch x heads such blocks.
//
// Cost: out goes to memory and comes back once for each tile of keys, and is divided by row_sum each time.
//
// Arguments: HEAD_DIM, IS_CAUSAL, TILE_M, TILE_N. Tensors are (batch, seqlen, heads, HEAD_DIM), fp32.
// Source: Dao et al. 2022, FlashAttention, algorithm 1.

#define NEG_INF __int_as_float(0xff800000)
constexpr float LN2 = 0.69314718f;
constexpr int NUM_THREADS = 256;
// 16 x 16 threads: thread (y, x) owns rows y ROWS + r, score columns x + 16 c, and groups of 4 elements of out.
constexpr int ROWS = TILE_M / 16, COLS = TILE_N / 16, GROUPS = HEAD_DIM / 64;
// Four numbers more a row: 16 rows then begin in different banks, and float4 loads stay aligned.
constexpr int LD = HEAD_DIM + 4, P_LD = TILE_N + 4;

template <int TILE>
__device__ void load_tile(float* smem, const float* tensor, int begin, int seqlen, long long row_stride) {
    static_assert(TILE * HEAD_DIM % (4 * NUM_THREADS) == 0, "as many pieces for each thread");
    for (int j = 0; j < TILE * HEAD_DIM / (4 * NUM_THREADS); ++j) {
        const int i = j * NUM_THREADS + threadIdx.x;
        const int row = i / (HEAD_DIM / 4), d = i % (HEAD_DIM / 4) * 4;
        float4 x = {0, 0, 0, 0};
        if (begin + row < seqlen) x = *(const float4*)(tensor + (begin + row) * row_stride + d);
        *(float4*)(smem + row * LD + d) = x;
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    step(const float* q, const float* k, const float* v, float* out, float* global_max, float* global_sum, int seqlen,
         int num_heads, float scale_log2, int n_tile) {
    const int m_begin = blockIdx.x * TILE_M, head = blockIdx.y, batch = blockIdx.z, n_begin = n_tile * TILE_N;
    if (IS_CAUSAL && m_begin + TILE_M <= n_begin) return;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const long long row_stride = (long long)num_heads * HEAD_DIM;
    const long long of_head = ((long long)batch * seqlen * num_heads + head) * HEAD_DIM;
    extern __shared__ __align__(16) float smem[];
    float *q_smem = smem, *k_smem = q_smem + TILE_M * LD, *v_smem = k_smem + TILE_N * LD, *p_smem = v_smem + TILE_N * LD;
    load_tile<TILE_M>(q_smem, q + of_head, m_begin, seqlen, row_stride);
    load_tile<TILE_N>(k_smem, k + of_head, n_begin, seqlen, row_stride);
    load_tile<TILE_N>(v_smem, v + of_head, n_begin, seqlen, row_stride);
    __syncthreads();

    // scores = q k^T
    float scores[ROWS][COLS] = {};
    for (int d = 0; d < HEAD_DIM; d += 4) {
        float4 a[ROWS], b[COLS];
        for (int r = 0; r < ROWS; ++r) a[r] = *(float4*)(q_smem + (y * ROWS + r) * LD + d);
        for (int c = 0; c < COLS; ++c) b[c] = *(float4*)(k_smem + (x + 16 * c) * LD + d);
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLS; ++c)
                scores[r][c] += a[r].x * b[c].x + a[r].y * b[c].y + a[r].z * b[c].z + a[r].w * b[c].w;
    }

    float old_weight[ROWS], new_sum[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        const int row = m_begin + y * ROWS + r, num_keys = IS_CAUSAL ? min(row + 1, seqlen) : seqlen;
        const long long of_row = ((long long)batch * num_heads + head) * seqlen + row;
        const float row_max = row < seqlen ? global_max[of_row] : NEG_INF, row_sum = row < seqlen ? global_sum[of_row] : 0;
        float new_max = row_max, tile_sum = 0;
        for (int c = 0; c < COLS; ++c) {
            scores[r][c] = n_begin + x + 16 * c < num_keys ? scores[r][c] * scale_log2 : NEG_INF;
            new_max = fmaxf(new_max, scores[r][c]);
        }
        // The 16 threads of a row are neighbours in a warp.
        for (int lane = 8; lane > 0; lane /= 2) new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, lane));
        for (int c = 0; c < COLS; ++c) {
            const float p = exp2f(scores[r][c] - new_max);
            p_smem[(y * ROWS + r) * P_LD + x + 16 * c] = p;
            tile_sum += p;
        }
        for (int lane = 8; lane > 0; lane /= 2) tile_sum += __shfl_xor_sync(~0u, tile_sum, lane);
        // out is an average of the values so far: its weight is the old sum, under the new maximum.
        old_weight[r] = row_sum * exp2f(row_max - new_max);
        new_sum[r] = old_weight[r] + tile_sum;
        if (x == 0 && row < seqlen) global_max[of_row] = new_max, global_sum[of_row] = new_sum[r];
    }
    // The rows of p that a warp reads are those that it wrote.
    __syncwarp();

    // acc = p v
    float4 acc[ROWS][GROUPS] = {};
    for (int col = 0; col < TILE_N; col += 4) {
        float4 p[ROWS];
        for (int r = 0; r < ROWS; ++r) p[r] = *(float4*)(p_smem + (y * ROWS + r) * P_LD + col);
        for (int g = 0; g < GROUPS; ++g)
            for (int j = 0; j < 4; ++j) {
                const float4 b = *(float4*)(v_smem + (col + j) * LD + 64 * g + 4 * x);
                for (int r = 0; r < ROWS; ++r) {
                    const float weight = ((float*)&p[r])[j];
                    acc[r][g].x += weight * b.x, acc[r][g].y += weight * b.y;
                    acc[r][g].z += weight * b.z, acc[r][g].w += weight * b.w;
                }
            }
    }

    for (int r = 0; r < ROWS; ++r) {
        const int row = m_begin + y * ROWS + r;
        if (row >= seqlen) continue;
        for (int g = 0; g < GROUPS; ++g) {
            float4* target = (float4*)(out + of_head + row * row_stride + 64 * g + 4 * x);
            const float4 old = *target;
            const float a = old_weight[r], b = 1 / new_sum[r];
            *target = {(old.x * a + acc[r][g].x) * b, (old.y * a + acc[r][g].y) * b, (old.z * a + acc[r][g].z) * b,
                       (old.w * a + acc[r][g].w) * b};
        }
    }
}
