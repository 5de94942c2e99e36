// How a parameter's exact value is kept.
#pragma once

#include <optional>

#include "cairn/kernels/master_weight.h"

namespace cairn::test {

/// Unset: the parameter has no master.
inline std::optional<kernels::MasterStorage> kept_as(const Tensor& parameter) {
  const auto* master = kernels::MasterWeight::of(parameter);
  if (master == nullptr) return std::nullopt;
  return master->storage();
}

}  // namespace cairn::test
