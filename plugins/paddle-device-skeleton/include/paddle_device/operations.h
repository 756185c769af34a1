// The operations a device here has kernels for, each with the signature that Paddle's own header declares: everything that the
// Paddle backend's step is made of. What is missing here falls back to the CPU, or is refused.

#pragma once

#include <tuple>

#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/arg_min_max_kernel.h"
#include "paddle/phi/kernels/argsort_kernel.h"
#include "paddle/phi/kernels/assign_kernel.h"
#include "paddle/phi/kernels/bitwise_kernel.h"
#include "paddle/phi/kernels/cast_kernel.h"
#include "paddle/phi/kernels/clip_kernel.h"
#include "paddle/phi/kernels/compare_kernel.h"
#include "paddle/phi/kernels/concat_kernel.h"
#include "paddle/phi/kernels/contiguous_kernel.h"
#include "paddle/phi/kernels/cum_kernel.h"
#include "paddle/phi/kernels/cum_maxmin_kernel.h"
#include "paddle/phi/kernels/cumprod_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_kernel.h"
#include "paddle/phi/kernels/elementwise_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/expand_as_kernel.h"
#include "paddle/phi/kernels/expand_kernel.h"
#include "paddle/phi/kernels/fill_kernel.h"
#include "paddle/phi/kernels/flip_kernel.h"
#include "paddle/phi/kernels/full_kernel.h"
#include "paddle/phi/kernels/gather_kernel.h"
#include "paddle/phi/kernels/index_select_kernel.h"
#include "paddle/phi/kernels/isfinite_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"
#include "paddle/phi/kernels/put_along_axis_kernel.h"
#include "paddle/phi/kernels/reduce_all_kernel.h"
#include "paddle/phi/kernels/reduce_any_kernel.h"
#include "paddle/phi/kernels/reduce_max_kernel.h"
#include "paddle/phi/kernels/reduce_mean_kernel.h"
#include "paddle/phi/kernels/reduce_min_kernel.h"
#include "paddle/phi/kernels/reduce_sum_kernel.h"
#include "paddle/phi/kernels/scale_kernel.h"
#include "paddle/phi/kernels/scatter_kernel.h"
#include "paddle/phi/kernels/searchsorted_kernel.h"
#include "paddle/phi/kernels/stack_kernel.h"
#include "paddle/phi/kernels/strided_copy_kernel.h"
#include "paddle/phi/kernels/take_along_axis_kernel.h"
#include "paddle/phi/kernels/transpose_kernel.h"
#include "paddle/phi/kernels/where_kernel.h"

namespace paddle_device {

// Names an operation by its kernel's name and function, in whichever header of a device there are more.
#define PADDLE_DEVICE_OPERATION(NAME, FUNCTION)                                      \
  struct operation_##NAME {                                                    \
    static constexpr const char* name = #NAME;                                 \
    template <typename T>                                                      \
    static auto signature() -> decltype(&phi::FUNCTION<T, phi::CPUContext>);   \
  };

