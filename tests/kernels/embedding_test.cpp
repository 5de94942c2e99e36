#include "cairn/kernels/embedding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "layouts.h"
#include "support/message_of.h"

namespace cairn::kernels {
namespace {

using test::message_of;

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

/// The gradient of f32 rows, as a GPU adds them: a token's in their order; more than 64 in pieces
/// of 64, and then the pieces' sums.
std::vector<float> added_in_pieces(const std::vector<std::int64_t>& tokens, std::int64_t vocabulary,
                                   const std::vector<double>& rows, std::int64_t columns) {
  std::vector<std::vector<std::size_t>> rows_of(static_cast<std::size_t>(vocabulary));
  for (std::size_t n = 0; n < tokens.size(); ++n) {
    rows_of[static_cast<std::size_t>(tokens[n])].push_back(n);
  }
  const auto width = static_cast<std::size_t>(columns);
  std::vector<float> sums;
  for (const std::vector<std::size_t>& own : rows_of) {
    for (std::size_t c = 0; c < width; ++c) {
      float sum = 0.0f, piece = 0.0f;
      for (std::size_t k = 0; k < own.size(); ++k) {
        piece += static_cast<float>(rows[own[k] * width + c]);
        if (k % 64 == 63 || k + 1 == own.size()) sum += std::exchange(piece, 0.0f);
      }
      sums.push_back(sum);
    }
  }
  return sums;
}

/// With rows that are whole packs and with others; twice, for the same bits.
void check_pieces(const std::vector<std::int64_t>& tokens, std::int64_t vocabulary, Device device) {
  const std::int64_t rows = std::ssize(tokens);
  const Tensor index = Tensor::from(tokens, {rows}, DType::i64, device);
  for (std::int64_t columns : {1, 4}) {
    const std::vector<double> gradient =
        test::rounded(random_values(rows * columns, 3), DType::f32);
    const Tensor dy = Tensor::from(gradient, {rows, columns}, DType::f32, device);
    const Tensor dweight = Tensor::empty({vocabulary, columns}, DType::f32, device);
    embedding_backward(dy, index, dweight, false);
    const std::vector<float> first = dweight.to_vector<float>();
    const auto expected = added_in_pieces(tokens, vocabulary, gradient, columns);
    if (device.is_cuda()) {
      EXPECT_EQ(first, expected) << columns;
    } else {  // the CPU sums in double
      expect_close(dweight, {expected.begin(), expected.end()}, 1e-5, 1e-5);
    }
    embedding_backward(dy, index, dweight, false);
    EXPECT_EQ(dweight.to_vector<float>(), first) << columns;
  }
}

/// Many rows, most of two tokens, and tokens that differ in every byte of their numbers.
TEST_P(Embedding, GradientAddsManyRowsOfOneTokenInAFixedOrder) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t n = 0; n < 2500; ++n) tokens.push_back(n % 3 == 0 ? n * 27 : 65536 + n % 2);
  check_pieces(tokens, 70000, GetParam());
}

/// Around whole pieces, with what lies before them at any place.
TEST_P(Embedding, GradientAddsRunsOfEveryLength) {
  std::vector<std::int64_t> tokens;
  std::int64_t token = 0;
  for (const std::int64_t length :
       {64, 65, 1, 66, 63, 128, 0, 129, 3, 127, 2, 192, 193, 64, 1, 10000, 62, 65}) {
    tokens.insert(tokens.end(), static_cast<std::size_t>(length), token++);
  }
  check_pieces(tokens, token, GetParam());
  std::reverse(tokens.begin(), tokens.end());
  check_pieces(tokens, token, GetParam());
}

/// Sums that f32 holds and halves do not.
TEST_P(Embedding, GradientOfHalvesIsSummedUnrounded) {
  constexpr std::int64_t kVocabulary = 3, kColumns = 24;
  const std::vector<std::int64_t> counts{300, 40, 0};
  std::vector<std::int64_t> tokens;
  for (std::int64_t v = 0; v < kVocabulary; ++v) {
    tokens.insert(tokens.end(), static_cast<std::size_t>(counts[static_cast<std::size_t>(v)]), v);
  }
  const std::int64_t rows = std::ssize(tokens);
  const Tensor index = Tensor::from(tokens, {rows}, DType::i64, GetParam());
  for (DType dtype : {DType::f16, DType::bf16}) {
    for (bool accumulate : {false, true}) {
      std::vector<double> gradient;  // a large one, then small ones that halves lose beside it
      std::vector<double> expected(kVocabulary * kColumns, accumulate ? 8.0 : 0.0);
      for (std::int64_t n = 0; n < rows; ++n) {
        for (std::int64_t c = 0; c < kColumns; ++c) {
          gradient.push_back(n == 0 || n == 300 ? 64.0 : static_cast<double>(c % 5 + 1) / 64);
          expected[static_cast<std::size_t>(tokens[static_cast<std::size_t>(n)] * kColumns + c)] +=
              gradient.back();
        }
      }
      const Tensor dy = Tensor::from(gradient, {rows, kColumns}, dtype, GetParam());
      const Tensor dweight = Tensor::full({kVocabulary, kColumns}, 8.0, dtype, GetParam());
      embedding_backward(dy, index, dweight, accumulate);
      EXPECT_EQ(dweight.to_vector(), test::rounded(expected, dtype)) << dtype << accumulate;
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
