#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/sgd.h"
#include "torch_options.h"

namespace cairn::optim {

FusedSGD::FusedSGD(NamedTensors parameters, const SgdOptions& options)
    : FusedSGD({{std::move(parameters), options.lr, options.weight_decay}}, options) {}

FusedSGD::FusedSGD(std::vector<ParameterGroup> groups, const SgdOptions& options)
    : Optimizer(std::move(groups)), options_(options) {
  CAIRN_CHECK(options.momentum >= 0 && std::isfinite(options.momentum), "FusedSGD",
              "expected a momentum >= 0, got ", options.momentum);
  CAIRN_CHECK(std::isfinite(options.dampening), "FusedSGD", "expected a finite dampening, got ",
              options.dampening);
  CAIRN_CHECK(!options.nesterov || (options.momentum > 0 && options.dampening == 0), "FusedSGD",
              "expected momentum > 0 and dampening 0 for nesterov, got ", options.momentum, " and ",
              options.dampening);
}

std::vector<std::string> FusedSGD::moment_names() const {
  for (const ParameterGroup& group : groups()) {
    if (momentum_of(group) != 0) return {"momentum_buffer"};
  }
  return {};
}

std::vector<std::pair<std::string, double>> FusedSGD::rule_options() const {
  return {{"momentum", options_.momentum},
          {"dampening", options_.dampening},
          {"nesterov", options_.nesterov ? 1.0 : 0.0},
          {"wd_after_momentum", options_.wd_after_momentum ? 1.0 : 0.0}};
}

void FusedSGD::update_entries(const ParameterGroup& group,
                              const std::vector<kernels::UpdateEntry>& entries, const Call& call) {
  kernels::SgdOptions options;
  options.lr = group.lr;
  options.momentum = momentum_of(group);
  options.dampening = options_.dampening;
  options.weight_decay = group.weight_decay;
  options.nesterov = options_.nesterov && options.momentum != 0;
  options.wd_after_momentum = options_.wd_after_momentum;
  options.first_step = call.step == 1;
  options.gradient_scale = call.gradient_scale;
  kernels::update(entries, options, call.device);
}

StateDict FusedSGD::torch_options(const ParameterGroup& group) const {
  require_in_torch("FusedSGD", !options_.wd_after_momentum || group.weight_decay == 0,
                   "weight decay before the momentum");
  StateDict options;
  options.set("lr", group.lr);
  options.set("momentum", momentum_of(group));
  options.set("dampening", options_.dampening);
  options.set("weight_decay", group.weight_decay);
  options.set("nesterov", std::int64_t{options_.nesterov});
  options.set("maximize", std::int64_t{0});
  return options;
}

void FusedSGD::take_torch_options(const StateDict& options, StateDict& group) const {
  require_in_torch("FusedSGD", !options_.wd_after_momentum, "weight decay before the momentum");
  expect_torch_option("FusedSGD", options, "dampening", options_.dampening);
  expect_torch_option("FusedSGD", options, "nesterov", options_.nesterov);
  expect_torch_option("FusedSGD", options, "maximize", 0);
  group.set("lr", torch_number(options, "lr"));
  group.set("weight_decay", torch_number(options, "weight_decay"));
  group.set("momentum", torch_number(options, "momentum"));
}

}  // namespace cairn::optim
