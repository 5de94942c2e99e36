// A torch::optim optimizer as one of Cairn's: gradients are checked, unscaled, clipped, averaged
// over ranks, and steps are skipped, by Cairn; the update is libtorch's own.
//
//   torch::optim::AdamW theirs(net->parameters(), torch::optim::AdamWOptions(1e-3));
//   libtorch::TorchOptimizer optimizer(model, theirs);
//   auto precision = libtorch::initialize(model, optimizer, {.opt_level = amp::OptLevel::O2});
//
// Half parameters are updated in their f32 masters, or without these in f32 copies for as long;
// moments are f32. Rates: each group's lr is the same number here and there; whoever changes either
// is followed (schedules of both kinds).
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <utility>
#include <vector>

#include "cairn/libtorch/model.h"
#include "cairn/optim/optimizer.h"

namespace cairn::libtorch {

class TorchOptimizer final : public optim::Optimizer {
 public:
  /// Both must outlive it. Throws InvalidArgument for a parameter that is not the model's;
  /// Unsupported for LBFGS, which evaluates the loss again.
  TorchOptimizer(Model& model, torch::optim::Optimizer& optimizer);
  TorchOptimizer(const std::vector<Model*>& models, torch::optim::Optimizer& optimizer);

  /// As Optimizer's, and "torch": what torch::save writes.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 protected:
  void update_group(const optim::ParameterGroup& group,
                    const std::vector<kernels::UpdateEntry>& entries, const Call& call) override;
  const char* kind() const override { return "TorchOptimizer"; }
  std::vector<std::string> moment_names() const override { return {}; }
  std::vector<RuleOption> rule_options() const override { return {}; }

 private:
  void agree_on_rates();

  torch::optim::Optimizer& optimizer_;
  std::vector<std::pair<Tensor, torch::Tensor>> parameters_;  // as both see them
  std::vector<double> rates_;                                 // when both last agreed, by group
};

}  // namespace cairn::libtorch
