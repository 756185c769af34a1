// What stands around products of packed weights: laying numbers out for them, and rounding rows of activations.
// Defines: ACT; NUMBER (`packed.cuh`); GROUP (inputs of a scale, 0: all of them); BLOCK (outputs of a scale); EIGHT (rows of activations
// become bytes of E4M3 in place of numbers in their own type); VECTOR (16 bits, inputs a multiple of 8, or of 128 with GROUP 128, and 8 * HELD
// a thread at most).
#include "packed.cuh"

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

// Numbers row by row as pieces: rows `pitch` bytes apart, matrices of `height` rows `step` bytes; a thread a word. What stands for no number among E4M3 is no place's in a product:
// the scale of its output says it, or that of its block.
extern "C" __global__ void lay_out(const unsigned char* numbers, unsigned* pieces, float* scales, int outputs, int inputs, int height, int step, int pitch) {
    enter();
    constexpr int WORDS = PIECE / 4;
    const int chunks = inputs / 64;
    const int64_t place = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, piece = place / WORDS;
    const int within = place % WORDS, lane = within / (LANE / 4), word = within % (LANE / 4);
    const int output = int(piece / chunks) * 8 + (lane >> 2), first = int(piece % chunks) * 64;
    if (piece / chunks * 8 >= outputs) return;
    unsigned made = 0;
    if (output < outputs) {
        const unsigned char* row = numbers + (int64_t)(output / height) * step + (int64_t)(output % height) * pitch;
#pragma unroll
        for (int at = 0; at < 32 / (NUMBER == INT4 ? 4 : 8); at++) {
            const int input = first + input_of(lane, word, at);
#if NUMBER == INT4
            made |= unsigned(row[input >> 1] >> (input & 1) * 4 & 15) << at * 4;
#else
            made |= unsigned(row[input]) << at * 8;
            if (NUMBER == E4M3 && (row[input] & 127) == 127)
                scales[first_place(output / height, output % height, height, inputs) + input / SPAN] = not_a_number();
#endif
        }
    }
    pieces[place] = made;
}

// Rows of bytes that overlap in memory, one by one, of matrices that may. A block a row.
extern "C" __global__ void spread_bytes(const unsigned char* pool, unsigned char* numbers, int columns, int height, int step, int pitch) {
    enter();
    const unsigned char* from = pool + (int64_t)(blockIdx.x / height) * step + (int64_t)(blockIdx.x % height) * pitch;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) numbers[(int64_t)blockIdx.x * columns + i] = from[i];
}

// -- activations --------------------------------------------------------------------------------------
constexpr float MOST = NUMBER == E4M3 ? 448.f : 127.f;
// The number that x over its scale is rounded to, ties to even.
__device__ __forceinline__ float nearest(float q) {
#if NUMBER == E4M3
    const float size = fminf(fabsf(q), MOST);
    const int exponent = max(int(__float_as_uint(size) >> 23) - 127, -6);  // 8 to 16 of the last place, fewer below the normal ones
    return copysignf(rintf(size * __uint_as_float(unsigned(130 - exponent) << 23)) * __uint_as_float(unsigned(124 + exponent) << 23), q);
#else
    return rintf(q);
#endif
}
#if EIGHT
typedef unsigned char number_t;
__device__ __forceinline__ number_t stored(float q) {  // the bits of a number that E4M3 has
    const unsigned bits = __float_as_uint(q), size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7f;
    return (bits >> 24 & 128) | (size < __float_as_uint(0x1p-6f) ? unsigned(__uint_as_float(size) * 512.f) : (size >> 20) - 960);
}
#else
typedef act_t number_t;
__device__ __forceinline__ number_t stored(float q) { return from_float<act_t>(q); }
#endif
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }  // that of a NaN is the highest
__device__ __forceinline__ float scale_of(unsigned most) {
    return most >= 0x7f800000u ? not_a_number() : fmaxf(__uint_as_float(most) / MOST, 0x1p-100f);
}

