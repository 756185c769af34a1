// out [rows, width] := the leaves of each row of x [rows, LEAVES * width], added in float32 in one balanced binary tree: neighbours first,
// the last of an odd number waits. Rounded once.
// Defines: ACT, OUT_F32, LEAVES.
#include "tensor.cuh"

#if OUT_F32
typedef float out_t;
#else
typedef act_t out_t;
#endif

extern "C" __global__ void sum_leaves(const float* x, out_t* out, int width) {
    begin_dependent();
    const int64_t row = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    float terms[LEAVES];
#pragma unroll
    for (int leaf = 0; leaf < LEAVES; leaf++) terms[leaf] = x[(row * LEAVES + leaf) * width + i];
#pragma unroll
    for (int apart = 1; apart < LEAVES; apart *= 2)
#pragma unroll
        for (int leaf = 0; leaf + apart < LEAVES; leaf += 2 * apart) terms[leaf] += terms[leaf + apart];
    out[row * width + i] = from_float<out_t>(terms[0]);
}
