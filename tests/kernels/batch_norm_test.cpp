#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cairn/kernels/batch_norm.h"
#include "cairn/kernels/elementwise.h"
#include "support/message_of.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

using test::epsilon;
using test::expect_close;
using test::random_channels_last;
using test::random_tensor;
using testing::HasSubstr;
using Values = std::vector<double>;

constexpr double kEps = 1e-5;
constexpr DType kDtypes[] = {DType::f32, DType::f16, DType::bf16, DType::f64};
const Shape kShapes[] = {{2, 3},          {57, 33},      {1300, 5},   {2, 1, 3, 5},
                         {3, 16, 14, 13}, {2, 40, 1, 9}, {1, 3, 1, 2}};

// Everything in row-major order, in double.
struct BatchNormReference {
  Shape shape;
  Values mean, var, y, dx, dweight, dbias;

  std::size_t channel(std::size_t i) const {
    const std::int64_t plane = shape.dims() == 4 ? shape[2] * shape[3] : 1;
    return static_cast<std::size_t>(static_cast<std::int64_t>(i) / plane % shape[1]);
  }
  double per_channel() const { return static_cast<double>(shape.numel() / shape[1]); }

  void take_moments(const Values& x) {
    const auto channels = static_cast<std::size_t>(shape[1]);
    mean.assign(channels, 0.0), var.assign(channels, 0.0);
    for (std::size_t i = 0; i < x.size(); ++i) mean[channel(i)] += x[i] / per_channel();
    for (std::size_t i = 0; i < x.size(); ++i) {
      var[channel(i)] += std::pow(x[i] - mean[channel(i)], 2) / per_channel();
    }
  }
  double normalised(const Values& x, std::size_t i) const {
    return (x[i] - mean[channel(i)]) / std::sqrt(var[channel(i)] + kEps);
  }
  void apply(const Values& x, const Values& weight, const Values& bias, bool relu) {
    y.clear();
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double v = normalised(x, i) * weight[channel(i)] + bias[channel(i)];
      y.push_back(relu ? std::max(v, 0.0) : v);
    }
  }
  // dy is masked already.
  void differentiate(const Values& x, const Values& weight, const Values& dy,
                     bool batch_statistics) {
    dweight.assign(mean.size(), 0.0), dbias.assign(mean.size(), 0.0), dx.clear();
    for (std::size_t i = 0; i < x.size(); ++i) {
      dweight[channel(i)] += dy[i] * normalised(x, i);
      dbias[channel(i)] += dy[i];
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t c = channel(i);
      double g = dy[i];
      if (batch_statistics) g -= (dbias[c] + normalised(x, i) * dweight[c]) / per_channel();
      dx.push_back(g * weight[c] / std::sqrt(var[c] + kEps));
    }
  }
};

class BatchNorm : public testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  Tensor random(const Shape& shape, DType dtype, std::uint64_t seed, double low = -1.0,
                double high = 1.0) const {
    return random_tensor(shape, dtype, device(), seed, low, high);
  }
  Tensor image(const Shape& shape, DType dtype, std::uint64_t seed, bool last, double low = -1.0,
               double high = 1.0) const {
    return last && shape.dims() == 4 ? random_channels_last(shape, dtype, device(), seed, low, high)
                                     : random(shape, dtype, seed, low, high);
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, BatchNorm, testing::ValuesIn(test::devices()), test::device_name);

template <class F>
void for_all(F&& f) {
  for (const Shape& shape : kShapes)
    for (const DType dtype : kDtypes)
      for (const bool last : {false, true})
        for (const bool relu : {false, true})
          f(shape, dtype, last, relu,
            core::str(shape, " ", core::name(dtype), last ? " channels-last" : " row-major",
                      relu ? " relu" : ""));
}

