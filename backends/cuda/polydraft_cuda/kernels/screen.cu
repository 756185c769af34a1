// Finding the highest output of each row of x by a first look at all of them: weights in a byte each, and the choice behind
// `linear_screen`.
//
// An output's score s is off by no more than slack * |x|: with e the rest of a row of weights behind its bytes, w = scale q + e, the
// product is s + e x, and |e x| <= |e| |x| (Cauchy and Schwarz). So an output can be the highest only where s + slack |x| reaches a
// product that is known. `screen_settle` computes that of the best score, `screen_choose` those of all outputs that reach it: what is
// chosen is the highest of all products, whatever the scores. (Of rows of x beyond 1e34 a score may be infinite: they choose nothing.)
//
// Defines: ACT (1, 2); TOKENS of `linear_screen` (screen_choose).
#include "tensor.cuh"
#include "sampling.cuh"
#include "screen.cuh"

constexpr int SCREEN_THREADS = 256;  // of every kernel
constexpr int AT_ONCE = 2, MOST_AT_ONCE = AT_ONCE * SCREEN_THREADS * 8, MOST_NOTED = 2 * MOST_AT_ONCE;  // sweeps over `pairs`, and what they may find
constexpr float ROUNDING = 0x1p-22f;  // two sums in float32, one cut off, are off by no more than this times |w| |x|, for each of their inputs
#define UNREACHED __int_as_float(0x7fffffff)  // no comparison with it holds
constexpr float STORED = 1.f / 256;   // of itself: what a score in bfloat16 is off by at most

__device__ __forceinline__ float add_product(float sum, vec4 a, vec4 b) {
    sum += low(a.x) * low(b.x) + high(a.x) * high(b.x) + low(a.y) * low(b.y) + high(a.y) * high(b.y);
    return sum + low(a.z) * low(b.z) + high(a.z) * high(b.z) + low(a.w) * low(b.w) + high(a.w) * high(b.w);
}

// A block an output: its bytes, scale and slack. Weights that are no numbers have a scale of zero and a slack that lets nothing past.
extern "C" __global__ void __launch_bounds__(SCREEN_THREADS) screen_weights(const act_t* w, unsigned char* bytes, float* scales, float* slacks, int inputs) {
    enter();
    __shared__ float scratch[33], tops[SCREEN_THREADS / 32];
    const int output = blockIdx.x;
    const act_t* row = w + (int64_t)output * inputs;
    float top = 0.f, all = 0.f;
    for (int i = threadIdx.x; i < inputs; i += SCREEN_THREADS) {
        const float x = to_float(row[i]);
        top = fmaxf(top, fabsf(x)), all += x * x;
    }
    top = warp_max(top);
    if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = top;
    all = block_sum(all, scratch);
    for (int i = 0; i < SCREEN_THREADS / 32; i++) top = fmaxf(top, tops[i]);
    const bool sound = all < INFINITY_F;  // and so no NaN
    const float scale = sound ? top / (MOST - MIDDLE) : 0.f, by = top > 0.f ? (MOST - MIDDLE) / top : 0.f;
    float rest = 0.f;
    for (int i = threadIdx.x; i < inputs; i += SCREEN_THREADS) {
        const float x = sound ? to_float(row[i]) : 0.f;
        const int byte = byte_of(fminf(fmaxf(x * by + MIDDLE, LEAST), MOST));
        const float e = x - scale * (number_of(byte) - MIDDLE);
        rest += e * e;
        bytes[place_of_byte(output, i, inputs)] = (unsigned char)byte;
    }
    rest = block_sum(rest, scratch);
    if (threadIdx.x) return;
    scales[output] = scale;
    slacks[output] = sound ? (sqrtf(rest) + sqrtf(all) * ROUNDING * inputs) * 1.001f + 1e-20f : INFINITY_F;  // squares below 1e-45 are lost
}

// A block a row: the bound that scores have to reach (the product of the output with the best score) and the row's length. A row that is
// no numbers chooses nothing, nor does one of nobody: their bound is none that anything reaches.
extern "C" __global__ void __launch_bounds__(SCREEN_THREADS)
screen_settle(const float2* kept, const act_t* x, const act_t* w, const int* row_slot, uint64_t* best, float2* bounds, int warps, int pitch, int inputs) {
    enter();
    __shared__ uint64_t keys[33];
    __shared__ double squares[33];
    __shared__ float sums[33];
    const int r = blockIdx.x, begin = threadIdx.x * 8;
    const act_t* row = x + (int64_t)r * inputs;
    uint64_t key = 0;
#pragma unroll 5
    for (int i = threadIdx.x; i < warps; i += SCREEN_THREADS) {
        const float2 one = __ldcg(kept + (int64_t)i * pitch + r);
        const uint64_t found = logit_key(one.x, __float_as_int(one.y));
        key = found > key ? found : key;
    }
    double square = 0.;
#pragma unroll 2
    for (int i = begin; i < inputs; i += SCREEN_THREADS * 8) {
        const vec4 a = load4(row + i);
        const unsigned words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int j = 0; j < 4; j++) square += double(low(words[j])) * low(words[j]) + double(high(words[j])) * high(words[j]);
    }
    key = block_max(key, keys);
    square = block_sum(square, squares);
    const bool sound = row_slot[r] >= 0 && square < 1e300 && key != BROKEN && key != 0;
    const int output = sound ? ranked_id(key) : 0;
    float found = 0.f;
