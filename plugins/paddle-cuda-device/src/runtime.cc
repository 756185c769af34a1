// The runtime that Paddle asks of a custom device, over the CUDA driver: memory, streams, events, copies and graphs.
//
// Paddle's handles are the driver's own, so that other libraries of the process can work on Paddle's tensors and streams. Each
// device is used in its primary context, as they use it. A machine without a driver has no device, and can be asked why.

#include <atomic>
#include <map>
#include <mutex>
#include <set>

#include "driver.h"
#include "memory.h"
#include "paddle_device/table.h"

namespace paddle_device {
void register_kernels();
}

namespace {

using polycuda::driver;
using polycuda::enter;

thread_local int current_device = 0;

C_Status status(CUresult code) {
  if (code == CUDA_SUCCESS) return C_SUCCESS;
  return code == CUDA_ERROR_OUT_OF_MEMORY || code == CUDA_ERROR_NOT_READY ? C_FAILED : C_ERROR;
}

CUstream as_stream(C_Stream stream) { return reinterpret_cast<CUstream>(stream); }
CUevent as_event(C_Event event) { return reinterpret_cast<CUevent>(event); }
CUdeviceptr as_address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// -- what captured graphs keep alive --------------------------------------------------------------
using Held = std::set<std::shared_ptr<void>>;

struct Captures {
  std::atomic<int> open{0};  // so that outside a capture a launch costs one load
  std::mutex mutex;
  std::map<CUstream, Held> held;
};

Captures& captures() {
  static auto* instance = new Captures;  // outlives what is destroyed at the end of the process
  return *instance;
}

struct Graph {
  CUgraph graph;
  Held held;
};

struct Executable {
  CUgraphExec executable;
  Held held;
};

std::atomic<int64_t> graph_launches{0}, synchronous_copies{0}, copies{0}, bytes_in_use{0};

struct Runtime : paddle_device::Plain {
  static C_Status initialize() { return C_SUCCESS; }  // a machine without a driver must not end the process
  static C_Status finalize() { return C_SUCCESS; }
  static C_Status init_device(const C_Device device) { return status(enter(device->id)); }
  static C_Status deinit_device(const C_Device) { return C_SUCCESS; }

  static C_Status set_device(const C_Device device) {
    current_device = device->id;
    return status(enter(device->id));
  }

  static C_Status get_device(const C_Device device) {
    device->id = current_device;
    return C_SUCCESS;
  }

  // -- what there is ------------------------------------------------------------------------------
  static C_Status device_count(size_t* count) {
    *count = static_cast<size_t>(driver().count);
    return C_SUCCESS;
  }

  static C_Status device_list(size_t* devices) {
    for (int i = 0; i < driver().count; ++i) devices[i] = static_cast<size_t>(i);
    return C_SUCCESS;
  }

  static C_Status memory_stats(const C_Device device, size_t* total, size_t* free) {
    if (enter(device->id) != CUDA_SUCCESS) return C_ERROR;
    return status(driver().cuMemGetInfo_(free, total));
  }

