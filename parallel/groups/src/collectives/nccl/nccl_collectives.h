// A rank's NCCL communicator, and what the device has not done of it yet.
#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cairn/core/memory.h"
#include "cairn/core/stream.h"
#include "collectives/nccl_backend.h"

namespace cairn::parallel {

inline bool is_error(ncclResult_t result) {
  return result != ncclSuccess && result != ncclInProgress;
}

/// A number in memory of the host that the GPU reads.
std::shared_ptr<core::Storage> zero_for(Device device);

/// A collective or message that the device may not have done yet.
struct InFlight {
  std::string what;
  std::uint64_t sequence = 0;
  std::optional<PairMessage> message;
  /// Points in its stream before and after it.
  core::Event reached, done;
  /// When the watchdog first saw the first one.
  std::optional<std::chrono::steady_clock::time_point> reached_since;
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
  InFlight start(const core::Stream& stream);
  void watch(InFlight started, const core::Stream& stream);
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

}  // namespace cairn::parallel
