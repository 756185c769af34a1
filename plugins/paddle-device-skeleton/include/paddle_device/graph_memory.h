// Memory of captured work as Paddle holds it: it goes back to the blocks of graphs when Paddle lets go of it.

#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "paddle/phi/core/dense_tensor.h"

namespace paddle_device {

// A result of captured work, in memory that captured work alone is given. Who is given it next runs behind this work, so that
// nobody has to keep it for a queue.
class GraphMemory : public phi::Allocation {
 public:
  GraphMemory(std::shared_ptr<void> memory, size_t bytes, const phi::Place& place)
      : phi::Allocation(memory.get(), bytes, place), memory_(std::move(memory)) {}

 private:
  std::shared_ptr<void> memory_;
};

}  // namespace paddle_device
