#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "cairn/autograd/ops.h"
#include "gradient_check.h"

namespace cairn::autograd {
namespace {

using testing::check_gradients;
using testing::error_of;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::leaf;
using testing::random_tensor;
using testing::strided_leaf;

Tensor counting(const Shape& shape) {
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  std::iota(values.begin(), values.end(), 0.0);
  return Tensor::from(values, shape, DType::f64);
}

TEST(Reduce, SumsOverTheGivenDimensions) {
  const Tensor x = counting({2, 3, 4});
  expect_close(sum(x), {276}, 0);
  EXPECT_EQ(sum(x).shape(), Shape{});
  expect_close(sum(x, {1}), {12, 15, 18, 21, 48, 51, 54, 57}, 0);
  EXPECT_EQ(sum(x, {1}).shape(), (Shape{2, 4}));
  EXPECT_EQ(sum(x, {0, -1}, true).shape(), (Shape{1, 3, 1}));
  expect_close(sum(x, {0, -1}, true), {60, 92, 124}, 0);
  expect_close(mean(x, {2}), {1.5, 5.5, 9.5, 13.5, 17.5, 21.5}, 1e-14);
  expect_close(max(x, {0, 1}), {20, 21, 22, 23}, 0);
  expect_close(sum(Tensor::zeros({0, 3}, DType::f64), {0}), {0, 0, 0}, 0);
}

TEST(Reduce, HasTheGradientsOfItsFormula) {
  for (const bool keep : {false, true}) {
    for (const std::vector<int>& dims : {std::vector<int>{}, {0}, {1, 2}, {-1}}) {
      const auto of = [&](auto op) {
        return [=](const Tensors& x) { return op(x[0], dims, keep); };
      };
      check_gradients(of(sum), {leaf({2, 3, 4}, 1)});
      check_gradients(of(mean), {strided_leaf({2, 3, 4}, 1)});
      check_gradients(of(max), {leaf({2, 3, 4}, 1)});
    }
  }
  check_gradients([](const Tensors& x) { return sum(x[0]); }, {leaf({0, 3}, 1)});
}

TEST(Reduce, MaxSplitsItsGradientAmongEquals) {
  Tensor x = Tensor::from(std::vector<double>{1, 3, 3, 2}, {4});
  x.set_requires_grad(true);
  backward(max(x));
  expect_close(x.grad(), {0, 0.5, 0.5, 0}, 0);
}

TEST(Reduce, ArgmaxIsTheFirstOfEquals) {
  const Tensor x = Tensor::from(std::vector<float>{1, 3, 3, 2, -1, -2, -3, -1}, {2, 4});
  const Tensor index = argmax(x);
  EXPECT_EQ(index.dtype(), DType::i64);
  EXPECT_EQ(index.shape(), Shape{2});
  expect_close(index, {1, 0}, 0);
  expect_close(argmax(Tensor::from(std::vector<float>{0, 7}, {2}, DType::bf16)), {1}, 0);
  EXPECT_EQ(argmax(Tensor::zeros({0, 3})).shape(), Shape{0});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double got = argmax(Tensor::full({3}, nan)).item();
  EXPECT_TRUE(got >= 0 && got < 3);
}

TEST(Reduce, NamesWrongDimensions) {
  const Tensor x = counting({2, 3});
  EXPECT_THAT(error_of([&] { sum(x, {2}); }), HasSubstr("sum"));
  EXPECT_THAT(error_of([&] { sum(x, {0, -2}); }), HasSubstr("twice"));
  EXPECT_THAT(error_of([&] { max(Tensor::zeros({0}, DType::f64)); }), HasSubstr("maximum"));
}

TEST(Views, ShareMemoryAndPassGradientsOn) {
  const Tensor x = leaf({2, 3, 4}, 1);
  EXPECT_EQ(reshape(x, {6, -1}).storage(), x.storage());
  EXPECT_EQ(reshape(x, {6, -1}).shape(), (Shape{6, 4}));
  EXPECT_EQ(transpose(x, 0, -1).shape(), (Shape{4, 3, 2}));
  EXPECT_EQ(permute(x, {1, 2, 0}).shape(), (Shape{3, 4, 2}));
  EXPECT_EQ(slice(x, 1, 1, 3).shape(), (Shape{2, 2, 4}));
  EXPECT_EQ(flatten(x).shape(), (Shape{2, 12}));
  EXPECT_EQ(flatten(x, 0).shape(), Shape{24});
  check_gradients([](const Tensors& x) { return reshape(x[0], {6, 4}); }, {leaf({2, 3, 4}, 1)});
  check_gradients(
      [](const Tensors& x) {
        return reshape(x[0], {8, 3});
      },
      {strided_leaf({2, 3, 4}, 1)});
  check_gradients([](const Tensors& x) { return transpose(x[0], 0, 2); }, {leaf({2, 3, 4}, 1)});
  check_gradients([](const Tensors& x) { return permute(x[0], {1, -1, 0}); }, {leaf({2, 3, 4}, 1)});
  check_gradients([](const Tensors& x) { return expand(x[0], {2, 3, 4}); }, {leaf({3, 1}, 1)});
  check_gradients([](const Tensors& x) { return slice(x[0], 1, 1, 3); }, {leaf({2, 3, 4}, 1)});
  check_gradients([](const Tensors& x) { return slice(x[0], 0, 1, 1); }, {leaf({2, 3}, 1)});
}

TEST(Views, ASliceAddsToAGradientThatIsThere) {
  const Tensor x = leaf({3, 2}, 1);
  backward(sum(slice(x, 0, 0, 2)) + sum(slice(x, 0, 1, 3)));
  backward(sum(slice(x, 0, 0, 1)));
  expect_close(x.grad(), {2, 2, 2, 2, 1, 1}, 0);
}

TEST(Views, NameWhatDoesNotFit) {
  const Tensor x = counting({2, 3});
  EXPECT_THAT(error_of([&] { reshape(x, {4, -1}); }), HasSubstr("[4, -1]"));
  EXPECT_THAT(error_of([&] { slice(x, 1, 2, 4); }), HasSubstr("slice"));
  EXPECT_THAT(error_of([&] { expand(x, {3, 3}); }), HasSubstr("expand"));
  EXPECT_THAT(error_of([&] { transpose(x, 0, 2); }), HasSubstr("transpose"));
}

TEST(Layout, FlattenOfAChannelsLastImageIsInChannelOrder) {
  const Tensor x = counting({2, 3, 2, 2}).set_requires_grad(true);
  const Tensor image = channels_last(x);
  EXPECT_TRUE(image.view().is_channels_last());
  const Tensor flat = flatten(image);
  EXPECT_EQ(flat.to_vector(), x.to_vector());
  backward(flat, counting({2, 12}));
  EXPECT_EQ(x.grad().to_vector(), x.to_vector());
  EXPECT_EQ(contiguous(image).to_vector(), x.to_vector());
  EXPECT_TRUE(contiguous(image).is_contiguous());
  EXPECT_TRUE(contiguous(x).same(x));
  EXPECT_TRUE(channels_last(image).same(image));
}

// Tells how its gradient lies.
struct Layouts {
  static constexpr OpInfo kInfo{"layouts"};
  bool* channels_last;
  Tensor forward(Context&, const Tensor& x) { return x; }
  Tensors backward(Context&, const Tensor& dy) {
    *channels_last = dy.view().is_channels_last();
    return {dy};
  }
};

TEST(Layout, TheGradientOfAFlattenedImageIsChannelsLastAgain) {
  bool channels_last_again = false;
  const Tensor image = channels_last(counting({2, 3, 2, 2})).set_requires_grad(true);
  backward(flatten(apply(Layouts{&channels_last_again}, image)), counting({2, 12}));
  EXPECT_TRUE(channels_last_again);
}

TEST(Layout, GradientsFollowTheLayout) {
  check_gradients([](const Tensors& x) { return relu(channels_last(x[0])); },
                  {leaf({2, 3, 2, 2}, 1)});
  check_gradients([](const Tensors& x) { return flatten(channels_last(x[0]) * x[0]); },
                  {leaf({2, 3, 2, 2}, 1)});
  check_gradients([](const Tensors& x) { return contiguous(transpose(x[0], 0, 1)); },
                  {leaf({2, 3}, 1)});
}

TEST(Concat, JoinsAlongADimension) {
  const Tensor a = counting({2, 2}), b = counting({2, 1});
  expect_close(concat({a, b}, 1), {0, 1, 0, 2, 3, 1}, 0);
  EXPECT_EQ(concat({a, a, a}).shape(), (Shape{6, 2}));
  check_gradients(
      [](const Tensors& x) {
        return concat({x[0], x[1], x[0]}, -1);
      },
      {leaf({2, 3}, 1), strided_leaf({2, 2}, 2)});
  check_gradients(
      [](const Tensors& x) {
        return concat({x[0], x[1]}, 0);
      },
      {leaf({0, 3}, 1), leaf({2, 3}, 2)});
  const Tensor half = random_tensor({2, 2}, 1, -1, 1, DType::f16);
  EXPECT_EQ(concat({half, random_tensor({2, 2}, 1, -1, 1, DType::f32)}).dtype(), DType::f32);
  EXPECT_THAT(error_of([&] { concat({a, counting({3, 2})}, 1); }), HasSubstr("[3, 2]"));
  EXPECT_THAT(error_of([] { concat({}); }), HasSubstr("none"));
}

TEST(Stack, JoinsAlongANewDimension) {
  const Tensor a = counting({2, 2}), b = a + 4.0;
  expect_close(stack({a, b}), {0, 1, 2, 3, 4, 5, 6, 7}, 0);
  expect_close(stack({a, b}, 1), {0, 1, 4, 5, 2, 3, 6, 7}, 0);
  expect_close(stack({a, b}, -1), {0, 4, 1, 5, 2, 6, 3, 7}, 0);
  EXPECT_EQ(stack({a, a, a}, 2).shape(), (Shape{2, 2, 3}));
  EXPECT_EQ(stack({Tensor::full({}, 1.0)}).shape(), (Shape{1}));
  check_gradients(
      [](const Tensors& x) {
        return stack({x[0], x[1], x[0]}, 1);
      },
      {leaf({2, 3}, 1), strided_leaf({2, 3}, 2)});
  check_gradients(
      [](const Tensors& x) {
        return stack({x[0], x[1]});
      },
      {random_tensor({2}, 1), leaf({2}, 2)});
  const Tensor half = random_tensor({2}, 1, -1, 1, DType::f16);
  EXPECT_EQ(stack({half, random_tensor({2}, 1, -1, 1, DType::bf16)}).dtype(), DType::f32);
  EXPECT_THAT(error_of([&] { stack({a, counting({3, 2})}); }), HasSubstr("[3, 2]"));
  EXPECT_THAT(error_of([&] { stack({a, Tensor()}); }), HasSubstr("none"));
  EXPECT_THAT(error_of([] { stack({}); }), HasSubstr("none"));
}

TEST(Convert, CastsBothWays) {
  const Tensor x = leaf({3}, 1, -1, 1, DType::f32);
  const Tensor y = to(x, DType::bf16);
  EXPECT_EQ(y.dtype(), DType::bf16);
  EXPECT_TRUE(to(y, DType::bf16).same(y));
  backward(y, Tensor::full({3}, 1.5, DType::bf16));
  EXPECT_EQ(x.grad().dtype(), DType::f32);
  expect_close(x.grad(), {1.5, 1.5, 1.5}, 0);
  backward(to(x, DType::f16), Tensor::full({3}, 1.0, DType::f16));
  expect_close(x.grad(), {2.5, 2.5, 2.5}, 0);
  EXPECT_TRUE(to(x, x.device()).same(x));
}

}  // namespace
}  // namespace cairn::autograd
