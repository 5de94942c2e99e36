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
    Slot result{true, std::nullopt, nullptr};
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

Batch Prefetcher::deliver(Batch batch) {
  {
    const std::lock_guard lock(mutex_);
    if (!workers_.empty()) slot(delivered_) = {};
    ++delivered_;
  }
  room_.notify_all();
  return batch;
}

Batch Prefetcher::next() {
  if (workers_.empty()) return deliver(make_(delivered_));
  std::unique_lock lock(mutex_);
  made_.wait(lock, [&] { return slot(delivered_).ready; });
  Slot& due = slot(delivered_);  // no worker touches a slot that is ready
  lock.unlock();
  if (due.error) std::rethrow_exception(std::exchange(due.error, nullptr));
  return deliver(due.batch ? std::move(*due.batch) : make_(delivered_));
}

std::optional<Batch> Prefetcher::next_if_ready() {
  if (workers_.empty() || finished()) return std::nullopt;
  {
    const std::lock_guard lock(mutex_);
    if (!slot(delivered_).batch) return std::nullopt;
  }
  return next();
}

}  // namespace cairn::data::detail
