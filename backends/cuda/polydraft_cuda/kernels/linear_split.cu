// out[n, O] = x[n, I] @ w[O, I].T (+ bias) where a block, or two of them, have outputs for themselves (sm_90a).
//
// Rows of x are the first operand of a product, 64 of them to a warp group, and outputs the second, so that a block may have any
// multiple of 8 of them (of 16 with SPLIT 2). SPLIT 2: two blocks take half of the inputs each for the same outputs, so that half of x
// comes to each; each finishes half of the outputs, and is given the other's sums of them through shared memory.
//
// Leaves of a sum are as many products: w has the matrix of each one below the other, x the inputs of all side by side. Where each has blocks
// of its own (gridDim.z, else 1), out has the outputs of all side by side, and the bias is the first one's. Where a block has LEAVES, or half of
// them with SPLIT 2, it adds them as `sum_leaves` does, and out has the sums.
//
// Defines: ACT (1 bf16, 2 f16), TOKENS (rows of x of a block at most: 8, 32, 64, 128, 192, 256), WIDTH (outputs of a block, or of two), CHUNKS
// (of 64 inputs in a stage, all of one leaf), STAGES (in flight), SPLIT (1, 2), OUT_F32, BIAS, GATED (as in linear_tile.cu; rows of gate
// and up come one by one), ORDER (1: a sum, or that of a leaf, is taken in the order of the inputs), SHARED (1, 2: blocks next to each other
// that bring half of the rows of x each for both; SPLIT 1, up to 128 TOKENS), LEAVES (1, 2, 4: beyond 1 with ORDER, up to 128 TOKENS, without
// BIAS; else 1). O is a multiple of 8.
#ifndef LEAVES
#define LEAVES 1
#endif
#include "tensor.cuh"
#include "wgmma.cuh"
#include "boxes.cuh"

constexpr int PRODUCTS = TOKENS > 192 ? 2 : 1, GROUPS = (TOKENS + 63) / 64 / PRODUCTS, CONSUMERS = GROUPS * 128;
constexpr int FETCHERS = PRODUCTS > 1 ? 128 : 32;  // a warp group where registers pass from it to the others
constexpr int W_BYTES = WIDTH * 128, X_BYTES = TOKENS * 128, STAGE = CHUNKS * (W_BYTES + X_BYTES);
constexpr int EIGHTS = WIDTH / 8, HALF = EIGHTS / 2, GIVEN = STAGES * STAGE + (TOKENS < 64 ? (64 - TOKENS) * 128 : 0);  // where the other's sums lie
static_assert(SHARED == 1 || SPLIT == 1 && PRODUCTS == 1, "who may share rows of x");
static_assert(SPLIT == 1 || PRODUCTS == 1 && EIGHTS % 2 == 0, "what two blocks may share");
constexpr int X_PART = TOKENS / SHARED;
constexpr int OWN_LEAVES = LEAVES > SPLIT ? LEAVES / SPLIT : 1, KEPT = OWN_LEAVES > 2 ? 2 : OWN_LEAVES - 1;  // leaves of a block; sums beside those of one
static_assert(!ORDER || LEAVES % SPLIT == 0, "a leaf has one block");
static_assert(LEAVES == 1 || ORDER && !BIAS && !GATED && PRODUCTS == 1 && LEAVES <= 4, "which leaves are added");
#if OUT_F32
typedef float out_t;
struct alignas(8) Two { float a, b; };
__device__ __forceinline__ void put_two(out_t* to, float a, float b) { *(Two*)to = {a, b}; }
#else
typedef act_t out_t;
__device__ __forceinline__ void put_two(out_t* to, float a, float b) { *(unsigned*)to = pack(a, b); }
#endif
constexpr int OWN = WIDTH / (SPLIT * (GATED ? 2 : 1)), PITCH = OWN + 16 / sizeof(out_t);  // outputs that a block finishes
constexpr int UNIT = OWN % 8 ? 4 : 8;
struct alignas(UNIT * 2) Unit { out_t e[UNIT]; };

