// Attention of any shape and dtype, one block a row and head: for float32, and for head or block sizes that the fast kernels lack.
// Defines: ACT, TILED (1: the cache is in tiles), KV where its rows are quantised, WINDOW where it slides.
#include "attention.cuh"

extern "C" __global__ void attention_plain(const act_t* q, const kv_t* keys, const kv_t* values, const int* row_slot, const int* positions,
                                           const int* block_table, act_t* out, int max_blocks, int num_heads, int num_kv_heads, int head_dim,
                                           int block_size, float scale) {
    __shared__ float plain[PLAIN_KEYS];
    begin_dependent();
    const int row = blockIdx.x, head = blockIdx.y, slot = row_slot[row];
    const int64_t at = ((int64_t)row * num_heads + head) * head_dim;
    if (slot < 0) {
        for (int d = threadIdx.x; d < head_dim; d += blockDim.x) out[at + d] = from_float<act_t>(0.f);
        return;
    }
    const Pages<TILED> pages = {keys, values, block_table + (int64_t)slot * max_blocks, num_kv_heads, block_size, head_dim};
    attend_row<TILED>(q + at, pages, head / (num_heads / num_kv_heads), positions[row], scale, out + at, plain);
}
