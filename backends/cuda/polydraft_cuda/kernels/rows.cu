// Rows moved bit for bit: embedding lookup, gathering by index, the newest committed row of each drafting sequence.
// Defines: ACT, VECTOR (1: rows are a multiple of 16 bytes).
#include "tensor.cuh"

#if VECTOR
typedef vec4 unit_t;
#else
typedef act_t unit_t;
#endif

// One block a row; `source` negative gives a zero row. `units`: of one row.
__device__ __forceinline__ void move_row(const act_t* from, int64_t source, act_t* to, int64_t target, int units) {
    const unit_t* s = (const unit_t*)from + source * units;
    unit_t* d = (unit_t*)to + target * units;
    for (int i = threadIdx.x; i < units; i += blockDim.x) d[i] = source >= 0 ? s[i] : unit_t{};
}

extern "C" __global__ void gather_rows(const act_t* x, const int* index, act_t* out, int units) {
    begin_dependent();
    move_row(x, index[blockIdx.x], out, blockIdx.x, units);
}

extern "C" __global__ void select_last_rows(const act_t* hidden, const int* positions, const int* seq_start, const int* draft_slot,
                                            const int* draft_position, act_t* out, int units) {
    begin_dependent();
    const int i = blockIdx.x;
    int row = -1;
    if (draft_slot[i] >= 0) row = seq_start[i] + draft_position[i] - positions[seq_start[i]];
    move_row(hidden, row, out, i, units);
}

// Rows that overlap in `pool`, `step` elements apart, and those of a stack `stack_step`, written out one behind the other.
extern "C" __global__ void spread_rows(const act_t* pool, act_t* out, int step, int stack_step, int columns) {
    begin_dependent();
    pool += static_cast<int64_t>(blockIdx.y) * stack_step + static_cast<int64_t>(blockIdx.x) * step;
    out += (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) out[i] = pool[i];
}
