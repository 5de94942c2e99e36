#include "formats/flat_state.h"

#include <algorithm>
#include <utility>

#include "cairn/core/error.h"
#include "io/printable.h"

namespace cairn::checkpointing {

namespace {

void flatten_into(FlatState& out, const StateDict& state, const std::string& prefix) {
  for (const auto& [key, value] : state) {
    const auto* inner = std::get_if<StateDict>(&value);
    if (inner != nullptr && !inner->empty()) {
      flatten_into(out, *inner, prefix + key + ".");
    } else {
      out.emplace_back(prefix + key, value);
    }
  }
}

[[noreturn]] void fail_name(const std::string& name) {
  core::fail<core::DataError>("state", "expected distinct entries with non-empty names, got '",
                              printable(name), "'");
}

void insert(StateDict& state, const std::string& path, std::size_t from, StateDict::Value value) {
  const std::size_t dot = path.find('.', from);
  const std::string key = path.substr(from, dot - from);
  if (key.empty()) fail_name(path);
  if (dot == std::string::npos) {
    if (state.contains(key)) fail_name(path);
    return state.set(key, std::move(value));
  }
  if (!state.contains(key)) state.set(key, StateDict{});
  auto* inner = std::get_if<StateDict>(state.find(key));
  if (inner == nullptr) fail_name(path);
  insert(*inner, path, dot + 1, std::move(value));
}

}  // namespace

bool usable_name(const std::string& name) {
  constexpr std::ptrdiff_t kMostKeys = 64;
  bool controls = false;
  for (std::size_t i = 0; i < name.size(); ++i) controls = controls || is_control(name, i);
  return !name.empty() && !controls && name.front() != '.' && name.back() != '.' &&
         name.find("..") == std::string::npos &&
         std::count(name.begin(), name.end(), '.') < kMostKeys;
}

std::string_view repeated_name(std::vector<std::string_view> names) {
  std::sort(names.begin(), names.end());
  const auto found = std::adjacent_find(names.begin(), names.end());
  return found == names.end() ? std::string_view() : *found;
}

const char* name(EntryKind kind) {
  switch (kind) {
    case EntryKind::tensor:
      return "tensor";
    case EntryKind::number:
      return "number";
    case EntryKind::integer:
      return "integer";
    case EntryKind::text:
      return "text";
    case EntryKind::dictionary:
      return "dictionary";
  }
  return "unknown";
}

FlatState flatten(const StateDict& state) {
  FlatState entries;
  flatten_into(entries, state, "");
  return entries;
}

const Tensor* tensor_in(const StateDict::Value& value) {
  if (const auto* shard = std::get_if<Shard>(&value)) return &shard->tensor;
  return std::get_if<Tensor>(&value);
}

EntryKind kind_of(const StateDict::Value& value) {
  if (tensor_in(value) != nullptr) return EntryKind::tensor;
  if (std::holds_alternative<double>(value)) return EntryKind::number;
  if (std::holds_alternative<std::int64_t>(value)) return EntryKind::integer;
  if (std::holds_alternative<std::string>(value)) return EntryKind::text;
  return EntryKind::dictionary;
}

Tensor tensor_of(const StateDict::Value& value) {
  if (const Tensor* tensor = tensor_in(value)) return *tensor;
  if (const auto* number = std::get_if<double>(&value))
    return Tensor::from<double>({*number}, {}, DType::f64, Device{});
  if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    return Tensor::from<std::int64_t>({*integer}, {}, DType::i64, Device{});
  }
  return {};
}

StateDict::Value value_of(EntryKind kind, const Tensor& tensor, const std::string& text) {
  switch (kind) {
    case EntryKind::tensor:
      return tensor;
    case EntryKind::number:
      return *tensor.data<double>();
    case EntryKind::integer:
      return *tensor.data<std::int64_t>();
    case EntryKind::text:
      return text;
    case EntryKind::dictionary:
      break;
  }
  return StateDict{};
}

StateDict unflatten(FlatState entries) {
  StateDict state;
  for (auto& entry : entries) insert(state, entry.first, 0, std::move(entry.second));
  return state;
}

}  // namespace cairn::checkpointing
