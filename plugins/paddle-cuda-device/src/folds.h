// What folds two numbers into one.

#pragma once

#include "numbers.h"

namespace polycuda {

struct Plus {
  template <typename A>
  POLY_BOTH A operator()(A x, A y) const {
    return x + y;
  }
};

// The larger (smaller) of two; NaN wins.
struct Extreme {
  bool largest;
  template <typename C>
  POLY_BOTH bool prefers(C x, C y) const {
    if (x != x) return y == y;
    return largest ? x > y : x < y;
  }
  template <typename C>
  POLY_BOTH C operator()(C x, C y) const {
    return prefers(y, x) ? y : x;
  }
};

}  // namespace polycuda
