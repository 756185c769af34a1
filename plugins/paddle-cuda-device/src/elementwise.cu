// Elementwise work: operands of any strides, one element of the result a call.

#include "launch.h"
#include "operators.h"
#include "walk.h"

namespace polycuda {
namespace {

template <typename C>
POLY_BOTH C computed_unary(Unary operation, C x) {
  if constexpr (std::is_floating_point<C>::value) {
    switch (operation) {
      case Unary::exp:
        return exp(x);
      case Unary::log:
        return log(x);
      case Unary::log1p:
        return log1p(x);
      case Unary::rsqrt:
        return C(1) / sqrt(x);
      case Unary::silu:
        return x / (C(1) + exp(-x));
      default:
        return x;
    }
  } else if constexpr (std::is_same<C, bool>::value) {
    return !x;
  } else {
    return static_cast<C>(~x);
  }
}

template <typename T>
struct UnaryWork {
  Unary operation;
  T* out;
  const T* x;
  POLY_BOTH void operator()(int64_t i) const { out[i] = store<T>(computed_unary(operation, load(x[i]))); }
};

template <typename T>
struct TestWork {
  Test what;
  bool* out;
  const T* x;
  POLY_BOTH void operator()(int64_t i) const {
    if constexpr (is_float<T>) {
      const auto value = load(x[i]);
      const bool nan = value != value;
      out[i] = what == Test::nan ? nan : !nan && value - value == 0;
    } else {
      out[i] = what == Test::finite;
    }
  }
};

template <typename C>
POLY_BOTH C whole_binary(Binary operation, C x, C y) {
  using U = std::make_unsigned_t<C>;
  constexpr int kBits = 8 * sizeof(C);
  const U a = static_cast<U>(x), b = static_cast<U>(y);  // sums and products wrap
  const bool far = y < 0 || y >= kBits;
  switch (operation) {
    case Binary::add:
      return static_cast<C>(a + b);
    case Binary::subtract:
      return static_cast<C>(a - b);
    case Binary::multiply:
      return static_cast<C>(a * b);
    case Binary::divide:
      return y == 0 ? C(0) : static_cast<C>(x / y);
    case Binary::floor_divide: {
      if (y == 0) return C(0);
      const C quotient = static_cast<C>(x / y);
      return quotient * y != x && (x < 0) != (y < 0) ? static_cast<C>(quotient - 1) : quotient;
    }
    case Binary::remainder: {
      if (y == 0) return C(0);
      const C rest = static_cast<C>(x % y);
      return rest != 0 && (rest < 0) != (y < 0) ? static_cast<C>(rest + y) : rest;
    }
    case Binary::maximum:
      return x > y ? x : y;
    case Binary::minimum:
      return x < y ? x : y;
    case Binary::bit_and:
      return static_cast<C>(a & b);
    case Binary::bit_or:
      return static_cast<C>(a | b);
    case Binary::bit_xor:
      return static_cast<C>(a ^ b);
    case Binary::shift_left:
      return far ? C(0) : static_cast<C>(a << b);
    case Binary::shift_right:
      return far ? (x < 0 ? static_cast<C>(-1) : C(0)) : static_cast<C>(x >> y);
    case Binary::shift_right_logical:
      return far ? C(0) : static_cast<C>(a >> b);
  }
  return x;
}

template <typename C>
POLY_BOTH C real_binary(Binary operation, C x, C y) {
  switch (operation) {
    case Binary::add:
      return x + y;
    case Binary::subtract:
      return x - y;
    case Binary::multiply:
      return x * y;
    case Binary::divide:
      return x / y;
    case Binary::floor_divide:
      return floor(x / y);
    case Binary::remainder: {
      const C rest = fmod(x, y);
      return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
    }
    case Binary::maximum:
      return x != x ? x : y != y ? y : x > y ? x : y;
    case Binary::minimum:
      return x != x ? x : y != y ? y : x < y ? x : y;
    default:
      return x;
  }
}

POLY_BOTH bool truth_binary(Binary operation, bool x, bool y) {
  switch (operation) {
    case Binary::multiply:
    case Binary::minimum:
    case Binary::bit_and:
      return x && y;
    case Binary::subtract:
    case Binary::bit_xor:
      return x != y;
    default:
      return x || y;
  }
}

template <typename C>
POLY_BOTH C computed_binary(Binary operation, C x, C y) {
  if constexpr (std::is_same<C, bool>::value) {
    return truth_binary(operation, x, y);
  } else if constexpr (std::is_floating_point<C>::value) {
    return real_binary(operation, x, y);
  } else {
    return whole_binary(operation, x, y);
  }
}

template <typename T>
struct BinaryWork {
  Binary operation;
  Walk<2> walk;
  T* out;
  const T *x, *y;
  POLY_BOTH void operator()(int64_t i) const {
    int64_t at[2];
    walk.at(i, at);
    out[i] = store<T>(computed_binary(operation, load(x[at[0]]), load(y[at[1]])));
  }
};

template <typename T>
struct CompareWork {
  Comparison comparison;
  Walk<2> walk;
  bool* out;
  const T *x, *y;
  POLY_BOTH void operator()(int64_t i) const {
    int64_t at[2];
    walk.at(i, at);
    const auto a = load(x[at[0]]), b = load(y[at[1]]);
    out[i] = holds(a, b);
  }
  template <typename C>
  POLY_BOTH bool holds(C a, C b) const {
    switch (comparison) {
      case Comparison::equal:
        return a == b;
      case Comparison::not_equal:
        return a != b;
      case Comparison::less:
        return a < b;
      case Comparison::less_equal:
        return a <= b;
      case Comparison::greater:
        return a > b;
      default:
        return a >= b;
    }
  }
};

template <typename T>
struct ChooseWork {
  Walk<3> walk;
  T* out;
  const bool* condition;
  const T *x, *y;
  POLY_BOTH void operator()(int64_t i) const {
    int64_t at[3];
    walk.at(i, at);
    out[i] = condition[at[0]] ? x[at[1]] : y[at[2]];
  }
};

template <typename T>
struct ScaleWork {
  computed<T> factor, bias;
  bool bias_after_scale;
  T* out;
  const T* x;
  POLY_BOTH void operator()(int64_t i) const {
    const auto value = load(x[i]);
    using C = computed<T>;
    out[i] = store<T>(static_cast<C>(bias_after_scale ? value * factor + bias : (value + bias) * factor));
  }
};

template <typename T>
struct ClipWork {
  computed<T> low, high;
  T* out;
  const T* x;
  POLY_BOTH void operator()(int64_t i) const {
    const auto value = load(x[i]);
    out[i] = store<T>(value < low ? low : value > high ? high : value);
  }
};

template <typename T>
struct FillWork {
  Walk<1> walk;
  T value;
  T* out;
  POLY_BOTH void operator()(int64_t i) const {
    int64_t at[1];
    walk.at(i, at);
    out[at[0]] = value;
  }
};

// P elements a call.
template <typename To, typename From, int P>
struct CastWork {
  To* out;
  const From* x;
  POLY_BOTH void operator()(int64_t i) const {
    const Pack<From, P> from = packed<P>(x + i * P);
    Pack<To, P> to;
    for (int j = 0; j < P; ++j) to.of[j] = store<To>(load(from.of[j]));
    *reinterpret_cast<Pack<To, P>*>(out + i * P) = to;
  }
};

template <typename T>
struct CopyWork {
  Walk<2> walk;
  T* out;
  const T* x;
  POLY_BOTH void operator()(int64_t i) const {
    int64_t at[2];
    walk.at(i, at);
    out[at[0]] = x[at[1]];
  }
};

template <typename T>
computed<T> number(Number value) {
  if constexpr (is_float<T>) {
    return static_cast<computed<T>>(value.real);
  } else {
    return static_cast<computed<T>>(value.whole);
  }
}

}  // namespace

void unary(Queue queue, Unary operation, const View& out, const View& x) {
  for_type(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, out.size(), UnaryWork<T>{operation, as<T>(out), as<T>(x)});
  });
}

