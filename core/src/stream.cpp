#include "cairn/core/stream.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/work_observer.h"
#include "cuda_interface.h"
#include "work_queue.h"

namespace cairn::core {

struct Stream::Impl {
  Device device;
  std::string name;                  // empty for the default ones
  std::unique_ptr<WorkQueue> queue;  // CPU streams but the default
  void* cuda = nullptr;              // null also for CUDA's default stream
  bool owns_cuda = false;

  ~Impl() {
    if (owns_cuda) cuda::destroy_stream(cuda);
  }
};

namespace {

using ImplPointer = std::shared_ptr<Stream::Impl>;

// The thread's current streams that are not the default ones; few, so a list.
thread_local std::vector<ImplPointer> current_streams;
// In a worker thread: the stream it belongs to.
thread_local std::weak_ptr<Stream::Impl> own_stream;
// Whose work the thread runs; only compared.
thread_local const Stream::Impl* running_for = nullptr;

class RunningGuard {
 public:
  explicit RunningGuard(const Stream::Impl* stream)
      : previous_(std::exchange(running_for, stream)) {}
  ~RunningGuard() { running_for = previous_; }
  RunningGuard(const RunningGuard&) = delete;
  RunningGuard& operator=(const RunningGuard&) = delete;

 private:
  const Stream::Impl* previous_;
};

void run_observed(const Stream::Impl* stream, const std::string& name,
                  const std::function<void()>& work) {
  if (running_for == stream) return work();  // part of the work that asks
  const RunningGuard running(stream);
  const WorkSpan span(ObservedWork::Kind::stream, name, stream->device);
  work();
}

std::atomic<CurrentStreamSource> current_source = nullptr;

std::vector<Stream> make_default_streams(DeviceType type) {
  std::vector<Stream> streams;
  for (int i = 0; i < device_count(type); ++i) {
    auto impl = std::make_shared<Stream::Impl>();
    impl->device = {type, i};
    streams.emplace_back(std::move(impl));
  }
  return streams;
}

ImplPointer exchange_current(Device device, ImplPointer replacement) {
  for (auto it = current_streams.begin(); it != current_streams.end(); ++it) {
    if ((*it)->device != device) continue;
    ImplPointer previous = std::move(*it);
    if (replacement) {
      *it = std::move(replacement);
    } else {
      current_streams.erase(it);
    }
    return previous;
  }
  if (replacement) current_streams.push_back(std::move(replacement));
  return nullptr;
}

}  // namespace

// A recording is one point in one stream; recording an event again makes a new one, so earlier
// waits keep theirs.
struct Event::Impl {
  Device device;
  void* cuda = nullptr;

  struct Point {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
    std::exception_ptr error;
    std::weak_ptr<Stream::Impl> stream;

    void reach(std::exception_ptr e) {
      {
        const std::lock_guard lock(mutex);
        reached = true;
        error = std::move(e);
      }
      changed.notify_all();
    }
    std::exception_ptr wait() {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return reached; });
      return error;
    }
    bool done() {
      const std::lock_guard lock(mutex);
      return reached;
    }
  };
  std::mutex mutex;
  std::shared_ptr<Point> point;  // CPU; null until recorded
  bool recorded = false;         // CUDA

  ~Impl() {
    if (cuda != nullptr) cuda::destroy_event(cuda);
  }
  std::shared_ptr<Point> current_point() {
    const std::lock_guard lock(mutex);
    return point;
  }
};

namespace {

// Waits in this thread; rethrows the recorded stream's error unless it has been reported already.
void wait_for(Event::Impl::Point& point) {
  if (!point.wait()) return;
  const ImplPointer stream = point.stream.lock();
  const std::exception_ptr error =
      stream && stream->queue ? stream->queue->take_error() : std::exception_ptr{};
  if (error) std::rethrow_exception(error);
}

}  // namespace

Stream Stream::default_stream(Device device) {
  check_exists(device);
  static const auto* cpu = new std::vector<Stream>(make_default_streams(DeviceType::cpu));
  static const auto* cuda = new std::vector<Stream>(make_default_streams(DeviceType::cuda));
  return (device.is_cpu() ? *cpu : *cuda)[static_cast<std::size_t>(device.index)];
}

Stream Stream::current(Device device) {
  for (const ImplPointer& impl : current_streams) {
    if (impl->device == device) return Stream(impl);
  }
  if (ImplPointer own = own_stream.lock(); own && own->device == device) return Stream(own);
  const CurrentStreamSource source = current_source;
  if (source != nullptr && device.is_cuda()) return wrap(device, source(device.index));
  return default_stream(device);
}

Stream Stream::wrap(Device device, void* native) {
  CAIRN_CHECK(device.is_cuda(), "stream", "expected a CUDA device, got ", device);
  if (native == nullptr) return default_stream(device);
  check_exists(device);
  static std::mutex mutex;
  static auto* const wrapped = new std::map<std::pair<int, void*>, Stream>;
  const std::lock_guard lock(mutex);
  const auto found = wrapped->find({device.index, native});
  if (found != wrapped->end()) return found->second;
  auto impl = std::make_shared<Impl>();
  impl->device = device;
  impl->cuda = native;
  return wrapped->try_emplace({device.index, native}, std::move(impl)).first->second;
}

