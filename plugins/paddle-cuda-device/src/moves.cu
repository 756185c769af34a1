// Moves by index, and products without a library.

#include "launch.h"
#include "operators.h"
#include "walk.h"

namespace polycuda {
namespace {

template <typename I>
POLY_BOTH int64_t wrapped(I index, int64_t size) {
  return index < 0 ? static_cast<int64_t>(index) + size : static_cast<int64_t>(index);
}

template <typename T, typename I>
struct GatherWork {
  int64_t count, size, inner;  // of indices; of the axis; behind the axis
  T* out;
  const T* x;
  const I* index;
  POLY_BOTH void operator()(int64_t i) const {
    if (i >> 31 == 0 && count >> 31 == 0 && inner >> 31 == 0) {  // divisions of 32 bits are much cheaper on a GPU
      pick(static_cast<uint32_t>(i), static_cast<uint32_t>(count), static_cast<uint32_t>(inner));
    } else {
      pick(i, count, inner);
    }
  }
  template <typename N>
  POLY_BOTH void pick(N i, N of, N behind) const {
    const N rest = i / behind, column = i - rest * behind, outer = rest / of;
    out[i] = x[(static_cast<int64_t>(outer) * size + wrapped(index[rest - outer * of], size)) * inner + column];
  }
};

template <typename T, typename I>
struct TakeWork {
  Walk<1> walk;
  int64_t size, stride;
  T* out;
  const T* x;
  const I* index;
  POLY_BOTH void operator()(int64_t i) const {
    int64_t at[1];
    walk.at(i, at);
    out[i] = x[at[0] + wrapped(index[i], size) * stride];
  }
};

template <typename T, typename I>
struct PutWork {
  Walk<2> walk;  // of out, without the axis, and of value
  int64_t size, stride;
  T* out;
  const I* index;
  const T* value;
  POLY_BOTH void operator()(int64_t i) const {
    int64_t at[2];
    walk.at(i, at);
    out[at[0] + wrapped(index[i], size) * stride] = value[at[1]];
  }
};

// One call a row, entry by entry: equal indices add up in a fixed order.
template <typename T, typename I>
struct AddWork {
  Walk<3> walk;  // where a row begins in out, index and value
  int64_t length, size, stride, index_stride, value_stride;
  T* out;
  const I* index;
  const T* value;
  POLY_BOTH void operator()(int64_t row) const {
    int64_t at[3];
    walk.at(row, at);
    for (int64_t i = 0; i < length; ++i) {
      T& to = out[at[0] + wrapped(index[at[1] + i * index_stride], size) * stride];
      to = store<T>(static_cast<computed<T>>(load(to) + load(value[at[2] + i * value_stride])));
    }
  }
};

template <typename T, typename I>
struct ScatterWork {
  int64_t size, inner;
  T* out;
  const I* index;
  const T* updates;
  POLY_BOTH void operator()(int64_t i) const {
    out[wrapped(index[i / inner], size) * inner + i % inner] = updates[i];
  }
};

// One call a column: rows that are named are cleared, then added up.
template <typename T, typename I>
struct ScatterAddWork {
  int64_t count, size, inner;
  T* out;
  const I* index;
  const T* updates;
  POLY_BOTH void operator()(int64_t column) const {
    for (int64_t i = 0; i < count; ++i) out[wrapped(index[i], size) * inner + column] = store<T>(computed<T>(0));
    for (int64_t i = 0; i < count; ++i) {
      T& to = out[wrapped(index[i], size) * inner + column];
      to = store<T>(static_cast<computed<T>>(load(to) + load(updates[i * inner + column])));
    }
  }
};

template <typename T, typename Y>
struct ProductWork {
  Walk<2> batch;
  int64_t rows, columns, depth, x_row, x_column, y_row, y_column;
  T* out;
  const T* x;
  const Y* y;
  const T* bias;  // [columns], may be null
  POLY_BOTH void operator()(int64_t i) const {
    const int64_t column = i % columns, rest = i / columns;
    int64_t at[2];
    batch.at(rest / rows, at);
    const T* left = x + at[0] + rest % rows * x_row;
    const Y* right = y + at[1] + column * y_column;
    summed<T> sum = bias == nullptr ? summed<T>(0) : static_cast<summed<T>>(load(bias[column]));
    for (int64_t k = 0; k < depth; ++k) {
      sum += static_cast<summed<T>>(load(left[k * x_column])) * static_cast<summed<T>>(load(right[k * y_row]));
    }
    out[i] = store<T>(sum);
  }
};

int64_t behind(const View& x, int axis) {
  int64_t size = 1;
  for (int d = axis + 1; d < x.rank; ++d) size *= x.dims[d];
  return size;
}

}  // namespace

void gather(Queue queue, const View& out, const View& x, const View& index, int axis) {
  axis = axis_of(axis, x.rank);
  for_size(x.kind, [&](auto element) {
    for_index(index.kind, [&](auto word) {
      using T = typename decltype(element)::type;
      using I = typename decltype(word)::type;
      const int64_t inner = behind(x, axis);
      if (go_together<T>(inner, out, x)) {
        using P = Pack<T, kTogether<T>>;
        each(queue, out.size() / kTogether<T>,
             GatherWork<P, I>{index.size(), x.dims[axis], inner / kTogether<T>, as<P>(out), as<P>(x), as<I>(index)});
      } else {
        each(queue, out.size(), GatherWork<T, I>{index.size(), x.dims[axis], inner, as<T>(out), as<T>(x), as<I>(index)});
      }
    });
  });
}

void take_along(Queue queue, const View& out, const View& x, const View& index, int axis) {
  axis = axis_of(axis, x.rank);
  Walk<1> walk;
  for (int d = 0; d < index.rank; ++d) walk.add(index.dims[d], {d == axis ? 0 : stride_in(x, d, index.rank)});
  for_size(x.kind, [&](auto element) {
    for_index(index.kind, [&](auto word) {
      using T = typename decltype(element)::type;
      using I = typename decltype(word)::type;
      each(queue, out.size(), TakeWork<T, I>{walk, x.dims[axis], x.strides[axis], as<T>(out), as<T>(x), as<I>(index)});
    });
  });
}

void put_along(Queue queue, const View& out, const View& index, const View& value, int axis, bool add) {
  axis = axis_of(axis, out.rank);
  Walk<2> places;
  Walk<3> rows;
  int64_t count = 1;
  for (int d = 0; d < index.rank; ++d) {
    const int64_t to = d == axis ? 0 : out.strides[d], from = stride_in(value, d, index.rank);
    places.add(index.dims[d], {to, from});
    if (d != axis) rows.add(index.dims[d], {to, index.strides[d], from}), count *= index.dims[d];
  }
  const int64_t size = out.dims[axis], stride = out.strides[axis];
  for_index(index.kind, [&](auto word) {
    using I = typename decltype(word)::type;
    if (add) {
      for_type(out.kind, [&](auto element) {
        using T = typename decltype(element)::type;
        each(queue, count,
             AddWork<T, I>{rows, index.dims[axis], size, stride, index.strides[axis], stride_in(value, axis, index.rank),
                           as<T>(out), as<I>(index), as<T>(value)});
      });
    } else {
      for_size(out.kind, [&](auto element) {
        using T = typename decltype(element)::type;
        each(queue, index.size(), PutWork<T, I>{places, size, stride, as<T>(out), as<I>(index), as<T>(value)});
      });
    }
  });
}

void scatter(Queue queue, const View& out, const View& index, const View& updates, bool overwrite) {
  const int64_t size = out.dims[0], inner = behind(out, 0);
  for_index(index.kind, [&](auto word) {
    using I = typename decltype(word)::type;
    if (overwrite) {
      for_size(out.kind, [&](auto element) {
        using T = typename decltype(element)::type;
        each(queue, index.size() * inner, ScatterWork<T, I>{size, inner, as<T>(out), as<I>(index), as<T>(updates)});
      });
    } else {
      for_type(out.kind, [&](auto element) {
        using T = typename decltype(element)::type;
        each(queue, inner, ScatterAddWork<T, I>{index.size(), size, inner, as<T>(out), as<I>(index), as<T>(updates)});
      });
    }
  });
}

void product(Queue queue, const View& out, const View& x, const View& y, const View* bias) {
  Walk<2> batch;
  for (int d = 0; d < out.rank - 2; ++d) batch.add(out.dims[d], {stride_in(x, d, out.rank), stride_in(y, d, out.rank)});
  const int last = out.rank - 1;
  const auto launch = [&](auto element, auto second) {
    using T = typename decltype(element)::type;
    using Y = typename decltype(second)::type;
    each(queue, out.size(),
         ProductWork<T, Y>{batch, out.dims[last - 1], out.dims[last], x.dims[x.rank - 1], x.strides[x.rank - 2],
                           x.strides[x.rank - 1], y.strides[y.rank - 2], y.strides[y.rank - 1], as<T>(out), as<T>(x), as<Y>(y),
                           bias == nullptr ? nullptr : as<T>(*bias)});
  };
  if (is_mixed(x, y)) return launch(Type<float>(), Type<bf16>());
  for_type(out.kind, [&](auto element) { launch(element, element); });
}

}  // namespace polycuda
