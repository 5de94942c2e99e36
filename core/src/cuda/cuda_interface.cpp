#include "cuda_interface.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExtCudaRt.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
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

// A function of the driver, whose library is not linked: machines without a GPU lack it. Null where
// there is none.
template <class Function>
Function* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kSinceCuda = 7000;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, kSinceCuda, cudaEnableDefault, &found);
  if (status != cudaSuccess) (void)cudaGetLastError();
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(function) : nullptr;
}

// Whether the process has made the device ready for work, which takes some hundred MB of its
// memory.
bool has_context(int device) {
  static auto* const get_state =
      driver_function<decltype(cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState");
  unsigned flags = 0;
  int active = 0;
  if (get_state == nullptr || get_state(device, &flags, &active) != CUDA_SUCCESS) return true;
  return active != 0;
}

// A GPU has room for a few peers only; where it refuses one more, copies go through the host.
bool enable_access(int device, int peer) {
  const DeviceGuard guard({DeviceType::cuda, device});
  int can = 0;
  cudaError_t status = cudaDeviceCanAccessPeer(&can, device, peer);
  if (status == cudaSuccess && can != 0) status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status != cudaSuccess) (void)cudaGetLastError();
  return can != 0 && (status == cudaSuccess || status == cudaErrorPeerAccessAlreadyEnabled);
}

template <class Function, class... Args>
void call_driver(const char* name, Args... args) {
  auto* const function = driver_function<Function>(name);
  const CUresult status = function == nullptr ? CUDA_ERROR_NOT_FOUND : function(args...);
  if (status != CUDA_SUCCESS) {
    fail<DeviceError>(name, "expected success, got CUDA driver error ", static_cast<int>(status));
  }
}

thread_local bool has_set_device = false;

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

int runtime_version() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

const char* absence_hint() {
  return device_count() == 0 ? " (the CUDA runtime finds no driver or no GPU: see nvidia-smi)"
                             : " (CUDA_VISIBLE_DEVICES chooses which GPUs a process sees)";
}

std::string pci_place(int device) {
  std::array<char, 32> place{};
  check(cudaDeviceGetPCIBusId(place.data(), static_cast<int>(place.size()), device),
        "cudaDeviceGetPCIBusId");
  return place.data();
}

int current_device() {
  int device = -1;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

void set_device(int index) {
  check(cudaSetDevice(index), "cudaSetDevice");
  has_set_device = true;
}

bool device_was_set() {
  return has_set_device;
}

void return_to_device(int index) noexcept {
  if (has_context(index)) log_failure(cudaSetDevice(index), "cudaSetDevice");
}

// Enabling may wait for devices, so no lock is held meanwhile: two threads may do it at once.
bool reaches(int device, int peer) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<int, int>, bool>;
  const std::pair pair(device, peer);
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(pair); found != known.end()) return found->second;
  }
  const bool enabled = enable_access(device, peer);
  const std::lock_guard lock(mutex);
  return known[pair] = enabled;
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
    (void)reaches(dst_device.index, src_device.index);
    check(
        cudaMemcpyPeerAsync(dst, dst_device.index, src, src_device.index, bytes, stream_of(stream)),
        "cudaMemcpyPeerAsync");
    return;
  }
  const bool both = dst_device.is_cuda() && src_device.is_cuda();
  if (!both) refuse_in_capture("copy", "a copy between the host and a GPU");
  check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_of(stream)), "cudaMemcpyAsync");
  if (!both && is_pageable(dst_device.is_cpu() ? dst : src)) synchronize_stream(stream);
}

void fill(void* data, const void* element, std::size_t element_bytes, std::size_t count, int device,
          void* stream) {
  const DeviceGuard guard({DeviceType::cuda, device});
  const auto at = reinterpret_cast<CUdeviceptr>(data);
  const auto where = static_cast<CUstream>(stream);
  std::uint32_t words[2] = {};
  std::memcpy(words, element, element_bytes);
  switch (element_bytes) {
    case 1:
      return call_driver<decltype(cuMemsetD8Async)>("cuMemsetD8Async", at, words[0], count, where);
    case 2:
      return call_driver<decltype(cuMemsetD16Async)>("cuMemsetD16Async", at, words[0], count,
                                                     where);
    case 4:
      return call_driver<decltype(cuMemsetD32Async)>("cuMemsetD32Async", at, words[0], count,
                                                     where);
    default:  // two columns of words, each a fill of its own
      for (std::size_t half = 0; half < 2; ++half) {
        call_driver<decltype(cuMemsetD2D32Async)>("cuMemsetD2D32Async", at + 4 * half,
                                                  std::size_t{8}, words[half], std::size_t{1},
                                                  count, where);
      }
  }
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
  refuse_in_capture("stream", "a question whether a stream is done");
  const cudaError_t status = cudaStreamQuery(stream_of(stream));
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check(status, "cudaStreamQuery");
  return true;
}

bool is_captured(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream_of(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void synchronize_stream(void* stream) {
  refuse_in_capture("stream", "a wait of the host for a stream");
  check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
}

void wait_event(void* stream, void* event) {
  check(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "cudaStreamWaitEvent");
}

void* create_event(int device, bool timed) {
  const DeviceGuard guard({DeviceType::cuda, device});
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
        "cudaEventCreateWithFlags");
  return event;
}

void destroy_event(void* event) noexcept {
  log_failure(cudaEventDestroy(event_of(event)), "cudaEventDestroy");
}

void record_event(void* event, void* stream) {
  check(cudaEventRecord(event_of(event), stream_of(stream)), "cudaEventRecord");
}

bool event_done(void* event) {
  refuse_in_capture("stream", "a question whether an event is done");
  const cudaError_t status = cudaEventQuery(event_of(event));
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

void synchronize_event(void* event) {
  refuse_in_capture("stream", "a wait of the host for an event");
  check(cudaEventSynchronize(event_of(event)), "cudaEventSynchronize");
}

double elapsed_seconds(void* from, void* to) {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, event_of(from), event_of(to)), "cudaEventElapsedTime");
  return 1e-3 * static_cast<double>(milliseconds);
}

void begin_capture(void* stream) {
  check(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal),
        "cudaStreamBeginCapture");
}

void* end_capture(void* stream) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream_of(stream), &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  log_failure(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(status, "cudaGraphInstantiate");
  return executable;
}

// The error that broke it is known.
void drop_capture(void* stream) noexcept {
  cudaGraph_t graph = nullptr;
  (void)cudaStreamEndCapture(stream_of(stream), &graph);
  (void)cudaGetLastError();
  if (graph != nullptr) log_failure(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

void launch_graph(void* graph, void* stream) {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)), "cudaGraphLaunch");
}

void destroy_graph(void* graph) noexcept {
  log_failure(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)), "cudaGraphExecDestroy");
}

}  // namespace cairn::core::cuda
