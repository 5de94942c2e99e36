// The in-process group: ranks are threads, and one more thread watches them.
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "cairn/core/error.h"
#include "collectives/in_process_mesh.h"
#include "collectives/mesh.h"
#include "control/node.h"
#include "group/coordinator.h"

namespace cairn::parallel {

class InProcessGroup {
 public:
  explicit InProcessGroup(int size)
      : boxes_(std::make_shared<Mailboxes>(size)),
        on_failure_(static_cast<std::size_t>(size)),
        watcher_([this] { watch(); }) {}
  ~InProcessGroup();

  void enter(int rank, OnFailure on_failure);
  void add(const std::shared_ptr<History>& history);
  void break_group(const std::string& reason);
  void leave(int rank);
  const std::shared_ptr<Mailboxes>& boxes() const { return boxes_; }

 private:
  void watch();

  const std::shared_ptr<Mailboxes> boxes_;
  std::mutex mutex_;
  std::string failure_;
  std::vector<std::shared_ptr<History>> histories_;
  std::vector<OnFailure> on_failure_;
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
  const auto own = ControlNode::own_of([this] {
    const std::lock_guard lock(mutex_);
    return histories_;
  });
  ControlNode judge(0, 1, "", Milliseconds(1000), own, Clock::now());
  std::unique_lock lock(watcher_mutex_);
  while (!watcher_wakeup_.wait_for(lock, kInterval, [this] { return stop_; })) {
    lock.unlock();
    judge.tick(Clock::now());
    if (!judge.failure().empty()) break_group(judge.failure());
    lock.lock();
  }
}

void InProcessGroup::break_group(const std::string& reason) {
  std::vector<OnFailure> told;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = reason;
    told = std::exchange(on_failure_, std::vector<OnFailure>(on_failure_.size()));
  }
  boxes_->break_all(reason);
  for (const OnFailure& tell : told) {
    if (tell) tell(reason);
  }
}

void InProcessGroup::enter(int rank, OnFailure on_failure) {
  const std::lock_guard lock(mutex_);
  on_failure_[static_cast<std::size_t>(rank)] = std::move(on_failure);
}

void InProcessGroup::add(const std::shared_ptr<History>& history) {
  const std::lock_guard lock(mutex_);
  histories_.push_back(history);
}

void InProcessGroup::leave(int rank) {
  const std::lock_guard lock(mutex_);
  on_failure_[static_cast<std::size_t>(rank)] = nullptr;
}

namespace {

class InProcessCoordinator : public Coordinator {
 public:
  InProcessCoordinator(std::shared_ptr<InProcessGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}
  void add(const std::shared_ptr<History>& history) override { group_->add(history); }
  void break_group(const std::string& reason) override { group_->break_group(reason); }
  void leave() noexcept override { group_->leave(rank_); }
  std::unique_ptr<Collectives> connect(Device device, const Members& members) override {
    if (!device.is_cpu())
      core::fail<core::Unsupported>(
          "group", "in-process groups reduce CPU tensors only, got one on ", device);
    return make_mesh_collectives(
        make_in_process_mesh(group_->boxes(), members.ranks, members.place, members.id));
  }

 private:
  std::shared_ptr<InProcessGroup> group_;
  int rank_;
};

}  // namespace

std::shared_ptr<InProcessGroup> make_in_process_group(int size) {
  return std::make_shared<InProcessGroup>(size);
}

std::unique_ptr<Coordinator> join_in_process_group(std::shared_ptr<InProcessGroup> group, int rank,
                                                   OnFailure on_failure) {
  group->enter(rank, std::move(on_failure));
  return std::make_unique<InProcessCoordinator>(std::move(group), rank);
}

}  // namespace cairn::parallel
