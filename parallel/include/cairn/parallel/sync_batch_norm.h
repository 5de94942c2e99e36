// Batch norm with the statistics of all ranks' batches together, as if one process had them all.
//
//   parallel::convert_sync_batch_norm(model, group);  // every batch norm of the model
//   parallel::SyncBatchNorm norm(64, group);          // or a layer of its own
//
// In training a forward is one all_gather of 2 C + 1 f32 numbers (mean, sum of squared deviations
// and count of each rank, joined in rank order in double: the same bits on every rank), a backward
// one all_reduce of 2 C. Ranks may have batches of different sizes, empty ones too; every rank runs
// each forward and each backward. Gradients of weight and bias are of the rank's own samples, as
// all others: DistributedDataParallel averages them. Evaluation communicates nothing.
//
// The group may be a part of the job's ranks, or of one rank. Where all its ranks together have one
// value per channel, training throws InvalidArgument on each of them.
#pragma once

#include "cairn/nn/norm.h"
#include "cairn/parallel/process_group.h"

namespace cairn::parallel {

/// autograd::batch_norm over the batches of the group's ranks. x [N, C] or [N, C, H, W] in any
/// storage; without options.training it is autograd::batch_norm.
Tensor sync_batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const Tensor& running_mean, const Tensor& running_var,
                       const autograd::BatchNormOptions& options, const ProcessGroup& group);

/// x [N, C], [N, C, L], [N, C, H, W] or [N, C, D, H, W].
class SyncBatchNorm : public nn::BatchNorm {
 public:
  SyncBatchNorm(std::int64_t channels, ProcessGroup group,
                const nn::BatchNormOptions& options = {});
  std::string kind() const override { return "SyncBatchNorm"; }
  using nn::BatchNorm::forward;
  /// norm(x) + z, then the ReLU where options.relu asks for one: the end of a residual block.
  Tensor forward(const Tensor& x, const Tensor& z);

 protected:
  std::shared_ptr<nn::Module> make_like() const override;

 private:
  ProcessGroup group_;
};

/// Makes every nn::BatchNorm of the model, in place, one over the group's ranks: the modules, their
/// tensors, options, mode and names in state dicts stay. Returns how many there were.
int convert_sync_batch_norm(nn::Module& model, const ProcessGroup& group);

}  // namespace cairn::parallel
