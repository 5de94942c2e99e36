// FusedRMSprop: RMSprop (Tieleman & Hinton 2012) with L2 weight decay and momentum.
#pragma once

#include "cairn/optim/optimizer.h"

namespace cairn::optim {

struct RmsPropOptions {
  double lr = 1e-2;
  double alpha = 0.99;  // of the mean of squares
  double eps = 1e-8;
  double momentum = 0.0;
  double weight_decay = 0.0;
};
/// torch.optim.RMSprop, not centered. Formulas in kernels/optimizer_update.h. State: square_avg,
/// and momentum_buffer where the momentum is not 0.
class FusedRMSprop final : public FusedOptimizer<RmsPropOptions> {
 public:
  explicit FusedRMSprop(NamedTensors parameters, const RmsPropOptions& options = {})
      : FusedRMSprop({{std::move(parameters), options.lr, options.weight_decay}}, options) {}
  FusedRMSprop(std::vector<ParameterGroup> groups, const RmsPropOptions& options);

 protected:
  void update_group(const ParameterGroup& group, const Entries& entries, const Call& call) override;
  const char* kind() const override { return "FusedRMSprop"; }
  std::vector<RuleOption> rule_options() const override;
  std::vector<std::string> moment_names() const override;
  std::vector<const char*> torch_flags() const override { return {"centered", "maximize"}; }
};

}  // namespace cairn::optim
