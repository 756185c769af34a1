// Operations that Paddle fuses, which a step does without and takes where a device has them: with the signatures of Paddle's headers.

#pragma once

#include <string>

#include "paddle/phi/core/dense_tensor.h"
#if PADDLE_DEVICE_GRAPHS  // Paddle 3.3, which calls the norm otherwise than 3.2, and has the product with a bias
#include "paddle/phi/kernels/linear_v2_kernel.h"
#endif
#include "paddle/phi/kernels/rms_norm_kernel.h"
#include "paddle/phi/kernels/softmax_kernel.h"
#include "paddle/phi/kernels/swiglu_kernel.h"
#include "paddle_device/operations.h"

namespace paddle_device {

PADDLE_DEVICE_OPERATION(softmax, SoftmaxKernel)
PADDLE_DEVICE_OPERATION(swiglu, SwiGLUKernel)

#if PADDLE_DEVICE_GRAPHS
PADDLE_DEVICE_OPERATION(fused_rms_norm_quant, RmsNormQuantKernel)
PADDLE_DEVICE_OPERATION(linear_v2, LinearV2Kernel)

// Those that Paddle's CPU has no kernel of: what such a kernel's function would be.
using MaybeTensor = paddle::optional<phi::DenseTensor>;

// The norm of GPU and XPU: y = x * rsqrt(mean(x * x) + epsilon) * scale over the last axis.
struct operation_fused_rms_norm_ext {
  static constexpr const char* name = "fused_rms_norm_ext";
  using Signature = void (*)(const phi::CPUContext&, const phi::DenseTensor& x, const phi::DenseTensor& scale, float epsilon,
                             phi::DenseTensor* y, phi::DenseTensor* inverse);
};

// Rotation by position of heads [batch, length, heads, size], by `sin` and `cos` [1, length, 1, size]: of pairs of neighbours
// (`neox` in Paddle's words), or of the two halves of a head.
struct operation_fused_rotary_position_embedding {
  static constexpr const char* name = "fused_rotary_position_embedding";
  using Signature = void (*)(const phi::CPUContext&, const phi::DenseTensor& q, const MaybeTensor& k, const MaybeTensor& v,
                             const MaybeTensor& sin, const MaybeTensor& cos, const MaybeTensor& position_ids, bool neox,
                             bool time_major, float base, phi::DenseTensor* out_q, phi::DenseTensor* out_k, phi::DenseTensor* out_v);
};

// Softmax attention of q [batch, rows, heads, size] over k and v [batch, places, heads of k, size], with `attn_mask` [batch, heads,
// rows, places] added to the scores.
struct operation_flash_attn {
  static constexpr const char* name = "flash_attn";
  using Signature = void (*)(const phi::CPUContext&, const phi::DenseTensor& query, const phi::DenseTensor& key,
                             const phi::DenseTensor& value, const MaybeTensor& seed, const MaybeTensor& mask, float dropout,
                             bool causal, bool return_softmax, bool is_test, const std::string& generator, phi::DenseTensor* out,
                             phi::DenseTensor* softmax, phi::DenseTensor* softmax_lse, phi::DenseTensor* seed_offset);
};
#endif

}  // namespace paddle_device
