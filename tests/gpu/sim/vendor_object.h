// What the simulated vendor libraries share: their live handles and descriptors, and rules about
// addresses.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "gpu/sim/machine.h"
#include "gpu/sim/scheduler.h"

namespace cairn::gpusim {

/// The live objects of one kind. Used under the machine's lock.
template <class T>
class Objects {
 public:
  explicit Objects(const char* kind) : kind_(kind) {}

  T* make() {
    auto made = std::make_unique<T>();
    T* const object = made.get();
    return live_.emplace(object, std::move(made)).first->second.get();
  }
  /// Reports what was destroyed or never made.
  T& at(const void* object, const Call& call) const {
    const auto found = live_.find(object);
    if (found != live_.end()) return *found->second;
    report("use after destroy", std::string(call.name()) + ": expected a live " + kind_ +
                                    ", got one that was destroyed or never made");
  }
  void destroy(const void* object, const Call& call) {
    at(object, call);
    live_.erase(object);
  }

 private:
  const char* kind_;
  std::map<const void*, std::unique_ptr<T>> live_;
};

/// The largest power of two, up to `most`, that divides the address.
inline std::uint64_t alignment_of(const void* data, std::uint64_t most = 256) {
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(data) | most;
  return bits & (~bits + 1);
}

/// alpha and beta: they are host memory here.
inline double scalar_at(const void* data, bool wide, const char* contract, const Call& call) {
  if (location_of(data) >= 0) {
    report(contract, std::string(call.name()) +
                         ": expected alpha and beta in host memory (the pointer mode), got device "
                         "memory");
  }
  return wide ? *static_cast<const double*>(data) : *static_cast<const float*>(data);
}

/// A handle belongs to the device that was current when it was made; its streams are that device's.
inline void check_devices(const char* contract, const Call& call, int handle, int stream) {
  if (handle == current_device() && handle == stream) return;
  report(contract, std::string(call.name()) + ": expected a handle of the current device " +
                       std::to_string(current_device()) + " and a stream of it, got a handle of " +
                       std::to_string(handle) + " and a stream of " + std::to_string(stream));
}

/// The workspace is device memory of the size that was said, which the work may fill.
inline void check_workspace(const char* contract, const Call& call, const void* data,
                            std::size_t bytes, std::uint64_t alignment) {
  if (alignment_of(data) < alignment) {
    report(contract, std::string(call.name()) + ": expected a workspace aligned to " +
                         std::to_string(alignment) + " bytes, got one aligned to " +
                         std::to_string(alignment_of(data)));
  }
  if (bytes_left(data) >= bytes) return;
  report(contract, std::string(call.name()) + ": expected a workspace of " + std::to_string(bytes) +
                       " bytes as told, got " + std::to_string(bytes_left(data)) +
                       " to the end of its allocation");
}

/// Queues a library's kernel: like Cairn's own it must not compute with what nobody wrote.
inline void enqueue_kernel(const Call& call, Stream& stream, std::function<void()> run,
                           std::optional<double> milliseconds = {}) {
  count_kernel();
  enqueue(stream, {call.name(),
                   [run = std::move(run)] {
                     Machine::get().memory.running().kernel = true;
                     run();
                   },
                   {},
                   milliseconds});
}

}  // namespace cairn::gpusim
