// FusedAdam: Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019).
#pragma once

#include "cairn/optim/optimizer.h"

namespace cairn::optim {

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool adamw = true;  // decoupled weight decay; false: L2
  bool bias_correction = true;
};
/// Adam and AdamW; formulas in kernels/optimizer_update.h. State: exp_avg, exp_avg_sq.
class FusedAdam final : public FusedOptimizer<AdamOptions> {
 public:
  explicit FusedAdam(NamedTensors parameters, const AdamOptions& options = {})
      : FusedAdam({{std::move(parameters), options.lr, options.weight_decay}}, options) {}
  FusedAdam(std::vector<ParameterGroup> groups,
            const AdamOptions& options);  // lr and weight_decay are the groups'

 protected:
  void update_group(const ParameterGroup& group, const Entries& entries, const Call& call) override;
  const char* kind() const override { return "FusedAdam"; }
  std::vector<RuleOption> rule_options() const override;
  std::vector<std::string> moment_names() const override { return {"exp_avg", "exp_avg_sq"}; }
  std::vector<const char*> torch_flags() const override { return {"amsgrad", "maximize"}; }
  const char* missing_for_torch(bool /*decays*/) const override {
    return options_.bias_correction ? nullptr : "bias correction";
  }
};

}  // namespace cairn::optim
