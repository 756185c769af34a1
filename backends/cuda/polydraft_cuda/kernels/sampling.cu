// Choosing tokens: contracts argmax, gumbel_noise, sample, gumbel_noise+sample, uniform_noise, filter_probs, draw_draft,
// verify_rejection. Defines: PAIRS (argmax_among), where ranks go on with keys.
#include "sampling.cuh"
#include "screen_state.cuh"

// Blocks share a row. The best key is gathered by an atomic maximum, whose order does not matter; the last block of a row takes
// it out, so that `best` and `tickets` are zero again for the next launch.
extern "C" __global__ void __launch_bounds__(256) argmax(
    const float* logits, const int* row_slot, int* tokens, int vocab, uint64_t* best, int* tickets
) {
    enter();
    __shared__ uint64_t scratch[33];
    const int r = blockIdx.x;
    if (row_slot[r] < 0) {
        if (blockIdx.y == 0 && threadIdx.x == 0) tokens[r] = NO_TOKEN;
        return;
    }
    const int share = ((vocab + gridDim.y - 1) / gridDim.y + 3) & ~3, first = blockIdx.y * share;
    const float* row = logits + int64_t(r) * vocab;
    uint64_t mine = 0;
    if (first < vocab)
        for_row(row + first, min(share, vocab - first), [&](float x, int v) {
            const uint64_t key = logit_key(x, first + v);
            mine = key > mine ? key : mine;
        });
    mine = block_max(mine, scratch);
    if (threadIdx.x != 0) return;
    atomicMax(best + r, mine);
    __threadfence();
    if (atomicAdd(tickets + r, 1) + 1 < int(gridDim.y)) return;
    tickets[r] = 0;
    tokens[r] = chosen(atomicExch(best + r, 0ull));
}

constexpr int KEPT_AT_ONCE = 33;  // a thread's: all, where 132 blocks have 8 warps
// Eight rows a block: the best of what `linear_tile` kept of each (value and id by warp and row), if it did.
extern "C" __global__ void __launch_bounds__(256) argmax_among(
    const float2* kept, const int* row_slot, choice_t* choices, const ScreenState* state, int warps, int pitch, int n
) {
    enter();
    if (state != nullptr && !state->whole) return;
    __shared__ uint64_t best[8][8];
    const int r = blockIdx.x * 8 + (threadIdx.x & 7), warp = threadIdx.x >> 5;
    uint64_t mine = 0;
    for (int first = threadIdx.x >> 3; r < n && first < warps; first += KEPT_AT_ONCE * 32) {
        float2 some[KEPT_AT_ONCE];
#pragma unroll
        for (int k = 0; k < KEPT_AT_ONCE; k++) some[k] = kept[(int64_t)min(first + k * 32, warps - 1) * pitch + r];  // the last ones again
#pragma unroll
        for (int k = 0; k < KEPT_AT_ONCE; k++) {
            const uint64_t key = logit_key(some[k].x, __float_as_int(some[k].y));
            mine = key > mine ? key : mine;
        }
    }
#pragma unroll
    for (int d = 8; d < 32; d <<= 1) {
        const uint64_t other = __shfl_xor_sync(FULL, mine, d);
        mine = other > mine ? other : mine;
    }
    best[warp][threadIdx.x & 7] = mine;  // four lanes write the same
    __syncthreads();
    if (threadIdx.x >= 8 || r >= n) return;
    for (int w = 1; w < 8; w++) mine = best[w][threadIdx.x] > mine ? best[w][threadIdx.x] : mine;
    choices[r] = choice_of(row_slot[r] >= 0, mine);
}

__device__ __forceinline__ Noise noise_of(const uint32_t* seed, int slot, int position, int draw) {
    return {seed[2 * slot], seed[2 * slot + 1], uint32_t(position), uint32_t(draw) << 20};
}

extern "C" __global__ void gumbel_noise(
    const int* row_slot, const int* positions, const uint32_t* seed,
    const float* temperature, float* noise, int vocab, int ahead, int draw
) {
    enter();
    const int r = blockIdx.x, slot = row_slot[r];
    float* row = noise + int64_t(r) * vocab;
    const bool real = slot >= 0 && temperature[slot] != 0.0f;
    const Noise source = real ? noise_of(seed, slot, positions[r] + ahead, draw) : Noise{};
#pragma unroll 1
    for (int pair = blockIdx.y * blockDim.x + threadIdx.x; 2 * pair < vocab; pair += gridDim.y * blockDim.x) {
        const uint2 words = threefry(source.k0, source.k1, source.position, source.base + pair);
        row[2 * pair] = real ? gumbel(words.x) : 0.0f;
        if (2 * pair + 1 < vocab) row[2 * pair + 1] = real ? gumbel(words.y) : 0.0f;
    }
}

