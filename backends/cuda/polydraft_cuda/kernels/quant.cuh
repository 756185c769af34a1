// Quantised rows of the paged cache: numbers q of eight bits and an exponent e a row, q * 2**e, as polydraft.contracts.kv_quant defines.
//
// Memory: [2, blocks, heads, groups, rows * dim + rows] bytes: a group's numbers, then its exponents. Tiled (as in cache.cuh, a byte
// an element), a group is 16 rows, else the whole block; in tiles the middle two of four bytes are exchanged, so that the pairs that a
// tensor core wants are the low and the high bytes of a word's halves. A NaN or an infinity in a row makes its exponent BROKEN, which
// fresh memory has too: such a row reads as NaN, though every number q is finite.
//
// Defines: KV (1: int8, kept as sign and magnitude; 2: fp8, E4M3), ACT.
#pragma once
#include "cache.cuh"

typedef unsigned char kv_t;
constexpr int BROKEN = 127, LEAST_EXPONENT = -100, MOST_EXPONENT = 100;
constexpr int WHOLE = KV == 1 ? 7 : 9, MOST_MANTISSA = KV == 1 ? 0x7e0000 : 0x600000;  // 127 and 448: a fraction from 1/2 on, times 2**WHOLE
#define NAN_F __int_as_float(0x7fffffff)

// -- one number -----------------------------------------------------------------------------------------
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }  // e from -126 to 127
__device__ __forceinline__ float quantum_of(int e) { return e == BROKEN ? NAN_F : power_of_two(e); }

__device__ __forceinline__ float number(kv_t q) {
    if (KV == 1) return (q & 128 ? -1.f : 1.f) * (q & 127);
    return __uint_as_float((q & 127u) << 20 | (q & 128u) << 24) * power_of_two(120);
}

// Exponent of a row whose largest magnitude has these bits; NaN and infinity are the largest of all.
__device__ __forceinline__ int exponent_of(unsigned largest) {
    if (largest >= 0x7f800000u) return BROKEN;
    const int e = (int)(largest >> 23) - 126 - WHOLE + ((int)(largest & 0x7fffffu) > MOST_MANTISSA);
    return min(max(e, LEAST_EXPONENT), MOST_EXPONENT);
}

// The nearest number, ties to even, of x in a row of exponent e.
__device__ __forceinline__ kv_t nearest(float x, int e) {
    if (e == BROKEN) return 0;
    const float y = x * power_of_two(-e), magnitude = fminf(fabsf(y), KV == 1 ? 127.f : 448.f);
    const unsigned sign = __float_as_uint(y) >> 31 << 7;
    if (KV == 1) return sign | __float2int_rn(magnitude);
    unsigned bits = __float_as_uint(magnitude);
    if (magnitude < 0.015625f) return sign | __float2int_rn(magnitude * 512.f);  // below 2**-6: whole parts of 2**-9
    bits += 0x7ffffu + (bits >> 20 & 1);
    return sign | ((bits >> 20) - (120 << 3));
}

// -- places ---------------------------------------------------------------------------------------------
template <bool TILED_>
struct Group {  // the rows around one position of a head: where they begin, and which of them it is
    int64_t at;
    int row, rows, dim;
    __device__ __forceinline__ Group(int64_t block, int num_heads, int head, int offset, int block_size, int dim_) {
        rows = TILED_ ? 16 : block_size, row = offset % rows, dim = dim_;
        at = ((block * num_heads + head) * block_size + offset / rows * rows) * (dim + 1);
    }
    static __device__ __forceinline__ int exchanged(int o) { return TILED_ ? (o & ~3) | (o & 1) << 1 | (o >> 1 & 1) : o; }
    __device__ __forceinline__ int64_t key(int d) const { return at + exchanged(key_offset<TILED_>(row, d, dim)); }
    __device__ __forceinline__ int64_t value(int d) const { return at + exchanged(value_offset<TILED_>(row, d, dim)); }
    __device__ __forceinline__ int64_t exponent() const { return at + rows * dim + row; }
};

