// The two products of experts for 16-bit weights: each block takes tiles of whichever experts have rows. Every warp copies its own
// chunks of weights through a ring of its own in shared memory, whole lines of 128 bytes at a time: warps do not wait for each other,
// and what is in flight does not cost registers. Inputs are permuted within a chunk of 64, for weights and rows alike.
//
// GATED: h[entry, I] = silu(gate) * up, half of a tile being gate and half up rows; else terms[place, H], a tile being rows of
// `down`. An entry is a place of `list` (see experts.cu). A tile of an expert with more rows than TOKENS is taken as often as it
// needs. Sums of one entry are made by the same warps over the same inputs in every launch. Leaves (gridDim.y, else 1) as in experts.cu.
//
// Defines: ACT (1, 2), TOKENS (8, 16, 32), TILES (rows of a tile by 16), DEPTH, WARPS, MIN_BLOCKS, GATED. Sizes: inputs a multiple of 64, outputs of 8 * TILES.
#include "tensor.cuh"

constexpr int ROWS = 16 * TILES, PARTS = TOKENS / 8, THREADS = WARPS * 32, MOST_EXPERTS = 512;
constexpr int TURNS = WARPS * TOKENS * ROWS * 8 > 32768 ? 1 : 2;  // shares of sums that fit
constexpr int STEP = GATED ? ROWS / 2 : ROWS;  // outputs of a tile

constexpr int CHUNK = ROWS * 128;  // bytes: 64 inputs of each row of a tile

