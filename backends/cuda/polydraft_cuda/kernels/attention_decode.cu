// Attention of decode windows over the paged cache: the rows and query heads that share a key head are packed into tensor-core tiles.
//
// A cluster of SPLITS blocks serves one tile of rows and one key head. Keys are dealt in groups of 16 to the KEY_WARPS warps of its
// blocks by their absolute position, and the parts are joined in one fixed order: what a row gets depends on that row alone. A warp
// fetches its groups ahead into shared memory of its own, in the order in which its lanes read them: nobody else has to be waited for.
//
// Defines: ACT (1, 2), HEAD_DIM (a multiple of 32, up to 128), GROUP (query heads a key head), TILES (tiles of 16 packed rows),
// KEY_WARPS, SPLITS, STAGES (groups a warp has room for), BLOCK_GROUPS (groups of 16 positions a block).
#include "attention.cuh"

constexpr int PACKED = 16 * TILES, WARPS = TILES * KEY_WARPS, OWN = PACKED / SPLITS, PITCH = HEAD_DIM + 4, STAGE_BYTES = 2 * GROUP_BYTES;
static_assert(PACKED % SPLITS == 0, "a block joins whole rows");

__device__ __forceinline__ void cluster_barrier() {
#if SPLITS > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}
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

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_decode(const act_t* __restrict__ q, const act_t* keys, const act_t* values, const int4* __restrict__ tiles, const int* __restrict__ num_tiles,
                 const int* __restrict__ row_slot, const int* __restrict__ block_table, act_t* __restrict__ out, int n, int max_blocks,
                 int num_heads, int num_kv_heads, float scale) {
    extern __shared__ float shared[];  // the ring of every warp; then sums [KEY_WARPS][PACKED][PITCH] and (top, total) [KEY_WARPS][PACKED]
    __shared__ float plain[PLAIN_KEYS];
    __shared__ int broken[OWN];
    float* sums_shared = shared;
    float2* stats_shared = (float2*)(shared + KEY_WARPS * PACKED * PITCH);
    const int split = blockIdx.x, kv_head = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int tile_of_warp = warp % TILES, part = warp / TILES, width = num_heads * HEAD_DIM, columns = GROUP * HEAD_DIM;
    begin_dependent();
    const int4 tile = tiles[blockIdx.z];
    const bool real = (int)blockIdx.z < *num_tiles;
    if (split == 0)
        for (int r = blockIdx.z; r < n; r += gridDim.z)
            if (row_slot[r] < 0)
                for (int i = threadIdx.x; i < columns; i += WARPS * 32) out[(int64_t)r * width + kv_head * columns + i] = from_float<act_t>(0.f);
    if (!real) return;  // the whole cluster
    const int first = tile.x, rows = tile.y, position = tile.w;
    const int* table = block_table + (int64_t)tile.z * max_blocks;
    const float scale2 = scale * 1.4426950408889634f;
    for (int from = 0; from < rows * GROUP; from += PACKED) {
        const int base = from + tile_of_warp * 16, last = position + min(rows - 1, (from + PACKED - 1) / GROUP);
        const int stride = SPLITS * KEY_WARPS, start = split * KEY_WARPS + part, groups = last / 16 + 1;
        const unsigned ring = shared_address(shared) + warp * STAGES * STAGE_BYTES + lane * 16;
        auto fetch = [&](int group, int stage) {
            if (group < groups) {
                const int64_t place = (((int64_t)table[group / BLOCK_GROUPS] * num_kv_heads + kv_head) * BLOCK_GROUPS + group % BLOCK_GROUPS) * 16 * HEAD_DIM;
                const act_t *k = keys + place + lane * 8, *v = values + place + lane * 8;
                const unsigned to = ring + stage * STAGE_BYTES;
#pragma unroll
                for (int i = 0; i < GROUP_BYTES / 512; i++) copy_async(to + i * 512, k + i * 256, true);
#pragma unroll
                for (int i = 0; i < GROUP_BYTES / 512; i++) copy_async(to + GROUP_BYTES + i * 512, v + i * 256, true);
            }
            copy_commit();
        };
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) fetch(start + s * stride, s);
        int limit[2];
        Queries queries;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int packed = base + g + h * 8, row = packed / GROUP, head = packed % GROUP;
            limit[h] = row < rows ? position + row : -1;
#pragma unroll
            for (int j = 0; j < QUADS; j++)
                queries.part[j][h] = row < rows ? load4(q + (int64_t)(first + row) * width + (kv_head * GROUP + head) * HEAD_DIM + j * 32 + t * 8)
                                                : vec4{0, 0, 0, 0};
        }
        float sums[PAIRS * 2][4] = {};
        Softmax softmax = {{-INFINITY_F, -INFINITY_F}, {0.f, 0.f}};
        int stage = 0;
        for (int group = start; group < groups; group += stride) {
            fetch(group + (STAGES - 1) * stride, stage == 0 ? STAGES - 1 : stage - 1);
            copy_wait<STAGES - 1>();
            const unsigned at = ring + stage * STAGE_BYTES;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            const int key0 = group * 16;
            float scores[1][2][4] = {}, keep[2];
            score_group(scores[0], queries, at);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    scores[0][i][c] = key0 + i * 8 + t * 2 + (c & 1) <= limit[c >> 1] ? scores[0][i][c] * scale2 : -INFINITY_F;
            soften(scores, softmax, keep);
            rescale(sums, keep);
            mix_group(sums, scores[0], at + GROUP_BYTES, key0 + 15 > last, reach_of(key0, t, last));
        }
        copy_wait<0>();
        __syncthreads();  // the sums take the place of the ring
#pragma unroll
        for (int h = 0; h < 2; h++) {  // totals of the four lanes that share a row
            float& total = softmax.total[h];
            total += __shfl_xor_sync(FULL, total, 1);
            total += __shfl_xor_sync(FULL, total, 2);
            const int packed = tile_of_warp * 16 + g + h * 8;
            if (t == 0) stats_shared[part * PACKED + packed] = make_float2(softmax.top[h], total);
            float* s = sums_shared + (part * PACKED + packed) * PITCH + t * 2;
#pragma unroll
            for (int d = 0; d < PAIRS * 2; d++) *(float2*)(s + d * 8) = make_float2(sums[d][h * 2], sums[d][h * 2 + 1]);
        }
        if (threadIdx.x < OWN) broken[threadIdx.x] = 0;
        cluster_barrier();
        for (int e = threadIdx.x; e < OWN * HEAD_DIM / 4; e += WARPS * 32) {  // this block joins the parts of its own rows
            const int own = e / (HEAD_DIM / 4), d = e % (HEAD_DIM / 4) * 4, packed = split * OWN + own;
            const int row = (from + packed) / GROUP, head = (from + packed) % GROUP;
            if (row >= rows) continue;
            const unsigned stats = shared_address(stats_shared + packed), values_at = shared_address(sums_shared + packed * PITCH + d);
            constexpr int PARTS = SPLITS * KEY_WARPS;
            float high = -INFINITY_F, all = 0.f;
            float2 stat[PARTS];
            float4 mixed = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int i = 0; i < PARTS; i++) stat[i] = load_pair(of_rank(stats, i / KEY_WARPS) + i % KEY_WARPS * PACKED * 8);
#pragma unroll
            for (int i = 0; i < PARTS; i++) high = fmaxf(high, stat[i].x);
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                const float4 s = load_quad(of_rank(values_at, i / KEY_WARPS) + i % KEY_WARPS * PACKED * PITCH * 4);
                const float weight = exp2_fast(stat[i].x - high);
                if (!(weight > 0.f) && stat[i].y == stat[i].y) continue;  // saw no key of this row
                all += stat[i].y * weight;
                mixed.x += s.x * weight, mixed.y += s.y * weight, mixed.z += s.z * weight, mixed.w += s.w * weight;
            }
            const float rest = 1.f / all;
            mixed.x *= rest, mixed.y *= rest, mixed.z *= rest, mixed.w *= rest;
            vec2 packed_out = {pack(mixed.x, mixed.y), pack(mixed.z, mixed.w)};
            *(vec2*)(out + (int64_t)(first + row) * width + (kv_head * GROUP + head) * HEAD_DIM + d) = packed_out;
            if (!(mixed.x == mixed.x && mixed.y == mixed.y && mixed.z == mixed.z && mixed.w == mixed.w)) broken[own] = 1;
        }
        cluster_barrier();
        for (int own = 0; own < OWN; own++) {
            const int packed = from + split * OWN + own, row = packed / GROUP, head = packed % GROUP;
            if (!broken[own] || row >= rows) continue;
            const int64_t at = (int64_t)(first + row) * width + (kv_head * GROUP + head) * HEAD_DIM;
            const Pages<true> pages = {keys, values, table, num_kv_heads, BLOCK_GROUPS * 16, HEAD_DIM};
            attend_row<true>(q + at, pages, kv_head, position + row, scale, out + at, plain);
        }
        __syncthreads();
    }
}
