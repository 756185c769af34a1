// Work along axes: sums and other folds, running folds, sorting, searching. One team a row, and sums in wider types.

#include "folds.h"
#include "launch.h"
#include "operators.h"
#include "walk.h"

namespace polycuda {
namespace {

constexpr int kAhead = 8;  // elements of a thread that are on their way at a time

// The elements that are folded into one, from where the row begins.
struct Rows {
  Walk<1> row, element;
  int64_t rows = 1, length = 1;

  POLY_BOTH int64_t start(int64_t i) const {
    int64_t at[1];
    row.at(i, at);
    return at[0];
  }
  POLY_BOTH int64_t offset(int64_t i) const {
    int64_t at[1];
    element.at(i, at);
    return at[0];
  }
  // `visit` what this thread has of the row at `from`, and where in the row it is.
  template <typename T, typename Team, typename F>
  POLY_BOTH void each(const T* from, const Team& team, F visit) const {
    int64_t i = team.index();
    const int64_t step = team.size(), stride = element.strides[0][0];
    for (; element.rank == 1 && i + (kAhead - 1) * step < length; i += kAhead * step) {
      computed<T> values[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) values[j] = load(from[(i + j * step) * stride]);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) visit(values[j], i + j * step);
    }
    for (; i < length; i += step) visit(load(from[offset(i)]), i);
  }
};

Rows rows_of(const View& x, const std::vector<int>& axes) {
  bool folded[kMaxRank] = {};
  for (const int axis : axes) folded[axis_of(axis, x.rank)] = true;
  Rows rows;
  for (int d = 0; d < x.rank; ++d) {
    const bool all = axes.empty() || folded[d];
    (all ? rows.element : rows.row).add(x.dims[d], {x.strides[d]});
    (all ? rows.length : rows.rows) *= x.dims[d];
  }
  return rows;
}

template <typename T>
POLY_BOTH void store_at(void* out, int64_t i, T value) {
  static_cast<T*>(out)[i] = value;
}

// A number into an element of a type that is known at run time.
template <typename A>
POLY_BOTH void store_as(void* out, Kind kind, int64_t i, A value) {
  switch (kind) {
    case Kind::f32:
      return store_at(out, i, store<float>(value));
    case Kind::f64:
      return store_at(out, i, store<double>(value));
    case Kind::i32:
      return store_at(out, i, store<int32_t>(value));
    case Kind::i64:
      return store_at(out, i, store<int64_t>(value));
    case Kind::u8:
      return store_at(out, i, store<uint8_t>(value));
    case Kind::b8:
      return store_at(out, i, store<bool>(value));
    case Kind::bf16:
      return store_at(out, i, store<bf16>(value));
  }
}

template <typename T>
struct SumWork {
  Rows rows;
  Kind kind;
  bool mean;
  void* out;
  const T* x;
  template <typename Team>
  POLY_BOTH void operator()(int64_t row, Team& team) const {
    using A = summed<T>;
    const T* from = x + rows.start(row);
    A sum = 0;
    for (int64_t i = team.index(); i < rows.length; i += team.size()) sum += static_cast<A>(load(from[rows.offset(i)]));
    sum = team.reduce(sum, Plus());
    if (team.index() == 0) store_as(out, kind, row, mean ? static_cast<A>(sum / static_cast<A>(rows.length)) : sum);
  }
};

template <typename T>
struct ExtremeWork {
  Rows rows;
  Extreme extreme;
  T* out;
  const T* x;
  template <typename Team>
  POLY_BOTH void operator()(int64_t row, Team& team) const {
    const T* from = x + rows.start(row);
    auto best = load(from[rows.offset(0)]);
    rows.each(from, team, [&](computed<T> value, int64_t) { best = extreme(best, value); });
    best = team.reduce(best, extreme);
    if (team.index() == 0) out[row] = store<T>(best);
  }
};

struct Either {
  POLY_BOTH int operator()(int x, int y) const { return x | y; }
};

template <typename T>
struct TruthWork {
  Rows rows;
  bool all;
  bool* out;
  const T* x;
  template <typename Team>
  POLY_BOTH void operator()(int64_t row, Team& team) const {
    const T* from = x + rows.start(row);
    int found = 0;  // of what decides
    for (int64_t i = team.index(); i < rows.length; i += team.size()) found |= (load(from[rows.offset(i)]) != 0) != all;
    found = team.reduce(found, Either());
    if (team.index() == 0) out[row] = (found != 0) != all;
  }
};

// A value and its place; the first of equals wins, or the last.
template <typename C>
struct Placed {
  C value;
  int64_t place;
};

struct Better {
  Extreme extreme;
  bool last;
  template <typename C>
  POLY_BOTH Placed<C> operator()(Placed<C> x, Placed<C> y) const {
    if (x.place < 0) return y;
    if (y.place < 0) return x;
    if (extreme.prefers(y.value, x.value)) return y;
    if (extreme.prefers(x.value, y.value)) return x;
    return (y.place > x.place) == last ? y : x;
  }
};

template <typename T>
struct ArgmaxWork {
  Rows rows;
  Kind kind;
  void* out;
  const T* x;
  template <typename Team>
  POLY_BOTH void operator()(int64_t row, Team& team) const {
    using P = Placed<computed<T>>;
    const Better better{{true}, false};
    const T* from = x + rows.start(row);
    P best{load(from[rows.offset(0)]), -1};
    rows.each(from, team, [&](computed<T> value, int64_t i) { best = better(best, P{value, i}); });
    best = team.reduce(best, better);
    if (team.index() == 0) store_as(out, kind, row, best.place);
  }
};

struct Join {
  Running what;
  template <typename A>
  POLY_BOTH A operator()(A x, A y) const {
    return what == Running::sum ? x + y : x * y;
  }
};

template <typename T>
struct RunningWork {
  Rows rows;
  Join join;
  bool exclusive, reverse;
  T* out;
  const T* x;
  template <typename Team>
  POLY_BOTH void operator()(int64_t row, Team& team) const {
    using A = summed<T>;
    const int64_t start = rows.start(row);
    A carried = join.what == Running::sum ? A(0) : A(1);
    if (exclusive && team.index() == 0 && rows.length > 0) out[start + place(0)] = store<T>(carried);
    for (int64_t base = 0; base < rows.length; base += team.size()) {
      const int64_t i = base + team.index();
      A total;
      const A own = i < rows.length ? static_cast<A>(load(x[start + place(i)])) : A(0);
      const A upto = join(carried, team.scan(own, join, &total));
      const int64_t to = exclusive ? i + 1 : i;
      if (to < rows.length) out[start + place(to)] = store<T>(upto);
      carried = join(carried, total);
    }
  }
  POLY_BOTH int64_t place(int64_t i) const { return rows.offset(reverse ? rows.length - 1 - i : i); }
};

template <typename T>
struct RunningExtremeWork {
  Rows rows;
  Better better;
  Kind kind;
  T* out;
  void* indices;
  const T* x;
  template <typename Team>
  POLY_BOTH void operator()(int64_t row, Team& team) const {
    using P = Placed<computed<T>>;
    const int64_t start = rows.start(row);
    P carried{computed<T>(0), -1};
    for (int64_t base = 0; base < rows.length; base += team.size()) {
      const int64_t i = base + team.index();
      P total;
      const P own = i < rows.length ? P{load(x[start + rows.offset(i)]), i} : P{computed<T>(0), -1};
      const P upto = better(carried, team.scan(own, better, &total));
      if (i < rows.length) {
        out[start + rows.offset(i)] = store<T>(upto.value);
        store_as(indices, kind, start + rows.offset(i), upto.place);
      }
      carried = better(carried, total);
    }
  }
};

// -- sorting: a bitonic network over the places of each row, padded to a power of two; ties by place make it stable ----
struct Places {
  Rows rows;
  int64_t padded;
  int32_t* places;
};

struct NumberWork {
  Places sorted;
  POLY_BOTH void operator()(int64_t i) const { sorted.places[i] = static_cast<int32_t>(i % sorted.padded); }
};

template <typename T>
struct ExchangeWork {
  Places sorted;
  bool descending;
  int64_t block, distance;
  const T* x;

