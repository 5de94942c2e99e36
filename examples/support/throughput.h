// How fast a run is now: units a second over its last steps.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>

namespace support {

/// The first step, which makes what later ones find ready, counts only until there is another.
class Throughput {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kSteps = 50;

  explicit Throughput(Clock::time_point start = Clock::now()) : marks_{{start, 0}} {}

  void step(std::int64_t units, Clock::time_point end = Clock::now()) {
    marks_.push_back({end, marks_.back().units + units});
    const bool second = !warm_ && marks_.size() > 2;
    if (second || marks_.size() > kSteps + 1) marks_.pop_front();
    warm_ = warm_ || second;
  }

  /// 0 before the first step.
  double per_second() const {
    const auto& [begin, before] = marks_.front();
    const auto& [end, now] = marks_.back();
    const double seconds = std::chrono::duration<double>(end - begin).count();
    return seconds > 0 ? static_cast<double>(now - before) / seconds : 0.0;
  }

 private:
  struct Mark {
    Clock::time_point time;
    std::int64_t units;  // since the start
  };
  std::deque<Mark> marks_;  // ends of steps; the first is where the rate is taken from
  bool warm_ = false;
};

}  // namespace support
