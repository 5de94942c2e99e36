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
StateDict::Value in_f32(const Tensor& moment, const Tensor& parameter, const OwnedRange& part,
                        const kernels::StatePlace& place) {
  const StateForm form{DType::f32, place};
  Tensor value = moment;
  if (!moment.defined()) {
    value = full_state(parameter, part, form, 0.0);
  } else if (moment.dtype() != DType::f32 || (part && moment.numel() != part->size())) {
    value = copy_state(parameter, part, moment, form);
  }
  if (!part) return value;
  return Shard{value, parameter.shape(), part->begin};
}

std::optional<double> ParameterGroup::*group_option(const std::string& name) {
  for (const auto& [key, option] : kOwnOptions) {
    if (name == key) return option;
  }
  return nullptr;
}

/// One a line.
std::string names_in(const ParameterGroup& group) {
  std::string names;
  for (const NamedTensor& parameter : group.parameters) names += parameter.name + "\n";
  return names;
}

}  // namespace

StateDict Optimizer::options_of(const ParameterGroup& group) const {
  StateDict options;
  options.set("lr", group.lr);
  options.set("weight_decay", group.weight_decay);
  for (const RuleOption& rule : rule_options()) {
    const auto option = group_option(rule.name);
    if (option != nullptr) options.set(rule.name, (group.*option).value_or(rule.number()));
  }
  return options;
}

StateDict Optimizer::state_dict() const {
  check_ended();
  return whole_state();
}

StateDict Optimizer::undo_state() const {
  StateDict state = whole_state();
  if (!stopped_.empty()) state.set("stopped", stopped_);
  return state;
}

StateDict Optimizer::whole_state() const {
  StateDict state;
  state.set("kind", std::string(kind()));
  state.set("steps", steps());
  const bool f32_slots = std::any_of(arenas_.begin(), arenas_.end(),
                                     [](const auto& arena) { return arena->f32_slots(); });
  // Else the first step would round differently.
  state.set("f32_gradients", std::int64_t{f32_slots});
  StateDict& options = state.make_dict("options");
  for (const RuleOption& own : rule_options()) options.set(own.name, own.number());
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
      entry.set(moments[m], in_f32(own.moments[m], own.tensor, part, state_options_.place()));
    }
  }
  return state;
}

/// What an optimizer is with a state, found before anything is changed.
struct Optimizer::Loaded {
  std::vector<ParameterGroup> groups;
  std::vector<Parameter> parameters;
  Partition partition;
  StateDict options;  // that the state's rule was constructed with
  std::vector<std::string> moments;
  bool has_norm = false;
  Problems problems;

