// Work that is no operation of a thread: what streams run and what ranks exchange. Timelines
// observe it; where nobody does, a piece of work pays one test of an atomic.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace cairn::core {

/// One piece of work. Seconds are std::chrono::steady_clock's; on a GPU's stream those of queueing.
struct ObservedWork {
  enum class Kind { stream, collective };
  Kind kind = Kind::stream;
  std::string name;    // of a collective what errors call it: "all_reduce mean f32[16] 'fc.weight'"
  std::string stream;  // in whose thread or for which it ran; empty: outside of created streams
  std::thread::id thread;
  double begin = 0, end = 0;
};

class WorkObserver {
 public:
  virtual ~WorkObserver() = default;
  /// After a piece of work, or where it threw; in the thread that ran it, one call at a time. Must
  /// not throw, nor begin or end observations.
  virtual void ran(const ObservedWork& work) = 0;
};

/// Shows an observer the work of the whole process for as long as this lives. The end waits for a
/// call that is under way.
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

/// From here to the end of its life is a piece of work. Names live as long.
class [[nodiscard]] WorkSpan {
 public:
  WorkSpan(ObservedWork::Kind kind, std::string_view name);
  ~WorkSpan();
  WorkSpan(const WorkSpan&) = delete;
  WorkSpan& operator=(const WorkSpan&) = delete;

 private:
  ObservedWork::Kind kind_;
  std::string_view name_;
  std::optional<double> begin_;  // none: nobody observed when it began
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
