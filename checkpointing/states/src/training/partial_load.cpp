#include "training/partial_load.h"

#include <map>

#include "formats/flat_state.h"

namespace cairn::checkpointing {

namespace {

bool lies_in(const std::string& name, const std::string& place) {
  return name == place || name.starts_with(place + ".");
}

// "FusedAdam", of the state of an optimizer; "" of any other.
std::string optimizer_of(const StateDict& state) {
  const StateDict::Value *kind = state.find("kind"), *groups = state.find("groups");
  const bool is_one = kind != nullptr && std::holds_alternative<std::string>(*kind) &&
                      groups != nullptr && std::holds_alternative<StateDict>(*groups);
  return is_one ? std::get<std::string>(*kind) : "";
}

}  // namespace

std::string new_name(const std::string& name,
                     const std::vector<std::pair<std::string, std::string>>& names) {
  for (const auto& [from, to] : names) {
    if (lies_in(name, from)) return to + name.substr(from.size());
  }
  return name;
}

StateDict renamed(const StateDict& state,
                  const std::vector<std::pair<std::string, std::string>>& names) {
  if (names.empty()) return state;
  FlatState entries = flatten(state);
  for (auto& [name, value] : entries) name = new_name(name, names);
  return unflatten(std::move(entries));
}

bool of_different_optimizers(const StateDict& a, const StateDict& b) {
  const std::string one = optimizer_of(a), other = optimizer_of(b);
  return !one.empty() && !other.empty() && one != other;
}

StateDict merged(const StateDict& now, const StateDict& loaded, const std::string& prefix,
                 std::vector<std::string>& kept, std::vector<std::string>& ignored) {
  FlatState entries = flatten(now);
  std::map<std::string, StateDict::Value> others;
  for (auto& [name, value] : flatten(loaded)) others.emplace(name, std::move(value));
  for (auto& [name, value] : entries) {
    const auto found = others.extract(name);
    if (found.empty()) kept.push_back(prefix + name);
    if (!found.empty()) value = found.mapped();
  }
  for (const auto& [name, value] : others) ignored.push_back(prefix + name);
  return unflatten(std::move(entries));
}

}  // namespace cairn::checkpointing
