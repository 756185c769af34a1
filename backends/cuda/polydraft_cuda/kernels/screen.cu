// Finding the highest output of each row of x by a first look at all of them: weights in a byte each, rows of x as the look wants them,
// and the choice behind `linear_screen`.
//
// All is said of turned weights u and rows y (`screen.cuh`), whose products are those of the head times a row's `factor`. With u = scale q
// + e and y = z + d, where q are numbers of bytes and z is y in float16, a score is s = scale q z, and u y - s = e z + u d is
// no more than |e| |z| + |u| |d| (Cauchy and Schwarz). So an output can be the highest only where s + slack |z| + length |d| reaches a
// product that is known. `screen_settle` computes that of the best score, `screen_choose` those of all outputs that reach it: what is
// chosen is the highest of all products, whatever the scores. Where too many do, or z cannot be told, the choice gives up and the head is
// read whole (`screen_state.cuh`).
//
// Defines: ACT (1, 2); TOKENS of `linear_screen` (screen_choose); PAIRS, where ranks go on with keys.
#include "tensor.cuh"
#include "sampling.cuh"
#include "screen.cuh"
#include "screen_state.cuh"

constexpr int SCREEN_THREADS = 256, TURN_THREADS = 512;  // of every kernel, and of `screen_turn`
constexpr int AT_ONCE = 2;          // sweeps over `pairs`
constexpr int MOST_NOTED = 96;      // pairs that a block computes at most: some 12 a warp, a tenth of the time of a head that is read whole
constexpr float ROUNDING = 0x1p-22f;  // two sums in float32, one cut off, are off by no more than this times |u| |z|, for each of their inputs
constexpr int FARTHEST = 60;        // powers of two that a row is brought back from, so that nothing of it is lost below float32
#define UNREACHED __int_as_float(0x7fffffff)  // no comparison with it holds
constexpr float STORED = 1.f / 256;   // of itself: what a score in bfloat16 is off by at most

