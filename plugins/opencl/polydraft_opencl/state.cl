// Slot state: rows packed from it, windows committed to it, drafts filed in it. A work-item a sequence, if nothing else is said.

kernel void scatter(Ints runs, Ints payload, int column, IntsOut target, int target_width) {
    Ints run = runs + (size_t)get_global_id(1) * 5;
    if (run[RUN_COLUMN] != column || run[RUN_SLOT] < 0)
        return;
    for (int i = get_local_id(0); i < run[RUN_COUNT]; i += LANES)
        target[(size_t)run[RUN_SLOT] * target_width + run[RUN_START] + i] = payload[run[RUN_OFFSET] + i];
}

kernel void reserve_blocks(Ints slot_order, IntsOut phase, Ints kv_len, Ints draft_len, Ints max_total, Ints block_table,
                           int block_table_width, int block_size, int lookahead) {
    const int slot = slot_order[get_global_id(1)];
    if (slot < 0 || (phase[slot] != PHASE_DECODE && phase[slot] != PHASE_PAUSED))
        return;
    const int need = min(kv_len[slot] + 1 + draft_len[slot] + lookahead, max_total[slot]);
    int covered = 1;
    for (int i = 0; i < (need + block_size - 1) / block_size; i++)
        covered &= block_table[(size_t)slot * block_table_width + i] >= 0;
    phase[slot] = covered ? PHASE_DECODE : PHASE_PAUSED;
}

// One work-item does it all, since a row's place follows from all before it. So does pack_logit_rows.
kernel void pack_rows(Ints slot_order, Ints seq_rows, Ints phase, Ints kv_len, Ints prefill_len, Ints prompt_len,
                      Ints num_generated, Ints tokens, Ints drafts, Ints draft_len, IntsOut ids, IntsOut row_slot,
                      IntsOut positions, IntsOut seq_start, IntsOut seq_len, int slot_order_rows, int tokens_width,
                      int drafts_width, int n) {
    int row = 0;
    for (int i = 0; i < slot_order_rows; i++) {
        const int slot = slot_order[i], now = slot < 0 ? PHASE_IDLE : phase[slot];
        seq_start[i] = row;
        const int runs = now == PHASE_PREFILL || now == PHASE_DECODE;
        seq_len[i] = runs ? min(seq_rows[i], now == PHASE_DECODE ? 1 + draft_len[slot] : prefill_len[slot] - kv_len[slot]) : 0;
        for (int j = 0; j < seq_len[i]; j++, row++) {
            const int newest = now == PHASE_PREFILL ? kv_len[slot] + j : prompt_len[slot] + num_generated[slot] - 1;
            const int is_draft = now == PHASE_DECODE && j > 0;
            ids[row] = is_draft ? drafts[(size_t)slot * drafts_width + j - 1] : tokens[(size_t)slot * tokens_width + newest];
            row_slot[row] = slot;
            positions[row] = kv_len[slot] + j;
        }
    }
    for (; row < n; row++)
        ids[row] = NO_TOKEN, row_slot[row] = PAD_SLOT, positions[row] = 0;
}

kernel void pack_logit_rows(Ints slot_order, Ints phase, Ints kv_len, Ints prefill_len, Ints prompt_len, Ints num_generated,
                            Ints seq_start, Ints seq_len, IntsOut logit_row, IntsOut logit_slot, IntsOut logit_position,
                            IntsOut logit_start, IntsOut logit_len, int slot_order_rows, int n) {
    int place = 0;
    for (int i = 0; i < slot_order_rows; i++) {
        const int slot = slot_order[i], now = slot < 0 ? PHASE_IDLE : phase[slot];
        const int completes = now == PHASE_PREFILL && seq_len[i] > 0 && kv_len[slot] + seq_len[i] == prefill_len[slot] &&
                              prefill_len[slot] == prompt_len[slot] + num_generated[slot];
        const int first = now == PHASE_DECODE ? 0 : seq_len[i] - completes;
        logit_start[i] = place;
        logit_len[i] = seq_len[i] - first;
        for (int j = first; j < seq_len[i]; j++, place++) {
            logit_row[place] = seq_start[i] + j;
            logit_slot[place] = slot;
            logit_position[place] = kv_len[slot] + j + 1;
        }
    }
    for (; place < n; place++)
        logit_row[place] = NO_ROW, logit_slot[place] = PAD_SLOT, logit_position[place] = 0;
}

kernel void verify_match(Ints choices, Ints slot_order, Ints phase, Ints logit_start, Ints logit_len, Ints drafts,
                         IntsOut window, IntsOut window_len, IntsOut accepted, IntsOut drafted, int drafts_width,
                         int window_width) {
    const int i = get_global_id(1), slot = slot_order[i], live = slot >= 0 && logit_len[i] > 0;
    const int decodes = live && phase[slot] == PHASE_DECODE;
    int matches = 0;
    while (decodes && matches < logit_len[i] - 1 &&
           choices[logit_start[i] + matches] == drafts[(size_t)slot * drafts_width + matches])
        matches++;
    for (int j = 0; j < window_width; j++)
        window[(size_t)i * window_width + j] = live && j <= matches ? choices[logit_start[i] + j] : NO_TOKEN;
    window_len[i] = live ? matches + 1 : 0;
    accepted[i] = matches;
    drafted[i] = decodes ? logit_len[i] - 1 : -1;
}

