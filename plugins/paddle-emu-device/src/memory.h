// Device memory: heap memory apart, counted, and poisoned when it is given out and when it is taken back; and pinned host memory,
// which is heap memory that the device knows.
//
// Captured work gets blocks of its own. Paddle gives custom devices no memory pool of a graph's own, and its pool would hand a
// graph's temporaries out again while the graph is launched. Blocks are handed out to captured work alone: again as soon as they
// were given back, since a graph runs in order, and to every graph, since all of them are launched on one stream. Nothing here
// knows Paddle.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "queue.h"

namespace polyemu {

// Which addresses are of one kind of memory.
class Ranges {
 public:
  void add(void* memory, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_[static_cast<char*>(memory)] = static_cast<char*>(memory) + bytes;
  }
  void drop(void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_.erase(static_cast<char*>(memory));
  }
  bool hold(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto behind = ends_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    return behind != ends_.begin() && address < (--behind)->second;
  }

 private:
  std::mutex mutex_;
  std::map<char*, char*> ends_;
};

inline Ranges& device_memory() {
  static auto* instance = new Ranges;  // these outlive what is destroyed at the end of the process
  return *instance;
}

inline Ranges& pinned_memory() {
  static auto* instance = new Ranges;
  return *instance;
}

inline void poison(void* memory, size_t bytes) { std::memset(memory, 0xA5, bytes); }

// Memory of the device; null where the limit is reached.
inline void* take(size_t bytes) {
  if (counters().bytes_in_use.load() + static_cast<int64_t>(bytes) > knobs().bytes_limit.load()) return nullptr;
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (memory == nullptr) return nullptr;
  poison(memory, bytes);
  device_memory().add(memory, bytes);
  const int64_t now = counters().bytes_in_use += static_cast<int64_t>(bytes);
  counters().peak_bytes.store(std::max(now, counters().peak_bytes.load()));
  return memory;
}

inline void give_back(void* memory, size_t bytes) {
  poison(memory, bytes);
  device_memory().drop(memory);
  std::free(memory);
  counters().bytes_in_use -= static_cast<int64_t>(bytes);
}

// Host memory that copies may be queued from and to; null where there is none.
inline void* pin(size_t bytes) {
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (memory != nullptr) pinned_memory().add(memory, bytes);
  return memory;
}

inline void unpin(void* memory) {
  pinned_memory().drop(memory);
  std::free(memory);
}

// Whether a copy queued here would wait on a chip, because an end of it is host memory that the driver does not know.
inline bool is_pageable(const void* end) { return !device_memory().hold(end) && !pinned_memory().hold(end); }

// Blocks that captured work has given back, by size. None goes back to the heap before the process ends.
class GraphBlocks {
 public:
  // Null where memory is short. Few sizes, so that blocks are of use again: powers of two, above 1 MiB multiples of it.
  std::shared_ptr<void> take_block(size_t bytes) {
    size_t size = 512;
    while (size < bytes) size = size < kMebi ? size * 2 : (bytes + kMebi - 1) / kMebi * kMebi;
    void* memory = again(size);
    if (memory == nullptr) {
      memory = take(size);
      if (memory == nullptr) return nullptr;
      counters().graph_bytes += static_cast<int64_t>(size);
    }
    return {memory, [this, size](void* block) {
              std::lock_guard<std::mutex> lock(mutex_);
              free_.emplace(size, block);
            }};
  }

 private:
  static constexpr size_t kMebi = size_t{1} << 20;

  // A free block of `size` bytes or somewhat more, which `size` then says; null where there is none.
  void* again(size_t& size) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = free_.lower_bound(size);
    if (found == free_.end() || found->first > size + size / 2) return nullptr;
    void* block = found->second;
    size = found->first;
    free_.erase(found);
    return block;
  }

  std::mutex mutex_;
  std::multimap<size_t, void*> free_;
};

inline GraphBlocks& graph_blocks() {
  static auto* instance = new GraphBlocks;  // outlives what is destroyed at the end of the process
  return *instance;
}

}  // namespace polyemu
