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
// The same box for the blocks of a cluster that `whom` has a bit for.
__device__ __forceinline__ void load_shared_box(unsigned target, const Map* map, int column, int row, unsigned barrier, int whom) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target), "l"(map),
        "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)whom)
        : "memory");
}
// A stretch of memory.
__device__ __forceinline__ void load_stretch(unsigned target, const void* source, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target), "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}
// A stretch of memory into the second cache.
__device__ __forceinline__ void prefetch_stretch(const void* source, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}
// Rows of gate and up in turn, 8 of each: [inputs, 8 rows, gate or up, eights of rows].
__device__ __forceinline__ void load_pairs(unsigned target, const Map* map, int column, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];" ::"r"(target), "l"(map),
                 "r"(column), "r"(0), "r"(row / 16), "r"(barrier)
                 : "memory");
}
// Several chunks of 64 inputs at once, one behind the other; of rows, or of rows of gate and up in turn from turn `turn` on.
__device__ __forceinline__ void load_chunks(unsigned target, const Map* map, int row, int chunk, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target), "l"(map),
                 "r"(0), "r"(row), "r"(chunk), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void load_pair_chunks(unsigned target, const Map* map, int turn, int chunk, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %2, %3, %4}], [%5];" ::"r"(target), "l"(map),
                 "r"(0), "r"(turn), "r"(chunk), "r"(barrier)
                 : "memory");
}
// -- clusters of two blocks ---------------------------------------------------------------------------
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// What was read before is not written again before; nothing is published (a fence of the device here would take longer than a chunk).
__device__ __forceinline__ void barrier_arrive_at(unsigned b, int rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(b), "r"(rank) : "memory");
}
// The warp that fetches: fills a ring of stages, `count` times in all, in a cluster of BLOCKS. The first ones get their weights before
// the launch ahead has ended and their rows of x behind it, the others as they are given back. With BESIDE rows of x are there as well,
// and the caller waits for the launch ahead in the end. All 32 threads come here, one fetches.
template <int RING, int BLOCKS, bool BESIDE = false, class Weights, class Rows>
__device__ __forceinline__ void fetch_stages(bool fetches, int count, uint64_t* empty, const Weights& weights,
                                             const Rows& rows) {
    const int early = min(RING, count);
    if (fetches)
        for (int i = 0; i < early; i++) weights(i, i);  // they depend on nobody
    if (BLOCKS > 1) {
        __syncwarp();
        cluster_wait();
    }
    if (!BESIDE) wait_for_previous();
    launch_dependents();  // not before: who follows may rely on what lies two launches back
    if (fetches) {
        for (int i = 0; i < early; i++) rows(i, i);
        for (int i = RING; i < count; i++) {
            const int s = i % RING;
            barrier_wait(shared_address(&empty[s]), (i / RING - 1) & 1);
            weights(i, s), rows(i, s);
        }
    }
    if (BLOCKS > 1) {
        __syncwarp();
        cluster_arrive_relaxed(), cluster_wait();  // the others may still write here
    }
}
