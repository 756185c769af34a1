// From slot state to packed rows: contracts reserve_blocks, pack_rows, pack_logit_rows.
#include "common.cuh"

extern "C" __global__ void reserve_blocks(
    const int* slot_order, int* phase, const int* kv_len, const int* draft_len,
    const int* max_total, const int* block_table, int max_blocks, int block_size, int lookahead, int n
) {
    enter();
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, lane = threadIdx.x & 31;
    if (i >= n) return;
    const int slot = slot_order[i];
    if (slot < 0) return;
    const int now = phase[slot];
    if (now != PHASE_DECODE && now != PHASE_PAUSED) return;
    const int need = min(kv_len[slot] + 1 + draft_len[slot] + lookahead, max_total[slot]);
    const int blocks = (need + block_size - 1) / block_size;
    bool covered = true;
    for (int b = lane; b < blocks; b += 32) covered &= block_table[int64_t(slot) * max_blocks + b] >= 0;
    covered = __all_sync(FULL, covered);
    if (lane == 0) phase[slot] = covered ? PHASE_DECODE : PHASE_PAUSED;
}

struct Slots {  // by slot
    const int *phase, *kv_len, *prefill_len, *prompt_len, *num_generated;
};

// Rows of a sequence, at most what is planned.
__device__ __forceinline__ int row_count(const Slots& s, const int* draft_len, int slot, int planned) {
    if (slot < 0) return 0;
    const int phase = s.phase[slot];
    if (phase == PHASE_PREFILL) return max(min(planned, s.prefill_len[slot] - s.kv_len[slot]), 0);
    return phase == PHASE_DECODE ? min(planned, 1 + draft_len[slot]) : 0;
}

// Logit rows of a sequence that has `rows` rows: all of a window, the last of a prompt that becomes complete.
__device__ __forceinline__ int logit_count(const Slots& s, int slot, int rows) {
    if (slot < 0) return 0;
    const int phase = s.phase[slot];
    if (phase == PHASE_DECODE) return rows;
    if (phase != PHASE_PREFILL || rows <= 0) return 0;
    const int target = s.prefill_len[slot];
    return s.kv_len[slot] + rows == target && target == s.prompt_len[slot] + s.num_generated[slot];
}

// Exclusive sums of `count(i)` for i < size into `starts`, whose entry `size` gets the total. The whole block calls it.
template <typename Count> __device__ void scan(int size, int* starts, int* scratch, Count count) {
    int before = 0;
    for (int base = 0; base < size; base += blockDim.x) {
        const int i = base + threadIdx.x, x = i < size ? count(i) : 0;
        int total;
        const int sum = block_scan(x, scratch, total);
        if (i < size) starts[i] = before + sum - x;
        before += total;
    }
    if (threadIdx.x == 0) starts[size] = before;
    __syncthreads();
}

// The sequence that entry `place` belongs to: the last one that begins at or before it and is not empty.
__device__ __forceinline__ int owner(const int* starts, int size, int place) {
    int low = 0, high = size - 1;
    while (low < high) {
        const int middle = (low + high + 1) >> 1;
        if (starts[middle] <= place) low = middle; else high = middle - 1;
    }
    return low;
}

struct Rows { int *ids, *row_slot, *positions, *seq_start, *seq_len; };
struct LogitRows { int *row, *slot, *position, *start, *len; };

__device__ void write_rows(
    const Slots& s, const int* slot_order, const int* tokens, int max_len, const int* drafts, int num_drafts, const Rows& out,
    const int* starts, int size, int n
) {
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < size; i += blockDim.x) out.seq_start[i] = starts[i], out.seq_len[i] = starts[i + 1] - starts[i];
    for (int r = blockIdx.x * blockDim.x + threadIdx.x; r < n; r += gridDim.x * blockDim.x) {
        int id = NO_TOKEN, slot = PAD_SLOT, position = 0;
        if (r < starts[size]) {
            const int i = owner(starts, size, r), offset = r - starts[i];
            slot = slot_order[i];
            position = s.kv_len[slot] + offset;
            const int* text = tokens + int64_t(slot) * max_len;
            if (s.phase[slot] == PHASE_PREFILL) id = text[position];
            else if (offset == 0) id = text[s.prompt_len[slot] + s.num_generated[slot] - 1];
            else id = drafts[int64_t(slot) * num_drafts + offset - 1];
        }
        out.ids[r] = id, out.row_slot[r] = slot, out.positions[r] = position;
    }
}

