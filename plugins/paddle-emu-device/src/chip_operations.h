// Fused operations that chips have kernels of and Paddle's CPU has none (paddle_device/fused_operations.h), in float32, straight from
// what their documents say. Products round their factors as the device's other products do (differences.h).
//
// Only what a chip's backend in Paddle's public source registers is here: a kernel that no chip has would prove nothing.

#pragma once

#if PADDLE_DEVICE_GRAPHS  // Paddle 3.3

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>

#include "differences.h"
#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle_device/fused_operations.h"

namespace polyemu {

using paddle_device::MaybeTensor;

struct operation_fused_rms_norm_ext : paddle_device::operation_fused_rms_norm_ext {
  static void compute(const CPUContext&, const DenseTensor& x, const DenseTensor& scale, float epsilon, DenseTensor* y,
                      DenseTensor* inverse) {
    auto* kept = inverse == nullptr ? nullptr : cpu().Alloc<float>(inverse);
    norm_rows(x.data<float>(), x.numel(), scale, epsilon, cpu().Alloc<float>(y), kept);
  }
};

struct operation_fused_rotary_position_embedding : paddle_device::operation_fused_rotary_position_embedding {
  static void compute(const CPUContext&, const DenseTensor& q, const MaybeTensor& k, const MaybeTensor& v, const MaybeTensor& sin,
                      const MaybeTensor& cos, const MaybeTensor& position_ids, bool neox, bool time_major, float, DenseTensor* out_q,
                      DenseTensor* out_k, DenseTensor* out_v) {
    if (!sin || !cos || position_ids || time_major) {
      PADDLE_THROW(common::errors::Unimplemented("rotation is by sin and cos of each place here, batch first"));
    }
    rotate(q, *sin, *cos, neox, out_q);
    if (k) rotate(*k, *sin, *cos, neox, out_k);
    if (v) rotate(*v, *sin, *cos, neox, out_v);
  }

  static void rotate(const DenseTensor& x, const DenseTensor& sin, const DenseTensor& cos, bool neox, DenseTensor* out) {
    const int64_t length = x.dims()[1], heads = x.dims()[2], size = x.dims()[3], rows = size == 0 ? 0 : x.numel() / size;
    const auto* from = x.data<float>();
    auto* to = cpu().Alloc<float>(out);
    for (int64_t r = 0; r < rows; ++r, from += size, to += size) {
      const int64_t place = (r / heads) % length;
      const auto *s = sin.data<float>() + place * size, *c = cos.data<float>() + place * size;
      for (int64_t i = 0; i < size / 2; ++i) {
        const int64_t a = neox ? 2 * i : i, b = neox ? 2 * i + 1 : i + size / 2;
        const float one = from[a] * c[a] - from[b] * s[a], other = from[b] * c[b] + from[a] * s[b];
        to[a] = one;
        to[b] = other;
      }
    }
  }
};

struct operation_flash_attn : paddle_device::operation_flash_attn {
  static void compute(const CPUContext&, const DenseTensor& query, const DenseTensor& key, const DenseTensor& value,
                      const MaybeTensor& seed, const MaybeTensor& mask, float dropout, bool causal, bool return_softmax, bool,
                      const std::string&, DenseTensor* out, DenseTensor*, DenseTensor*, DenseTensor*) {
    if (seed || dropout != 0.0f || causal || return_softmax) {
      PADDLE_THROW(common::errors::Unimplemented("attention is without dropout, causality and weights here"));
    }
    const int64_t batch = query.dims()[0], rows = query.dims()[1], heads = query.dims()[2], size = query.dims()[3];
    const int64_t places = key.dims()[1], groups = key.dims()[2], shared = heads / groups;
    const auto q = factor(query), k = factor(key), v = factor(value);
    const auto* added = mask ? mask->data<float>() : nullptr;
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
    DenseTensor weights;
    weights.Resize({places});
    auto *weight = cpu().Alloc<float>(&weights), *all = cpu().Alloc<float>(out);
    for (int64_t each = 0; each < batch * heads * rows; ++each) {
      const int64_t b = each / (heads * rows), h = each / rows % heads, r = each % rows;
      const auto* one = q.data<float>() + ((b * rows + r) * heads + h) * size;
      const auto of = [&](const DenseTensor& x, int64_t place) {
        return x.data<float>() + ((b * places + place) * groups + h / shared) * size;
      };
      float top = -std::numeric_limits<float>::infinity();
      for (int64_t c = 0; c < places; ++c) {
        const auto* other = of(k, c);
        float score = 0.0f;
        for (int64_t i = 0; i < size; ++i) score += one[i] * other[i];
        weight[c] = score * scale + (added ? added[each * places + c] : 0.0f);
        top = std::max(top, weight[c]);
      }
      float total = 0.0f;
      for (int64_t c = 0; c < places; ++c) total += weight[c] = std::exp(weight[c] - top);
      const auto rounded = factor(weights);
      auto* to = all + ((b * rows + r) * heads + h) * size;
      std::fill(to, to + size, 0.0f);
      for (int64_t c = 0; c < places; ++c) {
        const auto* other = of(v, c);
        for (int64_t i = 0; i < size; ++i) to[i] += rounded.data<float>()[c] * other[i];
      }
      for (int64_t i = 0; i < size; ++i) to[i] /= total;
    }
  }

  static DenseTensor factor(const DenseTensor& x) { return knobs().tf32 == 0 ? x : tf32(x); }
};

using ChipOperations = std::tuple<operation_fused_rms_norm_ext, operation_fused_rotary_position_embedding, operation_flash_attn>;

}  // namespace polyemu

#endif
