// Optimizers on tensors of Apex's sizes against double precision: weights and gradients are drawn
// from a counter, so that the reference needs no memory of its own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cairn/core/error.h"
#include "cairn/core/parallel_for.h"
#include "cairn/core/tensor.h"
#include "cairn/kernels/elementwise.h"
#include "cairn/optim/optimizer.h"
#include "support/tensors.h"

namespace cairn::conformance {

inline constexpr std::int64_t kGrain = 1 << 15;

/// In [0, 1), as torch.rand.
inline float uniform(std::uint64_t stream, std::int64_t index) {
  std::uint64_t x = (stream << 40) + static_cast<std::uint64_t>(index);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return static_cast<float>((x ^ (x >> 31)) >> 40) * 0x1p-24f;
}

inline double rounded(double value, DType dtype) {
  const auto x = static_cast<float>(value);
  if (dtype == DType::f16) return static_cast<float>(core::Half(x));
  if (dtype == DType::bf16) return static_cast<float>(core::BFloat16(x));
  return x;
}

struct Differences {
  double most = 0.0, most_relative = 0.0;
  std::int64_t not_close = 0;  // by torch.testing.assert_close
};

/// Weights and gradients of a list of tensors in one dtype.
class ManyElements {
 public:
  ManyElements(const std::vector<Shape>& shapes, DType dtype,
               Device device = core::default_device())
      : dtype_(dtype), device_(device) {
    for (std::size_t t = 0; t < shapes.size(); ++t) {
      Tensor tensor = Tensor::empty(shapes[t], dtype, device);
      write(tensor, [t](std::int64_t i) { return uniform(t, i); });
      tensor.set_requires_grad(true);
      parameters_.push_back({core::str("p", t), tensor});
    }
  }

  const NamedTensors& parameters() const { return parameters_; }
  DType dtype() const { return dtype_; }
  double weight(std::size_t t, std::int64_t i) const { return rounded(uniform(t, i), dtype_); }
  double gradient(std::size_t t, std::int64_t i, int step) const {
    return rounded(uniform(100 * static_cast<std::uint64_t>(step + 1) + t, i), dtype_);
  }

  void write_gradients(int step) const {
    for (std::size_t t = 0; t < parameters_.size(); ++t) {
      core::GradientSlot& slot = parameters_[t].tensor.gradient_slot();
      if (!slot.memory().defined()) slot.set_own(Tensor::empty_like(parameters_[t].tensor));
      const std::uint64_t stream = 100 * static_cast<std::uint64_t>(step + 1) + t;
      write(slot.memory(), [stream](std::int64_t i) { return uniform(stream, i); });
      slot.mark_written();
    }
  }
  void train(optim::Optimizer& optimizer, int steps, double scale = 1.0) const {
    for (int k = 0; k < steps; ++k) {
      write_gradients(k);
      EXPECT_TRUE(optimizer.step({.gradient_scale = scale}).applied);
    }
  }

  /// Of a gradient, or of all of one step.
  double norm(std::size_t t, int step) const {
    return std::sqrt(sum(parameters_[t].tensor.numel(), [&](std::int64_t i) {
      const double g = gradient(t, i, step);
      return g * g;
    }));
  }
  double norm(int step) const {
    double all = 0.0;
    for (std::size_t t = 0; t < parameters_.size(); ++t) all += norm(t, step) * norm(t, step);
    return std::sqrt(all);
  }

  template <class F>
  static double sum(std::int64_t n, const F& f) {
    std::vector<double> parts(static_cast<std::size_t>((n + kGrain - 1) / kGrain));
    core::parallel_for(n, kGrain, [&](std::int64_t begin, std::int64_t end) {
      double part = 0.0;
      for (std::int64_t i = begin; i < end; ++i) part += f(i);
      parts[static_cast<std::size_t>(begin / kGrain)] = part;
    });
    double all = 0.0;
    for (const double part : parts) all += part;
    return all;
  }

  /// The true weights (masters, where there are some) against expected(t, i); assert_close's
  /// default tolerances of `tolerance`.
  template <class Expected>
  Differences compare(const Expected& expected, DType tolerance) const {
    Differences all;
    for (std::size_t t = 0; t < parameters_.size(); ++t) {
      const auto at = [&](std::int64_t i) { return expected(t, i); };
      compare_one(parameters_[t].tensor, at, tolerance, all);
    }
    return all;
  }
  template <class Expected>
  Differences compare_tensor(std::size_t t, const Expected& expected, DType tolerance) const {
    Differences all;
    compare_one(parameters_[t].tensor, expected, tolerance, all);
    return all;
  }

 private:
  template <class F>
  void write(const Tensor& x, const F& value) const {
    const Tensor host = Tensor::empty(x.shape());
    float* data = host.data<float>();
    core::parallel_for(x.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) data[i] = value(i);
    });
    kernels::copy(host, x);
  }

  template <class Expected>
  static void compare_one(const Tensor& x, const Expected& expected, DType tolerance,
                          Differences& all) {
    const double relative = tolerance == DType::f16    ? 1e-3
                            : tolerance == DType::bf16 ? 1.6e-2
                                                       : 1.3e-6;
    const Tensor host = Tensor::empty(x.shape());
    kernels::copy(kernels::master_value(x), host);
    const float* data = host.data<float>();
    std::vector<Differences> parts(static_cast<std::size_t>((x.numel() + kGrain - 1) / kGrain));
    core::parallel_for(x.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      Differences part;
      for (std::int64_t i = begin; i < end; ++i) {
        const double e = expected(i), d = std::abs(static_cast<double>(data[i]) - e);
        part.most = std::max(part.most, d);
        if (e != 0) part.most_relative = std::max(part.most_relative, d / std::abs(e));
        part.not_close += !(d <= 1e-5 + relative * std::abs(e));
      }
      parts[static_cast<std::size_t>(begin / kGrain)] = part;
    });
    for (const Differences& part : parts) {
      all.most = std::max(all.most, part.most);
      all.most_relative = std::max(all.most_relative, part.most_relative);
      all.not_close += part.not_close;
    }
  }

  DType dtype_;
  Device device_;
  NamedTensors parameters_;
};

/// Apex's tolerance of its fused optimizers.
inline void expect_fused(const Differences& differences) {
  EXPECT_LE(differences.most, 1e-3);
  EXPECT_LE(differences.most_relative, 1.0);
}

inline constexpr int kIterations = 7;
inline constexpr std::int64_t kElements = 278011;
inline const std::vector<Shape> kManySizes = {
    {4096, 1024}, {4096}, {4096, 2048}, {32320, 1024}, {1}};

}  // namespace cairn::conformance
