// Staged writes into the slot state: contracts update_slots, update_tokens, update_blocks, update_biases, update_bad_words.
#include "common.cuh"

constexpr int SLOT = 0, SEED_LOW = 9, SEED_HIGH = 10;  // columns of polydraft.contracts.layout.SlotUpdate
struct Columns {  // where each field lies in a row, and where it goes
    int* integers[11];
    int integer_columns[11];
    float* floats[6];
    int float_columns[6];
};

extern "C" __global__ void update_slots(
    const int* updates, int width, int first_stop, Columns fields, int* finish, int* draft_len, uint32_t* seed,
    int* stop_tokens, int num_stops, int* drafts, int num_drafts, int* block_table, int max_blocks
) {
    enter();
    const int* row = updates + int64_t(blockIdx.x) * width;
    const int slot = row[SLOT];
    if (slot < 0) return;
    if (threadIdx.x < 11) fields.integers[threadIdx.x][slot] = row[fields.integer_columns[threadIdx.x]];
    if (threadIdx.x < 6) fields.floats[threadIdx.x][slot] = __int_as_float(row[fields.float_columns[threadIdx.x]]);
    if (threadIdx.x < 2) seed[2 * slot + threadIdx.x] = uint32_t(row[threadIdx.x ? SEED_HIGH : SEED_LOW]);
    if (threadIdx.x == 0) finish[slot] = FINISH_NONE, draft_len[slot] = 0;
    for (int i = threadIdx.x; i < num_stops; i += blockDim.x) stop_tokens[int64_t(slot) * num_stops + i] = row[first_stop + i];
    for (int i = threadIdx.x; i < num_drafts; i += blockDim.x) drafts[int64_t(slot) * num_drafts + i] = NO_TOKEN;
    for (int i = threadIdx.x; i < max_blocks; i += blockDim.x) block_table[int64_t(slot) * max_blocks + i] = NO_BLOCK;
}

// Rows (slot, place, value): tokens, blocks and bad words alike.
extern "C" __global__ void update_places(const int* updates, int* target, int width, int n) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || updates[3 * i] < 0) return;
    target[int64_t(updates[3 * i]) * width + updates[3 * i + 1]] = updates[3 * i + 2];
}

extern "C" __global__ void update_biases(const int4* updates, int* bias_ids, float* biases, int width, int n) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || updates[i].x < 0) return;
    const int64_t place = int64_t(updates[i].x) * width + updates[i].y;
    bias_ids[place] = updates[i].z;
    biases[place] = __int_as_float(updates[i].w);
}
