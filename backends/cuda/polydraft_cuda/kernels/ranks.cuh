// What ranks compare of what they came for, and how they add, whoever carries it between them.
//
// Defines: RANKS; ACT for sums, EACH_BYTES (16, 4, 2) for gathers.
#pragma once
#include "norms.cuh"

#ifndef RANKS
#define RANKS 1
#endif

enum { ALL_GATHER, ALL_REDUCE, ARGMAX_PAIR, BROADCAST };  // `KINDS` of core's exchange

// What a rank came for. Ranks compare it.
struct Note {
    int kind, launch, n;
    int64_t nbytes;
};

__device__ __forceinline__ uint32_t digest(const Note& note, int step) {
    const uint32_t what = uint32_t(note.kind) * 0x9e3779b1u ^ uint32_t(note.launch) * 0x85ebca6bu ^ uint32_t(note.n) * 0xc2b2ae35u;
    return what ^ uint32_t(note.nbytes) * 0x27d4eb2fu ^ uint32_t(step) * 0x165667b1u;
}

// Of the launch that is the `count`-th of this block or rank.
__device__ __forceinline__ uint64_t flag_for(const Note& note, int step, uint32_t count) { return uint64_t(count) << 32 | digest(note, step); }

template <typename T> __device__ __forceinline__ T tree(T (&terms)[RANKS]) {  // neighbours first, whoever came first
#pragma unroll
    for (int apart = 1; apart < RANKS; apart *= 2)
#pragma unroll
        for (int i = 0; i + apart < RANKS; i += 2 * apart) terms[i] += terms[i + apart];
    return terms[0];
}

#if defined(ACT)
// What ranks have brought, added in float32 and rounded once.
__device__ __forceinline__ Vector sum_of(const uint4 (&brought)[RANKS]) {
    Vector sum;
#pragma unroll
    for (int e = 0; e < LANES; ++e) {
        float terms[RANKS];
#pragma unroll
        for (int from = 0; from < RANKS; ++from) terms[from] = to_float(vector_of(brought[from]).e[e]);
        sum.e[e] = from_float<act_t>(tree(terms));
    }
    return sum;
}
#endif

#if defined(EACH_BYTES)  // that are gathered at once
#if EACH_BYTES == 16
typedef uint4 word_t;
#elif EACH_BYTES == 4
typedef uint32_t word_t;
#else
typedef uint16_t word_t;
#endif
#endif
