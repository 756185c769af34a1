// The device's kernels: each runs Paddle's own CPU kernel on the stream's thread, over device memory, when its turn comes.
//
// A chip vendor writes real kernels here and registers them the same way. What matters to whoever tests on this device is when
// and where they run: the caller returns at once, inputs and outputs lie in device memory, and a capture records the work.
// An operation that is not in the list has no kernel on this device: Paddle falls back to the CPU, or refuses if it is told to.
// What Paddle's CPU has no kernel of in 16 bits is computed in float32 and rounded once (half.h).
//
// It is nearly all templates, two hundred operations for each data type, and compiled in two files at once, each for some types.

#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/common/int_array.h"
#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/device_context.h"
#include "chip_operations.h"
#include "differences.h"
#include "further_operations.h"
#include "half.h"
#include "log.h"
#include "memory.h"
#include "paddle_device/graph_memory.h"
#include "paddle_device/registration.h"
#include "queue.h"

namespace polyemu {
namespace {

using paddle_device::GraphMemory;
using phi::CPUContext;
using phi::CustomContext;
using phi::DenseTensor;

// Device memory as the CPU kernel sees it. It keeps the allocation alive until the work has run, in a graph for as long as there is
// the graph. Memory of graphs is not kept: what it is given to next runs behind this work.
class Borrowed : public phi::Allocation {
 public:
  explicit Borrowed(std::shared_ptr<phi::Allocation> owner) : phi::Allocation(owner->ptr(), owner->size(), phi::CPUPlace()) {
    if (dynamic_cast<GraphMemory*>(owner.get()) == nullptr) owner_ = std::move(owner);
  }

 private:
  std::shared_ptr<phi::Allocation> owner_;
};

DenseTensor borrow(const DenseTensor& tensor) {
  DenseTensor view(tensor);
  if (tensor.initialized() && tensor.place().GetType() == phi::AllocationType::CUSTOM) {
    view.ResetHolder(std::make_shared<Borrowed>(tensor.Holder()));
  }
  return view;
}

// How an argument is kept until the work runs (`hold`), and handed to the CPU kernel then (`give`).
template <typename A>
struct Argument {
  using Held = std::decay_t<A>;
  static Held hold(const CustomContext&, const Held& value) { return value; }
  static const Held& give(Held& value) { return value; }
};

template <>
struct Argument<const DenseTensor&> {
  using Held = DenseTensor;
  static Held hold(const CustomContext&, const DenseTensor& tensor) { return borrow(tensor); }
  static const DenseTensor& give(Held& tensor) { return tensor; }
};

template <>
struct Argument<const paddle::optional<DenseTensor>&> {
  using Held = paddle::optional<DenseTensor>;
  static Held hold(const CustomContext&, const Held& tensor) {
    return tensor ? paddle::make_optional<DenseTensor>(borrow(*tensor)) : paddle::none;
  }
  static const Held& give(Held& tensor) { return tensor; }
};

template <>
struct Argument<const std::vector<const DenseTensor*>&> {
  struct Held {
    std::vector<DenseTensor> tensors;
    std::vector<const DenseTensor*> pointers;
  };
  static Held hold(const CustomContext&, const std::vector<const DenseTensor*>& tensors) {
    Held held;
    for (const auto* tensor : tensors) held.tensors.push_back(borrow(*tensor));
    return held;
  }
  static const std::vector<const DenseTensor*>& give(Held& held) {
    held.pointers.clear();
    for (const auto& tensor : held.tensors) held.pointers.push_back(&tensor);
    return held.pointers;
  }
};

// Outputs get their memory when the work is queued, from the device: shapes are known by then, and nothing waits. That of captured
// work is poisoned in every launch, as fresh memory is.
template <>
struct Argument<DenseTensor*> {
  struct Held {
    DenseTensor tensor;
    bool wanted;
    size_t fresh = 0;
  };
  static Held hold(const CustomContext& context, DenseTensor* tensor) {
    if (tensor == nullptr || !tensor->meta().valid()) return {DenseTensor(), false};  // nobody asks for it
    size_t fresh = 0;
    if (static_cast<Stream*>(context.stream())->capturing() && !tensor->initialized() && tensor->numel() > 0) {
      fresh = static_cast<size_t>(tensor->numel()) * phi::SizeOf(tensor->dtype());
      auto memory = graph_blocks().take_block(fresh);
      if (memory == nullptr) {
        PADDLE_THROW(common::errors::ResourceExhausted("no %d bytes of device memory are left for a graph", fresh));
      }
      tensor->ResetHolder(std::make_shared<GraphMemory>(std::move(memory), fresh, context.GetPlace()));
    }
    context.Alloc(tensor, tensor->dtype());
    return {borrow(*tensor), true, fresh};
  }
  static DenseTensor* give(Held& held) {
    if (held.fresh > 0) poison(held.tensor.data(), held.fresh);
    return held.wanted ? &held.tensor : nullptr;
  }
};

std::string label_of(const char* operation, phi::DataType dtype) {
  return std::string(operation) + " in " + phi::DataTypeToString(dtype);
}

// As on a chip whose kernel reads an argument on the host: everything queued has to have run.
void wait_for(Stream* stream, const std::string& label) {
  log().waited(label);
  if (stream->capturing()) PADDLE_THROW(common::errors::Unavailable("%s makes the host wait, which breaks a capture", label));
  stream->synchronize();
}

// One device kernel for each (operation, data type): the index says which CPU kernel it runs.
template <typename Operation, typename Element, typename Signature>
struct DeviceKernel;

template <typename Operation, typename Element, typename... A>
struct DeviceKernel<Operation, Element, void (*)(const CPUContext&, A...)> {
  using Function = void (*)(const CPUContext&, A...);
  static inline Function on_cpu = nullptr;
  static inline bool in_float = false;  // that kernel is one for float32

