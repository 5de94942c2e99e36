// Activations and their gradients (see begin.h for V).
//
// Each is a struct with forward(x) and backward(saved, dy), where `saved` is the output y for exp,
// sqrt, rsqrt, tanh, sigmoid and relu and the input x for the others, as saves_output() of
// elementwise.h says.
#if defined(CAIRN_KERNELS_MATH_ACTIVATIONS_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_ACTIVATIONS_H_
#undef CAIRN_KERNELS_MATH_ACTIVATIONS_H_
#else
#define CAIRN_KERNELS_MATH_ACTIVATIONS_H_
#endif

#include "math/functions.h"

CAIRN_MATH_BEGIN

struct Neg {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return -x;
  }
  template <class V>
  CAIRN_MATH V backward(V, V dy) const {
    return -dy;
  }
};

struct Abs {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return abs(x);
  }
  template <class V>
  CAIRN_MATH V backward(V x, V dy) const {
    return select(x > V(0.0), dy, select(x < V(0.0), -dy, V(0.0)));
  }
};

struct Exp {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return exp(x);
  }
  template <class V>
  CAIRN_MATH V backward(V y, V dy) const {
    return dy * y;
  }
};

struct Log {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return log(x);
  }
  template <class V>
  CAIRN_MATH V backward(V x, V dy) const {
    return dy / x;
  }
};

struct Sqrt {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return sqrt(x);
  }
  template <class V>
  CAIRN_MATH V backward(V y, V dy) const {
    return dy / (y + y);
  }
};

struct Rsqrt {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return V(1.0) / sqrt(x);
  }
  template <class V>
  CAIRN_MATH V backward(V y, V dy) const {
    return V(-0.5) * dy * y * y * y;
  }
};

struct Tanh {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return tanh(x);
  }
  template <class V>
  CAIRN_MATH V backward(V y, V dy) const {
    return dy * (V(1.0) - y * y);
  }
};

/// 1 / (1 + exp(-x)); exp overflows to infinity, which gives the right 0.
struct Sigmoid {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return V(1.0) / (V(1.0) + exp(-x));
  }
  template <class V>
  CAIRN_MATH V backward(V y, V dy) const {
    return dy * y * (V(1.0) - y);
  }
};

/// NaN stays NaN.
struct Relu {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return select(x < V(0.0), V(0.0), x);
  }
  template <class V>
  CAIRN_MATH V backward(V y, V dy) const {
    return select(y > V(0.0), dy, V(0.0));
  }
};

struct LeakyRelu {
  double slope;
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return select(x < V(0.0), x * V(slope), x);
  }
  template <class V>
  CAIRN_MATH V backward(V x, V dy) const {
    return select(x > V(0.0), dy, dy * V(slope));
  }
};

/// x cdf(x) of the standard normal distribution (Hendrycks & Gimpel 2016), exactly.
struct Gelu {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return x * normal_distribution(x).cdf;
  }
  template <class V>
  CAIRN_MATH V backward(V x, V dy) const {
    const auto normal = normal_distribution(x);
    return dy * fma(x, normal.density, normal.cdf);
  }
};

/// sigmoid(u) and 1 - sigmoid(u), each to its own last digit.
template <class V>
struct Gate {
  V open, closed;

  CAIRN_MATH explicit Gate(V u) {
    const V e = exp(-abs(u)), larger = V(1.0) / (V(1.0) + e), smaller = e * larger;
    open = select(u < V(0.0), smaller, larger);
    closed = select(u < V(0.0), larger, smaller);
  }
};

/// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), written with (1 + tanh(u / 2)) / 2 =
/// sigmoid(u).
struct GeluTanh {
  template <class V>
  CAIRN_MATH Gate<V> gate(V x) const {
    return Gate<V>(x * fma(V(0.07135481627260025), x * x, V(1.5957691216057308)));
  }
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return x * gate(x).open;
  }
  template <class V>
  CAIRN_MATH V backward(V x, V dy) const {
    const Gate<V> g = gate(x);
    const V du = fma(V(0.21406444881780076), x * x, V(1.5957691216057308));
    return dy * g.open * fma(x * g.closed, du, V(1.0));
  }
};

/// x sigmoid(x).
struct Silu {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return x * Gate<V>(x).open;
  }
  template <class V>
  CAIRN_MATH V backward(V x, V dy) const {
    const Gate<V> g(x);
    return dy * g.open * fma(x, g.closed, V(1.0));
  }
};

struct Square {
  template <class V>
  CAIRN_MATH V forward(V x) const {
    return x * x;
  }
  template <class V>
  CAIRN_MATH V backward(V x, V dy) const {
    return (x + x) * dy;
  }
};

CAIRN_MATH_END
#endif
