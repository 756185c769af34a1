// What a window is, and how it is verified: shared by verify.cu and commit.cu.
#pragma once
#include "common.cuh"

struct Window { const int *choices, *slot_order, *phase, *logit_start, *logit_len, *drafts; };

// Drafts accepted of sequence i, -1 without logit rows; `drafted`: how many were verified, -1 outside a decode round.
__device__ __forceinline__ int verify(const Window& w, int i, int num_drafts, int& drafted) {
    drafted = -1;
    const int slot = w.slot_order[i];
    if (slot < 0 || w.logit_len[i] == 0) return -1;
    int accepted = 0;
    if (w.phase[slot] == PHASE_DECODE) {
        drafted = w.logit_len[i] - 1;
        const int *choices = w.choices + w.logit_start[i], *drafts = w.drafts + int64_t(slot) * num_drafts;
        while (accepted < drafted && choices[accepted] == drafts[accepted]) accepted++;
    }
    return accepted;
}
