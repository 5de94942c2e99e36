#include "cairn/kernels/embedding.h"

#include <gtest/gtest.h>

#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::describe;
using test::epsilon;
using test::expect_close;
using test::kFloating;
using test::LaidOut;
using test::Layout;
using test::layouts;
using test::message_of;
using test::random_values;

const std::vector<std::int64_t> kIndices{4, 0, 4, 10, 3, 4, 0};

class Embedding : public testing::TestWithParam<Device> {};

TEST_P(Embedding, CopiesRowsInEveryDtypeAndLayout) {
  const Shape table{11, 37}, result{7, 37};
  const Tensor index = Tensor::from(kIndices, {7}, DType::i64, GetParam());
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    for (Layout layout : layouts(table)) {
      SCOPED_TRACE(describe(table, dtype, layout));
      const LaidOut weight(random_values(table.numel(), 1), table, dtype, GetParam(), layout);
      const LaidOut y(result, dtype, GetParam(), layout);
      embedding(weight, index, y);
      const auto rows = weight.values();
      std::vector<double> expected;
      for (std::int64_t i : kIndices)
        expected.insert(expected.end(), rows.begin() + i * 37, rows.begin() + (i + 1) * 37);
      EXPECT_EQ(y.values(), expected);
      EXPECT_TRUE(y.gaps_untouched());
    }
  }
}

TEST_P(Embedding, GradientAddsOccurrencesAndRoundsOnce) {
  const Shape table{11, 37}, rows{7, 37};
  const Tensor index = Tensor::from(kIndices, {7}, DType::i64, GetParam());
  for (DType dtype : kFloating) {
    for (DType to : {dtype, DType::f32}) {
      for (Layout layout : layouts(table)) {
        for (bool accumulate : {false, true}) {
          SCOPED_TRACE(describe(table, dtype, layout));
          const LaidOut dy(random_values(rows.numel(), 2), rows, dtype, GetParam(), layout);
          const LaidOut dweight(table, to, GetParam(), layout);
          embedding_backward(dy, index, dweight, accumulate);
          std::vector<double> expected(static_cast<std::size_t>(table.numel()),
                                       accumulate ? test::kGap : 0.0);
          const auto gradient = dy.values();
          for (std::size_t k = 0; k < gradient.size(); ++k) {
            expected[static_cast<std::size_t>(kIndices[k / 37] * 37) + k % 37] += gradient[k];
          }
          expect_close(dweight.values(), expected, 2 * epsilon(to),
                       4 * std::min(epsilon(to), epsilon(DType::f32)));
          EXPECT_TRUE(dweight.gaps_untouched());
        }
      }
    }
  }
}

/// Many rows, most of one token, and tokens that differ in every byte of their numbers: the
/// gradient has the bits of sums in the order of the rows, with rows that are whole packs and with
/// others.
TEST_P(Embedding, GradientAddsManyRowsOfOneTokenInTheirOrder) {
  const std::int64_t rows = 2500, vocabulary = 70000;
  std::vector<std::int64_t> tokens;
  for (std::int64_t n = 0; n < rows; ++n) tokens.push_back(n % 3 == 0 ? n * 27 : 65536 + n % 2);
  const Tensor index = Tensor::from(tokens, {rows}, DType::i64, GetParam());
  for (std::int64_t columns : {1, 4}) {
    const std::vector<double> gradient =
        test::rounded(random_values(rows * columns, 3), DType::f32);
    const Tensor dy = Tensor::from(gradient, {rows, columns}, DType::f32, GetParam());
    const Tensor dweight = Tensor::empty({vocabulary, columns}, DType::f32, GetParam());
    embedding_backward(dy, index, dweight, false);
    std::vector<float> expected(static_cast<std::size_t>(vocabulary * columns), 0.0f);
    for (std::size_t k = 0; k < gradient.size(); ++k) {
      const auto n = static_cast<std::int64_t>(k) / columns,
                 c = static_cast<std::int64_t>(k) % columns;
      expected[static_cast<std::size_t>(tokens[static_cast<std::size_t>(n)] * columns + c)] +=
          static_cast<float>(gradient[k]);
    }
    if (GetParam().is_cuda()) {
      EXPECT_EQ(dweight.to_vector<float>(), expected) << columns;
    } else {  // the CPU sums in double
      expect_close(dweight, {expected.begin(), expected.end()}, 1e-5, 1e-5);
    }
  }
}

TEST_P(Embedding, OfNothingIsEmptyAndItsGradientZero) {
  const Tensor none = Tensor::zeros({0}, DType::i64, GetParam());
  const Tensor weight = Tensor::full({3, 2}, 5.0, DType::f32, GetParam()),
               y = Tensor::zeros({0, 2}, DType::f32, GetParam());
  embedding(weight, none, y);
  embedding_backward(y, none, weight, true);
  EXPECT_EQ(weight.to_vector(), std::vector<double>(6, 5.0));
  embedding_backward(y, none, weight, false);
  EXPECT_EQ(weight.to_vector(), std::vector<double>(6, 0.0));
}

TEST(EmbeddingIndices, OutOfRangeNamesPositionAndValue) {
  const Tensor weight = Tensor::zeros({3, 2}), y = Tensor::zeros({2, 2});
  const Tensor index = Tensor::from(std::vector<std::int64_t>{2, -1}, {2});
  EXPECT_EQ(message_of([&] { embedding(weight, index, y); }),
            "[embedding] expected indices in 0..2, got -1 at position 1");
  EXPECT_EQ(message_of([&] { embedding_backward(y, index, weight, true); }),
            "[embedding_backward] expected indices in 0..2, got -1 at position 1");
}

TEST_P(Embedding, ErrorsNameWhatIsWrong) {
  const Tensor weight = Tensor::zeros({3, 2}, DType::f32, GetParam()),
               y = Tensor::zeros({2, 2}, DType::f32, GetParam());
  const Tensor index = Tensor::zeros({4}, DType::i64, GetParam());
  EXPECT_EQ(message_of([&] { embedding(weight, index, y); }),
            "[embedding] expected y of shape [4, 2], got [2, 2]");
  EXPECT_EQ(message_of([&] { embedding(weight, Tensor::zeros({2}, DType::f32, GetParam()), y); }),
            "[embedding] expected index of dtype i64, got f32");
}

INSTANTIATE_TEST_SUITE_P(Devices, Embedding, testing::ValuesIn(test::devices()), test::device_name);

}  // namespace
}  // namespace cairn::kernels
