// silu(gate) * up of joint [gate | up] rows.
// Defines: ACT, VECTOR (1: the width is a multiple of a 16-byte vector).
#include "tensor.cuh"

constexpr int LANES = VECTOR ? 16 / sizeof(act_t) : 1;
struct alignas(VECTOR ? 16 : sizeof(act_t)) Vector { act_t e[LANES]; };

#if ACT == 0
__device__ __forceinline__ float gated(float g, float up) { return (g >= 0.f ? g / (1.f + expf(-g)) : g * expf(g) / (1.f + expf(g))) * up; }
#endif

extern "C" __global__ void swiglu(const act_t* gate_up, act_t* out, int width) {
    begin_dependent();
    const int64_t row = blockIdx.x;
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * LANES;
    if (at >= width) return;
    const Vector gate = *(const Vector*)(gate_up + row * 2 * width + at), up = *(const Vector*)(gate_up + row * 2 * width + width + at);
    Vector o;
#pragma unroll
    for (int i = 0; i < LANES; i++) o.e[i] = from_float<act_t>(gated(to_float(gate.e[i]), to_float(up.e[i])));
    *(Vector*)(out + row * width + at) = o;
}
