// NovoGrad for one element (see begin.h for V); the formula stands in optimizer_update.h.
#if defined(CAIRN_KERNELS_MATH_NOVOGRAD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_NOVOGRAD_H_
#undef CAIRN_KERNELS_MATH_NOVOGRAD_H_
#else
#define CAIRN_KERNELS_MATH_NOVOGRAD_H_
#endif

#include "cairn/kernels/optimizer_update.h"
#include "math/functions.h"

CAIRN_MATH_BEGIN

template <class V>
struct NovoGrad {
  V beta1, beta3, inner_l2, decay, step;
  bool inside;

  CAIRN_MATH explicit NovoGrad(const NovoGradOptions& o)
      : beta1(o.beta1),
        beta3(o.grad_averaging ? 1.0 - o.beta1 : 1.0),
        inner_l2(o.weight_decay),
        decay(o.reg_inside_moment ? 1.0 : 1.0 - o.lr * o.weight_decay),
        step(o.lr / o.correction1),
        inside(o.reg_inside_moment) {}

  /// Updates the moment and the weight; `inverse` is 1 / d.
  CAIRN_MATH void update(V g, V inverse, V& m, V&, V& w) const {
    if (inside) g = fma(inner_l2, w, g * inverse);
    m = fma(beta1, m, beta3 * g);
    w = w * decay - step * (inside ? m : m * inverse);
  }
};

template <class V>
CAIRN_MATH NovoGrad<V> formula_of(const NovoGradOptions& o) {
  return NovoGrad<V>(o);
}

CAIRN_MATH_END
#endif
