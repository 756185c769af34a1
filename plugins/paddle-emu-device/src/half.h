// Kernels of Paddle's CPU for float32 on tensors of 16 bits: arguments are widened, results rounded to nearest once. So the device
// computes in bfloat16 and float16 what the CPU has in float32 alone, as a chip does that sums in float32.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "differences.h"
#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"
#include "paddle/phi/core/dense_tensor.h"

namespace polyemu {

template <typename Element>
inline constexpr bool is_half = std::is_same_v<Element, phi::bfloat16> || std::is_same_v<Element, phi::float16>;

// To nearest, ties to even. Paddle's own conversion makes numbers far below the smallest of float16 into some of 1e-6.
inline phi::float16 rounded(float number) {
  uint32_t bits = 0;
  std::memcpy(&bits, &number, sizeof(bits));
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7FFFFFFFu;
  uint32_t half = 0;
  if (bits > 0x7F800000u) {
    half = 0x7E00u;
  } else if (bits >= 0x477FF000u) {  // 65520, half way to what there is none of
    half = 0x7C00u;
  } else if (bits < 0x38800000u) {  // 2**-14: counted in steps of 2**-24
    half = static_cast<uint32_t>(std::nearbyint(std::fabs(number) * 16777216.0f));
  } else {
    half = (bits + 0xFFFu + ((bits >> 13) & 1u) - 0x38000000u) >> 13;
  }
  phi::float16 result;
  result.x = static_cast<uint16_t>(sign | half);
  return result;
}

template <typename From, typename To>
void convert(const DenseTensor& from, DenseTensor* to) {
  const auto* read = from.data<From>();
  auto* written = cpu().Alloc<To>(to);
  for (int64_t i = 0; i < from.numel(); ++i) {
    if constexpr (std::is_same_v<To, phi::float16>) {
      written[i] = rounded(static_cast<float>(read[i]));
    } else {
      written[i] = static_cast<To>(read[i]);
    }
  }
}

template <typename Half>
bool has(const DenseTensor& tensor) {
  return tensor.dtype() == phi::CppTypeToDataType<Half>::Type();
}

template <typename Half>
DenseTensor widened(const DenseTensor& tensor) {
  DenseTensor wide;
  wide.Resize(tensor.dims());
  if (tensor.initialized()) convert<Half, float>(tensor, &wide);
  return wide;
}

// One argument as the kernel for float32 sees it (`wide`); `finish` rounds what the kernel has written.
template <typename Half, typename A>
struct Wide {
  const A& wide;
  explicit Wide(const A& value) : wide(value) {}
  void finish() {}
};

template <typename Half>
struct Wide<Half, DenseTensor> {
  DenseTensor wide;
  explicit Wide(const DenseTensor& tensor) : wide(has<Half>(tensor) ? widened<Half>(tensor) : tensor) {}
  void finish() {}
};

template <typename Half>
struct Wide<Half, paddle::optional<DenseTensor>> {
  paddle::optional<DenseTensor> wide;
  explicit Wide(const paddle::optional<DenseTensor>& tensor) : wide(tensor) {
    if (tensor && has<Half>(*tensor)) wide = widened<Half>(*tensor);
  }
  void finish() {}
};

template <typename Half>
struct Wide<Half, std::vector<const DenseTensor*>> {
  std::vector<std::unique_ptr<DenseTensor>> made;
  std::vector<const DenseTensor*> wide;
  explicit Wide(const std::vector<const DenseTensor*>& tensors) : wide(tensors) {
    for (auto& tensor : wide) {
      if (!has<Half>(*tensor)) continue;
      made.push_back(std::make_unique<DenseTensor>(widened<Half>(*tensor)));
      tensor = made.back().get();
    }
  }
  void finish() {}
};

template <typename Half>
struct Wide<Half, DenseTensor*> {
  DenseTensor made;
  DenseTensor* narrow;
  DenseTensor* wide;
  explicit Wide(DenseTensor* tensor) : narrow(tensor), wide(tensor) {
    if (tensor == nullptr || !has<Half>(*tensor)) return;
    made.Resize(tensor->dims());
    wide = &made;
  }
  Wide(const Wide&) = delete;
  void finish() {
    if (wide == &made && made.initialized()) convert<float, Half>(made, narrow);
  }
};

template <typename Half, typename Call, typename... A>
void with_floats(Call call, A&&... arguments) {
  std::tuple<std::unique_ptr<Wide<Half, std::decay_t<A>>>...> all(std::make_unique<Wide<Half, std::decay_t<A>>>(arguments)...);
  std::apply([&](auto&... one) { call(one->wide...); }, all);
  std::apply([](auto&... one) { (one->finish(), ...); }, all);
}

template <>
struct Computed<paddle_device::operation_cast, float> {
  template <typename Function>
  static void run(Function on_cpu, const DenseTensor& x, phi::DataType dtype, DenseTensor* out) {
    if (dtype == phi::DataType::FLOAT16) return convert<float, phi::float16>(x, out);
    on_cpu(cpu(), x, dtype, out);
  }
};

}  // namespace polyemu
