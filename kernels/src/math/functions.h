// The functions that the formulas use, for V = float and V = double (see begin.h). cpu/simd.h has
// them for vectors.
#if defined(CAIRN_KERNELS_MATH_FUNCTIONS_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CAIRN_KERNELS_MATH_FUNCTIONS_H_
#undef CAIRN_KERNELS_MATH_FUNCTIONS_H_
#else
#define CAIRN_KERNELS_MATH_FUNCTIONS_H_
#endif

#include <cmath>

#include "math/begin.h"

CAIRN_MATH_BEGIN

CAIRN_MATH float select(bool mask, float a, float b) {
  return mask ? a : b;
}
CAIRN_MATH double select(bool mask, double a, double b) {
  return mask ? a : b;
}
CAIRN_MATH float fma(float a, float b, float c) {
  return ::fmaf(a, b, c);
}
CAIRN_MATH double fma(double a, double b, double c) {
  return ::fma(a, b, c);
}
CAIRN_MATH float exp(float x) {
  return ::expf(x);
}
CAIRN_MATH double exp(double x) {
  return ::exp(x);
}
CAIRN_MATH float log(float x) {
  return ::logf(x);
}
CAIRN_MATH double log(double x) {
  return ::log(x);
}
CAIRN_MATH float log1p(float x) {
  return ::log1pf(x);
}
CAIRN_MATH double log1p(double x) {
  return ::log1p(x);
}
CAIRN_MATH float tanh(float x) {
  return ::tanhf(x);
}
CAIRN_MATH double tanh(double x) {
  return ::tanh(x);
}
CAIRN_MATH float sqrt(float x) {
  return ::sqrtf(x);
}
CAIRN_MATH double sqrt(double x) {
  return ::sqrt(x);
}
CAIRN_MATH float abs(float x) {
  return ::fabsf(x);
}
CAIRN_MATH double abs(double x) {
  return ::fabs(x);
}
CAIRN_MATH float pow(float x, float y) {
  return ::powf(x, y);
}
CAIRN_MATH double pow(double x, double y) {
  return ::pow(x, y);
}

CAIRN_MATH float atan2(float y, float x) {
  return ::atan2f(y, x);
}
CAIRN_MATH double atan2(double y, double x) {
  return ::atan2(y, x);
}

/// The larger and the smaller; NaN where either is.
CAIRN_MATH float max(float a, float b) {
  return a > b || a != a ? a : b;
}
CAIRN_MATH double max(double a, double b) {
  return a > b || a != a ? a : b;
}
CAIRN_MATH float min(float a, float b) {
  return a < b || a != a ? a : b;
}
CAIRN_MATH double min(double a, double b) {
  return a < b || a != a ? a : b;
}

/// The standard normal distribution at x: cdf(x) = (1 + erf(x / sqrt 2)) / 2 and density(x) =
/// exp(-x^2 / 2) / sqrt(2 pi).
template <class V>
struct Normal {
  V cdf, density;
};
CAIRN_MATH Normal<float> normal_distribution(float x) {
  return {0.5f * ::erfcf(-0.70710678f * x), 0.39894228f * ::expf(-0.5f * x * x)};
}
CAIRN_MATH Normal<double> normal_distribution(double x) {
  return {0.5 * ::erfc(-0.70710678118654752 * x), 0.39894228040143268 * ::exp(-0.5 * x * x)};
}

CAIRN_MATH_END
#endif
