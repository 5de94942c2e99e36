// A rank's last collectives, for people who ask why a job hung. Written where the job breaks and on
// SIGUSR1, as the pickles that torchfrtrace (torch.distributed.flight_recorder) reads, with the
// reason beside them.
//
// The folder is CAIRN_FLIGHT_RECORDER ("off": none), else flight_recorder in the run's folder;
// where there is neither, nothing is written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "control/history.h"
#include "group/coordinator.h"

namespace cairn::parallel {

class FlightRecorder {
 public:
  static constexpr std::size_t kKept = 1000;
  static constexpr std::uint64_t kNotKept = UINT64_MAX;

  explicit FlightRecorder(int job_rank);

  void add(const Members& members, const std::shared_ptr<History>& history);
  /// Returns the record's number; kNotKept where there is no folder for it. `operation` is a
  /// literal.
  std::uint64_t schedule(std::uint64_t group, std::uint64_t sequence, const char* operation,
                         const Description& what);
  void start(std::uint64_t record);
  void complete(std::uint64_t record);  // the host is done with it; a device may not be

  std::string pickled() const;
  /// rank_N and, where there is a reason, verdict.txt. Warns where it cannot.
  void write(const std::string& pickle, const std::string& reason) const noexcept;
  /// Where SIGUSR1 has come since the last call.
  void write_if_asked() noexcept;
  /// From now on SIGUSR1 asks for it, unless the program does something else with that signal.
  static void watch_signal();

 private:
  struct Record {
    std::uint64_t group = 0, sequence = 0;
    const char* operation = "";
    Description what;
    std::int64_t scheduled = 0, started = 0, completed = 0;  // ns since 1970; 0: not yet
  };
  struct Group {
    Members members;
    std::weak_ptr<History> history;
  };
  class Pickler;

  static const char* state_of(const Record& record, const std::optional<Pending>& device);
  Record* find(std::uint64_t record);  // needs mutex_; null: overwritten
  void forget_earlier(const std::filesystem::path& folder) const;

  const int job_rank_;
  const bool named_;  // a folder, by CAIRN_FLIGHT_RECORDER
  const bool off_;
  const std::filesystem::file_time_type begun_ = std::filesystem::file_time_type::clock::now();
  mutable std::mutex mutex_;
  std::vector<Record> records_;  // the n-th at n % kKept
  std::uint64_t noted_ = 0;
  std::vector<Group> groups_;
  std::uint64_t asked_;  // of the signals so far
};

}  // namespace cairn::parallel
