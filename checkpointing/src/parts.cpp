#include "cairn/checkpointing/parts.h"

#include <functional>
#include <limits>
#include <map>
#include <set>
#include <type_traits>

#include "cairn/core/error.h"
#include "cairn/kernels/copy.h"
#include "flat_state.h"

namespace cairn::checkpointing {

namespace {

StateDict::Value value_of_variable(const Variables::Reference& reference) {
  return std::visit(
      [](auto* variable) -> StateDict::Value {
        using T = std::remove_pointer_t<decltype(variable)>;
        if constexpr (std::is_integral_v<T>)
          return static_cast<std::int64_t>(*variable);
        else if constexpr (std::is_floating_point_v<T>)
          return static_cast<double>(*variable);
        else
          return *variable;
      },
      reference);
}

// Throws core::DataError where the variable cannot hold what `key` has.
template <class T>
T loaded_value(const StateDict& state, const std::string& key) {
  if constexpr (std::is_same_v<T, std::string>) {
    return state.text(key);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(state.number(key));
  } else {
    const std::int64_t value = state.integer(key);
    const auto least = static_cast<std::int64_t>(std::numeric_limits<T>::min());
    const auto most = static_cast<std::int64_t>(std::numeric_limits<T>::max());
    if (value < least || value > most) {
      core::fail<core::DataError>("variables", "expected '", key, "' from ", least, " to ", most,
                                  ", got ", value);
    }
    return static_cast<T>(value);
  }
}

void fail_with(const char* what, const std::string& problems) {
  if (problems.empty()) return;
  core::fail<core::DataError>(what, "expected a state that fits, got:", problems);
}

std::string surplus_in(const FlatState& state, const std::set<std::string>& known) {
  std::string problems;
  for (const auto& [name, value] : state) {
    if (!known.contains(name)) problems += core::str("\n  surplus: '", name, "'");
  }
  return problems;
}

bool can_load(const Tensor& from, const Tensor& to) {
  const bool floats = core::is_floating(from.dtype()) && core::is_floating(to.dtype());
  return from.shape() == to.shape() && (from.dtype() == to.dtype() || floats);
}

}  // namespace

Variables::Variables(std::initializer_list<Variable> variables) : variables_(variables) {
  std::set<std::string> names;
  for (const Variable& variable : variables_) {
    const bool usable = !variable.name.empty() && variable.name.find('.') == std::string::npos;
    CAIRN_CHECK(usable && names.insert(variable.name).second, "variables",
                "expected distinct names without '.', got '", variable.name, "'");
  }
}

StateDict Variables::state_dict() const {
  StateDict state;
  for (const Variable& variable : variables_) {
    state.set(variable.name, value_of_variable(variable.reference));
  }
  return state;
}

void Variables::load_state_dict(const StateDict& state) {
  std::string problems;
  std::set<std::string> known;
  std::vector<std::function<void()>> assignments;
  for (const Variable& variable : variables_) {
    known.insert(variable.name);
    try {
      std::visit(
          [&](auto* place) {
            using T = std::remove_pointer_t<decltype(place)>;
            assignments.push_back(
                [place, value = loaded_value<T>(state, variable.name)] { *place = value; });
          },
          variable.reference);
    } catch (const core::DataError& e) {
      problems += core::str("\n  ", e.what());
    }
  }
  fail_with("variables", problems + surplus_in(flatten(state), known));
  for (const auto& assign : assignments) assign();
}

Tensors::Tensors(NamedTensors tensors) : tensors_(std::move(tensors)) {
  FlatState entries;
  for (const auto& [name, tensor] : tensors_) {
    CAIRN_CHECK(usable_name(name) && tensor.defined(), "tensors",
                "expected a name and a tensor, got '", name, "'");
    entries.emplace_back(name, tensor);
  }
  try {
    unflatten(entries);
  } catch (const core::DataError& e) {
    core::fail("tensors", e.what());
  }
}

StateDict Tensors::state_dict() const {
  FlatState entries;
  for (const auto& [name, tensor] : tensors_) entries.emplace_back(name, tensor);
  return unflatten(entries);
}

void Tensors::load_state_dict(const StateDict& state) {
  const FlatState entries = flatten(state);
  std::map<std::string, const Tensor*> loaded;
  for (const auto& [name, value] : entries) loaded[name] = std::get_if<Tensor>(&value);
  std::string problems;
  std::set<std::string> known;
  for (const auto& [name, tensor] : tensors_) {
    known.insert(name);
    const Tensor* from = loaded[name];
    if (from == nullptr) {
      problems += core::str("\n  missing: '", name, "'");
    } else if (!can_load(*from, tensor)) {
      problems += core::str("\n  '", name, "': expected ", tensor.dtype(), " ", tensor.shape(),
                            ", got ", from->dtype(), " ", from->shape());
    }
  }
  fail_with("tensors", problems + surplus_in(entries, known));
  for (const auto& [name, tensor] : tensors_) kernels::copy(*loaded[name], tensor);
}

}  // namespace cairn::checkpointing
