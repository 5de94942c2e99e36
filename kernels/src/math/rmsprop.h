// RMSprop for one element (see begin.h for V); the formula stands in optimizer_update.h.
#if defined(CAIRN_KERNELS_MATH_RMSPROP_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_RMSPROP_H_
#undef CAIRN_KERNELS_MATH_RMSPROP_H_
#else
#define CAIRN_KERNELS_MATH_RMSPROP_H_
#endif

#include "cairn/kernels/optimizer_update.h"
#include "math/functions.h"

CAIRN_MATH_BEGIN

template <class V>
struct RmsProp {
  V lr, alpha, rest, eps, momentum;
  bool has_momentum;

  CAIRN_MATH explicit RmsProp(const RmsPropOptions& o)
      : lr(o.lr),
        alpha(o.alpha),
        rest(1.0 - o.alpha),
        eps(o.eps),
        momentum(o.momentum),
        has_momentum(o.momentum != 0.0) {}

  /// Updates the mean of squares, the momentum buffer where there is momentum, and the weight; g
  /// has the L2 term.
  CAIRN_MATH void update(V g, V, V& mean, V& buffer, V& w) const {
    mean = fma(alpha, mean, rest * g * g);
    V change = g / (sqrt(mean) + eps);
    if (has_momentum) {
      buffer = fma(momentum, buffer, change);
      change = buffer;
    }
    w = w - lr * change;
  }
};

template <class V>
CAIRN_MATH RmsProp<V> formula_of(const RmsPropOptions& o) {
  return RmsProp<V>(o);
}

CAIRN_MATH_END
#endif
