// FusedSGD: stochastic gradient descent with momentum, dampening and Nesterov's variant.
#pragma once

#include "cairn/optim/optimizer.h"

namespace cairn::optim {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool wd_after_momentum = false;
};
/// SGD; formulas in kernels/optimizer_update.h. State: momentum_buffer, where a momentum is not 0.
class FusedSGD final : public FusedOptimizer<SgdOptions> {
 public:
  explicit FusedSGD(NamedTensors parameters, const SgdOptions& options = {})
      : FusedSGD({{std::move(parameters), options.lr, options.weight_decay}}, options) {}
  FusedSGD(std::vector<ParameterGroup> groups, const SgdOptions& options);

 protected:
  void update_group(const ParameterGroup& group, const Entries& entries, const Call& call) override;
  const char* kind() const override { return "FusedSGD"; }
  std::vector<RuleOption> rule_options() const override;
  std::vector<std::string> moment_names() const override;
  std::vector<const char*> torch_flags() const override { return {"maximize"}; }
  const char* missing_for_torch(bool decays) const override {
    return options_.wd_after_momentum && decays ? "weight decay before the momentum" : nullptr;
  }
  bool torch_counts_steps() const override { return false; }

 private:
  double momentum_of(const ParameterGroup& group) const {
    return group.momentum.value_or(options_.momentum);
  }
};

}  // namespace cairn::optim
