// Reducer: averages lists of gradients over the ranks, bucket by bucket, while more are still being
// made. For trainers of any kind; DistributedDataParallel stands on it.
//
//   parallel::Reducer reducer(group, {.bucket_bytes = 8 << 20});
//   reducer.register_gradients({{"weight", dweight}});   // every rank: the same list
//   reducer.mark_ready(0);   // as each gradient is written, in the current stream
//   reducer.wait();          // later work in the current streams sees averages
//
// Gradients that are neighbours in memory are cut into slices that are reduced in place; others are
// copied into a flat buffer and back. A bucket is reduced on a communication stream once its last
// gradient is ready and all buckets before it are on their way: the same order on every rank,
// whatever each rank's own. After the first pass the buckets follow the order in which rank 0's
// gradients became ready; the state dict keeps it, so that a resumed run reduces in the same order.
//
// Mistakes (a gradient that is marked twice, or never) are InvalidArgument on the rank that makes
// them, with the gradient's name, and break the group: the others get a CommunicationError that
// quotes it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/core/world.h"
#include "cairn/parallel/communication_hook.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

/// Combinations that make no sense are InvalidArgument at construction; ranks whose options differ,
/// where gradients are registered.
struct ReducerOptions {
  std::int64_t first_bucket_bytes = 1 << 20;  // small, so that communication starts early
  std::int64_t bucket_bytes = 25 << 20;
  /// Everything is reduced when the last gradient is there: one bucket a dtype and device. For
  /// measurements, and where communication disturbs the computation.
  bool delay_allreduce = false;
  /// Half gradients are reduced in f32: twice the bytes, rounded once.
  bool allreduce_always_fp32 = false;
  /// true: the mean over the ranks; false: their sum.
  bool average = true;
  /// Gradients are divided by f before the reduction and by world size / f after it (half sums of
  /// many ranks neither overflow nor vanish). 1: what the group's mean does. Only with average.
  double gradient_predivide_factor = 1.0;
  /// A bucket ends with each of these gradients. Not with delay_allreduce.
  std::vector<std::string> trigger_parameters;
  /// Communication streams on each device, which buckets take in turn; the collectives keep their
  /// order. On GPUs not several with shard_within (Unsupported).
  int num_allreduce_streams = 1;
  /// Reducer::reduced_buckets() has what the last pass reduced.
  bool retain_allreduce_buffers = false;
  /// Each bucket is checked for inf and NaN before its reduction, on the communication stream, so
  /// that world().take_local_nonfinite() can tell who made an overflow. Reads the gradients once
  /// more: about 1 % of a step with 500 rows (samples, tokens, pixels) a rank, less with more, 3 %
  /// with 100 (docs/parallel.md). A Reducer does so once world() was called.
  bool check_local_gradients = true;
  /// Each rank gets its part of the averages alone (core::even_part of each gradient): a
  /// reduce_scatter in place of the all_reduce. Gradients are left as they are; on_part() hands the
  /// parts out. Not with a hook.
  bool shard = false;
  /// With shard: so many neighbours in rank order divide each gradient, and each such group has all
  /// of the averages, which are over all ranks. Must divide the number of ranks: construction is a
  /// collective, and throws InvalidArgument on every rank. 0: all ranks divide it.
  int shard_within = 0;
  /// Takes the place of the all-reduce and its division: only with average,
  /// gradient_predivide_factor 1 and without allreduce_always_fp32.
  std::shared_ptr<CommunicationHook> hook;
};

class Reducer : public core::Stateful {
 public:
  explicit Reducer(ProcessGroup group, const ReducerOptions& options = {});
  ~Reducer() override;
  Reducer(Reducer&&) noexcept;
  Reducer& operator=(Reducer&&) noexcept;

