#include "cairn/kernels/matmul.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cairn/core/parallel_for.h"
#include "cairn/core/stream.h"
#include "support/message_of.h"
#include "support/tensors.h"
#include "support/versions.h"

namespace cairn::kernels {
namespace {

using core::InvalidArgument;
using test::epsilon;
using test::expect_close;
using test::random_tensor;
using testing::HasSubstr;

// sum over k of a[..., m, k] b[..., k, n], and the sum of the terms' magnitudes, which bounds the
// rounding error.
struct MatmulReference {
  std::vector<double> sum, magnitude;
};

MatmulReference multiply(const Tensor& a, const Tensor& b, const Shape& shape) {
  const std::int64_t rows = shape[shape.dims() - 2], columns = shape.back(), depth = a.size(-1);
  Shape shape_a = shape, shape_b = shape;
  shape_a[shape.dims() - 1] = shape_b[shape.dims() - 2] = depth;
  const auto va = a.alias(a.view().expand(shape_a)).to_vector<double>();
  const auto vb = b.alias(b.view().expand(shape_b)).to_vector<double>();
  MatmulReference result;
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    const std::int64_t row = i / columns, batch = row / rows;
    double sum = 0.0, magnitude = 0.0;
    for (std::int64_t k = 0; k < depth; ++k) {
      const double term = va[static_cast<std::size_t>(row * depth + k)] *
                          vb[static_cast<std::size_t>((batch * depth + k) * columns + i % columns)];
      sum += term;
      magnitude += std::abs(term);
    }
    result.sum.push_back(sum);
    result.magnitude.push_back(magnitude);
  }
  return result;
}

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::relu:
      return x > 0.0 ? x : 0.0;
    case Activation::gelu:
      return 0.5 * x * std::erfc(-x * std::sqrt(0.5));
    case Activation::gelu_tanh:
      return 0.5 * x *
             (1.0 +
              std::tanh(std::sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
  }
  return x;
}

// f32 accumulation over the terms, one rounding of the result.
void expect_product(const Tensor& y, const std::vector<double>& expected, const MatmulReference& r,
                    const std::string& what) {
  double magnitude = 1.0;
  for (const double m : r.magnitude) magnitude = std::max(magnitude, m);
  const double sum_epsilon = y.dtype() == DType::f64 ? 1e-14 : 2e-6;
  expect_close(y, expected, 1.5 * epsilon(y.dtype()), sum_epsilon * magnitude, what);
}

class Matmul : public testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  Tensor random(const Shape& shape, DType dtype, std::uint64_t seed) const {
    return random_tensor(shape, dtype, device(), seed);
  }
  Tensor transposed(const Tensor& x) const { return x.alias(x.view().transpose(-2, -1)); }
};
INSTANTIATE_TEST_SUITE_P(Devices, Matmul, testing::ValuesIn(test::devices()), test::device_name);

constexpr DType kMatmulDtypes[] = {DType::f32, DType::f16, DType::bf16, DType::f64};

TEST_P(Matmul, EqualsReferenceForShapesTransposesAndDtypes) {
  const Shape sizes[] = {{1, 1, 1},    {1, 5, 3},    {7, 1, 4},     {5, 6, 1},
                         {17, 33, 65}, {64, 48, 32}, {100, 10, 157}};
  for (const DType dtype : kMatmulDtypes) {
    for (const Shape& s : sizes) {
      for (int layout = 0; layout < 8; ++layout) {
        const std::int64_t m = s[0], n = s[1], k = s[2];
        const Tensor a =
            layout & 1 ? transposed(random({k, m}, dtype, 1)) : random({m, k}, dtype, 1);
        const Tensor b =
            layout & 2 ? transposed(random({n, k}, dtype, 2)) : random({k, n}, dtype, 2);
        const Tensor y =
            layout & 4 ? transposed(random({n, m}, dtype, 3)) : random({m, n}, dtype, 3);
        matmul(a, b, y);
        const MatmulReference r = multiply(a, b, {m, n});
        expect_product(y, r.sum, r, core::str(core::name(dtype), " ", s, " layout ", layout));
      }
    }
  }
}

