// Staged runs of words into slot columns: contract scatter.
#include "common.cuh"

struct Column {
    int* data;
    int64_t width;  // words of a slot
};

// A block a run (column, slot, start, count, offset into the payload).
extern "C" __global__ void scatter(const int* runs, const int* payload, const Column* columns) {
    enter();
    const int* run = runs + 5 * int64_t(blockIdx.x);
    if (run[1] < 0) return;
    const Column column = columns[run[0]];
    int* to = column.data + run[1] * column.width + run[2];
    const int* from = payload + run[4];
    for (int i = threadIdx.x; i < run[3]; i += blockDim.x) to[i] = from[i];
}
