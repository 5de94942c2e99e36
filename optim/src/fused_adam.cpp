#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer.h"

namespace cairn::optim {

FusedAdam::FusedAdam(NamedTensors parameters, const AdamOptions& options)
    : FusedAdam({{std::move(parameters), options.lr, options.weight_decay}}, options) {}

FusedAdam::FusedAdam(std::vector<ParameterGroup> groups, const AdamOptions& options)
    : Optimizer(std::move(groups)), options_(options) {
  const auto is_beta = [](double beta) { return beta >= 0 && beta < 1; };
  CAIRN_CHECK(is_beta(options.beta1) && is_beta(options.beta2), "FusedAdam",
              "expected betas in [0, 1), got ", options.beta1, " and ", options.beta2);
  CAIRN_CHECK(options.eps >= 0 && std::isfinite(options.eps), "FusedAdam",
              "expected eps >= 0, got ", options.eps);
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
    options.correction1 = 1.0 - std::pow(options.beta1, static_cast<double>(step));
    options.correction2 = 1.0 - std::pow(options.beta2, static_cast<double>(step));
  }
  options.gradient_scale = gradient_scale;
  kernels::adam_update(entries, options);
}

}  // namespace cairn::optim
