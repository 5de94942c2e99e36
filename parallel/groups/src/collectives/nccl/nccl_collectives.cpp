#include "collectives/nccl/nccl_collectives.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/log.h"
#include "pause.h"

namespace cairn::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using core::Event;
using core::Stream;

// Who has not come is found by asking all ranks, which takes a while beyond the limit.
constexpr std::chrono::seconds kJudgement{5};

/// The ids by which ranks find each other, made by ranks that lie evenly apart: each is asked by as
/// many ranks as there are ids.
std::vector<ncclUniqueId> shared_ids(const Membership& membership) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 23, 0)
  const int count = std::max(1, static_cast<int>(std::sqrt(membership.world_size)));
#else
  const int count = 1;
#endif
  std::vector<int> makers;
  for (int i = 0; i < count; ++i) makers.push_back(i * membership.world_size / count);
  ncclUniqueId id{};
  std::string own;
  if (std::find(makers.begin(), makers.end(), membership.rank) != makers.end()) {
    if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess)
      core::fail<core::CommunicationError>("nccl", "cannot start: ", ncclGetErrorString(result));
    own.assign(id.internal, sizeof id.internal);
  }
  const auto all = share(membership, "nccl", own);
  std::vector<ncclUniqueId> ids;
  for (const int maker : makers) {
    const std::string& bytes = all[static_cast<std::size_t>(maker)];
    if (bytes.size() != sizeof id.internal)
      core::fail<core::CommunicationError>("nccl", "got an id of ", bytes.size(),
                                           " bytes from rank ", maker);
    std::memcpy(id.internal, bytes.data(), bytes.size());
    ids.push_back(id);
  }
  return ids;
}

ncclConfig_t nonblocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

}  // namespace

std::shared_ptr<core::Storage> zero_for(Device device) {
  const core::DeviceGuard guard(device);
  auto memory = core::Storage::allocate_pinned(sizeof(float));
  *static_cast<float*>(memory->data()) = 0.0f;
  return memory;
}

NcclCollectives::NcclCollectives(const Membership& membership)
    : rank_(membership.rank),
      device_(membership.device),
      timeout_(membership.timeout),
      store_(membership.store) {
  const core::DeviceGuard guard(device_);
  auto ids = shared_ids(membership);
  ncclConfig_t config = nonblocking();
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 23, 0)
  finish_start(ncclCommInitRankScalable(&communicator_, membership.world_size, rank_,
                                        static_cast<int>(ids.size()), ids.data(), &config));
#else
  finish_start(
      ncclCommInitRankConfig(&communicator_, membership.world_size, ids[0], rank_, &config));
#endif
}

NcclCollectives::NcclCollectives(const NcclCollectives& parent, int rank, ncclComm_t communicator)
    : rank_(rank),
      device_(parent.device_),
      timeout_(parent.timeout_),
      store_(parent.store_),
      communicator_(communicator) {
  finish_start(ncclInProgress);
}

void NcclCollectives::finish_start(ncclResult_t result) {
  try {
    finish("initialisation", result);
  } catch (...) {
    abort();
    throw;
  }
}

/// Before it everything of this communicator must be done.
std::unique_ptr<Collectives> NcclCollectives::split([[maybe_unused]] int color,
                                                    [[maybe_unused]] int place) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0)
  wait();
  const core::DeviceGuard guard(device_);
  ncclConfig_t config = nonblocking();
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    throw_if_aborted("a split");
    result = ncclCommSplit(communicator_, color < 0 ? NCCL_SPLIT_NOCOLOR : color, place, &part_,
                           &config);
  }
  finish("a split", result);
  if (color >= 0)
    return std::make_unique<NcclCollectives>(*this, place, std::exchange(part_, nullptr));
#endif
  return nullptr;
}

NcclCollectives::~NcclCollectives() {
  close();
}

void NcclCollectives::abort() noexcept {
  aborted_ = true;
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr) return;
  try {
    forget_done();
  } catch (const core::Error&) {  // what is left in flight is named; more is not lost
  }
  std::atomic_ref(*static_cast<float*>(broken_->data())) = 1.0f;
  ncclCommAbort(communicator_);
  communicator_ = nullptr;
  if (part_ != nullptr) ncclCommAbort(std::exchange(part_, nullptr));
}

/// Waits for collectives that are under way, here and on the other ranks: to end a communicator
/// before takes the others' from them.
void NcclCollectives::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (communicator_ == nullptr) return;
  }
  try {
    finish_close();
  } catch (const core::Error& error) {
    if (!aborted_) log::warn("ending NCCL: {}", error.what());
    abort();
  }
}

void NcclCollectives::finish_close() {
  const core::DeviceGuard guard(device_);
  finish("the end",
         ncclInProgress);  // a call that another rank's failure has cut off may not have ended
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    throw_if_aborted("the end");
    result = ncclCommFinalize(communicator_);
  }
  finish("the end", result);
  const std::lock_guard lock(mutex_);
  throw_if_aborted("the end");
  const ncclComm_t communicator = std::exchange(communicator_, nullptr);
  if (result = ncclCommDestroy(communicator); result != ncclSuccess) fail("the end", result);
}

void NcclCollectives::fail(const std::string& name, ncclResult_t result) const {
  core::fail<core::CommunicationError>("nccl", name, " failed on ", device_, ": ",
                                       ncclGetErrorString(result), " (NCCL_DEBUG=INFO tells more)");
}

void NcclCollectives::throw_if_aborted(const std::string& name) const {
  if (aborted_ || communicator_ == nullptr)
    core::fail<core::CommunicationError>("nccl", name, " was aborted on ", device_);
}

