#pragma once

namespace cairn::kernels {

/// What cross_entropy needs of one row of logits.
struct RowSums {
  double log_sum_exp;
  double sum;
};

}  // namespace cairn::kernels
