// Rows of activations: picked, normalised, multiplied. A work-item a column, where nothing else is said.

void pick(Floats x, int from, FloatsOut out, int width) {
    const int column = get_global_id(0), r = get_global_id(1);
    if (column < width)
        out[(size_t)r * width + column] = from >= 0 ? x[(size_t)from * width + column] : 0.0f;
}

kernel void embed(Ints ids, Floats weight, FloatsOut out, int out_width) { pick(weight, ids[get_global_id(1)], out, out_width); }

kernel void gather_rows(Floats x, Ints index, FloatsOut out, int out_width) { pick(x, index[get_global_id(1)], out, out_width); }

kernel void select_last_rows(Floats hidden, Ints positions, Ints seq_start, Ints draft_slot, Ints draft_position, FloatsOut out,
                             int out_width) {
    const int i = get_global_id(1), start = seq_start[i];
    pick(hidden, draft_slot[i] < 0 ? NO_ROW : start + draft_position[i] - positions[start], out, out_width);
}

kernel void residual_add(FloatsOut x, Floats y, int x_width) {
    const int column = get_global_id(0), r = get_global_id(1);
    if (column < x_width)
        x[(size_t)r * x_width + column] += y[(size_t)r * x_width + column];
}

kernel void swiglu(Floats gate_up, FloatsOut out, int out_width) {
    const int column = get_global_id(0), r = get_global_id(1);
    Floats row = gate_up + (size_t)r * 2 * out_width;
    if (column < out_width)
        out[(size_t)r * out_width + column] = row[column] / (1.0f + exp(-row[column])) * row[out_width + column];
}

// Sixteen sums an output, so that their order depends on the width alone.
kernel void linear(Floats x, Floats weight, Floats bias, FloatsOut out, int x_width, int out_width) {
    const int column = get_global_id(0), r = get_global_id(1);
    if (column >= out_width)
        return;
    Floats left = x + (size_t)r * x_width, right = weight + (size_t)column * x_width;
    float16 sums = 0.0f;
    int i = 0;
    for (; i + 16 <= x_width; i += 16)
        sums = fma(vload16(0, left + i), vload16(0, right + i), sums);
    const float8 eight = sums.lo + sums.hi;
    const float4 four = eight.lo + eight.hi;
    float sum = four.x + four.y + four.z + four.w;
    for (; i < x_width; i++)
        sum = fma(left[i], right[i], sum);
    out[(size_t)r * out_width + column] = bias ? sum + bias[column] : sum;
}

// RMSNorm of one row by one group; of a row of zeros where it is masked.
void normalise(Floats x, Floats weight, FloatsOut out, int width, float eps, int plus_one, int masked, local float *shared) {
    float squares = 0.0f;
    for (int i = get_local_id(0); i < width; i += LANES)
        squares += masked ? 0.0f : x[i] * x[i];
    const float root = sqrt(group_sum(squares, shared) / width + eps);
    for (int i = get_local_id(0); i < width; i += LANES)
        out[i] = masked ? 0.0f : x[i] / root * (plus_one ? 1.0f + weight[i] : weight[i]);
}

kernel void rms_norm(Floats x, Floats weight, FloatsOut out, int x_width, float eps, int plus_one) {
    local float shared[LANES];
    const size_t at = (size_t)get_global_id(1) * x_width;
    normalise(x + at, weight, out + at, x_width, eps, plus_one, 0, shared);
}

// Two groups a row: the left half of the output, and the right one.
kernel void combine_draft_inputs(Floats embedding, Floats hidden, Floats emb_norm, Floats hid_norm, Ints positions, FloatsOut out,
                                 int hidden_width, float eps, int plus_one, int hidden_first, int mask_first_position) {
    local float shared[LANES];
    const int side = get_group_id(0), r = get_global_id(1), is_hidden = side == (hidden_first ? 0 : 1);
    const int masked = !is_hidden && mask_first_position && positions[r] == 0;
    const size_t at = (size_t)r * hidden_width;
    normalise((is_hidden ? hidden : embedding) + at, is_hidden ? hid_norm : emb_norm, out + 2 * at + side * hidden_width,
              hidden_width, eps, plus_one, masked, shared);
}