  POLY_BOTH void operator()(int64_t i) const {
    const int64_t half = sorted.padded / 2, row = i / half, pair = i % half;
    const int64_t low = pair / distance * 2 * distance + pair % distance;
    int32_t* places = sorted.places + row * sorted.padded;
    const int32_t a = places[low], b = places[low + distance];
    const bool upwards = (low & block) == 0;
    if (before(row, b, a) == upwards) {
      places[low] = b;
      places[low + distance] = a;
    }
  }
  // Whether the element at place a of the row comes before that at place b; padding comes last, and NaN is the largest number.
  POLY_BOTH bool before(int64_t row, int64_t a, int64_t b) const {
    if (a >= sorted.rows.length || b >= sorted.rows.length) return a < b;
    const T* from = x + sorted.rows.start(row);
    const auto left = load(from[sorted.rows.offset(a)]), right = load(from[sorted.rows.offset(b)]);
    const Extreme extreme{descending};
    if (left != left || right != right) {
      if (left != left && right != right) return a < b;
      return (left != left) == descending;
    }
    if (extreme.prefers(left, right)) return true;
    if (extreme.prefers(right, left)) return false;
    return a < b;
  }
};

template <typename T>
struct SortedWork {
  Places sorted;
  T* out;
  int64_t* indices;
  const T* x;
  POLY_BOTH void operator()(int64_t i) const {
    const Rows& rows = sorted.rows;
    const int64_t row = i / rows.length, place = i % rows.length, start = rows.start(row);
    const int64_t from = sorted.places[row * sorted.padded + place];
    out[start + rows.offset(place)] = x[start + rows.offset(from)];
    indices[start + rows.offset(place)] = from;
  }
};

int64_t padded(int64_t length) {
  int64_t size = 2;
  while (size < length) size *= 2;
  return size;
}

template <typename T>
struct SearchWork {
  int64_t rows_of_sorted, length, values_of_row;
  bool right;
  Kind kind;
  void* out;
  const T *sorted, *values;
  POLY_BOTH void operator()(int64_t i) const {
    const T* row = sorted + (rows_of_sorted > 1 ? i / values_of_row * length : 0);
    const auto value = load(values[i]);
    int64_t low = 0, high = length;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const auto here = load(row[middle]);
      if (right ? here <= value : here < value) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    store_as(out, kind, i, low);
  }
};

}  // namespace

