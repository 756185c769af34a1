// What Paddle fuses: norms, alone or behind a sum, an activation, rotation by position, softmax, attention.
//
// Numbers of 16 bits are computed with in float32 and rounded once. A row has a team; sums of squares are taken in float64.

#include <string>

#include "folds.h"
#include "launch.h"
#include "operators.h"
#include "walk.h"

namespace polycuda {
namespace {

// Rows as packs of P elements.
template <typename T, int P>
struct NormWork {
  int64_t packs;
  double eps;
  T *out, *sum;    // `sum`: where x + y goes, null without y
  float* inverse;  // may be null
  const T *x, *y, *gain;
  template <typename Team>
  POLY_BOTH void operator()(int64_t row, Team& team) const {
    using Packed = Pack<T, P>;
    const int64_t start = row * packs * P;
    const Packed* from = reinterpret_cast<const Packed*>(x + start);
    double squares = 0;
    for (int64_t i = team.index(); i < packs; i += team.size()) {
      Packed values = from[i];
      if (sum != nullptr) {
        const Packed others = reinterpret_cast<const Packed*>(y + start)[i];
        for (int j = 0; j < P; ++j) values.of[j] = store<T>(load(values.of[j]) + load(others.of[j]));
        reinterpret_cast<Packed*>(sum + start)[i] = values;  // rounded: the norm is that of what is stored
      }
      for (int j = 0; j < P; ++j) squares += static_cast<double>(load(values.of[j])) * load(values.of[j]);
    }
    squares = team.reduce(squares, Plus());
    const float factor = static_cast<float>(1.0 / sqrt(squares / static_cast<double>(packs * P) + eps));
    if (inverse != nullptr && team.index() == 0) inverse[row] = factor;
    if (sum != nullptr) from = reinterpret_cast<const Packed*>(sum + start);
    for (int64_t i = team.index(); i < packs; i += team.size()) {
      const Packed values = from[i], gains = reinterpret_cast<const Packed*>(gain)[i];
      Packed made;
      for (int j = 0; j < P; ++j) made.of[j] = store<T>(load(values.of[j]) * factor * load(gains.of[j]));
      reinterpret_cast<Packed*>(out + start)[i] = made;
    }
  }
};

template <typename T>
struct GatedWork {
  int64_t width, pitch;
  T* out;
  const T *gate, *up;
  POLY_BOTH void operator()(int64_t i) const {
    const int64_t at = i / width * pitch + i % width;
    const float x = load(gate[at]);
    out[i] = store<T>(x / (1.f + exp(-x)) * load(up[at]));
  }
};

// Pairs of a head are neighbours, or lie in its two halves.
template <typename T>
struct RotateWork {
  int64_t heads, length, half;
  bool neighbours;
  T* out;
  const T *x, *sin, *cos;
  POLY_BOTH void operator()(int64_t i) const {
    const int64_t pair = i % half, head = i / half, place = head / heads % length, from = head * 2 * half, turn = place * 2 * half;
    const int64_t a = neighbours ? 2 * pair : pair, b = neighbours ? a + 1 : pair + half;
    const float one = load(x[from + a]), other = load(x[from + b]);
    out[from + a] = store<T>(one * load(cos[turn + a]) - other * load(sin[turn + a]));
    out[from + b] = store<T>(other * load(cos[turn + b]) + one * load(sin[turn + b]));
  }
};

template <typename T>
struct SoftmaxWork {
  int64_t width;
  T* out;
  const T* x;
  template <typename Team>
  POLY_BOTH void operator()(int64_t row, Team& team) const {
    const T* from = x + row * width;
    T* to = out + row * width;
    const Extreme larger{true};
    float top = -INFINITY;
    for (int64_t i = team.index(); i < width; i += team.size()) top = larger(top, load(from[i]));
    top = team.reduce(top, larger);
    float total = 0;
    for (int64_t i = team.index(); i < width; i += team.size()) total += exp(load(from[i]) - top);
    total = team.reduce(total, Plus());
    for (int64_t i = team.index(); i < width; i += team.size()) to[i] = store<T>(exp(load(from[i]) - top) / total);
  }
};

// One head of one row. A team scores as many places at a time as it has threads. Values are added up by groups of threads, each of which
// takes every so many places, kOwn elements of them a thread; what a group has is taken down whenever a higher score comes. Heads are
// multiples of kPack elements, which are read at once.
template <typename T, int kPack, int kOwn>
struct AttendWork {
  using Own = Pack<float, kOwn>;
  int64_t rows, heads, shared, places, size;
  Walk<1> walk;  // where `added` has the scores of a head of a row
  int64_t step;  // and how far apart those of two places are
  T* out;
  const T *q, *k, *v, *added;  // `added` may be null
  template <typename Team>
  POLY_BOTH void operator()(int64_t each, Team& team) const {
    constexpr int kTurns = (kLargestHead / kOwn + Team::size() - 1) / Team::size();
    const int64_t head = each % heads, row = each / heads, batch = row / rows, groups = heads / shared;
    const int64_t pitch = groups * size, first = batch * places * pitch + head / shared * size;
    const int packs = static_cast<int>(size / kOwn), lanes = packs < Team::size() ? packs : Team::size(), bands = Team::size() / lanes;
    const int lane = team.index() % lanes, band = team.index() / lanes;
    const T* query = q + each * size;
    const float scale = 1.f / sqrt(static_cast<float>(size));
    const int64_t base = added == nullptr ? 0 : start(batch, head, row % rows);
    float* weights = team.floats();
    const Extreme larger{true};
    Own sums[kTurns] = {};
    float top = -INFINITY, total = 0;
    for (int64_t from = 0; from < places; from += Team::size()) {
      const int64_t place = from + team.index(), count = places - from < Team::size() ? places - from : Team::size();
      float score = -INFINITY;
      if (place < places) {
        score = dot(query, k + first + place * pitch) * scale;
        if (added != nullptr) score += load(added[base + place * step]);
      }
      const float higher = larger(top, team.reduce(score, larger)), down = top == higher ? 1.f : exp(top - higher);
      const float weight = place < places ? exp(score - higher) : 0.f;
      weights[team.index()] = weight;
      total = total * down + team.reduce(weight, Plus());
      team.wait();
      for (int turn = 0; turn < kTurns; ++turn) {
        const int pack = lane + turn * lanes;
        if (pack >= packs || band >= bands) break;
        Own sum = {};
        const T* value = v + first + from * pitch + pack * kOwn;
        for (int64_t i = band; i < count; i += bands) {
          const Pack<T, kOwn> four = packed<kOwn>(value + i * pitch);
          for (int j = 0; j < kOwn; ++j) sum.of[j] += weights[i] * load(four.of[j]);
        }
        for (int j = 0; j < kOwn; ++j) sums[turn].of[j] = sums[turn].of[j] * down + sum.of[j];
      }
      top = higher;
    }
    if (bands > 1) {
      Own* shared_sums = team.template everybodys<Own>();
      team.wait();
      shared_sums[team.index()] = sums[0];
      team.wait();
      for (int other = 1; other < bands && band == 0; ++other) {
        for (int j = 0; j < kOwn; ++j) sums[0].of[j] += shared_sums[other * lanes + lane].of[j];
      }
    }
    for (int turn = 0; turn < kTurns && band == 0; ++turn) {
      const int pack = lane + turn * lanes;
      if (pack >= packs) break;
      for (int j = 0; j < kOwn; ++j) out[each * size + pack * kOwn + j] = store<T>(sums[turn].of[j] / total);
    }
  }
  POLY_BOTH int64_t start(int64_t batch, int64_t head, int64_t row) const {
    int64_t at[1];
    walk.at((batch * heads + head) * rows + row, at);
    return at[0];
  }
  POLY_BOTH float dot(const T* x, const T* y) const {
    float sum = 0;
    for (int64_t i = 0; i < size; i += kPack) {
      const Pack<T, kPack> a = packed<kPack>(x + i), b = packed<kPack>(y + i);
      for (int j = 0; j < kPack; ++j) sum += load(a.of[j]) * load(b.of[j]);
    }
    return sum;
  }
};

// A float32 is the sum of three numbers of bfloat16, one behind the other: each rounds what is left.
struct SplitWork {
  int64_t count;
  bf16* parts;  // [3, count]
  const float* x;
  POLY_BOTH void operator()(int64_t i) const {
    float rest = x[i];
    for (int part = 0; part < 3; ++part) {
      parts[part * count + i] = store<bf16>(rest);
      const float taken = load(parts[part * count + i]);
      rest = taken - taken == 0 ? rest - taken : 0;  // nothing is left of what is not finite
    }
  }
};

struct JoinWork {
  int64_t count;
  float* out;
  const float* parts;  // [3, count]
  POLY_BOTH void operator()(int64_t i) const { out[i] = parts[2 * count + i] + parts[count + i] + parts[i]; }
};

template <typename F>
void for_real(Kind kind, F function) {
  if (kind == Kind::f32) return function(Type<float>());
  if (kind == Kind::bf16) return function(Type<bf16>());
  throw std::runtime_error("fused operations are in float32 and bfloat16");
}

}  // namespace

void norm(Queue queue, const View& out, const View* sum, const View* inverse, const View& x, const View* y, const View& gain, double eps) {
  const int64_t width = gain.size();
  if (width == 0) return;
  for_real(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto pack) {
      constexpr int P = decltype(pack)::value;
      teams(queue, x.size() / width,
            NormWork<T, P>{width / P, eps, as<T>(out), sum == nullptr ? nullptr : as<T>(*sum),
                           inverse == nullptr ? nullptr : as<float>(*inverse), as<T>(x), y == nullptr ? nullptr : as<T>(*y),
                           as<T>(gain)});
    };
    if (go_together<T>(width, out, x, gain) && (y == nullptr || go_together<T>(width, *sum, *y))) {
      launch(std::integral_constant<int, kTogether<T>>());
    } else {
      launch(std::integral_constant<int, 1>());
    }
  });
}

