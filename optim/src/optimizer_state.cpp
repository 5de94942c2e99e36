// Saving and loading an optimizer's state.
#include <algorithm>
#include <cmath>
#include <map>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "cairn/optim/optimizer.h"
#include "layout.h"
#include "states.h"

namespace cairn::optim {

namespace {

constexpr const char* kStep = "step";
constexpr const char* kNorm = "norm";
constexpr std::pair<const char*, std::optional<double> ParameterGroup::*> kOwnOptions[] = {
    {"beta1", &ParameterGroup::beta1},
    {"beta2", &ParameterGroup::beta2},
    {"eps", &ParameterGroup::eps},
    {"momentum", &ParameterGroup::momentum}};

/// Files hold f32 whatever the moments are kept in; zeros for one that no update has needed yet
/// (momentum that was switched on since). A whole one may not have been cut yet.
StateDict::Value in_f32(const Tensor& moment, const Tensor& parameter, const OwnedRange& part) {
  Tensor value = moment;
  if (!moment.defined()) {
    value = empty_state(parameter, part, DType::f32);
    kernels::fill(value, 0.0);
  } else if (moment.dtype() != DType::f32 || (part && moment.numel() != part->size())) {
    value = copy_state(parameter, part, moment, DType::f32);
  }
  if (!part) return value;
  return Shard{value, parameter.shape(), part->begin};
}

/// Every parameter's entry by its full name: a dictionary that holds a step count.
void collect_entries(const StateDict& at, const std::string& name,
                     std::map<std::string, const StateDict*>& entries) {
  // A dictionary there is of a parameter or module of that name.
  const bool is_entry = std::get_if<std::int64_t>(at.find(kStep)) != nullptr;
  if (!name.empty() && is_entry) entries[name] = &at;
  for (const auto& [key, value] : at) {
    const auto* child = std::get_if<StateDict>(&value);
    if (child != nullptr) collect_entries(*child, path_in(name, key), entries);
  }
}

struct LoadedParameter {
  std::int64_t steps = 0;
  double norm = 0.0;
  std::array<Tensor, 2> moments;
};

/// The options of each group (no parameters).
std::vector<ParameterGroup> read_groups(const StateDict& state, std::size_t count,
                                        Problems& problems) {
  const auto* groups = std::get_if<StateDict>(state.find("groups"));
  const std::size_t found = groups == nullptr ? 0 : groups->size();
  std::vector<ParameterGroup> all;
  if (found != count) {
    problems.add(found, " parameter groups instead of ", count);
    return all;
  }
  for (std::size_t g = 0; g < count; ++g) {
    const StateDict& group = groups->dict(std::to_string(g));
    ParameterGroup& loaded = all.emplace_back();
    loaded.lr = group.number("lr");
    loaded.weight_decay = group.number("weight_decay");
    const auto is_rate = [](double rate) { return rate >= 0 && std::isfinite(rate); };
    if (!is_rate(loaded.lr) || !is_rate(loaded.weight_decay)) {
      problems.add("lr ", loaded.lr, " and weight_decay ", loaded.weight_decay, " in group ", g);
    }
    for (const auto& [key, option] : kOwnOptions) {
      if (group.contains(key)) loaded.*option = group.number(key);
    }
  }
  return all;
}

std::optional<double> ParameterGroup::*group_option(const std::string& name) {
  for (const auto& [key, option] : kOwnOptions) {
    if (name == key) return option;
  }
  return nullptr;
}

/// A whole one, or the shard of this part.
Tensor read_moment(const StateDict& entry, const NamedTensor& parameter, const OwnedRange& part,
                   const std::string& key, Problems& problems) {
  const Shape& shape = parameter.tensor.shape();
  const auto* whole = std::get_if<Tensor>(entry.find(key));
  const auto* shard = std::get_if<Shard>(entry.find(key));
  const bool is_own = shard != nullptr && part && shard->whole == shape &&
                      shard->begin == part->begin && shard->tensor.numel() == part->size();
  if (whole == nullptr && !is_own) {
    problems.add("no '", parameter.name, ".", key, "'");
    return {};
  }
  const Tensor& moment = is_own ? shard->tensor : *whole;
  if ((is_own || moment.shape() == shape) && core::is_floating(moment.dtype())) return moment;
  problems.add("'", parameter.name, ".", key, "' of shape ", moment.shape(), " ", moment.dtype(),
               " instead of ", shape, " f32");
  return {};
}

LoadedParameter read_parameter(const StateDict& entry, const NamedTensor& parameter,
                               const OwnedRange& part, const std::vector<std::string>& moments,
                               bool has_norm, Problems& problems) {
  LoadedParameter loaded;
  loaded.steps = entry.integer(kStep);
  if (loaded.steps < 0) problems.add("step ", loaded.steps, " of '", parameter.name, "'");
  if (has_norm && !entry.contains(kNorm)) {
    problems.add("no '", parameter.name, ".", kNorm, "'");
  } else if (has_norm) {
    loaded.norm = entry.number(kNorm);
  }
  for (std::size_t m = 0; m < moments.size() && loaded.steps > 0; ++m) {
    loaded.moments[m] = read_moment(entry, parameter, part, moments[m], problems);
  }
  for (const auto& [key, value] : entry) {
    const bool known = std::find(moments.begin(), moments.end(), key) != moments.end();
    const bool is_surplus = std::holds_alternative<Tensor>(value) && !known;
    if (is_surplus) problems.add("a surplus '", parameter.name, ".", key, "'");
  }
  return loaded;
}

/// One a line.
std::string names_in(const ParameterGroup& group) {
  std::string names;
  for (const NamedTensor& parameter : group.parameters) names += parameter.name + "\n";
  return names;
}

}  // namespace

/// What a state holds for this optimizer, found before anything is changed.
struct Optimizer::LoadPlan {
  std::vector<LoadedParameter> parameters;
  std::vector<ParameterGroup> groups;     // without parameters
  std::map<std::string, double> options;  // that the state's rule was constructed with
  std::int64_t steps = 0;
  bool f32_slots = false;
};

StateDict Optimizer::options_of(const ParameterGroup& group) const {
  StateDict options;
  options.set("lr", group.lr);
  options.set("weight_decay", group.weight_decay);
  for (const auto& [key, own] : rule_options()) {
    if (const auto option = group_option(key)) options.set(key, (group.*option).value_or(own));
  }
  return options;
}

StateDict Optimizer::state_dict() const {
  StateDict state;
  state.set("kind", std::string(kind()));
  state.set("steps", steps());
  const bool f32_slots = std::any_of(arenas_.begin(), arenas_.end(),
                                     [](const auto& arena) { return arena->f32_slots(); });
  // Else the first step would round differently.
  state.set("f32_gradients", std::int64_t{f32_slots});
  StateDict& options = state.make_dict("options");
  for (const auto& [key, own] : rule_options()) options.set(key, own);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    StateDict& group = state.make_dict("groups").make_dict(std::to_string(g));
    group = options_of(groups_[g]);
    if (groups_.size() > 1) group.set("parameters", names_in(groups_[g]));  // torch's state asks
  }
  const std::vector<std::string> moments = moment_names();
  const Partition parts = partition();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& own = parameters_[i];
    const OwnedRange part = parts.own_part(i);
    StateDict& entry = make_path(state.make_dict("state"), own.name);
    const std::int64_t taken = steps_of(own);
    entry.set(kStep, taken);
    if (running_norm_type()) entry.set(kNorm, own.norm);
    // Shards always: a state that is loaded has those that are here.
    for (std::size_t m = 0; m < moments.size() && (taken > 0 || part); ++m) {
      entry.set(moments[m], in_f32(own.moments[m], own.tensor, part));
    }
  }
  return state;
}

