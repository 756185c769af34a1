// Attention of prefill tiles: 64 rows of one slot, HEADS query heads of one key head, keys and values in steps of 64.
//
// One warp owns 16 rows of a head; keys and values come through shared memory, fetched a step ahead. Tiles with the longest context
// start first. Windows of decoding slots in a mixed step are served here as well, as tiles with few rows.
//
// Defines: ACT (1, 2), HEAD_DIM (a multiple of 32, up to 128), HEADS (1, 2), BLOCK_GROUPS (groups of 16 positions a block), WINDOW.
#include "attention.cuh"

constexpr int GROUPS = 4, WARPS = 4 * HEADS, THREADS = WARPS * 32, STEP_BYTES = 2 * GROUPS * GROUP_BYTES;

extern "C" __global__ void __launch_bounds__(THREADS)
attention_prefill(const act_t* __restrict__ q, const act_t* keys, const act_t* values, const int4* __restrict__ tiles, const int* __restrict__ num_tiles,
                  const int* __restrict__ row_slot, const int* __restrict__ block_table, act_t* __restrict__ out, int n, int max_blocks,
                  int num_heads, int num_kv_heads, float scale) {
    extern __shared__ __align__(128) float shared[];  // two steps of keys, then values, by groups
    const unsigned base = shared_address(shared);
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
        constexpr int PIECES = GROUP_BYTES / 16;  // of one group's keys or values
        for (int i = threadIdx.x; i < 2 * GROUPS * PIECES; i += THREADS) {
            const int piece = i % PIECES, local = i / PIECES % GROUPS, which = i / (PIECES * GROUPS), group = group0 + local;
            if (group > last / 16) continue;
            const int64_t place = (((int64_t)table[group / BLOCK_GROUPS] * num_kv_heads + kv_head) * BLOCK_GROUPS + group % BLOCK_GROUPS) * 16 * HEAD_DIM;
            copy_async(base + stage * STEP_BYTES + i * 16, (which ? values : keys) + place + piece * 8, true);
        }
        copy_commit();
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
        const unsigned k = base + stage * STEP_BYTES + lane * 16, v = k + GROUPS * GROUP_BYTES;
        float scores[GROUPS][2][4] = {};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) score_group(scores[group], queries, k + group * GROUP_BYTES);
        if (key0 + 63 > position || rows < 64 || (WINDOW && key0 <= last - WINDOW)) {
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        if (!attends(limit[c >> 1], key0 + group * 16 + i * 8 + t * 2 + (c & 1))) scores[group][i][c] = -INFINITY_F;
        }
        soften(scores, scale2, softmax, sums);
        if (key0 + 63 > last) {
#pragma unroll
            for (int group = 0; group < GROUPS; group++) mix_group<true>(sums, scores[group], v + group * GROUP_BYTES, reach_of(key0 + group * 16, t, last));
        } else {
#pragma unroll
            for (int group = 0; group < GROUPS; group++) mix_group<false>(sums, scores[group], v + group * GROUP_BYTES);
        }
        __syncthreads();
    }
    const Pages<true> pages = {keys, values, table, num_kv_heads, BLOCK_GROUPS * 16, HEAD_DIM};
    store_tile<THREADS>(sums, softmax, tile, q, out, width, head0, kv_head, pages, scale);
}
