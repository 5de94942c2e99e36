#include "group/group_impl.h"

#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/stream.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using core::Stream;
using std::chrono::milliseconds;

// Descriptions that the ranks have agreed on are remembered, up to this many. A caller that makes
// up a new name every step has each of them checked, but the memory stays bounded.
constexpr std::size_t kMostKnown = 4096;
// How long past a heartbeat an error waits for the watchdog, which knows why a connection closed.
constexpr auto kExplanation = milliseconds(2000);

/// FNV-1a of the description, started from the number.
std::uint64_t fingerprint(const std::string& what, std::uint64_t sequence) {
  std::uint64_t hash = 0xcbf29ce484222325u ^ (sequence * 0x9e3779b97f4a7c15u);
  for (const char c : what) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

}  // namespace

void GroupFailure::set(const std::string& reason) {
  std::vector<std::shared_ptr<Collectives>> backends;
  {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) return;
    reason_ = reason;
    backends = alive();
  }
  changed_.notify_all();
  for (const auto& backend : backends) backend->abort();
}

std::vector<std::shared_ptr<Collectives>> GroupFailure::alive() const {
  std::vector<std::shared_ptr<Collectives>> backends;
  for (const auto& weak : backends_) {
    if (auto backend = weak.lock()) backends.push_back(std::move(backend));
  }
  return backends;
}

std::string GroupFailure::check_devices() const {
  std::vector<std::shared_ptr<Collectives>> backends;
  {
    const std::lock_guard lock(mutex_);
    backends = alive();
  }
  for (const auto& backend : backends) {
    if (std::string trouble = backend->check(); !trouble.empty()) return trouble;
  }
  return "";
}

bool GroupFailure::is_set() const {
  return !reason().empty();
}

std::string GroupFailure::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

std::string GroupFailure::wait(milliseconds timeout) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return !reason_.empty(); });
  return reason_;
}

void GroupFailure::add(const std::shared_ptr<Collectives>& backend) {
  const std::lock_guard lock(mutex_);
  backends_.push_back(backend);
  if (!reason_.empty()) backend->abort();
}

ProcessGroup::Impl::Impl(const JobEnvironment& job, const GroupOptions& options)
    : job_(job), options_(options) {}

void ProcessGroup::Impl::join(
    const std::function<std::unique_ptr<Coordinator>(OnFailure, CheckDevices)>& make) {
  coordinator_ = make([failure = failure_](const std::string& reason) { failure->set(reason); },
                      [failure = failure_] { return failure->check_devices(); });
}

ProcessGroup::Impl::~Impl() {
  if (!coordinator_) return;
  // Ranks that still need this one hear so before it waits for them, and the watchdog ends that wait.
  coordinator_->leave(next_);
  if (cpu_) cpu_->close();
  if (cuda_) cuda_->close();
}

ProcessGroup::Impl::Ticket ProcessGroup::Impl::take_ticket(const char* operation,
                                                           const std::string& what) {
  const std::lock_guard lock(mutex_);
  return {operation, what, next_++};
}

void ProcessGroup::Impl::wait_for_turn(const Ticket& ticket) {
  std::unique_lock lock(mutex_);
  const auto come = [&] { return turn_ == ticket.sequence || failure_->is_set(); };
  // What comes first may wait for other ranks (bounded by the ledger) or sit in a stream that is
  // busy.
  while (!turn_changed_.wait_for(lock, milliseconds(200), come)) {
  }
}

void ProcessGroup::Impl::pass_turn() {
  {
    const std::lock_guard lock(mutex_);
    ++turn_;
  }
  turn_changed_.notify_all();
}

bool ProcessGroup::Impl::is_new(const std::string& what) {
  if (known_.size() >= kMostKnown) known_.clear();
  return known_.insert(what).second;
}

Collectives& ProcessGroup::Impl::backend(Device device) {
  std::shared_ptr<Collectives>& backend = device.is_cpu() ? cpu_ : cuda_;
  if (!backend) {
    backend = coordinator_->connect(device);
    failure_->add(backend);
  }
  return *backend;
}

