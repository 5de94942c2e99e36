// SGD with momentum for one element (see begin.h for V); the formula stands in optimizer_update.h.
#if defined(CAIRN_KERNELS_MATH_SGD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_SGD_H_
#undef CAIRN_KERNELS_MATH_SGD_H_
#else
#define CAIRN_KERNELS_MATH_SGD_H_
#endif

#include "math/functions.h"

CAIRN_MATH_BEGIN

/// Options has the members of SgdOptions.
template <class V>
struct Sgd {
  V gradient_scale, lr, momentum, keep, l2, late_l2;
  bool first_step, nesterov;

  template <class Options>
  CAIRN_MATH explicit Sgd(const Options& o)
      : gradient_scale(o.gradient_scale),
        lr(o.lr),
        momentum(o.momentum),
        keep(1.0 - o.dampening),
        l2(o.wd_after_momentum ? 0.0 : o.weight_decay),
        late_l2(o.wd_after_momentum ? o.weight_decay : 0.0),
        first_step(o.first_step),
        nesterov(o.nesterov) {}

  /// Updates the momentum buffer and the weight.
  CAIRN_MATH void update(V gradient, V& buffer, V& w) const {
    V g = fma(l2, w, gradient * gradient_scale);
    buffer = first_step ? g : fma(momentum, buffer, keep * g);
    g = nesterov ? fma(momentum, buffer, g) : buffer;
    w = w - lr * fma(late_l2, w, g);
  }
  /// Without momentum.
  CAIRN_MATH void update(V gradient, V& w) const {
    const V g = fma(l2 + late_l2, w, gradient * gradient_scale);
    w = w - lr * g;
  }
};

CAIRN_MATH_END
#endif