TEST_P(Matmul, HalfInputsGiveF32Output) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Tensor a = transposed(random({50, 33}, dtype, 1)), b = random({50, 20}, dtype, 2);
    const Tensor y = random({33, 20}, DType::f32, 3);
    auto expected = y.to_vector<double>();
    const MatmulReference r = multiply(a, b, {33, 20});
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += r.sum[i];
    matmul(a, b, y, {.accumulate = true});
    expect_product(y, expected, r, "accumulated");
    matmul(a, b, y);
    expect_product(y, r.sum, r, "overwritten");
  }
}

TEST_P(Matmul, AlphaBiasAndAccumulate) {
  for (const DType dtype : kMatmulDtypes) {
    const Tensor a = random({13, 21}, dtype, 1), b = random({21, 18}, dtype, 2);
    const Tensor y = random({13, 18}, dtype, 3), bias = random({18}, dtype, 4);
    const Tensor y2 = transposed(random({18, 13}, dtype, 3));
    const MatmulReference r = multiply(a, b, {13, 18});
    auto expected = y.to_vector<double>(), expected2 = y2.to_vector<double>();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i] += -0.5 * r.sum[i];
      expected2[i] += r.sum[i];
    }
    matmul(a, b, y, {.alpha = -0.5, .accumulate = true});
    expect_product(y, expected, r, "alpha, accumulate");
    matmul(a, b, y2, {.accumulate = true});
    expect_product(y2, expected2, r, "accumulate into columns");
    const auto biases = bias.to_vector<double>();
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = 2.0 * r.sum[i] + biases[i % 18];
    matmul(a, b, y, {.alpha = 2.0, .bias = bias});
    expect_product(y, expected, r, "alpha, bias");
  }
}

TEST_P(Matmul, ActivationWithAndWithoutPreActivation) {
  for (const DType dtype : kMatmulDtypes) {
    for (const Activation activation :
         {Activation::none, Activation::relu, Activation::gelu, Activation::gelu_tanh}) {
      const Tensor a = random({9, 40}, dtype, 1), b = transposed(random({24, 40}, dtype, 2));
      const Tensor bias =
          core::is_half(dtype) ? random({24}, DType::f32, 4) : random({24}, dtype, 4);
      const Tensor y = random({9, 24}, dtype, 3), pre = random({9, 24}, dtype, 5);
      const MatmulReference r = multiply(a, b, {9, 24});
      const auto biases = bias.to_vector<double>();
      std::vector<double> before, after;
      for (std::size_t i = 0; i < r.sum.size(); ++i) {
        before.push_back(r.sum[i] + biases[i % 24]);
        after.push_back(activate(activation, before.back()));
      }
      const std::string what =
          core::str(core::name(dtype), " activation ", static_cast<int>(activation));
      matmul(a, b, y, {.bias = bias, .activation = activation});
      expect_product(y, after, r, what);
      matmul(a, b, y, {.bias = bias, .activation = activation, .pre_activation = pre});
      expect_product(pre, before, r, what + " pre-activation");
      for (std::size_t i = 0; i < after.size(); ++i) {
        after[i] = activate(activation, pre.to_vector<double>()[i]);
      }
      expect_product(y, after, r, what + " after pre-activation");
    }
  }
}

