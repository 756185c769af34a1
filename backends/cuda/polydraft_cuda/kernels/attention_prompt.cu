// Attention of prefill tiles by warp-group products (sm_90a): 64 rows of one slot, HEADS query heads of one key head, keys and values in
// steps of 64.
//
// A warp group has the 64 rows of a head. Queries, keys and values lie in shared memory as operands, in 128-byte swizzled rows: keys row by
// row, 64 elements of a head side by side, and values element by element, the keys of a step side by side. Both are fetched a step ahead, in
// the pieces in which the cache has them. A piece of values has two pairs of neighbours eight keys apart, so that within each group of 16
// keys lie in the order of `slot_of`, in keys as well, and a lane's weights are what it has to bring as an operand of values.
// Tiles with the longest context start first. Those of up to `few` rows, as are windows of decoding slots in a mixed step, are left to
// attention_decode.cu.
//
// Defines: ACT (1, 2), HEAD_DIM (64, 128), HEADS (1, 2), BLOCK_GROUPS (groups of 16 positions a block), WINDOW.
#define WIDTH 64
#define REGISTERS
#include "attention.cuh"
#include "wgmma.cuh"
#include "boxes.cuh"

constexpr int GROUPS = 4, THREADS = 128 * HEADS, HALVES = HEAD_DIM / 64, ROWS_BYTES = 64 * HEAD_DIM * 2, STEP_BYTES = 2 * ROWS_BYTES;