void test(Queue queue, Test what, const View& out, const View& x) {
  for_type(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, out.size(), TestWork<T>{what, as<bool>(out), as<T>(x)});
  });
}

void binary(Queue queue, Binary operation, const View& out, const View& x, const View& y) {
  for_type(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, out.size(), BinaryWork<T>{operation, broadcast(out, x, y), as<T>(out), as<T>(x), as<T>(y)});
  });
}

void compare(Queue queue, Comparison comparison, const View& out, const View& x, const View& y) {
  for_type(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, out.size(), CompareWork<T>{comparison, broadcast(out, x, y), as<bool>(out), as<T>(x), as<T>(y)});
  });
}

void choose(Queue queue, const View& out, const View& condition, const View& x, const View& y) {
  for_size(out.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, out.size(),
         ChooseWork<T>{broadcast(out, condition, x, y), as<T>(out), as<bool>(condition), as<T>(x), as<T>(y)});
  });
}

void scale(Queue queue, const View& out, const View& x, Number factor, Number bias, bool bias_after_scale) {
  for_type(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, out.size(), ScaleWork<T>{number<T>(factor), number<T>(bias), bias_after_scale, as<T>(out), as<T>(x)});
  });
}

void clip(Queue queue, const View& out, const View& x, Number low, Number high) {
  for_type(x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, out.size(), ClipWork<T>{number<T>(low), number<T>(high), as<T>(out), as<T>(x)});
  });
}

void fill(Queue queue, const View& out, Number value) {
  for_type(out.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, out.size(), FillWork<T>{broadcast(out, out), store<T>(number<T>(value)), as<T>(out)});
  });
}

void cast(Queue queue, const View& out, const View& x) {
  for_type(out.kind, [&](auto to) {
    for_type(x.kind, [&](auto from) {
      using To = typename decltype(to)::type;
      using From = typename decltype(from)::type;
      constexpr int kPack = 4;
      if (out.size() % kPack == 0 && is_aligned(out) && is_aligned(x)) {
        each(queue, out.size() / kPack, CastWork<To, From, kPack>{as<To>(out), as<From>(x)});
      } else {
        each(queue, out.size(), CastWork<To, From, 1>{as<To>(out), as<From>(x)});
      }
    });
  });
}

void copy(Queue queue, const View& out, const View& x) {
  for_size(out.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    each(queue, out.size(), CopyWork<T>{broadcast(out, out, x), as<T>(out), as<T>(x)});
  });
}

}  // namespace polycuda
