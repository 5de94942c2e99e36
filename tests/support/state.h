// What tests of states share.
#pragma once

#include <vector>

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

/// Writes one element, in row-major order, on any device.
inline void set_element(const Tensor& x, std::int64_t element, double value) {
  std::vector<double> values = x.to_vector();
  values[static_cast<std::size_t>(element)] = value;
  kernels::copy(Tensor::from(values, x.shape(), x.dtype(), x.device()), x);
}

}  // namespace cairn::test
