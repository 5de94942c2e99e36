#include "cairn/optim/optimizer.h"
#include "options.h"

namespace cairn::optim {

FusedAdam::FusedAdam(NamedTensors parameters, const AdamOptions& options)
    : FusedAdam({{std::move(parameters), options.lr, options.weight_decay}}, options) {}

FusedAdam::FusedAdam(std::vector<ParameterGroup> groups, const AdamOptions& options)
    : Optimizer(std::move(groups)), options_(options) {
  check_betas_and_eps("FusedAdam", options.beta1, options.beta2, options.eps);
}

void FusedAdam::update_entries(const ParameterGroup& group,
                               const std::vector<kernels::UpdateEntry>& entries,
                               double gradient_scale, std::int64_t step) {
  kernels::AdamOptions options;
  options.lr = group.lr;
  options.beta1 = group.beta1.value_or(options_.beta1);
  options.beta2 = group.beta2.value_or(options_.beta2);
  options.eps = group.eps.value_or(options_.eps);
  options.weight_decay = group.weight_decay;
  options.adamw = options_.adamw;
  if (options_.bias_correction) {
    options.correction1 = bias_correction(options.beta1, step);
    options.correction2 = bias_correction(options.beta2, step);
  }
  options.gradient_scale = gradient_scale;
  kernels::adam_update(entries, options);
}

}  // namespace cairn::optim
