// Mixed precision for a Model: amp::Amp, whose losses are libtorch's.
//
//   auto precision = libtorch::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
//   precision.backward(loss);
//   optim::StepResult r = precision.step();
//
// Everything else is amp::Amp's: levels and overrides, several losses, scalers, attribution, states
// (amp.h). amp::Options::cast_policies and fallback_after speak of Cairn's operations and are
// refused; so are capturable steps.
#pragma once

#include <vector>

#include "cairn/amp/amp.h"
#include "cairn/libtorch/model.h"

namespace cairn::libtorch {

class [[nodiscard]] Amp : public amp::Amp {
 public:
  /// loss: one element of a floating dtype, which depends on a parameter. Not inside of an autocast
  /// region.
  void backward(const torch::Tensor& loss, const amp::LossOptions& options = {}) const;
  /// loss: of Cairn's, as join.zero() of DistributedDataParallel.
  void backward(const Tensor& loss, const amp::LossOptions& options = {}) const;
  /// As amp::Amp's: parameters are f32 again.
  void release();

 private:
  friend Amp initialize(const std::vector<Model*>& models,
                        const std::vector<optim::Optimizer*>& optimizers,
                        const amp::Options& options);
  Amp(amp::Amp handle, std::vector<Model*> models);

  std::vector<Model*> models_;
};

/// As amp::initialize. Models and optimizers must outlive the handle.
Amp initialize(const std::vector<Model*>& models, const std::vector<optim::Optimizer*>& optimizers,
               const amp::Options& options = {});
Amp initialize(Model& model, optim::Optimizer& optimizer, const amp::Options& options = {});

}  // namespace cairn::libtorch