Stream Stream::create(Device device, const char* name) {
  check_exists(device);
  auto impl = std::make_shared<Impl>();
  impl->device = device;
  impl->name = name;
  if (device.is_cuda()) {
    impl->cuda = cuda::create_stream(device.index, name);
    impl->owns_cuda = true;
  } else {
    impl->queue = std::make_unique<WorkQueue>(
        name, [weak = std::weak_ptr<Impl>(impl)] { own_stream = weak; });
  }
  return Stream(std::move(impl));
}

Device Stream::device() const {
  return impl_->device;
}
bool Stream::is_inline() const {
  return impl_->device.is_cpu() && !impl_->queue;
}
bool Stream::idle() const {
  const DeviceGuard guard(impl_->device);  // CUDA's default stream is the current device's
  if (impl_->device.is_cuda()) return cuda::stream_idle(impl_->cuda);
  return !impl_->queue || impl_->queue->idle();
}
void* Stream::native() const {
  return impl_->cuda;
}

void Stream::submit(std::function<void()> work) const {
  if (impl_->queue) {
    refuse_in_capture("stream", "work of another thread of the host");
    impl_->queue->submit([stream = impl_.get(), name = impl_->name, work = std::move(work)] {
      run_observed(stream, name, work);
    });
    return;
  }
  if (is_inline()) return work();
  const DeviceGuard device(impl_->device);
  const StreamGuard stream(*this);
  if (impl_->name.empty()) return work();
  const WorkStreamGuard owner(impl_->name);
  run_observed(impl_.get(), impl_->name, work);
}

void Stream::wait(const Event& event) const {
  Event::Impl& source = *event.impl_;
  if (source.device.is_cuda() && impl_->device.is_cuda()) {
    const DeviceGuard guard(impl_->device);
    if (source.recorded) cuda::wait_event(impl_->cuda, source.cuda);
    return;
  }
  if (source.device.is_cuda()) {  // the CPU waits for CUDA: in the worker, or here
    submit([event] { event.synchronize(); });
    return;
  }
  const std::shared_ptr<Event::Impl::Point> point = source.current_point();
  if (!point) return;
  if (!impl_->queue) return wait_for(*point);
  impl_->queue->submit([point] {
    if (const std::exception_ptr error = point->wait()) std::rethrow_exception(error);
  });
}

void Stream::synchronize() const {
  const DeviceGuard guard(impl_->device);
  if (impl_->device.is_cuda()) return cuda::synchronize_stream(impl_->cuda);
  if (!impl_->queue) return;
  impl_->queue->drain();
  if (const std::exception_ptr error = impl_->queue->take_error()) std::rethrow_exception(error);
}

Event::Event(Device device) : impl_(std::make_shared<Impl>()) {
  check_exists(device);
  impl_->device = device;
  if (device.is_cuda()) impl_->cuda = cuda::create_event(device.index);
}

Device Event::device() const {
  return impl_->device;
}

void Event::record(const Stream& stream) {
  CAIRN_CHECK(stream.device() == impl_->device, "event", "expected a stream of ", impl_->device,
              ", got one of ", stream.device());
  if (impl_->device.is_cuda()) {
    const DeviceGuard guard(impl_->device);
    cuda::record_event(impl_->cuda, stream.native());
    impl_->recorded = true;
    return;
  }
  auto point = std::make_shared<Impl::Point>();
  point->stream = stream.impl_;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->point = point;
  }
  if (!stream.impl_->queue) return point->reach(nullptr);
  stream.impl_->queue->submit_always(
      [point](const std::exception_ptr& error) { point->reach(error); });
}

bool Event::done() const {
  if (impl_->device.is_cuda()) return !impl_->recorded || cuda::event_done(impl_->cuda);
  const std::shared_ptr<Impl::Point> point = impl_->current_point();
  return !point || point->done();
}

void Event::synchronize() const {
  if (impl_->device.is_cuda()) {
    if (impl_->recorded) cuda::synchronize_event(impl_->cuda);
    return;
  }
  if (const std::shared_ptr<Impl::Point> point = impl_->current_point()) wait_for(*point);
}

void follow_current_stream(CurrentStreamSource source) {
  current_source = source;
}

StreamGuard::StreamGuard(const Stream& stream)
    : previous_(exchange_current(stream.device(), stream.impl_)), device_(stream.device()) {}

StreamGuard::~StreamGuard() {
  exchange_current(device_, previous_);
}

DeviceGuard::DeviceGuard(Device device) {
  if (device.is_cpu()) return;
  const int current = cuda::current_device();
  if (current == device.index && cuda::device_was_set()) return;
  cuda::set_device(device.index);
  if (current != device.index) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cuda::return_to_device(previous_);
}

}  // namespace cairn::core
