// The CUDA runtime. What Cairn does not call is not here: its use fails to link, and
// docs/gpu.md tells how to add it.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>

#include "gpu/sim/machine.h"
#include "gpu/sim/scheduler.h"

using namespace cairn::gpusim;  // NOLINT: this file is that namespace's outside

namespace cairn::gpusim {
namespace {

thread_local int device_now = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool context_bound = false;

Machine& machine() {
  return Machine::get();
}

// Errors stay until they are asked for; those of a lost device come back at every call.
cudaError_t answer(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

bool exists(int device) {
  return device >= 0 && device < machine().gpus;
}

/// What every call does before its own work: an injected error, or a lost device's.
cudaError_t enter(const Call& call) {
  if (machine().gpus == 0) return answer(cudaErrorNoDevice);
  if (call.injected() == cudaErrorIllegalAddress ||
      call.injected() == cudaErrorDeviceUninitialized ||
      call.injected() == cudaErrorLaunchFailure || call.injected() == cudaErrorECCUncorrectable) {
    machine().lost = call.injected();  // sticky: no later call of this process succeeds
  }
  if (machine().lost != 0) return answer(static_cast<cudaError_t>(machine().lost));
  return answer(static_cast<cudaError_t>(call.injected()));
}

void touch_context(int device) {
  context_bound = true;
  machine().counters.contexts.insert(device);
}

std::set<Event*>& events() {
  static auto& all = *new std::set<Event*>;
  return all;
}
Event* find_event(cudaEvent_t handle) {
  auto* const event = reinterpret_cast<Event*>(handle);
  return events().contains(event) ? event : nullptr;
}
Stream* find_stream_of(cudaStream_t handle) {
  return machine().find(handle);
}

bool capturing() {
  return machine().captures > 0;
}
// A wait of the host has no meaning in a graph, and spoils the capture.
bool breaks_capture(Stream& stream) {
  if (stream.capture == nullptr) return false;
  stream.capture->broken = true;
  return true;
}

const char* kind_name(cudaMemcpyKind kind) {
  static const char* const names[] = {"HostToHost", "HostToDevice", "DeviceToHost",
                                      "DeviceToDevice", "Default"};
  return names[kind];
}

bool matches(cudaMemcpyKind kind, int dst, int src) {
  const bool to_device = dst >= 0, from_device = src >= 0;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    default:
      return true;
  }
}

bool in_bounds(const void* data, std::size_t bytes) {
  return location_of(data) == kPageable || bytes_left(data) >= bytes;
}

std::uint64_t digest(const void* data, std::size_t bytes) {
  std::uint64_t sum = 14695981039346656037u;  // FNV-1a
  const auto* const at = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) sum = (sum ^ at[i]) * 1099511628211u;
  return sum;
}

/// A pageable source is read late: hardware may do so too. It must still be what it was.
Work copy_work(const char* call, void* dst, const void* src, std::size_t bytes) {
  const bool pageable = location_of(src) == kPageable;
  const std::uint64_t before = pageable ? digest(src, bytes) : 0;
  return {call, [=] {
            if (pageable && digest(src, bytes) != before) {
              report("pageable copy",
                     "the host changed or freed the source of a copy that had "
                     "not run: keep it until the stream was waited for, or pin it");
            }
            std::memcpy(write(dst, bytes), read(src, bytes), bytes);
          }};
}

cudaError_t copy(const Call& call, void* dst, const void* src, std::size_t bytes,
                 cudaMemcpyKind kind, cudaStream_t handle) {
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (bytes == 0) return cudaSuccess;
  if (dst == nullptr || src == nullptr) return answer(cudaErrorInvalidValue);
  if (!matches(kind, location_of(dst), location_of(src))) {
    report("copy", std::string("cudaMemcpy") + kind_name(kind) + " from " +
                       machine().memory.describe(src) + " to " + machine().memory.describe(dst));
  }
  if (!in_bounds(dst, bytes) || !in_bounds(src, bytes)) {
    report("copy", std::to_string(bytes) + " bytes reach past an allocation, from " +
                       machine().memory.describe(src) + " to " + machine().memory.describe(dst));
  }
  enqueue(*stream, copy_work(call.name(), dst, src, bytes));
  return cudaSuccess;
}

}  // namespace

int current_device() {
  return device_now;
}

