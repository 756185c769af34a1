// What ranks exchange over memory of each other's GPUs, in one launch each: contracts all_reduce, all_gather, argmax_pair,
// broadcast; and own_experts, which exchanges nothing.
//
// Each rank has a region that all others write into. A block of a launch and the same block of the other ranks' launches meet by
// themselves: it writes its stretch into every other region, then a flag behind it, waits for the flags of the others in its own
// region, and reads what they brought there. Stretches and flags are taken in two turns: who has seen the flags of the next
// launch knows that all have read those of this one. One-shot sums over peer memory as in FasterTransformer and vLLM's custom
// all-reduce; here data are pushed, so that nobody waits for a read across the link.
#include "common.cuh"

#ifndef RANKS
#define RANKS 1
#endif

struct Region {
    unsigned char* memory[RANKS];  // of each rank: `DEAD` words, flags [2, blocks, RANKS], stretches [2, RANKS, blocks, span]
    uint32_t* counts;              // this rank's, [blocks]: launches that a block has made
    volatile int* stop;            // on the host: not 0 when this rank should wait for nobody any more
    volatile int64_t* fault;       // on the host, [8]: what this rank came for when it gave up; the first word says that it has
    int64_t patience_ns;           // 0: for as long as it takes
    int64_t span;                  // bytes of a block's stretch
    int rank;
    int blocks;  // at most
};

// What a rank came for. Ranks compare it.
struct Note {
    int kind, launch, n;
    int64_t nbytes;
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
__device__ __forceinline__ void release(uint64_t* flag, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t acquire(const uint64_t* flag) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
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

__device__ __forceinline__ uint32_t digest(const Note& note, int step) {
    const uint32_t what = uint32_t(note.kind) * 0x9e3779b1u ^ uint32_t(note.launch) * 0x85ebca6bu ^ uint32_t(note.n) * 0xc2b2ae35u;
    return what ^ uint32_t(note.nbytes) * 0x27d4eb2fu ^ uint32_t(step) * 0x165667b1u;
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
__device__ __forceinline__ bool meet(const Region& r, const Note& note, const int* step, uint32_t count) {
    const int turn = count & 1, from = threadIdx.x;
    const uint64_t mine = uint64_t(count) << 32 | digest(note, step[0]);
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
        if (bad) give_up(r, note, step[0], from);
    }
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) r.counts[blockIdx.x] = count;
    return !bad;
}

template <typename T> __device__ __forceinline__ T tree(T (&terms)[RANKS]) {  // neighbours first, whoever came first
#pragma unroll
    for (int apart = 1; apart < RANKS; apart *= 2)
#pragma unroll
        for (int i = 0; i + apart < RANKS; i += 2 * apart) terms[i] += terms[i + apart];
    return terms[0];
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

#if defined(ACT)
// x [rows, width] := the sum over the ranks, in float32, rounded once.
extern "C" __global__ void all_reduce(Region r, act_t* x, const int* step, int width, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * width * sizeof(act_t);
    const Stretch s = stretch(nbytes);
    uint32_t count;
    if (!begin(r, count)) return;
    const int turn = count & 1;
    unsigned char* bytes = reinterpret_cast<unsigned char*>(x);
    push(r, bytes, s, turn);
    if (!meet(r, {1, launch, n, nbytes}, step, count)) return;
    constexpr int EACH = 16 / sizeof(act_t);
    const int vectors = int(s.nbytes >> 4), elements = int(s.nbytes / sizeof(act_t));
    union Vector {
        uint4 bits;
        act_t each[EACH];
    };
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        Vector brought[RANKS], sum;
#pragma unroll
        for (int from = 0; from < RANKS; ++from)
            brought[from].bits = from == r.rank ? reinterpret_cast<const uint4*>(bytes + s.begin)[i]
                                                : fetch(reinterpret_cast<const uint4*>(stretch_of(r, r.rank, turn, from, blockIdx.x)) + i);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            float terms[RANKS];
#pragma unroll
            for (int from = 0; from < RANKS; ++from) terms[from] = to_float(brought[from].each[e]);
            sum.each[e] = from_float<act_t>(tree(terms));
        }
        reinterpret_cast<uint4*>(bytes + s.begin)[i] = sum.bits;
    }
    for (int i = vectors * EACH + threadIdx.x; i < elements; i += blockDim.x) {
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

#if defined(EACH_BYTES)
#if EACH_BYTES == 4
typedef uint32_t word_t;
#else
typedef uint16_t word_t;
#endif
// out [rows, columns] := the ranks' x [rows, width] side by side, as far as there is room.
extern "C" __global__ void all_gather(Region r, const word_t* x, word_t* out, const int* step, int width, int columns, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * width * sizeof(word_t);
    const Stretch s = stretch(nbytes);
    uint32_t count;
    if (!begin(r, count)) return;
    const int turn = count & 1;
    push(r, reinterpret_cast<const unsigned char*>(x), s, turn);
    if (!meet(r, {0, launch, n, nbytes}, step, count)) return;
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

// A logit and its id as one number: the higher logit is more, then the lower id. NaN counts as infinity.
__device__ __forceinline__ uint64_t ranked(float value, int id) {
    uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);
    bits = value != value ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~id);
}
constexpr uint32_t LEAST = 0x007fffffu, MOST = 0xff800000u;  // of minus infinity and of infinity

// tokens [rows] := the id of the highest logit of all ranks, each of which has `width` columns of which `valid` are tokens.
extern "C" __global__ void argmax_pair(Region r, const float* logits, const int* row_slot, int* tokens, const int* step, int width,
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
            const uint64_t one = ranked(of[c], first + c);
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
    if (!meet(r, {2, launch, n, int64_t(n) * 8}, step, count)) return;
    for (int row = blockIdx.x + gridDim.x * threadIdx.x, j = threadIdx.x; row < n; row += gridDim.x * blockDim.x, j += blockDim.x) {
        uint64_t top = 0;
        for (int from = 0; from < RANKS; ++from) {
            const uint64_t one = fetch(reinterpret_cast<const uint64_t*>(stretch_of(r, r.rank, turn, from, blockIdx.x)) + j);
            top = one > top ? one : top;
        }
        const uint32_t value = uint32_t(top >> 32);
        tokens[row] = row_slot[row] >= 0 && value > LEAST && value < MOST ? int(~uint32_t(top)) : NO_TOKEN;
    }
}

// x [rows] := that of rank 0.
extern "C" __global__ void broadcast(Region r, int* x, const int* step, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * 4;
    const Stretch s = stretch(nbytes);
    uint32_t count;
    if (!begin(r, count)) return;
    const int turn = count & 1;
    if (r.rank == 0) push(r, reinterpret_cast<const unsigned char*>(x), s, turn);
    if (!meet(r, {3, launch, n, nbytes}, step, count) || r.rank == 0) return;
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
