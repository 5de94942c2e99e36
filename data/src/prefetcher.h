// Batches made ahead of time by worker threads and handed out in order.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cairn/data/loader.h"

namespace cairn::data::detail {

class Prefetcher {
 public:
  using Make = std::function<Batch(std::int64_t)>;

  /// Will hand out make(0) ... make(count-1), at most `depth` of them made ahead. Without workers,
  /// make runs in next().
  Prefetcher(Make make, std::int64_t count, int workers, int depth);
  /// Stops after the batches in the making.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  bool finished() const { return delivered_ == count_; }  // for the consumer's thread
  /// The next batch, as soon as it is made. Rethrows what its making threw; the call after that
  /// makes the same batch again, in the consumer's thread. Not after the last.
  Batch next();
  /// After a next() that threw: there will be no such batch, the one behind it is next.
  void skip() { deliver({}); }
  /// The next batch if it is made already.
  std::optional<Batch> next_if_ready();

 private:
  struct Slot {
    bool ready = false;          // its maker has ended: with a batch, or with an error
    std::optional<Batch> batch;  // neither: the error has been rethrown
    std::exception_ptr error;
  };

  void work();
  void stop();
  Slot& slot(std::int64_t k) { return slots_[static_cast<std::size_t>(k) % slots_.size()]; }
  Batch deliver(Batch batch);

  Make make_;
  std::int64_t count_;
  std::mutex mutex_;
  std::condition_variable room_, made_;
  std::vector<Slot> slots_;     // batch k lies in slot k mod depth
  std::int64_t claimed_ = 0;    // batches that a worker has taken on
  std::int64_t delivered_ = 0;  // written by the consumer, under the mutex
  bool stopped_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace cairn::data::detail
