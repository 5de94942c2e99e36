// How the ranks of a job hear of each other: through a tree of connections for processes, through
// shared memory for threads.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/collectives.h"
#include "control/history.h"
#include "group/job_environment.h"
#include "store/broken.h"
#include "store/store.h"

namespace cairn::parallel {

/// The ranks of a group: all of the job, or those of a part of it.
struct Members {
  std::uint64_t id = 0;    // of the group: 0 is the whole job
  std::vector<int> ranks;  // the job's numbers of them, by their rank in the group
  int place = 0;           // this rank's rank in the group
  std::string name;        // "" or " in the group of ranks 1, 3"

  int size() const { return static_cast<int>(ranks.size()); }
  int job_rank() const { return ranks[static_cast<std::size_t>(place)]; }
  /// Of the group's keys in the store.
  std::string prefix() const { return id == 0 ? "" : "group" + std::to_string(id) + "/"; }
};
Members all_ranks(int rank, int world_size);

class Coordinator {
 public:
  virtual ~Coordinator() = default;
  /// Answers for a group's collectives from now on.
  virtual void add(const std::shared_ptr<History>& history) = 0;
  /// Breaks the job for every rank.
  virtual void break_group(const std::string& reason) = 0;
  /// This rank takes part in nothing more: its histories have left. Returns when others no longer
  /// need this process.
  virtual void leave() noexcept = 0;
  /// Connects a backend for the device's kind of tensors. A collective: every member calls it at
  /// the same place.
  virtual std::unique_ptr<Collectives> connect(Device device, const Members& members) = 0;
  /// Ends a backend together with the other members'.
  virtual void close(const Members& /*members*/, std::shared_ptr<Collectives> backend) noexcept {
    backend->close();
  }
};

/// Called once where the job breaks, from any thread.
using OnFailure = std::function<void(const std::string& reason)>;
/// What is wrong on this rank's devices, asked now and then from one thread; empty: nothing.
using CheckDevices = std::function<std::string()>;

/// Joins the job's other processes. Throws as ProcessGroup::from_environment. A store at work
/// answers within `answer_time`. Rank 0 may have begun to serve.
std::unique_ptr<Coordinator> join_processes(const JobEnvironment& job, const GroupOptions& options,
                                            OnFailure on_failure, CheckDevices check,
                                            Milliseconds answer_time = StoreClient::kAnswerTime,
                                            std::unique_ptr<StoreServer> server = nullptr);

/// What the ranks of an in-process group share.
class InProcessGroup;
std::shared_ptr<InProcessGroup> make_in_process_group(int size);
std::unique_ptr<Coordinator> join_in_process_group(std::shared_ptr<InProcessGroup> group, int rank,
                                                   const GroupOptions& options,
                                                   OnFailure on_failure, CheckDevices check);

}  // namespace cairn::parallel
