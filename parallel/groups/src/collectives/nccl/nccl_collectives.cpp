#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/graph.h"
#include "cairn/core/log.h"
#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "cairn/core/tensor.h"
#include "collectives/nccl_backend.h"
#include "pause.h"

namespace cairn::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using core::Event;
using core::Stream;

// Who has not come is found by asking all ranks, which takes a while beyond the limit.
constexpr std::chrono::seconds kJudgement{5};

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return ncclFloat16;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
    case DType::i16:
      core::fail("nccl", "expected a dtype that NCCL computes with, got i16");
    case DType::i32:
      return ncclInt32;
    case DType::i64:
      return ncclInt64;
    case DType::u8:
    case DType::boolean:
      return ncclUint8;
  }
  core::fail("nccl", "unknown dtype ", static_cast<int>(dtype));
}

/// For collectives that only move elements.
ncclDataType_t moved_type_of(DType dtype) {
  return dtype == DType::i16 ? ncclFloat16 : type_of(dtype);
}

ncclRedOp_t op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return ncclSum;
    case ReduceOp::mean:
      return ncclAvg;
    case ReduceOp::max:
      return ncclMax;
    case ReduceOp::min:
      return ncclMin;
    case ReduceOp::product:
      return ncclProd;
  }
  core::fail("nccl", "unknown operation ", static_cast<int>(op));
}

std::size_t count(const TensorView& x) {
  return static_cast<std::size_t>(x.numel());
}

bool are_even(const Counts& counts) {
  return std::equal(counts.begin() + 1, counts.end(), counts.begin());
}

/// Rank r's part of a tensor that is cut by counts.
TensorView part_of(const TensorView& whole, const Counts& counts, std::size_t r) {
  std::int64_t before = 0;
  for (std::size_t i = 0; i < r; ++i) before += counts[i];
  auto* data = static_cast<std::byte*>(whole.data) +
               static_cast<std::size_t>(before) * core::size_of(whole.dtype);
  return {data, {counts[r]}, whole.dtype, whole.device};
}

void copy_own_part(const TensorView& x, const TensorView& y) {
  if (x.numel() == 0 || x.data == y.data) return;
  core::copy_bytes(TensorView(x.data, {x.numel()}, x.dtype, x.device),
                   TensorView(y.data, {y.numel()}, y.dtype, y.device));
}

bool is_error(ncclResult_t result) {
  return result != ncclSuccess && result != ncclInProgress;
}

/// The calls of a group; what fails first is its result.
class Calls {
 public:
  void add(ncclResult_t result) {
    if (result_ == ncclSuccess && is_error(result)) result_ = result;
  }
  ncclResult_t result() const { return result_; }

 private:
  ncclResult_t result_ = ncclSuccess;
};

/// A number in memory of the host that the GPU reads.
std::shared_ptr<core::Storage> zero_for(Device device) {
  const core::DeviceGuard guard(device);
  auto memory = core::Storage::allocate_pinned(sizeof(float));
  *static_cast<float*>(memory->data()) = 0.0f;
  return memory;
}

/// A collective or message that the device may not have done yet.
struct InFlight {
  std::string what;
  std::uint64_t sequence = 0;
  std::optional<PairMessage> message;
  Event reached, done;                             // points in its stream before and after it
  std::optional<Clock::time_point> reached_since;  // when the watchdog first saw the first one
};

/// A non-blocking communicator: calls return at once and are finished by polling, so that abort()
/// ends them from another thread. Each call is finished before anything else is put into its
/// stream, because only then NCCL's kernel is there.
///
/// The device's part is watched by check(): an aborted kernel ends as if it had succeeded, so
/// nobody but wait() knows whether results are whole.
class NcclCollectives : public Collectives {
 public:
  explicit NcclCollectives(const Membership& membership);
  /// Of a part of parent's ranks, in which this one is `rank`; takes the communicator.
  NcclCollectives(const NcclCollectives& parent, int rank, ncclComm_t communicator);
  ~NcclCollectives() override;
  /// NCCL has no tags; audits of what was called find what differs.
  void begin(const CollectiveId& called) override {
    what_ = called.what();
    sequence_ = called.sequence;
    message_.reset();
  }
  void begin_message(const PairMessage& message, const std::string& what) override {
    what_ = what;
    message_ = message;
  }
  void all_reduce(const TensorView& x, ReduceOp op) override;
  void broadcast(const TensorView& x, int root) override;
  void reduce(const TensorView& x, const TensorView& y, ReduceOp op, int root) override;
  void all_gather(const TensorView& x, const TensorView& y, const Counts& counts) override;
  void gather(const TensorView& x, const TensorView& y, const Counts& counts, int root) override;
  void scatter(const TensorView& x, const TensorView& y, const Counts& counts, int root) override;
  void reduce_scatter(const TensorView& x, const TensorView& y, const Counts& counts,
                      ReduceOp op) override;
  void all_to_all(const TensorView& x, const Counts& send_counts, const TensorView& y,
                  const Counts& receive_counts, bool even) override;
  void barrier() override;
  std::unique_ptr<Collectives> split(int color, int place) override;
  void send(const TensorView& x, int to, std::uint64_t tag) override;
  void receive(const TensorView& x, int from, std::uint64_t tag) override;
  void abort() noexcept override;
  void wait() override;
  std::string check() override;
  std::optional<Pending> pending() override;
  void close() noexcept override;