void split(Queue queue, const View& parts, const View& x) {
  each(queue, x.size(), SplitWork{x.size(), as<bf16>(parts), as<float>(x)});
}

void join(Queue queue, const View& out, const View& parts) {
  each(queue, out.size(), JoinWork{out.size(), as<float>(out), as<float>(parts)});
}

void gated(Queue queue, const View& out, const View& gate, const View* up) {
  const int64_t width = out.rank == 0 ? 1 : out.dims[out.rank - 1];
  for_real(out.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* second = up == nullptr ? as<T>(gate) + width : as<T>(*up);
    each(queue, out.size(), GatedWork<T>{width, up == nullptr ? 2 * width : width, as<T>(out), as<T>(gate), second});
  });
}

void rotate(Queue queue, const View& out, const View& x, const View& sin, const View& cos, bool neighbours) {
  for_real(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, x.size() / 2,
         RotateWork<T>{x.dims[2], x.dims[1], x.dims[3] / 2, neighbours, as<T>(out), as<T>(x), as<T>(sin), as<T>(cos)});
  });
}

void softmax(Queue queue, const View& out, const View& x) {
  const int64_t width = x.rank == 0 ? 1 : x.dims[x.rank - 1];
  if (width == 0) return;
  for_real(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    teams(queue, x.size() / width, SoftmaxWork<T>{width, as<T>(out), as<T>(x)});
  });
}

void attend(Queue queue, const View& out, const View& q, const View& k, const View& v, const View* added) {
  const int64_t rows = q.dims[1], heads = q.dims[2], size = q.dims[3], places = k.dims[1];
  if (size > kLargestHead) throw std::runtime_error("attention takes heads of up to " + std::to_string(kLargestHead) + " elements");
  for_real(q.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto work) {
      work.rows = rows, work.heads = heads, work.shared = heads / k.dims[2], work.places = places, work.size = size;
      for (int d = 0; d < 3 && added != nullptr; ++d) work.walk.add(d == 0 ? q.dims[0] : d == 1 ? heads : rows, {stride_in(*added, d, 4)});
      if (added != nullptr) work.step = stride_in(*added, 3, 4), work.added = as<T>(*added);
      work.out = as<T>(out), work.q = as<T>(q), work.k = as<T>(k), work.v = as<T>(v);
      teams(queue, q.dims[0] * rows * heads, work);
    };
    if (go_together<T>(size, q, k, v)) {
      launch(AttendWork<T, kTogether<T>, 4>());
    } else {
      launch(AttendWork<T, 1, 1>());
    }
  });
}

}  // namespace polycuda
