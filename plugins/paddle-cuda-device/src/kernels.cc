// The device's kernels as Paddle knows them: what each operation is handed becomes views, and calls of `operators.h`.
//
// Everything is queued on the stream of the context, and nothing waits. The shapes of results are known by then; their memory is
// allocated here, from Paddle's pool.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "memory.h"
#include "operators.h"
#include "paddle/phi/common/int_array.h"
#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/enforce.h"
#include "paddle_device/fused_operations.h"
#include "paddle_device/graph_memory.h"
#include "paddle_device/registration.h"

namespace polycuda {

std::atomic<int64_t> library_products{0}, own_products{0};

namespace {

using paddle_device::GraphMemory;
using Context = phi::CustomContext;
using phi::DenseTensor;
using phi::IntArray;
using phi::Scalar;
using Tensors = std::vector<const DenseTensor*>;
namespace known = paddle_device;

// -- views ----------------------------------------------------------------------------------------
Queue queue_of(const Context& context) { return const_cast<void*>(reinterpret_cast<const void*>(context.stream())); }

Kind kind_of(phi::DataType dtype) {
  switch (dtype) {
    case phi::DataType::FLOAT32:
      return Kind::f32;
    case phi::DataType::FLOAT64:
      return Kind::f64;
    case phi::DataType::INT32:
      return Kind::i32;
    case phi::DataType::INT64:
      return Kind::i64;
    case phi::DataType::UINT8:
      return Kind::u8;
    case phi::DataType::BOOL:
      return Kind::b8;
    case phi::DataType::BFLOAT16:
      return Kind::bf16;
    default:
      PADDLE_THROW(common::errors::Unimplemented("The device " PADDLE_DEVICE_TYPE " has no kernel for %s.", dtype));
  }
}

View view_of(const Context& context, const DenseTensor& tensor) {
  View view{};
  view.kind = kind_of(tensor.dtype());
  view.rank = tensor.dims().size();
  for (int d = 0; d < view.rank; ++d) {
    view.dims[d] = tensor.dims()[d];
    view.strides[d] = tensor.strides()[d];
  }
  if (tensor.numel() > 0) {
    view.data = const_cast<void*>(tensor.data());
    if (dynamic_cast<GraphMemory*>(tensor.Holder().get()) == nullptr) hold(queue_of(context), tensor.Holder());
  }
  return view;
}

View result(const Context& context, DenseTensor* out) {
  if (!out->initialized() && out->numel() > 0) {
    const size_t bytes = static_cast<size_t>(out->numel()) * phi::SizeOf(out->dtype());
    if (auto memory = graph_memory(queue_of(context), bytes)) {
      out->ResetHolder(std::make_shared<GraphMemory>(std::move(memory), bytes, context.GetPlace()));
    }
  }
  context.Alloc(out, out->dtype());
  return view_of(context, *out);
}

// Memory for a result that nobody else sees.
View scratch(const Context& context, DenseTensor& tensor, std::vector<int64_t> dims, phi::DataType dtype) {
  tensor.Resize(common::make_ddim(dims));
  tensor.set_type(dtype);
  return result(context, &tensor);
}

int64_t distance(const View& view, int64_t elements) { return elements * bytes_of(view.kind); }

View moved(View view, int64_t elements) {
  view.data = static_cast<char*>(view.data) + distance(view, elements);
  return view;
}

View flat(const View& view) {
  View line = view;
  line.rank = 1;
  line.dims[0] = view.size();
  line.strides[0] = 1;
  return line;
}

View permuted(const View& view, const std::vector<int>& order) {
  View turned = view;
  for (size_t d = 0; d < order.size(); ++d) {
    const int from = order[d] < 0 ? order[d] + view.rank : order[d];
    turned.dims[d] = view.dims[from];
    turned.strides[d] = view.strides[from];
  }
  return turned;
}

Number number(const Scalar& scalar) {
  const double real = scalar.to<double>();
  const bool whole = scalar.dtype() == phi::DataType::INT64 || scalar.dtype() == phi::DataType::INT32;
  if (whole) return {real, scalar.to<int64_t>()};
  return {real, std::abs(real) < 9e18 ? static_cast<int64_t>(real) : 0};
}

std::vector<int> axes_of(const std::vector<int64_t>& dims) { return {dims.begin(), dims.end()}; }

// -- elementwise ----------------------------------------------------------------------------------
template <Unary kOperation>
void unary_kernel(const Context& context, const DenseTensor& x, DenseTensor* out) {
  unary(queue_of(context), kOperation, result(context, out), view_of(context, x));
}

template <Test kTest>
void test_kernel(const Context& context, const DenseTensor& x, DenseTensor* out) {
  test(queue_of(context), kTest, result(context, out), view_of(context, x));
}

template <Binary kOperation>
void binary_kernel(const Context& context, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  const View left = view_of(context, x), right = view_of(context, y);
  binary(queue_of(context), kOperation, result(context, out), left, right);
}

void shift_left(const Context& context, const DenseTensor& x, const DenseTensor& y, bool, DenseTensor* out) {
  binary_kernel<Binary::shift_left>(context, x, y, out);
}

void shift_right(const Context& context, const DenseTensor& x, const DenseTensor& y, bool is_arithmetic, DenseTensor* out) {
  if (is_arithmetic) {
    binary_kernel<Binary::shift_right>(context, x, y, out);
  } else {
    binary_kernel<Binary::shift_right_logical>(context, x, y, out);
  }
}

template <Comparison kComparison>
void compare_kernel(const Context& context, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  compare(queue_of(context), kComparison, result(context, out), view_of(context, x), view_of(context, y));
}

void where(const Context& context, const DenseTensor& condition, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  choose(queue_of(context), result(context, out), view_of(context, condition), view_of(context, x), view_of(context, y));
}

void scale_kernel(const Context& context, const DenseTensor& x, const Scalar& factor, const Scalar& bias, bool bias_after_scale,
                  DenseTensor* out) {
  scale(queue_of(context), result(context, out), view_of(context, x), number(factor), number(bias), bias_after_scale);
}

void clip_kernel(const Context& context, const DenseTensor& x, const Scalar& low, const Scalar& high, DenseTensor* out) {
  clip(queue_of(context), result(context, out), view_of(context, x), number(low), number(high));
}

void cast_kernel(const Context& context, const DenseTensor& x, phi::DataType dtype, DenseTensor* out) {
  out->set_type(dtype);
  cast(queue_of(context), result(context, out), view_of(context, x));
}

void assign(const Context& context, const DenseTensor& x, DenseTensor* out) {
  copy(queue_of(context), result(context, out), view_of(context, x));
}

void fill_kernel(const Context& context, const DenseTensor&, const Scalar& value, DenseTensor* out) {
  fill(queue_of(context), result(context, out), number(value));
}

void full(const Context& context, const IntArray& shape, const Scalar& value, phi::DataType dtype, DenseTensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  out->set_type(dtype);
  fill(queue_of(context), result(context, out), number(value));
}

void full_like(const Context& context, const DenseTensor&, const Scalar& value, phi::DataType dtype, DenseTensor* out) {
  if (dtype != phi::DataType::UNDEFINED) out->set_type(dtype);
  fill(queue_of(context), result(context, out), number(value));
}

// -- shapes ---------------------------------------------------------------------------------------
void expand(const Context& context, const DenseTensor& x, const IntArray& shape, DenseTensor* out) {
  auto dims = shape.GetData();
  const int added = static_cast<int>(dims.size()) - x.dims().size();
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d] < 0) dims[d] = x.dims()[static_cast<int>(d) - added];
  }
  out->Resize(common::make_ddim(dims));
  copy(queue_of(context), result(context, out), view_of(context, x));
}

