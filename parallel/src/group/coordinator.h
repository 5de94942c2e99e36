// How the ranks of a group agree: by the store for processes, by shared memory for threads.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/collectives.h"
#include "group/job_environment.h"
#include "store/ledger.h"

namespace cairn::parallel {

class Coordinator {
 public:
  virtual ~Coordinator() = default;
  /// Reports a collective; with `wait`, returns when all ranks have come, with their values. Throws
  /// CommunicationError.
  virtual std::vector<std::string> report(const Ledger::Report& report, bool wait) = 0;
  virtual void break_group(const std::string& reason) = 0;
  /// This rank takes part no more. Returns when others no longer need this process.
  virtual void leave(std::uint64_t collectives) noexcept = 0;
  /// Connects a backend for the device's kind of tensors. A collective: every rank calls it at the
  /// same place.
  virtual std::unique_ptr<Collectives> connect(Device device) = 0;
};

/// Called once where the group breaks, from any thread.
using OnFailure = std::function<void(const std::string& reason)>;
/// What is wrong on this rank's devices, asked now and then from one thread; empty: nothing.
using CheckDevices = std::function<std::string()>;

/// Joins the job's other processes. Throws as ProcessGroup::from_environment.
std::unique_ptr<Coordinator> join_processes(const JobEnvironment& job, const GroupOptions& options,
                                            OnFailure on_failure, CheckDevices check);

/// What the ranks of an in-process group share.
class InProcessGroup;
std::shared_ptr<InProcessGroup> make_in_process_group(int size);
std::unique_ptr<Coordinator> join_in_process_group(std::shared_ptr<InProcessGroup> group, int rank,
                                                   OnFailure on_failure);

}  // namespace cairn::parallel
