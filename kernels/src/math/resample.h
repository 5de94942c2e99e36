// Which pixels along one dimension resampling reads, and their weights; for the CPU's loops and for
// CUDA. Positions are fractions of integers, so forward and backward agree about every pixel.
#pragma once

#include <cstdint>

#include "cairn/core/half.h"
#include "cairn/kernels/resample.h"

namespace cairn::kernels {

/// From `in` pixels to `out`.
class ResampleAxis {
 public:
  struct Range {
    std::int64_t begin, end;
  };

  ResampleAxis(const ResampleOptions& options, std::int64_t in, std::int64_t out)
      : mode_(options.mode), aligned_(options.align_corners), in_(in), out_(out) {}

  /// The input's pixels that output pixel o reads.
  CAIRN_HOST_DEVICE Range sources(std::int64_t o) const {
    const std::int64_t first = quotient(mode_ == ResampleMode::bilinear ? position(o) : o * in_,
                                        mode_ == ResampleMode::bilinear ? unit() : out_);
    if (mode_ == ResampleMode::nearest) return {first, first + 1};
    if (mode_ == ResampleMode::area) return {first, ceiling((o + 1) * in_, out_)};
    return {first, first + 2 < in_ ? first + 2 : in_};
  }
  /// The output's pixels that read input pixel i; bilinear: and some beside them, of weight 0.
  CAIRN_HOST_DEVICE Range targets(std::int64_t i) const {
    if (mode_ == ResampleMode::nearest)
      return {ceiling(i * out_, in_), ceiling((i + 1) * out_, in_)};
    if (mode_ == ResampleMode::area) return {quotient(i * out_, in_), ceiling((i + 1) * out_, in_)};
    const std::int64_t above = (i - 1) * out_, below = (i + 2) * out_;
    return {above <= in_ ? 0 : quotient(above, in_) - 1,
            i + 1 >= in_ ? out_ : lesser(ceiling(below, in_) + 1, out_)};
  }
  template <class A>  // float or double
  CAIRN_HOST_DEVICE A weight(std::int64_t o, std::int64_t i) const {
    if (mode_ == ResampleMode::nearest) return A(1);
    if (mode_ == ResampleMode::area) {
      const Range range = sources(o);
      return A(1) / static_cast<A>(range.end - range.begin);
    }
    const std::int64_t apart = position(o) - i * unit(), distance = apart < 0 ? -apart : apart;
    if (distance >= unit()) return A(0);
    return static_cast<A>(unit() - distance) / static_cast<A>(unit());
  }

 private:
  // Bilinear: output pixel o lies at position(o) / unit() among the input's.
  CAIRN_HOST_DEVICE std::int64_t unit() const {
    if (!aligned_) return 2 * out_;
    return out_ > 1 ? out_ - 1 : 1;
  }
  CAIRN_HOST_DEVICE std::int64_t position(std::int64_t o) const {
    const std::int64_t p = aligned_ ? o * (in_ - 1) : (2 * o + 1) * in_ - out_;
    return p < 0 ? 0 : lesser(p, (in_ - 1) * unit());
  }
  static CAIRN_HOST_DEVICE std::int64_t lesser(std::int64_t a, std::int64_t b) {
    return a < b ? a : b;
  }
  static CAIRN_HOST_DEVICE std::int64_t quotient(std::int64_t a, std::int64_t b) {
    if (((a | b) >> 32) != 0) return a / b;
    return static_cast<std::int64_t>(static_cast<std::uint32_t>(a) /  // several times faster
                                     static_cast<std::uint32_t>(b));
  }
  static CAIRN_HOST_DEVICE std::int64_t ceiling(std::int64_t a, std::int64_t b) {
    return quotient(a + b - 1, b);
  }

  ResampleMode mode_;
  bool aligned_;
  std::int64_t in_, out_;
};

}  // namespace cairn::kernels