template <bool TILED_>
struct Pages {  // one layer's cache as one slot sees it, for attend_row
    const kv_t* keys;
    const kv_t* values;
    const int* table;
    int num_kv_heads, block_size, head_dim;
    __device__ __forceinline__ Group<TILED_> group(int position, int head) const {
        return {table[position / block_size], num_kv_heads, head, position % block_size, block_size, head_dim};
    }
    __device__ __forceinline__ float key(int position, int head, int d) const {
        const Group<TILED_> g = group(position, head);
        return number(keys[g.key(d)]) * quantum_of((signed char)keys[g.exponent()]);
    }
    __device__ __forceinline__ float value(int position, int head, int d) const {
        const Group<TILED_> g = group(position, head);
        return number(values[g.value(d)]) * quantum_of((signed char)values[g.exponent()]);
    }
};

#if ACT != 0
// -- four numbers as two pairs of the activation dtype, exact ----------------------------------------------
__device__ __forceinline__ unsigned fused(unsigned a, unsigned b, unsigned c) {  // a * b + c, pair by pair
    unsigned r;
#if ACT == 1
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
#endif
    return r;
}
constexpr unsigned NEGATIVE_ZEROS = 0x80008000u;

// The numbers in the high bytes of the halves of w, before fp8 is brought to its range (`FP8_RANGE`).
__device__ __forceinline__ unsigned spread(unsigned w) {
    const unsigned sign = w & 0x80008000u;
#if KV == 1  // m over 128 (1024) is that number's sum with m
    const unsigned m = w >> 8 & 0x007f007fu;
    return sign | (ACT == 1 ? fused(m | 0x43004300u, 0x3f803f80u, 0xc300c300u) : fused(m | 0x64006400u, 0x3c003c00u, 0xe400e400u));
#else  // the same bits with another bias
    return sign | (ACT == 1 ? w >> 4 & 0x07f007f0u : w >> 1 & 0x3f803f80u);
#endif
}
constexpr int FP8_BIAS = ACT == 1 ? 120 : 8;
constexpr unsigned FP8_RANGE = ACT == 1 ? 0x7b807b80u : 0x5c005c00u;  // 2**FP8_BIAS

// A word's four numbers in the order of their elements, times `scales` where the dtype lacks the range to do that in weights.
__device__ __forceinline__ vec2 pairs_of(unsigned word) {
    const unsigned a = spread(word << 8), b = spread(word);
    if (KV == 1) return {a, b};
    return {fused(a, FP8_RANGE, NEGATIVE_ZEROS), fused(b, FP8_RANGE, NEGATIVE_ZEROS)};
}

// What 2**e of a value's row becomes: a factor of its weights, and, in float16, whose weights lack the range, a scale of the values.
__device__ __forceinline__ int scale_of(int e) {  // exponent of the part that values take
    if (ACT == 1) return 0;
    return KV == 1 ? min(max(e, -24), 8) : min(max(e, -24 - FP8_BIAS), 15 - FP8_BIAS);
}
__device__ __forceinline__ float factor_of(int e) { return e == BROKEN ? NAN_F : power_of_two(e - scale_of(e)); }

struct ValueScales { unsigned near, far; };  // of keys (2 t, 2 t + 1) and those 8 behind, as pairs
__device__ __forceinline__ ValueScales scales_of(const signed char (&e)[4]) {
    if (ACT == 1) return {0, 0};
    auto scale = [&](int e) { return pack(power_of_two(scale_of(e) + (KV == 1 ? 0 : FP8_BIAS)), 0.f) & 0xffffu; };
    return {scale(e[0]) | scale(e[1]) << 16, scale(e[2]) | scale(e[3]) << 16};
}
// Four values of a column pair: keys (2 t, 2 t + 1), then those 8 behind.
__device__ __forceinline__ vec2 values_of(unsigned word, ValueScales s) {
    if (ACT == 1) return pairs_of(word);
    return {fused(spread(word << 8), s.near, NEGATIVE_ZEROS), fused(spread(word), s.far, NEGATIVE_ZEROS)};
}
#endif
