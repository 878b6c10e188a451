// Rung 2, online softmax: one kernel, a block a query; no score leaves the chip.
//
// The block walks over the keys, TILE_N at a time. It keeps the largest score so far, row_max, and what was summed relative to
// it, row_sum and acc; when a larger score comes, both are multiplied by correction = 2^(old row_max - new row_max).
//
// Cost: memory beyond the tensors is 0. But each query reads all keys and values for itself: with seqlen queries that is
// 2 seqlen^2 HEAD_DIM numbers a head, from the L2 cache, for two FLOPs each. The next rung shares them among queries.
//
// Arguments: HEAD_DIM, IS_CAUSAL; TILE_N = HEAD_DIM threads: a thread owns one key of the tile, then one element of out.
// Tensors are (batch, seqlen, heads, HEAD_DIM), fp32.

#define NEG_INF __int_as_float(0xff800000)
constexpr float LN2 = 0.69314718f;
static_assert(TILE_N == HEAD_DIM && 32 * NUM_WARPS == HEAD_DIM, "a thread a key, and a thread an element of out");

__device__ float max_of_block(float x) {
    __shared__ float of_warp[NUM_WARPS];
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warp[0];
    for (int warp = 1; warp < NUM_WARPS; ++warp) x = fmaxf(x, of_warp[warp]);
    return x;
}

extern "C" __global__ void forward(const float* q, const float* k, const float* v, float* out, float* lse, int seqlen,
                                   int num_heads, float scale_log2) {
    const int row = blockIdx.x, head = blockIdx.y, batch = blockIdx.z, thread = threadIdx.x;
    const long long row_stride = (long long)num_heads * HEAD_DIM;
    const long long of_head = ((long long)batch * seqlen * num_heads + head) * HEAD_DIM;
    __shared__ __align__(16) float q_smem[HEAD_DIM], p_smem[TILE_N];
    q_smem[thread] = q[of_head + row * row_stride + thread];
    __syncthreads();

    float row_max = NEG_INF, row_sum = 0, acc = 0;
    const int num_keys = IS_CAUSAL ? row + 1 : seqlen;
    for (int n_begin = 0; n_begin < num_keys; n_begin += TILE_N) {
        float score = NEG_INF;
        if (n_begin + thread < num_keys) {
            const float* k_row = k + of_head + (n_begin + thread) * row_stride;
            score = 0;
            for (int d = 0; d < HEAD_DIM; d += 4) {
                const float4 a = *(const float4*)(q_smem + d), b = *(const float4*)(k_row + d);
                score += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
            score *= scale_log2;
        }
        const float new_max = fmaxf(row_max, max_of_block(score));
        const float correction = exp2f(row_max - new_max);
        p_smem[thread] = exp2f(score - new_max);
        __syncthreads();
        row_max = new_max;
        row_sum *= correction;
        acc *= correction;
        const float* v_col = v + of_head + n_begin * row_stride + thread;
        const int num_cols = min(TILE_N, num_keys - n_begin);
#pragma unroll 8
        for (int col = 0; col < num_cols; ++col) {
            row_sum += p_smem[col];
            acc += p_smem[col] * v_col[col * row_stride];
        }
        __syncthreads();
    }
    out[of_head + row * row_stride + thread] = acc / row_sum;
    if (thread == 0) lse[((long long)batch * num_heads + head) * seqlen + row] = (row_max + log2f(row_sum)) * LN2;
}
