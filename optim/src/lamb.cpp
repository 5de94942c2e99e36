#include "cairn/optim/lamb.h"
#include "options.h"

namespace cairn::optim {

FusedLAMB::FusedLAMB(NamedTensors parameters, const LambOptions& options)
    : FusedLAMB({{std::move(parameters), options.lr, options.weight_decay}}, options) {}

FusedLAMB::FusedLAMB(std::vector<ParameterGroup> groups, const LambOptions& options)
    : Optimizer(std::move(groups)), options_(options) {
  check_betas_and_eps("FusedLAMB", options.beta1, options.beta2, options.eps);
  CAIRN_CHECK(options.max_gradient_norm >= 0 && std::isfinite(options.max_gradient_norm),
              "FusedLAMB", "expected max_gradient_norm >= 0, got ", options.max_gradient_norm);
}

std::vector<std::pair<std::string, double>> FusedLAMB::rule_options() const {
  return {{"beta1", options_.beta1},
          {"beta2", options_.beta2},
          {"eps", options_.eps},
          {"bias_correction", options_.bias_correction ? 1.0 : 0.0},
          {"adamw", options_.adamw ? 1.0 : 0.0},
          {"grad_averaging", options_.grad_averaging ? 1.0 : 0.0},
          {"max_gradient_norm", options_.max_gradient_norm},
          {"use_nvlamb", options_.use_nvlamb ? 1.0 : 0.0}};
}

void FusedLAMB::update_entries(const ParameterGroup& group,
                               const std::vector<kernels::UpdateEntry>& entries, const Call& call) {
  kernels::LambOptions options;
  options.lr = group.lr;
  options.beta1 = group.beta1.value_or(options_.beta1);
  options.beta2 = group.beta2.value_or(options_.beta2);
  options.eps = group.eps.value_or(options_.eps);
  options.weight_decay = group.weight_decay;
  options.adamw = options_.adamw;
  options.grad_averaging = options_.grad_averaging;
  options.use_nvlamb = options_.use_nvlamb;
  if (options_.bias_correction) {
    options.correction1 = bias_correction(options.beta1, call.step);
    options.correction2 = bias_correction(options.beta2, call.step);
  }
  options.gradient_scale = call.gradient_scale;
  kernels::DeviceStep device = call.device;
  device.bias_correction = options_.bias_correction;
  kernels::update(entries, options, device);
}

}  // namespace cairn::optim
