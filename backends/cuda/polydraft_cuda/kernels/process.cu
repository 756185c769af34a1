// Processing of logits, in place: contracts process_logits, penalise_logits, bias_logits, forbid_tokens, mask_logits,
// limit_thinking; and commit_thinking, which tells the latter where thinking has ended.
#include "common.cuh"

extern "C" __global__ void process_logits(float* logits, const int* row_slot, int num_valid, int vocab) {
    enter();
    if (row_slot[blockIdx.x] < 0) return;
    float* row = logits + int64_t(blockIdx.x) * vocab;
    for (int v = num_valid + threadIdx.x; v < vocab; v += blockDim.x) row[v] = -INFINITY_F;
}

struct Text {  // by slot; `ahead`: how far the chosen token lies after the row
    const int *tokens, *drafts, *prompt_len, *num_generated;
    int max_len, num_drafts, ahead;
};

// Token `i` of the text before the chosen one: the known tokens, then drafts.
__device__ __forceinline__ int token_at(const Text& t, int slot, int known, int i) {
    return i < known ? t.tokens[int64_t(slot) * t.max_len + i] : t.drafts[int64_t(slot) * t.num_drafts + i - known];
}

constexpr int SEEN = 1 << 30;  // in a count: the token occurs in the prompt

// Blocks take rows in turn. Each has counts [vocab] of its own, of which it clears, fills and empties what the text touches.
extern "C" __global__ void penalise_logits(
    float* logits, const int* row_slot, const int* positions, Text t,
    const float* repetition, const float* presence, const float* frequency, int* workspace,
    int vocab, int n
) {
    enter();
    int* counts = workspace + int64_t(blockIdx.x) * vocab;
    for (int r = blockIdx.x; r < n; r += gridDim.x) {
        const int slot = row_slot[r];
        if (slot < 0) continue;
        const float factor = repetition[slot], once = presence[slot], each = frequency[slot];
        if (factor == 1.0f && once == 0.0f && each == 0.0f) continue;
        const int prompt = t.prompt_len[slot], known = prompt + t.num_generated[slot], length = positions[r] + t.ahead;
        for (int i = threadIdx.x; i < length; i += blockDim.x) counts[token_at(t, slot, known, i)] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < length; i += blockDim.x) {
            int* count = counts + token_at(t, slot, known, i);
            if (i < prompt) atomicOr(count, SEEN); else atomicAdd(count, 1);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < length; i += blockDim.x) {
            const int v = token_at(t, slot, known, i), count = atomicExch(counts + v, 0);
            if (count == 0) continue;  // another place of the same token has done it
            const int generated = count & ~SEEN;
            float* logit = logits + int64_t(r) * vocab + v;
            const float x = *logit > 0.0f ? *logit / factor : *logit * factor;
            *logit = generated ? x - (once + float(generated) * each) : x;
        }
        __syncthreads();
    }
}

extern "C" __global__ void bias_logits(
    float* logits, const int* row_slot, const int* num_biases, const int* bias_ids,
    const float* biases, int width, int vocab
) {
    enter();
    const int slot = row_slot[blockIdx.x];
    if (slot < 0) return;
    for (int i = threadIdx.x; i < num_biases[slot]; i += blockDim.x)
        logits[int64_t(blockIdx.x) * vocab + bias_ids[int64_t(slot) * width + i]] += biases[int64_t(slot) * width + i];
}

extern "C" __global__ void forbid_tokens(
    float* logits, const int* row_slot, const int* positions, Text t, const int* min_tokens,
    const int* stop_tokens, int num_stops, const int* bad_words, int width,
    const int* bad_len, int vocab
) {
    enter();
    const int r = blockIdx.x, slot = row_slot[r];
    if (slot < 0) return;
    const int prompt = t.prompt_len[slot], known = prompt + t.num_generated[slot], length = positions[r] + t.ahead;
    float* row = logits + int64_t(r) * vocab;
    if (length - prompt < min_tokens[slot])
        for (int s = threadIdx.x; s < num_stops; s += blockDim.x) {
            const int token = stop_tokens[int64_t(slot) * num_stops + s];
            if (token != NO_TOKEN) row[token] = -INFINITY_F;
        }
    // A thread a word, which it finds by the mark behind it and reads backwards, beside the end of the text.
    const int* words = bad_words + int64_t(slot) * width;
    for (int end = 1 + threadIdx.x; end < bad_len[slot]; end += blockDim.x) {
        if (words[end] != NO_TOKEN) continue;
        bool fits = true;
        int i = length - 1;
        for (int w = end - 2; fits && w >= 0 && words[w] != NO_TOKEN; w--, i--) fits = i >= prompt && token_at(t, slot, known, i) == words[w];
        if (fits) row[words[end - 1]] = -INFINITY_F;
    }
}