TEST_P(BatchNorm, TrainingEqualsReference) {
  for_all([&](const Shape& shape, DType dtype, bool last, bool relu, const std::string& what) {
    const Shape channels{shape[1]};
    const Tensor x = image(shape, dtype, 1, last, 2.0, 5.0), y = image(shape, dtype, 2, last);
    const Tensor weight = random(channels, DType::f32, 3), bias = random(channels, DType::f32, 4);
    const Tensor running_mean = random(channels, DType::f32, 5),
                 running_var = random(channels, DType::f32, 6, 0.5, 2.0);
    const Tensor mean = random(channels, DType::f32, 7), rstd = random(channels, DType::f32, 8);
    Values expected_mean = running_mean.to_vector<double>(),
           expected_var = running_var.to_vector<double>();
    BatchNormReference r{shape};
    r.take_moments(x.to_vector<double>());
    r.apply(x.to_vector<double>(), weight.to_vector<double>(), bias.to_vector<double>(), relu);
    Values rstds;
    for (std::size_t c = 0; c < r.mean.size(); ++c) {
      const double unbiased = r.var[c] * r.per_channel() / (r.per_channel() - 1.0);
      expected_mean[c] = 0.75 * expected_mean[c] + 0.25 * r.mean[c];
      expected_var[c] = 0.75 * expected_var[c] + 0.25 * unbiased;
      rstds.push_back(1.0 / std::sqrt(r.var[c] + kEps));
    }
    batch_norm(x, weight, bias, running_mean, running_var, y, mean, rstd,
               {.eps = kEps, .momentum = 0.25, .relu = relu});
    expect_close(mean, r.mean, 3e-7, 0.0, what + " mean");
    expect_close(rstd, rstds, 3e-6, 0.0, what + " rstd");
    expect_close(running_mean, expected_mean, 3e-7, 1e-6, what + " running mean");
    expect_close(running_var, expected_var, 3e-6, 1e-6, what + " running var");
    // A nearly constant channel magnifies the mean's rounding by rstd.
    const double magnified = *std::max_element(rstds.begin(), rstds.end());
    expect_close(y, r.y, 1.01 * epsilon(dtype) + 5e-6, 1e-6 * (1.0 + magnified), what + " y");
  });
}

TEST_P(BatchNorm, BackwardEqualsReference) {
  for_all([&](const Shape& shape, DType dtype, bool last, bool relu, const std::string& what) {
    for (const bool batch_statistics : {true, false}) {
      const Shape channels{shape[1]};
      const Tensor x = image(shape, dtype, 1, last, 1.0, 3.0), y = image(shape, dtype, 2, last);
      const Tensor dy = image(shape, dtype, 3, last), dx = image(shape, dtype, 4, last);
      const Tensor weight = random(channels, DType::f32, 5, 0.5, 1.5);
      const Values vx = x.to_vector<double>(), vy = y.to_vector<double>();
      Values g = dy.to_vector<double>();
      for (std::size_t i = 0; i < g.size(); ++i) g[i] = relu && !(vy[i] > 0.0) ? 0.0 : g[i];
      BatchNormReference r{shape};
      r.take_moments(vx);
      r.differentiate(vx, weight.to_vector<double>(), g, batch_statistics);
      Values rstds;
      for (const double v : r.var) rstds.push_back(1.0 / std::sqrt(v + kEps));
      const Tensor mean = Tensor::from(r.mean, channels, DType::f32, device());
      const Tensor rstd = Tensor::from(rstds, channels, DType::f32, device());
      const Tensor dweight = random(channels, DType::f32, 6),
                   dbias = random(channels, DType::f32, 7);
      const double terms = 4.0 + r.per_channel(),
                   magnified = *std::max_element(rstds.begin(), rstds.end());
      const double tolerance = 4e-7 * terms * (1.0 + magnified);
      for (const bool accumulate : {false, true}) {
        batch_norm_backward(x, relu ? TensorView(y) : TensorView(), weight, mean, rstd, dy, dx,
                            dweight, dbias, {.training = batch_statistics, .relu = relu},
                            accumulate);
        Values total = r.dweight, total_bias = r.dbias;
        for (std::size_t c = 0; c < total.size(); ++c) {
          total[c] *= accumulate ? 2.0 : 1.0;
          total_bias[c] *= accumulate ? 2.0 : 1.0;
        }
        expect_close(dweight, total, 1e-6, tolerance, what + " dweight");
        expect_close(dbias, total_bias, 1e-6, tolerance, what + " dbias");
        expect_close(dx, r.dx, 1.5 * epsilon(dtype), 1e-6 * magnified * (1.0 + magnified),
                     what + " dx");
      }
    }
  });
}

