// out[n, O] = x[n, I] @ w[O, I].T (+ bias): weights stream through shared memory into warp-group products (sm_90a).
//
// The work is tiles of ROWS outputs by chunks of 64 inputs, laid one after the other and dealt to the blocks in equal runs, so that
// all blocks end together whatever the matrix. A tile that two or more blocks share is summed by the one that has its beginning, in
// the order of the inputs: the sum of an element depends on the matrix and the number of blocks alone, not on the rows of x.
// The first weights are fetched before the kernel in front has ended. With CLUSTER 2 the runs are those of pairs of blocks, whose
// tiles lie one below the other: each brings half of the rows of x for both.
//
// Packed weights (NUMBER) come as pieces and are widened in registers, while the products of the chunk before run; work is dealt in pairs of
// chunks. A scale of all inputs of an output meets its sum; where a scale is of GROUP inputs, it meets the sum of these, and the sums of
// groups are added in float32. Rows of x that were rounded have scales of their own beside them. EIGHT: both are E4M3 and multiplied as they
// are; weights come row by row, in chunks of 128 inputs, whose sums are added in float32.
//
// Defines: ACT (1 bf16, 2 f16), TOKENS (rows of x in a launch at most: 8..256), STAGES (chunks in flight), OUT_F32, BIAS,
// CLUSTER (1, 2), GATED (w is [gate rows | up rows], out is [n, O / 2] and gets silu(gate) * up), BEST (1: instead of out, 2: besides,
// `best` gets the highest output of each row that a warp has, and its number: [blocks, warps, TOKENS] pairs; the lowest number of equals,
// infinity for what is no number; only where `state`, if there is one, says that the head is to be read whole); NUMBER (0: weights in the activation type; as in
// packed.cuh), GROUP (0, 32, 64, 128), BLOCK (outputs of a scale), ZEROS (zero points), ROUNDED (x was rounded), EIGHT (NUMBER 1, ROUNDED; x is
// bytes), ORDER (1: a block has whole tiles, so that a sum is taken in the order of the inputs). With GROUP at most 128 TOKENS. Inputs are a multiple of 64, of 128 where weights are packed.
#ifndef ORDER
#define ORDER 0
#endif
#include "tensor.cuh"
#if EIGHT && TOKENS > 128  // products of half of the rows at a time: beside the sums of all there is no room for those of a chunk
#define WIDTH 128
#define HALVES
#else
#define WIDTH TOKENS
#endif
#define PIECES (NUMBER && !EIGHT)
#if PIECES
#define REGISTERS
#include "packed.cuh"
constexpr int CHUNK = PIECE / 8, UNIT = 2;  // bytes that an output has of a chunk, chunks that are dealt together
#else
constexpr int CHUNK = 128, UNIT = 1;
#endif
#if EIGHT
#define BYTES
#endif
constexpr int INPUTS = EIGHT ? 128 : 64;  // of a chunk
#include "wgmma.cuh"
#if NUMBER && GROUP
#include "grouped.cuh"
#endif
#include "boxes.cuh"
#include "best.cuh"
#include "screen_state.cuh"

constexpr int GROUPS = 2, ROWS = 64 * GROUPS, W_BYTES = ROWS * CHUNK, X_BYTES = TOKENS * 128, STAGE = W_BYTES + X_BYTES;
constexpr int CONSUMERS = GROUPS * 128, ACCUMULATORS = TOKENS / 2, X_PART = TOKENS / CLUSTER;
constexpr bool CROWDED = NUMBER && (GROUP || EIGHT ? TOKENS >= 128 : TOKENS >= 256);  // sums and operands want more registers than there are a thread
constexpr int FETCHERS = CROWDED ? 128 : 32;  // a warp group where registers pass from it to the others
constexpr int RELEASED = PIECES ? CONSUMERS : GROUPS;  // by whom a block gives a stage back
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
    __device__ __forceinline__ Share(int outputs, int inputs) : chunks(inputs / (INPUTS * UNIT)) {  // or pairs of them
        total = (int64_t)((outputs + ROWS * CLUSTER - 1) / (ROWS * CLUSTER)) * chunks;
        begin = first(blockIdx.x / CLUSTER), end = first(blockIdx.x / CLUSTER + 1);
    }
    __device__ __forceinline__ int first(int run) const {
        const int64_t each = ORDER ? chunks : 1;
        return (int)(total / each * run / (int)(gridDim.x / CLUSTER) * each);
    }
};

