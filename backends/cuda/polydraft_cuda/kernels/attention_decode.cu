// Attention of decode windows over the paged cache: the rows and query heads that share a key head are packed into tensor-core tiles.
//
// A cluster of SPLITS blocks serves one tile of rows and one key head. Keys are dealt in groups of 16 to the KEY_WARPS warps of its
// blocks by their absolute position, and the parts are joined in one fixed order: what a row gets depends on that row alone. A warp
// fetches its groups ahead into shared memory of its own, in the order in which its lanes read them: nobody else has to be waited for.
// From sm_90 on the copy engine brings them, whole. (The ring is aligned to 128 bytes: elsewhere copies take a quarter longer.)
//
// With ROPE the launch takes the projection's rows instead: it turns queries and keys and stores keys and values as rope.cu does, and
// lays them over what the cache has at their places. Then the old context is fetched before the projection in front has ended, which
// lets its dependents come only once it has seen what was before it itself; all of a slot's new rows must be in one tile. Turned
// queries are stored only for a row that is computed again.
//
// Where `few` is not 0, tiles of more rows, and rows without a slot, are left to attention_prompt.cu.
//
// Defines: ACT (1, 2), HEAD_DIM (a multiple of 32, up to 128; of 64 with ROPE), GROUP (query heads a key head), TILES (tiles of 16
// packed rows), KEY_WARPS, SPLITS, STAGES (groups a warp has room for), BLOCK_GROUPS (groups of 16 positions a block), WINDOW, ROPE (0,
// or the rows of a tile at most); with it INTERLEAVED where heads are not turned in halves, and ROTARY where only so many of their first
// elements are turned: half of 128, in halves.
#include "attention.cuh"
#include "boxes.cuh"

constexpr int PACKED = 16 * TILES, WARPS = TILES * KEY_WARPS, OWN = PACKED / SPLITS, PITCH = HEAD_DIM + 8, STAGE_BYTES = 2 * GROUP_BYTES;
constexpr int PARTS = SPLITS * KEY_WARPS;
static_assert(PACKED % SPLITS == 0, "a block joins whole rows");
#if __CUDA_ARCH__ >= 900
#define BULK 1
#else
#define BULK 0
#endif

#if BULK
__device__ __forceinline__ uint64_t read_once() {  // it leaves the second cache first
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bring(unsigned target, const void* source, int bytes, unsigned barrier, uint64_t once) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(target), "l"(source),
                 "r"(bytes), "r"(barrier), "l"(once)
                 : "memory");
}
#endif
#if ROPE
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
#ifndef ROTARY
#define ROTARY HEAD_DIM
#endif
constexpr int HALF = INTERLEAVED ? HEAD_DIM / 2 : ROTARY / 2;  // from the two neighbours that a lane has of a key to its two others
constexpr int TURNED = INTERLEAVED ? QUADS : ROTARY / 64;      // quads of a query that are turned, or pairs of them
static_assert(HEAD_DIM % 64 == 0 && ROPE * GROUP <= PACKED, "a lane holds both elements of a turn, and a tile all rows");
static_assert(ROTARY == HEAD_DIM || !INTERLEAVED && ROTARY % 64 == 0 && ROTARY * 2 == HEAD_DIM, "what lanes can hold so");

