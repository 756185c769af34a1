// out[n, O] = x[n, I] @ w[O, I].T (+ bias) for any shape and dtype, float32 sums without tensor cores: one warp an output, eight rows
// at a time. The lanes' shares and their sum have a fixed order, so a row's bits are the same in every launch. Leaves of a sum (gridDim.z) as in
// linear_split.cu.
// Defines: ACT, OUT_F32, BIAS, NUMBER (0: weights in the activation dtype; as in packed.cuh: row by row), GROUP (inputs of a scale, 0: all
// of them), BLOCK (outputs of a scale), ZEROS (zero points), ROUNDED (x is numbers of which `row_scales` are the scales, as of GROUP).
#include "tensor.cuh"
#if NUMBER
#include "packed.cuh"
#endif

#if OUT_F32
typedef float out_t;
#else
typedef act_t out_t;
#endif

#if NUMBER
typedef unsigned char number_t;
#else
typedef act_t number_t;
#endif

extern "C" __global__ void linear_plain(const act_t* x, const number_t* w, const act_t* bias, out_t* out, const float* scales, const unsigned char* zeros,
                                        const float* row_scales, int row_pitch, int n, int outputs, int inputs) {
    wait_for_previous();
    launch_dependents();  // not before: who follows may rely on what lies two launches back
    const int lane = threadIdx.x & 31, o = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), leaf = blockIdx.z;
    const int64_t x_pitch = (int64_t)gridDim.z * inputs, pitch = (int64_t)gridDim.z * outputs;
    if (o >= outputs) return;
    x += (int64_t)leaf * inputs, out += (int64_t)leaf * outputs;
#if NUMBER
    const number_t* weights = w + (int64_t)o * (NUMBER == INT4 ? (inputs + 1) / 2 : inputs);
    const int64_t places = first_place(0, o, outputs, inputs);
#else
    const number_t* weights = w + ((int64_t)leaf * outputs + o) * inputs;
#endif
    const float add = BIAS && !leaf ? to_float(bias[o]) : 0.f;
    for (int first = blockIdx.y * 8; first < n; first += gridDim.y * 8) {
        const int count = min(8, n - first);
        float sums[8] = {};
        for (int i = lane; i < inputs; i += 32) {
#if NUMBER
            const int group = i / SPAN;
            const float weight = number_in_row(weights, i, ZEROS ? zeros[places + group] : 8) * scales[places + group];
#else
            constexpr int group = 0;
            const float weight = to_float(weights[i]);
#endif
#pragma unroll
            for (int r = 0; r < 8; r++) {
                if (r >= count) continue;
                const float value = to_float(x[(first + r) * x_pitch + i]);
                sums[r] += weight * (ROUNDED ? value * row_scales[(int64_t)group * row_pitch + first + r] : value);
            }
        }
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const float sum = warp_sum(sums[r]);
            if (lane == 0 && r < count) out[(first + r) * pitch + o] = from_float<out_t>(sum + add);
        }
    }
}