// 16 rows of a warp on their way out: lanes put one or two outputs of a row, and store several of them next to each other.
struct Rows {
    out_t *stage, *out;
    const act_t* bias;
    int token, column, n, outputs, pitch;  // where they belong
    __device__ __forceinline__ void put(int eight, float a, float b, float c, float d) const {  // of rows g and g + 8
        const int lane = threadIdx.x & 31, at = eight * 8 + (lane & 3) * 2;
        if (BIAS && bias && column + at < outputs) {
            const float add[2] = {to_float(bias[column + at]), to_float(bias[column + at + 1])};
            a += add[0], b += add[1], c += add[0], d += add[1];
        }
        put_two(stage + (lane >> 2) * PITCH + at, a, b);
        put_two(stage + ((lane >> 2) + 8) * PITCH + at, c, d);
    }
    __device__ __forceinline__ void put_one(int four, float a, float b) const {
        const int lane = threadIdx.x & 31, at = four * 4 + (lane & 3);
        stage[(lane >> 2) * PITCH + at] = from_float<out_t>(a), stage[((lane >> 2) + 8) * PITCH + at] = from_float<out_t>(b);
    }
    __device__ __forceinline__ void store() const {
        __syncwarp();
        for (int i = threadIdx.x & 31; i < 16 * OWN / UNIT; i += 32) {
            const int row = i / (OWN / UNIT), at = i % (OWN / UNIT) * UNIT;
            if (token + row < n && column + at < outputs) *(Unit*)(out + (int64_t)(token + row) * pitch + column + at) = *(const Unit*)(stage + row * PITCH + at);
        }
        __syncwarp();
    }
};
// Sums of the eights from FIRST on, for the other block.
template <int FIRST>
__device__ __forceinline__ void give(const float (&sums)[WIDTH / 2], unsigned mine, int other) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(mine), "r"(other));
#pragma unroll
    for (int j = 0; j < HALF; j++) {
        const float* s = sums + (FIRST + j) * 4;
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there + j * CONSUMERS * 16), "f"(s[0]), "f"(s[1]), "f"(s[2]), "f"(s[3]) : "memory");
    }
}
template <int FIRST>
__device__ __forceinline__ void finish(const float (&sums)[WIDTH / 2], unsigned mine, const Rows& rows) {
#pragma unroll
    for (int j = 0; j < HALF; j++) {
        const vec4 more = load_shared(mine + j * CONSUMERS * 16);
        const float* s = sums + (FIRST + j) * 4;
        const float a = s[0] + __uint_as_float(more.x), b = s[1] + __uint_as_float(more.y), c = s[2] + __uint_as_float(more.z), d = s[3] + __uint_as_float(more.w);
#if GATED  // gate and up in turn; both are rounded, as if they were stored
        rows.put_one(j, gated(a, b), gated(c, d));
#else
        rows.put(j, a, b, c, d);
#endif
    }
    rows.store();
}

// What becomes of a leaf's sums in front of the next leaf: the first and the third are kept, the second is added to the first.
template <int ROOM>
__device__ __forceinline__ void keep(float (&kept)[ROOM][WIDTH / 2], float (&sums)[WIDTH / 2], int leaf) {
    if (leaf & 1) {
#pragma unroll
        for (int j = 0; j < WIDTH / 2; j++) kept[ROOM - 1][j] = kept[0][j] + sums[j];
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH / 2; j++) kept[0][j] = sums[j];
    }