extern "C" __global__ void uniform_noise(
    const int* row_slot, const int* positions, const uint32_t* seed, float* uniforms,
    int ahead, int draw, int n
) {
    enter();
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= n) return;
    const int slot = row_slot[r];
    float u = 0.0f;
    if (slot >= 0) {
        const Noise s = noise_of(seed, slot, positions[r] + ahead, draw);
        u = float(threefry(s.k0, s.k1, s.position, s.base).x >> 8) * 0x1p-24f;
    }
    uniforms[r] = u;
}

struct Sampling { const float *temperature, *top_p, *min_p; const int* top_k; };  // by slot

// Key of a token that the border keeps; 0 where min-p drops it.
__device__ __noinline__ uint64_t score(float x, int v, float gumbel, const Filters& f, float best) {
    if (f.min_p > 0.0f && !(share_of(x, f.temperature, best) >= f.min_p)) return 0;
    return ranked(x / f.temperature + gumbel, v);
}

// A block a row. `noise` null: made here from `seed` (composite gumbel_noise+sample).
extern "C" __global__ void __launch_bounds__(THREADS) sample(
    const float* logits, const float* noise, const int* row_slot,
    const int* positions, const uint32_t* seed, Sampling by_slot, int* tokens, int vocab, int ahead,
    int draw
) {
    enter();
    __shared__ FilterSpace space;
    const int r = blockIdx.x, slot = row_slot[r];
    const float* row = logits + int64_t(r) * vocab;
    const uint64_t top = slot < 0 ? 0 : best_of(row, vocab, space.scratch);
    const float temperature = slot < 0 ? 0.0f : by_slot.temperature[slot];
    if (chosen(top) == NO_TOKEN || temperature == 0.0f) {
        if (threadIdx.x == 0) tokens[r] = chosen(top);
        return;
    }
    const Filters filters = {temperature, by_slot.top_p[slot], by_slot.min_p[slot], by_slot.top_k[slot]};
    const float best = ranked_value(top) / temperature;
    const Border border = filter(space, row, vocab, filters, best);
    const Noise source = noise ? Noise{} : noise_of(seed, slot, positions[r] + ahead, draw);
    // Noise made here lies between -2.86 and 17.33: what is farther below the best than their distance cannot win.
    const uint32_t floor = noise ? border.key : max(border.key, floor_key(temperature, best, 20.2f));
    uint64_t winner = 0;
    for_row(row, vocab, [&](float x, int v) {
        const uint32_t key = order_key(x);
        if (key < floor || x == -INFINITY_F || !inside(border, key, v)) return;
        const uint64_t offer = score(x, v, noise ? noise[int64_t(r) * vocab + v] : noise_at(source, v), filters, best);
        winner = offer > winner ? offer : winner;
    });
    winner = block_max(winner, space.scratch);
    if (threadIdx.x == 0) tokens[r] = chosen(winner);
}

// A block a row, in place.
extern "C" __global__ void __launch_bounds__(THREADS) filter_probs(
    float* logits, const int* row_slot, Sampling by_slot, int vocab
) {
    enter();
    __shared__ FilterSpace space;
    const int r = blockIdx.x, slot = row_slot[r];
    if (slot < 0) return;
    float* row = logits + int64_t(r) * vocab;
    const uint64_t top = best_of(row, vocab, space.scratch);
    const float temperature = by_slot.temperature[slot];
    const int best_id = chosen(top);
    if (best_id == NO_TOKEN || temperature == 0.0f) {
#pragma unroll 1
        for (int v = threadIdx.x; v < vocab; v += THREADS) row[v] = v == best_id ? 1.0f : 0.0f;
        return;
    }
    const Filters filters = {temperature, by_slot.top_p[slot], by_slot.min_p[slot], by_slot.top_k[slot]};
    const float best = ranked_value(top) / temperature;
    const Border border = filter(space, row, vocab, filters, best);
    auto share = [&](float x, int v) {  // 0 for what the filters drop
        if (!inside(border, order_key(x), v)) return 0.0f;
        const float share = share_of(x, temperature, best);
        return filters.min_p > 0.0f && !(share >= filters.min_p) ? 0.0f : share;
    };
    uint64_t mine = 0;
#pragma unroll 1
    for (int v = threadIdx.x; v < vocab; v += THREADS) mine += uint64_t(share(row[v], v) * 0x1p40f + 0.5f);
    const float scale = float(0x1p40 / double(block_sum(mine, space.scratch)));
#pragma unroll 2
    for (int v = threadIdx.x; v < vocab; v += THREADS) row[v] = share(row[v], v) * scale;
}

