// Adam and AdamW for one element (see begin.h for V); the formula stands in optimizer_update.h.
#if defined(CAIRN_KERNELS_MATH_ADAM_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_ADAM_H_
#undef CAIRN_KERNELS_MATH_ADAM_H_
#else
#define CAIRN_KERNELS_MATH_ADAM_H_
#endif

#include "cairn/kernels/optimizer_update.h"
#include "math/functions.h"

CAIRN_MATH_BEGIN

/// V holds the constants too, so that they are broadcast once.
template <class V>
struct Adam {
  V beta1, beta2, one_minus_beta1, one_minus_beta2, decay, step, root, eps;

  Adam() = default;  // without values
  /// Options has the members of AdamOptions.
  template <class Options>
  CAIRN_MATH explicit Adam(const Options& o)
      : beta1(o.beta1),
        beta2(o.beta2),
        one_minus_beta1(1.0 - o.beta1),
        one_minus_beta2(1.0 - o.beta2),
        decay(o.adamw ? 1.0 - o.lr * o.weight_decay : 1.0),
        step(o.lr / o.correction1),
        root(1.0 / ::sqrt(o.correction2)),
        eps(o.eps) {}

  /// Updates the moments m, v and the weight w; g has the L2 term.
  CAIRN_MATH void update(V g, V, V& m, V& v, V& w) const {
    m = fma(beta1, m, one_minus_beta1 * g);
    v = fma(beta2, v, one_minus_beta2 * g * g);
    w = w * decay - step * m / fma(sqrt(v), root, eps);
  }
};

template <class V>
CAIRN_MATH Adam<V> formula_of(const AdamOptions& o) {
  return Adam<V>(o);
}

CAIRN_MATH_END
#endif
