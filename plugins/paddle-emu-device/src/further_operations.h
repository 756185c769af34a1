// Operations that polydraft's step does without, and that chips have: a list of a chip's operations (offer.cc) can only be played as
// far as there are kernels here. Each with the signature that Paddle's own header declares.

#pragma once

#include <tuple>

#include "paddle/phi/kernels/abs_kernel.h"
#include "paddle/phi/kernels/bmm_kernel.h"
#include "paddle/phi/kernels/embedding_kernel.h"
#include "paddle/phi/kernels/gather_nd_kernel.h"
#include "paddle/phi/kernels/index_put_kernel.h"
#include "paddle/phi/kernels/index_sample_kernel.h"
#include "paddle/phi/kernels/log_softmax_kernel.h"
#include "paddle/phi/kernels/logical_kernel.h"
#include "paddle/phi/kernels/logsumexp_kernel.h"
#include "paddle/phi/kernels/norm_kernel.h"
#include "paddle/phi/kernels/one_hot_kernel.h"
#include "paddle/phi/kernels/prod_kernel.h"
#include "paddle/phi/kernels/roll_kernel.h"
#include "paddle/phi/kernels/scatter_nd_add_kernel.h"
#include "paddle/phi/kernels/sign_kernel.h"
#include "paddle/phi/kernels/tile_kernel.h"
#include "paddle/phi/kernels/top_k_kernel.h"
#include "paddle/phi/kernels/tril_triu_kernel.h"
#include "paddle_device/fused_operations.h"
#include "paddle_device/operations.h"

namespace polyemu {

PADDLE_DEVICE_OPERATION(abs, AbsKernel)
PADDLE_DEVICE_OPERATION(argmin, ArgMinKernel)
PADDLE_DEVICE_OPERATION(bmm, BmmKernel)
PADDLE_DEVICE_OPERATION(cos, CosKernel)
PADDLE_DEVICE_OPERATION(elementwise_pow, ElementwisePowKernel)
PADDLE_DEVICE_OPERATION(embedding, EmbeddingKernel)
PADDLE_DEVICE_OPERATION(gather_nd, GatherNdKernel)
PADDLE_DEVICE_OPERATION(index_put, IndexPutKernel)
PADDLE_DEVICE_OPERATION(index_sample, IndexSampleKernel)
PADDLE_DEVICE_OPERATION(isinf, IsinfKernel)
PADDLE_DEVICE_OPERATION(log_softmax, LogSoftmaxKernel)
PADDLE_DEVICE_OPERATION(logical_and, LogicalAndKernel)
PADDLE_DEVICE_OPERATION(logical_not, LogicalNotKernel)
PADDLE_DEVICE_OPERATION(logical_or, LogicalOrKernel)
PADDLE_DEVICE_OPERATION(logical_xor, LogicalXorKernel)
PADDLE_DEVICE_OPERATION(logsumexp, LogsumexpKernel)
PADDLE_DEVICE_OPERATION(norm, NormKernel)
PADDLE_DEVICE_OPERATION(one_hot, OneHotKernel)
PADDLE_DEVICE_OPERATION(pow, PowKernel)
PADDLE_DEVICE_OPERATION(prod, ProdKernel)
PADDLE_DEVICE_OPERATION(relu, ReluKernel)
PADDLE_DEVICE_OPERATION(roll, RollKernel)
PADDLE_DEVICE_OPERATION(scatter_nd_add, ScatterNdAddKernel)
PADDLE_DEVICE_OPERATION(sigmoid, SigmoidKernel)
PADDLE_DEVICE_OPERATION(sign, SignKernel)
PADDLE_DEVICE_OPERATION(sin, SinKernel)
PADDLE_DEVICE_OPERATION(sqrt, SqrtKernel)
PADDLE_DEVICE_OPERATION(square, SquareKernel)
PADDLE_DEVICE_OPERATION(tanh, TanhKernel)
PADDLE_DEVICE_OPERATION(tile, TileKernel)
PADDLE_DEVICE_OPERATION(topk, TopkKernel)
PADDLE_DEVICE_OPERATION(tril, TrilKernel)
PADDLE_DEVICE_OPERATION(triu, TriuKernel)

using paddle_device::operation_softmax;
using paddle_device::operation_swiglu;

#if PADDLE_DEVICE_GRAPHS
using paddle_device::operation_linear_v2;
using NormOfSum = paddle_device::operation_fused_rms_norm_quant;
using FusedOperations = std::tuple<NormOfSum, operation_linear_v2>;
#else
PADDLE_DEVICE_OPERATION(rms_norm, RmsNormKernel)
using NormOfSum = operation_rms_norm;
using FusedOperations = std::tuple<NormOfSum>;
#endif

using FurtherOperations = std::tuple<
    operation_abs, operation_argmin, operation_bmm, operation_cos, operation_elementwise_pow, operation_embedding,
    operation_gather_nd, operation_index_put, operation_index_sample, operation_isinf, operation_log_softmax,
    operation_logical_and, operation_logical_not, operation_logical_or, operation_logical_xor, operation_logsumexp, operation_norm,
    operation_one_hot, operation_pow,
    operation_prod, operation_relu, operation_roll, operation_scatter_nd_add, operation_sigmoid, operation_sign, operation_sin,
    operation_softmax, operation_sqrt, operation_square, operation_swiglu, operation_tanh, operation_tile, operation_topk,
    operation_tril, operation_triu>;

}  // namespace polyemu
