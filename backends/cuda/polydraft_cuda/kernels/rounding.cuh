// Rows of activations as products of packed weights take them (`rounded` of contracts/packing.py): numbers, and a scale of each row or of each GROUP
// inputs of it. Whoever holds a row in registers rounds it there.
//
// Defines: ACT; NUMBER (`packed.cuh`); GROUP (inputs of a scale: 128, or 0: all of them); EIGHT (numbers are bytes of E4M3, else of the activation type).
#pragma once
#include "packed.cuh"

constexpr float MOST = NUMBER == E4M3 ? 448.f : 127.f;
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }  // that of a NaN is the highest
__device__ __forceinline__ float scale_of(unsigned most) {
    return most >= 0x7f800000u ? not_a_number() : fmaxf(__uint_as_float(most) / MOST, 0x1p-100f);
}
__device__ __forceinline__ unsigned highest(unsigned most) {  // of a warp
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) most = max(most, __shfl_xor_sync(FULL, most, d));
    return most;
}

#if EIGHT
typedef unsigned char number_t;
// The bytes of the numbers of E4M3 nearest to two, ties to even, 448 at most.
__device__ __forceinline__ unsigned bytes_of(float lo, float hi) {
    uint16_t two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(hi), "f"(lo));
    return two;
}
__device__ __forceinline__ number_t number_nearest(float q) { return number_t(bytes_of(q, 0.f)); }
#else
typedef act_t number_t;
// The number that x over its scale is rounded to, ties to even.
__device__ __forceinline__ float nearest(float q) {
#if NUMBER == E4M3
    const float size = fminf(fabsf(q), MOST);
    const int exponent = max(int(__float_as_uint(size) >> 23) - 127, -6);  // 8 to 16 of the last place, fewer below the normal ones
    const float found = copysignf(rintf(size * __uint_as_float(unsigned(130 - exponent) << 23)) * __uint_as_float(unsigned(124 + exponent) << 23), q);
    return q == q ? found : q;
#else
    return rintf(q);
#endif
}
__device__ __forceinline__ number_t number_nearest(float q) { return from_float<act_t>(nearest(q)); }
#endif

#if ACT != 0 && (GROUP == 0 || GROUP == 128)
// Quotients by a scale of numbers that have 16 bits, rounded as IEEE 754 says: that by the reciprocal, corrected once (Markstein). What it is off by is
// exact, for small scales as well, which are lifted with the numbers.
struct Divisor {
    float lift, scale, reciprocal;
    __device__ __forceinline__ Divisor(float by) : lift(by < 0x1p-64f ? 0x1p32f : 1.f), scale(by * lift), reciprocal(1.f / scale) {}
    __device__ __forceinline__ float operator()(float x) const {
        const float lifted = x * lift, q = __fmul_rn(lifted, reciprocal);
        return __fmaf_rn(__fmaf_rn(-q, scale, lifted), reciprocal, q);
    }
};
__device__ __forceinline__ unsigned highest_of(const vec4& v) {  // of the magnitudes of eight, as bits of 16
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) most = max(most, max(words[i] & 0x7fff, words[i] >> 16 & 0x7fff));
    return most;
}
__device__ __forceinline__ void store_rounded(number_t* to, const vec4& v, const Divisor& by) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = by(i & 1 ? high(words[i / 2]) : low(words[i / 2]));
#if EIGHT
    *(vec2*)to = {bytes_of(q[0], q[1]) | bytes_of(q[2], q[3]) << 16, bytes_of(q[4], q[5]) | bytes_of(q[6], q[7]) << 16};
#else
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = nearest(q[i]);
    *(vec4*)to = {pack(q[0], q[1]), pack(q[2], q[3]), pack(q[4], q[5]), pack(q[6], q[7])};
#endif
}
// A row that `threads` threads hold, vector `h` of a thread being number `thread + h * threads` of its eights: numbers to `to`, scales to
// scales [groups, pitch] in the column `row`. `meet`: a barrier of these threads; `found`: 32 words of shared memory.
template <int HELD, class Meet>
__device__ __forceinline__ void round_held(const vec4 (&held)[HELD], int thread, int threads, const Meet& meet, unsigned* found, number_t* to, float* scales, int row,
                                           int inputs, int pitch) {
    const int lane = thread & 31, eights = inputs / 8;
    auto scale_found = [](unsigned bits) { return scale_of(magnitude(to_float(act_t{uint16_t(bits)}))); };
    auto most_of = [&](int h) { return thread + h * threads < eights ? highest_of(held[h]) : 0u; };
    if (GROUP) {  // 16 lanes have one
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const int at = thread + h * threads;
            unsigned most = most_of(h);
#pragma unroll
            for (int d = 8; d > 0; d >>= 1) most = max(most, __shfl_xor_sync(FULL, most, d));
            const float scale = scale_found(most);
            if (at >= eights) continue;
            if (at % 16 == 0) scales[(int64_t)(at / 16) * pitch + row] = scale;
            store_rounded(to + at * 8, held[h], Divisor(scale));
        }
        return;
    }
    unsigned all = 0;
#pragma unroll
    for (int h = 0; h < HELD; h++) all = max(all, most_of(h));
    all = highest(all);
    if (lane == 0) found[thread >> 5] = all;
    meet();
    const float scale = scale_found(highest(lane < threads >> 5 ? found[lane] : 0u));
    if (thread == 0) scales[row] = scale;
    const Divisor by(scale);
#pragma unroll
    for (int h = 0; h < HELD; h++)
        if (thread + h * threads < eights) store_rounded(to + (thread + h * threads) * 8, held[h], by);
}
#endif