  static int attribute(const C_Device device, CUdevice_attribute which) {
    CUdevice handle;
    int value = 0;
    if (driver().cuDeviceGet_(&handle, device->id) == CUDA_SUCCESS) driver().cuDeviceGetAttribute_(&value, which, handle);
    return value;
  }
  static C_Status compute_capability(const C_Device device, size_t* value) {
    *value = static_cast<size_t>(10 * attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                                 attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    return C_SUCCESS;
  }
  static C_Status driver_version(const C_Device, size_t* value) {
    int version = 0;
    const CUresult code = driver().cuDriverGetVersion_(&version);
    *value = static_cast<size_t>(version);
    return status(code);
  }
  static C_Status multiprocessors(const C_Device device, size_t* value) {
    *value = static_cast<size_t>(attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
    return C_SUCCESS;
  }
  static C_Status threads_per_multiprocessor(const C_Device device, size_t* value) {
    *value = static_cast<size_t>(attribute(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR));
    return C_SUCCESS;
  }
  static C_Status threads_per_block(const C_Device device, size_t* value) {
    *value = static_cast<size_t>(attribute(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK));
    return C_SUCCESS;
  }

  // -- streams and events -------------------------------------------------------------------------
  static C_Status create_stream(const C_Device device, C_Stream* stream) {
    if (enter(device->id) != CUDA_SUCCESS) return C_ERROR;
    return status(driver().cuStreamCreate_(reinterpret_cast<CUstream*>(stream), CU_STREAM_NON_BLOCKING));
  }

  // Giving back never fails: Paddle does it in destructors, where an error ends the process; and a device that is lost, or a
  // driver that went first, has taken everything already.
  static C_Status destroy_stream(const C_Device, C_Stream stream) {
    driver().cuStreamDestroy_(as_stream(stream));
    return C_SUCCESS;
  }

  static C_Status query_stream(const C_Device, C_Stream stream) {
    polycuda::Relaxed relaxed;
    return status(driver().cuStreamQuery_(as_stream(stream)));
  }

  struct Callback {
    C_Callback function;
    void* data;
    C_Stream stream;
    int device;
  };

  static void CUDA_CB call_back(void* data) {
    std::unique_ptr<Callback> callback(static_cast<Callback*>(data));
    C_Device_st device{callback->device};
    C_Status result = C_SUCCESS;
    callback->function(&device, callback->stream, callback->data, &result);
  }

  // What is called back is deleted by its first call, so that a graph cannot call it again.
  static C_Status stream_add_callback(const C_Device device, C_Stream stream, C_Callback function, void* data) {
    if (is_capturing(stream)) return C_ERROR;
    return status(driver().cuLaunchHostFunc_(as_stream(stream), call_back, new Callback{function, data, stream, device->id}));
  }

  static C_Status create_event(const C_Device device, C_Event* event) {
    if (enter(device->id) != CUDA_SUCCESS) return C_ERROR;
    return status(driver().cuEventCreate_(reinterpret_cast<CUevent*>(event), CU_EVENT_DISABLE_TIMING));
  }

  static C_Status destroy_event(const C_Device, C_Event event) {
    driver().cuEventDestroy_(as_event(event));
    return C_SUCCESS;
  }

  static C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
    return status(driver().cuEventRecord_(as_event(event), as_stream(stream)));
  }

  static C_Status query_event(const C_Device, C_Event event) {
    polycuda::Relaxed relaxed;
    return status(driver().cuEventQuery_(as_event(event)));
  }

  static C_Status synchronize_event(const C_Device, C_Event event) {
    return status(driver().cuEventSynchronize_(as_event(event)));
  }

  static C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event event) {
    return status(driver().cuStreamWaitEvent_(as_stream(stream), as_event(event), 0));
  }

  static C_Status synchronize_stream(const C_Device, C_Stream stream) {
    return status(driver().cuStreamSynchronize_(as_stream(stream)));
  }

  static C_Status synchronize_device(const C_Device device) {
    if (enter(device->id) != CUDA_SUCCESS) return C_ERROR;
    return status(driver().cuCtxSynchronize_());
  }

  // -- memory -------------------------------------------------------------------------------------
  static C_Status allocate(const C_Device device, void** pointer, size_t size) {
    if (enter(device->id) != CUDA_SUCCESS) return C_ERROR;
    polycuda::Relaxed relaxed;
    CUdeviceptr address = 0;
    const CUresult code = driver().cuMemAlloc_(&address, size);
    *pointer = reinterpret_cast<void*>(address);
    if (code == CUDA_SUCCESS) bytes_in_use += static_cast<int64_t>(size);
    return status(code);
  }

  static C_Status release(const C_Device device, void* pointer, size_t size) {
    if (enter(device->id) != CUDA_SUCCESS) return C_SUCCESS;
    polycuda::Relaxed relaxed;
    if (driver().cuMemFree_(as_address(pointer)) == CUDA_SUCCESS) bytes_in_use -= static_cast<int64_t>(size);
    return C_SUCCESS;
  }

  static C_Status allocate_host(const C_Device device, void** pointer, size_t size) {
    if (enter(device->id) != CUDA_SUCCESS) return C_ERROR;
    polycuda::Relaxed relaxed;
    return status(driver().cuMemAllocHost_(pointer, size));
  }

  static C_Status release_host(const C_Device, void* pointer, size_t) {
    polycuda::Relaxed relaxed;
    driver().cuMemFreeHost_(pointer);
    return C_SUCCESS;
  }

