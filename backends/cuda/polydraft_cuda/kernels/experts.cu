// Mixture of experts, the small launches: the router's product, the choice of experts, lists of each expert's rows, the last sum;
// and the two products of an expert for what `experts_stream.cu` does not take (float32, odd sizes).
//
// A *place* is one choice of one row: row * chosen + number of the choice. Places of one expert lie together in `list`, in
// ascending order, which depends on the ids alone.
//
// Defines: ACT, and for one kernel each OUTPUTS (of a block of the router), UNIFORM (experts are drawn, for benchmarks), GATED (the first
// product).
#include "tensor.cuh"

// -- router: out[n, O] = x[n, I] @ w[O, I].T with float32 weights -----------------------------------------------------
// A block has OUTPUTS outputs (a divisor of O) of eight rows; a sum is made alike whatever their number.
#ifdef OUTPUTS
constexpr int ROUTER_ROWS = 8, ROUTER_THREADS = 128;

extern "C" __global__ void __launch_bounds__(ROUTER_THREADS) router(const act_t* x, const float* w, float* out, int n, int outputs, int inputs) {
    __shared__ float shares[ROUTER_THREADS / 32][OUTPUTS * ROUTER_ROWS];
    begin_dependent();
    const int o = blockIdx.x * OUTPUTS, first = blockIdx.y * ROUTER_ROWS, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float* row = w + (int64_t)o * inputs;
    float sums[OUTPUTS][ROUTER_ROWS] = {};
#pragma unroll 4
    for (int i = threadIdx.x; i < inputs; i += ROUTER_THREADS) {
        float v[OUTPUTS];
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++) v[k] = row[(int64_t)k * inputs + i];
#pragma unroll
        for (int r = 0; r < ROUTER_ROWS; r++) {
            const float one = first + r < n ? to_float(x[(int64_t)(first + r) * inputs + i]) : 0.f;
#pragma unroll
            for (int k = 0; k < OUTPUTS; k++) sums[k][r] = fmaf(one, v[k], sums[k][r]);
        }
    }
#pragma unroll
    for (int k = 0; k < OUTPUTS; k++)
#pragma unroll
        for (int r = 0; r < ROUTER_ROWS; r++) {
            const float s = warp_sum(sums[k][r]);
            if (lane == 0) shares[warp][k * ROUTER_ROWS + r] = s;
        }
    __syncthreads();
    const int k = threadIdx.x / ROUTER_ROWS, r = threadIdx.x % ROUTER_ROWS;
    if (k < OUTPUTS && first + r < n) {
        float s = 0.f;
#pragma unroll
        for (int part = 0; part < ROUTER_THREADS / 32; part++) s += shares[part][threadIdx.x];
        out[(int64_t)(first + r) * outputs + o + k] = s;
    }
}
#endif

// -- choice: a warp a row ----------------------------------------------------------------------------------------------
// The largest of a warp's values, of equal ones that of the lowest index; NaN has become -infinity, and taken ones NaN.
__device__ __forceinline__ int best_left(const float* ranked, int experts, int lane) {
    float value = __int_as_float(0x7fc00000);
    int found = 0x7fffffff;
    for (int e = lane; e < experts; e += 32) {
        const float v = ranked[e];
        if (v == v && (value != value || v > value)) value = v, found = e;
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const float other = __shfl_xor_sync(FULL, value, d);
        const int index = __shfl_xor_sync(FULL, found, d);
        if (other == other && (value != value || other > value || (other == value && index < found))) value = other, found = index;
    }
    return found;
}

extern "C" __global__ void route_experts(const float* logits, const float* bias, const int* row_slot, int* ids, float* weights, int n,
                                         int experts, int chosen, int sigmoid, int groups, int top_groups, int renormalize,
                                         float floor_, float scale) {
    extern __shared__ float memory[];
    begin_dependent();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, r = blockIdx.x * (blockDim.x >> 5) + warp;
    if (r >= n) return;
    float* scores = memory + warp * (2 * experts + groups);
    float *ranked = scores + experts, *worth = ranked + experts;
    const float nan = __int_as_float(0x7fc00000);
    if (row_slot && row_slot[r] < 0) {
        for (int j = lane; j < chosen; j += 32) ids[(int64_t)r * chosen + j] = -1, weights[(int64_t)r * chosen + j] = 0.f;
        return;
    }
    const float* from = logits + (int64_t)r * experts;
#if defined(UNIFORM) && UNIFORM
    for (int e = lane; e < experts; e += 32) {
        uint32_t bits = __float_as_uint(from[e]) * 0x9e3779b9u ^ (uint32_t)(r * 0x85ebca6bu + e * 0xc2b2ae35u);
        bits ^= bits >> 16, bits *= 0x7feb352du, bits ^= bits >> 15, bits *= 0x846ca68bu, bits ^= bits >> 16;
        scores[e] = 1.f, ranked[e] = (float)(bits >> 8);
    }
    __syncwarp();
#else
    float top = -INFINITY_F, total = 0.f;
    if (!sigmoid) {
        for (int e = lane; e < experts; e += 32) top = fmaxf(top, from[e]);
        top = warp_max(top);
    }
    for (int e = lane; e < experts; e += 32) {
        const float v = from[e], s = sigmoid ? 1.f / (1.f + expf(-v)) : expf(v - top);
        scores[e] = s, total += s;
    }
    total = warp_sum(total);
    __syncwarp();
    for (int e = lane; e < experts; e += 32) {
        const float s = sigmoid ? scores[e] : scores[e] / total;
        const float biased = bias ? s + bias[e] : s;
        scores[e] = s, ranked[e] = biased == biased ? biased : -INFINITY_F;
    }
    __syncwarp();
    if (groups > 1) {
        const int size = experts / groups;
        for (int g = lane; g < groups; g += 32) {
            float first = -INFINITY_F, second = -INFINITY_F;
            for (int e = g * size; e < (g + 1) * size; e++) {
                const float v = ranked[e];
                if (v > first) second = first, first = v;
                else if (v > second) second = v;
            }
            worth[g] = size > 1 ? first + second : first;
        }
        __syncwarp();
        for (int k = 0; k < top_groups; k++) {
            const int g = best_left(worth, groups, lane);
            __syncwarp();
            if (lane == 0) worth[g] = nan;
            __syncwarp();
        }
        for (int e = lane; e < experts; e += 32)
            if (worth[e / size] == worth[e / size]) ranked[e] = -INFINITY_F;
        __syncwarp();
    }
#endif
    float sum = 0.f;
    for (int j = 0; j < chosen; j++) {
        const int e = best_left(ranked, experts, lane);
        sum += scores[e];
        __syncwarp();
        if (lane == 0) ranked[e] = nan, ids[(int64_t)r * chosen + j] = e, weights[(int64_t)r * chosen + j] = scores[e];
        __syncwarp();
    }
    const float by = renormalize == 0 ? 1.f : renormalize == 1 ? sum + floor_ : fmaxf(sum, floor_);
    for (int j = lane; j < chosen; j += 32) weights[(int64_t)r * chosen + j] = weights[(int64_t)r * chosen + j] / by * scale;
}

