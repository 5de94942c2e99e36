// What each rule checks, what its states are compared by, and what it hands to its kernel.
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/adagrad.h"
#include "cairn/optim/adam.h"
#include "cairn/optim/lamb.h"
#include "cairn/optim/novograd.h"
#include "cairn/optim/rmsprop.h"
#include "cairn/optim/sgd.h"

namespace cairn::optim {

namespace {

bool is_amount(double x) {
  return x >= 0 && std::isfinite(x);
}

template <class Own>
void check_betas_and_eps(const char* kind, const Own& own) {
  const auto is_beta = [](double beta) { return beta >= 0 && beta < 1; };
  CAIRN_CHECK(is_beta(own.beta1) && is_beta(own.beta2), kind, "expected betas in [0, 1), got ",
              own.beta1, " and ", own.beta2);
  CAIRN_CHECK(is_amount(own.eps), kind, "expected eps >= 0, got ", own.eps);
}

/// What several rules' kernels have, as it holds for the group: its own, or the rule's.
template <class Options, class Own, class Call>
Options kernel_options(const ParameterGroup& group, const Own& own, const Call& call) {
  Options options;
  options.lr = group.lr;
  options.weight_decay = call.weight_decay;
  options.gradient_scale = call.gradient_scale;
  if constexpr (requires { options.eps; }) options.eps = group.eps.value_or(own.eps);
  if constexpr (requires { options.beta1; }) options.beta1 = group.beta1.value_or(own.beta1);
  if constexpr (requires { options.beta2; }) options.beta2 = group.beta2.value_or(own.beta2);
  if constexpr (requires { options.correction1; }) {
    if (!own.bias_correction) return options;
    options.correction1 = kernels::correction_of(options.beta1, call.step);
    options.correction2 = kernels::correction_of(group.beta2.value_or(own.beta2), call.step);
  }
  return options;
}

}  // namespace

FusedAdam::FusedAdam(std::vector<ParameterGroup> groups, const AdamOptions& options)
    : FusedOptimizer(std::move(groups), options) {
  check_betas_and_eps("FusedAdam", options);
}

std::vector<Optimizer::RuleOption> FusedAdam::rule_options() const {
  return {{"beta1", options_.beta1, "betas.0"},
          {"beta2", options_.beta2, "betas.1"},
          {"eps", options_.eps, "eps"},
          {"adamw", options_.adamw, "decoupled_weight_decay"},
          {"bias_correction", options_.bias_correction}};
}

void FusedAdam::update_group(const ParameterGroup& group, const Entries& entries,
                             const Call& call) {
  auto options = kernel_options<kernels::AdamOptions>(group, options_, call);
  options.adamw = options_.adamw;
  kernels::DeviceStep device = call.device;
  device.bias_correction = options_.bias_correction;
  kernels::update(entries, options, device);
}

FusedSGD::FusedSGD(std::vector<ParameterGroup> groups, const SgdOptions& options)
    : FusedOptimizer(std::move(groups), options) {
  CAIRN_CHECK(is_amount(options.momentum), "FusedSGD", "expected a momentum >= 0, got ",
              options.momentum);
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

std::vector<Optimizer::RuleOption> FusedSGD::rule_options() const {
  return {{"momentum", options_.momentum, "momentum"},
          {"dampening", options_.dampening, "dampening"},
          {"nesterov", options_.nesterov, "nesterov"},
          {"wd_after_momentum", options_.wd_after_momentum}};
}

void FusedSGD::update_group(const ParameterGroup& group, const Entries& entries, const Call& call) {
  auto options = kernel_options<kernels::SgdOptions>(group, options_, call);
  options.momentum = momentum_of(group);
  options.dampening = options_.dampening;
  options.nesterov = options_.nesterov && options.momentum != 0;
  options.wd_after_momentum = options_.wd_after_momentum;
  options.first_step = call.step == 1;
  kernels::update(entries, options, call.device);
}

FusedAdagrad::FusedAdagrad(std::vector<ParameterGroup> groups, const AdagradOptions& options)
    : FusedOptimizer(std::move(groups), options) {
  for (const double value : {options.eps, options.lr_decay, options.initial_accumulator}) {
    CAIRN_CHECK(is_amount(value), "FusedAdagrad",
                "expected eps, lr_decay and initial_accumulator >= 0, got ", value);
  }
}

std::vector<Optimizer::RuleOption> FusedAdagrad::rule_options() const {
  return {{"eps", options_.eps, "eps"},
          {"adagrad_w", options_.adagrad_w},
          {"lr_decay", options_.lr_decay, "lr_decay"},
          {"initial_accumulator", options_.initial_accumulator, "initial_accumulator_value"}};
}

void FusedAdagrad::update_group(const ParameterGroup& group, const Entries& entries,
                                const Call& call) {
  auto options = kernel_options<kernels::AdagradOptions>(group, options_, call);
  options.lr = group.lr / (1.0 + static_cast<double>(call.step - 1) * options_.lr_decay);
  options.lr_decay = options_.lr_decay;
  options.adagrad_w = options_.adagrad_w;
  kernels::update(entries, options, call.device);
}

FusedRMSprop::FusedRMSprop(std::vector<ParameterGroup> groups, const RmsPropOptions& options)
    : FusedOptimizer(std::move(groups), options) {
  CAIRN_CHECK(options.alpha >= 0 && options.alpha < 1, "FusedRMSprop",
              "expected an alpha in [0, 1), got ", options.alpha);
  for (const double value : {options.eps, options.momentum}) {
    CAIRN_CHECK(is_amount(value), "FusedRMSprop", "expected eps and momentum >= 0, got ", value);
  }
}

std::vector<Optimizer::RuleOption> FusedRMSprop::rule_options() const {
  return {{"alpha", options_.alpha, "alpha"},
          {"eps", options_.eps, "eps"},
          {"momentum", options_.momentum, "momentum"}};
}

std::vector<std::string> FusedRMSprop::moment_names() const {
  if (options_.momentum == 0) return {"square_avg"};
  return {"square_avg", "momentum_buffer"};
}

void FusedRMSprop::update_group(const ParameterGroup& group, const Entries& entries,
                                const Call& call) {
  auto options = kernel_options<kernels::RmsPropOptions>(group, options_, call);
  options.alpha = options_.alpha;
  options.momentum = options_.momentum;
  kernels::update(entries, options, call.device);
}

FusedNovoGrad::FusedNovoGrad(std::vector<ParameterGroup> groups, const NovoGradOptions& options)
    : FusedOptimizer(std::move(groups), options) {
  check_betas_and_eps("FusedNovoGrad", options);
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

std::vector<Optimizer::RuleOption> FusedNovoGrad::rule_options() const {
  return {{"beta1", options_.beta1},
          {"beta2", options_.beta2},
          {"eps", options_.eps},
          {"bias_correction", options_.bias_correction},
          {"reg_inside_moment", options_.reg_inside_moment},
          {"grad_averaging", options_.grad_averaging},
          {"norm_type", options_.norm_type},
          {"init_zero", options_.init_zero}};
}

void FusedNovoGrad::update_group(const ParameterGroup& group, const Entries& entries,
                                 const Call& call) {
  auto options = kernel_options<kernels::NovoGradOptions>(group, options_, call);
  options.grad_averaging = options_.grad_averaging;
  options.reg_inside_moment = options_.reg_inside_moment;
  kernels::update(entries, options, call.device);
}

FusedLAMB::FusedLAMB(std::vector<ParameterGroup> groups, const LambOptions& options)
    : FusedOptimizer(std::move(groups), options) {
  check_betas_and_eps("FusedLAMB", options);
  CAIRN_CHECK(is_amount(options.max_gradient_norm), "FusedLAMB",
              "expected max_gradient_norm >= 0, got ", options.max_gradient_norm);
}

std::vector<Optimizer::RuleOption> FusedLAMB::rule_options() const {
  return {{"beta1", options_.beta1},
          {"beta2", options_.beta2},
          {"eps", options_.eps},
          {"bias_correction", options_.bias_correction},
          {"adamw", options_.adamw},
          {"grad_averaging", options_.grad_averaging},
          {"max_gradient_norm", options_.max_gradient_norm},
          {"use_nvlamb", options_.use_nvlamb}};
}

kernels::LambOptions FusedLAMB::kernel_options_of(const ParameterGroup& group,
                                                  const Call& call) const {
  auto options = kernel_options<kernels::LambOptions>(group, options_, call);
  options.adamw = options_.adamw;
  options.grad_averaging = options_.grad_averaging;
  options.use_nvlamb = options_.use_nvlamb;
  return options;
}

void FusedLAMB::update_group(const ParameterGroup& group, const Entries& entries,
                             const Call& call) {
  kernels::DeviceStep device = call.device;
  device.bias_correction = options_.bias_correction;
  kernels::update(entries, kernel_options_of(group, call), device);
}

kernels::PendingCheck FusedLAMB::begin_update(const ParameterGroup& group, const Entries& pieces,
                                              const Call& call) {
  return kernels::begin_lamb_update(pieces, kernel_options_of(group, call));
}

void FusedLAMB::end_update(const ParameterGroup& group, const Entries& entries,
                           const std::vector<TwoChecks>& found, const Call& call) {
  std::vector<kernels::LambNorms> norms;
  norms.reserve(found.size());
  for (const TwoChecks& one : found) norms.push_back({one[0].power_sum, one[1].power_sum});
  kernels::end_lamb_update(entries, norms, kernel_options_of(group, call));
}

}  // namespace cairn::optim
