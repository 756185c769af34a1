// Memory of captured work: blocks that were given back are handed out again, to captured work of the same device alone.

#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "driver.h"
#include "memory.h"

namespace polycuda {
namespace {

struct Blocks {
  std::mutex mutex;
  std::multimap<std::pair<CUcontext, size_t>, CUdeviceptr> free;
};

std::atomic<int64_t> allocated{0};

Blocks& blocks() {
  static auto* instance = new Blocks;  // outlives what is destroyed at the end of the process
  return *instance;
}

// Few sizes, so that blocks are of use again: powers of two, above 1 MiB multiples of it.
size_t rounded(size_t bytes) {
  constexpr size_t kMebi = size_t{1} << 20;
  if (bytes > kMebi) return (bytes + kMebi - 1) / kMebi * kMebi;
  size_t size = 512;
  while (size < bytes) size *= 2;
  return size;
}

// A free block of `size` bytes or somewhat more, which `size` then says; 0 where there is none.
CUdeviceptr take(CUcontext context, size_t& size) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  const auto found = blocks().free.lower_bound({context, size});
  if (found == blocks().free.end() || found->first.first != context || found->first.second > size + size / 2) return 0;
  const CUdeviceptr address = found->second;
  size = found->first.second;
  blocks().free.erase(found);
  return address;
}

}  // namespace

int64_t graph_bytes() { return allocated; }

std::shared_ptr<void> graph_memory(Queue queue, size_t bytes) {
  if (!is_captured(queue)) return nullptr;
  CUcontext context = nullptr;
  driver().cuCtxGetCurrent_(&context);
  size_t size = rounded(bytes);
  CUdeviceptr address = take(context, size);
  if (address == 0) {
    Relaxed relaxed;
    if (driver().cuMemAlloc_(&address, size) != CUDA_SUCCESS) throw std::bad_alloc();
    allocated += static_cast<int64_t>(size);
  }
  const auto give_back = [context, size](void* memory) {
    std::lock_guard<std::mutex> lock(blocks().mutex);
    blocks().free.emplace(std::make_pair(context, size), reinterpret_cast<CUdeviceptr>(memory));
  };
  return {reinterpret_cast<void*>(address), give_back};
}

}  // namespace polycuda
