// Parameters' names as paths in a StateDict.
#pragma once

#include <string>
#include <string_view>

#include "cairn/core/state_dict.h"

namespace cairn::optim {

/// The dictionary at "a.b.c" under root, made where there is none.
inline StateDict& make_path(StateDict& root, std::string_view path) {
  StateDict* at = &root;
  while (true) {
    const std::size_t dot = path.find('.');
    at = &at->make_dict(std::string(path.substr(0, dot)));
    if (dot == std::string_view::npos) return *at;
    path.remove_prefix(dot + 1);
  }
}

}  // namespace cairn::optim
