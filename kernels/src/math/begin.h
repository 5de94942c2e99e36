// The formulas in this folder are written once, as templates on a number type V, for three users:
// CUDA kernels (V = float), scalar host loops (float, double) and the CPU's vector loops, where V
// wraps a Highway vector (see cpu/simd.h).
//
// The vector loops are compiled once per instruction set, and GCC lets a function use an
// instruction set only if it is declared inside that set's pragma. So the headers here are included
// once per set too, into the set's own namespace; their guards toggle as Highway's own headers' do.
// Everybody else includes them like any header and finds cairn::kernels::math.
//
// V offers + - * / (and unary -), comparisons giving a mask, explicit construction from double,
// and, beside it by argument-dependent lookup, select(mask, a, b), fma(a, b, c) = a b + c, exp,
// log, log1p, tanh, sqrt, abs, max, min, pow and normal_distribution. No file here includes Highway
// or CUDA.
#undef CAIRN_MATH_BEGIN
#undef CAIRN_MATH_END
#undef CAIRN_MATH
#ifdef HWY_NAMESPACE
#define CAIRN_MATH_BEGIN     \
  HWY_BEFORE_NAMESPACE();    \
  namespace cairn::kernels { \
  namespace HWY_NAMESPACE {  \
  namespace math {
#define CAIRN_MATH_END \
  }                    \
  }                    \
  }                    \
  HWY_AFTER_NAMESPACE();
#define CAIRN_MATH HWY_INLINE
#else
#include "cairn/core/half.h"
#define CAIRN_MATH_BEGIN     \
  namespace cairn::kernels { \
  namespace math {
#define CAIRN_MATH_END \
  }                    \
  }
#define CAIRN_MATH CAIRN_HOST_DEVICE inline
#endif
