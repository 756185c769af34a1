// What a graph that is being captured has to keep alive, and products by a library: asked of whatever drives the device.

#pragma once

#include <atomic>
#include <memory>

#include "operators.h"

namespace polycuda {

// Keep `memory` at least until what is queued now has run; within a capture, until the graph is given back.
void hold(Queue queue, std::shared_ptr<void> memory);

// Memory for a result of the work that is captured on the queue; null where nothing is captured, and Paddle's pool is as good.
//
// Paddle gives custom devices no memory pool of a graph's own, and its pool would hand a graph's temporaries out again while the
// graph is replayed. This memory is handed out to captured work alone: again as soon as it was given back, since a graph runs in
// order, and to every graph of the device, since they are replayed on one stream.
std::shared_ptr<void> graph_memory(Queue queue, size_t bytes);

// Bytes of device memory that captured work was ever given; none of it goes back before the process ends.
int64_t graph_bytes();

// Queue a product, as `product`, by the vendor's library; false where there is none, or it does not take these operands. `out` may
// be of float32 where x and y are of bfloat16.
bool library_product(Queue queue, const View& out, const View& x, const View& y, const View* bias);

// Products that were queued: by the library, and by the device's own kernel.
extern std::atomic<int64_t> library_products, own_products;

}  // namespace polycuda