void expand_as(const Context& context, const DenseTensor& x, const paddle::optional<DenseTensor>&,
               const std::vector<int64_t>& shape, DenseTensor* out) {
  out->Resize(common::make_ddim(shape));
  copy(queue_of(context), result(context, out), view_of(context, x));
}

void transpose(const Context& context, const DenseTensor& x, const std::vector<int>& axis, DenseTensor* out) {
  copy(queue_of(context), result(context, out), permuted(view_of(context, x), axis));
}

void flip(const Context& context, const DenseTensor& x, const std::vector<int>& axes, DenseTensor* out) {
  View turned = view_of(context, x);
  for (int axis : axes) {
    if (axis < 0) axis += turned.rank;
    turned = moved(turned, (turned.dims[axis] - 1) * turned.strides[axis]);
    turned.strides[axis] = -turned.strides[axis];
  }
  copy(queue_of(context), result(context, out), turned);
}

void contiguous(const Context& context, const DenseTensor& x, DenseTensor* out) {
  phi::DenseTensorMeta meta = x.meta();
  meta.strides = meta.calc_strides(meta.dims);
  meta.offset = 0;
  out->set_meta(meta);
  copy(queue_of(context), result(context, out), view_of(context, x));
}

void strided_copy(const Context& context, const DenseTensor& x, const std::vector<int64_t>& dims,
                  const std::vector<int64_t>& strides, int64_t offset, DenseTensor* out) {
  phi::DenseTensorMeta meta = x.meta();
  meta.dims = common::make_ddim(dims);
  meta.strides = common::make_ddim(strides);
  meta.offset = offset;
  out->set_meta(meta);  // over memory that is there already
  copy(queue_of(context), view_of(context, *out), view_of(context, x));
}

