#include "cairn/core/work_observer.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "steady_seconds.h"

namespace cairn::core {

namespace {

std::atomic<int> observing{0};
thread_local std::string_view stream_of_thread;
thread_local WorkSpan* innermost_span = nullptr;  // of those that are observed
thread_local std::uint64_t flow_of_thread = 0;

// Never destroyed: streams may outlive static objects.
struct Observers {
  std::shared_mutex mutex;
  std::vector<WorkObserver*> all;
};
Observers& observers() {
  static auto* const only = new Observers;
  return *only;
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

const char* name(ObservedWork::Kind kind) {
  constexpr const char* kNames[] = {"forward", "backward", "recompute",
                                    "update",  "stream",   "collective"};
  return kNames[static_cast<int>(kind)];
}

WorkSpan::WorkSpan(ObservedWork::Kind kind, std::string_view name, Device device)
    : kind_(kind), name_(name), device_(device) {
  if (!WorkObservation::any()) return;
  outer_ = std::exchange(innermost_span, this);
  began_ = mark_time(device_);
  begin_ = steady_seconds();
}

WorkSpan::~WorkSpan() {
  if (!begin_) return;
  innermost_span = outer_;
  const ObservedWork work{.kind = kind_,
                          .name = std::string(name_),
                          .stream = std::string(stream_of_thread),
                          .thread = std::this_thread::get_id(),
                          .begin = *begin_,
                          .end = steady_seconds(),
                          .began = began_,
                          .ended = mark_time(device_),
                          .flows = std::move(flows_),
                          .sequence = sequence_,
                          .bytes = bytes_,
                          .group = std::string(group_)};
  const std::shared_lock lock(observers().mutex);
  for (WorkObserver* observer : observers().all) observer->ran(work);
}

void WorkSpan::add_flow(std::uint64_t flow) {
  const bool known = std::find(flows_.begin(), flows_.end(), flow) != flows_.end();
  if (observed() && flow != 0 && !known) flows_.push_back(flow);
}

void WorkSpan::set_collective(std::uint64_t sequence, std::int64_t bytes, std::string_view group) {
  sequence_ = sequence, bytes_ = bytes, group_ = group;
}

WorkFlowGuard::WorkFlowGuard() : previous_(flow_of_thread) {
  static std::atomic<std::uint64_t> last = 0;
  flow_of_thread = WorkObservation::any() ? ++last : 0;
  if (innermost_span != nullptr) innermost_span->add_flow(flow_of_thread);
}
WorkFlowGuard::~WorkFlowGuard() {
  flow_of_thread = previous_;
}
std::uint64_t WorkFlowGuard::current() {
  return flow_of_thread;
}

WorkStreamGuard::WorkStreamGuard(std::string_view stream) : previous_(stream_of_thread) {
  stream_of_thread = stream;
}
WorkStreamGuard::~WorkStreamGuard() {
  stream_of_thread = previous_;
}

}  // namespace cairn::core
