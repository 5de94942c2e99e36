// ProcessGroup: the processes of a job, and collective operations on views of their tensors.
//
// A handle: copies share the group, which ends with the last of them. Every rank calls the same
// collectives in the same order, from one thread at a time. A collective is done in the order of
// its device's current stream: on the CPU when the call returns (inside a stream's work: in that
// stream's thread), on CUDA queued.
//
//   auto group = parallel::ProcessGroup::from_environment();  // RANK, WORLD_SIZE ...; else of one
//   group.all_reduce(gradient, parallel::ReduceOp::mean, "fc.weight");
//
// Backends: none for a group of one; for CPU tensors shared memory between processes of one host
// and Gloo (TCP) between hosts, for CUDA tensors NCCL, each connected by its first collective.
// CAIRN_BACKEND chooses another way for CPU tensors (docs/parallel.md).
//
// CPU results are the same bits in every run and on every rank, whatever the sizes: contributions
// are combined in rank order, half types in f32 and rounded once. NCCL reduces in the tensor's
// dtype, in the order of its ring or tree.
//
// Errors. Each rank remembers its collectives (number, operation, dtype, shape, name); where one
// does not end, the ranks ask each other where they stand. Ranks that call something else or have
// left, one that does not come within `timeout` and one that dies break the group: the collective
// in flight and every later one throws core::CommunicationError, on every rank, naming the cause,
// the rank, the operation and `name`. While all goes well nothing is sent for that but heartbeats,
// as many in a job of thousands as in one of two. A dead process is noticed in about two seconds
// where its connection closes, and within `heartbeat_timeout` otherwise.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cairn/core/stream.h"
#include "cairn/core/tensor_view.h"
#include "cairn/core/world.h"

struct ncclComm;

