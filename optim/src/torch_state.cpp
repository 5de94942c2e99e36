// States of torch.optim.
#include <algorithm>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer.h"
#include "layout.h"
#include "states.h"

namespace cairn::optim {

namespace {

using core::fail;

/// A number, or a tensor of one element; at "betas.0" in a dictionary.
double torch_number(const StateDict& from, const std::string& path) {
  const std::size_t dot = path.find('.');
  if (dot != std::string::npos) {
    return torch_number(from.dict(path.substr(0, dot)), path.substr(dot + 1));
  }
  const auto* tensor = std::get_if<Tensor>(from.find(path));
  if (tensor == nullptr) return from.number(path);
  if (!tensor->defined() || tensor->numel() != 1) {
    fail<core::DataError>("torch state", "expected one number '", path, "', got a tensor",
                          tensor->defined() ? core::str(" of shape ", tensor->shape()) : "");
  }
  return tensor->item();
}

/// Of the parameter that a group names at `key`: by index, or by its dotted name, as
/// torch.distributed.checkpoint.state_dict has it.
const StateDict& torch_entry(const StateDict& entries, const StateDict& group,
                             const std::string& key) {
  const auto* name = std::get_if<std::string>(group.find(key));
  if (name == nullptr)
    return dict_or_empty(entries,
                         std::to_string(static_cast<std::int64_t>(torch_number(group, key))));
  const StateDict* found = &entries;
  for (std::size_t at = 0; at <= name->size();) {
    const std::size_t end = std::min(name->find('.', at), name->size());
    found = &dict_or_empty(*found, name->substr(at, end - at));
    at = end + 1;
  }
  return *found;
}

bool same_name(const std::string& a, const std::string& b) {
  return a == b;
}
/// One has "module." or the like in front of the other.
bool same_end(const std::string& a, const std::string& b) {
  return a.ends_with("." + b) || b.ends_with("." + a);
}

/// The key of each parameter in a group that names its parameters; "" for one that it has not.
std::vector<std::string> keys_by(bool (*same)(const std::string&, const std::string&),
                                 const StateDict& group, const NamedTensors& parameters) {
  std::vector<std::string> keys;
  for (const NamedTensor& parameter : parameters) {
    const auto found = std::find_if(group.begin(), group.end(), [&](const StateDict::Entry& entry) {
      const auto* name = std::get_if<std::string>(&entry.second);
      return name != nullptr && same(*name, parameter.name);
    });
    keys.push_back(found == group.end() ? "" : found->first);
  }
  return keys;
}

/// Those of a group with names; without, or where it knows none of them by these, as they come.
std::vector<std::string> keys_of(const StateDict& group, const NamedTensors& parameters,
                                 const char* kind) {
  std::vector<std::string> keys;
  const auto known = [&] {
    return std::any_of(keys.begin(), keys.end(), [](const auto& key) { return !key.empty(); });
  };
  keys = keys_by(same_name, group, parameters);
  if (!known()) keys = keys_by(same_end, group, parameters);
  if (!known()) {
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = std::to_string(i);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const bool once = std::count(keys.begin(), keys.end(), keys[i]) == 1;
    if (keys[i].empty() || !once)
      fail<core::DataError>(kind,
                            "expected a torch state that names each of these parameters, got ",
                            keys[i].empty() ? "none for '" : "one that may be several for '",
                            parameters[i].name, "'");
  }
  return keys;
}

bool holds_moments(const StateDict& entry) {
  return std::any_of(entry.begin(), entry.end(), [](const StateDict::Entry& value) {
    return value.first != "step" && std::holds_alternative<Tensor>(value.second);
  });
}

/// An own entry from torch's; returns its steps. SGD does not count them: 1 means "not the first".
std::int64_t take_entry(const StateDict& torch, bool counts_steps, StateDict& own) {
  std::int64_t steps = 0;
  if (holds_moments(torch)) {
    steps = counts_steps ? static_cast<std::int64_t>(torch_number(torch, "step")) : 1;
  }
  own.set("step", steps);
  for (const auto& [key, value] : torch) {
    if (key != "step" && steps > 0) own.set(key, value);
  }
  return steps;
}

}  // namespace

void Optimizer::check_torch_has_it(bool decays) const {
  if (torch_flags().empty()) {
    fail<core::Unsupported>(kind(), "expected an optimizer that torch.optim has, got ", kind());
  }
  if (const char* missing = missing_for_torch(decays)) {
    fail<core::Unsupported>(kind(), "expected an optimizer with ", missing,
                            " to exchange states with torch, got one without");
  }
}

StateDict Optimizer::to_torch(const ParameterGroup& group) const {
  check_torch_has_it(group.weight_decay != 0);
  const StateDict own = options_of(group);
  StateDict theirs;
  theirs.set("lr", group.lr);
  for (const RuleOption& option : rule_options()) {
    if (option.torch == nullptr) continue;
    if (const auto* flag = std::get_if<bool>(&option.value)) {
      theirs.set(option.torch, std::int64_t{*flag});
    } else {
      const bool is_groups = own.contains(option.name);
      set_path(theirs, option.torch, is_groups ? own.number(option.name) : option.number());
    }
  }
  theirs.set("weight_decay", group.weight_decay);
  for (const char* flag : torch_flags()) theirs.set(flag, std::int64_t{0});
  theirs.make_dict("params");  // nobody yet
  return theirs;
}

/// What this optimizer cannot take over must be the same there, unless it is not said.
StateDict Optimizer::from_torch(const StateDict& theirs) const {
  check_torch_has_it(true);
  const auto expect = [&](const char* key, double own) {
    if (!theirs.contains(key)) return;
    const double their = torch_number(theirs, key);
    if (their == own) return;
    fail<core::DataError>(kind(), "expected a torch state with ", key, " = ", own, ", got ", their,
                          " (construct the optimizer like torch's)");
  };
  StateDict own = options_of({});
  own.set("lr", torch_number(theirs, "lr"));
  own.set("weight_decay", torch_number(theirs, "weight_decay"));
  for (const RuleOption& option : rule_options()) {
    if (own.contains(option.name)) {
      own.set(option.name, torch_number(theirs, option.torch));
    } else if (option.torch != nullptr) {
      expect(option.torch, option.number());
    }
  }
  for (const char* flag : torch_flags()) expect(flag, 0);
  return own;
}

StateDict Optimizer::torch_state_dict() const {
  check_ended();
  if (partition().cuts_any()) {
    fail<core::Unsupported>(kind(), "expected an optimizer whose state is whole on this ",
                            "rank, got a sharded one (save the training state; resumed ",
                            "without ShardedDataParallel it is whole)");
  }
  StateDict state;
  StateDict& entries = state.make_dict("state");
  StateDict groups;
  for (const ParameterGroup& group : groups_) {
    groups.set(std::to_string(groups.size()), to_torch(group));
  }
  const std::vector<std::string> moments = moment_names();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    StateDict& indices = groups.make_dict(std::to_string(parameter.group)).make_dict("params");
    indices.set(std::to_string(indices.size()), static_cast<std::int64_t>(i));
    const std::int64_t steps = steps_of(parameter);
    if (moments.empty() || (steps == 0 && !torch_begins_with_state())) continue;
    StateDict& entry = entries.make_dict(std::to_string(i));
    if (torch_counts_steps()) {
      entry.set("step", Tensor::full({}, static_cast<double>(steps), DType::f32, Device{}));
    }
    for (std::size_t m = 0; m < moments.size(); ++m) {
      const Tensor& moment = parameter.moments[m];
      const StateForm form{DType::f32, state_options_.place()};
      entry.set(moments[m], moment.defined()
                                ? copy_state(parameter.tensor, {}, moment, form)
                                : full_state(parameter.tensor, {}, form, initial_moment()));
    }
  }
  state.set("param_groups", std::move(groups));
  return state;
}