bool has_bound_context() {
  return context_bound;
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

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const Call call("cudaDeviceGetAttribute");
  if (const cudaError_t code = enter(call)) return code;
  if (!exists(device)) return answer(cudaErrorInvalidDevice);
  if (attribute != cudaDevAttrMaxSharedMemoryPerBlockOptin) return answer(cudaErrorInvalidValue);
  *value = static_cast<int>(machine().shared_limit);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  const Call call("cudaDeviceSynchronize");
  if (const cudaError_t code = enter(call)) return code;
  if (capturing()) return answer(cudaErrorStreamCaptureUnsupported);
  count_wait(call.name());
  machine().finish_device(device_now);
  return answer(static_cast<cudaError_t>(machine().lost));
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  const Call call("cudaDeviceCanAccessPeer");
  if (const cudaError_t code = enter(call)) return code;
  if (!exists(device) || !exists(peer)) return answer(cudaErrorInvalidDevice);
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const Call call("cudaDeviceEnablePeerAccess");
  if (const cudaError_t code = enter(call)) return code;
  if (!exists(peer) || peer == device_now) return answer(cudaErrorInvalidDevice);
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
    default:
      return "a CUDA error";
  }
}

const char* cudaGetErrorString(cudaError_t code) {
  return cudaGetErrorName(code);
}

