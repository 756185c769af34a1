// Building blocks of the numeric kernels: dependent launch, vector loads, asynchronous copies, tensor-core products.
//
// Everything here is inline PTX over plain registers, so that no header of the toolkit is needed at run time. `common.cuh` gives
// the activation type; nothing in here knows a contract.
#pragma once
#include "common.cuh"

struct alignas(16) vec4 { unsigned x, y, z, w; };
struct alignas(8) vec2 { unsigned x, y; };
struct alignas(16) float4v { float x, y, z, w; };

// -- dependent launch: start early, prefetch what no earlier kernel writes, then wait -----------------
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Every thread of every kernel that may be launched as dependent calls this before it touches anything but weights.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void begin_dependent() {
    launch_dependents();
    wait_for_previous();
}

// -- memory -------------------------------------------------------------------------------------------
// 16 bytes that are read once: past the first cache, with the neighbours into the second.
__device__ __forceinline__ vec4 load_stream(const void* p) {
    vec4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ vec4 load4(const void* p) {
    vec4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_async(unsigned target, const void* source, bool real) {
    const int bytes = real ? 16 : 0;  // zeros where nothing is read
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ vec4 load_shared(unsigned a) {
    vec4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
    return v;
}
template <int LEFT>
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// An element that turns with another, `by` its cosine and sine; rounded in one way, whoever turns it.
__device__ __forceinline__ float rotated(float x, float other, float cosine, float sine) { return __fmaf_rn(x, cosine, __fmul_rn(other, sine)); }

// -- 16-bit pairs -------------------------------------------------------------------------------------
#if ACT != 0
__device__ __forceinline__ float low(unsigned pair) {
#if ACT == 1
    return __uint_as_float(pair << 16);
#else
    float f;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(pair));
    return f;
#endif
}
__device__ __forceinline__ float high(unsigned pair) {
#if ACT == 1
    return __uint_as_float(pair & 0xffff0000u);
#else
    float f;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(pair));
    return f;
#endif
}
__device__ __forceinline__ unsigned pack(float lo, float hi) {
    unsigned r;
#if ACT == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#endif
    return r;
}

// c[16 x 8] += a[16 x 16] b[16 x 8], float32 sums
__device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#if ACT == 1
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#if ACT != 0
// silu(gate) * up of two sums that are rounded as if they were stored, with or without a launch between. The parts of 1e-6 that it is off are lost in the rounding behind.
__device__ __forceinline__ float gated(float gate, float up) {
    gate = to_float(from_float<act_t>(gate)), up = to_float(from_float<act_t>(up));
    const float e = exp2_fast(fabsf(gate) * -1.4426950408889634f);  // never beyond 1
    return __fdividef(gate >= 0.f ? gate : gate * e, 1.f + e) * up;
}
#endif
