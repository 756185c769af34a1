// attention_prefill.cu over a cache of quantised rows: tiles of 64 rows, HEADS query heads of one key head, keys in steps of 64.
//
// A step's numbers come through shared memory, fetched a step ahead, and are made pairs of the activation dtype once for all warps;
// exponents go to scores and weights as in attention_quant.cu.
//
// Defines: ACT (1, 2), KV (1: int8, 2: fp8), HEAD_DIM (a multiple of 32, up to 128), HEADS (1, 2), BLOCK_GROUPS (groups of 16 positions a block),
// WINDOW.
#include "attention.cuh"

constexpr int GROUPS = 4, WARPS = 4 * HEADS, THREADS = WARPS * 32, ROWS_BYTES = 16 * HEAD_DIM, QUANT_BYTES = ROWS_BYTES + 16;
constexpr int PAIRS_BYTES = 2 * GROUPS * GROUP_BYTES, RAW_BYTES = 2 * GROUPS * QUANT_BYTES;  // of a step: keys of its groups, then values

extern "C" __global__ void __launch_bounds__(THREADS)
attention_quant_prefill(const act_t* q, const kv_t* keys, const kv_t* values, const int4* tiles, const int* num_tiles, const int* row_slot,
                        const int* block_table, act_t* out, int n, int max_blocks, int num_heads, int num_kv_heads, float scale) {
    extern __shared__ float shared[];  // pairs of one step, numbers of two
    __shared__ float factors[2][GROUPS * 16];  // of the step's keys: what scores are multiplied by, what weights are
    char* pairs = (char*)shared;
    char* raw = pairs + PAIRS_BYTES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int head0 = blockIdx.x * HEADS, kv_head = head0 / (num_heads / num_kv_heads), width = num_heads * HEAD_DIM;
    begin_dependent();
    clear_padding<THREADS>(out, row_slot, n, width, head0);
    const int index = *num_tiles - 1 - (int)blockIdx.y;
    if (index < 0) return;
    const int4 tile = tiles[index];
    const int first = tile.x, rows = tile.y, position = tile.w, last = position + rows - 1;
    const int* table = block_table + (int64_t)tile.z * max_blocks;
    const float scale2 = scale * 1.4426950408889634f;
    const int head = head0 + warp / 4, row0 = (warp % 4) * 16 + g;

    auto fetch = [&](int stage, int group0) {
        constexpr int PIECES = QUANT_BYTES / 16;  // of one group's keys or values
        for (int i = threadIdx.x; i < 2 * GROUPS * PIECES; i += THREADS) {
            const int piece = i % PIECES, local = i / PIECES % GROUPS, which = i / (PIECES * GROUPS), group = group0 + local;
            if (group > last / 16) continue;
            const int64_t place = (((int64_t)table[group / BLOCK_GROUPS] * num_kv_heads + kv_head) * BLOCK_GROUPS + group % BLOCK_GROUPS) * QUANT_BYTES;
            copy_async(shared_address(raw) + stage * RAW_BYTES + i * 16, (which ? values : keys) + place + piece * 16, true);
        }
        copy_commit();
    };
    auto convert = [&](int stage) {
        constexpr int LANES = GROUP_BYTES / 16;  // eight numbers each, of one group's keys or values
        const char* numbers = raw + stage * RAW_BYTES;
        for (int i = threadIdx.x; i < 2 * GROUPS * LANES; i += THREADS) {
            const char* of_group = numbers + i / LANES * QUANT_BYTES;
            const vec2 word = *(const vec2*)(of_group + i % LANES * 8);
            vec2 a, b;
            if (i < GROUPS * LANES)
                a = pairs_of(word.x), b = pairs_of(word.y);
            else {
                const signed char* e = (const signed char*)of_group + ROWS_BYTES + (i & 3) * 2;
                const signed char own[4] = {e[0], e[1], e[8], e[9]};
                const ValueScales scales = scales_of(own);
                a = values_of(word.x, scales), b = values_of(word.y, scales);
            }
            *(vec4*)(pairs + i * 16) = vec4{a.x, a.y, b.x, b.y};
        }
        for (int i = threadIdx.x; i < 2 * GROUPS * 16; i += THREADS) {
            const int e = *(const signed char*)(numbers + i / 16 * QUANT_BYTES + ROWS_BYTES + i % 16);
            factors[i / (GROUPS * 16)][i % (GROUPS * 16)] = i < GROUPS * 16 ? scale2 * quantum_of(e) : factor_of(e);
        }
    };
    Queries queries;
    load_queries(queries, q, first, row0, rows, width, head, t);
    float sums[PAIRS * 2][4] = {};
    Softmax softmax = {{LOWEST, LOWEST}, {0.f, 0.f}};
    const int limit[2] = {row0 < rows ? position + row0 : -1, row0 + 8 < rows ? position + row0 + 8 : -1};
    const int steps = last / 64 + 1, begin = first_key(position) / 64;
    fetch(begin & 1, begin * GROUPS);
    for (int step = begin; step < steps; step++) {
        const int stage = step & 1, key0 = step * 64;
        if (step + 1 < steps) {
            fetch(stage ^ 1, (step + 1) * GROUPS);
            copy_wait<1>();
        } else
            copy_wait<0>();
        __syncthreads();
        convert(stage);
        __syncthreads();
        const unsigned k = shared_address(pairs) + lane * 16, v = k + GROUPS * GROUP_BYTES;
        float scores[GROUPS][2][4] = {};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) score_group(scores[group], queries, k + group * GROUP_BYTES);
        const bool border = key0 + 63 > position || rows < 64 || (WINDOW && key0 <= last - WINDOW);
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int key = group * 16 + i * 8 + t * 2;
                const float2 by = *(const float2*)(factors[0] + key);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float& score = scores[group][i][c];
                    score *= c & 1 ? by.y : by.x;
                    if (border && !attends(limit[c >> 1], key0 + key + (c & 1))) score = -INFINITY_F;
                }
            }
        soften(scores, 1.f, softmax, sums);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int key = group * 16 + i * 8 + t * 2;
                const float2 by = *(const float2*)(factors[1] + key);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float& weight = scores[group][i][c];
                    weight *= c & 1 ? by.y : by.x;
                    if (border && !attends(limit[c >> 1], key0 + key + (c & 1))) weight = 0.f;
                }
            }
            mix_group<false>(sums, scores[group], v + group * GROUP_BYTES);
        }
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float& total = softmax.total[h];
        add_over_lanes(total);
        const int row = row0 + h * 8;
        if (row >= rows) continue;
        const float rest = 1.f / total;
        act_t* o = out + (int64_t)(first + row) * width + head * HEAD_DIM + t * 2;
#pragma unroll
        for (int d = 0; d < PAIRS * 2; d++) *(unsigned*)(o + d * 8) = pack(sums[d][h * 2] * rest, sums[d][h * 2 + 1] * rest);
    }
}
