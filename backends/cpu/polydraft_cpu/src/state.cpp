// The integer state kernels: packing, commits, drafts and staged writes, as plain loops over sequences.
//
// They run on one thread: there are a handful of sequences, and a loop over them takes less time than waking another thread.
#include <cstring>
#include <limits>

#include "ops.h"

namespace pd {
namespace {

template <class R, void (*F)(const R&, int64_t)>
void serial(const void* args, const Call& c) { F(*static_cast<const R*>(args), c.n); }
#define PD_STATE(name, record, function) {name, -1, serial<record, function>, nullptr, sizeof(record) / 8}

void fill(int32_t* p, int64_t n, int32_t value) {
  for (int64_t i = 0; i < n; i++) p[i] = value;
}

// -- staged writes ----------------------------------------------------------------------------------------------------
struct Column { int32_t* data; int64_t width; };  // [B, width] words
struct Scatter { Ints runs, payload; const Column* columns; };
void scatter(const Scatter& a, int64_t n) {
  for (int64_t r = 0; r < n; r++) {
    const int32_t* run = a.runs.row(r);  // column, slot, start, count, offset into the payload
    if (run[1] < 0) continue;
    const Column& column = a.columns[run[0]];
    std::memcpy(column.data + run[1] * column.width + run[2], &a.payload[run[4]], size_t(run[3]) * 4);
  }
}

// -- packing ----------------------------------------------------------------------------------------------------------
struct ReserveBlocks { Ints slot_order, phase, kv_len, draft_len, max_total, block_table; int64_t block_size, lookahead; };
void reserve_blocks(const ReserveBlocks& a, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = a.slot_order[i];
    if (s < 0 || (a.phase[s] != DECODE && a.phase[s] != PAUSED)) continue;
    int64_t need = a.kv_len[s] + 1 + a.draft_len[s] + a.lookahead;
    if (need > a.max_total[s]) need = a.max_total[s];
    bool covered = true;
    for (int64_t b = 0; b * a.block_size < need && covered; b++) covered = a.block_table.row(s)[b] >= 0;
    a.phase[s] = covered ? DECODE : PAUSED;
  }
}

struct PackRows {
  Ints slot_order, seq_rows, phase, kv_len, prefill_len, prompt_len, num_generated, tokens, drafts, draft_len;
  Ints ids, row_slot, positions, seq_start, seq_len;
};
void pack_rows(const PackRows& a, int64_t n) {
  int32_t row = 0;
  for (int64_t i = 0; i < a.slot_order.d[0]; i++) {
    const int32_t s = a.slot_order[i];
    const bool prefill = s >= 0 && a.phase[s] == PREFILL, decode = s >= 0 && a.phase[s] == DECODE;
    int32_t length = prefill ? a.prefill_len[s] - a.kv_len[s] : decode ? 1 + a.draft_len[s] : 0;
    if ((prefill || decode) && length > a.seq_rows[i]) length = a.seq_rows[i];
    a.seq_start[i] = row;
    a.seq_len[i] = length;
    for (int32_t j = 0; j < length; j++, row++) {
      const int32_t position = a.kv_len[s] + j;
      a.ids[row] = prefill ? a.tokens.row(s)[position]
                   : j == 0 ? a.tokens.row(s)[a.prompt_len[s] + a.num_generated[s] - 1]
                            : a.drafts.row(s)[j - 1];
      a.row_slot[row] = s;
      a.positions[row] = position;
    }
  }
  for (; row < n; row++) {
    a.ids[row] = NO_TOKEN;
    a.row_slot[row] = PAD_SLOT;
    a.positions[row] = 0;
  }
}

struct PackLogitRows {
  Ints slot_order, phase, kv_len, prefill_len, prompt_len, num_generated, seq_start, seq_len;
  Ints logit_row, logit_slot, logit_position, logit_start, logit_len;
};
void pack_logit_rows(const PackLogitRows& a, int64_t n) {
  int32_t place = 0;
  for (int64_t i = 0; i < a.slot_order.d[0]; i++) {
    const int32_t s = a.slot_order[i];
    int32_t length = 0, first = 0;
    if (s >= 0 && a.phase[s] == DECODE) {
      length = a.seq_len[i];
    } else if (s >= 0 && a.phase[s] == PREFILL && a.seq_len[i] > 0) {
      const bool completes = a.kv_len[s] + a.seq_len[i] == a.prefill_len[s];
      const bool fresh = a.prefill_len[s] == a.prompt_len[s] + a.num_generated[s];
      length = completes && fresh;
      first = a.seq_len[i] - 1;
    }
    a.logit_start[i] = place;
    a.logit_len[i] = length;
    for (int32_t j = first; j < first + length; j++, place++) {
      a.logit_row[place] = a.seq_start[i] + j;
      a.logit_slot[place] = s;
      a.logit_position[place] = a.kv_len[s] + j + 1;
    }
  }
  for (; place < n; place++) {
    a.logit_row[place] = NO_ROW;
    a.logit_slot[place] = PAD_SLOT;
    a.logit_position[place] = 0;
  }
}

struct PackBoth { PackRows rows; PackLogitRows logit_rows; };
// The logit rows over their whole capacity, as the composite's launch length counts rows.
void pack_both(const PackBoth& a, int64_t n) {
  pack_rows(a.rows, n);
  pack_logit_rows(a.logit_rows, a.logit_rows.logit_row.d[0]);
}

// -- verification and commit ------------------------------------------------------------------------------------------
struct ForceChoices {
  Ints slot_order, logit_start, logit_len, drafts; Floats uniforms, chances; Ints choices; int64_t num_valid;
};
void force_choices(const ForceChoices& a, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = a.slot_order[i];
    if (s < 0) continue;
    for (int32_t j = 0; j < a.logit_len[i] - 1; j++) {
      const int32_t row = a.logit_start[i] + j, draft = a.drafts.row(s)[j];
      if (a.choices[row] == NO_TOKEN) continue;
      if (a.uniforms[row] < a.chances[j]) a.choices[row] = draft;
      else if (a.choices[row] == draft) a.choices[row] = int32_t((int64_t(draft) + 1) % a.num_valid);
    }
  }
}

