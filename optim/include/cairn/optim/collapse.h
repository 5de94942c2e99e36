// Where training goes on in vain: step after step is skipped, because gradients are not finite.
#pragma once

#include <string>
#include <vector>

#include "cairn/core/error.h"

namespace cairn::optim {

/// Thrown by a step after so many in a row were skipped that the run is broken
/// (StepOptions::collapse_after, amp::Options::collapse_after). The gradients are dropped; weights
/// and state are as before the step.
class GradientCollapse : public core::Error {
 public:
  GradientCollapse(const std::string& message, std::vector<std::string> parameters)
      : core::Error(message), parameters_(std::move(parameters)) {}
  /// Those whose gradients were not finite in every one of the last steps.
  const std::vector<std::string>& parameters() const { return parameters_; }

 private:
  std::vector<std::string> parameters_;
};

/// What such an error advises.
inline constexpr const char* kCollapseAdvice =
    "(Look there for a division or log of 0, an exp of a large value, a broken batch or label; "
    "lower the learning rate or clip with max_gradient_norm; amp::AnomalyMode names the first "
    "operation that is not finite";

/// Skipped steps in a row, and which parameters each of them had in common.
class SkipStreak {
 public:
  void add(std::vector<std::string> parameters);
  void set(int length, std::vector<std::string> parameters);
  void clear() { set(0, {}); }
  int length() const { return length_; }
  const std::vector<std::string>& parameters() const { return parameters_; }  // sorted
  /// For people: the first of them.
  std::string describe() const;

 private:
  int length_ = 0;
  std::vector<std::string> parameters_;
};

}  // namespace cairn::optim