TEST_P(Matmul, BatchesBroadcast) {
  struct Case {
    Shape a, b, y;
  };
  const Case cases[] = {{{3, 4, 5}, {3, 5, 6}, {3, 4, 6}},
                        {{3, 4, 5}, {5, 6}, {3, 4, 6}},
                        {{4, 5}, {3, 5, 6}, {3, 4, 6}},
                        {{1, 4, 5}, {3, 5, 6}, {3, 4, 6}},
                        {{2, 3, 4, 5}, {2, 3, 5, 6}, {2, 3, 4, 6}},
                        {{2, 3, 4, 5}, {3, 5, 6}, {2, 3, 4, 6}},
                        {{2, 1, 4, 5}, {1, 3, 5, 6}, {2, 3, 4, 6}},
                        {{2, 3, 1, 5}, {5, 6}, {2, 3, 1, 6}},
                        {{2, 2, 3, 4, 5}, {2, 1, 3, 5, 6}, {2, 2, 3, 4, 6}}};
  for (const DType dtype : kMatmulDtypes) {
    for (const Case& c : cases) {
      const Tensor a = random(c.a, dtype, 1), b = random(c.b, dtype, 2), y = random(c.y, dtype, 3);
      matmul(a, b, y);
      const MatmulReference r = multiply(a, b, c.y);
      expect_product(y, r.sum, r, core::str(core::name(dtype), " ", c.a, " x ", c.b));
    }
  }
}

// Attention on a fused projection [B, T, 3, H, hd], seen as q, k, v [B, H, T, hd].
TEST_P(Matmul, ViewsOfFusedProjection) {
  const std::int64_t B = 2, T = 9, H = 3, hd = 8;
  for (const DType dtype : kMatmulDtypes) {
    const Tensor fused = random({B, T, 3, H, hd}, dtype, 1);
    auto part = [&](std::int64_t i) {
      return fused.alias(fused.view().select(2, i).permute({0, 2, 1, 3}));
    };
    const Tensor q = part(0), k = part(1), v = part(2);
    const Tensor scores = random({B, H, T, T}, dtype, 2);
    matmul(q, transposed(k), scores, {.alpha = 0.25});
    MatmulReference r = multiply(q, transposed(k), {B, H, T, T});
    for (double& x : r.sum) x *= 0.25;
    expect_product(scores, r.sum, r, "scores");
    const Tensor out = random({B, T, H, hd}, dtype, 3);
    const Tensor heads = out.alias(out.view().permute({0, 2, 1, 3}));
    matmul(scores, v, heads);
    r = multiply(scores, v, {B, H, T, hd});
    expect_product(heads, r.sum, r, "values");
    const Tensor dfused = random({B, T, 3, H, hd}, dtype, 4);
    const Tensor dv = dfused.alias(dfused.view().select(2, 2).permute({0, 2, 1, 3}));
    matmul(transposed(scores), heads, dv);
    r = multiply(transposed(scores), heads, {B, H, T, hd});
    expect_product(dv, r.sum, r, "value gradient");
  }
}

TEST_P(Matmul, StridedAndRepeatedOperands) {
  for (const DType dtype : kMatmulDtypes) {
    const Tensor wide = random({12, 40}, dtype, 1), row = random({1, 10}, dtype, 2);
    const Tensor every_second =
        wide.alias(TensorView(wide.raw_data(), {6, 10}, Strides{80, 4}, dtype, wide.device()));
    const Tensor repeated = row.alias(row.view().expand({7, 10}).transpose(0, 1));
    const Tensor slice = wide.alias(wide.view().slice(1, 3, 13));
    const Tensor y = random({6, 7}, dtype, 3), y2 = random({12, 7}, dtype, 4);
    matmul(every_second, repeated, y);
    MatmulReference r = multiply(every_second, repeated, {6, 7});
    expect_product(y, r.sum, r, "every second row");
    matmul(slice, repeated, y2);
    r = multiply(slice, repeated, {12, 7});
    expect_product(y2, r.sum, r, "slice of columns");
    const Tensor big = random({12, 30}, dtype, 5);
    const Tensor part =
        big.alias(TensorView(big.raw_data(), {6, 7}, Strides{60, 3}, dtype, big.device()));
    const auto before = big.to_vector<double>();
    matmul(every_second, repeated, part);
    r = multiply(every_second, repeated, {6, 7});
    expect_product(part, r.sum, r, "strided output");
    EXPECT_EQ(big.to_vector<double>()[1], before[1]) << "wrote between the output's elements";
  }
}

