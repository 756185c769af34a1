// The router of experts: its product with float32 weights, and the choice of each row's experts.
//
// `router`: out[n, O] = x[n, I] @ w[O, I].T. A block has 8 outputs of 16 rows, its warps take 16 inputs each in turn. Weights are the
// sum of two tf32 numbers, and 16-bit activations are tf32 numbers themselves, so that products on tensor cores are as exact as those in
// float32. A row's sums are made alike whatever else runs. The first KEPT weights of every lane come before x is there. With CHOOSES
// experts are chosen as well: the blocks of a cluster, which have all outputs of their rows, bring each other logits and choose for some
// rows each; where there are more of them, the block of those of its rows that ends last chooses.
//
// Defines: ACT (1, 2), CHOOSES, CLUSTER (blocks of a cluster, 0: none), FEW (there are 8 rows at most), VECTOR (I is a multiple of 4, and
// rows begin at vectors), KEPT (times 16 inputs a warp), WHOLE (which are all there are; only with VECTOR), EARLY (x was made two launches
// back: what is in front is waited for in the end, for whoever follows), and for the choice EACH (experts a lane) and UNIFORM (they are
// drawn, for benchmarks). `route_experts` alone wants these two.
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

// What is left of a warp's values, EACH a lane, in the order of whole numbers: 0 for what is taken, not there, or NaN.
struct Left {
    unsigned keys[EACH];
    __device__ __forceinline__ Left(const float* values, int count, int lane) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float v = lane + 32 * i < count ? values[lane + 32 * i] + 0.f : __int_as_float(0x7fc00000);  // one zero
            const unsigned bits = __float_as_uint(v);
            keys[i] = v == v ? bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u) : 0;
        }
    }
    // Takes the largest, of equal ones that of the lowest index, which it answers.
    __device__ __forceinline__ int take(int lane) {
        unsigned value = 0, found = 0xffffffff;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (keys[i] > value) value = keys[i], found = lane + 32 * i;
        const unsigned most = warp_most(value), best = warp_least(value == most ? found : 0xffffffff);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (best == (unsigned)(lane + 32 * i)) keys[i] = 0;
        return (int)best;
    }
};

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
    if (empty) {
#pragma unroll 1
        for (int j = lane; j < chosen; j += 32) by.ids[(int64_t)r * chosen + j] = -1, by.weights[(int64_t)r * chosen + j] = 0.f;
        return;
    }
    // Here and below: code that runs once a launch takes longer to be fetched than a loop.
#if UNIFORM
#pragma unroll 1
    for (int e = lane; e < experts; e += 32) {
        uint32_t bits = __float_as_uint(from(e)) * 0x9e3779b9u ^ (uint32_t)(r * 0x85ebca6bu + e * 0xc2b2ae35u);
        bits ^= bits >> 16, bits *= 0x7feb352du, bits ^= bits >> 15, bits *= 0x846ca68bu, bits ^= bits >> 16;
        scores[e] = 1.f, ranked[e] = (float)(bits >> 8);
    }
    __syncwarp();
#else
    float top = -INFINITY_F, total = 0.f;
#pragma unroll 1
    for (int e = lane; e < experts; e += 32) {
        scores[e] = from(e);
        top = fmaxf(top, scores[e]);
    }
    if (!by.sigmoid) top = warp_max(top);
#pragma unroll 1
    for (int e = lane; e < experts; e += 32) {
        const float v = scores[e], s = by.sigmoid ? 1.f / (1.f + expf(-v)) : expf(v - top);
        scores[e] = s, total += s;
    }
    total = warp_sum(total);
#pragma unroll 1
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
        Left left(worth, by.groups, lane);
        __syncwarp();
#pragma unroll 1
        for (int k = 0; k < by.top_groups; k++) {
            const int g = left.take(lane);
            if (lane == 0) worth[g] = __int_as_float(0x7fc00000);  // NaN
        }
        __syncwarp();
        for (int e = lane; e < experts; e += 32)
            if (worth[e / size] == worth[e / size]) ranked[e] = -INFINITY_F;
        __syncwarp();
    }
#endif
    Left left(ranked, experts, lane);
    float sum = 0.f;
#pragma unroll 1
    for (int j = 0; j < chosen; j++) {
        const int e = left.take(lane);
        sum += scores[e];
        if (lane == 0) ids[j] = e;
    }
    __syncwarp();
    const float of = by.renormalize == 0 ? 1.f : by.renormalize == 1 ? sum + by.least : fmaxf(sum, by.least);
#pragma unroll 1
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
constexpr int AT_ONCE = FEW ? (KEPT > 10 ? 4 : KEPT) : (KEPT > 10 ? 2 : (KEPT + 1) / 2);  // times a lane's inputs of a row are on their way
struct Four { unsigned v[4]; };

