#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/adagrad.h"
#include "torch_options.h"

namespace cairn::optim {

FusedAdagrad::FusedAdagrad(NamedTensors parameters, const AdagradOptions& options)
    : FusedAdagrad({{std::move(parameters), options.lr, options.weight_decay}}, options) {}

FusedAdagrad::FusedAdagrad(std::vector<ParameterGroup> groups, const AdagradOptions& options)
    : Optimizer(std::move(groups)), options_(options) {
  for (const double value : {options.eps, options.lr_decay, options.initial_accumulator}) {
    CAIRN_CHECK(value >= 0 && std::isfinite(value), "FusedAdagrad",
                "expected eps, lr_decay and initial_accumulator >= 0, got ", value);
  }
}

std::vector<std::pair<std::string, double>> FusedAdagrad::rule_options() const {
  return {{"eps", options_.eps},
          {"adagrad_w", options_.adagrad_w ? 1.0 : 0.0},
          {"lr_decay", options_.lr_decay},
          {"initial_accumulator", options_.initial_accumulator}};
}

void FusedAdagrad::update_entries(const ParameterGroup& group,
                                  const std::vector<kernels::UpdateEntry>& entries,
                                  const Call& call) {
  kernels::AdagradOptions options;
  options.lr = group.lr / (1.0 + static_cast<double>(call.step - 1) * options_.lr_decay);
  options.lr_decay = options_.lr_decay;
  options.eps = group.eps.value_or(options_.eps);
  options.weight_decay = group.weight_decay;
  options.adagrad_w = options_.adagrad_w;
  options.gradient_scale = call.gradient_scale;
  kernels::update(entries, options, call.device);
}

StateDict FusedAdagrad::torch_options(const ParameterGroup& group) const {
  require_in_torch("FusedAdagrad", !options_.adagrad_w || group.weight_decay == 0,
                   "weight decay in the gradient");
  StateDict options;
  options.set("lr", group.lr);
  options.set("lr_decay", options_.lr_decay);
  options.set("eps", group.eps.value_or(options_.eps));
  options.set("weight_decay", group.weight_decay);
  options.set("initial_accumulator_value", options_.initial_accumulator);
  options.set("maximize", std::int64_t{0});
  return options;
}

void FusedAdagrad::take_torch_options(const StateDict& options, StateDict& group) const {
  require_in_torch("FusedAdagrad", !options_.adagrad_w, "weight decay in the gradient");
  expect_torch_option("FusedAdagrad", options, "lr_decay", options_.lr_decay);
  expect_torch_option("FusedAdagrad", options, "initial_accumulator_value",
                      options_.initial_accumulator);
  expect_torch_option("FusedAdagrad", options, "maximize", 0);
  group.set("lr", torch_number(options, "lr"));
  group.set("weight_decay", torch_number(options, "weight_decay"));
  group.set("eps", torch_number(options, "eps"));
}

}  // namespace cairn::optim
