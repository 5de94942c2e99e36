// Element-wise losses and their gradients with respect to x (see begin.h for V).
#if defined(CAIRN_KERNELS_MATH_LOSSES_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_LOSSES_H_
#undef CAIRN_KERNELS_MATH_LOSSES_H_
#else
#define CAIRN_KERNELS_MATH_LOSSES_H_
#endif

#include "math/functions.h"

CAIRN_MATH_BEGIN

struct SquaredError {
  template <class V>
  CAIRN_MATH V forward(V x, V target) const {
    const V d = x - target;
    return d * d;
  }
  template <class V>
  CAIRN_MATH V backward(V x, V target, V dloss) const {
    const V d = x - target;
    return (d + d) * dloss;
  }
};

/// Of the probability sigmoid(x), without computing it.
struct BinaryCrossEntropy {
  template <class V>
  CAIRN_MATH V forward(V x, V target) const {
    const V positive = select(x > V(0.0), x, V(0.0));
    return positive - x * target + log1p(exp(-abs(x)));
  }
  template <class V>
  CAIRN_MATH V backward(V x, V target, V dloss) const {
    return (V(1.0) / (V(1.0) + exp(-x)) - target) * dloss;
  }
};

/// Of a probability p; NaN outside of [0, 1].
struct ProbabilityCrossEntropy {
  template <class V>
  CAIRN_MATH V forward(V p, V target) const {
    const V lowest(-100.0);
    const V with = max(log(p), lowest);
    const V log_without = select(p > V(0.5), log(V(1.0) - p), log1p(-p));
    const V without = max(log_without, lowest);
    return (target - V(1.0)) * without - target * with;
  }
  template <class V>
  CAIRN_MATH V backward(V p, V target, V dloss) const {
    return (p - target) / max(p * (V(1.0) - p), V(1e-12)) * dloss;
  }
};

CAIRN_MATH_END
#endif
