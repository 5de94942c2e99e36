#include "cairn/checkpointing/parts.h"

#include <functional>
#include <limits>
#include <set>
#include <string_view>
#include <type_traits>
#include <unordered_map>

#include "cairn/checkpointing/foreign_tensors.h"
#include "cairn/core/error.h"
#include "cairn/kernels/master_weight.h"
#include "checkpoint/shards.h"
#include "formats/flat_state.h"

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

std::string surplus(const std::string& name) {
  return core::str("\n  surplus: '", name, "'");
}

std::string surplus_in(const FlatState& state, const std::set<std::string>& known) {
  std::string problems;
  for (const auto& [name, value] : state) {
    if (!known.contains(name)) problems += surplus(name);
  }
  return problems;
}

bool can_load(const Tensor& from, const Tensor& to) {
  const bool floats = core::is_floating(from.dtype()) && core::is_floating(to.dtype());
  return from.shape() == to.shape() && (from.dtype() == to.dtype() || floats);
}

// What files hold: the exact value of a half weight that has a master, else the tensor itself.
StateDict::Value saved_value(const Tensor& tensor) {
  if (!kernels::MasterWeight::exists(tensor)) return tensor;
  return kernels::exported_state(tensor);
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

namespace {

// Throws core::InvalidArgument for names that cannot stand beside each other in a state.
void check_names(const char* what, const FlatState& entries) {
  for (const auto& [name, value] : entries) {
    CAIRN_CHECK(usable_name(name) && tensor_in(value)->defined(), what,
                "expected a name and a tensor, got '", name, "'");
  }
  try {
    unflatten(entries);
  } catch (const core::DataError& e) {
    core::fail(what, e.what());
  }
}

std::string text_of(const StateDict::Value& value) {
  const Tensor* tensor = tensor_in(value);
  if (tensor == nullptr) return "no tensor";
  const auto* shard = std::get_if<Shard>(&value);
  if (shard == nullptr) return core::str(tensor->dtype(), " ", tensor->shape());
  return core::str(tensor->dtype(), " ", tensor->shape(), " of ", shard->whole, " from ",
                   shard->begin, " on");
}

bool fits(const StateDict::Value& from, const StateDict::Value& to) {
  const auto* part = std::get_if<Shard>(&from);
  const auto* tensor = std::get_if<Tensor>(&to);
  if (part != nullptr && tensor != nullptr) return kernels::is_stored_part(*tensor, *part);
  if (from.index() != to.index() || !can_load(*tensor_in(from), *tensor_in(to))) return false;
  const auto *a = std::get_if<Shard>(&from), *b = std::get_if<Shard>(&to);
  return a == nullptr || (a->whole == b->whole && a->begin == b->begin);
}

// Copies the values into the tensors of `own`; all or nothing.
void load_tensors(const char* what, const FlatState& own, const StateDict& state) {
  const FlatState entries = flatten(state);
  std::unordered_map<std::string_view, const StateDict::Value*> loaded;
  loaded.reserve(entries.size());
  for (const auto& [name, value] : entries) loaded.emplace(name, &value);
  std::string problems;
  std::vector<const StateDict::Value*> values;  // for each of `own`
  values.reserve(own.size());
  for (const auto& [name, value] : own) {
    const auto from = loaded.extract(name);
    if (from.empty()) {
      problems += core::str("\n  missing: '", name, "'");
    } else if (!fits(*from.mapped(), value)) {
      problems += core::str("\n  '", name, "': expected ", text_of(value), ", got ",
                            text_of(*from.mapped()));
    }
    values.push_back(from.empty() ? nullptr : from.mapped());
  }
  for (const auto& [name, value] : entries) {
    if (!loaded.empty() && loaded.contains(name)) problems += surplus(name);
  }
  fail_with(what, problems);
  for (std::size_t i = 0; i < own.size(); ++i) {
    const Tensor& tensor = *tensor_in(own[i].second);
    const bool is_shard = std::holds_alternative<Shard>(own[i].second);
    const StateDict::Value value = is_shard ? *tensor_in(*values[i]) : *values[i];
    kernels::write_weight(tensor, value, tensor.requires_grad());
  }
}

}  // namespace

Tensors::Tensors(const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) entries_.emplace_back(name, tensor);
  check_names("tensors", entries_);
}

StateDict Tensors::state_dict() const {
  FlatState values;
  for (const auto& [name, value] : entries_)
    values.emplace_back(name, saved_value(*tensor_in(value)));
  return unflatten(std::move(values));
}

void Tensors::load_state_dict(const StateDict& state) {
  load_tensors("tensors", entries_, state);
}

Shards::Shards(const NamedShards& shards) : entries_(shards.begin(), shards.end()) {
  check_names("shards", entries_);
  for (const auto& [name, shard] : shards) {
    CAIRN_CHECK(elements_of(shard.tensor.shape(), {shard.whole, shard.begin}), "shards",
                "expected rows or elements within ", shard.whole, " as '", name, "', got ",
                shard.tensor.shape(), " from ", shard.begin, " on");
  }
}

StateDict Shards::state_dict() const {
  return unflatten(entries_);
}

void Shards::load_state_dict(const StateDict& state) {
  load_tensors("shards", entries_, state);
}

namespace {

/// In memory of the host, of any values.
FlatState host_copies_of(const std::vector<ForeignTensor>& tensors) {
  FlatState copies;
  for (const ForeignTensor& tensor : tensors)
    copies.emplace_back(tensor.name, Tensor::empty(tensor.shape, tensor.dtype, Device{}));
  return copies;
}

}  // namespace

ForeignTensors::ForeignTensors(std::vector<ForeignTensor> tensors) : tensors_(std::move(tensors)) {
  FlatState names;
  for (const ForeignTensor& tensor : tensors_) {
    CAIRN_CHECK(tensor.read && tensor.write, "foreign tensors",
                "expected callbacks that read and write '", tensor.name, "', got none");
    names.emplace_back(tensor.name, Tensor::empty({0}, tensor.dtype, Device{}));
  }
  check_names("foreign tensors", names);
}

StateDict ForeignTensors::state_dict() const {
  FlatState values = host_copies_of(tensors_);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const TensorView copy = *tensor_in(values[i].second);
    if (copy.nbytes() > 0) tensors_[i].read(copy.data, 0, copy.nbytes());
  }
  return unflatten(std::move(values));
}

void ForeignTensors::load_state_dict(const StateDict& state) {
  const FlatState values = host_copies_of(tensors_);
  load_tensors("foreign tensors", values, state);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const TensorView copy = *tensor_in(values[i].second);
    if (copy.nbytes() > 0) tensors_[i].write(copy.data, 0, copy.nbytes());
  }
}

}  // namespace cairn::checkpointing
