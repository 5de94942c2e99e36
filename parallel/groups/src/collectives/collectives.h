// What a backend does: collectives on checked views, one at a time, in the order of their numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/tensor_view.h"
#include "cairn/parallel/process_group.h"
#include "control/history.h"

namespace cairn::parallel {

/// Elements of each rank, in rank order.
using Counts = std::vector<std::int64_t>;

/// A collective that is called.
struct CollectiveId {
  std::uint64_t sequence = 0;
  /// Of its number and description: data of different ones never meets.
  std::uint64_t fingerprint = 0;
  /// In errors: "collective 41, all_reduce sum f32[3] 'x'". To be called before begin() returns.
  std::function<std::string()> what;
};

class Collectives {
 public:
  virtual ~Collectives() = default;
  /// Before each collective.
  virtual void begin(const CollectiveId& called) = 0;
  virtual void all_reduce(const TensorView& x, ReduceOp op) = 0;
  virtual void broadcast(const TensorView& x, int root) = 0;
  // y of reduce and gather and x of scatter are undefined on other ranks than the root.
  virtual void reduce(const TensorView& x, const TensorView& y, ReduceOp op, int root) = 0;
  virtual void all_gather(const TensorView& x, const TensorView& y, const Counts& counts) = 0;
  virtual void gather(const TensorView& x, const TensorView& y, const Counts& counts, int root) = 0;
  virtual void scatter(const TensorView& x, const TensorView& y, const Counts& counts,
                       int root) = 0;
  virtual void reduce_scatter(const TensorView& x, const TensorView& y, const Counts& counts,
                              ReduceOp op) = 0;
  /// `even`: all ranks know that all counts are the same.
  virtual void all_to_all(const TensorView& x, const Counts& send_counts, const TensorView& y,
                          const Counts& receive_counts, bool even) = 0;
  virtual void barrier() = 0;
  /// Before each message between two ranks.
  virtual void begin_message(const PairMessage& /*message*/, const std::string& /*what*/) {}
  virtual void send(const TensorView& x, int to, std::uint64_t tag) = 0;
  virtual void receive(const TensorView& x, int from, std::uint64_t tag) = 0;
  /// Of a message whose data another backend moves: dtype, size and tag, which are compared. The
  /// CPU's.
  virtual void send_header(const TensorView& /*x*/, int /*to*/, std::uint64_t /*tag*/) {
    core::fail<core::Unsupported>("send_header", "expected the CPU's backend");
  }
  virtual void receive_header(const TensorView& /*x*/, int /*from*/, std::uint64_t /*tag*/) {
    core::fail<core::Unsupported>("receive_header", "expected the CPU's backend");
  }
  /// From any thread: collectives under way end with an error soon, later ones at once. Work that
  /// waits on a device for an aborted one goes on, with half of its result: wait() tells.
  virtual void abort() noexcept = 0;
  /// Returns when all collectives so far are done on the device too. Throws CommunicationError
  /// where one was aborted or failed.
  virtual void wait() {}
  /// Called now and then by the watchdog, from its thread: what is wrong with the collectives that
  /// are under way on the device; empty: nothing.
  virtual std::string check() { return ""; }
  /// What the device has not ended, asked by the watchdog too.
  virtual std::optional<Pending> pending() { return std::nullopt; }
  /// A collective: connects parts of the ranks, each those with its `color` (0 or more; -1: none),
  /// in the order of `place`. Null: parts connect by themselves.
  virtual std::unique_ptr<Collectives> split(int /*color*/, int /*place*/) { return nullptr; }
  /// The last call: ends the connections together with the other ranks, after what is under way.
  virtual void close() noexcept {}
};

}  // namespace cairn::parallel
