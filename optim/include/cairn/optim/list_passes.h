// The list passes of optim over kernels::check_gradients, until kernels has them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cairn/core/tensor_view.h"

namespace cairn::optim::passes {

struct TensorCheck {
  double power_sum = 0.0;
  std::int64_t nonfinite = 0;
  std::int64_t nan = 0;
};

class PendingCheck {
 public:
  std::vector<TensorCheck> read() const;
  static std::vector<std::vector<TensorCheck>> read(const std::vector<PendingCheck>& pending);
  std::shared_ptr<std::vector<TensorCheck>> found;
};

enum class CheckedArgument { both, x, y };

PendingCheck check_tensors(const std::vector<TensorView>& tensors, double p = 2.0);
PendingCheck multi_tensor_scale(const std::vector<TensorView>& in,
                                const std::vector<TensorView>& out, double scale);
PendingCheck multi_tensor_axpby(double a, const std::vector<TensorView>& x, double b,
                                const std::vector<TensorView>& y,
                                const std::vector<TensorView>& out, CheckedArgument checked);
double norm_of(const std::vector<TensorCheck>& found, double p);

}  // namespace cairn::optim::passes
