// Weights in a byte each, for a first look at scores. What bytes are made of is turned first: w / c times a Hadamard matrix H, with c a
// power of two of either sign for each input, near the mean of its weights (as QuaRot and others turn weights before they quantise them;
// Ashkboos et al. 2024). x c H is the other factor, and w x = (w / c H) (x c H) / |H|. So columns that stand out are level, and one
// large weight is spread over many: whatever a head's weights are distributed like, what is left of a row behind its bytes is as little
// as with normal ones.
//
// A turned weight is about scale * (f - MIDDLE), where f is the float16 number whose lower byte is the weight's and whose upper byte is
// HIGH: these are whole numbers from 1024 to 1279. Less MIDDLE, they are exact in float16: widening takes one permutation of bytes and one
// subtraction for two weights. Whatever the activation type, a look is taken in float16, which has room for turned rows, too, and leaves
// less of them than bfloat16 does.
//
// Bytes lie as the warps of a product read them: tiles of 128 outputs, in each chunks of 64 inputs, in each the 16 outputs of 8 warps:
// [2 halves of the chunk][32 lanes][16 bytes]. A lane's four bytes of a word are rows g (bytes 0 and 2) and g + 8 (1 and 3).
#pragma once
#include "common.cuh"

constexpr unsigned HIGH = 0x64;
constexpr float MIDDLE = 1152.f, LEAST = 1024.f, MOST = 1279.f;
#define MIDDLES "0x64806480"
constexpr int SCREEN_TILE = 128;
// The byte whose number is next to `t`, from LEAST to MOST; and the number of a byte.
__device__ __forceinline__ int byte_of(float t) { return int(rintf(t - LEAST)); }
__device__ __forceinline__ float number_of(int byte) { return to_float(f16{uint16_t(HIGH << 8 | byte)}); }
__device__ __forceinline__ int64_t place_of_byte(int output, int input, int inputs) {
    const int within = input % 64, row = output % 16, k = within % 16;
    const int lane = (row & 7) * 4 + (k & 7) / 2, byte = within / 16 % 2 * 8 + k / 8 * 4 + (k & 1) * 2 + row / 8;
    return (((int64_t)(output / SCREEN_TILE) * (inputs / 64) + input / 64) * 8 + output % SCREEN_TILE / 16) * 1024 + within / 32 * 512 + lane * 16 + byte;
}
// -- turning ------------------------------------------------------------------------------------------
constexpr int LEAST_POWER = -100, MOST_POWER = 100;
// An input's c: of the sign that a hash of its number gives (without it a row of equal weights would be one large one), and with the
// exponent of the mean of its weights' magnitudes; 1 where that is no number.
__device__ __forceinline__ float column_of(int input, float mean) {
    const int found = int(__float_as_uint(mean) >> 23) - 127, power = found > 127 ? 0 : min(max(found, LEAST_POWER), MOST_POWER);
    return __uint_as_float(unsigned(power + 127) << 23 | unsigned(__popc(unsigned(input) * 0x9e3779b1u >> 8) & 1) << 31);
}
// Inputs that are turned together: the highest power of two that divides all of them.
__device__ __forceinline__ int turned_inputs(int inputs) { return inputs & -inputs; }
// Place of an input in shared memory: one word is left out in 33, so that inputs 8 apart lie in banks of their own.
__device__ __forceinline__ int slot_of(int input) { return input + (input >> 5); }
// In shared memory, by a whole block: sums of float32 that are off by no more than TURNING of the length of all.
constexpr float TURNING = 0x1p-20f;  // 14 sums behind each other, each off by 2**-24 of itself at most
template <int OF>  // inputs `half` apart, by a thread
__device__ __forceinline__ void turn_step(float* values, int inputs, int half) {
    __syncthreads();
    for (int i = threadIdx.x; i < inputs / OF; i += blockDim.x) {
        const int at = (i & ~(half - 1)) * OF + (i & (half - 1));
        float v[OF];
#pragma unroll
        for (int k = 0; k < OF; k++) v[k] = values[slot_of(at + k * half)];
#pragma unroll
        for (int step = 1; step < OF; step <<= 1)
#pragma unroll
            for (int k = 0; k < OF; k++)
                if (!(k & step)) {
                    const float a = v[k], b = v[k + step];
                    v[k] = a + b, v[k + step] = a - b;
                }
#pragma unroll
        for (int k = 0; k < OF; k++) values[slot_of(at + k * half)] = v[k];
    }
}
__device__ __forceinline__ void turn(float* values, int inputs) {
    const int together = turned_inputs(inputs);
    int half = 1;
    for (; half * 8 <= together; half *= 8) turn_step<8>(values, inputs, half);
    if (half * 4 <= together) turn_step<4>(values, inputs, half), half *= 4;
    if (half * 2 <= together) turn_step<2>(values, inputs, half);
    __syncthreads();
}
// The token at place `p` of a row of `pairs`: four lanes have a quarter of them each, in eights.
__device__ __forceinline__ int token_at(int p, int tokens) {
    const int quarter = tokens / 4, rest = p % quarter;
    return rest / 2 * 8 + p / quarter * 2 + (rest & 1);
}

#if defined(REGISTERS)
// Two operands of a product from bytes 0 and 2, or 1 and 3, of a word.
template <int FIRST>
__device__ __forceinline__ unsigned widen_two(unsigned bytes) {
    unsigned r;
    const unsigned numbers = __byte_perm(bytes, HIGH, FIRST ? 0x4341 : 0x4240);
    asm("{\n.reg .b32 middles;\nmov.b32 middles, " MIDDLES ";\nsub.rn.f16x2 %0, %1, middles;\n}" : "=r"(r) : "r"(numbers));
    return r;
}
__device__ __forceinline__ void widen(unsigned* a, vec4 bytes) {
    const unsigned words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 4; i++) a[i * 2] = widen_two<0>(words[i]), a[i * 2 + 1] = widen_two<1>(words[i]);
}
// Operands are made up to here and not behind it, and stay what they are.
__device__ __forceinline__ void operands_fence(unsigned (&a)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i])::"memory");
}
// The higher of outputs r and r + 8 of every token that a lane has sums of.
__device__ __forceinline__ void store_pairs(const float (&sums)[TOKENS / 2], uint16_t* to) {
    constexpr int WORDS = TOKENS / 8;
    unsigned words[WORDS];
#pragma unroll
    for (int e = 0; e < WORDS; e++) {
        const float a = fmaxf(sums[e * 4], sums[e * 4 + 2]), b = fmaxf(sums[e * 4 + 1], sums[e * 4 + 3]);
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[e]) : "f"(b), "f"(a));
    }
    if constexpr (WORDS >= 4) {
#pragma unroll
        for (int e = 0; e < WORDS; e += 4) *(vec4*)(to + e * 2) = {words[e], words[e + 1], words[e + 2], words[e + 3]};
    } else {
#pragma unroll
        for (int e = 0; e < WORDS; e++) ((unsigned*)to)[e] = words[e];
    }
}
#endif
