// The choice of tokens: argmax, noise, filters, rejection. Rows are shared among threads; a row is one thread's work alone.
//
// The loops over a vocabulary are primitives of the processor's table; what is left here selects and compares.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"

namespace pd {
namespace {

constexpr int64_t FIRST_CANDIDATES = 256;  // top-p looks at this many best tokens first, then at eight times as many

bool wide(int64_t n, int64_t vocab) { return n > 1 && n * vocab >= (1 << 14); }

// -- records ----------------------------------------------------------------------------------------------------------
struct Argmax { Floats logits; Ints row_slot, tokens; };
struct GumbelNoise { Ints row_slot, positions; Words seed; Floats temperature, noise; int64_t ahead, draw; };
struct Filters { Floats temperature; Ints top_k; Floats top_p, min_p; };
struct Sample { Floats logits, noise; Ints row_slot; Filters filters; Ints tokens; };
struct NoiseSample { GumbelNoise noise; Sample sample; };
struct UniformNoise { Ints row_slot, positions; Words seed; Floats uniforms; int64_t ahead, draw; };
struct FilterProbs { Floats logits; Ints row_slot; Filters filters; };
struct DrawDraft { Floats probs, noise; Ints row_slot, draft_len, tokens; Floats draft_probs; };
struct VerifyRejection {
  Floats probs, draft_probs, uniforms, noise;
  Ints slot_order, phase, logit_start, logit_len, drafts, window, window_len, accepted, drafted;
};
struct Penalise {
  Floats logits; Ints row_slot, positions, tokens, drafts, prompt_len, num_generated;
  Floats repetition, presence, frequency; int64_t ahead;
};

void argmax(const void* args, const Call& c) {
  const auto& a = record<Argmax>(args);
  int64_t first, last;
  share(c.n, c, &first, &last);
  for (int64_t r = first; r < last; r++)
    a.tokens[r] = a.row_slot[r] < 0 ? NO_TOKEN : c.primitives->best(a.logits.row(r), a.logits.d[1]);
}
bool argmax_worth(const void* args, int64_t n) { return wide(n, record<Argmax>(args).logits.d[1]); }

void make_noise(const GumbelNoise& a, int64_t r, float* out, int64_t vocab, const Call& c) {
  const int32_t s = a.row_slot[r];
  c.primitives->gumbel(a.seed[2 * s], a.seed[2 * s + 1], uint32_t(a.positions[r] + a.ahead), uint32_t(a.draw), out, vocab);
}
void gumbel_noise(const void* args, const Call& c) {
  const auto& a = record<GumbelNoise>(args);
  const int64_t vocab = a.noise.d[1];
  int64_t first, last;
  share(c.n, c, &first, &last);
  for (int64_t r = first; r < last; r++) {
    if (a.row_slot[r] >= 0 && a.temperature[a.row_slot[r]] != 0) make_noise(a, r, a.noise.row(r), vocab, c);
    else std::memset(a.noise.row(r), 0, size_t(vocab) * 4);
  }
}
bool gumbel_noise_worth(const void* args, int64_t n) { return wide(n, record<GumbelNoise>(args).noise.d[1]); }

// -- filters ----------------------------------------------------------------------------------------------------------
bool filtering(const Filters& f, int32_t s, int64_t vocab) {
  return (f.top_k[s] > 0 && f.top_k[s] < vocab) || f.top_p[s] < 1.0f || f.min_p[s] > 0.0f;
}

// The ids that survive top-k, then top-p over what top-k left, then min-p; returns how many, in `x.ids`. `z` are the logits
// over the temperature; `x.second` is overwritten with shares of the best one's probability.
int64_t kept(const float* z, const Filters& f, int32_t s, int64_t vocab, const Scratch& x, const Call& c) {
  int32_t* ids = x.ids;
  for (int64_t v = 0; v < vocab; v++) ids[v] = int32_t(v);
  auto before = [z](int32_t i, int32_t j) { return z[i] > z[j] || (z[i] == z[j] && i < j); };
  int64_t size = vocab;
  if (f.top_k[s] > 0 && f.top_k[s] < vocab) {
    size = f.top_k[s];
    std::nth_element(ids, ids + size - 1, ids + vocab, before);
  }
  const int32_t best = *std::min_element(ids, ids + size, before);
  c.primitives->shares(z, 1.0f, z[best], x.second, vocab);
  const float* share = x.second;
  if (f.top_p[s] < 1.0f) {
    double total = 0, reached = 0;
    for (int64_t i = 0; i < size; i++) total += share[ids[i]];
    int64_t sorted = 0, keep = 0, part = FIRST_CANDIDATES;
    const double wanted = double(f.top_p[s]) * total;
    for (; keep < size; keep++) {
      if (keep == sorted) {  // sort the next best ones
        const int64_t end = std::min(size, sorted + part);
        if (end < size) std::nth_element(ids + sorted, ids + end - 1, ids + size, before);
        std::sort(ids + sorted, ids + end, before);
        sorted = end;
        part *= 8;
      }
      if (keep > 0 && !(reached < wanted)) break;
      reached += share[ids[keep]];
    }
    size = keep;
  }
  if (f.min_p[s] > 0.0f) size = std::remove_if(ids, ids + size, [&](int32_t v) { return share[v] < f.min_p[s]; }) - ids;
  return size;
}

int32_t choose(const Sample& a, int64_t r, const float* noise, const Scratch& x, const Call& c) {
  const int64_t vocab = a.logits.d[1];
  const int32_t s = a.row_slot[r];
  const float *logits = a.logits.row(r), temperature = a.filters.temperature[s];
  if (!filtering(a.filters, s, vocab)) return c.primitives->best_sum(logits, temperature, noise, vocab);
  for (int64_t v = 0; v < vocab; v++) x.first[v] = logits[v] / temperature;
  const int64_t size = kept(x.first, a.filters, s, vocab, x, c);
  int32_t found = NO_TOKEN;
  float top = 0;
  for (int64_t i = 0; i < size; i++) {
    const int32_t v = x.ids[i];
    const float value = x.first[v] + noise[v];
    if (found == NO_TOKEN || value > top || (value == top && v < found)) { top = value; found = v; }
  }
  return found;
}

// `noise` is null where the rows of the record hold it, else a row is made in the scratch.
void sample_rows(const Sample& a, const GumbelNoise* noise, const Call& c) {
  const int64_t vocab = a.logits.d[1];
  int64_t first, last;
  share(c.n, c, &first, &last);
  Scratch x(c, vocab);
  for (int64_t r = first; r < last; r++) {
    const int32_t s = a.row_slot[r];
    a.tokens[r] = s < 0 ? NO_TOKEN : c.primitives->best(a.logits.row(r), vocab);
    if (a.tokens[r] == NO_TOKEN || a.filters.temperature[s] == 0) continue;
    if (noise) make_noise(*noise, r, x.noise, vocab, c);
    a.tokens[r] = choose(a, r, noise ? x.noise : a.noise.row(r), x, c);
  }
}
void sample(const void* args, const Call& c) { sample_rows(record<Sample>(args), nullptr, c); }
bool sample_worth(const void* args, int64_t n) { return wide(n, record<Sample>(args).logits.d[1]); }
void noise_sample(const void* args, const Call& c) { sample_rows(record<NoiseSample>(args).sample, &record<NoiseSample>(args).noise, c); }
bool noise_sample_worth(const void* args, int64_t n) { return wide(n, record<NoiseSample>(args).sample.logits.d[1]); }

// -- rejection --------------------------------------------------------------------------------------------------------
uint32_t first_word(uint32_t k0, uint32_t k1, uint32_t x0, uint32_t x1) {
  const uint32_t key[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
  const int turns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  x0 += k0;
  x1 += k1;
  for (uint32_t block = 0; block < 5; block++) {
    for (int i = 0; i < 4; i++) {
      x0 += x1;
      const int by = turns[block % 2][i];
      x1 = ((x1 << by) | (x1 >> (32 - by))) ^ x0;
    }
    x0 += key[(block + 1) % 3];
    x1 += key[(block + 2) % 3] + block + 1;
  }
  return x0;
}
void uniform_noise(const void* args, const Call& c) {
  const auto& a = record<UniformNoise>(args);
  for (int64_t r = 0; r < c.n; r++) {
    const int32_t s = a.row_slot[r];
    a.uniforms[r] = 0.0f;
    if (s < 0) continue;
    const uint32_t word = first_word(a.seed[2 * s], a.seed[2 * s + 1], uint32_t(a.positions[r] + a.ahead), uint32_t(a.draw) << 20);
    a.uniforms[r] = float(word >> 8) * 0x1p-24f;
  }
}

void filter_probs(const void* args, const Call& c) {
  const auto& a = record<FilterProbs>(args);
  const int64_t vocab = a.logits.d[1];
  int64_t first, last;
  share(c.n, c, &first, &last);
  Scratch x(c, vocab);
  for (int64_t r = first; r < last; r++) {
    const int32_t s = a.row_slot[r];
    if (s < 0) continue;
    float* row = a.logits.row(r);
    const int32_t best = c.primitives->best(row, vocab);
    if (best == NO_TOKEN || a.filters.temperature[s] == 0) {
      std::memset(row, 0, size_t(vocab) * 4);
      if (best != NO_TOKEN) row[best] = 1.0f;
      continue;
    }
    for (int64_t v = 0; v < vocab; v++) x.first[v] = row[v] / a.filters.temperature[s];
    int64_t size = vocab;
    if (filtering(a.filters, s, vocab)) {
      size = kept(x.first, a.filters, s, vocab, x, c);
    } else {
      c.primitives->shares(x.first, 1.0f, x.first[best], x.second, vocab);
      for (int64_t v = 0; v < vocab; v++) x.ids[v] = int32_t(v);
    }
    double total = 0;
    std::sort(x.ids, x.ids + (size < vocab ? size : 0));  // one order of the sum, whichever way they were selected
    for (int64_t i = 0; i < size; i++) total += x.second[x.ids[i]];
    std::memset(row, 0, size_t(vocab) * 4);
    for (int64_t i = 0; i < size; i++) row[x.ids[i]] = float(x.second[x.ids[i]] / total);
  }
}
bool filter_probs_worth(const void* args, int64_t n) { return wide(n, record<FilterProbs>(args).logits.d[1]); }

// The token whose log weight plus noise is highest; NO_TOKEN where no weight is positive.
template <class W>
int32_t drawn(W weight, const float* noise, int64_t vocab) {
  int32_t found = NO_TOKEN;
  float top = 0;
  for (int64_t v = 0; v < vocab; v++) {
    const float w = weight(v);
    if (!(w > 0)) continue;
    const float value = std::log(w) + noise[v];
    if (found == NO_TOKEN || value > top) { top = value; found = int32_t(v); }
  }
  return found;
}

void draw_draft(const void* args, const Call& c) {
  const auto& a = record<DrawDraft>(args);
  const int64_t vocab = a.probs.d[1];
  for (int64_t r = 0; r < c.n; r++) {
    const int32_t s = a.row_slot[r];
    a.tokens[r] = NO_TOKEN;
    if (s < 0) continue;
    const float* probs = a.probs.row(r);
    a.tokens[r] = drawn([probs](int64_t v) { return probs[v]; }, a.noise.row(r), vocab);
    std::memcpy(a.draft_probs.p + (s * a.draft_probs.d[1] + a.draft_len[s]) * vocab, probs, size_t(vocab) * 4);
  }
}

// What p has more than q, or p itself where rounding left nothing.
int32_t drawn_leftover(const float* p, const float* q, int32_t draft, const float* noise, int64_t vocab) {
  auto more = [&](int64_t v) {
    const float rest = p[v] - (q ? q[v] : v == draft ? 1.0f : 0.0f);
    return rest > 0 ? rest : 0.0f;
  };
  const int32_t found = drawn(more, noise, vocab);
  return found != NO_TOKEN ? found : drawn([p](int64_t v) { return p[v]; }, noise, vocab);
}

void verify_rejection(const void* args, const Call& c) {
  const auto& a = record<VerifyRejection>(args);
  const int64_t vocab = a.probs.d[1];
  for (int64_t i = 0; i < c.n; i++) {
    const int32_t s = a.slot_order[i];
    for (int64_t j = 0; j < a.window.d[1]; j++) a.window.row(i)[j] = NO_TOKEN;
    a.window_len[i] = a.accepted[i] = 0;
    a.drafted[i] = -1;
    if (s < 0 || a.logit_len[i] == 0) continue;
    if (a.phase[s] == DECODE) a.drafted[i] = a.logit_len[i] - 1;
    int64_t row = a.logit_start[i];
    int32_t accepted = 0, last = NO_TOKEN;
    bool rejected = false;
    for (; accepted < a.drafted[i]; accepted++, row++) {
      const float *p = a.probs.row(row), *q = a.draft_probs.p ? a.draft_probs.p + (s * a.draft_probs.d[1] + accepted) * vocab : nullptr;
      const int32_t draft = a.drafts.row(s)[accepted];
      const double chance = q ? double(q[draft]) : 1.0;  // the product is exact, so its border is too
      if (!(double(a.uniforms[row]) * chance < double(p[draft]))) {
        last = drawn_leftover(p, q, draft, a.noise.row(row), vocab);
        rejected = true;
        break;
      }
      a.window.row(i)[accepted] = draft;
    }
    if (!rejected) {
      const float* p = a.probs.row(row);
      last = drawn([p](int64_t v) { return p[v]; }, a.noise.row(row), vocab);
    }
    a.window.row(i)[accepted] = last;
    a.accepted[i] = accepted;
    a.window_len[i] = accepted + 1;
  }
}

// -- penalties --------------------------------------------------------------------------------------------------------
// Tokens of the text are counted in the scratch once a row: bit 0 says that the prompt has the token, the rest how often it
// was generated.
void penalise_logits(const void* args, const Call& c) {
  const auto& a = record<Penalise>(args);
  const int64_t vocab = a.logits.d[1];
  int32_t* count = reinterpret_cast<int32_t*>(c.workspace);
  for (int64_t r = 0; r < c.n; r++) {
    const int32_t s = a.row_slot[r];
    if (s < 0) continue;
    const float factor = a.repetition[s], presence = a.presence[s], frequency = a.frequency[s];
    if (factor == 1 && presence == 0 && frequency == 0) continue;
    std::memset(count, 0, size_t(vocab) * 4);
    const int32_t *text = a.tokens.row(s), prompt = a.prompt_len[s], known = prompt + a.num_generated[s];
    for (int32_t i = 0; i < prompt; i++) count[text[i]] |= 1;
    for (int32_t i = prompt; i < known; i++) count[text[i]] += 2;
    for (int64_t j = 0; j < a.positions[r] + a.ahead - known; j++) count[a.drafts.row(s)[j]] += 2;
    float* row = a.logits.row(r);
    for (int64_t v = 0; v < vocab; v++) {
      if (!count[v]) continue;
      const int32_t times = count[v] >> 1;
      const float x = row[v] > 0 ? row[v] / factor : row[v] * factor;
      row[v] = x - (times ? presence + float(times) * frequency : 0.0f);
    }
  }
}

}  // namespace

const Kernel sampling_kernels[] = {
    {"argmax", -1, argmax, argmax_worth, sizeof(Argmax) / 8},
    {"gumbel_noise", -1, gumbel_noise, gumbel_noise_worth, sizeof(GumbelNoise) / 8},
    {"sample", -1, sample, sample_worth, sizeof(Sample) / 8},
    {"gumbel_noise+sample", -1, noise_sample, noise_sample_worth, sizeof(NoiseSample) / 8},
    {"uniform_noise", -1, uniform_noise, nullptr, sizeof(UniformNoise) / 8},
    {"filter_probs", -1, filter_probs, filter_probs_worth, sizeof(FilterProbs) / 8},
    {"draw_draft", -1, draw_draft, nullptr, sizeof(DrawDraft) / 8},
    {"verify_rejection", -1, verify_rejection, nullptr, sizeof(VerifyRejection) / 8},
    {"penalise_logits", -1, penalise_logits, nullptr, sizeof(Penalise) / 8},
};
const int64_t num_sampling_kernels = sizeof sampling_kernels / sizeof sampling_kernels[0];
}  // namespace pd