// -- scales -------------------------------------------------------------------------------------------
// The output that a lane has sums of in half `half` of its warp's 16 of a tile.
__device__ __forceinline__ int output_of(int tile, int half, int outputs) {
    const int local = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2;
    return GATED ? (tile * ROWS + local * 16) / 2 + half * (outputs / 2) + g : tile * ROWS + local * 16 + half * 8 + g;
}
#if NUMBER
struct Scaled {
    const float* scales;
    const unsigned char* zeros;
    const float* rows;  // [groups, pitch], of rows of x
    int pitch;
};
// Of sums of the group `group`, or of all inputs, what a lane's sums of one token are multiplied with.
__device__ __forceinline__ float row_scale(const Scaled& by, int group, int first_token, int at) {
    return ROUNDED ? by.rows[(int64_t)group * by.pitch + min(first_token + (at >> 2) * 8 + (int)(threadIdx.x & 3) * 2 + (at & 1), by.pitch - 1)] : 1.f;
}
#if GROUP
// The first places of both outputs of a lane.
__device__ __forceinline__ void fetch_places(Places& places, const Scaled& by, int tile, int pair, int outputs, int inputs) {
    int64_t first[2];
#pragma unroll
    for (int half = 0; half < 2; half++) first[half] = first_place(0, min(output_of(tile, half, outputs), outputs - 1), outputs, inputs);
    places.fetch(by.scales, by.zeros, first, pair, places_of(inputs));
}
#endif
#endif

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

extern "C" __global__ void __launch_bounds__(CONSUMERS + FETCHERS, 1)
linear_tile(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, out_t* __restrict__ out, float2* best,
            const act_t* __restrict__ bias, float* __restrict__ partial, unsigned* __restrict__ flags, const ScreenState* state, const float* scales,
            const unsigned char* zeros, const float* row_scales, int row_pitch, int n, int first_token, int outputs, int inputs) {
    if (BEST && !reads_whole(state)) return;
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), RELEASED * CLUSTER);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive_relaxed();
    const Share share(outputs, inputs);
    const int begin = share.begin * UNIT, count = share.end * UNIT - begin, chunks = share.chunks * UNIT;
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        if (CROWDED) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const bool fetches = threadIdx.x == CONSUMERS;
        auto weights = [&](int i, int s) {
            const int column = (begin + i) % chunks * INPUTS, row = ((begin + i) / chunks * CLUSTER + rank) * ROWS;
            barrier_expect(shared_address(&full[s]), STAGE);
            if (PIECES && GATED) load_pair_chunks(base + s * STAGE, &w_map, row / 16, column / 64, shared_address(&full[s]));
            else if (PIECES) load_chunks(base + s * STAGE, &w_map, row / 8, column / 64, shared_address(&full[s]));
            else if (GATED) load_pairs(base + s * STAGE, &w_map, column, row, shared_address(&full[s]));
            else load_box(base + s * STAGE, &w_map, column, row, shared_address(&full[s]));
        };
        auto rows = [&](int i, int s) {
            const unsigned to = base + s * STAGE + W_BYTES + rank * X_PART * 128, f = shared_address(&full[s]);
            const int column = (begin + i) % chunks * INPUTS, row = first_token + rank * X_PART;
            if (CLUSTER > 1) load_shared_box(to, &x_map, column, row, f, 3);
            else load_box(to, &x_map, column, row, f);
        };
        return fetch_stages<STAGES, CLUSTER>(fetches, count, empty, weights, rows);
    }
    if (CROWDED) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if (CLUSTER > 1) cluster_wait();
    wait_for_previous();
    const int group = threadIdx.x >> 7;
    auto release = [&](int s) {
        if (PIECES || (threadIdx.x & 127) == 0) {  // of pieces each thread has read its own
            if (CLUSTER > 1)
                for (int to = 0; to < CLUSTER; to++) barrier_arrive_at(shared_address(&empty[s]), to);
            else barrier_arrive(shared_address(&empty[s]));
        }
    };
#if NUMBER
    const Scaled by{scales, zeros, row_scales, row_pitch};
#if PIECES
    unsigned even[16], odd[16];
    auto widened = [&](int i, unsigned (&a)[16], const unsigned (*middle)[2]) {  // the address of the chunk's rows of x
        const int s = i % STAGES;
        barrier_wait(shared_address(&full[s]), i / STAGES & 1);
        widen(a, base + s * STAGE + (threadIdx.x >> 5) * 2 * PIECE + (threadIdx.x & 31) * LANE, middle);
        operands_fence(a);
        return base + s * STAGE + W_BYTES;
    };
#endif
#if GROUP
    Places places;
    if (count) fetch_places(places, by, begin / chunks * CLUSTER + rank, begin % chunks / UNIT, outputs, inputs);
#endif
#endif
#if BEST
    Best held[HELD];
    begin_best(held);
