#pragma once

#include <memory>
#include <string>
#include <utility>

#include "cairn.h"
#include "cairn/optim/optimizer.h"
#include "objects.h"
#include "options.h"

namespace cairn::capi {

struct Optimizer final : Object {
  explicit Optimizer(std::unique_ptr<optim::Optimizer> rule) : optimizer(std::move(rule)) {}

  std::unique_ptr<optim::Optimizer> optimizer;
  optim::StepResult last;  // whose texts a cairn_step_result has
};

inline std::shared_ptr<Optimizer> optimizer_of(const void* handle, const char* function) {
  return object_of<Optimizer>(handle, function, "an optimizer");
}

/// Calls f(NamedTensor) with every parameter of it.
template <class F>
void for_each_parameter(const optim::Optimizer& optimizer, F&& f) {
  for (const optim::ParameterGroup& group : optimizer.groups()) {
    for (const NamedTensor& parameter : group.parameters) f(parameter);
  }
}

/// What cairn_optimizer_step takes.
optim::StepOptions step_options(const char* text, const char* function);
/// Its texts are those of `result`, which must stay.
cairn_step_result step_result(const optim::StepResult& result);

}  // namespace cairn::capi
