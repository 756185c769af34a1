// rope.cu for a cache of quantised rows: a warp turns a head in float32, finds the exponent of the row, and stores its numbers.
//
// Defines: ACT, KV (1: int8, 2: fp8), NORMS, INTERLEAVED, TILED (1: the cache is in tiles).
#include "quant.cuh"

extern "C" __global__ void rope_kv_write_quant(const act_t* qkv, const int* row_slot, const int* positions, const int* block_table, kv_t* keys,
                                               kv_t* values, const act_t* q_norm, const act_t* k_norm, const float2* table, act_t* q_out,
                                               int max_blocks, int num_heads, int num_kv_heads, int head_dim, int rope_dims, int block_size, float eps) {
    extern __shared__ float shared[];  // a row a warp
    begin_dependent();
    const int row = blockIdx.x, warp = threadIdx.x >> 5, head = blockIdx.y * (blockDim.x >> 5) + warp, lane = threadIdx.x & 31;
    if (head >= num_heads + 2 * num_kv_heads) return;
    const int slot = row_slot[row];
    const bool is_q = head < num_heads, is_v = head >= num_heads + num_kv_heads;
    act_t* query = q_out + ((int64_t)row * num_heads + head) * head_dim;
    if (slot < 0) {
        if (is_q)
            for (int i = lane; i < head_dim; i += 32) query[i] = from_float<act_t>(0.f);
        return;
    }
    const int position = positions[row], block = is_q ? 0 : block_table[(int64_t)slot * max_blocks + position / block_size];
    if (block < 0) return;
    const act_t* source = qkv + ((int64_t)row * (num_heads + 2 * num_kv_heads) + head) * head_dim;
    const act_t* weight = is_q ? q_norm : k_norm;
    const bool normed = NORMS && !is_v;
    float factor = 1.f;
    if (normed) {
        float squares = 0.f;
        for (int i = lane; i < head_dim; i += 32) squares += to_float(source[i]) * to_float(source[i]);
        factor = 1.f / sqrtf(warp_sum(squares) / head_dim + eps);
    }
    auto value = [&](int i) { return normed ? to_float(source[i]) * factor * to_float(weight[i]) : to_float(source[i]); };
    float* turned = shared + warp * head_dim;
    unsigned largest = 0;
    auto put = [&](int i, float x) {
        if (is_q) {
            query[i] = from_float<act_t>(x);
            return;
        }
        turned[i] = x;
        largest = max(largest, __float_as_uint(x) & 0x7fffffffu);
    };
    const int half = is_v ? 0 : rope_dims >> 1;
    const float2* turns = table + (int64_t)position * (rope_dims >> 1);
    for (int i = lane; i < half; i += 32) {
        const int a = INTERLEAVED ? 2 * i : i, b = INTERLEAVED ? 2 * i + 1 : i + half;
        const float x = value(a), y = value(b);
        const float2 turn = turns[i];
        put(a, rotated(x, -y, turn.x, turn.y));
        put(b, rotated(y, x, turn.x, turn.y));
    }
    for (int i = 2 * half + lane; i < head_dim; i += 32) put(i, value(i));
    if (is_q) return;
    const int e = exponent_of(__reduce_max_sync(FULL, largest));
    __syncwarp();
    kv_t* half_of_cache = is_v ? values : keys;
    const Group<TILED> group(block, num_kv_heads, is_v ? head - num_heads - num_kv_heads : head - num_heads, position % block_size, block_size, head_dim);
    for (int i = lane; i < head_dim; i += 32) half_of_cache[is_v ? group.value(i) : group.key(i)] = nearest(turned[i], e);
    if (lane == 0) half_of_cache[group.exponent()] = (kv_t)e;
}