void concat(const Context& context, const Tensors& parts, const Scalar& where, DenseTensor* out) {
  const View whole = result(context, out);
  int axis = where.to<int>();
  if (axis < 0) axis += whole.rank;
  int64_t start = 0;
  for (const DenseTensor* part : parts) {
    if (part->numel() == 0) continue;
    const View from = view_of(context, *part);
    View to = moved(whole, start * whole.strides[axis]);
    to.dims[axis] = from.dims[axis];
    copy(queue_of(context), to, from);
    start += from.dims[axis];
  }
}

void stack(const Context& context, const Tensors& parts, int axis, DenseTensor* out) {
  const View whole = result(context, out);
  if (axis < 0) axis += whole.rank;
  View to = whole;
  to.rank = whole.rank - 1;
  for (int d = axis; d < to.rank; ++d) {
    to.dims[d] = whole.dims[d + 1];
    to.strides[d] = whole.strides[d + 1];
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    copy(queue_of(context), moved(to, static_cast<int64_t>(i) * whole.strides[axis]), view_of(context, *parts[i]));
  }
}

// -- along axes -----------------------------------------------------------------------------------
void sum(const Context& context, const DenseTensor& x, const IntArray& dims, phi::DataType, bool, DenseTensor* out) {
  fold(queue_of(context), Fold::sum, result(context, out), view_of(context, x), axes_of(dims.GetData()));
}

template <Fold kFold>
void fold_kernel(const Context& context, const DenseTensor& x, const IntArray& dims, bool, DenseTensor* out) {
  fold(queue_of(context), kFold, result(context, out), view_of(context, x), axes_of(dims.GetData()));
}

template <Fold kFold>
void truth_kernel(const Context& context, const DenseTensor& x, const std::vector<int64_t>& dims, bool, DenseTensor* out) {
  fold(queue_of(context), kFold, result(context, out), view_of(context, x), axes_of(dims));
}

void argmax_kernel(const Context& context, const DenseTensor& x, const Scalar& axis, bool, bool flatten, phi::DataType,
                   DenseTensor* out) {
  const View from = view_of(context, x);
  argmax(queue_of(context), result(context, out), flatten ? flat(from) : from, flatten ? 0 : axis.to<int>());
}

void cumsum(const Context& context, const DenseTensor& x, const Scalar& axis, bool flatten, bool exclusive, bool reverse,
            DenseTensor* out) {
  const View from = view_of(context, x), to = result(context, out);
  running(queue_of(context), Running::sum, flatten ? flat(to) : to, nullptr, flatten ? flat(from) : from,
          flatten ? 0 : axis.to<int>(), exclusive, reverse);
}

void cumprod(const Context& context, const DenseTensor& x, int axis, bool exclusive, bool reverse, DenseTensor* out) {
  running(queue_of(context), Running::product, result(context, out), nullptr, view_of(context, x), axis, exclusive, reverse);
}

template <Running kRunning>
void running_extreme(const Context& context, const DenseTensor& x, int axis, phi::DataType dtype, DenseTensor* out,
                     DenseTensor* indices) {
  indices->set_type(dtype);
  const View places = result(context, indices);
  running(queue_of(context), kRunning, result(context, out), &places, view_of(context, x), axis, false, false);
}

void argsort(const Context& context, const DenseTensor& x, int axis, bool descending, bool, DenseTensor* out,
             DenseTensor* indices) {
  const View from = view_of(context, x);
  DenseTensor places;
  const View working = scratch(context, places, {sort_scratch(from, axis)}, phi::DataType::INT32);
  sort(queue_of(context), result(context, out), result(context, indices), from, axis, descending, working.data);
}