// ---- Memory ----

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  const Call call("cudaMalloc");
  if (const cudaError_t code = enter(call)) return code;
  if (capturing()) return answer(cudaErrorStreamCaptureUnsupported);
  touch_context(device_now);
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;
  *data = machine().memory.allocate(device_now, bytes);
  return answer(*data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

// Waits for all work of the device, as the driver does.
cudaError_t cudaFree(void* data) {
  const Call call("cudaFree");
  if (const cudaError_t code = enter(call)) return code;
  if (data == nullptr) return cudaSuccess;
  if (!machine().memory.is_device(data) || machine().memory.allocation_of(data) == nullptr) {
    report("memory", "cudaFree of " + machine().memory.describe(data));
  }
  if (capturing()) return answer(cudaErrorStreamCaptureUnsupported);
  count_wait(call.name());
  machine().finish_device(location_of(data));
  if (!machine().memory.release(data)) {
    report("memory", "cudaFree of the inside of an allocation, " + machine().memory.describe(data));
  }
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  const Call call("cudaHostAlloc");
  if (const cudaError_t code = enter(call)) return code;
  touch_context(device_now);
  *data = machine().memory.allocate_pinned(bytes);
  return answer(*data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaFreeHost(void* data) {
  const Call call("cudaFreeHost");
  if (const cudaError_t code = enter(call)) return code;
  if (data == nullptr) return cudaSuccess;
  count_wait(call.name());
  for (int device = 0; device < machine().gpus; ++device) machine().finish_device(device);
  if (!machine().memory.release_pinned(data)) {
    report("memory", "cudaFreeHost of " + machine().memory.describe(data));
  }
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const Call call("cudaPointerGetAttributes");
  if (const cudaError_t code = enter(call)) return code;
  const int location = location_of(data);
  *attributes = {};
  attributes->device = std::max(location, 0);
  attributes->type = location == kPageable ? cudaMemoryTypeUnregistered
                     : location == kPinned ? cudaMemoryTypeHost
                                           : cudaMemoryTypeDevice;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const Call call("cudaMemcpyAsync");
  if (const cudaError_t code = enter(call)) return code;
  return copy(call, dst, src, bytes, kind, stream);
}

cudaError_t cudaMemcpy(void* dst, const void* src, std::size_t bytes, cudaMemcpyKind kind) {
  const Call call("cudaMemcpy");
  if (const cudaError_t code = enter(call)) return code;
  const cudaError_t code = copy(call, dst, src, bytes, kind, nullptr);
  count_wait(call.name());
  machine().finish(*machine().default_stream(device_now));
  return code;
}

// Goes through the host where a device has no access to its peer.
cudaError_t cudaMemcpyPeerAsync(void* dst, int dst_device, const void* src, int src_device,
                                std::size_t bytes, cudaStream_t handle) {
  const Call call("cudaMemcpyPeerAsync");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (location_of(dst) != dst_device || location_of(src) != src_device) {
    report("wrong device", "cudaMemcpyPeerAsync from cuda:" + std::to_string(src_device) +
                               " to cuda:" + std::to_string(dst_device) + " was given " +
                               machine().memory.describe(src) + " and " +
                               machine().memory.describe(dst));
  }
  enqueue(*stream, {call.name(), [=] {
                      machine().memory.running().peers = true;
                      std::memcpy(write(dst, bytes), read(src, bytes), bytes);
                    }});
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t handle) {
  const Call call("cudaMemsetAsync");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (bytes == 0) return cudaSuccess;
  if (location_of(data) == kPageable || !in_bounds(data, bytes)) {
    return answer(cudaErrorInvalidValue);
  }
  enqueue(*stream, {call.name(), [=] { std::memset(write(data, bytes), value, bytes); }});
  return cudaSuccess;
}

// ---- Streams ----

// Only streams that do not wait for the default one are simulated: Cairn makes no others.
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const Call call("cudaStreamCreateWithFlags");
  if (const cudaError_t code = enter(call)) return code;
  if (flags != cudaStreamNonBlocking) {
    report("not simulated",
           "a stream that waits for the default stream (expected "
           "cudaStreamNonBlocking)");
  }
  touch_context(device_now);
  *stream = reinterpret_cast<cudaStream_t>(machine().make_stream(device_now));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Call call("cudaStreamDestroy");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr || handle == nullptr) return answer(cudaErrorInvalidResourceHandle);
  stream->destroyed = true;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Call call("cudaStreamSynchronize");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (breaks_capture(*stream)) return answer(cudaErrorStreamCaptureUnsupported);
  count_wait(call.name());
  machine().finish(*stream);
  return answer(static_cast<cudaError_t>(machine().lost));
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Call call("cudaStreamQuery");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (breaks_capture(*stream)) return answer(cudaErrorStreamCaptureUnsupported);
  machine().progress();
  return answer(machine().idle(*stream) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  const Call call("cudaStreamWaitEvent");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  const Event* const event = find_event(event_handle);
  if (stream == nullptr || event == nullptr) return answer(cudaErrorInvalidResourceHandle);
  machine().wait(*stream, *event);
  return cudaSuccess;
}

// ---- Events ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const Call call("cudaEventCreateWithFlags");
  if (const cudaError_t code = enter(call)) return code;
  touch_context(device_now);
  auto* const made = new Event{};
  made->device = device_now;
  made->timed = (flags & cudaEventDisableTiming) == 0;
  events().insert(made);
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Call call("cudaEventDestroy");
  if (const cudaError_t code = enter(call)) return code;
  Event* const event = find_event(handle);
  if (event == nullptr) return answer(cudaErrorInvalidResourceHandle);
  events().erase(event);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  const Call call("cudaEventRecord");
  if (const cudaError_t code = enter(call)) return code;
  Event* const event = find_event(handle);
  Stream* const stream = find_stream_of(stream_handle);
  if (event == nullptr || stream == nullptr || event->device != stream->device) {
    return answer(cudaErrorInvalidResourceHandle);
  }
  machine().record(*event, *stream);
  return cudaSuccess;
}

// Of one stream's work; what it waits for takes no time.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  const Call call("cudaEventElapsedTime");
  if (const cudaError_t code = enter(call)) return code;
  const Event *const start = find_event(from), *const end = find_event(to);
  const bool timed = start != nullptr && end != nullptr && start->timed && end->timed &&
                     start->recorded && end->recorded && start->stream == end->stream;
  if (!timed) return answer(cudaErrorInvalidResourceHandle);
  if (!machine().done(*start) || !machine().done(*end)) return answer(cudaErrorNotReady);
  *milliseconds = static_cast<float>(end->milliseconds - start->milliseconds);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Call call("cudaEventQuery");
  if (const cudaError_t code = enter(call)) return code;
  Event* const event = find_event(handle);
  if (event == nullptr) return answer(cudaErrorInvalidResourceHandle);
  machine().progress();
  return answer(machine().done(*event) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Call call("cudaEventSynchronize");
  if (const cudaError_t code = enter(call)) return code;
  Event* const event = find_event(handle);
  if (event == nullptr) return answer(cudaErrorInvalidResourceHandle);
  count_wait(call.name());
  machine().finish(*event);
  return answer(static_cast<cudaError_t>(machine().lost));
}

// ---- Capture and graphs: what is captured runs in the order in which it was ----

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Call call("cudaStreamIsCapturing");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  *status = stream->capture == nullptr ? cudaStreamCaptureStatusNone
            : stream->capture->broken  ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  const Call call("cudaStreamBeginCapture");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (handle == nullptr) return answer(cudaErrorStreamCaptureUnsupported);  // the default stream
  if (stream->capture != nullptr) return answer(cudaErrorIllegalState);
  stream->capture = new Graph{stream, false, {}};
  ++machine().captures;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const Call call("cudaStreamEndCapture");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  Graph* const captured = stream->capture;
  if (captured == nullptr || captured->origin != stream) return answer(cudaErrorIllegalState);
  machine().end_capture(*captured);
  *graph = captured->broken ? nullptr : reinterpret_cast<cudaGraph_t>(captured);
  return answer(captured->broken ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  const Call call("cudaGraphInstantiate");
  if (const cudaError_t code = enter(call)) return code;
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  const Call call("cudaGraphLaunch");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  for (const Work& work : reinterpret_cast<Graph*>(executable)->work) {
    machine().queue(*stream, work);
  }
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const Call call("cudaGraphExecDestroy");
  delete reinterpret_cast<Graph*>(executable);
  return enter(call);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Call call("cudaGraphDestroy");
  delete reinterpret_cast<Graph*>(graph);
  return enter(call);
}

}  // extern "C"