kernel void commit_window(Ints slot_order, Ints seq_len, Ints window, Ints window_len, Ints accepted, Ints prompt_len,
                          Ints prefill_len, Ints max_total, Ints stop_tokens, IntsOut tokens, IntsOut num_generated,
                          IntsOut kv_len, IntsOut phase, IntsOut finish, IntsOut out_tokens, IntsOut out_len,
                          IntsOut out_accepted, int window_width, int stop_tokens_width, int tokens_width) {
    const int i = get_global_id(1), slot = slot_order[i];
    IntsOut out = out_tokens + (size_t)i * window_width;
    for (int j = 0; j < window_width; j++)
        out[j] = NO_TOKEN;
    out_len[i] = out_accepted[i] = 0;
    if (slot < 0 || seq_len[i] == 0)
        return;
    const int decodes = phase[slot] == PHASE_DECODE, prefills = phase[slot] == PHASE_PREFILL;
    kv_len[slot] += prefills ? seq_len[i] : 0;
    if (!decodes && !(prefills && kv_len[slot] == prefill_len[slot]))
        return;
    int emitted = 0, reason = FINISH_NONE;
    while (reason == FINISH_NONE && emitted < window_len[i]) {
        const int token = window[(size_t)i * window_width + emitted], known = prompt_len[slot] + num_generated[slot];
        if (token == NO_TOKEN) {
            reason = FINISH_ERROR;
            break;
        }
        tokens[(size_t)slot * tokens_width + known] = token;
        num_generated[slot]++;
        out[emitted++] = token;
        if (known + 1 == max_total[slot])
            reason = FINISH_LENGTH;
        for (int s = 0; s < stop_tokens_width; s++)
            if (token == stop_tokens[(size_t)slot * stop_tokens_width + s])
                reason = FINISH_STOP;
    }
    out_len[i] = emitted;
    phase[slot] = reason == FINISH_NONE ? PHASE_DECODE : PHASE_FINISHED;
    finish[slot] = reason;
    if (decodes) {
        kv_len[slot] += emitted;
        out_accepted[i] = min(accepted[i], emitted);
    }
}

kernel void snapshot_output(Ints slot_order, Ints epoch, Ints out_len, Ints out_accepted, Ints drafted, Ints finish, Ints phase,
                            Ints kv_len, Ints out_tokens, IntsOut record, int out_tokens_width, int record_width) {
    const int i = get_global_id(1), slot = slot_order[i], there = slot >= 0;
    IntsOut row = record + (size_t)i * record_width;
    row[SNAPSHOT_SLOT] = there ? slot : PAD_SLOT;
    row[SNAPSHOT_EPOCH] = there ? epoch[slot] : 0;
    row[SNAPSHOT_NUM_TOKENS] = there ? out_len[i] : 0;
    row[SNAPSHOT_ACCEPTED] = there ? out_accepted[i] : 0;
    row[SNAPSHOT_DRAFTED] = there ? drafted[i] : -1;
    row[SNAPSHOT_FINISH] = there ? finish[slot] : 0;
    row[SNAPSHOT_PHASE] = there ? phase[slot] : 0;
    row[SNAPSHOT_KV_LEN] = there ? kv_len[slot] : 0;
    for (int j = 0; j < out_tokens_width; j++)
        row[record_width - out_tokens_width + j] = there ? out_tokens[(size_t)i * out_tokens_width + j] : NO_TOKEN;
}

// A work-item a row.
kernel void pack_draft_rows(Ints row_slot, Ints positions, Ints phase, Ints prompt_len, Ints num_generated, Ints tokens,
                            IntsOut draft_ids, IntsOut draft_row_slot, int tokens_width) {
    const int row = get_global_id(1), slot = row_slot[row], next = positions[row] + 1;
    const int running = slot >= 0 && (phase[slot] == PHASE_PREFILL || phase[slot] == PHASE_DECODE);
    const int known = running && next < prompt_len[slot] + num_generated[slot];
    draft_ids[row] = known ? tokens[(size_t)slot * tokens_width + next] : NO_TOKEN;
    draft_row_slot[row] = known ? slot : PAD_SLOT;
}

kernel void begin_draft(Ints slot_order, Ints seq_len, Ints phase, Ints kv_len, Ints prompt_len, Ints num_generated,
                        Ints max_total, IntsOut drafts, IntsOut draft_len, IntsOut draft_slot, IntsOut draft_position,
                        IntsOut draft_budget, int drafts_width, int num_drafts) {
    const int i = get_global_id(1), slot = slot_order[i];
    draft_slot[i] = PAD_SLOT;
    draft_position[i] = draft_budget[i] = 0;
    if (slot < 0 || seq_len[i] == 0)
        return;
    for (int j = 0; j < drafts_width; j++)
        drafts[(size_t)slot * drafts_width + j] = NO_TOKEN;
    draft_len[slot] = 0;
    const int budget = min(num_drafts, max_total[slot] - prompt_len[slot] - num_generated[slot] - 1);
    if (phase[slot] == PHASE_DECODE && budget > 0) {
        draft_slot[i] = slot;
        draft_position[i] = kv_len[slot] - 1;
        draft_budget[i] = budget;
    }
}

kernel void advance_draft(Ints chosen, Ints draft_budget, IntsOut draft_slot, IntsOut draft_position, IntsOut drafts,
                          IntsOut draft_len, IntsOut next_ids, int drafts_width, int pass_index) {
    const int i = get_global_id(1), slot = draft_slot[i], token = slot < 0 ? NO_TOKEN : chosen[i];
    const int goes_on = token >= 0 && pass_index + 1 < draft_budget[i];
    if (token >= 0) {
        drafts[(size_t)slot * drafts_width + pass_index] = token;
        draft_len[slot] = pass_index + 1;
    }
    if (goes_on)
        draft_position[i]++;
    else if (slot >= 0)
        draft_slot[i] = PAD_SLOT;
    next_ids[i] = goes_on ? token : NO_TOKEN;
}
