// From logits to tokens: one group a row.

// Unsigned numbers in the order of floats; both zeros are equal.
uint key_of(float x) {
    const uint bits = as_uint(x) == 0x80000000u ? 0u : as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A token's place in the order "lower logits first, of equals the higher id": no two have the same.
ulong place_of(Floats row, int width, int v) { return (ulong)key_of(row[v]) << 32 | (uint)(width - 1 - v); }

// The lowest id of the highest logit of a row; NO_TOKEN where there is NaN or +inf, or only -inf.
int highest(Floats row, int width, local ulong *shared) {
    ulong best = 0;
    for (int v = get_local_id(0); v < width; v += LANES)
        best = max(best, isnan(row[v]) || row[v] == INFINITY ? ULONG_MAX : place_of(row, width, v));
    best = group_best(best, shared);
    return best == ULONG_MAX || best >> 32 <= key_of(-INFINITY) ? NO_TOKEN : width - 1 - (int)(uint)best;
}

kernel void process_logits(FloatsOut logits, Ints row_slot, int logits_width, int num_valid) {
    const int v = num_valid + get_global_id(0), r = get_global_id(1);
    if (v < logits_width && row_slot[r] >= 0)
        logits[(size_t)r * logits_width + v] = -INFINITY;
}

kernel void argmax(Floats logits, Ints row_slot, IntsOut tokens, int logits_width) {
    local ulong shared[LANES];
    const int r = get_global_id(1);
    const int best = row_slot[r] < 0 ? NO_TOKEN : highest(logits + (size_t)r * logits_width, logits_width, shared);
    if (get_local_id(0) == 0)
        tokens[r] = best;
}

// Threefry-2x32 with 20 rounds (Salmon et al. 2011).
uint2 threefry(uint2 key, uint2 counter) {
    const uint rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24}, schedule[3] = {key.x, key.y, key.x ^ key.y ^ 0x1BD11BDAu};
    uint x = counter.x + key.x, y = counter.y + key.y;
    for (uint i = 0; i < 20; i++) {
        x += y;
        y = rotate(y, rotations[i % 8]) ^ x;
        if (i % 4 == 3) {
            const uint injection = i / 4 + 1;
            x += schedule[injection % 3];
            y += schedule[(injection + 1) % 3] + injection;
        }
    }
    return (uint2)(x, y);
}

// -log(-log(u)) with u = (k + 1/2) / 2**24 for the upper 24 bits k; from the middle on by 1 - u, which float32 holds exactly.
float gumbel(uint bits) {
    const uint k = bits >> 8;
    const float t = (min(k, 0xFFFFFFu - k) + 0.5f) * 0x1p-24f;
    return -log(-(k < 0x800000u ? log(t) : log1p(-t)));
}

// Two tokens a work-item: both words of one counter.
kernel void gumbel_noise(Ints row_slot, Ints positions, global const uint2 *seed, Floats temperature, FloatsOut noise,
                         int noise_width, int ahead, int draw) {
    const int v = 2 * get_global_id(0), r = get_global_id(1), slot = row_slot[r];
    if (v >= noise_width)
        return;
    float2 pair = 0.0f;
    if (slot >= 0 && temperature[slot] != 0.0f) {
        const uint2 bits = threefry(seed[slot], (uint2)(positions[r] + ahead, ((uint)draw << 20) + v / 2));
        pair = (float2)(gumbel(bits.x), gumbel(bits.y));
    }
    FloatsOut row = noise + (size_t)r * noise_width;
    row[v] = pair.x;
    if (v + 1 < noise_width)
        row[v + 1] = pair.y;
}

// Sum of the probabilities of all tokens from a place on, as shares of the best one's in units of 2**-40, so that it does not
// depend on their order. At temperature 0 each counts as 1.
ulong sum_from(Floats row, int width, ulong place, float most, float heat, local ulong *shared) {
    ulong sum = 0;
    for (int v = get_local_id(0); v < width; v += LANES)
        if (place_of(row, width, v) >= place)
            sum += heat == 0.0f ? 1 : convert_ulong_rte(exp((row[v] - most) / heat) * 0x1p40f);
    return group_total(sum, shared);
}

// The highest place from which on there is as much as wanted. It is found bit by bit: nothing is sorted, nothing is stored.
ulong border_of(Floats row, int width, ulong wanted, float most, float heat, local ulong *shared) {
    ulong border = 0;
    for (ulong bit = 1ul << 63; bit; bit >>= 1)
        if ((bit >> 32 || bit < width) && sum_from(row, width, border | bit, most, heat, shared) >= wanted)
            border |= bit;
    return border;
}

// Each filter keeps the tokens from some place on.
kernel void sample(Floats logits, Floats noise, Ints row_slot, Floats temperature, Ints top_k, Floats top_p, Floats min_p,
                   IntsOut tokens, int logits_width) {
    local ulong shared[LANES];
    const int r = get_global_id(1), lane = get_local_id(0), slot = row_slot[r], width = logits_width;
    Floats row = logits + (size_t)r * width, gumbels = noise + (size_t)r * width;
    const int best = slot < 0 ? NO_TOKEN : highest(row, width, shared);
    if (lane == 0)
        tokens[r] = best;
    if (best == NO_TOKEN || temperature[slot] == 0.0f)
        return;
    const float most = row[best], heat = temperature[slot];
    ulong border = 0, chosen = 0;
    if (top_k[slot] > 0 && top_k[slot] < width)
        border = border_of(row, width, top_k[slot], most, 0.0f, shared);
    if (top_p[slot] < 1.0f) {
        const ulong part = (ulong)(fmax(top_p[slot], 0.0f) * 0x1p32f) << 32; // in units of 2**-64
        const ulong wanted = mul_hi(sum_from(row, width, border, most, heat, shared), part);
        border = border_of(row, width, max(wanted, 1ul), most, heat, shared);
    }
    for (int v = lane; v < width; v += LANES) {
        const float z = (row[v] - most) / heat;
        if (place_of(row, width, v) >= border && exp(z) >= min_p[slot])
            chosen = max(chosen, (ulong)key_of(z + gumbels[v]) << 32 | (uint)(width - 1 - v));
    }
    chosen = group_best(chosen, shared);
    if (lane == 0)
        tokens[r] = width - 1 - (int)(uint)chosen;
}
