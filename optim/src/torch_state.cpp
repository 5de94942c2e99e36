// States of torch.optim.
#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer.h"
#include "layout.h"
#include "torch_options.h"

namespace cairn::optim {

namespace {

/// The entries of an own state or of torch's, by name or index; empty where there are none.
const StateDict& dict_or_empty(const StateDict& from, const std::string& key) {
  static const StateDict empty;
  const StateDict::Value* value = from.find(key);
  const auto* dict = value == nullptr ? nullptr : std::get_if<StateDict>(value);
  return dict == nullptr ? empty : *dict;
}

/// The dictionary at "a.b.c" under root.
StateDict& make_path(StateDict& root, const std::string& path) {
  StateDict* at = &root;
  for (std::size_t begin = 0; begin != std::string::npos;) {
    const std::size_t dot = path.find('.', begin);
    at = &at->make_dict(path.substr(begin, dot - begin));
    begin = dot == std::string::npos ? dot : dot + 1;
  }
  return *at;
}

bool holds_moments(const StateDict& entry) {
  return std::any_of(entry.begin(), entry.end(), [](const StateDict::Entry& value) {
    return value.first != "step" && std::holds_alternative<Tensor>(value.second);
  });
}

}  // namespace

StateDict Optimizer::torch_options(const ParameterGroup&) const {
  core::fail<core::Unsupported>(kind(), "expected an optimizer that torch.optim has, got ", kind());
}

void Optimizer::take_torch_options(const StateDict&, StateDict&) const {
  core::fail<core::Unsupported>(kind(), "expected an optimizer that torch.optim has, got ", kind());
}

StateDict Optimizer::torch_state_dict() const {
  StateDict state;
  StateDict& entries = state.make_dict("state");
  StateDict groups;
  const std::vector<std::string> moments = moment_names();
  std::int64_t index = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    StateDict& group = groups.make_dict(std::to_string(g));
    group = torch_options(groups_[g]);
    StateDict& indices = group.make_dict("params");
    for (std::size_t i = 0; i < state_[g].size(); ++i, ++index) {
      indices.set(std::to_string(i), index);
      const State& own = state_[g][i];
      const bool begins = own.steps == 0 && torch_begins_with_state();
      if ((own.steps == 0 && !begins) || moments.empty()) continue;
      StateDict& entry = entries.make_dict(std::to_string(index));
      if (torch_counts_steps()) entry.set("step", Tensor::full({}, static_cast<double>(own.steps)));
      const Tensor& parameter = groups_[g].parameters[i].tensor;
      for (std::size_t m = 0; m < moments.size(); ++m) {
        const Tensor moment = empty_beside(parameter, DType::f32);
        begins ? kernels::fill(moment, initial_moment()) : kernels::copy(own.moments[m], moment);
        entry.set(moments[m], moment);
      }
    }
  }
  state.set("param_groups", std::move(groups));
  return state;
}

void Optimizer::load_torch_state_dict(const StateDict& state) {
  const StateDict& groups = dict_or_empty(state, "param_groups");
  const StateDict& entries = dict_or_empty(state, "state");
  if (groups.size() != groups_.size()) {
    core::fail<core::DataError>(kind(), "expected a torch state with ", groups_.size(),
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
      core::fail<core::DataError>(kind(), "expected a torch state with ", parameters.size(),
                                  " parameters in group ", g, ", got ", indices.size());
    }
    take_torch_options(group, own.make_dict("groups").make_dict(std::to_string(g)));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto index = static_cast<std::int64_t>(torch_number(indices, std::to_string(i)));
      const StateDict& entry = dict_or_empty(entries, std::to_string(index));
      StateDict& target = make_path(own.make_dict("state"), parameters[i].name);
      const bool has_state = holds_moments(entry);
      const std::int64_t steps = !has_state ? 0
                                 : torch_counts_steps()
                                     ? static_cast<std::int64_t>(torch_number(entry, "step"))
                                     : 1;  // what matters: not the first
      most_steps = std::max(most_steps, steps);
      target.set("step", steps);
      for (const auto& [key, value] : entry) {
        if (key != "step" && steps > 0) target.set(key, value);
      }
    }
  }
  own.set("steps", most_steps);
  load_state_dict(own);
}

}  // namespace cairn::optim