TEST_P(Matmul, EmptySizes) {
  const Tensor y = random({3, 4}, DType::f32, 1),
               bias = Tensor::from<double>({-1, 2, -3, 4}, {4}, DType::f32, device());
  matmul(random({3, 0}, DType::f32, 1), random({0, 4}, DType::f32, 2), y, {.accumulate = true});
  EXPECT_EQ(y.to_vector(), random({3, 4}, DType::f32, 1).to_vector());
  matmul(random({3, 0}, DType::f32, 1), random({0, 4}, DType::f32, 2), y,
         {.bias = bias, .activation = Activation::relu});
  EXPECT_THAT(y.to_vector(), testing::ElementsAre(0, 2, 0, 4, 0, 2, 0, 4, 0, 2, 0, 4));
  matmul(random({3, 0}, DType::f32, 1), random({0, 4}, DType::f32, 2), y);
  EXPECT_THAT(y.to_vector(), testing::Each(0.0));
  EXPECT_NO_THROW(matmul(random({0, 5}, DType::f32, 1), random({5, 4}, DType::f32, 2),
                         random({0, 4}, DType::f32, 3)));
  EXPECT_NO_THROW(matmul(random({3, 5}, DType::bf16, 1), random({5, 0}, DType::bf16, 2),
                         random({3, 0}, DType::bf16, 3)));
  EXPECT_NO_THROW(matmul(random({0, 3, 5}, DType::f16, 1), random({5, 2}, DType::f16, 2),
                         random({0, 3, 2}, DType::f16, 3)));
}

TEST_P(Matmul, SameBitsInEveryRun) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Tensor a = random({150, 333}, dtype, 1), b = random({333, 70}, dtype, 2);
    const Tensor first = random({150, 70}, dtype, 3), again = random({150, 70}, dtype, 4);
    matmul(a, b, first);
    for (int run = 0; run < 3; ++run) {
      matmul(a, b, again);
      EXPECT_EQ(first.to_vector(), again.to_vector());
    }
  }
}

// More operations than the CPU backend keeps; the first ones are made again.
TEST_P(Matmul, ManyDifferentCalls) {
  const Tensor a = random({2, 3}, DType::f32, 1), b = random({3, 2}, DType::f32, 2);
  const Tensor y = random({2, 2}, DType::f32, 3);
  const MatmulReference r = multiply(a, b, {2, 2});
  const int calls = device().is_cpu() ? 1100 : 20;
  for (int i = 0; i <= calls; ++i) {
    const double alpha = i % calls + 1;
    matmul(a, b, y, {.alpha = alpha});
    std::vector<double> expected = r.sum;
    for (double& x : expected) x *= alpha;
    expect_close(y, expected, 1e-5, 1e-6 * alpha, core::str("call ", i));
  }
}

TEST_P(Matmul, RunsInStreamOrder) {
  const Tensor a = random({40, 30}, DType::f32, 1), b = random({30, 40}, DType::f32, 2);
  const Tensor y = random({40, 40}, DType::f32, 3), z = random({40, 40}, DType::f32, 4);
  const core::Stream stream = core::Stream::create(device(), "worker");
  {
    const core::StreamGuard guard(stream);
    for (int i = 0; i < 10; ++i) {
      matmul(a, b, y);
      matmul(y, y, z);
    }
  }
  stream.synchronize();
  const MatmulReference product = multiply(a, b, {40, 40});
  expect_product(y, product.sum, product, "first");
  const MatmulReference square = multiply(y, y, {40, 40});
  expect_product(z, square.sum, square, "second");
}

TEST_P(Matmul, AnyThreadCount) {
  if (device().is_cuda()) GTEST_SKIP() << "processor threads";
  const int threads = core::num_threads();
  const Tensor a = random({5, 60, 70}, DType::f32, 1), b = random({5, 70, 50}, DType::f32, 2);
  const Tensor y = random({5, 60, 50}, DType::f32, 3);
  const MatmulReference r = multiply(a, b, {5, 60, 50});
  for (const int n : {1, 4, 2}) {
    core::set_num_threads(n);
    matmul(a, b, y);
    expect_product(y, r.sum, r, core::str(n, " threads"));
  }
  core::set_num_threads(threads);
}

