// What ranks exchange where NCCL carries it: of each collective the launch in front of ncclAllGather, which lays down what this rank
// brings, and the one behind it, which takes what all have brought. Contracts all_reduce, all_gather, argmax_pair and broadcast.
//
// NCCL moves bytes and computes nothing, so sums have the bits that they have over memory of each other's GPUs. In front of a rank's
// bytes stands what it came for: ranks that part, or a gather that was aborted, are seen before anything is taken.
#include "ranks.cuh"
#include "sampling.cuh"

struct Carried {
    unsigned char* memory;   // [RANKS], each of `stride` bytes: a head, and what the rank has brought
    uint32_t* count;         // launches that this rank has made
    volatile int64_t* came;  // on the host, [8]: `count` when this rank came and when it had taken, and what it came for
    volatile int64_t* fault; // on the host, [8]: what this rank came for when others came for something else; the first word says so
    int rank;
};

constexpr int HEAD = 16;  // bytes, so that what stands behind it is aligned

__device__ __forceinline__ unsigned char* brought_by(const Carried& c, int rank, int64_t nbytes) {
    return c.memory + rank * (HEAD + ((nbytes + 15) & ~int64_t(15)));
}
__device__ __forceinline__ unsigned char* data_of(const Carried& c, int rank, int64_t nbytes) { return brought_by(c, rank, nbytes) + HEAD; }
__device__ __forceinline__ uint64_t head_of(const Carried& c, int rank, int64_t nbytes) {
    return __ldcg(reinterpret_cast<const uint64_t*>(brought_by(c, rank, nbytes)));
}
__device__ __forceinline__ int thread() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int threads() { return gridDim.x * blockDim.x; }

__device__ __forceinline__ void come(const Carried& c, const Note& note, int step) {
    if (thread() != 0) return;
    const uint32_t count = *c.count + 1;
    *c.count = count;
    *reinterpret_cast<uint64_t*>(brought_by(c, c.rank, note.nbytes)) = flag_for(note, step, count);
    c.came[2] = note.kind, c.came[3] = note.launch, c.came[4] = step, c.came[5] = note.n, c.came[6] = note.nbytes;
    c.came[0] = count;
}

// Whether all ranks came for the same, for all threads of a block.
__device__ __forceinline__ bool agreed(const Carried& c, const Note& note, int step) {
    const bool other = threadIdx.x < RANKS && head_of(c, threadIdx.x, note.nbytes) != head_of(c, c.rank, note.nbytes);
    if (other && blockIdx.x == 0) {
        c.fault[1] = note.kind, c.fault[2] = note.launch, c.fault[3] = step, c.fault[4] = note.n, c.fault[5] = note.nbytes;
        c.fault[6] = threadIdx.x;
        c.fault[0] = 1;
    }
    if (thread() == 0) c.came[1] = *c.count;
    return __syncthreads_or(other) == 0;
}

// What a rank has in x.
extern "C" __global__ void bring(const __grid_constant__ Carried c, const uint16_t* x, const int* step, int row_bytes, int kind, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * row_bytes;
    come(c, {kind, launch, n, nbytes}, step[0]);
    unsigned char* to = data_of(c, c.rank, nbytes);
    const int vectors = int(nbytes >> 4), pairs = int(nbytes >> 1);
    for (int i = thread(); i < vectors; i += threads()) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(x)[i];
    for (int i = vectors * 8 + thread(); i < pairs; i += threads()) reinterpret_cast<uint16_t*>(to)[i] = x[i];
}

// The highest logit of each row and its id, of `valid` tokens from `first` on.
extern "C" __global__ void bring_choice(const __grid_constant__ Carried c, const float* logits, const int* row_slot, const int* step, int width, int valid, int first, int launch, int n) {
    __shared__ uint64_t scratch[33];
    enter();
    const int64_t nbytes = int64_t(n) * 8;
    come(c, {ARGMAX_PAIR, launch, n, nbytes}, step[0]);
    uint64_t* keys = reinterpret_cast<uint64_t*>(data_of(c, c.rank, nbytes));
    for (int row = blockIdx.x; row < n; row += gridDim.x) {
        uint64_t best = 0;
        for (int v = threadIdx.x; v < valid; v += blockDim.x) {
            const uint64_t key = logit_key(logits[int64_t(row) * width + v], first + v);
            best = key > best ? key : best;
        }
        best = block_max(best, scratch);
        if (threadIdx.x == 0) keys[row] = row_slot[row] >= 0 ? best : 0;
    }
}

extern "C" __global__ void choose(const __grid_constant__ Carried c, int* tokens, const int* step, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * 8;
    if (!agreed(c, {ARGMAX_PAIR, launch, n, nbytes}, step[0])) return;
    for (int row = thread(); row < n; row += threads()) {
        uint64_t best = 0;
        for (int from = 0; from < RANKS; ++from) {
            const uint64_t key = __ldcg(reinterpret_cast<const uint64_t*>(data_of(c, from, nbytes)) + row);
            best = key > best ? key : best;
        }
        tokens[row] = chosen(best);
    }
}

#if defined(ACT)
// x [rows, width] := the sum over the ranks, in float32, rounded once.
extern "C" __global__ void add(const __grid_constant__ Carried c, act_t* x, const int* step, int width, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * width * sizeof(act_t);
    if (!agreed(c, {ALL_REDUCE, launch, n, nbytes}, step[0])) return;
    const int vectors = int(nbytes >> 4), elements = int(nbytes / sizeof(act_t));
    for (int i = thread(); i < vectors; i += threads()) {
        uint4 brought[RANKS];
#pragma unroll
        for (int from = 0; from < RANKS; ++from) brought[from] = __ldcg(reinterpret_cast<const uint4*>(data_of(c, from, nbytes)) + i);
        reinterpret_cast<uint4*>(x)[i] = bits_of(sum_of(brought));
    }
    for (int i = vectors * LANES + thread(); i < elements; i += threads()) {
        float terms[RANKS];
#pragma unroll
        for (int from = 0; from < RANKS; ++from) terms[from] = to_float(reinterpret_cast<const act_t*>(data_of(c, from, nbytes))[i]);
        x[i] = from_float<act_t>(tree(terms));
    }
}
#endif

#if defined(EACH_BYTES)
// out [rows, columns] := the ranks' x [rows, width] side by side, as far as there is room.
extern "C" __global__ void columns(const __grid_constant__ Carried c, word_t* out, const int* step, int width, int columns, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * width * sizeof(word_t);
    if (!agreed(c, {ALL_GATHER, launch, n, nbytes}, step[0])) return;
    for (int from = 0; from < RANKS; ++from) {
        const word_t* theirs = reinterpret_cast<const word_t*>(data_of(c, from, nbytes));
        for (int i = thread(); i < n * width; i += threads()) {
            const int row = i / width, column = from * width + i % width;
            if (column < columns) out[int64_t(row) * columns + column] = theirs[i];
        }
    }
}
#endif

// x [rows] := that of rank 0.
extern "C" __global__ void first(const __grid_constant__ Carried c, int* x, const int* step, int launch, int n) {
    enter();
    const int64_t nbytes = int64_t(n) * 4;
    if (!agreed(c, {BROADCAST, launch, n, nbytes}, step[0])) return;
    for (int row = thread(); row < n; row += threads()) x[row] = reinterpret_cast<const int*>(data_of(c, 0, nbytes))[row];
}
