// Log probabilities: contracts keep_logits, forbid_filtered, top_logprobs, draft_logprobs,
// draft_top_logprobs, pack_logprobs.
#include "sampling.cuh"

extern "C" __global__ void keep_logits(
    const float* logits, const int* row_slot, const int* num_top, float* kept, int vocab
) {
    enter();
    const int r = blockIdx.x, slot = row_slot[r];
    const bool wanted = slot >= 0 && num_top[slot] >= 0;
    const int64_t first = int64_t(r) * vocab;
#pragma unroll 4
    for (int v = blockIdx.y * blockDim.x + threadIdx.x; v < vocab; v += gridDim.y * blockDim.x)
        kept[first + v] = wanted ? logits[first + v] : 0.0f;
}

extern "C" __global__ void forbid_filtered(
    float* logits, const float* probs, const int* row_slot, const int* num_top, const float* temperature,
    const int* top_k, const float* top_p, const float* min_p, int vocab
) {
    enter();
    const int r = blockIdx.x, slot = row_slot[r];
    if (slot < 0 || num_top[slot] < 0 || temperature[slot] == 0.0f) return;
    if (top_k[slot] <= 0 && top_p[slot] >= 1.0f && min_p[slot] <= 0.0f) return;
    const int64_t first = int64_t(r) * vocab;
    for (int v = blockIdx.y * blockDim.x + threadIdx.x; v < vocab; v += gridDim.y * blockDim.x)
        if (probs[first + v] == 0.0f) logits[first + v] = -INFINITY_F;
}

// log(sum(exp(x / temperature - best))) over a row, summed in double in a fixed order.
__device__ float log_total(const float* row, int vocab, float temperature, float best, double* scratch) {
    double mine = 0.0;
    for_row(row, vocab, [&](float x, int) { mine += double(expf(x / temperature - best)); });
    return float(log(block_sum(mine, scratch)));
}

__device__ __forceinline__ uint64_t highest(const float* row, int vocab, uint64_t* scratch) {  // -inf counts, lowest of all
    uint64_t best = 0;
    for_row(row, vocab, [&](float x, int v) {
        const uint64_t key = ranked(x, v);
        best = key > best ? key : best;
    });
    return block_max(best, scratch);
}

struct TopSpace {
    FilterSpace filter;
    uint64_t found[THREADS];
    int num_found;
};

// Columns 1 to `count` of the most likely tokens of a row, of which `best` is the largest over the temperature: the border is found
// as top-k finds it; then they are put in order. `fill(column, key)` writes one.
template <typename Fill>
__device__ __forceinline__ void most_likely(TopSpace& space, const float* row, int vocab, int count, float temperature, float best, Fill fill) {
    if (count > THREADS) {  // more than anybody reads: one by one
        uint64_t last = ~0ull;
        for (int k = 1; k <= count; k++) {
            uint64_t mine = 0;
            for_row(row, vocab, [&](float x, int v) {
                const uint64_t key = ranked(x, v);
                if (key < last && key > mine) mine = key;
            });
            last = block_max(mine, space.filter.scratch);
            if (threadIdx.x == 0) fill(k, last);
        }
    } else if (count > 0) {
        const Border border = filter(space.filter, row, vocab, {temperature, 1.0f, 0.0f, count}, best);
        if (threadIdx.x == 0) space.num_found = 0;
        __syncthreads();
        for_row(row, vocab, [&](float x, int v) {
            if (inside(border, order_key(x), v)) space.found[atomicAdd(&space.num_found, 1)] = ranked(x, v);
        });
        __syncthreads();
        if (threadIdx.x < count) {
            int before = 0;
            for (int k = 0; k < count; k++) before += space.found[k] > space.found[threadIdx.x];
            fill(1 + before, space.found[threadIdx.x]);
        }
    }
}

// A block a place of a window.
extern "C" __global__ void __launch_bounds__(THREADS) top_logprobs(
    const float* logits, const int* slot_order, const int* logit_start,
    const int* out_tokens, const int* num_top, const float* temperatures, int* ids,
    float* logprobs, int* ranks, int vocab, int columns
) {
    enter();
    __shared__ TopSpace space;
    __shared__ double sums[33];
    const int i = blockIdx.x, width = gridDim.y, place = i * width + blockIdx.y, slot = slot_order[i];
    int* id = ids + int64_t(place) * columns;
    float* logprob = logprobs + int64_t(place) * columns;
    const int wanted = slot < 0 ? -1 : num_top[slot], token = out_tokens[place], count = min(wanted, vocab);
    const bool real = wanted >= 0 && token != NO_TOKEN;
    for (int c = threadIdx.x + (real ? 1 + count : 0); c < columns; c += THREADS) id[c] = NO_TOKEN, logprob[c] = 0.0f;
    if (!real) {
        if (threadIdx.x == 0) ranks[place] = 0;
        return;
    }
    const float* row = logits + int64_t(logit_start[i] + int(blockIdx.y)) * vocab;
    const float asked = temperatures ? temperatures[slot] : 0.0f, temperature = asked == 0.0f ? 1.0f : asked;
    const uint64_t top = highest(row, vocab, space.filter.scratch), own = ranked(row[token], token);
    const float best = ranked_value(top) / temperature, total = log_total(row, vocab, temperature, best, sums);
    auto fill = [&](int column, uint64_t key) {
        id[column] = ranked_id(key);
        logprob[column] = row[ranked_id(key)] / temperature - best - total;
    };
    int above = 0;
    for_row(row, vocab, [&](float x, int v) { above += ranked(x, v) > own; });
    above = block_sum(above, space.filter.sums);
    if (threadIdx.x == 0) ranks[place] = above + 1, fill(0, own);
    most_likely(space, row, vocab, count, temperature, best, fill);
}

