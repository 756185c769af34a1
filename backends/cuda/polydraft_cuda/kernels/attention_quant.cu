// Attention of decode windows over a cache of quantised rows: attention_decode.cu with half of the bytes.
//
// A cluster of SPLITS blocks serves one tile of rows and one key head; groups of 16 keys are dealt to the KEY_WARPS warps of its blocks
// by their absolute position, and the parts are joined in one fixed order. Numbers become pairs of the activation dtype when they are
// read from shared memory. The exponent of a key goes to its scores, that of a value to its weights: both are exact. A NaN lies in an
// exponent, so it meets only rows that may see it, and nothing has to be computed again.
//
// Defines: ACT (1, 2), KV (1: int8, 2: fp8), HEAD_DIM (a multiple of 32, up to 128), GROUP (query heads a key head), TILES (tiles of 16
// packed rows), KEY_WARPS, SPLITS, STAGES (groups a warp has room for), BLOCK_GROUPS (groups of 16 positions a block), WINDOW.
#include "attention.cuh"

constexpr int PACKED = 16 * TILES, WARPS = TILES * KEY_WARPS, OWN = PACKED / SPLITS, PITCH = HEAD_DIM + 4;
constexpr int ROWS_BYTES = 16 * HEAD_DIM, QUANT_BYTES = ROWS_BYTES + 16, STAGE_BYTES = 2 * QUANT_BYTES;
static_assert(PACKED % SPLITS == 0, "a block joins whole rows");

__device__ __forceinline__ vec2 load_words(unsigned a) {
    vec2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
    return v;
}
// Exponents of rows 2 t, 2 t + 1 and those 8 behind, of a group's exponents in shared memory.
__device__ __forceinline__ void load_exponents(signed char (&e)[4], unsigned a, int t) {
    unsigned short near, far;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(near) : "r"(a + t * 2) : "memory");
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(far) : "r"(a + t * 2 + 8) : "memory");
    e[0] = near & 255, e[1] = near >> 8, e[2] = far & 255, e[3] = far >> 8;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, WARPS > 4 ? 2 : 16 / WARPS)
