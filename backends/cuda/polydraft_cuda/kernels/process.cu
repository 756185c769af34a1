// Processing of logits, in place: contracts process_logits, penalise_logits, bias_logits, forbid_tokens, mask_logits.
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
