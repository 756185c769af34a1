// What ranks exchange over memory of each other's GPUs, in one launch each: contracts all_reduce, also with the residual addition
// and the norm behind it, all_gather, argmax_pair, also of what a head has kept, broadcast; and own_experts, which exchanges nothing.
//
// Each rank has a region that all others write into. A block of a launch and the same block of the other ranks' launches meet by
// themselves: it writes its stretch into every other region, then a flag behind it, waits for the flags of the others in its own
// region, and reads what they brought there. Stretches and flags are taken in two turns: who has seen the flags of the next
// launch knows that all have read those of this one. One-shot sums over peer memory as in FasterTransformer and vLLM's custom
// all-reduce; here data are pushed, so that nobody waits for a read across the link.
//
// A flag has to wait until what lies in front of it has crossed the link. Few rows are brought as words of 8 bytes instead, half of each
// the count of the launch: who sees the count has the other half, without a flag (as in NCCL's protocol LL). Flags are compared there
// as well, beside the words. Words lie in stretches of their own, where nothing but a count is ever in the place of one.
#include "ranks.cuh"
#include "sampling.cuh"

struct Region {
    unsigned char* memory[RANKS];  // of each rank: `DEAD` words, flags [2, blocks, RANKS], stretches [2, RANKS, blocks, span] and, of
                                   // words that carry their count, [2, RANKS, word_blocks, word_span]
    uint32_t* counts;              // this rank's, [blocks]: launches that a block has made
    volatile int* stop;            // on the host: not 0 when this rank should wait for nobody any more
    volatile int64_t* fault;       // on the host, [8]: what this rank came for when it gave up; the first word says that it has
    int64_t patience_ns;           // 0: for as long as it takes
    int64_t span, word_span;       // bytes of a block's stretch
    int rank;
    int blocks, word_blocks;  // at most
};

constexpr int DEAD = 16;  // words in front: the first is not 0 where some rank has given up, the second where this one has

