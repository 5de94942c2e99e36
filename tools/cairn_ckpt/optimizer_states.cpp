#include "optimizer_states.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

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

[[noreturn]] void fail_groups(const std::string& what) {
  core::fail<core::Unsupported>(
      "convert", "expected parameter groups that tell which parameters are in which, got ", what,
      " (convert --part model, or exchange it in the program, by torch_state_dict)");
}

using Groups = std::vector<optim::ParameterGroup>;

Groups one_group(NamedTensors parameters) {
  return {optim::ParameterGroup{.parameters = std::move(parameters)}};
}

Groups by_names(const std::vector<std::vector<std::string>>& names,
                const NamedTensors& parameters) {
  std::map<std::string, Tensor> left;
  for (const auto& [name, tensor] : parameters) left.emplace(name, tensor);
  Groups groups(names.size());
  for (std::size_t g = 0; g < names.size(); ++g) {
    for (const std::string& name : names[g]) {
      const auto found = left.extract(name);
      if (found.empty()) {
        core::fail<core::DataError>("convert", "expected the parameters of the model in groups, ",
                                    "each once, got '", name, "' in group ", g);
      }
      groups[g].parameters.push_back({name, found.mapped()});
    }
  }
  return groups;
}

Groups own_groups(const StateDict& own, const NamedTensors& parameters) {
  const StateDict& groups = own.dict("groups");
  if (groups.size() == 1) return one_group(parameters);
  std::vector<std::vector<std::string>> names;
  for (const auto& [key, value] : groups) {
    const StateDict& group = std::get<StateDict>(value);
    if (!group.contains("parameters")) fail_groups("a state of an older release");
    std::istringstream text(group.text("parameters"));
    std::vector<std::string>& own_names = names.emplace_back();
    for (std::string name; std::getline(text, name);) own_names.push_back(name);
  }
  return by_names(names, parameters);
}

// torch tells of each parameter of a group its index in the state, and the names of parameters only
// where the optimizer was given them. Without names each group has its parameters in the model's
// order, and their shapes must leave one way to deal the model's parameters out to the groups.
class Dealing {
 public:
  Dealing(const StateDict& torch, const NamedTensors& parameters) : parameters_(parameters) {
    for (const auto& [key, group] : torch.dict("param_groups")) {
      std::vector<std::optional<Shape>>& shapes = groups_.emplace_back();
      for (const auto& [place, index] : std::get<StateDict>(group).dict("params")) {
        shapes.push_back(shape_of(torch, std::get<std::int64_t>(index)));
      }
    }
  }

  Groups deal() {
    std::vector<std::size_t> taken(groups_.size());
    const int ways = ways_from(taken);
    if (ways != 1) {
      fail_groups(core::str(groups_.size(), ways == 0
                                                ? " that the model's parameters do not fit in order"
                                                : " that they fit in several ways"));
    }
    Groups groups(groups_.size());
    for (const NamedTensor& parameter : parameters_) {
      for (std::size_t g = 0; g < groups_.size(); ++g) {
        if (!fits(g, taken, parameter)) continue;
        ++taken[g];
        if (ways_from(taken) > 0) {
          groups[g].parameters.push_back(parameter);
          break;
        }
        --taken[g];
      }
    }
    return groups;
  }

 private:
  // Of its moments; none for a parameter that no step has reached.
  static std::optional<Shape> shape_of(const StateDict& torch, std::int64_t index) {
    const StateDict* entry = dictionary(torch.dict("state"), std::to_string(index));
    if (entry == nullptr) return {};
    for (const auto& [key, value] : *entry) {
      const auto* tensor = std::get_if<Tensor>(&value);
      if (tensor != nullptr && key != "step") return tensor->shape();
    }
    return {};
  }

  bool fits(std::size_t g, const std::vector<std::size_t>& taken,
            const NamedTensor& parameter) const {
    if (taken[g] == groups_[g].size()) return false;
    const std::optional<Shape>& shape = groups_[g][taken[g]];
    return !shape || *shape == parameter.tensor.shape();
  }

