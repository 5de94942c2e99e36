// ProcessGroup: the processes of a job, and collective operations on views of their tensors.
//
// A handle: copies share the group, which ends with the last of them. Every rank calls the same
// collectives in the same order, from one thread at a time. A collective is done in the order of
// its device's current stream: on the CPU when the call returns (inside a stream's work: in that
// stream's thread), on CUDA queued.
//
//   auto group = parallel::ProcessGroup::from_environment();  // RANK, WORLD_SIZE ...; alone: of one
//   group.all_reduce(gradient, parallel::ReduceOp::mean, "fc.weight");
//
// Backends: none for a group of one; Gloo (TCP) for CPU tensors, NCCL for CUDA tensors, each
// connected by its first collective.
//
// CPU results are the same bits in every run and on every rank, whatever the sizes: contributions
// are combined in rank order, half types in f32 and rounded once. NCCL reduces in the tensor's
// dtype, in the order of its ring or tree.
//
// Errors. Ranks report each collective (number, operation, dtype, shape, name) to the store in rank
// 0; what differs, a rank that leaves while others need it, one that does not come within `timeout`
// and one that dies break the group: the collective in flight and every later one throws
// core::CommunicationError, on every rank, naming the cause, the rank, the operation and `name`.
// The first time a rank uses a description it waits for the store's word before any data moves;
// later times it only tells the store, which costs microseconds, and hears of trouble within a
// heartbeat. A dead process is noticed in about a second where its connection closes, and within
// `heartbeat_timeout` otherwise.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cairn/core/tensor_view.h"
#include "cairn/core/world.h"

namespace cairn::parallel {

enum class ReduceOp : std::uint8_t { sum, mean, max, min };
std::string_view name(ReduceOp op);

struct GroupOptions {
  std::chrono::milliseconds timeout{
      30'000};  // for ranks to meet: at the start and at each collective
  std::chrono::milliseconds heartbeat_timeout{8'000};  // silence after which a rank counts as dead
};

class ProcessGroup {
 public:
  /// The job this process was started in (docs/parallel.md lists the variables); without RANK and
  /// WORLD_SIZE a group of one. Returns when every rank has come. Throws InvalidArgument naming a
  /// variable and its value, CommunicationError for a port in use and for missing ranks, naming
  /// them.
  static ProcessGroup from_environment(const GroupOptions& options = {});
  static ProcessGroup single();
  /// Groups whose ranks are threads of this process, one handle each: for tests and for several
  /// devices in one process. Collectives on CPU tensors only.
  static std::vector<ProcessGroup> in_process(int world_size, const GroupOptions& options = {});

  int rank() const;
  int world_size() const;
  int local_rank() const;  // among the ranks of this machine
  int local_world_size() const;
  /// This rank's device: "cpu" is cpu:0 and "cuda" the GPU of its local rank; "cpu:1", "cuda:3" are
  /// themselves; "" is cuda where there is a GPU for each local rank, else cpu:0. Throws
  /// InvalidArgument naming the devices there are.
  Device device(std::string_view text = "") const;

  // Collectives. Views are dense (any strides without gaps; the same on all ranks), of the same
  // shape and dtype on all ranks, and changed in place. `name` appears in errors: a parameter's
  // name, a metric's.

  /// x = op over all ranks' x. Any dtype but boolean sums; mean is for floating dtypes.
  void all_reduce(const TensorView& x, ReduceOp op = ReduceOp::sum,
                  std::string_view name = "") const;
  /// x = root's x.
  void broadcast(const TensorView& x, int root = 0, std::string_view name = "") const;
  /// y [world_size * n] = all ranks' x [n], in rank order; contiguous, any shapes with these
  /// element counts.
  void all_gather(const TensorView& x, const TensorView& y, std::string_view name = "") const;
  /// y [n] = this rank's part of op over all ranks' x [world_size * n]; contiguous, any shapes with
  /// these element counts.
  void reduce_scatter(const TensorView& x, const TensorView& y, ReduceOp op = ReduceOp::sum,
                      std::string_view name = "") const;
  /// Returns when every rank has come.
  void barrier(std::string_view name = "") const;
  void barrier(std::chrono::milliseconds timeout, std::string_view name = "") const;

  /// Returns when the collectives on CUDA tensors so far are done on the device. Throws
  /// CommunicationError where the group is broken: what they wrote may then be half reduced.
  /// Synchronising a stream does not tell: it ends with success when a collective is aborted.
  void wait() const;
  /// Throws CommunicationError where the group is known to be broken; waits for nothing.
  void check() const;

  // The same for host values; they pass through the store.
  double all_reduce_max(double value, std::string_view name = "") const;
  double all_reduce_sum(double value, std::string_view name = "") const;
  /// Every rank's value (bytes, at most a few megabytes), in rank order.
  std::vector<std::string> exchange(const std::string& value, std::string_view name = "") const;
  /// For jobs without a DistributedDataParallel, whose world() knows of its gradients too.
  core::World world() const;

  /// Breaks the group for every rank: this rank cannot go on, and the others shall know why instead
  /// of waiting for it.
  void abort(std::string_view reason) const;

  class Impl;
  explicit ProcessGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace cairn::parallel