__device__ __forceinline__ uint64_t* dead_of(const Region& r, int of) { return reinterpret_cast<uint64_t*>(r.memory[of]); }
__device__ __forceinline__ uint64_t* flag_of(const Region& r, int of, int turn, int block, int from) {
    return dead_of(r, of) + DEAD + (int64_t(turn) * r.blocks + block) * RANKS + from;
}
__device__ __forceinline__ unsigned char* stretch_of(const Region& r, int of, int turn, int from, int block) {
    unsigned char* first = reinterpret_cast<unsigned char*>(flag_of(r, of, 2, 0, 0));
    return first + ((int64_t(turn) * RANKS + from) * r.blocks + block) * r.span;
}
__device__ __forceinline__ uint64_t* words_of(const Region& r, int of, int turn, int from, int block) {
    return reinterpret_cast<uint64_t*>(stretch_of(r, of, 2, 0, 0) + ((int64_t(turn) * RANKS + from) * r.word_blocks + block) * r.word_span);
}
__device__ __forceinline__ void release(uint64_t* flag, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t acquire(const uint64_t* flag) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}
// The same, ordered with nothing: for what says everything by itself.
__device__ __forceinline__ void post(uint64_t* flag, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t peek(const uint64_t* flag) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}
__device__ __forceinline__ int64_t nanoseconds() {
    int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
__device__ __forceinline__ uint4 fetch(const uint4* from) {  // never from the first cache, which knows nothing of other GPUs
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t fetch(const uint32_t* from) {
    uint32_t v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint16_t fetch(const uint16_t* from) {
    uint16_t v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint64_t fetch(const uint64_t* from) {
    uint64_t v;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

// The place of a launch in the run of those that this block has made, whose parity is the turn that it takes. False where this
// rank has given up before: then nothing is exchanged any more. All threads look for themselves, at both at once.
__device__ __forceinline__ bool begin(const Region& r, uint32_t& count) {
    const uint64_t dead = *reinterpret_cast<volatile uint64_t*>(dead_of(r, r.rank) + 1);
    count = *reinterpret_cast<volatile uint32_t*>(r.counts + blockIdx.x) + 1;
    return __syncthreads_or(dead != 0) == 0;
}

__device__ __forceinline__ void give_up(const Region& r, const Note& note, int step, int late) {
    if (atomicCAS(dead_of(r, r.rank) + 1, 0ull, 1ull) != 0) return;
    r.fault[1] = note.kind, r.fault[2] = note.launch, r.fault[3] = step, r.fault[4] = note.n, r.fault[5] = note.nbytes;
    r.fault[6] = late;
    __threadfence_system();
    r.fault[0] = 1;
    for (int of = 0; of < RANKS; ++of) release(dead_of(r, of), 1);  // whoever waits, for whomever, gives up as well
}

// Whether a thread that has looked so often should wait no longer. Looks closer now and then.
__device__ __forceinline__ bool in_vain(const Region& r, int looks, int64_t& since) {
    if (looks & 1023) return false;
    const int64_t now = nanoseconds();
    since = since ? since : now;
    return *r.stop != 0 || acquire(dead_of(r, r.rank)) != 0 || (r.patience_ns && now - since > r.patience_ns);
}

// Show what this block has brought, and wait until the same block of every other rank has. False, on all threads, where one does
// not come or came for something else; the host then finds out who.
__device__ __forceinline__ bool meet(const Region& r, const Note& note, int step, uint32_t count) {
    const int turn = count & 1, from = threadIdx.x;
    const uint64_t mine = flag_for(note, step, count);
    __syncthreads();  // a release is for all that it has seen, what other threads wrote before the barrier among it
    bool bad = false;
    if (from < RANKS && from != r.rank) {
        release(flag_of(r, from, turn, blockIdx.x, r.rank), mine);
        const uint64_t* flag = flag_of(r, r.rank, turn, blockIdx.x, from);
        int64_t since = 0;
        for (int looks = 1;; ++looks) {
            const uint64_t theirs = acquire(flag);
            if (theirs >> 32 == count) {
                bad = theirs != mine;
                break;
            }
            if (bad = in_vain(r, looks, since)) break;
        }
        if (bad) give_up(r, note, step, from);
    }
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) r.counts[blockIdx.x] = count;
    return !bad;
}

// The stretch of this block, in whole vectors of 16 bytes but for the end of what there is.
struct Stretch {
    int64_t begin, nbytes;
};
__device__ __forceinline__ Stretch stretch(int64_t nbytes) {
    const int64_t each = ((nbytes + gridDim.x - 1) / gridDim.x + 15) & ~int64_t(15), begin = each * blockIdx.x;
    const int64_t left = nbytes - begin;
    return {begin, left < 0 ? 0 : left < each ? left : each};
}

// Copy a stretch of x into the region of every other rank.
__device__ __forceinline__ void push(const Region& r, const unsigned char* x, const Stretch& s, int turn) {
    const int vectors = int(s.nbytes >> 4), pairs = int(s.nbytes >> 1);
    const uint4* whole = reinterpret_cast<const uint4*>(x + s.begin);
    const uint16_t* part = reinterpret_cast<const uint16_t*>(x + s.begin);
    for (int of = 0; of < RANKS; ++of) {
        if (of == r.rank) continue;
        unsigned char* to = stretch_of(r, of, turn, r.rank, blockIdx.x);
        for (int i = threadIdx.x; i < vectors; i += blockDim.x) reinterpret_cast<uint4*>(to)[i] = whole[i];
        for (int i = vectors * 8 + threadIdx.x; i < pairs; i += blockDim.x) reinterpret_cast<uint16_t*>(to)[i] = part[i];
    }
}

#if defined(ACT) && !defined(VECTORS)
// x [rows, width] := the sum over the ranks, in float32, rounded once.
extern "C" __global__ void all_reduce(const __grid_constant__ Region r, act_t* x, const int* step, int width, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * width * sizeof(act_t);
    const Stretch s = stretch(nbytes);
    uint32_t count;
    if (!begin(r, count)) return;
    const int turn = count & 1;
    unsigned char* bytes = reinterpret_cast<unsigned char*>(x);
    push(r, bytes, s, turn);
    if (!meet(r, {ALL_REDUCE, launch, n, nbytes}, step[0], count)) return;
    const int vectors = int(s.nbytes >> 4), elements = int(s.nbytes / sizeof(act_t));
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        uint4 brought[RANKS], *own = reinterpret_cast<uint4*>(bytes + s.begin) + i;
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            brought[from] = from == r.rank ? *own : fetch(reinterpret_cast<const uint4*>(stretch_of(r, r.rank, turn, from, blockIdx.x)) + i);
        *own = bits_of(sum_of(brought));
    }
    for (int i = vectors * LANES + threadIdx.x; i < elements; i += blockDim.x) {
        act_t* at = reinterpret_cast<act_t*>(bytes + s.begin) + i;
        float terms[RANKS];
#pragma unroll
        for (int from = 0; from < RANKS; ++from) {
            union { act_t value; uint16_t half; uint32_t word; } brought;
            const unsigned char* theirs = stretch_of(r, r.rank, turn, from, blockIdx.x) + i * sizeof(act_t);
            if (from == r.rank) brought.value = *at;
            else if (sizeof(act_t) == 4) brought.word = fetch(reinterpret_cast<const uint32_t*>(theirs));
            else brought.half = fetch(reinterpret_cast<const uint16_t*>(theirs));
            terms[from] = to_float(brought.value);
        }
        *at = from_float<act_t>(tree(terms));
    }
}
#endif

#if defined(VECTORS)
__device__ __forceinline__ void put(uint64_t* to, uint64_t first, uint64_t second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}
__device__ __forceinline__ void get(const uint64_t* from, uint64_t& first, uint64_t& second) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

// Four words of a vector, each of which carries `count` beside its own four bytes.
__device__ __forceinline__ void carry(uint64_t* to, const uint4& bits, uint32_t count) {
    const uint64_t high = uint64_t(count) << 32;
    put(to, high | bits.x, high | bits.y);
    put(to + 2, high | bits.z, high | bits.w);
}
__device__ __forceinline__ bool carried(const uint64_t* from, uint32_t count, uint4& bits) {
    uint64_t x, y, z, w;
    get(from, x, y);
    get(from + 2, z, w);
    bits = make_uint4(uint32_t(x), uint32_t(y), uint32_t(z), uint32_t(w));
    return (uint32_t(x >> 32) == count) & (uint32_t(y >> 32) == count) & (uint32_t(z >> 32) == count) & (uint32_t(w >> 32) == count);
}

// Wait for the words of a thread's vector from every other rank, where there is one, and for the flag of rank `whose`, where that is not
// below 0. Returns the rank that does not come or came for something else, or -1.
__device__ __forceinline__ int await(const Region& r, uint4 (&brought)[RANKS], int place, bool real, int whose, uint64_t mine) {
    const uint32_t count = uint32_t(mine >> 32);
    const int turn = count & 1;
    int64_t since = 0;
    for (int looks = 1;; ++looks) {
        int late = -1;
        const uint64_t theirs = whose < 0 ? mine : peek(flag_of(r, r.rank, turn, blockIdx.x, whose));
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (real && from != r.rank && !carried(words_of(r, r.rank, turn, from, blockIdx.x) + place, count, brought[from])) late = from;
        if (theirs != mine) {
            late = whose;
            if (theirs >> 32 == count) return late;
        }
        if (late < 0 || in_vain(r, looks, since)) return late;
    }
}

// x [rows, width] := x + the sum over the ranks of y, both rounded; out := the norm of x. A block has whole rows, and a norm is computed
// as in norms.cu. EARLY: what the launch in front does not write is read before that has ended: it is a projection, which lets this one
// come only once it has seen what was before it.
//
// Few rows, of one block each, are brought as words that carry their count.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
norm_of_few(const __grid_constant__ Region r, const act_t* y, act_t* x, const act_t* weight, act_t* out, const int* step, int width, float eps, int launch, int n) {
    __shared__ float scratch[32];
    launch_dependents();
    const int64_t first = int64_t(blockIdx.x) * width;
    Vector gains[VECTORS], stream[VECTORS], sums[VECTORS];
    load_gains(gains, weight, width);
    if (!EARLY) wait_for_previous();
    load_row(stream, x + first, width);
    const Note note = {ALL_REDUCE, launch, n, int64_t(n) * width * int64_t(sizeof(act_t))};
    const int now = __ldcg(step);
    uint32_t count;
    const bool alive = begin(r, count);
    if (EARLY) wait_for_previous();
    if (!alive) return;
    load_row(sums, y + first, width);
    const int turn = count & 1, whose = threadIdx.x < RANKS && threadIdx.x != r.rank ? int(threadIdx.x) : -1;
    const uint64_t mine = flag_for(note, now, count);
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (element_of(v) < width)
            for (int of = 0; of < RANKS; ++of)
                if (of != r.rank) carry(words_of(r, of, turn, r.rank, blockIdx.x) + element_of(v) / LANES * 4, bits_of(sums[v]), count);
    if (whose >= 0) post(flag_of(r, whose, turn, blockIdx.x, r.rank), mine);
    int late = -1;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        uint4 brought[RANKS];
        if (late < 0) late = await(r, brought, element_of(v) / LANES * 4, element_of(v) < width, v ? -1 : whose, mine);
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            if (from == r.rank) brought[from] = bits_of(sums[v]);
        sums[v] = sum_of(brought);
    }
    if (late >= 0) give_up(r, note, now, late);
    if (threadIdx.x == 0) r.counts[blockIdx.x] = count;
    if (__syncthreads_or(late >= 0)) return;
    add_row(stream, sums, x + first, width);
    store_norm(stream, gains, out + first, width, eps, scratch);
}

// Rows of a block, so many at a time, every gridDim.x-th from `row` on; place `j` of the first in what the block brings.
constexpr int AT_ONCE = VECTORS * RANKS > 4 ? 1 : 2;
__device__ __forceinline__ void load_rows(Vector (&kept)[AT_ONCE][VECTORS], const act_t* rows, int row, int n, int width) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
        if (row + k * int(gridDim.x) < n) load_row(kept[k], rows + int64_t(row + k * gridDim.x) * width, width);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
norm_of_sum(const __grid_constant__ Region r, const act_t* y, act_t* x, const act_t* weight, act_t* out, const int* step, int width, float eps, int launch, int n) {
    __shared__ float scratch[2][32];
    launch_dependents();
    Vector gains[VECTORS], stream[AT_ONCE][VECTORS], sums[AT_ONCE][VECTORS];
    load_gains(gains, weight, width);
    if (!EARLY) wait_for_previous();
    const int64_t row_bytes = int64_t(width) * sizeof(act_t);
    const int now = __ldcg(step), apart = gridDim.x, further = apart * AT_ONCE;
    uint32_t count;
    const bool alive = begin(r, count);
    if (EARLY) wait_for_previous();
    if (!alive) return;
    const int turn = count & 1;
    int row = blockIdx.x, j = 0, used = 0;
    for (;; row += further, j += AT_ONCE) {
        load_rows(sums, y, row, n, width);
        for (int of = 0; of < RANKS; ++of) {
            if (of == r.rank) continue;
            unsigned char* to = stretch_of(r, of, turn, r.rank, blockIdx.x) + j * row_bytes;
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                for (int v = 0; v < VECTORS; v++)
                    if (row + k * apart < n && element_of(v) < width) *reinterpret_cast<Vector*>(to + k * row_bytes + element_of(v) * sizeof(act_t)) = sums[k][v];
        }
        if (row + further >= n) break;
    }
    load_rows(stream, x, row, n, width);
    if (!meet(r, {ALL_REDUCE, launch, n, n * row_bytes}, now, count)) return;
    for (;;) {  // the last rows first, which are still there
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                if (row + k * apart >= n || element_of(v) >= width) continue;
                uint4 brought[RANKS];
#pragma unroll
                for (int from = 0; from < RANKS; ++from) {
                    const unsigned char* theirs = stretch_of(r, r.rank, turn, from, blockIdx.x) + (j + k) * row_bytes + element_of(v) * sizeof(act_t);
                    brought[from] = from == r.rank ? bits_of(sums[k][v]) : fetch(reinterpret_cast<const uint4*>(theirs));
                }
                sums[k][v] = sum_of(brought);
            }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (row + k * apart >= n) continue;
            const int64_t at = int64_t(row + k * apart) * width;
            add_row(stream[k], sums[k], x + at, width);
            store_norm(stream[k], gains, out + at, width, eps, scratch[used++ & 1]);  // by turns: others may still read the last one's
        }
        if (j == 0) return;
        row -= further, j -= AT_ONCE;
        load_rows(sums, y, row, n, width);
        load_rows(stream, x, row, n, width);
    }
}
#endif

