// The in-process group: ranks are threads, and one more thread watches them.
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "cairn/core/error.h"
#include "collectives/cpu/mesh_collectives.h"
#include "collectives/nccl_backend.h"
#include "control/node.h"
#include "group/coordinator.h"
#include "transports/in_process/in_process_mesh.h"
#include "transports/mesh.h"

namespace cairn::parallel {
namespace {

/// The store of ranks that share memory.
class HashStore : public Store {
 public:
  void set(const std::string& key, std::string_view value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, Milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, timeout, [&] { return !reason_.empty() || values_.contains(key); });
    if (!reason_.empty()) throw GroupBroken("store", reason_);
    if (!values_.contains(key))
      core::fail<core::CommunicationError>("store", "expected '", key, "' within ", timeout.count(),
                                           " ms, it did not come");
    return values_[key];
  }
  void throw_if_cancelled(std::string_view what) const override {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) throw GroupBroken(what, reason_);
  }
  void cancel(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    reason_ = reason;
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::string reason_;
};

using Backends = std::vector<std::shared_ptr<Collectives>>;

void abort_all(const Backends& backends) {
  for (const auto& backend : backends) backend->abort();
}

}  // namespace

class InProcessGroup {
 public:
  explicit InProcessGroup(int size)
      : boxes_(std::make_shared<Mailboxes>(size)),
        on_failure_(static_cast<std::size_t>(size)),
        checks_(static_cast<std::size_t>(size)),
        watcher_([this] { watch(); }) {}
  ~InProcessGroup();

  void enter(int rank, OnFailure on_failure, CheckDevices check);
  void add(const std::shared_ptr<History>& history);
  void break_group(const std::string& reason);
  void leave(int rank);
  void close(const Members& members, std::shared_ptr<Collectives> backend);
  const std::shared_ptr<Mailboxes>& boxes() const { return boxes_; }
  const std::shared_ptr<HashStore>& store() const { return store_; }

 private:
  void watch();
  void check_devices();

  const std::shared_ptr<Mailboxes> boxes_;
  const std::shared_ptr<HashStore> store_ = std::make_shared<HashStore>();
  std::mutex mutex_;
  std::string failure_;
  std::vector<std::shared_ptr<History>> histories_;
  std::vector<OnFailure> on_failure_;
  std::vector<CheckDevices> checks_;
  std::map<std::uint64_t, Backends> ended_;  // by group
  std::mutex watcher_mutex_;
  std::condition_variable watcher_wakeup_;
  bool stop_ = false;
  std::thread watcher_;
};

InProcessGroup::~InProcessGroup() {
  {
    const std::lock_guard lock(watcher_mutex_);
    stop_ = true;
  }
  watcher_wakeup_.notify_all();
  watcher_.join();
}

/// One node that knows every rank's history judges as the root of a tree does.
void InProcessGroup::watch() {
  constexpr std::chrono::milliseconds kInterval{50};
  const auto own = ControlNode::probes_of([this] {
    const std::lock_guard lock(mutex_);
    return histories_;
  });
  ControlNode judge(0, 1, "", Milliseconds(1000), own, Clock::now());
  std::unique_lock lock(watcher_mutex_);
  while (!watcher_wakeup_.wait_for(lock, kInterval, [this] { return stop_; })) {
    lock.unlock();
    judge.tick(Clock::now());
    if (!judge.failure().empty()) break_group(judge.failure());
    check_devices();
    lock.lock();
  }
}

void InProcessGroup::check_devices() {
  std::vector<CheckDevices> checks;
  {
    const std::lock_guard lock(mutex_);
    checks = checks_;
  }
  for (const CheckDevices& check : checks) {
    if (const std::string trouble = check ? check() : ""; !trouble.empty()) break_group(trouble);
  }
}

void InProcessGroup::break_group(const std::string& reason) {
  std::vector<OnFailure> told;
  std::map<std::uint64_t, Backends> ended;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = reason;
    told = std::exchange(on_failure_, std::vector<OnFailure>(on_failure_.size()));
    ended = std::move(ended_);
  }
  for (const auto& [group, backends] : ended) abort_all(backends);
  boxes_->break_all(reason);
  store_->cancel(reason);
  for (const OnFailure& tell : told) {
    if (tell) tell(reason);
  }
}

void InProcessGroup::enter(int rank, OnFailure on_failure, CheckDevices check) {
  const std::lock_guard lock(mutex_);
  on_failure_[static_cast<std::size_t>(rank)] = std::move(on_failure);
  checks_[static_cast<std::size_t>(rank)] = std::move(check);
}

void InProcessGroup::add(const std::shared_ptr<History>& history) {
  const std::lock_guard lock(mutex_);
  histories_.push_back(history);
}

void InProcessGroup::leave(int rank) {
  const std::lock_guard lock(mutex_);
  on_failure_[static_cast<std::size_t>(rank)] = nullptr;
  checks_[static_cast<std::size_t>(rank)] = nullptr;
}

/// One thread may end the groups of all ranks, one after the other: the last of a group ends the
/// backends of all.
void InProcessGroup::close(const Members& members, std::shared_ptr<Collectives> backend) {
  Backends all;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return backend->abort();
    Backends& ended = ended_[members.id];
    ended.push_back(std::move(backend));
    if (std::ssize(ended) < members.size()) return;
    all = std::move(ended);
    ended_.erase(members.id);
  }
  std::vector<std::jthread> threads;
  for (const auto& each : all) threads.emplace_back([&each] { each->close(); });
}

namespace {

class InProcessCoordinator : public Coordinator {
 public:
  InProcessCoordinator(std::shared_ptr<InProcessGroup> group, int rank, Milliseconds timeout)
      : group_(std::move(group)), rank_(rank), timeout_(timeout) {}
  void add(const std::shared_ptr<History>& history) override { group_->add(history); }
  void break_group(const std::string& reason) override { group_->break_group(reason); }
  void leave() noexcept override { group_->leave(rank_); }
  std::unique_ptr<Collectives> connect(Device device, const Members& members) override {
    if (device.is_cuda()) return connect_nccl(membership(device, members));
    return make_mesh_collectives(
        make_in_process_mesh(group_->boxes(), members.ranks, members.place, members.id));
  }
  void close(const Members& members, std::shared_ptr<Collectives> backend) noexcept override {
    try {
      backend->wait();
    } catch (const core::Error&) {  // who waits for a result has heard of it
    }
    group_->close(members, std::move(backend));
  }

 private:
  Membership membership(Device device, const Members& members) const {
    return {members.place,   members.size(), device, "",
            group_->store(), timeout_,       "",     members.prefix()};
  }

  std::shared_ptr<InProcessGroup> group_;
  int rank_;
  Milliseconds timeout_;
};

}  // namespace

std::shared_ptr<InProcessGroup> make_in_process_group(int size) {
  return std::make_shared<InProcessGroup>(size);
}

std::unique_ptr<Coordinator> join_in_process_group(std::shared_ptr<InProcessGroup> group, int rank,
                                                   const GroupOptions& options,
                                                   OnFailure on_failure, CheckDevices check) {
  group->enter(rank, std::move(on_failure), std::move(check));
  return std::make_unique<InProcessCoordinator>(std::move(group), rank, options.timeout);
}

}  // namespace cairn::parallel