// Two elements and the two they turn with, by (cosine, sine) of each; of interleaved ones either two turn with one another.
__device__ __forceinline__ void turn(unsigned& a, unsigned& b, float4 by) {
    const float x0 = low(a), x1 = high(a), y0 = low(b), y1 = high(b);
    if (INTERLEAVED) {
        a = pack(rotated(x0, -x1, by.x, by.y), rotated(x1, x0, by.x, by.y));
        b = pack(rotated(y0, -y1, by.z, by.w), rotated(y1, y0, by.z, by.w));
        return;
    }
    a = pack(rotated(x0, -y0, by.x, by.y), rotated(x1, -y1, by.z, by.w));
    b = pack(rotated(y0, x0, by.x, by.y), rotated(y1, x1, by.z, by.w));
}
// A new row of a key head, shared by the lanes of a warp: two keys and two HALF behind them, four values.
struct NewRow { unsigned a, b; vec2 v; };
template <typename T> __device__ __forceinline__ void store_shared(unsigned at, T value);
template <> __device__ __forceinline__ void store_shared(unsigned at, unsigned value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory"); }
template <> __device__ __forceinline__ void store_shared(unsigned at, unsigned short value) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(value) : "memory"); }
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_decode(act_t* q, act_t* keys, act_t* values, const int4* tiles, const int* num_tiles, const int* row_slot, const int* block_table,
                 act_t* out, const act_t* qkv, const float2* turns, int n, int max_blocks, int num_heads, int num_kv_heads, float scale, int few) {
    extern __shared__ __align__(128) float shared[];  // the ring of every warp; then sums [KEY_WARPS][PACKED][PITCH] and (top, total) [KEY_WARPS][PACKED]
    __shared__ float plain[PLAIN_KEYS];
    __shared__ int broken[OWN];
#if BULK
    __shared__ alignas(8) uint64_t full[WARPS][STAGES];
#endif
    float* sums_shared = shared;
    float2* stats_shared = (float2*)(shared + KEY_WARPS * PACKED * PITCH);
    const int split = blockIdx.x, kv_head = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int tile_of_warp = warp % TILES, part = warp / TILES, width = num_heads * HEAD_DIM, columns = GROUP * HEAD_DIM;
    launch_dependents();
#if BULK
    if (lane < STAGES) {
        barrier_init(shared_address(&full[warp][lane]), 1);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
#endif
    if (!ROPE) wait_for_previous();
    const int4 tile = __ldcg(tiles + blockIdx.z);
    const bool real = (int)blockIdx.z < __ldcg(num_tiles) && (few == 0 || tile.y <= few);
    const int first = tile.x, rows = real ? tile.y : 0, position = tile.w;
    const int* table = block_table + (int64_t)tile.z * max_blocks;
    const float scale2 = scale * 1.4426950408889634f;
#if BULK
    const uint64_t once = read_once();
#endif
    const int step = gridDim.z * WARPS * 32, row_of_thread = blockIdx.z + threadIdx.x * gridDim.z;  // rows that may have no slot
    const bool padding = split == 0 && row_of_thread < n && __ldcg(row_slot + row_of_thread) < 0;
    int fetched = 0, used = 0;  // groups of this warp so far: which place in the ring, and which turn of its barrier
    for (int from = 0; from < max(rows * GROUP, 1); from += PACKED) {
        const int base = from + tile_of_warp * 16, last = position + min(rows - 1, (from + PACKED - 1) / GROUP);
        const int stride = SPLITS * KEY_WARPS, groups = real ? last / 16 + 1 : 0;
        const int start = first_dealt(first_key(position + from / GROUP) / 16, split * KEY_WARPS + part, stride);
        const unsigned ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;
        int entry = 0;  // lane i: block of this warp's group i of 32
        auto place_of = [&](int block, int group) { return (((int64_t)block * num_kv_heads + kv_head) * BLOCK_GROUPS + group % BLOCK_GROUPS) * 16 * HEAD_DIM; };
        auto fetch = [&](int i) {  // in order
            if ((i & 31) == 0) {
                const int group = start + (i + lane) * stride;
                entry = group < groups ? __ldcg(table + group / BLOCK_GROUPS) : 0;
            }
            const int block = __shfl_sync(FULL, entry, i & 31), group = start + i * stride;
            if (group < groups) {
                const int64_t place = place_of(block, group);
                const int s = fetched++ % STAGES;
                const unsigned to = ring + s * STAGE_BYTES;
#if BULK
                if (lane == 0) {
                    const unsigned f = shared_address(&full[warp][s]);
                    barrier_expect(f, STAGE_BYTES);
                    bring(to, keys + place, GROUP_BYTES, f, once), bring(to + GROUP_BYTES, values + place, GROUP_BYTES, f, once);
                }
#else
#pragma unroll
                for (int p = 0; p < GROUP_BYTES / 512; p++) copy_async(to + lane * 16 + p * 512, keys + place + lane * 8 + p * 256, true);
#pragma unroll
                for (int p = 0; p < GROUP_BYTES / 512; p++) copy_async(to + lane * 16 + GROUP_BYTES + p * 512, values + place + lane * 8 + p * 256, true);
#endif
            }
            if (!BULK) copy_commit();
        };
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) fetch(i);
        int limit[2];  // last position that the lane's rows see
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = (base + g + h * 8) / GROUP;
            limit[h] = row < rows ? position + row : -1;
        }
#if ROPE
        const int fresh = position / 16, newest = last / 16;  // groups with new rows
        const bool mine = real && newest >= start && (newest - start) / stride * stride + start >= fresh;
        const int fresh_block = mine ? __ldcg(table + fresh / BLOCK_GROUPS) : 0, newest_block = mine ? __ldcg(table + newest / BLOCK_GROUPS) : 0;
        constexpr int TWOS = INTERLEAVED ? 2 : 4;  // of angles that eight elements turn by
        const int column = lane % (HALF / 2) * 2 + lane / (HALF / 2) * HALF * 2;  // of this lane's elements of a key
        const bool has_keys = column < HEAD_DIM, is_turned = column < ROTARY;
        float4 by_query[2][TURNED][TWOS], by_row[ROPE];  // what they turn by
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4* by = (const float4*)(turns + (int64_t)max(limit[h], 0) * (ROTARY / 2));
#pragma unroll
            for (int j = 0; j < TURNED; j++)
#pragma unroll
                for (int i = 0; i < TWOS; i++) by_query[h][j][i] = by[(j * 4 + t) * TWOS + i];
        }
        if (mine) {
#pragma unroll
            for (int r = 0; r < ROPE; r++)
                if (r < rows && is_turned) {
                    const float2* by = turns + (int64_t)(position + r) * (ROTARY / 2);
                    if (INTERLEAVED) {
                        const float2 a = by[column / 2], b = by[(column + HALF) / 2];
                        by_row[r] = make_float4(a.x, a.y, b.x, b.y);
                    } else
                        by_row[r] = *(const float4*)(by + column);
                }
        }
        wait_for_previous();
