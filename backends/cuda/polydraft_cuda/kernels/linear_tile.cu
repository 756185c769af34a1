// out[n, O] = x[n, I] @ w[O, I].T (+ bias): weights stream through shared memory into warp-group products (sm_90a).
//
// The work is tiles of ROWS outputs by chunks of 64 inputs, laid one after the other and dealt to the blocks in equal runs, so that
// all blocks end together whatever the matrix. A tile that two or more blocks share is summed by the one that has its beginning, in
// the order of the inputs: the sum of an element depends on the matrix and the number of blocks alone, not on the rows of x.
// The first weights are fetched before the kernel in front has ended. With CLUSTER 2 the runs are those of pairs of blocks, whose
// tiles lie one below the other: each brings half of the rows of x for both.
//
// Defines: ACT (1 bf16, 2 f16), TOKENS (rows of x in a launch at most: 8..256), STAGES (chunks in flight), OUT_F32, BIAS,
// CLUSTER (1, 2), GATED (w is [gate rows | up rows], out is [n, O / 2] and gets silu(gate) * up), BEST (out gets the highest output of
// each row that a warp has, and its number: [blocks, warps, TOKENS] pairs; the lowest number of equals, infinity for what is no number;
// only where `state`, if there is one, says that the head is to be read whole).
#include "tensor.cuh"
#define WIDTH TOKENS
#include "wgmma.cuh"
#include "boxes.cuh"
#include "best.cuh"
#include "screen_state.cuh"

constexpr int GROUPS = 2, ROWS = 64 * GROUPS, W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128, STAGE = W_BYTES + X_BYTES;
constexpr int CONSUMERS = GROUPS * 128, ACCUMULATORS = TOKENS / 2, X_PART = TOKENS / CLUSTER;
constexpr int AHEAD = TOKENS >= 64;  // a chunk is multiplied while the one before it ends
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
        total = (int64_t)((outputs + ROWS * CLUSTER - 1) / (ROWS * CLUSTER)) * chunks;
        begin = first(blockIdx.x / CLUSTER), end = first(blockIdx.x / CLUSTER + 1);
    }
    __device__ __forceinline__ int first(int run) const { return (int)(total * run / (int)(gridDim.x / CLUSTER)); }
};

