// Attention of one row and head by a whole block, for any head size and dtype: the plain kernel, and the second try of the fast ones
// for a row that met NaN, since a weight of zero times NaN is NaN there, or whose scores are too high for them. Keys beyond the row's position, or in front of its window, are
// never read.
//
// Defines: WINDOW where a row does not attend to all keys before it (how many at most, its own the last of them).
#pragma once
#ifndef WINDOW
#define WINDOW 0
#endif
#ifdef KV
#include "quant.cuh"
#else
#include "cache.cuh"

typedef act_t kv_t;
template <bool TILED_>
struct Pages {  // one layer's cache as one slot sees it
    const act_t* keys;
    const act_t* values;
    const int* table;
    int num_kv_heads, block_size, head_dim;
    __device__ __forceinline__ int64_t block(int position, int head) const {
        return ((int64_t)table[position / block_size] * num_kv_heads + head) * block_size * head_dim;
    }
    __device__ __forceinline__ float key(int position, int head, int d) const {
        return to_float(keys[block(position, head) + key_offset<TILED_>(position % block_size, d, head_dim)]);
    }
    __device__ __forceinline__ float value(int position, int head, int d) const {
        return to_float(values[block(position, head) + value_offset<TILED_>(position % block_size, d, head_dim)]);
    }
};
#endif

constexpr int PLAIN_KEYS = 128, PLAIN_DIMS = 8;

// The first key that the row at `position` attends to.
__device__ __forceinline__ int first_key(int position) { return WINDOW ? max(position + 1 - WINDOW, 0) : 0; }
// Whether the row at `position` attends to `key`; no row does at position -1.
__device__ __forceinline__ bool attends(int position, int key) { return key <= position && (WINDOW == 0 || key > position - WINDOW); }

// `q` and `out` point at the row's head; blockDim.x may be anything from 32 to 1024. `weights`: PLAIN_KEYS floats of shared memory.
template <bool TILED_>
__device__ __noinline__ void attend_row(const act_t* q, const Pages<TILED_>& pages, int head, int position, float scale, act_t* out, float* weights) {
    const int dim = pages.head_dim;
    float top = -INFINITY_F, total = 0.f, sums[PLAIN_DIMS] = {};
    for (int first = first_key(position); first <= position; first += PLAIN_KEYS) {
        const int count = min(PLAIN_KEYS, position + 1 - first);
        __syncthreads();
        for (int key = threadIdx.x; key < count; key += blockDim.x) {
            float score = 0.f;
            for (int d = 0; d < dim; d++) score += to_float(q[d]) * pages.key(first + key, head, d);
            weights[key] = score * scale;
        }
        __syncthreads();
        float high = top;
        for (int key = 0; key < count; key++) high = fmaxf(high, weights[key]);
        const float shift = high == -INFINITY_F ? 0.f : high, keep = expf(top - shift);
        __syncthreads();
        for (int key = threadIdx.x; key < count; key += blockDim.x) weights[key] = expf(weights[key] - shift);
        __syncthreads();
        float sum = 0.f;
        for (int key = 0; key < count; key++) sum += weights[key];
        total = total * keep + sum;
        top = high;
        for (int i = 0, d = threadIdx.x; i < PLAIN_DIMS; i++, d += blockDim.x) {
            if (d >= dim) break;
            sums[i] *= keep;
            for (int key = 0; key < count; key++) sums[i] += weights[key] * pages.value(first + key, head, d);
        }
    }
    for (int i = 0, d = threadIdx.x; i < PLAIN_DIMS; i++, d += blockDim.x)
        if (d < dim) out[d] = from_float<act_t>(sums[i] / total);
    __syncthreads();
}

#if defined(HEAD_DIM) && ACT != 0
// -- one group of 16 keys against 16 packed rows ------------------------------------------------------
constexpr int QUADS = HEAD_DIM / 32, PAIRS = HEAD_DIM / 16, GROUP_BYTES = 16 * HEAD_DIM * 2;

