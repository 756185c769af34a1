// Where the device computes otherwise than Paddle's CPU kernel: as a chip does that rounds the factors of a product, or that finds
// another one of several equal numbers, if it was told to (knobs in queue.h); softmax, in which the CPU loses NaN and small weights; and
// the norm of a sum, which may lie where an addend does, as in the XPU's kernel. Everything else runs the CPU kernel as it is.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "further_operations.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle_device/operations.h"
#include "queue.h"

namespace polyemu {

using phi::CPUContext;
using phi::DenseTensor;

inline const CPUContext& cpu() {
  return *static_cast<const CPUContext*>(phi::DeviceContextPool::Instance().Get(phi::CPUPlace()));
}

// How an operation is computed on the stream's thread: `on_cpu` is Paddle's kernel.
template <typename Operation, typename Element>
struct Computed {
  template <typename Function, typename... A>
  static void run(Function on_cpu, A&&... arguments) {
    on_cpu(cpu(), std::forward<A>(arguments)...);
  }
};

// -- products in TF32 -------------------------------------------------------------------------------------------------------------
// The factor with 10 bits of mantissa, ties to even; infinities and NaN as they are. How a chip breaks ties is its own affair.
inline DenseTensor tf32(const DenseTensor& factor) {
  DenseTensor rounded;
  rounded.Resize(factor.dims());
  auto* to = cpu().Alloc<float>(&rounded);
  const auto* from = factor.data<float>();
  for (int64_t i = 0; i < factor.numel(); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, from + i, sizeof(bits));
    if ((bits & 0x7F800000u) != 0x7F800000u) bits = (bits + 0xFFFu + ((bits >> 13) & 1u)) & ~0x1FFFu;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
  return rounded;
}

struct Product {
  template <typename Function, typename... A>
  static void run(Function on_cpu, const DenseTensor& x, const DenseTensor& y, A&&... rest) {
    if (knobs().tf32 == 0) return on_cpu(cpu(), x, y, std::forward<A>(rest)...);
    on_cpu(cpu(), tf32(x), tf32(y), std::forward<A>(rest)...);
  }
};

template <>
struct Computed<paddle_device::operation_matmul, float> : Product {};
template <>
struct Computed<operation_bmm, float> : Product {};
#if PADDLE_DEVICE_GRAPHS
template <>
struct Computed<operation_linear_v2, float> : Product {};
#endif

// -- softmax ----------------------------------------------------------------------------------------------------------------------
// As it is written, over the last axis: the CPU's kernel clips the arguments of exp, which loses NaN and small weights.
template <>
struct Computed<operation_softmax, float> {
  template <typename Function>
  static void run(Function on_cpu, const DenseTensor& x, int axis, DenseTensor* out) {
    const int rank = x.dims().size();
    if (rank == 0 || (axis != -1 && axis != rank - 1) || x.numel() == 0) return on_cpu(cpu(), x, axis, out);
    const int64_t size = x.dims()[rank - 1];
    for (int64_t row = 0; row < x.numel() / size; ++row) {
      const auto* from = x.data<float>() + row * size;
      auto* to = out->data<float>() + row * size;
      const float top = *std::max_element(from, from + size);
      float total = 0.0f;
      for (int64_t i = 0; i < size; ++i) total += to[i] = std::exp(from[i] - top);
      for (int64_t i = 0; i < size; ++i) to[i] /= total;
    }
  }
};

// -- the norm of a sum -------------------------------------------------------------------------------------------------------------
// y = x * rsqrt(mean(x * x) + epsilon) * gain over rows as long as `gain`; `inverse`, one number a row, may be null.
inline void norm_rows(const float* from, int64_t count, const DenseTensor& gain, float epsilon, float* to, float* inverse) {
  const int64_t width = gain.numel(), rows = width == 0 ? 0 : count / width;
  const auto* by = gain.data<float>();
  for (int64_t r = 0; r < rows; ++r, from += width, to += width) {
    double sum = 0.0;
    for (int64_t i = 0; i < width; ++i) sum += static_cast<double>(from[i]) * from[i];
    const auto factor = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(width) + epsilon));
    for (int64_t i = 0; i < width; ++i) to[i] = from[i] * factor * by[i];
    if (inverse != nullptr) inverse[r] = factor;
  }
}

// As it is written, over the last axis: the CPU's kernel reads both addends a second time, and is made of AVX-512, which it does not ask
// for. What this backend does not want of it, a bias or rounding, is left to that kernel.
template <>
struct Computed<NormOfSum, float> {
  using MaybeTensor = paddle::optional<DenseTensor>;
  template <typename Function>
  static void run(Function on_cpu, const DenseTensor& x, const MaybeTensor& bias, const MaybeTensor& residual, const DenseTensor& weight,
                  const MaybeTensor& norm_bias, float epsilon, int axis, float scale, int round, float most, float least,
                  DenseTensor* out, DenseTensor* sum, DenseTensor* inverse) {
    if (bias || norm_bias || scale > 0.0f || (residual && sum == nullptr)) {
      return on_cpu(cpu(), x, bias, residual, weight, norm_bias, epsilon, axis, scale, round, most, least, out, sum, inverse);
    }
    const auto* from = x.data<float>();
    if (residual) {
      auto* both = cpu().Alloc<float>(sum);
      std::transform(from, from + x.numel(), residual->data<float>(), both, [](float a, float b) { return a + b; });
      from = both;
    }
    norm_rows(from, x.numel(), weight, epsilon, cpu().Alloc<float>(out), inverse == nullptr ? nullptr : cpu().Alloc<float>(inverse));
  }
};

// -- which of equal numbers -------------------------------------------------------------------------------------------------------
// The last one instead of the first: the CPU kernel looks at the numbers in reverse, and its answer is counted from the end.
template <typename Element>
DenseTensor reversed(const DenseTensor& x, int64_t outer, int64_t size, int64_t inner) {
  DenseTensor turned;
  turned.Resize(x.dims());
  auto* to = cpu().Alloc<Element>(&turned);
  const auto* from = x.data<Element>();
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t i = 0; i < size; ++i) {
      std::memcpy(to + (o * size + i) * inner, from + (o * size + size - 1 - i) * inner, static_cast<size_t>(inner) * sizeof(Element));
    }
  }
  return turned;
}

template <typename Element>
struct Computed<paddle_device::operation_argmax, Element> {
  template <typename Function>
  static void run(Function on_cpu, const DenseTensor& x, const phi::Scalar& axis, bool keepdims, bool flatten, phi::DataType dtype,
                  DenseTensor* out) {
    if (knobs().last_maximum == 0 || x.numel() == 0) return on_cpu(cpu(), x, axis, keepdims, flatten, dtype, out);
    int64_t outer = 1, size = x.numel(), inner = 1;
    if (!flatten && x.dims().size() > 0) {
      const int rank = x.dims().size(), along = (axis.to<int>() + rank) % rank;
      size = x.dims()[along];
      for (int i = 0; i < along; ++i) outer *= x.dims()[i];
      inner = x.numel() / (outer * size);
    }
    on_cpu(cpu(), reversed<Element>(x, outer, size, inner), axis, keepdims, flatten, dtype, out);
    if (out->dtype() == phi::DataType::INT32) {
      count_back(out->data<int32_t>(), out->numel(), size);
    } else {
      count_back(out->data<int64_t>(), out->numel(), size);
    }
  }

  template <typename Index>
  static void count_back(Index* places, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; ++i) places[i] = static_cast<Index>(size - 1 - places[i]);
  }
};

}  // namespace polyemu
