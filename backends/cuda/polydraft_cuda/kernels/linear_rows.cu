// out[n, O] = x[n, I] @ w[O, I].T (+ bias) where outputs can be dealt evenly: each block has OUTPUTS of them for itself (sm_90a).
//
// Nothing is summed over blocks. Products are of 64 outputs: what the last one has beyond OUTPUTS is read from wherever, and dropped.
// A warp group takes one product; where there is but one, two groups take every other stage of its inputs, and their sums meet in
// shared memory in one order. The blocks of a cluster bring a part of the rows of x each, for all of them.
//
// Defines: ACT (1 bf16, 2 f16), TOKENS (rows of x in a launch at most: 8..128), OUTPUTS (a multiple of 16), CHUNKS (of 64 inputs in a
// stage), STAGES (in flight), CLUSTER (1, 2, 4), OUT_F32, BIAS, GATED (as in linear_tile.cu), ORDER (1: sums are taken in the order of the
// inputs, whatever the size and the block), FETCHES (`bytes` that the launch behind reads are brought into the second cache, a part by each block).
#include "tensor.cuh"
#define WIDTH TOKENS
#include "wgmma.cuh"
#include "boxes.cuh"

constexpr int PRODUCTS = (OUTPUTS + 63) / 64, TURNS = PRODUCTS == 1 ? 2 : 1, GROUPS = PRODUCTS * TURNS, CONSUMERS = GROUPS * 128;
constexpr int ACCUMULATORS = TOKENS / 2, X_PART = TOKENS / CLUSTER;
constexpr int W_BYTES = OUTPUTS * 128, X_BYTES = TOKENS * 128, STAGE = CHUNKS * (W_BYTES + X_BYTES);
static_assert(!ORDER || TURNS == 1, "one group takes all inputs");
static_assert(STAGES % TURNS == 0, "a place in the ring belongs to one group");
constexpr int AHEAD = TOKENS >= 64;  // a stage is multiplied while the one before it ends
#if OUT_F32
typedef float out_t;
#else
typedef act_t out_t;
#endif

