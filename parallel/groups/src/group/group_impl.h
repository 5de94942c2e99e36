// A rank's membership in a group: numbers its collectives, keeps them in order and explains what
// broke them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cairn/core/graph.h"
#include "cairn/core/stream.h"
#include "cairn/core/work_observer.h"
#include "group/coordinator.h"
#include "group/flight_recorder.h"

namespace cairn::parallel {

/// Why a group is broken, and the backends to abort then. Outlives the group for callbacks that
/// come late.
class GroupFailure {
 public:
  void set(const std::string& reason);
  bool is_set() const { return set_; }
  std::string reason() const;  // empty: all is well
  /// The reason, waiting for one for a while.
  std::string wait(std::chrono::milliseconds timeout) const;
  void add(const std::shared_ptr<Collectives>& backend);
  /// What is written then.
  void record(std::shared_ptr<const FlightRecorder> recorder) { recorder_ = std::move(recorder); }
  /// What the backends find wrong on their devices; empty: nothing.
  std::string check_devices() const;

 private:
  std::vector<std::shared_ptr<Collectives>> alive() const;  // needs mutex_

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::string reason_;
  std::atomic<bool> set_ = false;
  std::vector<std::weak_ptr<Collectives>> backends_;
  std::shared_ptr<const FlightRecorder> recorder_;  // null: a job of one
};

/// What all groups of a job share on a rank. The job ends, on this rank, with the last of them.
struct JobConnection {
  explicit JobConnection(JobEnvironment e, const GroupOptions& o)
      : environment(std::move(e)), options(o) {}
  ~JobConnection() {
    if (coordinator) coordinator->leave();
  }
  JobConnection(const JobConnection&) = delete;
  JobConnection& operator=(const JobConnection&) = delete;

  JobEnvironment environment;
  GroupOptions options;
  int exceptions = std::uncaught_exceptions();  // on their way where the job began
  std::shared_ptr<GroupFailure> failure = std::make_shared<GroupFailure>();
  std::shared_ptr<FlightRecorder> recorder;  // null: a job of one
  std::unique_ptr<Coordinator> coordinator;
};

class ProcessGroup::Impl : public std::enable_shared_from_this<ProcessGroup::Impl> {
 public:
  using MakeCoordinator = std::function<std::unique_ptr<Coordinator>(OnFailure, CheckDevices)>;
  /// The group of the whole job. Joins the other ranks by `make`; without, it is a group of one.
  Impl(const JobEnvironment& job, const GroupOptions& options, const MakeCoordinator& make = {});
  /// A part of the job, on each of its ranks. A member of one rank needs nobody.
  Impl(std::shared_ptr<JobConnection> job, Members members, int local_rank, int local_world_size);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  std::shared_ptr<Impl> split(int color, int key, const std::string& what);

  int rank() const { return members_.place; }
  int world_size() const { return members_.size(); }
  const std::vector<int>& job_ranks() const { return members_.ranks; }
  int local_rank() const { return local_rank_; }
  int local_world_size() const { return local_world_size_; }
  const GroupOptions& options() const { return job_->options; }
  const std::shared_ptr<JobConnection>& job() const { return job_; }

  using QueuedCalls = std::function<void(Collectives&)>;
  /// Runs a collective in the order of the device's current stream. `what` is its description for
  /// its history. `work` is copied only where a stream keeps it.
  template <class Work>
  void run(const char* operation, Description what, Device device, const Work& work) {
    if (!history_) return;
    if (core::capturing()) return capture(operation, what, device, work);
    const Ticket ticket = take_ticket(operation, std::move(what));
    runs_here(device) ? perform(ticket, device, std::ref(work)) : queue(ticket, device, work);
  }
  /// The same for what only this rank and another take part in: in the order of this rank's
  /// collectives, but without a number of the group.
  struct Pair {
    const char* operation = "";
    bool sends = false;
    int peer = 0;
    TensorView x;
    std::uint64_t tag = 0;
  };
  void run_pair(const Pair& pair, const Description& what);
  /// The same over the CPU's backend in the calling thread, whatever its stream: returns when done.
  void run_now(const char* operation, const Description& what, std::chrono::milliseconds timeout,
               const QueuedCalls& work);
  /// A collective of host values: all ranks' values.
  std::vector<std::string> exchange(const char* operation, const Description& what,
                                    const std::string& value, std::chrono::milliseconds timeout);
  void wait();
  void check() const;
  std::string failure() const { return failure_->reason(); }
  void abort(const std::string& reason);
  /// For the others, where an exception ends this rank's part in the job: "rank 1" and these words.
  void tell_of_exception(const std::string& words);
  void give_up(const std::string& reason);
  /// The stream of the device in which async() works.
  core::Stream stream(Device device);
  /// Turns that somebody waited for and found when looking again, 200 ms later, without being told.
  std::uint64_t unnotified_turns() const { return unnotified_turns_; }