#endif
        if (!real) break;
        Queries queries;
        vec4 loaded[2][QUADS];
#if ROPE
        const int64_t pitch = (num_heads + 2 * num_kv_heads) * HEAD_DIM;
        NewRow added[ROPE];
        if (mine) {
#pragma unroll
            for (int r = 0; r < ROPE; r++)
                if (r < rows && has_keys) {
                    const act_t* key = qkv + (first + r) * pitch + (num_heads + kv_head) * HEAD_DIM + column;
                    added[r].a = *(const unsigned*)key, added[r].b = *(const unsigned*)(key + HALF);
                }
#pragma unroll
            for (int r = 0; r < ROPE; r++)
                if (r < rows && lane * 4 < HEAD_DIM) added[r].v = *(const vec2*)(qkv + (first + r) * pitch + (num_heads + num_kv_heads + kv_head) * HEAD_DIM + lane * 4);
        }
#endif
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int packed = base + g + h * 8, row = packed / GROUP, head = packed % GROUP;
#if ROPE
            const act_t* source = qkv + (first + row) * pitch + (kv_head * GROUP + head) * HEAD_DIM + t * 8;
#pragma unroll
            for (int j = 0; j < QUADS; j++) loaded[h][j] = row < rows ? load4(source + j * 32) : vec4{0, 0, 0, 0};
#else
            const act_t* source = q + (int64_t)(first + row) * width + (kv_head * GROUP + head) * HEAD_DIM + t * 8;
#pragma unroll
            for (int j = 0; j < QUADS; j++) loaded[h][j] = row < rows ? load_apart(source + j * 32) : vec4{0, 0, 0, 0};
#endif
        }