#if defined(EACH_BYTES)
// out [rows, columns] := the ranks' x [rows, width] side by side, as far as there is room.
extern "C" __global__ void all_gather(const __grid_constant__ Region r, const word_t* x, word_t* out, const int* step, int width, int columns, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * width * sizeof(word_t);
    const Stretch s = stretch(nbytes);
    uint32_t count;
    if (!begin(r, count)) return;
    const int turn = count & 1;
    push(r, reinterpret_cast<const unsigned char*>(x), s, turn);
    if (!meet(r, {ALL_GATHER, launch, n, nbytes}, step[0], count)) return;
    const int first = int(s.begin / sizeof(word_t)), elements = int(s.nbytes / sizeof(word_t));
    for (int from = 0; from < RANKS; ++from) {
        const word_t* theirs = reinterpret_cast<const word_t*>(stretch_of(r, r.rank, turn, from, blockIdx.x));
        for (int i = threadIdx.x; i < elements; i += blockDim.x) {
            const int row = (first + i) / width, column = from * width + (first + i) % width;
            if (column >= columns) continue;
            out[int64_t(row) * columns + column] = from == r.rank ? x[first + i] : fetch(theirs + i);
        }
    }
}
#endif

// tokens [rows] := the id of the highest logit of all ranks, each of which has `width` columns of which `valid` are tokens.
extern "C" __global__ void argmax_pair(const __grid_constant__ Region r, const float* logits, const int* row_slot, int* tokens, const int* step, int width,
                                       int valid, int first, int launch, int n) {
    enter();
    __shared__ uint64_t best[32];
    uint32_t count;
    if (!begin(r, count)) return;
    const int turn = count & 1, warps = blockDim.x >> 5;
    uint64_t* mine = reinterpret_cast<uint64_t*>(stretch_of(r, r.rank, turn, r.rank, blockIdx.x));
    for (int row = blockIdx.x, j = 0; row < n; row += gridDim.x, ++j) {
        const float* of = logits + int64_t(row) * width;
        uint64_t top = 0;
        for (int c = threadIdx.x; c < valid; c += blockDim.x) {
            const uint64_t one = logit_key(of[c], first + c);
            top = one > top ? one : top;
        }
        for (int d = 16; d > 0; d >>= 1) {
            const uint64_t other = __shfl_xor_sync(FULL, top, d);
            top = other > top ? other : top;
        }
        __syncthreads();
        if ((threadIdx.x & 31) == 0) best[threadIdx.x >> 5] = top;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < warps; ++w) top = best[w] > top ? best[w] : top;
            mine[j] = top;
            for (int of_rank = 0; of_rank < RANKS; ++of_rank)
                if (of_rank != r.rank) reinterpret_cast<uint64_t*>(stretch_of(r, of_rank, turn, r.rank, blockIdx.x))[j] = top;
        }
    }
    if (!meet(r, {ARGMAX_PAIR, launch, n, int64_t(n) * 8}, step[0], count)) return;
    for (int row = blockIdx.x + gridDim.x * threadIdx.x, j = threadIdx.x; row < n; row += gridDim.x * blockDim.x, j += blockDim.x) {
        uint64_t top = 0;
        for (int from = 0; from < RANKS; ++from) {
            const uint64_t one = fetch(reinterpret_cast<const uint64_t*>(stretch_of(r, r.rank, turn, from, blockIdx.x)) + j);
            top = one > top ? one : top;
        }
        tokens[row] = row_slot[row] >= 0 ? chosen(top) : NO_TOKEN;
    }
}

