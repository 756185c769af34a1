// Log probabilities: contracts keep_logits, forbid_filtered, top_logprobs, draft_logprobs,
// draft_top_logprobs, pack_logprobs.
//
// Rows are surveyed first: each warp reads a part of one once, and notes its best logit, the sum of its exponentials, how many stand above
// the row's token, and the best of each lane. A block a row then joins its parts in their order. The most likely tokens are among the
// logits of those few lanes whose best is high enough; where logits tie so often that these are many, the row is read again.
#include "sampling.cuh"
#include "tensor.cuh"

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

// -- surveys ------------------------------------------------------------------------------------------
constexpr int LANE = 32, PART = 32 * LANE;  // logits of a lane, and of a warp
struct alignas(16) Part {
    float best;  // over the temperature
    int above;
    double total;  // of exp(x / temperature - best)
};
struct Survey {  // of one row: what its parts have, and the order_key of the best logit of each of their lanes, 0 beyond the vocabulary
    Part* parts;
    uint32_t* lanes;
    int count;
};
__device__ __forceinline__ Survey survey_of(void* surveys, int place, int vocab) {
    const int count = (vocab + PART - 1) / PART;
    char* mine = (char*)surveys + int64_t(place) * count * (sizeof(Part) + 32 * sizeof(uint32_t));
    return {(Part*)mine, (uint32_t*)(mine + count * sizeof(Part)), count};
}
__device__ __forceinline__ int logit_of(int part, int lane, int i) { return part * PART + (i >> 2) * 128 + lane * 4 + (i & 3); }

// A place of a window, or a draft: its row, the temperature of its slot, and how many of the most likely tokens are wanted, -1: nothing.
struct Place {
    const float* row;
    float temperature;
    int token, count;
};
struct Windows { const int *slot_order, *logit_start, *out_tokens, *num_top; const float* temperatures; };
__device__ __forceinline__ Place place_of(const float* logits, const Windows& by, int vocab) {
    const int i = blockIdx.x, j = blockIdx.y, slot = by.slot_order[i], first = by.logit_start[i];
    const int token = by.out_tokens[i * int(gridDim.y) + j];
    if (slot < 0 || token == NO_TOKEN) return {nullptr, 1.0f, token, -1};
    const float asked = by.temperatures ? by.temperatures[slot] : 0.0f;
    return {logits + int64_t(first + j) * vocab, asked == 0.0f ? 1.0f : asked, token, min(by.num_top[slot], vocab)};
}
struct Drafts { const int *row_slot, *tokens, *draft_len, *num_top; };
__device__ __forceinline__ Place place_of(const float* logits, const Drafts& by, int vocab) {
    const int r = blockIdx.x, slot = by.row_slot[r], token = by.tokens[r];
    if (slot < 0 || token == NO_TOKEN) return {nullptr, 1.0f, token, -1};
    return {logits + int64_t(r) * vocab, 1.0f, token, min(by.num_top[slot], vocab)};
}

// Blocks of warps share a row: a warp surveys the part that `blockIdx.z` and its place in the block say.
__device__ __forceinline__ void survey(const Survey& found, const Place& place, int vocab) {
    const int lane = threadIdx.x & 31, part = blockIdx.z * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const float *row = place.row, temperature = place.temperature;
    if (place.count < 0 || part >= found.count) return;
    const uint64_t own = ranked(row[place.token], place.token);
    float x[LANE];
    if ((uint64_t(row) & 15) == 0 && (part + 1) * PART <= vocab) {
#pragma unroll
        for (int i = 0; i < LANE; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(row + logit_of(part, lane, i));
            x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < LANE; i++) {
            const int v = logit_of(part, lane, i);
            x[i] = v < vocab ? row[v] : -INFINITY_F;
        }
    }
    float high = -INFINITY_F;
    int above = 0;
#pragma unroll
    for (int i = 0; i < LANE; i++) {
        high = fmaxf(high, x[i]);
        above += ranked(x[i], logit_of(part, lane, i)) > own;
    }
    found.lanes[part * 32 + lane] = logit_of(part, lane, 0) < vocab ? order_key(high) : 0;
    const float best = warp_max(high) / temperature;
    double total = 0.0;
    if (best > -INFINITY_F)
#pragma unroll
        for (int i = 0; i < LANE; i++) total += double(expf((temperature == 1.0f ? x[i] : x[i] / temperature) - best));
    total = warp_sum(total), above = warp_sum(above);
    if (lane == 0) found.parts[part] = {best, above, total};
}