// A block a row.
extern "C" __global__ void __launch_bounds__(THREADS) draft_logprobs(
    const float* logits, const int* row_slot, const int* tokens,
    const int* draft_len, const int* num_top, float* filed, int num_drafts, int vocab, int are_probs
) {
    enter();
    __shared__ uint64_t scratch[33];
    __shared__ double sums[33];
    const int r = blockIdx.x, slot = row_slot[r], token = tokens[r];
    if (slot < 0 || num_top[slot] < 0 || token == NO_TOKEN) return;
    const float* row = logits + int64_t(r) * vocab;
    float value;
    if (are_probs) {
        value = logf(row[token]);
    } else {
        const float best = ranked_value(highest(row, vocab, scratch));
        value = row[token] - best - log_total(row, vocab, 1.0f, best, sums);
    }
    if (threadIdx.x == 0) filed[int64_t(slot) * num_drafts + draft_len[slot]] = value;
}

// A block a row. Probabilities are put in order as logits are.
extern "C" __global__ void __launch_bounds__(THREADS) draft_top_logprobs(
    const float* logits, const int* row_slot, const int* tokens, const int* draft_len, const int* num_top, int* draft_ids,
    float* draft_tops, int num_drafts, int vocab, int columns, int are_probs
) {
    enter();
    __shared__ TopSpace space;
    __shared__ double sums[33];
    const int r = blockIdx.x, slot = row_slot[r], token = tokens[r];
    if (slot < 0 || num_top[slot] < 0 || token == NO_TOKEN) return;
    const int count = min(num_top[slot], vocab);
    const int64_t place = (int64_t(slot) * num_drafts + draft_len[slot]) * columns;
    const float* row = logits + int64_t(r) * vocab;
    const float best = ranked_value(highest(row, vocab, space.filter.scratch));
    const float total = are_probs ? 0.0f : log_total(row, vocab, 1.0f, best, sums);
    auto fill = [&](int column, uint64_t key) {
        const float x = row[ranked_id(key)];
        draft_ids[place + column] = ranked_id(key);
        draft_tops[place + column] = are_probs ? logf(x) : x - best - total;
    };
    for (int c = 1 + count + threadIdx.x; c < columns; c += THREADS) draft_ids[place + c] = NO_TOKEN, draft_tops[place + c] = 0.0f;
    if (threadIdx.x == 0) fill(0, ranked(row[token], token));
    __syncthreads();  // of probabilities nothing has come between the two uses of the scratch space
    most_likely(space, row, vocab, count, 1.0f, best, fill);
}

// A block a sequence, which counts the entries before its own.
extern "C" __global__ void pack_logprobs(
    const int* slot_order, const int* num_top, const int* ids,
    const int* logprob_bits, const int* ranks, const int* extra,
    const int* drafts, const int* draft_logprob_bits, const int* draft_ids, const int* draft_top_bits,
    int num_drafts, int* record, int flag, int width, int capacity, int n
) {
    enter();
    constexpr int HEADER = 5, ENTRY = 2, ROW = 3, VERSION = 1;  // words; polydraft.contracts.layout
    __shared__ int scratch[33];
    __shared__ int most;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    int before = 0, entries = 0, columns = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int slot = slot_order[i], top = slot < 0 ? -1 : num_top[slot];
        if (top < 0) continue;
        entries++, before += i < int(blockIdx.x), columns = max(columns, top + 1);
    }
    atomicMax(&most, columns);
    before = block_sum(before, scratch);
    entries = block_sum(entries, scratch);
    columns = most;
    const int row_words = ROW + (draft_ids ? 4 : 2) * columns, words = ENTRY + width * row_words;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        record[0] = flag | columns << 8, record[1] = VERSION, record[2] = entries, record[3] = width;
        record[4] = HEADER + entries * words;
    }
    const int i = blockIdx.x;
    if (i >= n) return;
    const int slot = slot_order[i];
    if (slot < 0 || num_top[slot] < 0) return;
    int* entry = record + HEADER + int64_t(before) * words;
    if (threadIdx.x == 0) entry[0] = slot, entry[1] = extra[i];
    for (int w = threadIdx.x; w < words - ENTRY; w += blockDim.x) {
        const int j = w / row_words, c = w % row_words - ROW;
        const int64_t place = int64_t(i) * width + j;
        const bool verified = drafts && j < extra[i];
        int value;
        if (c == -3) value = ranks[place];
        else if (c == -2) value = verified ? drafts[int64_t(slot) * num_drafts + j] : NO_TOKEN;
        else if (c == -1) value = verified ? draft_logprob_bits[int64_t(slot) * num_drafts + j] : 0;
        else if (c < columns) value = ids[place * capacity + c];
        else if (c < 2 * columns) value = logprob_bits[place * capacity + c - columns];
        else if (!verified) value = c < 3 * columns ? NO_TOKEN : 0;
        else {
            const int64_t draft = (int64_t(slot) * num_drafts + j) * capacity;
            value = c < 3 * columns ? draft_ids[draft + c - 2 * columns] : draft_top_bits[draft + c - 3 * columns];
        }
        entry[ENTRY + w] = value;
    }
}