void searchsorted(const Context& context, const DenseTensor& sorted, const DenseTensor& values, bool, bool right,
                  DenseTensor* out) {
  search(queue_of(context), result(context, out), view_of(context, sorted), view_of(context, values), right);
}

// -- by index -------------------------------------------------------------------------------------
void gather_kernel(const Context& context, const DenseTensor& x, const DenseTensor& index, const Scalar& axis, DenseTensor* out) {
  gather(queue_of(context), result(context, out), view_of(context, x), view_of(context, index), axis.to<int>());
}

void index_select(const Context& context, const DenseTensor& x, const DenseTensor& index, int axis, DenseTensor* out) {
  gather(queue_of(context), result(context, out), view_of(context, x), view_of(context, index), axis);
}

void take_along_axis(const Context& context, const DenseTensor& x, const DenseTensor& index, int axis, DenseTensor* out) {
  take_along(queue_of(context), result(context, out), view_of(context, x), view_of(context, index), axis);
}

// A result that begins as a copy of `x`, unless it is written in place.
View copied(const Context& context, const DenseTensor& x, DenseTensor* out) {
  const View from = view_of(context, x), to = result(context, out);
  if (from.data != to.data) copy(queue_of(context), to, from);
  return to;
}

void put_along_axis(const Context& context, const DenseTensor& x, const DenseTensor& index, const DenseTensor& value, int axis,
                    const std::string& reduce, bool include_self, DenseTensor* out) {
  if ((reduce != "assign" && reduce != "add") || !include_self) {
    PADDLE_THROW(common::errors::Unimplemented(
        "The device " PADDLE_DEVICE_TYPE " puts along an axis by assign or add, with what was there, got %s.", reduce));
  }
  const View to = copied(context, x, out);
  put_along(queue_of(context), to, view_of(context, index), view_of(context, value), axis, reduce == "add");
}

void scatter_kernel(const Context& context, const DenseTensor& x, const DenseTensor& index, const DenseTensor& updates,
                    bool overwrite, DenseTensor* out) {
  const View to = copied(context, x, out);
  scatter(queue_of(context), to, view_of(context, index), view_of(context, updates), overwrite);
}

// -- products -------------------------------------------------------------------------------------
// A matrix, or a batch of them, whose last two dimensions are (rows, columns) of the product; a vector becomes one row or column.
View matrix(View view, bool transposed, bool left) {
  if (view.rank == 1) {
    view.dims[1] = view.dims[0];
    view.strides[1] = view.strides[0];
    view.dims[0] = view.strides[0] = 1;
    view.rank = 2;
    transposed = !left;
  }
  if (transposed) {
    std::swap(view.dims[view.rank - 2], view.dims[view.rank - 1]);
    std::swap(view.strides[view.rank - 2], view.strides[view.rank - 1]);
  }
  return view;
}

// The result with both dimensions of a matrix, though Paddle leaves out those of vectors.
View product_of(const View& out, const View& x, const View& y) {
  View whole = out;
  const int64_t rows = x.dims[x.rank - 2], columns = y.dims[y.rank - 1];
  const int batch = std::max(x.rank, y.rank) - 2;
  int64_t step = 1;
  whole.rank = batch + 2;
  whole.dims[batch] = rows;
  whole.dims[batch + 1] = columns;
  for (int d = whole.rank - 1; d >= 0; --d) {
    whole.strides[d] = step;
    step *= whole.dims[d];
  }
  return whole;
}

// x of float32 by y of bfloat16, exact in each product: x is three matrices of bfloat16 one below the other, which the library multiplies.
bool mixed_product(const Context& context, const View& out, const View& x, const View& y) {
  if (out.rank != 2 || x.strides[1] != 1 || x.strides[0] != x.dims[1] || out.size() == 0 || x.size() == 0) return false;
  DenseTensor parts, products;
  const View split_up = scratch(context, parts, {3 * x.dims[0], x.dims[1]}, phi::DataType::BFLOAT16);
  const View apart = scratch(context, products, {3 * out.dims[0], out.dims[1]}, phi::DataType::FLOAT32);
  split(queue_of(context), split_up, x);
  if (!library_product(queue_of(context), apart, split_up, y, nullptr)) return false;
  join(queue_of(context), out, apart);
  return true;
}