  // Streams here do not wait for the null stream, nor it for them. By the driver's rules a copy on it has happened when the call
  // returns only where it ends in host memory: a copy on the device, or from memory that is not pinned, may still be under way.
  static C_Status happened(CUresult code) {
    return code == CUDA_SUCCESS ? status(driver().cuStreamSynchronize_(nullptr)) : status(code);
  }

  static C_Status memory_set(const C_Device device, void* pointer, unsigned char value, size_t size) {
    const C_Status waited = synchronize_device(device);
    return waited == C_SUCCESS ? happened(driver().cuMemsetD8_(as_address(pointer), value, size)) : waited;
  }

  static C_Status copy_now(const C_Device device, void* to, const void* from, size_t size) {
    const C_Status waited = synchronize_device(device);
    ++synchronous_copies;
    return waited == C_SUCCESS ? happened(driver().cuMemcpy_(as_address(to), as_address(from), size)) : waited;
  }

  // The driver tells from the addresses which way it goes; host memory that is not pinned it copies aside before it returns.
  static C_Status copy_queued(const C_Device device, C_Stream stream, void* to, const void* from, size_t size) {
    if (enter(device->id) != CUDA_SUCCESS) return C_ERROR;
    ++copies;
    return status(driver().cuMemcpyAsync_(as_address(to), as_address(from), size, as_stream(stream)));
  }

  static C_Status copy_peer(const C_Device device, const C_Device, void* to, const void* from, size_t size) {
    return copy_now(device, to, from, size);
  }

  static C_Status copy_peer_queued(const C_Device device, const C_Device, C_Stream stream, void* to, const void* from,
                                   size_t size) {
    return copy_queued(device, stream, to, from, size);
  }

  // -- graphs -------------------------------------------------------------------------------------
  static bool is_capturing(C_Stream stream) {
    CUstreamCaptureStatus now = CU_STREAM_CAPTURE_STATUS_NONE;
    driver().cuStreamIsCapturing_(as_stream(stream), &now);
    return now != CU_STREAM_CAPTURE_STATUS_NONE;
  }

#if PADDLE_DEVICE_GRAPHS
  static C_Status begin_capture(const C_Device device, C_Stream stream, C_StreamCaptureMode mode) {
    if (enter(device->id) != CUDA_SUCCESS) return C_ERROR;
    const auto wanted = mode == C_StreamCaptureModeGlobal        ? CU_STREAM_CAPTURE_MODE_GLOBAL
                        : mode == C_StreamCaptureModeThreadLocal ? CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                                                                 : CU_STREAM_CAPTURE_MODE_RELAXED;
    const CUresult code = driver().cuStreamBeginCapture_(as_stream(stream), wanted);
    if (code != CUDA_SUCCESS) return status(code);
    std::lock_guard<std::mutex> lock(captures().mutex);
    captures().held[as_stream(stream)].clear();
    ++captures().open;
    return C_SUCCESS;
  }

  static C_Status end_capture(const C_Device, C_Stream stream, C_CudaGraph* graph) {
    auto made = std::make_unique<Graph>();
    {
      std::lock_guard<std::mutex> lock(captures().mutex);
      const auto found = captures().held.find(as_stream(stream));
      if (found == captures().held.end()) return C_ERROR;
      made->held = std::move(found->second);
      captures().held.erase(found);
      --captures().open;
    }
    const CUresult code = driver().cuStreamEndCapture_(as_stream(stream), &made->graph);
    if (code != CUDA_SUCCESS || made->graph == nullptr) return C_ERROR;
    *graph = reinterpret_cast<C_CudaGraph>(made.release());
    return C_SUCCESS;
  }

  static C_Status capture_info(const C_Device, C_Stream stream, C_StreamCaptureStatus* now, unsigned long long* id,  // NOLINT
                               C_CudaGraph* graph, C_CudaGraphNode* dependencies, void** edges, size_t* count) {
    CUstreamCaptureStatus found = CU_STREAM_CAPTURE_STATUS_NONE;
    const CUresult code = driver().cuStreamIsCapturing_(as_stream(stream), &found);
    if (now != nullptr) {
      *now = found == CU_STREAM_CAPTURE_STATUS_NONE     ? C_StreamCaptureStatusNone
             : found == CU_STREAM_CAPTURE_STATUS_ACTIVE ? C_StreamCaptureStatusActive
                                                        : C_StreamCaptureStatusInvalidated;
    }
    if (id != nullptr) *id = found == CU_STREAM_CAPTURE_STATUS_NONE ? 0 : reinterpret_cast<unsigned long long>(stream);  // NOLINT
    if (graph != nullptr) *graph = nullptr;
    if (dependencies != nullptr) *dependencies = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = 0;
    return status(code);
  }

