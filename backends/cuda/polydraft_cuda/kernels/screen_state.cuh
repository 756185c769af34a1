// Whether a head is looked at by its bytes or read whole, decided on the device: one record a weight, kept from choice to choice.
//
// A choice that finds too many outputs within the bound gives up and reads the head whole, and so do the next `skips` choices without
// a look. Only the last block of `screen_choose` writes the record, but for `given_up`.
#pragma once
#include "tensor.cuh"

struct alignas(16) ScreenState {
    int skips;     // choices that are not looked at any more from now on
    int wait;      // what `skips` was last, less what looks that succeeded since have taken off
    int given_up;  // this choice's look excludes too little
    int whole;     // this choice reads the head whole
};
constexpr int MOST_WAIT = 1020;
// A head gives nothing back once one look in three fails: a failed one costs about what two others save.
__device__ __forceinline__ int longer_wait(int wait) { return wait * 4 + 4 < MOST_WAIT ? wait * 4 + 4 : MOST_WAIT; }
__device__ __forceinline__ int shorter_wait(int wait) { return wait / 2; }

// In every kernel from `linear_screen` to `screen_choose`; before it waits, too, since `screen_turn` lets others come only once it has waited.
__device__ __forceinline__ bool is_skipped(const ScreenState* state) { return __ldcg(&state->skips) > 0; }
// Behind `screen_choose`, whether this choice reads the head whole; no state: always. Waits unless that has been known since before the
// look. (`skips` may change meanwhile: while it is above 0 the choice that is under way reads the head whole, in either case.)
__device__ __forceinline__ bool reads_whole(const ScreenState* state) {
    if (state == nullptr || is_skipped(state)) return true;
    wait_for_previous();
    return __ldcg(&state->whole) != 0;
}
