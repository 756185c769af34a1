// Optional norm of q and k heads, rotary embedding, and the store of keys and values in the paged cache [2, blocks, heads, block, dim].
//
// One warp a head of a row; or one block a row, of whose threads each has 8 elements of a head and the 8 that turn with them. Cosines and
// sines come from a table made in float64 (a pair a position and frequency).
// Defines: ACT, NORMS, INTERLEAVED, TILED (1: the cache is in tiles), HEAD_DIM (of heads that are turned as a whole, in halves and without
// norms, into tiles: a multiple of 32, by blocks of rows; else left out).
#include "cache.cuh"

#ifdef HEAD_DIM
constexpr int EIGHTS = HEAD_DIM / 16;
struct alignas(16) Eight { act_t e[8]; };

extern "C" __global__ void rope_kv_write(const act_t* __restrict__ qkv, const int* row_slot, const int* positions, const int* block_table,
                                         act_t* keys, act_t* values, const act_t* q_norm, const act_t* k_norm, const float2* __restrict__ table,
                                         act_t* q_out, int max_blocks, int num_heads, int num_kv_heads, int head_dim, int rope_dims,
                                         int block_size, float eps) {
    begin_dependent();
    const int row = blockIdx.x, head = threadIdx.x / EIGHTS, at = threadIdx.x % EIGHTS * 8, other = at + HEAD_DIM / 2;
    const act_t* source = qkv + ((int64_t)row * (num_heads + 2 * num_kv_heads) + head) * HEAD_DIM;
    Eight a = *(const Eight*)(source + at), b = *(const Eight*)(source + other);
    const bool is_q = head < num_heads, is_v = head >= num_heads + num_kv_heads;
    const int slot = row_slot[row], position = positions[row];
    act_t* target = q_out + ((int64_t)row * num_heads + head) * HEAD_DIM;
    if (slot < 0) {
        if (is_q) *(vec4*)(target + at) = *(vec4*)(target + other) = vec4{0, 0, 0, 0};
        return;
    }
    if (!is_q) {
        const int block = block_table[(int64_t)slot * max_blocks + position / block_size];
        if (block < 0) return;
        const int kv_head = is_v ? head - num_heads - num_kv_heads : head - num_heads;
        target = (is_v ? values : keys) + ((int64_t)block * num_kv_heads + kv_head) * block_size * HEAD_DIM;
    }
    const int offset = is_q ? 0 : position % block_size;  // row within the block
    if (is_v) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            target[value_offset<true>(offset, at + i, HEAD_DIM)] = a.e[i];
            target[value_offset<true>(offset, other + i, HEAD_DIM)] = b.e[i];
        }
        return;
    }
    const float2* turns = table + (int64_t)position * (HEAD_DIM / 2) + at;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float x = to_float(a.e[i]), y = to_float(b.e[i]);
        const float2 turn = turns[i];
        a.e[i] = from_float<act_t>(rotated(x, -y, turn.x, turn.y));
        b.e[i] = from_float<act_t>(rotated(y, x, turn.x, turn.y));
    }
    *(Eight*)(target + (is_q ? at : key_offset<true>(offset, at, HEAD_DIM))) = a;
    *(Eight*)(target + (is_q ? other : key_offset<true>(offset, other, HEAD_DIM))) = b;
}
#else
extern "C" __global__ void rope_kv_write(const act_t* __restrict__ qkv, const int* row_slot, const int* positions, const int* block_table,
                                         act_t* keys, act_t* values, const act_t* q_norm, const act_t* k_norm, const float2* __restrict__ table,
                                         act_t* q_out, int max_blocks, int num_heads, int num_kv_heads, int head_dim, int rope_dims,
                                         int block_size, float eps) {
    begin_dependent();
    const int row = blockIdx.x, head = blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (head >= num_heads + 2 * num_kv_heads) return;
    const int slot = row_slot[row];
    const bool is_q = head < num_heads, is_v = head >= num_heads + num_kv_heads;
    act_t* target = q_out + ((int64_t)row * num_heads + head) * head_dim;
    if (slot < 0) {
        if (is_q)
            for (int i = lane; i < head_dim; i += 32) target[i] = from_float<act_t>(0.f);
        return;
    }
    const int position = positions[row];
    if (!is_q) {
        const int block = block_table[(int64_t)slot * max_blocks + position / block_size];
        if (block < 0) return;
        const int kv_head = is_v ? head - num_heads - num_kv_heads : head - num_heads;
        target = (is_v ? values : keys) + ((int64_t)block * num_kv_heads + kv_head) * block_size * head_dim;
    }
    const int offset = is_q ? 0 : position % block_size;  // row within the block
    const act_t* source = qkv + ((int64_t)row * (num_heads + 2 * num_kv_heads) + head) * head_dim;
    if (is_v) {
        for (int i = lane; i < head_dim; i += 32) target[value_offset<TILED>(offset, i, head_dim)] = source[i];
        return;
    }
    const act_t* weight = is_q ? q_norm : k_norm;
    float factor = 1.f;
    if (NORMS) {
        float squares = 0.f;
        for (int i = lane; i < head_dim; i += 32) squares += to_float(source[i]) * to_float(source[i]);
        factor = 1.f / sqrtf(warp_sum(squares) / head_dim + eps);
    }
    auto value = [&](int i) { return NORMS ? to_float(source[i]) * factor * to_float(weight[i]) : to_float(source[i]); };
    auto place = [&](int i) -> act_t& { return is_q ? target[i] : target[key_offset<TILED>(offset, i, head_dim)]; };
    const int half = rope_dims >> 1;
    const float2* turns = table + (int64_t)position * half;
    for (int i = lane; i < half; i += 32) {
        const int a = INTERLEAVED ? 2 * i : i, b = INTERLEAVED ? 2 * i + 1 : i + half;
        const float x = value(a), y = value(b);
        const float2 turn = turns[i];
        place(a) = from_float<act_t>(rotated(x, -y, turn.x, turn.y));
        place(b) = from_float<act_t>(rotated(y, x, turn.x, turn.y));
    }
    for (int i = rope_dims + lane; i < head_dim; i += 32) place(i) = NORMS ? from_float<act_t>(value(i)) : source[i];
}
#endif