#endif
    for (int i = 0; i < count;) {  // one tile, or this block's part of it
        const int tile = (begin + i) / chunks, end = min(i + chunks - (begin + i) % chunks, count);
        float sums[ACCUMULATORS] = {};
#if EIGHT
#ifdef HALVES
        float part[WIDTH / 2] = {};
#endif
        for (; i < end; i++) {
            const int s = i % STAGES, chunk = (begin + i) % chunks;
#if GROUP
            const Places now = places;
            if (i + 1 < count) fetch_places(places, by, (begin + i + 1) / chunks * CLUSTER + rank, (begin + i + 1) % chunks, outputs, inputs);
            auto times = [&](int j) { return now.scale[0][j >> 1 & 1] * row_scale(by, chunk, first_token, j); };
#else
            auto times = [&](int) { return 1.f; };
#endif
            barrier_wait(shared_address(&full[s]), i / STAGES & 1);
            const unsigned w = base + s * STAGE + group * 8192, x = base + s * STAGE + W_BYTES;
#pragma unroll
            for (int first = 0; first < ACCUMULATORS; first += WIDTH / 2) {
#ifdef HALVES
                const int keeps = n < 0;  // never; the registers of the part before serve again
#else
                float part[WIDTH / 2] = {};
#endif
                accumulators_fence(part);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < 4; k++) {
#ifdef HALVES
                    wgmma(part, descriptor(w + k * 32), descriptor(x + first * 256 + k * 32), k ? 1 : keeps);
#else
                    wgmma(part, descriptor(w + k * 32), descriptor(x + k * 32));
#endif
                }
                asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
                accumulators_fence(part);
                if (first + WIDTH / 2 >= ACCUMULATORS) release(s);
#pragma unroll
                for (int j = 0; j < WIDTH / 2; j++) sums[first + j] += part[j] * times(first + j);
            }
        }
#elif NUMBER && GROUP
        for (; i < end; i += 2) {
            const Places now = places;
            if (i + 2 < count) fetch_places(places, by, (begin + i + 2) / chunks * CLUSTER + rank, (begin + i + 2) % chunks / 2, outputs, inputs);
            const int group = (begin + i) % chunks / 2 * PARTS;
            multiply_groups(
                sums, even, odd, now, [&](int half, unsigned (&a)[16], const unsigned (&middle)[2][2]) { return widened(i + half, a, middle); },
                [&](int part, int j) { return row_scale(by, group + part, first_token, j); }, [&](int half) { release((i + half) % STAGES); });
        }
#elif NUMBER
        unsigned middle[2][2] = {};
#if NUMBER == INT4
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int output = min(output_of(tile * CLUSTER + rank, half, outputs), outputs - 1);
            middle[0][half] = middle[1][half] = WHOLE + (ZEROS ? zeros[output] : 8) * 0x10001u;
        }
#endif
        for (int from = i; i < end; i += 2) {
            multiply_widened(sums, even, widened(i, even, middle), 0, 4);
            products_wait<1>(sums);
            if (i > from) release((i - 1) % STAGES);
            multiply_widened(sums, odd, widened(i + 1, odd, middle), 0, 4);
            products_wait<1>(sums);
            release(i % STAGES);
        }
        products_wait<0>(sums);
        release((end - 1) % STAGES);
#else
        for (int from = i; i < end; i++) {
            const int s = i % STAGES;
            barrier_wait(shared_address(&full[s]), i / STAGES & 1);
            const unsigned w = base + s * STAGE + group * 8192, x = base + s * STAGE + W_BYTES;
            multiply_chunk<AHEAD>(sums, w, x);
            if (!AHEAD) release(s);
            else if (i > from) release((i - 1) % STAGES);
        }
        if (AHEAD) {
            products_wait<0>(sums);
            release((end - 1) % STAGES);
        }
#endif
        if (begin > tile * chunks) {  // the beginning is another block's: leave the sums to it
            float4* mine = (float4*)(partial + (int64_t)blockIdx.x * ROWS * TOKENS) + threadIdx.x;
#pragma unroll
            for (int j = 0; j < ACCUMULATORS; j += 4) __stcg(mine + j / 4 * CONSUMERS, make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]));
            consumers_meet();
            if (threadIdx.x == 0)  // what the others wrote before the meeting is published with the flag
                asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + blockIdx.x) : "memory");
            continue;
        }
        add_shares(sums, share, (tile + 1) * share.chunks, partial, flags);
#if NUMBER && !GROUP
        const int scaled[2] = {min(output_of(tile * CLUSTER + rank, 0, outputs), outputs - 1), min(output_of(tile * CLUSTER + rank, 1, outputs), outputs - 1)};
        const float scale[2] = {scales[scaled[0]], scales[scaled[1]]};
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; j++) sums[j] *= scale[j >> 1 & 1] * row_scale(by, 0, first_token, j);
#endif
#if BEST
        const int row = (tile * CLUSTER + rank) * ROWS + (threadIdx.x >> 5) * 16 + ((threadIdx.x & 31) >> 2);
        const bool real[2] = {row < outputs, row + 8 < outputs};
        const float add[2] = {BIAS && real[0] ? to_float(bias[row]) : 0.f, BIAS && real[1] ? to_float(bias[row + 8]) : 0.f};
        keep_best(held, row, [&](int at) { return real[at >> 1 & 1] ? sums[at] + add[at >> 1 & 1] : -INFINITY_F; });
#endif
#if BEST != 1
        store_tile(sums, out, bias, tile * CLUSTER + rank, n, first_token, outputs);
#endif
    }
#if BEST
    store_best(held, best + ((int64_t)blockIdx.x * (CONSUMERS / 32) + (threadIdx.x >> 5)) * TOKENS);
#endif
    if (CLUSTER > 1) cluster_arrive_relaxed(), cluster_wait();
}