  static C_Status graph_nodes(C_CudaGraph graph, C_CudaGraphNode* nodes, size_t* count) {
    auto* own = reinterpret_cast<Graph*>(graph);
    return status(driver().cuGraphGetNodes_(own->graph, reinterpret_cast<CUgraphNode*>(nodes), count));
  }

  static C_Status instantiate(C_GraphExec* exec, C_CudaGraph* graph, void**, char*, size_t) {
    auto* from = reinterpret_cast<Graph*>(*graph);
    auto made = std::make_unique<Executable>(Executable{nullptr, from->held});
    const CUresult code = driver().cuGraphInstantiate_(&made->executable, from->graph, 0);
    if (code != CUDA_SUCCESS) return status(code);
    *exec = reinterpret_cast<C_GraphExec>(made.release());
    return C_SUCCESS;
  }

  static C_Status launch_graph(const C_Device device, C_GraphExec exec, C_Stream stream) {
    if (enter(device->id) != CUDA_SUCCESS) return C_ERROR;
    ++graph_launches;
    return status(driver().cuGraphLaunch_(reinterpret_cast<Executable*>(exec)->executable, as_stream(stream)));
  }

  static C_Status destroy_graph(C_CudaGraph graph) {
    std::unique_ptr<Graph> gone(reinterpret_cast<Graph*>(graph));
    driver().cuGraphDestroy_(gone->graph);
    return C_SUCCESS;
  }

  static C_Status destroy_exec(C_GraphExec exec) {
    std::unique_ptr<Executable> gone(reinterpret_cast<Executable*>(exec));
    polycuda::Relaxed relaxed;
    driver().cuGraphExecDestroy_(gone->executable);
    return C_SUCCESS;
  }

  static C_Status print_graph(C_CudaGraph graph, const char* path, unsigned int flags) {
    return status(driver().cuGraphDebugDotPrint_(reinterpret_cast<Graph*>(graph)->graph, path, flags));
  }

  static C_Status exchange_mode(C_StreamCaptureMode* mode) {
    auto native = static_cast<CUstreamCaptureMode>(*mode);  // the same numbers
    const CUresult code = driver().cuThreadExchangeStreamCaptureMode_(&native);
    *mode = static_cast<C_StreamCaptureMode>(native);
    return status(code);
  }
#endif
};

}  // namespace

bool polycuda::is_captured(void* stream) {
  if (captures().open.load() == 0) return false;
  std::lock_guard<std::mutex> lock(captures().mutex);
  return captures().held.count(static_cast<CUstream>(stream)) > 0;
}

void polycuda::hold(Queue queue, std::shared_ptr<void> memory) {
  if (captures().open.load() == 0) return;
  std::lock_guard<std::mutex> lock(captures().mutex);
  const auto found = captures().held.find(static_cast<CUstream>(queue));
  if (found != captures().held.end()) found->second.insert(std::move(memory));
}

extern "C" void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  paddle_device::fill<Runtime>(params, PADDLE_DEVICE_TYPE);
  paddle_device::register_kernels();
}

// -- what the Python side of this package asks ------------------------------------------------------
extern "C" const char* polycuda_reason() { return driver().reason.c_str(); }

extern "C" int64_t polycuda_counter(const char* name) {
  const std::string wanted = name;
  if (wanted == "graph_launches") return graph_launches;
  if (wanted == "copies") return copies;
  if (wanted == "synchronous_copies") return synchronous_copies;
  if (wanted == "bytes_in_use") return bytes_in_use;
  if (wanted == "graph_bytes") return polycuda::graph_bytes();
  if (wanted == "library_products") return polycuda::library_products;
  if (wanted == "own_products") return polycuda::own_products;
  return -1;
}

extern "C" void* polycuda_pinned(int device, size_t size) {
  C_Device_st where{device};
  void* pointer = nullptr;
  return Runtime::allocate_host(&where, &pointer, size) == C_SUCCESS ? pointer : nullptr;
}

extern "C" void polycuda_unpinned(void* pointer) { Runtime::release_host(nullptr, pointer, 0); }
