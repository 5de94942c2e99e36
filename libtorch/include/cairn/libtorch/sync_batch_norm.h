// Batch norm over the batches of all ranks, in place of torch::nn::BatchNorm1d and 2d: the same
// names in state dictionaries, parallel::sync_batch_norm inside.
//
//   libtorch::SyncBatchNorm norm(torch::nn::BatchNormOptions(64), group);
//
// x [N, C], [N, C, L] or [N, C, H, W]. Gradients of weight and bias are of the rank's own samples:
// the Model averages them. Every rank runs each forward and each backward; evaluation communicates
// nothing.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include "cairn/parallel/process_group.h"

namespace cairn::libtorch {

class SyncBatchNormImpl : public torch::nn::Module {
 public:
  /// Throws InvalidArgument for options without track_running_stats or momentum.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, parallel::ProcessGroup group);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::BatchNormOptions options;
  torch::Tensor weight, bias;  // undefined without options.affine
  torch::Tensor running_mean, running_var, num_batches_tracked;

 private:
  parallel::ProcessGroup group_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace cairn::libtorch