attention_quant(const act_t* q, const kv_t* keys, const kv_t* values, const int4* tiles, const int* num_tiles, const int* row_slot,
                const int* block_table, act_t* out, int n, int max_blocks, int num_heads, int num_kv_heads, float scale) {
    // The ring of every warp; then sums [KEY_WARPS][PACKED][PITCH], whose rows end with (top, total, 0, 0).
    extern __shared__ float shared[];
    __shared__ vec4 queries[TILES][QUADS][2][32];  // operands by lane: in registers they would leave room for fewer warps
    begin_dependent();
    const int split = blockIdx.x, kv_head = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int tile_of_warp = warp % TILES, part = warp / TILES, width = num_heads * HEAD_DIM, columns = GROUP * HEAD_DIM;
    const bool real = (int)blockIdx.z < *num_tiles;
    const int4 tile = real ? tiles[blockIdx.z] : make_int4(0, 0, 0, 0);
    const int first = tile.x, rows = tile.y, position = tile.w;
    const int* table = block_table + (int64_t)tile.z * max_blocks;
    const float scale2 = scale * 1.4426950408889634f;
    for (int from = 0; from < rows * GROUP; from += PACKED) {
        const int base = from + tile_of_warp * 16, last = position + min(rows - 1, (from + PACKED - 1) / GROUP);
        const int seen_by_all = position + from / GROUP;  // but by rows of the tile that are none, of which nothing is kept
        const int stride = SPLITS * KEY_WARPS, groups = last / 16 + 1;
        const int start = first_dealt(first_key(seen_by_all) / 16, split * KEY_WARPS + part, stride);
        const unsigned ring = shared_address(shared) + warp * STAGES * STAGE_BYTES;
        int entry = 0;  // lane i: block of this warp's group i of 32
        auto fetch = [&](int i, int stage) {  // in order
            if ((i & 31) == 0) {
                const int group = start + (i + lane) * stride;
                entry = group < groups ? table[group / BLOCK_GROUPS] : 0;
            }
            const int block = __shfl_sync(FULL, entry, i & 31), group = start + i * stride;
            if (group < groups) {
                const int64_t place = (((int64_t)block * num_kv_heads + kv_head) * BLOCK_GROUPS + group % BLOCK_GROUPS) * QUANT_BYTES;
                const unsigned to = ring + stage * STAGE_BYTES + lane * 16;
#pragma unroll
                for (int p = 0; p < ROWS_BYTES / 512; p++) copy_async(to + p * 512, keys + place + lane * 16 + p * 512, true);
#pragma unroll
                for (int p = 0; p < ROWS_BYTES / 512; p++) copy_async(to + QUANT_BYTES + p * 512, values + place + lane * 16 + p * 512, true);
                if (lane < 2) copy_async(to - lane * 16 + lane * QUANT_BYTES + ROWS_BYTES, (lane ? values : keys) + place + ROWS_BYTES, true);
            }
            copy_commit();
        };
#pragma unroll
        for (int s = 0; s < STAGES; s++) fetch(s, s);
        int limit[2];
        const act_t* source[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int packed = base + g + h * 8, row = packed / GROUP, head = packed % GROUP;
            source[h] = q + (int64_t)(first + row) * width + (kv_head * GROUP + head) * HEAD_DIM + t * 8;
            limit[h] = row < rows ? position + row : -1;
        }
        for (int j = part; j < QUADS; j += KEY_WARPS) {
            const vec4 near = limit[0] < 0 ? vec4{0, 0, 0, 0} : load4(source[0] + j * 32), far = limit[1] < 0 ? vec4{0, 0, 0, 0} : load4(source[1] + j * 32);
            queries[tile_of_warp][j][0][lane] = {near.x, far.x, near.y, far.y}, queries[tile_of_warp][j][1][lane] = {near.z, far.z, near.w, far.w};
        }
        __syncthreads();
        float sums[PAIRS * 2][4] = {};
        Softmax softmax = {{LOWEST, LOWEST}, {0.f, 0.f}};
        int stage = 0;
        for (int group = start, i = 0; group < groups; group += stride, i++) {
            copy_wait<STAGES - 1>();
            __syncwarp();
            const unsigned at = ring + stage * STAGE_BYTES;
            const int key0 = group * 16;
            const bool border = key0 + 15 > seen_by_all || (WINDOW && key0 <= last - WINDOW);
            float scores[1][2][4] = {};
            signed char of_keys[4], of_values[4];
            load_exponents(of_keys, at + ROWS_BYTES, t);
            load_exponents(of_values, at + QUANT_BYTES + ROWS_BYTES, t);
            float others[2][4] = {};  // of every second product, so that fewer wait for each other
#pragma unroll
            for (int j = 0; j < QUADS; j++) {
                const vec4 a = queries[tile_of_warp][j][0][lane], b = queries[tile_of_warp][j][1][lane];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const vec2 word = load_words(at + lane * 8 + (k * QUADS + j) * 256), c = pairs_of(word.x), d = pairs_of(word.y);
                    mma(scores[0][k], a.x, a.y, a.z, a.w, c.x, c.y);
                    mma(others[k], b.x, b.y, b.z, b.w, d.x, d.y);
                }
            }
            auto each = [&](auto change) {  // of the scores, by half and place
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int c = 0; c < 4; c++) change(scores[0][k][c], k, c);
            };
            auto within = [&](int k, int c) { return attends(limit[c >> 1], key0 + k * 8 + t * 2 + (c & 1)); };
            float by[4];
#pragma unroll
            for (int i = 0; i < 4; i++) by[i] = scale2 * quantum_of(of_keys[i]);
            each([&](float& score, int k, int c) { score = (score + others[k][c]) * by[k * 2 + (c & 1)]; });
            if (border) each([&](float& score, int k, int c) { score = within(k, c) ? score : -INFINITY_F; });
            soften(scores, 1.f, softmax, sums);
#pragma unroll
            for (int i = 0; i < 4; i++) by[i] = factor_of(of_values[i]);
            each([&](float& weight, int k, int c) { weight *= by[k * 2 + (c & 1)]; });
            if (border) each([&](float& weight, int k, int c) { weight = within(k, c) ? weight : 0.f; });
            const float(&w)[2][4] = scores[0];
            const unsigned a0 = pack(w[0][0], w[0][1]), a1 = pack(w[0][2], w[0][3]), a2 = pack(w[1][0], w[1][1]), a3 = pack(w[1][2], w[1][3]);
            const ValueScales scales = scales_of(of_values);
#pragma unroll
            for (int p = 0; p < PAIRS; p++) {
                const vec2 word = load_words(at + QUANT_BYTES + lane * 8 + p * 256), even = values_of(word.x, scales), odd = values_of(word.y, scales);
                mma(sums[p * 2], a0, a1, a2, a3, even.x, even.y);
                mma(sums[p * 2 + 1], a0, a1, a2, a3, odd.x, odd.y);
            }
            __syncwarp();
            fetch(i + STAGES, stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        copy_wait<0>();
        __syncthreads();  // the sums take the place of the ring
#pragma unroll
        for (int h = 0; h < 2; h++) {  // totals of the four lanes that share a row
            float& total = softmax.total[h];
            add_over_lanes(total);
            float* s = shared + (part * PACKED + tile_of_warp * 16 + g + h * 8) * PITCH;
            if (t == 0) *(float4*)(s + HEAD_DIM) = make_float4(softmax.top[h], total, 0.f, 0.f);
#pragma unroll
            for (int d = 0; d < PAIRS * 2; d++) *(float2*)(s + t * 2 + d * 8) = make_float2(sums[d][h * 2], sums[d][h * 2 + 1]);
        }
        cluster_barrier();
        for (int e = threadIdx.x; e < OWN * HEAD_DIM / 4; e += WARPS * 32) {  // this block joins the parts of its own rows
            const int own = e / (HEAD_DIM / 4), d = e % (HEAD_DIM / 4) * 4, packed = split * OWN + own;
            const int row = (from + packed) / GROUP, head = (from + packed) % GROUP;
            if (row >= rows) continue;
            constexpr int PARTS = SPLITS * KEY_WARPS;
            const unsigned there = shared_address(shared + packed * PITCH);
            auto part_at = [&](int i) { return there + i % KEY_WARPS * PACKED * PITCH * 4; };
            float high = -INFINITY_F, all = 0.f;
            float2 stat[PARTS];
            float4 mixed = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                const float4 found = load_quad(of_rank(part_at(i) + HEAD_DIM * 4, i / KEY_WARPS));
                stat[i] = make_float2(found.x, found.y);
                high = fmaxf(high, found.x);
            }
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                const float weight = exp2_fast(stat[i].x - high);
                if (!(weight > 0.f) && stat[i].y == stat[i].y) continue;  // saw no key of this row
                const float4 s = load_quad(of_rank(part_at(i) + d * 4, i / KEY_WARPS));
                all += stat[i].y * weight;
                mixed.x += s.x * weight, mixed.y += s.y * weight, mixed.z += s.z * weight, mixed.w += s.w * weight;
            }
            const float rest = 1.f / all;
            const vec2 packed_out = {pack(mixed.x * rest, mixed.y * rest), pack(mixed.z * rest, mixed.w * rest)};
            *(vec2*)(out + (int64_t)(first + row) * width + (kv_head * GROUP + head) * HEAD_DIM + d) = packed_out;
        }
        cluster_barrier();  // nobody leaves, or goes on, while his parts are read
    }
    if (split == 0)
        for (int r = blockIdx.z; r < n; r += gridDim.z)
            if (row_slot[r] < 0)
                for (int i = threadIdx.x; i < columns; i += WARPS * 32) out[(int64_t)r * width + kv_head * columns + i] = from_float<act_t>(0.f);
}