#if VECTOR
constexpr int HELD = 4;  // vectors of a thread
static_assert(GROUP == 0 || GROUP == 128, "16 lanes have a group");
__device__ __forceinline__ unsigned highest_of(const vec4& v) {  // of the magnitudes of eight, as bits of 16
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) most = max(most, max(words[i] & 0x7fff, words[i] >> 16 & 0x7fff));
    return most;
}
__device__ __forceinline__ void store(number_t* to, const vec4& v, float scale) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; i++) q[i] = scale == scale ? nearest((i & 1 ? high(words[i / 2]) : low(words[i / 2])) / scale) : scale;
#if EIGHT
    unsigned made[2] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) made[i / 4] |= unsigned(stored(q[i])) << i % 4 * 8;
    *(vec2*)to = {made[0], made[1]};
#else
    *(vec4*)to = {pack(q[0], q[1]), pack(q[2], q[3]), pack(q[4], q[5]), pack(q[6], q[7])};
#endif
}
#endif

// Each row of x, or each GROUP inputs of it, as numbers and their scale: numbers [n, I], scales [groups, pitch]. A block a row.
extern "C" __global__ void round_rows(const act_t* x, number_t* numbers, float* scales, int inputs, int pitch) {
    begin_dependent();
    __shared__ unsigned found[32];
    const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const act_t* from = x + (int64_t)row * inputs;
    number_t* to = numbers + (int64_t)row * inputs;
    auto put = [&](int i, float scale) {
        to[i] = stored(scale == scale ? nearest(to_float(from[i]) / scale) : scale);
    };
    auto highest = [&](unsigned most) {
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) most = max(most, __shfl_xor_sync(FULL, most, d));
        return most;
    };
#if VECTOR
    vec4 held[HELD];
    unsigned all = 0;
#pragma unroll
    for (int h = 0; h < HELD; h++) {
        const int at = threadIdx.x + h * blockDim.x;
        held[h] = at < inputs / 8 ? load4(from + at * 8) : vec4{0, 0, 0, 0};
        all = max(all, highest_of(held[h]));
    }
    auto found_scale = [&](unsigned bits) { return scale_of(magnitude(to_float(act_t{uint16_t(bits)}))); };
    float whole = 0.f;
    if (!GROUP) {
        all = highest(all);
        if (lane == 0) found[warp] = all;
        __syncthreads();
        whole = found_scale(highest(lane < warps ? found[lane] : 0u));
        if (threadIdx.x == 0) scales[row] = whole;
    }
#pragma unroll
    for (int h = 0; h < HELD; h++) {
        const int at = threadIdx.x + h * blockDim.x;
        float scale = whole;
        if (GROUP) {
            unsigned most = highest_of(held[h]);
#pragma unroll
            for (int d = 8; d > 0; d >>= 1) most = max(most, __shfl_xor_sync(FULL, most, d));
            scale = found_scale(most);
            if (at % 16 == 0 && at < inputs / 8) scales[(int64_t)(at / 16) * pitch + row] = scale;
        }
        if (at < inputs / 8) store(to + at * 8, held[h], scale);
    }
    return;
#endif
    if (GROUP) {  // a warp a group
        for (int first = warp * GROUP, group = warp; first < inputs; first += warps * GROUP, group += warps) {
            const int last = min(first + GROUP, inputs);
            unsigned most = 0;
            for (int i = first + lane; i < last; i += 32) most = max(most, magnitude(to_float(from[i])));
            const float scale = scale_of(highest(most));
            if (lane == 0) scales[(int64_t)group * pitch + row] = scale;
            for (int i = first + lane; i < last; i += 32) put(i, scale);
        }
        return;
    }
    unsigned most = 0;
    for (int i = threadIdx.x; i < inputs; i += blockDim.x) most = max(most, magnitude(to_float(from[i])));
    most = highest(most);
    if (lane == 0) found[warp] = most;
    __syncthreads();
    const float scale = scale_of(highest(lane < warps ? found[lane] : 0u));
    if (threadIdx.x == 0) scales[row] = scale;
    for (int i = threadIdx.x; i < inputs; i += blockDim.x) put(i, scale);
}
