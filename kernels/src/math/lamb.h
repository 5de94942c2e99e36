// LAMB for one element (see begin.h for V); the formula stands in optimizer_update.h.
#if defined(CAIRN_KERNELS_MATH_LAMB_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_LAMB_H_
#undef CAIRN_KERNELS_MATH_LAMB_H_
#else
#define CAIRN_KERNELS_MATH_LAMB_H_
#endif

#include "cairn/kernels/optimizer_update.h"
#include "math/functions.h"

CAIRN_MATH_BEGIN

template <class V>
struct Lamb {
  V beta1, beta2, beta3, one_minus_beta2, inverse_correction1, root, eps, decay;

  CAIRN_MATH explicit Lamb(const LambOptions& o)
      : beta1(o.beta1),
        beta2(o.beta2),
        beta3(o.grad_averaging ? 1.0 - o.beta1 : 1.0),
        one_minus_beta2(1.0 - o.beta2),
        inverse_correction1(1.0 / o.correction1),
        root(1.0 / ::sqrt(o.correction2)),
        eps(o.eps),
        decay(o.adamw ? o.weight_decay : 0.0) {}

  /// g has the L2 term.
  CAIRN_MATH void update_moments(V g, V& m, V& v) const {
    m = fma(beta1, m, beta3 * g);
    v = fma(beta2, v, one_minus_beta2 * g * g);
  }
  /// u, from the moments as they are stored.
  CAIRN_MATH V direction(V m, V v, V w) const {
    return fma(decay, w, m * inverse_correction1 / fma(sqrt(v), root, eps));
  }
};

template <class V>
CAIRN_MATH Lamb<V> formula_of(const LambOptions& o) {
  return Lamb<V>(o);
}

CAIRN_MATH_END
#endif
