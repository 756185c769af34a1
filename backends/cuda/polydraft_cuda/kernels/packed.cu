// What stands around products of packed weights: laying numbers out for them, and rounding rows of activations.
// Defines: ACT; NUMBER (`packed.cuh`); GROUP (inputs of a scale, 0: all of them); BLOCK (outputs of a scale); EIGHT (`rounding.cuh`); VECTOR (16 bits, inputs a multiple of 8, or of 128 with GROUP 128, and 8 * HELD
// a thread at most).
#include "rounding.cuh"

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
constexpr int HELD = 4;  // vectors of a thread

// Each row of x, or each GROUP inputs of it, as numbers and their scale: numbers [n, I], scales [groups, pitch]. A block a row.
extern "C" __global__ void round_rows(const act_t* x, number_t* numbers, float* scales, int inputs, int pitch) {
    begin_dependent();
    __shared__ unsigned found[32];
    const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const act_t* from = x + (int64_t)row * inputs;
    number_t* to = numbers + (int64_t)row * inputs;
#if VECTOR
    vec4 held[HELD] = {};
#pragma unroll
    for (int h = 0; h < HELD; h++) {
        const int at = threadIdx.x + h * blockDim.x;
        if (at < inputs / 8) held[h] = load4(from + at * 8);
    }
    return round_held(held, threadIdx.x, blockDim.x, [] { __syncthreads(); }, found, to, scales, row, inputs, pitch);
#endif
    auto put = [&](int i, float scale) { to[i] = number_nearest(to_float(from[i]) / scale); };
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