Optimizer::LoadPlan Optimizer::plan_load(const StateDict& state) const {
  Problems problems;
  LoadPlan plan;
  plan.steps = state.integer("steps");
  if (plan.steps < 0) problems.add("steps ", plan.steps);
  if (state.text("kind") != kind()) problems.add("the state of a ", state.text("kind"));
  plan.groups = read_groups(state, groups_.size(), problems);
  plan.f32_slots = state.contains("f32_gradients") && state.integer("f32_gradients") != 0;
  if (const auto* options = std::get_if<StateDict>(state.find("options"))) {
    for (const auto& [key, value] : *options) plan.options[key] = options->number(key);
  }

  std::map<std::string, const StateDict*> entries;
  if (const auto* root = std::get_if<StateDict>(state.find("state"))) {
    collect_entries(*root, "", entries);
  }
  const std::vector<std::string> moments = moment_names();
  const Partition parts = partition();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    LoadedParameter& loaded = plan.parameters.emplace_back();
    const auto found = entries.find(parameters_[i].name);
    if (found == entries.end()) {
      problems.add("no '", parameters_[i].name, "'");
      continue;
    }
    loaded = read_parameter(*found->second, parameters_[i], parts.own_part(i), moments,
                            running_norm_type().has_value(), problems);
    entries.erase(found);
  }
  for (const auto& [name, entry] : entries) problems.add("a surplus '", name, "'");
  problems.throw_if_any(kind(), "this optimizer");
  return plan;
}

/// A state of other options is taken over or passed over, but never without a word.
void Optimizer::tell_differences(const LoadPlan& plan) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const StateDict loaded = options_of(plan.groups[g]), own = options_of(groups_[g]);
    for (const auto& [name, value] : own) {
      if (own.number(name) == loaded.number(name) || (scheduled_ && name == "lr")) continue;
      log::warn("{}: group {} continues with {} {} of the state, not {}", kind(), g, name,
                loaded.number(name), own.number(name));
    }
  }
  for (const auto& [name, own] : rule_options()) {
    const auto saved = plan.options.find(name);
    const bool differs = saved != plan.options.end() && saved->second != own;
    if (!differs || group_option(name) != nullptr) continue;
    log::warn("{}: continues with its own {} {}, the state was trained with {}", kind(), name, own,
              saved->second);
  }
}

void Optimizer::load_state_dict(const StateDict& state) {
  const LoadPlan plan = plan_load(state);
  tell_differences(plan);
  clear_grad();
  if (plan.f32_slots) {
    for (const auto& arena : arenas_) arena->use_f32_slots();
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].lr = plan.groups[g].lr;
    groups_[g].weight_decay = plan.groups[g].weight_decay;
    for (const auto& [key, option] : kOwnOptions) groups_[g].*option = plan.groups[g].*option;
  }
  partition_ = partition();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& own = parameters_[i];
    const LoadedParameter& loaded = plan.parameters[i];
    own.steps = loaded.steps;
    own.norm = loaded.norm;
    own.part = partition_.own_part(i);
    for (std::size_t m = 0; m < own.moments.size(); ++m) {
      const Tensor& moment = loaded.moments[m];
      // A new tensor, not the old one's memory: the state may share that with us.
      own.moments[m] = moment.defined()
                           ? copy_state(own.tensor, own.part, moment, state_options_.moments)
                           : Tensor();
    }
  }
  steps_ = plan.steps;
  skips_.clear();
  if (capturable()) device_ = make_device_state();
}

}  // namespace cairn::optim
