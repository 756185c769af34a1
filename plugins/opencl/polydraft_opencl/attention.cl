// Rotation, the paged cache, and attention over it. The cache is two buffers [num_blocks, block_size, num_kv_heads, head_dim].

size_t cache_row(int block, int position, int block_size, int num_kv_heads, int kv_head) {
    return ((size_t)block * block_size + position % block_size) * num_kv_heads + kv_head;
}

// A work-item a head of the row, in the order of qkv. An angle is counted in turns, as a fraction of 64 bits: turns[i] is what
// one position adds to pair i, and whole turns fall out of the product by themselves, so that far positions lose no digits.
kernel void rope_kv_write(Floats qkv, Ints row_slot, Ints positions, Ints block_table, FloatsOut cache_k, FloatsOut cache_v,
                          Floats q_norm, Floats k_norm, FloatsOut q_out, int block_table_width, global const ulong *turns,
                          int turns_rows, int interleaved, float attention_factor, int num_heads, int num_kv_heads, int head_dim,
                          int block_size, float eps) {
    const int head = get_global_id(0), r = get_global_id(1), slot = row_slot[r], position = positions[r];
    const int heads = num_heads + 2 * num_kv_heads, is_query = head < num_heads;
    const int is_value = head >= num_heads + num_kv_heads, kv_head = (head - num_heads) % num_kv_heads;
    Floats x = qkv + ((size_t)r * heads + head) * head_dim;
    FloatsOut target = q_out + ((size_t)r * num_heads + head) * head_dim;
    for (int i = 0; slot < 0 && is_query && i < head_dim; i++)
        target[i] = 0.0f;
    if (slot < 0 || head >= heads)
        return;
    if (!is_query) {
        const int block = block_table[(size_t)slot * block_table_width + position / block_size];
        if (block < 0)
            return;
        target = (is_value ? cache_v : cache_k) + cache_row(block, position, block_size, num_kv_heads, kv_head) * head_dim;
    }
    Floats norm = is_value ? 0 : is_query ? q_norm : k_norm;
    float squares = 0.0f;
    for (int i = 0; norm && i < head_dim; i++)
        squares += x[i] * x[i];
    const float root = norm ? sqrt(squares / head_dim + eps) : 1.0f;
    for (int i = is_value ? 0 : 2 * turns_rows; i < head_dim; i++)
        target[i] = norm ? x[i] / root * norm[i] : x[i];
    for (int i = 0; !is_value && i < turns_rows; i++) {
        const int j = interleaved ? 2 * i : i, k = interleaved ? 2 * i + 1 : i + turns_rows;
        const float first = norm ? x[j] / root * norm[j] : x[j], second = norm ? x[k] / root * norm[k] : x[k];
        const float half_turns = (float)(long)((ulong)position * turns[i]) * 0x1p-63f;
        const float cosine = attention_factor * cospi(half_turns), sine = attention_factor * sinpi(half_turns);
        target[j] = first * cosine - second * sine;
        target[k] = second * cosine + first * sine;
    }
}

// A group a head of the row. It takes LANES keys at a time, a score each, and rescales what it has summed up in `out`.
kernel void paged_attention(Floats q, Ints row_slot, Ints positions, Ints block_table, Floats cache_k, Floats cache_v,
                            FloatsOut out, int block_table_width, int num_heads, int num_kv_heads, int head_dim, int block_size,
                            float softmax_scale, int sliding_window) {
    local float shared[LANES], weights[LANES];
    local size_t rows[LANES];
    const int head = get_group_id(0), r = get_global_id(1), lane = get_local_id(0);
    const int slot = row_slot[r], last = positions[r];
    const size_t at = ((size_t)r * num_heads + head) * head_dim;
    for (int i = lane; slot < 0 && i < head_dim; i += LANES)
        out[at + i] = 0.0f;
    if (slot < 0)
        return;
    const int first = sliding_window && last >= sliding_window ? last + 1 - sliding_window : 0;
    Ints blocks = block_table + (size_t)slot * block_table_width;
    const int kv_head = head / (num_heads / num_kv_heads);
    float highest = -INFINITY, whole = 0.0f;
    for (int start = first; start <= last; start += LANES) {
        const int key = start + lane, keys = min(LANES, last + 1 - start);
        float score = -INFINITY;
        if (key <= last) {
            rows[lane] = cache_row(blocks[key / block_size], key, block_size, num_kv_heads, kv_head) * head_dim;
            score = 0.0f;
            for (int i = 0; i < head_dim; i++)
                score = fma(q[at + i], cache_k[rows[lane] + i], score);
            score *= softmax_scale;
        }
        const float before = highest;
        highest = fmax(highest, group_max(score, shared));
        const float weight = key <= last ? exp(score - highest) : 0.0f, kept = exp(before - highest);
        weights[lane] = weight;
        whole = whole * kept + group_sum(weight, shared); // behind a barrier: all lanes see weights and rows
        for (int i = lane; i < head_dim; i += LANES) {
            float sum = start == first ? 0.0f : out[at + i] * kept;
            for (int j = 0; j < keys; j++)
                sum = fma(weights[j], cache_v[rows[j] + i], sum);
            out[at + i] = sum;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (int i = lane; i < head_dim; i += LANES)
        out[at + i] /= whole;
}