  struct Layout {
    /// Gradients that follow each other in memory with at most so many bytes between them are
    /// neighbours: what lies between is nobody's, and is reduced along.
    std::int64_t gap_bytes = 0;
    /// trigger_parameters may name gradients that are not in the list now.
    bool partial = false;
  };
  /// Dense views of floating dtype in the order in which their parameters are used (the last one's
  /// gradient is expected first), in place of those registered before. Their memory must live. A
  /// collective; throws InvalidArgument, on every rank, naming the first gradient that differs
  /// between ranks.
  void register_gradients(const std::vector<std::string>& names,
                          const std::vector<TensorView>& gradients, const Layout& layout);
  void register_gradients(const std::vector<std::string>& names,
                          const std::vector<TensorView>& gradients) {
    register_gradients(names, gradients, {});
  }
  /// The same, and keeps the tensors. A wrapped vector that has moved its elements is a mistake.
  void register_gradients(const NamedTensors& gradients);

  /// The gradient (its place in the list) is complete, in the order of the current stream of its
  /// device. It is left alone until wait().
  void mark_ready(std::size_t gradient);
  /// The same of a gradient that has other memory in each pass; with ReducerOptions::shard. Its
  /// memory must live as long as what the current streams have been given so far.
  void mark_ready(std::size_t gradient, const TensorView& where);
  /// This rank has none: it is filled with zeros (with ReducerOptions::shard it counts as zeros).
  void mark_unused(std::size_t gradient);
  bool is_marked(std::size_t gradient) const;
  /// Ends a pass: all gradients are marked, all buckets are on their way, and later work of the
  /// current streams comes after them. On CUDA ProcessGroup::wait() tells whether they arrived. In
  /// the first pass every rank hears rank 0's order.
  void wait();
  /// Gives a pass up (an error came between): later work comes after what was begun. Every rank has
  /// to.
  void abandon();

  /// For uneven batches: gradients are multiplied by `before` ahead of the reduction and the
  /// averages by `after` behind it, in all passes from now on.
  void set_weights(double before, double after);
  /// What the gradients of the passes from now on are of, "loss 1 scaled by 8, sums of loss 0
  /// scaled by 8", with what waits for the same step; "": nobody says. It
  /// is a part of the names of their collectives: ranks that would reduce gradients of other losses
  /// into one another throw, naming both.
  void set_losses(std::string description);
  /// Called with the gradients of each bucket (places in the list) before its reduction, its stream
  /// current.
  void before_reduction(std::function<void(const std::vector<std::size_t>& gradients)> callback);

  /// With ReducerOptions::shard: called with a gradient's place and this rank's part of its
  /// average, [n] of its dtype, once its reduction is under way, whose stream is current: other
  /// streams see the part after wait(). Its memory is the bucket's, and lives as long as one of its
  /// parts.
  void on_part(std::function<void(std::size_t gradient, const Tensor& part)> callback);

  struct Bucket {
    std::vector<std::string> parameters;  // in the order in which their gradients are expected
    std::int64_t bytes = 0;               // that are reduced
    DType dtype = DType::f32;             // of the reduction
    bool in_place = true;                 // without a copy
  };
  std::vector<Bucket> buckets() const;  // in the order of their reduction
  /// With retain_allreduce_buffers: what the last pass reduced, [elements] each, in the order of
  /// the reduction: slices of the gradients where they were reduced in place. Valid until the next
  /// pass.
  std::vector<TensorView> reduced_buckets() const;

  const ProcessGroup& group() const;
  /// The group's, for a scaler and training states; it also knows which of this rank's own
  /// gradients were not finite before they were reduced (take_local_nonfinite(), of the passes
  /// since it was last asked or forget_local_nonfinite()).
  core::World world();
  /// The gradients of the passes so far were dropped: no step will use them.
  void forget_local_nonfinite();

  /// The bucket sizes, the order of the gradients and the hook's state.
  StateDict state_dict() const override;
  /// Nothing is exchanged: every rank loads the same.
  void load_state_dict(const StateDict& state) override;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace cairn::parallel
