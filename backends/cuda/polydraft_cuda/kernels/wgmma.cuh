// One warp-group product: sums[64 x WIDTH] += a[64 x 16] b[WIDTH x 16].T, operands in shared memory, K-major (sm_90a).
//
// WIDTH, defined before this file is included, is a multiple of 8 up to 256. The instruction names all its registers: the descriptors
// come first, so that what follows can be put together from eights of columns. With REGISTERS the first operand lies in registers, as
// that of `mma` does in each of the four warps; then WIDTH is a power of two. With BYTES operands are E4M3 and 32 wide, and sums are only as
// exact as such products are summed on this architecture, to some 13 places: whoever asks adds those of few products in float32.
#pragma once
#include "common.cuh"

template <int N>
__device__ __forceinline__ void accumulators_fence(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

#ifdef BYTES
#define WGMMA_TYPES "k32.f32.e4m3.e4m3"
#define WGMMA_FLAGS "p, 1, 1"
#elif ACT == 1
#define WGMMA_TYPES "k16.f32.bf16.bf16"
#define WGMMA_FLAGS "p, 1, 1, 0, 0"
#else
#define WGMMA_TYPES "k16.f32.f16.f16"
#define WGMMA_FLAGS "p, 1, 1, 0, 0"
#endif

#define WGMMA_FOUR(i) "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3])
#define WGMMA_NAMES_8 "%2, %3, %4, %5"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %6, %7, %8, %9"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %10, %11, %12, %13"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", %14, %15, %16, %17"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %18, %19, %20, %21"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %22, %23, %24, %25"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %26, %27, %28, %29"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %30, %31, %32, %33"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %34, %35, %36, %37"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %38, %39, %40, %41"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %42, %43, %44, %45"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %46, %47, %48, %49"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", %50, %51, %52, %53"
#define WGMMA_NAMES_112 WGMMA_NAMES_104 ", %54, %55, %56, %57"
#define WGMMA_NAMES_120 WGMMA_NAMES_112 ", %58, %59, %60, %61"
#define WGMMA_NAMES_128 WGMMA_NAMES_120 ", %62, %63, %64, %65"
#define WGMMA_NAMES_136 WGMMA_NAMES_128 ", %66, %67, %68, %69"
#define WGMMA_NAMES_144 WGMMA_NAMES_136 ", %70, %71, %72, %73"
#define WGMMA_NAMES_152 WGMMA_NAMES_144 ", %74, %75, %76, %77"
#define WGMMA_NAMES_160 WGMMA_NAMES_152 ", %78, %79, %80, %81"
#define WGMMA_NAMES_168 WGMMA_NAMES_160 ", %82, %83, %84, %85"
#define WGMMA_NAMES_176 WGMMA_NAMES_168 ", %86, %87, %88, %89"
#define WGMMA_NAMES_184 WGMMA_NAMES_176 ", %90, %91, %92, %93"
#define WGMMA_NAMES_192 WGMMA_NAMES_184 ", %94, %95, %96, %97"
#define WGMMA_NAMES_200 WGMMA_NAMES_192 ", %98, %99, %100, %101"
#define WGMMA_NAMES_208 WGMMA_NAMES_200 ", %102, %103, %104, %105"
#define WGMMA_NAMES_216 WGMMA_NAMES_208 ", %106, %107, %108, %109"
#define WGMMA_NAMES_224 WGMMA_NAMES_216 ", %110, %111, %112, %113"
#define WGMMA_NAMES_232 WGMMA_NAMES_224 ", %114, %115, %116, %117"
#define WGMMA_NAMES_240 WGMMA_NAMES_232 ", %118, %119, %120, %121"
#define WGMMA_NAMES_248 WGMMA_NAMES_240 ", %122, %123, %124, %125"
#define WGMMA_NAMES_256 WGMMA_NAMES_248 ", %126, %127, %128, %129"
#define WGMMA_SUMS_8 WGMMA_FOUR(0)
#define WGMMA_SUMS_16 WGMMA_SUMS_8, WGMMA_FOUR(4)
#define WGMMA_SUMS_24 WGMMA_SUMS_16, WGMMA_FOUR(8)
#define WGMMA_SUMS_32 WGMMA_SUMS_24, WGMMA_FOUR(12)
#define WGMMA_SUMS_40 WGMMA_SUMS_32, WGMMA_FOUR(16)
#define WGMMA_SUMS_48 WGMMA_SUMS_40, WGMMA_FOUR(20)
#define WGMMA_SUMS_56 WGMMA_SUMS_48, WGMMA_FOUR(24)
#define WGMMA_SUMS_64 WGMMA_SUMS_56, WGMMA_FOUR(28)
#define WGMMA_SUMS_72 WGMMA_SUMS_64, WGMMA_FOUR(32)
#define WGMMA_SUMS_80 WGMMA_SUMS_72, WGMMA_FOUR(36)
#define WGMMA_SUMS_88 WGMMA_SUMS_80, WGMMA_FOUR(40)
#define WGMMA_SUMS_96 WGMMA_SUMS_88, WGMMA_FOUR(44)
#define WGMMA_SUMS_104 WGMMA_SUMS_96, WGMMA_FOUR(48)
#define WGMMA_SUMS_112 WGMMA_SUMS_104, WGMMA_FOUR(52)
#define WGMMA_SUMS_120 WGMMA_SUMS_112, WGMMA_FOUR(56)
#define WGMMA_SUMS_128 WGMMA_SUMS_120, WGMMA_FOUR(60)
#define WGMMA_SUMS_136 WGMMA_SUMS_128, WGMMA_FOUR(64)
#define WGMMA_SUMS_144 WGMMA_SUMS_136, WGMMA_FOUR(68)
#define WGMMA_SUMS_152 WGMMA_SUMS_144, WGMMA_FOUR(72)
#define WGMMA_SUMS_160 WGMMA_SUMS_152, WGMMA_FOUR(76)
#define WGMMA_SUMS_168 WGMMA_SUMS_160, WGMMA_FOUR(80)
#define WGMMA_SUMS_176 WGMMA_SUMS_168, WGMMA_FOUR(84)
#define WGMMA_SUMS_184 WGMMA_SUMS_176, WGMMA_FOUR(88)
#define WGMMA_SUMS_192 WGMMA_SUMS_184, WGMMA_FOUR(92)
#define WGMMA_SUMS_200 WGMMA_SUMS_192, WGMMA_FOUR(96)
#define WGMMA_SUMS_208 WGMMA_SUMS_200, WGMMA_FOUR(100)
#define WGMMA_SUMS_216 WGMMA_SUMS_208, WGMMA_FOUR(104)
#define WGMMA_SUMS_224 WGMMA_SUMS_216, WGMMA_FOUR(108)
#define WGMMA_SUMS_232 WGMMA_SUMS_224, WGMMA_FOUR(112)
#define WGMMA_SUMS_240 WGMMA_SUMS_232, WGMMA_FOUR(116)
#define WGMMA_SUMS_248 WGMMA_SUMS_240, WGMMA_FOUR(120)
#define WGMMA_SUMS_256 WGMMA_SUMS_248, WGMMA_FOUR(124)
#define WGMMA_JOIN_(a, b) a##b
#define WGMMA_JOIN(a, b) WGMMA_JOIN_(a, b)
#define WGMMA_TEXT_(a) #a
#define WGMMA_TEXT(a) WGMMA_TEXT_(a)

__device__ __forceinline__ void wgmma(float (&r)[WIDTH / 2], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n" WGMMA_TEXT(WIDTH) WGMMA_TYPES " {" WGMMA_JOIN(WGMMA_NAMES_, WIDTH) "}, %0, %1, " WGMMA_FLAGS ";\n}"
        : "+l"(a), "+l"(b), WGMMA_JOIN(WGMMA_SUMS_, WIDTH)
        :
        : "memory");
}