// Blocks (sequence, place, part of the vocabulary); a warp reads one word of the mask for its 32 tokens.
extern "C" __global__ void mask_logits(
    const int* slot_order, const int* logit_start, const int* logit_len,
    const int* masked, const uint32_t* masks, int words, float* logits, int vocab
) {
    enter();
    const int i = blockIdx.x, j = blockIdx.y;
    if (slot_order[i] < 0 || j >= min(masked[i], logit_len[i])) return;
    const uint32_t* mask = masks + (int64_t(i) * gridDim.y + j) * words;
    float* row = logits + int64_t(logit_start[i] + j) * vocab;
    for (int v = blockIdx.z * blockDim.x + threadIdx.x; v < vocab; v += gridDim.z * blockDim.x)
        if (!(mask[v >> 5] >> (v & 31) & 1)) row[v] = -INFINITY_F;
}

struct Thinking {  // limits by slot; -1: none
    const int *limit, *reply_limit, *starts, *num_starts, *stop_tokens, *end, *forced;
    int width, num_stops, num_end, num_forced;
};

// Whether thinking ends behind the generated tokens before `place`, none of which has ended it.
__device__ __forceinline__ bool ends_at(const Text& t, int slot, int known, int place, int limit, const int* end, int num_end, int num_forced) {
    if (limit >= 0 && place > limit) return place == limit + num_forced;
    if (place < num_end) return false;
    const int first = t.prompt_len[slot] + place - num_end;
    for (int e = 0; e < num_end; e++)
        if (token_at(t, slot, known, first + e) != end[e]) return false;
    return true;
}

// Blocks (row, part of the vocabulary). Every thread works out where its row stands, from the few tokens that are not committed.
// The thread that owns the forced token reads and writes it alone.
extern "C" __global__ void limit_thinking(
    float* logits, const int* row_slot, const int* positions, Text t, const int* reply_from, Thinking k, int vocab
) {
    enter();
    const int r = blockIdx.x, slot = row_slot[r];
    if (slot < 0) return;
    const int limit = k.limit[slot], most = k.reply_limit[slot], starts = k.num_starts[slot];
    if (limit < 0 && most < 0 && starts == 0) return;
    const int generated = t.num_generated[slot], known = t.prompt_len[slot] + generated;
    const int place = positions[r] + t.ahead - t.prompt_len[slot];
    int reply = reply_from[slot];
    for (int p = generated + 1; reply < 0 && p <= place; p++)
        if (ends_at(t, slot, known, p, limit, k.end, k.num_end, k.num_forced)) reply = p;
    int forced = -1;
    if (reply < 0) {
        if (limit < 0 || place < limit) return;
        forced = k.forced[place - limit];
    } else if (most >= 0 && place >= reply + most) {
        forced = k.stop_tokens[int64_t(slot) * k.num_stops];
    } else if (place != reply || starts == 0) {
        return;
    }
    const int* allowed = k.starts + int64_t(slot) * k.width;
    float* row = logits + int64_t(r) * vocab;
    for (int v = blockIdx.y * blockDim.x + threadIdx.x; v < vocab; v += gridDim.y * blockDim.x) {
        if (v == forced) {
            if (row[v] == -INFINITY_F) row[v] = 0.0f;
            continue;
        }
        bool kept = false;
        if (forced < 0)
            for (int j = 0; j < starts && !kept; j++) kept = allowed[j] == v;
        if (!kept) row[v] = -INFINITY_F;
    }
}

// A thread a sequence. The step's own tokens are in the history already, as the last ones.
extern "C" __global__ void commit_thinking(
    const int* slot_order, const int* out_len, Text t, const int* think_limit, const int* end, int num_end,
    int num_forced, int* reply_from, int n
) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int slot = slot_order[i];
    if (slot < 0 || out_len[i] == 0 || reply_from[slot] >= 0) return;
    const int generated = t.num_generated[slot], known = t.prompt_len[slot] + generated, limit = think_limit[slot];
    for (int p = generated - out_len[i] + 1; p <= generated; p++)
        if (ends_at(t, slot, known, p, limit, end, num_end, num_forced)) {
            reply_from[slot] = p;
            return;
        }
}