struct SpreadLogits { Floats x; Ints places; Floats out; };
// Logits over a reduced vocabulary at their places in the whole one, -inf elsewhere.
void spread_logits(const SpreadLogits& a, int64_t n) {
  const int64_t vocab = a.out.d[1];
  for (int64_t r = 0; r < n; r++) {
    const float* from = a.x.row(r);
    float* to = a.out.row(r);
    for (int64_t v = 0; v < vocab; v++) to[v] = a.places[v] < 0 ? -std::numeric_limits<float>::infinity() : from[a.places[v]];
  }
}

struct VerifyMatch {
  Ints choices, slot_order, phase, logit_start, logit_len, drafts, window, window_len, accepted, drafted;
};
// The number of drafts that agree with what the target chose, up to the first that does not.
int32_t agreeing(const VerifyMatch& a, int64_t i, int32_t s, int32_t drafted) {
  const int32_t* choice = a.choices.p + a.logit_start[i];
  int32_t accepted = 0;
  while (accepted < drafted && choice[accepted] == a.drafts.row(s)[accepted]) accepted++;
  return accepted;
}
void verify_match(const VerifyMatch& a, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = a.slot_order[i];
    fill(a.window.row(i), a.window.d[1], NO_TOKEN);
    a.window_len[i] = a.accepted[i] = 0;
    a.drafted[i] = -1;
    if (s < 0 || a.logit_len[i] == 0) continue;
    if (a.phase[s] == DECODE) a.drafted[i] = a.logit_len[i] - 1;
    const int32_t accepted = agreeing(a, i, s, a.drafted[i]);
    a.accepted[i] = accepted;
    a.window_len[i] = accepted + 1;
    std::memcpy(a.window.row(i), a.choices.p + a.logit_start[i], size_t(accepted + 1) * 4);
  }
}

