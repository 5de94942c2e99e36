// FusedAdagrad: Adagrad (Duchi, Hazan & Singer 2011) with L2 or decoupled weight decay.
#pragma once

#include "cairn/optim/optimizer.h"

namespace cairn::optim {

struct AdagradOptions {
  double lr = 1e-2;
  double eps = 1e-10;
  double weight_decay = 0.0;
  bool adagrad_w = false;            // decoupled weight decay; false: L2
  double lr_decay = 0.0;             // the t-th update has lr / (1 + (t - 1) lr_decay), as torch's
  double initial_accumulator = 0.0;  // where the sums of squares begin
};
/// Formulas in kernels/optimizer_update.h. State: sum.
class FusedAdagrad final : public FusedOptimizer<AdagradOptions> {
 public:
  explicit FusedAdagrad(NamedTensors parameters, const AdagradOptions& options = {})
      : FusedAdagrad({{std::move(parameters), options.lr, options.weight_decay}}, options) {}
  FusedAdagrad(std::vector<ParameterGroup> groups, const AdagradOptions& options);

 protected:
  void update_group(const ParameterGroup& group, const Entries& entries, const Call& call) override;
  const char* kind() const override { return "FusedAdagrad"; }
  std::vector<RuleOption> rule_options() const override;
  std::vector<std::string> moment_names() const override { return {"sum"}; }
  std::vector<const char*> torch_flags() const override { return {"maximize"}; }
  const char* missing_for_torch(bool decays) const override {
    return options_.adagrad_w && decays ? "weight decay in the gradient" : nullptr;
  }
  bool torch_begins_with_state() const override { return true; }
  double initial_moment() const override { return options_.initial_accumulator; }
};

}  // namespace cairn::optim