/// Waits until the call has done its work on the host; the device's part is in the stream.
void NcclCollectives::finish(const std::string& name, ncclResult_t result) {
  const auto deadline = Clock::now() + timeout_ + kJudgement;
  for (Pause pause;; pause()) {
    if (is_error(result)) fail(name, result);
    {
      const std::lock_guard lock(mutex_);
      throw_if_aborted(name);
      result = state();
    }
    if (result == ncclSuccess) return;
    store_->throw_if_cancelled("nccl");
    if (Clock::now() > deadline)
      core::fail<core::CommunicationError>("nccl", name, " did not finish in time on ", device_);
  }
}

// ---- The device's part

InFlight NcclCollectives::start(const Stream& stream) {
  const std::lock_guard lock(mutex_);
  throw_if_aborted(what_);
  forget_done();
  InFlight started = spare_.empty() ? InFlight{{}, 0, {}, Event(device_), Event(device_), {}}
                                    : std::move(spare_.back());
  if (!spare_.empty()) spare_.pop_back();
  started.what = what_;
  started.sequence = sequence_;
  started.message = message_;
  started.reached_since.reset();
  started.reached.record(stream);
  return started;
}

void NcclCollectives::watch(InFlight started, const Stream& stream) {
  started.done.record(stream);
  const std::lock_guard lock(mutex_);
  in_flight_.push_back(std::move(started));
}

/// Of the graph that is being recorded: a replay is watched as its first collective. The group's
/// own hook keeps this object.
void NcclCollectives::watch_replays() {
  const std::uint64_t capture = core::capture_number();
  if (std::exchange(watched_capture_, capture) == capture) return;
  const auto replay = std::make_shared<std::optional<InFlight>>();
  core::at_each_replay({.broken = {broken_->data(), {1}, DType::f32, device_},
                        .before = [this, replay](const Stream& stream) { *replay = start(stream); },
                        .after =
                            [this, replay](const Stream& stream) {
                              watch(std::move(**replay), stream);
                              replay->reset();
                            }});
}

/// The device does the collectives of one communicator in order.
void NcclCollectives::forget_done() {
  while (!in_flight_.empty() && in_flight_.front().done.done()) {
    spare_.push_back(std::move(in_flight_.front()));
    in_flight_.pop_front();
  }
}

/// The communicator's, which has what its threads found too.
ncclResult_t NcclCollectives::state() const {
  ncclResult_t found = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &found);
  return asked == ncclSuccess ? found : asked;
}

std::string NcclCollectives::under_way() const {
  return in_flight_.empty() ? "the communicator" : in_flight_.front().what;
}

std::string NcclCollectives::trouble() {
  forget_done();
  if (const ncclResult_t state = this->state(); is_error(state))
    return core::str(under_way(), ", failed on ", device_, ": ", ncclGetErrorString(state));
  const InFlight* const first = first_in_flight();
  if (first == nullptr || !first->reached_since) return "";
  if (Clock::now() - *first->reached_since < timeout_ + kJudgement) return "";
  return core::str(first->what, ", did not end on ", device_, " within ",
                   static_cast<double>(timeout_.count()) / 1000.0, " s");
}

/// The one that the device comes to next, or is in.
const InFlight* NcclCollectives::first_in_flight() {
  if (in_flight_.empty()) return nullptr;
  InFlight& first = in_flight_.front();
  if (!first.reached_since && first.reached.done()) first.reached_since = Clock::now();
  return &first;
}

std::optional<Pending> NcclCollectives::pending() {
  if (aborted_) return std::nullopt;
  cudaSetDevice(device_.index);  // the watchdog's thread uses no other
  const std::lock_guard lock(mutex_);
  try {
    forget_done();
    const InFlight* const first = first_in_flight();
    if (first == nullptr) return std::nullopt;
    Pending pending{.since = first->reached_since, .timeout = timeout_};
    for (const InFlight& each : in_flight_) {
      if (!each.message) {
        if (!pending.sequence) pending.sequence = each.sequence;
      } else if (&each == first && pending.since) {
        pending.message = each.message;
        pending.what = each.what;
      } else {
        pending.to_come.push_back(*each.message);
      }
    }
    return pending;
  } catch (const core::Error&) {  // check() tells
    return std::nullopt;
  }
}

std::string NcclCollectives::check() {
  if (aborted_) return "";
  cudaSetDevice(device_.index);  // the watchdog's thread uses no other
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr) return "";
  try {
    const std::string found = trouble();
    return found.empty() ? found : core::str("rank ", rank_, " failed: ", found);
  } catch (const core::Error& error) {
    return core::str("rank ", rank_, " failed: ", under_way(), ": ", error.what());
  }
}

void NcclCollectives::wait() {
  std::vector<Event> events;
  {
    const std::lock_guard lock(mutex_);
    throw_if_aborted(under_way());
    for (const InFlight& collective : in_flight_) events.push_back(collective.done);
  }
  // Polls: the device may be stuck ahead of the collectives, and then no abort frees it.
  for (const Event& event : events) {
    for (Pause pause; !aborted_ && !event.done(); pause()) {
    }
  }
  const std::lock_guard lock(mutex_);
  throw_if_aborted(under_way());
  if (const ncclResult_t state = this->state(); is_error(state)) fail(under_way(), state);
  forget_done();
}

std::unique_ptr<Collectives> connect_nccl(const Membership& membership) {
  return std::make_unique<NcclCollectives>(membership);
}

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "";
  return core::str(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace cairn::parallel