// Tokens from `begin` to `end` of a product, in eights.
__device__ __forceinline__ void store_product(const float (&sums)[ACCUMULATORS], out_t* out, const act_t* bias, int product, int begin, int end, int n, int outputs) {
    const int lane = threadIdx.x & 31, g = lane >> 2, local = product * 64 + (threadIdx.x >> 5 & 3) * 16, base = blockIdx.x * OUTPUTS + local;
    if (local >= OUTPUTS) return;
    const float add[2] = {BIAS && base + g < outputs ? to_float(bias[base + g]) : 0.f, BIAS && base + g + 8 < outputs ? to_float(bias[base + g + 8]) : 0.f};
#pragma unroll
    for (int eight = 0; eight < TOKENS / 8; eight++) {
        if (eight < begin || eight >= end) continue;
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = eight * 8 + (lane & 3) * 2 + odd;
            if (token >= n) continue;
            const float low = sums[eight * 4 + odd], high = sums[eight * 4 + 2 + odd];  // rows g and g + 8
#if GATED  // gate and up of one output; both are rounded, as if they were stored
            const int width = outputs / 2, row = base / 2 + g;
            if (row < width) out[(int64_t)token * width + row] = from_float<out_t>(gated(low, high));
#else
            const int row = base + g;
            if (row < outputs) out[(int64_t)token * outputs + row] = from_float<out_t>(low + add[0]);
            if (row + 8 < outputs) out[(int64_t)token * outputs + row + 8] = from_float<out_t>(high + add[1]);
#endif
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
linear_rows(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, out_t* __restrict__ out, const act_t* __restrict__ bias, int n,
            int outputs, int inputs, const unsigned char* fetched, int bytes) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    __shared__ float shares[TURNS > 1 ? ACCUMULATORS : 1][128];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    const int count = (inputs / 64 + CHUNKS - 1) / CHUNKS, rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    const int shift = ORDER ? 0 : blockIdx.x / CLUSTER * (CLUSTER > 1 ? 13 : 5) % count;  // blocks begin with different inputs
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), GROUPS / TURNS * CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive_relaxed();
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        const bool fetches = threadIdx.x == CONSUMERS;
#if FETCHES
        const int part = (bytes / 128 + gridDim.x - 1) / gridDim.x * 128, begin = blockIdx.x * part;
        if (threadIdx.x == CONSUMERS + 1 && begin < bytes) prefetch_stretch(fetched + begin, min(part, bytes - begin));
#endif
        auto weights = [&](int i, int s) {
            const unsigned f = shared_address(&full[s]);
            barrier_expect(f, STAGE);
            if (GATED) load_pair_chunks(base + s * STAGE, &w_map, blockIdx.x * (OUTPUTS / 16), (i + shift) % count * CHUNKS, f);
            else load_chunks(base + s * STAGE, &w_map, blockIdx.x * OUTPUTS, (i + shift) % count * CHUNKS, f);
        };
        auto rows = [&](int i, int s) {
            const unsigned to = base + s * STAGE + CHUNKS * W_BYTES + rank * X_PART * 128, f = shared_address(&full[s]);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                if (CLUSTER > 1) load_shared_box(to + c * X_BYTES, &x_map, ((i + shift) % count * CHUNKS + c) * 64, rank * X_PART, f, (1 << CLUSTER) - 1);
                else load_box(to + c * X_BYTES, &x_map, ((i + shift) % count * CHUNKS + c) * 64, 0, f);
            }
        };
        return fetch_stages<STAGES, CLUSTER>(fetches, count, empty, weights, rows);
    }
    if (CLUSTER > 1) cluster_wait();
    wait_for_previous();
    const int group = threadIdx.x >> 7, thread = threadIdx.x & 127;
    auto release = [&](int s) {
        if (thread >= CLUSTER) return;
        if (CLUSTER > 1) barrier_arrive_at(shared_address(&empty[s]), thread);
        else barrier_arrive(shared_address(&empty[s]));
    };
    const int first = TURNS > 1 ? group : 0;
    float sums[ACCUMULATORS] = {};
    for (int i = first; i < count; i += TURNS) {
        const int s = i % STAGES;
        barrier_wait(shared_address(&full[s]), i / STAGES & 1);
        const unsigned w = base + s * STAGE + (TURNS > 1 ? 0 : group * 8192), x = base + s * STAGE + CHUNKS * W_BYTES;
        accumulators_fence(sums);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int k = 0; k < 4; k++) wgmma(sums, descriptor(w + c * W_BYTES + k * 32), descriptor(x + c * X_BYTES + k * 32));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned %0;" ::"n"(AHEAD) : "memory");
        accumulators_fence(sums);
        if (!AHEAD) release(s);
        else if (i > first) release((i - TURNS) % STAGES);
    }
    if (AHEAD) {
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        accumulators_fence(sums);
        if (count > first) release((first + (count - 1 - first) / TURNS * TURNS) % STAGES);
    }
    if (TURNS == 1) store_product(sums, out, bias, group, 0, TOKENS / 8, n, outputs);
    else {  // each group finishes a half of the tokens, the first all of eight
        constexpr int HALF = TOKENS / 16;
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; j++)
            if (group ? j / 4 < (HALF ? HALF : 1) : HALF && j / 4 >= HALF) shares[j][thread] = sums[j];
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; j++)
            if (group ? HALF && j / 4 >= HALF : j / 4 < (HALF ? HALF : 1)) sums[j] = group ? shares[j][thread] + sums[j] : sums[j] + shares[j][thread];
        store_product(sums, out, bias, 0, group ? (HALF ? HALF : 1) : 0, group ? TOKENS / 8 : HALF ? HALF : 1, n, outputs);
    }
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive_relaxed(), cluster_wait();
    }
}
