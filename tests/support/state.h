// What tests of states share.
#pragma once

#include <map>
#include <string>
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

/// All tensors and numbers by their names ("state.w.exp_avg").
inline std::map<std::string, std::vector<double>> flat(const StateDict& state,
                                                       const std::string& path = "") {
  std::map<std::string, std::vector<double>> all;
  for (const auto& [key, value] : state) {
    const std::string name = path.empty() ? key : path + "." + key;
    if (const auto* child = std::get_if<StateDict>(&value)) all.merge(flat(*child, name));
    if (const auto* tensor = std::get_if<Tensor>(&value)) all[name] = tensor->to_vector();
    if (const auto* number = std::get_if<double>(&value)) all[name] = {*number};
    if (const auto* integer = std::get_if<std::int64_t>(&value)) {
      all[name] = {static_cast<double>(*integer)};
    }
  }
  return all;
}

/// Writes one element, in row-major order, on any device.
inline void set_element(const Tensor& x, std::int64_t element, double value) {
  std::vector<double> values = x.to_vector();
  values[static_cast<std::size_t>(element)] = value;
  kernels::copy(Tensor::from(values, x.shape(), x.dtype(), x.device()), x);
}

}  // namespace cairn::test