 private:
  template <class Call>
  void run(const char* name, const TensorView& x, Call&& call);
  template <class F>
  void run_group(const char* name, const TensorView& x, F&& calls);
  void send_to(const TensorView& x, int to);
  void receive_from(const TensorView& x, int from);
  void finish_start(ncclResult_t result);
  void finish(const std::string& name, ncclResult_t result);
  InFlight start(const Stream& stream);
  void watch(InFlight started, const Stream& stream);
  void watch_replays();
  void finish_close();
  // These need mutex_.
  void forget_done();
  const InFlight* first_in_flight();
  std::string trouble();
  void throw_if_aborted(const std::string& name) const;
  ncclResult_t state() const;
  std::string under_way() const;
  [[noreturn]] void fail(const std::string& name, ncclResult_t result) const;

  int rank_;
  Device device_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Store> store_;
  std::shared_ptr<core::Storage> broken_ = zero_for(device_);  // f32 [1]
  // What is being called.
  std::string what_;
  std::uint64_t sequence_ = 0;
  std::optional<PairMessage> message_;
  std::mutex mutex_;  // all that follows: the watchdog's thread checks and aborts
  ncclComm_t communicator_ = nullptr;
  ncclComm_t part_ = nullptr;  // of a split: NCCL may write it until the communicator ends
  std::deque<InFlight> in_flight_;
  std::vector<InFlight> spare_;  // their events are used again
  std::uint64_t watched_capture_ = 0;
  std::atomic<bool> aborted_ = false;
};

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

template <class Call>
void NcclCollectives::run(const char* name, const TensorView& x, Call&& call) {
  CAIRN_CHECK(x.device == device_, name, "expected tensors on this rank's ", device_,
              ", got one on ", x.device);
  const core::DeviceGuard guard(device_);
  const Stream stream = Stream::current(device_);
  std::optional<InFlight> started;
  if (core::capturing()) {
    watch_replays();
  } else {
    started = start(stream);
  }
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    throw_if_aborted(what_);
    result = call(static_cast<cudaStream_t>(stream.native()));
  }
  finish(what_, result);
  if (started) watch(std::move(*started), stream);
}

/// Calls that NCCL does as one, at the same time.
template <class F>
void NcclCollectives::run_group(const char* name, const TensorView& x, F&& calls) {
  run(name, x, [&](cudaStream_t stream) {
    if (const ncclResult_t result = ncclGroupStart(); result != ncclSuccess) return result;
    Calls group;
    calls(group, stream);
    const ncclResult_t end = ncclGroupEnd();
    return group.result() == ncclSuccess ? end : group.result();
  });
}

void NcclCollectives::all_reduce(const TensorView& x, ReduceOp op) {
  if (x.numel() == 0) return;
  run("all_reduce", x, [&](cudaStream_t stream) {
    return ncclAllReduce(x.data, x.data, count(x), type_of(x.dtype), op_of(op), communicator_,
                         stream);
  });
}

void NcclCollectives::broadcast(const TensorView& x, int root) {
  if (x.numel() == 0) return;
  run("broadcast", x, [&](cudaStream_t stream) {
    return ncclBroadcast(x.data, x.data, count(x), moved_type_of(x.dtype), root, communicator_,
                         stream);
  });
}

void NcclCollectives::reduce(const TensorView& x, const TensorView& y, ReduceOp op, int root) {
  if (x.numel() == 0) return;
  run("reduce", x, [&](cudaStream_t stream) {
    return ncclReduce(x.data, y.data, count(x), type_of(x.dtype), op_of(op), root, communicator_,
                      stream);
  });
}

/// Uneven parts: each is broadcast by its rank.
void NcclCollectives::all_gather(const TensorView& x, const TensorView& y, const Counts& counts) {
  if (y.numel() == 0) return;
  const ncclDataType_t type = moved_type_of(y.dtype);
  if (are_even(counts)) {
    return run("all_gather", y, [&](cudaStream_t stream) {
      return ncclAllGather(x.data, y.data, count(x), type, communicator_, stream);
    });
  }
  run_group("all_gather", y, [&](Calls& calls, cudaStream_t stream) {
    for (std::size_t r = 0; r < counts.size(); ++r) {
      if (counts[r] == 0) continue;
      const TensorView part = part_of(y, counts, r);
      const void* own = static_cast<int>(r) == rank_ ? x.data : part.data;
      calls.add(ncclBroadcast(own, part.data, count(part), type, static_cast<int>(r), communicator_,
                              stream));
    }
  });
}

