// One sequence of a CTC loss; for the CPU's loops and for CUDA. A path goes through 2 L + 1 states,
// where L is the target's length: a blank, the first label, a blank, ... State s at step t follows
// s, s - 1, or s - 2 where that leaves out a blank between two labels that differ. All
// probabilities are logarithms.
#pragma once

#include <cstdint>
#include <limits>

#include "cairn/core/half.h"
#include "math/functions.h"

namespace cairn::kernels {

/// The sizes of log_probs [T, N, C] and targets [N, S].
struct CtcShape {
  std::int64_t T, N, C, S;
  std::int64_t blank;
  CAIRN_HOST_DEVICE std::int64_t states() const { return 2 * S + 1; }  // at most
};

template <class A>
class CtcSequence {
 public:
  CAIRN_HOST_DEVICE CtcSequence(const CtcShape& shape, std::int64_t n, const A* log_probs,
                                const std::int64_t* targets, const std::int64_t* input_lengths,
                                const std::int64_t* target_lengths)
      : shape_(shape),
        n_(n),
        steps_(input_lengths[n]),
        length_(target_lengths[n]),
        log_probs_(log_probs),
        labels_(targets + n * shape.S) {}

  CAIRN_HOST_DEVICE std::int64_t steps() const { return steps_; }
  CAIRN_HOST_DEVICE std::int64_t states() const { return 2 * length_ + 1; }
  /// Lengths and classes lie in their ranges.
  CAIRN_HOST_DEVICE bool valid() const {
    if (steps_ < 0 || steps_ > shape_.T || length_ < 0 || length_ > shape_.S) return false;
    for (std::int64_t i = 0; i < length_; ++i) {
      if (labels_[i] < 0 || labels_[i] >= shape_.C) return false;
    }
    return true;
  }
  CAIRN_HOST_DEVICE std::int64_t class_of(std::int64_t s) const {
    return s % 2 == 1 ? labels_[s / 2] : shape_.blank;
  }
  /// Where step t and class c lie in log_probs.
  CAIRN_HOST_DEVICE std::int64_t at(std::int64_t t, std::int64_t c) const {
    return (t * shape_.N + n_) * shape_.C + c;
  }

  /// All paths to state s at step t; before: those of step t - 1.
  CAIRN_HOST_DEVICE A alpha(std::int64_t t, std::int64_t s, const A* before) const {
    const A here = log_probs_[at(t, class_of(s))];
    if (t == 0) return s < 2 ? here : none();
    A sum = before[s];
    if (s >= 1) sum = join(sum, before[s - 1]);
    if (s >= 2 && leaves_out(s)) sum = join(sum, before[s - 2]);
    return sum + here;
  }
  /// All paths from state s after step t to the end; after: those of step t + 1.
  CAIRN_HOST_DEVICE A beta(std::int64_t t, std::int64_t s, const A* after) const {
    if (t == steps_ - 1) return s >= states() - 2 ? A(0) : none();
    A sum = onward(t, s, after);
    if (s + 1 < states()) sum = join(sum, onward(t, s + 1, after));
    if (s + 2 < states() && leaves_out(s + 2)) sum = join(sum, onward(t, s + 2, after));
    return sum;
  }
  /// last: alpha of the last step.
  CAIRN_HOST_DEVICE A loss(const A* last) const {
    if (steps_ == 0) return length_ == 0 ? A(0) : -none();
    const A end = last[states() - 1];
    return -(states() > 1 ? join(end, last[states() - 2]) : end);
  }
  /// The probability that a path is in the class of state s at a step, where s is the first state
  /// of that class; negative elsewhere.
  CAIRN_HOST_DEVICE A posterior(std::int64_t s, A loss, const A* alpha, const A* beta) const {
    const std::int64_t c = class_of(s);
    for (std::int64_t i = 0; i < s; ++i) {
      if (class_of(i) == c) return A(-1);
    }
    A sum = 0;
    for (std::int64_t i = s; i < states(); ++i) {
      if (class_of(i) == c) sum += math::exp(alpha[i] + beta[i] + loss);
    }
    return sum;
  }

 private:
  static CAIRN_HOST_DEVICE A none() { return -std::numeric_limits<A>::infinity(); }
  static CAIRN_HOST_DEVICE A join(A a, A b) {  // log(exp a + exp b)
    const A high = a > b ? a : b, low = a > b ? b : a;
    return low == none() ? high : high + math::log1p(math::exp(low - high));
  }
  CAIRN_HOST_DEVICE bool leaves_out(std::int64_t s) const {
    return class_of(s) != shape_.blank && class_of(s) != class_of(s - 2);
  }
  CAIRN_HOST_DEVICE A onward(std::int64_t t, std::int64_t s, const A* after) const {
    return after[s] + log_probs_[at(t + 1, class_of(s))];
  }

  CtcShape shape_;
  std::int64_t n_, steps_, length_;
  const A* log_probs_;
  const std::int64_t* labels_;
};

}  // namespace cairn::kernels
