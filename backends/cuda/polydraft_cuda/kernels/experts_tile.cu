// The two products of experts for many rows (sm_90a): `linear_tile` with weights of whichever experts have rows. The copy engine
// brings tiles of 128 rows of weights by 64 inputs, and as many inputs of up to TOKENS entries, into shared memory, and two warp groups
// multiply them.
//
// GATED: h[entry, I] = silu(gate) * up, a tile being 64 rows of either in turn, 8 of each; else terms[place, H], a tile being rows of
// `down`. An entry is a place of `list`, the rows of x lie in the order of entries (see experts.cu). A tile of an expert with more rows
// than TOKENS is taken as often as it needs, by blocks that run side by side. An entry's sum is made by one block in the order of inputs.
//
// Defines: ACT (1, 2), TOKENS (8..256, a power of two), STAGES (chunks of 64 inputs in flight), GATED, EARLY (the lists were made two
// launches back). Sizes: inputs a multiple of 64, outputs of 64 with GATED, else of 8.
#include "tensor.cuh"
#define WIDTH TOKENS
#include "wgmma.cuh"
#include "boxes.cuh"

constexpr int GROUPS = 2, ROWS = 64 * GROUPS, W_BYTES = ROWS * 128, STAGE = W_BYTES + TOKENS * 128, MOST_EXPERTS = 512;
constexpr int CONSUMERS = GROUPS * 128, ACCUMULATORS = TOKENS / 2, STEP = GATED ? ROWS / 2 : ROWS;  // outputs of a tile
constexpr int AHEAD = TOKENS >= 64;  // a chunk is multiplied while the one before it ends
#if GATED
typedef act_t to_t;
#else
typedef float to_t;
#endif

// A box of a matrix of a stack; and of gate and up in turn.
__device__ __forceinline__ void load_tile(unsigned target, const Map* map, int column, int tile, int expert, unsigned barrier) {
#if GATED
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

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
expert_tile(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, const int* begins, const int* list, to_t* out, int experts,
            int outputs, int inputs) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    __shared__ int first_item[MOST_EXPERTS + 1], begin_of[MOST_EXPERTS + 1], scratch[33];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    if (GATED && !EARLY) wait_for_previous();  // that makes the lists; the launch behind this one comes only then, and need not wait for them

    // Items in the order of experts, tiles, entries: those of one tile follow one another, so that it is read from memory once.
    const int chunks = inputs / 64, tiles = (outputs + STEP - 1) / STEP;
    int items = 0;
    for (int from = 0; from < experts; from += CONSUMERS + 32) {
        const int e = from + threadIdx.x;
        const int begin = e < experts ? __ldcg(begins + e) : 0, count = e < experts ? __ldcg(begins + e + 1) - begin : 0;
        int total;
        const int own = (count + TOKENS - 1) / TOKENS * tiles, before = block_scan(own, scratch, total);
        if (e < experts) first_item[e] = items + before - own, begin_of[e] = begin;
        items += total;
    }
    if (threadIdx.x == 0) first_item[experts] = items, begin_of[experts] = __ldcg(begins + experts);
    __syncthreads();
    const int own_items = max((items - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x, 0), count = own_items * chunks;
    auto item_of = [&](int number, int expert) {  // `expert`: one at or before it
        while (number >= first_item[expert + 1]) expert++;
        const int begin = begin_of[expert], all = begin_of[expert + 1] - begin, passes = (all + TOKENS - 1) / TOKENS;
        const int place = number - first_item[expert], first = place % passes * TOKENS;
        return Item{expert, place / passes, begin + first, min(TOKENS, all - first)};
    };

    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        Item of_weights{}, of_rows{};
        auto weights = [&](int i, int s) {
            const unsigned f = shared_address(&full[s]);
            if (i % chunks == 0) of_weights = item_of(blockIdx.x + i / chunks * gridDim.x, of_weights.expert);
            barrier_expect(f, STAGE);
            load_tile(base + s * STAGE, &w_map, i % chunks * 64, of_weights.tile, of_weights.expert, f);
        };
        auto rows = [&](int i, int s) {
            if (i % chunks == 0) of_rows = item_of(blockIdx.x + i / chunks * gridDim.x, of_rows.expert);
            load_box(base + s * STAGE + W_BYTES, &x_map, i % chunks * 64, of_rows.begin, shared_address(&full[s]));
        };
        return fetch_stages<STAGES, 1>(threadIdx.x == CONSUMERS, count, empty, weights, rows);
    }
    wait_for_previous();
    const int group = threadIdx.x >> 7, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    auto release = [&](int s) {
        if ((threadIdx.x & 127) == 0) barrier_arrive(shared_address(&empty[s]));
    };
    Item item{};
    for (int own = 0, i = 0; own < own_items; own++) {
        item = item_of(blockIdx.x + own * gridDim.x, item.expert);
        float sums[ACCUMULATORS] = {};
        for (const int from = i, end = i + chunks; i < end; i++) {
            const int s = i % STAGES;
            barrier_wait(shared_address(&full[s]), i / STAGES & 1);
            const unsigned w = base + s * STAGE + group * 8192, x = base + s * STAGE + W_BYTES;
            accumulators_fence(sums);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < 4; k++) wgmma(sums, descriptor(w + k * 32), descriptor(x + k * 32));
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned %0;" ::"n"(AHEAD) : "memory");
            accumulators_fence(sums);
            if (!AHEAD) release(s);
            else if (i > from) release((i - 1) % STAGES);
        }
        if (AHEAD) {
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            accumulators_fence(sums);
            release((i - 1) % STAGES);
        }
#if GATED  // rows g and g + 8 of 16 are gate and up of one output
        const int row = item.tile * STEP + group * 32 + warp * 8 + (lane >> 2);
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
            float* to = out + (int64_t)list[item.begin + token] * outputs;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = item.tile * STEP + group * 64 + warp * 16 + half * 8 + (lane >> 2);
                if (row < outputs) to[row] = sums[at + half * 2];
            }
        }
#endif
    }
}