#pragma unroll 2
    for (int i = begin; i < inputs; i += SCREEN_THREADS * 8) found = add_product(found, load4(row + i), load4(w + (int64_t)output * inputs + i));
    found = block_sum(found, sums);
    if (threadIdx.x) return;
    const bool bounded = sound && found < INFINITY_F;
    best[r] = bounded ? 0 : BROKEN;
    bounds[r] = bounded ? make_float2(found, float(sqrt(square)) * 1.001f + 1e-30f) : make_float2(UNREACHED, 0.f);
}

#ifdef TOKENS
// Blocks share the pairs; a thread looks at eight scores at a time, of the same tokens always. What reaches its row's bound is noted,
// and computed by a warp each behind the last sweep, or where there is no room for more. The last block to end hands out the tokens.
extern "C" __global__ void __launch_bounds__(SCREEN_THREADS, 2)
screen_choose(const uint16_t* pairs, const float* slacks, const act_t* x, const act_t* w, const int* row_slot, int* tokens, uint64_t* best, const float2* bounds,
              int* tickets, int n, int outputs, int inputs) {
    enter();
    __shared__ unsigned noted[MOST_NOTED];  // pair, token
    __shared__ int num_noted;
    __shared__ bool ends;
    const int lane = threadIdx.x & 31, place = threadIdx.x * 8 % TOKENS;
    float wanted[8], length[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int token = token_at(place + i, TOKENS);
        const float2 bound = token < n ? bounds[token] : make_float2(UNREACHED, 0.f);
        wanted[i] = bound.x, length[i] = bound.y;
    }
    constexpr int SWEEP = SCREEN_THREADS * 8 / TOKENS;  // pairs
    const int count = (outputs + 15) / 16 * 8, stride = gridDim.x * SWEEP;
    vec4 next[AT_ONCE];
    float next_slack[AT_ONCE];
    auto fetch = [&](int from) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int pair = min(from + k * stride + int(threadIdx.x) * 8 / TOKENS, count - 1), output = pair / 8 * 16 + pair % 8;
            next[k] = load4(pairs + (int64_t)pair * TOKENS + place);
            next_slack[k] = fmaxf(slacks[min(output, outputs - 1)], slacks[min(output + 8, outputs - 1)]);
        }
    };
    int from = blockIdx.x * SWEEP;
    fetch(from);
    if (threadIdx.x == 0) num_noted = 0;
    for (; from < count; from += stride * AT_ONCE) {
        vec4 scores[AT_ONCE];
        float slack[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) scores[k] = next[k], slack[k] = next_slack[k];
        fetch(from + stride * AT_ONCE);
        __syncthreads();  // nobody counts from before, or still computes
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int pair = from + k * stride + threadIdx.x * 8 / TOKENS;
            const unsigned words[4] = {scores[k].x, scores[k].y, scores[k].z, scores[k].w};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float score = __uint_as_float(i & 1 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
                if (pair < count && score + fabsf(score) * STORED + slack[k] * length[i] >= wanted[i])
                    noted[atomicAdd(&num_noted, 1)] = pair << 8 | token_at(place + i, TOKENS);
            }
        }
        __syncthreads();
        const int found = num_noted;
        if (found <= MOST_NOTED - MOST_AT_ONCE && from + stride * AT_ONCE < count) continue;  // there is room for all that may come
        for (int i = threadIdx.x >> 5; i < found; i += SCREEN_THREADS / 32) {
            const int pair = noted[i] >> 8, token = noted[i] & 255, output = pair / 8 * 16 + pair % 8, other = min(output + 8, outputs - 1);
            const act_t *row = x + (int64_t)token * inputs, *a = w + (int64_t)output * inputs, *b = w + (int64_t)other * inputs;
            float first = 0.f, second = 0.f;
#pragma unroll 8
            for (int j = lane * 8; j < inputs; j += 256) {
                const vec4 of_row = load4(row + j);
                first = add_product(first, of_row, load4(a + j)), second = add_product(second, of_row, load4(b + j));
            }
            first = warp_sum(first), second = warp_sum(second);
            if (lane == 0) {
                atomicMax((unsigned long long*)best + token, logit_key(first, output));
                if (output + 8 < outputs) atomicMax((unsigned long long*)best + token, logit_key(second, output + 8));
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) num_noted = 0;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ends = atomicAdd(tickets, 1) + 1 == (int)gridDim.x;
    __syncthreads();
    if (!ends) return;
    __threadfence();
    for (int r = threadIdx.x; r < n; r += SCREEN_THREADS) tokens[r] = row_slot[r] < 0 ? NO_TOKEN : chosen(__ldcg(best + r));
    if (threadIdx.x == 0) *tickets = 0;
}
#endif
