#include "group/group_impl.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <sstream>
#include <tuple>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/status.h"
#include "cairn/core/status_page.h"
#include "cairn/core/stream.h"
#include "cairn/core/work_observer.h"
#include "control/node.h"

namespace cairn::parallel {
namespace {

using core::CommunicationError;
using core::Stream;
using std::chrono::milliseconds;

// Descriptions that the ranks have agreed on are remembered, up to this many. A caller that makes
// up a new name every step has each of them checked, but the memory stays bounded.
constexpr std::size_t kMostKnown = 4096;

std::uint64_t number_in(const std::string& bytes) {
  std::uint64_t number = 0;
  std::memcpy(&number, bytes.data(), std::min(bytes.size(), sizeof number));
  return number;
}

/// A CPU view of bytes in memory.
TensorView bytes_view(void* data, std::int64_t bytes) {
  return {data, {bytes}, DType::u8, Device{}};
}

/// All ranks' values over the CPU's backend.
std::vector<std::string> gather_texts(Collectives& backend, const std::string& value,
                                      std::size_t world_size) {
  const auto gather = [&](std::string block, const Counts& counts) {
    std::int64_t total = 0;
    for (const std::int64_t count : counts) total += count;
    std::string all(static_cast<std::size_t>(total), '\0');
    backend.all_gather(bytes_view(block.data(), std::ssize(block)), bytes_view(all.data(), total),
                       counts);
    return all;
  };
  std::uint64_t own = value.size();
  std::string size(sizeof own, '\0');
  std::memcpy(size.data(), &own, sizeof own);
  const std::string sizes = gather(size, Counts(world_size, sizeof own));
  Counts lengths;
  for (std::size_t r = 0; r < world_size; ++r) {
    lengths.push_back(
        static_cast<std::int64_t>(number_in(sizes.substr(r * sizeof own, sizeof own))));
  }
  const std::string all = gather(value, lengths);
  std::vector<std::string> texts;
  std::size_t at = 0;
  for (const std::int64_t length : lengths) {
    texts.push_back(all.substr(at, static_cast<std::size_t>(length)));
    at += static_cast<std::size_t>(length);
  }
  return texts;
}

}  // namespace

void GroupFailure::set(const std::string& reason) {
  std::vector<std::shared_ptr<Collectives>> backends;
  {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) return;
    reason_ = reason;
    set_ = true;
    backends = alive();
  }
  const std::string records = recorder_ ? recorder_->pickled() : "";  // as they stand now
  changed_.notify_all();
  for (const auto& backend : backends) backend->abort();
  if (recorder_) recorder_->write(records, reason);  // nobody waits for a slow disk
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

Members all_ranks(int rank, int world_size) {
  Members members{0, std::vector<int>(static_cast<std::size_t>(world_size)), rank, ""};
  std::iota(members.ranks.begin(), members.ranks.end(), 0);
  return members;
}

ProcessGroup::Impl::Impl(const JobEnvironment& environment, const GroupOptions& options,
                         const MakeCoordinator& make)
    : job_(std::make_shared<JobConnection>(environment, options)),
      members_(all_ranks(environment.rank, environment.world_size)),
      local_rank_(environment.local_rank),
      local_world_size_(environment.local_world_size),
      failure_(job_->failure) {
  if (!make || environment.world_size == 1) return;
  job_->recorder = std::make_shared<FlightRecorder>(rank());
  failure_->record(job_->recorder);
  job_->coordinator = make([failure = failure_](const std::string& why) { failure->set(why); },
                           [failure = failure_, recorder = job_->recorder] {
                             recorder->write_if_asked();
                             return failure->check_devices();
                           });
  history_ = std::make_shared<History>(0, rank(), world_size());
  join_job();
}

ProcessGroup::Impl::Impl(std::shared_ptr<JobConnection> job, Members members, int local_rank,
                         int local_world_size)
    : job_(std::move(job)),
      members_(std::move(members)),
      local_rank_(local_rank),
      local_world_size_(local_world_size),
      failure_(job_->failure) {
  if (world_size() == 1) return;
  history_ =
      std::make_shared<History>(members_.id, members_.job_rank(), world_size(), members_.name);
  join_job();
}

void ProcessGroup::Impl::join_job() {
  job_->coordinator->add(history_);
  job_->recorder->add(members_, history_);
}

ProcessGroup::Impl::~Impl() {
  tell_why_it_ends();
  // Ranks that still need this one find that out, and the connections end without them.
  if (history_) history_->leave();
  if (cpu_) cpu_->close();
  if (cuda_) job_->coordinator->close(members_, std::move(cuda_));
}

namespace {

/// What each rank tells the others of its wish.
struct SplitRequest {
  int color = 0, key = 0;
  int rank = 0, job_rank = 0;
  int node = 0;  // the job's lowest rank on its machine

