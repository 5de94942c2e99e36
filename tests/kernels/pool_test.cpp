#include "cairn/kernels/pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/message_of.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

using test::epsilon;
using test::expect_close;
using test::message_of;
using test::random_channels_last;
using test::random_tensor;
using testing::ElementsAre;
using testing::HasSubstr;
using Values = std::vector<double>;

struct PoolCase {
  const char* name;
  Shape x;
  Pool2dOptions options;
};

const PoolCase kAdaptiveCases[] = {
    {"adaptive, overlapping", {2, 5, 7, 8}, {.output = {{3, 5}}}},
    {"adaptive, larger", {1, 3, 3, 2}, {.output = {{5, 4}}}},
    {"adaptive, even", {2, 16, 8, 6}, {.output = {{4, 3}}}},
    {"adaptive, one", {2, 1, 5, 6}, {.output = {{1, 1}}}},
};
const PoolCase kPoolCases[] = {
    {"2x2", {2, 16, 8, 6}, {}},
    {"2x2 with a rest", {3, 5, 7, 9}, {}},
    {"3x3 overlapping, padded", {2, 19, 7, 8}, {{3, 3}, {2, 2}, {1, 1}}},
    {"stride beyond the kernel", {1, 33, 9, 11}, {{2, 3}, {3, 4}, {0, 0}}},
    {"one channel", {2, 1, 6, 6}, {{3, 2}, {1, 2}, {1, 0}}},
    {"global", {4, 10, 5, 7}, {{5, 7}, {1, 1}, {0, 0}}},
};
constexpr DType kPoolDtypes[] = {DType::f32, DType::f16, DType::bf16, DType::f64};

std::int64_t flat(const Shape& s, std::int64_t plane, std::int64_t h, std::int64_t w) {
  return (plane * s[2] + h) * s[3] + w;
}

/// Begin and end of the i-th window along H (0) or W (1), padding included.
std::pair<std::int64_t, std::int64_t> window_of(const PoolCase& c, std::size_t axis,
                                                std::int64_t i) {
  const Pool2dOptions& o = c.options;
  if (!o.output) {
    const std::int64_t begin = i * o.stride[axis] - o.padding[axis];
    return {begin, begin + o.kernel[axis]};
  }
  const auto size = static_cast<double>(c.x[static_cast<int>(axis) + 2]);
  const double share = size / static_cast<double>((*o.output)[axis]);
  return {static_cast<std::int64_t>(std::floor(static_cast<double>(i) * share + 1e-9)),
          static_cast<std::int64_t>(std::ceil(static_cast<double>(i + 1) * share - 1e-9))};
}

// Calls f(plane, element of y, pixel h, pixel w) for every pixel of every window, in order.
template <class F>
void for_each_pixel(const PoolCase& c, const Shape& y, F&& f) {
  for (std::int64_t plane = 0; plane < y[0] * y[1]; ++plane)
    for (std::int64_t i = 0; i < y[2]; ++i)
      for (std::int64_t j = 0; j < y[3]; ++j)
        for (std::int64_t h = window_of(c, 0, i).first; h < window_of(c, 0, i).second; ++h)
          for (std::int64_t w = window_of(c, 1, j).first; w < window_of(c, 1, j).second; ++w)
            if (h >= 0 && h < c.x[2] && w >= 0 && w < c.x[3])
              f(plane, static_cast<std::size_t>(flat(y, plane, i, j)), h, w);
}

class Pool : public testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  Tensor image(const Shape& shape, DType dtype, std::uint64_t seed, bool channels_last) const {
    return channels_last ? random_channels_last(shape, dtype, device(), seed)
                         : random_tensor(shape, dtype, device(), seed);
  }
  Tensor index_like(const Shape& shape, bool channels_last) const {
    return channels_last ? Tensor::empty_strided(shape, core::channels_last_strides(shape),
                                                 DType::i32, device())
                         : Tensor::empty(shape, DType::i32, device());
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, Pool, testing::ValuesIn(test::devices()), test::device_name);

template <class F>
void pool_for_all(F&& f, std::span<const PoolCase> cases = kPoolCases) {
  for (const PoolCase& c : cases)
    for (const DType dtype : kPoolDtypes)
      for (const bool last : {false, true})
        f(c, dtype, last,
          core::str(c.name, ", ", core::name(dtype), last ? ", channels-last" : ", row-major"));
}