TEST_P(Matmul, ThreadsMayCallAtTheSameTime) {
  const Tensor a = random({64, 96}, DType::bf16, 1), b = random({96, 40}, DType::bf16, 2);
  const MatmulReference r = multiply(a, b, {64, 40});
  std::vector<Tensor> results;
  for (int i = 0; i < 4; ++i) results.push_back(random({64, 40}, DType::bf16, 3));
  std::vector<std::thread> threads;
  for (const Tensor& y : results) {
    threads.emplace_back([&, y] {
      for (int run = 0; run < 20; ++run) matmul(a, b, y);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Tensor& y : results) expect_product(y, r.sum, r, "concurrent");
}

TEST_P(Matmul, WrongInputIsNamed) {
  const Tensor a = random({3, 4}, DType::f32, 1), b = random({4, 5}, DType::f32, 2),
               y = random({3, 5}, DType::f32, 3);
  EXPECT_THAT(message_of([&] { matmul(a, a, y); }),
              HasSubstr("as many columns in a as rows in b, got [3, 4] and [3, 4]"));
  EXPECT_THAT(message_of([&] { matmul(a, b, a); }),
              HasSubstr("[matmul] expected y of shape [3, 5], got [3, 4]"));
  EXPECT_THAT(message_of([&] {
                matmul(a, random({4, 5}, DType::bf16, 1), y);
              }),
              HasSubstr("expected b of dtype f32"));
  EXPECT_THAT(message_of([&] {
                matmul(a, b, random({3, 5}, DType::bf16, 1));
              }),
              HasSubstr("expected y of dtype f32"));
  EXPECT_THAT(message_of([&] { matmul(a.alias(a.view().select(0, 0)), b, y); }),
              HasSubstr("unsqueeze a vector"));
  EXPECT_THAT(message_of([&] { matmul(TensorView(), b, y); }), HasSubstr("expected a defined a"));
  EXPECT_THAT(message_of([&] { matmul(a, b, y, {.bias = a}); }),
              HasSubstr("expected bias of shape [5]"));
  EXPECT_THAT(message_of([&] {
                matmul(a, b, y, {.accumulate = true, .bias = random({5}, DType::f32, 1)});
              }),
              HasSubstr("no bias with accumulate"));
  EXPECT_THAT(
      message_of([&] { matmul(a, b, y, {.accumulate = true, .activation = Activation::relu}); }),
      HasSubstr("no activation with accumulate"));
  EXPECT_THAT(message_of([&] {
                matmul(random({2, 3, 4}, DType::f32, 1), random({3, 4, 5}, DType::f32, 1), y);
              }),
              HasSubstr("[matmul]"));
  EXPECT_THAT(message_of([&] {
                matmul(a, b, random({1, 5}, DType::f32, 1).view().expand({3, 5}));
              }),
              HasSubstr("without repeated dimensions"));
  const Tensor ints = Tensor::from<double>({1}, {1, 1}, DType::i32, device());
  EXPECT_THAT(message_of([&] { matmul(ints, ints, ints); }), HasSubstr("f16, bf16, f32 or f64"));
}

TEST(MatmulVersions, CountWritesToOutputsAlone) {
  const auto f32 = [](const Shape& shape) { return test::random_tensor(shape, DType::f32, {}, 1); };
  for (const std::int64_t inner : {4, 0}) {
    test::expect_outputs_counted(
        {"matmul",
         {f32({3, inner}), f32({inner, 5})},
         {f32({3, 5}), f32({3, 5})},
         [](auto& in, auto& out) {
           matmul(in[0], in[1], out[0], {.activation = Activation::relu, .pre_activation = out[1]});
         }});
  }
}

}  // namespace
}  // namespace cairn::kernels
