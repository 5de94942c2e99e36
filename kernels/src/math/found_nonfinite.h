// What becomes of the checks of many tensors where no host reads them; the formula stands in
// optimizer_update.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "cairn/core/half.h"
#include "cairn/kernels/multi_tensor.h"
#include "cairn/kernels/optimizer_update.h"

namespace cairn::kernels {

struct FoundState {
  float* found_inf;
  float* each;              // or nullptr
  double* clip;             // or nullptr
  const float* loss_scale;  // or nullptr
  double max_norm, gradient_scale, eps;

  explicit FoundState(const FoundNonfinite& f)
      : found_inf(f.found_inf.as<float>()),
        each(f.each.as<float>()),
        clip(f.clip.as<double>()),
        loss_scale(f.loss_scale.as<const float>()),
        max_norm(f.max_norm),
        gradient_scale(f.gradient_scale),
        eps(f.eps) {}

  /// Squares of the norms, of p = 2. In the order of the tensors, as the host adds them.
  CAIRN_HOST_DEVICE void judge(const TensorCheck* checks, std::int64_t count) const {
    double squares = 0.0;
    bool found = false;
    for (std::int64_t i = 0; i < count; ++i) {
      squares += checks[i].power_sum;
      found = found || checks[i].nonfinite > 0;
      if (each != nullptr && checks[i].nonfinite > 0) each[i] = 1.0f;
    }
    *found_inf = found ? 1.0f : 0.0f;
    if (clip != nullptr) *clip = coefficient(::sqrt(squares));
  }

 private:
  CAIRN_HOST_DEVICE double coefficient(double norm) const {
    const double scale = loss_scale != nullptr ? static_cast<double>(*loss_scale) : 1.0;
    norm *= ::fabs(gradient_scale / scale);
    return norm > max_norm ? max_norm / (norm + eps) : 1.0;
  }
};

/// Counts a step unless it is skipped; found_inf may be nullptr.
CAIRN_HOST_DEVICE inline void advance(std::int32_t* step, const float* found_inf) {
  if (found_inf == nullptr || *found_inf == 0.0f) ++*step;
}

}  // namespace cairn::kernels
