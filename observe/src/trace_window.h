// The steps of a run that are profiled: what they do goes through the rings, and at the last one's
// end the ranks join what each has.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "asked_profile.h"
#include "cairn/core/status.h"
#include "cairn/core/work_observer.h"
#include "cairn/observe/run.h"
#include "trace.h"

namespace cairn::observe {

class Writer;

class TraceWindow final : private core::WorkObserver {
 public:
  TraceWindow(Writer& writer, const RunOptions& options);

  // By threads of the training.

  /// Run::profile. Throws InvalidArgument.
  void ask(std::int64_t last_told, ProfiledSteps steps);
  /// This step was told last. A collective where it is the last one that the program profiles.
  void stepped(std::int64_t step) {
    if (const auto request = core::take_profile_request()) take(*request, step);
    if (asked_.load(std::memory_order_acquire)) begin_or_end(step);
  }
  /// Nothing is observed any more: the run ends.
  void close() { observation_.reset(); }

  // By the writer's thread.

  bool open() const { return keeps_.load(std::memory_order_relaxed); }
  /// A message of a ring, where it is of use.
  void keep(std::uint32_t source, std::string_view message);
  /// Whether somebody waits for all that was told: asked ahead of emptying the rings, and handed
  /// to turn() after it.
  bool wanted();
  /// Writes what is joined; at the run's last turn, too, what this rank has of an open window.
  void turn(bool wanted, bool last);

 private:
  enum class State : std::uint8_t { none, asked, open, ending, draining, drained };

  void ran(const core::ObservedWork& work) override;
  /// What another process asks for stands behind what the program does.
  void take(const core::ProfileRequest& request, std::int64_t last_told);
  void end_request();
  void begin_or_end(std::int64_t step);
  void wait_for_device() const;
  void begin();
  void finish();
  TracePart end();
  void join(ProfiledSteps steps, TracePart own);
  TracePart part_so_far();  // needs mutex_
  void write(const std::vector<TracePart>& parts);

  Writer& writer_;
  const World& world_;
  const Device device_;
  std::atomic<bool> asked_ = false;
  std::atomic<bool> keeps_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::none;
  ProfiledSteps steps_;
  double begin_ = 0;
  std::uint64_t dropped_ = 0, left_out_ = 0;  // by the rings so far; where messages_ was full
  std::string messages_;                      // by the writer's thread alone while state_ is open
  std::vector<std::string> joined_;           // parts by rank, to be written
  std::optional<core::ProfileRequest> request_;      // of the steps; none: the program's
  std::optional<AskedProfile::HandedIn> handed_in_;  // to be written
  AskedProfile asked_profile_;                       // by the writer's thread

  std::optional<core::WorkObservation> observation_;  // ends first
};

}  // namespace cairn::observe