PADDLE_DEVICE_OPERATION(add, AddKernel)
PADDLE_DEVICE_OPERATION(all, AllKernel)
PADDLE_DEVICE_OPERATION(any, AnyKernel)
PADDLE_DEVICE_OPERATION(argmax, ArgMaxKernel)
PADDLE_DEVICE_OPERATION(argsort, ArgsortKernel)
PADDLE_DEVICE_OPERATION(bitwise_and, BitwiseAndKernel)
PADDLE_DEVICE_OPERATION(bitwise_left_shift, BitwiseLeftShiftKernel)
PADDLE_DEVICE_OPERATION(bitwise_not, BitwiseNotKernel)
PADDLE_DEVICE_OPERATION(bitwise_or, BitwiseOrKernel)
PADDLE_DEVICE_OPERATION(bitwise_right_shift, BitwiseRightShiftKernel)
PADDLE_DEVICE_OPERATION(bitwise_xor, BitwiseXorKernel)
PADDLE_DEVICE_OPERATION(cast, CastKernel)
PADDLE_DEVICE_OPERATION(clip, ClipKernel)
PADDLE_DEVICE_OPERATION(concat, ConcatKernel)
PADDLE_DEVICE_OPERATION(contiguous, ContiguousKernel)
PADDLE_DEVICE_OPERATION(cummax, CummaxKernel)
PADDLE_DEVICE_OPERATION(cummin, CumminKernel)
PADDLE_DEVICE_OPERATION(cumprod, CumprodKernel)
PADDLE_DEVICE_OPERATION(cumsum, CumsumKernel)
PADDLE_DEVICE_OPERATION(divide, DivideKernel)
PADDLE_DEVICE_OPERATION(equal, EqualKernel)
PADDLE_DEVICE_OPERATION(exp, ExpKernel)
PADDLE_DEVICE_OPERATION(expand, ExpandKernel)
PADDLE_DEVICE_OPERATION(expand_as, ExpandAsKernel)
PADDLE_DEVICE_OPERATION(fill, FillKernel)
PADDLE_DEVICE_OPERATION(flip, FlipKernel)
PADDLE_DEVICE_OPERATION(floor_divide, FloorDivideKernel)
PADDLE_DEVICE_OPERATION(full, FullKernel)
PADDLE_DEVICE_OPERATION(full_like, FullLikeKernel)
PADDLE_DEVICE_OPERATION(gather, GatherKernel)
PADDLE_DEVICE_OPERATION(greater_equal, GreaterEqualKernel)
PADDLE_DEVICE_OPERATION(greater_than, GreaterThanKernel)
PADDLE_DEVICE_OPERATION(index_select, IndexSelectKernel)
PADDLE_DEVICE_OPERATION(isfinite, IsfiniteKernel)
PADDLE_DEVICE_OPERATION(isnan, IsnanKernel)
PADDLE_DEVICE_OPERATION(less_equal, LessEqualKernel)
PADDLE_DEVICE_OPERATION(less_than, LessThanKernel)
PADDLE_DEVICE_OPERATION(log, LogKernel)
PADDLE_DEVICE_OPERATION(log1p, Log1pKernel)
PADDLE_DEVICE_OPERATION(matmul, MatmulKernel)
PADDLE_DEVICE_OPERATION(max, MaxKernel)
PADDLE_DEVICE_OPERATION(maximum, MaximumKernel)
PADDLE_DEVICE_OPERATION(mean, MeanKernel)
PADDLE_DEVICE_OPERATION(min, MinKernel)
PADDLE_DEVICE_OPERATION(minimum, MinimumKernel)
PADDLE_DEVICE_OPERATION(multiply, MultiplyKernel)
PADDLE_DEVICE_OPERATION(not_equal, NotEqualKernel)
PADDLE_DEVICE_OPERATION(put_along_axis, PutAlongAxisKernel)
PADDLE_DEVICE_OPERATION(remainder, RemainderKernel)
PADDLE_DEVICE_OPERATION(rsqrt, RsqrtKernel)
PADDLE_DEVICE_OPERATION(scale, ScaleKernel)
PADDLE_DEVICE_OPERATION(scatter, ScatterKernel)
PADDLE_DEVICE_OPERATION(searchsorted, SearchsortedKernel)
PADDLE_DEVICE_OPERATION(silu, SiluKernel)
PADDLE_DEVICE_OPERATION(stack, StackKernel)
PADDLE_DEVICE_OPERATION(strided_copy, StridedCopyKernel)
PADDLE_DEVICE_OPERATION(subtract, SubtractKernel)
PADDLE_DEVICE_OPERATION(sum, SumKernel)
PADDLE_DEVICE_OPERATION(take_along_axis, TakeAlongAxisKernel)
PADDLE_DEVICE_OPERATION(transpose, TransposeKernel)
PADDLE_DEVICE_OPERATION(where, WhereKernel)

struct operation_assign {  // its function has an overload for optional tensors
  static constexpr const char* name = "assign";
  template <typename T>
  static auto signature() -> void (*)(const phi::CPUContext&, const phi::DenseTensor&, phi::DenseTensor*);
};

using AllOperations = std::tuple<
    operation_add, operation_all, operation_any, operation_argmax, operation_argsort, operation_assign,
    operation_bitwise_and, operation_bitwise_left_shift, operation_bitwise_not, operation_bitwise_or,
    operation_bitwise_right_shift, operation_bitwise_xor, operation_cast, operation_clip, operation_concat,
    operation_contiguous, operation_cummax, operation_cummin, operation_cumprod, operation_cumsum, operation_divide,
    operation_equal, operation_exp, operation_expand, operation_expand_as, operation_fill, operation_flip,
    operation_floor_divide, operation_full, operation_full_like, operation_gather, operation_greater_equal,
    operation_greater_than, operation_index_select, operation_isfinite, operation_isnan, operation_less_equal,
    operation_less_than, operation_log, operation_log1p, operation_matmul, operation_max, operation_maximum, operation_mean,
    operation_min, operation_minimum, operation_multiply, operation_not_equal, operation_put_along_axis, operation_remainder,
    operation_rsqrt, operation_scale, operation_scatter, operation_searchsorted, operation_silu, operation_stack,
    operation_strided_copy, operation_subtract, operation_sum, operation_take_along_axis, operation_transpose,
    operation_where>;

}  // namespace paddle_device