#if ROPE
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int j = 0; j < TURNED; j++) {
                vec4& a = loaded[h][j];
                const float4(&w)[TWOS] = by_query[h][j];
#if INTERLEAVED
                turn(a.x, a.y, w[0]), turn(a.z, a.w, w[1]);
#else
                vec4& b = loaded[h][j + TURNED];
                turn(a.x, b.x, w[0]), turn(a.y, b.y, w[1]), turn(a.z, b.z, w[2]), turn(a.w, b.w, w[3]);
#endif
            }
        }
        if (mine) {
#pragma unroll
            for (int r = 0; r < ROPE; r++)
                if (r < rows && is_turned) turn(added[r].a, added[r].b, by_row[r]);
        }
        // The new rows of a group that has come, over what the cache had there; and into the cache. An element of a value has two
        // bytes of each 16 of its group: the group is stored whole, nobody else writes to it.
        auto lay = [&](int group, unsigned at) {
            const int64_t place = place_of(group == fresh ? fresh_block : newest_block, group);
            __syncwarp();
#pragma unroll
            for (int r = 0; r < ROPE; r++) {
                const int k = position + r - group * 16;
                if (r >= rows || k < 0 || k > 15) continue;
                if (has_keys) {
                    const int a = key_offset<true>(k, column, HEAD_DIM), b = key_offset<true>(k, column + HALF, HEAD_DIM);
                    store_shared(at + a * 2, added[r].a), store_shared(at + b * 2, added[r].b);
                    if (tile_of_warp == 0) *(unsigned*)(keys + place + a) = added[r].a, *(unsigned*)(keys + place + b) = added[r].b;
                }
                if (lane * 4 < HEAD_DIM) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const unsigned short bits = (i < 2 ? added[r].v.x : added[r].v.y) >> (i & 1) * 16;
                        store_shared(at + GROUP_BYTES + value_offset<true>(k, lane * 4 + i, HEAD_DIM) * 2, bits);
                    }
                }
            }
            __syncwarp();
            if (tile_of_warp == 0) {
#pragma unroll
                for (int p = 0; p < GROUP_BYTES / 512; p++) *(vec4*)(values + place + p * 256 + lane * 8) = load_shared(at + GROUP_BYTES + p * 512 + lane * 16);
            }
        };
#endif
#pragma unroll
        for (int j = 0; j < QUADS; j++) queries.set(j, loaded[0][j], loaded[1][j]);
        float sums[PAIRS * 2][4] = {};
        Softmax softmax = {{LOWEST, LOWEST}, {0.f, 0.f}};
        for (int group = start, i = 0; group < groups; group += stride, i++) {
            const int s = used % STAGES, key0 = group * 16;
            const unsigned to = ring + s * STAGE_BYTES, at = to + lane * 16;
#if BULK
            barrier_wait(shared_address(&full[warp][s]), used / STAGES & 1);
#else
            copy_wait<STAGES - 1>();
#endif
            used++;
#if ROPE
            if (group >= fresh) lay(group, to);
#endif
            float scores[1][2][4] = {};
            score_group(scores[0], queries, at);
            if (key0 + 15 > position || (WINDOW && key0 <= last - WINDOW)) {  // not seen by all rows
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        if (!attends(limit[c >> 1], key0 + k * 8 + t * 2 + (c & 1))) scores[0][k][c] = -INFINITY_F;
            }
            soften(scores, scale2, softmax, sums);
            if (key0 + 15 > last) mix_group<true>(sums, scores[0], at + GROUP_BYTES, reach_of(key0, t, last));
            else mix_group<false>(sums, scores[0], at + GROUP_BYTES);
            __syncwarp();
            fetch(i + STAGES);
        }
        if (!BULK) copy_wait<0>();
        __syncthreads();  // the sums take the place of the ring
#pragma unroll
        for (int h = 0; h < 2; h++) {  // totals of the four lanes that share a row
            float& total = softmax.total[h];
            add_over_lanes(total);
            const int packed = tile_of_warp * 16 + g + h * 8;
            if (t == 0) stats_shared[part * PACKED + packed] = make_float2(softmax.top[h], total);
            float* s = sums_shared + (part * PACKED + packed) * PITCH + t * 2;
#pragma unroll
            for (int d = 0; d < PAIRS * 2; d++) *(float2*)(s + d * 8) = make_float2(sums[d][h * 2], sums[d][h * 2 + 1]);
        }
        if (threadIdx.x < OWN) broken[threadIdx.x] = 0;
        cluster_barrier();
        bool wrong = false;