  // 0, 1 or 2 for more: of dealing out what is left when each group has taken so many.
  int ways_from(std::vector<std::size_t>& taken) {
    std::size_t next = 0;
    for (const std::size_t n : taken) next += n;
    if (next == parameters_.size()) return is_full(taken) ? 1 : 0;
    if (const auto known = ways_.find(taken); known != ways_.end()) return known->second;
    int ways = 0;
    for (std::size_t g = 0; g < groups_.size() && ways < 2; ++g) {
      if (!fits(g, taken, parameters_[next])) continue;
      ++taken[g];
      ways += ways_from(taken);
      --taken[g];
    }
    return ways_[taken] = std::min(ways, 2);
  }

  bool is_full(const std::vector<std::size_t>& taken) const {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (taken[g] != groups_[g].size()) return false;
    }
    return true;
  }

  const NamedTensors& parameters_;
  std::vector<std::vector<std::optional<Shape>>> groups_;
  std::map<std::vector<std::size_t>, int> ways_;
};

/// Of torch.distributed.checkpoint.state_dict, parameters are names.
const StateDict* names_in(const StateDict& group) {
  if (const StateDict* given = dictionary(group, "param_names")) return given;
  const StateDict& given = group.dict("params");
  const bool named = given.size() > 0 && std::holds_alternative<std::string>(given.begin()->second);
  return named ? &given : nullptr;
}

Groups torch_groups(const StateDict& torch, const NamedTensors& parameters) {
  const StateDict& groups = torch.dict("param_groups");
  std::vector<std::vector<std::string>> names;
  for (const auto& [key, value] : groups) {
    const StateDict* given = names_in(std::get<StateDict>(value));
    if (given == nullptr)
      return groups.size() == 1 ? one_group(parameters) : Dealing(torch, parameters).deal();
    std::vector<std::string>& group_names = names.emplace_back();
    for (const auto& [place, name] : *given) group_names.push_back(std::get<std::string>(name));
  }
  return by_names(names, parameters);
}

double option(const StateDict& state, const char* key) {
  const StateDict* options = dictionary(state, "options");
  return options != nullptr && options->contains(key) ? options->number(key) : 0.0;
}

std::unique_ptr<optim::Optimizer> own_optimizer(const StateDict& own, Groups groups) {
  const std::string& kind = own.text("kind");
  if (kind == "FusedAdam") {
    optim::AdamOptions options;
    options.adamw = option(own, "adamw") != 0;
    options.bias_correction = option(own, "bias_correction") != 0;
    return std::make_unique<optim::FusedAdam>(std::move(groups), options);
  }
  if (kind == "FusedSGD") {
    optim::SgdOptions options;
    options.momentum = option(own, "momentum");
    options.dampening = option(own, "dampening");
    options.nesterov = option(own, "nesterov") != 0;
    options.wd_after_momentum = option(own, "wd_after_momentum") != 0;
    return std::make_unique<optim::FusedSGD>(std::move(groups), options);
  }
  core::fail<core::Unsupported>("convert", "expected FusedAdam or FusedSGD, got ", kind,
                                " (convert --part model)");
}

double number_or(const StateDict& group, const char* key, double otherwise) {
  return group.contains(key) ? group.number(key) : otherwise;
}

std::unique_ptr<optim::Optimizer> torch_optimizer(const StateDict& group, Groups groups) {
  if (group.contains("betas")) {
    optim::AdamOptions options;
    options.adamw = number_or(group, "decoupled_weight_decay", 1) != 0;
    return std::make_unique<optim::FusedAdam>(std::move(groups), options);
  }
  if (group.contains("momentum")) {
    optim::SgdOptions options;
    options.momentum = group.number("momentum");
    options.dampening = number_or(group, "dampening", 0);
    options.nesterov = number_or(group, "nesterov", 0) != 0;
    return std::make_unique<optim::FusedSGD>(std::move(groups), options);
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
  const auto optimizer = own_optimizer(own, own_groups(own, parameters_of(model)));
  optimizer->load_state_dict(own);
  return optimizer->torch_state_dict();
}

StateDict own_from_torch(const StateDict& torch, const StateDict& model) {
  const NamedTensors parameters = parameters_of(model);
  const auto optimizer =
      torch_optimizer(torch.dict("param_groups").dict("0"), torch_groups(torch, parameters));
  optimizer->load_torch_state_dict(torch);
  return optimizer->state_dict();
}

}  // namespace cairn::tools
