// Adagrad for one element (see begin.h for V); the formula stands in optimizer_update.h.
#if defined(CAIRN_KERNELS_MATH_ADAGRAD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_ADAGRAD_H_
#undef CAIRN_KERNELS_MATH_ADAGRAD_H_
#else
#define CAIRN_KERNELS_MATH_ADAGRAD_H_
#endif

#include "math/functions.h"

CAIRN_MATH_BEGIN

/// Options has the members of AdagradOptions.
template <class V>
struct Adagrad {
  V lr, eps, decay;

  template <class Options>
  CAIRN_MATH explicit Adagrad(const Options& o)
      : lr(o.lr), eps(o.eps), decay(o.adagrad_w ? 1.0 - o.lr * o.weight_decay : 1.0) {}

  /// Updates the sum of squares and the weight; g has the L2 term.
  CAIRN_MATH void update(V g, V, V& sum, V&, V& w) const {
    sum = fma(g, g, sum);
    w = w * decay - lr * g / (sqrt(sum) + eps);
  }
};

CAIRN_MATH_END
#endif
