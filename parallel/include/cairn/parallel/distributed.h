// DistributedDataParallel: one model on every rank, each with its own part of the batch; gradients
// are averaged over the ranks.
//
//   parallel::DistributedDataParallel ddp(model, group);
//   for (const auto& batch : loader) {
//     Tensor loss = nn::cross_entropy(ddp(batch.inputs), batch.labels);
//     precision.backward(loss);     // gradients are averaged when this returns
//     precision.step();
//   }
//
// At construction the ranks compare names, shapes and dtypes of all parameters and buffers, and
// take rank 0's values (f32 masters too). Gradients live in the arena (optim::GradientArena);
// buckets are slices of it in reverse registration order, the first small so that communication
// starts early. A bucket is all-reduced on a stream of its own as soon as its last gradient is
// there, while backward goes on, in the same order on every rank; the current stream waits for the
// last one at the end of backward. What is averaged is all that the gradients hold: with no_sync
// around all but the last micro-batch, one reduction serves them all.
//
// Gradients of the mean over ranks are those of the mean loss over the whole batch where every rank has as
// many samples. Batch norms use each rank's own statistics; buffers are shared at construction
// only, and by sync_buffers().
//
// Frozen parameters take no part; one that is unfrozen later does from its first backward on, and an
// error names the rank that did not unfreeze it. Gradients that no backward has reduced (no_sync, two
// losses in one micro-batch) are averaged by the optimizer's step, so none is ever applied unreduced.
//
// May be constructed before or after amp::initialize, the optimizers and load_state_dict; the model must
// outlive it. world() is what amp, Accumulation, samplers and TrainingState ask for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cairn/core/state_dict.h"
#include "cairn/core/world.h"
#include "cairn/nn/module.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

struct DistributedOptions {
  std::int64_t first_bucket_bytes = 1 << 20;
  std::int64_t bucket_bytes = 25 << 20;
  /// What a parameter without a gradient at the end of a backward means. false: an error naming it,
  /// on every rank. true: a gradient of zero, so that ranks may use different parts of the model;
  /// such buckets are reduced only at the end of backward.
  bool unused_as_zeros = false;
  /// Each bucket is checked for inf and NaN before its reduction, on the communication stream, so
  /// that world().take_local_nonfinite() can tell who made an overflow. Reads the gradients once more: about 1 % of a step with 500
  /// rows (samples, tokens, pixels) a rank, less with more, 3 % with 100 (docs/parallel.md).
  bool check_local_gradients = true;
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
  class NoSync {
   public:
    ~NoSync();
    NoSync(NoSync&& other) noexcept;
    NoSync& operator=(NoSync&&) = delete;

   private:
    friend class DistributedDataParallel;
    explicit NoSync(int* depth);
    int* depth_;
  };
  /// `if_` false gives a guard that does nothing: no_sync(!last_micro_batch).
  [[nodiscard]] NoSync no_sync(bool if_ = true);

  /// Gives every rank rank 0's buffers (running statistics): before an evaluation that all ranks
  /// take part in.
  void sync_buffers();

  /// The one handle for the others: rank, size, agreement, and what only this model's gradients tell.
  core::World world() const;

  nn::Module& module() const;
  const ProcessGroup& group() const;

  struct Bucket {
    std::vector<std::string> parameters;  // in the order in which their gradients are expected
    std::int64_t bytes = 0;
    DType dtype = DType::f32;
  };
  std::vector<Bucket> buckets() const;  // in the order of their reduction

  /// The bucket plan: first_bucket_bytes, bucket_bytes, buckets. NCCL's results depend on it in the
  /// last bit.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace cairn::parallel
