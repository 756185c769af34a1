// What the device computes, as calls that queue work on a stream over views of tensors. Nothing here knows Paddle.
//
// `kernels.cc` calls them with what Paddle's operations are handed; the `.cu` files define them, for a CUDA compiler or, where
// tests run them without a GPU, for a C++ compiler.

#pragma once

#include <vector>

#include "numbers.h"

namespace polycuda {

using Queue = void*;  // a stream of the device

enum class Unary { exp, log, log1p, rsqrt, silu, bitwise_not };
enum class Test { finite, nan };
enum class Binary {
  add, subtract, multiply, divide, floor_divide, remainder, maximum, minimum,
  bit_and, bit_or, bit_xor, shift_left, shift_right, shift_right_logical,
};
enum class Comparison { equal, not_equal, less, less_equal, greater, greater_equal };
enum class Fold { sum, mean, max, min, any, all };
enum class Running { sum, product, max, min };

// A number of either kind; what is used depends on the type that it is for.
struct Number {
  double real;
  int64_t whole;
};

// -- elementwise: operands are broadcast to the shape of `out`, which is contiguous ----------------
void unary(Queue queue, Unary operation, const View& out, const View& x);
void test(Queue queue, Test what, const View& out, const View& x);
void binary(Queue queue, Binary operation, const View& out, const View& x, const View& y);
void compare(Queue queue, Comparison comparison, const View& out, const View& x, const View& y);
void choose(Queue queue, const View& out, const View& condition, const View& x, const View& y);
void scale(Queue queue, const View& out, const View& x, Number factor, Number bias, bool bias_after_scale);
void clip(Queue queue, const View& out, const View& x, Number low, Number high);
void fill(Queue queue, const View& out, Number value);
void cast(Queue queue, const View& out, const View& x);
void copy(Queue queue, const View& out, const View& x);  // any strides on both sides; one type

// -- along axes -----------------------------------------------------------------------------------
void fold(Queue queue, Fold what, const View& out, const View& x, const std::vector<int>& axes);
void argmax(Queue queue, const View& out, const View& x, int axis);
void running(Queue queue, Running what, const View& out, const View* indices, const View& x, int axis, bool exclusive,
             bool reverse);
// `scratch`: sort_scratch(x, axis) int32 words.
int64_t sort_scratch(const View& x, int axis);
void sort(Queue queue, const View& out, const View& indices, const View& x, int axis, bool descending, void* scratch);
void search(Queue queue, const View& out, const View& sorted, const View& values, bool right);

// -- by index -------------------------------------------------------------------------------------
void gather(Queue queue, const View& out, const View& x, const View& index, int axis);
void take_along(Queue queue, const View& out, const View& x, const View& index, int axis);
void put_along(Queue queue, const View& out, const View& index, const View& value, int axis, bool add);
void scatter(Queue queue, const View& out, const View& index, const View& updates, bool overwrite);

// -- fused: in float32 and bfloat16, over contiguous memory ----------------------------------------
constexpr int kLargestHead = 1024;  // elements

// The RMSNorm of rows as long as `gain`. With `y` that of x + y, which goes to `sum`, and may lie where an addend does. `inverse`, float32
// [rows], gets what the rows were multiplied with.
void norm(Queue queue, const View& out, const View* sum, const View* inverse, const View& x, const View* y, const View& gain, double eps);
// silu(gate) * up; without `up` both are halves of the rows of `gate`.
void gated(Queue queue, const View& out, const View& gate, const View* up);
// Heads x [batch, length, heads, size] by sin and cos [1, length, 1, size].
void rotate(Queue queue, const View& out, const View& x, const View& sin, const View& cos, bool neighbours);
void softmax(Queue queue, const View& out, const View& x);  // over the last axis
// Softmax attention of q [batch, rows, heads, size] over k and v [batch, places, heads of k, size], whose scores are size ** -0.5 times
// the products plus `added` [batch, heads, rows, places], of any strides. Throws for heads that are too large.
void attend(Queue queue, const View& out, const View& q, const View& k, const View& v, const View* added);

// Parts [3, ..] of bfloat16 whose sum is `x`, float32; and the sum of three, float32, from the last to the first.
void split(Queue queue, const View& parts, const View& x);
void join(Queue queue, const View& out, const View& parts);

// -- products: out [.., M, N] of x [.., M, K] and y [.., K, N], whose strides may say that they are transposed, plus `bias` [N] or null
// All are of one type, or y is of bfloat16 and the others of float32.
inline bool is_mixed(const View& x, const View& y) { return x.kind == Kind::f32 && y.kind == Kind::bf16; }
void product(Queue queue, const View& out, const View& x, const View& y, const View* bias);

}  // namespace polycuda