void NcclCollectives::gather(const TensorView& x, const TensorView& y, const Counts& counts,
                             int root) {
  const ncclDataType_t type = moved_type_of(x.dtype);
  if (rank_ != root) return send_to(x, root);
  copy_own_part(x, part_of(y, counts, static_cast<std::size_t>(root)));
  run_group("gather", y, [&](Calls& calls, cudaStream_t stream) {
    for (std::size_t r = 0; r < counts.size(); ++r) {
      if (static_cast<int>(r) == root || counts[r] == 0) continue;
      const TensorView part = part_of(y, counts, r);
      calls.add(ncclRecv(part.data, count(part), type, static_cast<int>(r), communicator_, stream));
    }
  });
}

void NcclCollectives::scatter(const TensorView& x, const TensorView& y, const Counts& counts,
                              int root) {
  const ncclDataType_t type = moved_type_of(y.dtype);
  if (rank_ != root) return receive_from(y, root);
  copy_own_part(part_of(x, counts, static_cast<std::size_t>(root)), y);
  run_group("scatter", x, [&](Calls& calls, cudaStream_t stream) {
    for (std::size_t r = 0; r < counts.size(); ++r) {
      if (static_cast<int>(r) == root || counts[r] == 0) continue;
      const TensorView part = part_of(x, counts, r);
      calls.add(ncclSend(part.data, count(part), type, static_cast<int>(r), communicator_, stream));
    }
  });
}

/// Uneven parts: each is reduced to its rank.
void NcclCollectives::reduce_scatter(const TensorView& x, const TensorView& y, const Counts& counts,
                                     ReduceOp op) {
  if (x.numel() == 0) return;
  const ncclDataType_t type = type_of(x.dtype);
  if (are_even(counts)) {
    return run("reduce_scatter", x, [&](cudaStream_t stream) {
      return ncclReduceScatter(x.data, y.data, count(y), type, op_of(op), communicator_, stream);
    });
  }
  run_group("reduce_scatter", x, [&](Calls& calls, cudaStream_t stream) {
    for (std::size_t r = 0; r < counts.size(); ++r) {
      if (counts[r] == 0) continue;
      const TensorView part = part_of(x, counts, r);
      void* out = static_cast<int>(r) == rank_ ? y.data : nullptr;
      calls.add(ncclReduce(part.data, out, count(part), type, op_of(op), static_cast<int>(r),
                           communicator_, stream));
    }
  });
}

void NcclCollectives::all_to_all(const TensorView& x, const Counts& send_counts,
                                 const TensorView& y, const Counts& receive_counts, bool /*even*/) {
  const ncclDataType_t type = moved_type_of(x.dtype);
  const auto me = static_cast<std::size_t>(rank_);
  copy_own_part(part_of(x, send_counts, me), part_of(y, receive_counts, me));
  run_group("all_to_all", x, [&](Calls& calls, cudaStream_t stream) {
    for (std::size_t r = 0; r < send_counts.size(); ++r) {
      if (r == me) continue;
      const TensorView out = part_of(x, send_counts, r), in = part_of(y, receive_counts, r);
      const int peer = static_cast<int>(r);
      if (send_counts[r] > 0)
        calls.add(ncclSend(out.data, count(out), type, peer, communicator_, stream));
      if (receive_counts[r] > 0)
        calls.add(ncclRecv(in.data, count(in), type, peer, communicator_, stream));
    }
  });
}

void NcclCollectives::barrier() {
  const core::DeviceGuard guard(device_);
  const auto one = core::Storage::allocate(sizeof(float), device_);
  const TensorView x(one->data(), {1}, DType::u8, device_);
  all_reduce(x, ReduceOp::max);  // of bytes that nobody reads
  wait();
}

void NcclCollectives::send_to(const TensorView& x, int to) {
  if (x.numel() == 0) return;
  run("send", x, [&](cudaStream_t stream) {
    return ncclSend(x.data, count(x), moved_type_of(x.dtype), to, communicator_, stream);
  });
}

void NcclCollectives::receive_from(const TensorView& x, int from) {
  if (x.numel() == 0) return;
  run("recv", x, [&](cudaStream_t stream) {
    return ncclRecv(x.data, count(x), moved_type_of(x.dtype), from, communicator_, stream);
  });
}

void NcclCollectives::send(const TensorView& x, int to, std::uint64_t /*tag*/) {
  send_to(x, to);
}

void NcclCollectives::receive(const TensorView& x, int from, std::uint64_t /*tag*/) {
  receive_from(x, from);
}

}  // namespace

std::unique_ptr<Collectives> connect_nccl(const Membership& membership) {
  return std::make_unique<NcclCollectives>(membership);
}

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "";
  return core::str(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace cairn::parallel
