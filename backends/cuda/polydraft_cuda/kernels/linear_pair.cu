// out[n, O] = x[n, I] @ w[O, I].T (+ bias) for matrices of few outputs: two blocks share a tile of 64 outputs (sm_90a).
//
// The blocks of a cluster of two take half of the inputs each, their two warp groups every other chunk of 64; the four sums meet in
// shared memory and are added in one order. There is one tile a cluster, so that nothing has to pass through memory.
//
// Defines: ACT (1 bf16, 2 f16), TOKENS (rows of x in a launch at most: 8..32), STAGES (double chunks in flight), OUT_F32, BIAS.
// I is a multiple of 128.
#include "tensor.cuh"
#define WIDTH TOKENS
#include "wgmma.cuh"
#include "boxes.cuh"

constexpr int ROWS = 64, W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128, HALF = W_BYTES + X_BYTES, STAGE = 2 * HALF;
constexpr int CONSUMERS = 256, ACCUMULATORS = TOKENS / 2;
#if OUT_F32
typedef float out_t;
#else
typedef act_t out_t;
#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
linear_pair(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, out_t* __restrict__ out, const act_t* __restrict__ bias, int n,
            int outputs, int inputs) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    __shared__ float shares[2][ACCUMULATORS][128];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    const int rank = blockIdx.x & 1, row0 = (blockIdx.x >> 1) * ROWS, doubles = inputs / 128;
    const int begin = rank * doubles / 2, count = (rank + 1) * doubles / 2 - begin;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), 2);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        if (threadIdx.x == CONSUMERS) {
            auto weights = [&](int i, int s) {
                const unsigned f = shared_address(&full[s]);
                barrier_expect(f, STAGE);
                load_box(base + s * STAGE, &w_map, (begin + i) * 128, row0, f);
                load_box(base + s * STAGE + W_BYTES, &w_map, (begin + i) * 128 + 64, row0, f);
            };
            auto rows = [&](int i, int s) {
                const unsigned f = shared_address(&full[s]);
                load_box(base + s * STAGE + 2 * W_BYTES, &x_map, (begin + i) * 128, 0, f);
                load_box(base + s * STAGE + 2 * W_BYTES + X_BYTES, &x_map, (begin + i) * 128 + 64, 0, f);
            };
            const int early = min(STAGES, count);
            for (int i = 0; i < early; i++) weights(i, i);  // they depend on nobody
            wait_for_previous();
            for (int i = 0; i < early; i++) rows(i, i);
            for (int i = STAGES; i < count; i++) {
                const int s = i % STAGES;
                barrier_wait(shared_address(&empty[s]), (i / STAGES - 1) & 1);
                weights(i, s), rows(i, s);
            }
        } else
            wait_for_previous();
        __syncwarp();
        cluster_arrive(), cluster_wait();
        cluster_arrive_relaxed(), cluster_wait();
        return;
    }
    wait_for_previous();
    launch_dependents();  // not before: who follows may rely on what lies two launches back
    const int group = threadIdx.x >> 7, thread = threadIdx.x & 127, lane = threadIdx.x & 31, warp = thread >> 5;
    float sums[ACCUMULATORS] = {};
    for (int i = 0; i < count; i++) {
        const int s = i % STAGES;
        barrier_wait(shared_address(&full[s]), i / STAGES & 1);
        const unsigned w = base + s * STAGE + group * W_BYTES, x = base + s * STAGE + 2 * W_BYTES + group * X_BYTES;
        multiply_chunk<0>(sums, w, x);
        if (thread == 0) barrier_arrive(shared_address(&empty[s]));
    }
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; j++) shares[group][j][thread] = sums[j];
    cluster_arrive(), cluster_wait();
#pragma unroll
    for (int k = 0; k < ACCUMULATORS / 4; k++) {  // each warp group of each block finishes a quarter
        const int j = (k * 2 + rank) * 2 + group;
        float sum = 0.f;
#pragma unroll
        for (int from = 0; from < 2; from++)
#pragma unroll
            for (int g = 0; g < 2; g++) {
                unsigned there;
                float part;
                asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(&shares[g][j][thread])), "r"(from));
                asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(there) : "memory");
                sum += part;
            }
        const int row = row0 + warp * 16 + (j >> 1 & 1) * 8 + (lane >> 2), token = (j >> 2) * 8 + (lane & 3) * 2 + (j & 1);
        if (row < outputs && token < n) out[(int64_t)token * outputs + row] = from_float<out_t>(sum + (BIAS ? to_float(bias[row]) : 0.f));
    }
    cluster_arrive_relaxed(), cluster_wait();  // nobody leaves while his sums are read
}
