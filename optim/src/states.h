// What the states of optimizers and averages have in common.
#pragma once

#include <string>
#include <utility>

#include "cairn/core/error.h"
#include "cairn/core/state_dict.h"

namespace cairn::optim {

/// The dictionary at "a.b.c" under root, made where there is none.
inline StateDict& make_path(StateDict& root, const std::string& path) {
  const std::size_t dot = path.find('.');
  StateDict& child = root.make_dict(path.substr(0, dot));
  return dot == std::string::npos ? child : make_path(child, path.substr(dot + 1));
}

/// Puts a value at "a.b.c".
inline void set_path(StateDict& root, const std::string& path, StateDict::Value value) {
  const std::size_t dot = path.rfind('.');
  StateDict& at = dot == std::string::npos ? root : make_path(root, path.substr(0, dot));
  at.set(path.substr(dot + 1), std::move(value));  // npos + 1 is 0
}

/// What lies at a key; empty where there is no dictionary.
inline const StateDict& dict_or_empty(const StateDict& from, const std::string& key) {
  static const StateDict empty;
  const auto* dict = std::get_if<StateDict>(from.find(key));
  return dict == nullptr ? empty : *dict;
}

/// Visits all that lies below, dictionaries too, by its path: visit("a.b.c", value).
template <class Visit>
void walk(const StateDict& at, const Visit& visit, const std::string& path = "") {
  for (const auto& [key, value] : at) {
    const std::string name = path.empty() ? key : path + "." + key;
    visit(name, value);
    if (const auto* child = std::get_if<StateDict>(&value)) walk(*child, visit, name);
  }
}

/// Everything wrong with a state, to be told at once.
class Problems {
 public:
  template <class... Parts>
  void add(const Parts&... parts) {
    text_ += core::str(text_.empty() ? "" : "; ", parts...);
  }
  void throw_if_any(const char* where, const char* of_what) const {
    if (text_.empty()) return;
    core::fail<core::DataError>(where, "expected a state of ", of_what, ", got one with ", text_,
                                " (nothing was changed)");
  }

 private:
  std::string text_;
};

}  // namespace cairn::optim