TEST_P(BatchNorm, EvaluationUsesRunningStatistics) {
  for_all([&](const Shape& shape, DType dtype, bool last, bool relu, const std::string& what) {
    const Shape channels{shape[1]};
    const Tensor x = image(shape, dtype, 1, last), y = image(shape, dtype, 2, last);
    const Tensor weight = random(channels, dtype, 3), bias = random(channels, dtype, 4);
    const Tensor mean = random(channels, DType::f32, 5),
                 var = random(channels, DType::f32, 6, 0.5, 2.0);
    BatchNormReference r{shape, mean.to_vector<double>(), var.to_vector<double>()};
    r.apply(x.to_vector<double>(), weight.to_vector<double>(), bias.to_vector<double>(), relu);
    batch_norm_eval(x, weight, bias, mean, var, y, {.eps = kEps, .relu = relu});
    expect_close(y, r.y, 1.01 * epsilon(dtype) + 1e-6, 1e-6, what);
  });
}

TEST_P(BatchNorm, OptionalOperandsMayBeAbsent) {
  const Tensor x = random({40, 6}, DType::bf16, 1), y = random({40, 6}, DType::bf16, 2),
               dx = random({40, 6}, DType::bf16, 3);
  const Tensor mean = random({6}, DType::f32, 4), rstd = random({6}, DType::f32, 5);
  BatchNormReference r{x.shape()};
  r.take_moments(x.to_vector<double>());
  r.apply(x.to_vector<double>(), Values(6, 1.0), Values(6, 0.0), false);
  batch_norm(x, {}, {}, {}, {}, y, mean, rstd, {});
  expect_close(y, r.y, 1.01 * epsilon(DType::bf16), 1e-5, "forward");
  r.differentiate(x.to_vector<double>(), Values(6, 1.0), y.to_vector<double>(), true);
  batch_norm_backward(x, {}, {}, mean, rstd, y, dx, {}, {}, {});
  expect_close(dx, r.dx, 1.01 * epsilon(DType::bf16), 1e-4, "backward");
}

// The mean is far from zero: sums of squares would cancel.
TEST_P(BatchNorm, LargeMeanKeepsTheVariance) {
  const Tensor x = random({5000, 20}, DType::f32, 1, 1000.0, 1001.0),
               y = random({5000, 20}, DType::f32, 2);
  const Tensor mean = random({20}, DType::f32, 3), rstd = random({20}, DType::f32, 4);
  BatchNormReference r{x.shape()};
  r.take_moments(x.to_vector<double>());
  Values rstds;
  for (const double v : r.var) rstds.push_back(1.0 / std::sqrt(v + kEps));
  batch_norm(x, {}, {}, {}, {}, y, mean, rstd, {.eps = kEps});
  expect_close(mean, r.mean, 1e-7, 0.0, "mean");
  expect_close(rstd, rstds, 3e-6, 0.0, "rstd");
}

