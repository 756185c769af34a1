// Choosing tokens: keys that order floats, counter-based noise, the best of a row, and the filters' border without a sort.
#pragma once
#include "common.cuh"

// -- noise: Threefry-2x32 with 20 rounds (Salmon et al. 2011) -------------------------------------
__device__ __forceinline__ uint2 threefry(uint32_t k0, uint32_t k1, uint32_t x, uint32_t y) {
    const uint32_t keys[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
    const int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    x += k0, y += k1;
#pragma unroll
    for (int i = 0; i < 20; i++) {
        x += y;
        y = __funnelshift_l(y, y, rotations[i % 8]) ^ x;
        if (i % 4 == 3) x += keys[(i / 4 + 1) % 3], y += keys[(i / 4 + 2) % 3] + i / 4 + 1;
    }
    return make_uint2(x, y);
}

// Standard Gumbel variate of 32 bits; u = (k + 1/2) / 2^24 is replaced by its distance from the nearer end, which is exact.
__device__ __forceinline__ float gumbel(uint32_t bits) {
    const uint32_t k = bits >> 8;
    const bool lower = k < (1u << 23);
    const float t = (float(lower ? k : (1u << 24) - 1 - k) + 0.5f) * 0x1p-24f;
    return -logf(-(lower ? logf(t) : log1pf(-t)));
}

struct Noise { uint32_t k0, k1, position, base; };  // of one row
__device__ __noinline__ float noise_at(const Noise& s, int v) {
    const uint2 words = threefry(s.k0, s.k1, s.position, s.base + uint32_t(v >> 1));
    return gumbel(v & 1 ? words.y : words.x);
}

// -- the best of a row: 64-bit keys, higher is better, of equals the lower id ---------------------
__device__ __forceinline__ uint32_t order_key(float x) {  // orders floats; both zeros alike, so that they tie
    const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float key_value(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ uint64_t ranked(float x, int v) { return uint64_t(order_key(x)) << 32 | uint32_t(~v); }
__device__ __forceinline__ int ranked_id(uint64_t key) { return int(~uint32_t(key)); }
__device__ __forceinline__ float ranked_value(uint64_t key) { return key_value(uint32_t(key >> 32)); }

__device__ __forceinline__ uint64_t block_max(uint64_t x, uint64_t* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const uint64_t y = __shfl_xor_sync(FULL, x, d);
        x = y > x ? y : x;
    }
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    if (warp == 0) {
        uint64_t y = lane < warps ? scratch[lane] : 0;
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) {
            const uint64_t z = __shfl_xor_sync(FULL, y, d);
            y = z > y ? z : y;
        }
        if (lane == 0) scratch[32] = y;
    }
    __syncthreads();
    return scratch[32];
}

constexpr uint64_t BROKEN = ~0ull;  // above every key: NaN or +inf was met

// Key of logit v for a plain argmax; a key of 0 is no choice.
__device__ __forceinline__ uint64_t logit_key(float x, int v) {
    if (!(x < INFINITY_F)) return BROKEN;
    return x == -INFINITY_F ? 0 : ranked(x, v);
}
// f(x, v) for every logit of a row, whose threads read four at a time.
template <typename Use> __device__ __forceinline__ void for_row(const float* row, int vocab, Use use) {
    const int aligned = (uint64_t(row) & 15) == 0 ? vocab & ~3 : 0;
#pragma unroll 4
    for (int v = 4 * threadIdx.x; v < aligned; v += 4 * blockDim.x) {
        const float4 x = *reinterpret_cast<const float4*>(row + v);
        use(x.x, v), use(x.y, v + 1), use(x.z, v + 2), use(x.w, v + 3);
    }
#pragma unroll 1
    for (int v = aligned + threadIdx.x; v < vocab; v += blockDim.x) use(row[v], v);
}
__device__ __forceinline__ uint64_t best_of(const float* row, int vocab, uint64_t* scratch) {
    uint64_t best = 0;
    for_row(row, vocab, [&](float x, int v) {
        const uint64_t key = logit_key(x, v);
        best = key > best ? key : best;
    });
    return block_max(best, scratch);
}
__device__ __forceinline__ int chosen(uint64_t key) { return key == 0 || key == BROKEN ? NO_TOKEN : ranked_id(key); }
// What the choice of a row is left as: its token, or, of a vocabulary that ranks have shared out (PAIRS), the key, which they exchange.
#ifdef PAIRS
typedef uint64_t choice_t;
__device__ __forceinline__ choice_t choice_of(bool real, uint64_t key) { return real ? key : 0; }
#else
typedef int choice_t;
__device__ __forceinline__ choice_t choice_of(bool real, uint64_t key) { return real ? chosen(key) : NO_TOKEN; }
#endif

// -- filters --------------------------------------------------------------------------------------
// What survives top-k, and then top-p over what top-k left, is a border: all logits above `key`, and of those equal to it the
// ids below `limit`. It is found digit by digit (11, 11 and 10 bits of the key) from histograms of counts or masses. Masses are
// integers, exp(z - z_max) * 2^40, so that their sums do not depend on the order in which they are added. Only what can lie at
// or above the border enters a histogram: nothing below the k-th best of the threads' own best, nothing so improbable that
// all tokens like it together lie behind top-p.
constexpr int THREADS = 1024, BINS = 2048;
struct Border { uint32_t key; int limit; };
struct FilterSpace {
    uint64_t masses[BINS], scratch[33], before;
    uint32_t counts[BINS];
    int bin, ties, limit, sums[33];
};
struct Filters { float temperature, top_p, min_p; int top_k; };

__device__ __forceinline__ float share_of(float x, float temperature, float best) { return expf(x / temperature - best); }
__device__ __noinline__ uint64_t mass_of(float x, float temperature, float best) {
    return uint64_t(share_of(x, temperature, best) * 0x1p40f + 0.5f);
}
// Key below which every z lies more than `distance` below the best; a little lower, to be safe from rounding.
__device__ __forceinline__ uint32_t floor_key(float temperature, float best, float distance) {
    return order_key((best - distance - 0.01f - 1e-5f * fabsf(best)) * temperature);
}

// The bin, from the highest down, in which the sum that began with `s.before` reaches `wanted`.
template <bool BY_MASS> __device__ __noinline__ void pick(FilterSpace& s, int bins, double wanted) {
    const int each = (bins + THREADS - 1) / THREADS, top = bins - 1 - int(threadIdx.x) * each;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint64_t mine = 0;
    for (int j = 0; j < each; j++)
        if (top - j >= 0) mine += BY_MASS ? s.masses[top - j] : uint64_t(s.counts[top - j]);
    uint64_t sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const uint64_t y = __shfl_up_sync(FULL, sum, d);
        if (lane >= d) sum += y;
    }
    if (lane == 31) s.scratch[warp] = sum;
    if (threadIdx.x == 0) s.bin = -1;
    __syncthreads();
    uint64_t before = s.before + sum - mine;
    for (int w = 0; w < warp; w++) before += s.scratch[w];
    __syncthreads();
    if (double(before) < wanted && !(double(before + mine) < wanted))
        for (int j = 0; j < each && top - j >= 0; j++) {
            const uint64_t here = BY_MASS ? s.masses[top - j] : uint64_t(s.counts[top - j]);
            if (!(double(before + here) < wanted)) {
                s.bin = top - j, s.before = before, s.ties = int(s.counts[top - j]);
                break;
            }
            before += here;
        }
    __syncthreads();
}

