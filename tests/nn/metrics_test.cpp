// Metrics against counts by hand and against plain loops over random logits.
#include "cairn/nn/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include "support/message_of.h"

namespace cairn::nn {
namespace {

using core::InvalidArgument;
using test::message_of;
using ::testing::HasSubstr;

/// Logits [rows, classes] of few distinct values, so that some are equal.
std::vector<float> drawn_logits(std::mt19937& draw, std::size_t count) {
  std::vector<float> all;
  for (std::size_t i = 0; i < count; ++i) all.push_back(static_cast<float>(draw() % 7));
  return all;
}

Tensor logits_of(const std::vector<float>& values, const Shape& shape) {
  return Tensor::from(values, shape);
}
Tensor labels_of(const std::vector<std::int64_t>& values) {
  return Tensor::from(values, {static_cast<std::int64_t>(values.size())}, DType::i64);
}

/// How many classes stand ahead of the label: larger ones, and equal ones before it.
std::int64_t place_of(const float* row, std::int64_t classes, std::int64_t label) {
  std::int64_t ahead = 0;
  for (std::int64_t c = 0; c < classes; ++c)
    ahead += row[c] > row[label] || (row[c] == row[label] && c < label) ? 1 : 0;
  return ahead;
}

/// Two ranks, of which this is the first.
World beside(const std::string& other) {
  return {0, 2, [other](const std::string& own, std::string_view) {
            return std::vector<std::string>{own, other};
          }};
}
template <class Metric>
std::string told_by(const Metric& metric) {
  std::string told;
  (void)metric.over(World(0, 1, [&](const std::string& own, std::string_view) {
    told = own;
    return std::vector<std::string>{own};
  }));
  return told;
}

TEST(Accuracy, CountsTheSamplesThatPlainLoopsCount) {
  std::mt19937 draw(3);
  constexpr std::int64_t kRows = 40, kClasses = 9;
  for (const std::int64_t top : {1, 2, 5, 9, 20}) {
    Accuracy accuracy(top), other(top);
    double right = 0, samples = 0;
    for (int batch = 0; batch < 6; ++batch) {
      const auto logits = drawn_logits(draw, kRows * kClasses);
      std::vector<std::int64_t> labels;
      for (std::int64_t i = 0; i < kRows; ++i) {
        const bool counts = draw() % 5 != 0;
        labels.push_back(counts ? static_cast<std::int64_t>(draw() % kClasses) : kIgnoredLabel);
        if (!counts) continue;
        ++samples;
        right += place_of(&logits[static_cast<std::size_t>(i * kClasses)], kClasses,
                          labels.back()) < top;
      }
      // The last batches are the other rank's, whose samples have two dimensions.
      if (batch < 4) {
        accuracy.add(Tensor::from(logits, {kRows, kClasses}),
                     Tensor::from(labels, {kRows}, DType::i64));
      } else {
        other.add(Tensor::from(logits, {4, kRows / 4, kClasses}),
                  Tensor::from(labels, {4, kRows / 4}, DType::i64));
      }
    }
    EXPECT_EQ(accuracy.samples() + other.samples(), samples);
    EXPECT_EQ(accuracy.over(beside(told_by(other))), right / samples) << top;
  }
}

TEST(Accuracy, OfNoSamplesIsAnErrorOfAllRanks) {
  Accuracy none, some;
  some.add(logits_of({1, 2}, {1, 2}), labels_of({1}));
  EXPECT_EQ(none.over(beside(told_by(some))), 1.0);
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)none.over(World()); }),
              HasSubstr("a sample on some rank"));
}

TEST(ConfusionMatrix, HasCountsAndShares) {
  ConfusionMatrix confusion(3), other(3);
  // Predictions 0 1 2 0 of labels 0 1 1 2; the other rank's: 2 of 2, and an ignored one.
  confusion.add(logits_of({5, 1, 1, 0, 3, 0, 1, 1, 2, 9, 0, 0}, {4, 3}), labels_of({0, 1, 1, 2}));
  other.add(logits_of({0, 1, 2, 0, 0, 0}, {2, 3}), labels_of({2, kIgnoredLabel}));
  const ConfusionMatrix all = confusion.over(beside(told_by(other)));
  EXPECT_EQ(all.counts().to_vector(), (std::vector<double>{1, 0, 0, 0, 1, 1, 1, 0, 1}));
  EXPECT_EQ(all.count(2, 0), 1);
  EXPECT_EQ(all.accuracy(), 3.0 / 5);
  EXPECT_EQ(all.recall(1), 1.0 / 2);
  EXPECT_EQ(all.precision(0), 1.0 / 2);
  EXPECT_EQ(all.f1(1), 2.0 / 3);
  EXPECT_TRUE(std::isnan(other.recall(0)));
}

TEST(Metrics, NameWhatDoesNotFit) {
  Accuracy accuracy;
  ConfusionMatrix confusion(3);
  const Tensor logits = Tensor::zeros({4, 3});
  for (const Tensor& wrong :
       {Tensor::zeros({4}), Tensor::zeros({5}, DType::i64), Tensor::zeros({4, 1}, DType::i64)}) {
    EXPECT_THAT(message_of<InvalidArgument>([&] { accuracy.add(logits, wrong); }),
                HasSubstr("expected logits [..., C] and labels [...] i64, got [4, 3]"));
  }
  EXPECT_THAT(message_of<InvalidArgument>([&] { accuracy.add(Tensor::zeros({}), labels_of({0})); }),
              HasSubstr("expected logits"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                accuracy.add(logits, labels_of({0, 1, 3, 0}));
              }),
              HasSubstr("labels below 3 (or -100, which is ignored), got 3"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                confusion.add(Tensor::zeros({1, 4}), labels_of({0}));
              }),
              HasSubstr("of 3 classes, got [1, 4]"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)confusion.count(0, 3); }),
              HasSubstr("below 3, got 3"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)Accuracy(0); }), HasSubstr("got 0"));
  EXPECT_EQ(accuracy.samples(), 0);  // nothing of a refused batch
}

}  // namespace
}  // namespace cairn::nn