__device__ void write_logit_rows(
    const Slots& s, const int* slot_order, const int* seq_start, const int* seq_len, const LogitRows& out, const int* starts,
    int size, int n
) {
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < size; i += blockDim.x) out.start[i] = starts[i], out.len[i] = starts[i + 1] - starts[i];
    for (int r = blockIdx.x * blockDim.x + threadIdx.x; r < n; r += gridDim.x * blockDim.x) {
        int row = NO_ROW, slot = PAD_SLOT, position = 0;
        if (r < starts[size]) {
            const int i = owner(starts, size, r), length = starts[i + 1] - starts[i];
            slot = slot_order[i];
            const int offset = seq_len[i] - length + r - starts[i];  // a prefill's single one is its last row
            row = seq_start[i] + offset;
            position = s.kv_len[slot] + offset + 1;
        }
        out.row[r] = row, out.slot[r] = slot, out.position[r] = position;
    }
}

// Every block repeats the scan over the sequences and writes its share of the rows.
extern "C" __global__ void pack_rows(
    const int* slot_order, const int* seq_rows, int size, Slots s, const int* tokens, int max_len, const int* drafts,
    int num_drafts, const int* draft_len, Rows out, int n
) {
    enter();
    extern __shared__ int starts[];
    __shared__ int scratch[33];
    scan(size, starts, scratch, [&](int i) { return row_count(s, draft_len, slot_order[i], seq_rows[i]); });
    write_rows(s, slot_order, tokens, max_len, drafts, num_drafts, out, starts, size, n);
}

extern "C" __global__ void pack_logit_rows(
    const int* slot_order, int size, Slots s, const int* seq_start, const int* seq_len, LogitRows out, int n
) {
    enter();
    extern __shared__ int starts[];
    __shared__ int scratch[33];
    scan(size, starts, scratch, [&](int i) { return logit_count(s, slot_order[i], seq_len[i]); });
    write_logit_rows(s, slot_order, seq_start, seq_len, out, starts, size, n);
}

// Composite pack_rows+pack_logit_rows; the logit rows over their whole capacity.
extern "C" __global__ void pack_both(
    const int* slot_order, const int* seq_rows, int size, Slots s, const int* tokens, int max_len, const int* drafts,
    int num_drafts, const int* draft_len, Rows out, LogitRows logits, int capacity, int n
) {
    enter();
    extern __shared__ int starts[];  // row starts, lengths, logit starts
    __shared__ int scratch[33];
    int *lengths = starts + size + 1, *logit_starts = lengths + size;
    scan(size, starts, scratch, [&](int i) { return lengths[i] = row_count(s, draft_len, slot_order[i], seq_rows[i]); });
    scan(size, logit_starts, scratch, [&](int i) { return logit_count(s, slot_order[i], lengths[i]); });
    write_rows(s, slot_order, tokens, max_len, drafts, num_drafts, out, starts, size, n);
    write_logit_rows(s, slot_order, starts, lengths, logits, logit_starts, size, capacity);
}

struct PromptRows { int *row, *slot, *position, *token; };

// Rows that predict a prompt token whose log probability is wanted; positions of a sequence's rows are consecutive.
extern "C" __global__ void pack_prompt_rows(
    const int* slot_order, int size, const int* seq_start, const int* seq_len, const int* positions, const int* prompt_len,
    const int* num_top, const int* tokens, int max_len, PromptRows out, int n
) {
    enter();
    extern __shared__ int starts[];
    __shared__ int scratch[33];
    scan(size, starts, scratch, [&](int i) {
        const int slot = slot_order[i];
        if (slot < 0 || num_top[slot] < 0 || seq_len[i] <= 0) return 0;
        return min(seq_len[i], max(prompt_len[slot] - 1 - positions[seq_start[i]], 0));
    });
    for (int r = blockIdx.x * blockDim.x + threadIdx.x; r < n; r += gridDim.x * blockDim.x) {
        int row = NO_ROW, slot = PAD_SLOT, position = 0, token = NO_TOKEN;
        if (r < starts[size]) {
            const int i = owner(starts, size, r);
            row = seq_start[i] + r - starts[i];
            slot = slot_order[i];
            position = positions[row] + 1;
            token = tokens[int64_t(slot) * max_len + position];
        }
        out.row[r] = row, out.slot[r] = slot, out.position[r] = position, out.token[r] = token;
    }
}