void multiply(const Context& context, const DenseTensor& x, const DenseTensor& y, bool transpose_x, bool transpose_y, const View* bias,
              DenseTensor* out) {
  const View left = matrix(view_of(context, x), transpose_x, true), right = matrix(view_of(context, y), transpose_y, false);
  const View to = product_of(result(context, out), left, right);
  if (to.size() == 0) return;
  const bool taken = is_mixed(left, right) ? bias == nullptr && mixed_product(context, to, left, right)
                                           : library_product(queue_of(context), to, left, right, bias);
  if (!taken) product(queue_of(context), to, left, right, bias);
  ++(taken ? library_products : own_products);
}

void matmul(const Context& context, const DenseTensor& x, const DenseTensor& y, bool transpose_x, bool transpose_y,
            DenseTensor* out) {
  multiply(context, x, y, transpose_x, transpose_y, nullptr, out);
}

// -- fused ----------------------------------------------------------------------------------------
using MaybeTensor = paddle::optional<DenseTensor>;

// Null where nobody asks for the result.
std::optional<View> wanted(const Context& context, DenseTensor* out) {
  if (out == nullptr || !out->meta().valid()) return std::nullopt;
  return result(context, out);
}
const View* maybe(const std::optional<View>& view) { return view ? &*view : nullptr; }

std::optional<View> given(const Context& context, const MaybeTensor& tensor) {
  if (!tensor) return std::nullopt;
  return view_of(context, *tensor);
}

void refuse_unless(bool fine, const char* what) {
  if (!fine) PADDLE_THROW(common::errors::Unimplemented("The device " PADDLE_DEVICE_TYPE " has %s.", what));
}

void linear(const Context& context, const DenseTensor& x, const DenseTensor& weight, const DenseTensor& bias, bool transposed,
            DenseTensor* out) {
  const View added = view_of(context, bias);
  multiply(context, x, weight, false, transposed, &added, out);
}

void swiglu(const Context& context, const DenseTensor& x, const MaybeTensor& y, DenseTensor* out) {
  const auto up = given(context, y);
  gated(queue_of(context), result(context, out), view_of(context, x), maybe(up));
}

void softmax_kernel(const Context& context, const DenseTensor& x, int axis, DenseTensor* out) {
  const View from = view_of(context, x);
  refuse_unless(axis == -1 || axis == from.rank - 1, "softmax over the last axis alone");
  softmax(queue_of(context), result(context, out), from);
}

void rms_norm(const Context& context, const DenseTensor& x, const DenseTensor& gain, float epsilon, DenseTensor* out,
              DenseTensor* inverse) {
  const auto kept = wanted(context, inverse);
  norm(queue_of(context), result(context, out), nullptr, maybe(kept), view_of(context, x), nullptr, view_of(context, gain), epsilon);
}

void norm_of_sum(const Context& context, const DenseTensor& x, const MaybeTensor& bias, const MaybeTensor& residual,
                 const DenseTensor& gain, const MaybeTensor& norm_bias, float epsilon, int, float scale, int, float, float,
                 DenseTensor* out, DenseTensor* sum, DenseTensor* inverse) {
  refuse_unless(!bias && !norm_bias && scale <= 0, "norms of sums without a bias or rounding alone");
  const auto kept = wanted(context, inverse), second = given(context, residual);
  const auto both = second ? wanted(context, sum) : std::nullopt;
  refuse_unless(!second || both, "norms of sums that somebody asks for alone");
  norm(queue_of(context), result(context, out), maybe(both), maybe(kept), view_of(context, x), maybe(second), view_of(context, gain),
       epsilon);
}

void rotation(const Context& context, const DenseTensor& q, const MaybeTensor& k, const MaybeTensor& v, const MaybeTensor& sin,
              const MaybeTensor& cos, const MaybeTensor& positions, bool neighbours, bool time_major, float, DenseTensor* out_q,
              DenseTensor* out_k, DenseTensor* out_v) {
  refuse_unless(sin && cos && !positions && !time_major, "rotation by sin and cos of each place, batch first, alone");
  const View sines = view_of(context, *sin), cosines = view_of(context, *cos);
  const auto turn = [&](const DenseTensor& x, DenseTensor* out) {
    rotate(queue_of(context), result(context, out), view_of(context, x), sines, cosines, neighbours);
  };
  turn(q, out_q);
  if (k) turn(*k, out_k);
  if (v) turn(*v, out_v);
}