template <bool BY_MASS> __device__ __noinline__ void tally(FilterSpace& s, int bin, float x, float temperature, float best) {
    atomicAdd(&s.counts[bin], 1u);
    if (BY_MASS) atomicAdd(&s.masses[bin], mass_of(x, temperature, best));
}

// Key of the logit at which the sum over descending keys reaches `wanted`; `s.before` is then the sum above it, `s.ties` how
// many have it. `each(f)` calls f(key, logit) for the values of this thread. 0 where the sum never reaches it.
template <bool BY_MASS, typename Each>
__device__ __forceinline__ uint32_t select(FilterSpace& s, double wanted, float temperature, float best, Each each) {
    uint32_t prefix = 0;
    if (threadIdx.x == 0) s.before = 0;
#pragma unroll 1
    for (int digit = 0; digit < 3; digit++) {
        const int width = digit < 2 ? 11 : 10, shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, bins = 1 << width;
#pragma unroll 1
        for (int b = threadIdx.x; b < bins; b += THREADS) {
            s.counts[b] = 0;
            if (BY_MASS) s.masses[b] = 0;
        }
        __syncthreads();
        each([&](uint32_t key, float x) {
            if (digit > 0 && key >> (shift + width) != prefix) return;
            tally<BY_MASS>(s, (key >> shift) & (bins - 1), x, temperature, best);
        });
        __syncthreads();
        pick<BY_MASS>(s, bins, wanted);
        if (s.bin < 0) return 0;
        prefix = prefix << width | uint32_t(s.bin);
    }
    return prefix;
}

