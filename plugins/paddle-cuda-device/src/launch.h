// The two ways in which work is spread: one call for each of n elements, and one team for each of n rows.
//
// A CUDA compiler makes kernels of them. A C++ compiler makes loops of them, queued on an emulated stream: so everything above
// the driver is tested without a GPU.

#pragma once

#include "numbers.h"

#ifdef __CUDACC__

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace polycuda {

constexpr int kThreads = 256;

// The threads of a block that work on one row.
struct Team {
  unsigned char* scratch;

  __device__ int index() const { return threadIdx.x; }
  static constexpr __host__ __device__ int size() { return kThreads; }
  __device__ void wait() const { __syncthreads(); }

  // A float for each thread, for all to see behind a `wait`; other calls leave them alone.
  __device__ float* floats() const { return reinterpret_cast<float*>(scratch + kThreads * 16); }

  // 16 bytes for each thread, which other calls overwrite.
  template <typename T>
  __device__ T* everybodys() const {
    static_assert(sizeof(T) <= 16, "there is no room for more");
    return reinterpret_cast<T*>(scratch);
  }

  // `combine` over everybody's `x`, in the order of the threads; everybody gets it.
  template <typename T, typename F>
  __device__ T reduce(T x, F combine) {
    constexpr int kWarps = kThreads / 32;
    T* shared = reinterpret_cast<T*>(scratch);
    for (int step = 1; step < 32; step *= 2) x = combine(x, of_lane(x, step));  // of the lanes from this one on
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
    for (int warp = 1; warp < kWarps; ++warp) x = combine(x, shared[warp]);
    return x;
  }

  // What the lane that is `step` further on has.
  template <typename T>
  static __device__ T of_lane(const T& x, int step) {
    uint32_t words[(sizeof(T) + 3) / 4] = {};
    memcpy(words, &x, sizeof x);
    for (uint32_t& word : words) word = __shfl_down_sync(~0u, word, step);
    T other;
    memcpy(&other, words, sizeof other);
    return other;
  }

  // `combine` over the `x` of all threads up to this one; `total` gets that of all.
  template <typename T, typename F>
  __device__ T scan(T x, F combine, T* total) {
    T* shared = reinterpret_cast<T*>(scratch);
    __syncthreads();
    shared[threadIdx.x] = x;
    for (int step = 1; step < kThreads; step *= 2) {
      __syncthreads();
      const bool reaches = threadIdx.x >= step;
      const T before = shared[reaches ? threadIdx.x - step : 0];
      __syncthreads();
      if (reaches) shared[threadIdx.x] = x = combine(before, x);
    }
    __syncthreads();
    *total = shared[kThreads - 1];
    return x;
  }
};

template <typename F>
__global__ void each_kernel(F work, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) work(i);
}

template <typename F>
__global__ void team_kernel(F work, int64_t rows) {
  __shared__ alignas(16) unsigned char scratch[kThreads * (16 + sizeof(float))];
  Team team{scratch};
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) work(row, team);
}

inline void check_launch() {
  const cudaError_t code = cudaGetLastError();
  if (code != cudaSuccess) throw std::runtime_error(std::string("a kernel was not launched: ") + cudaGetErrorString(code));
}

template <typename F>
void each(void* queue, int64_t count, const F& work) {
  if (count <= 0) return;
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  each_kernel<<<static_cast<unsigned>(blocks < (1 << 20) ? blocks : 1 << 20), kThreads, 0, static_cast<cudaStream_t>(queue)>>>(
      work, count);
  check_launch();
}

template <typename F>
void teams(void* queue, int64_t rows, const F& work) {
  if (rows <= 0) return;
  team_kernel<<<static_cast<unsigned>(rows < (1 << 20) ? rows : 1 << 20), kThreads, 0, static_cast<cudaStream_t>(queue)>>>(
      work, rows);
  check_launch();
}

}  // namespace polycuda

#else

#include "queue.h"

namespace polycuda {

struct Team {
  float one;
  int index() const { return 0; }
  static constexpr int size() { return 1; }
  void wait() const {}
  float* floats() { return &one; }
  template <typename T>
  T* everybodys() {
    return nullptr;  // of one there are no others
  }
  template <typename T, typename F>
  T reduce(T x, F) {
    return x;
  }
  template <typename T, typename F>
  T scan(T x, F, T* total) {
    return *total = x;
  }
};

template <typename F>
void each(void* queue, int64_t count, const F& work) {
  if (count <= 0) return;
  static_cast<polyemu::Stream*>(queue)->submit([work, count] {
    for (int64_t i = 0; i < count; ++i) work(i);
  });
}

template <typename F>
void teams(void* queue, int64_t rows, const F& work) {
  if (rows <= 0) return;
  static_cast<polyemu::Stream*>(queue)->submit([work, rows] {
    Team team;
    for (int64_t row = 0; row < rows; ++row) work(row, team);
  });
}

}  // namespace polycuda

#endif