// What blocks behind this one have of tile `tile`, which this block began, added in the order of the inputs.
__device__ __forceinline__ void add_shares(float (&sums)[ACCUMULATORS], const Share& share, int last, const float* partial, unsigned* flags) {
    const int block = blockIdx.x;
    int partners = 0;
    while (share.first(block / CLUSTER + 1 + partners) < last) partners++;
    if (!partners) return;
    if (threadIdx.x < partners) {
        unsigned* flag = flags + block + (1 + threadIdx.x) * CLUSTER;
        while (!load_acquire(flag)) {}
        *flag = 0;
    }
    consumers_meet();
    for (int first = 0; first < partners; first += BATCH) {
        float more[BATCH][ACCUMULATORS];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const float* p = partial + (int64_t)(block + (1 + min(first + b, partners - 1)) * CLUSTER) * ROWS * TOKENS + threadIdx.x * 4;
#pragma unroll
            for (int j = 0; j < ACCUMULATORS; j += 4) {
                const float4 four = __ldcg((const float4*)p + j / 4 * CONSUMERS);
                more[b][j] = four.x, more[b][j + 1] = four.y, more[b][j + 2] = four.z, more[b][j + 3] = four.w;
            }
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
        out[(int64_t)token * width + row] = from_float<out_t>(gated(sums[at], sums[at + 2]));
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
linear_tile(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, out_t* __restrict__ out,
            const act_t* __restrict__ bias, float* __restrict__ partial, unsigned* __restrict__ flags, const ScreenState* state, int n, int first_token, int outputs, int inputs) {
    if (BEST && !reads_whole(state)) return;
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), GROUPS * CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive_relaxed();
    const Share share(outputs, inputs);
    const int begin = share.begin, count = share.end - share.begin, chunks = share.chunks;
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        const bool fetches = threadIdx.x == CONSUMERS;
        auto weights = [&](int i, int s) {
            const int column = (begin + i) % chunks * 64, row = ((begin + i) / chunks * CLUSTER + rank) * ROWS;
            barrier_expect(shared_address(&full[s]), STAGE);
            if (GATED) load_pairs(base + s * STAGE, &w_map, column, row, shared_address(&full[s]));
            else load_box(base + s * STAGE, &w_map, column, row, shared_address(&full[s]));
        };
        auto rows = [&](int i, int s) {
            const unsigned to = base + s * STAGE + W_BYTES + rank * X_PART * 128, f = shared_address(&full[s]);
            const int column = (begin + i) % chunks * 64, row = first_token + rank * X_PART;
            if (CLUSTER > 1) load_shared_box(to, &x_map, column, row, f, 3);
            else load_box(to, &x_map, column, row, f);
        };
        return fetch_stages<STAGES, CLUSTER>(fetches, count, empty, weights, rows);
    }
    if (CLUSTER > 1) cluster_wait();
    wait_for_previous();
    const int group = threadIdx.x >> 7;
    auto release = [&](int s) {
        if ((threadIdx.x & 127) == 0) {
            if (CLUSTER > 1)
                for (int to = 0; to < CLUSTER; to++) barrier_arrive_at(shared_address(&empty[s]), to);
            else barrier_arrive(shared_address(&empty[s]));
        }
    };
#if BEST
    Best held[HELD];
    begin_best(held);
#endif
    for (int i = 0; i < count;) {  // one tile, or this block's part of it
        const int tile = (begin + i) / chunks, end = min(i + chunks - (begin + i) % chunks, count);
        float sums[ACCUMULATORS] = {};
        for (int from = i; i < end; i++) {
            const int s = i % STAGES;
            barrier_wait(shared_address(&full[s]), i / STAGES & 1);
            const unsigned w = base + s * STAGE + group * 8192, x = base + s * STAGE + W_BYTES;
            accumulators_fence(sums);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < 4; k++) wgmma(sums, descriptor(w + k * 32), descriptor(x + k * 32));
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned %0;" ::"n"(AHEAD) : "memory");
            accumulators_fence(sums);
            if (!AHEAD) release(s);
            else if (i > from) release((i - 1) % STAGES);
        }
        if (AHEAD) {
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            accumulators_fence(sums);
            release((end - 1) % STAGES);
        }
        if (begin > tile * chunks) {  // the beginning is another block's: leave the sums to it
            float4* mine = (float4*)(partial + (int64_t)blockIdx.x * ROWS * TOKENS) + threadIdx.x;
#pragma unroll
            for (int j = 0; j < ACCUMULATORS; j += 4) __stcg(mine + j / 4 * CONSUMERS, make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]));
            consumers_meet();
            if (threadIdx.x == 0)  // what the others wrote before the meeting is published with the flag
                asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + blockIdx.x) : "memory");
            continue;
        }
        add_shares(sums, share, (tile + 1) * chunks, partial, flags);
#if BEST
        const int row = (tile * CLUSTER + rank) * ROWS + (threadIdx.x >> 5) * 16 + ((threadIdx.x & 31) >> 2);
        const bool real[2] = {row < outputs, row + 8 < outputs};
        const float add[2] = {BIAS && real[0] ? to_float(bias[row]) : 0.f, BIAS && real[1] ? to_float(bias[row + 8]) : 0.f};
        keep_best(held, row, [&](int at) { return real[at >> 1 & 1] ? sums[at] + add[at >> 1 & 1] : -INFINITY_F; });
#else
        store_tile(sums, out, bias, tile * CLUSTER + rank, n, first_token, outputs);
#endif
    }
#if BEST
    store_best(held, (float2*)out + ((int64_t)blockIdx.x * (CONSUMERS / 32) + (threadIdx.x >> 5)) * TOKENS);
#endif
    if (CLUSTER > 1) cluster_arrive_relaxed(), cluster_wait();
}
