// Ranks as threads that run one at a time, so that every run of a test is the same: a rank goes on
// until it ends or waits for the others, then the next has its turn.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/world.h"

namespace cairn::checkpointing {

class TurnsWorld {
 public:
  explicit TurnsWorld(int size) : ranks_(static_cast<std::size_t>(size)) {}

  World of(int rank) {
    return {rank, static_cast<int>(ranks_.size()),
            [this, rank](const std::string& value, std::string_view name) {
              return exchange(static_cast<std::size_t>(rank), value, name);
            }};
  }

  /// Calls f(rank) for every rank; f must not throw. A rank that ends while others wait for it
  /// gives them a CommunicationError.
  void run(const std::function<void(int)>& f) {
    for (Rank& rank : ranks_) rank = {};
    turn_ = 0;
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        std::unique_lock lock(mutex_);
        wait_for_turn(rank, lock);
        lock.unlock();
        f(static_cast<int>(rank));
        lock.lock();
        ranks_[rank].ended = true;
        next_turn();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  struct Rank {
    bool waits = false, ended = false;
    std::string value;
  };

  std::vector<std::string> exchange(std::size_t rank, const std::string& value,
                                    std::string_view name) {
    std::unique_lock lock(mutex_);
    ranks_[rank] = {.waits = true, .ended = false, .value = value};
    const int round = round_;
    while (true) {
      if (round_ == round && all(&Rank::waits)) {
        result_.clear();
        for (Rank& other : ranks_) result_.push_back(other.value), other.waits = false;
        ++round_;
      }
      if (round_ != round) return result_;
      for (const Rank& other : ranks_) {
        if (!other.ended) continue;
        ranks_[rank].waits = false;
        core::fail<core::CommunicationError>(name, "a rank has ended");
      }
      next_turn();
      wait_for_turn(rank, lock);
    }
  }
  bool all(bool Rank::*what) const {
    for (const Rank& rank : ranks_) {
      if (!(rank.*what)) return false;
    }
    return true;
  }
  void next_turn() {
    if (all(&Rank::ended)) return;
    do turn_ = (turn_ + 1) % ranks_.size();
    while (ranks_[turn_].ended);
    changed_.notify_all();
  }
  void wait_for_turn(std::size_t rank, std::unique_lock<std::mutex>& lock) {
    changed_.wait(lock, [&] { return turn_ == rank; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Rank> ranks_;
  std::size_t turn_ = 0;
  std::vector<std::string> result_;
  int round_ = 0;
};

}  // namespace cairn::checkpointing