extern "C" __global__ void __launch_bounds__(256) survey_windows(const float* logits, Windows by, void* surveys, int vocab) {
    enter();
    survey(survey_of(surveys, blockIdx.x * gridDim.y + blockIdx.y, vocab), place_of(logits, by, vocab), vocab);
}

extern "C" __global__ void __launch_bounds__(256) survey_drafts(const float* logits, Drafts by, void* surveys, int vocab) {
    enter();
    survey(survey_of(surveys, blockIdx.x, vocab), place_of(logits, by, vocab), vocab);
}

// -- what is reported ---------------------------------------------------------------------------------
struct TopSpace {
    FilterSpace filter;
    uint64_t found[THREADS];
    int lanes[THREADS];
    int num_found, num_lanes;
};
// Of all parts: the best over the temperature, log(sum(exp(x / temperature - best))), and how many stand above the row's token. Every warp
// joins them for itself, one after the other in each lane and then over lanes.
struct Joined { float best, total; int above; };
__device__ __forceinline__ Joined joined(const Survey& survey) {
    float best = -INFINITY_F;
    for (int i = threadIdx.x & 31; i < survey.count; i += 32) best = fmaxf(best, survey.parts[i].best);
    best = warp_max(best);
    double total = 0.0;
    int above = 0;
    for (int i = threadIdx.x & 31; i < survey.count; i += 32) {
        const Part part = survey.parts[i];
        above += part.above;
        if (part.total > 0.0) total += part.total * double(expf(part.best - best));
    }
    return {best, float(log(warp_sum(total))), warp_sum(above)};
}

// Puts what was found in order, as columns 1 to `count`.
template <typename Fill> __device__ __forceinline__ void in_order(const TopSpace& space, int num_found, int count, Fill fill) {
    if (threadIdx.x >= num_found) return;
    int before = 0;
    for (int k = 0; k < num_found; k++) before += space.found[k] > space.found[threadIdx.x];
    if (before < count) fill(1 + before, space.found[threadIdx.x]);
}

// Columns 1 to `count` of the most likely tokens of a row, by its survey. `fill(column, key)` writes one.
template <typename Fill>
__device__ __forceinline__ void most_likely(TopSpace& space, const Survey& survey, const float* row, int vocab, int count, Fill fill) {
    if (count <= 0) return;
    if (count <= THREADS) {
        // So many lanes' best are a bound from below. Where there are fewer lanes it is 0.
        const uint32_t bound = select<false>(space.filter, count, 1.0f, 0.0f, [&](auto use) {
            for (int i = threadIdx.x; i < survey.count * 32; i += THREADS)
                if (survey.lanes[i] != 0) use(survey.lanes[i], 0.0f);
        });
        if (threadIdx.x == 0) space.num_found = space.num_lanes = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < survey.count * 32; i += THREADS)
            if (survey.lanes[i] != 0 && survey.lanes[i] >= bound) {
                const int at = atomicAdd(&space.num_lanes, 1);
                if (at < THREADS) space.lanes[at] = i;
            }
        __syncthreads();
        const int num_lanes = space.num_lanes;
        for (int i = threadIdx.x >> 5; num_lanes <= THREADS && i < num_lanes; i += THREADS / 32) {
            const int v = logit_of(space.lanes[i] >> 5, space.lanes[i] & 31, threadIdx.x & 31);
            if (v >= vocab || order_key(row[v]) < bound) continue;
            const int at = atomicAdd(&space.num_found, 1);
            if (at < THREADS) space.found[at] = ranked(row[v], v);
        }
        __syncthreads();
        if (num_lanes <= THREADS && space.num_found <= THREADS) return in_order(space, space.num_found, count, fill);
        // So many are equal: the border is found as top-k finds it.
        const Border border = filter(space.filter, row, vocab, {1.0f, 1.0f, 0.0f, count}, 0.0f);
        if (threadIdx.x == 0) space.num_found = 0;
        __syncthreads();
        for_row(row, vocab, [&](float x, int v) {
            if (inside(border, order_key(x), v)) space.found[atomicAdd(&space.num_found, 1)] = ranked(x, v);
        });
        __syncthreads();
        return in_order(space, count, count, fill);
    }
    uint64_t last = ~0ull;  // more than anybody reads: one by one
    for (int k = 1; k <= count; k++) {
        uint64_t mine = 0;
        for_row(row, vocab, [&](float x, int v) {
            const uint64_t key = ranked(x, v);
            if (key < last && key > mine) mine = key;
        });
        last = block_max(mine, space.filter.scratch);
        if (threadIdx.x == 0) fill(k, last);
    }
}

