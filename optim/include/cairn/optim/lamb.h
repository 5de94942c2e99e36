// FusedLAMB: Adam's update, scaled for each tensor by |w| / |update| (You et al. 2020). What Apex
// splits into FusedLAMB and FusedMixedPrecisionLamb: half parameters with masters, gradients
// unscaled and clipped inside the update, never written.
#pragma once

#include "cairn/optim/optimizer.h"

namespace cairn::optim {

struct LambOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-6;
  double weight_decay = 0.01;
  bool bias_correction = true;
  bool adamw = true;  // weight decay in the update; false: in the gradient (L2)
  bool grad_averaging = true;
  double max_gradient_norm = 1.0;  // of all unscaled gradients together; 0: no clipping
  bool use_nvlamb = false;         // scales where weight_decay is 0, too
};
/// Formulas in kernels/optimizer_update.h; gradients are first multiplied by max / norm where their
/// 2-norm is larger than max_gradient_norm (no 1e-6, unlike StepOptions::max_gradient_norm, which
/// clips before it). State: exp_avg, exp_avg_sq. With clipping every step checks.
class FusedLAMB final : public FusedOptimizer<LambOptions> {
 public:
  explicit FusedLAMB(NamedTensors parameters, const LambOptions& options = {})
      : FusedLAMB({{std::move(parameters), options.lr, options.weight_decay}}, options) {}
  FusedLAMB(std::vector<ParameterGroup> groups, const LambOptions& options);

 protected:
  void update_group(const ParameterGroup& group, const Entries& entries, const Call& call) override;
  const char* kind() const override { return "FusedLAMB"; }
  std::vector<RuleOption> rule_options() const override;
  std::vector<std::string> moment_names() const override { return {"exp_avg", "exp_avg_sq"}; }
  bool updates_in_two_passes() const override { return true; }
  kernels::PendingCheck begin_update(const ParameterGroup& group, const Entries& pieces,
                                     const Call& call) override;
  void end_update(const ParameterGroup& group, const Entries& entries,
                  const std::vector<TwoChecks>& found, const Call& call) override;
  double own_max_norm() const override { return options_.max_gradient_norm; }

 private:
  kernels::LambOptions kernel_options_of(const ParameterGroup& group, const Call& call) const;
};

}  // namespace cairn::optim