namespace cairn::parallel {

enum class ReduceOp : std::uint8_t { sum, mean, max, min, product };
std::string_view name(ReduceOp op);

struct GroupOptions {
  /// For ranks to meet in a collective, and for its data to move: one rank may save or evaluate
  /// meanwhile. After 30 s a warning says who is waited for.
  std::chrono::milliseconds timeout{600'000};
  /// Silence after which a rank counts as dead.
  std::chrono::milliseconds heartbeat_timeout{8'000};
  /// For all ranks to start.
  std::chrono::milliseconds rendezvous_timeout{300'000};
};

/// What ProcessGroup::async() started. A handle: copies stand for the same work.
class [[nodiscard]] Work {
 public:
  /// Whether it has ended, well or not, on the device too. Waits for nothing.
  bool done() const;
  /// Returns when it has ended. Throws CommunicationError where the group is broken.
  void wait() const;
  /// False where it has not ended in time: it goes on, and may be waited for again. Throws as
  /// wait().
  bool wait_for(std::chrono::milliseconds timeout) const;
  /// Why it can end no more; empty: all is well so far. Waits for nothing.
  std::string error() const;

 private:
  friend class ProcessGroup;
  struct Impl;
  explicit Work(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

class ProcessGroup {
 public:
  /// The job this process was started in (docs/parallel.md lists the variables); without RANK and
  /// WORLD_SIZE a group of one. CAIRN_TIMEOUT, CAIRN_HEARTBEAT_TIMEOUT and CAIRN_RENDEZVOUS_TIMEOUT
  /// (seconds) override the options. Returns when every rank has come. Throws InvalidArgument
  /// naming a variable and its value, CommunicationError for a port in use and for missing ranks,
  /// naming them.
  static ProcessGroup from_environment(const GroupOptions& options = {});
  static ProcessGroup single();
  /// The ranks of a communicator of NCCL's (an ncclComm_t), each with its GPU as its device(). They
  /// meet through it, in the current stream of that GPU, and by a port of rank 0's machine, which
  /// is MASTER_ADDR where that is set and else its host name. It stays the caller's, who may use
  /// it, and may end it before the group; the group's collectives have a communicator of their own.
  /// Throws InvalidArgument for none, CommunicationError for ranks that do not come within
  /// `rendezvous_timeout` (then what waits for them stays in the stream until the communicator is
  /// aborted), Unsupported in a build without NCCL.
  static ProcessGroup from_nccl(ncclComm* communicator, const GroupOptions& options = {});
  /// Groups whose ranks are threads of this process, one handle each: for tests and for several
  /// devices in one process. Each rank has a GPU of its own or none.
  static std::vector<ProcessGroup> in_process(int world_size, const GroupOptions& options = {});

  /// The ranks that give the same color, ordered by key and then by rank, as a group of their own,
  /// which lives beside this one. A collective: every rank calls it, and gets a group, of one where
  /// nobody else has its color. Collectives of different groups are not ordered among each other;
  /// on CUDA, let those of one group end before another's begin. What breaks one group breaks them
  /// all.
  ProcessGroup split(int color, int key = 0, std::string_view name = "") const;

  int rank() const;
  int world_size() const;
  int local_rank() const;  // among the ranks of this machine
  int local_world_size() const;
  /// This rank's device: "cpu" is cpu:0 and "cuda" the GPU of its local rank; "cpu:1", "cuda:3" are
  /// themselves; "" is cuda where there is a GPU for each local rank, else cpu:0. Throws
  /// InvalidArgument naming the devices there are.
  Device device(std::string_view text = "") const;

  // Collectives. Views have the same dtype on all ranks. Those that are changed in place are dense
  // (any strides without gaps; the same on all ranks) and of one shape; x -> y are contiguous, do
  // not overlap, and have any shapes with the element counts that are said. `counts` are the
  // elements of each rank, in rank order, the same list on all ranks; without it all ranks have the
  // same. What only the root needs or writes may be undefined (a TensorView{}) elsewhere. `name`
  // appears in errors: a parameter's name, a metric's. Throws InvalidArgument before anything is
  // sent.

  /// x = op over all ranks' x. Sum and product are of any dtype but boolean (integers wrap around),
  /// mean of floating dtypes; max and min of booleans are any and all.
  void all_reduce(const TensorView& x, ReduceOp op = ReduceOp::sum,
                  std::string_view name = "") const;
  /// The root's y = op over all ranks' x, of the same element count; y may be x.
  void reduce(const TensorView& x, const TensorView& y, int root = 0, ReduceOp op = ReduceOp::sum,
              std::string_view name = "") const;
  /// x = root's x.
  void broadcast(const TensorView& x, int root = 0, std::string_view name = "") const;
  /// y [world_size * n] = all ranks' x [n], in rank order. x may be its place in y.
  void all_gather(const TensorView& x, const TensorView& y, std::string_view name = "") const;
  /// y [sum of counts] = all ranks' x [counts[rank]].
  void all_gather(const TensorView& x, const TensorView& y, std::span<const std::int64_t> counts,
                  std::string_view name = "") const;
  /// As all_gather; only the root has a y.
  void gather(const TensorView& x, const TensorView& y, int root = 0,
              std::string_view name = "") const;
  void gather(const TensorView& x, const TensorView& y, std::span<const std::int64_t> counts,
              int root = 0, std::string_view name = "") const;
  /// y [n] = this rank's part of the root's x [world_size * n]. y may be its place in x.
  void scatter(const TensorView& x, const TensorView& y, int root = 0,
               std::string_view name = "") const;
  /// y [counts[rank]] = this rank's part of the root's x [sum of counts].
  void scatter(const TensorView& x, const TensorView& y, std::span<const std::int64_t> counts,
               int root = 0, std::string_view name = "") const;
  /// y [n] = this rank's part of op over all ranks' x [world_size * n]. y may be its place in x.
  void reduce_scatter(const TensorView& x, const TensorView& y, ReduceOp op = ReduceOp::sum,
                      std::string_view name = "") const;
  void reduce_scatter(const TensorView& x, const TensorView& y,
                      std::span<const std::int64_t> counts, ReduceOp op = ReduceOp::sum,
                      std::string_view name = "") const;
  /// Part r of y [world_size * n] = this rank's part of rank r's x [world_size * n].
  void all_to_all(const TensorView& x, const TensorView& y, std::string_view name = "") const;
  /// Rank r gets send_counts[r] elements of this rank's x and gives receive_counts[r] to y. Each
  /// rank has lists of its own; two that do not fit together break the group (on CPU tensors; NCCL
  /// does not notice).
  void all_to_all(const TensorView& x, std::span<const std::int64_t> send_counts,
                  const TensorView& y, std::span<const std::int64_t> receive_counts,
                  std::string_view name = "") const;
  /// Returns when every rank has come. By messages of the CPU's engine, in ceil(log2 world_size)
  /// rounds; with a timeout of its own through the store.
  void barrier(std::string_view name = "") const;
  void barrier(std::chrono::milliseconds timeout, std::string_view name = "") const;

  // Between two ranks; the others take no part. Point-to-point messages have their own sequence
  // numbers per (sender, receiver), apart from the collectives', and arrive in the order sent,
  // whatever their tags. The tag is a check, not a choice: a message of another tag, dtype or size
  // than the receiver expects breaks the group (on GPUs the first message of each tag, dtype and
  // size is compared: both hosts wait for each other there). On each rank they are done in program
  // order with its collectives. A peer that left, or does not come within `timeout`, breaks the
  // group. The device's engine must be connected: by any earlier collective on such a tensor, or
  // barrier() for the CPU's; else InvalidArgument.

  /// Returns when x may be changed; that may be before the other rank has received it.
  void send(const TensorView& x, int to, std::uint64_t tag = 0, std::string_view name = "") const;
  void recv(const TensorView& x, int from, std::uint64_t tag = 0, std::string_view name = "") const;

  /// Starts the collectives that `calls` calls, of this group and on tensors of this device, and
  /// returns: they run in a stream of the group's own, after what the current stream holds, in the
  /// order of the calls to async(). Their tensors must live, and be left alone, until they have
  /// ended; wrong arguments throw here.
  ///
  ///   auto work = group.async(x.device(), [&] { group.all_reduce(x); });
  ///   work.wait();
  Work async(Device device, const std::function<void()>& calls) const;
  /// The stream of async(), which the reductions of DDP take too. On a GPU, collectives of two
  /// groups that share ranks must be in one order on all of these (NCCL: each may keep the other's
  /// kernel from starting): calls in one stream are.
  core::Stream stream(Device device) const;

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
  /// This rank leaves out collectives that others may be in: where some are, the group breaks and
  /// they learn why instead of waiting for it. Ranks that all give up after the same collective go
  /// on with the next one.
  void give_up(std::string_view reason) const;

  /// Runs this rank's part of the job and returns its result. Where it throws, all other ranks
  /// learn the text ("rank 1 (pid 77 on host) threw: ...") before the exception goes on.
  ///
  ///   group.run([&] { train_step(); });
  template <class F>
  decltype(auto) run(F&& work) const {
    try {
      return std::forward<F>(work)();
    } catch (...) {
      tell_of_exception();
      throw;
    }
  }

  class Impl;
  explicit ProcessGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  void tell_of_exception() const noexcept;

  std::shared_ptr<Impl> impl_;
};

}  // namespace cairn::parallel