#pragma unroll 2
        for (int own = warp; own < OWN; own += WARPS) {  // this block joins the parts of its own rows
            const int packed = split * OWN + own, row = (from + packed) / GROUP, head = (from + packed) % GROUP;
            if (row >= rows || lane * 4 >= HEAD_DIM) break;
            float high = -INFINITY_F, all = 0.f;
            float2 stats[PARTS];
            float4 parts[PARTS], mixed = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                const int at = i % KEY_WARPS * PACKED + packed;
#if SPLITS > 1
                stats[i] = load_pair(of_rank(shared_address(stats_shared + at), i / KEY_WARPS));
                parts[i] = load_quad(of_rank(shared_address(sums_shared + at * PITCH + lane * 4), i / KEY_WARPS));
#else
                stats[i] = stats_shared[at], parts[i] = *(const float4*)(sums_shared + at * PITCH + lane * 4);
#endif
                high = fmaxf(high, stats[i].x);
            }
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                const float weight = exp2_fast(stats[i].x - high);
                const bool none = !(weight > 0.f) && stats[i].y == stats[i].y;  // saw no key of this row
                const float by = none ? 0.f : weight;
                const float4 s = none ? make_float4(0.f, 0.f, 0.f, 0.f) : parts[i];
                all += stats[i].y * by, mixed.x += s.x * by, mixed.y += s.y * by, mixed.z += s.z * by, mixed.w += s.w * by;
            }
            const float rest = 1.f / all;
            mixed.x *= rest, mixed.y *= rest, mixed.z *= rest, mixed.w *= rest;
            *(vec2*)(out + (int64_t)(first + row) * width + (kv_head * GROUP + head) * HEAD_DIM + lane * 4) = {pack(mixed.x, mixed.y), pack(mixed.z, mixed.w)};
            const bool numbers = mixed.x == mixed.x && mixed.y == mixed.y && mixed.z == mixed.z && mixed.w == mixed.w;
            if (!numbers || fabsf(high) >= LOUD) broken[own] = 1, wrong = true;
        }
        if (SPLITS > 1) {
            __syncwarp();
            cluster_arrive_relaxed();  // the others' parts have been read
        }
        if (__syncthreads_or(wrong)) {
#if ROPE
            if (part == 0) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int packed = base + g + h * 8;
                    if (limit[h] < 0) continue;
                    act_t* to = q + (int64_t)(first + packed / GROUP) * width + (kv_head * GROUP + packed % GROUP) * HEAD_DIM + t * 8;
#pragma unroll
                    for (int j = 0; j < QUADS; j++) *(vec4*)(to + j * 32) = queries.row(j, h);
                }
            }
            __syncthreads();
#endif
            for (int own = 0; own < OWN; own++) {
                const int packed = from + split * OWN + own, row = packed / GROUP, head = packed % GROUP;
                if (!broken[own] || row >= rows) continue;
                const int64_t at = (int64_t)(first + row) * width + (kv_head * GROUP + head) * HEAD_DIM;
                const Pages<true> pages = {keys, values, table, num_kv_heads, BLOCK_GROUPS * 16, HEAD_DIM};
                attend_row<true>(q + at, pages, kv_head, position + row, scale, out + at, plain);
            }
        }
#if BULK
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the ring takes its place again
#endif
#if SPLITS > 1
        cluster_wait();  // nobody leaves, or goes on, while his parts are read
#else
        __syncthreads();
#endif
    }
    if (few || !__syncthreads_or(padding) && step >= n) return;
    if (split == 0)
        for (int r = blockIdx.z; r < n; r += gridDim.z)
            if (row_slot[r] < 0)
                for (int i = threadIdx.x; i < columns; i += WARPS * 32) out[(int64_t)r * width + kv_head * columns + i] = from_float<act_t>(0.f);
}
