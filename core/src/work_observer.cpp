#include "cairn/core/work_observer.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

namespace cairn::core {

namespace {

std::atomic<int> observing{0};
thread_local std::string_view stream_of_thread;

// Never destroyed: streams may outlive static objects.
struct Observers {
  std::mutex mutex;
  std::vector<WorkObserver*> all;
};
Observers& observers() {
  static auto* const only = new Observers;
  return *only;
}

double steady_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

WorkObservation::WorkObservation(WorkObserver& observer) : observer_(observer) {
  const std::lock_guard lock(observers().mutex);
  observers().all.push_back(&observer);
  ++observing;
}

WorkObservation::~WorkObservation() {
  const std::lock_guard lock(observers().mutex);
  std::erase(observers().all, &observer_);
  --observing;
}

bool WorkObservation::any() {
  return observing.load(std::memory_order_relaxed) > 0;
}

WorkSpan::WorkSpan(ObservedWork::Kind kind, std::string_view name) : kind_(kind), name_(name) {
  if (WorkObservation::any()) begin_ = steady_now();
}

WorkSpan::~WorkSpan() {
  if (!begin_) return;
  const double end = steady_now();
  const ObservedWork work{
      kind_, std::string(name_), std::string(stream_of_thread), std::this_thread::get_id(), *begin_,
      end};
  const std::lock_guard lock(observers().mutex);
  for (WorkObserver* observer : observers().all) observer->ran(work);
}

WorkStreamGuard::WorkStreamGuard(std::string_view stream) : previous_(stream_of_thread) {
  stream_of_thread = stream;
}
WorkStreamGuard::~WorkStreamGuard() {
  stream_of_thread = previous_;
}

}  // namespace cairn::core
