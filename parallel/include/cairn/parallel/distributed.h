// DistributedDataParallel: one model on every rank, each with its own part of the batch; gradients
// are averaged over the ranks.
//
//   parallel::DistributedDataParallel ddp(model, group);
//   for (const auto& batch : loader) {
//     Tensor loss = nn::cross_entropy(ddp(batch.inputs), batch.labels);
//     precision.backward(loss);     // gradients are averaged when this returns
//     schedule.step(precision.step());
//   }
//
// At construction the ranks compare names, shapes and dtypes of all parameters and buffers, and
// take rank 0's values (f32 masters too). Gradients live in the arena (optim::GradientArena);
// a Reducer's buckets are slices of it, the first small so that communication
// starts early. A bucket is all-reduced on a stream of its own as soon as its last gradient is
// there, while backward goes on, in the same order on every rank; the current stream waits for the
// last one at the end of backward. What is averaged is all that the gradients hold: with no_sync
// around all but the last micro-batch, one reduction serves them all.
//
// Gradients of the mean over ranks are those of the mean loss over the whole batch where every rank
// has as many samples (join() is for those that have not). Batch norms use each rank's own
// statistics; buffers are shared at construction, by sync_buffers(), and with broadcast_buffers at
// each forward in training.
//
// Frozen parameters take no part; one that is unfrozen later does from its first backward on, and
// an error names the rank that did not unfreeze it. Parameters that are added to the model later
// take part from the next ddp(x) on, with rank 0's values. Gradients that no backward has reduced
// (no_sync, two losses in one micro-batch) are averaged by the optimizer's step, so none is ever
// applied unreduced.
//
// Between two steps every rank contributes the same losses, or all ranks throw and none may step
// until clear_grad() on all of them. A backward that throws on one rank in a reduction breaks the
// group, which quotes it; under no_sync its gradients are broken, and the step is an error on every
// rank. (Which parameters a loss reaches, and how many batches a rank has, may differ:
// find_unused_parameters, join().)
//
// With average = false gradients are sums, and a step takes one reducing backward, the last one:
// another backward after it is InvalidArgument.
//
// May be constructed before or after amp::initialize, the optimizers and load_state_dict; the model
// must outlive it. world() is what amp, Accumulation, samplers and TrainingState ask for.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cairn/core/sharding.h"
#include "cairn/core/state_dict.h"
#include "cairn/core/world.h"
#include "cairn/nn/module.h"
#include "cairn/parallel/process_group.h"
#include "cairn/parallel/reducer.h"

namespace cairn::parallel {

/// ReducerOptions, field by field, and what a graph and buffers add.
struct DistributedOptions {
  std::int64_t first_bucket_bytes = ReducerOptions{}.first_bucket_bytes;
  std::int64_t bucket_bytes = ReducerOptions{}.bucket_bytes;
  bool delay_allreduce = false;
  bool allreduce_always_fp32 = false;
  bool average = true;
  double gradient_predivide_factor = 1.0;
  std::vector<std::string> trigger_parameters;
  int num_allreduce_streams = 1;
  bool retain_allreduce_buffers = false;
  bool check_local_gradients = true;
  std::shared_ptr<CommunicationHook> hook;
  ReducerOptions of_reducer() const;

  /// What a parameter that the loss does not reach means. false: an error that names it, on every
  /// rank. true: where some rank reaches it, a zero of this rank's; where none does, it has no
  /// gradient and the optimizers leave it alone. Costs an exchange of a bit for each parameter at
  /// the start of a backward.
  bool find_unused_parameters = false;
  /// The same, and the parameters that the first backward reaches are those of all: the exchange is
  /// made once, and another loss is an error that names a parameter.
  bool static_graph = false;
  /// Every forward in training that a reducing backward follows gives all ranks rank 0's buffers.
  bool broadcast_buffers = false;
};

/// By what the sum of the gradients is divided while some ranks have no more batches.
enum class DivideBy : std::uint8_t {
  participants,  // the ranks that have a batch
  world,         // all ranks, as long as there are batches
  samples,  // each gradient times its rank's samples, by all samples: the mean over these, exactly
};

enum class ZeroStage : std::uint8_t;  // of a ShardedDataParallel
struct ShardedOptions;
class WeightUnits;

/// Of gather_parameters(). While it lives, every weight is whole on every rank, to be read and
/// written (on all ranks alike); forwards are this rank's own. Its end takes over what was written;
/// where that fails, it is logged and the group breaks. No step, save or load meanwhile.
class [[nodiscard]] GatheredParameters {
 public:
  ~GatheredParameters();
  GatheredParameters(GatheredParameters&& other) noexcept;
  GatheredParameters& operator=(GatheredParameters&&) = delete;

