#include "cuda_interface.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExtCudaRt.h>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/core/stream.h"

namespace cairn::core::cuda {

namespace {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // reported here: the next call starts clean
  fail<DeviceError>(call, "expected success, got ", cudaGetErrorName(status), ": ",
                    cudaGetErrorString(status));
}

void log_failure(cudaError_t status, const char* call) noexcept {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  // At exit the driver may be gone before the last tensors: there is nothing left to free.
  if (status == cudaErrorCudartUnloading) return;
  try {
    log::error("[{}] {}", call, cudaGetErrorString(status));
  } catch (...) {  // nothing more can be done about a failing clean-up
  }
}

// False where memory is short, which the caller answers; anything else is an error.
bool has_memory(cudaError_t status, const char* call) {
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return false;
  }
  check(status, call);
  return true;
}

// CUDA may touch such memory after the copy's call has returned, when its owner has let it go.
bool is_pageable(const void* host) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, host), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeUnregistered;
}

// Whether the process has made the device ready for work, which takes some hundred MB of its memory.
// Only the driver knows; it is asked without linking its library.
bool has_context(int device) {
  static const auto get_state = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status = cudaGetDriverEntryPointByVersion(
        "cuDevicePrimaryCtxGetState", &function, 7000, cudaEnableDefault, &found);
    if (status != cudaSuccess) (void)cudaGetLastError();
    return found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(function)
               : nullptr;
  }();
  unsigned flags = 0;
  int active = 0;
  if (get_state == nullptr || get_state(device, &flags, &active) != CUDA_SUCCESS) return true;
  return active != 0;
}

cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t event_of(void* event) {
  return static_cast<cudaEvent_t>(event);
}

}  // namespace

int device_count() {
  static const int count = [] {
    int found = 0;
    if (cudaGetDeviceCount(&found) == cudaSuccess) return found;
    (void)cudaGetLastError();  // no driver or no GPU: an answer, not an error
    return 0;
  }();
  return count;
}

const char* absence_hint() {
  return device_count() == 0 ? " (the CUDA runtime finds no driver or no GPU: see nvidia-smi)"
                             : " (CUDA_VISIBLE_DEVICES chooses which GPUs a process sees)";
}

int current_device() {
  int device = -1;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

void set_device(int index) {
  check(cudaSetDevice(index), "cudaSetDevice");
}

void return_to_device(int index) noexcept {
  if (has_context(index)) log_failure(cudaSetDevice(index), "cudaSetDevice");
}

void* allocate(int device, std::size_t bytes) {
  const DeviceGuard guard({DeviceType::cuda, device});
  void* data = nullptr;
  return has_memory(cudaMalloc(&data, bytes), "cudaMalloc") ? data : nullptr;
}

void release(int, void* data) noexcept {
  log_failure(cudaFree(data), "cudaFree");
}

void* allocate_pinned(std::size_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
  return has_memory(status, "cudaHostAlloc") ? data : nullptr;
}

void release_pinned(void* data) noexcept {
  log_failure(cudaFreeHost(data), "cudaFreeHost");
}

void copy(void* dst, Device dst_device, const void* src, Device src_device, std::size_t bytes,
          void* stream) {
  const DeviceGuard guard(dst_device.is_cuda() ? dst_device : src_device);
  if (dst_device.is_cuda() && src_device.is_cuda() && dst_device != src_device) {
    check(
        cudaMemcpyPeerAsync(dst, dst_device.index, src, src_device.index, bytes, stream_of(stream)),
        "cudaMemcpyPeerAsync");
    return;
  }
  check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_of(stream)), "cudaMemcpyAsync");
  const bool both = dst_device.is_cuda() && src_device.is_cuda();
  if (!both && is_pageable(dst_device.is_cpu() ? dst : src)) synchronize_stream(stream);
}

void zero(void* data, std::size_t bytes, int device, void* stream) {
  const DeviceGuard guard({DeviceType::cuda, device});
  check(cudaMemsetAsync(data, 0, bytes, stream_of(stream)), "cudaMemsetAsync");
}

void* create_stream(int device, const char* name) {
  const DeviceGuard guard({DeviceType::cuda, device});
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  nvtxNameCudaStreamA(stream, name);
  return stream;
}

// Its work ends first: the allocator takes an equal handle to mean the same order of work.
void destroy_stream(void* stream) noexcept {
  log_failure(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
  log_failure(cudaStreamDestroy(stream_of(stream)), "cudaStreamDestroy");
}

bool stream_idle(void* stream) {
  const cudaError_t status = cudaStreamQuery(stream_of(stream));
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check(status, "cudaStreamQuery");
  return true;
}

void synchronize_stream(void* stream) {
  check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
}

void wait_event(void* stream, void* event) {
  check(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "cudaStreamWaitEvent");
}

void* create_event(int device) {
  const DeviceGuard guard({DeviceType::cuda, device});
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

void destroy_event(void* event) noexcept {
  log_failure(cudaEventDestroy(event_of(event)), "cudaEventDestroy");
}

void record_event(void* event, void* stream) {
  check(cudaEventRecord(event_of(event), stream_of(stream)), "cudaEventRecord");
}

bool event_done(void* event) {
  const cudaError_t status = cudaEventQuery(event_of(event));
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

void synchronize_event(void* event) {
  check(cudaEventSynchronize(event_of(event)), "cudaEventSynchronize");
}

}  // namespace cairn::core::cuda
