// out[n, O] = x[n, I] @ w[O, I].T (+ bias) for many rows: blocks have tiles of outputs by all rows, and parts of the inputs of the last ones (sm_90a).
//
// The larger a tile, the fewer bytes of shared memory a product reads. A block has as many whole tiles as every block can have. The inputs of
// each tile that is left are split evenly: every block of it finishes some rows, whose sums the others leave in memory for it, and adds them in
// the order of the inputs. The blocks of a tile run at once. The first weights are fetched before the kernel in front has ended.
//
// EIGHT: weights and rows are E4M3 with a scale of each output and of each row; sums of 128 inputs are added in float32 (as in linear_tile.cu),
// of 128 rows at a time, so that registers last.
//
// Defines: ACT (1 bf16, 2 f16), TOKENS (rows of x in a launch at most: 192; with EIGHT 128, 256), WHOLE (whole tiles of a block), SPLIT (blocks
// of a tile that is left: 2, 3, 4), STAGES (chunks in flight), BIAS, GATED (as in linear_tile.cu, without BIAS), EIGHT. Inputs are a multiple of 64, of
// 128 with EIGHT; outputs are one of 8, of 16 with GATED.
#include "tensor.cuh"
#if EIGHT
#define WIDTH 128
#define HALVES
#define BYTES
#else
#define WIDTH TOKENS
#endif
#include "wgmma.cuh"
#include "boxes.cuh"

constexpr int GROUPS = 2, ROWS = 64 * GROUPS, CONSUMERS = GROUPS * 128, CHUNK = EIGHT ? 128 : 64;  // rows of weights of a tile, inputs of a chunk
constexpr int FETCHERS = EIGHT ? 128 : 32;  // a warp group where registers pass from it to the others
constexpr int W_BYTES = ROWS * 128, STAGE = W_BYTES + TOKENS * 128;
constexpr int EIGHTS = TOKENS / 8, ACROSS = GATED ? ROWS / 2 : ROWS, PITCH = ACROSS + 8;  // outputs of a tile; elements of a row on its way out
constexpr int SLOT = (EIGHTS + SPLIT - 1) / SPLIT * CONSUMERS;  // fours of sums that a block leaves for another at most
static_assert(!(GATED && BIAS) && TOKENS % WIDTH == 0, "what is launched");
constexpr int first_of(int part) { return EIGHTS * part / SPLIT; }  // eights of rows that a block of a tile finishes

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

