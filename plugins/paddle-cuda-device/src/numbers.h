// Element types and views of tensors, for the host and the device alike. Nothing here knows Paddle.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#define POLY_BOTH __host__ __device__ __forceinline__
#else
#define POLY_BOTH inline
#endif

namespace polycuda {

constexpr int kMaxRank = 9;

// float32 cut to its upper half; computed with as float32, rounded to even when it is stored.
struct bf16 {
  uint16_t bits;
};

enum class Kind : int { f32, f64, i32, i64, u8, b8, bf16 };

struct View {
  void* data;
  Kind kind;
  int rank;
  int64_t dims[kMaxRank];
  int64_t strides[kMaxRank];  // in elements; 0 repeats, negative walks back

  int64_t size() const {
    int64_t count = 1;
    for (int d = 0; d < rank; ++d) count *= dims[d];
    return count;
  }
};

inline int64_t bytes_of(Kind kind) {
  switch (kind) {
    case Kind::f64:
    case Kind::i64:
      return 8;
    case Kind::f32:
    case Kind::i32:
      return 4;
    case Kind::bf16:
      return 2;
    default:
      return 1;
  }
}

// -- what a type is computed in -------------------------------------------------------------------
template <typename T>
struct Computed {
  using Type = T;
};
template <>
struct Computed<bf16> {
  using Type = float;
};
template <typename T>
using computed = typename Computed<T>::Type;

template <typename T>
constexpr bool is_float = std::is_floating_point<computed<T>>::value;

// What sums of it are taken in.
template <typename T>
using summed = std::conditional_t<is_float<T>, double, int64_t>;

template <typename T>
POLY_BOTH computed<T> load(const T& x) {
  return x;
}
template <>
POLY_BOTH float load<bf16>(const bf16& x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

template <typename T, typename C>
POLY_BOTH T store(C x) {
  if constexpr (std::is_same<T, bf16>::value) {
    const float narrow = static_cast<float>(x);
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    if (narrow != narrow) return bf16{static_cast<uint16_t>(bits >> 16 | 0x40)};
    return bf16{static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  } else if constexpr (std::is_same<T, bool>::value) {
    return x != C(0);
  } else {
    return static_cast<T>(x);
  }
}

// N elements that are read or written at once, from a multiple of their size on.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T of[N];
};
template <int N, typename T>
POLY_BOTH Pack<T, N> packed(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

}  // namespace polycuda
