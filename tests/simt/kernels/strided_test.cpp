// The element-wise engine on strided views whose rows are whole packs: values against a plain loop
// over offsets, and canaries between the rows.
#include <gtest/gtest.h>

#include "cairn/kernels/elementwise.h"
#include "support/tensors.h"

namespace cairn::kernels {
namespace {

constexpr double kCanary = 77.0;

/// Integers, exact in every dtype.
Tensor counted(const Shape& shape, DType dtype, std::int64_t from) {
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<double>((static_cast<std::int64_t>(i) + from) % 101);
  }
  return Tensor::from(values, shape, dtype);
}

class Strided : public testing::TestWithParam<DType> {};

/// y[i, j, k] = a[j, i, k] + b[k], y and a slices of wider rows that start `shift` elements in.
void check_sum(DType dtype, std::int64_t width, std::int64_t shift) {
  const std::int64_t n = 3, m = 5, room = width + 16;
  const Tensor a = counted({m, n, room}, dtype, 1), b = counted({width}, dtype, 50);
  const Tensor y = Tensor::full({n, m, room}, kCanary, dtype);
  const TensorView from = a.view().permute({1, 0, 2}).slice(2, shift, shift + width);
  binary(BinaryOp::add, from, b, y.view().slice(2, shift, shift + width));
  const auto av = a.to_vector(), bv = b.to_vector(), yv = y.to_vector();
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < m; ++j) {
      for (std::int64_t k = 0; k < room; ++k) {
        const bool inside = k >= shift && k < shift + width;
        const auto at = [&](std::int64_t p, std::int64_t q, std::int64_t r, std::int64_t rows) {
          return static_cast<std::size_t>((p * rows + q) * room + r);
        };
        const double sum =
            inside ? av[at(j, i, k, n)] + bv[static_cast<std::size_t>(k - shift)] : 0;
        ASSERT_EQ(yv[at(i, j, k, m)], inside ? sum : kCanary) << i << " " << j << " " << k;
      }
    }
  }
}

TEST_P(Strided, SumsOfSlicedPermutedAndRepeatedRows) {
  for (std::int64_t width : {16, 32, 48, 17, 24}) {
    for (std::int64_t shift : {0, 8, 1}) check_sum(GetParam(), width, shift);
  }
}

TEST_P(Strided, PermutedCopiesOfPackedRows) {
  const Tensor x = counted({4, 3, 5, 32}, GetParam(), 7);  // [B, T, H, D] to [B, H, T, D]
  const Tensor y = Tensor::full({4, 5, 3, 32}, kCanary, GetParam());
  copy(x.view().permute({0, 2, 1, 3}), y);
  const auto xv = x.to_vector(), yv = y.to_vector();
  for (std::size_t i = 0; i < yv.size(); ++i) {
    const std::size_t d = i % 32, t = i / 32 % 3, h = i / 96 % 5, b = i / 480;
    ASSERT_EQ(yv[i], xv[((b * 3 + t) * 5 + h) * 32 + d]) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Simt, Strided, testing::Values(DType::f16, DType::f32, DType::f64),
                         [](const auto& info) { return std::string(core::name(info.param)); });

}  // namespace
}  // namespace cairn::kernels
