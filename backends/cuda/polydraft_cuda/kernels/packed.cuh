// Weights of few bits (`contracts/packing.py`), laid out as the warps of a product read them, and widened in registers, exactly.
//
// A piece is what 8 outputs have of a chunk of 64 inputs: 32 lanes by 16 bytes, of int4 by 8. Pieces of one run of 8 outputs lie one
// behind the other. Lane (g, t) has output g; of each 16 inputs it has 2t, 2t + 1, 2t + 8 and 2t + 9, as operands of `mma` do. Of 8 bits
// these are bytes 0, 2, 1 and 3 of a word; of 4 bits nibbles 0, 4, 1 and 5 of it for the even 16 inputs, 2, 6, 3 and 7 for the odd ones.
//
// Defines: NUMBER (1 E4M3, 2 int8, 3 int4), GROUP (inputs of a scale, 0: all of them), BLOCK (outputs of a scale), ACT.
#pragma once
#include "tensor.cuh"

#define E4M3 1
#define INT8 2
#define INT4 3
constexpr int PIECE = NUMBER == INT4 ? 256 : 512, LANE = PIECE / 32;  // bytes
constexpr int SPAN = GROUP ? GROUP : 1 << 30;  // inputs of a scale
__device__ __forceinline__ int places_of(int inputs) { return (inputs + SPAN - 1) / SPAN; }  // scales along them
// The first place of an output of a matrix among the scales and zero points of a stack of matrices of `height` outputs.
__device__ __forceinline__ int64_t first_place(int64_t matrix, int output, int height, int inputs) {
    return (matrix * ((height + BLOCK - 1) / BLOCK) + output / BLOCK) * places_of(inputs);
}
// The input, within a chunk, of byte or nibble `at` of word `word` of a lane's share.
__device__ __forceinline__ int input_of(int lane, int word, int at) {
    const int t = lane & 3;
#if NUMBER == INT4
    return word * 32 + (at >> 1 & 1) * 16 + (at & 1) * 8 + t * 2 + (at >> 2);
#else
    return word * 16 + (at & 1) * 8 + t * 2 + (at >> 1);
#endif
}

// -- numbers one by one, for kernels that take any size: less their zero points ---------------------------
__device__ __forceinline__ float number_of(unsigned bits, int zero) {
#if NUMBER == INT4
    return float(int(bits) - zero);
#elif NUMBER == INT8
    return float((signed char)bits);
#else
    if ((bits & 127) == 127) return __uint_as_float(0x7fc00000u);
    return copysignf(__uint_as_float((bits & 127) << 20) * 0x1p120f, bits & 128 ? -1.f : 1.f);
#endif
}
// That of input `i` of a row of numbers.
__device__ __forceinline__ float number_in_row(const unsigned char* row, int i, int zero) {
    return number_of(NUMBER == INT4 ? row[i >> 1] >> (i & 1) * 4 & 15 : row[i], zero);
}
// That of an output and an input of pieces.
__device__ __forceinline__ float number_in_pieces(const unsigned char* pieces, int64_t output, int input, int inputs, int zero) {
    const int within = input & 63, lane = int(output & 7) * 4 + (within >> 1 & 3);
    const unsigned char* share = pieces + ((output >> 3) * (inputs >> 6) + (input >> 6)) * PIECE + lane * LANE;
#if NUMBER == INT4
    return number_of(share[(within >> 5) * 4 + (within & 1) * 2 + (within >> 4 & 1)] >> (within >> 3 & 1) * 4 & 15, zero);
#else
    return number_of(share[(within >> 4) * 4 + (within & 1) * 2 + (within >> 3 & 1)], zero);
#endif
}

#if ACT != 0 && defined(REGISTERS)
#if ACT == 1
#define PAIR_TYPE "bf16x2"
constexpr unsigned TIMES = 0x7b807b80u, WHOLE = 0x43004300u;  // 2**120; 128, whose last place is 1
constexpr int EXPONENT = 4;
#else
#define PAIR_TYPE "f16x2"
constexpr unsigned TIMES = 0x5c005c00u, WHOLE = 0x64006400u;  // 2**8; 1024
constexpr int EXPONENT = 1;
#endif
__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {
    unsigned r;
    asm("mul.rn." PAIR_TYPE " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ unsigned less(unsigned a, unsigned b) {
    unsigned r;
    asm("sub.rn." PAIR_TYPE " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// Two operands from bytes 0 and 2, or 1 and 3, of a word.
template <int ODD>
__device__ __forceinline__ unsigned widen_two(unsigned word) {
#if NUMBER == E4M3  // exponent and mantissa in their places are the number by a power of two, subnormal ones as well
    const unsigned high = ODD ? word : word << 8;
    return times((high & 0x7f007f00u) >> EXPONENT | (high & 0x80008000u), TIMES);
#else
    const unsigned low = ODD ? word >> 8 : word;
#if ACT == 1  // seven bits beside 128, less 128, and as much again where the eighth is set
    return less((low & 0x007f007fu) | WHOLE, (low & 0x00800080u) | WHOLE);
#else
    return less(((low & 0x00ff00ffu) ^ 0x00800080u) | WHOLE, WHOLE + 0x00800080u);
#endif
#endif
}
// The operands of 16 outputs and a chunk from this lane's share of their two pieces; `middle`: WHOLE and the zero point, twice, of either
// piece's output, by 32 inputs (int4).
__device__ __forceinline__ void widen(unsigned (&a)[16], unsigned shared, const unsigned (*middle)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#if NUMBER == INT4
        vec2 v;
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared + half * PIECE) : "memory");
        const unsigned words[2] = {v.x, v.y};
#pragma unroll
        for (int at = 0; at < 8; at++)
            a[at / 2 * 4 + at % 2 * 2 + half] = less((words[at / 4] >> at % 4 * 4 & 0x000f000fu) | WHOLE, middle[at / 4][half]);
#else
        const vec4 v = load_shared(shared + half * PIECE);
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; k++) a[k * 4 + half] = widen_two<0>(words[k]), a[k * 4 + 2 + half] = widen_two<1>(words[k]);
#endif
    }
}
// Operands are made up to here and not behind it, and stay what they are.
__device__ __forceinline__ void operands_fence(unsigned (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i])::"memory");
}
#endif