  void read_groups(const StateDict& state) {
    const StateDict& all = dict_or_empty(state, "groups");
    if (all.size() != groups.size()) {
      problems.add(all.size(), " parameter groups instead of ", groups.size());
      return;
    }
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const StateDict& group = all.dict(std::to_string(g));
      ParameterGroup& loaded = groups[g];
      loaded.lr = group.number("lr");
      loaded.weight_decay = group.number("weight_decay");
      const auto is_rate = [](double rate) { return rate >= 0 && std::isfinite(rate); };
      if (!is_rate(loaded.lr) || !is_rate(loaded.weight_decay)) {
        problems.add("lr ", loaded.lr, " and weight_decay ", loaded.weight_decay, " in group ", g);
      }
      for (const auto& [key, option] : kOwnOptions) {
        loaded.*option = group.contains(key) ? std::optional(group.number(key)) : std::nullopt;
      }
    }
  }

  void read_parameters(const StateDict& state) {
    std::map<std::string, const StateDict*> entries;  // by full name: they hold a step count
    walk(dict_or_empty(state, "state"), [&](const std::string& name, const auto& value) {
      // A "step" that is a dictionary is of a parameter or module of that name.
      const auto* entry = std::get_if<StateDict>(&value);
      if (entry && std::get_if<std::int64_t>(entry->find(kStep))) entries[name] = entry;
    });
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].part = partition.own_part(i);
      const auto found = entries.extract(parameters[i].name);
      if (found.empty()) {
        problems.add("no '", parameters[i].name, "'");
      } else {
        read_parameter(*found.mapped(), parameters[i]);
      }
    }
    for (const auto& [name, entry] : entries) problems.add("a surplus '", name, "'");
  }

  void read_parameter(const StateDict& entry, Parameter& parameter) {
    parameter.steps = entry.integer(kStep);
    if (parameter.steps < 0) problems.add("step ", parameter.steps, " of '", parameter.name, "'");
    if (has_norm && !entry.contains(kNorm)) {
      problems.add("no '", parameter.name, ".", kNorm, "'");
    } else if (has_norm) {
      parameter.norm = entry.number(kNorm);
    }
    parameter.moments = {};
    for (std::size_t m = 0; m < moments.size() && parameter.steps > 0; ++m) {
      parameter.moments[m] = read_moment(entry, parameter, moments[m]);
    }
    for (const auto& [key, value] : entry) {
      const bool known = std::find(moments.begin(), moments.end(), key) != moments.end();
      const bool is_surplus = std::holds_alternative<Tensor>(value) && !known;
      if (is_surplus) problems.add("a surplus '", parameter.name, ".", key, "'");
    }
  }

  /// A whole one, or the shard of this part.
  Tensor read_moment(const StateDict& entry, const Parameter& parameter, const std::string& key) {
    const Shape& shape = parameter.tensor.shape();
    const OwnedRange& part = parameter.part;
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
};

/// A state of other options is taken over or passed over, but never without a word.
void Optimizer::tell_differences(const Loaded& loaded) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const StateDict before = options_of(groups_[g]), now = options_of(loaded.groups[g]);
    for (const auto& [name, value] : now) {
      if (before.number(name) == now.number(name) || (scheduled_ && name == "lr")) continue;
      log::warn("{}: group {} continues with {} {} of the state, not {}", kind(), g, name,
                now.number(name), before.number(name));
    }
  }
  for (const RuleOption& own : rule_options()) {
    const bool compares = group_option(own.name) == nullptr && loaded.options.contains(own.name);
    if (!compares || loaded.options.number(own.name) == own.number()) continue;
    log::warn("{}: continues with its own {} {}, the state was trained with {}", kind(), own.name,
              own.number(), loaded.options.number(own.name));
  }
}

void Optimizer::load_state_dict(const StateDict& state) {
  Loaded loaded{groups_, parameters_, partition(), {}, moment_names()};
  loaded.has_norm = running_norm_type().has_value();
  const std::int64_t steps = state.integer("steps");
  if (steps < 0) loaded.problems.add("steps ", steps);
  if (state.text("kind") != kind()) loaded.problems.add("the state of a ", state.text("kind"));
  const bool f32_slots = state.contains("f32_gradients") && state.integer("f32_gradients") != 0;
  loaded.options = dict_or_empty(state, "options");
  loaded.read_groups(state);
  loaded.read_parameters(state);
  loaded.problems.throw_if_any(kind(), "this optimizer");
  tell_differences(loaded);
  for (Parameter& parameter : loaded.parameters) {
    for (Tensor& moment : parameter.moments) {  // in its own memory: the state may share that
      if (!moment.defined()) continue;
      const StateForm form{state_options_.moments, state_options_.place()};
      moment = copy_state(parameter.tensor, parameter.part, moment, form);
    }
  }
  clear_grad();
  for (std::size_t g = 0; g < groups_.size(); ++g) groups_[g] = std::move(loaded.groups[g]);
  parameters_ = std::move(loaded.parameters);
  partition_ = std::move(loaded.partition);
  if (f32_slots) {
    for (const auto& arena : arenas_) arena->use_f32_slots();
  }
  steps_ = steps;
  skips_.clear();
  stopped_ = state.contains("stopped") ? state.text("stopped") : "";
  if (capturable()) device_ = make_device_state();
}

}  // namespace cairn::optim
