// Where an element of a cached key or value lies: [2, blocks, heads, block, dim], each block's rows in one of two orders.
//
// Plain: row by row. Tiled (16-bit elements, dim a multiple of 32, blocks of whole groups of 16 rows): each group in the order in
// which the lanes of a warp hold it as the second operand of a tensor-core product, so that a lane reads 16 bytes in a row, and a
// group is one stretch of memory. For keys, elements of a head are permuted within 32, as the queries are when they are loaded.
#pragma once
#include "tensor.cuh"

template <bool TILED_>
__device__ __forceinline__ int key_offset(int row, int d, int dim) {  // row: within the block
    if (!TILED_) return row * dim + d;
    const int k = row & 15;
    return (row >> 4) * 16 * dim + (((k >> 3) * (dim >> 5) + (d >> 5)) * 32 + (k & 7) * 4 + ((d & 31) >> 3)) * 8 + (d & 7);
}

template <bool TILED_>
__device__ __forceinline__ int value_offset(int row, int d, int dim) {
    if (!TILED_) return row * dim + d;
    const int k = row & 15, n = d >> 3;
    return (row >> 4) * 16 * dim + (((n >> 1) * 32 + (d & 7) * 4 + ((k & 7) >> 1)) * 4 + (n & 1) * 2 + (k >> 3)) * 2 + (k & 1);
}
