// The two products of experts for many rows (sm_90a), and of packed ones for any number: `linear_tile` with weights of whichever
// experts have rows. The copy engine brings tiles of weights by 64 inputs, and as many inputs of up to TOKENS entries, into shared memory,
// and warp groups multiply them, 64 rows of weights each.
//
// GATED: h[entry, I] = silu(gate) * up, half of a tile being rows of either in turn, 8 of each; else terms[place, H], a tile being rows of
// `down`. An entry is a place of `list`, the rows of x lie in the order of entries (see experts.cu). A tile of an expert with more rows
// than TOKENS is taken as often as it needs, by blocks that run side by side. An entry's sum is made by one block in the order of inputs.
//
// ALONE: there is one row and nothing to list, its choices are the entries, and `begins` has their experts. Of one that is none the copy
// engine brings zeros.
//
// Packed weights (NUMBER) come as pieces, a pair of chunks at a time, and are widened in registers while the products of the chunk before run;
// the scale of an output meets its sum, scales of groups meet the sums of these (grouped.cuh). So an entry's sum has the same bits whatever
// TOKENS, GROUPS and ALONE are.
//
// Defines: ACT (1, 2), TOKENS (8..256, a power of two), GROUPS (warp groups), STAGES (chunks of 64 inputs in flight, or pairs of them),
// GATED, ALONE, EARLY (lists, or choices, were made two launches back), NUMBER (0: weights in the activation type; as in packed.cuh), GROUP and
// BLOCK (as there), ZEROS (zero points), ROUNDED (x is numbers of which `row_scales` [groups, row_pitch] are the scales, in the order of
// entries). Sizes: inputs a multiple of 64, outputs of 8.
#include "tensor.cuh"
#define WIDTH TOKENS
#if NUMBER
#define REGISTERS
#include "packed.cuh"
constexpr int CHUNK = PIECE / 8, UNIT = 2;  // bytes that a row of weights has of a chunk, chunks of a stage
#else
constexpr int CHUNK = 128, UNIT = 1;
#endif
#include "wgmma.cuh"
#if NUMBER && GROUP
#include "grouped.cuh"
#endif
#include "boxes.cuh"

constexpr int ROWS = 64 * GROUPS, X_BYTES = TOKENS * 128, W_BYTES = UNIT * ROWS * CHUNK, STAGE = W_BYTES + UNIT * X_BYTES, MOST_EXPERTS = 512;
constexpr bool CROWDED = NUMBER && GROUP && TOKENS >= 64;  // sums and operands want more registers than there are a thread
constexpr int FETCHERS = CROWDED ? 128 : 32;  // a warp group where registers pass from it to the others
constexpr int CONSUMERS = GROUPS * 128, ACCUMULATORS = TOKENS / 2, STEP = GATED ? ROWS / 2 : ROWS;  // outputs of a tile
constexpr int RELEASED = NUMBER ? CONSUMERS / 32 : GROUPS;  // by whom a stage is given back
constexpr int AHEAD = TOKENS >= 64;  // a chunk is multiplied while the one before it ends
#if GATED
typedef act_t to_t;
#else
typedef float to_t;
#endif

// A box of a matrix of a stack, or of its pieces; and of gate and up in turn.
__device__ __forceinline__ void load_tile(unsigned target, const Map* map, int column, int tile, int expert, unsigned barrier) {
#if NUMBER
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3, %4, %5}], [%6];" ::"r"(target), "l"(map),
                 "r"(0), "r"(tile * (STEP / 8)), "r"(expert), "r"(column / 64), "r"(barrier)
                 : "memory");
#elif GATED
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4, %5}], [%6];" ::"r"(target), "l"(map),
                 "r"(column), "r"(0), "r"(tile * (STEP / 8)), "r"(expert), "r"(barrier)
                 : "memory");
#else
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target), "l"(map),
                 "r"(column), "r"(tile * STEP), "r"(expert), "r"(barrier)
                 : "memory");
#endif
}

struct Item { int expert, tile, begin, count; };  // entries [begin, begin + count)
// The output that a lane has sums of in half `half` of its warp's 16 rows of a tile.
__device__ __forceinline__ int output_of(int tile, int half) {
    const int local = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2;
    return GATED ? tile * STEP + local * 8 + g : tile * STEP + local * 16 + half * 8 + g;
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + FETCHERS, 1)
expert_tile(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, const int* begins, const int* list, to_t* out, const float* scales,
            const unsigned char* zeros, const float* row_scales, int row_pitch, int chosen, int experts, int outputs, int inputs) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