// Rows g and g + 8 of a tile, as `mma` wants them: in fours of registers, where they have to stay. What one instruction has loaded lies
// in fours of its own, and would be put together anew for each product, which takes twice as many instructions as the products.
struct Queries {
    vec4 part[QUADS][2];
    __device__ __forceinline__ void set(int j, vec4 near, vec4 far) {  // elements 32 j + 8 t .. 8 t + 7 of both rows
        part[j][0] = {near.x, far.x, near.y, far.y}, part[j][1] = {near.z, far.z, near.w, far.w};
    }
    __device__ __forceinline__ vec4 row(int j, int h) const {
        const vec4 &a = part[j][0], &b = part[j][1];
        return h ? vec4{a.y, a.w, b.y, b.w} : vec4{a.x, a.z, b.x, b.z};
    }
};
struct Softmax { float top[2], total[2]; };  // what is taken off scores, in powers of two; of the weights so far, this lane's part
// The sum over the four lanes that share a row, in each of them.
__device__ __forceinline__ void add_over_lanes(float& total) {
    total += __shfl_xor_sync(FULL, total, 1);
    total += __shfl_xor_sync(FULL, total, 2);
}
constexpr float LOWEST = -3.402823466e+38f, SLACK = 8.f;  // a top before any key; how far scores may lie beyond one
// A score's weight is of the score as it is, a top of one that float32 has rounded: from here on by more than half a power of two, so that
// weights may be lost or infinite, and the row is computed again.
constexpr float LOUD = 0x1p24f;

__device__ __forceinline__ vec4 load_apart(const act_t* p) {  // as load4, by an instruction a word
    vec4 v;
    asm volatile("ld.global.u32 %0, [%4];\nld.global.u32 %1, [%4 + 4];\nld.global.u32 %2, [%4 + 8];\nld.global.u32 %3, [%4 + 12];" : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// Scores of the keys at `at` (shared memory, lane's own place): [keys 0..7, 8..15][4].
__device__ __forceinline__ void score_group(float (&scores)[2][4], const Queries& q, unsigned at) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < QUADS; j++) {
            const vec4 a = q.part[j][0], b = q.part[j][1], c = load_shared(at + (i * QUADS + j) * 512);
            mma(scores[i], a.x, a.y, a.z, a.w, c.x, c.y);
            mma(scores[i], b.x, b.y, b.z, b.w, c.z, c.w);
        }
}

// Words of a value group with what lies beyond position `last` set to zero: it may be anything in memory.
struct Reach { unsigned near, far; };
__device__ __forceinline__ Reach reach_of(int key0, int t, int last) {
    const int k = key0 + t * 2;
    return {(k <= last ? 0xffffu : 0u) | (k + 1 <= last ? 0xffff0000u : 0u), (k + 8 <= last ? 0xffffu : 0u) | (k + 9 <= last ? 0xffff0000u : 0u)};
}

// sums[n] += weights of one group times its values; weights are the group's scores after exp. With BORDER values reach to `reach`.
template <bool BORDER>
__device__ __forceinline__ void mix_group(float (&sums)[PAIRS * 2][4], const float (&w)[2][4], unsigned at, Reach reach = {}) {
    const unsigned a0 = pack(w[0][0], w[0][1]), a1 = pack(w[0][2], w[0][3]), a2 = pack(w[1][0], w[1][1]), a3 = pack(w[1][2], w[1][3]);
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        vec4 v = load_shared(at + p * 512);
        if (BORDER) v.x &= reach.near, v.y &= reach.far, v.z &= reach.near, v.w &= reach.far;
        mma(sums[p * 2], a0, a1, a2, a3, v.x, v.y);
        mma(sums[p * 2 + 1], a0, a1, a2, a3, v.z, v.w);
    }
}

