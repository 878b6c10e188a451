// Rung 4, FlashAttention-2: queries outside, keys inside; out stays in registers until it is done.
//
//   for each tile of queries (the blocks):
//       for each tile of keys that it sees: absorb the tile into acc, row_max and row_sum
//       out = acc / row_sum, once
//
// Nothing but q, k, v, out and lse touches memory, q is loaded once, and blocks wait for nobody. acc is not divided in each
// step, and of the softmax state only lse is written.
//
// Cost: both products run on the fp32 units: 67 TFLOP/s at most on an H200, a fifteenth of what its tensor cores have.
//
// Arguments: HEAD_DIM, IS_CAUSAL, TILE_M, TILE_N. Tensors are (batch, seqlen, heads, HEAD_DIM), fp32.
// Source: Dao 2023, FlashAttention-2, algorithm 1.

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
    forward(const float* q, const float* k, const float* v, float* out, float* lse, int seqlen, int num_heads,
            float scale_log2) {
    // Under a causal mask the last queries have most keys: they begin first.
    const int m_begin = (gridDim.x - 1 - blockIdx.x) * TILE_M, head = blockIdx.y, batch = blockIdx.z;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const long long row_stride = (long long)num_heads * HEAD_DIM;
    const long long of_head = ((long long)batch * seqlen * num_heads + head) * HEAD_DIM;
    extern __shared__ __align__(16) float smem[];
    float *q_smem = smem, *k_smem = q_smem + TILE_M * LD, *v_smem = k_smem + TILE_N * LD, *p_smem = v_smem + TILE_N * LD;
    load_tile<TILE_M>(q_smem, q + of_head, m_begin, seqlen, row_stride);

    float row_max[ROWS], row_sum[ROWS] = {};
    float4 acc[ROWS][GROUPS] = {};
    for (int r = 0; r < ROWS; ++r) row_max[r] = NEG_INF;
    const int n_end = IS_CAUSAL ? min(m_begin + TILE_M, seqlen) : seqlen;
    for (int n_begin = 0; n_begin < n_end; n_begin += TILE_N) {
        __syncthreads();
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

        for (int r = 0; r < ROWS; ++r) {
            const int row = m_begin + y * ROWS + r, num_keys = IS_CAUSAL ? min(row + 1, seqlen) : seqlen;
            float new_max = row_max[r], tile_sum = 0;
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
            const float correction = exp2f(row_max[r] - new_max);
            row_max[r] = new_max;
            row_sum[r] = row_sum[r] * correction + tile_sum;
            for (int g = 0; g < GROUPS; ++g) {
                acc[r][g].x *= correction, acc[r][g].y *= correction;
                acc[r][g].z *= correction, acc[r][g].w *= correction;
            }
        }
        // The rows of p that a warp reads are those that it wrote.
        __syncwarp();

        // acc += p v
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
    }

    for (int r = 0; r < ROWS; ++r) {
        const int row = m_begin + y * ROWS + r;
        if (row >= seqlen) continue;
        const float b = 1 / row_sum[r];
        for (int g = 0; g < GROUPS; ++g)
            *(float4*)(out + of_head + row * row_stride + 64 * g + 4 * x) = {acc[r][g].x * b, acc[r][g].y * b,
                                                                             acc[r][g].z * b, acc[r][g].w * b};
        if (x == 0) lse[((long long)batch * num_heads + head) * seqlen + row] = (row_max[r] + log2f(row_sum[r])) * LN2;
    }
}