__device__ __forceinline__ unsigned rounded(float x) {
    unsigned y;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#endif
    return y;
}
// Four weights, and four inputs of a row as they lie in memory, at `at`, behind which there are `left` of its row. Loads stay where they
// are written: in front of the products, so that all are on their way.
__device__ __forceinline__ Four weights_of(const float* at, int left) {
    Four f{};
#if VECTOR
    if (left > 0) asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(f.v[0]), "=r"(f.v[1]), "=r"(f.v[2]), "=r"(f.v[3]) : "l"(at) : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; i++) f.v[i] = i < left ? __float_as_uint(at[i]) : 0;
#endif
    return f;
}
__device__ __forceinline__ vec2 inputs_of(const act_t* at, int left) {
    vec2 v{};
#if VECTOR
    if (left > 0) asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
#else
    unsigned short e[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < left) e[i] = __ldcg((const unsigned short*)at + i);
    v.x = e[0] | (unsigned)e[1] << 16, v.y = e[2] | (unsigned)e[3] << 16;
#endif
    return v;
}
__device__ __forceinline__ Four widened(const vec2& v) {
    return Four{{__float_as_uint(low(v.x)), __float_as_uint(high(v.x)), __float_as_uint(low(v.y)), __float_as_uint(high(v.y))}};
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
    __shared__ float logits[(ROWS + CLUSTER - 1) / CLUSTER][CLUSTER * OUTPUTS];  // of the rows that this block chooses for: each CLUSTER-th one
    __shared__ alignas(8) uint64_t arrived;
    if (threadIdx.x == 0) {
        const int mine = (min(n - (int)blockIdx.y * ROWS, ROWS) - (int)blockIdx.x + CLUSTER - 1) / CLUSTER;
        barrier_init(shared_address(&arrived), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (mine > 0) barrier_expect(shared_address(&arrived), mine * outputs * 4);
    }
    __syncwarp();
    cluster_arrive_relaxed();
#endif
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, o = blockIdx.x * OUTPUTS, first = blockIdx.y * ROWS;
    const int own = warp * 16 + (lane & 3) * 4, left = WHOLE ? 1 : inputs - own;  // inputs of a lane: four of each 16 of its warp
    const float* weight = w + (int64_t)(o + g) * inputs + own;
    const int left_weights = o + g < outputs ? left : 0;
    auto left_at = [](int left, int k) { return WHOLE ? left : left - k; };
    Four kept[KEPT];
#pragma unroll
    for (int p = 0; p < KEPT; p++) kept[p] = weights_of(weight + p * WARPS * 16, left_at(left_weights, p * WARPS * 16));
    if (!EARLY) wait_for_previous();
#if CHOOSES  // a warp a row
    const int chosen_for = CLUSTER ? warp * CLUSTER + blockIdx.x : warp;
    const bool chooses = chosen_for < ROWS && first + chosen_for < n, empty = chooses && row_slot && __ldcg(row_slot + first + chosen_for) < 0;
#endif
    const act_t *row = x + (int64_t)(first + g) * inputs + own, *other = row + (int64_t)8 * inputs;
    const int left_near = first + g < n ? left : 0, left_far = !FEW && first + g + 8 < n ? left : 0;
    struct Rows { vec2 near, far; };  // rows g and g + 8
    auto rows = [&](int k) { return Rows{inputs_of(row + k, left_at(left_near, k)), FEW ? vec2{} : inputs_of(other + k, left_at(left_far, k))}; };
    float sums[2][4] = {};  // of either half of the inputs
    auto add = [&](const Four& v, const Rows& of) {
        const Four a = widened(of.near), b = widened(of.far);
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
    for (int begin = 0; begin < KEPT; begin += AT_ONCE) {
        Rows of[AT_ONCE];
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++)
            if (begin + p < KEPT) of[p] = rows((begin + p) * WARPS * 16);
        // Products want what the barrier says, and loads stay in front of it: else the compiler mixes them, and each load is waited for by itself.
        const unsigned nothing = __syncthreads_or(n < 0);
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++)
            if (begin + p < KEPT) of[p].near.x |= nothing, of[p].near.y |= nothing, add(kept[begin + p], of[p]);
    }
    for (int k = KEPT * WARPS * 16; !WHOLE && k < inputs; k += WARPS * 16) add(weights_of(weight + k, left_at(left_weights, k)), rows(k));
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
        // Counted where it arrives: a barrier of the cluster would wait for what was stored in memory, too.
        asm volatile(
            "{\n.reg .b32 there, count;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 count, %1, %3;\n"
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %2, [count];\n}" ::"r"(shared_address(&logits[r / CLUSTER][o + at])),
            "r"(shared_address(&arrived)), "f"(sum), "r"(r % CLUSTER)
            : "memory");
#endif
    }
#if CHOOSES
    const Choice by{bias, ids, weights, chosen, sigmoid, groups, top_groups, renormalize, least, scale};
    float* own_memory = memory + warp * (2 * outputs + groups + chosen);
#if CLUSTER
    if (chooses) {
        barrier_wait(shared_address(&arrived), 0);
        choose(by, [&](int e) { return logits[warp][e]; }, first + chosen_for, empty, outputs, own_memory);
    }
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