 private:
  friend class DistributedDataParallel;
  explicit GatheredParameters(std::shared_ptr<WeightUnits> units);
  std::shared_ptr<WeightUnits> units_;
};

class DistributedDataParallel : public core::Stateful {
 public:
  /// Throws InvalidArgument, on every rank, naming the first parameter or buffer that differs
  /// between ranks.
  DistributedDataParallel(nn::Module& model, ProcessGroup group,
                          const DistributedOptions& options = {});
  ~DistributedDataParallel() override;
  DistributedDataParallel(DistributedDataParallel&&) noexcept;
  DistributedDataParallel& operator=(DistributedDataParallel&&) noexcept;

  Tensor operator()(const Tensor& x);  // the model's forward

  /// While it lives, backward adds up gradients on this rank and reduces nothing.
  class [[nodiscard]] NoSync {
   public:
    ~NoSync();
    NoSync(NoSync&& other) noexcept;
    NoSync& operator=(NoSync&&) = delete;

   private:
    friend class DistributedDataParallel;
    explicit NoSync(int* depth);
    int* depth_;
  };
  /// `enabled` false gives a guard that does nothing: no_sync(!last_micro_batch).
  [[nodiscard]] NoSync no_sync(bool enabled = true);

  struct Impl;

  /// Uneven inputs: ranks that have run out of batches take part with zeros until all have.
  ///
  ///   auto join = ddp.join();
  ///   for (const auto& batch : loader) {
  ///     precision.backward(nn::cross_entropy(ddp(batch.inputs), batch.labels));
  ///     schedule.step(precision.step());
  ///   }
  ///   while (join.other_ranks_have_batches()) {         // false once every rank is here
  ///     precision.backward(join.zero());
  ///     schedule.step(precision.step());  // the same step as the others': the weights stay alike
  ///   }
  ///
  /// A rank without a single batch may begin with other_ranks_have_batches(). Each backward that
  /// reduces costs an exchange of a few bytes meanwhile. Collectives of the trainer's own, and
  /// steps that reduce what no_sync left behind, are not shadowed: the latter are an error.
  class [[nodiscard]] Join {
   public:
    ~Join();
    Join(Join&& other) noexcept;
    Join& operator=(Join&&) = delete;

    /// How many samples the next reducing backward of this rank averages over; for
    /// DivideBy::samples.
    void samples(std::int64_t count);
    /// This rank has no more batches. Waits for the others' next reducing backward, whose
    /// collectives a backward of zero() shadows; false: they have none left either.
    bool other_ranks_have_batches();
    /// A loss of 0 whose gradients are zeros, for every parameter that requires one.
    Tensor zero() const;

   private:
    friend class DistributedDataParallel;
    explicit Join(std::shared_ptr<Impl> ddp) : ddp_(std::move(ddp)) {}
    std::shared_ptr<Impl> ddp_;
  };
  /// On every rank, while it lives; one at a time. Throws InvalidArgument where another one lives.
  [[nodiscard]] Join join(DivideBy divide_by = DivideBy::participants);

  /// Gives every rank rank 0's buffers (running statistics): before an evaluation that all ranks
  /// take part in.
  void sync_buffers();

  /// A collective, between steps, where ranks hold weights in parts (ZeroStage::parameters); else
  /// it does nothing: an evaluation in which ranks have batches of different numbers, a picture
  /// that one of them draws, an average of weights.
  GatheredParameters gather_parameters();

  /// The one handle for the others: rank, size, agreement, and what only this model's gradients
  /// tell.
  core::World world() const;

  nn::Module& module() const;
  const ProcessGroup& group() const;

  using Bucket = Reducer::Bucket;
  std::vector<Bucket> buckets() const;  // in the order of their reduction
  /// With retain_allreduce_buffers: Reducer::reduced_buckets().
  std::vector<TensorView> reduced_buckets() const;
  /// With find_unused_parameters or static_graph: what the loss of the last reducing backward did
  /// not reach on this rank.
  const std::vector<std::string>& unused_parameters() const;

  /// The reducer's: bucket sizes and the order of the gradients. NCCL's results depend on them in
  /// the last bit.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  friend class ShardedDataParallel;
  DistributedDataParallel(nn::Module& model, ProcessGroup group, const ShardedOptions& options,
                          std::optional<ZeroStage> stage);
  std::shared_ptr<Impl> impl_;
};

}  // namespace cairn::parallel