#if !ALONE
    __shared__ int first_item[MOST_EXPERTS + 1], begin_of[MOST_EXPERTS + 1], scratch[33];
#endif
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), RELEASED);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    if (GATED && !EARLY) wait_for_previous();  // that makes the lists; the launch behind this one comes only then, and need not wait for them

    // Items in the order of experts, tiles, entries: those of one tile follow one another, so that it is read from memory once.
    const int chunks = (inputs / 64 + UNIT - 1) / UNIT, tiles = (outputs + STEP - 1) / STEP;
#if ALONE
    __syncthreads();
    const int items = chosen * tiles;
    auto item_of = [&](int number, int) { return Item{__ldcg(begins + number / tiles), number % tiles, number / tiles, 1}; };
#else
    int items = 0;
    for (int from = 0; from < experts; from += CONSUMERS + FETCHERS) {
        const int e = from + threadIdx.x;
        const int begin = e < experts ? __ldcg(begins + e) : 0, count = e < experts ? __ldcg(begins + e + 1) - begin : 0;
        int total;
        const int own = (count + TOKENS - 1) / TOKENS * tiles, before = block_scan(own, scratch, total);
        if (e < experts) first_item[e] = items + before - own, begin_of[e] = begin;
        items += total;
    }
    if (threadIdx.x == 0) first_item[experts] = items, begin_of[experts] = __ldcg(begins + experts);
    __syncthreads();
    auto item_of = [&](int number, int expert) {  // `expert`: one at or before it
        while (number >= first_item[expert + 1]) expert++;
        const int begin = begin_of[expert], all = begin_of[expert + 1] - begin, passes = (all + TOKENS - 1) / TOKENS;
        const int place = number - first_item[expert], first = place % passes * TOKENS;
        return Item{expert, place / passes, begin + first, min(TOKENS, all - first)};
    };
#endif
    const int own_items = max((items - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x, 0), count = own_items * chunks;

    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        if (CROWDED) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        Item of_weights{}, of_rows{};
        auto weights = [&](int i, int s) {
            const unsigned f = shared_address(&full[s]);
            if (i % chunks == 0) of_weights = item_of(blockIdx.x + i / chunks * gridDim.x, of_weights.expert);
            barrier_expect(f, STAGE);
            load_tile(base + s * STAGE, &w_map, i % chunks * (64 * UNIT), of_weights.tile, of_weights.expert, f);
        };
        auto rows = [&](int i, int s) {
            if (i % chunks == 0) of_rows = item_of(blockIdx.x + i / chunks * gridDim.x, of_rows.expert);
            const int row = ALONE && GATED ? 0 : of_rows.begin;
            if (UNIT > 1) load_chunks(base + s * STAGE + W_BYTES, &x_map, row, i % chunks * UNIT, shared_address(&full[s]));
            else load_box(base + s * STAGE + W_BYTES, &x_map, i % chunks * 64, row, shared_address(&full[s]));
        };
        return fetch_stages<STAGES, 1>(threadIdx.x == CONSUMERS, count, empty, weights, rows);
    }
    if (CROWDED) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int lane = threadIdx.x & 31;
    auto release = [&](int s) {
        if (NUMBER) __syncwarp();  // of pieces each lane has read its own
        if ((threadIdx.x & (NUMBER ? 31 : 127)) == 0) barrier_arrive(shared_address(&empty[s]));
    };
#if NUMBER
    unsigned even[16], odd[16];
    auto widened = [&](unsigned (&a)[16], unsigned w, const unsigned (*middle)[2]) {
        widen(a, w + (threadIdx.x >> 5) * 2 * PIECE + lane * LANE, middle);
        operands_fence(a);
    };
    auto find_places = [&](int64_t (&first)[2], const Item& of) {  // of both outputs of a lane
#pragma unroll
        for (int half = 0; half < 2; half++)
            first[half] = first_place(max(of.expert, 0), min(output_of(of.tile, half), outputs - 1) + (GATED ? half * outputs : 0), (GATED ? 2 : 1) * outputs, inputs);
    };
    int64_t first[2];
#endif
#if NUMBER && GROUP
    static_assert(!ROUNDED || GROUP == 128, "a pair of chunks has one scale of a row of x");
    Places places;
    if (own_items) {
        find_places(first, item_of(blockIdx.x, 0));
        places.fetch(scales, zeros, first, 0, places_of(inputs));
    }
