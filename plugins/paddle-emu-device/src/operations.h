// The operations this device has kernels for, each with the signature that Paddle's own header declares: everything that the
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

namespace polyemu {

#define POLYEMU_OPERATION(NAME, FUNCTION)                                      \
  struct operation_##NAME {                                                    \
    static constexpr const char* name = #NAME;                                 \
    template <typename T>                                                      \
    static auto signature() -> decltype(&phi::FUNCTION<T, phi::CPUContext>);   \
  };

POLYEMU_OPERATION(add, AddKernel)
POLYEMU_OPERATION(all, AllKernel)
POLYEMU_OPERATION(any, AnyKernel)
POLYEMU_OPERATION(argmax, ArgMaxKernel)
POLYEMU_OPERATION(argsort, ArgsortKernel)
POLYEMU_OPERATION(bitwise_and, BitwiseAndKernel)
POLYEMU_OPERATION(bitwise_left_shift, BitwiseLeftShiftKernel)
POLYEMU_OPERATION(bitwise_not, BitwiseNotKernel)
POLYEMU_OPERATION(bitwise_or, BitwiseOrKernel)
POLYEMU_OPERATION(bitwise_right_shift, BitwiseRightShiftKernel)
POLYEMU_OPERATION(bitwise_xor, BitwiseXorKernel)
POLYEMU_OPERATION(cast, CastKernel)
POLYEMU_OPERATION(clip, ClipKernel)
POLYEMU_OPERATION(concat, ConcatKernel)
POLYEMU_OPERATION(contiguous, ContiguousKernel)
POLYEMU_OPERATION(cummax, CummaxKernel)
POLYEMU_OPERATION(cummin, CumminKernel)
POLYEMU_OPERATION(cumprod, CumprodKernel)
POLYEMU_OPERATION(cumsum, CumsumKernel)
POLYEMU_OPERATION(divide, DivideKernel)
POLYEMU_OPERATION(equal, EqualKernel)
POLYEMU_OPERATION(exp, ExpKernel)
POLYEMU_OPERATION(expand, ExpandKernel)
POLYEMU_OPERATION(expand_as, ExpandAsKernel)
POLYEMU_OPERATION(fill, FillKernel)
POLYEMU_OPERATION(flip, FlipKernel)
POLYEMU_OPERATION(floor_divide, FloorDivideKernel)
POLYEMU_OPERATION(full, FullKernel)
POLYEMU_OPERATION(full_like, FullLikeKernel)
POLYEMU_OPERATION(gather, GatherKernel)
POLYEMU_OPERATION(greater_equal, GreaterEqualKernel)
POLYEMU_OPERATION(greater_than, GreaterThanKernel)
POLYEMU_OPERATION(index_select, IndexSelectKernel)
POLYEMU_OPERATION(isfinite, IsfiniteKernel)
POLYEMU_OPERATION(isnan, IsnanKernel)
POLYEMU_OPERATION(less_equal, LessEqualKernel)
POLYEMU_OPERATION(less_than, LessThanKernel)
POLYEMU_OPERATION(log, LogKernel)
POLYEMU_OPERATION(log1p, Log1pKernel)
POLYEMU_OPERATION(matmul, MatmulKernel)
POLYEMU_OPERATION(max, MaxKernel)
POLYEMU_OPERATION(maximum, MaximumKernel)
POLYEMU_OPERATION(mean, MeanKernel)
POLYEMU_OPERATION(min, MinKernel)
POLYEMU_OPERATION(minimum, MinimumKernel)
POLYEMU_OPERATION(multiply, MultiplyKernel)
POLYEMU_OPERATION(not_equal, NotEqualKernel)
POLYEMU_OPERATION(put_along_axis, PutAlongAxisKernel)
POLYEMU_OPERATION(remainder, RemainderKernel)
POLYEMU_OPERATION(rsqrt, RsqrtKernel)
POLYEMU_OPERATION(scale, ScaleKernel)
POLYEMU_OPERATION(scatter, ScatterKernel)
POLYEMU_OPERATION(searchsorted, SearchsortedKernel)
POLYEMU_OPERATION(silu, SiluKernel)
POLYEMU_OPERATION(stack, StackKernel)
POLYEMU_OPERATION(strided_copy, StridedCopyKernel)
POLYEMU_OPERATION(subtract, SubtractKernel)
POLYEMU_OPERATION(sum, SumKernel)
POLYEMU_OPERATION(take_along_axis, TakeAlongAxisKernel)
POLYEMU_OPERATION(transpose, TransposeKernel)
POLYEMU_OPERATION(where, WhereKernel)

#undef POLYEMU_OPERATION

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

}  // namespace polyemu
