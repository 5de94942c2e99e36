// One unit of an LSTM in one step (see begin.h for V): Hochreiter & Schmidhuber 1997, with the
// forget gate of Gers, Schmidhuber & Cummins 2000.
#if defined(CAIRN_KERNELS_MATH_LSTM_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_LSTM_H_
#undef CAIRN_KERNELS_MATH_LSTM_H_
#else
#define CAIRN_KERNELS_MATH_LSTM_H_
#endif

#include "math/activations.h"

CAIRN_MATH_BEGIN

/// Before or after their activations, or the gradients of what is before them.
template <class V>
struct LstmGates {
  V i, f, g, o;

  CAIRN_MATH LstmGates activated() const {
    const Sigmoid sigmoid;
    return {sigmoid.forward(i), sigmoid.forward(f), tanh(g), sigmoid.forward(o)};
  }
};

template <class V>
struct LstmUnit {
  V c, h;
};

/// Of activated gates: c = f c_before + i g, h = o tanh(c).
template <class V>
CAIRN_MATH LstmUnit<V> lstm_unit(const LstmGates<V>& y, V c_before) {
  const V c = fma(y.f, c_before, y.i * y.g);
  return {c, y.o * tanh(c)};
}

template <class V>
struct LstmUnitGradients {
  LstmGates<V> gates;  // before their activations
  V c_before;
};

/// From dh and what of dc does not come through it.
template <class V>
CAIRN_MATH LstmUnitGradients<V> lstm_unit_backward(const LstmGates<V>& y, V c_before, V c, V dh,
                                                   V dc) {
  const Sigmoid sigmoid;
  const Tanh squash;
  const V t = tanh(c), total = dc + squash.backward(t, dh * y.o);
  return {{sigmoid.backward(y.i, total * y.g), sigmoid.backward(y.f, total * c_before),
           squash.backward(y.g, total * y.i), sigmoid.backward(y.o, dh * t)},
          total * y.f};
}

CAIRN_MATH_END
#endif