// Where the operand of a head's rows, 64 elements side by side, has 16 bytes: elements 8 chunk .. 8 chunk + 7 of `row`.
__device__ __forceinline__ int piece_offset(int row, int chunk) { return chunk / 8 * 8192 + row * 128 + ((chunk % 8 ^ row % 8) << 4); }
// Where a key of a group lies within it, and which key lies there.
__device__ __forceinline__ int slot_of(int key) { return (key & 7) / 2 * 4 + key / 8 * 2 + key % 2; }
__device__ __forceinline__ int key_at(int slot) { return slot / 4 * 2 + slot / 2 % 2 * 8 + slot % 2; }
__device__ __forceinline__ void copy_async_half(unsigned target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(source) : "memory");
}
__device__ __forceinline__ void written_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_prompt(const act_t* __restrict__ q, const act_t* keys, const act_t* values, const int4* __restrict__ tiles, const int* __restrict__ num_tiles,
                 const int* __restrict__ row_slot, const int* __restrict__ block_table, act_t* __restrict__ out, int n, int max_blocks,
                 int num_heads, int num_kv_heads, float scale, int few) {
    extern __shared__ unsigned char raw[];  // queries of each head, then two steps of keys and values
    const unsigned base = (shared_address(raw) + 1023) & ~1023u, ring = base + HEADS * ROWS_BYTES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int head0 = blockIdx.x * HEADS, kv_head = head0 / (num_heads / num_kv_heads), width = num_heads * HEAD_DIM;
    begin_dependent();
    clear_padding<THREADS>(out, row_slot, n, width, head0);
    const int index = *num_tiles - 1 - (int)blockIdx.y;
    if (index < 0) return;
    const int4 tile = tiles[index];
    if (tile.y <= few) return;
    const int first = tile.x, rows = tile.y, position = tile.w, last = position + rows - 1;
    const int* table = block_table + (int64_t)tile.z * max_blocks;
    const float scale2 = scale * 1.4426950408889634f;
    const int row0 = (warp % 4) * 16 + g;

    auto fetch = [&](int stage, int group0) {
        const unsigned k = ring + stage * STEP_BYTES, v = k + ROWS_BYTES;
#pragma unroll
        for (int local = 0; local < GROUPS; local++) {
            const int group = group0 + local;
            if (group > last / 16) continue;
            const int64_t place = (((int64_t)table[group / BLOCK_GROUPS] * num_kv_heads + kv_head) * BLOCK_GROUPS + group % BLOCK_GROUPS) * 16 * HEAD_DIM;
#pragma unroll
            for (int i = threadIdx.x; i < 2 * HEAD_DIM; i += THREADS) {  // 8 elements of a key
                const int key = i / HEAD_DIM * 8 + i / 4 % 8, chunk = i / 32 % (HEAD_DIM / 32) * 4 + i % 4;
                copy_async(k + local * 2048 + piece_offset(slot_of(key), chunk), keys + place + i * 8, true);
            }
#pragma unroll
            for (int i = threadIdx.x; i < 4 * HEAD_DIM; i += THREADS) {  // 4 keys of an element
                const int element = (i / 64 * 2 + i % 2) * 8 + i / 8 % 8, four = i / 2 % 4;
                copy_async_half((v + element * 128 + ((four / 2 ^ element % 8) << 4) + four % 2 * 8) ^ local << 5, values + place + i * 4);
            }
        }
        copy_commit();
    };
    const int steps = last / 64 + 1, begin = first_key(position) / 64;
    for (int i = threadIdx.x; i < HEADS * 64 * (HEAD_DIM / 8); i += THREADS) {
        const int chunk = i % (HEAD_DIM / 8), row = i / (HEAD_DIM / 8) % 64, of = i / (HEAD_DIM / 8 * 64);
        copy_async(base + of * ROWS_BYTES + piece_offset(row, chunk), q + (int64_t)(first + min(row, rows - 1)) * width + (head0 + of) * HEAD_DIM + chunk * 8, row < rows);
    }
    fetch(begin & 1, begin * GROUPS);
    float sums[PAIRS * 2][4] = {};
    Softmax softmax = {{LOWEST, LOWEST}, {0.f, 0.f}};
    const unsigned queries = base + warp / 4 * ROWS_BYTES;
#pragma unroll 1
    for (int step = begin; step < steps; step++) {
        const int stage = step & 1, key0 = step * 64;
        const unsigned k = ring + stage * STEP_BYTES, v = k + ROWS_BYTES;
        copy_wait<0>();
        written_for_products();
        __syncthreads();  // and nobody reads the other stage any more
        if (step + 1 < steps) fetch(stage ^ 1, (step + 1) * GROUPS);
        float scores[GROUPS][2][4] = {};
        float(&s)[32] = reinterpret_cast<float(&)[32]>(scores);
        accumulators_fence(s);
        products_begin();
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 16; j++) wgmma(s, descriptor(queries + j / 4 * 8192 + j % 4 * 32), descriptor(k + j / 4 * 8192 + j % 4 * 32));
        products_end<0>();
        accumulators_fence(s);
        if (key0 + 63 > position || rows < 64 || (WINDOW && key0 <= last - WINDOW)) {
            const int limit[2] = {row0 < rows ? position + row0 : -1, row0 + 8 < rows ? position + row0 + 8 : -1};
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        if (!attends(limit[c >> 1], key0 + group * 16 + key_at(i * 8 + t * 2 + (c & 1)))) scores[group][i][c] = -INFINITY_F;
        }
        soften(scores, scale2, softmax, sums);
        if (key0 + 63 > last) {  // what lies behind the last value may be anything, and a weight of zero times NaN is NaN
            for (int i = threadIdx.x; i < 64 * HEAD_DIM; i += THREADS) {
                const int key = i % 64, element = i / 64, at = key / 16 * 16 + slot_of(key % 16);
                if (key0 + key > last)
                    asm volatile("st.shared.u16 [%0], %1;" ::"r"(v + element * 128 + ((at / 8 ^ element % 8) << 4) + at % 8 * 2), "h"((unsigned short)0) : "memory");
            }
            written_for_products();
            __syncthreads();
        }
        unsigned weights[GROUPS][4];
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int i = 0; i < 4; i++) weights[group][i] = pack(scores[group][i / 2][i % 2 * 2], scores[group][i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int h = 0; h < HALVES; h++) accumulators_fence(reinterpret_cast<float(&)[32]>(sums[h * 8]));
        products_begin();
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int h = 0; h < HALVES; h++) wgmma(reinterpret_cast<float(&)[32]>(sums[h * 8]), weights[group], descriptor(v + h * 8192 + group * 32));
        products_end<0>();
#pragma unroll
        for (int h = 0; h < HALVES; h++) accumulators_fence(reinterpret_cast<float(&)[32]>(sums[h * 8]));
    }
    const Pages<true> pages = {keys, values, table, num_kv_heads, BLOCK_GROUPS * 16, HEAD_DIM};
    store_tile<THREADS>(sums, softmax, tile, q, out, width, head0, kv_head, pages, scale);
}
