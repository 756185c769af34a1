// Matrix products by cuBLASLt, found when the first product is wanted; without it the device's own kernel computes them.
//
// The library is column-major: a row-major out = x @ y is asked of it as the transposed out' = y' @ x'. Its calls are declared
// here, since nothing of it is needed to build.

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver.h"
#include "memory.h"
#include "walk.h"

namespace polycuda {
namespace {

constexpr size_t kScratch = size_t{32} << 20;
constexpr int kCompute32 = 68, kCompute64 = 70;
enum Attribute {
  kBatchCount = 5, kBatchStride = 6, kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBias = 8, kMaxScratch = 1, kAlignment = 5
};
constexpr uint32_t kAddBias = 4;  // to each row of what the library computes, which is a column of ours

struct Choice {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t scratch;
  int state;
  float waves;
  int reserved[4];
};

struct Library {
  int (*create)(void**) = nullptr;
  int (*describe_product)(void**, int, int) = nullptr;
  int (*set_product)(void*, int, const void*, size_t) = nullptr;
  int (*describe_matrix)(void**, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*set_matrix)(void*, int, const void*, size_t) = nullptr;
  int (*make_preference)(void**) = nullptr;
  int (*set_preference)(void*, int, const void*, size_t) = nullptr;
  int (*drop_preference)(void*) = nullptr;
  int (*choose)(void*, void*, void*, void*, void*, void*, void*, int, Choice*, int*) = nullptr;
  int (*multiply)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*,
                  void*, const void*, void*, size_t, CUstream) = nullptr;
  bool there = false;
};

// As the loader finds it, or where pip puts it beside this library.
void* open_library() {
  const std::string name = "libcublasLt.so.13";
  if (void* found = dlopen(name.c_str(), RTLD_NOW)) return found;
  Dl_info here;
  if (dladdr(reinterpret_cast<void*>(&open_library), &here) == 0) return nullptr;
  const std::string path = here.dli_fname;
  const std::string folder = path.substr(0, path.find_last_of('/') + 1);
  return dlopen((folder + "../nvidia/cu13/lib/" + name).c_str(), RTLD_NOW);
}

template <typename F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

const Library& library() {
  static const Library found = [] {
    Library made;
    void* opened = open_library();
    made.there = opened != nullptr && find(opened, "cublasLtCreate", made.create) &&
                 find(opened, "cublasLtMatmulDescCreate", made.describe_product) &&
                 find(opened, "cublasLtMatmulDescSetAttribute", made.set_product) &&
                 find(opened, "cublasLtMatrixLayoutCreate", made.describe_matrix) &&
                 find(opened, "cublasLtMatrixLayoutSetAttribute", made.set_matrix) &&
                 find(opened, "cublasLtMatmulPreferenceCreate", made.make_preference) &&
                 find(opened, "cublasLtMatmulPreferenceSetAttribute", made.set_preference) &&
                 find(opened, "cublasLtMatmulPreferenceDestroy", made.drop_preference) &&
                 find(opened, "cublasLtMatmulAlgoGetHeuristic", made.choose) && find(opened, "cublasLtMatmul", made.multiply);
    return made;
  }();
  return found;
}

// One operand as the library sees it: rows and columns in its own order, and whether it is to be transposed.
struct Operand {
  uint64_t rows, columns;
  int64_t leading, batch_stride;
  bool transposed;
  int alignment;
};

int alignment_of(const void* pointer) {
  int bytes = 256;
  while (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) bytes /= 2;
  return bytes;
}

// The row-major matrix [rows, columns] of the last two dimensions, read as its transpose; false where neither dimension is dense.
bool describe(const View& view, int64_t batch_stride, Operand& operand) {
  const int64_t rows = view.dims[view.rank - 2], columns = view.dims[view.rank - 1];
  const int64_t row = view.strides[view.rank - 2], column = view.strides[view.rank - 1];
  operand.batch_stride = batch_stride;
  operand.alignment = alignment_of(view.data);
  if (columns == 1 || column == 1) {
    operand.rows = static_cast<uint64_t>(columns);
    operand.columns = static_cast<uint64_t>(rows);
    operand.leading = rows == 1 ? columns : row;
    operand.transposed = false;
    if (operand.leading >= columns) return true;
  }
  if (rows == 1 || row == 1) {
    operand.rows = static_cast<uint64_t>(rows);
    operand.columns = static_cast<uint64_t>(columns);
    operand.leading = columns == 1 ? rows : column;
    operand.transposed = true;
    return operand.leading >= rows;
  }
  return false;
}

struct Plan {
  void *product = nullptr, *left = nullptr, *right = nullptr, *out = nullptr;
  Choice choice;
  bool usable = false;
};

struct Problem {
  int device_type, out_type;  // the library's numbers of the element types
  int compute;
  int batches;
  Operand left, right, out;
  bool biased;
};

void* matrix_of(const Library& lib, const Problem& problem, const Operand& operand, int type) {
  void* made = nullptr;
  if (lib.describe_matrix(&made, type, operand.rows, operand.columns, operand.leading) != 0) return nullptr;
  lib.set_matrix(made, kBatchCount, &problem.batches, sizeof problem.batches);
  lib.set_matrix(made, kBatchStride, &operand.batch_stride, sizeof operand.batch_stride);
  return made;
}

Plan plan_of(const Library& lib, void* handle, const Problem& problem) {
  Plan plan;
  const int scale = problem.compute == kCompute64 ? 1 : 0;
  if (lib.describe_product(&plan.product, problem.compute, scale) != 0) return plan;
  const int left = problem.left.transposed, right = problem.right.transposed;
  lib.set_product(plan.product, kTransposeA, &left, sizeof left);
  lib.set_product(plan.product, kTransposeB, &right, sizeof right);
  if (problem.biased) lib.set_product(plan.product, kEpilogue, &kAddBias, sizeof kAddBias);
  plan.left = matrix_of(lib, problem, problem.left, problem.device_type);
  plan.right = matrix_of(lib, problem, problem.right, problem.device_type);
  plan.out = matrix_of(lib, problem, problem.out, problem.out_type);
  void* preference = nullptr;
  if (plan.left == nullptr || plan.right == nullptr || plan.out == nullptr || lib.make_preference(&preference) != 0) return plan;
  const uint64_t scratch = kScratch;
  lib.set_preference(preference, kMaxScratch, &scratch, sizeof scratch);
  const int alignments[] = {problem.left.alignment, problem.right.alignment, problem.out.alignment, problem.out.alignment};
  for (int i = 0; i < 4; ++i) lib.set_preference(preference, kAlignment + i, &alignments[i], sizeof alignments[i]);
  int found = 0;
  const int code =
      lib.choose(handle, plan.product, plan.left, plan.right, plan.out, plan.out, preference, 1, &plan.choice, &found);
  lib.drop_preference(preference);
  plan.usable = code == 0 && found > 0;
  return plan;
}

std::string key_of(const Problem& problem) {
  std::string key;
  const auto add = [&key](int64_t value) { key += std::to_string(value) + ','; };
  for (const int value : {problem.device_type, problem.out_type, problem.batches, int{problem.biased}}) add(value);
  for (const Operand* operand : {&problem.left, &problem.right, &problem.out}) {
    add(static_cast<int64_t>(operand->rows));
    add(static_cast<int64_t>(operand->columns));
    add(operand->leading);
    add(operand->batch_stride);
    add(operand->transposed);
    add(operand->alignment);
  }
  return key;
}

struct State {
  std::mutex mutex;
  void* handle = nullptr;
  std::map<std::string, Plan> plans;
  std::map<CUstream, CUdeviceptr> scratch;  // products of one stream run one after the other
};

State& state() {
  static auto* instance = new State;
  return *instance;
}

CUdeviceptr scratch_of(CUstream stream) {
  CUdeviceptr& address = state().scratch[stream];
  if (address == 0) {
    Relaxed relaxed;
    if (driver().cuMemAlloc_(&address, kScratch) != CUDA_SUCCESS) address = 0;
  }
  return address;
}

}  // namespace

