// Tiles of a pass: runs of rows of one slot at consecutive positions, cut to `tile_rows`. One block, of no more warps than there are rows for:
// each looks at what all of them have found.
#include "common.cuh"

__device__ __forceinline__ bool continues(const int* row_slot, const int* positions, int row, int n) {
    return row > 0 && row < n && row_slot[row] >= 0 && row_slot[row - 1] == row_slot[row] && positions[row] == positions[row - 1] + 1;
}

extern "C" __global__ void __launch_bounds__(1024) fill_tiles(
    const int* row_slot, const int* positions, int4* tiles, int* num_tiles,
    int tile_rows, int n
) {
    enter();
    __shared__ int scratch[33], newest[32];
    const int warps = blockDim.x / 32;
    int found = 0, run = 0;  // tiles before this chunk; first row of the run that reaches into it
    for (int base = 0; base < n; base += blockDim.x) {
        const int row = base + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const bool valid = row < n && row_slot[row] >= 0;
        const bool begins = valid && !continues(row_slot, positions, row, n);
        // First row of the run of each row: the newest beginning at or before it.
        int first = begins ? row : -1;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const int other = __shfl_up_sync(FULL, first, d);
            if (lane >= d) first = max(first, other);
        }
        __syncthreads();
        if (lane == 31) newest[warp] = first;
        __syncthreads();
        for (int w = 0; w < warp; w++) first = max(first, newest[w]);
        first = max(first, run);
        const bool opens = valid && (row - first) % tile_rows == 0;
        int total;
        const int place = found + block_scan(opens ? 1 : 0, scratch, total) - 1;
        if (opens) {
            int rows = 1;
            while (rows < tile_rows && continues(row_slot, positions, row + rows, n)) rows++;
            tiles[place] = make_int4(row, rows, row_slot[row], positions[row]);
        }
        found += total;
        for (int w = 0; w < warps; w++) run = max(run, newest[w]);
        __syncthreads();
    }
    if (threadIdx.x == 0) *num_tiles = found;
}
