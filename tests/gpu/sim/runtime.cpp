// The CUDA runtime: devices, errors, launches. What Cairn does not call is not here: use fails to
// link, and docs/gpu.md tells how to add it.
#include "gpu/sim/runtime.h"

#include <cuda.h>
#include <unistd.h>

#include <cstring>
#include <utility>

using namespace cairn::gpusim;  // NOLINT: this file is that namespace's outside

namespace cairn::gpusim {
namespace {

thread_local int device_now = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool context_bound = false;
pid_t context_owner = 0;  // the process that made the first context

bool exists(int device) {
  return device >= 0 && device < machine().gpus;
}

}  // namespace

cudaError_t answer(int code) {
  if (code != cudaSuccess) last_error = static_cast<cudaError_t>(code);
  return static_cast<cudaError_t>(code);
}

// A process that was forked from one with a context has no GPU.
cudaError_t enter(const Call& call) {
  if (machine().gpus == 0) return answer(cudaErrorNoDevice);
  if (context_owner != 0 && context_owner != getpid()) return answer(cudaErrorInitializationError);
  if (call.injected() == cudaErrorIllegalAddress ||
      call.injected() == cudaErrorDeviceUninitialized ||
      call.injected() == cudaErrorLaunchFailure || call.injected() == cudaErrorECCUncorrectable) {
    machine().lost = call.injected();  // sticky: no later call of this process succeeds
  }
  return answer(machine().lost != 0 ? machine().lost : call.injected());
}

void touch_context(int device) {
  context_bound = true;
  if (context_owner == 0) context_owner = getpid();
  machine().counters.contexts.insert(device);
}

Stream* find_stream_of(cudaStream_t handle) {
  return machine().find(handle);
}

int current_device() {
  return device_now;
}

bool has_bound_context() {
  return context_bound;
}

void check_bound_context(const char* contract, const Call& call) {
  if (context_bound) return;
  report(contract, std::string(call.name()) +
                       ": expected a thread with a context (cudaSetDevice gives it one), got one "
                       "that never set a device");
}

// An error of a launch is found by the next cudaGetLastError.
void launch(const Call& call, void* handle, std::function<void()> kernel) {
  if (enter(call) != cudaSuccess) return;
  Stream* const stream = machine().find(handle);
  if (stream == nullptr) return (void)answer(cudaErrorInvalidResourceHandle);
  if (stream->device != device_now) {
    report("wrong device",
           "a kernel is launched on a stream of cuda:" + std::to_string(stream->device) +
               " while cuda:" + std::to_string(device_now) + " is current");
  }
  if (const int code = refuse_use(*stream)) return (void)answer(code);
  touch_context(device_now);
  count_kernel();
  enqueue(*stream, {"kernel", std::move(kernel)});
}

}  // namespace cairn::gpusim

extern "C" {

// ---- Devices ----

cudaError_t cudaGetDeviceCount(int* count) {
  const Call call("cudaGetDeviceCount");
  *count = machine().gpus;
  return enter(call);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  const Call call("cudaRuntimeGetVersion");
  *version = CUDART_VERSION;
  return enter(call);
}

cudaError_t cudaDriverGetVersion(int* version) {
  const Call call("cudaDriverGetVersion");
  *version = machine().gpus > 0 ? CUDART_VERSION : 0;
  return enter(call);
}

cudaError_t cudaGetDevice(int* device) {
  const Call call("cudaGetDevice");
  *device = device_now;
  return enter(call);
}

cudaError_t cudaSetDevice(int device) {
  const Call call("cudaSetDevice");
  if (const cudaError_t code = enter(call)) return code;
  if (!exists(device)) return answer(cudaErrorInvalidDevice);
  device_now = device;
  touch_context(device);  // since CUDA 12
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const Call call("cudaGetDeviceProperties");
  if (const cudaError_t code = enter(call)) return code;
  if (!exists(device)) return answer(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "simulated GPU");
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* place, int size, int device) {
  const Call call("cudaDeviceGetPCIBusId");
  if (const cudaError_t code = enter(call)) return code;
  if (device < 0 || device >= machine().gpus || size < 13) return answer(cudaErrorInvalidValue);
  std::snprintf(place, static_cast<std::size_t>(size), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const Call call("cudaDeviceGetAttribute");
  if (const cudaError_t code = enter(call)) return code;
  if (!exists(device)) return answer(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(machine().shared_limit);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = machine().capability / 10;
      return cudaSuccess;
    default:
      return answer(cudaErrorInvalidValue);
  }
}

cudaError_t cudaDeviceSynchronize() {
  const Call call("cudaDeviceSynchronize");
  if (const cudaError_t code = enter(call)) return code;
  if (const int code = refuse_wait_for_device(device_now)) return answer(code);
  count_wait(call.name());
  machine().finish_device(device_now);
  return answer(static_cast<cudaError_t>(machine().lost));
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  const Call call("cudaDeviceCanAccessPeer");
  if (const cudaError_t code = enter(call)) return code;
  if (!exists(device) || !exists(peer)) return answer(cudaErrorInvalidDevice);
  *can = device != peer && machine().peers;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const Call call("cudaDeviceEnablePeerAccess");
  if (const cudaError_t code = enter(call)) return code;
  if (!exists(peer) || peer == device_now) return answer(cudaErrorInvalidDevice);
  if (!machine().peers) return answer(cudaErrorPeerAccessUnsupported);
  if (machine().memory.reaches(device_now, peer)) {
    return answer(cudaErrorPeerAccessAlreadyEnabled);
  }
  machine().memory.allow_peer(device_now, peer);
  return cudaSuccess;
}

// Functions of the driver are asked for by name.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const Call call("cudaGetDriverEntryPointByVersion");
  if (const cudaError_t code = enter(call)) return code;
  *function = find_driver_function(symbol);
  *found = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const Call call("cudaMemGetInfo");
  if (const cudaError_t code = enter(call)) return code;
  *total = machine().memory.capacity();
  *free = *total - machine().memory.used(device_now);
  return cudaSuccess;
}

// ---- Errors ----

cudaError_t cudaGetLastError() {
  const Call call("cudaGetLastError");
  const cudaError_t code = std::exchange(last_error, static_cast<cudaError_t>(machine().lost));
  return code;
}

cudaError_t cudaPeekAtLastError() {
  const Call call("cudaPeekAtLastError");
  return last_error;
}

const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureUnjoined:
      return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation:
      return "cudaErrorStreamCaptureIsolation";
    case cudaErrorCapturedEvent:
      return "cudaErrorCapturedEvent";
    default:
      return "a CUDA error";
  }
}

const char* cudaGetErrorString(cudaError_t code) {
  return cudaGetErrorName(code);
}

}  // extern "C"
