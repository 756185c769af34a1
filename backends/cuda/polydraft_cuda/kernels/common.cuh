// What every kernel shares: dtypes, sentinels of polydraft.sentinels, reductions over a warp and a block.
// Needs no header of the toolkit, so that a kernel compiles in milliseconds.
#pragma once

typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned short uint16_t;
typedef unsigned char uint8_t;

constexpr int PAD_SLOT = -1, NO_TOKEN = -1, NO_BLOCK = -1, NO_ROW = -1;
constexpr int PHASE_IDLE = 0, PHASE_PREFILL = 1, PHASE_DECODE = 2, PHASE_PAUSED = 3, PHASE_FINISHED = 4;
constexpr int FINISH_NONE = 0, FINISH_STOP = 1, FINISH_LENGTH = 2, FINISH_ABORT = 3, FINISH_ERROR = 4;
constexpr unsigned FULL = 0xffffffffu;
#define INFINITY_F __int_as_float(0x7f800000)
// A kernel is on the device while the one before it still writes (`enter`), so that nothing may be read through the read-only
// cache, which `const T* __restrict__` allows: such a load may come early or find an old line. Weights are read so on purpose.
#define __restrict__

// -- dtypes: bits in memory, float in registers ---------------------------------------------------
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {  // ties to even; NaN stays NaN
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

#ifdef ACT
#if ACT == 0
typedef float act_t;
#elif ACT == 1
typedef bf16 act_t;
#else
typedef f16 act_t;
#endif
#endif

// First in every kernel: the next one may be brought onto the device, and this one waits until what was before it is done and
// seen. Without effect in kernels that are not launched as dependent.
__device__ __forceinline__ void enter() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// -- reductions: a fixed order, whatever the launch -----------------------------------------------
template <typename T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(FULL, x, d);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, d));
    return x;
}
// Sum over a block of up to 1024 threads (a multiple of 32); every thread gets it. `scratch`: 33 values of shared memory.
template <typename T> __device__ __forceinline__ T block_sum(T x, T* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    if (warp == 0) {
        T y = lane < warps ? scratch[lane] : T(0);
        y = warp_sum(y);
        if (lane == 0) scratch[32] = y;
    }
    __syncthreads();
    return scratch[32];
}
// Inclusive sum over a block; `total` gets the sum of all. `scratch`: 33 ints of shared memory.
__device__ __forceinline__ int block_scan(int x, int* scratch, int& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const int y = __shfl_up_sync(FULL, x, d);
        if (lane >= d) x += y;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = x;
    __syncthreads();
    if (warp == 0) {
        int y = lane < warps ? scratch[lane] : 0;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const int z = __shfl_up_sync(FULL, y, d);
            if (lane >= d) y += z;
        }
        scratch[lane] = y;
    }
    __syncthreads();
    total = scratch[warps - 1];
    const int before = warp ? scratch[warp - 1] : 0;
    __syncthreads();
    return x + before;
}
