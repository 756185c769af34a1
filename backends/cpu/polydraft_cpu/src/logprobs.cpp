// Log probabilities of emitted tokens, drafts and prompts, and the packed record that takes them to the host.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"

namespace pd {
namespace {

struct KeepLogits { Floats logits; Ints row_slot, num_top; Floats kept; };
struct TopLogprobs {
  Floats logits; Ints slot_order, logit_start, out_tokens, num_top; Floats temperature; Ints ids; Floats logprobs; Ints ranks;
};
struct PackLogprobs {
  Ints slot_order, num_top, ids; Floats logprobs; Ints ranks, extra, drafts; Floats draft_logprobs; Ints draft_ids;
  Floats draft_tops; Ints record; int64_t flag;
};
struct PackPromptRows {
  Ints slot_order, seq_start, seq_len, positions, prompt_len, num_top, tokens;
  Ints prompt_row, prompt_slot, prompt_position, prompt_token;
};
struct DraftLogprobs { Floats logits; Ints row_slot, tokens, draft_len, num_top; Floats draft_logprobs; int64_t probs; };
struct DraftTopLogprobs {
  Floats logits; Ints row_slot, tokens, draft_len, num_top, draft_ids; Floats draft_tops; int64_t probs;
};

void keep_logits(const void* args, const Call& c) {
  const auto& a = record<KeepLogits>(args);
  const size_t bytes = size_t(a.logits.d[1]) * 4;
  for (int64_t r = 0; r < c.n; r++) {
    const int32_t s = a.row_slot[r];
    if (s >= 0 && a.num_top[s] >= 0) std::memcpy(a.kept.row(r), a.logits.row(r), bytes);
    else std::memset(a.kept.row(r), 0, bytes);
  }
}

struct ForbidFiltered { Floats logits, probs; Ints row_slot, num_top; Floats temperature; Ints top_k; Floats top_p, min_p; };
void forbid_filtered(const void* args, const Call& c) {
  const auto& a = record<ForbidFiltered>(args);
  for (int64_t r = 0; r < c.n; r++) {
    const int32_t s = a.row_slot[r];
    if (s < 0 || a.num_top[s] < 0 || a.temperature[s] == 0) continue;
    if (a.top_k[s] <= 0 && a.top_p[s] >= 1 && a.min_p[s] <= 0) continue;
    for (int64_t v = 0; v < a.logits.d[1]; v++)
      if (a.probs.row(r)[v] == 0) a.logits.row(r)[v] = -__builtin_inff();
  }
}

// The largest of a row, and the logarithm of the sum of exp(z - largest); `space` holds a row.
struct Softmax {
  float top;
  double log_sum;
  double of(float z) const { return double(z) - double(top) - log_sum; }
};
Softmax softmax(const float* z, int64_t vocab, float* space, const Call& c) {
  const float top = *std::max_element(z, z + vocab);
  c.primitives->shares(z, 1.0f, top, space, vocab);
  double total = 0;
  for (int64_t v = 0; v < vocab; v++) total += space[v];
  return {top, std::log(total)};
}

void top_logprobs(const void* args, const Call& c) {
  const auto& a = record<TopLogprobs>(args);
  const int64_t vocab = a.logits.d[1], width = a.ids.d[1], columns = a.ids.d[2];
  int64_t first, last;
  share(c.n, c, &first, &last);
  Scratch x(c, vocab);
  for (int64_t i = first; i < last; i++) {
    const int32_t s = a.slot_order[i];
    int32_t* ids = a.ids.p + i * width * columns;
    float* logprobs = a.logprobs.p + i * width * columns;
    std::fill(ids, ids + width * columns, NO_TOKEN);
    std::fill(logprobs, logprobs + width * columns, 0.0f);
    std::fill(a.ranks.row(i), a.ranks.row(i) + width, 0);
    if (s < 0 || a.num_top[s] < 0) continue;
    for (int64_t j = 0; j < width; j++) {
      const int32_t token = a.out_tokens.row(i)[j];
      if (token == NO_TOKEN) continue;
      const float temperature = a.temperature.p && a.temperature[s] != 0 ? a.temperature[s] : 1.0f;
      const float* row = a.logits.row(a.logit_start[i] + j);
      float* z = x.first;
      for (int64_t v = 0; v < vocab; v++) z[v] = row[v] / temperature;
      const Softmax soft = softmax(z, vocab, x.second, c);
      auto before = [z](int32_t u, int32_t v) { return z[u] > z[v] || (z[u] == z[v] && u < v); };
      int32_t rank = 1;
      for (int64_t v = 0; v < vocab; v++) {
        x.ids[v] = int32_t(v);
        rank += before(int32_t(v), token);
      }
      a.ranks.row(i)[j] = rank;
      const int64_t many = std::min(int64_t(a.num_top[s]), vocab);
      if (many < vocab && many > 0) std::nth_element(x.ids, x.ids + many - 1, x.ids + vocab, before);
      std::sort(x.ids, x.ids + many, before);
      for (int64_t k = 0; k <= many && k < columns; k++) {
        const int32_t v = k == 0 ? token : x.ids[k - 1];
        ids[j * columns + k] = v;
        logprobs[j * columns + k] = float(soft.of(z[v]));
      }
    }
  }
}
bool top_logprobs_worth(const void* args, int64_t n) { return n > 1 && record<TopLogprobs>(args).logits.d[1] >= (1 << 11); }

void pack_logprobs(const void* args, const Call& c) {
  const auto& a = record<PackLogprobs>(args);
  constexpr int64_t HEADER = 5;
  const int64_t width = a.ids.d[1], stride = a.ids.d[2];
  int32_t *word = a.record.p + HEADER, entries = 0, columns = 0;
  auto wanted = [&](int64_t i) { return a.slot_order[i] >= 0 && a.num_top[a.slot_order[i]] >= 0; };
  for (int64_t i = 0; i < c.n; i++)
    if (wanted(i)) columns = std::max(columns, a.num_top[a.slot_order[i]] + 1);
  for (int64_t i = 0; i < c.n; i++) {
    if (!wanted(i)) continue;
    const int32_t s = a.slot_order[i];
    entries++;
    *word++ = s;
    *word++ = a.extra[i];
    for (int64_t j = 0; j < width; j++) {
      const bool verified = a.drafts.p && j < a.extra[i];
      *word++ = a.ranks.row(i)[j];
      *word++ = verified ? a.drafts.row(s)[j] : NO_TOKEN;
      if (verified) std::memcpy(word, a.draft_logprobs.row(s) + j, 4);
      else *word = 0;
      word++;
      std::memcpy(word, a.ids.p + (i * width + j) * stride, size_t(columns) * 4);
      word += columns;
      std::memcpy(word, a.logprobs.p + (i * width + j) * stride, size_t(columns) * 4);
      word += columns;
      if (!a.draft_ids.p) continue;
      const int64_t place = (s * a.draft_ids.d[1] + j) * stride;
      if (verified) {
        std::memcpy(word, a.draft_ids.p + place, size_t(columns) * 4);
        std::memcpy(word + columns, a.draft_tops.p + place, size_t(columns) * 4);
      } else {
        std::fill(word, word + columns, NO_TOKEN);
        std::fill(word + columns, word + 2 * columns, 0);
      }
      word += 2 * columns;
    }
  }
  const int32_t header[HEADER] = {int32_t(a.flag) | columns << 8, 1, entries, int32_t(width), int32_t(word - a.record.p)};
  std::memcpy(a.record.p, header, sizeof header);
}

void pack_prompt_rows(const void* args, const Call& c) {
  const auto& a = record<PackPromptRows>(args);
  int32_t place = 0;
  for (int64_t i = 0; i < a.slot_order.d[0]; i++) {
    const int32_t s = a.slot_order[i];
    if (s < 0 || a.num_top[s] < 0) continue;
    for (int32_t row = a.seq_start[i]; row < a.seq_start[i] + a.seq_len[i]; row++) {
      const int32_t position = a.positions[row] + 1;
      if (position >= a.prompt_len[s]) continue;
      a.prompt_row[place] = row;
      a.prompt_slot[place] = s;
      a.prompt_position[place] = position;
      a.prompt_token[place++] = a.tokens.row(s)[position];
    }
  }
  for (; place < c.n; place++) {
    a.prompt_row[place] = NO_ROW;
    a.prompt_slot[place] = PAD_SLOT;
    a.prompt_position[place] = 0;
    a.prompt_token[place] = NO_TOKEN;
  }
}

void draft_logprobs(const void* args, const Call& c) {
  const auto& a = record<DraftLogprobs>(args);
  const int64_t vocab = a.logits.d[1];
  Scratch x(c, vocab);
  for (int64_t r = 0; r < c.n; r++) {
    const int32_t s = a.row_slot[r], token = a.tokens[r];
    if (s < 0 || a.num_top[s] < 0 || token == NO_TOKEN) continue;
    const float* row = a.logits.row(r);
    float* to = a.draft_logprobs.row(s) + a.draft_len[s];
    *to = a.probs ? std::log(row[token]) : float(softmax(row, vocab, x.first, c).of(row[token]));
  }
}

void draft_top_logprobs(const void* args, const Call& c) {
  const auto& a = record<DraftTopLogprobs>(args);
  const int64_t vocab = a.logits.d[1], columns = a.draft_ids.d[2];
  Scratch x(c, vocab);
  for (int64_t r = 0; r < c.n; r++) {
    const int32_t s = a.row_slot[r], token = a.tokens[r];
    if (s < 0 || a.num_top[s] < 0 || token == NO_TOKEN) continue;
    const float* z = a.logits.row(r);
    const Softmax soft = a.probs ? Softmax{0, 0} : softmax(z, vocab, x.first, c);
    auto before = [z](int32_t u, int32_t v) { return z[u] > z[v] || (z[u] == z[v] && u < v); };
    for (int64_t v = 0; v < vocab; v++) x.ids[v] = int32_t(v);
    const int64_t many = std::min(int64_t(a.num_top[s]), vocab), place = (s * a.draft_ids.d[1] + a.draft_len[s]) * columns;
    if (many < vocab && many > 0) std::nth_element(x.ids, x.ids + many - 1, x.ids + vocab, before);
    std::sort(x.ids, x.ids + many, before);
    for (int64_t k = 0; k < columns; k++) {
      const int32_t v = k == 0 ? token : k <= many ? x.ids[k - 1] : NO_TOKEN;
      a.draft_ids.p[place + k] = v;
      a.draft_tops.p[place + k] = v == NO_TOKEN ? 0.0f : a.probs ? std::log(z[v]) : float(soft.of(z[v]));
    }
  }
}

}  // namespace

const Kernel logprob_kernels[] = {
    {"keep_logits", -1, keep_logits, nullptr, sizeof(KeepLogits) / 8},
    {"forbid_filtered", -1, forbid_filtered, nullptr, sizeof(ForbidFiltered) / 8},
    {"top_logprobs", -1, top_logprobs, top_logprobs_worth, sizeof(TopLogprobs) / 8},
    {"pack_logprobs", -1, pack_logprobs, nullptr, sizeof(PackLogprobs) / 8},
    {"pack_prompt_rows", -1, pack_prompt_rows, nullptr, sizeof(PackPromptRows) / 8},
    {"draft_logprobs", -1, draft_logprobs, nullptr, sizeof(DraftLogprobs) / 8},
    {"draft_top_logprobs", -1, draft_top_logprobs, nullptr, sizeof(DraftTopLogprobs) / 8},
};
const int64_t num_logprob_kernels = sizeof logprob_kernels / sizeof logprob_kernels[0];
}  // namespace pd
