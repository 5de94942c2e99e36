// Batch norm and its gradients in double precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "cairn/core/shape.h"

namespace cairn::test {

using Values = std::vector<double>;

/// Batch norm of a whole batch [N, C, ...], its loss sum(y * dy), and all gradients, in double.
struct BatchNormReference {
  Shape shape;
  Values x, z, dy, weight, bias;  // z: added before the ReLU; empty: nothing
  bool relu = false;
  double eps = 1e-5;
  Values mean, var, y, dx, dweight, dbias;

  std::size_t channels() const { return static_cast<std::size_t>(shape[1]); }
  std::size_t channel(std::size_t i) const {
    const auto plane = static_cast<std::size_t>(shape.numel() / (shape[0] * shape[1]));
    return i / plane % channels();
  }
  double count() const { return static_cast<double>(shape.numel() / shape[1]); }

  void run() {
    mean.assign(channels(), 0), var = dweight = dbias = mean;
    for (std::size_t i = 0; i < x.size(); ++i) mean[channel(i)] += x[i] / count();
    for (std::size_t i = 0; i < x.size(); ++i) {
      var[channel(i)] += std::pow(x[i] - mean[channel(i)], 2) / count();
    }
    Values xhat(x.size()), g = dy;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t c = channel(i);
      xhat[i] = (x[i] - mean[c]) / std::sqrt(var[c] + eps);
      double v = xhat[i] * weight[c] + bias[c] + (z.empty() ? 0.0 : z[i]);
      if (relu && v <= 0.0) v = g[i] = 0.0;
      y.push_back(v);
      dweight[c] += g[i] * xhat[i];
      dbias[c] += g[i];
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t c = channel(i);
      const double mean_part = (dbias[c] + xhat[i] * dweight[c]) / count();
      dx.push_back((g[i] - mean_part) * weight[c] / std::sqrt(var[c] + eps));
    }
  }
};

/// Samples [begin, end) of values of that shape.
inline Values rows_of(const Values& values, const Shape& shape, std::int64_t begin,
                      std::int64_t end) {
  const std::int64_t row = shape.numel() / shape[0];
  return {values.begin() + begin * row, values.begin() + end * row};
}

}  // namespace cairn::test
