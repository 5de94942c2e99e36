// Reading the options of a torch.optim state.
#pragma once

#include <string>

#include "cairn/core/error.h"
#include "cairn/core/state_dict.h"

namespace cairn::optim {

/// A number, or a tensor of one element.
inline double torch_number(const StateDict& from, const std::string& key) {
  const StateDict::Value* value = from.find(key);
  const auto* tensor = value == nullptr ? nullptr : std::get_if<Tensor>(value);
  if (tensor == nullptr) return from.number(key);
  if (!tensor->defined() || tensor->numel() != 1) {
    core::fail<core::DataError>("torch state", "expected one number '", key, "', got a tensor",
                                tensor->defined() ? core::str(" of shape ", tensor->shape()) : "");
  }
  return tensor->item();
}

/// What this optimizer cannot take over must be the same there, unless it is not said.
inline void expect_torch_option(const char* kind, const StateDict& options, const std::string& key,
                                double own) {
  if (!options.contains(key)) return;
  const double theirs = torch_number(options, key);
  if (theirs == own) return;
  core::fail<core::DataError>(kind, "expected a torch state with ", key, " = ", own, ", got ",
                              theirs, " (construct the optimizer like torch's)");
}

inline void require_in_torch(const char* kind, bool has, const char* what) {
  if (has) return;
  core::fail<core::Unsupported>(kind, "expected an optimizer with ", what,
                                " to exchange states with torch, got one without");
}

}  // namespace cairn::optim