void attention(const Context& context, const DenseTensor& q, const DenseTensor& k, const DenseTensor& v, const MaybeTensor& seed,
               const MaybeTensor& mask, float dropout, bool causal, bool weights, bool, const std::string&, DenseTensor* out,
               DenseTensor*, DenseTensor*, DenseTensor*) {
  refuse_unless(!seed && dropout == 0 && !causal && !weights, "attention without dropout, causality and weights alone");
  const auto added = given(context, mask);
  attend(queue_of(context), result(context, out), view_of(context, q), view_of(context, k), view_of(context, v), maybe(added));
}

// -- the list -------------------------------------------------------------------------------------
// A kernel as Paddle calls it. Of what is thrown, Paddle hands its own errors to Python; any other would end the process.
template <typename Function, Function kLaunch>
struct Guarded;

template <typename... A, void (*kLaunch)(A...)>
struct Guarded<void (*)(A...), kLaunch> {
  static void launch(A... arguments) {
    try {
      kLaunch(std::forward<A>(arguments)...);
    } catch (const std::bad_alloc&) {
      PADDLE_THROW(common::errors::ResourceExhausted("The device " PADDLE_DEVICE_TYPE " is out of memory in a capture."));
    } catch (const std::runtime_error& error) {
      PADDLE_THROW(common::errors::External("The device " PADDLE_DEVICE_TYPE ": %s.", error.what()));
    }
  }
};

template <typename Operation, typename known::LaunchOf<Operation, float>::Function kLaunch>
struct Kernel {
  using Of = Operation;
  using Function = typename known::LaunchOf<Operation, float>::Function;

  static void add() {
    for (const auto dtype : {phi::DataType::FLOAT32, phi::DataType::FLOAT64, phi::DataType::INT32, phi::DataType::INT64,
                             phi::DataType::UINT8, phi::DataType::BOOL, phi::DataType::BFLOAT16}) {
      auto like = dtype;
      const phi::Kernel* on_cpu = known::cpu_kernel(Operation::name, dtype);
      if (on_cpu == nullptr && dtype == phi::DataType::BFLOAT16) {  // few CPU kernels know it; here it is as good as float32
        like = phi::DataType::FLOAT32;
        on_cpu = known::cpu_kernel(Operation::name, like);
      }
      if (on_cpu == nullptr) continue;
      known::register_kernel(PADDLE_DEVICE_TYPE, Operation::name, dtype, *on_cpu, like,
                             reinterpret_cast<void*>(&Guarded<Function, kLaunch>::launch));
    }
  }
};

// An operation that Paddle's CPU has no kernel of.
template <typename Operation, typename known::Launch<typename Operation::Signature>::Function kLaunch>
struct NewKernel {
  static void add() {
    using Function = typename known::Launch<typename Operation::Signature>::Function;
    for (const auto dtype : {phi::DataType::FLOAT32, phi::DataType::BFLOAT16}) {
      known::register_new_kernel<typename Operation::Signature>(PADDLE_DEVICE_TYPE, Operation::name, dtype,
                                                                reinterpret_cast<void*>(&Guarded<Function, kLaunch>::launch));
    }
  }
};

