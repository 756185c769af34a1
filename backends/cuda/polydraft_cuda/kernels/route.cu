// The router of experts: its product with float32 weights, and the choice of each row's experts.
//
// `router`: out[n, O] = x[n, I] @ w[O, I].T. A block has 8 outputs of 16 rows, its warps take 16 inputs each in turn. Weights are the
// sum of two tf32 numbers, and 16-bit activations are tf32 numbers themselves, so that products on tensor cores are as exact as those in
// float32. A row's sums are made alike whatever else runs. The first KEPT weights of every lane come before x is there. With CHOOSES
// experts are chosen as well: the blocks of a cluster, which have all outputs of their rows, bring each other logits and choose for some
// rows each; where there are more of them, the block of those of its rows that ends last chooses.
//
// Defines: ACT (1, 2), CHOOSES, CLUSTER (blocks of a cluster, 0: none), FEW (there are 8 rows at most), VECTOR (I is a multiple of 4, and
// rows begin at vectors), KEPT (times 16 inputs a warp), EARLY (x was made two launches back: what is in front is waited for in the end, for
// whoever follows), and for the choice UNIFORM (experts are drawn, for benchmarks). `route_experts` alone wants UNIFORM.
#include "tensor.cuh"
#include "boxes.cuh"

constexpr int ROWS = 16, OUTPUTS = 8, WARPS = 16;
constexpr int MOST_THREADS = WARPS * 32 + 128;  // no more registers than leave room for a block of the projection behind

