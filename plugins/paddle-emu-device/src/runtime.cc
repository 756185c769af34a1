// The runtime that Paddle asks of a custom device: devices, streams, events, memory, copies and graphs, through its C interface.
//
// Paddle calls InitPlugin when the library is loaded and everything else through the table filled there. Device memory is heap
// memory apart, poisoned when it is given out and when it is taken back; work runs on the stream's own thread, never on the
// caller's.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "log.h"
#include "memory.h"
#include "paddle_device/table.h"
#include "queue.h"

namespace paddle_device {
void register_kernels();
}
namespace polyemu {
void fill_collectives(C_DeviceInterface& table);
}

namespace {

using polyemu::counters;
using polyemu::knobs;

thread_local int current_device = 0;

std::mutex streams_mutex;
std::set<polyemu::Stream*> streams;

polyemu::Stream* as_stream(C_Stream stream) { return reinterpret_cast<polyemu::Stream*>(stream); }
polyemu::Event* as_event(C_Event event) { return reinterpret_cast<polyemu::Event*>(event); }
polyemu::Graph* as_graph(void* graph) { return static_cast<polyemu::Graph*>(graph); }

// A copy that the host waits for, in the log.
void note_copy(const char* kind, const void* to, const void* from, size_t bytes) {
  const bool down = !polyemu::device_memory().hold(to), up = !polyemu::device_memory().hold(from);
  const char* way = down ? " to the host" : up ? " from the host" : " on the device";
  polyemu::log().waited(kind + std::to_string(bytes) + " bytes" + way);
}

bool copy_fails() {
  if (knobs().lost.load() != 0) return true;
  if (knobs().copies_until_failure.load() < 0) return false;
  return knobs().copies_until_failure.fetch_sub(1) == 0;
}

struct Runtime : paddle_device::Plain {
  static C_Status initialize() { return C_SUCCESS; }
  static C_Status finalize() { return C_SUCCESS; }
  static C_Status init_device(const C_Device) { return C_SUCCESS; }
  static C_Status deinit_device(const C_Device) { return C_SUCCESS; }

  static C_Status set_device(const C_Device device) {
    current_device = device->id;
    return C_SUCCESS;
  }

  static C_Status get_device(const C_Device device) {
    device->id = current_device;
    return C_SUCCESS;
  }

  // -- streams and events -------------------------------------------------------------------------
  static C_Status create_stream(const C_Device, C_Stream* stream) {
    auto* made = new polyemu::Stream;
    {
      std::lock_guard<std::mutex> lock(streams_mutex);
      streams.insert(made);
    }
    *stream = reinterpret_cast<C_Stream>(made);
    return C_SUCCESS;
  }

  static C_Status destroy_stream(const C_Device, C_Stream stream) {
    {
      std::lock_guard<std::mutex> lock(streams_mutex);
      streams.erase(as_stream(stream));
    }
    delete as_stream(stream);
    return C_SUCCESS;
  }

  static C_Status query_stream(const C_Device, C_Stream stream) { return as_stream(stream)->is_idle() ? C_SUCCESS : C_FAILED; }

  static C_Status stream_add_callback(const C_Device device, C_Stream stream, C_Callback function, void* data) {
    const int id = device->id;
    as_stream(stream)->submit([=] {
      C_Device_st where{id};
      C_Status status = C_SUCCESS;
      function(&where, stream, data, &status);
    });
    return C_SUCCESS;
  }

  static C_Status create_event(const C_Device, C_Event* event) {
    *event = reinterpret_cast<C_Event>(new polyemu::Event);
    return C_SUCCESS;
  }

  static C_Status destroy_event(const C_Device, C_Event event) {
    delete as_event(event);
    return C_SUCCESS;
  }

  static C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
    auto flag = std::make_shared<polyemu::Flag>();
    as_event(event)->move_to(flag);
    as_stream(stream)->submit([flag] { flag->set(); });
    return C_SUCCESS;
  }

  static C_Status query_event(const C_Device, C_Event event) {
    auto flag = as_event(event)->flag();
    return flag == nullptr || flag->is_set() ? C_SUCCESS : C_FAILED;
  }

  static C_Status synchronize_event(const C_Device, C_Event event) {
    polyemu::log().waited("a wait for an event");
    if (auto flag = as_event(event)->flag()) flag->wait();
    return C_SUCCESS;
  }