struct CommitWindow {
  Ints slot_order, seq_len, window, window_len, accepted, prompt_len, prefill_len, max_total, stop_tokens, tokens;
  Ints num_generated, kv_len, phase, finish, out_tokens, out_len, out_accepted;
};
int32_t append(const CommitWindow& a, int64_t i, int32_t s, const int32_t* window, int32_t size) {
  int32_t emitted = 0;
  Finish reason = NONE;
  for (int32_t j = 0; j < size && reason == NONE; j++) {
    const int32_t token = window[j];
    if (token == NO_TOKEN) { reason = ERROR; break; }
    const int32_t known = a.prompt_len[s] + a.num_generated[s];
    a.tokens.row(s)[known] = token;
    a.num_generated[s]++;
    a.out_tokens.row(i)[emitted++] = token;
    const int32_t* stops = a.stop_tokens.row(s);
    for (int64_t k = 0; k < a.stop_tokens.d[1]; k++)
      if (stops[k] == token) reason = STOP;
    if (reason == NONE && known + 1 == a.max_total[s]) reason = LENGTH;
  }
  a.out_len[i] = emitted;
  a.phase[s] = reason == NONE ? DECODE : FINISHED;
  if (reason != NONE) a.finish[s] = reason;
  return emitted;
}
void commit_one(const CommitWindow& a, int64_t i, const int32_t* window, int32_t size, int32_t accepted) {
  const int32_t s = a.slot_order[i];
  fill(a.out_tokens.row(i), a.out_tokens.d[1], NO_TOKEN);
  a.out_len[i] = a.out_accepted[i] = 0;
  if (s < 0 || a.seq_len[i] == 0) return;
  if (a.phase[s] == PREFILL) {
    a.kv_len[s] += a.seq_len[i];
    if (a.kv_len[s] == a.prefill_len[s]) append(a, i, s, window, size);
  } else if (a.phase[s] == DECODE) {
    const int32_t emitted = append(a, i, s, window, size);
    a.kv_len[s] += emitted;
    a.out_accepted[i] = accepted < emitted ? accepted : emitted;
  }
}
void commit_window(const CommitWindow& a, int64_t n) {
  for (int64_t i = 0; i < n; i++) commit_one(a, i, a.window.row(i), a.window_len[i], a.accepted[i]);
}

struct VerifyCommit { VerifyMatch verify; CommitWindow commit; };
// The window is read where the target chose it and never stored.
void verify_commit(const VerifyCommit& a, int64_t n) {
  const VerifyMatch& v = a.verify;
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = v.slot_order[i];
    const bool active = s >= 0 && v.logit_len[i] > 0;
    v.drafted[i] = active && v.phase[s] == DECODE ? v.logit_len[i] - 1 : -1;
    const int32_t accepted = active ? agreeing(v, i, s, v.drafted[i]) : 0;
    commit_one(a.commit, i, v.choices.p + (active ? v.logit_start[i] : 0), active ? accepted + 1 : 0, accepted);
  }
}

struct SnapshotOutput { Ints slot_order, epoch, out_len, out_accepted, drafted, finish, phase, kv_len, out_tokens, record; };
void snapshot_output(const SnapshotOutput& a, int64_t n) {
  constexpr int64_t FIXED = 8;  // columns of `Snapshot`
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = a.slot_order[i];
    int32_t* to = a.record.row(i);
    if (s < 0) {
      fill(to, FIXED, 0);
      to[0] = PAD_SLOT;
      to[4] = -1;
      fill(to + FIXED, a.record.d[1] - FIXED, NO_TOKEN);
      continue;
    }
    const int32_t fixed[FIXED] = {s, a.epoch[s], a.out_len[i], a.out_accepted[i], a.drafted[i], a.finish[s], a.phase[s], a.kv_len[s]};
    std::memcpy(to, fixed, sizeof fixed);
    std::memcpy(to + FIXED, a.out_tokens.row(i), size_t(a.out_tokens.d[1]) * 4);
  }
}

// -- drafts -----------------------------------------------------------------------------------------------------------
struct PackDraftRows { Ints row_slot, positions, phase, prompt_len, num_generated, tokens, draft_ids, draft_row_slot; };
void pack_draft_rows(const PackDraftRows& a, int64_t n) {
  for (int64_t r = 0; r < n; r++) {
    const int32_t s = a.row_slot[r], next = a.positions[r] + 1;
    const bool keep = s >= 0 && (a.phase[s] == PREFILL || a.phase[s] == DECODE) && next < a.prompt_len[s] + a.num_generated[s];
    a.draft_ids[r] = keep ? a.tokens.row(s)[next] : NO_TOKEN;
    a.draft_row_slot[r] = keep ? s : PAD_SLOT;
  }
}

struct BeginDraft {
  Ints slot_order, seq_len, phase, kv_len, prompt_len, num_generated, max_total, drafts, draft_len;
  Ints draft_slot, draft_position, draft_budget; int64_t num_drafts;
};
void begin_draft(const BeginDraft& a, int64_t n) {
  const int32_t most = int32_t(a.num_drafts);
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = a.slot_order[i];
    a.draft_slot[i] = PAD_SLOT;
    a.draft_position[i] = a.draft_budget[i] = 0;
    if (s < 0 || a.seq_len[i] == 0) continue;
    fill(a.drafts.row(s), a.drafts.d[1], NO_TOKEN);
    a.draft_len[s] = 0;
    const int32_t room = a.max_total[s] - a.prompt_len[s] - a.num_generated[s] - 1, budget = room < most ? room : most;
    if (a.phase[s] != DECODE || budget <= 0) continue;
    a.draft_slot[i] = s;
    a.draft_position[i] = a.kv_len[s] - 1;
    a.draft_budget[i] = budget;
  }
}