// One step of the running softmax over COUNT groups: scores times `scale` become weights, powers of two. A row's top follows its highest
// score only where that is beyond it by more than SLACK (as in FlashAttention-4): weights stay below 2**SLACK, and most steps have
// nothing to take to a new top. A row's weights depend on that row alone.
template <int COUNT>
__device__ __forceinline__ void soften(float (&scores)[COUNT][2][4], float scale, Softmax& s, float (&sums)[PAIRS * 2][4]) {
    float high[2] = {-INFINITY_F, -INFINITY_F}, sum[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) high[c >> 1] = fmaxf(high[c >> 1], scores[n][i][c]);
    high[0] *= scale, high[1] *= scale;
    if (__any_sync(FULL, high[0] - s.top[0] > SLACK || high[1] - s.top[1] > SLACK)) {
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            high[h] = fmaxf(high[h], __shfl_xor_sync(FULL, high[h], 1));
            high[h] = fmaxf(high[h], __shfl_xor_sync(FULL, high[h], 2));
            const float top = high[h] - s.top[h] > SLACK ? high[h] : s.top[h];
            keep[h] = exp2_fast(s.top[h] - top);
            s.total[h] *= keep[h], s.top[h] = top;
        }
#pragma unroll
        for (int n = 0; n < PAIRS * 2; n++) sums[n][0] *= keep[0], sums[n][1] *= keep[0], sums[n][2] *= keep[1], sums[n][3] *= keep[1];
    }
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                scores[n][i][c] = exp2_fast(scores[n][i][c] * scale - s.top[c >> 1]);
                sum[c >> 1] += scores[n][i][c];
            }
    s.total[0] += sum[0], s.total[1] += sum[1];
}
#ifdef SPLITS
// -- the blocks that share a tile ---------------------------------------------------------------------
// The first group from `least` on of those that are dealt to warp `own` of `stride`: each goes to one warp by its number alone.
__device__ __forceinline__ int first_dealt(int least, int own, int stride) { return own + max(least - own + stride - 1, 0) / stride * stride; }
__device__ __forceinline__ void cluster_barrier() {
#if SPLITS > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}
// The same place in the shared memory of block `rank` of the cluster, which `load_pair` and `load_quad` read.
__device__ __forceinline__ unsigned of_rank(unsigned address, int rank) {
#if SPLITS > 1
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
#else
    return address;
#endif
}
#if SPLITS > 1
#define SPACE "shared::cluster"
#else
#define SPACE "shared"
#endif
__device__ __forceinline__ float2 load_pair(unsigned a) {
    float2 v;
    asm volatile("ld." SPACE ".v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a) : "memory");
    return v;
}
__device__ __forceinline__ float4 load_quad(unsigned a) {
    float4 v;
    asm volatile("ld." SPACE ".v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a) : "memory");
    return v;
}
#endif

#ifdef HEADS
// -- prefill tiles: what they do alike over any form of the cache ----------------------------------------
// Zeros in the block's heads, from `head0` on, for rows of nobody. Each warp looks at 32 rows at once.
template <int THREADS>
__device__ __forceinline__ void clear_padding(act_t* out, const int* row_slot, int n, int width, int head0) {
    const int lane = threadIdx.x & 31, warp = blockIdx.y * (THREADS / 32) + threadIdx.x / 32, warps = gridDim.y * (THREADS / 32);
    for (int row0 = warp * 32; row0 < n; row0 += warps * 32)
        for (unsigned left = __ballot_sync(FULL, row0 + lane < n && row_slot[row0 + lane] < 0); left; left &= left - 1) {
            act_t* row = out + (int64_t)(row0 + __ffs(left) - 1) * width + head0 * HEAD_DIM;
            for (int i = lane; i < HEADS * HEAD_DIM; i += 32) row[i] = from_float<act_t>(0.f);
        }
}
// A lane's elements of rows `row` and `row + 8` of a head, in a tile of `rows` that begins at row `first`; zeros behind its end.
__device__ __forceinline__ void load_queries(Queries& queries, const act_t* q, int first, int row, int rows, int width, int head, int t) {
    vec4 loaded[2][QUADS];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < QUADS; j++)
            loaded[h][j] = row + h * 8 < rows ? load4(q + (int64_t)(first + row + h * 8) * width + head * HEAD_DIM + j * 32 + t * 8) : vec4{0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < QUADS; j++) queries.set(j, loaded[0][j], loaded[1][j]);
}
#ifndef KV
// What the rows of a tile get: their sums over the total of their weights. A row that met NaN, or whose scores are too high, is computed
// again by the block.
template <int THREADS>
__device__ __forceinline__ void store_tile(float (&sums)[PAIRS * 2][4], Softmax& softmax, int4 tile, const act_t* q, act_t* out, int width, int head0, int kv_head, const Pages<true>& pages, float scale) {
    __shared__ float plain[PLAIN_KEYS];
    __shared__ int broken[64 * HEADS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = warp / 4, row0 = warp % 4 * 16 + (lane >> 2);
    for (int i = threadIdx.x; i < 64 * HEADS; i += THREADS) broken[i] = 0;
    __syncthreads();
    bool again = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float& total = softmax.total[h];
        add_over_lanes(total);
        const int row = row0 + h * 8;
        if (row >= tile.y) continue;
        const float rest = 1.f / total;
        bool fine = fabsf(softmax.top[h]) < LOUD;
        act_t* o = out + (int64_t)(tile.x + row) * width + (head0 + head) * HEAD_DIM + (lane & 3) * 2;
#pragma unroll
        for (int d = 0; d < PAIRS * 2; d++) {
            const float a = sums[d][h * 2] * rest, b = sums[d][h * 2 + 1] * rest;
            *(unsigned*)(o + d * 8) = pack(a, b);
            fine &= a == a && b == b;
        }
        if (!fine) broken[head * 64 + row] = 1, again = true;
    }
    if (!__syncthreads_or(again)) return;
    for (int i = 0; i < 64 * HEADS; i++) {
        if (!broken[i]) continue;
        const int row = i % 64;
        const int64_t at = (int64_t)(tile.x + row) * width + (head0 + i / 64) * HEAD_DIM;
        attend_row<true>(q + at, pages, kv_head, tile.w + row, scale, out + at, plain);
    }
}
#endif
#endif
#endif
