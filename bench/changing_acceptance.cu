// Contract force_choices, but for its chances: those of the slot.
#include "common.cuh"

extern "C" __global__ void force_choices(
    const int* slot_order, const int* logit_start, const int* logit_len,
    const int* drafts, int num_drafts, const float* uniforms, const float* chances,
    int* choices, int num_valid, int n
) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int slot = slot_order[i];
    if (slot < 0) return;
    for (int j = 0; j < logit_len[i] - 1; j++) {
        const int64_t place = int64_t(slot) * num_drafts + j;
        const int row = logit_start[i] + j, draft = drafts[place], choice = choices[row];
        if (choice == NO_TOKEN) continue;
        if (uniforms[row] < chances[place]) choices[row] = draft;
        else if (choice == draft) choices[row] = (draft + 1) % num_valid;
    }
}