  std::string text() const { return core::str(color, " ", key, " ", job_rank, " ", node); }
  static SplitRequest parse(const std::string& text, int rank) {
    SplitRequest wish;
    wish.rank = rank;
    std::istringstream(text) >> wish.color >> wish.key >> wish.job_rank >> wish.node;
    return wish;
  }
};

/// Those of this color, in their order.
std::vector<SplitRequest> alike(const std::vector<std::string>& texts, int color) {
  std::vector<SplitRequest> wishes;
  for (std::size_t r = 0; r < texts.size(); ++r) {
    const SplitRequest wish = SplitRequest::parse(texts[r], static_cast<int>(r));
    if (wish.color == color) wishes.push_back(wish);
  }
  std::sort(wishes.begin(), wishes.end(), [](const SplitRequest& a, const SplitRequest& b) {
    return std::tie(a.key, a.rank) < std::tie(b.key, b.rank);
  });
  return wishes;
}

std::string name_of(const std::vector<int>& ranks) {
  constexpr std::size_t kNamed = 8;
  std::string name = " in the group of ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kNamed); ++i) {
    name += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return ranks.size() > kNamed ? name + ", ..." : name;
}

}  // namespace

std::shared_ptr<ProcessGroup::Impl> ProcessGroup::Impl::split(int color, int key,
                                                              const std::string& what) {
  const JobEnvironment& environment = job_->environment;
  const SplitRequest own{color, key, rank(), members_.job_rank(),
                         environment.rank - environment.local_rank};
  const std::uint64_t number = splits_++;
  std::vector<SplitRequest> wishes{own};
  std::shared_ptr<Collectives> cuda;
  run_now("split", what, options().timeout, [&](Collectives& backend) {
    wishes =
        alike(gather_texts(backend, own.text(), static_cast<std::size_t>(world_size())), color);
    if (!cuda_) return;
    const auto place = std::find_if(wishes.begin(), wishes.end(),
                                    [&](const SplitRequest& wish) { return wish.rank == rank(); });
    cuda = cuda_->split(wishes.size() == 1 ? -1 : wishes.front().rank,
                        static_cast<int>(place - wishes.begin()));
  });
  Members members;
  members.id = fingerprint(core::str("split ", members_.id, " ", color), number) | 1;
  int local_rank = 0, local_world_size = 0;
  for (const SplitRequest& wish : wishes) {
    if (wish.rank == rank()) {
      members.place = static_cast<int>(members.ranks.size());
      local_rank = local_world_size;
    }
    local_world_size += wish.node == own.node;
    members.ranks.push_back(wish.job_rank);
  }
  members.name = name_of(members.ranks);
  auto part = std::make_shared<Impl>(job_, std::move(members), local_rank, local_world_size);
  part->cuda_ = cuda;
  if (cuda) {
    failure_->add(cuda);
    part->watch_device();
  }
  return part;
}

ProcessGroup::Impl::Ticket ProcessGroup::Impl::take_ticket(const char* operation, Description what,
                                                           std::optional<Pair> pair) {
  const std::lock_guard lock(mutex_);
  Ticket ticket{operation,    std::move(what),
                next_turn_++, pair ? 0 : next_++,
                pair,         core::WorkFlowGuard::current()};
  if (!pair && !failure_->is_set())
    ticket.record =
        job_->recorder->schedule(members_.id, ticket.sequence, ticket.operation, ticket.what);
  return ticket;
}

ProcessGroup::Impl::Ticket ProcessGroup::Impl::take_turn(const char* operation,
                                                         const Description& what) {
  const std::lock_guard lock(mutex_);
  return {operation, what, next_turn_++, 0, {}, 0};
}

std::string ProcessGroup::Impl::numbered(const Ticket& ticket) const {
  return ticket.pair ? text_of(ticket)
                     : core::str("collective ", ticket.sequence, ", ", text_of(ticket));
}

void ProcessGroup::Impl::show(const Ticket& ticket, core::WorkSpan& span) const {
  const std::string_view group = members_.name;  // " in ..."
  span.set_collective(ticket.sequence, ticket.what.bytes(), group.substr(group.empty() ? 0 : 1));
  span.add_flow(ticket.flow);
}

void ProcessGroup::Impl::wait_for_turn(const Ticket& ticket) {
  if (turn_ == ticket.turn) return;
  std::unique_lock lock(mutex_);
  const auto come = [&] { return turn_ == ticket.turn || failure_->is_set(); };
  // What comes first may wait for other ranks (bounded by its timeout) or sit in a stream that is
  // busy.
  while (!come()) {
    const auto woken = turn_changed_.wait_for(lock, milliseconds(200));
    if (woken == std::cv_status::timeout && turn_ == ticket.turn) ++unnotified_turns_;
  }
}

void ProcessGroup::Impl::pass_turn() {
  {
    const std::lock_guard lock(mutex_);
    ++turn_;
  }
  turn_changed_.notify_all();
}

bool ProcessGroup::Impl::is_new(Known& known, std::uint64_t what) {
  if (known.size() >= kMostKnown) known.clear();
  return known.insert(what).second;
}

Collectives& ProcessGroup::Impl::backend(Device device) {
  std::shared_ptr<Collectives>& backend = device.is_cpu() ? cpu_ : cuda_;
  if (!backend) {
    backend = job_->coordinator->connect(device, members_);
    failure_->add(backend);
    if (device.is_cuda()) watch_device();
  }
  return *backend;
}

void ProcessGroup::Impl::watch_device() {
  history_->watch_device([weak = std::weak_ptr(cuda_)] {
    const auto alive = weak.lock();
    return alive ? alive->pending() : std::nullopt;
  });
}

/// Why a backend failed. It only sees a closed connection; the store knows who died. Unless nobody
/// did: then this rank is the cause.
std::string ProcessGroup::Impl::reason_of(const std::string& message) {
  std::string reason = failure_->wait(ControlNode::time_to_explain(options().heartbeat_timeout));
  if (!reason.empty()) return reason;
  reason = core::str("rank ", members_.job_rank(), " failed: ", message);
  abort(reason);
  return reason;
}

void ProcessGroup::Impl::explain(const Ticket& ticket, const std::string& message) {
  core::fail<CommunicationError>(ticket.operation, reason_of(message), "; rank ",
                                 members_.job_rank(), " was in ", numbered(ticket));
}

/// Waits for it; the next one comes when it ends.
class ProcessGroup::Impl::Turn {
 public:
  Turn(Impl& impl, const Ticket& ticket) : impl_(impl) { impl_.wait_for_turn(ticket); }
  ~Turn() {
    impl_.history_->end();
    impl_.pass_turn();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Impl& impl_;
};

void ProcessGroup::Impl::begin_collective(const Ticket& ticket, milliseconds timeout) {
  history_->begin(ticket.sequence, ticket.what, timeout);
  job_->recorder->start(ticket.record);
}

template <class Calls>
void ProcessGroup::Impl::execute(const Ticket& ticket, Device device, milliseconds timeout,
                                 Calls&& calls) {
  std::array<char, core::StatusPage::kText> status;
  const std::size_t status_size = core::tells_status() ? ticket.what.write(status) : 0;
  const core::WaitMark mark({status.data(), status_size}, core::WaitMark::Kind::collective);
  const Turn turn(*this, ticket);
  const std::string observed = core::WorkObservation::any() ? text_of(ticket) : std::string();
  core::WorkSpan span(core::ObservedWork::Kind::collective, observed, device);
  show(ticket, span);
  try {
    if (failure_->is_set()) core::fail<CommunicationError>(ticket.operation, failure_->reason());
    if (!ticket.pair) begin_collective(ticket, timeout);
    calls();
    if (!ticket.pair) job_->recorder->complete(ticket.record);
  } catch (const GroupBroken& error) {  // the reason is known
    abort(error.reason());
    explain(ticket, error.what());
  } catch (const CommunicationError& error) {
    explain(ticket, error.what());
  } catch (const std::exception& error) {
    // Others are in this collective, or will be: they must not wait for this rank. Unless two ranks
    // were to meet, and this one has not begun.
    const bool begun =
        !ticket.pair || dynamic_cast<const core::InvalidArgument*>(&error) == nullptr;
    if (begun) {
      abort(core::str("rank ", members_.job_rank(), " failed in ", numbered(ticket), ": ",
                      error.what()));
    }
    throw;
  }
}

CollectiveId ProcessGroup::Impl::id_of(const Ticket& ticket) const {
  return {ticket.sequence, fingerprint(ticket.what, ticket.sequence) ^ members_.id,
          [this, &ticket] { return numbered(ticket); }};
}

Collectives& ProcessGroup::Impl::begin(const Ticket& ticket, Device device) {
  Collectives& backend = this->backend(device);
  backend.begin(id_of(ticket));
  return backend;
}

/// Recorded in a graph. The other ranks hear of it, and it has a number, at each replay: to them it
/// is one collective, whether it is replayed here or called.
void ProcessGroup::Impl::capture(const char* operation, const Description& what, Device device,
                                 const QueuedCalls& work) {
  if (device.is_cpu()) refuse_in_capture("a collective of the host's tensors", what);
  const Ticket ticket = take_turn(operation, what);
  const Turn turn(*this, ticket);
  if (!cuda_ || !known_.contains(what.hash()))
    refuse_in_capture("a collective that no warm-up has called", what);
  core::at_each_replay({.before = [self = shared_from_this(), operation, what](const Stream&) {
    self->note_replay(operation, what);
  }});
  cuda_->begin(id_of(ticket));
  work(*cuda_);
}

/// What the host does once would not be done at the replays.
void ProcessGroup::Impl::refuse_in_capture(const char* kind, const Description& what) const {
  if (!core::capturing()) return;
  core::refuse_in_capture("group", core::str(kind, ", ", what.text(), members_.name).c_str());
}

void ProcessGroup::Impl::note_replay(const char* operation, const Description& what) {
  const Ticket ticket = take_ticket(operation, what);
  execute(ticket, Device{}, options().timeout, [&] {
    history_->mark_untagged();
    cuda_->begin(id_of(ticket));
  });
}

/// Send and receive, in which two ranks take part: nobody else would connect.
void ProcessGroup::Impl::meet(const Ticket& ticket) {
  const Pair& pair = *ticket.pair;
  const auto& backend = pair.x.device.is_cpu() ? cpu_ : cuda_;
  CAIRN_CHECK(backend && cpu_, ticket.operation,
              "expected an earlier collective of all ranks on this kind of tensor, which connects "
              "them, got none (call barrier() or broadcast())");
  const int peer = members_.ranks[static_cast<std::size_t>(pair.peer)];
  const std::string what = text_of(ticket);
  const PairMessage message = history_->begin_pair(peer, pair.sends, what, options().timeout);
  if (pair.x.device.is_cuda()) agree_with_peer(pair);
  backend->begin_message(message, what);
  pair.sends ? backend->send(pair.x, pair.peer, pair.tag)
             : backend->receive(pair.x, pair.peer, pair.tag);
}

/// What agree() is for collectives.
void ProcessGroup::Impl::agree_with_peer(const Pair& pair) {
  const Description what(core::str(pair.x.dtype, ' ', pair.x.numel(), ' ', pair.tag));
  if (!is_new(known_to_peers_[{pair.peer, pair.sends}], what.hash())) return;
  pair.sends ? cpu_->send_header(pair.x, pair.peer, pair.tag)
             : cpu_->receive_header(pair.x, pair.peer, pair.tag);
}

/// Data of collectives that differ must never meet. The CPU's messages carry a fingerprint; what a
/// GPU's library moves does not, so ranks that call something for the first time compare it before.
void ProcessGroup::Impl::agree(const Ticket& ticket) {
  if (!is_new(known_, ticket.what.hash())) return;
  gather_texts(begin(ticket, Device{}), "", static_cast<std::size_t>(world_size()));
}

void ProcessGroup::Impl::perform(const Ticket& ticket, Device device, const QueuedCalls& work) {
  execute(ticket, device, options().timeout, [&] {
    if (ticket.pair) return meet(ticket);
    if (device.is_cuda()) {
      history_->mark_untagged();
      agree(ticket);
    }
    work(begin(ticket, device));
  });
}

/// Waits in a stream for its turn. Where the stream drops it unrun (an earlier error of its), later
/// collectives must not wait for it.
class ProcessGroup::Impl::Queued {
 public:
  Queued(std::shared_ptr<Impl> impl, Ticket ticket)
      : impl_(std::move(impl)), ticket_(std::move(ticket)) {}
  ~Queued() {
    if (!ran_)
      impl_->abort(core::str("rank ", impl_->members_.job_rank(), " skipped ",
                             impl_->text_of(ticket_), " after an error in its stream"));
  }
  Queued(const Queued&) = delete;
  Queued& operator=(const Queued&) = delete;
  void run(Device device, const QueuedCalls& work) {
    ran_ = true;
    impl_->perform(ticket_, device, work);
  }

