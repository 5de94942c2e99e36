#include "cairn/optim/list_passes.h"

#include <cmath>

#include "cairn/core/error.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/kernels/multi_tensor.h"

namespace cairn::optim::passes {

std::vector<TensorCheck> PendingCheck::read() const {
  return *found;
}

std::vector<std::vector<TensorCheck>> PendingCheck::read(const std::vector<PendingCheck>& pending) {
  std::vector<std::vector<TensorCheck>> all;
  for (const PendingCheck& one : pending) all.push_back(*one.found);
  return all;
}

PendingCheck check_tensors(const std::vector<TensorView>& tensors, double p) {
  CAIRN_CHECK(p == 2.0, "check_tensors", "expected p = 2, got ", p);
  const kernels::GradientCheck check = kernels::check_gradients(tensors, true);
  PendingCheck pending{std::make_shared<std::vector<TensorCheck>>(tensors.size())};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    TensorCheck& found = (*pending.found)[i];
    found.power_sum = check.squared_norms[i];
    if (check.first_nonfinite < 0) continue;
    const kernels::GradientCheck one = kernels::check_gradients({tensors[i]});
    found.nonfinite = one.nonfinite_count;
    found.nan = one.is_nan ? one.nonfinite_count : 0;
  }
  return pending;
}

PendingCheck multi_tensor_scale(const std::vector<TensorView>& in,
                                const std::vector<TensorView>& out, double scale) {
  PendingCheck pending = check_tensors(in);
  for (std::size_t i = 0; i < in.size(); ++i) kernels::affine(in[i], scale, 0.0, out[i]);
  return pending;
}

PendingCheck multi_tensor_axpby(double a, const std::vector<TensorView>& x, double b,
                                const std::vector<TensorView>& y, const std::vector<TensorView>&,
                                CheckedArgument) {
  PendingCheck pending = check_tensors(x);
  for (std::size_t i = 0; i < x.size(); ++i) kernels::axpby(a, x[i], b, y[i]);
  return pending;
}

double norm_of(const std::vector<TensorCheck>& found, double p) {
  double sum = 0.0;
  for (const TensorCheck& one : found) {
    sum = std::isinf(p) ? std::max(sum, one.power_sum) : sum + one.power_sum;
  }
  return std::isinf(p) ? sum : p == 2.0 ? std::sqrt(sum) : std::pow(sum, 1.0 / p);
}

}  // namespace cairn::optim::passes
