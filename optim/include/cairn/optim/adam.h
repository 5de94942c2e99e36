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
class FusedAdam final : public Optimizer {
 public:
  explicit FusedAdam(NamedTensors parameters, const AdamOptions& options = {});
  FusedAdam(std::vector<ParameterGroup> groups,
            const AdamOptions& options);  // lr and weight_decay are the groups'
  const AdamOptions& options() const { return options_; }

 protected:
  void update_entries(const ParameterGroup& group, const std::vector<kernels::UpdateEntry>& entries,
                      const Call& call) override;
  const char* kind() const override { return "FusedAdam"; }
  std::vector<std::pair<std::string, double>> rule_options() const override;
  std::vector<std::string> moment_names() const override { return {"exp_avg", "exp_avg_sq"}; }
  std::vector<TorchOption> torch_options() const override;
  const char* missing_for_torch(bool decays) const override;

 private:
  AdamOptions options_;
};

}  // namespace cairn::optim