// What a place of a window gets: ids and log probabilities of `columns` columns, and the rank of its token. The whole block calls it.
__device__ __forceinline__ void report(
    TopSpace& space, const Place& place, const Survey& survey, int vocab, int* id, float* logprob, int* rank, int columns
) {
    for (int c = threadIdx.x + 1 + place.count; c < columns; c += THREADS) id[c] = NO_TOKEN, logprob[c] = 0.0f;
    if (place.count < 0) {
        if (threadIdx.x == 0) *rank = 0;
        return;
    }
    if (place.count == 0 && threadIdx.x >= 32) return;
    const Joined row = joined(survey);
    auto fill = [&](int column, uint64_t key) {
        id[column] = ranked_id(key);
        logprob[column] = place.row[ranked_id(key)] / place.temperature - row.best - row.total;
    };
    if (threadIdx.x == 0) *rank = row.above + 1, fill(0, ranked(place.row[place.token], place.token));
    most_likely(space, survey, place.row, vocab, place.count, fill);
}

// A block a place of a window.
extern "C" __global__ void __launch_bounds__(THREADS) top_logprobs(
    const float* logits, Windows by, void* surveys, int* ids, float* logprobs, int* ranks, int vocab, int columns
) {
    enter();
    __shared__ TopSpace space;
    const int64_t at = blockIdx.x * gridDim.y + blockIdx.y;
    report(space, place_of(logits, by, vocab), survey_of(surveys, at, vocab), vocab, ids + at * columns, logprobs + at * columns, ranks + at, columns);
}

// A warp a row.
extern "C" __global__ void __launch_bounds__(32) draft_logprobs(
    const float* logits, Drafts by, void* surveys, float* filed, int num_drafts, int vocab, int are_probs
) {
    enter();
    const Place place = place_of(logits, by, vocab);
    if (place.count < 0) return;
    float value = place.row[place.token];
    if (are_probs) {
        value = logf(value);
    } else {
        const Joined row = joined(survey_of(surveys, blockIdx.x, vocab));
        value = value - row.best - row.total;
    }
    const int slot = by.row_slot[blockIdx.x];
    if (threadIdx.x == 0) filed[int64_t(slot) * num_drafts + by.draft_len[slot]] = value;
}

// A block a row. Probabilities are put in order as logits are.
extern "C" __global__ void __launch_bounds__(THREADS) draft_top_logprobs(
    const float* logits, Drafts by, void* surveys, int* draft_ids, float* draft_tops, int num_drafts, int vocab, int columns, int are_probs
) {
    enter();
    __shared__ TopSpace space;
    const Place place = place_of(logits, by, vocab);
    if (place.count < 0) return;
    const int slot = by.row_slot[blockIdx.x];
    const int64_t at = (int64_t(slot) * num_drafts + by.draft_len[slot]) * columns;
    const Survey survey = survey_of(surveys, blockIdx.x, vocab);
    const Joined row = joined(survey);
    auto fill = [&](int column, uint64_t key) {
        const float x = place.row[ranked_id(key)];
        draft_ids[at + column] = ranked_id(key);
        draft_tops[at + column] = are_probs ? logf(x) : x - row.best - row.total;
    };
    for (int c = 1 + place.count + threadIdx.x; c < columns; c += THREADS) draft_ids[at + c] = NO_TOKEN, draft_tops[at + c] = 0.0f;
    if (threadIdx.x == 0) fill(0, ranked(place.row[place.token], place.token));
    most_likely(space, survey, place.row, vocab, place.count, fill);
}

