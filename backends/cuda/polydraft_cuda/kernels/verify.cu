// From choices to windows: contracts verify_match and force_choices.
#include "window.cuh"

extern "C" __global__ void verify_match(
    Window w, int num_drafts, int* window, int* window_len, int* accepted_out, int* drafted_out, int n
) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int drafted;
    const int accepted = verify(w, i, num_drafts, drafted), width = num_drafts + 1;
    for (int j = 0; j < width; j++)
        window[int64_t(i) * width + j] = j <= accepted ? w.choices[w.logit_start[i] + j] : NO_TOKEN;
    window_len[i] = accepted + 1;
    accepted_out[i] = max(accepted, 0);
    drafted_out[i] = drafted;
}

extern "C" __global__ void force_choices(
    const int* slot_order, const int* logit_start, const int* logit_len,
    const int* drafts, int num_drafts, const float* uniforms, const float* chances,
    int* choices, int num_valid, int n
) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int slot = slot_order[i];
    if (slot < 0) return;
    for (int j = 0; j < logit_len[i] - 1; j++) {
        const int row = logit_start[i] + j, draft = drafts[int64_t(slot) * num_drafts + j], choice = choices[row];
        if (choice == NO_TOKEN) continue;
        if (uniforms[row] < chances[j]) choices[row] = draft;
        else if (choice == draft) choices[row] = (draft + 1) % num_valid;
    }
}
