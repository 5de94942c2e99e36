#include "data_parallel/workers.h"

#include <cstdint>
#include <exception>
#include <memory>
#include <typeinfo>

#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/core/memory.h"

namespace cairn::parallel {
namespace {

using core::MemoryCategory;
using core::MemoryCategoryGuard;

/// What the calling thread has, for another one to take over.
class CallersState {
 public:
  explicit CallersState(const std::vector<Device>& devices)
      : thread_(autograd::ThreadState::capture()), category_(MemoryCategoryGuard::current()) {
    streams_.push_back(core::Stream::current(Device{}));
    for (const Device device : devices) streams_.push_back(core::Stream::current(device));
  }

  /// The i-th device's random numbers are others than the first one's, and follow from them.
  void run(Device device, std::size_t i, const std::function<void(std::size_t)>& work) const {
    autograd::ThreadState own = thread_;
    const auto words = core::philox(thread_.seed, /*offset=*/~std::uint64_t{0}, i);
    own.seed = std::uint64_t{words[0]} << 32 | words[1];
    const autograd::ThreadStateGuard thread(own);
    const MemoryCategoryGuard category(category_);
    std::vector<std::unique_ptr<core::StreamGuard>> streams;
    for (const core::Stream& stream : streams_) {
      streams.push_back(std::make_unique<core::StreamGuard>(stream));
    }
    const core::DeviceGuard current(device);
    const core::DefaultDeviceGuard fallback(device);
    work(i);
    while (!streams.empty()) streams.pop_back();  // in reverse
  }

 private:
  autograd::ThreadState thread_;
  MemoryCategory category_;
  std::vector<core::Stream> streams_;
};

template <class E>
void rethrow_if(const std::exception_ptr& error, Device device) {
  try {
    std::rethrow_exception(error);
  } catch (const E& known) {
    if (typeid(known) == typeid(E)) throw E(core::str("[", device, "] ", known.what()));
  } catch (...) {  // another type's turn
  }
}

template <class... Errors>
[[noreturn]] void rethrow_named(const std::exception_ptr& error, Device device) {
  (rethrow_if<Errors>(error, device), ...);
  std::rethrow_exception(error);
}

}  // namespace

void Workers::run(const std::vector<Device>& devices,
                  const std::function<void(std::size_t)>& work) {
  const std::size_t count = devices.size();
  while (threads_.size() + 1 < count) {
    threads_.push_back(core::Stream::create(Device{}, "replica"));
  }
  const CallersState state(devices);
  std::vector<std::exception_ptr> errors(count);
  const auto keeping_error = [&errors](std::size_t i, const auto& f) {
    try {
      f();
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  for (std::size_t i = 1; i < count; ++i) {
    threads_[i - 1].submit([&, i] { keeping_error(i, [&] { state.run(devices[i], i, work); }); });
  }
  keeping_error(0, [&] {
    const core::DeviceGuard current(devices[0]);
    const core::DefaultDeviceGuard fallback(devices[0]);
    work(0);
  });
  for (std::size_t i = 1; i < count; ++i) threads_[i - 1].synchronize();
  for (std::size_t i = 0; i < count; ++i) {
    if (!errors[i]) continue;
    rethrow_named<core::InvalidArgument, core::Unsupported, core::OutOfMemory, core::IoError,
                  core::DataError, core::DeviceError, core::CommunicationError, core::Error>(
        errors[i], devices[i]);
  }
}

}  // namespace cairn::parallel
