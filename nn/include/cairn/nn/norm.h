// Normalisation layers. Weights start at 1, biases at 0, running means at 0, running variances
// at 1.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "cairn/autograd/ops.h"
#include "cairn/nn/module.h"

namespace cairn::nn {

struct BatchNormOptions {
  double eps = 1e-5;
  /// running = (1 - momentum) running + momentum batch; none: the average of all batches so far,
  /// whose number is the buffer "num_batches_tracked".
  std::optional<double> momentum = 0.1;
  bool affine = true;
  bool relu = false;  // fuses a ReLU into the result
};

/// What BatchNorm1d, BatchNorm2d and BatchNorm3d share: per-channel statistics of the batch in
/// training, running ones in evaluation.
class BatchNorm : public Module {
 public:
  /// autograd::batch_norm's signature.
  using Function = std::function<Tensor(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                        const Tensor& running_mean, const Tensor& running_var,
                                        const autograd::BatchNormOptions& options)>;
  /// Stands in for autograd::batch_norm in training: statistics of more than this module's own
  /// batch (parallel::convert_sync_batch_norm). clone() takes it along; empty: autograd::batch_norm
  /// again.
  void set_training_function(Function function) { function_ = std::move(function); }
  bool has_training_function() const { return function_ != nullptr; }

  bool is_batch_norm() const override { return true; }
  Tensor forward(const Tensor& x) override;
  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const { return bias_; }
  const Tensor& running_mean() const { return running_mean_; }
  const Tensor& running_var() const { return running_var_; }

 protected:
  /// Of x with `least` to `most` dimensions: [N, C], [N, C, L], [N, C, H, W], [N, C, D, H, W].
  BatchNorm(std::int64_t channels, int least, int most, const BatchNormOptions& options);
  std::int64_t channels() const { return running_mean_.size(0); }
  Tensor normalise(const Tensor& x, bool relu);
  template <class M>
  std::shared_ptr<Module> like_this() const {
    auto like = std::make_shared<M>(channels(), options_);
    like->set_training_function(function_);
    return like;
  }
  BatchNormOptions options_;

 private:
  void check(const Tensor& x) const;
  double next_momentum();

  int least_, most_;
  Tensor weight_, bias_, running_mean_, running_var_, batches_;
  Function function_;
};

class BatchNorm1d : public BatchNorm {  // x [N, C] or [N, C, L]
 public:
  explicit BatchNorm1d(std::int64_t channels, const BatchNormOptions& options = {})
      : BatchNorm(channels, 2, 3, options) {}
  std::string kind() const override { return "BatchNorm1d"; }

 protected:
  std::shared_ptr<Module> make_like() const override;
};

class BatchNorm2d : public BatchNorm {  // x [N, C, H, W]
 public:
  explicit BatchNorm2d(std::int64_t channels, const BatchNormOptions& options = {})
      : BatchNorm(channels, 4, 4, options) {}
  std::string kind() const override { return "BatchNorm2d"; }

 protected:
  std::shared_ptr<Module> make_like() const override;
};

class BatchNorm3d : public BatchNorm {  // x [N, C, D, H, W]
 public:
  explicit BatchNorm3d(std::int64_t channels, const BatchNormOptions& options = {})
      : BatchNorm(channels, 5, 5, options) {}
  std::string kind() const override { return "BatchNorm3d"; }

 protected:
  std::shared_ptr<Module> make_like() const override;
};

struct LayerNormOptions {
  double eps = 1e-5;
  bool affine = true;
};

/// Over the last dimension: x [..., D].
class LayerNorm : public Module {
 public:
  explicit LayerNorm(std::int64_t size, const LayerNormOptions& options = {});
  std::string kind() const override { return "LayerNorm"; }
  Tensor forward(const Tensor& x) override;
  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const { return bias_; }

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  std::int64_t size_;
  LayerNormOptions options_;
  Tensor weight_, bias_;
};

struct GroupNormOptions {
  double eps = 1e-5;
  bool affine = true;
};

/// x [N, C, ...]: each of `groups` groups of channels to mean 0 and variance 1; C a multiple of
/// groups.
class GroupNorm : public Module {
 public:
  GroupNorm(std::int64_t groups, std::int64_t channels, const GroupNormOptions& options = {});
  std::string kind() const override { return "GroupNorm"; }
  Tensor forward(const Tensor& x) override;
  const Tensor& weight() const { return weight_; }
  const Tensor& bias() const { return bias_; }

 protected:
  std::int64_t channels() const { return channels_; }
  std::shared_ptr<Module> make_like() const override;

 private:
  std::int64_t groups_, channels_;
  GroupNormOptions options_;
  Tensor weight_, bias_;
};

struct InstanceNormOptions {
  double eps = 1e-5;
  bool affine = false;
};

/// x [N, C, ...]: each channel of each sample to mean 0 and variance 1: GroupNorm of as many groups
/// as channels, without weight and bias unless `affine`. In training and evaluation alike.
class InstanceNorm : public GroupNorm {
 public:
  explicit InstanceNorm(std::int64_t channels, const InstanceNormOptions& options = {})
      : GroupNorm(channels, channels, {options.eps, options.affine}), options_(options) {}
  std::string kind() const override { return "InstanceNorm"; }

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  InstanceNormOptions options_;
};

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension: x [..., D].
class RMSNorm : public Module {
 public:
  explicit RMSNorm(std::int64_t size, double eps = 1e-6);
  std::string kind() const override { return "RMSNorm"; }
  Tensor forward(const Tensor& x) override;
  const Tensor& weight() const { return weight_; }

 protected:
  std::shared_ptr<Module> make_like() const override;

 private:
  double eps_;
  Tensor weight_;
};

}  // namespace cairn::nn
