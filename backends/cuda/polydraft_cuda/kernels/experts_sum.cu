// The end of a layer with experts: the last sum of `experts.cu`, rounded, added to the stream, and the norm of that where a norm follows.
// A block a row, eight neighbours a thread.
//
// The launch in front is the second product of the experts, which lets this one come only once it has seen what was before it: all but
// the terms is read while it runs.
//
// Defines: ACT (1, 2), THREADS, CHOSEN (experts of a row), SHARED (there are shared experts), NORM (one follows), PLUS_ONE (as in norms.cu).
#include "tensor.cuh"

struct alignas(16) Eight { act_t e[8]; };

__device__ __forceinline__ Eight load_eight(const act_t* p) {
    const float4 bits = __ldcg((const float4*)p);
    return *(const Eight*)&bits;
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_and_add(const float* terms, const int* ids, const float* weights, const act_t* shared, act_t* x, const act_t* gain,
                                        act_t* out, int width, float eps) {
    __shared__ float scratch[32];
    launch_dependents();
    const int64_t r = blockIdx.x;
    const int i = threadIdx.x * 8, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const bool real = i < width;
    Eight gains{}, stream{}, more{};
    float by[CHOSEN];
    bool is_chosen[CHOSEN];
#pragma unroll
    for (int j = 0; j < CHOSEN; j++) by[j] = __ldcg(weights + r * CHOSEN + j), is_chosen[j] = __ldcg(ids + r * CHOSEN + j) >= 0;
    if (real) {
        if (NORM) gains = *(const Eight*)(gain + i);
        stream = load_eight(x + r * width + i);
        if (SHARED) more = load_eight(shared + r * width + i);
    }
    wait_for_previous();
    float sums[8] = {}, squares = 0.f;
    if (real) {
        float4 low[CHOSEN], high[CHOSEN];
#pragma unroll
        for (int j = 0; j < CHOSEN; j++) {  // what stands in the place of no expert is read and left
            const float4* from = (const float4*)(terms + (r * CHOSEN + j) * width + i);
            low[j] = __ldcg(from), high[j] = __ldcg(from + 1);
        }
#pragma unroll
        for (int j = 0; j < CHOSEN; j++) {
            if (!is_chosen[j]) continue;
            const float term[8] = {low[j].x, low[j].y, low[j].z, low[j].w, high[j].x, high[j].y, high[j].z, high[j].w};
#pragma unroll
            for (int k = 0; k < 8; k++) sums[k] = fmaf(by[j], term[k], sums[k]);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float branch = to_float(from_float<act_t>(SHARED ? sums[k] + to_float(more.e[k]) : sums[k]));
            stream.e[k] = from_float<act_t>(to_float(stream.e[k]) + branch);
            sums[k] = to_float(stream.e[k]);
            squares += sums[k] * sums[k];
        }
        *(Eight*)(x + r * width + i) = stream;
    }
    if (!NORM) return;
    squares = warp_sum(squares);
    if (lane == 0) scratch[warp] = squares;
    __syncthreads();
    const float factor = 1.f / sqrtf(warp_sum(lane < warps ? scratch[lane] : 0.f) / width + eps);
    if (!real) return;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float by_gain = PLUS_ONE ? 1.f + to_float(gains.e[k]) : to_float(gains.e[k]);
        stream.e[k] = from_float<act_t>(sums[k] * factor * by_gain);
    }
    *(Eight*)(out + r * width + i) = stream;
}
