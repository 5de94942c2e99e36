// Convolutions, batch norms and pools against values that PyTorch made:
// tests/golden/make_images.py.
#include <gtest/gtest.h>

#include <string>

#include "cairn/kernels/batch_norm.h"
#include "cairn/kernels/conv.h"
#include "cairn/kernels/pool.h"
#include "support/golden.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

constexpr double kImageGoldenTolerance = 5e-6;

class GoldenImages : public testing::TestWithParam<Device> {
 protected:
  Tensor given(const std::string& name) const {
    return golden_.tensor(name, DType::f32, GetParam());
  }
  Tensor like(const std::string& name) const {
    return Tensor::empty(golden_.shape(name), DType::f32, GetParam());
  }
  void expect(const Tensor& actual, const std::string& name) const {
    test::expect_close(actual, golden_.values(name), kImageGoldenTolerance, kImageGoldenTolerance,
                       name);
  }
  void check_conv(const std::string& name, const Conv2dOptions& options) const;
  void check_transposed(const std::string& name, const Conv2dOptions& options) const;
  void check_norm(const std::string& name) const;

  const test::Golden golden_{"images"};
};
INSTANTIATE_TEST_SUITE_P(Devices, GoldenImages, testing::ValuesIn(test::devices()),
                         test::device_name);

void GoldenImages::check_conv(const std::string& name, const Conv2dOptions& options) const {
  const Tensor x = given(name + ".x"), weight = given(name + ".weight"), dy = given(name + ".dy");
  const Tensor y = like(name + ".y"), dx = like(name + ".x"), dweight = like(name + ".weight");
  const Tensor dbias = like(name + ".bias");
  conv2d(x, weight, given(name + ".bias"), y, options);
  expect(y, name + ".y");
  conv2d_backward_data(dy, weight, {}, dx, options);
  expect(dx, name + ".dx");
  conv2d_backward_weight(x, dy, dweight, dbias, options, false);
  expect(dweight, name + ".dweight");
  expect(dbias, name + ".dbias");
}

TEST_P(GoldenImages, Conv) {
  check_conv("conv", {.stride = {2, 1}, .padding = {1, 0}});
  check_conv("conv_groups", {.padding = {1, 1}, .dilation = {2, 2}, .groups = 2});
}

// A transposed convolution is the gradient of one: its input stands for dy, its output for dx.
void GoldenImages::check_transposed(const std::string& name, const Conv2dOptions& options) const {
  const Tensor x = given(name + ".x"), weight = given(name + ".weight"), dy = given(name + ".dy");
  const Tensor y = like(name + ".y"), dx = like(name + ".x"), dweight = like(name + ".weight");
  conv2d_backward_data(x, weight, given(name + ".bias"), y, options);
  expect(y, name + ".y");
  conv2d(dy, weight, {}, dx, options);
  expect(dx, name + ".dx");
  conv2d_backward_weight(dy, x, dweight, {}, options, false);
  expect(dweight, name + ".dweight");
}

TEST_P(GoldenImages, TransposedConv) {
  check_transposed("transposed", {.stride = {2, 3}, .padding = {1, 0}});
  check_transposed("transposed_groups", {.stride = {2, 2}, .dilation = {1, 2}, .groups = 2});
}

void GoldenImages::check_norm(const std::string& name) const {
  const Tensor x = given(name + ".x"), weight = given(name + ".weight"),
               bias = given(name + ".bias");
  const Tensor running_mean = given(name + ".running_mean");
  auto variances = golden_.values(name + ".running_var_root");
  for (double& v : variances) v *= v;
  const Tensor running_var = Tensor::from(variances, {4}, DType::f32, GetParam());
  const Tensor y = like(name + ".x"), dx = like(name + ".x"), mean = like(name + ".weight");
  const Tensor rstd = like(name + ".weight"), dweight = like(name + ".weight"),
               dbias = like(name + ".bias");
  batch_norm_eval(x, weight, bias, running_mean, running_var, y, {.eps = 1e-3});
  expect(y, name + ".eval.y");
  batch_norm(x, weight, bias, running_mean, running_var, y, mean, rstd,
             {.eps = 1e-3, .momentum = 0.3});
  expect(y, name + ".y");
  expect(running_mean, name + ".new_mean");
  expect(running_var, name + ".new_var");
  batch_norm_backward(x, {}, weight, mean, rstd, given(name + ".dy"), dx, dweight, dbias, {});
  expect(dx, name + ".dx");
  expect(dweight, name + ".dweight");
  expect(dbias, name + ".dbias");
}

TEST_P(GoldenImages, BatchNorm) {
  check_norm("norm2d");
  check_norm("norm1d");
}

TEST_P(GoldenImages, Pools) {
  const Pool2dOptions max_options{{3, 2}, {2, 2}, {1, 1}}, avg_options{{3, 2}, {2, 1}, {1, 1}};
  const Tensor x = given("pool.x"), dx = like("pool.x"), y = like("max.y"), mean = like("avg.y");
  const Tensor index = Tensor::empty(golden_.shape("max.index"), DType::i32, GetParam());
  max_pool2d(x, y, index, max_options);
  expect(y, "max.y");
  expect(index, "max.index");
  max_pool2d_backward(given("max.dy"), index, dx, max_options);
  expect(dx, "max.dx");
  avg_pool2d(x, mean, avg_options);
  expect(mean, "avg.y");
  avg_pool2d_backward(given("avg.dy"), dx, avg_options);
  expect(dx, "avg.dx");
}

}  // namespace
}  // namespace cairn::kernels
