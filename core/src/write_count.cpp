#include "cairn/core/write_count.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "cairn/core/tensor_view.h"

namespace cairn::core {

struct WriteCount::Guards {
  std::mutex mutex;
  std::vector<std::weak_ptr<WriteGuard>> list;
};

WriteCount::WriteCount() = default;
WriteCount::~WriteCount() {
  delete guards_.load();
}

/// Without the lock: a guard may use other memory, which has guards too.
template <class F>
void WriteCount::for_each_guard(F&& f) {
  Guards* guards = guards_.load(std::memory_order_acquire);
  if (guards == nullptr) return;
  std::vector<std::shared_ptr<WriteGuard>> alive;
  {
    const std::lock_guard lock(guards->mutex);
    for (const auto& guard : guards->list) alive.push_back(guard.lock());
  }
  for (const auto& guard : alive) {
    if (guard) f(*guard);
  }
}

void WriteCount::announce_write() {
  for_each_guard([](WriteGuard& guard) { guard.before_write(); });
  count_write();
}

void WriteCount::give_pointer() {
  has_given_pointer_ = true;
  for_each_guard([](WriteGuard& guard) { guard.pointer_given(); });
}

void WriteCount::add_guard(const std::shared_ptr<WriteGuard>& guard) {
  if (has_given_pointer_) guard->pointer_given();
  Guards* guards = guards_.load(std::memory_order_acquire);
  if (guards == nullptr) {
    auto made = std::make_unique<Guards>();
    if (guards_.compare_exchange_strong(guards, made.get())) guards = made.release();
  }
  const std::lock_guard lock(guards->mutex);
  std::erase_if(guards->list, [](const auto& one) { return one.expired(); });
  guards->list.push_back(guard);
}

void TensorView::bump_version() const {
  if (version != nullptr) version->announce_write();
}

}  // namespace cairn::core