// -- records ------------------------------------------------------------------------------------------
constexpr int HEADER = 5, ENTRY = 2, ROW = 3, VERSION = 1;  // words; polydraft.contracts.layout
struct Packed {  // what a record has beside what is reported of tokens, and where it goes; `extra`: drafts that a window verified
    const int *extra, *drafts, *draft_bits, *draft_ids, *draft_top_bits;  // drafts may be left out, and their tops
    int* record;
    int num_drafts, flag, width, capacity;
};
struct Counted { int before, entries, columns; };  // entries before this block's, all of them, and the columns that they have
__device__ __forceinline__ Counted counted(const int* slot_order, const int* num_top, int n) {
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
    if (columns) atomicMax(&most, columns);
    before = block_sum(before, scratch);
    return {before, block_sum(entries, scratch), most};
}
__device__ __forceinline__ int row_words(const Packed& p, int columns) { return ROW + (p.draft_ids ? 4 : 2) * columns; }

// The words of this block's entry, behind a header that the first block writes; null where its sequence has none.
__device__ __forceinline__ int* entry_of(const Packed& p, const int* slot_order, const int* num_top, const Counted& all, int n) {
    const int words = ENTRY + p.width * row_words(p, all.columns), i = blockIdx.x;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        p.record[0] = p.flag | all.columns << 8, p.record[1] = VERSION, p.record[2] = all.entries, p.record[3] = p.width;
        p.record[4] = HEADER + all.entries * words;
    }
    const int slot = i < n ? slot_order[i] : -1;
    if (slot < 0 || num_top[slot] < 0) return nullptr;
    int* entry = p.record + HEADER + int64_t(all.before) * words;
    if (blockIdx.y == 0 && threadIdx.x == 0) entry[0] = slot, entry[1] = p.extra[i];
    return entry + ENTRY;
}
// Word `c` behind the columns of tokens, or -2 and -1 in front of them, of place `j` of the block's window: of its draft.
__device__ __forceinline__ int draft_word(const Packed& p, int slot, int j, int c, int columns) {
    const bool verified = p.drafts && j < p.extra[blockIdx.x];
    if (c == -2) return verified ? p.drafts[int64_t(slot) * p.num_drafts + j] : NO_TOKEN;
    if (c == -1) return verified ? p.draft_bits[int64_t(slot) * p.num_drafts + j] : 0;
    if (!verified) return c < 3 * columns ? NO_TOKEN : 0;
    const int64_t draft = (int64_t(slot) * p.num_drafts + j) * p.capacity;
    return c < 3 * columns ? p.draft_ids[draft + c - 2 * columns] : p.draft_top_bits[draft + c - 3 * columns];
}

// A block a sequence, which counts the entries before its own.
extern "C" __global__ void pack_logprobs(
    const int* slot_order, const int* num_top, const int* ids, const int* logprob_bits, const int* ranks, Packed p, int n
) {
    enter();
    const Counted all = counted(slot_order, num_top, n);
    const int columns = all.columns, each = row_words(p, columns);
    int* rows = entry_of(p, slot_order, num_top, all, n);
    if (rows == nullptr) return;
    const int slot = slot_order[blockIdx.x];
    for (int w = threadIdx.x; w < p.width * each; w += blockDim.x) {
        const int j = w / each, c = w % each - ROW;
        const int64_t place = int64_t(blockIdx.x) * p.width + j;
        if (c == -ROW) rows[w] = ranks[place];
        else if (c < 0 || c >= 2 * columns) rows[w] = draft_word(p, slot, j, c, columns);
        else rows[w] = c < columns ? ids[place * p.capacity + c] : logprob_bits[place * p.capacity + c - columns];
    }
}

// Both at once: a block a place of a window, which puts into the record what it finds. In a captured step, where whose rows are reported has
// been there since before the first launch.
extern "C" __global__ void __launch_bounds__(THREADS) report_logprobs(const float* logits, Windows by, void* surveys, Packed p, int vocab, int n) {
    launch_dependents();
    __shared__ TopSpace space;
    const Counted all = counted(by.slot_order, by.num_top, n);
    wait_for_previous();
    const int columns = all.columns, j = blockIdx.y;
    int* row = entry_of(p, by.slot_order, by.num_top, all, n);
    if (row == nullptr) return;
    row += j * row_words(p, columns);
    const int slot = by.slot_order[blockIdx.x];
    for (int c = threadIdx.x - 2; c < row_words(p, columns) - ROW; c += THREADS)
        if (c < 0 || c >= 2 * columns) row[ROW + c] = draft_word(p, slot, j, c, columns);
    const Survey survey = survey_of(surveys, blockIdx.x * gridDim.y + j, vocab);
    report(space, place_of(logits, by, vocab), survey, vocab, row + ROW, (float*)(row + ROW + columns), row, columns);
}
