// Adagrad for one element (see begin.h for V); the formula stands in optimizer_update.h.
#if defined(CAIRN_KERNELS_MATH_ADAGRAD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_ADAGRAD_H_
#undef CAIRN_KERNELS_MATH_ADAGRAD_H_
#else
#define CAIRN_KERNELS_MATH_ADAGRAD_H_
#endif

#include "cairn/kernels/optimizer_update.h"
#include "math/functions.h"

CAIRN_MATH_BEGIN

template <class V>
struct Adagrad {
  V lr, eps, decay;

  CAIRN_MATH explicit Adagrad(const AdagradOptions& o)
      : lr(o.lr), eps(o.eps), decay(o.adagrad_w ? 1.0 - o.lr * o.weight_decay : 1.0) {}

  /// Updates the sum of squares and the weight; g has the L2 term.
  CAIRN_MATH void update(V g, V, V& sum, V&, V& w) const {
    sum = fma(g, g, sum);
    w = w * decay - lr * g / (sqrt(sum) + eps);
  }
};

template <class V>
CAIRN_MATH Adagrad<V> formula_of(const AdagradOptions& o) {
  return Adagrad<V>(o);
}

CAIRN_MATH_END
#endif