struct AdvanceDraft {
  Ints chosen, draft_budget, draft_slot, draft_position, drafts, draft_len, next_ids; int64_t pass_index;
};
void advance_draft(const AdvanceDraft& a, int64_t n) {
  const int32_t pass = int32_t(a.pass_index);
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = a.draft_slot[i];
    a.next_ids[i] = NO_TOKEN;
    if (s < 0) continue;
    const bool chosen = a.chosen[i] >= 0;
    if (chosen) {
      a.drafts.row(s)[pass] = a.chosen[i];
      a.draft_len[s] = pass + 1;
    }
    if (chosen && pass + 1 < a.draft_budget[i]) {
      a.draft_position[i]++;
      a.next_ids[i] = a.chosen[i];
    } else {
      a.draft_slot[i] = PAD_SLOT;
    }
  }
}

struct DraftNgram {
  Ints draft_slot, draft_budget, prompt_len, num_generated, tokens, drafts, draft_len; int64_t max_ngram, min_ngram;
};
// Place of the token behind the latest earlier occurrence of the text's longest end; 0 where there is none.
int64_t follows(const int32_t* text, int64_t known, int64_t longest, int64_t shortest) {
  for (int64_t size = longest; size >= shortest; size--)
    for (int64_t start = known - size - 1; start >= 0; start--)
      if (std::memcmp(text + start, text + known - size, size_t(size) * 4) == 0) return start + size;
  return 0;
}
void draft_ngram(const DraftNgram& a, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = a.draft_slot[i];
    if (s < 0) continue;
    const int32_t* text = a.tokens.row(s);
    const int64_t known = a.prompt_len[s] + a.num_generated[s], place = follows(text, known, a.max_ngram, a.min_ngram);
    int64_t found = place ? known - place : 0;
    if (found > a.draft_budget[i]) found = a.draft_budget[i];
    for (int64_t j = 0; j < found; j++) a.drafts.row(s)[j] = text[place + j];
    a.draft_len[s] = int32_t(found);
  }
}

struct AlignDrafts {
  Ints draft_slot, draft_budget, prompt_len, num_generated, tokens, guess, guess_start, guess_len, drafts, draft_len;
};
// A guess holds where it agrees with the text as far as that goes; what it says beyond becomes drafts.
void align_drafts(const AlignDrafts& a, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = a.draft_slot[i];
    if (s < 0) continue;
    const int32_t *text = a.tokens.row(s), *guess = a.guess.row(i);
    const int32_t known = a.prompt_len[s] + a.num_generated[s], size = a.guess_len[i], behind = known - a.guess_start[i];
    int32_t found = 0;
    if (behind >= 0 && behind <= size && std::memcmp(guess, text + known - behind, size_t(behind) * 4) == 0) found = size - behind;
    if (found > a.draft_budget[i]) found = a.draft_budget[i];
    for (int32_t j = 0; j < found; j++) a.drafts.row(s)[j] = guess[behind + j];
    a.draft_len[s] = found;
  }
}

struct SpliceDrafts { Ints slot_order, draft_budget, agree, found, found_len, drafts, draft_len, kept_drafts; Floats draft_logprobs; };
// Found drafts take the place of others where enough of the first ones are the same, and they say more than that.
void splice_drafts(const SpliceDrafts& a, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = a.slot_order[i];
    if (s < 0 || a.draft_budget[i] <= 0) continue;
    int32_t *drafts = a.drafts.row(s), same = 0;
    const int32_t *found = a.found.row(s), size = a.found_len[s], old = a.draft_len[s];
    while (same < old && same < size && drafts[same] == found[same]) same++;
    const bool taken = same >= a.agree[i] && same < size;
    if (taken) {
      for (int64_t j = same; j < a.drafts.d[1]; j++) drafts[j] = j < size ? found[j] : NO_TOKEN;
      for (int64_t j = same; a.draft_logprobs.p && j < size; j++) a.draft_logprobs.row(s)[j] = 0;
      a.draft_len[s] = size;
    }
    a.kept_drafts[s] = taken ? same : old;
  }
}