TEST_P(Pool, MaxAndItsGradientEqualReference) {
  const auto check = [&](const PoolCase& c, DType dtype, bool last, const std::string& what) {
    const Shape shape = pool2d_shape(c.x, c.options);
    const Tensor x = image(c.x, dtype, 1, last), y = image(shape, dtype, 2, last);
    const Tensor dy = image(shape, dtype, 3, last), dx = image(c.x, dtype, 4, last),
                 index = index_like(shape, last);
    const Values vx = x.to_vector<double>(), vdy = dy.to_vector<double>();
    const auto count = static_cast<std::size_t>(shape.numel());
    Values best(count, -std::numeric_limits<double>::infinity()), winner(count, -1),
        gradient(vx.size(), 0.0);
    for_each_pixel(c, shape, [&](auto plane, auto k, auto h, auto w) {
      const double v = vx[static_cast<std::size_t>(flat(c.x, plane, h, w))];
      if (v > best[k]) best[k] = v, winner[k] = static_cast<double>(h * c.x[3] + w);
    });
    for (std::size_t k = 0; k < count; ++k) {
      const auto plane = static_cast<std::int64_t>(k) / (shape[2] * shape[3]);
      gradient[static_cast<std::size_t>(plane * c.x[2] * c.x[3]) +
               static_cast<std::size_t>(winner[k])] += vdy[k];
    }
    max_pool2d(x, y, index, c.options);
    EXPECT_EQ(y.to_vector<double>(), best) << what;
    EXPECT_EQ(index.to_vector<double>(), winner) << what;
    max_pool2d_backward(dy, index, dx, c.options);
    expect_close(dx, gradient, 1.01 * epsilon(dtype), 1e-6, what);
  };
  pool_for_all(check);
  pool_for_all(check, kAdaptiveCases);
}

TEST_P(Pool, AverageAndItsGradientEqualReference) {
  pool_for_all([&](const PoolCase& c, DType dtype, bool last, const std::string& what) {
    const Shape shape = pool2d_shape(c.x, c.options);
    const Tensor x = image(c.x, dtype, 1, last), y = image(shape, dtype, 2, last);
    const Tensor dy = image(shape, dtype, 3, last), dx = image(c.x, dtype, 4, last);
    const Values vx = x.to_vector<double>(), vdy = dy.to_vector<double>();
    const double share = 1.0 / static_cast<double>(c.options.kernel[0] * c.options.kernel[1]);
    Values mean(vdy.size(), 0.0), gradient(vx.size(), 0.0);
    for_each_pixel(c, shape, [&](auto plane, auto k, auto h, auto w) {
      const auto pixel = static_cast<std::size_t>(flat(c.x, plane, h, w));
      mean[k] += vx[pixel] * share;
      gradient[pixel] += vdy[k] * share;
    });
    avg_pool2d(x, y, c.options);
    expect_close(y, mean, 1.01 * epsilon(dtype), 1e-6, what);
    avg_pool2d_backward(dy, dx, c.options);
    expect_close(dx, gradient, 1.01 * epsilon(dtype), 1e-6, what);
  });
}

TEST_P(Pool, FirstOfEqualsAndNanWin) {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               low = -std::numeric_limits<double>::infinity();
  const Tensor x =
      Tensor::from<double>({5, 5, low, low, 1, 5, low, low, nan, 9, 2, nan, 1, nan, 3, 4},
                           {1, 1, 4, 4}, DType::f32, device());
  const Tensor y = Tensor::empty({1, 1, 2, 2}, DType::f32, device()),
               index = index_like({1, 1, 2, 2}, false);
  max_pool2d(x, y, index, {});
  const Values values = y.to_vector<double>();
  EXPECT_EQ(values[0], 5.0);
  EXPECT_EQ(values[1], low);
  EXPECT_TRUE(std::isnan(values[2]));
  EXPECT_TRUE(std::isnan(values[3]));
  EXPECT_THAT(index.to_vector<double>(), ElementsAre(0, 2, 8, 11));
}

TEST_P(Pool, EmptyBatch) {
  const Tensor x = Tensor::empty({0, 3, 4, 4}, DType::f32, device()),
               y = Tensor::empty({0, 3, 2, 2}, DType::f32, device());
  const Tensor index = index_like({0, 3, 2, 2}, false);
  EXPECT_NO_THROW(max_pool2d(x, y, index, {}));
  EXPECT_NO_THROW(max_pool2d_backward(y, index, x, {}));
  EXPECT_NO_THROW(avg_pool2d(x, y, {}));
  EXPECT_NO_THROW(avg_pool2d_backward(y, x, {}));
}

TEST_P(Pool, WrongInputIsNamed) {
  const Tensor x = image({1, 2, 4, 4}, DType::f32, 1, false),
               y = image({1, 2, 2, 2}, DType::f32, 2, false);
  const Tensor index = index_like({1, 2, 2, 2}, false);
  EXPECT_THAT(message_of([&] {
                pool2d_shape({1, 2, 4}, {});
              }),
              HasSubstr("[N, C, H, W], got [1, 2, 4]"));
  EXPECT_THAT(message_of([&] {
                avg_pool2d(x, y, {.padding = {2, 0}});
              }),
              HasSubstr("padding of 0 to half the kernel, got 2 for kernel 2"));
  EXPECT_THAT(message_of([&] {
                avg_pool2d(x, y, {.kernel = {5, 2}});
              }),
              HasSubstr("no smaller than the kernel, got 4"));
  EXPECT_THAT(message_of([&] {
                avg_pool2d(x, y, {.stride = {1, 2}});
              }),
              HasSubstr("[avg_pool2d] expected y of shape [1, 2, 3, 2]"));
  EXPECT_THAT(message_of([&] { max_pool2d(x, y, y, {}); }),
              HasSubstr("index of dtype i32, got f32"));
  EXPECT_THAT(message_of([&] { max_pool2d_backward(x, index, y, {}); }),
              HasSubstr("[max_pool2d_backward]"));
}

}  // namespace
}  // namespace cairn::kernels
