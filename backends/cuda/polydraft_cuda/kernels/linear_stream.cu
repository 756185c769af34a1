// out[n, O] = x[n, I] @ w[O, I].T (+ bias) for few rows: weights go from memory straight into the registers that multiply them.
//
// A block computes 16 * TILES outputs at a time for all rows; its warps take every WARPS-th chunk of 64 inputs, each with DEPTH
// chunks of weights in flight, and their sums are added in the order of the warps. Inputs are permuted within a chunk, for weights
// and rows alike, so that every load is 16 bytes of one row. No row touches another: a row's bits are the same in every launch.
//
// Defines: ACT (1, 2), TOKENS (8, 16, 32), TILES, DEPTH, WARPS, MIN_BLOCKS (blocks a multiprocessor), OUT_F32, BIAS.
// O is a multiple of 16, I of 64.
#include "tensor.cuh"

constexpr int ROWS = 16 * TILES, PARTS = TOKENS / 8;
#if OUT_F32
typedef float out_t;
#else
typedef act_t out_t;
#endif

struct Weights { vec4 part[TILES][2][2]; };  // [tile of 16][rows g, g + 8][inputs 0..31, 32..63]
struct Rows { vec4 part[PARTS][2]; };

__device__ __forceinline__ void multiply(float (&sums)[TILES][PARTS][4], const Weights& w, const Rows& x) {
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const vec4 a = w.part[m][0][k], b = w.part[m][1][k], c = x.part[p][k];
                mma(sums[m][p], a.x, b.x, a.y, b.y, c.x, c.y);
                mma(sums[m][p], a.z, b.z, a.w, b.w, c.z, c.w);
            }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
linear_stream(const act_t* __restrict__ x, const act_t* __restrict__ w, const act_t* __restrict__ bias, out_t* out, int n, int outputs, int inputs) {
    __shared__ float shares[2][WARPS][PARTS * ROWS * 8];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = inputs >> 6, mine = (chunks - warp + WARPS - 1) / WARPS, tiles = (outputs + ROWS - 1) / ROWS;
    const int count = mine * ((tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x);

    auto fetch = [&](Weights& to, int tile, int chunk) {
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = min(tile * ROWS + m * 16 + h * 8 + g, outputs - 1);
                const act_t* p = w + (int64_t)row * inputs + chunk * 64 + t * 8;
                to.part[m][h][0] = load_stream(p);
                to.part[m][h][1] = load_stream(p + 32);
            }
    };
    auto rows = [&](Rows& to, int chunk) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            const int token = p * 8 + g;
            to.part[p][0] = to.part[p][1] = vec4{0, 0, 0, 0};
            if (token < n) {
                const act_t* source = x + (int64_t)token * inputs + chunk * 64 + t * 8;
                to.part[p][0] = load4(source), to.part[p][1] = load4(source + 32);
            }
        }
    };

    Weights ring[DEPTH];
    Rows now, next;
    int next_tile = blockIdx.x, next_chunk = warp;  // what is fetched next
    auto advance = [&](int& tile, int& chunk) {
        chunk += WARPS;
        if (chunk >= chunks) chunk = warp, tile += gridDim.x;
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (d < count) {
            fetch(ring[d], next_tile, next_chunk);
            advance(next_tile, next_chunk);
        }
    wait_for_previous();
    launch_dependents();  // not before: who follows may rely on what lies two launches back

    float sums[TILES][PARTS][4] = {};
    int tile = blockIdx.x, chunk = warp, turn = 0;
    if (count) rows(next, chunk);
    for (int i = 0; i < count || (mine == 0 && tile < tiles);) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (i < count) {
                now = next;
                int following = chunk + WARPS;
                if (i + 1 < count) rows(next, following >= chunks ? warp : following);
                multiply(sums, ring[d], now);
                if (i + DEPTH < count) {
                    fetch(ring[d], next_tile, next_chunk);
                    advance(next_tile, next_chunk);
                }
                i++;
                chunk += WARPS;
            }
            if (chunk >= chunks && tile < tiles) {  // this warp's share of the tile is done (or it never had one)
                float* share = shares[turn & 1][warp];
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int p = 0; p < PARTS; p++)
#pragma unroll
                        for (int c = 0; c < 4; c++)  // [token][output]
                            share[(p * 8 + t * 2 + (c & 1)) * ROWS + m * 16 + (c >> 1) * 8 + g] = sums[m][p][c], sums[m][p][c] = 0.f;
                __syncthreads();
                for (int e = threadIdx.x; e < PARTS * 8 * ROWS; e += WARPS * 32) {
                    const int token = e / ROWS, row = tile * ROWS + e % ROWS;
                    if (token >= n || row >= outputs) continue;
                    float sum = 0.f;
#pragma unroll
                    for (int k = 0; k < WARPS; k++) sum += shares[turn & 1][k][e];
                    out[(int64_t)token * outputs + row] = from_float<out_t>((BIAS ? to_float(bias[row]) : 0.f) + sum);
                }
                turn++;
                tile += gridDim.x;
                chunk = warp;
            }
        }
    }
}