 private:
  std::shared_ptr<Impl> impl_;
  Ticket ticket_;
  bool ran_ = false;
};

void ProcessGroup::Impl::run_pair(const Pair& pair, const Description& what) {
  if (!history_) return;
  refuse_in_capture("a message between two ranks", what);
  const Ticket ticket = take_ticket(pair.operation, what, pair);
  const Device device = pair.x.device;
  runs_here(device) ? perform(ticket, device, {}) : queue(ticket, device, {});
}

bool ProcessGroup::Impl::runs_here(Device device) {
  return device.is_cuda() || Stream::current(device).is_inline();
}

void ProcessGroup::Impl::queue(const Ticket& ticket, Device device, const QueuedCalls& work) {
  const auto queued = std::make_shared<Queued>(shared_from_this(), ticket);
  Stream::current(device).submit([queued, device, work] { queued->run(device, work); });
}

void ProcessGroup::Impl::run_now(const char* operation, const Description& what,
                                 milliseconds timeout, const QueuedCalls& work) {
  if (!history_) return;
  refuse_in_capture("an exchange between ranks by the host", what);
  const Ticket ticket = take_ticket(operation, what);
  execute(ticket, Device{}, timeout, [&] { work(begin(ticket, Device{})); });
}

std::vector<std::string> ProcessGroup::Impl::exchange(const char* operation,
                                                      const Description& what,
                                                      const std::string& value,
                                                      milliseconds timeout) {
  std::vector<std::string> values{value};
  run_now(operation, what, timeout, [&](Collectives& backend) {
    values = gather_texts(backend, value, static_cast<std::size_t>(world_size()));
  });
  return values;
}

Stream ProcessGroup::Impl::stream(Device device) {
  const std::lock_guard lock(streams_mutex_);
  for (const Stream& stream : streams_) {
    if (stream.device() == device) return stream;
  }
  return streams_.emplace_back(Stream::create(device, "collectives"));
}

void ProcessGroup::Impl::check() const {
  if (!history_) return;
  if (failure_->is_set()) core::fail<CommunicationError>("group", failure_->reason());
}

void ProcessGroup::Impl::wait() {
  const core::WaitMark mark("waiting for collectives on the device");
  try {
    if (cuda_ && !core::capturing()) cuda_->wait();  // what is recorded is not under way
  } catch (const CommunicationError& error) {
    core::fail<CommunicationError>("group", reason_of(error.what()), "; rank ", members_.job_rank(),
                                   ": ", error.what());
  }
  check();
}

void ProcessGroup::Impl::give_up(const std::string& reason) {
  if (history_) history_->give_up(reason);
}

/// Of a rank that gave up, they hear why it did.
void ProcessGroup::Impl::tell_of_exception(const std::string& words) {
  if (!job_->coordinator || failure_->is_set()) return;
  const std::string why = history_ ? history_->why_given_up() : "";
  abort(core::str("rank ", members_.job_rank(), why.empty() ? words : " gave up: " + why));
}

/// The exception's own text cannot be had before it is caught.
void ProcessGroup::Impl::tell_why_it_ends() noexcept {
  const bool last = job_.use_count() == 1;
  if (!last || std::uncaught_exceptions() <= job_->exceptions) return;
  try {
    tell_of_exception(
        " threw an exception outside of its collectives (its own output has the text; "
        "ProcessGroup::run passes it on)");
  } catch (const std::exception&) {  // they hear that it has left
  }
}

/// The others hear this rank's first reason, whichever thread tells them: later ones follow from
/// it.
void ProcessGroup::Impl::abort(const std::string& reason) {
  failure_->set(reason);
  if (job_->coordinator) job_->coordinator->break_group(failure_->reason());
}

}  // namespace cairn::parallel
