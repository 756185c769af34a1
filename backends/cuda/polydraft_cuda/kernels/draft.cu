// The round of a proposer: contracts pack_draft_rows, begin_draft, spread_logits, advance_draft, draft_ngram, align_drafts,
// splice_drafts.
#include "common.cuh"

extern "C" __global__ void pack_draft_rows(
    const int* row_slot, const int* positions, const int* phase,
    const int* prompt_len, const int* num_generated, const int* tokens, int max_len,
    int* draft_ids, int* draft_row_slot, int n
) {
    enter();
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= n) return;
    const int slot = row_slot[r];
    int id = NO_TOKEN, kept = PAD_SLOT;
    if (slot >= 0 && (phase[slot] == PHASE_PREFILL || phase[slot] == PHASE_DECODE)) {
        const int next = positions[r] + 1;
        if (next < prompt_len[slot] + num_generated[slot]) id = tokens[int64_t(slot) * max_len + next], kept = slot;
    }
    draft_ids[r] = id, draft_row_slot[r] = kept;
}

extern "C" __global__ void begin_draft(
    const int* slot_order, const int* seq_len, const int* phase,
    const int* kv_len, const int* prompt_len, const int* num_generated,
    const int* max_total, int* drafts, int places, int* draft_len, int* draft_slot, int* draft_position,
    int* draft_budget, int num_drafts, int n
) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int slot = slot_order[i];
    int drafting = PAD_SLOT, position = 0, budget = 0;
    if (slot >= 0 && seq_len[i] != 0) {
        for (int j = 0; j < places; j++) drafts[int64_t(slot) * places + j] = NO_TOKEN;
        draft_len[slot] = 0;
        const int room = min(num_drafts, max_total[slot] - prompt_len[slot] - num_generated[slot] - 1);
        if (phase[slot] == PHASE_DECODE && room > 0) drafting = slot, position = kv_len[slot] - 1, budget = room;
    }
    draft_slot[i] = drafting, draft_position[i] = position, draft_budget[i] = budget;
}

extern "C" __global__ void advance_draft(
    const int* chosen, const int* draft_budget, int* draft_slot, int* draft_position, int* drafts,
    int num_drafts, int* draft_len, int* next_ids, int pass_index, int n
) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int slot = draft_slot[i], token = chosen[i];
    int next = NO_TOKEN;
    if (slot >= 0) {
        if (token >= 0) drafts[int64_t(slot) * num_drafts + pass_index] = token, draft_len[slot] = pass_index + 1;
        if (token >= 0 && pass_index + 1 < draft_budget[i]) draft_position[i]++, next = token;
        else draft_slot[i] = PAD_SLOT;
    }
    next_ids[i] = next;
}

// A block a sequence: the longest run first; of its places, searched in parallel, the latest.
extern "C" __global__ void draft_ngram(
    const int* draft_slot, const int* draft_budget, const int* prompt_len,
    const int* num_generated, const int* tokens, int max_len, int* drafts, int num_drafts,
    int* draft_len, int max_ngram, int min_ngram
) {
    enter();
    __shared__ int latest;
    const int i = blockIdx.x, slot = draft_slot[i];
    if (slot < 0) return;
    const int known = prompt_len[slot] + num_generated[slot];
    const int* text = tokens + int64_t(slot) * max_len;
    int follows = 0;
    for (int size = max_ngram; size >= min_ngram && follows == 0; size--) {
        __syncthreads();
        if (threadIdx.x == 0) latest = -1;
        __syncthreads();
        for (int start = threadIdx.x; start < known - size; start += blockDim.x) {
            bool same = true;
            for (int k = 0; k < size && same; k++) same = text[start + k] == text[known - size + k];
            if (same) atomicMax(&latest, start);
        }
        __syncthreads();
        if (latest >= 0) follows = latest + size;
    }
    const int found = follows ? min(draft_budget[i], known - follows) : 0;
    for (int j = threadIdx.x; j < found; j += blockDim.x) drafts[int64_t(slot) * num_drafts + j] = text[follows + j];
    if (threadIdx.x == 0) draft_len[slot] = found;
}

// Logits over a reduced vocabulary at their places in the whole one, -inf elsewhere.
extern "C" __global__ void spread_logits(const float* x, int columns, const int* places, float* out, int vocab) {
    enter();
    const float* from = x + int64_t(blockIdx.x) * columns;
    float* to = out + int64_t(blockIdx.x) * vocab;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int v = (blockIdx.y * 4 + k) * blockDim.x + threadIdx.x;
        if (v >= vocab) return;
        const int place = places[v];
        to[v] = place >= 0 ? from[place] : -INFINITY_F;
    }
}

// Where the guess has foretold what became known since, what follows in it are the drafts.
extern "C" __global__ void align_drafts(
    const int* draft_slot, const int* draft_budget, const int* prompt_len,
    const int* num_generated, const int* tokens, int max_len, const int* guess, int width,
    const int* guess_start, const int* guess_len, int* drafts, int num_drafts, int* draft_len, int n
) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int slot = draft_slot[i];
    if (slot < 0) return;
    const int known = prompt_len[slot] + num_generated[slot], start = guess_start[i], length = guess_len[i], fresh = known - start;
    const int *text = tokens + int64_t(slot) * max_len, *said = guess + int64_t(i) * width;
    bool holds = fresh >= 0 && fresh <= length;
    for (int j = 0; holds && j < fresh; j++) holds = said[j] == text[start + j];
    const int found = holds ? min(draft_budget[i], length - fresh) : 0;
    for (int j = 0; j < found; j++) drafts[int64_t(slot) * num_drafts + j] = said[fresh + j];
    draft_len[slot] = found;
}

// Found drafts take the place of others where enough of the first ones are the same, and they say more than that.
extern "C" __global__ void splice_drafts(
    const int* slot_order, const int* draft_budget, const int* agree, const int* found, const int* found_len, int* drafts,
    int num_drafts, int* draft_len, int* kept_drafts, float* draft_logprobs, int n
) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int slot = slot_order[i];
    if (slot < 0 || draft_budget[i] <= 0) return;
    const int size = found_len[slot], old = draft_len[slot];
    const int* other = found + int64_t(slot) * num_drafts;
    int *own = drafts + int64_t(slot) * num_drafts, same = 0;
    while (same < old && same < size && own[same] == other[same]) same++;
    const bool taken = same >= agree[i] && same < size;
    for (int j = same; taken && j < num_drafts; j++) own[j] = j < size ? other[j] : NO_TOKEN;
    for (int j = same; taken && draft_logprobs && j < size; j++) draft_logprobs[int64_t(slot) * num_drafts + j] = 0;
    if (taken) draft_len[slot] = size;
    kept_drafts[slot] = taken ? same : old;
}
