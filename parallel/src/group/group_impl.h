// A rank's membership in a group: numbers its collectives, keeps them in order and explains what
// broke them.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "group/coordinator.h"

namespace cairn::parallel {

/// Why a group is broken, and the backends to abort then. Outlives the group for callbacks that
/// come late.
class GroupFailure {
 public:
  void set(const std::string& reason);
  bool is_set() const;
  std::string reason() const;  // empty: all is well
  /// The reason, waiting for one for a while.
  std::string wait(std::chrono::milliseconds timeout) const;
  void add(const std::shared_ptr<Collectives>& backend);
  /// What the backends find wrong on their devices; empty: nothing.
  std::string check_devices() const;

 private:
  std::vector<std::shared_ptr<Collectives>> alive() const;  // needs mutex_

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::string reason_;
  std::vector<std::weak_ptr<Collectives>> backends_;
};

class ProcessGroup::Impl : public std::enable_shared_from_this<ProcessGroup::Impl> {
 public:
  Impl(const JobEnvironment& job, const GroupOptions& options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  /// Joins the other ranks; without it, it is a group of one.
  void join(const std::function<std::unique_ptr<Coordinator>(OnFailure, CheckDevices)>& make);

  const JobEnvironment& job() const { return job_; }
  const GroupOptions& options() const { return options_; }

  using Work = std::function<void(Collectives&)>;
  /// Runs a collective in the order of the device's current stream. `what` is its description for
  /// the ledger.
  void run(const char* operation, const std::string& what, Device device, const Work& work);
  /// A collective of host values: all ranks' values.
  std::vector<std::string> exchange(const char* operation, const std::string& what,
                                    const std::string& value, std::chrono::milliseconds timeout);
  void wait();
  void check() const;
  void abort(const std::string& reason);

 private:
  class Queued;
  /// A collective's place in the order.
  struct Ticket {
    const char* operation = "";
    std::string what;
    std::uint64_t sequence = 0;
  };
  Ticket take_ticket(const char* operation, const std::string& what);
  std::vector<std::string> execute(const Ticket& ticket, const std::string& value,
                                   std::chrono::milliseconds timeout, bool wait,
                                   const std::function<void()>& work);
  void wait_for_turn(const Ticket& ticket);
  void pass_turn();
  bool is_new(const std::string& what);
  Collectives& backend(Device device);
  std::string reason_of(const std::string& message);
  [[noreturn]] void explain(const Ticket& ticket, const std::string& message);

  JobEnvironment job_;
  GroupOptions options_;
  std::shared_ptr<GroupFailure> failure_ = std::make_shared<GroupFailure>();
  std::unique_ptr<Coordinator> coordinator_;
  std::mutex mutex_;  // next_, turn_
  std::condition_variable turn_changed_;
  std::uint64_t next_ = 0;
  std::uint64_t turn_ = 0;
  // What follows belongs to the collective whose turn it is.
  std::unordered_set<std::string> known_;
  std::shared_ptr<Collectives> cpu_;
  std::shared_ptr<Collectives> cuda_;
};

}  // namespace cairn::parallel
