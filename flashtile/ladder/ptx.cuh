// The instructions of rungs 5 to 9 that CUDA C++ has no words for. PTX ISA, "Warp-level matrix instructions", "cp.async".
//
// A file that includes this defines DTYPE first: "f16" or "bf16". Elements travel as their 16 bits, two to a register.

typedef unsigned short element;

// Shared memory has addresses of 32 bits of its own.
__device__ __forceinline__ unsigned smem_address(const void* pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }

// Load four 8 x 8 matrices. Lanes 0-7 give the addresses of the rows (16 bytes each) of the first, 8-15 of the second, and so
// on. In matrix i a lane receives elements 2 (lane % 4) and the one after it, of row lane / 4, in r[i].
__device__ __forceinline__ void ldmatrix(unsigned (&r)[4], const element* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(row)));
}

// The same, with each matrix transposed on its way.
__device__ __forceinline__ void ldmatrix_trans(unsigned (&r)[4], const element* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(row)));
}

// c (16, 8) += a (16, 16) b (16, 8), by the 32 lanes of a warp together; products and sums in fp32.
//   a: r[0] row lane / 4, columns 2 (lane % 4) and + 1; r[1] 8 rows below; r[2], r[3] the same, 8 columns to the right.
//   b: b0 column lane / 4, rows 2 (lane % 4) and + 1; b1 8 rows below.
//   c: c[0], c[1] row lane / 4, columns 2 (lane % 4) and + 1; c[2], c[3] 8 rows below.
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." DTYPE "." DTYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Round two numbers to DTYPE, `low` in the lower half: the element with the smaller column.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned bits;
    asm("cvt.rn." DTYPE "x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// Copy 16 bytes from global to shared memory without passing through registers, in the background; zeros if not `inside`.
__device__ __forceinline__ void copy_async(element* target, const element* source, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(smem_address(target)), "l"(source), "r"(inside ? 16 : 0));
}

// Close a group of copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

// Wait until at most PENDING of this thread's latest groups are still under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

// Sum or maximum over the four lanes that share rows of a c.
__device__ __forceinline__ float max_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float sum_of_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
