// What the rules' options have in common.
#pragma once

#include <cmath>
#include <cstdint>

#include "cairn/core/error.h"

namespace cairn::optim {

inline void check_betas_and_eps(const char* kind, double beta1, double beta2, double eps) {
  const auto is_beta = [](double beta) { return beta >= 0 && beta < 1; };
  CAIRN_CHECK(is_beta(beta1) && is_beta(beta2), kind, "expected betas in [0, 1), got ", beta1,
              " and ", beta2);
  CAIRN_CHECK(eps >= 0 && std::isfinite(eps), kind, "expected eps >= 0, got ", eps);
}

inline double bias_correction(double beta, std::int64_t step) {
  return 1.0 - std::pow(beta, static_cast<double>(step));
}

}  // namespace cairn::optim
