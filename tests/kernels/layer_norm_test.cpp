#include <gtest/gtest.h>

#include <cmath>

#include "cairn/core/parallel_for.h"
#include "cairn/kernels/layer_norm.h"
#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;
using Values = std::vector<double>;

constexpr double kLayerNormEps = 1e-5;
const Shape kLayerNormShapes[] = {{0, 5}, {1, 1}, {3, 7}, {40, 65}, {5, 768}, {1300, 9}};

struct LayerNormReference {
  Values y, mean, rstd, dx, dweight, dbias;
};

// layer_norm where centred, else rms_norm (without bias).
LayerNormReference reference(const Values& x, const Values& weight, const Values& bias,
                             const Values& dy, const Shape& shape, bool centred) {
  const auto rows = static_cast<std::size_t>(shape[0]), width = static_cast<std::size_t>(shape[1]);
  const double n = static_cast<double>(width);
  LayerNormReference r{Values(x.size()), Values(rows),  Values(rows),
                       Values(x.size()), Values(width), Values(width)};
  for (std::size_t i = 0; i < rows; ++i) {
    const double *row = x.data() + i * width, *g = dy.data() + i * width;
    double mean = 0, variance = 0, sum = 0, dot = 0;
    for (std::size_t j = 0; j < width && centred; ++j) mean += row[j] / n;
    for (std::size_t j = 0; j < width; ++j) variance += (row[j] - mean) * (row[j] - mean) / n;
    const double rstd = 1 / std::sqrt(variance + kLayerNormEps);
    for (std::size_t j = 0; j < width; ++j) {
      const double normal = (row[j] - mean) * rstd;
      r.y[i * width + j] = normal * weight[j] + bias[j];
      r.dweight[j] += g[j] * normal;
      r.dbias[j] += g[j];
      sum += g[j] * weight[j] / n;
      dot += g[j] * weight[j] * normal / n;
    }
    for (std::size_t j = 0; j < width; ++j) {
      r.dx[i * width + j] =
          rstd * (g[j] * weight[j] - (centred ? sum : 0.0) - (row[j] - mean) * rstd * dot);
    }
    r.mean[i] = mean;
    r.rstd[i] = rstd;
  }
  return r;
}

