// What tests of saved states share.
#pragma once

#include "cairn/core/state_dict.h"
#include "cairn/kernels/elementwise.h"

namespace cairn::test {

/// A deep copy, as a file would hold it.
inline StateDict snapshot(const StateDict& state) {
  StateDict copy;
  for (const auto& [key, value] : state) {
    if (const auto* tensor = std::get_if<Tensor>(&value)) {
      const Tensor values = Tensor::empty(tensor->shape(), tensor->dtype(), tensor->device());
      kernels::copy(*tensor, values);
      copy.set(key, values);
    } else if (const auto* child = std::get_if<StateDict>(&value)) {
      copy.set(key, snapshot(*child));
    } else {
      copy.set(key, value);
    }
  }
  return copy;
}

}  // namespace cairn::test
