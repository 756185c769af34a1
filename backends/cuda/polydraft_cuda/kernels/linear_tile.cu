// out[n, O] = x[n, I] @ w[O, I].T (+ bias): weights stream through shared memory into warp-group products (sm_90a).
//
// The work is tiles of ROWS outputs by chunks of 64 inputs, laid one after the other and dealt to the blocks in equal runs, so that
// all blocks end together whatever the matrix. A tile that two or more blocks share is summed by the one that has its beginning, in
// the order of the inputs: the sum of an element depends on the matrix and the number of blocks alone, not on the rows of x.
//
// Defines: ACT (1 bf16, 2 f16), TOKENS (rows of x in a launch at most: 8..256), GROUPS (warp groups of 64 x TILES outputs), TILES,
// STAGES, MIN_BLOCKS (blocks a multiprocessor), OUT_F32, BIAS, ADD (out += instead of out =, rounded to the activation type).
#include "tensor.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 64 * TILES * GROUPS, W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128, STAGE = W_BYTES + X_BYTES;
constexpr int CONSUMERS = GROUPS * 128, ACCUMULATORS = TOKENS / 2;
constexpr int BATCH = TOKENS * TILES <= 16 ? 4 : TOKENS * TILES <= 64 ? 2 : 1;  // shares of a tile that are read at once
struct alignas(64) Map { uint64_t words[16]; };
#if OUT_F32
typedef float out_t;
#else
typedef act_t out_t;
#endif

