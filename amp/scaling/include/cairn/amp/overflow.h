// What amp tells of gradients that were not finite: which parameter, on which rank, inf or NaN, how
// many elements. Known from the pass that checks the gradients anyway, and the same on every rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cairn/optim/collapse.h"

namespace cairn::amp {

inline constexpr int kSumOfRanks = -1;

/// A parameter whose gradient was not finite on one rank.
struct Culprit {
  std::string parameter;
  int rank = 0;                   // kSumOfRanks: every rank's own was finite, their sum is not
  std::int64_t inf = 0, nan = 0;  // elements
};

/// One overflow of one loss.
struct Overflow {
  std::int64_t step = 0;  // the call of Amp::step, from 1
  int loss_id = 0;
  double loss_scale = 1.0;        // at which it happened
  std::vector<Culprit> culprits;  // by rank, then in registration order

  /// "inf in the gradient of conv1.weight (3 elements) on rank 2, and 4 more parameters".
  std::string describe(int world_size = 1) const;
};

/// A table of overflows, the newest last, for people.
std::string overflow_report(const std::vector<Overflow>& overflows, int world_size = 1);

/// Thrown by Amp::step where step after step overflows although the scale is at its minimum: the
/// run is broken and no scale will mend it. The message names the parameters that overflowed each
/// time. The gradients are dropped. Optimizers that the loss reaches are as before the step, and so
/// is its scale; others of the same step have updated.
class LossScaleCollapse : public optim::GradientCollapse {
 public:
  using GradientCollapse::GradientCollapse;
};

}  // namespace cairn::amp