/// Why a backend failed. It only sees a closed connection; the store knows who died. Unless nobody
/// did: then this rank is the cause.
std::string ProcessGroup::Impl::reason_of(const std::string& message) {
  std::string reason = failure_->wait(options_.heartbeat_timeout + kExplanation);
  if (!reason.empty()) return reason;
  reason = core::str("rank ", job_.rank, " failed: ", message);
  abort(reason);
  return reason;
}

void ProcessGroup::Impl::explain(const Ticket& ticket, const std::string& message) {
  core::fail<CommunicationError>(ticket.operation, reason_of(message), "; rank ", job_.rank,
                                 " was in collective ", ticket.sequence, ", ", ticket.what);
}

std::vector<std::string> ProcessGroup::Impl::execute(const Ticket& ticket, const std::string& value,
                                                     milliseconds timeout, bool wait,
                                                     const std::function<void()>& work) {
  wait_for_turn(ticket);
  struct Turn {
    Impl& impl;
    ~Turn() { impl.pass_turn(); }
  };
  const Turn turn{*this};
  try {
    if (failure_->is_set()) core::fail<CommunicationError>(ticket.operation, failure_->reason());
    const bool check = is_new(ticket.what);
    auto values = coordinator_->report({job_.rank, ticket.sequence, ticket.what, value, timeout},
                                       wait || check);
    if (work) work();
    return values;
  } catch (const GroupBroken& error) {
    failure_->set(error.reason());
    explain(ticket, error.what());
  } catch (const CommunicationError& error) {
    explain(ticket, error.what());
  }
}

/// Waits in a stream for its turn. Where the stream drops it unrun (an earlier error of its), later
/// collectives must not wait for it.
class ProcessGroup::Impl::Queued {
 public:
  Queued(std::shared_ptr<Impl> impl, Ticket ticket)
      : impl_(std::move(impl)), ticket_(std::move(ticket)) {}
  ~Queued() {
    if (!ran_)
      impl_->abort(core::str("rank ", impl_->job_.rank, " skipped ", ticket_.what,
                             " after an error in its stream"));
  }
  Queued(const Queued&) = delete;
  Queued& operator=(const Queued&) = delete;
  void run(Device device, const Work& work) {
    ran_ = true;
    impl_->execute(ticket_, "", impl_->options_.timeout, false, [&] {
      Collectives& backend = impl_->backend(device);
      backend.begin(fingerprint(ticket_.what, ticket_.sequence),
                    core::str("collective ", ticket_.sequence, ", ", ticket_.what));
      work(backend);
    });
  }

 private:
  std::shared_ptr<Impl> impl_;
  Ticket ticket_;
  bool ran_ = false;
};

void ProcessGroup::Impl::run(const char* operation, const std::string& what, Device device,
                             const Work& work) {
  if (!coordinator_) return;
  const auto queued = std::make_shared<Queued>(shared_from_this(), take_ticket(operation, what));
  const Stream stream = Stream::current(device);
  if (device.is_cuda() || stream.is_inline()) return queued->run(device, work);
  stream.submit([queued, device, work] { queued->run(device, work); });
}

std::vector<std::string> ProcessGroup::Impl::exchange(const char* operation,
                                                      const std::string& what,
                                                      const std::string& value,
                                                      milliseconds timeout) {
  if (!coordinator_) return {value};
  return execute(take_ticket(operation, what), value, timeout, true, nullptr);
}

void ProcessGroup::Impl::check() const {
  if (!coordinator_) return;
  if (failure_->is_set()) core::fail<CommunicationError>("group", failure_->reason());
}

void ProcessGroup::Impl::wait() {
  try {
    if (cuda_) cuda_->wait();
  } catch (const CommunicationError& error) {
    core::fail<CommunicationError>("group", reason_of(error.what()), "; rank ", job_.rank, ": ",
                                   error.what());
  }
  check();
}

void ProcessGroup::Impl::abort(const std::string& reason) {
  failure_->set(reason);
  if (coordinator_) coordinator_->break_group(reason);
}

}  // namespace cairn::parallel
