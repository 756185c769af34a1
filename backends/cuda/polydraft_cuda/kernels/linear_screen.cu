// Scores of all outputs for up to TOKENS rows of x by weights in a byte each, from which `screen.cu` finds each row's highest output
// without reading more than a few rows of the weights themselves (sm_90a).
//
// The bytes (`screen.cuh`) lie in the order of operands and are widened in registers, exactly; rows of x are turned ones (`screen_turn`). A block has
// whole tiles of ROWS outputs, whose scores nobody else needs. With CLUSTER 2 each of two blocks brings half of the rows of x for both.
// `pairs` gets the higher score of outputs r and r + 8 of each 16, in bfloat16: [pairs, TOKENS], tokens in the order of `token_at`.
// `kept` gets what each warp has found best: [blocks, warps, TOKENS] pairs of score and output.
//
// Defines: ACT (2: float16, whatever the activation type), TOKENS (8..128, a power of two), STAGES (chunks of 64 inputs in flight), CLUSTER (1, 2). Inputs are
// a multiple of 128.
#include "tensor.cuh"
#define WIDTH TOKENS
#define REGISTERS
#include "wgmma.cuh"
#include "boxes.cuh"
#include "best.cuh"
#include "screen.cuh"
#include "screen_state.cuh"

constexpr int GROUPS = 2, ROWS = 64 * GROUPS, W_BYTES = ROWS * 64, X_BYTES = TOKENS * 128, STAGE = W_BYTES + X_BYTES;
constexpr int CONSUMERS = GROUPS * 128, ACCUMULATORS = TOKENS / 2, X_PART = TOKENS / CLUSTER;

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
linear_screen(const __grid_constant__ Map x_map, const unsigned char* bytes, const float* scales, uint16_t* pairs, float2* kept, const ScreenState* state, int outputs, int inputs) {
    if (is_skipped(state)) return wait_for_previous();
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), CONSUMERS * CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive_relaxed();
    const int chunks = inputs / 64, runs = (outputs + ROWS * CLUSTER - 1) / (ROWS * CLUSTER), clusters = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER;
    const int first = (int)((int64_t)runs * cluster / clusters), last = (int)((int64_t)runs * (cluster + 1) / clusters);  // tiles, or pairs of them
    const int count = (last - first) * chunks;
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        auto weights = [&](int i, int s) {
            const unsigned f = shared_address(&full[s]);
            const int tile = (first + i / chunks) * CLUSTER + rank;
            barrier_expect(f, STAGE);
            load_stretch(base + s * STAGE, bytes + ((int64_t)tile * chunks + i % chunks) * W_BYTES, W_BYTES, f);
        };
        auto rows = [&](int i, int s) {
            const unsigned to = base + s * STAGE + W_BYTES + rank * X_PART * 128, f = shared_address(&full[s]);
            if (CLUSTER > 1) load_shared_box(to, &x_map, i % chunks * 64, rank * X_PART, f, 3);
            else load_box(to, &x_map, i % chunks * 64, 0, f);
        };
        return fetch_stages<STAGES, CLUSTER>(threadIdx.x == CONSUMERS, count, empty, weights, rows);
    }
    if (CLUSTER > 1) cluster_wait();
    wait_for_previous();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    auto release = [&](int s) {  // each thread for itself, as each has read bytes of the stage; faster than one of a warp behind its others
        if (CLUSTER == 1) return barrier_arrive(shared_address(&empty[s]));
#pragma unroll
        for (int r = 0; r < CLUSTER; r++) barrier_arrive_at(shared_address(&empty[s]), r);
    };
    Best held[HELD];
    begin_best(held);
    float sums[ACCUMULATORS];
    unsigned even[16], odd[16];
    // A chunk's bytes are widened while the products of the chunk before it run, which are over behind this.
    auto multiply = [&](int i, unsigned (&a)[16], bool follows) {
        const int s = i % STAGES;
        barrier_wait(shared_address(&full[s]), i / STAGES & 1);
        const unsigned w = base + s * STAGE + warp * 1024 + lane * 16, x = base + s * STAGE + W_BYTES;
        const vec4 low = load_shared(w), high = load_shared(w + 512);
        widen(a, low), widen(a + 8, high);
        operands_fence(a);
        accumulators_fence(sums);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma(sums, a + k * 4, descriptor(x + k * 32));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        accumulators_fence(sums);
        if (follows) release((i - 1) % STAGES);
    };
    for (int i = 0, run = first; run < last; run++) {
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; j++) sums[j] = 0.f;
        for (int c = 0; c < chunks; c += 2, i += 2) {
            multiply(i, even, c > 0);
            multiply(i + 1, odd, true);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        accumulators_fence(sums);
        release((i - 1) % STAGES);

        const int tile = run * CLUSTER + rank, row = tile * ROWS + warp * 16 + (lane >> 2);
        const float scale[2] = {row < outputs ? scales[row] : 0.f, row + 8 < outputs ? scales[row + 8] : 0.f};
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; j++) {
            const int half = j >> 1 & 1;
            sums[j] = row + half * 8 < outputs ? sums[j] * scale[half] : -INFINITY_F;
        }
        keep_best(held, row, [&](int at) { return sums[at]; });
        uint16_t* to = pairs + (int64_t)(tile * (ROWS / 2) + warp * 8 + (lane >> 2)) * TOKENS + (lane & 3) * (TOKENS / 4);
        store_pairs(sums, to);
    }
    store_best(held, kept + ((int64_t)blockIdx.x * (CONSUMERS / 32) + warp) * TOKENS);
    if (CLUSTER > 1) cluster_arrive_relaxed(), cluster_wait();
}
