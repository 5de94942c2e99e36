// How the elements of a tensor add up to its p-norm, and what else a check counts; for the CPU's
// scalar loops and for CUDA.
#pragma once

#include <cmath>
#include <cstdint>

#include "cairn/core/half.h"
#include "cairn/kernels/multi_tensor.h"

namespace cairn::kernels {

/// |x|^p, and how two of them join: their sum, or (p infinite) the larger.
class PowerSum {
 public:
  enum class Kind : std::uint8_t { absolutes, squares, largest, powers };

  explicit PowerSum(double p) : kind_(kind_of(p)), p_(p) {}
  Kind kind() const { return kind_; }

  CAIRN_HOST_DEVICE double of(double x) const {
    switch (kind_) {
      case Kind::squares:
        return x * x;
      case Kind::powers:
        return ::pow(::fabs(x), p_);
      default:
        return ::fabs(x);
    }
  }
  CAIRN_HOST_DEVICE double join(double a, double b) const {
    if (kind_ == Kind::largest) return a > b ? a : b;
    return a + b;
  }

 private:
  static Kind kind_of(double p) {
    if (p == 1.0) return Kind::absolutes;
    if (p == 2.0) return Kind::squares;
    return std::isinf(p) ? Kind::largest : Kind::powers;
  }
  Kind kind_;
  double p_;
};

/// The same of p = 2 alone, for loops that would ask for the kind at every element.
struct Squares {
  CAIRN_HOST_DEVICE double of(double x) const { return x * x; }
  CAIRN_HOST_DEVICE double join(double a, double b) const { return a + b; }
};

/// A TensorCheck of some elements, as shared memory and device buffers can hold it.
struct CheckPart {
  double power_sum;
  std::int64_t nonfinite, nan;

  template <class Value, class Power>
  CAIRN_HOST_DEVICE void see(Value x, const Power& power) {
    if (x - x == Value(0)) {  // false for inf and NaN
      power_sum = power.join(power_sum, power.of(static_cast<double>(x)));
    } else {
      ++nonfinite;
      nan += x != x;
    }
  }
};
static_assert(sizeof(CheckPart) == sizeof(TensorCheck) && sizeof(CheckPart) == 24);

template <class Power>
struct JoinParts {
  Power power;
  CAIRN_HOST_DEVICE CheckPart operator()(const CheckPart& a, const CheckPart& b) const {
    return {power.join(a.power_sum, b.power_sum), a.nonfinite + b.nonfinite, a.nan + b.nan};
  }
};

}  // namespace cairn::kernels