__device__ __forceinline__ void barrier_init(unsigned b, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(count) : "memory"); }
__device__ __forceinline__ void barrier_expect(unsigned b, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory"); }
__device__ __forceinline__ void barrier_arrive(unsigned b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void barrier_wait(unsigned b, int parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(b), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void load_box(unsigned target, const Map* map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(target), "l"(map),
                 "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}
// K-major operand in 128-byte swizzled rows, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(unsigned address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ int range_begin(int64_t total, int block, int blocks) { return (int)(total * block / blocks); }

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, MIN_BLOCKS)
linear_tile(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, out_t* __restrict__ out, const act_t* __restrict__ bias,
            float* __restrict__ partial, unsigned* __restrict__ flags, int n, int first_token, int outputs, int inputs) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    const int chunks = inputs / 64, tiles = (outputs + ROWS - 1) / ROWS;
    const int64_t total = (int64_t)tiles * chunks;
    const int blocks = gridDim.x, block = blockIdx.x;
    const int begin = range_begin(total, block, blocks), end = range_begin(total, block + 1, blocks);
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        if (threadIdx.x != CONSUMERS) { wait_for_previous(); return; }
        const int early = min(STAGES, end - begin);
        for (int i = 0; i < early; i++) {  // weights depend on nobody
            const unsigned b = shared_address(&full[i]);
            barrier_expect(b, STAGE);
            load_box(base + i * STAGE, &w_map, (begin + i) % chunks * 64, (begin + i) / chunks * ROWS, b);
        }
        wait_for_previous();
        for (int i = 0; i < early; i++) load_box(base + i * STAGE + W_BYTES, &x_map, (begin + i) % chunks * 64, first_token, shared_address(&full[i]));
        for (int i = STAGES; i < end - begin; i++) {
            const int s = i % STAGES;
            const unsigned b = shared_address(&full[s]);
            barrier_wait(shared_address(&empty[s]), (i / STAGES - 1) & 1);
            barrier_expect(b, STAGE);
            load_box(base + s * STAGE, &w_map, (begin + i) % chunks * 64, (begin + i) / chunks * ROWS, b);
            load_box(base + s * STAGE + W_BYTES, &x_map, (begin + i) % chunks * 64, first_token, b);
        }
        return;
    }
#if HEAVY
    if (n < 0) {  // never: takes registers, so that no two blocks of this kernel share a multiprocessor, but two kernels may
        float held[112];
#pragma unroll
        for (int i = 0; i < 112; i++) asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(held[i]) : "l"(partial + i));
#pragma unroll
        for (int i = 0; i < 112; i++) asm volatile("st.volatile.global.f32 [%1], %0;" ::"f"(held[i]), "l"(partial + i));
    }
#endif
    wait_for_previous();
    const int group = threadIdx.x >> 7, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    float sums[TILES][ACCUMULATORS];
    for (int i = begin; i < end; i++) {
        const int s = (i - begin) % STAGES, chunk = i % chunks;
        const bool fresh = i == begin || chunk == 0;
        if (fresh) {
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int j = 0; j < ACCUMULATORS; j++) sums[m][j] = 0.f;
        }
        barrier_wait(shared_address(&full[s]), (i - begin) / STAGES & 1);
        const unsigned w = base + s * STAGE + group * TILES * 8192, x = base + s * STAGE + W_BYTES;
#pragma unroll
        for (int m = 0; m < TILES; m++) accumulators_fence(sums[m]);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int m = 0; m < TILES; m++) wgmma(sums[m], descriptor(w + m * 8192 + k * 32), descriptor(x + k * 32));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int m = 0; m < TILES; m++) accumulators_fence(sums[m]);
        if ((threadIdx.x & 127) == 0) barrier_arrive(shared_address(&empty[s]));
        if (chunk != chunks - 1 && i != end - 1) continue;
        const int tile = i / chunks, last = (tile + 1) * chunks;
        if (max(begin, tile * chunks) != tile * chunks) {  // the beginning is another block's: leave the sums to it
            float* p = partial + (int64_t)block * ROWS * TOKENS + threadIdx.x;
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int j = 0; j < ACCUMULATORS; j++) __stcg(p + (m * ACCUMULATORS + j) * CONSUMERS, sums[m][j]);
            __threadfence();
            asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
            if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + block) : "memory");
            continue;
        }
        int partners = 0;  // blocks behind this one that hold shares of the tile
        while (range_begin(total, block + 1 + partners, blocks) < last) partners++;
        if (partners) {
            if (threadIdx.x < partners) {
                unsigned ready;
                do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(flags + block + 1 + threadIdx.x) : "memory");
                while (!ready);
                flags[block + 1 + threadIdx.x] = 0;
            }
            asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
            for (int first = 0; first < partners; first += BATCH) {
                float more[BATCH][TILES][ACCUMULATORS];
#pragma unroll
                for (int b = 0; b < BATCH; b++) {
                    const float* p = partial + (int64_t)(block + 1 + min(first + b, partners - 1)) * ROWS * TOKENS + threadIdx.x;
#pragma unroll
                    for (int m = 0; m < TILES; m++)
#pragma unroll
                        for (int j = 0; j < ACCUMULATORS; j++) more[b][m][j] = __ldcg(p + (m * ACCUMULATORS + j) * CONSUMERS);
                }
#pragma unroll
                for (int b = 0; b < BATCH; b++)  // in the order of the inputs
                    if (first + b < partners) {
#pragma unroll
                        for (int m = 0; m < TILES; m++)
#pragma unroll
                            for (int j = 0; j < ACCUMULATORS; j++) sums[m][j] += more[b][m][j];
                    }
            }
        }
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = tile * ROWS + (group * TILES + m) * 64 + warp * 16 + half * 8 + (lane >> 2);
                if (row >= outputs) continue;
                const float add = BIAS ? to_float(bias[row]) : 0.f;
#pragma unroll
                for (int j = 0; j < ACCUMULATORS / 2; j++) {
                    const int token = first_token + (j >> 1) * 8 + (lane & 3) * 2 + (j & 1);
                    if (token >= n) continue;
                    out_t* o = out + (int64_t)token * outputs + row;
                    const float value = sums[m][(j >> 1) * 4 + half * 2 + (j & 1)] + add;
#if ADD
                    *o = from_float<out_t>(to_float(*o) + to_float(from_float<act_t>(value)));
#else
                    *o = from_float<out_t>(value);
#endif
                }
            }
    }
}
