// How the values of a tensor are distributed: each power of two is divided in eight, as the first
// three bits of an f32's fraction divide it.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::observe {

struct Histogram {
  /// `scale` divides each value first.
  static Histogram of(const Tensor& tensor, double scale);

  /// Those that are finite, from the lowest: how many lie between the limit before and this one.
  /// The first one's count is 0.
  struct Limit {
    double value = 0;
    std::int64_t count = 0;
  };
  std::vector<Limit> limits;
  /// How many have a magnitude in [2^exponent, 2^(exponent + 1)), by exponent.
  std::map<int, std::int64_t> octaves;
  std::int64_t count = 0, not_finite = 0;  // count: of those that are finite
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  double sum = 0, squares = 0;
};

/// A parameter in a step.
struct LayerRecord {
  std::int64_t step = 0;
  double time = 0;  // seconds since 1970
  std::string name;
  Histogram weights, gradients;  // gradients unscaled; count 0: there are none
  DType dtype = DType::f32;      // of the gradient as it lies, with its scale
  /// How often its largest magnitude could double within that dtype; below 0: some overflowed.
  double bits_left = 0;
};
LayerRecord layer_record(const NamedTensor& parameter, std::int64_t step, double time);

}  // namespace cairn::observe