#pragma unroll
    for (int j = 0; j < WIDTH / 2; j++) sums[j] = 0.f;
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + FETCHERS, 1)
linear_split(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, out_t* __restrict__ out, const act_t* __restrict__ bias, int n,
             int outputs, int inputs) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    const int rank = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT, first_row = blockIdx.y * TOKENS, leaf = blockIdx.z;
    const int of_leaf = (inputs / 64 + CHUNKS - 1) / CHUNKS, units = LEAVES * of_leaf;
    const int begin = units * rank / SPLIT, count = units * (rank + 1) / SPLIT - begin;
    const int shift = TOKENS <= 64 && !ORDER ? tile * 5 % count : 0;  // blocks begin with different inputs
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), GROUPS * SHARED);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (SPLIT > 1 || SHARED > 1) cluster_arrive_relaxed();
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        if (PRODUCTS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x >= CONSUMERS + 32) return;
        const int part = blockIdx.x % SHARED, bring = SHARED > 1 ? min(SHARED, (n - first_row + X_PART - 1) / X_PART) : 1;  // parts with rows
        const int width = (int)gridDim.z * LEAVES * inputs;
        // The leaf of a stage, and its first chunk there.
        auto place = [&](int i, int& chunk) {
            int unit = begin + (i + shift) % count, of = leaf;
#pragma unroll
            for (int next = 1; next < LEAVES; next++)
                if (unit >= of_leaf) unit -= of_leaf, of++;
            chunk = unit * CHUNKS;
            return of;
        };
        auto weights = [&](int i, int s) {
            const unsigned f = shared_address(&full[s]);
            int chunk;
            const int of = place(i, chunk);
            barrier_expect(f, CHUNKS * (W_BYTES + bring * X_PART * 128));
            if (GATED) load_pair_chunks(base + s * STAGE, &w_map, tile * (WIDTH / 2), chunk, f);
            else load_chunks(base + s * STAGE, &w_map, of * outputs + tile * WIDTH, chunk, f);
        };
        auto rows = [&](int i, int s) {
            const unsigned to = base + s * STAGE + CHUNKS * W_BYTES, f = shared_address(&full[s]);
            int chunk;
            const int of = place(i, chunk);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const int at = (chunk + c) * 64, column = at < inputs ? of * inputs + at : width;  // zeros behind the leaf
                if (SHARED == 1) load_box(to + c * X_BYTES, &x_map, column, first_row, f);
                else if (part < bring) load_shared_box(to + c * X_BYTES + part * X_PART * 128, &x_map, column, first_row + part * X_PART, f, (1 << SHARED) - 1);
            }
        };
        fetch_stages<STAGES, SHARED>(threadIdx.x == CONSUMERS, count, empty, weights, rows);
        if (SPLIT > 1) {
            __syncwarp();
            cluster_wait();
            cluster_arrive_relaxed(), cluster_wait();
        }
        return;
    }
    if (PRODUCTS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if (SHARED > 1) cluster_wait();
    wait_for_previous();
    const int group = threadIdx.x >> 7;
    auto release = [&](int s) {
        if ((threadIdx.x & 127) >= SHARED) return;
        if (SHARED > 1) barrier_arrive_at(shared_address(&empty[s]), threadIdx.x & 127);
        else barrier_arrive(shared_address(&empty[s]));
    };
    float sums[PRODUCTS][WIDTH / 2] = {}, kept[KEPT ? KEPT : 1][WIDTH / 2];
    int ended = 0;  // leaves
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        if (KEPT && i == (ended + 1) * of_leaf) {
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            accumulators_fence(sums[0]);
            keep(kept, sums[0], ended++);
        }
        const int s = i % STAGES;
        barrier_wait(shared_address(&full[s]), i / STAGES & 1);
        const unsigned w = base + s * STAGE, x = w + CHUNKS * W_BYTES + group * PRODUCTS * 8192;
#pragma unroll
        for (int p = 0; p < PRODUCTS; p++) accumulators_fence(sums[p]);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int p = 0; p < PRODUCTS; p++) wgmma(sums[p], descriptor(x + c * X_BYTES + p * 8192 + k * 32), descriptor(w + c * W_BYTES + k * 32));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");  // while the stage before it ends
#pragma unroll
        for (int p = 0; p < PRODUCTS; p++) accumulators_fence(sums[p]);
        if (i > 0) release((i - 1) % STAGES);  // nobody waits for the last one
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int p = 0; p < PRODUCTS; p++) accumulators_fence(sums[p]);
#pragma unroll
    for (int j = 0; j < (KEPT ? WIDTH / 2 : 0); j++) {
        sums[0][j] = kept[0][j] + sums[0][j];
        if (KEPT > 1) sums[0][j] = kept[KEPT - 1][j] + sums[0][j];
    }
    const int warp = threadIdx.x >> 5 & 3, token = first_row + group * PRODUCTS * 64 + warp * 16;
    out_t* stage = (out_t*)(raw + (base - shared_address(raw))) + (threadIdx.x >> 5) * 16 * PITCH;
    if (SPLIT > 1) {
        const unsigned mine = base + GIVEN + threadIdx.x * 16;
        const int width = GATED ? outputs / 2 : outputs;
        const Rows rows{stage, out, bias, token, tile * OWN * 2 + rank * OWN, n, width, width};
        cluster_wait();  // the other one has begun
        if (rank) give<0>(sums[0], mine, 0);
        else give<HALF>(sums[0], mine, 1);
        cluster_arrive(), cluster_wait();
        if (rank) finish<HALF>(sums[0], mine, rows);
        else finish<0>(sums[0], mine, rows);
        return;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");  // nobody reads a stage any more
#pragma unroll
    for (int p = 0; p < PRODUCTS; p++) {
        const float* s = sums[p];
#if GATED
        const Rows rows{stage, out, nullptr, token + p * 64, tile * (WIDTH / 2), n, outputs / 2, outputs / 2};
#pragma unroll
        for (int j = 0; j < EIGHTS; j++, s += 4) rows.put_one(j, gated(s[0], s[1]), gated(s[2], s[3]));
#else
        const Rows rows{stage, out + leaf * outputs, leaf ? nullptr : bias, token + p * 64, tile * WIDTH, n, outputs, outputs * (int)gridDim.z};
#pragma unroll
        for (int j = 0; j < EIGHTS; j++, s += 4) rows.put(j, s[0], s[1], s[2], s[3]);
#endif
        rows.store();
    }
    if (SHARED > 1) cluster_arrive_relaxed(), cluster_wait();  // the other may still say here what it has read
}
