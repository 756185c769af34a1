// RMS norm of rows, with the residual addition before it or two of them side by side; and the residual addition alone.
//
// One block a row. A row is read once, 16 bytes a thread, and kept in registers; widths that do not fit that are read twice.
// Defines: ACT, VECTORS (16-byte vectors of a row that one thread keeps; 0 for any width), PLUS_ONE, EARLY (x is read before the launch
// in front has ended: it is a projection, which lets this one come only once it has seen what was before it, x among that), ROUNDS (norms are
// not stored but rounded for the product behind: `numbers` and `scales` as in rounding.cuh, whose defines come with it, and VECTORS).
#include "norms.cuh"
#if ROUNDS
#include "rounding.cuh"
#endif

#if VECTORS
// What the norm is of: x, which is replaced by x + y, rounded, where `y` is given; and its gains.
__device__ __forceinline__ void begin_norm(Vector (&kept)[VECTORS], Vector (&gains)[VECTORS], act_t* x, const act_t* y, const act_t* weight, int width) {
    Vector more[VECTORS];
    load_gains(gains, weight, width);
    if (EARLY) load_row(kept, x, width);
    wait_for_previous();
    if (!EARLY) load_row(kept, x, width);
    if (y) {
        load_row(more, y, width);
        add_row(kept, more, x, width);
    }
}
#endif
// `out` gets the norm of what is in x behind the addition of `y`. `hide`: take zeros for x.
__device__ __forceinline__ void norm_row(act_t* x, const act_t* y, const act_t* weight, act_t* out, int width, float eps, bool hide, float* scratch) {
#if VECTORS
    Vector kept[VECTORS], gains[VECTORS];
    begin_norm(kept, gains, x, y, weight, width);
    if (hide)
#pragma unroll
        for (int v = 0; v < VECTORS; v++) kept[v] = {};
    store_norm(kept, gains, out, width, eps, scratch);
#else
    wait_for_previous();
    float squares = 0.f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        if (y) x[i] = from_float<act_t>(to_float(x[i]) + to_float(y[i]));
        const float value = hide ? 0.f : to_float(x[i]);
        squares += value * value;
    }
    const float factor = 1.f / sqrtf(total(squares, scratch) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float value = hide ? 0.f : to_float(x[i]);
        out[i] = from_float<act_t>(value * factor * gain(weight[i]));
    }
#endif
}

extern "C" __global__ void rms_norm(act_t* x, const act_t* y, const act_t* weight, act_t* out, int width, float eps) {
    __shared__ float scratch[32];
    launch_dependents();
    const int64_t row = (int64_t)blockIdx.x * width;
    norm_row(x + row, y ? y + row : nullptr, weight, out + row, width, eps, false, scratch);
}

#if ROUNDS
extern "C" __global__ void rounded_norm(act_t* x, const act_t* y, const act_t* weight, number_t* numbers, float* scales, int width, int pitch, float eps) {
    __shared__ float scratch[32];
    __shared__ unsigned found[32];
    launch_dependents();
    const int64_t row = (int64_t)blockIdx.x * width;
    Vector kept[VECTORS] = {}, gains[VECTORS];
    begin_norm(kept, gains, x + row, y ? y + row : nullptr, weight, width);
    norm_kept(kept, gains, width, eps, scratch);
    vec4 held[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) held[v] = *reinterpret_cast<const vec4*>(&kept[v]);
    round_held(held, threadIdx.x, blockDim.x, [] { __syncthreads(); }, found, numbers + row, scales, blockIdx.x, width, pitch);
}
#endif

// Two halves of a row: the hidden state and the embedding, in the order given by the columns at which they start.
extern "C" __global__ void combine_draft_inputs(act_t* embedding, act_t* hidden, const act_t* emb_norm, const act_t* hid_norm, const int* positions,
                                                act_t* out, int width, int embedding_at, int hidden_at, int mask_first, float eps) {
    __shared__ float scratch[32];
    launch_dependents();
    const int row = blockIdx.x;
    if (mask_first) wait_for_previous();
    act_t* o = out + (int64_t)row * 2 * width;
    if (blockIdx.y)
        norm_row(hidden + (int64_t)row * width, nullptr, hid_norm, o + hidden_at, width, eps, false, scratch);
    else
        norm_row(embedding + (int64_t)row * width, nullptr, emb_norm, o + embedding_at, width, eps, mask_first && positions[row] == 0, scratch);
}

extern "C" __global__ void residual_add(act_t* x, const act_t* y, int width, int n) {
    begin_dependent();
    const int64_t count = (int64_t)width * n, step = (int64_t)gridDim.x * blockDim.x * LANES;
    for (int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * LANES; at < count; at += step) {
        if (at + LANES <= count) {
            Vector a = *(Vector*)(x + at);
            const Vector b = *(const Vector*)(y + at);
#pragma unroll
            for (int i = 0; i < LANES; i++) a.e[i] = from_float<act_t>(to_float(a.e[i]) + to_float(b.e[i]));
            *(Vector*)(x + at) = a;
        } else
            for (int64_t i = at; i < count; i++) x[i] = from_float<act_t>(to_float(x[i]) + to_float(y[i]));
    }
}
