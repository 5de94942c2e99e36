// FusedNovoGrad: momentum over gradients that are divided by a running norm of their tensor
// (Ginsburg et al. 2019).
#pragma once

#include "cairn/optim/optimizer.h"

namespace cairn::optim {

struct NovoGradOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool bias_correction = true;
  bool reg_inside_moment =
      false;                   // weight decay, and the division by the norm, before the momentum
  bool grad_averaging = true;  // (1 - beta1) times the gradient goes into the momentum
  double norm_type = 2.0;      // or infinity
  bool init_zero = false;      // the running norm begins at 0; false: at the first gradient's
};
/// Formulas in kernels/optimizer_update.h; the running norm of each parameter is
///   norm_type 2: n = sqrt(beta2 n^2 + (1 - beta2) |g|^2);  infinity: n = beta2 n + (1 - beta2) |g|
/// of the unscaled, clipped gradient. State: exp_avg, norm (a number). Every step checks.
class FusedNovoGrad final : public FusedOptimizer<NovoGradOptions> {
 public:
  explicit FusedNovoGrad(NamedTensors parameters, const NovoGradOptions& options = {})
      : FusedNovoGrad({{std::move(parameters), options.lr, options.weight_decay}}, options) {}
  FusedNovoGrad(std::vector<ParameterGroup> groups, const NovoGradOptions& options);

 protected:
  void update_group(const ParameterGroup& group, const Entries& entries, const Call& call) override;
  const char* kind() const override { return "FusedNovoGrad"; }
  std::vector<RuleOption> rule_options() const override;
  std::vector<std::string> moment_names() const override { return {"exp_avg"}; }
  std::optional<double> running_norm_type() const override { return options_.norm_type; }
  double running_norm(const ParameterGroup& group, double before, double gradient_norm,
                      std::int64_t step) const override;
};

}  // namespace cairn::optim