 private:
  class Queued;
  void tell_why_it_ends() noexcept;
  /// A collective's place in the order.
  struct Ticket {
    const char* operation = "";
    Description what;
    std::uint64_t turn = 0;
    std::uint64_t sequence = 0;
    std::optional<Pair> pair;  // has a turn, but no number
    std::uint64_t flow = 0;
    std::uint64_t record = 0;  // of the flight recorder
  };
  class Turn;
  Ticket take_ticket(const char* operation, Description what, std::optional<Pair> pair = {});
  Ticket take_turn(const char* operation, const Description& what);  // without a number
  /// As errors say it: "all_reduce sum f32[3] 'x' in the group of ranks 1, 3"; with its number.
  std::string text_of(const Ticket& ticket) const { return ticket.what.text() + members_.name; }
  std::string numbered(const Ticket& ticket) const;
  void show(const Ticket& ticket, core::WorkSpan& span) const;
  /// The host calls it at once: the device's current stream does not run on another thread.
  static bool runs_here(Device device);
  void join_job();
  void begin_collective(const Ticket& ticket, std::chrono::milliseconds timeout);
  void queue(const Ticket& ticket, Device device, const QueuedCalls& work);
  void perform(const Ticket& ticket, Device device, const QueuedCalls& work);
  void capture(const char* operation, const Description& what, Device device,
               const QueuedCalls& work);
  void refuse_in_capture(const char* kind, const Description& what) const;
  void note_replay(const char* operation, const Description& what);
  template <class Calls>
  void execute(const Ticket& ticket, Device device, std::chrono::milliseconds timeout,
               Calls&& calls);
  Collectives& begin(const Ticket& ticket, Device device);
  void meet(const Ticket& ticket);
  void agree_with_peer(const Pair& pair);
  void agree(const Ticket& ticket);
  CollectiveId id_of(const Ticket& ticket) const;
  void wait_for_turn(const Ticket& ticket);
  void pass_turn();
  Collectives& backend(Device device);
  void watch_device();
  std::string reason_of(const std::string& message);
  [[noreturn]] void explain(const Ticket& ticket, const std::string& message);

  std::shared_ptr<JobConnection> job_;
  Members members_;
  int local_rank_, local_world_size_;
  std::shared_ptr<GroupFailure> failure_;
  std::shared_ptr<History> history_;  // none: a group of one
  std::mutex mutex_;                  // next_, next_turn_; held where turn_ changes
  std::condition_variable turn_changed_;
  std::uint64_t next_ = 0;
  std::uint64_t splits_ = 0;
  std::uint64_t next_turn_ = 0;
  std::atomic<std::uint64_t> turn_ = 0;
  std::atomic<std::uint64_t> unnotified_turns_ = 0;
  // What follows belongs to the collective whose turn it is.
  using Known = std::unordered_set<std::uint64_t>;  // hashes of descriptions
  static bool is_new(Known& known, std::uint64_t what);
  Known known_;
  std::map<std::pair<int, bool>, Known> known_to_peers_;  // by peer and direction
  std::shared_ptr<Collectives> cpu_;
  std::shared_ptr<Collectives> cuda_;

  std::mutex streams_mutex_;
  std::vector<core::Stream> streams_;
};

}  // namespace cairn::parallel