#endif
    wait_for_previous();
    Item item{};
    for (int own = 0, i = 0; own < own_items; own++) {
        item = item_of(blockIdx.x + own * gridDim.x, item.expert);
        float sums[ACCUMULATORS] = {};
#if NUMBER
        // What rows of x are multiplied with in group `group`, or in all: of the entries that a lane has sums of.
        auto row_scales_of = [&](float (&by)[TOKENS / 4], int group) {
#pragma unroll
            for (int k = 0; k < TOKENS / 4; k++)
                by[k] = ROUNDED ? row_scales[(int64_t)group * row_pitch + (ALONE && GATED ? 0 : item.begin + min((k >> 1) * 8 + (lane & 3) * 2 + (k & 1), item.count - 1))] : 1.f;
        };
        float by[TOKENS / 4];
#if GROUP
        for (const int from = i, end = i + chunks; i < end; i++) {
            const int s = i % STAGES;
            const Places now = places;
            if (i + 1 == end && own + 1 < own_items) find_places(first, item_of(blockIdx.x + (own + 1) * gridDim.x, item.expert));
            places.fetch(scales, zeros, first, i + 1 == end ? 0 : i + 1 - from, places_of(inputs));
            const unsigned w = base + s * STAGE, x = w + W_BYTES;
            auto operands = [&](int half, unsigned (&a)[16], const unsigned (&middle)[2][2]) {
                widened(a, w + half * ROWS * CHUNK, middle);
                return x + half * X_BYTES;
            };
            row_scales_of(by, i - from);
            barrier_wait(shared_address(&full[s]), i / STAGES & 1);
            multiply_groups(sums, even, odd, now, operands, [&](int, int j) { return by[(j >> 2) * 2 + (j & 1)]; }, [&](int half) {
                if (half) release(s);
            });
        }
#else
        float scale[2];
        unsigned middle[2][2] = {};
        find_places(first, item);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            scale[half] = scales[first[half]];
            if (NUMBER == INT4) middle[0][half] = middle[1][half] = WHOLE + (ZEROS ? zeros[first[half]] : 8) * 0x10001u;
        }
        for (const int from = i, end = i + chunks; i < end; i++) {
            const int s = i % STAGES;
            barrier_wait(shared_address(&full[s]), i / STAGES & 1);
            const unsigned w = base + s * STAGE, x = w + W_BYTES;
            widened(even, w, middle);
            multiply_widened(sums, even, x, 0, 4);
            products_wait<1>(sums);  // while the chunk before it ends
            if (i > from) release((i - 1) % STAGES);
            widened(odd, w + ROWS * CHUNK, middle);
            multiply_widened(sums, odd, x + X_BYTES, 0, 4);
            products_wait<1>(sums);
        }
        products_wait<0>(sums);
        release((i - 1) % STAGES);
        row_scales_of(by, 0);
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; j++) sums[j] *= scale[j >> 1 & 1] * by[(j >> 2) * 2 + (j & 1)];
#endif
#else
        for (const int from = i, end = i + chunks; i < end; i++) {
            const int s = i % STAGES;
            barrier_wait(shared_address(&full[s]), i / STAGES & 1);
            const unsigned w = base + s * STAGE + (threadIdx.x >> 7) * 8192, x = base + s * STAGE + W_BYTES;
            multiply_chunk<AHEAD>(sums, w, x);
            if (!AHEAD) release(s);
            else if (i > from) release((i - 1) % STAGES);
        }
        if (AHEAD) {
            products_wait<0>(sums);
            release((i - 1) % STAGES);
        }
#endif
#if GATED  // rows g and g + 8 of 16 are gate and up of one output
        const int row = output_of(item.tile, 0);
        if (row >= outputs) continue;
#pragma unroll
        for (int j = 0; j < ACCUMULATORS / 2; j++) {
            const int token = (j >> 1) * 8 + (lane & 3) * 2 + (j & 1), at = (j >> 1) * 4 + (j & 1);
            if (token < item.count) out[(int64_t)(item.begin + token) * outputs + row] = from_float<act_t>(sums[at] / (1.f + __expf(-sums[at])) * sums[at + 2]);
        }
#else
#pragma unroll
        for (int j = 0; j < ACCUMULATORS / 2; j++) {
            const int token = (j >> 1) * 8 + (lane & 3) * 2 + (j & 1), at = (j >> 1) * 4 + (j & 1);
            if (token >= item.count) continue;
            float* to = out + (int64_t)(ALONE ? item.begin : list[item.begin + token]) * outputs;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = output_of(item.tile, half);
                if (row < outputs) to[row] = sums[at + half * 2];
            }
        }
#endif
    }
}
