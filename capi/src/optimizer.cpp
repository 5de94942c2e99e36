#include "optimizer.h"

#include "cairn/optim/optim.h"
#include "guard.h"
#include "tensors.h"

namespace cairn::capi {

namespace {

NamedTensors parameters_of(const cairn_tensor* weights, const cairn_tensor* gradients,
                           std::size_t count, const char* function) {
  const std::vector<TensorView> values = views_of(weights, count, function);
  const std::vector<TensorView> slopes = views_of(gradients, count, function);
  NamedTensors parameters;
  for (std::size_t i = 0; i < count; ++i) {
    parameters.push_back(
        optim::wrap_parameter(name_of(weights[i], function), values[i], slopes[i]));
  }
  return parameters;
}

void read_moments(Options& options, double& beta1, double& beta2, double& eps) {
  options.read("beta1", beta1);
  options.read("beta2", beta2);
  options.read("eps", eps);
}

optim::AdamOptions adam_options(Options& options, bool adamw) {
  optim::AdamOptions own{.adamw = adamw};
  read_moments(options, own.beta1, own.beta2, own.eps);
  options.read("bias_correction", own.bias_correction);
  return own;
}

optim::SgdOptions sgd_options(Options& options) {
  optim::SgdOptions own;
  options.read("momentum", own.momentum);
  options.read("dampening", own.dampening);
  options.read("nesterov", own.nesterov);
  options.read("wd_after_momentum", own.wd_after_momentum);
  return own;
}

optim::AdagradOptions adagrad_options(Options& options) {
  optim::AdagradOptions own;
  options.read("eps", own.eps);
  options.read("adagrad_w", own.adagrad_w);
  options.read("lr_decay", own.lr_decay);
  options.read("initial_accumulator", own.initial_accumulator);
  return own;
}

optim::RmsPropOptions rmsprop_options(Options& options) {
  optim::RmsPropOptions own;
  options.read("alpha", own.alpha);
  options.read("eps", own.eps);
  options.read("momentum", own.momentum);
  return own;
}

optim::LambOptions lamb_options(Options& options) {
  optim::LambOptions own;
  read_moments(options, own.beta1, own.beta2, own.eps);
  options.read("bias_correction", own.bias_correction);
  options.read("adamw", own.adamw);
  options.read("grad_averaging", own.grad_averaging);
  options.read("max_gradient_norm", own.max_gradient_norm);
  options.read("use_nvlamb", own.use_nvlamb);
  return own;
}

optim::NovoGradOptions novograd_options(Options& options) {
  optim::NovoGradOptions own;
  read_moments(options, own.beta1, own.beta2, own.eps);
  options.read("bias_correction", own.bias_correction);
  options.read("reg_inside_moment", own.reg_inside_moment);
  options.read("grad_averaging", own.grad_averaging);
  options.read("norm_type", own.norm_type);
  options.read("init_zero", own.init_zero);
  return own;
}

template <class Rule, class Own>
std::unique_ptr<optim::Optimizer> make_rule(Own own, Options& options, NamedTensors parameters) {
  options.read("lr", own.lr);
  options.read("weight_decay", own.weight_decay);
  options.end();
  return std::make_unique<Rule>(std::move(parameters), own);
}

std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& kind, Options& options,
                                                 NamedTensors parameters, const char* function) {
  using namespace optim;  // NOLINT: the rules
  if (kind == "adam")
    return make_rule<FusedAdam>(adam_options(options, false), options, std::move(parameters));
  if (kind == "adamw")
    return make_rule<FusedAdam>(adam_options(options, true), options, std::move(parameters));
  if (kind == "sgd")
    return make_rule<FusedSGD>(sgd_options(options), options, std::move(parameters));
  if (kind == "adagrad")
    return make_rule<FusedAdagrad>(adagrad_options(options), options, std::move(parameters));
  if (kind == "rmsprop")
    return make_rule<FusedRMSprop>(rmsprop_options(options), options, std::move(parameters));
  if (kind == "lamb")
    return make_rule<FusedLAMB>(lamb_options(options), options, std::move(parameters));
  if (kind == "novograd")
    return make_rule<FusedNovoGrad>(novograd_options(options), options, std::move(parameters));
  core::fail(function, "expected adam, adamw, sgd, adagrad, rmsprop, lamb or novograd, got '", kind,
             "'");
}

void read_group(optim::ParameterGroup& group, const char* text, const char* function) {
  Options options(function, text);
  options.read("lr", group.lr);
  options.read("weight_decay", group.weight_decay);
  options.read("beta1", group.beta1);
  options.read("beta2", group.beta2);
  options.read("eps", group.eps);
  options.read("momentum", group.momentum);
  options.end();
}

void set_groups(optim::Optimizer& optimizer, int32_t group, const char* text,
                const char* function) {
  const auto count = static_cast<int32_t>(optimizer.groups().size());
  CAIRN_CHECK(group >= -1 && group < count, function, "expected a group below ", count,
              " or -1, got ", group);
  std::vector<optim::ParameterGroup> groups = optimizer.groups();
  for (int32_t i = 0; i < count; ++i) {
    if (group == -1 || group == i) read_group(groups[static_cast<std::size_t>(i)], text, function);
  }
  optimizer.groups() = std::move(groups);
}

void keep_state(optim::Optimizer& optimizer, const char* text, const char* folder,
                const char* function) {
  Options options(function, text);
  std::string moments = "f32", masters = "f32";
  optim::StateOptions own{.folder = text_of(folder)};
  options.read("moments", moments);
  options.read("masters", masters);
  options.read("on_host", own.on_host);
  options.end();
  CAIRN_CHECK(masters == "f32" || masters == "remainder" || masters == "none", function,
              "expected masters=f32, remainder or none, got '", masters, "'");
  own.moments = core::parse_dtype(moments);
  if (masters == "remainder") own.masters = optim::MasterStorage::remainder;
  optimizer.set_state_options(own);
  optimizer.set_master_weights(masters != "none");
}

}  // namespace