struct Target {
    act_t *out, *stage;  // 64 rows on their way out
    const act_t* bias;
    const float *scales, *row_scales;  // those of rows lie in shared memory
    int n, outputs;
};
// Stores the sums of EACH eights of rows from `first` on, 64 rows at a time; `sums_of(from, s)` gives those of eights `from` to `from + 8`.
template <int EACH, class Sums>
__device__ __forceinline__ void store(const Sums& sums_of, const Target& to, int tile, int first) {
    const int lane = threadIdx.x & 31, g = lane >> 2, warp = threadIdx.x >> 5, width = GATED ? to.outputs / 2 : to.outputs, column = tile * ACROSS;
    const int at = warp * (GATED ? 8 : 16) + g;  // the output of a lane in a tile, of two the lower
    auto scale = [&](int half) { return EIGHT ? to.scales[min(GATED ? min(column + at, width - 1) + half * width : column + at + half * 8, to.outputs - 1)] : 1.f; };
    auto added = [&](int half) { return BIAS && column + at + half * 8 < width ? to_float(to.bias[column + at + half * 8]) : 0.f; };
    const float by[2] = {scale(0), scale(1)}, add[2] = {added(0), added(1)};
#pragma unroll
    for (int from = 0; from < EACH; from += 8) {
        float sums[32];
        sums_of(from, sums);
#pragma unroll
        for (int j = 0; j < 8 && from + j < EACH; j++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int row = j * 8 + (lane & 3) * 2 + odd;
                const float of_row = EIGHT ? to.row_scales[first + from * 8 + row] : 1.f;
                const float low = EIGHT ? sums[j * 4 + odd] * (by[0] * of_row) : sums[j * 4 + odd], high = EIGHT ? sums[j * 4 + 2 + odd] * (by[1] * of_row) : sums[j * 4 + 2 + odd];
                act_t* p = to.stage + row * PITCH + at;
                if (GATED) p[0] = from_float<act_t>(gated(low, high));
                else p[0] = from_float<act_t>(low + add[0]), p[8] = from_float<act_t>(high + add[1]);
            }
        consumers_meet();
        for (int i = threadIdx.x; i < min(8, EACH - from) * ACROSS; i += CONSUMERS) {  // 8 elements at a time
            const int row = i / (ACROSS / 8), o = i % (ACROSS / 8) * 8, token = first + from * 8 + row;
            if (token < to.n && column + o < width) *(vec4*)(to.out + (int64_t)token * width + column + o) = *(const vec4*)(to.stage + row * PITCH + o);
        }
        consumers_meet();
    }
}
// Leaves the sums of the others' rows for them, adds what they left of this block's, and stores it. `left` and `flags` are the tile's.
template <int OWN>
__device__ __forceinline__ void exchange(const float (&sums)[TOKENS / 2], const Target& target, int tile, float4* left, unsigned* flags) {
    constexpr int FIRST = first_of(OWN), EACH = first_of(OWN + 1) - FIRST;
#pragma unroll
    for (int k = 1; k < SPLIT; k++) {
        const int to = (OWN + k) % SPLIT;
        float4* p = left + (to * SPLIT + OWN) * SLOT + threadIdx.x;
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            const float* s = sums + j * 4;
            if (j >= first_of(to) && j < first_of(to + 1)) __stcg(p + (j - first_of(to)) * CONSUMERS, make_float4(s[0], s[1], s[2], s[3]));
        }
    }
    consumers_meet();
    if (threadIdx.x < SPLIT && threadIdx.x != OWN)  // what the others wrote before the meeting is published with it
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flags + threadIdx.x) : "memory");
    if (threadIdx.x == 0) {
        unsigned came;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(came) : "l"(flags + OWN) : "memory");
        while (came != SPLIT - 1);
        flags[OWN] = 0;
    }
    consumers_meet();
    auto added_up = [&](int from, float (&whole)[32]) {
        float4 more[SPLIT][8];
#pragma unroll
        for (int p = 0; p < SPLIT; p++)
#pragma unroll
            for (int j = 0; j < 8 && from + j < EACH; j++) {
                const float* s = sums + (FIRST + from + j) * 4;
                more[p][j] = p == OWN ? make_float4(s[0], s[1], s[2], s[3]) : __ldcg(left + (OWN * SPLIT + p) * SLOT + (from + j) * CONSUMERS + threadIdx.x);
            }
#pragma unroll
        for (int j = 0; j < 8 && from + j < EACH; j++) {
            float4 s = more[0][j];
#pragma unroll
            for (int p = 1; p < SPLIT; p++) s.x += more[p][j].x, s.y += more[p][j].y, s.z += more[p][j].z, s.w += more[p][j].w;
            whole[j * 4] = s.x, whole[j * 4 + 1] = s.y, whole[j * 4 + 2] = s.z, whole[j * 4 + 3] = s.w;
        }
    };
    store<EACH>(added_up, target, tile, FIRST * 8);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + FETCHERS, 1)
