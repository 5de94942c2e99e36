#include "cairn/optim/adam.h"
#include "options.h"
#include "torch_options.h"

namespace cairn::optim {

FusedAdam::FusedAdam(NamedTensors parameters, const AdamOptions& options)
    : FusedAdam({{std::move(parameters), options.lr, options.weight_decay}}, options) {}

FusedAdam::FusedAdam(std::vector<ParameterGroup> groups, const AdamOptions& options)
    : Optimizer(std::move(groups)), options_(options) {
  check_betas_and_eps("FusedAdam", options.beta1, options.beta2, options.eps);
}

std::vector<std::pair<std::string, double>> FusedAdam::rule_options() const {
  return {{"beta1", options_.beta1},
          {"beta2", options_.beta2},
          {"eps", options_.eps},
          {"adamw", options_.adamw ? 1.0 : 0.0},
          {"bias_correction", options_.bias_correction ? 1.0 : 0.0}};
}

void FusedAdam::update_entries(const ParameterGroup& group,
                               const std::vector<kernels::UpdateEntry>& entries, const Call& call) {
  kernels::AdamOptions options;
  options.lr = group.lr;
  options.beta1 = group.beta1.value_or(options_.beta1);
  options.beta2 = group.beta2.value_or(options_.beta2);
  options.eps = group.eps.value_or(options_.eps);
  options.weight_decay = group.weight_decay;
  options.adamw = options_.adamw;
  if (options_.bias_correction) {
    options.correction1 = bias_correction(options.beta1, call.step);
    options.correction2 = bias_correction(options.beta2, call.step);
  }
  options.gradient_scale = call.gradient_scale;
  kernels::DeviceStep device = call.device;
  device.bias_correction = options_.bias_correction;
  kernels::update(entries, options, device);
}

StateDict FusedAdam::torch_options(const ParameterGroup& group) const {
  require_in_torch("FusedAdam", options_.bias_correction, "bias correction");
  StateDict options;
  options.set("lr", group.lr);
  StateDict& betas = options.make_dict("betas");
  betas.set("0", group.beta1.value_or(options_.beta1));
  betas.set("1", group.beta2.value_or(options_.beta2));
  options.set("eps", group.eps.value_or(options_.eps));
  options.set("weight_decay", group.weight_decay);
  options.set("amsgrad", std::int64_t{0});
  options.set("maximize", std::int64_t{0});
  options.set("decoupled_weight_decay", std::int64_t{options_.adamw});
  return options;
}

void FusedAdam::take_torch_options(const StateDict& options, StateDict& group) const {
  require_in_torch("FusedAdam", options_.bias_correction, "bias correction");
  expect_torch_option("FusedAdam", options, "amsgrad", 0);
  expect_torch_option("FusedAdam", options, "maximize", 0);
  expect_torch_option("FusedAdam", options, "decoupled_weight_decay", options_.adamw);
  const StateDict& betas = options.dict("betas");
  group.set("lr", torch_number(options, "lr"));
  group.set("weight_decay", torch_number(options, "weight_decay"));
  group.set("beta1", torch_number(betas, "0"));
  group.set("beta2", torch_number(betas, "1"));
  group.set("eps", torch_number(options, "eps"));
}

}  // namespace cairn::optim
