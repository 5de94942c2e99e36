#include "cairn/gradients/trained.h"

#include <memory>

#include "cairn/core/gradient_slot.h"

namespace cairn::gradients {

bool has_optimizer(const Tensor& parameter) {
  return !parameter.gradient_slot().claim(std::make_shared<char>());  // which ends at once
}

}  // namespace cairn::gradients