using Kernels = std::tuple<
    Kernel<known::operation_add, binary_kernel<Binary::add>>, Kernel<known::operation_all, truth_kernel<Fold::all>>,
    Kernel<known::operation_any, truth_kernel<Fold::any>>, Kernel<known::operation_argmax, argmax_kernel>,
    Kernel<known::operation_argsort, argsort>, Kernel<known::operation_assign, assign>,
    Kernel<known::operation_bitwise_and, binary_kernel<Binary::bit_and>>,
    Kernel<known::operation_bitwise_left_shift, shift_left>,
    Kernel<known::operation_bitwise_not, unary_kernel<Unary::bitwise_not>>,
    Kernel<known::operation_bitwise_or, binary_kernel<Binary::bit_or>>,
    Kernel<known::operation_bitwise_right_shift, shift_right>,
    Kernel<known::operation_bitwise_xor, binary_kernel<Binary::bit_xor>>, Kernel<known::operation_cast, cast_kernel>,
    Kernel<known::operation_clip, clip_kernel>, Kernel<known::operation_concat, concat>,
    Kernel<known::operation_contiguous, contiguous>, Kernel<known::operation_cummax, running_extreme<Running::max>>,
    Kernel<known::operation_cummin, running_extreme<Running::min>>, Kernel<known::operation_cumprod, cumprod>,
    Kernel<known::operation_cumsum, cumsum>, Kernel<known::operation_divide, binary_kernel<Binary::divide>>,
    Kernel<known::operation_equal, compare_kernel<Comparison::equal>>,
    Kernel<known::operation_exp, unary_kernel<Unary::exp>>, Kernel<known::operation_expand, expand>,
    Kernel<known::operation_expand_as, expand_as>, Kernel<known::operation_fill, fill_kernel>,
    Kernel<known::operation_flip, flip>, Kernel<known::operation_floor_divide, binary_kernel<Binary::floor_divide>>,
    Kernel<known::operation_full, full>, Kernel<known::operation_full_like, full_like>,
    Kernel<known::operation_gather, gather_kernel>,
    Kernel<known::operation_greater_equal, compare_kernel<Comparison::greater_equal>>,
    Kernel<known::operation_greater_than, compare_kernel<Comparison::greater>>,
    Kernel<known::operation_index_select, index_select>, Kernel<known::operation_isfinite, test_kernel<Test::finite>>,
    Kernel<known::operation_isnan, test_kernel<Test::nan>>,
    Kernel<known::operation_less_equal, compare_kernel<Comparison::less_equal>>,
    Kernel<known::operation_less_than, compare_kernel<Comparison::less>>,
    Kernel<known::operation_log, unary_kernel<Unary::log>>, Kernel<known::operation_log1p, unary_kernel<Unary::log1p>>,
    Kernel<known::operation_matmul, matmul>, Kernel<known::operation_max, fold_kernel<Fold::max>>,
    Kernel<known::operation_maximum, binary_kernel<Binary::maximum>>, Kernel<known::operation_mean, fold_kernel<Fold::mean>>,
    Kernel<known::operation_min, fold_kernel<Fold::min>>, Kernel<known::operation_minimum, binary_kernel<Binary::minimum>>,
    Kernel<known::operation_multiply, binary_kernel<Binary::multiply>>,
    Kernel<known::operation_not_equal, compare_kernel<Comparison::not_equal>>,
    Kernel<known::operation_put_along_axis, put_along_axis>,
    Kernel<known::operation_remainder, binary_kernel<Binary::remainder>>,
    Kernel<known::operation_rsqrt, unary_kernel<Unary::rsqrt>>, Kernel<known::operation_scale, scale_kernel>,
    Kernel<known::operation_scatter, scatter_kernel>, Kernel<known::operation_searchsorted, searchsorted>,
    Kernel<known::operation_silu, unary_kernel<Unary::silu>>, Kernel<known::operation_stack, stack>,
    Kernel<known::operation_strided_copy, strided_copy>, Kernel<known::operation_subtract, binary_kernel<Binary::subtract>>,
    Kernel<known::operation_sum, sum>, Kernel<known::operation_take_along_axis, take_along_axis>,
    Kernel<known::operation_transpose, transpose>, Kernel<known::operation_where, where>>;

using FusedKernels = std::tuple<
    Kernel<known::operation_softmax, softmax_kernel>, Kernel<known::operation_swiglu, swiglu>
#if PADDLE_DEVICE_GRAPHS
    ,
    Kernel<known::operation_fused_rms_norm_quant, norm_of_sum>, Kernel<known::operation_linear_v2, linear>,
    NewKernel<known::operation_fused_rms_norm_ext, rms_norm>,
    NewKernel<known::operation_fused_rotary_position_embedding, rotation>, NewKernel<known::operation_flash_attn, attention>
#endif
    >;

template <typename... K>
constexpr bool are_all_operations(std::tuple<K...>*) {
  return std::is_same<std::tuple<typename K::Of...>, known::AllOperations>::value;
}
static_assert(are_all_operations(static_cast<Kernels*>(nullptr)), "a kernel an operation, in order");

template <typename... K>
void add_all(std::tuple<K...>*) {
  (K::add(), ...);
}

}  // namespace
}  // namespace polycuda

void paddle_device::register_kernels() {
  polycuda::add_all(static_cast<polycuda::Kernels*>(nullptr));
  polycuda::add_all(static_cast<polycuda::FusedKernels*>(nullptr));
}
