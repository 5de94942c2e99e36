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

CAIRN_MATH_END
#endif
