// The pixels along one dimension that each pixel of a resampled image, or of its gradient, reads.
#pragma once

#include <vector>

#include "math/resample.h"

namespace cairn::kernels {

class Taps {
 public:
  struct Pixel {
    std::int64_t begin, count;
    const double* weights;
  };

  static Taps forward(const ResampleAxis& axis, std::int64_t pixels) {
    Taps taps;
    for (std::int64_t o = 0; o < pixels; ++o) {
      taps.add(axis.sources(o), [&](std::int64_t i) { return axis.weight<double>(o, i); });
    }
    return taps;
  }
  static Taps backward(const ResampleAxis& axis, std::int64_t pixels) {
    Taps taps;
    for (std::int64_t i = 0; i < pixels; ++i) {
      taps.add(axis.targets(i), [&](std::int64_t o) { return axis.weight<double>(o, i); });
    }
    return taps;
  }

  Pixel of(std::int64_t pixel) const {
    const auto p = static_cast<std::size_t>(pixel);
    const std::size_t end = p + 1 < pixels_.size() ? pixels_[p + 1].weights : weights_.size();
    return {pixels_[p].begin, static_cast<std::int64_t>(end - pixels_[p].weights),
            weights_.data() + pixels_[p].weights};
  }
  std::int64_t total() const { return static_cast<std::int64_t>(weights_.size()); }

 private:
  template <class Weight>
  void add(ResampleAxis::Range range, const Weight& weight) {
    pixels_.push_back({range.begin, weights_.size()});
    for (std::int64_t i = range.begin; i < range.end; ++i) weights_.push_back(weight(i));
  }

  struct Start {
    std::int64_t begin;
    std::size_t weights;  // where they start
  };
  std::vector<Start> pixels_;
  std::vector<double> weights_;
};

}  // namespace cairn::kernels
