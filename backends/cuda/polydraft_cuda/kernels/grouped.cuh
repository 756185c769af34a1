// Products of packed weights whose scales are of groups of inputs (sm_90a): the sum of a group meets its scales, and these are added in float32.
//
// Defines: those of packed.cuh with GROUP (32, 64, 128), ZEROS (zero points); of wgmma.cuh with REGISTERS, unless GROUP is 128 and they
// multiply bytes.
#pragma once
#include "packed.cuh"
#include "wgmma.cuh"

constexpr int PARTS = 128 / GROUP;  // groups of a pair of chunks
// Scales and zero points of both outputs of a lane, of a pair of chunks; they are fetched a pair ahead.
struct Places {
    float scale[PARTS][2];
    unsigned zero[PARTS][2];
    // `first`: of either output; of `groups` along the inputs the last ones stand for those beyond.
    __device__ __forceinline__ void fetch(const float* scales, const unsigned char* zeros, const int64_t (&first)[2], int pair, int groups) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const int64_t at = first[half] + min(pair * PARTS + p, groups - 1);
                scale[p][half] = scales[at], zero[p][half] = ZEROS ? zeros[at] : 8;
            }
    }
};

#ifdef REGISTERS
// sums += the products of a pair of chunks. `widened(half, a, middle)` makes the operands of one and says where its rows of x are,
// `row_scale(group, j)` is that of group `group` of the pair and of sum `j`; `release(half)` may give a chunk back.
template <class Widened, class RowScale, class Release>
__device__ __forceinline__ void multiply_groups(float (&sums)[WIDTH / 2], unsigned (&even)[16], unsigned (&odd)[16], const Places& now, const Widened& widened,
                                                const RowScale& row_scale, const Release& release) {
    float part[WIDTH / 2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        unsigned middle[2][2];
#pragma unroll
        for (int k = 0; k < 4; k++) middle[k >> 1][k & 1] = WHOLE + now.zero[(half * 64 + (k >> 1) * 32) / GROUP][k & 1] * 0x10001u;
        unsigned(&a)[16] = half ? odd : even;
        const unsigned x = widened(half, a, middle);
#pragma unroll
        for (int first = 0; first < 64; first += GROUP < 64 ? GROUP : 64) {
            constexpr int STEP = (GROUP < 64 ? GROUP : 64) / 16;
            const int input = half * 64 + first, last = input + STEP * 16;
            if (input % GROUP == 0)
#pragma unroll
                for (int j = 0; j < WIDTH / 2; j++) part[j] = 0.f;
            multiply_widened(part, a, x, first / 16, first / 16 + STEP);
            if (last % GROUP) continue;
            products_wait<0>(part);
#pragma unroll
            for (int j = 0; j < WIDTH / 2; j++) sums[j] += part[j] * (now.scale[input / GROUP][j >> 1 & 1] * row_scale(input / GROUP, j));
        }
        if (GROUP <= 64) release(half);
    }
    if (GROUP > 64) release(0), release(1);
}
#endif
