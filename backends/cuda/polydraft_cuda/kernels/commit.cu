// From windows to committed text: contracts commit_window, verify_match+commit_window, snapshot_output.
#include "window.cuh"

struct Commit {
    const int *slot_order, *seq_len, *prompt_len, *prefill_len, *max_total, *stop_tokens;
    int *tokens, *num_generated, *kv_len, *phase, *finish, *out_tokens, *out_len, *out_accepted;
};

// Append up to `size` tokens to the slot's text until a stop token, the length limit or an error ends it.
__device__ __forceinline__ int append(
    const Commit& c, int slot, const int* window, int size, int num_stops, int max_len, int* out
) {
    const int known = c.prompt_len[slot] + c.num_generated[slot], limit = c.max_total[slot];
    const int* stops = c.stop_tokens + int64_t(slot) * num_stops;
    int emitted = 0, reason = FINISH_NONE;
    while (emitted < size && reason == FINISH_NONE) {
        const int token = window[emitted];
        if (token == NO_TOKEN) {
            reason = FINISH_ERROR;
            break;
        }
        c.tokens[int64_t(slot) * max_len + known + emitted] = token;
        out[emitted++] = token;
        for (int s = 0; s < num_stops; s++)
            if (stops[s] == token) reason = FINISH_STOP;
        if (reason == FINISH_NONE && known + emitted >= limit) reason = FINISH_LENGTH;
    }
    c.num_generated[slot] += emitted;
    if (reason != FINISH_NONE) c.finish[slot] = reason, c.phase[slot] = PHASE_FINISHED;
    return emitted;
}

__device__ __forceinline__ void commit(
    const Commit& c, int i, const int* window, int size, int accepted, int num_stops, int max_len, int width
) {
    int* out = c.out_tokens + int64_t(i) * width;
    for (int j = 0; j < width; j++) out[j] = NO_TOKEN;
    int emitted = 0, kept = 0;
    const int slot = c.slot_order[i];
    if (slot >= 0 && c.seq_len[i] > 0) {
        const int phase = c.phase[slot];
        if (phase == PHASE_PREFILL) {
            const int rows = c.kv_len[slot] + c.seq_len[i];
            c.kv_len[slot] = rows;
            if (rows == c.prefill_len[slot]) {
                c.phase[slot] = PHASE_DECODE;
                emitted = append(c, slot, window, size, num_stops, max_len, out);
            }
        } else if (phase == PHASE_DECODE) {
            emitted = append(c, slot, window, size, num_stops, max_len, out);
            c.kv_len[slot] += emitted;
            kept = min(accepted, emitted);
        }
    }
    c.out_len[i] = emitted;
    c.out_accepted[i] = kept;
}

extern "C" __global__ void commit_window(
    Commit c, const int* window, const int* window_len, const int* accepted, int num_stops,
    int max_len, int width, int n
) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) commit(c, i, window + int64_t(i) * width, window_len[i], accepted[i], num_stops, max_len, width);
}

// Composite verify_match+commit_window: a window is a run of choices, so it is never stored.
extern "C" __global__ void verify_and_commit(Window w, Commit c, int* drafted_out, int num_stops, int max_len, int width, int n) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int drafted;
    const int accepted = verify(w, i, width - 1, drafted);
    const int* choices = w.choices + (accepted < 0 ? 0 : w.logit_start[i]);
    drafted_out[i] = drafted;
    commit(c, i, choices, accepted + 1, max(accepted, 0), num_stops, max_len, width);
}

struct Snapshot { const int *slot_order, *epoch, *out_len, *out_accepted, *drafted, *finish, *phase, *kv_len, *out_tokens; };

extern "C" __global__ void snapshot_output(Snapshot s, int* record, int window) {
    enter();
    const int i = blockIdx.x, slot = s.slot_order[i];
    int* row = record + int64_t(i) * (8 + window);
    const bool real = slot >= 0;
    if (threadIdx.x == 0) {
        row[0] = real ? slot : PAD_SLOT;
        row[1] = real ? s.epoch[slot] : 0;
        row[2] = real ? s.out_len[i] : 0;
        row[3] = real ? s.out_accepted[i] : 0;
        row[4] = real ? s.drafted[i] : -1;
        row[5] = real ? s.finish[slot] : 0;
        row[6] = real ? s.phase[slot] : 0;
        row[7] = real ? s.kv_len[slot] : 0;
    }
    for (int j = threadIdx.x; j < window; j += blockDim.x) row[8 + j] = real ? s.out_tokens[int64_t(i) * window + j] : NO_TOKEN;
}