__device__ __forceinline__ float add_product(float sum, vec4 a, vec4 b) {
    sum += low(a.x) * low(b.x) + high(a.x) * high(b.x) + low(a.y) * low(b.y) + high(a.y) * high(b.y);
    return sum + low(a.z) * low(b.z) + high(a.z) * high(b.z) + low(a.w) * low(b.w) + high(a.w) * high(b.w);
}
__device__ __forceinline__ float block_most(float x, float* scratch) {
    const float most = warp_max(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = most;
    __syncthreads();
    float all = scratch[0];
    for (unsigned i = 1; i < blockDim.x / 32; i++) all = fmaxf(all, scratch[i]);
    return all;
}

// -- weights -------------------------------------------------------------------------------------------
// A block 64 inputs: what each is divided by.
extern "C" __global__ void __launch_bounds__(SCREEN_THREADS) screen_columns(const act_t* w, float* columns, int outputs, int inputs) {
    enter();
    __shared__ float2 sums[SCREEN_THREADS / 32][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, input = blockIdx.x * 64 + lane * 2;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll 8
    for (int row = warp; row < outputs; row += SCREEN_THREADS / 32) {
        const unsigned two = *(const unsigned*)(w + (int64_t)row * inputs + input);
        sum.x += fabsf(low(two)), sum.y += fabsf(high(two));
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp) return;
    for (int i = 1; i < SCREEN_THREADS / 32; i++) sum.x += sums[i][lane].x, sum.y += sums[i][lane].y;
    columns[input] = column_of(input, sum.x / outputs), columns[input + 1] = column_of(input + 1, sum.y / outputs);
}

// A block an output: its bytes, scale and (slack, length). Weights that are no numbers have a scale of zero and a slack that lets nothing
// past. `values`: shared memory for all inputs.
extern "C" __global__ void __launch_bounds__(SCREEN_THREADS)
screen_weights(const act_t* w, const float* columns, unsigned char* bytes, float* scales, float2* slacks, int inputs) {
    enter();
    extern __shared__ float values[];
    __shared__ float scratch[33];
    const int output = blockIdx.x;
    const act_t* row = w + (int64_t)output * inputs;
    for (int i = threadIdx.x; i < inputs; i += SCREEN_THREADS) values[slot_of(i)] = to_float(row[i]) / columns[i];
    turn(values, inputs);
    float top = 0.f, all = 0.f;
    for (int i = threadIdx.x; i < inputs; i += SCREEN_THREADS) {
        const float u = values[slot_of(i)];
        top = fmaxf(top, fabsf(u)), all += u * u;
    }
    top = block_most(top, scratch);
    all = block_sum(all, scratch);
    const bool sound = all < INFINITY_F;  // and so no NaN
    const float scale = sound ? top / (MOST - MIDDLE) : 0.f, by = top > 0.f ? (MOST - MIDDLE) / top : 0.f;
    float rest = 0.f;
    for (int i = threadIdx.x; i < inputs; i += SCREEN_THREADS) {
        const float u = sound ? values[slot_of(i)] : 0.f;
        const int byte = byte_of(fminf(fmaxf(u * by + MIDDLE, LEAST), MOST));
        const float e = u - scale * (number_of(byte) - MIDDLE);
        rest += e * e;
        bytes[place_of_byte(output, i, inputs)] = (unsigned char)byte;
    }
    rest = block_sum(rest, scratch);
    if (threadIdx.x) return;
    scales[output] = scale;
    const float slack = (sqrtf(rest) + sqrtf(all) * (ROUNDING * inputs + TURNING)) * 1.001f + 1e-20f;  // squares below 1e-45 are lost
    slacks[output] = sound ? make_float2(slack, sqrtf(all) * 1.001f + 1e-20f) : make_float2(INFINITY_F, 0.f);
}

// -- rows ------------------------------------------------------------------------------------------------
// A block a row: the row turned, its largest number between 1 and 2, and of its bound |z|, |d| and `factor`. |z| is below 0 where x is
// no numbers. `values`: shared memory for all inputs. Others come once this one has waited: until then the state may be another's.
extern "C" __global__ void __launch_bounds__(TURN_THREADS)
screen_turn(const act_t* x, const float* columns, const int* row_slot, f16* turned, float4* bounds, ScreenState* state, int inputs) {
    wait_for_previous();
    launch_dependents();
    extern __shared__ float values[];
    __shared__ float scratch[TURN_THREADS / 32];
    const int r = blockIdx.x;
    if (is_skipped(state) || row_slot[r] < 0) return;
    bool sound = true;
#pragma unroll 4
    for (int i = threadIdx.x * 2; i < inputs; i += TURN_THREADS * 2) {
        const unsigned two = *(const unsigned*)(x + (int64_t)r * inputs + i);
        const float2 c = *(const float2*)(columns + i);
        const float a = low(two), b = high(two);
        sound &= fabsf(a) < INFINITY_F && fabsf(b) < INFINITY_F;
        values[slot_of(i)] = a * c.x, values[slot_of(i + 1)] = b * c.y;
    }
    turn(values, inputs);
    float top = 0.f;
    for (int i = threadIdx.x; i < inputs; i += TURN_THREADS) top = fmaxf(top, fabsf(values[slot_of(i)]));
    sound = __syncthreads_and(sound);
    top = block_most(top, scratch);
    const int power = top > 0.f ? int(__float_as_uint(top) >> 23) - 127 : 0;
    const bool near = power >= -FARTHEST && power <= FARTHEST;
    const float by = near ? __uint_as_float(unsigned(127 - power) << 23) : 0.f;
    float z2 = 0.f, d2 = 0.f, y2 = 0.f;
    for (int i = threadIdx.x; i < inputs; i += TURN_THREADS) {
        const float y = values[slot_of(i)] * by;
        const f16 stored = from_float<f16>(y);
        const float z = to_float(stored), d = y - z;
        turned[(int64_t)r * inputs + i] = stored;
        z2 += z * z, d2 += d * d, y2 += y * y;
    }
    __shared__ float3 parts[TURN_THREADS / 32];
    z2 = warp_sum(z2), d2 = warp_sum(d2), y2 = warp_sum(y2);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = make_float3(z2, d2, y2);
    __syncthreads();
    if (threadIdx.x) return;
    z2 = d2 = y2 = 0.f;
    for (int i = 0; i < TURN_THREADS / 32; i++) z2 += parts[i].x, d2 += parts[i].y, y2 += parts[i].z;
    const float off = (sqrtf(d2) + sqrtf(y2) * TURNING) * 1.001f + 1e-20f;
    bounds[r] = make_float4(UNREACHED, sound ? sqrtf(z2) * 1.001f + 1e-20f : -1.f, off, by * turned_inputs(inputs));
    if (sound && !near) state->given_up = 1;
}

// -- the choice ------------------------------------------------------------------------------------------
// A block a row: the bound that scores have to reach, the product of the output with the best score. A row that is no numbers chooses
// nothing, nor does one of nobody: their bound is none that anything reaches.
extern "C" __global__ void __launch_bounds__(SCREEN_THREADS)
screen_settle(const float2* kept, const act_t* x, const act_t* w, const int* row_slot, uint64_t* best, float4* bounds, const ScreenState* state, int warps, int pitch, int inputs) {
    enter();
    if (is_skipped(state)) return;
    __shared__ uint64_t keys[33];
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
    key = block_max(key, keys);
    const bool real = row_slot[r] >= 0, sound = real && bounds[r].y >= 0.f && key != BROKEN && key != 0;
    const int output = sound ? ranked_id(key) : 0;
    float found = 0.f;
#pragma unroll 2
    for (int i = begin; i < inputs; i += SCREEN_THREADS * 8) found = add_product(found, load4(row + i), load4(w + (int64_t)output * inputs + i));
    found = block_sum(found, sums);
    if (threadIdx.x) return;
    const bool bounded = sound && found < INFINITY_F;
    best[r] = bounded ? 0 : BROKEN;
    bounds[r].x = bounded ? found * bounds[r].w : UNREACHED;
}

#ifdef TOKENS
// Blocks share the pairs; a thread looks at eight scores at a time, of the same tokens always. What reaches its row's bound is noted,
// and computed by a warp each behind the last sweep; a block that has noted too many gives up. The last block to end hands out the tokens,
// or says that the head is to be read whole.
extern "C" __global__ void __launch_bounds__(SCREEN_THREADS, 2)
screen_choose(const uint16_t* pairs, const float2* slacks, const act_t* x, const act_t* w, const int* row_slot, choice_t* choices, uint64_t* best, const float4* bounds,
              ScreenState* state, int* tickets, int n, int outputs, int inputs) {
    enter();
    __shared__ unsigned noted[MOST_NOTED];  // pair, token
    __shared__ int num_noted;
    __shared__ bool ends;
    const int lane = threadIdx.x & 31, place = threadIdx.x * 8 % TOKENS;
    const bool skipped = is_skipped(state);
    float wanted[8], length[8], off[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int token = token_at(place + i, TOKENS);
        const bool real = token < n && row_slot[token] >= 0;
        wanted[i] = real ? bounds[token].x : UNREACHED, length[i] = real ? bounds[token].y : 0.f, off[i] = real ? bounds[token].z : 0.f;
    }
    constexpr int SWEEP = SCREEN_THREADS * 8 / TOKENS;  // pairs
    const int count = skipped ? 0 : (outputs + 15) / 16 * 8, stride = gridDim.x * SWEEP;
    vec4 next[AT_ONCE];
    float2 next_slack[AT_ONCE];
    auto fetch = [&](int from) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int pair = max(min(from + k * stride + int(threadIdx.x) * 8 / TOKENS, count - 1), 0), output = pair / 8 * 16 + pair % 8;
            next[k] = load4(pairs + (int64_t)pair * TOKENS + place);
            const float2 a = slacks[min(output, outputs - 1)], b = slacks[min(output + 8, outputs - 1)];
            next_slack[k] = make_float2(fmaxf(a.x, b.x), fmaxf(a.y, b.y));
        }
    };
    int from = blockIdx.x * SWEEP;
    fetch(from);
    if (threadIdx.x == 0) num_noted = 0;
    __syncthreads();
    for (; from < count && *(volatile int*)&num_noted <= MOST_NOTED; from += stride * AT_ONCE) {
        vec4 scores[AT_ONCE];
        float2 slack[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) scores[k] = next[k], slack[k] = next_slack[k];
        fetch(from + stride * AT_ONCE);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int pair = from + k * stride + threadIdx.x * 8 / TOKENS;
            const unsigned words[4] = {scores[k].x, scores[k].y, scores[k].z, scores[k].w};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float score = __uint_as_float(i & 1 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
                if (pair < count && score + fabsf(score) * STORED + slack[k].x * length[i] + slack[k].y * off[i] >= wanted[i]) {
                    const int at = atomicAdd(&num_noted, 1);
                    if (at < MOST_NOTED) noted[at] = pair << 8 | token_at(place + i, TOKENS);
                }
            }
        }
    }
    __syncthreads();
    const int found = num_noted;
    if (found > MOST_NOTED) {
        if (threadIdx.x == 0) state->given_up = 1;
    } else {
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
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ends = atomicAdd(tickets, 1) + 1 == (int)gridDim.x;
    __syncthreads();
    if (!ends) return;
    __threadfence();
    const bool whole = skipped || __ldcg(&state->given_up) != 0;
    for (int r = threadIdx.x; r < n && !whole; r += SCREEN_THREADS) choices[r] = choice_of(row_slot[r] >= 0, __ldcg(best + r));
    __syncthreads();
    if (threadIdx.x) return;
    const int wait = skipped ? state->wait : whole ? longer_wait(state->wait) : shorter_wait(state->wait);
    *state = {skipped ? state->skips - 1 : whole ? wait : 0, wait, 0, whole};
    *tickets = 0;
}
#endif
