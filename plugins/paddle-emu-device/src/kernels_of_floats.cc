// Kernels of floating-point numbers that models compute in, and of operations that the CPU has none of.

#include "kernels.h"

namespace polyemu {
namespace {

#if PADDLE_DEVICE_GRAPHS
// As on a chip attention gives nothing but what it is asked for: its other outputs get no memory.
template <typename Element>
void launch_attention(const CustomContext& context, const DenseTensor& q, const DenseTensor& k, const DenseTensor& v,
                      const MaybeTensor& seed, const MaybeTensor& mask, float dropout, bool causal, bool return_softmax, bool is_test,
                      const std::string& generator, DenseTensor* out, DenseTensor*, DenseTensor*, DenseTensor*) {
  DeviceKernel<operation_flash_attn, Element, operation_flash_attn::Signature>::launch(
      context, q, k, v, seed, mask, dropout, causal, return_softmax, is_test, generator, out, nullptr, nullptr, nullptr);
}

// An operation that the CPU has no kernel of (chip_operations.h): `compute`, for float32.
template <typename Operation, typename Element>
void register_chip_one(phi::DataType dtype) {
  using Signature = typename Operation::Signature;
  using Device = DeviceKernel<Operation, Element, Signature>;
  Device::on_cpu = &Operation::compute;
  Device::in_float = is_half<Element>;
  auto* launch = reinterpret_cast<void*>(&Device::launch);
  if constexpr (std::is_same_v<Operation, operation_flash_attn>) launch = reinterpret_cast<void*>(&launch_attention<Element>);
  paddle_device::register_new_kernel<Signature>(PADDLE_DEVICE_TYPE, Operation::name, dtype, launch);
}

template <typename... Operations>
void register_chip(std::tuple<Operations...>*) {
  (register_chip_one<Operations, float>(phi::DataType::FLOAT32), ...);
  (register_chip_one<Operations, phi::bfloat16>(phi::DataType::BFLOAT16), ...);
  (register_chip_one<Operations, phi::float16>(phi::DataType::FLOAT16), ...);
}
#endif

}  // namespace

void register_floats() {
  register_elements<float, phi::bfloat16, phi::float16>();
#if PADDLE_DEVICE_GRAPHS
  register_chip(static_cast<ChipOperations*>(nullptr));
#endif
}

}  // namespace polyemu
