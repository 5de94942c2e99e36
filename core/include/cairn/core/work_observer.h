// Work of the whole process: operations, updates, what streams run and what ranks exchange. A run
// that is profiled observes it; where nobody does, a piece of work pays one test of an atomic.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cairn/core/device.h"
#include "cairn/core/device_time.h"

namespace cairn::core {

/// One piece of work. Seconds are std::chrono::steady_clock's, by the host; of work on a GPU those
/// of queueing, and the marks say when the GPU began and ended.
struct ObservedWork {
  enum class Kind : std::uint8_t { forward, backward, recompute, update, stream, collective };
  Kind kind = Kind::stream;
  std::string name;    // of a collective what errors call it: "all_reduce mean f32[16] 'fc.weight'"
  std::string stream;  // in whose thread or for which it ran; empty: outside of created streams
  std::thread::id thread;
  double begin = 0, end = 0;
  TimeMark began, ended;
  std::vector<std::uint64_t> flows;  // that begin in it, pass through it or end in it

  // Of collectives alone.
  std::uint64_t sequence = 0;  // its number among the group's, the same on all ranks
  std::int64_t bytes = 0;      // of the tensor, or of all ranks' parts of it; 0: of host values
  std::string group;           // empty: the whole job; else "in the group of ranks 1, 3"
};
const char* name(ObservedWork::Kind kind);  // "forward"

class WorkObserver {
 public:
  virtual ~WorkObserver() = default;
  /// After a piece of work, or where it threw; in the thread that ran it, in several at once. Must
  /// not throw, nor begin or end observations.
  virtual void ran(const ObservedWork& work) = 0;
};

/// Shows an observer the work of the whole process for as long as this lives. The end waits for
/// calls that are under way.
class [[nodiscard]] WorkObservation {
 public:
  explicit WorkObservation(WorkObserver& observer);
  ~WorkObservation();
  static bool any();  // somebody observes
  WorkObservation(const WorkObservation&) = delete;
  WorkObservation& operator=(const WorkObservation&) = delete;

 private:
  WorkObserver& observer_;
};

/// From here to the end of its life is a piece of work, on the current stream of the device. Names
/// live as long.
class [[nodiscard]] WorkSpan {
 public:
  WorkSpan(ObservedWork::Kind kind, std::string_view name, Device device);
  ~WorkSpan();
  WorkSpan(const WorkSpan&) = delete;
  WorkSpan& operator=(const WorkSpan&) = delete;

  /// What is told of it from here on is read by somebody.
  bool observed() const { return begin_.has_value(); }
  /// 0, or one that it has: nothing.
  void add_flow(std::uint64_t flow);
  void set_collective(std::uint64_t sequence, std::int64_t bytes, std::string_view group);

 private:
  friend class WorkFlowGuard;
  ObservedWork::Kind kind_;
  std::string_view name_, group_;
  Device device_;
  std::optional<double> begin_;  // none: nobody observed when it began
  TimeMark began_;
  std::vector<std::uint64_t> flows_;
  std::uint64_t sequence_ = 0;
  std::int64_t bytes_ = 0;
  WorkSpan* outer_ = nullptr;
};

/// A flow begins in the innermost span of this thread, where somebody observes. While the guard
/// lives, what the thread hands on takes its number along: a collective, a gradient that is
/// reduced.
class [[nodiscard]] WorkFlowGuard {
 public:
  WorkFlowGuard();
  ~WorkFlowGuard();
  static std::uint64_t current();  // another number for each flow of the process; 0: none
  WorkFlowGuard(const WorkFlowGuard&) = delete;
  WorkFlowGuard& operator=(const WorkFlowGuard&) = delete;

 private:
  std::uint64_t previous_;
};

/// Work of this thread belongs to the stream for as long as the guard lives.
class [[nodiscard]] WorkStreamGuard {
 public:
  explicit WorkStreamGuard(std::string_view stream);
  ~WorkStreamGuard();
  WorkStreamGuard(const WorkStreamGuard&) = delete;
  WorkStreamGuard& operator=(const WorkStreamGuard&) = delete;

 private:
  std::string_view previous_;
};

}  // namespace cairn::core