optim::StepOptions step_options(const char* text, const char* function) {
  Options options(function, text);
  optim::StepOptions own;
  options.read("gradient_scale", own.gradient_scale);
  options.read("check", own.check);
  options.read("max_gradient_norm", own.max_gradient_norm);
  options.read("norm_type", own.norm_type);
  options.read("per_group_norm", own.per_group_norm);
  options.read("error_if_nonfinite", own.error_if_nonfinite);
  options.read("collapse_after", own.collapse_after);
  options.end();
  return own;
}

cairn_step_result step_result(const optim::StepResult& result) {
  return {result.applied ? 1 : 0, result.gradient_norm, result.clip_coefficient,
          result.reason.c_str(), result.culprit.c_str()};
}

extern "C" {

cairn_status cairn_optimizer_create(const char* kind, const char* options,
                                    const cairn_tensor* weights, const cairn_tensor* gradients,
                                    size_t count, cairn_optimizer** optimizer) {
  return guard(__func__, [&](const char* function) {
    check_given(optimizer, function, "where the optimizer goes");
    Options own(function, options);
    auto rule = make_optimizer(text_of(kind), own,
                               parameters_of(weights, gradients, count, function), function);
    *optimizer =
        static_cast<cairn_optimizer*>(add_object(std::make_shared<Optimizer>(std::move(rule))));
  });
}

cairn_status cairn_optimizer_add_group(cairn_optimizer* optimizer, const char* options,
                                       const cairn_tensor* weights, const cairn_tensor* gradients,
                                       size_t count) {
  return guard(__func__, [&](const char* function) {
    const auto own = optimizer_of(optimizer, function);
    const optim::ParameterGroup& first = own->optimizer->groups().front();
    optim::ParameterGroup group{.lr = first.lr, .weight_decay = first.weight_decay};
    read_group(group, options, function);
    group.parameters = parameters_of(weights, gradients, count, function);
    own->optimizer->add_group(std::move(group));
  });
}

cairn_status cairn_optimizer_set(cairn_optimizer* optimizer, int32_t group, const char* options) {
  return guard(__func__, [&](const char* function) {
    set_groups(*optimizer_of(optimizer, function)->optimizer, group, options, function);
  });
}

cairn_status cairn_optimizer_keep_state(cairn_optimizer* optimizer, const char* options,
                                        const char* folder) {
  return guard(__func__, [&](const char* function) {
    keep_state(*optimizer_of(optimizer, function)->optimizer, options, folder, function);
  });
}

cairn_status cairn_optimizer_step(cairn_optimizer* optimizer, const char* options,
                                  cairn_step_result* result) {
  return guard(__func__, [&](const char* function) {
    const auto own = optimizer_of(optimizer, function);
    check_given(result, function, "a result (a skipped step shows there alone)");
    const optim::StepOptions how = step_options(options, function);
    for_each_parameter(*own->optimizer, [](const NamedTensor& parameter) {
      parameter.tensor.gradient_slot().mark_written();
    });
    own->last = own->optimizer->step(how);
    *result = step_result(own->last);
  });
}

cairn_status cairn_optimizer_steps(cairn_optimizer* optimizer, int64_t* steps) {
  return guard(__func__, [&](const char* function) {
    const auto own = optimizer_of(optimizer, function);
    check_given(steps, function, "where the steps go");
    *steps = own->optimizer->steps();
  });
}

cairn_status cairn_optimizer_weights_written(cairn_optimizer* optimizer) {
  return guard(__func__, [&](const char* function) {
    for_each_parameter(
        *optimizer_of(optimizer, function)->optimizer,
        [](const NamedTensor& parameter) { parameter.tensor.view().bump_version(); });
  });
}

}  // extern "C"

}  // namespace cairn::capi
