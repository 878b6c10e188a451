def flops(batch, seqlen_q, seqlen_k, heads, head_dim, causal):
    pairs = seqlen_q * seqlen_k
    if causal:
        # query i sees seqlen_k - seqlen_q + i + 1 keys
        pairs = seqlen_q * (seqlen_k - seqlen_q) + seqlen_q * (seqlen_q + 1) // 2
    return 4 * batch * heads * pairs * head_dim


def bytes_moved(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, itemsize):
    q_and_out = 2 * batch * seqlen_q * heads * head_dim * itemsize
    k_and_v = 2 * batch * seqlen_k * heads_kv * head_dim * itemsize
    return q_and_out + k_and_v + 4 * batch * seqlen_q * heads


def floor(num_flops, num_bytes, tflops, bandwidth):
    compute, memory = num_flops / tflops / 1e9, num_bytes / bandwidth * 1e3
    return ("compute", compute) if compute >= memory else ("memory", memory)