// -- lists: a block an expert counts the places of lower experts and lists its own, and gathers their rows of x where somebody
// wants these in that order (`sorted` is not null) ------------------------------------------------------------------------
constexpr int LIST_THREADS = 256;

extern "C" __global__ void list_experts(const int* ids, int* begins, int* list, const vec4* x, vec4* sorted, int n, int chosen, int pieces) {
    __shared__ int scratch[33];
    begin_dependent();
    const int expert = blockIdx.x, places = n * chosen;
    int before = 0;
    for (int p = threadIdx.x; p < places; p += LIST_THREADS) {
        const int id = ids[p];
        before += id >= 0 && id < expert;
    }
    int begin = block_sum(before, scratch);
    const int own = begin;
    if (threadIdx.x == 0) begins[expert] = begin;
    for (int first = 0; first < places; first += LIST_THREADS) {
        const int p = first + threadIdx.x;
        const int mine = p < places && ids[p] == expert;
        int total;
        const int rank = block_scan(mine, scratch, total);
        if (mine) list[begin + rank - 1] = p;
        begin += total;
    }
    if (threadIdx.x == 0 && expert == gridDim.x - 1) begins[expert + 1] = begin;
    if (sorted == nullptr) return;
    __syncthreads();
    const int count = (begin - own) * pieces;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += LIST_THREADS)
        sorted[(int64_t)own * pieces + i] = load4(x + (int64_t)(list[own + i / pieces] / chosen) * pieces + i % pieces);
}

// -- the last sum: terms of a row in the order of its choices, then the shared experts ----------------------------------
extern "C" __global__ void sum_experts(const float* terms, const int* ids, const float* weights, const act_t* shared, const float* gate,
                                       act_t* out, int chosen, int hidden) {
    begin_dependent();
    const int64_t r = blockIdx.y;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= hidden) return;
    float sum = 0.f;
    for (int j = 0; j < chosen; j++)
        if (ids[r * chosen + j] >= 0) sum += weights[r * chosen + j] * terms[(r * chosen + j) * hidden + i];
    if (shared) {
        const float s = to_float(shared[r * hidden + i]);
        sum += gate ? s / (1.f + expf(-gate[r])) : s;
    }
    out[r * hidden + i] = from_float<act_t>(sum);
}

// -- any size: a warp one output of one place ---------------------------------------------------------------------------
// GATED: h[place, I] = silu(gate) * up of x's row; else terms[place, H] of h's row.
#ifdef GATED
#if GATED
typedef act_t to_t;
#else
typedef float to_t;
#endif
extern "C" __global__ void expert_plain(const act_t* x, const act_t* w, const int* ids, to_t* out, int chosen, int outputs, int inputs) {
    begin_dependent();
    const int lane = threadIdx.x & 31, o = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const int64_t place = blockIdx.y, expert = ids[place];
    if (o >= outputs || expert < 0) return;
    const act_t* row = x + (GATED ? place / chosen : place) * inputs;
    const act_t* first = w + (expert * outputs * (GATED ? 2 : 1) + o) * inputs;
    float a = 0.f, b = 0.f;
    for (int i = lane; i < inputs; i += 32) {
        const float v = to_float(row[i]);
        a = fmaf(to_float(first[i]), v, a);
        if (GATED) b = fmaf(to_float(first[(int64_t)outputs * inputs + i]), v, b);
    }
    a = warp_sum(a), b = warp_sum(b);
    if (lane == 0) out[place * outputs + o] = from_float<to_t>(GATED ? a / (1.f + expf(-a)) * b : a);
}
#endif
