// The in-process group: ranks are threads, the ledger is behind a mutex, and sending is copying.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "cairn/core/error.h"
#include "collectives/mesh.h"
#include "group/coordinator.h"

namespace cairn::parallel {

class InProcessGroup {
 public:
  explicit InProcessGroup(int size)
      : size_(size), ledger_(size), on_failure_(static_cast<std::size_t>(size)) {}

  int size() const { return size_; }
  void enter(int rank, OnFailure on_failure);
  std::vector<std::string> report(const Ledger::Report& report, bool wait);
  void break_group(const std::string& reason);
  void leave(int rank, std::uint64_t collectives);
  // Sending: post, then finish (which also receives); withdraw what nobody took.
  void post(int rank, std::uint64_t tag, const std::vector<Mesh::Send>& sends);
  void finish(int rank, std::uint64_t tag, const std::vector<Mesh::Send>& sends,
              const std::vector<Mesh::Receive>& receives);
  void withdraw(int rank, std::uint64_t tag, const std::vector<Mesh::Send>& sends);

 private:
  struct Result {
    std::vector<std::string> values;
    int readers = 0;  // that have not taken them yet
  };
  using Place = std::tuple<int, int, std::uint64_t>;  // sender, receiver, tag
  using Lock = std::unique_lock<std::mutex>;
  void throw_if_broken() const;
  void spread_failure(Lock& lock);
  template <class Come>
  void wait(Lock& lock, const Come& come);

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Ledger ledger_;
  std::map<std::uint64_t, int> waiting_;  // by collective
  std::map<std::uint64_t, Result> results_;
  std::map<Place, Mesh::Send> posted_;
  std::vector<OnFailure> on_failure_;
};

void InProcessGroup::throw_if_broken() const {
  if (!ledger_.failure().empty()) throw GroupBroken("group", ledger_.failure());
}

void InProcessGroup::spread_failure(Lock& lock) {
  changed_.notify_all();
  if (ledger_.failure().empty()) return;
  const std::string reason = ledger_.failure();
  for (OnFailure& on_failure : on_failure_) {
    const OnFailure once = std::exchange(on_failure, nullptr);
    lock.unlock();
    if (once) once(reason);
    lock.lock();
  }
}

// Until `come`; throws where the group breaks before. There is no server here to watch the deadlines of
// ranks that do not come: whoever waits does.
template <class Come>
void InProcessGroup::wait(Lock& lock, const Come& come) {
  constexpr std::chrono::milliseconds kWatch{50};
  const auto over = [&] { return come() || !ledger_.failure().empty(); };
  while (!changed_.wait_for(lock, kWatch, over)) {
    ledger_.check_deadlines(Ledger::Clock::now());
    spread_failure(lock);
  }
  throw_if_broken();
}

void InProcessGroup::enter(int rank, OnFailure on_failure) {
  const std::lock_guard lock(mutex_);
  on_failure_[static_cast<std::size_t>(rank)] = std::move(on_failure);
}

std::vector<std::string> InProcessGroup::report(const Ledger::Report& report, bool wait) {
  Lock lock(mutex_);
  throw_if_broken();
  if (wait) ++waiting_[report.sequence];
  if (auto complete = ledger_.report(report, Ledger::Clock::now())) {
    const int readers = std::exchange(waiting_[report.sequence], 0);
    if (readers > 0) results_[report.sequence] = {std::move(complete->values), readers};
    waiting_.erase(report.sequence);
  }
  spread_failure(lock);
  throw_if_broken();
  if (!wait) return {};
  InProcessGroup::wait(lock, [&] { return results_.contains(report.sequence); });
  Result& result = results_[report.sequence];
  std::vector<std::string> values = result.values;
  if (--result.readers == 0) results_.erase(report.sequence);
  return values;
}

void InProcessGroup::break_group(const std::string& reason) {
  Lock lock(mutex_);
  ledger_.fail(reason);
  spread_failure(lock);
}

void InProcessGroup::leave(int rank, std::uint64_t collectives) {
  Lock lock(mutex_);
  on_failure_[static_cast<std::size_t>(rank)] = nullptr;
  ledger_.leave(rank, collectives);
  spread_failure(lock);
}

void InProcessGroup::post(int rank, std::uint64_t tag, const std::vector<Mesh::Send>& sends) {
  const std::lock_guard lock(mutex_);
  for (const Mesh::Send& send : sends) posted_[{rank, send.to, tag}] = send;
  changed_.notify_all();
}

void InProcessGroup::finish(int rank, std::uint64_t tag, const std::vector<Mesh::Send>& sends,
                            const std::vector<Mesh::Receive>& receives) {
  Lock lock(mutex_);
  for (const Mesh::Receive& receive : receives) {
    const Place place{receive.from, rank, tag};
    wait(lock, [&] { return posted_.contains(place); });
    // Copied under the lock, because the sender's memory lives only while it is posted.
    std::memcpy(receive.data, posted_[place].data, receive.bytes);
    posted_.erase(place);
    changed_.notify_all();
  }
  const auto taken = [&] {
    return std::none_of(sends.begin(), sends.end(), [&](const Mesh::Send& send) {
      return posted_.contains({rank, send.to, tag});
    });
  };
  wait(lock, taken);
}

void InProcessGroup::withdraw(int rank, std::uint64_t tag, const std::vector<Mesh::Send>& sends) {
  const std::lock_guard lock(mutex_);
  for (const Mesh::Send& send : sends) posted_.erase({rank, send.to, tag});
}

namespace {

class InProcessTransfer : public Mesh::Transfer {
 public:
  InProcessTransfer(InProcessGroup& group, int rank, std::uint64_t tag,
                    std::vector<Mesh::Send> sends, std::vector<Mesh::Receive> receives)
      : group_(group),
        rank_(rank),
        tag_(tag),
        sends_(std::move(sends)),
        receives_(std::move(receives)) {
    group_.post(rank_, tag_, sends_);
  }
  ~InProcessTransfer() override { group_.withdraw(rank_, tag_, sends_); }
  void wait() override { group_.finish(rank_, tag_, sends_, receives_); }

 private:
  InProcessGroup& group_;
  int rank_;
  std::uint64_t tag_;
  std::vector<Mesh::Send> sends_;
  std::vector<Mesh::Receive> receives_;
};

class InProcessMesh : public Mesh {
 public:
  InProcessMesh(std::shared_ptr<InProcessGroup> group, int rank)
      : Mesh(rank, group->size()), group_(std::move(group)) {}
  std::unique_ptr<Transfer> start(int round, const std::vector<Send>& sends,
                                  const std::vector<Receive>& receives) override {
    return std::make_unique<InProcessTransfer>(*group_, rank(), tag(round), sends, receives);
  }
  void abort() noexcept override {}  // waits see the ledger themselves

 private:
  std::shared_ptr<InProcessGroup> group_;
};

class InProcessCoordinator : public Coordinator {
 public:
  InProcessCoordinator(std::shared_ptr<InProcessGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}
  std::vector<std::string> report(const Ledger::Report& report, bool wait) override {
    return group_->report(report, wait);
  }
  void break_group(const std::string& reason) override { group_->break_group(reason); }
  void leave(std::uint64_t collectives) noexcept override { group_->leave(rank_, collectives); }
  std::unique_ptr<Collectives> connect(Device device) override {
    if (!device.is_cpu())
      core::fail<core::Unsupported>(
          "group", "in-process groups reduce CPU tensors only, got one on ", device);
    return make_mesh_collectives(std::make_unique<InProcessMesh>(group_, rank_));
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