  static C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event event) {
    if (auto flag = as_event(event)->flag()) as_stream(stream)->submit([flag] { flag->wait(); });
    return C_SUCCESS;
  }

  static C_Status synchronize_stream(const C_Device, C_Stream stream) {
    polyemu::log().waited("a wait for the stream");
    if (as_stream(stream)->capturing()) return C_ERROR;
    as_stream(stream)->synchronize();
    return C_SUCCESS;
  }

  static C_Status synchronize_device(const C_Device) {
    polyemu::log().waited("a wait for the device");
    settle();
    return C_SUCCESS;
  }

  static void settle() {
    std::lock_guard<std::mutex> lock(streams_mutex);
    for (auto* stream : streams) stream->synchronize();
  }

  // -- memory -------------------------------------------------------------------------------------
  static C_Status allocate(const C_Device, void** pointer, size_t size) {
    if (knobs().lost.load() != 0) return C_ERROR;
    *pointer = polyemu::take(size);
    return *pointer == nullptr ? C_FAILED : C_SUCCESS;
  }

  static C_Status release(const C_Device, void* pointer, size_t size) {
    polyemu::give_back(pointer, size);
    return C_SUCCESS;
  }

  static C_Status allocate_host(const C_Device, void** pointer, size_t size) {
    *pointer = polyemu::pin(size);
    return *pointer == nullptr ? C_FAILED : C_SUCCESS;
  }

  static C_Status release_host(const C_Device, void* pointer, size_t) {
    polyemu::unpin(pointer);
    return C_SUCCESS;
  }

  static C_Status memory_set(const C_Device, void* pointer, unsigned char value, size_t size) {
    std::memset(pointer, value, size);
    return C_SUCCESS;
  }

  // What is queued elsewhere must have run before the host sees a synchronous copy, as with a driver's null stream.
  static C_Status copy_now(const C_Device, void* to, const void* from, size_t size) {
    if (copy_fails()) return C_ERROR;
    note_copy("a copy of ", to, from, size);
    settle();
    std::memcpy(to, from, size);
    ++counters().synchronous_copies;
    return C_SUCCESS;
  }

  static C_Status copy_queued(const C_Device, C_Stream stream, void* to, const void* from, size_t size) {
    if (copy_fails()) return C_ERROR;
    ++counters().copies;
    if (polyemu::is_pageable(to) || polyemu::is_pageable(from)) {
      ++counters().pageable_copies;
      note_copy("a copy through pageable memory of ", to, from, size);
    }
    as_stream(stream)->submit([=] { std::memcpy(to, from, size); });
    return C_SUCCESS;
  }

  static C_Status copy_peer(const C_Device device, const C_Device, void* to, const void* from, size_t size) {
    return copy_now(device, to, from, size);
  }

  static C_Status copy_peer_queued(const C_Device device, const C_Device, C_Stream stream, void* to, const void* from,
                                   size_t size) {
    return copy_queued(device, stream, to, from, size);
  }

  // -- what there is ------------------------------------------------------------------------------
  static C_Status device_count(size_t* count) {
    *count = 1;
    return C_SUCCESS;
  }

  static C_Status device_list(size_t* devices) {
    devices[0] = 0;
    return C_SUCCESS;
  }

  static C_Status memory_stats(const C_Device, size_t* total, size_t* free) {
    *total = static_cast<size_t>(knobs().bytes_limit.load());
    *free = *total - static_cast<size_t>(std::min(counters().bytes_in_use.load(), knobs().bytes_limit.load()));
    return C_SUCCESS;
  }

