// The CUDA runtime: memory and copies.
#include <algorithm>
#include <cstring>

#include "gpu/sim/runtime.h"

using namespace cairn::gpusim;  // NOLINT: this file is that namespace's outside

namespace cairn::gpusim {
namespace {

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
  if (const int code = refuse_use(*stream)) return answer(code);
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
}  // namespace cairn::gpusim

extern "C" {

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  const Call call("cudaMalloc");
  if (const cudaError_t code = enter(call)) return code;
  if (const int code = refuse_unsafe_call()) return answer(code);
  touch_context(current_device());
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;
  *data = machine().memory.allocate(current_device(), bytes);
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
  if (const int code = refuse_unsafe_call()) return answer(code);
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
  if (const int code = refuse_unsafe_call()) return answer(code);
  touch_context(current_device());
  *data = machine().memory.allocate_pinned(bytes);
  return answer(*data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaFreeHost(void* data) {
  const Call call("cudaFreeHost");
  if (const cudaError_t code = enter(call)) return code;
  if (data == nullptr) return cudaSuccess;
  if (const int code = refuse_unsafe_call()) return answer(code);
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
  if (const int code = refuse_unsafe_call()) return answer(code);
  const cudaError_t code = copy(call, dst, src, bytes, kind, nullptr);
  count_wait(call.name());
  machine().finish(*machine().default_stream(current_device()));
  return code;
}

// Goes through the host where a device has no access to its peer.
cudaError_t cudaMemcpyPeerAsync(void* dst, int dst_device, const void* src, int src_device,
                                std::size_t bytes, cudaStream_t handle) {
  const Call call("cudaMemcpyPeerAsync");
  if (const cudaError_t code = enter(call)) return code;
  Stream* const stream = find_stream_of(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  if (const int code = refuse_use(*stream)) return answer(code);
  if (location_of(dst) != dst_device || location_of(src) != src_device) {
    report("wrong device", "cudaMemcpyPeerAsync from cuda:" + std::to_string(src_device) +
                               " to cuda:" + std::to_string(dst_device) + " was given " +
                               machine().memory.describe(src) + " and " +
                               machine().memory.describe(dst));
  }
  const int other = stream->device == dst_device ? src_device : dst_device;
  const bool direct = machine().memory.reaches(stream->device, other);
  enqueue(*stream, {call.name() + std::string(direct ? "" : " through the host"), [=] {
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
  if (const int code = refuse_use(*stream)) return answer(code);
  if (bytes == 0) return cudaSuccess;
  if (location_of(data) == kPageable || !in_bounds(data, bytes)) {
    return answer(cudaErrorInvalidValue);
  }
  enqueue(*stream, {call.name(), [=] { std::memset(write(data, bytes), value, bytes); }});
  return cudaSuccess;
}

}  // extern "C"
