// Rung 1, naive: the definition in three kernels; every score goes to memory and comes back.
//
//   scores   scores[i][j] = scale q_i . k_j      a thread a score
//   softmax  p = softmax of each row, in place   a block a row
//   output   out_i = sum over j of p[i][j] v_j   a thread an element of out
//
// Cost: seqlen^2 numbers a head written twice and read four times, and seqlen^2 numbers of memory: 1 GiB for 16 heads of 4096.
// But what limits it is the first kernel: each of its products needs two loads, and only the L1 cache spares it most of them.
//
// Arguments: HEAD_DIM, IS_CAUSAL; TILE_M x TILE_N threads a block. Tensors are (batch, seqlen, heads, HEAD_DIM), fp32.

#define NEG_INF __int_as_float(0xff800000)
constexpr float LN2 = 0.69314718f;
constexpr int NUM_THREADS = 32 * NUM_WARPS;

extern "C" __global__ void scores(const float* q, const float* k, float* scores, int seqlen, int num_heads, float scale_log2) {
    const int col = blockIdx.x * TILE_N + threadIdx.x % TILE_N, row = blockIdx.y * TILE_M + threadIdx.x / TILE_N;
    const int batch = blockIdx.z / num_heads, head = blockIdx.z % num_heads;
    if (row >= seqlen || col >= seqlen) return;
    const float* q_row = q + (((long long)batch * seqlen + row) * num_heads + head) * HEAD_DIM;
    const float* k_row = k + (((long long)batch * seqlen + col) * num_heads + head) * HEAD_DIM;
    float score = 0;
    for (int d = 0; d < HEAD_DIM; ++d) score += q_row[d] * k_row[d];
    const bool hidden = IS_CAUSAL && col > row;
    scores[((long long)blockIdx.z * seqlen + row) * seqlen + col] = hidden ? NEG_INF : score * scale_log2;
}

// The same maximum or sum in all threads of a block.
template <bool IS_MAX>
__device__ float over_block(float x) {
    __shared__ float of_warp[NUM_WARPS];
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(~0u, x, step);
        x = IS_MAX ? fmaxf(x, other) : x + other;
    }
    __syncthreads();
    of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warp[0];
    for (int warp = 1; warp < NUM_WARPS; ++warp) x = IS_MAX ? fmaxf(x, of_warp[warp]) : x + of_warp[warp];
    return x;
}

extern "C" __global__ void softmax(float* scores, float* lse, int seqlen) {
    const long long row = (long long)blockIdx.y * seqlen + blockIdx.x;
    float* row_scores = scores + row * seqlen;
    float row_max = NEG_INF, row_sum = 0;
    for (int col = threadIdx.x; col < seqlen; col += NUM_THREADS) row_max = fmaxf(row_max, row_scores[col]);
    row_max = over_block<true>(row_max);
    for (int col = threadIdx.x; col < seqlen; col += NUM_THREADS) row_sum += exp2f(row_scores[col] - row_max);
    row_sum = over_block<false>(row_sum);
    for (int col = threadIdx.x; col < seqlen; col += NUM_THREADS)
        row_scores[col] = exp2f(row_scores[col] - row_max) / row_sum;
    if (threadIdx.x == 0) lse[row] = (row_max + log2f(row_sum)) * LN2;
}

extern "C" __global__ void output(const float* p, const float* v, float* out, int seqlen, int num_heads) {
    const int dim = blockIdx.x * TILE_N + threadIdx.x % TILE_N, row = blockIdx.y * TILE_M + threadIdx.x / TILE_N;
    const int batch = blockIdx.z / num_heads, head = blockIdx.z % num_heads;
    if (row >= seqlen || dim >= HEAD_DIM) return;
    const float* p_row = p + ((long long)blockIdx.z * seqlen + row) * seqlen;
    const float* v_col = v + ((long long)batch * seqlen * num_heads + head) * HEAD_DIM + dim;
    float sum = 0;
    for (int col = 0; col < seqlen; ++col) sum += p_row[col] * v_col[(long long)col * num_heads * HEAD_DIM];
    out[(((long long)batch * seqlen + row) * num_heads + head) * HEAD_DIM + dim] = sum;
}