__device__ __forceinline__ void copy_stream(unsigned target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

struct Rows { vec4 part[PARTS][2]; };
struct Item { int expert, tile, begin, count; };  // entries [begin, begin + count)

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
expert_stream(const act_t* __restrict__ x, const act_t* __restrict__ w, const int* begins, const int* list, void* out, int chosen,
              int experts, int outputs, int inputs) {
    extern __shared__ vec4 ring[];  // [WARPS][DEPTH][ROWS][8], halves of odd rows swapped: no bank is asked twice
    __shared__ float shares[TURNS][WARPS][PARTS * ROWS * 8];
    __shared__ int first_item[MOST_EXPERTS + 1], scratch[33];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = inputs >> 6, mine = (chunks - warp + WARPS - 1) / WARPS, tiles = (outputs + STEP - 1) / STEP;
    const int leaf = blockIdx.y, leaves = gridDim.y;
    begin_dependent();

    // Items in the order of experts, tiles, entries: those of one tile follow one another, so that it is read from memory once.
    int done = 0;
    for (int base = 0; base < experts; base += THREADS) {
        const int e = base + threadIdx.x;
        const int count = e < experts ? begins[e + 1] - begins[e] : 0;
        int total;
        const int items = (count + TOKENS - 1) / TOKENS * tiles, before = block_scan(items, scratch, total);
        if (e < experts) first_item[e] = done + before - items;
        done += total;
    }
    if (threadIdx.x == 0) first_item[experts] = done;
    __syncthreads();
    const int items = done;

    auto item_of = [&](int number, int expert) {  // `expert`: one at or before it
        while (number >= first_item[expert + 1]) expert++;
        const int begin = begins[expert], all = begins[expert + 1] - begin, passes = (all + TOKENS - 1) / TOKENS;
        const int place = number - first_item[expert], first = place % passes * TOKENS;
        return Item{expert, place / passes, begin + first, min(TOKENS, all - first)};
    };
    const unsigned mine_at = shared_address(ring) + warp * DEPTH * CHUNK;
    auto piece = [&](int slot, int row, int number) { return mine_at + slot * CHUNK + row * 128 + (number ^ ((row & 1) << 2)) * 16; };
    auto fetch = [&](int slot, const Item& item, int chunk) {
        const act_t* base = w + ((int64_t)item.expert * leaves + leaf) * outputs * (GATED ? 2 : 1) * inputs + chunk * 64 + (lane & 7) * 8;
#pragma unroll
        for (int k = 0; k < ROWS / 4; k++) {
            const int r = k * 4 + (lane >> 3);
            const int row = GATED ? r / STEP * outputs + item.tile * STEP + r % STEP : min(item.tile * STEP + r, outputs - 1);
            copy_stream(piece(slot, r, lane & 7), base + (int64_t)row * inputs);
        }
    };
    int source[PARTS];  // rows of x of this thread's entries; negative: none
    auto look_up = [&](const Item& item) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int token = p * 8 + g;
            source[p] = token >= item.count ? -1 : GATED ? list[item.begin + token] / chosen : item.begin + token;
        }
    };
    auto rows = [&](Rows& to, int chunk) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            to.part[p][0] = to.part[p][1] = vec4{0, 0, 0, 0};
            if (source[p] >= 0) {
                const act_t* from = x + ((int64_t)source[p] * leaves + leaf) * inputs + chunk * 64 + t * 8;
                to.part[p][0] = load4(from), to.part[p][1] = load4(from + 32);
            }
        }
    };

    const int count = mine * ((items - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x);
    Rows now, next;
    int ahead = blockIdx.x, ahead_chunk = warp;  // what is fetched next
    Item coming{}, item{};
    if (ahead < items) coming = item_of(ahead, 0);
    auto fetch_next = [&](int slot) {
        fetch(slot, coming, ahead_chunk);
        ahead_chunk += WARPS;
        if (ahead_chunk >= chunks) {
            ahead_chunk = warp, ahead += gridDim.x;
            if (ahead < items) coming = item_of(ahead, coming.expert);
        }
    };
    for (int d = 0; d < DEPTH; d++) {
        if (d < count) fetch_next(d);
        copy_commit();
    }

    float sums[TILES][PARTS][4] = {};
    int number = blockIdx.x, chunk = warp, turn = 0;
    if (number < items) {
        item = item_of(number, 0);
        look_up(item);
        if (count) rows(next, chunk);
    }
    for (int i = 0, slot = 0; i < count || (mine == 0 && number < items);) {
        if (i < count) {
            now = next;
            if (chunk + WARPS < chunks) rows(next, chunk + WARPS);
            copy_wait<DEPTH - 1>();
            __syncwarp();
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    const vec4 a = load_shared(piece(slot, m * 16 + g, k * 4 + t)), b = load_shared(piece(slot, m * 16 + 8 + g, k * 4 + t));
#pragma unroll
                    for (int p = 0; p < PARTS; p++) {
                        const vec4 c = now.part[p][k];
                        mma(sums[m][p], a.x, b.x, a.y, b.y, c.x, c.y);
                        mma(sums[m][p], a.z, b.z, a.w, b.w, c.z, c.w);
                    }
                }
            __syncwarp();  // all have read
            if (i + DEPTH < count) fetch_next(slot);
            copy_commit();
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
            i++;
            chunk += WARPS;
        }
        if (chunk >= chunks && number < items) {  // this warp's share of the item is done (or it never had one)
            float* share = shares[turn % TURNS][warp];
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int p = 0; p < PARTS; p++)
#pragma unroll
                    for (int c = 0; c < 4; c++)  // [token][output]
                        share[(p * 8 + t * 2 + (c & 1)) * ROWS + m * 16 + (c >> 1) * 8 + g] = sums[m][p][c], sums[m][p][c] = 0.f;
            const Item ended = item;
            number += gridDim.x;
            chunk = warp;
            if (number < items) {
                item = item_of(number, item.expert);
                look_up(item);
                if (i < count) rows(next, chunk);
            }
            __syncthreads();
            for (int e = threadIdx.x; e < PARTS * 8 * STEP; e += THREADS) {
                const int token = e / STEP, column = e % STEP, o = ended.tile * STEP + column;
                if (token >= ended.count || o >= outputs) continue;
                float a = 0.f, b = 0.f;
#pragma unroll
                for (int k = 0; k < WARPS; k++) {
                    a += shares[turn % TURNS][k][token * ROWS + column];
                    if (GATED) b += shares[turn % TURNS][k][token * ROWS + STEP + column];
                }
                const int64_t entry = ended.begin + token;
                if (GATED) ((act_t*)out)[entry * outputs + o] = from_float<act_t>(a / (1.f + __expf(-a)) * b);
                else ((float*)out)[((int64_t)list[entry] * leaves + leaf) * outputs + o] = a;
            }
            if (TURNS == 1) __syncthreads();
            turn++;
        }
    }
}
