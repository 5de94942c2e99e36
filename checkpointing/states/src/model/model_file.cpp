#include "cairn/checkpointing/model_file.h"

#include <map>
#include <set>

#include "cairn/core/deferred.h"
#include "cairn/core/error.h"
#include "cairn/kernels/copy.h"
#include "formats/flat_state.h"
#include "formats/safetensors/model.h"

namespace cairn::checkpointing {

namespace {

constexpr const char* kBatches = "num_batches_tracked";  // a count that nothing depends on

std::string quoted(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "'" : ", '") + name + "'";
  return all;
}

StateDict part_of(StateDict state, const std::string& part, const std::string& path) {
  if (part.empty()) return state;
  if (const auto* inner = std::get_if<StateDict>(state.find(part))) {
    return StateDict(*inner);
  }
  std::vector<std::string> keys;
  for (const auto& [key, value] : state) keys.push_back(key);
  core::fail<core::DataError>("load", "expected a dictionary '", part, "' in '", path, "', got ",
                              keys.empty() ? "nothing" : quoted(keys));
}

std::string name_in_model(const std::string& name, const LoadOptions& options) {
  for (const auto& [from, to] : options.names) {
    if (name.starts_with(from)) return to + name.substr(from.size());
  }
  return name;
}

std::string shape_text(const Tensor* tensor) {
  return tensor == nullptr ? "no tensor" : core::str(tensor->shape());
}

bool has_deferred(const StateDict& state) {
  for (const auto& [name, value] : flatten(state)) {
    const auto* tensor = std::get_if<Tensor>(&value);
    if (tensor != nullptr && tensor->defined() && !core::deferred(*tensor).empty()) return true;
  }
  return false;
}

/// Of a file that allows it, tensors are read when they are used.
StateDict read(const std::string& path, bool when_used) {
  const FileKind kind = kind_of_file(path);
  const bool allows = kind == FileKind::safetensors || kind == FileKind::safetensors_model;
  if (!when_used || !allows) return read_state(path);
  return unflatten(read_safetensors_model(path, ReadTensors::when_used));
}

/// The same for two names of one tensor.
const void* identity_of(const Tensor& tensor) {
  return core::deferred(tensor).empty() ? tensor.raw_data() : tensor.storage().get();
}

// What the file has for the model, and all that differs.
class Matching {
 public:
  Matching(const StateDict& own, const FlatState& given, const LoadOptions& options)
      : entries_(flatten(own)) {
    for (std::size_t i = 0; i < entries_.size(); ++i) places_[entries_[i].first] = i;
    for (const auto& [name, value] : given) {
      if (!take(name_in_model(name, options), value)) left_.emplace_back(name, &value);
    }
    for (const auto& [name, value] : left_) {
      if (!name.ends_with(kBatches) && !is_tied(*value)) report_.surplus.push_back(name);
    }
    for (const auto& [name, value] : entries_) {
      if (!taken_.contains(name) && !name.ends_with(kBatches)) report_.missing.push_back(name);
    }
  }

  void check(const std::string& path, bool strict) const {
    std::string text = problems_;
    if (strict && !report_.missing.empty()) text += "; missing: " + quoted(report_.missing);
    if (strict && !report_.surplus.empty()) text += "; surplus: " + quoted(report_.surplus);
    if (text.empty()) return;
    core::fail<core::DataError>("load", "expected the model's entries in '", path, "', got others",
                                text);
  }

  /// Deferred weights learn where their values are. The others' are in state().
  void defer(const std::string& path) const {
    for (const auto& [own, given] : later_) {
      const std::string& known = core::deferred(given);
      core::defer(own, {[given = given](const Tensor& to) { kernels::copy(given, to); },
                        known.empty() ? "from '" + path + "'" : known});
    }
  }
  StateDict state() const { return unflatten(entries_); }
  const LoadReport& report() const { return report_; }

 private:
  bool take(const std::string& name, const StateDict::Value& value) {
    const auto place = places_.find(name);
    if (place == places_.end()) return false;
    if (!taken_.insert(name).second) {
      problems_ += core::str("; '", name, "' twice");
      return true;
    }
    const auto* tensor = std::get_if<Tensor>(&value);
    const auto* own = std::get_if<Tensor>(&entries_[place->second].second);
    if (tensor == nullptr || own == nullptr || tensor->shape() != own->shape()) {
      problems_ +=
          core::str("; '", name, "' ", shape_text(tensor), " instead of ", shape_text(own));
      return true;
    }
    memory_.insert(identity_of(*tensor));
    if (!core::deferred(*own).empty()) later_.emplace_back(*own, *tensor);
    if (core::deferred(*own).empty()) entries_[place->second].second = *tensor;
    report_.loaded.push_back(name);
    return true;
  }

  bool is_tied(const StateDict::Value& value) const {
    const auto* tensor = std::get_if<Tensor>(&value);
    return tensor != nullptr && tensor->nbytes() > 0 && memory_.contains(identity_of(*tensor));
  }

  FlatState entries_;  // the model's
  std::map<std::string, std::size_t> places_;
  std::set<std::string> taken_;
  std::set<const void*> memory_;
  std::vector<std::pair<std::string, const StateDict::Value*>> left_;
  std::vector<std::pair<Tensor, Tensor>> later_;  // the model's, and what the file has for it
  std::string problems_;
  LoadReport report_;
};

}  // namespace

LoadReport load(core::Stateful& model, const std::string& path, const LoadOptions& options) {
  const StateDict own = model.state_dict();
  const FlatState given = flatten(part_of(read(path, has_deferred(own)), options.part, path));
  const Matching matching(own, given, options);
  matching.check(path, options.strict);
  matching.defer(path);
  model.load_state_dict(matching.state());
  return matching.report();
}

}  // namespace cairn::checkpointing
