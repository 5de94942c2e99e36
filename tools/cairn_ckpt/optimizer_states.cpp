#include "optimizer_states.h"

#include <algorithm>
#include <map>
#include <memory>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "cairn/optim/optim.h"

namespace cairn::tools {

namespace {

const StateDict* dictionary(const StateDict& state, const std::string& key) {
  const StateDict::Value* value = state.find(key);
  return value == nullptr ? nullptr : std::get_if<StateDict>(value);
}

bool is_buffer(const std::string& name) {
  return name.ends_with("running_mean") || name.ends_with("running_var") ||
         name.ends_with("num_batches_tracked");
}

// Stand-ins for the model's parameters, in its order: an optimizer asks for their names and shapes.
NamedTensors parameters_of(const StateDict& model) {
  NamedTensors parameters;
  for (const auto& [name, value] : checkpointing::flatten(model)) {
    const auto* tensor = std::get_if<Tensor>(&value);
    if (tensor == nullptr || !core::is_floating(tensor->dtype()) || is_buffer(name)) continue;
    Tensor parameter = Tensor::zeros(tensor->shape(), DType::f32, Device{});
    parameter.set_requires_grad(true);
    parameters.push_back({name, parameter});
  }
  return parameters;
}

void expect_one_group(std::size_t groups) {
  if (groups == 1) return;
  core::fail<core::Unsupported>(
      "convert", "expected one parameter group, got ", groups,
      ": no state says which parameters are in which (convert --part model, or exchange it in the "
      "program, by torch_state_dict)");
}

double option(const StateDict& state, const char* key) {
  const StateDict* options = dictionary(state, "options");
  return options != nullptr && options->contains(key) ? options->number(key) : 0.0;
}

std::unique_ptr<optim::Optimizer> own_optimizer(const StateDict& own, NamedTensors parameters) {
  const std::string& kind = own.text("kind");
  if (kind == "FusedAdam") {
    optim::AdamOptions options;
    options.adamw = option(own, "adamw") != 0;
    options.bias_correction = option(own, "bias_correction") != 0;
    return std::make_unique<optim::FusedAdam>(std::move(parameters), options);
  }
  if (kind == "FusedSGD") {
    optim::SgdOptions options;
    options.momentum = option(own, "momentum");
    options.dampening = option(own, "dampening");
    options.nesterov = option(own, "nesterov") != 0;
    options.wd_after_momentum = option(own, "wd_after_momentum") != 0;
    return std::make_unique<optim::FusedSGD>(std::move(parameters), options);
  }
  core::fail<core::Unsupported>("convert", "expected FusedAdam or FusedSGD, got ", kind,
                                " (convert --part model)");
}

double number_or(const StateDict& group, const char* key, double otherwise) {
  return group.contains(key) ? group.number(key) : otherwise;
}

std::unique_ptr<optim::Optimizer> torch_optimizer(const StateDict& group, NamedTensors parameters) {
  if (group.contains("betas")) {
    optim::AdamOptions options;
    options.adamw = number_or(group, "decoupled_weight_decay", 1) != 0;
    return std::make_unique<optim::FusedAdam>(std::move(parameters), options);
  }
  if (group.contains("momentum")) {
    optim::SgdOptions options;
    options.momentum = group.number("momentum");
    options.dampening = number_or(group, "dampening", 0);
    options.nesterov = number_or(group, "nesterov", 0) != 0;
    return std::make_unique<optim::FusedSGD>(std::move(parameters), options);
  }
  core::fail<core::Unsupported>("convert",
                                "expected a state of torch's Adam, AdamW or SGD, got another "
                                "(convert --part model)");
}

}  // namespace

bool is_own_optimizer(const StateDict& state) {
  const StateDict::Value* kind = state.find("kind");
  return kind != nullptr && std::holds_alternative<std::string>(*kind) &&
         dictionary(state, "groups") != nullptr && dictionary(state, "state") != nullptr;
}

bool is_torch_optimizer(const StateDict& state) {
  return dictionary(state, "param_groups") != nullptr;
}

StateDict torch_from_own(const StateDict& own, const StateDict& model) {
  expect_one_group(own.dict("groups").size());
  const auto optimizer = own_optimizer(own, parameters_of(model));
  optimizer->load_state_dict(own);
  return optimizer->torch_state_dict();
}

StateDict own_from_torch(const StateDict& torch, const StateDict& model) {
  const StateDict& groups = torch.dict("param_groups");
  expect_one_group(groups.size());
  const auto optimizer = torch_optimizer(groups.dict("0"), parameters_of(model));
  optimizer->load_torch_state_dict(torch);
  return optimizer->state_dict();
}

}  // namespace cairn::tools
