#include "cairn/kernels/conv.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/message_of.h"
#include "support/tensors.h"
#include "support/versions.h"

namespace cairn::kernels {
namespace {

using test::epsilon;
using test::expect_close;
using test::random_channels_last;
using test::random_tensor;
using testing::HasSubstr;
using Values = std::vector<double>;

struct ConvCase {
  const char* name;
  Shape x, weight;
  Conv2dOptions options;
};

const ConvCase kCases[] = {
    {"1x1", {2, 5, 4, 3}, {7, 5, 1, 1}, {}},
    {"3x3 padded", {2, 8, 9, 7}, {16, 8, 3, 3}, {.padding = {1, 1}}},
    {"one input channel", {3, 1, 12, 12}, {16, 1, 5, 5}, {.padding = {2, 2}}},
    {"stride that leaves a rest",
     {2, 3, 8, 9},
     {4, 3, 3, 3},
     {.stride = {2, 3}, .padding = {0, 1}}},
    {"dilated", {1, 4, 11, 10}, {6, 4, 3, 2}, {.padding = {2, 0}, .dilation = {2, 3}}},
    {"groups", {2, 6, 7, 7}, {4, 3, 3, 3}, {.padding = {1, 1}, .groups = 2}},
    {"depthwise",
     {2, 16, 8, 8},
     {16, 1, 3, 3},
     {.stride = {2, 2}, .padding = {1, 1}, .groups = 16}},
    {"kernel as large as the image", {3, 5, 4, 6}, {2, 5, 4, 6}, {}},
    // The same shapes as each other: the stride leaves a rest.
    {"apart by one", {2, 3, 9, 9}, {4, 3, 2, 2}, {.stride = {4, 4}, .padding = {1, 1}}},
    {"apart by two",
     {2, 3, 9, 9},
     {4, 3, 2, 2},
     {.stride = {4, 4}, .padding = {1, 1}, .dilation = {2, 2}}},
    {"16 to 32 channels", {2, 16, 14, 14}, {32, 16, 5, 5}, {.padding = {2, 2}}},
};

std::size_t at(const Shape& s, std::int64_t n, std::int64_t c, std::int64_t h, std::int64_t w) {
  return static_cast<std::size_t>(((n * s[1] + c) * s[2] + h) * s[3] + w);
}

// Calls f(index into x, into weight, into y) for every product that a convolution adds up.
template <class F>
void for_each_product(const ConvCase& c, const Shape& y, F&& f) {
  const Conv2dOptions& o = c.options;
  const std::int64_t in = c.weight[1], out = c.weight[0] / o.groups;
  for (std::int64_t n = 0; n < y[0]; ++n)
    for (std::int64_t k = 0; k < y[1]; ++k)
      for (std::int64_t i = 0; i < y[2]; ++i)
        for (std::int64_t j = 0; j < y[3]; ++j)
          for (std::int64_t ch = 0; ch < in; ++ch)
            for (std::int64_t r = 0; r < c.weight[2]; ++r)
              for (std::int64_t s = 0; s < c.weight[3]; ++s) {
                const std::int64_t h = i * o.stride[0] - o.padding[0] + r * o.dilation[0];
                const std::int64_t w = j * o.stride[1] - o.padding[1] + s * o.dilation[1];
                if (h < 0 || h >= c.x[2] || w < 0 || w >= c.x[3]) continue;
                f(at(c.x, n, k / out * in + ch, h, w), at(c.weight, k, ch, r, s),
                  at(y, n, k, i, j));
              }
}

Values zeros(const Shape& shape) {
  return Values(static_cast<std::size_t>(shape.numel()), 0.0);
}

// Adds bias[c] to a row-major [N, C, H, W].
void add_channels(Values& image, const Shape& shape, const Values& bias) {
  const auto plane = static_cast<std::size_t>(shape[2] * shape[3]);
  for (std::size_t i = 0; i < image.size(); ++i) image[i] += bias[i / plane % bias.size()];
}

void expect_sum(const Tensor& actual, const Values& expected, double terms, const std::string& what,
                double more = 0.0) {
  expect_close(actual, expected, 1.5 * epsilon(actual.dtype()), 4e-7 * (terms + 4.0) + more, what);
}

/// cuDNN rounds half images' results to half, before a bias or an earlier gradient is added.
double rounding_of_sums(const Values& sums, DType dtype, Device device) {
  if (device.is_cpu() || !core::is_half(dtype)) return 0.0;
  double largest = 0.0;
  for (const double sum : sums) largest = std::max(largest, std::abs(sum));
  return epsilon(dtype) * largest;
}

class Conv : public testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  Tensor random(const Shape& shape, DType dtype, std::uint64_t seed) const {
    return random_tensor(shape, dtype, device(), seed);
  }
  Tensor image(const Shape& shape, DType dtype, std::uint64_t seed, bool channels_last) const {
    return channels_last ? random_channels_last(shape, dtype, device(), seed)
                         : random(shape, dtype, seed);
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, Conv, testing::ValuesIn(test::devices()), test::device_name);

constexpr DType kConvDtypes[] = {DType::f32, DType::f16, DType::bf16};

template <class F>
void conv_for_all(F&& f) {
  for (const ConvCase& c : kCases) {
    for (const DType dtype : kConvDtypes) {
      for (const bool channels_last : {false, true}) {
        f(c, dtype, channels_last,
          core::str(c.name, ", ", core::name(dtype),
                    channels_last ? ", channels-last" : ", row-major"));
      }
    }
  }
}

TEST_P(Conv, ForwardEqualsReference) {
  conv_for_all([&](const ConvCase& c, DType dtype, bool last, const std::string& what) {
    const Shape shape = conv2d_shape(c.x, c.weight, c.options);
    const Tensor x = image(c.x, dtype, 1, last), weight = random(c.weight, dtype, 2);
    const Tensor bias = random({c.weight[0]}, dtype, 3), y = image(shape, dtype, 4, last);
    const Values vx = x.to_vector<double>(), vw = weight.to_vector<double>();
    Values expected = zeros(shape);
    for_each_product(c, shape, [&](auto i, auto j, auto k) { expected[k] += vx[i] * vw[j]; });
    const auto terms = static_cast<double>(c.weight.numel() / c.weight[0]);
    conv2d(x, weight, {}, y, c.options);
    expect_sum(y, expected, terms, what);
    const double rounding = rounding_of_sums(expected, dtype, device());
    add_channels(expected, shape, bias.to_vector<double>());
    conv2d(x, weight, bias, y, c.options);
    expect_sum(y, expected, terms, what + ", bias", rounding);
  });
}

TEST_P(Conv, BackwardDataEqualsReference) {
  conv_for_all([&](const ConvCase& c, DType dtype, bool last, const std::string& what) {
    const Shape shape = conv2d_shape(c.x, c.weight, c.options);
    const Tensor dy = image(shape, dtype, 1, last), weight = random(c.weight, dtype, 2);
    const Tensor bias = random({c.x[1]}, DType::f32, 3), dx = image(c.x, dtype, 4, last);
    const Values vdy = dy.to_vector<double>(), vw = weight.to_vector<double>();
    Values expected = zeros(c.x);
    for_each_product(c, shape, [&](auto i, auto j, auto k) { expected[i] += vdy[k] * vw[j]; });
    const auto terms = static_cast<double>(c.weight.numel() / c.weight[1]);
    conv2d_backward_data(dy, weight, {}, dx, c.options);
    expect_sum(dx, expected, terms, what);
    add_channels(expected, c.x, bias.to_vector<double>());
    conv2d_backward_data(dy, weight, bias, dx, c.options);
    expect_close(dx, expected, 3.0 * epsilon(dtype), 4e-7 * (terms + 4.0) + 4.0 * epsilon(dtype),
                 what + ", bias");
  });
}

TEST_P(Conv, BackwardWeightEqualsReferenceAndAccumulates) {
  conv_for_all([&](const ConvCase& c, DType dtype, bool last, const std::string& what) {
    const Shape shape = conv2d_shape(c.x, c.weight, c.options);
    const Tensor x = image(c.x, dtype, 1, last), dy = image(shape, dtype, 2, last);
    const Values vx = x.to_vector<double>(), vdy = dy.to_vector<double>();
    Values sum = zeros(c.weight), bias_sum = zeros({c.weight[0]});
    for_each_product(c, shape, [&](auto i, auto j, auto k) { sum[j] += vx[i] * vdy[k]; });
    const auto plane = static_cast<std::size_t>(shape[2] * shape[3]);
    for (std::size_t i = 0; i < vdy.size(); ++i) bias_sum[i / plane % bias_sum.size()] += vdy[i];
    const auto terms = static_cast<double>(shape.numel() / shape[1]);
    const double rounding = rounding_of_sums(sum, dtype, device());
    for (const DType out : {dtype, DType::f32}) {
      const Tensor dweight = random(c.weight, out, 3), dbias = random({c.weight[0]}, out, 4);
      conv2d_backward_weight(x, dy, dweight, {}, c.options, false);
      expect_sum(dweight, sum, terms, what, rounding);
      const Tensor more = random(c.weight, out, 5);
      Values total = more.to_vector<double>(), bias_total = dbias.to_vector<double>();
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += sum[i];
      for (std::size_t i = 0; i < bias_total.size(); ++i) bias_total[i] += bias_sum[i];
      conv2d_backward_weight(x, dy, more, dbias, c.options, true);
      expect_sum(more, total, terms, what + ", accumulated", rounding);
      expect_sum(dbias, bias_total, terms, what + ", accumulated bias");
    }
  });
}

TEST_P(Conv, TakesStridedViews) {
  const ConvCase c{"", {2, 4, 6, 5}, {3, 4, 3, 3}, {.padding = {1, 1}}};
  const Shape shape = conv2d_shape(c.x, c.weight, c.options);
  const Tensor wide = random({2, 6, 6, 9}, DType::f32, 1),
               all = random({3, 3, 4, 3}, DType::f32, 2);
  const Tensor x = wide.alias(wide.view().slice(1, 1, 5).slice(3, 2, 7));
  const Tensor weight = all.alias(all.view().permute({0, 2, 1, 3}));
  const Tensor room = random({2, 3, 6, 10}, DType::f32, 3);
  const Tensor y = room.alias(room.view().slice(3, 0, 5));
  Values expected = zeros(shape);
  const Values vx = x.to_vector<double>(), vw = weight.to_vector<double>();
  for_each_product(c, shape, [&](auto i, auto j, auto k) { expected[k] += vx[i] * vw[j]; });
  conv2d(x, weight, {}, y, c.options);
  expect_sum(y, expected, 36, "forward");
  const Tensor dweight = random({3, 3, 4, 3}, DType::f32, 4);
  const Tensor permuted = dweight.alias(dweight.view().permute({0, 2, 1, 3}));
  Values sum = permuted.to_vector<double>();
  const Values vdy = y.to_vector<double>();
  for_each_product(c, shape, [&](auto i, auto j, auto k) { sum[j] += vx[i] * vdy[k]; });
  conv2d_backward_weight(x, y, permuted, {}, c.options, true);
  expect_close(permuted, sum, 1e-6, 1e-4, "weight gradient");
}

TEST_P(Conv, EmptyBatch) {
  const Tensor x = random({0, 3, 5, 5}, DType::f32, 1),
               weight = random({4, 3, 3, 3}, DType::f32, 2);
  const Tensor y = random({0, 4, 3, 3}, DType::f32, 3),
               dweight = random({4, 3, 3, 3}, DType::f32, 4);
  const Tensor dbias = random({4}, DType::f32, 5);
  conv2d(x, weight, {}, y, {});
  conv2d_backward_data(y, weight, {}, x, {});
  conv2d_backward_weight(x, y, dweight, dbias, {}, true);
  EXPECT_EQ(dweight.to_vector(), random({4, 3, 3, 3}, DType::f32, 4).to_vector());
  conv2d_backward_weight(x, y, dweight, dbias, {}, false);
  EXPECT_THAT(dweight.to_vector(), testing::Each(0.0));
  EXPECT_THAT(dbias.to_vector(), testing::Each(0.0));
}

TEST_P(Conv, SameBitsInEveryRun) {
  for (const DType dtype : kConvDtypes) {
    const Tensor x = image({4, 8, 13, 13}, dtype, 1, true),
                 dy = image({4, 20, 13, 13}, dtype, 2, true);
    const Tensor first = random({20, 8, 3, 3}, DType::f32, 3),
                 again = random({20, 8, 3, 3}, DType::f32, 4);
    conv2d_backward_weight(x, dy, first, {}, {.padding = {1, 1}}, false);
    for (int run = 0; run < 3; ++run) {
      conv2d_backward_weight(x, dy, again, {}, {.padding = {1, 1}}, false);
      EXPECT_EQ(first.to_vector(), again.to_vector());
    }
  }
}

TEST_P(Conv, WrongInputIsNamed) {
  const Tensor x = random({2, 3, 5, 5}, DType::f32, 1),
               weight = random({4, 3, 3, 3}, DType::f32, 2);
  const Tensor y = random({2, 4, 3, 3}, DType::f32, 3);
  EXPECT_THAT(message_of([&] {
                conv2d(x, weight, {}, y, {.padding = {1, 1}});
              }),
              HasSubstr("[conv2d] expected y of shape [2, 4, 5, 5], got [2, 4, 3, 3]"));
  EXPECT_THAT(message_of([&] {
                conv2d(x, weight, {}, y, {.stride = {0, 1}});
              }),
              HasSubstr("stride >= 1, got 0"));
  EXPECT_THAT(message_of([&] { conv2d(x, weight, {}, y, {.groups = 3}); }),
              HasSubstr("9 channels"));
  EXPECT_THAT(message_of([&] {
                conv2d(x, random({4, 3, 6, 3}, DType::f32, 1), {}, y, {});
              }),
              HasSubstr("no smaller than the kernel, got 5 (with padding) for 6"));
  EXPECT_THAT(message_of([&] { conv2d(x, weight, y, y, {}); }), HasSubstr("bias of shape [4]"));
  EXPECT_THAT(message_of([&] {
                conv2d(x, random({4, 3, 3, 3}, DType::bf16, 1), {}, y, {});
              }),
              HasSubstr("weight of dtype f32"));
  EXPECT_THAT(message_of([&] {
                conv2d(random({2, 3, 5, 5}, DType::f64, 1), weight, {}, y, {});
              }),
              HasSubstr("f16, bf16 or f32, got f64"));
  EXPECT_THAT(message_of([&] { conv2d_backward_data(x, weight, {}, y, {}); }),
              HasSubstr("[conv2d_backward_data]"));
  EXPECT_THAT(message_of([&] {
                conv2d_backward_weight(x, y, random({4, 3, 3, 3}, DType::bf16, 1), {}, {}, false);
              }),
              HasSubstr("dweight of dtype f32"));
  EXPECT_THAT(message_of([&] {
                conv2d_shape({2, 3, 5}, weight.shape(), {});
              }),
              HasSubstr("[N, C, H, W], got [2, 3, 5]"));
}

TEST(ConvVersions, CountWritesToOutputsAlone) {
  const auto f32 = [](const Shape& shape) { return test::random_tensor(shape, DType::f32, {}, 1); };
  const Tensor x = f32({2, 3, 5, 5}), weight = f32({4, 3, 3, 3}), y = f32({2, 4, 3, 3});
  const Tensor bias = f32({4});
  test::expect_outputs_counted({"conv2d", {x, weight, bias}, {y}, [](auto& in, auto& out) {
                                  conv2d(in[0], in[1], in[2], out[0], {});
                                }});
  test::expect_outputs_counted({"conv2d_backward_data", {y, weight}, {x}, [](auto& in, auto& out) {
                                  conv2d_backward_data(in[0], in[1], {}, out[0], {});
                                }});
  test::expect_outputs_counted(
      {"conv2d_backward_weight", {x, y}, {weight, bias}, [](auto& in, auto& out) {
         conv2d_backward_weight(in[0], in[1], out[0], out[1], {}, false);
       }});
}

}  // namespace
}  // namespace cairn::kernels