void Optimizer::load_torch_state_dict(const StateDict& state) {
  const StateDict& groups = dict_or_empty(state, "param_groups");
  const StateDict& entries = dict_or_empty(state, "state");
  if (groups.size() != groups_.size()) {
    fail<core::DataError>(kind(), "expected a torch state with ", groups_.size(),
                          " parameter groups, got ", groups.size());
  }
  StateDict own;
  own.set("kind", std::string(kind()));
  std::int64_t most_steps = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const StateDict& group = groups.dict(std::to_string(g));
    const StateDict& indices = group.dict("params");
    const NamedTensors& parameters = groups_[g].parameters;
    if (indices.size() != parameters.size()) {
      fail<core::DataError>(kind(), "expected a torch state with ", parameters.size(),
                            " parameters in group ", g, ", got ", indices.size());
    }
    own.make_dict("groups").set(std::to_string(g), from_torch(group));
    const std::vector<std::string> keys = keys_of(indices, parameters, kind());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const StateDict& entry = torch_entry(entries, indices, keys[i]);
      StateDict& target = make_path(own.make_dict("state"), parameters[i].name);
      most_steps = std::max(most_steps, take_entry(entry, torch_counts_steps(), target));
    }
  }
  own.set("steps", most_steps);
  load_state_dict(own);
}

}  // namespace cairn::optim
