#include "cairn/kernels/resample.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support/message_of.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

using test::epsilon;
using test::expect_close;
using testing::HasSubstr;
using Values = std::vector<double>;

/// weights[o][i] of output pixel o on input pixel i, by the definition in doubles.
std::vector<Values> resample_weights(const ResampleOptions& options, std::int64_t in,
                                     std::int64_t out) {
  std::vector<Values> weights;
  for (std::int64_t o = 0; o < out; ++o) {
    Values row(static_cast<std::size_t>(in), 0.0);
    const double scale = static_cast<double>(in) / static_cast<double>(out);
    const auto begin = static_cast<std::size_t>(o * in / out);
    if (options.mode == ResampleMode::nearest) {
      row[begin] = 1.0;
    } else if (options.mode == ResampleMode::area) {
      const auto end =
          static_cast<std::size_t>(std::ceil(static_cast<double>(o + 1) * scale - 1e-9));
      for (std::size_t i = begin; i < end; ++i) row[i] = 1.0 / static_cast<double>(end - begin);
    } else {
      double at = (static_cast<double>(o) + 0.5) * scale - 0.5;
      if (options.align_corners) {
        at = out > 1 ? static_cast<double>(o * (in - 1)) / static_cast<double>(out - 1) : 0.0;
      }
      at = std::clamp(at, 0.0, static_cast<double>(in - 1));
      const double low = std::floor(at);
      row[static_cast<std::size_t>(low)] += 1.0 - (at - low);
      if (at > low) row[static_cast<std::size_t>(low) + 1] += at - low;
    }
    weights.push_back(row);
  }
  return weights;
}

struct ResampleCase {
  Shape x;
  std::int64_t height, width;
};

const ResampleCase kResampleCases[] = {{{2, 3, 4, 5}, 8, 10}, {{1, 17, 5, 3}, 3, 7},
                                       {{2, 1, 7, 6}, 2, 9},  {{1, 5, 1, 4}, 3, 1},
                                       {{3, 8, 6, 6}, 1, 1},  {{1, 2, 9, 8}, 9, 8}};
const ResampleOptions kResampleOptions[] = {{ResampleMode::nearest},
                                            {ResampleMode::bilinear},
                                            {ResampleMode::bilinear, true},
                                            {ResampleMode::area}};

class ResampleImages : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, ResampleImages, testing::ValuesIn(test::devices()),
                         test::device_name);

TEST_P(ResampleImages, AndTheirGradientsEqualReference) {
  for (const ResampleCase& c : kResampleCases)
    for (const ResampleOptions& options : kResampleOptions)
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64})
        for (const bool last : {false, true}) {
          const Shape shape{c.x[0], c.x[1], c.height, c.width};
          const auto make = [&](const Shape& s, std::uint64_t seed) {
            return last ? test::random_channels_last(s, dtype, GetParam(), seed)
                        : test::random_tensor(s, dtype, GetParam(), seed);
          };
          const Tensor x = make(c.x, 1), y = make(shape, 2), dy = make(shape, 3), dx = make(c.x, 4);
          const Values vx = x.to_vector<double>(), vdy = dy.to_vector<double>();
          const auto rows = resample_weights(options, c.x[2], c.height);
          const auto columns = resample_weights(options, c.x[3], c.width);
          Values expected(vdy.size(), 0.0), gradient(vx.size(), 0.0);
          for (std::size_t k = 0; k < expected.size(); ++k) {
            const std::size_t w = k % columns.size(), h = k / columns.size() % rows.size();
            const std::size_t plane = k / columns.size() / rows.size();
            for (std::size_t i = 0; i < rows[h].size(); ++i)
              for (std::size_t j = 0; j < columns[w].size(); ++j) {
                const std::size_t at = (plane * rows[h].size() + i) * columns[w].size() + j;
                expected[k] += rows[h][i] * columns[w][j] * vx[at];
                gradient[at] += rows[h][i] * columns[w][j] * vdy[k];
              }
          }
          const std::string what =
              core::str(c.x, " to ", c.height, "x", c.width, " by ", static_cast<int>(options.mode),
                        " ", core::name(dtype));
          const double tolerance = dtype == DType::f64 ? 1e-12 : 1e-6;
          resample2d(x, y, options);
          expect_close(y, expected, 1.01 * epsilon(dtype), tolerance, what);
          resample2d_backward(dy, dx, options);
          expect_close(dx, gradient, 1.01 * epsilon(dtype), 4 * tolerance, what);
        }
}

TEST(ResampledImages, NameWhatDoesNotFit) {
  const Tensor x = Tensor::zeros({1, 2, 3, 3});
  EXPECT_THAT(test::message_of([&] {
                resample2d(x, Tensor::zeros({1, 3, 3, 3}), {});
              }),
              HasSubstr("[resample2d] expected images [N, C, H, W] of the same N and C"));
  EXPECT_THAT(test::message_of([&] {
                resample2d(x, Tensor::zeros({1, 2, 0, 3}), {});
              }),
              HasSubstr("at least one pixel"));
  EXPECT_THAT(test::message_of([&] {
                resample2d(x, x, {ResampleMode::nearest, true});
              }),
              HasSubstr("bilinear alone"));
}

}  // namespace
}  // namespace cairn::kernels