  static void launch(const CustomContext& context, A... arguments) {
    using Kept = std::tuple<typename Argument<A>::Held...>;
    auto* stream = static_cast<Stream*>(context.stream());
    log().ran(label());
    if (log().makes_wait(Operation::name)) wait_for(stream, label());
    auto kept = std::make_shared<Kept>(Argument<A>::hold(context, arguments)...);
    ++counters().kernels;
    stream->submit([kept] { run(*kept, std::index_sequence_for<A...>()); });
  }

  template <size_t... I>
  static void run(std::tuple<typename Argument<A>::Held...>& kept, std::index_sequence<I...>) {
    if constexpr (is_half<Element>) {
      if (in_float) {
        return with_floats<Element>([](auto&&... wide) { Computed<Operation, float>::run(on_cpu, wide...); },
                                    Argument<A>::give(std::get<I>(kept))...);
      }
    }
    Computed<Operation, Element>::run(on_cpu, Argument<A>::give(std::get<I>(kept))...);
  }

  static const std::string& label() {
    static const std::string name = label_of(Operation::name, phi::CppTypeToDataType<Element>::Type());
    return name;
  }
};

template <typename Operation, typename Element>
void register_one(phi::DataType dtype) {
  using Device = DeviceKernel<Operation, Element, typename paddle_device::LaunchOf<Operation, Element>::OnCpu>;
  const phi::Kernel* found = paddle_device::cpu_kernel(Operation::name, dtype);
  auto of = dtype;
  if (found == nullptr && is_half<Element>) {
    of = phi::DataType::FLOAT32;
    found = paddle_device::cpu_kernel(Operation::name, of);
    Device::in_float = true;
  }
  if (found == nullptr) return;
  Device::on_cpu = found->template GetVariadicKernelFn<typename Device::Function>();
  paddle_device::register_kernel(PADDLE_DEVICE_TYPE, Operation::name, dtype, *found, of,
                                 reinterpret_cast<void*>(&Device::launch));
}

template <typename Operation, typename... Elements>
void register_operation() {
  (register_one<Operation, Elements>(phi::CppTypeToDataType<Elements>::Type()), ...);
}

template <typename... Elements, typename... Operations>
void register_all(std::tuple<Operations...>*) {
  (register_operation<Operations, Elements...>(), ...);
}

// Those that the CPU has a kernel of, for these data types.
template <typename... Elements>
void register_elements() {
  register_all<Elements...>(static_cast<paddle_device::AllOperations*>(nullptr));
  register_all<Elements...>(static_cast<FurtherOperations*>(nullptr));
  register_all<Elements...>(static_cast<FusedOperations*>(nullptr));
}

}  // namespace

void register_floats();  // kernels_of_floats.cc

}  // namespace polyemu