linear_parts(const __grid_constant__ Map w_map, const __grid_constant__ Map x_map, act_t* __restrict__ out, const act_t* __restrict__ bias,
             const float* scales, const float* row_scales, float4* left, unsigned* flags, int n, int outputs, int inputs) {
    extern __shared__ unsigned char raw[];
    __shared__ alignas(8) uint64_t full[STAGES], empty[STAGES];
    const unsigned base = (shared_address(raw) + 1023) & ~1023u;
    const int chunks = inputs / CHUNK, tiles = (outputs + ROWS - 1) / ROWS, own = WHOLE * chunks;  // those of whole tiles
    const int part = blockIdx.x % SPLIT, shared = blockIdx.x / SPLIT, last = WHOLE * gridDim.x + shared;  // a tile that is left
    const int begin = chunks * part / SPLIT, count = own + (last < tiles ? chunks * (part + 1) / SPLIT - begin : 0);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(shared_address(&full[s]), 1), barrier_init(shared_address(&empty[s]), GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {  // the warp that fetches
        if (EIGHT) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x >= CONSUMERS + 32) return;
        auto column = [&](int i) { return (i < own ? i % chunks : begin + i - own) * CHUNK; };
        auto weights = [&](int i, int s) {
            const unsigned f = shared_address(&full[s]);
            const int row = (i < own ? i / chunks * gridDim.x + blockIdx.x : last) * ROWS;
            barrier_expect(f, STAGE);
            if (GATED) load_pairs(base + s * STAGE, &w_map, column(i), row, f);
            else load_box(base + s * STAGE, &w_map, column(i), row, f);
        };
        auto rows = [&](int i, int s) { load_box(base + s * STAGE + W_BYTES, &x_map, column(i), 0, shared_address(&full[s])); };
        return fetch_stages<STAGES, 1>(threadIdx.x == CONSUMERS, count, empty, weights, rows);
    }
    if (EIGHT) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_previous();
    const int group = threadIdx.x >> 7;
    auto release = [&](int s) {
        if ((threadIdx.x & 127) == 0) barrier_arrive(shared_address(&empty[s]));
    };
    __shared__ float of_rows[TOKENS];
    if (EIGHT) {
        if (threadIdx.x < TOKENS) of_rows[threadIdx.x] = row_scales[min((int)threadIdx.x, n - 1)];
        consumers_meet();
    }
    const Target target{out, (act_t*)(raw + (base - shared_address(raw)) + STAGES * STAGE), bias, scales, of_rows, n, outputs};
    // The sums of chunks `from` to `end`: a tile, or the part of one.
    auto multiply = [&](float (&sums)[TOKENS / 2], int from, int end) {
#if EIGHT
        float chunk[WIDTH / 2] = {};
        const int keeps = n < 0;  // never; the registers of the products before serve again
#else
        accumulators_fence(sums);  // what they begin with is not made between products
#endif
#pragma unroll 1
        for (int i = from; i < end; i++) {
            const int s = i % STAGES;
            barrier_wait(shared_address(&full[s]), i / STAGES & 1);
            const unsigned w = base + s * STAGE + group * 8192, x = base + s * STAGE + W_BYTES;
#if EIGHT
#pragma unroll
            for (int first = 0; first < TOKENS; first += WIDTH) {
                accumulators_fence(chunk);
                products_begin();
#pragma unroll
                for (int k = 0; k < 4; k++) wgmma(chunk, descriptor(w + k * 32), descriptor(x + first * 128 + k * 32), k ? 1 : keeps);
                products_end<0>();
                accumulators_fence(chunk);
                if (first + WIDTH == TOKENS) release(s);
#pragma unroll
                for (int j = 0; j < WIDTH / 2; j++) sums[first / 2 + j] += chunk[j];
            }
#else
            multiply_chunk<1>(sums, w, x);  // while the chunk before it ends
            if (i > from) release((i - 1) % STAGES);
#endif
        }
#if !EIGHT
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        accumulators_fence(sums);
        release((end - 1) % STAGES);
#endif
    };
#pragma unroll 1
    for (int tile = 0; tile < WHOLE; tile++) {  // apart from the last one: one loop would keep what both need in registers, and some of it in memory
        float sums[TOKENS / 2] = {};
        multiply(sums, tile * chunks, (tile + 1) * chunks);
        auto whole = [&](int first, float (&of_eights)[32]) {
#pragma unroll
            for (int j = 0; j < 32; j++) of_eights[j] = sums[first * 4 + j];
        };
        store<EIGHTS>(whole, target, tile * gridDim.x + blockIdx.x, 0);
    }
    if (count == own) return;
    float sums[TOKENS / 2] = {};
    multiply(sums, own, count);
    left += (int64_t)shared * SPLIT * SPLIT * SLOT, flags += shared * SPLIT;
    if (part == 0) exchange<0>(sums, target, last, left, flags);
    else if (part == 1) exchange<1>(sums, target, last, left, flags);
#if SPLIT > 2
    else if (part == 2) exchange<2>(sums, target, last, left, flags);
#endif
#if SPLIT > 3
    else exchange<3>(sums, target, last, left, flags);
#endif
}
