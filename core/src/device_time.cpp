#include "cairn/core/device_time.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"
#include "capture.h"
#include "cuda_interface.h"
#include "steady_seconds.h"

namespace cairn::core {

namespace {

constexpr std::size_t kMarks = std::size_t{1} << 14;

/// The last marks of one device, and the last one whose time is known: others count from it.
class Marks {
 public:
  explicit Marks(int device) : device_(device) {}

  /// Its number among the device's.
  std::uint64_t record(void* stream) {
    const std::lock_guard lock(mutex_);
    if (!start_) begin(stream);
    if (marks_.size() < kMarks) marks_.push_back({.event = cuda::create_event(device_, true)});
    const std::uint64_t number = next_++;
    Mark& mark = marks_[number % kMarks];
    mark.number = number;
    mark.reached.reset();
    mark.recorded = steady_seconds();
    cuda::record_event(mark.event, stream);
    return number;
  }

  MarkedTime time_of(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    if (number >= next_) return {};
    Mark& mark = marks_[number % kMarks];
    if (mark.number != number) return {};
    if (!mark.reached) {
      if (!cuda::event_done(mark.event)) return {MarkedTime::State::ahead, 0};
      if (!start_ || !cuda::event_done(start_->event)) return {MarkedTime::State::ahead, 0};
      reach(mark);
    }
    return {MarkedTime::State::reached, *mark.reached};
  }

  void align(void* stream) {
    const std::lock_guard lock(mutex_);
    begin(stream);
  }

 private:
  struct Mark {
    std::uint64_t number = 0;
    void* event = nullptr;
    double recorded = 0;  // by the host
    std::optional<double> reached = {};
  };
  struct Start {
    void* event;
    double seconds;
  };

  /// As if the device were idle; what it does later corrects it.
  void begin(void* stream) {
    if (!start_) start_ = {cuda::create_event(device_, true), 0};
    start_->seconds = steady_seconds();
    cuda::record_event(start_->event, stream);
  }

  /// Its event is not needed any more: it becomes the one that others count from.
  void reach(Mark& mark) {
    const double counted = start_->seconds + cuda::elapsed_seconds(start_->event, mark.event);
    mark.reached = std::max(mark.recorded, std::min(counted, steady_seconds()));
    std::swap(start_->event, mark.event);
    start_->seconds = *mark.reached;
  }

  const int device_;
  std::mutex mutex_;
  std::uint64_t next_ = 0;
  std::vector<Mark> marks_;
  std::optional<Start> start_;
};

constexpr std::uint64_t kDevices = 1024;

/// Never destroyed: the driver may be gone by then.
Marks& marks_of(int device) {
  static std::mutex mutex;
  static auto& all = *new std::map<int, std::unique_ptr<Marks>>;
  const std::lock_guard lock(mutex);
  auto& marks = all[device];
  if (!marks) marks = std::make_unique<Marks>(device);
  return *marks;
}

/// Whoever waits for the device hears of an error.
template <class Work>
void mark_stream(Device device, const Work& work) try {
  if (device.is_cpu()) return;
  const DeviceGuard guard(device);
  const Stream stream = Stream::current(device);
  if (!is_recorded(stream)) work(marks_of(device.index), stream.native());
} catch (const Error&) {
}

}  // namespace

TimeMark mark_time(Device device) {
  TimeMark mark;
  mark_stream(device, [&](Marks& marks, void* stream) {
    const std::uint64_t number = marks.record(stream);
    mark.number = 1 + number * kDevices + static_cast<std::uint64_t>(device.index);
  });
  return mark;
}

MarkedTime time_of(TimeMark mark) {
  if (mark.number == 0) return {};
  try {
    const auto device = static_cast<int>((mark.number - 1) % kDevices);
    const DeviceGuard guard({DeviceType::cuda, device});  // a question of another's makes a context
    return marks_of(device).time_of((mark.number - 1) / kDevices);
  } catch (const Error&) {
    return {};
  }
}

void align_device_time(Device device) {
  mark_stream(device, [](Marks& marks, void* stream) { marks.align(stream); });
}

}  // namespace cairn::core