// Gumbel-max over the positive of `weight(v)`; key 0 where there is none. The whole block calls it.
template <typename Weight> __device__ uint64_t drawn(Weight weight, const float* noise, int vocab, uint64_t* scratch) {
    uint64_t winner = 0;
#pragma unroll 1
    for (int v = threadIdx.x; v < vocab; v += blockDim.x) {
        const float w = weight(v);
        if (!(w > 0.0f)) continue;
        const uint64_t key = ranked(logf(w) + noise[v], v);
        winner = key > winner ? key : winner;
    }
    return block_max(winner, scratch);
}

extern "C" __global__ void __launch_bounds__(THREADS) draw_draft(
    const float* probs, const float* noise, const int* row_slot,
    const int* draft_len, int* tokens, float* draft_probs, int num_drafts, int vocab
) {
    enter();
    __shared__ uint64_t scratch[33];
    const int r = blockIdx.x, slot = row_slot[r];
    if (slot < 0) {
        if (threadIdx.x == 0) tokens[r] = NO_TOKEN;
        return;
    }
    const float* row = probs + int64_t(r) * vocab;
    float* filed = draft_probs + (int64_t(slot) * num_drafts + draft_len[slot]) * vocab;
#pragma unroll 4
    for (int v = threadIdx.x; v < vocab; v += THREADS) filed[v] = row[v];
    const uint64_t winner = drawn([&](int v) { return row[v]; }, noise + int64_t(r) * vocab, vocab, scratch);
    if (threadIdx.x == 0) tokens[r] = winner ? ranked_id(winner) : NO_TOKEN;
}

// A block a sequence: walk its window until a draft is rejected, then draw the token that ends it.
extern "C" __global__ void __launch_bounds__(THREADS) verify_rejection(
    const float* probs, const float* draft_probs, const float* uniforms,
    const float* noise, const int* slot_order, const int* phase,
    const int* logit_start, const int* logit_len, const int* drafts, int num_drafts,
    int* window, int* window_len, int* accepted_out, int* drafted_out, int vocab
) {
    enter();
    __shared__ uint64_t scratch[33];
    const int i = blockIdx.x, slot = slot_order[i], length = logit_len[i], width = num_drafts + 1;
    int* out = window + int64_t(i) * width;
    for (int j = threadIdx.x; j < width; j += THREADS) out[j] = NO_TOKEN;
    __syncthreads();
    if (slot < 0 || length == 0) {
        if (threadIdx.x == 0) window_len[i] = 0, accepted_out[i] = 0, drafted_out[i] = -1;
        return;
    }
    const int drafted = phase[slot] == PHASE_DECODE ? length - 1 : -1, first = logit_start[i];
    const int* mine = drafts + int64_t(slot) * num_drafts;
    const float* filed = draft_probs ? draft_probs + int64_t(slot) * num_drafts * vocab : nullptr;
    int accepted = 0;
    while (accepted < drafted) {  // every thread decides alike; products of two floats are exact in double
        const int row = first + accepted, draft = mine[accepted];
        const double q = filed ? double(filed[int64_t(accepted) * vocab + draft]) : 1.0;
        if (!(double(uniforms[row]) * q < double(probs[int64_t(row) * vocab + draft]))) break;
        accepted++;
    }
    const float* p = probs + int64_t(first + accepted) * vocab;
    const float* here = noise + int64_t(first + accepted) * vocab;
    uint64_t winner = 0;
    if (accepted < drafted) {
        const int draft = mine[accepted];
        const float* q = filed ? filed + int64_t(accepted) * vocab : nullptr;
        winner = drawn([&](int v) { return q ? p[v] - q[v] : (v == draft ? p[v] - 1.0f : p[v]); }, here, vocab, scratch);
    }
    if (winner == 0) winner = drawn([&](int v) { return p[v]; }, here, vocab, scratch);
    for (int j = threadIdx.x; j < accepted; j += THREADS) out[j] = mine[j];
    if (threadIdx.x == 0) {
        out[accepted] = winner ? ranked_id(winner) : NO_TOKEN;
        window_len[i] = accepted + 1, accepted_out[i] = accepted, drafted_out[i] = drafted;
    }
}
