// How a device says which kernels it has: one launch function for each operation and data type, registered for its place.
//
// What Paddle has to know of an operation's arguments is taken over from its own CPU kernel, so that a device writes launch
// functions and nothing else. A launch function has the signature of Paddle's header, with the custom device's context.

#pragma once

#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/custom_kernel.h"
#include "paddle/phi/core/kernel_factory.h"
#include "paddle/phi/core/kernel_registry.h"
#include "paddle_device/operations.h"

namespace paddle_device {

// A signature as `operations.h` gives it: the launch function of the same arguments, and the CPU kernel's.
template <typename Signature>
struct Launch;

template <typename... A>
struct Launch<void (*)(const phi::CPUContext&, A...)> {
  using Function = void (*)(const phi::CustomContext&, A...);
  using OnCpu = void (*)(const phi::CPUContext&, A...);
};

template <typename Operation, typename Element>
using LaunchOf = Launch<decltype(Operation::template signature<Element>())>;

// Paddle's CPU kernel of an operation; null where it has none for the data type.
inline const phi::Kernel* cpu_kernel(const char* operation, phi::DataType dtype) {
  auto& all = phi::KernelFactory::Instance().kernels();
  const auto named = all.find(operation);
  if (named == all.end()) return nullptr;
  for (const auto layout : {phi::DataLayout::ALL_LAYOUT, phi::DataLayout::NCHW}) {
    const auto found = named->second.find(phi::KernelKey(phi::Backend::CPU, layout, dtype));
    if (found != named->second.end()) return &found->second;
  }
  return nullptr;
}

// Register `launch` for an operation on the device type, with the arguments of `like`, a CPU kernel for the data type `of`.
inline void register_kernel(const char* device_type, const char* operation, phi::DataType dtype, const phi::Kernel& like,
                            phi::DataType of, void* launch) {
  const auto backend = phi::TransToPhiBackend(phi::CustomPlace(device_type, 0));
  const auto move_here = [&](auto& definitions) {
    for (auto& one : definitions) {
      if (one.backend == phi::Backend::CPU) one.backend = backend;
      if (one.dtype == of) one.dtype = dtype;
    }
  };
  phi::Kernel kernel(nullptr, launch);
  *kernel.mutable_args_def() = like.args_def();
  move_here(kernel.mutable_args_def()->input_defs());
  move_here(kernel.mutable_args_def()->output_defs());
  phi::CustomKernelMap::Instance().RegisterCustomKernel(
      operation, phi::KernelKey(backend, phi::DataLayout::ALL_LAYOUT, dtype), kernel);
}

// Register `launch` for an operation that the CPU has no kernel of, whose function there would be of the type `OnCpu`.
template <typename OnCpu>
void register_new_kernel(const char* device_type, const char* operation, phi::DataType dtype, void* launch) {
  const phi::KernelKey key(phi::TransToPhiBackend(phi::CustomPlace(device_type, 0)), phi::DataLayout::ALL_LAYOUT, dtype);
  phi::Kernel kernel(nullptr, launch);
  phi::KernelArgsParseFunctor<OnCpu>::Parse(key, kernel.mutable_args_def());
  phi::CustomKernelMap::Instance().RegisterCustomKernel(operation, key, kernel);
}

// Every kernel of the device; the device's source of kernels has it, and InitPlugin calls it.
void register_kernels();

}  // namespace paddle_device
