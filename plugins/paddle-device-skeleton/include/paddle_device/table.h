// The table of calls that Paddle wants from a custom device, filled from a class with a static function for each of them.
//
// `Plain` has what a device need not think about: numbers that nothing asks for, handles of libraries that nothing computes with,
// and no parameters of captured kernels to set anew. Paddle has the calls of graphs since 3.3: `PADDLE_DEVICE_GRAPHS` is 0 where
// the installed one has not, and a device is built without.

#pragma once

#include <array>
#include <cstddef>

#include "paddle/phi/backends/device_ext.h"

namespace paddle_device {

// What a runtime without a chip answers; a class of calls derives from it and hides what it knows better.
struct Plain {
  static C_Status one(const C_Device, size_t* value) {
    *value = 1;
    return C_SUCCESS;
  }
  static C_Status compute_capability(const C_Device device, size_t* value) { return one(device, value); }
  static C_Status driver_version(const C_Device device, size_t* value) { return one(device, value); }
  static C_Status multiprocessors(const C_Device device, size_t* value) { return one(device, value); }
  static C_Status threads_per_multiprocessor(const C_Device device, size_t* value) { return one(device, value); }
  static C_Status threads_per_block(const C_Device device, size_t* value) { return one(device, value); }

  static C_Status smallest_chunk(const C_Device, size_t* value) {
    *value = 256;
    return C_SUCCESS;
  }
  static C_Status grid_limit(const C_Device, std::array<unsigned int, 3>* size) {
    *size = {1, 1, 1};
    return C_SUCCESS;
  }
  static C_Status yes(const C_Device, bool* value) {
    *value = true;
    return C_SUCCESS;
  }
  static C_Status no(const C_Device, bool* value) {
    *value = false;
    return C_SUCCESS;
  }

  // -- handles of libraries that Paddle wants before it offers graphs; nothing computes with them ----
  static C_Status make_blas_handle(const C_Device, C_BLASHandle* handle, C_Stream stream) {
    *handle = reinterpret_cast<C_BLASHandle>(stream);
    return C_SUCCESS;
  }
  static C_Status set_math_mode(const C_Device, C_BLASHandle, int) { return C_SUCCESS; }
  static C_Status make_blaslt_handle(const C_Device device, C_BLASLtHandle* handle) {
    *handle = reinterpret_cast<C_BLASLtHandle>(device);
    return C_SUCCESS;
  }
  static C_Status drop_blas_handle(const C_Device, C_BLASHandle) { return C_SUCCESS; }
  static C_Status drop_blaslt_handle(const C_Device, C_BLASLtHandle) { return C_SUCCESS; }

#if PADDLE_DEVICE_GRAPHS
  // -- graphs -------------------------------------------------------------------------------------
  static C_Status parameter_setter(C_CudaGraph, C_GraphHookManager* hooks) {
    hooks->size = 0;
    hooks->hooks = nullptr;
    hooks->user_data = nullptr;
    return C_SUCCESS;
  }
  static C_Status print_graph(C_CudaGraph, const char*, unsigned int) { return C_SUCCESS; }
  static C_Status exchange_mode(C_StreamCaptureMode*) { return C_SUCCESS; }
#endif
};

// Fill what InitPlugin was handed for the device type `type`.
template <typename Runtime>
void fill(CustomRuntimeParams* params, const char* type) {
  params->device_type = const_cast<char*>(type);
  params->sub_device_type = const_cast<char*>("v1");
  C_DeviceInterface& table = *params->interface;
  table.initialize = Runtime::initialize;
  table.finalize = Runtime::finalize;
  table.init_device = Runtime::init_device;
  table.set_device = Runtime::set_device;
  table.get_device = Runtime::get_device;
  table.deinit_device = Runtime::deinit_device;

  table.create_stream = Runtime::create_stream;
  table.destroy_stream = Runtime::destroy_stream;
  table.query_stream = Runtime::query_stream;
  table.stream_add_callback = Runtime::stream_add_callback;
  table.create_event = Runtime::create_event;
  table.record_event = Runtime::record_event;
  table.destroy_event = Runtime::destroy_event;
  table.query_event = Runtime::query_event;
  table.synchronize_device = Runtime::synchronize_device;
  table.synchronize_stream = Runtime::synchronize_stream;
  table.synchronize_event = Runtime::synchronize_event;
  table.stream_wait_event = Runtime::stream_wait_event;

  table.device_memory_allocate = Runtime::allocate;
  table.device_memory_deallocate = Runtime::release;
  table.device_memory_set = Runtime::memory_set;
  table.host_memory_allocate = Runtime::allocate_host;
  table.host_memory_deallocate = Runtime::release_host;
  table.unified_memory_allocate = Runtime::allocate_host;
  table.unified_memory_deallocate = Runtime::release_host;
  table.memory_copy_h2d = Runtime::copy_now;
  table.memory_copy_d2h = Runtime::copy_now;
  table.memory_copy_d2d = Runtime::copy_now;
  table.memory_copy_p2p = Runtime::copy_peer;
  table.async_memory_copy_h2d = Runtime::copy_queued;
  table.async_memory_copy_d2h = Runtime::copy_queued;
  table.async_memory_copy_d2d = Runtime::copy_queued;
  table.async_memory_copy_p2p = Runtime::copy_peer_queued;

  table.get_device_count = Runtime::device_count;
  table.get_device_list = Runtime::device_list;
  table.device_memory_stats = Runtime::memory_stats;
  table.device_min_chunk_size = Runtime::smallest_chunk;
  table.get_compute_capability = Runtime::compute_capability;
  table.get_runtime_version = Runtime::one;
  table.get_driver_version = Runtime::driver_version;
  table.get_multi_process = Runtime::multiprocessors;
  table.get_max_threads_per_mp = Runtime::threads_per_multiprocessor;
  table.get_max_threads_per_block = Runtime::threads_per_block;
  table.get_max_grid_dim_size = Runtime::grid_limit;
  table.is_float16_supported = Runtime::no;
  table.is_bfloat16_supported = Runtime::yes;

  table.init_blas_handle = Runtime::make_blas_handle;
  table.blas_set_math_mode = Runtime::set_math_mode;
  table.init_blaslt_handle = Runtime::make_blaslt_handle;
  table.destroy_blas_handle = Runtime::drop_blas_handle;
  table.destroy_blaslt_handle = Runtime::drop_blaslt_handle;
#if PADDLE_DEVICE_GRAPHS
  table.cuda_stream_begin_capture = Runtime::begin_capture;
  table.cuda_stream_end_captrue = Runtime::end_capture;
  table.cuda_stream_capture_info = Runtime::capture_info;
  table.cuda_graph_get_nodes = Runtime::graph_nodes;
  table.cuda_graph_instantiate = Runtime::instantiate;
  table.cuda_graph_launch = Runtime::launch_graph;
  table.cuda_graph_destroy = Runtime::destroy_graph;
  table.cuda_graph_exec_destroy = Runtime::destroy_exec;
  table.get_parameter_setter_for_exec_graph = Runtime::parameter_setter;
  table.cuda_graph_debug_dot_print = Runtime::print_graph;
  table.cuda_thread_exchange_stream_capthure_mode = Runtime::exchange_mode;
#endif
}

}  // namespace paddle_device
