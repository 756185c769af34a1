// RMS norm of a row that a block keeps in registers, VECTORS vectors of 16 bytes a thread. Statistics are float32.
//
// Whoever norms rows of one width has as many threads and vectors (`shape_of` of norms.py), so that sums are the same to the bit.
// Defines: ACT; VECTORS (0: rows are not kept), PLUS_ONE.
#pragma once
#include "tensor.cuh"

#ifdef ACT
constexpr int LANES = 16 / sizeof(act_t);
struct alignas(16) Vector { act_t e[LANES]; };
template <typename Bits> __device__ __forceinline__ Vector vector_of(const Bits& bits) { return *reinterpret_cast<const Vector*>(&bits); }
__device__ __forceinline__ uint4 bits_of(const Vector& vector) { return *reinterpret_cast<const uint4*>(&vector); }
#endif

#ifdef VECTORS
__device__ __forceinline__ float gain(act_t weight) { return PLUS_ONE ? 1.f + to_float(weight) : to_float(weight); }

// Sum over the block, for every thread: each warp adds up what all warps have found. `scratch`: 32 floats, used once.
__device__ __forceinline__ float total(float x, float* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    x = warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.f);
}

#if VECTORS
// The first element of a thread's vector `v`. Those at `width` and behind it are nobody's.
__device__ __forceinline__ int element_of(int v) { return (v * blockDim.x + threadIdx.x) * LANES; }

__device__ __forceinline__ void load_row(Vector (&kept)[VECTORS], const act_t* row, int width) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = element_of(v);
        if (at >= width) continue;
        const float4 bits = __ldcg((const float4*)(row + at));
        kept[v] = vector_of(bits);
    }
}

__device__ __forceinline__ void load_gains(Vector (&gains)[VECTORS], const act_t* weight, int width) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = element_of(v);
        if (at < width) gains[v] = *(const Vector*)(weight + at);
    }
}

// kept + more, rounded, in `kept` and in x.
__device__ __forceinline__ void add_row(Vector (&kept)[VECTORS], const Vector (&more)[VECTORS], act_t* x, int width) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = element_of(v);
        if (at >= width) continue;
#pragma unroll
        for (int i = 0; i < LANES; i++) kept[v].e[i] = from_float<act_t>(to_float(kept[v].e[i]) + to_float(more[v].e[i]));
        *(Vector*)(x + at) = kept[v];
    }
}

// What is kept becomes its norm.
__device__ __forceinline__ void norm_kept(Vector (&kept)[VECTORS], const Vector (&gains)[VECTORS], int width, float eps, float* scratch) {
    float squares = 0.f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (element_of(v) >= width) continue;
#pragma unroll
        for (int i = 0; i < LANES; i++) squares += to_float(kept[v].e[i]) * to_float(kept[v].e[i]);
    }
    const float factor = 1.f / sqrtf(total(squares, scratch) / width + eps);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const int at = element_of(v);
        if (at >= width) continue;
#pragma unroll
        for (int i = 0; i < LANES; i++) kept[v].e[i] = from_float<act_t>(to_float(kept[v].e[i]) * factor * gain(gains[v].e[i]));
    }
}
// The same, and to `out`.
__device__ __forceinline__ void store_norm(Vector (&kept)[VECTORS], const Vector (&gains)[VECTORS], act_t* out, int width, float eps, float* scratch) {
    norm_kept(kept, gains, width, eps, scratch);
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (element_of(v) < width) *(Vector*)(out + element_of(v)) = kept[v];
}
#endif
#endif
