// out[n, O] = x[n, I] @ w[O, I].T (+ bias): weights stream through shared memory into warp-group products (sm_90a).
//
// The work is tiles of ROWS outputs by chunks of 64 inputs, laid one after the other and dealt to the blocks in equal runs, so that
// all blocks end together whatever the matrix. A tile that two or more blocks share is summed by the one that has its beginning, in
// the order of the inputs: the sum of an element depends on the matrix and the number of blocks alone, not on the rows of x.
// The first weights are fetched before the kernel in front has ended.
//
// Defines: ACT (1 bf16, 2 f16), TOKENS (rows of x in a launch at most: 8..256), STAGES (chunks in flight), OUT_F32, BIAS,
// GATED (w is [gate rows | up rows], out is [n, O / 2] and gets silu(gate) * up).
#include "tensor.cuh"
#include "wgmma.cuh"
#include "boxes.cuh"

constexpr int GROUPS = 2, ROWS = 64 * GROUPS, W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128, STAGE = W_BYTES + X_BYTES;
constexpr int CONSUMERS = GROUPS * 128, ACCUMULATORS = TOKENS / 2;
constexpr int BATCH = TOKENS <= 16 ? 4 : TOKENS <= 64 ? 2 : 1;  // shares of a tile that are read at once
#if OUT_F32
typedef float out_t;
#else
typedef act_t out_t;
#endif

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// -- the share of a block -----------------------------------------------------------------------------
struct Share {
    int chunks, begin, end;
    int64_t total;
    __device__ __forceinline__ Share(int outputs, int inputs) : chunks(inputs / 64) {
        total = (int64_t)((outputs + ROWS - 1) / ROWS) * chunks;
        begin = first(blockIdx.x), end = first(blockIdx.x + 1);
    }
    __device__ __forceinline__ int first(int block) const { return (int)(total * block / (int)gridDim.x); }
};

// What blocks behind this one have of tile `tile`, which this block began, added in the order of the inputs.
__device__ __forceinline__ void add_shares(float (&sums)[ACCUMULATORS], const Share& share, int last, const float* partial, unsigned* flags) {
    const int block = blockIdx.x;
    int partners = 0;
    while (share.first(block + 1 + partners) < last) partners++;
    if (!partners) return;
    if (threadIdx.x < partners) {
        while (!load_acquire(flags + block + 1 + threadIdx.x)) {}
        flags[block + 1 + threadIdx.x] = 0;
    }
    consumers_meet();
    for (int first = 0; first < partners; first += BATCH) {
        float more[BATCH][ACCUMULATORS];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const float* p = partial + (int64_t)(block + 1 + min(first + b, partners - 1)) * ROWS * TOKENS + threadIdx.x;
#pragma unroll
            for (int j = 0; j < ACCUMULATORS; j++) more[b][j] = __ldcg(p + j * CONSUMERS);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (first + b < partners) {
#pragma unroll
                for (int j = 0; j < ACCUMULATORS; j++) sums[j] += more[b][j];
            }
    }
}

