// A save that a thread of its own finishes. No collectives: ranks meet in the temporary folder,
// where each leaves a note of what it has written, and rank 0 waits for all of them.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/folder_lock.h"
#include "checkpoint/writer.h"

namespace cairn::checkpointing {

class BackgroundSave {
 public:
  /// contents: memory of its own, or nothing where `written` says what this rank has written
  /// already. turn: rank 0's; given back when all is done.
  BackgroundSave(SavePlan plan, std::optional<RankContents> contents, std::string written,
                 std::unique_ptr<SaveTurn> turn);
  /// Waits for the end, which for rank 0 of a job that breaks is at once. An error that nobody has
  /// been told of is logged.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  /// Waits for the end; rethrows what went wrong.
  Committed wait();
  bool done() const { return done_; }
  const SavePlan& plan() const { return plan_; }
  double seconds() const { return seconds_; }  // of the thread; after wait()

 private:
  void run();
  void finish_rank();
  std::vector<std::string> gather() const;
  void tell_failure(const std::string& reason) const;
  std::string note_of(int rank) const;

  SavePlan plan_;
  std::optional<RankContents> contents_;
  std::string written_;
  std::unique_ptr<SaveTurn> turn_;
  Committed committed_;
  double seconds_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> abandoned_{false}, done_{false};
  std::thread thread_;  // last: it uses all the others
};

}  // namespace cairn::checkpointing
