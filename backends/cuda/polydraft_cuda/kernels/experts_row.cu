// The two products of the experts of one row (sm_90a): there is nothing to list, its choices are the items. A block has WIDTH rows of the
// weights of one choice for itself, so many that the blocks share out all of them evenly. As in `linear_split.cu` the row of x is the
// first operand, of which the products take 64 rows, whatever lies behind it, and rows of weights are the second.
//
// GATED: h[choice, I] = silu(gate) * up, rows of gate and up in turn; else terms[choice, H] of h's row.
//
// Defines: ACT (1, 2), WIDTH (a multiple of 8, of 16 with GATED, up to 256), STAGES (chunks of 64 inputs in flight), GATED, EARLY (the
// choices and x were made two launches back: what is in front is waited for in the end, for whoever follows). Inputs are a multiple of
// 64.
#include "tensor.cuh"
#include "wgmma.cuh"
#include "boxes.cuh"

constexpr int W_BYTES = WIDTH * 128, STAGE = W_BYTES + 8 * 128, CONSUMERS = 128, EIGHTS = WIDTH / 8;
#if GATED
typedef act_t to_t;
#else
typedef float to_t;
#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
expert_row(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, const int* ids, to_t* out, int tiles, int outputs, int inputs) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), 1);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (GATED && !EARLY) wait_for_previous();  // that makes the choices; the launch behind this one comes only then
    const int choice = blockIdx.x / tiles, tile = blockIdx.x % tiles, expert = __ldcg(ids + choice), count = inputs / 64;
    if (expert < 0) return wait_for_previous();
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        auto weights = [&](int i, int s) {
            const unsigned f = shared_address(&full[s]), to = base + s * STAGE;
            barrier_expect(f, STAGE);
#if GATED
            asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4, %5}], [%6];" ::"r"(to),
                         "l"(&w_map), "r"(i * 64), "r"(0), "r"(tile * (WIDTH / 2)), "r"(expert), "r"(f)
                         : "memory");
#else
            asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                         "l"(&w_map), "r"(i * 64), "r"(tile * WIDTH), "r"(expert), "r"(f)
                         : "memory");
#endif
        };
        auto rows = [&](int i, int s) { load_box(base + s * STAGE + W_BYTES, &x_map, i * 64, GATED ? 0 : choice, shared_address(&full[s])); };
        fetch_stages<STAGES, 1, EARLY>(threadIdx.x == CONSUMERS, count, empty, weights, rows);
        if (EARLY) wait_for_previous();
        return;
    }
    if (!EARLY) wait_for_previous();
    float sums[WIDTH / 2] = {};
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const int s = i % STAGES;
        barrier_wait(shared_address(&full[s]), i / STAGES & 1);
        const unsigned w = base + s * STAGE, x = w + W_BYTES;
        multiply_chunk<1>(sums, x, w);  // while the stage before it ends
        if (i > 0 && threadIdx.x == 0) barrier_arrive(shared_address(&empty[(i - 1) % STAGES]));  // nobody waits for the last one
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    accumulators_fence(sums);
    if (EARLY) wait_for_previous();
    if (threadIdx.x >= 4) return;  // the others have what lies behind the row
    to_t* to = out + (int64_t)choice * outputs;
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
        const float a = sums[j * 4], b = sums[j * 4 + 1];
#if GATED
        const int o = tile * (WIDTH / 2) + j * 4 + threadIdx.x;
        if (o < outputs) to[o] = from_float<act_t>(a / (1.f + __expf(-a)) * b);
#else
        const int o = tile * WIDTH + j * 8 + threadIdx.x * 2;
        if (o < outputs) to[o] = a;
        if (o + 1 < outputs) to[o + 1] = b;
#endif
    }
}
