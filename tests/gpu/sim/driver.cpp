// The functions of the CUDA driver that Cairn asks the runtime for by name.
#include <cuda.h>

#include <cstring>
#include <map>
#include <string_view>

#include "gpu/sim/machine.h"
#include "gpu/sim/scheduler.h"

namespace cairn::gpusim {
namespace {

CUresult primary_context_state(CUdevice device, unsigned* flags, int* active) {
  const Call call("cuDevicePrimaryCtxGetState");
  *flags = 0;
  *active = Machine::get().counters.contexts.contains(device);
  return CUDA_SUCCESS;
}

/// Fills `height` elements, `pitch` bytes apart.
template <class Element>
CUresult fill(const Call& call, CUdeviceptr to, std::size_t pitch, Element value,
              std::size_t height, CUstream handle) {
  if (call.injected() != 0) return static_cast<CUresult>(call.injected());
  if (!has_bound_context()) return CUDA_ERROR_INVALID_CONTEXT;
  if (Machine::get().lost != 0) return CUDA_ERROR_ILLEGAL_ADDRESS;
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (const int code = refuse_use(*stream)) return static_cast<CUresult>(code);
  char* const data = reinterpret_cast<char*>(to);
  if (to % sizeof(Element) != 0 || bytes_left(data) < (height - 1) * pitch + sizeof(Element)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  enqueue(*stream, {call.name(), [=] {
                      for (std::size_t i = 0; i < height; ++i) {
                        std::memcpy(write(data + i * pitch, sizeof(Element)), &value,
                                    sizeof(Element));
                      }
                    }});
  return CUDA_SUCCESS;
}

CUresult fill_8(CUdeviceptr to, unsigned char value, std::size_t count, CUstream stream) {
  return fill(Call("cuMemsetD8Async"), to, 1, value, count, stream);
}
CUresult fill_16(CUdeviceptr to, unsigned short value, std::size_t count, CUstream stream) {
  return fill(Call("cuMemsetD16Async"), to, 2, value, count, stream);
}
CUresult fill_32(CUdeviceptr to, unsigned value, std::size_t count, CUstream stream) {
  return fill(Call("cuMemsetD32Async"), to, 4, value, count, stream);
}
// Of columns of one word: Cairn fills no others.
CUresult fill_32_columns(CUdeviceptr to, std::size_t pitch, unsigned value, std::size_t width,
                         std::size_t height, CUstream stream) {
  if (width != 1 || pitch < 4) return CUDA_ERROR_INVALID_VALUE;
  return fill(Call("cuMemsetD2D32Async"), to, pitch, value, height, stream);
}

}  // namespace

void* find_driver_function(const char* name) {
  static const std::map<std::string_view, void*> functions = {
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&primary_context_state)},
      {"cuMemsetD8Async", reinterpret_cast<void*>(&fill_8)},
      {"cuMemsetD16Async", reinterpret_cast<void*>(&fill_16)},
      {"cuMemsetD32Async", reinterpret_cast<void*>(&fill_32)},
      {"cuMemsetD2D32Async", reinterpret_cast<void*>(&fill_32_columns)}};
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

}  // namespace cairn::gpusim
