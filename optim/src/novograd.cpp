#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/novograd.h"
#include "options.h"

namespace cairn::optim {

FusedNovoGrad::FusedNovoGrad(NamedTensors parameters, const NovoGradOptions& options)
    : FusedNovoGrad({{std::move(parameters), options.lr, options.weight_decay}}, options) {}

FusedNovoGrad::FusedNovoGrad(std::vector<ParameterGroup> groups, const NovoGradOptions& options)
    : Optimizer(std::move(groups)), options_(options) {
  check_betas_and_eps("FusedNovoGrad", options.beta1, options.beta2, options.eps);
  CAIRN_CHECK(options.norm_type == 2.0 || (std::isinf(options.norm_type) && options.norm_type > 0),
              "FusedNovoGrad", "expected norm_type 2 or infinity, got ", options.norm_type);
}

double FusedNovoGrad::running_norm(const ParameterGroup& group, double before, double gradient_norm,
                                   std::int64_t step) const {
  if (step == 1 && !options_.init_zero) return gradient_norm;
  const double beta2 = group.beta2.value_or(options_.beta2);
  if (options_.norm_type != 2.0) return beta2 * before + (1.0 - beta2) * gradient_norm;
  return std::sqrt(beta2 * before * before + (1.0 - beta2) * gradient_norm * gradient_norm);
}

std::vector<std::pair<std::string, double>> FusedNovoGrad::rule_options() const {
  return {{"beta1", options_.beta1},
          {"beta2", options_.beta2},
          {"eps", options_.eps},
          {"bias_correction", options_.bias_correction ? 1.0 : 0.0},
          {"reg_inside_moment", options_.reg_inside_moment ? 1.0 : 0.0},
          {"grad_averaging", options_.grad_averaging ? 1.0 : 0.0},
          {"norm_type", options_.norm_type},
          {"init_zero", options_.init_zero ? 1.0 : 0.0}};
}

void FusedNovoGrad::update_entries(const ParameterGroup& group,
                                   const std::vector<kernels::UpdateEntry>& entries,
                                   const Call& call) {
  kernels::NovoGradOptions options;
  options.lr = group.lr;
  options.beta1 = group.beta1.value_or(options_.beta1);
  options.eps = group.eps.value_or(options_.eps);
  options.weight_decay = group.weight_decay;
  options.grad_averaging = options_.grad_averaging;
  options.reg_inside_moment = options_.reg_inside_moment;
  if (options_.bias_correction) {
    options.correction1 = bias_correction(options.beta1, call.step);
    options.correction2 = bias_correction(group.beta2.value_or(options_.beta2), call.step);
  }
  options.gradient_scale = call.gradient_scale;
  kernels::update(entries, options, call.device);
}

}  // namespace cairn::optim