// -- processing of logits ---------------------------------------------------------------------------------------------
struct ProcessLogits { Floats logits; Ints row_slot; int64_t num_valid; };
void process_logits(const ProcessLogits& a, int64_t n) {
  for (int64_t r = 0; r < n; r++)
    if (a.row_slot[r] >= 0)
      for (int64_t v = a.num_valid; v < a.logits.d[1]; v++) a.logits.row(r)[v] = -__builtin_inff();
}

struct BiasLogits { Floats logits; Ints row_slot, num_biases, bias_ids; Floats biases; };
void bias_logits(const BiasLogits& a, int64_t n) {
  for (int64_t r = 0; r < n; r++) {
    const int32_t s = a.row_slot[r];
    if (s < 0) continue;
    for (int32_t e = 0; e < a.num_biases[s]; e++) a.logits.row(r)[a.bias_ids.row(s)[e]] += a.biases.row(s)[e];
  }
}

struct ForbidTokens {
  Floats logits; Ints row_slot, positions, tokens, drafts, prompt_len, num_generated, min_tokens, stop_tokens, bad_words, bad_len;
  int64_t ahead;
};
void forbid_tokens(const ForbidTokens& a, int64_t n) {
  for (int64_t r = 0; r < n; r++) {
    const int32_t s = a.row_slot[r];
    if (s < 0) continue;
    float* logits = a.logits.row(r);
    const int32_t known = a.prompt_len[s] + a.num_generated[s], prompt = a.prompt_len[s];
    const int32_t size = a.positions[r] + int32_t(a.ahead) - prompt;  // tokens generated before the one this row chooses
    auto generated = [&](int32_t i) { return prompt + i < known ? a.tokens.row(s)[prompt + i] : a.drafts.row(s)[prompt + i - known]; };
    if (size < a.min_tokens[s])
      for (int64_t k = 0; k < a.stop_tokens.d[1]; k++)
        if (a.stop_tokens.row(s)[k] >= 0) logits[a.stop_tokens.row(s)[k]] = -__builtin_inff();
    const int32_t* words = a.bad_words.row(s);
    for (int32_t first = 0, end = 0; end < a.bad_len[s]; end++) {
      if (words[end] != NO_TOKEN) continue;
      const int32_t before = end - first - 1;  // tokens of the word before its last
      bool same = before <= size;
      for (int32_t j = 0; j < before && same; j++) same = generated(size - before + j) == words[first + j];
      if (same) logits[words[end - 1]] = -__builtin_inff();
      first = end + 1;
    }
  }
}

struct MaskLogits { Ints slot_order, logit_start, logit_len, masked; Words masks; Floats logits; };
void mask_logits(const MaskLogits& a, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t places = a.slot_order[i] < 0 ? 0 : a.masked[i] < a.logit_len[i] ? a.masked[i] : a.logit_len[i];
    for (int32_t j = 0; j < places; j++) {
      const uint32_t* mask = a.masks.p + (i * a.masks.d[1] + j) * a.masks.d[2];
      float* logits = a.logits.row(a.logit_start[i] + j);
      for (int64_t v = 0; v < a.logits.d[1]; v++)
        if (!(mask[v / 32] >> (v % 32) & 1)) logits[v] = -__builtin_inff();
    }
  }
}

// -- thinking ---------------------------------------------------------------------------------------------------------
// Where the reply begins, at the places from `first` to `last` of generated tokens that `token(i)` gives; -1: nowhere.
template <class Token>
int32_t reply_begins(Token token, int32_t first, int32_t last, int32_t limit, const int32_t* end, int64_t ends, int64_t forced) {
  for (int32_t place = first; place <= last; place++) {
    if (limit >= 0 && place > limit) {
      const int64_t behind = limit + forced;
      return behind >= place && behind <= last ? int32_t(behind) : -1;
    }
    bool same = place >= ends;
    for (int64_t e = 0; e < ends && same; e++) same = token(place - int32_t(ends - e)) == end[e];
    if (same) return place;
  }
  return -1;
}

void force(float* logits, int64_t vocab, int32_t token) {
  const float own = logits[token], none = -__builtin_inff();
  for (int64_t v = 0; v < vocab; v++) logits[v] = none;
  logits[token] = own == none ? 0.0f : own;
}