#ifdef HALVES  // of 128 columns
// The same, or the product alone where `keeps` is 0: who cannot tell which takes no other registers for it.
__device__ __forceinline__ void wgmma(float (&r)[WIDTH / 2], uint64_t a, uint64_t b, int keeps) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n" WGMMA_TEXT(WIDTH) WGMMA_TYPES " {" WGMMA_JOIN(WGMMA_NAMES_, WIDTH) "}, %0, %1, " WGMMA_FLAGS ";\n}"
        : "+l"(a), "+l"(b), WGMMA_JOIN(WGMMA_SUMS_, WIDTH)
        : "r"(keeps)
        : "memory");
}
#endif

#ifdef REGISTERS  // they are named behind the sums
#define WGMMA_A_8 "%6, %7, %8, %9"
#define WGMMA_A_16 "%10, %11, %12, %13"
#define WGMMA_A_32 "%18, %19, %20, %21"
#define WGMMA_A_64 "%34, %35, %36, %37"
#define WGMMA_A_128 "%66, %67, %68, %69"
#define WGMMA_A_256 "%130, %131, %132, %133"
// `a` is not to be touched before the product has been waited for.
__device__ __forceinline__ void wgmma(float (&r)[WIDTH / 2], const unsigned* a, uint64_t b) {
    uint64_t unused = 0;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n" WGMMA_TEXT(WIDTH) WGMMA_TYPES " {" WGMMA_JOIN(WGMMA_NAMES_, WIDTH) "}, {" WGMMA_JOIN(WGMMA_A_, WIDTH) "}, %0, p, 1, 1, 0;\n}"
        : "+l"(b), "+l"(unused), WGMMA_JOIN(WGMMA_SUMS_, WIDTH)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
        : "memory");
}
#endif

// K-major operand in 128-byte swizzled rows, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(unsigned address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Those since `products_begin` are one group; no more than AHEAD groups are still under way behind it.
template <int AHEAD>
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned %0;" ::"n"(AHEAD) : "memory"); }
// Until no more than AHEAD groups are under way.
template <int AHEAD>
__device__ __forceinline__ void products_wait(float (&sums)[WIDTH / 2]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(AHEAD) : "memory");
    accumulators_fence(sums);
}
// sums += a b.T over a chunk of 64 inputs, both operands in shared memory; as `products_end`.
template <int AHEAD>
__device__ __forceinline__ void multiply_chunk(float (&sums)[WIDTH / 2], unsigned a, unsigned b) {
    accumulators_fence(sums);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma(sums, descriptor(a + k * 32), descriptor(b + k * 32));
    products_end<AHEAD>();
    accumulators_fence(sums);
}
#ifdef REGISTERS
// sums += a b.T over inputs 16 * from to 16 * to of a chunk, `a` in registers: one group, which is to be waited for.
__device__ __forceinline__ void multiply_widened(float (&sums)[WIDTH / 2], const unsigned* a, unsigned b, int from, int to) {
    accumulators_fence(sums);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (k >= from && k < to) wgmma(sums, a + k * 4, descriptor(b + k * 32));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
#endif
