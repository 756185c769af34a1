// out[n, O] = x[n, I] @ w[O, I].T (+ bias) for any shape and dtype, float32 sums without tensor cores: one warp an output, eight rows
// at a time. The lanes' shares and their sum have a fixed order, so a row's bits are the same in every launch.
// Defines: ACT, OUT_F32, BIAS.
#include "tensor.cuh"

#if OUT_F32
typedef float out_t;
#else
typedef act_t out_t;
#endif

extern "C" __global__ void linear_plain(const act_t* x, const act_t* w, const act_t* bias, out_t* out, int n, int outputs, int inputs) {
    wait_for_previous();
    launch_dependents();  // not before: who follows may rely on what lies two launches back
    const int lane = threadIdx.x & 31, o = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (o >= outputs) return;
    const act_t* weights = w + (int64_t)o * inputs;
    const float add = BIAS ? to_float(bias[o]) : 0.f;
    for (int first = blockIdx.y * 8; first < n; first += gridDim.y * 8) {
        const int count = min(8, n - first);
        float sums[8] = {};
        for (int i = lane; i < inputs; i += 32) {
            const float weight = to_float(weights[i]);
#pragma unroll
            for (int r = 0; r < 8; r++)
                if (r < count) sums[r] += weight * to_float(x[(int64_t)(first + r) * inputs + i]);
        }
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const float sum = warp_sum(sums[r]);
            if (lane == 0 && r < count) out[(int64_t)(first + r) * outputs + o] = from_float<out_t>(sum + add);
        }
    }
}
