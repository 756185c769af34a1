// The bulk copy engine and its barriers (sm_90): boxes of a matrix into shared memory, in 128-byte swizzled rows.
#pragma once
#include "tensor.cuh"

struct alignas(64) Map { uint64_t words[16]; };
__device__ __forceinline__ void barrier_init(unsigned b, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(count) : "memory"); }
__device__ __forceinline__ void barrier_expect(unsigned b, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory"); }
__device__ __forceinline__ void barrier_arrive(unsigned b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void barrier_wait(unsigned b, int parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(b), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void load_box(unsigned target, const Map* map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(target), "l"(map),
                 "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}
// Rows of gate and up in turn, 8 of each: [inputs, 8 rows, gate or up, eights of rows].
__device__ __forceinline__ void load_pairs(unsigned target, const Map* map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];" ::"r"(target), "l"(map),
                 "r"(column), "r"(0), "r"(row / 16), "r"(barrier)
                 : "memory");
}
// K-major operand in 128-byte swizzled rows, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(unsigned address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