// One more than the id of the `keep`-th of the logits that equal the border; all ids where there are no more than that.
__device__ __noinline__ int limit_of(FilterSpace& s, const float* row, int vocab, uint32_t border, int keep) {
    if (keep >= s.ties) return vocab;
    int found = 0;
#pragma unroll 1
    for (int base = 0; base < vocab && found < keep; base += THREADS) {
        const int v = base + threadIdx.x, tie = v < vocab && order_key(row[v]) == border;
        int total;
        const int place = found + block_scan(tie, s.sums, total);
        if (tie && place == keep) s.limit = v + 1;
        found += total;
    }
    __syncthreads();
    return s.limit;
}

__device__ __forceinline__ bool inside(const Border& border, uint32_t key, int v) {
    return key > border.key || (key == border.key && v < border.limit);
}

// The border of a row; `best`: its highest logit over the temperature. The whole block of THREADS calls it.
__device__ __noinline__ Border filter(FilterSpace& s, const float* row, int vocab, const Filters& f, float best) {
    Border border = {0, vocab};
    if (f.top_k > 0 && f.top_k < vocab) {
        uint32_t floor = 0;
        if (f.top_k <= THREADS && vocab > THREADS) {
            uint32_t mine = 0;
            for_row(row, vocab, [&](float x, int) { mine = max(mine, order_key(x)); });
            floor = select<false>(s, f.top_k, f.temperature, best, [&](auto use) { use(mine, 0.0f); });
        }
        border.key = select<false>(s, f.top_k, f.temperature, best, [&](auto use) {
            for_row(row, vocab, [&](float x, int) {
                const uint32_t key = order_key(x);
                if (key >= floor) use(key, x);
            });
        });
        border.limit = limit_of(s, row, vocab, border.key, f.top_k - int(s.before));
    }
    if (f.top_p < 1.0f) {
        const uint32_t heavy = floor_key(f.temperature, best, 29.0f);  // below, a mass is 0
        uint64_t mine = 0;
        for_row(row, vocab, [&](float x, int v) {
            const uint32_t key = order_key(x);
            if (key >= heavy && inside(border, key, v)) mine += mass_of(x, f.temperature, best);
        });
        const uint64_t total = block_sum(mine, s.scratch);
        // Tokens so improbable that all of a vocabulary of them hold less than half of what top-p drops are behind its border.
        const float distance = logf(2.0f * float(vocab)) - logf(1.0f - f.top_p);
        const uint32_t floor = max(floor_key(f.temperature, best, fminf(distance, 60.0f)), border.key);
        // The best one always stays; masses are whole numbers, so that one half is as good as 0.
        const double wanted = fmax(double(f.top_p) * double(total), 0.5);
        const uint32_t key = select<true>(s, wanted, f.temperature, best, [&](auto use) {
            for_row(row, vocab, [&](float x, int v) {
                const uint32_t key = order_key(x);
                if (key >= floor && inside(border, key, v)) use(key, x);
            });
        });
        if (key != 0) {
            const uint64_t each = mass_of(key_value(key), f.temperature, best);
            const double room = wanted - double(s.before);
            int keep = each ? int(room / double(each)) : vocab;
            while (keep < s.ties && double(keep) * double(each) < room) keep++;
            while (keep > 1 && keep <= s.ties && !(double(keep - 1) * double(each) < room)) keep--;
            // Ties that top-k left begin with the lowest ids too, so that its limit holds where all of them stay.
            border = {key, keep >= s.ties ? (key == border.key ? border.limit : vocab) : limit_of(s, row, vocab, key, keep)};
        }
    }
    return border;
}
