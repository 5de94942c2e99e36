// SGD with momentum for one element (see begin.h for V); the formula stands in optimizer_update.h.
#if defined(CAIRN_KERNELS_MATH_SGD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_SGD_H_
#undef CAIRN_KERNELS_MATH_SGD_H_
#else
#define CAIRN_KERNELS_MATH_SGD_H_
#endif

#include "cairn/kernels/optimizer_update.h"
#include "math/functions.h"

CAIRN_MATH_BEGIN

template <class V>
struct Sgd {
  V lr, momentum, keep, late_l2;
  bool has_momentum, first_step, nesterov;

  CAIRN_MATH explicit Sgd(const SgdOptions& o)
      : lr(o.lr),
        momentum(o.momentum),
        keep(1.0 - o.dampening),
        late_l2(o.wd_after_momentum ? o.weight_decay : 0.0),
        has_momentum(o.momentum != 0.0),
        first_step(o.first_step),
        nesterov(o.nesterov) {}

  /// Updates the momentum buffer, where there is momentum, and the weight; g has the L2 term.
  CAIRN_MATH void update(V g, V, V& buffer, V&, V& w) const {
    if (has_momentum) {
      buffer = first_step ? g : fma(momentum, buffer, keep * g);
      g = nesterov ? fma(momentum, buffer, g) : buffer;
    }
    w = w - lr * fma(late_l2, w, g);
  }
};

template <class V>
CAIRN_MATH Sgd<V> formula_of(const SgdOptions& o) {
  return Sgd<V>(o);
}

CAIRN_MATH_END
#endif
