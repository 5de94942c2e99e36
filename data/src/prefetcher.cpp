#include "prefetcher.h"

#include <algorithm>

namespace cairn::data::detail {

Prefetcher::Prefetcher(Make make, std::int64_t count, int workers, int depth)
    : make_(std::move(make)), count_(count), slots_(static_cast<std::size_t>(std::max(depth, 1))) {
  const auto most = static_cast<int>(std::min<std::int64_t>(workers, count));
  try {
    for (int i = 0; i < most; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {  // the system gives no more threads: end those there are
    stop();
    throw;
  }
}

Prefetcher::~Prefetcher() {
  stop();
}

void Prefetcher::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  room_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Prefetcher::work() {
  const auto depth = static_cast<std::int64_t>(slots_.size());
  std::unique_lock lock(mutex_);
  while (true) {
    room_.wait(lock,
               [&] { return stopped_ || claimed_ == count_ || claimed_ < delivered_ + depth; });
    if (stopped_ || claimed_ == count_) return;
    const std::int64_t k = claimed_++;
    lock.unlock();
    Slot result{true, {}, nullptr};
    try {
      result.batch = make_(k);
    } catch (...) {
      result.error = std::current_exception();
    }
    lock.lock();
    slot(k) = std::move(result);
    made_.notify_one();
  }
}

Batch Prefetcher::take(std::unique_lock<std::mutex>& lock) {
  Slot result = std::exchange(slot(delivered_), {});
  ++delivered_;
  lock.unlock();
  room_.notify_all();
  if (result.error) std::rethrow_exception(result.error);
  return std::move(result.batch);
}

Batch Prefetcher::next() {
  if (workers_.empty()) return make_(delivered_++);
  std::unique_lock lock(mutex_);
  made_.wait(lock, [&] { return slot(delivered_).ready; });
  return take(lock);
}

std::optional<Batch> Prefetcher::next_if_ready() {
  if (workers_.empty() || finished()) return std::nullopt;
  std::unique_lock lock(mutex_);
  const Slot& due = slot(delivered_);
  if (!due.ready || due.error) return std::nullopt;
  return take(lock);
}

}  // namespace cairn::data::detail