// tokens [rows] := the id of the highest of all ranks' `keys` (`logit_key` of sampling.cuh), whose ids each rank counts from its `first`.
extern "C" __global__ void argmax_keys(const __grid_constant__ Region r, const uint64_t* keys, const int* row_slot, int* tokens, const int* step, int first, int launch, int n) {
    enter();
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    const bool real = row < n && row_slot[row] >= 0;
    const uint64_t mine = real ? keys[row] : 0;
    uint32_t count;
    if (!begin(r, count)) return;
    const int turn = count & 1;
    uint64_t best = mine == 0 || mine == BROKEN ? mine : mine - first;  // an id is kept as what it lacks
    for (int of = 0; of < RANKS; ++of)
        if (of != r.rank && row < n) reinterpret_cast<uint64_t*>(stretch_of(r, of, turn, r.rank, blockIdx.x))[threadIdx.x] = best;
    if (!meet(r, {ARGMAX_PAIR, launch, n, int64_t(n) * 8}, step[0], count) || row >= n) return;
    for (int from = 0; from < RANKS; ++from) {
        if (from == r.rank) continue;
        const uint64_t one = fetch(reinterpret_cast<const uint64_t*>(stretch_of(r, r.rank, turn, from, blockIdx.x)) + threadIdx.x);
        best = one > best ? one : best;
    }
    tokens[row] = chosen(best);
}

// x [rows] := that of rank 0.
extern "C" __global__ void broadcast(const __grid_constant__ Region r, int* x, const int* step, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * 4;
    const Stretch s = stretch(nbytes);
    uint32_t count;
    if (!begin(r, count)) return;
    const int turn = count & 1;
    if (r.rank == 0) push(r, reinterpret_cast<const unsigned char*>(x), s, turn);
    if (!meet(r, {BROADCAST, launch, n, nbytes}, step[0], count) || r.rank == 0) return;
    const uint32_t* theirs = reinterpret_cast<const uint32_t*>(stretch_of(r, r.rank, turn, 0, blockIdx.x));
    for (int i = threadIdx.x; i < s.nbytes / 4; i += blockDim.x) x[s.begin / 4 + i] = int(fetch(theirs + i));
}

// own [rows, k] := the experts of a row counted from this rank's first; -1 for those of others.
extern "C" __global__ void own_experts(const int* expert_ids, int* own, int k, int first, int kept, int n) {
    enter();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n * k) return;
    const int expert = expert_ids[i], counted = expert - first;
    own[i] = expert >= 0 && counted >= 0 && counted < kept ? counted : -1;
}