TEST_P(BatchNorm, SameBitsForAnyThreadCount) {
  if (device().is_cuda()) GTEST_SKIP() << "processor threads";
  const int threads = core::num_threads();
  const Tensor x = image({6, 12, 33, 31}, DType::f32, 1, true),
               y = image({6, 12, 33, 31}, DType::f32, 2, true);
  const Tensor mean = random({12}, DType::f32, 3), rstd = random({12}, DType::f32, 4);
  const Tensor dx = image({6, 12, 33, 31}, DType::f32, 5, true),
               dweight = random({12}, DType::f32, 6);
  std::vector<std::vector<double>> results;
  for (const int n : {1, 2, 3}) {
    core::set_num_threads(n);
    batch_norm(x, {}, {}, {}, {}, y, mean, rstd, {.relu = true});
    batch_norm_backward(x, y, {}, mean, rstd, x, dx, dweight, {}, {.relu = true});
    Values all = y.to_vector<double>();
    for (const Tensor& t : {dx, mean, rstd, dweight}) {
      const Values more = t.to_vector<double>();
      all.insert(all.end(), more.begin(), more.end());
    }
    results.push_back(all);
  }
  core::set_num_threads(threads);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST_P(BatchNorm, EmptyBatch) {
  const Tensor x = random({0, 3, 4, 4}, DType::f32, 1), mean = random({3}, DType::f32, 2),
               rstd = random({3}, DType::f32, 3);
  const Tensor running = random({3}, DType::f32, 4), dweight = random({3}, DType::f32, 5);
  batch_norm(x, {}, {}, running, running, x, mean, rstd, {.eps = 0.25});
  EXPECT_THAT(mean.to_vector(), testing::Each(0.0));
  EXPECT_THAT(rstd.to_vector(), testing::Each(2.0));
  EXPECT_EQ(running.to_vector(), random({3}, DType::f32, 4).to_vector());
  batch_norm_backward(x, {}, {}, mean, rstd, x, x, dweight, {}, {});
  EXPECT_THAT(dweight.to_vector(), testing::Each(0.0));
  EXPECT_NO_THROW(batch_norm_eval(x, {}, {}, mean, rstd, x, {}));
}

// The stages that ranks share a batch by, on parts of one batch: as the whole batch at once.
TEST_P(BatchNorm, MomentsOfPartsMergeToThoseOfTheWhole) {
  for_all([&](const Shape& shape, DType dtype, bool last, bool, const std::string& what) {
    const std::int64_t channels = shape[1], first = shape[0] / 3;
    const Tensor x = image(shape, dtype, 1, last, 40.0, 41.0);
    const std::int64_t ends[] = {0, first, first, shape[0]};  // a part in the middle is empty
    const Tensor parts = random({3, 2 * channels + 1}, DType::f32, 2);
    for (int r = 0; r < 3; ++r) {
      batch_norm_moments(x.view().slice(0, ends[r], ends[r + 1]), parts.view().select(0, r));
    }
    const Tensor running_mean = random({channels}, dtype, 5),
                 running_var = random({channels}, DType::f32, 6, 0.5, 2.0);
    Values expected_mean = running_mean.to_vector<double>(),
           expected_var = running_var.to_vector<double>(), rstds;
    BatchNormReference r{shape};
    r.take_moments(x.to_vector<double>());
    for (std::size_t c = 0; c < r.mean.size(); ++c) {
      expected_mean[c] = 0.75 * expected_mean[c] + 0.25 * r.mean[c];
      expected_var[c] =
          0.75 * expected_var[c] + 0.25 * r.var[c] * r.per_channel() / (r.per_channel() - 1.0);
      rstds.push_back(1.0 / std::sqrt(r.var[c] + kEps));
    }
    const Tensor mean = random({channels}, DType::f32, 7), var = random({channels}, DType::f32, 8),
                 rstd = random({channels}, DType::f32, 9), count = random({1}, DType::f32, 10);
    batch_norm_merge(parts, running_mean, running_var, mean, var, rstd, count,
                     {.eps = kEps, .momentum = 0.25});
    EXPECT_EQ(count.to_vector(), Values{r.per_channel()}) << what;
    expect_close(mean, r.mean, 3e-7, 0.0, what + " mean");
    // The f32 means of the parts are near 40: their rounding is squared, or times a deviation.
    expect_close(var, r.var, 3e-5, 1e-10, what + " var");
    expect_close(rstd, rstds, 3e-5, 1e-3, what + " rstd");
    expect_close(running_mean, expected_mean, epsilon(dtype) + 3e-7, 0.0, what + " running mean");
    expect_close(running_var, expected_var, 3e-5, 1e-6, what + " running var");
  });
}

TEST_P(BatchNorm, MergingNothingLeavesTheRunningStatistics) {
  const Tensor parts = Tensor::zeros({2, 7}, DType::f32, device());
  const Tensor running = random({3}, DType::f32, 1), mean = random({3}, DType::f32, 2),
               var = random({3}, DType::f32, 3), rstd = random({3}, DType::f32, 4),
               count = random({1}, DType::f32, 5);
  batch_norm_merge(parts, running, running, mean, var, rstd, count, {.eps = 0.25});
  EXPECT_EQ(running.to_vector(), random({3}, DType::f32, 1).to_vector());
  EXPECT_THAT(mean.to_vector(), testing::Each(0.0));
  EXPECT_THAT(rstd.to_vector(), testing::Each(2.0));
  EXPECT_THAT(count.to_vector(), testing::Each(0.0));
}

TEST_P(BatchNorm, BackwardOfPartsEqualsThatOfTheWhole) {
  for_all([&](const Shape& shape, DType dtype, bool last, bool relu, const std::string& what) {
    const Shape channels{shape[1]};
    const Tensor x = image(shape, dtype, 1, last, 1.0, 3.0), y = image(shape, dtype, 2, last);
    const Tensor dy = image(shape, dtype, 3, last), dx = image(shape, dtype, 4, last);
    const Tensor weight = random(channels, DType::f32, 5, 0.5, 1.5);
    const Values vx = x.to_vector<double>(), vy = y.to_vector<double>();
    Values g = dy.to_vector<double>(), rstds;
    for (std::size_t i = 0; i < g.size(); ++i) g[i] = relu && !(vy[i] > 0.0) ? 0.0 : g[i];
    BatchNormReference r{shape};
    r.take_moments(vx);
    r.differentiate(vx, weight.to_vector<double>(), g, true);
    for (const double v : r.var) rstds.push_back(1.0 / std::sqrt(v + kEps));
    const Tensor mean = Tensor::from(r.mean, channels, DType::f32, device());
    const Tensor rstd = Tensor::from(rstds, channels, DType::f32, device());
    const Tensor sum_gx = random(channels, DType::f32, 6), sum_g = random(channels, DType::f32, 7);
    const Tensor count = Tensor::full({1}, r.per_channel(), DType::f32, device());
    const auto part = [&](const Tensor& t, int i) {
      const std::int64_t cut = shape[0] / 2;
      return t.view().slice(0, i == 0 ? 0 : cut, i == 0 ? cut : shape[0]);
    };
    const auto result = [&](int i) { return relu ? part(y, i) : TensorView(); };
    for (int i = 0; i < 2; ++i) {
      batch_norm_backward(part(x, i), result(i), weight, mean, rstd, part(dy, i), {}, sum_gx, sum_g,
                          {.relu = relu}, i > 0);
    }
    const double magnified = *std::max_element(rstds.begin(), rstds.end());
    const double tolerance = 4e-7 * (4.0 + r.per_channel()) * (1.0 + magnified);
    expect_close(sum_gx, r.dweight, 1e-6, tolerance, what + " sum of g xhat");
    expect_close(sum_g, r.dbias, 1e-6, tolerance, what + " sum of g");
    binary(BinaryOp::div, sum_gx, count, sum_gx);
    binary(BinaryOp::div, sum_g, count, sum_g);
    for (int i = 0; i < 2; ++i) {
      batch_norm_backward_data(part(x, i), result(i), weight, mean, rstd, part(dy, i), sum_g,
                               sum_gx, part(dx, i), {.relu = relu});
    }
    expect_close(dx, r.dx, 1.5 * epsilon(dtype), 1e-6 * magnified * (1.0 + magnified),
                 what + " dx");
  });
}

TEST_P(BatchNorm, WrongInputIsNamed) {
  const Tensor x = random({4, 3}, DType::f32, 1), c = random({3}, DType::f32, 2),
               one = random({1, 3}, DType::f32, 3);
  EXPECT_THAT(message_of([&] { batch_norm(one, {}, {}, {}, {}, one, c, c, {}); }),
              HasSubstr("more than one value per channel to train on, got x [1, 3]"));
  EXPECT_THAT(message_of([&] { batch_norm(x, one, {}, {}, {}, x, c, c, {}); }),
              HasSubstr("weight of shape [3], got [1, 3]"));
  EXPECT_THAT(message_of([&] { batch_norm(c, {}, {}, {}, {}, c, c, c, {}); }),
              HasSubstr("[N, C] or [N, C, H, W], got shape [3]"));
  EXPECT_THAT(message_of([&] { batch_norm(x, {}, {}, {}, {}, one, c, c, {}); }),
              HasSubstr("y of shape [4, 3]"));
  EXPECT_THAT(message_of([&] { batch_norm_eval(x, {}, {}, {}, c, x, {}); }),
              HasSubstr("running_mean"));
  EXPECT_THAT(
      message_of([&] { batch_norm_backward(x, {}, {}, c, c, x, x, {}, {}, {.relu = true}); }),
      HasSubstr("defined y"));
  EXPECT_THAT(message_of([&] {
                batch_norm_backward(x, {}, {}, c, c, x, x, random({3}, DType::bf16, 1), {}, {});
              }),
              HasSubstr("dweight of dtype f32"));
  EXPECT_THAT(message_of([&] { batch_norm_moments(x, c); }), HasSubstr("part of shape [7]"));
  const Tensor parts = random({2, 7}, DType::f32, 4), count = random({1}, DType::f32, 5);
  EXPECT_THAT(message_of([&] { batch_norm_merge(x, {}, {}, c, c, c, count, {}); }),
              HasSubstr("contiguous parts [R, 7], got shape [4, 3]"));
  EXPECT_THAT(message_of([&] { batch_norm_merge(parts, {}, {}, c, c, count, count, {}); }),
              HasSubstr("rstd of shape [3]"));
  EXPECT_THAT(message_of([&] { batch_norm_backward_data(x, {}, {}, c, c, x, count, c, x, {}); }),
              HasSubstr("mean_g of shape [3]"));
}

}  // namespace
}  // namespace cairn::kernels
