// Where element i of a shape lies in each of several operands, and choices of a template by an element type.

#pragma once

#include <stdexcept>

#include "numbers.h"

namespace polycuda {

// Offsets, in elements, of element i (row by row) of `dims` in N operands. A plain value that kernels carry along.
template <int N>
struct Walk {
  int rank = 0;
  int64_t dims[kMaxRank];
  int64_t strides[N][kMaxRank];

  void add(int64_t dim, const int64_t (&steps)[N]) {
    if (dim == 1) return;
    if (rank > 0) {  // one dimension with the one before it, where all operands go on as if they were one
      bool joins = true;
      for (int n = 0; n < N; ++n) joins &= strides[n][rank - 1] == steps[n] * dim;
      if (joins) {
        dims[rank - 1] *= dim;
        for (int n = 0; n < N; ++n) strides[n][rank - 1] = steps[n];
        return;
      }
    }
    dims[rank] = dim;
    for (int n = 0; n < N; ++n) strides[n][rank] = steps[n];
    ++rank;
  }

  POLY_BOTH void at(int64_t i, int64_t (&offsets)[N]) const {
    if (rank == 1) {  // as where all operands lie in one piece
      for (int n = 0; n < N; ++n) offsets[n] = i * strides[n][0];
      return;
    }
    for (int n = 0; n < N; ++n) offsets[n] = 0;
    if (i >> 31 == 0) {  // divisions of 32 bits are much cheaper on a GPU
      uint32_t rest = static_cast<uint32_t>(i);
      for (int d = rank - 1; d >= 0; --d) {
        const uint64_t dim = static_cast<uint64_t>(dims[d]);
        const uint32_t before = dim >> 32 == 0 ? rest / static_cast<uint32_t>(dim) : 0;
        const int64_t here = rest - before * static_cast<uint32_t>(dim);
        for (int n = 0; n < N; ++n) offsets[n] += here * strides[n][d];
        rest = before;
      }
      return;
    }
    for (int d = rank - 1; d >= 0; --d) {
      const int64_t before = i / dims[d], here = i - before * dims[d];
      for (int n = 0; n < N; ++n) offsets[n] += here * strides[n][d];
      i = before;
    }
  }
};

// The stride of `x` along dimension `d` of a shape of `rank` dimensions that it is broadcast to.
inline int64_t stride_in(const View& x, int d, int rank) {
  const int own = d - (rank - x.rank);
  return own < 0 || x.dims[own] == 1 ? 0 : x.strides[own];
}

template <typename... Views>
Walk<sizeof...(Views)> broadcast(const View& shape, const Views&... operands) {
  Walk<sizeof...(Views)> walk;
  for (int d = 0; d < shape.rank; ++d) {
    const int64_t steps[] = {stride_in(operands, d, shape.rank)...};
    walk.add(shape.dims[d], steps);
  }
  return walk;
}

template <typename T>
struct Type {
  using type = T;
};

template <typename F>
void for_type(Kind kind, F function) {
  switch (kind) {
    case Kind::f32:
      return function(Type<float>());
    case Kind::f64:
      return function(Type<double>());
    case Kind::i32:
      return function(Type<int32_t>());
    case Kind::i64:
      return function(Type<int64_t>());
    case Kind::u8:
      return function(Type<uint8_t>());
    case Kind::b8:
      return function(Type<bool>());
    case Kind::bf16:
      return function(Type<bf16>());
  }
}

template <typename F>
void for_index(Kind kind, F function) {
  if (kind == Kind::i64) return function(Type<int64_t>());
  if (kind == Kind::i32) return function(Type<int32_t>());
  throw std::runtime_error("the device takes indices of 32 or 64 bits");
}

// Moves of whole elements need to know their size alone.
template <typename F>
void for_size(Kind kind, F function) {
  switch (bytes_of(kind)) {
    case 8:
      return function(Type<uint64_t>());
    case 4:
      return function(Type<uint32_t>());
    case 2:
      return function(Type<uint16_t>());
    default:
      return function(Type<uint8_t>());
  }
}

template <typename T>
T* as(const View& view) {
  return static_cast<T*>(view.data);
}

inline bool is_aligned(const View& view) { return reinterpret_cast<uintptr_t>(view.data) % 16 == 0; }

// Elements of 16 bytes, and whether rows of `inner` elements can be read and written so many at a time.
template <typename T>
constexpr int kTogether = 16 / sizeof(T);
template <typename T, typename... Views>
bool go_together(int64_t inner, const Views&... views) {
  return inner % kTogether<T> == 0 && (is_aligned(views) && ...);
}

inline int axis_of(int axis, int rank) { return axis < 0 ? axis + rank : axis; }

}  // namespace polycuda
