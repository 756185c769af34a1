// The best output of each row of x among those that a warp has had sums of: tokens in the second place of a product, 16 outputs a warp.
//
// TOKENS is defined before this file is included. A warp keeps (value, id) of every token, dealt to its lanes; of equals the lowest id,
// and infinity for what is no number.
#pragma once
#include "common.cuh"

struct Best { float value; int id; };
constexpr int COLUMNS = TOKENS < 32 ? TOKENS / 4 : 8, HELD = TOKENS < 32 ? 1 : TOKENS / 32;  // tokens that lanes deal out, and keep
__device__ __forceinline__ Best better(Best a, Best b) { return b.value > a.value || b.value == a.value && b.id < a.id ? b : a; }
__device__ __forceinline__ Best of_lane(Best a, int d) { return {__shfl_xor_sync(FULL, a.value, d), __shfl_xor_sync(FULL, a.id, d)}; }

__device__ __forceinline__ void begin_best(Best (&held)[HELD]) {
#pragma unroll
    for (int k = 0; k < HELD; k++) held[k] = {-INFINITY_F, 0};
}

// `value(at)`: that of the lane's sum `at`, of output `first` or, where bit 1 of `at` is set, of `first` + 8; minus infinity for an
// output that there is not. The tokens that four lanes have sums of are dealt to the eight lanes that share them, while the outputs
// of these are compared.
template <class Value>
__device__ __forceinline__ void keep_best(Best (&held)[HELD], int first, const Value& value) {
    const int lane = threadIdx.x & 31;
    auto of = [&](int at) {
        const float x = value(at);
        return Best{x < INFINITY_F ? x : INFINITY_F, first + (at & 2) * 4};
    };
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        Best best[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int at = (k * 4 + c / 2) * 4 + c % 2;
            best[c] = better(of(at), of(at + 2));
        }
#pragma unroll
        for (int step = 0; step < 3; step++) {
            const int d = 16 >> step, half = COLUMNS >> (step + 1);
            if (half == 0) best[0] = better(best[0], of_lane(best[0], d));
#pragma unroll
            for (int i = 0; i < half; i++) {
                const bool upper = lane & d;
                best[i] = better(upper ? best[i + half] : best[i], of_lane(upper ? best[i] : best[i + half], d));
            }
        }
        held[k] = better(held[k], best[0]);
    }
}

// What the warp has kept, as [TOKENS] pairs (value, id).
__device__ __forceinline__ void store_best(const Best (&held)[HELD], float2* of_warp) {
    const int lane = threadIdx.x & 31, column = (lane >> 2) * COLUMNS / 8;
#pragma unroll
    for (int k = 0; k < HELD; k++) of_warp[(k * 4 + column / 2) * 8 + (lane & 3) * 2 + column % 2] = make_float2(held[k].value, __int_as_float(held[k].id));
}
