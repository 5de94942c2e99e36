// Saving and loading an optimizer's state.
#include <algorithm>
#include <map>
#include <string_view>

#include "cairn/core/error.h"
#include "cairn/optim/optimizer.h"
#include "layout.h"

namespace cairn::optim {

/// What a state holds for this optimizer, found before anything is changed.
struct Optimizer::LoadPlan {
  struct Parameter {
    std::int64_t steps = 0;
    double norm = 0.0;
    std::array<Tensor, 2> moments;
  };
  std::vector<std::vector<Parameter>> parameters;
  std::vector<ParameterGroup> groups;  // without parameters
  std::int64_t steps = 0;
};

namespace {

constexpr const char* kStep = "step";
constexpr const char* kNorm = "norm";
constexpr std::pair<const char*, std::optional<double> ParameterGroup::*> kOwnOptions[] = {
    {"beta1", &ParameterGroup::beta1},
    {"beta2", &ParameterGroup::beta2},
    {"eps", &ParameterGroup::eps},
    {"momentum", &ParameterGroup::momentum}};

/// Files hold f32 whatever the moments are kept in.
Tensor in_f32(const Tensor& moment) {
  return moment.dtype() == DType::f32 ? moment : copy_beside(moment, moment, DType::f32);
}

/// The dictionary at "a.b.c" under root.
StateDict& make_path(StateDict& root, std::string_view path) {
  StateDict* at = &root;
  while (true) {
    const std::size_t dot = path.find('.');
    at = &at->make_dict(std::string(path.substr(0, dot)));
    if (dot == std::string_view::npos) return *at;
    path.remove_prefix(dot + 1);
  }
}

const StateDict* as_dict(const StateDict::Value* value) {
  return value == nullptr ? nullptr : std::get_if<StateDict>(value);
}

/// Every parameter's entry by its full name: a dictionary that holds a step.
void collect_entries(const StateDict& at, const std::string& name,
                     std::map<std::string, const StateDict*>& entries) {
  if (!name.empty() && at.contains(kStep)) entries[name] = &at;
  for (const auto& [key, value] : at) {
    const StateDict* child = as_dict(&value);
    if (child == nullptr) continue;
    collect_entries(*child, name.empty() ? key : core::str(name, ".", key), entries);
  }
}

/// Everything wrong with a state, to be told at once.
class Problems {
 public:
  void add(const std::string& text) { text_ += (text_.empty() ? "" : "; ") + text; }
  void throw_if_any(const char* kind) const {
    if (text_.empty()) return;
    core::fail<core::DataError>(kind, "expected a state of this optimizer, got one with ", text_,
                                " (nothing was changed)");
  }

 private:
  std::string text_;
};

}  // namespace

StateDict Optimizer::state_dict() const {
  StateDict state;
  state.set("kind", std::string(kind()));
  state.set("steps", steps_);
  const std::vector<std::string> moments = moment_names();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    StateDict& group = state.make_dict("groups").make_dict(std::to_string(g));
    group.set("lr", groups_[g].lr);
    group.set("weight_decay", groups_[g].weight_decay);
    for (const auto& [key, option] : kOwnOptions) {
      if (groups_[g].*option) group.set(key, *(groups_[g].*option));
    }
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const State& own = state_[g][i];
      StateDict& entry = make_path(state.make_dict("state"), groups_[g].parameters[i].name);
      entry.set(kStep, own.steps);
      if (running_norm_type()) entry.set(kNorm, own.norm);
      for (std::size_t m = 0; m < moments.size() && own.steps > 0; ++m) {
        entry.set(moments[m], in_f32(own.moments[m]));
      }
    }
  }
  return state;
}

Optimizer::LoadPlan Optimizer::plan_load(const StateDict& state) const {
  Problems problems;
  LoadPlan plan;
  plan.steps = state.integer("steps");
  if (state.text("kind") != kind()) problems.add("the state of a " + state.text("kind"));

  const StateDict* groups = as_dict(state.find("groups"));
  const std::size_t group_count = groups == nullptr ? 0 : groups->size();
  if (group_count != groups_.size()) {
    problems.add(core::str(group_count, " parameter groups instead of ", groups_.size()));
  } else {
    for (std::size_t g = 0; g < group_count; ++g) {
      const StateDict& group = groups->dict(std::to_string(g));
      ParameterGroup& loaded = plan.groups.emplace_back();
      loaded.lr = group.number("lr");
      loaded.weight_decay = group.number("weight_decay");
      for (const auto& [key, option] : kOwnOptions) {
        if (group.contains(key)) loaded.*option = group.number(key);
      }
    }
  }

  std::map<std::string, const StateDict*> entries;
  if (const StateDict* root = as_dict(state.find("state"))) collect_entries(*root, "", entries);
  const std::vector<std::string> moments = moment_names();
  for (const ParameterGroup& group : groups_) {
    auto& loaded = plan.parameters.emplace_back(group.parameters.size());
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const auto& [name, tensor] = group.parameters[i];
      const auto found = entries.find(name);
      if (found == entries.end()) {
        problems.add("no '" + name + "'");
        continue;
      }
      const StateDict& entry = *found->second;
      loaded[i].steps = entry.integer(kStep);
      if (running_norm_type() && !entry.contains(kNorm)) {
        problems.add("no '" + name + "." + kNorm + "'");
      } else if (running_norm_type()) {
        loaded[i].norm = entry.number(kNorm);
      }
      for (std::size_t m = 0; m < moments.size() && loaded[i].steps > 0; ++m) {
        const StateDict::Value* value = entry.find(moments[m]);
        const Tensor* moment = value == nullptr ? nullptr : std::get_if<Tensor>(value);
        if (moment == nullptr) {
          problems.add("no '" + name + "." + moments[m] + "'");
        } else if (moment->shape() != tensor.shape() || !core::is_floating(moment->dtype())) {
          problems.add(core::str("'", name, ".", moments[m], "' of shape ", moment->shape(), " ",
                                 moment->dtype(), " instead of ", tensor.shape(), " f32"));
        } else {
          loaded[i].moments[m] = *moment;
        }
      }
      for (const auto& [key, value] : entry) {
        const bool known = std::find(moments.begin(), moments.end(), key) != moments.end();
        if (std::holds_alternative<Tensor>(value) && !known) {
          problems.add(core::str("a surplus '", name, ".", key, "'"));
        }
      }
      entries.erase(found);
    }
  }
  for (const auto& [name, entry] : entries) problems.add("a surplus '" + name + "'");
  problems.throw_if_any(kind());
  return plan;
}

void Optimizer::load_state_dict(const StateDict& state) {
  const LoadPlan plan = plan_load(state);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].lr = plan.groups[g].lr;
    groups_[g].weight_decay = plan.groups[g].weight_decay;
    for (const auto& [key, option] : kOwnOptions) groups_[g].*option = plan.groups[g].*option;
    for (std::size_t i = 0; i < state_[g].size(); ++i) {
      const Tensor& parameter = groups_[g].parameters[i].tensor;
      State& own = state_[g][i];
      own.steps = plan.parameters[g][i].steps;
      own.norm = plan.parameters[g][i].norm;
      for (std::size_t m = 0; m < own.moments.size(); ++m) {
        const Tensor& loaded = plan.parameters[g][i].moments[m];
        if (!loaded.defined()) {
          own.moments[m] = {};
          continue;
        }
        // A new tensor, not the old one's memory: the state may share that with us.
        own.moments[m] = copy_beside(parameter, loaded, state_options_.moments);
      }
    }
  }
  steps_ = plan.steps;
}

}  // namespace cairn::optim
