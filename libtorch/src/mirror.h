// A torch::nn::Module's tree as one of Cairn's: names, memory, and which modules are batch norms.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <unordered_map>

#include "cairn/nn/module.h"

namespace cairn::libtorch {

/// Tensors that were met before: one that is registered twice is one tensor here too.
using KnownTensors = std::unordered_map<const at::TensorImpl*, Tensor>;

class Mirror final : public nn::Module {
 public:
  Mirror(const torch::nn::Module& module, KnownTensors& known);
  std::string kind() const override { return kind_; }
  bool is_batch_norm() const override { return is_batch_norm_ && keeps_statistics_; }
  /// Of this module and all below. Without: libtorch's batch norms are layers like any other,
  /// because they want their statistics in their weight's dtype.
  void keep_statistics(bool value);
  Tensor forward(const Tensor& x) override { return x; }

 private:
  std::string kind_;
  bool is_batch_norm_;
  bool is_ours_;  // SyncBatchNorm, whose statistics are f32 always
  bool keeps_statistics_ = true;
};

}  // namespace cairn::libtorch
