// Ranks as threads of this process: a World whose exchange meets at a barrier.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/world.h"

namespace cairn::checkpointing {

class ThreadsWorld {
 public:
  explicit ThreadsWorld(int size) : values_(static_cast<std::size_t>(size)) {}

  World of(int rank) {
    return {rank, static_cast<int>(values_.size()),
            [this, rank](const std::string& value, std::string_view name) {
              return exchange(rank, value, name);
            }};
  }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 private:
  std::vector<std::string> exchange(int rank, const std::string& value, std::string_view name) {
    std::unique_lock lock(mutex_);
    values_[static_cast<std::size_t>(rank)] = value;
    const int round = round_;
    if (++arrived_ == static_cast<int>(values_.size())) {
      arrived_ = 0;
      ++round_;
      result_ = values_;
      changed_.notify_all();
      return result_;
    }
    const bool complete = changed_.wait_for(lock, timeout_, [&] { return round_ != round; });
    if (!complete) core::fail<core::CommunicationError>(name, "a rank did not come");
    return result_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::milliseconds timeout_{10000};
  std::vector<std::string> values_, result_;
  int arrived_ = 0, round_ = 0;
};

}  // namespace cairn::checkpointing