DType statistic(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
// Of sums in f32 (f64), and of one rounding of a result; f64 as well as a plain f64 reference can
// tell.
double fine(DType dtype) {
  return dtype == DType::f64 ? 1e-14 : epsilon(DType::f32);
}
double coarse(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : 2 * epsilon(dtype);
}

class LayerNorm : public testing::TestWithParam<Device> {
 protected:
  Tensor tensor(const Values& values, DType dtype) const {
    return Tensor::from(values, {static_cast<std::int64_t>(values.size())}, dtype, GetParam());
  }
  Tensor filled(std::int64_t n, double value, DType dtype = DType::f32) const {
    return Tensor::full({n}, value, dtype, GetParam());
  }
};

TEST_P(LayerNorm, LayerAndRmsNormMatchTheReferenceInEveryDtypeAndLayout) {
  for (const Shape& shape : kLayerNormShapes) {
    for (DType dtype : kFloating) {
      for (DType weight_dtype : {dtype, statistic(dtype)}) {
        for (Layout layout : layouts(shape)) {
          for (bool centred : {true, false}) {
            SCOPED_TRACE(describe(shape, dtype, layout) + (centred ? " layer" : " rms"));
            const LaidOut x(random_values(shape.numel(), 1, -1, 5), shape, dtype, GetParam(),
                            layout);
            const LaidOut dy(random_values(shape.numel(), 2), shape, dtype, GetParam(), layout);
            const LaidOut y(shape, dtype, GetParam(), layout), dx(shape, dtype, GetParam(), layout);
            const Tensor weight = tensor(random_values(shape[1], 3, 0.5, 2), weight_dtype);
            const Tensor bias = tensor(
                centred ? random_values(shape[1], 4) : Values(static_cast<std::size_t>(shape[1])),
                weight_dtype);
            const Tensor mean = filled(shape[0], 9, statistic(dtype)),
                         rstd = filled(shape[0], 9, statistic(dtype));
            const Tensor dweight = filled(shape[1], 9, weight_dtype),
                         dbias = filled(shape[1], 9, weight_dtype);
            if (centred) {
              layer_norm(x, weight, bias, kLayerNormEps, y, mean, rstd);
              layer_norm_backward(x, weight, mean, rstd, dy, dx, dweight, dbias, false);
            } else {
              rms_norm(x, weight, kLayerNormEps, y, rstd);
              rms_norm_backward(x, weight, rstd, dy, dx, dweight, false);
            }
            const LayerNormReference r = reference(x.values(), weight.to_vector(), bias.to_vector(),
                                                   dy.values(), shape, centred);
            const double rows = static_cast<double>(std::max<std::int64_t>(1, shape[0]));
            expect_close(y.values(), r.y, coarse(dtype), 16 * fine(dtype));
            expect_close(rstd, r.rstd, 8 * fine(dtype), 0);
            if (centred) expect_close(mean, r.mean, 4 * fine(dtype), 4 * fine(dtype));
            expect_close(dx.values(), r.dx, coarse(dtype),
                         64 * fine(dtype) * (shape[1] == 1 ? 320 : 1));
            expect_close(dweight, r.dweight, coarse(weight_dtype), 16 * fine(dtype) * rows);
            if (centred) expect_close(dbias, r.dbias, coarse(weight_dtype), 4 * fine(dtype) * rows);
            EXPECT_TRUE(y.gaps_untouched() && dx.gaps_untouched());
          }
        }
      }
    }
  }
}

TEST_P(LayerNorm, WeightsBiasAndGradientsMayBeAbsent) {
  const Shape shape{6, 50};
  const Tensor x = Tensor::from(random_values(300, 1), shape, DType::f32, GetParam());
  const Tensor dy = Tensor::from(random_values(300, 2), shape, DType::f32, GetParam());
  const Tensor y = Tensor::empty_like(x), dx = Tensor::empty_like(x), mean = filled(6, 0),
               rstd = filled(6, 0);
  const Values ones(50, 1.0), zeros(50, 0.0);
  const LayerNormReference r = reference(x.to_vector(), ones, zeros, dy.to_vector(), shape, true);
  layer_norm(x, {}, {}, kLayerNormEps, y, mean, rstd);
  expect_close(y, r.y, 1e-6, 1e-6);
  layer_norm_backward(x, {}, mean, rstd, dy, dx, {}, {}, false);
  expect_close(dx, r.dx, 1e-6, 1e-6);
  const Tensor dbias = filled(50, 9);
  layer_norm_backward(x, {}, mean, rstd, dy, {}, {}, dbias, false);
  expect_close(dbias, r.dbias, 1e-6, 1e-6);
}

TEST_P(LayerNorm, AccumulatesWeightGradientsAndOverwritesDy) {
  const Shape shape{70, 33};
  const Tensor x = Tensor::from(random_values(shape.numel(), 1), shape, DType::bf16, GetParam());
  const Tensor dy = Tensor::from(random_values(shape.numel(), 2), shape, DType::bf16, GetParam());
  const Tensor y = Tensor::empty_like(x), dx = Tensor::empty_like(x), mean = filled(70, 0),
               rstd = filled(70, 0);
  const Tensor weight = filled(33, 1.5), dweight = filled(33, 0), dbias = filled(33, 0);
  layer_norm(x, weight, {}, kLayerNormEps, y, mean, rstd);
  layer_norm_backward(x, weight, mean, rstd, dy, dx, dweight, dbias, false);
  const Values once = dweight.to_vector(), once_bias = dbias.to_vector();
  layer_norm_backward(x, weight, mean, rstd, dy, dy, dweight, dbias, true);
  Values twice = once, twice_bias = once_bias;
  for (double& v : twice) v *= 2;
  for (double& v : twice_bias) v *= 2;
  expect_close(dweight, twice, 1e-6, 1e-6);
  expect_close(dbias, twice_bias, 1e-6, 1e-6);
  EXPECT_EQ(dy.to_vector(), dx.to_vector());
}

TEST_P(LayerNorm, LargeOffsetsDoNotSpoilTheVariance) {
  const Shape shape{2, 512};
  Values values = random_values(shape.numel(), 1);
  for (double& v : values) v += 4096;
  const Tensor x = Tensor::from(values, shape, DType::f32, GetParam()), y = Tensor::empty_like(x);
  const Tensor mean = filled(2, 0), rstd = filled(2, 0);
  layer_norm(x, {}, {}, kLayerNormEps, y, mean, rstd);
  const Values in = x.to_vector();
  const LayerNormReference r = reference(in, Values(512, 1.0), Values(512, 0.0), in, shape, true);
  expect_close(y, r.y, 1e-5, 2e-3);  // the mean itself is rounded at 4096
  expect_close(rstd, r.rstd, 1e-5, 0);
}

TEST(LayerNormThreads, BitsDoNotDependOnTheirNumber) {
  const int before = core::num_threads();
  const Shape shape{1000, 96};
  const Tensor x = Tensor::from(random_values(shape.numel(), 1), shape, DType::f32),
               dy = Tensor::from(random_values(shape.numel(), 2), shape, DType::f32);
  std::vector<std::vector<float>> results;
  for (int threads : {1, 2, 7}) {
    core::set_num_threads(threads);
    const Tensor y = Tensor::empty(shape), dx = Tensor::empty(shape), mean = Tensor::empty({1000}),
                 rstd = Tensor::empty({1000});
    const Tensor dweight = Tensor::empty({96}), dbias = Tensor::empty({96});
    layer_norm(x, {}, {}, kLayerNormEps, y, mean, rstd);
    layer_norm_backward(x, {}, mean, rstd, dy, dx, dweight, dbias, false);
    std::vector<float> all;
    for (const Tensor& t : {y, dx, dweight, dbias}) {
      const auto values = t.to_vector<float>();
      all.insert(all.end(), values.begin(), values.end());
    }
    results.push_back(all);
  }
  core::set_num_threads(before);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST_P(LayerNorm, ErrorsNameWhatIsWrong) {
  const Tensor x = Tensor::zeros({3, 4}, DType::f16, GetParam()), row = filled(3, 0);
  EXPECT_EQ(message_of([&] { layer_norm(x, filled(3, 1), {}, kLayerNormEps, x, row, row); }),
            "[layer_norm] expected weight of shape [4], got [3]");
  EXPECT_EQ(
      message_of([&] { layer_norm(x, {}, {}, kLayerNormEps, x, filled(3, 0, DType::f16), row); }),
      "[layer_norm] expected mean of dtype f32, got f16");
  EXPECT_EQ(message_of([&] { rms_norm(row, {}, kLayerNormEps, row, row); }),
            "[rms_norm] expected x of 2 dimensions, got shape [3]");
  EXPECT_EQ(message_of([&] {
              rms_norm(x, {}, kLayerNormEps, Tensor::zeros({3, 4}, DType::f32, GetParam()), row);
            }),
            "[rms_norm] expected y of dtype f16 like x, got f32");
}

INSTANTIATE_TEST_SUITE_P(Devices, LayerNorm, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