__device__ __forceinline__ void store_tile(const float (&sums)[ACCUMULATORS], out_t* out, const act_t* bias, int tile, int n, int first_token, int outputs) {
    const int group = threadIdx.x >> 7, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#if GATED  // rows g and g + 8 of 16 are gate and up of one output; both are rounded, as if they were stored
    const int width = outputs / 2, row = (tile * ROWS + group * 64 + warp * 16) / 2 + (lane >> 2);
    if (row >= width) return;
#pragma unroll
    for (int j = 0; j < ACCUMULATORS / 2; j++) {
        const int token = first_token + (j >> 1) * 8 + (lane & 3) * 2 + (j & 1), at = (j >> 1) * 4 + (j & 1);
        if (token >= n) continue;
        const float gate = to_float(from_float<act_t>(sums[at])), up = to_float(from_float<act_t>(sums[at + 2]));
        const float silu = gate >= 0.f ? gate / (1.f + expf(-gate)) : gate * expf(gate) / (1.f + expf(gate));
        out[(int64_t)token * width + row] = from_float<out_t>(silu * up);
    }
#else
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = tile * ROWS + group * 64 + warp * 16 + half * 8 + (lane >> 2);
        if (row >= outputs) continue;
        const float add = BIAS ? to_float(bias[row]) : 0.f;
#pragma unroll
        for (int j = 0; j < ACCUMULATORS / 2; j++) {
            const int token = first_token + (j >> 1) * 8 + (lane & 3) * 2 + (j & 1);
            if (token < n) out[(int64_t)token * outputs + row] = from_float<out_t>(sums[(j >> 1) * 4 + half * 2 + (j & 1)] + add);
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
linear_tile(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, out_t* __restrict__ out, const act_t* __restrict__ bias,
            float* __restrict__ partial, unsigned* __restrict__ flags, int n, int first_token, int outputs, int inputs) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    const Share share(outputs, inputs);
    const int begin = share.begin, count = share.end - share.begin, chunks = share.chunks;
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        if (threadIdx.x != CONSUMERS) { wait_for_previous(); return; }
        auto weights = [&](int i, int s) {
            const int column = (begin + i) % chunks * 64, row = (begin + i) / chunks * ROWS;
            barrier_expect(shared_address(&full[s]), STAGE);
            if (GATED) load_pairs(base + s * STAGE, &w_map, column, row, shared_address(&full[s]));
            else load_box(base + s * STAGE, &w_map, column, row, shared_address(&full[s]));
        };
        auto rows = [&](int i, int s) { load_box(base + s * STAGE + W_BYTES, &x_map, (begin + i) % chunks * 64, first_token, shared_address(&full[s])); };
        const int early = min(STAGES, count);
        for (int i = 0; i < early; i++) weights(i, i);  // they depend on nobody
        wait_for_previous();
        for (int i = 0; i < early; i++) rows(i, i);
        for (int i = STAGES; i < count; i++) {
            const int s = i % STAGES;
            barrier_wait(shared_address(&empty[s]), (i / STAGES - 1) & 1);
            weights(i, s), rows(i, s);
        }
        return;
    }
    wait_for_previous();
    const int group = threadIdx.x >> 7;
    float sums[ACCUMULATORS];
    for (int i = 0; i < count; i++) {
        const int s = i % STAGES, chunk = (begin + i) % chunks;
        if (i == 0 || chunk == 0) {
#pragma unroll
            for (int j = 0; j < ACCUMULATORS; j++) sums[j] = 0.f;
        }
        barrier_wait(shared_address(&full[s]), i / STAGES & 1);
        const unsigned w = base + s * STAGE + group * 8192, x = base + s * STAGE + W_BYTES;
        accumulators_fence(sums);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma(sums, descriptor(w + k * 32), descriptor(x + k * 32));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        accumulators_fence(sums);
        if ((threadIdx.x & 127) == 0) barrier_arrive(shared_address(&empty[s]));
        if (chunk != chunks - 1 && i != count - 1) continue;
        const int tile = (begin + i) / chunks;
        if (begin > tile * chunks) {  // the beginning is another block's: leave the sums to it
            float* mine = partial + (int64_t)blockIdx.x * ROWS * TOKENS + threadIdx.x;
#pragma unroll
            for (int j = 0; j < ACCUMULATORS; j++) __stcg(mine + j * CONSUMERS, sums[j]);
            consumers_meet();
            if (threadIdx.x == 0) {  // what the others wrote before the meeting is published with the flag
                __threadfence();
                asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + blockIdx.x) : "memory");
            }
            continue;
        }
        add_shares(sums, share, (tile + 1) * chunks, partial, flags);
        store_tile(sums, out, bias, tile, n, first_token, outputs);
    }
}
