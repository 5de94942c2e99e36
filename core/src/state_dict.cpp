#include "cairn/core/state_dict.h"

#include <utility>

#include "cairn/core/error.h"

namespace cairn::core {

namespace {

constexpr std::size_t kScanned = 16;  // keys that are compared one by one

const char* kind_name(const StateDict::Value& value) {
  static constexpr const char* kNames[] = {"a tensor", "a number",     "an integer",
                                           "text",     "a dictionary", "a shard"};
  return kNames[value.index()];
}

template <class T>
const T& get(const StateDict& state, const std::string& key, const char* expected) {
  const StateDict::Value* value = state.find(key);
  if (value == nullptr) {
    fail<DataError>("state", "expected ", expected, " '", key, "', got nothing of that name");
  }
  const T* result = std::get_if<T>(value);
  if (result == nullptr) {
    fail<DataError>("state", "expected ", expected, " '", key, "', got ", kind_name(*value));
  }
  return *result;
}

}  // namespace

void StateDict::set(const std::string& key, Value value) {
  CAIRN_CHECK(!key.empty() && key.find('.') == std::string::npos, "state",
              "expected a key without '.' and not empty, got '", key, "'");
  if (Value* found = find(key)) {
    *found = std::move(value);
    return;
  }
  entries_.emplace_back(key, std::move(value));
  if (entries_.size() <= kScanned) return;
  for (std::size_t i = places_.size(); i < entries_.size(); ++i) places_[entries_[i].first] = i;
}

StateDict& StateDict::make_dict(const std::string& key) {
  Value* found = find(key);
  if (found == nullptr) {
    set(key, StateDict{});
    found = &entries_.back().second;
  }
  if (!std::holds_alternative<StateDict>(*found)) *found = StateDict{};
  return std::get<StateDict>(*found);
}

const StateDict::Value* StateDict::find(const std::string& key) const {
  if (entries_.size() > kScanned) {
    const auto place = places_.find(key);
    return place == places_.end() ? nullptr : &entries_[place->second].second;
  }
  for (const Entry& entry : entries_) {
    if (entry.first == key) return &entry.second;
  }
  return nullptr;
}

const Tensor& StateDict::tensor(const std::string& key) const {
  return get<Tensor>(*this, key, "tensor");
}

StateDict::Value* StateDict::find(const std::string& key) {
  return const_cast<Value*>(std::as_const(*this).find(key));
}

double StateDict::number(const std::string& key) const {
  const Value* value = find(key);
  if (value != nullptr && std::holds_alternative<std::int64_t>(*value)) {
    return static_cast<double>(std::get<std::int64_t>(*value));
  }
  return get<double>(*this, key, "number");
}

std::int64_t StateDict::integer(const std::string& key) const {
  return get<std::int64_t>(*this, key, "integer");
}

const std::string& StateDict::text(const std::string& key) const {
  return get<std::string>(*this, key, "text");
}

const StateDict& StateDict::dict(const std::string& key) const {
  return get<StateDict>(*this, key, "dictionary");
}

const Shard& StateDict::shard(const std::string& key) const {
  return get<Shard>(*this, key, "shard");
}

}  // namespace cairn::core