struct LimitThinking {
  Floats logits;
  Ints row_slot, positions, tokens, drafts, prompt_len, num_generated, reply_from, think_limit, reply_limit, reply_starts,
      num_reply_starts, stop_tokens, think_end, think_forced;
  int64_t ahead;
};
void limit_thinking(const LimitThinking& a, int64_t n) {
  const int64_t vocab = a.logits.d[1], ends = a.think_end.d[0], forced = a.think_forced.d[0];
  for (int64_t r = 0; r < n; r++) {
    const int32_t s = a.row_slot[r];
    if (s < 0) continue;
    const int32_t limit = a.think_limit[s], most = a.reply_limit[s], starts = a.num_reply_starts[s];
    if (limit < 0 && most < 0 && starts == 0) continue;
    const int32_t prompt = a.prompt_len[s], known = a.num_generated[s], place = a.positions[r] + int32_t(a.ahead) - prompt;
    int32_t reply = a.reply_from[s];
    auto token = [&](int32_t i) { return i < known ? a.tokens.row(s)[prompt + i] : a.drafts.row(s)[i - known]; };
    if (reply < 0) reply = reply_begins(token, known + 1, place, limit, a.think_end.p, ends, forced);
    float* logits = a.logits.row(r);
    if (reply < 0) {
      if (limit >= 0 && place >= limit) force(logits, vocab, a.think_forced[place - limit]);
    } else if (most >= 0 && place >= reply + most) {
      force(logits, vocab, a.stop_tokens.row(s)[0]);
    } else if (place == reply && starts > 0) {
      const int32_t* allowed = a.reply_starts.row(s);
      for (int64_t v = 0; v < vocab; v++) {
        bool kept = false;
        for (int32_t j = 0; j < starts && !kept; j++) kept = allowed[j] == v;
        if (!kept) logits[v] = -__builtin_inff();
      }
    }
  }
}

struct CommitThinking {
  Ints slot_order, out_tokens, out_len, tokens, prompt_len, num_generated, think_limit, think_end, reply_from;
  int64_t num_forced;
};
void commit_thinking(const CommitThinking& a, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t s = a.slot_order[i];
    if (s < 0 || a.out_len[i] == 0 || a.reply_from[s] >= 0) continue;
    const int32_t size = a.num_generated[s], *text = a.tokens.row(s) + a.prompt_len[s];
    auto token = [&](int32_t place) { return text[place]; };
    a.reply_from[s] =
        reply_begins(token, size - a.out_len[i] + 1, size, a.think_limit[s], a.think_end.p, a.think_end.d[0], a.num_forced);
  }
}

}  // namespace

const Kernel state_kernels[] = {
    PD_STATE("scatter", Scatter, scatter),
    PD_STATE("reserve_blocks", ReserveBlocks, reserve_blocks),
    PD_STATE("pack_rows", PackRows, pack_rows),
    PD_STATE("pack_logit_rows", PackLogitRows, pack_logit_rows),
    PD_STATE("pack_rows+pack_logit_rows", PackBoth, pack_both),
    PD_STATE("force_choices", ForceChoices, force_choices),
    PD_STATE("verify_match", VerifyMatch, verify_match),
    PD_STATE("commit_window", CommitWindow, commit_window),
    PD_STATE("verify_match+commit_window", VerifyCommit, verify_commit),
    PD_STATE("snapshot_output", SnapshotOutput, snapshot_output),
    PD_STATE("pack_draft_rows", PackDraftRows, pack_draft_rows),
    PD_STATE("begin_draft", BeginDraft, begin_draft),
    PD_STATE("spread_logits", SpreadLogits, spread_logits),
    PD_STATE("advance_draft", AdvanceDraft, advance_draft),
    PD_STATE("draft_ngram", DraftNgram, draft_ngram),
    PD_STATE("align_drafts", AlignDrafts, align_drafts),
    PD_STATE("splice_drafts", SpliceDrafts, splice_drafts),
    PD_STATE("process_logits", ProcessLogits, process_logits),
    PD_STATE("mask_logits", MaskLogits, mask_logits),
    PD_STATE("bias_logits", BiasLogits, bias_logits),
    PD_STATE("forbid_tokens", ForbidTokens, forbid_tokens),
    PD_STATE("limit_thinking", LimitThinking, limit_thinking),
    PD_STATE("commit_thinking", CommitThinking, commit_thinking),
};
const int64_t num_state_kernels = sizeof state_kernels / sizeof state_kernels[0];
}  // namespace pd