#if PADDLE_DEVICE_GRAPHS
  // -- graphs -------------------------------------------------------------------------------------
  // Paddle asks for the handle when a capture begins. Refusing later leaves Paddle in a capture that nothing ends.
  static C_Status make_blas_handle(const C_Device device, C_BLASHandle* handle, C_Stream stream) {
    if (knobs().no_graphs.load() == 0) return Plain::make_blas_handle(device, handle, stream);
    *handle = nullptr;
    return C_SUCCESS;
  }

  static C_Status begin_capture(const C_Device, C_Stream stream, C_StreamCaptureMode) {
    if (as_stream(stream)->capturing()) return C_ERROR;
    as_stream(stream)->begin_capture();
    return C_SUCCESS;
  }

  static C_Status end_capture(const C_Device, C_Stream stream, C_CudaGraph* graph) {
    *graph = reinterpret_cast<C_CudaGraph>(as_stream(stream)->end_capture().release());
    return *graph == nullptr ? C_ERROR : C_SUCCESS;
  }

  static C_Status capture_info(const C_Device, C_Stream stream, C_StreamCaptureStatus* status, unsigned long long* id,  // NOLINT
                               C_CudaGraph* graph, C_CudaGraphNode* dependencies, void** edges, size_t* count) {
    const bool active = as_stream(stream)->capturing();
    if (status != nullptr) *status = active ? C_StreamCaptureStatusActive : C_StreamCaptureStatusNone;
    if (id != nullptr) *id = active ? reinterpret_cast<unsigned long long>(stream) : 0;  // NOLINT
    if (graph != nullptr) *graph = nullptr;
    if (dependencies != nullptr) *dependencies = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = 0;
    return C_SUCCESS;
  }

  static C_Status graph_nodes(C_CudaGraph graph, C_CudaGraphNode* nodes, size_t* count) {
    if (nodes != nullptr) std::fill(nodes, nodes + *count, nullptr);
    *count = as_graph(graph)->work.size();
    return C_SUCCESS;
  }

  static C_Status instantiate(C_GraphExec* exec, C_CudaGraph* graph, void**, char*, size_t) {
    *exec = reinterpret_cast<C_GraphExec>(new polyemu::Graph(*as_graph(*graph)));
    return C_SUCCESS;
  }

  static C_Status launch_graph(const C_Device, C_GraphExec exec, C_Stream stream) {
    if (knobs().lost.load() != 0) return C_ERROR;
    ++counters().graph_launches;
    for (const auto& work : as_graph(exec)->work) as_stream(stream)->submit(work);
    return C_SUCCESS;
  }

  static C_Status destroy_graph(C_CudaGraph graph) {
    delete as_graph(graph);
    return C_SUCCESS;
  }

  static C_Status destroy_exec(C_GraphExec exec) {
    delete as_graph(exec);
    return C_SUCCESS;
  }
#endif
};

}  // namespace

extern "C" void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  paddle_device::fill<Runtime>(params, PADDLE_DEVICE_TYPE);
  polyemu::fill_collectives(*params->interface);
  paddle_device::register_kernels();
}

// Pinned memory for the Python side of this package.
extern "C" void* polyemu_pinned(size_t bytes) { return polyemu::pin(bytes); }
extern "C" void polyemu_unpinned(void* memory) { polyemu::unpin(memory); }

// The log, for the Python side of this package: a launch of a contract begins on this thread; it ends, and what made the host wait in
// it, one a line; all that was seen so far. Texts live until this thread asks again.
extern "C" void polyemu_begin(const char* contract) { polyemu::log().begin(contract); }
extern "C" const char* polyemu_end() {
  static thread_local std::string waits;
  waits = polyemu::log().end();
  return waits.c_str();
}
extern "C" const char* polyemu_log() {
  static thread_local std::string text;
  text = polyemu::log().text();
  return text.c_str();
}

// What the Python side of this package sets and reads, by name; -1 for a name that there is not.
extern "C" int64_t polyemu_counter(const char* name) {
  const std::string wanted = name;
  if (wanted == "kernels") return counters().kernels;
  if (wanted == "copies") return counters().copies;
  if (wanted == "synchronous_copies") return counters().synchronous_copies;
  if (wanted == "pageable_copies") return counters().pageable_copies;
  if (wanted == "graph_launches") return counters().graph_launches;
  if (wanted == "collectives") return counters().collectives;
  if (wanted == "bytes_in_use") return counters().bytes_in_use;
  if (wanted == "peak_bytes") return counters().peak_bytes;
  if (wanted == "graph_bytes") return counters().graph_bytes;
  return -1;
}

extern "C" int polyemu_set(const char* name, int64_t value) {
  const std::string wanted = name;
  if (wanted == "latency_us") {
    knobs().latency_us = value;
  } else if (wanted == "copies_until_failure") {
    knobs().copies_until_failure = value;
  } else if (wanted == "bytes_limit") {
    knobs().bytes_limit = value;
  } else if (wanted == "lost") {
    knobs().lost = value;
  } else if (wanted == "tf32") {
    knobs().tf32 = value;
  } else if (wanted == "last_maximum") {
    knobs().last_maximum = value;
  } else if (wanted == "no_graphs") {
    knobs().no_graphs = value;
  } else {
    return -1;
  }
  return 0;
}
