// A CUDA driver without a GPU, for tests: the calls that `driver.h` lists, over the streams of the emulated device, with the
// driver's own rules where they are easy to get wrong. Built as libcuda.so.1.
//
// Streams run on threads of their own. The null stream is one of them: nothing orders it with the others, and it is slow. A copy
// returns when its source may be reused, not when it has happened, unless it ends in host memory. Memory that is not pinned is
// copied aside, or waited for. A thread that captures may not wait for the device; and neither allocate, give back memory or
// executable graphs, nor ask how far others are, except in relaxed mode. A refused call ends the capture, as it does on an H200.

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "queue.h"

namespace {

using polyemu::Event;
using polyemu::Flag;
using polyemu::Graph;
using polyemu::Stream;

constexpr auto kSlow = std::chrono::microseconds(300);
constexpr unsigned char kPoison = 0xA5;
constexpr size_t kMemory = size_t{4} << 30;

struct World {
  std::mutex mutex;
  std::set<Stream*> streams;
  std::map<uintptr_t, size_t> device_memory, pinned_memory;
  Stream null_stream;
};

World& world() {
  static auto* instance = new World;
  return *instance;
}

thread_local CUcontext current = nullptr;
thread_local int captures = 0;
thread_local bool invalidated = false;
thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

bool refused(bool also_relaxed = false) {
  const bool refuses = captures > 0 && (also_relaxed || mode != CU_STREAM_CAPTURE_MODE_RELAXED);
  invalidated = invalidated || refuses;
  return refuses;
}
Stream* stream_of(CUstream stream) {
  return stream == nullptr ? &world().null_stream : reinterpret_cast<Stream*>(stream);
}

bool lies_in(const std::map<uintptr_t, size_t>& memory, CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(world().mutex);
  auto found = memory.upper_bound(address);
  if (found == memory.begin()) return false;
  --found;
  return address < found->first + found->second;
}

CUresult allocate(std::map<uintptr_t, size_t>& memory, void** pointer, size_t size) {
  if (refused()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (size > kMemory) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = std::aligned_alloc(256, (size + 255) / 256 * 256);
  if (*pointer == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memset(*pointer, kPoison, size);
  std::lock_guard<std::mutex> lock(world().mutex);
  memory[reinterpret_cast<uintptr_t>(*pointer)] = size;
  return CUDA_SUCCESS;
}

CUresult release(std::map<uintptr_t, size_t>& memory, void* pointer) {
  if (refused()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  std::lock_guard<std::mutex> lock(world().mutex);
  const auto found = memory.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == memory.end()) return CUDA_ERROR_INVALID_VALUE;
  for (auto* stream : world().streams) stream->synchronize();  // memory is given back when nothing uses it any more
  world().null_stream.synchronize();
  std::memset(pointer, kPoison, found->second);
  std::free(pointer);
  memory.erase(found);
  return CUDA_SUCCESS;
}

CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t size, Stream* stream, bool wait) {
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  auto *target = reinterpret_cast<void*>(to), *source = reinterpret_cast<void*>(from);
  const bool on_device = lies_in(world().device_memory, from), to_device = lies_in(world().device_memory, to);
  const bool pinned_source = lies_in(world().pinned_memory, from), pinned_target = lies_in(world().pinned_memory, to);
  if (!on_device && !pinned_source) {
    if (stream->capturing() && refused(true)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    auto aside = std::make_shared<std::vector<char>>(static_cast<char*>(source), static_cast<char*>(source) + size);
    stream->submit([=] { std::memcpy(target, aside->data(), size); });
  } else {
    stream->submit([=] { std::memcpy(target, source, size); });
    wait = wait || (!to_device && !pinned_target);
  }
  if (wait && !to_device) stream->synchronize();
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned int) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { return *value = 9, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(&world());
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = current, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }

CUresult cuCtxSynchronize() {
  if (refused(true)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  std::set<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    all = world().streams;
  }
  for (auto* stream : all) stream->synchronize();
  world().null_stream.synchronize();
  return CUDA_SUCCESS;
}

// -- streams and events ---------------------------------------------------------------------------
CUresult cuStreamCreate(CUstream* stream, unsigned int) {
  auto* made = new Stream;
  std::lock_guard<std::mutex> lock(world().mutex);
  world().streams.insert(made);
  *stream = reinterpret_cast<CUstream>(made);
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    world().streams.erase(stream_of(stream));
  }
  delete stream_of(stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) {
  if (refused()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return stream_of(stream)->is_idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream stream) {
  if (refused()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  stream_of(stream)->synchronize();
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned int) {
  *event = reinterpret_cast<CUevent>(new Event);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
  delete reinterpret_cast<Event*>(event);
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  auto flag = std::make_shared<Flag>();
  reinterpret_cast<Event*>(event)->move_to(flag);
  stream_of(stream)->submit([flag] { flag->set(); });
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
  if (refused()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  auto flag = reinterpret_cast<Event*>(event)->flag();
  return flag == nullptr || flag->is_set() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
  if (refused()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (auto flag = reinterpret_cast<Event*>(event)->flag()) flag->wait();
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
  if (auto flag = reinterpret_cast<Event*>(event)->flag()) stream_of(stream)->submit([flag] { flag->wait(); });
  return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  stream_of(stream)->submit([=] { function(data); });
  return CUDA_SUCCESS;
}

// -- memory ---------------------------------------------------------------------------------------
CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  return allocate(world().device_memory, reinterpret_cast<void**>(address), size);
}
CUresult cuMemFree(CUdeviceptr address) { return release(world().device_memory, reinterpret_cast<void*>(address)); }
CUresult cuMemAllocHost(void** pointer, size_t size) { return allocate(world().pinned_memory, pointer, size); }
CUresult cuMemFreeHost(void* pointer) { return release(world().pinned_memory, pointer); }
CUresult cuMemGetInfo(size_t* free, size_t* total) { return *free = *total = kMemory, CUDA_SUCCESS; }

CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t size) {
  world().null_stream.submit([=] {
    std::this_thread::sleep_for(kSlow);
    std::memset(reinterpret_cast<void*>(address), value, size);
  });
  return CUDA_SUCCESS;
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
  if (refused()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  world().null_stream.submit([] { std::this_thread::sleep_for(kSlow); });
  return copy(to, from, size, &world().null_stream, true);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  return copy(to, from, size, stream_of(stream), false);
}

// -- graphs ---------------------------------------------------------------------------------------
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode wanted) {
  if (stream_of(stream)->capturing()) return CUDA_ERROR_ILLEGAL_STATE;
  stream_of(stream)->begin_capture();
  ++captures;
  invalidated = false;
  mode = wanted;
  return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  *graph = reinterpret_cast<CUgraph>(stream_of(stream)->end_capture().release());
  --captures;
  if (invalidated && *graph != nullptr) {
    delete reinterpret_cast<Graph*>(*graph);
    *graph = nullptr;
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  return *graph == nullptr ? CUDA_ERROR_ILLEGAL_STATE : CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = !stream_of(stream)->capturing() ? CU_STREAM_CAPTURE_STATUS_NONE
            : invalidated                   ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                            : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* other) {
  std::swap(*other, mode);
  return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  if (nodes != nullptr) std::fill(nodes, nodes + *count, nullptr);
  *count = reinterpret_cast<Graph*>(graph)->work.size();
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec* executable, CUgraph graph, unsigned long long) {  // NOLINT
  *executable = reinterpret_cast<CUgraphExec>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  for (const auto& work : reinterpret_cast<Graph*>(executable)->work) stream_of(stream)->submit(work);
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
  delete reinterpret_cast<Graph*>(graph);
  return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
  if (refused()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  delete reinterpret_cast<Graph*>(executable);
  return CUDA_SUCCESS;
}

CUresult cuGraphDebugDotPrint(CUgraph, const char*, unsigned int) { return CUDA_SUCCESS; }

}  // extern "C"
