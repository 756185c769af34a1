#include "driver.h"

#include <dlfcn.h>

#include <mutex>
#include <vector>

namespace polycuda {
namespace {

#define POLYCUDA_TEXT(name) #name
#define POLYCUDA_NAME(name) POLYCUDA_TEXT(name)  // of the version that the header stands for

std::string missing_call(void* library, Driver& found) {
#define POLYCUDA_FIND(name)                                                                            \
  found.name##_ = reinterpret_cast<decltype(&::name)>(dlsym(library, POLYCUDA_NAME(name)));            \
  if (found.name##_ == nullptr) return POLYCUDA_NAME(name);
  POLYCUDA_CALLS(POLYCUDA_FIND)
#undef POLYCUDA_FIND
  return "";
}

Driver look() {
  Driver found;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    found.reason = "no NVIDIA driver is installed (libcuda.so.1 cannot be loaded); install one, or choose another --device";
    return found;
  }
  const std::string missing = missing_call(library, found);
  if (!missing.empty()) {
    found.reason = "the NVIDIA driver has no " + missing + "; update it to one for CUDA 12.4 or newer";
    return found;
  }
  const CUresult code = found.cuInit_(0);
  if (code != CUDA_SUCCESS) {
    found.reason = "the NVIDIA driver does not start (CUDA error " + std::to_string(code) + "); see what nvidia-smi says";
    return found;
  }
  if (found.cuDeviceGetCount_(&found.count) != CUDA_SUCCESS || found.count == 0) {
    found.count = 0;
    found.reason = "the NVIDIA driver sees no device; check CUDA_VISIBLE_DEVICES and nvidia-smi";
  }
  return found;
}

}  // namespace

const Driver& driver() {
  static const Driver found = look();
  return found;
}

CUresult enter(int device) {
  static std::mutex mutex;
  static std::vector<CUcontext> contexts(driver().count, nullptr);
  std::lock_guard<std::mutex> lock(mutex);
  if (device < 0 || device >= driver().count) return CUDA_ERROR_INVALID_DEVICE;
  if (contexts[device] == nullptr) {
    CUdevice handle;
    CUresult code = driver().cuDeviceGet_(&handle, device);
    if (code == CUDA_SUCCESS) code = driver().cuDevicePrimaryCtxRetain_(&contexts[device], handle);
    if (code != CUDA_SUCCESS) return code;
  }
  return driver().cuCtxSetCurrent_(contexts[device]);
}

}  // namespace polycuda
