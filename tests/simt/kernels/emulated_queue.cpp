// The queue of the CUDA backend on the emulator: "device" memory is the CPU's, work runs at once.
#include "simt/kernels/emulated_queue.h"

#include <cstring>

#include "cuda/queue.h"
#include "simt/emulator.h"

namespace cairn::kernels::cuda {

Queue::Queue(const char* op, Device device)
    : op_(op), device_(device), guard_(device), stream_(nullptr) {}
Queue::~Queue() = default;

void Queue::check_launch() const {}  // the emulator throws by itself

bool& emulated_capture() {
  static bool capture = false;
  return capture;
}
bool Queue::capturing() const {
  return emulated_capture();
}

std::shared_ptr<core::Storage> Queue::workspace(std::size_t bytes) const {
  // Not from the caching allocator: a block of exactly this size lets AddressSanitizer see
  // overruns.
  auto memory = std::make_shared<std::vector<std::byte>>(bytes, std::byte{0xff});
  return core::Storage::wrap(memory->data(), bytes, device_, memory);
}

void Queue::copy(void* dst, const void* src, std::size_t bytes) const {
  if (bytes != 0) std::memcpy(dst, src, bytes);
}
void Queue::upload(void* dst, const void* src, std::size_t bytes) const {
  copy(dst, src, bytes);
}
std::size_t Queue::most_shared_bytes() const {
  return simt::shared_limit();
}

}  // namespace cairn::kernels::cuda