bool library_product(Queue queue, const View& out, const View& x, const View& y, const View* bias) {
  Problem problem{};
  problem.biased = bias != nullptr;
  const auto number = [](Kind kind) { return kind == Kind::f32 ? 0 : kind == Kind::f64 ? 1 : kind == Kind::bf16 ? 14 : -1; };
  problem.device_type = number(x.kind), problem.out_type = number(out.kind);
  problem.compute = x.kind == Kind::f64 ? kCompute64 : kCompute32;
  if (problem.device_type < 0 || x.kind != y.kind) return false;
  if (!library().there || x.dims[x.rank - 1] == 0) return false;
  Walk<3> batch;
  for (int d = 0; d < out.rank - 2; ++d) {
    batch.add(out.dims[d], {out.strides[d], stride_in(x, d, out.rank), stride_in(y, d, out.rank)});
  }
  if (batch.rank > 1) return false;
  problem.batches = batch.rank == 0 ? 1 : static_cast<int>(batch.dims[0]);
  const auto stride = [&batch](int n) { return batch.rank == 0 ? int64_t{0} : batch.strides[n][0]; };
  if (!describe(out, stride(0), problem.out) || problem.out.transposed || !describe(x, stride(1), problem.right) ||
      !describe(y, stride(2), problem.left)) {
    return false;
  }

  std::lock_guard<std::mutex> lock(state().mutex);
  const Library& lib = library();
  if (state().handle == nullptr && lib.create(&state().handle) != 0) return false;
  const std::string key = key_of(problem);
  auto found = state().plans.find(key);
  if (found == state().plans.end()) found = state().plans.emplace(key, plan_of(lib, state().handle, problem)).first;
  const Plan& plan = found->second;
  const auto stream = static_cast<CUstream>(queue);
  const CUdeviceptr scratch = scratch_of(stream);
  if (!plan.usable || (scratch == 0 && plan.choice.scratch > 0)) return false;
  if (bias != nullptr) lib.set_product(plan.product, kBias, &bias->data, sizeof bias->data);
  const double one64 = 1, zero64 = 0;
  const float one32 = 1, zero32 = 0;
  const bool wide = problem.compute == kCompute64;
  const void *one = wide ? static_cast<const void*>(&one64) : &one32, *zero = wide ? static_cast<const void*>(&zero64) : &zero32;
  const int code =
      lib.multiply(state().handle, plan.product, one, y.data, plan.left, x.data, plan.right, zero, out.data, plan.out, out.data,
                   plan.out, plan.choice.algorithm, reinterpret_cast<void*>(scratch), kScratch, stream);
  if (code != 0) throw std::runtime_error("cuBLASLt failed in a product (status " + std::to_string(code) + ")");
  return true;
}

}  // namespace polycuda
