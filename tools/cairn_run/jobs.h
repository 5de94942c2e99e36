// The jobs that run on this machine, as their ranks tell of themselves (core::StatusPage). The
// system lets a user read their own processes' pages alone, root all.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cairn/core/status_page.h"

namespace cairn::run {

/// What a thread of a rank is in; "": nothing that it told.
struct ThreadStatus {
  int id = 0;
  std::string part, wait;
  double part_since = 0, wait_since = 0;  // seconds of the steady clock
};

struct RankStatus {
  pid_t pid = -1;
  std::shared_ptr<const core::StatusPage> page;  // null: of another machine
  std::string host;                              // "": this one
  int rank = 0, world_size = 1;
  std::string job, device;   // where the ranks meet; "": alone
  char state = '?';          // the system's letter
  std::uint64_t memory = 0;  // bytes that are in memory
  std::int64_t steps = 0;    // told
  std::int64_t step = 0;     // the last; its end, how long it took, and waited
  double step_at = 0, step_seconds = 0, step_waits = 0;
  std::vector<float> losses;  // of the last steps
  std::uint64_t collectives = 0;
  double waited = 0;
  double temperature = 0;  // degrees Celsius of the device; 0: unknown
  std::vector<ThreadStatus> threads;
};

struct JobStatus {
  std::string name;   // "127.0.0.1:29500", or the process of a rank that is alone
  pid_t parent = -1;  // of the first rank
  std::string parent_name;
  double read_at = 0;             // steady clock
  std::vector<RankStatus> ranks;  // in order; find_jobs(): those of this machine
};

/// Thrown where there is nobody to ask; what() is one line for people.
class NoSuchJob : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// `job`: the process id of one of its ranks or of any process above ranks (cairn-run, mpirun), or
/// the address and port where they meet; "": all of this user. Throws NoSuchJob.
std::vector<JobStatus> find_jobs(const std::string& job);

/// A rank's page to write requests into, held by this process alone until the pointer goes. Null:
/// the rank has ended. Throws NoSuchJob where another process holds it.
std::shared_ptr<core::StatusPage> hold_page(const RankStatus& rank);

/// Of /proc/PID/stat, or of a thread's: "?" where it is gone.
struct ProcessState {
  std::string name;
  char state = '?';
  pid_t parent = -1;
};
ProcessState process_state(const std::string& folder);

/// Names in a folder of /proc; those that were read where its process ends meanwhile.
std::vector<std::string> names_in(const std::string& folder);

/// Text of another process, so that a terminal takes it for nothing but text.
std::string printable(std::string text);

}  // namespace cairn::run
