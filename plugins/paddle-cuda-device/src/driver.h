// The CUDA driver's calls that the device makes, found when the library is loaded: it needs nothing of CUDA to be linked or loaded.

#pragma once

#include <cuda.h>

#include <string>

namespace polycuda {

#define POLYCUDA_CALLS(CALL) \
  CALL(cuInit) CALL(cuDriverGetVersion) CALL(cuDeviceGetCount) CALL(cuDeviceGet) CALL(cuDeviceGetAttribute) \
  CALL(cuDevicePrimaryCtxRetain) CALL(cuCtxGetCurrent) CALL(cuCtxSetCurrent) CALL(cuCtxSynchronize) CALL(cuStreamCreate) \
  CALL(cuStreamDestroy) CALL(cuStreamQuery) CALL(cuStreamSynchronize) CALL(cuStreamWaitEvent) CALL(cuStreamIsCapturing) \
  CALL(cuStreamBeginCapture) CALL(cuStreamEndCapture) CALL(cuThreadExchangeStreamCaptureMode) CALL(cuLaunchHostFunc) \
  CALL(cuEventCreate) CALL(cuEventDestroy) CALL(cuEventRecord) CALL(cuEventQuery) CALL(cuEventSynchronize) CALL(cuMemAlloc) \
  CALL(cuMemFree) CALL(cuMemAllocHost) CALL(cuMemFreeHost) CALL(cuMemGetInfo) CALL(cuMemsetD8) CALL(cuMemcpy) \
  CALL(cuMemcpyAsync) CALL(cuGraphGetNodes) CALL(cuGraphInstantiate) CALL(cuGraphLaunch) CALL(cuGraphDestroy) \
  CALL(cuGraphExecDestroy) CALL(cuGraphDebugDotPrint)

struct Driver {
#define POLYCUDA_DECLARE(name) decltype(&::name) name##_ = nullptr;
  POLYCUDA_CALLS(POLYCUDA_DECLARE)
#undef POLYCUDA_DECLARE
  int count = 0;
  std::string reason;  // why there is no device; empty where there is one
};

// The driver, looked for once a process.
const Driver& driver();

// Whether work on the stream is being captured, through Paddle.
bool is_captured(void* stream);

// Make the primary context of a device current on this thread; what it answers is what the driver does.
CUresult enter(int device);

// While it lives, this thread may do what is no part of a captured graph although it captures one: allocate, ask how far others
// are, and give back what Python's collector finds just then. The driver takes such calls for mistakes, and drops the capture.
class Relaxed {
 public:
  Relaxed() { driver().cuThreadExchangeStreamCaptureMode_(&mode_); }
  ~Relaxed() { driver().cuThreadExchangeStreamCaptureMode_(&mode_); }

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace polycuda
