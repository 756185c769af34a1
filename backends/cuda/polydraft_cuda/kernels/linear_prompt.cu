// out[n, O / 2] = silu(gate) * up of x[n, I] @ w[O, I].T for many rows (sm_90a), rows of gate and up in turn as in linear_tile.cu.
//
// Two blocks next to each other have 256 rows of x and the same 256 outputs: 128 rows each, half of the outputs' weights brought by either for
// both. Two warp groups multiply 64 rows each by all of these outputs, a third warp fetches ahead, over the borders of tiles. Clusters take
// tiles in turn, in bands of BANDS times 256 rows, so that what runs at once reads few rows and few weights, which stay in the second cache.
//
// Defines: ACT (1 bf16, 2 f16), STAGES (in flight), BANDS. I is a multiple of 64, O of 16.
#define WIDTH 256
#include "tensor.cuh"
#include "wgmma.cuh"
#include "boxes.cuh"

constexpr int BAND = 256, X_BYTES = 128 * 128, W_BYTES = WIDTH * 128, STAGE = X_BYTES + W_BYTES, CONSUMERS = 256;
constexpr int OWN = WIDTH / 2, PART = 64, PITCH = PART + 8;  // outputs of a tile; those that a warp stores at once

// The same box as `load_pairs`, for both blocks.
__device__ __forceinline__ void load_shared_pairs(unsigned target, const Map* map, int column, int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(map), "r"(column), "r"(0), "r"(row / 16), "r"(barrier), "h"((unsigned short)3)
        : "memory");
}

struct Tile { int band, column; };  // in units of BAND rows and WIDTH outputs
__device__ __forceinline__ Tile tile_of(int number, int bands, int across) {
    const int group = number / (BANDS * across), first = group * BANDS, height = min(BANDS, bands - first), rest = number - first * across;
    return {first + rest % height, rest / height};
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
linear_prompt(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, act_t* __restrict__ out, int n, int outputs, int inputs) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    const int rank = blockIdx.x % 2, chunks = inputs / 64, bands = (n + BAND - 1) / BAND, across = (outputs + WIDTH - 1) / WIDTH;
    const int tiles = bands * across, clusters = gridDim.x / 2;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), 4);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    cluster_arrive_relaxed();
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x >= CONSUMERS + 32) return;
        cluster_wait();
        wait_for_previous();
        launch_dependents();  // not before: who follows may rely on what lies two launches back
        if (threadIdx.x == CONSUMERS)
            for (int number = blockIdx.x / 2, i = 0; number < tiles; number += clusters) {
                const Tile tile = tile_of(number, bands, across);
                for (int chunk = 0; chunk < chunks; chunk++, i++) {
                    const int s = i % STAGES;
                    const unsigned f = shared_address(&full[s]), x = base + s * STAGE, w = x + X_BYTES + rank * (W_BYTES / 2);
                    if (i >= STAGES) barrier_wait(shared_address(&empty[s]), (i / STAGES - 1) & 1);
                    barrier_expect(f, STAGE);
                    load_box(x, &x_map, chunk * 64, tile.band * BAND + rank * 128, f);
                    load_shared_pairs(w, &w_map, chunk * 64, tile.column * WIDTH + rank * (WIDTH / 2), f);
                }
            }
        __syncwarp();
        cluster_arrive_relaxed(), cluster_wait();  // the other may still write here
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    cluster_wait();
    wait_for_previous();
    const int group = threadIdx.x >> 7, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, width = outputs / 2;
    act_t* stage = (act_t*)(raw + (base - shared_address(raw)) + STAGES * STAGE) + (threadIdx.x >> 5) * 16 * PITCH;
    auto release = [&](int s) {
        if ((threadIdx.x & 127) < 2) barrier_arrive_at(shared_address(&empty[s]), threadIdx.x & 127);
    };
    float sums[WIDTH / 2];
    for (int number = blockIdx.x / 2, i = 0; number < tiles; number += clusters) {
#pragma unroll
        for (int j = 0; j < WIDTH / 2; j++) sums[j] = 0.f;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++, i++) {
            const int s = i % STAGES;
            const unsigned x = base + s * STAGE + group * (X_BYTES / 2), w = base + s * STAGE + X_BYTES;
            barrier_wait(shared_address(&full[s]), i / STAGES & 1);
            multiply_chunk<1>(sums, x, w);  // while the stage before it ends
            if (chunk > 0) release((i - 1) % STAGES);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        accumulators_fence(sums);
        release((i - 1) % STAGES);
        const Tile tile = tile_of(number, bands, across);
        const int token = tile.band * BAND + rank * 128 + (threadIdx.x >> 5) * 16;
#pragma unroll
        for (int part = 0; part < OWN / PART; part++) {
            const int column = tile.column * OWN + part * PART;
#pragma unroll
            for (int j = 0; j < PART / 8; j++) {
                const float *a = sums + (part * 8 + j) * 8, *b = a + 4;
                const unsigned near = pack(gated(a[0], b[0]), gated(a[1], b[1])), far = pack(gated(a[2], b[2]), gated(a[3], b[3]));
                *(unsigned*)(stage + g * PITCH + j * 8 + t * 2) = near;
                *(unsigned*)(stage + (g + 8) * PITCH + j * 8 + t * 2) = far;
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = i * 4 + (lane >> 3), at = (lane & 7) * 8;
                if (token + row < n && column + at < width) *(vec4*)(out + (int64_t)(token + row) * width + column + at) = *(const vec4*)(stage + row * PITCH + at);
            }
            __syncwarp();
        }
    }
    cluster_arrive_relaxed(), cluster_wait();
}
