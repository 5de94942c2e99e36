// States of torch.optim.
#include <algorithm>
#include <cmath>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer.h"
#include "layout.h"
#include "state_path.h"
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

StateDict Optimizer::torch_options(const ParameterGroup&) const {
  core::fail<core::Unsupported>(kind(), "expected an optimizer that torch.optim has, got ", kind());
}

void Optimizer::take_torch_options(const StateDict&, StateDict&) const {
  core::fail<core::Unsupported>(kind(), "expected an optimizer that torch.optim has, got ", kind());
}

StateDict Optimizer::torch_state_dict() const {
  if (partition().cuts_any()) {
    core::fail<core::Unsupported>(kind(), "expected an optimizer whose state is whole on this ",
                                  "rank, got a sharded one (save the training state; resumed ",
                                  "without ShardedDataParallel it is whole)");
  }
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
      const std::int64_t steps = steps_of(g, i);
      if (moments.empty() || (steps == 0 && !torch_begins_with_state())) continue;
      StateDict& entry = entries.make_dict(std::to_string(index));
      if (torch_counts_steps())
        entry.set("step", Tensor::full({}, static_cast<double>(steps), DType::f32, Device{}));
      const Tensor& parameter = groups_[g].parameters[i].tensor;
      for (std::size_t m = 0; m < moments.size(); ++m) {
        const Tensor moment = empty_with_layout_of(parameter, DType::f32);
        entry.set(moments[m], moment);
        if (own.moments[m].defined()) {
          kernels::copy(own.moments[m], moment);
        } else {
          kernels::fill(moment, initial_moment());
        }
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
      most_steps = std::max(most_steps, take_entry(entry, torch_counts_steps(), target));
    }
  }
  own.set("steps", most_steps);
  load_state_dict(own);
}

}  // namespace cairn::optim