void fold(Queue queue, Fold what, const View& out, const View& x, const std::vector<int>& axes) {
  const Rows rows = rows_of(x, axes);
  const bool empty = rows.length == 0;
  for_type(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (what) {
      case Fold::sum:
      case Fold::mean:
        return teams(queue, rows.rows, SumWork<T>{rows, out.kind, what == Fold::mean, out.data, as<T>(x)});
      case Fold::max:
      case Fold::min:
        if (empty) throw std::runtime_error("the extreme of nothing");
        return teams(queue, rows.rows, ExtremeWork<T>{rows, {what == Fold::max}, as<T>(out), as<T>(x)});
      case Fold::any:
      case Fold::all:
        return teams(queue, rows.rows, TruthWork<T>{rows, what == Fold::all, as<bool>(out), as<T>(x)});
    }
  });
}

void argmax(Queue queue, const View& out, const View& x, int axis) {
  const Rows rows = rows_of(x, {axis});
  for_type(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    teams(queue, rows.rows, ArgmaxWork<T>{rows, out.kind, out.data, as<T>(x)});
  });
}

void running(Queue queue, Running what, const View& out, const View* indices, const View& x, int axis, bool exclusive,
             bool reverse) {
  const Rows rows = rows_of(x, {axis});
  for_type(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    if (what == Running::sum || what == Running::product) {
      teams(queue, rows.rows, RunningWork<T>{rows, {what}, exclusive, reverse, as<T>(out), as<T>(x)});
    } else {
      const Better better{{what == Running::max}, true};
      teams(queue, rows.rows, RunningExtremeWork<T>{rows, better, indices->kind, as<T>(out), indices->data, as<T>(x)});
    }
  });
}

int64_t sort_scratch(const View& x, int axis) {
  const Rows rows = rows_of(x, {axis});
  return rows.rows * padded(rows.length);
}

void sort(Queue queue, const View& out, const View& indices, const View& x, int axis, bool descending, void* scratch) {
  const Places places{rows_of(x, {axis}), padded(x.dims[axis_of(axis, x.rank)]), static_cast<int32_t*>(scratch)};
  const int64_t all = places.rows.rows * places.padded;
  if (out.size() == 0) return;
  each(queue, all, NumberWork{places});
  for_type(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t block = 2; block <= places.padded; block *= 2) {
      for (int64_t distance = block / 2; distance > 0; distance /= 2) {
        each(queue, all / 2, ExchangeWork<T>{places, descending, block, distance, as<T>(x)});
      }
    }
    each(queue, out.size(), SortedWork<T>{places, as<T>(out), as<int64_t>(indices), as<T>(x)});
  });
}

void search(Queue queue, const View& out, const View& sorted, const View& values, bool right) {
  const int64_t length = sorted.rank == 0 ? 1 : sorted.dims[sorted.rank - 1];
  const int64_t each_row = values.rank == 0 ? 1 : values.dims[values.rank - 1];
  for_type(sorted.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, out.size(),
         SearchWork<T>{length == 0 ? 1 : sorted.size() / length, length, each_row, right, out.kind, out.data, as<T>(sorted),
                       as<T>(values)});
  });
}

}  // namespace polycuda