// -- choice: a warp a row ----------------------------------------------------------------------------------------------
__device__ __forceinline__ unsigned warp_most(unsigned x) {
    unsigned y;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ unsigned warp_least(unsigned x) {
    unsigned y;
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

// The largest of a warp's values, of equal ones that of the lowest index; NaN has become -infinity, and taken ones NaN.
__device__ __forceinline__ int best_left(const float* ranked, int experts, int lane) {
    unsigned value = 0, found = 0xffffffff;  // in the order of whole numbers; 0 for what is taken
    for (int e = lane; e < experts; e += 32) {
        const float v = ranked[e] + 0.f;  // one zero
        const unsigned bits = __float_as_uint(v), key = v == v ? bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u) : 0;
        if (key > value) value = key, found = e;
    }
    const unsigned most = warp_most(value);
    return (int)warp_least(value == most ? found : 0xffffffff);
}

struct Choice {
    const float* bias;
    int* ids;
    float* weights;
    int chosen, sigmoid, groups, top_groups, renormalize;
    float least, scale;
};

// For row r, whose logits `from` gives by expert, none where it is `empty`. `memory`: 2 * experts + groups + chosen words of this warp.
template <class From>
__device__ __forceinline__ void choose(const Choice& by, const From& from, int r, bool empty, int experts, float* memory) {
    const int lane = threadIdx.x & 31, chosen = by.chosen;
    float *scores = memory, *ranked = scores + experts, *worth = ranked + experts;
    int* ids = (int*)(worth + by.groups);
    const float nan = __int_as_float(0x7fc00000);
    if (empty) {
        for (int j = lane; j < chosen; j += 32) by.ids[(int64_t)r * chosen + j] = -1, by.weights[(int64_t)r * chosen + j] = 0.f;
        return;
    }
#if UNIFORM
    for (int e = lane; e < experts; e += 32) {
        uint32_t bits = __float_as_uint(from(e)) * 0x9e3779b9u ^ (uint32_t)(r * 0x85ebca6bu + e * 0xc2b2ae35u);
        bits ^= bits >> 16, bits *= 0x7feb352du, bits ^= bits >> 15, bits *= 0x846ca68bu, bits ^= bits >> 16;
        scores[e] = 1.f, ranked[e] = (float)(bits >> 8);
    }
    __syncwarp();
#else
    float top = -INFINITY_F, total = 0.f;
    for (int e = lane; e < experts; e += 32) {
        scores[e] = from(e);
        top = fmaxf(top, scores[e]);
    }
    if (!by.sigmoid) top = warp_max(top);
    for (int e = lane; e < experts; e += 32) {
        const float v = scores[e], s = by.sigmoid ? 1.f / (1.f + expf(-v)) : expf(v - top);
        scores[e] = s, total += s;
    }
    total = warp_sum(total);
    for (int e = lane; e < experts; e += 32) {
        const float s = by.sigmoid ? scores[e] : scores[e] / total;
        const float biased = by.bias ? s + by.bias[e] : s;
        scores[e] = s, ranked[e] = biased == biased ? biased : -INFINITY_F;
    }
    __syncwarp();
    if (by.groups > 1) {
        const int size = experts / by.groups;
        for (int g = lane; g < by.groups; g += 32) {
            float first = -INFINITY_F, second = -INFINITY_F;
            for (int e = g * size; e < (g + 1) * size; e++) {
                const float v = ranked[e];
                if (v > first) second = first, first = v;
                else if (v > second) second = v;
            }
            worth[g] = size > 1 ? first + second : first;
        }
        __syncwarp();
        for (int k = 0; k < by.top_groups; k++) {
            const int g = best_left(worth, by.groups, lane);
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
        if (lane == 0) ranked[e] = nan, ids[j] = e;
        __syncwarp();
    }
    const float of = by.renormalize == 0 ? 1.f : by.renormalize == 1 ? sum + by.least : fmaxf(sum, by.least);
    for (int j = lane; j < chosen; j += 32) {
        by.ids[(int64_t)r * chosen + j] = ids[j];
        by.weights[(int64_t)r * chosen + j] = scores[ids[j]] / of * by.scale;
    }
}

#ifndef KEPT
extern "C" __global__ void route_experts(const float* logits, const float* bias, const int* row_slot, int* ids, float* weights, int n,
                                         int experts, int chosen, int sigmoid, int groups, int top_groups, int renormalize,
                                         float least, float scale) {
    extern __shared__ float memory[];
    begin_dependent();
    const int warp = threadIdx.x >> 5, r = blockIdx.x * (blockDim.x >> 5) + warp;
    if (r >= n) return;
    const Choice by{bias, ids, weights, chosen, sigmoid, groups, top_groups, renormalize, least, scale};
    const float* row = logits + (int64_t)r * experts;
    choose(by, [&](int e) { return __ldcg(row + e); }, r, row_slot && row_slot[r] < 0, experts, memory + warp * (2 * experts + groups + chosen));
}
#else

// -- product -------------------------------------------------------------------------------------------------------------
struct Four { unsigned v[4]; };

__device__ __forceinline__ unsigned rounded(float x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ Four weights_of(const float* row, int k, int inputs, bool real) {
#if VECTOR
    Four f{};
    if (real && k < inputs) {
        const vec4 v = load_stream(row + k);
        f.v[0] = v.x, f.v[1] = v.y, f.v[2] = v.z, f.v[3] = v.w;
    }
#else
    Four f;
#pragma unroll
    for (int i = 0; i < 4; i++) f.v[i] = real && k + i < inputs ? __float_as_uint(row[k + i]) : 0;
#endif
    return f;
}
__device__ __forceinline__ Four inputs_of(const act_t* row, int k, int inputs, bool real) {
    Four f{};
#if VECTOR
    if (real && k < inputs) {
        const uint2 v = __ldcg((const uint2*)(row + k));
        f.v[0] = __float_as_uint(low(v.x)), f.v[1] = __float_as_uint(high(v.x)), f.v[2] = __float_as_uint(low(v.y)), f.v[3] = __float_as_uint(high(v.y));
    }
#else
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (real && k + i < inputs) f.v[i] = __float_as_uint(to_float(act_t{__ldcg((const unsigned short*)row + k + i)}));
#endif
    return f;
}
// c[16 x 8] += a[16 x 8] b[8 x 8], float32 sums
__device__ __forceinline__ void product(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) router(
    const act_t* x, const float* w, float* out, int n, int outputs, int inputs, const float* bias, const int* row_slot, int* ids, float* weights,
    unsigned* ended, int chosen, int sigmoid, int groups, int top_groups, int renormalize, float least, float scale) {
    extern __shared__ float memory[];
    __shared__ float shares[WARPS][ROWS * OUTPUTS];
#if CLUSTER
    __shared__ float logits[ROWS][CLUSTER * OUTPUTS];
    cluster_arrive_relaxed();
#endif
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, o = blockIdx.x * OUTPUTS, first = blockIdx.y * ROWS;
    const float* weight = w + (int64_t)(o + g) * inputs;
    const int own = warp * 16 + (lane & 3) * 4;  // inputs of a lane: four of each 16 of its warp
    Four kept[KEPT];
#pragma unroll
    for (int p = 0; p < KEPT; p++) kept[p] = weights_of(weight, p * WARPS * 16 + own, inputs, o + g < outputs);
    if (!EARLY) wait_for_previous();
#if CHOOSES  // a warp a row
    const int chosen_for = CLUSTER ? warp * CLUSTER + blockIdx.x : warp;
    const bool chooses = chosen_for < ROWS && first + chosen_for < n, empty = chooses && row_slot && __ldcg(row_slot + first + chosen_for) < 0;
#endif
    const act_t* row = x + (int64_t)(first + g) * inputs;
    const bool real = first + g < n, more = !FEW && first + g + 8 < n;
    float sums[2][4] = {};  // of either half of the inputs
    auto add = [&](const Four& v, int k) {
        const Four a = inputs_of(row, k, inputs, real), b = inputs_of(row + (int64_t)8 * inputs, k, inputs, more);
        Four high, low;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            high.v[i] = rounded(__uint_as_float(v.v[i]));
            low.v[i] = rounded(__uint_as_float(v.v[i]) - __uint_as_float(high.v[i]));
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            product(sums[half], a.v[half * 2], b.v[half * 2], a.v[half * 2 + 1], b.v[half * 2 + 1], high.v[half * 2], high.v[half * 2 + 1]);
            product(sums[half], a.v[half * 2], b.v[half * 2], a.v[half * 2 + 1], b.v[half * 2 + 1], low.v[half * 2], low.v[half * 2 + 1]);
        }
    };
#pragma unroll
    for (int p = 0; p < KEPT; p++) add(kept[p], p * WARPS * 16 + own);
    for (int k = KEPT * WARPS * 16 + own; k - own < inputs; k += WARPS * 16) add(weights_of(weight, k, inputs, o + g < outputs), k);
#pragma unroll
    for (int i = 0; i < 4; i++)  // rows g and g + 8, two outputs
        shares[warp][(g + (i >> 1) * 8) * OUTPUTS + (lane & 3) * 2 + (i & 1)] = sums[0][i] + sums[1][i];
    __syncthreads();
    const int r = threadIdx.x / OUTPUTS, at = threadIdx.x % OUTPUTS;
#if CLUSTER
    cluster_wait();  // all of them are there
#endif
    if (r < ROWS && first + r < n && o + at < outputs) {
        float sum = 0.f;
#pragma unroll
        for (int part = 0; part < WARPS; part++) sum += shares[part][threadIdx.x];
        __stcg(out + (int64_t)(first + r) * outputs + o + at, sum);
#if CLUSTER
        unsigned there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(&logits[r][o + at])), "r"(r % CLUSTER));
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(sum) : "memory");
#endif
    }
#if CHOOSES
    const Choice by{bias, ids, weights, chosen, sigmoid, groups, top_groups, renormalize, least, scale};
    float* own_memory = memory + warp * (2 * outputs + groups + chosen);
#if CLUSTER
    __syncwarp();
    cluster_arrive(), cluster_wait();
    if (chooses) choose(by, [&](int e) { return logits[chosen_for][e]; }, first + chosen_for, empty, outputs, own_memory);
#else
    __shared__ int is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(ended + blockIdx.y, 1u) == gridDim.x - 1;
        __threadfence();
        if (is_last) ended[blockIdx.y] = 0;
    }
    __syncthreads();
    const float* from = out + (int64_t)(first + chosen_for) * outputs;
    if (is_last && chooses) choose(by, [&](int e) { return __ldcg(from + e); }, first + chosen_for, empty, outputs, own_memory);
#endif
#endif
    if (EARLY) wait_for_previous();
}
#endif
