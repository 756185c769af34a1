// Mixture of experts, the small launches: lists of each expert's rows, and the last sum; and the two products of an expert for what
// neither `experts_tile.cu` nor `experts_stream.cu` takes (float32, odd sizes, packed weights before sm_90).
//
// A *place* is one choice of one row: row * chosen + number of the choice. Places of one expert lie together in `list`, in
// ascending order, which depends on the ids alone.
//
// Defines: ACT, and for one kernel each GATED (the first product), NUMBER (0: weights in the activation type; as in packed.cuh), GROUP and
// BLOCK (as there), PIECES (numbers lie as pieces, not row by row), ZEROS (zero points), ROUNDED (x is numbers of which `row_scales` are the
// scales, as of GROUP).
#include "tensor.cuh"

// -- lists: a block an expert counts the places of lower experts and lists its own. Where somebody wants their rows of x in that order
// (`sorted` is not null), several blocks do so, and each gathers some of the rows, a warp a row, and of rows that were rounded the
// `groups` scales [groups, pitch] ----------------------------------------------------------------------------------------
constexpr int LIST_THREADS = 512, HELD = 512, AT_ONCE = 8;  // places that a block remembers by itself; vectors of a lane in flight

extern "C" __global__ void list_experts(const int* ids, int* begins, int* list, const vec4* x, vec4* sorted, const float* scales, float* sorted_scales,
                                        int pitch, int sorted_pitch, int groups, int n, int chosen, int pieces) {
    constexpr int WARPS = LIST_THREADS / 32;
    __shared__ int lower[WARPS], mine[WARPS], held[HELD];
    begin_dependent();
    const int expert = blockIdx.x, places = n * chosen, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int each = (places + LIST_THREADS - 1) / LIST_THREADS * 32, first = warp * each, last = min(first + each, places);  // places of a warp
    int before = 0, count = 0;
#pragma unroll 4
    for (int p = first + lane; p - lane < last; p += 32) {
        const int id = p < last ? ids[p] : -1;
        before += id >= 0 && id < expert;
        count += __popc(__ballot_sync(FULL, id == expert));
    }
    before = warp_sum(before);
    if (lane == 0) lower[warp] = before, mine[warp] = count;
    __syncthreads();
    int own = 0, begin = 0, end = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) own += lower[w], begin += w < warp ? mine[w] : 0, end += mine[w];
    begin += own, end += own;
    if (threadIdx.x == 0) {
        begins[expert] = own;
        if (expert == gridDim.x - 1) begins[expert + 1] = end;
    }
#pragma unroll 4
    for (int p = first + lane; p - lane < last; p += 32) {
        const bool is_mine = p < last && ids[p] == expert;
        const unsigned all = __ballot_sync(FULL, is_mine);
        if (is_mine) {
            const int place = begin + __popc(all & ((1u << lane) - 1));
            list[place] = p;
            if (place - own < HELD) held[place - own] = p;
        }
        begin += __popc(all);
    }
    if (sorted == nullptr) return;
    __syncthreads();
    for (int r = blockIdx.y * WARPS + warp; r < end - own; r += gridDim.y * WARPS) {
        const int place = r < HELD ? held[r] : list[own + r];
        const vec4* from = x + (int64_t)(place / chosen) * pieces;
        vec4 *to = sorted + (int64_t)(own + r) * pieces, v[AT_ONCE];
        for (int i = lane; i < pieces; i += AT_ONCE * 32) {
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (i + j * 32 < pieces) v[j] = load4(from + i + j * 32);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (i + j * 32 < pieces) to[i + j * 32] = v[j];
        }
        for (int g = lane; g < groups; g += 32) sorted_scales[(int64_t)g * sorted_pitch + own + r] = scales[(int64_t)g * pitch + place / chosen];
    }
}

// -- the last sum: terms of a row in the order of its choices, then the shared experts ----------------------------------
// A row has `width` sums. Of the first `hidden` of them, of the next and so on only experts of one run of `of_leaf` have terms, which is 0
// where the terms of every expert are as wide as the row.
constexpr int BATCH = 8;  // terms that are read at once

extern "C" __global__ void sum_experts(const float* terms, const int* ids, const float* weights, const act_t* shared, const float* gate,
                                       act_t* out, int chosen, int hidden, int width, int of_leaf) {
    begin_dependent();
    const int64_t r = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    const int leaf = i / hidden, at = i - leaf * hidden;
    const float s = shared ? to_float(shared[r * width + i]) : 0.f;
    float sum = 0.f;
    for (int first = 0; first < chosen; first += BATCH) {
        float term[BATCH], by[BATCH];
        bool real[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {  // what stands in the place of no expert is read and left
            const int64_t place = r * chosen + min(first + j, chosen - 1);
            const int expert = ids[place];
            real[j] = first + j < chosen && expert >= 0 && (!of_leaf || expert / of_leaf == leaf);
            by[j] = weights[place], term[j] = terms[place * hidden + at];
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (real[j]) sum = fmaf(by[j], term[j], sum);
    }
    if (shared) sum += gate ? s / (1.f + expf(-gate[r])) : s;
    out[r * width + i] = from_float<act_t>(sum);
}

// -- any size: a warp one output of one place ---------------------------------------------------------------------------
// GATED: h[place, I] = silu(gate) * up of x's row; else terms[place, H] of h's row. Leaves (gridDim.z, else 1) are as many products: an
// expert has a matrix for each, h their inputs and terms their outputs side by side.
#ifdef GATED
#if NUMBER
#include "packed.cuh"
typedef unsigned char number_t;
#else
typedef act_t number_t;
#endif
#if GATED
typedef act_t to_t;
#else
typedef float to_t;
#endif
extern "C" __global__ void expert_plain(const act_t* x, const number_t* w, const int* ids, to_t* out, const float* scales, const unsigned char* zeros,
                                        const float* row_scales, int row_pitch, int chosen, int outputs, int inputs) {
    begin_dependent();
    const int lane = threadIdx.x & 31, o = blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const int64_t place = blockIdx.x, expert = ids[place], leaf = blockIdx.z, leaves = gridDim.z;
    if (o >= outputs || expert < 0) return;
    const int64_t from = GATED ? place / chosen : place, matrix = expert * leaves + leaf;
    const int height = outputs * (GATED ? 2 : 1);
    const act_t* row = x + (from * leaves + leaf) * inputs;
    auto weight = [&](int output, int i) {
        const int64_t at = matrix * height + output;
#if NUMBER
        const int64_t place = first_place(matrix, output, height, inputs) + i / SPAN;
        const int zero = ZEROS ? zeros[place] : 8;
        return scales[place] * (PIECES ? number_in_pieces(w, at, i, inputs, zero) : number_in_row(w + at * (NUMBER == INT4 ? (inputs + 1) / 2 : inputs), i, zero));
#else
        return to_float(w[at * inputs + i]);
#endif
    };
    float a = 0.f, b = 0.f;
    for (int i = lane; i < inputs; i += 32) {
        float v = to_float(row[i]);
#if NUMBER
        if (ROUNDED) v *= row_scales[(int64_t)(i / SPAN) * row_pitch + from];
#endif
        a = fmaf(weight(o, i), v, a);
        if (GATED) b = fmaf(weight(outputs + o, i), v, b);
    }
    a = warp_sum(a), b = warp_sum(b);
    if (lane == 0) out[(place * leaves + leaf) * outputs + o] = from_float<to_t>(GATED ? a / (1.f + expf(-a)) * b : a);
}
#endif
